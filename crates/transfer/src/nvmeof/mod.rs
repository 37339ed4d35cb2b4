//! The transport `nvmeof`: segments that are files.
//!
//! An engine offers files, each as a segment of its own whose offsets are the file's. The engine that has
//! a file does the I/O, for initiators that ask it over TCP. Where a segment says that its file is mapped
//! at the initiator, as Mooncake's do, that opens it itself.

mod connecting;
mod connections;
mod disk;
mod flow;
mod initiator;
mod mapped;
mod offered;
mod protocol;
mod queue;
mod receiving;
mod requests;
mod sending;
mod target;
mod wire;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, SystemTime};

use millstream_metadata::{
    BufferDesc, FileKey, FileName, FileTargetDesc, Gate, HostPort, NVMEOF, Resolver, SegmentDesc,
    Store, timestamp,
};
use millstream_net::file_io::FileEngine;

use self::connecting::Place;
use self::disk::{Disk, OpenFile};
use self::flow::Entry;
use self::initiator::{Link, Patience};
use self::mapped::Mapped;
use self::offered::Offered;
use self::target::{Files, Target};
use crate::batch::BatchShared;
use crate::keys::Keys;
use crate::listen::listen;
use crate::memory::RawMemory;
use crate::metrics::Metrics;
use crate::segment::OpenSegment;
use crate::terms::Terms;
use crate::transport::{Capabilities, Registration, Run, Transport};
use crate::{FailureReason, FileError, InstallError, SegmentId};

/// As in `--protocol` and in descriptors.
pub(crate) const NAME: &str = NVMEOF;

/// The most folders that a setting names.
pub(crate) const MAX_FOLDERS: usize = 64;

/// What the transport `nvmeof` is installed with.
#[derive(Clone, Debug)]
pub struct NvmeofConfig {
    /// Where initiators are answered. Without, at the engine's address and a free port.
    pub listen: Option<SocketAddr>,
    /// Among which ports to look for a free one, where `listen` has none. Without, the system chooses.
    pub ports: Option<RangeInclusive<u16>>,
    /// Initiators that are served at a time. Each can make us allocate 9 MiB.
    pub max_connections: usize,
    /// What reads and writes files: the best that the system lets us use, unless said.
    pub file_engine: Option<FileEngine>,
    /// Whether aligned I/O goes around the page cache where the file lets it.
    pub direct: bool,
    /// How long a target may take to accept a connection, and the resolver to find its host before; and as long again to
    /// prove who it is, where there is a token or a certificate.
    pub connect_timeout: Duration,
    /// How long a target may say nothing while it is asked for something. It says that it is there twice
    /// a second.
    pub silence: Duration,
    /// How long the device may take over a request, at the target or where a file is mapped. The target
    /// says that it is there meanwhile.
    pub io_timeout: Duration,
    /// Where files may lie that are mapped here. In none, unless said: a descriptor can name any path.
    pub mapped_folders: Vec<PathBuf>,
    /// By which name descriptors call this server where they say what is mapped here: the engine's,
    /// unless said.
    pub server_name: Option<String>,
}

impl Default for NvmeofConfig {
    fn default() -> Self {
        Self {
            listen: None,
            ports: None,
            max_connections: 64,
            file_engine: None,
            direct: true,
            connect_timeout: Duration::from_secs(2),
            silence: Duration::from_secs(3),
            io_timeout: Duration::from_secs(60),
            mapped_folders: Vec::new(),
            server_name: None,
        }
    }
}

/// How a file is offered.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    /// What it is called in the segment's name: as on disk, unless said.
    pub name: Option<String>,
    /// How much of it, from its start: all that there is, unless said. A regular file that is offered for
    /// writing and is shorter becomes so long.
    pub length: Option<u64>,
    /// Whether it may be written.
    pub writable: bool,
    /// Where other servers have mapped it: paths by the names of these.
    pub local_path_map: BTreeMap<String, String>,
}

