//! The engine of Python.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use millstream_metadata::FileName;
use millstream_transfer::{
    InstallError, Notification, Opcode, RdmaConfig, RegisterError, Settings, Sources,
    TransferEngine,
};
use millstream_verbs::Provider;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::failure::{CONTEXT, Failure};
use crate::files::{self, OnDemand};
use crate::memory;
use crate::region::{Owner, Region};
use crate::segment::Segment;
use crate::shared::{Held, Shared};
use crate::transfer::{self, Batch, Terms, Transfer};

/// A transfer engine: registers memory, and moves bytes between that and the memory of peers.
#[pyclass(frozen, module = "millstream", name = "Engine")]
pub(crate) struct Engine {
    shared: Arc<Shared>,
    nvmeof: OnDemand,
    name: String,
    address: SocketAddr,
}

impl Engine {
    fn register_found(
        &self,
        py: Python<'_>,
        brought: memory::Brought,
        location: &str,
        remote: bool,
    ) -> PyResult<Region> {
        let memory::Brought { address, length, held } = brought;
        let register = |engine: &TransferEngine| -> Result<u64, RegisterError> {
            let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: what is held keeps the memory where it is until it is unregistered, or the caller promised to;
            // and memory of Python is shared with whoever else has the object.
            unsafe { engine.register_memory(pointer, length as usize, location, remote)? };
            Ok(self.shared.hold(address, held))
        };
        let registration = self.shared.detached(py, register)?.map_err(Failure::from)?;
        let shared = Arc::clone(&self.shared);
        Ok(Region::new(shared, (address, length), registration, Owner::Brought))
    }