pub(crate) struct NvmeofTransport {
    /// Where the engine answers.
    engine: HostPort,
    incarnation: u64,
    config: NvmeofConfig,
    disk: Arc<Disk>,
    files: Arc<Files>,
    offered: Offered,
    target: Mutex<Option<Target>>,
    port: u16,
    /// Who is admitted, where there is a token or a certificate.
    gate: Option<Gate>,
    routes: RwLock<HashMap<SegmentId, Arc<Route>>>,
    links: Mutex<HashMap<(String, u16), Weak<Link>>>,
    /// Routes that are for nothing more but what was submitted before.
    retired: Mutex<Vec<Arc<Route>>>,
}

/// How a segment's files are reached.
struct Route {
    descriptor: Arc<SegmentDesc>,
    link: Option<Arc<Link>>,
    mapped: Mapped,
}

impl Route {
    fn is_at_rest(&self) -> bool {
        self.mapped.is_at_rest() && self.link.as_ref().is_none_or(|link| link.is_at_rest())
    }

    /// What is under way fails.
    fn stop(&self) {
        self.mapped.stop();
        if let Some(link) = &self.link {
            link.stop();
        }
    }
}

impl NvmeofTransport {
    pub(crate) fn new(
        config: NvmeofConfig,
        engine: HostPort,
        incarnation: u64,
        address: SocketAddr,
        gate: Option<Gate>,
    ) -> Result<Self, InstallError> {
        let failed = |error: io::Error| InstallError::Files(error.to_string());
        let disk = Arc::new(Disk::start(config.file_engine).map_err(failed)?);
        tracing::info!(engine = %disk.engine(), "files are read and written");
        let files = Arc::new(Files::default());
        let listening = config.listen.unwrap_or_else(|| SocketAddr::new(address.ip(), 0));
        let listener = listen(listening, config.ports.as_ref(), 128).map_err(|error| {
            InstallError::Files(format!("cannot listen at {listening}: {error}"))
        })?;
        let (connections, served) = (config.max_connections, Arc::clone(&files));
        let target = Target::start(listener, connections, served, Arc::clone(&disk), gate.clone());
        let target = target.map_err(failed)?;
        Ok(Self {
            engine,
            incarnation,
            config,
            disk,
            files,
            offered: Offered::default(),
            port: target.port(),
            gate,
            target: Mutex::new(Some(target)),
            routes: RwLock::default(),
            links: Mutex::default(),
            retired: Mutex::default(),
        })
    }

    /// Offers a file; the name of its segment.
    pub(crate) fn offer(
        &self,
        store: &dyn Store,
        path: &Path,
        options: FileOptions,
    ) -> Result<String, FileError> {
        let base = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = options.name.clone().or(base).unwrap_or_default();
        let name = FileName::new(self.engine.clone(), &name)?.to_string();
        let work = || self.open_and_publish(store, path, &name, &options);
        self.offered.offer(&name, work)?;
        Ok(name)
    }

    fn open_and_publish(
        &self,
        store: &dyn Store,
        path: &Path,
        name: &str,
        options: &FileOptions,
    ) -> Result<FileKey, FileError> {
        let failed = |error| FileError::Open { path: path.display().to_string(), error };
        let open = || {
            let path = path.canonicalize()?;
            let file = OpenFile::open(&path, options.length, options.writable, self.config.direct)?;
            Ok((file, draw_key()?))
        };
        let (file, key) = open().map_err(failed)?;
        let descriptor = SegmentDesc {
            name: name.to_owned(),
            protocol: NVMEOF.to_owned(),
            buffers: vec![BufferDesc {
                name: file.path.clone(),
                length: file.length,
                file_path: Some(file.path.clone()),
                local_path_map: options.local_path_map.clone(),
                file_key: Some(key),
                file_read_only: !file.writable,
                ..BufferDesc::default()
            }],
            file_target: Some(FileTargetDesc {
                host: self.engine.host.clone(),
                port: self.port,
                token: self.gate.as_ref().and_then(Gate::token).is_some(),
                tls: self.gate.as_ref().and_then(Gate::tls).is_some(),
            }),
            incarnation: Some(self.incarnation),
            timestamp: timestamp(SystemTime::now()),
            ..SegmentDesc::default()
        };
        tracing::info!(
            segment = name,
            path = file.path,
            bytes = file.length,
            direct = file.is_direct(),
            "a file is offered"
        );
        self.files.insert(key.0, Arc::new(file));
        if let Err(error) = store.publish_segment(&descriptor) {
            self.files.remove(key.0);
            return Err(error.into());
        }
        Ok(key)
    }