    fn one(
        &self,
        opcode: Opcode,
        segment: &Bound<'_, Segment>,
        (local, remote): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
        length: Option<u64>,
        terms: Terms<'_>,
    ) -> PyResult<Transfer> {
        let request = transfer::request(opcode, segment.get(), local, remote, length)?;
        transfer::submit(segment.py(), &self.shared, &mut vec![request], terms)
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        listen = "127.0.0.1", *, host = None, metadata = None, name = None, transports = None, bind = None,
        settings = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "arguments with names")]
    fn new(
        py: Python<'_>,
        listen: &str,
        host: Option<String>,
        metadata: Option<String>,
        name: Option<String>,
        transports: Option<Vec<String>>,
        bind: Option<Vec<String>>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let listen = listen_address(listen)?;
        let bind = bind.map(|all| all.iter().map(|it| address(it)).collect::<Result<Vec<_>, _>>());
        let bind = bind.transpose()?;
        let mut sources = Sources::of_process();
        for (key, value) in settings.into_iter().flatten() {
            sources.arguments.push(format!("{}={}", key.str()?, value.str()?));
        }
        let transports = transports.unwrap_or_else(|| vec!["auto".to_owned()]);
        let (engine, nvmeof) = py.detach(|| -> Result<_, Failure> {
            let settings = Settings::load(&sources)?;
            let mut config = settings.engine(listen.ip());
            if listen.port() != 0 {
                config.listen = listen;
                config.ports = None;
            }
            config.host = host.or(config.host);
            config.metadata = metadata.unwrap_or(config.metadata);
            config.segment_name = name.or(config.segment_name);
            let engine = TransferEngine::new(config)?;
            transports
                .iter()
                .try_for_each(|name| install(&engine, name, &settings, bind.as_deref()))?;
            if let Some(relay) = settings.relay() {
                engine.install_relay(&relay)?;
            }
            let is_auto = transports.iter().any(|name| name == "auto");
            Ok((engine, OnDemand::new(is_auto.then(|| settings.nvmeof()))))
        })?;
        let (name, address) = (engine.name().to_owned(), engine.listening_at());
        Ok(Self { shared: Arc::new(Shared::new(engine)), nvmeof, name, address })
    }

    /// The name of its segment, by which peers open it.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Where it answers peers: a host and a port.
    #[getter]
    fn address(&self) -> (String, u16) {
        (self.address.ip().to_string(), self.address.port())
    }

    /// The transports that it has, in the order in which they are tried.
    #[getter]
    fn transports(&self) -> PyResult<Vec<&'static str>> {
        Ok(self.shared.engine()?.transports().into_iter().map(|(name, _)| name).collect())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Ends it, once no other call has it: what is under way fails, memory is unregistered and let go of.
    fn close(&self, py: Python<'_>) {
        self.shared.close(py);
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    /// Registers the memory of an object, which is kept until that is undone.
    #[pyo3(signature = (buffer, *, location = "*", remote = true))]
    fn register(
        &self,
        buffer: &Bound<'_, PyAny>,
        location: &str,
        remote: bool,
    ) -> PyResult<Region> {
        self.shared.engine()?;
        self.register_found(buffer.py(), memory::find(buffer)?, location, remote)
    }

    /// Registers memory by its address. The caller sees to it that it stays there.
    #[pyo3(signature = (address, length, *, location = "*", remote = true))]
    fn register_address(
        &self,
        py: Python<'_>,
        address: u64,
        length: u64,
        location: &str,
        remote: bool,
    ) -> PyResult<Region> {
        let brought = memory::Brought { address, length, held: Held::Nothing };
        self.register_found(py, brought, location, remote)
    }

    /// Allocates and registers memory, which other processes of this host can map.
    #[pyo3(signature = (length, *, location = "*", remote = true))]
    fn allocate(
        &self,
        py: Python<'_>,
        length: usize,
        location: &str,
        remote: bool,
    ) -> PyResult<Region> {
        let allocate = |engine: &TransferEngine| -> Result<_, RegisterError> {
            let buffer = Arc::new(engine.allocate_buffer(length, location, remote)?);
            let held = Held::Own(Arc::clone(&buffer));
            Ok((self.shared.hold(buffer.address(), held), buffer))
        };
        let outcome = self.shared.detached(py, allocate)?;
        let (registration, buffer) = outcome.map_err(Failure::from)?;
        let range = (buffer.address(), length as u64);
        let owner = Owner::Engine(ManuallyDrop::new(buffer));
        Ok(Region::new(Arc::clone(&self.shared), range, registration, owner))
    }

    /// Offers a file or a block device as a segment of its own; the segment's name.
    #[pyo3(signature = (path, *, name = None, length = None, writable = false, local_path_map = None))]
    fn register_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        name: Option<String>,
        length: Option<u64>,
        writable: bool,
        local_path_map: Option<BTreeMap<String, PathBuf>>,
    ) -> PyResult<String> {
        let options = files::options(name, length, writable, local_path_map.unwrap_or_default())?;
        let offer = |engine: &TransferEngine| {
            self.nvmeof.install(engine)?;
            engine.register_file(&path, options).map_err(Failure::from)
        };
        Ok(self.shared.detached(py, offer)??)
    }

    /// Takes a file back.
    fn unregister_file(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let outcome = self.shared.detached(py, |engine| engine.unregister_file(name))?;
        Ok(outcome.map_err(Failure::from)?)
    }

    /// The names of the segments that are its files.
    #[getter]
    fn files(&self) -> PyResult<Vec<String>> {
        Ok(self.shared.engine()?.files())
    }

    /// Opens the segment of this name.
    fn open(&self, py: Python<'_>, name: &str) -> PyResult<Segment> {
        let open = |engine: &TransferEngine| {
            if name.starts_with(FileName::PREFIX) {
                self.nvmeof.install(engine)?;
            }
            engine.open_segment(name).map_err(Failure::from)
        };
        let opened = self.shared.detached(py, open)??;
        Ok(Segment::new(Arc::clone(&self.shared), opened))
    }

    /// Begins a WRITE: bytes from here to the segment.
    #[pyo3(signature = (
        segment, source, target, length = None, *, notify = None, timeout = None, priority = None, transport = None,
        policy = None, intent = None, durable = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "arguments with names")]
    fn write(
        &self,
        segment: &Bound<'_, Segment>,
        source: &Bound<'_, PyAny>,
        target: &Bound<'_, PyAny>,
        length: Option<u64>,
        notify: Option<(String, String)>,
        timeout: Option<f64>,
        priority: Option<&str>,
        transport: Option<String>,
        policy: Option<String>,
        intent: Option<String>,
        durable: bool,
    ) -> PyResult<Transfer> {
        let terms = Terms { notify, timeout, priority, transport, policy, intent, durable };
        self.one(Opcode::Write, segment, (source, target), length, terms)
    }

    /// Begins a READ: bytes from the segment to here.
    #[pyo3(signature = (
        segment, destination, source, length = None, *, notify = None, timeout = None, priority = None, transport = None,
        policy = None, intent = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "arguments with names")]
    fn read(
        &self,
        segment: &Bound<'_, Segment>,
        destination: &Bound<'_, PyAny>,
        source: &Bound<'_, PyAny>,
        length: Option<u64>,
        notify: Option<(String, String)>,
        timeout: Option<f64>,
        priority: Option<&str>,
        transport: Option<String>,
        policy: Option<String>,
        intent: Option<String>,
    ) -> PyResult<Transfer> {
        let terms = Terms { notify, timeout, priority, transport, policy, intent, durable: false };
        self.one(Opcode::Read, segment, (destination, source), length, terms)
    }

    /// Requests that are to be submitted together.
    fn batch(&self) -> PyResult<Batch> {
        self.shared.engine()?;
        Ok(Batch::new(Arc::clone(&self.shared)))
    }

    /// Sends a message to the application of a segment's process.
    fn notify(
        &self,
        py: Python<'_>,
        segment: &Bound<'_, Segment>,
        name: String,
        text: String,
    ) -> PyResult<()> {
        let (id, message) = (segment.get().opened.id(), Notification { name, text });
        let outcome = self.shared.detached(py, |engine| engine.notify(id, &message))?;
        Ok(outcome.map_err(Failure::from)?)
    }

    /// The messages that have come, as `(name, text)`.
    fn take_notifications(&self) -> PyResult<Vec<(String, String)>> {
        let messages = self.shared.engine()?.take_notifications();
        Ok(messages.into_iter().map(|message| (message.name, message.text)).collect())
    }

    /// Asks whether the process of a segment is there; how many seconds the answer took.
    fn probe(&self, py: Python<'_>, name: &str) -> PyResult<f64> {
        let took = self.shared.detached(py, |engine| engine.probe(name))?;
        Ok(took.map_err(Failure::from)?.as_secs_f64())
    }

    fn __repr__(&self) -> String {
        format!("Engine({:?})", self.name)
    }
}

/// Installs a transport by its name on the command line.
fn install(
    engine: &TransferEngine,
    name: &str,
    settings: &Settings,
    bind: Option<&[IpAddr]>,
) -> Result<(), Failure> {
    let listen = engine.listening_at().ip();
    let addresses = bind.map_or_else(|| vec![listen], <[_]>::to_vec);
    let rdma = |provider| RdmaConfig { provider, ..settings.rdma(&addresses) };
    match name {
        "local" => {}
        "shm" => engine.install_shm()?,
        "tcp" => engine.install_tcp(settings.tcp())?,
        "nvmeof" => engine.install_nvmeof(settings.nvmeof())?,
        "rdma" => engine.install_rdma(rdma(None))?,
        "rdma:soft" => engine.install_rdma(rdma(Some(Provider::Soft)))?,
        "rdma:ibverbs" => engine.install_rdma(rdma(Some(Provider::Ibverbs)))?,
        "auto" => {
            // What this machine does not have is no failure.
            drop(engine.install_shm());
            let mut config = rdma(Some(Provider::Ibverbs));
            if bind.is_none() && config.devices.is_none() && !listen.is_loopback() {
                config.devices = Some(Vec::new());
            }
            match engine.install_rdma(config) {
                Ok(()) | Err(InstallError::Open(_)) => {}
                Err(error) => return Err(error.into()),
            }
            engine.install_tcp(settings.tcp())?;
        }
        _ => {
            let message = format!("there is no transport {name:?}");
            return Err(Failure::new("ConfigError", CONTEXT, message)
                .remedy("take auto, shm, tcp, rdma, rdma:soft, rdma:ibverbs, nvmeof or local"));
        }
    }
    Ok(())
}

fn address(text: &str) -> Result<IpAddr, Failure> {
    text.parse().map_err(|_| Failure::argument(format!("{text:?} is no IP address")))
}

/// An IP address, with a port or without.
fn listen_address(text: &str) -> Result<SocketAddr, Failure> {
    match text.parse() {
        Ok(whole) => Ok(whole),
        Err(_) => Ok(SocketAddr::new(address(text)?, 0)),
    }
}