    /// Takes a file back. Returns when nobody reads or writes it any more.
    pub(crate) fn take_back(&self, store: &dyn Store, name: &str) -> Result<(), FileError> {
        self.offered.take_back(name, |key| {
            let withdrawn = store.withdraw_segment(name);
            self.files.remove(key.0);
            withdrawn
        })
    }

    /// The names of the segments that are files of this engine.
    pub(crate) fn names(&self) -> Vec<String> {
        self.offered.names()
    }

    /// Why a target and this engine have no conversation, if they have none.
    fn refusal(&self, target: &FileTargetDesc) -> Option<&'static str> {
        let gate = self.gate.as_ref();
        let (token, tls) =
            (gate.and_then(Gate::token).is_some(), gate.and_then(Gate::tls).is_some());
        match ((target.tls, tls), (target.token, token)) {
            ((true, false), _) => Some(
                "its process does I/O for those only who prove by a certificate who they are, and none is set \
                 here: see security.certificate_file",
            ),
            ((false, true), _) => {
                Some("its process does I/O without TLS, and a certificate is set here")
            }
            (_, (true, false)) => Some(
                "its process does I/O for those only who have its token, and none is set here: see \
                 security.token_file",
            ),
            (_, (false, true)) => Some("its process asks for no token, and one is set here"),
            _ => None,
        }
    }

    /// The link to a segment's target, which segments of one target share.
    fn link(&self, segment: &str, descriptor: &SegmentDesc) -> Option<Arc<Link>> {
        let target = descriptor.file_target.as_ref()?;
        if self.refusal(target).is_some() {
            return None;
        }
        // Where its process was found is a better name than the one it has for itself.
        let host = match segment.parse::<FileName>() {
            Ok(name) => name.server.host,
            Err(_) => target.host.clone(),
        };
        let mut links = lock(&self.links);
        links.retain(|_, link| link.strong_count() > 0);
        let place = (host, target.port);
        if let Some(link) = links.get(&place).and_then(Weak::upgrade) {
            return Some(link);
        }
        let NvmeofConfig { connect_timeout, silence, io_timeout: io, .. } = self.config;
        // What this engine asks of callers it shows and asks of who it calls, too.
        let gate = self.gate.as_ref();
        let target = Place {
            host: place.0.clone(),
            port: place.1,
            token: gate.and_then(Gate::token),
            tls: gate.and_then(Gate::tls).cloned(),
            patience: connect_timeout,
            resolver: Resolver::system(),
        };
        let link = Arc::new(Link::new(target, Patience { silence, io }));
        links.insert(place, Arc::downgrade(&link));
        Some(link)
    }

    /// Keeps a route that nobody finds any more until what goes over it has ended.
    fn retire(&self, route: Option<Arc<Route>>) {
        let mut retired = lock(&self.retired);
        retired.extend(route);
        // One that somebody still has is about to get more to do.
        let over = |route: &mut Arc<Route>| Arc::strong_count(route) == 1 && route.is_at_rest();
        let over: Vec<_> = retired.extract_if(.., over).collect();
        drop(retired);
        // Ends their threads.
        drop(over);
    }

    fn route(&self, segment: SegmentId) -> Option<Arc<Route>> {
        self.routes.read().unwrap_or_else(PoisonError::into_inner).get(&segment).cloned()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What nobody can guess.
fn draw_key() -> io::Result<FileKey> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(FileKey(u128::from_le_bytes(bytes)))
}

impl Transport for NvmeofTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { durable: true, ..Capabilities::REMOTE }
    }

    fn register(&self, _memory: &RawMemory, _remote: bool) -> Result<Registration, String> {
        let (keys, remote_keys) = (Keys::none(), Keys::none());
        Ok(Registration { keys, remote_keys, shared_key: None, guard: Box::new(()) })
    }

    fn describe(&self, _descriptor: &mut SegmentDesc) {}

    fn prepare(&self, segment: &Arc<OpenSegment>, descriptor: &Arc<SegmentDesc>) {
        if descriptor.protocol != NVMEOF {
            return;
        }
        let link = self.link(&segment.name, descriptor);
        let engine = self.engine.to_string();
        let server = self.config.server_name.as_deref().unwrap_or(&engine);
        let files =
            mapped::open(descriptor, server, &self.config.mapped_folders, self.config.direct);
        let mapped = Mapped::new(&self.disk, files, self.config.io_timeout);
        let route = Arc::new(Route { descriptor: Arc::clone(descriptor), link, mapped });
        let mut routes = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        let before = routes.insert(segment.id, route);
        drop(routes);
        self.retire(before);
    }

    fn reaches(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
        buffer: usize,
    ) -> Result<(), String> {
        if descriptor.protocol != NVMEOF {
            return Err("it is no file".to_owned());
        }
        let route = self.route(segment.id).ok_or("its target is not known")?;
        let mapped = route.mapped.reaches(buffer);
        if let Some(Ok(())) = mapped {
            return Ok(());
        }
        if let Some(reason) = descriptor.file_target.as_ref().and_then(|it| self.refusal(it)) {
            return Err(reason.to_owned());
        }
        let key = descriptor.buffers[buffer].file_key;
        match (mapped, route.link.is_some() && key.is_some()) {
            (_, true) => Ok(()),
            (Some(Err(why)), false) => Err(why),
            (_, false) => {
                Err("no process does its I/O, and it is not mapped for this server".to_owned())
            }
        }
    }

    fn observe(&self, metrics: &mut Metrics) {
        let links: Vec<_> = lock(&self.links).values().filter_map(Weak::upgrade).collect();
        metrics.rails.extend(links.iter().map(|link| link.observe()));
    }

    fn submit(&self, batch: &Arc<BatchShared>, runs: &[Run], terms: &Terms) {
        for run in runs {
            let route = self.route(run.segment.id);
            let route = route.filter(|route| route.descriptor.name == run.view.descriptor.name);
            let entry = Entry::new(batch, run, terms.durable);
            // The files of another version of the descriptor may be others.
            let file = run.view.descriptor.buffers.get(run.buffer);
            let mapped = |route: &Route| {
                route.descriptor.buffers.get(run.buffer) == file
                    && matches!(route.mapped.reaches(run.buffer), Some(Ok(())))
            };
            match route.as_deref() {
                Some(route) if mapped(route) => route.mapped.submit(entry),
                Some(Route { link: Some(link), .. }) => link.submit(entry),
                // It was closed since it was looked for.
                _ => entry.fail(&FailureReason::NoPath("the segment was closed".to_owned())),
            }
        }
    }

    fn forget(&self, segment: SegmentId) {
        let mut routes = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        let route = routes.remove(&segment);
        drop(routes);
        self.retire(route);
    }

    fn stop(&self) {
        let routes =
            std::mem::take(&mut *self.routes.write().unwrap_or_else(PoisonError::into_inner));
        let retired = std::mem::take(&mut *lock(&self.retired));
        // Somebody who submits may have one still.
        routes.into_values().chain(retired).for_each(|route| route.stop());
        let target = lock(&self.target).take();
        drop(target);
        self.offered.take().for_each(|key| self.files.remove(key.0));
    }
}
