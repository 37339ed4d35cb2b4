//! The class `TransferEngine` of `mooncake.engine`.

use std::path::Path;
use std::sync::{PoisonError, RwLock};

use millstream_topology::{DeviceFilter, Topology};
use millstream_transfer::{Notification, Opcode};
use pyo3::exceptions::{PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyString, PyType};

use super::arguments::{Number, Numbers, TransferNotify, TransferOpcode};
use super::bounce;
use super::start::Wanted;
use super::started::{FAILED, Handle, Moves, Started, complain};

/// Moves bytes between registered memory here and at peers. Calls return 0, or a negative code.
#[pyclass(frozen, subclass, module = "mooncake.engine", name = "TransferEngine")]
pub(crate) struct MooncakeEngine(RwLock<Option<Handle>>);

impl MooncakeEngine {
    /// The engine, unless it was not initialized, or this is a fork.
    fn started(&self) -> Option<Handle> {
        let handle = self.0.read().unwrap_or_else(PoisonError::into_inner);
        handle.as_ref().and_then(Handle::another)
    }

    /// What a call returns, or its failure where there is no engine.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        otherwise: R,
        run: impl FnOnce(&Started) -> R + Send,
    ) -> R {
        let Some(started) = self.started() else {
            complain(FAILED, "initialize was not called, or failed, or was called before a fork");
            return otherwise;
        };
        // Let go of in there, too: the last who has it ends it.
        py.detach(move || run(&started))
    }

    fn sync(
        &self,
        py: Python<'_>,
        moves: &Moves<'_>,
        notify: Option<TransferNotify>,
    ) -> PyResult<i32> {
        let Some(started) = self.started() else {
            return Ok(complain(FAILED, "initialize was not called, or failed"));
        };
        let notify = notify.map(|TransferNotify { name, msg }| Notification { name, text: msg });
        started.sync(py, moves, notify.as_ref())
    }

    /// The number of a batch, or 0.
    fn asynchronous(&self, py: Python<'_>, moves: &Moves<'_>) -> u64 {
        self.with(py, 0, |started| started.submit(moves, None).map_or(0, |job| started.add(job)))
    }
}

/// Methods that take a batch, whose lists are as long as each other.
macro_rules! lists {
    ($target:expr, $opcode:expr, $here:expr, $there:expr, $lengths:expr) => {
        &Moves {
            target: &$target,
            opcode: $opcode,
            here: &$here.0,
            there: &$there.0,
            lengths: &$lengths.0,
        }
    };
}

/// Methods that take one request.
macro_rules! single {
    ($target:expr, $opcode:expr, $here:expr, $there:expr, $length:expr) => {
        &Moves {
            target: &$target,
            opcode: $opcode,
            here: &[$here.0],
            there: &[$there.0],
            lengths: &[$length.0],
        }
    };
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "as the original has them")]
impl MooncakeEngine {
    #[new]
    fn new() -> Self {
        Self(RwLock::default())
    }

    #[classattr]
    #[pyo3(name = "TransferOpcode")]
    fn opcode(py: Python<'_>) -> Bound<'_, PyType> {
        py.get_type::<TransferOpcode>()
    }

    /// Starts the engine. Which transports it has depends on the machine, as `protocol` says.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, /))]
    fn initialize(
        &self,
        py: Python<'_>,
        local_hostname: String,
        metadata_server: String,
        protocol: String,
        device_name: String,
    ) -> i32 {
        let wanted = Wanted {
            hostname: local_hostname,
            metadata: metadata_server,
            protocol,
            devices: device_name,
        };
        match py.detach(|| Started::new(&wanted)) {
            Ok(started) => {
                // Only who has the interpreter has this lock, and so nobody when a process is forked off.
                let mut handle = self.0.write().unwrap_or_else(PoisonError::into_inner);
                let before = handle.replace(Handle::new(started));
                drop(handle);
                drop(before);
                0
            }
            Err(error) => complain(FAILED, &error),
        }
    }

    /// As `initialize`, with the kind of the metadata server beside its address.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, metadata_type, /))]
    fn initialize_ext(
        &self,
        py: Python<'_>,
        local_hostname: String,
        metadata_server: String,
        protocol: String,
        device_name: String,
        metadata_type: String,
    ) -> i32 {
        let whole = metadata_server == "P2PHANDSHAKE" || metadata_server.contains("://");
        let server =
            if whole { metadata_server } else { format!("{metadata_type}://{metadata_server}") };
        self.initialize(py, local_hostname, server, protocol, device_name)
    }

    /// The port at which it answers peers.
    fn get_rpc_port(&self, py: Python<'_>) -> i32 {
        self.with(py, FAILED, |started| started.engine.listening_at().port().into())
    }

    /// Allocates registered memory; its address, or 0.
    #[pyo3(signature = (length, /))]
    fn allocate_managed_buffer(&self, py: Python<'_>, length: Number) -> u64 {
        self.with(py, 0, |started| started.allocate(length.0 as usize))
    }

    #[pyo3(signature = (buffer_addr, length, /))]
    fn free_managed_buffer(&self, py: Python<'_>, buffer_addr: Number, length: Number) -> i32 {
        let _ = length;
        self.with(py, FAILED, |started| started.free(buffer_addr.0))
    }

    #[pyo3(signature = (buffer_addr, capacity, location = "*".to_owned()))]
    fn register_memory(
        &self,
        py: Python<'_>,
        buffer_addr: Number,
        capacity: Number,
        location: String,
    ) -> i32 {
        let piece = (buffer_addr.0, capacity.0);
        self.with(py, FAILED, |started| started.register(&[piece], &location))
    }

    #[pyo3(signature = (buffer_addr, /))]
    fn unregister_memory(&self, py: Python<'_>, buffer_addr: Number) -> i32 {
        self.with(py, FAILED, |started| started.unregister(&[buffer_addr.0]))
    }

    /// Registers all or none.
    #[pyo3(signature = (buffer_addresses, capacities, location = "*".to_owned()))]
    fn batch_register_memory(
        &self,
        py: Python<'_>,
        buffer_addresses: Numbers,
        capacities: Numbers,
        location: String,
    ) -> i32 {
        // Capacities beyond those of addresses are not looked at, as in the original.
        if capacities.0.len() < buffer_addresses.0.len() {
            return complain(FAILED, "each address needs a capacity");
        }
        let pieces: Vec<_> = buffer_addresses.0.into_iter().zip(capacities.0).collect();
        self.with(py, FAILED, |started| started.register(&pieces, &location))
    }

    /// Unregisters what can be; the first code that is not 0.
    #[pyo3(signature = (buffer_addresses, /))]
    fn batch_unregister_memory(&self, py: Python<'_>, buffer_addresses: Numbers) -> i32 {
        self.with(py, FAILED, |started| started.unregister(&buffer_addresses.0))
    }

    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = String::new()))]
    fn transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        transport_hint: String,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        self.sync(
            py,
            single!(target_hostname, Opcode::Write, buffer, peer_buffer_address, length),
            None,
        )
    }

    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = String::new()))]
    fn transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        transport_hint: String,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        self.sync(
            py,
            single!(target_hostname, Opcode::Read, buffer, peer_buffer_address, length),
            None,
        )
    }

    #[pyo3(signature = (
        target_hostname, buffer, peer_buffer_address, length, opcode, notify = None, transport_hint = String::new()
    ))]
    fn transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        opcode: TransferOpcode,
        notify: Option<TransferNotify>,
        transport_hint: String,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        self.sync(
            py,
            single!(target_hostname, opcode.into(), buffer, peer_buffer_address, length),
            notify,
        )
    }

    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = String::new()))]
    fn batch_transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: String,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        self.sync(
            py,
            lists!(target_hostname, Opcode::Write, buffers, peer_buffer_addresses, lengths),
            None,
        )
    }

    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = String::new()))]
    fn batch_transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: String,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        self.sync(
            py,
            lists!(target_hostname, Opcode::Read, buffers, peer_buffer_addresses, lengths),
            None,
        )
    }

    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify = None,
        transport_hint = String::new()
    ))]
    fn batch_transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        opcode: TransferOpcode,
        notify: Option<TransferNotify>,
        transport_hint: String,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        self.sync(
            py,
            lists!(target_hostname, opcode.into(), buffers, peer_buffer_addresses, lengths),
            notify,
        )
    }

    /// Begins a WRITE; the number of the batch, or 0.
    #[pyo3(signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint = String::new()))]
    fn transfer_submit_write(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        transport_hint: String,
    ) -> u64 {
        let _ = transport_hint;
        self.asynchronous(
            py,
            single!(target_hostname, Opcode::Write, buffer, peer_buffer_address, length),
        )
    }

    /// 1: done, 0: under way, -1: failed, -2: not in time. What is over is free then.
    #[pyo3(signature = (batch_id, /))]
    fn transfer_check_status(&self, py: Python<'_>, batch_id: Number) -> i32 {
        self.with(py, FAILED, |started| started.check(batch_id.0))
    }

    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = String::new()))]
    fn batch_transfer_async_write(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: String,
    ) -> u64 {
        let _ = transport_hint;
        self.asynchronous(
            py,
            lists!(target_hostname, Opcode::Write, buffers, peer_buffer_addresses, lengths),
        )
    }

    #[pyo3(signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = String::new()))]
    fn batch_transfer_async_read(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: String,
    ) -> u64 {
        let _ = transport_hint;
        self.asynchronous(
            py,
            lists!(target_hostname, Opcode::Read, buffers, peer_buffer_addresses, lengths),
        )
    }

    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, opcode, transport_hint = String::new()
    ))]
    fn batch_transfer_async(
        &self,
        py: Python<'_>,
        target_hostname: String,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        opcode: TransferOpcode,
        transport_hint: String,
    ) -> u64 {
        let _ = transport_hint;
        self.asynchronous(
            py,
            lists!(target_hostname, opcode.into(), buffers, peer_buffer_addresses, lengths),
        )
    }

    /// Waits for all of these batches, which are free then: 0, or -1 if one failed.
    #[pyo3(signature = (batch_ids, /))]
    fn get_batch_transfer_status(&self, py: Python<'_>, batch_ids: Numbers) -> PyResult<i32> {
        match self.started() {
            Some(started) => started.wait_for(py, &batch_ids.0),
            None if batch_ids.0.is_empty() => Ok(0),
            None => Ok(complain(FAILED, "initialize was not called, or failed")),
        }
    }

    /// Copies bytes to an address.
    #[pyo3(signature = (dest_address, src_ptr, length, /))]
    fn write_bytes_to_buffer(
        &self,
        py: Python<'_>,
        dest_address: Number,
        src_ptr: &Bound<'_, PyAny>,
        length: Number,
    ) -> PyResult<i32> {
        let data: Vec<u8> = if let Ok(text) = src_ptr.cast::<PyString>() {
            text.to_cow()?.as_bytes().to_vec()
        } else if let Ok(bytes) = src_ptr.cast::<PyBytes>() {
            bytes.as_bytes().to_vec()
        } else if let Ok(bytes) = src_ptr.cast::<PyByteArray>() {
            bytes.to_vec()
        } else {
            return Err(PyTypeError::new_err(
                "incompatible function arguments: not bytes, bytearray or str",
            ));
        };
        Ok(self.with(py, FAILED, |_| {
            if length.0 > data.len() as u64 {
                return complain(FAILED, "there are not so many bytes");
            }
            let from = data.as_ptr().expose_provenance() as u64;
            bounce::copy(from, dest_address.0, length.0)
                .map_or_else(|fault| complain(FAILED, &fault), |()| 0)
        }))
    }

    /// The bytes at an address.
    #[pyo3(signature = (source_address, length, /))]
    fn read_bytes_from_buffer<'py>(
        &self,
        py: Python<'py>,
        source_address: Number,
        length: Number,
    ) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, length.0 as usize, |bytes| {
            let to = bytes.as_mut_ptr().expose_provenance() as u64;
            let run = |_: &Started| bounce::copy(source_address.0, to, length.0).ok();
            self.with(py, None, run).ok_or_else(|| {
                PyValueError::new_err("the memory is not there, or the engine was not initialized")
            })
        })
    }

    /// Where the first registered memory of a segment is, or 0.
    #[pyo3(signature = (segment_name, /))]
    fn get_first_buffer_address(&self, py: Python<'_>, segment_name: String) -> u64 {
        self.with(py, 0, |started| started.first_buffer(&segment_name))
    }

    /// The messages that have come.
    fn get_notifies(&self, py: Python<'_>) -> Vec<TransferNotify> {
        let notify = |Notification { name, text }| TransferNotify { name, msg: text };
        self.with(py, Vec::new(), |started| {
            started.engine.take_notifications().into_iter().map(notify).collect()
        })
    }

    /// Whether the process of a segment is there: 0, or a code.
    #[pyo3(signature = (peer_server_name))]
    fn send_probe(&self, py: Python<'_>, peer_server_name: String) -> i32 {
        self.with(py, FAILED, |started| started.probe(&peer_server_name))
    }

    /// Which NICs are near to which memory, as JSON.
    #[pyo3(signature = (device_name = None))]
    fn get_local_topology(&self, py: Python<'_>, device_name: Option<String>) -> String {
        py.detach(|| {
            let filter = device_name.filter(|name| !name.is_empty());
            let filter = filter.map_or_else(DeviceFilter::all, |names| DeviceFilter::parse(&names));
            match Topology::read_places(Path::new("/sys")) {
                Ok(topology) => {
                    topology.priority_matrix(&topology.nics()).filtered(&filter).to_json()
                }
                Err(error) => {
                    complain(FAILED, &error);
                    String::new()
                }
            }
        })
    }

    /// Nothing to do: there are no EFA devices.
    #[pyo3(signature = (segment_name))]
    fn warmup_efa_segment(&self, segment_name: String) -> i32 {
        let _ = segment_name;
        0
    }

    fn get_engine(&self) -> PyResult<()> {
        Err(missing("get_engine: there is no object of C++", "use the methods of TransferEngine"))
    }

    fn get_engine_ptr(&self) -> PyResult<u64> {
        Err(missing(
            "get_engine_ptr: there is no object of C++",
            "use the methods of TransferEngine",
        ))
    }

    /// Memory of GPUs is moved by the other methods.
    #[pyo3(signature = (*_arguments, **_values))]
    fn transfer_write_on_cuda(
        &self,
        _arguments: &Bound<'_, PyAny>,
        _values: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        Err(missing("transfer_write_on_cuda", ON_CUDA))
    }

    #[pyo3(signature = (*_arguments, **_values))]
    fn transfer_read_on_cuda(
        &self,
        _arguments: &Bound<'_, PyAny>,
        _values: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        Err(missing("transfer_read_on_cuda", ON_CUDA))
    }

    #[pyo3(signature = (*_arguments, **_values))]
    fn batch_transfer_write_on_cuda(
        &self,
        _arguments: &Bound<'_, PyAny>,
        _values: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        Err(missing("batch_transfer_write_on_cuda", ON_CUDA))
    }

    #[pyo3(signature = (*_arguments, **_values))]
    fn batch_transfer_read_on_cuda(
        &self,
        _arguments: &Bound<'_, PyAny>,
        _values: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<i32> {
        Err(missing("batch_transfer_read_on_cuda", ON_CUDA))
    }
}

const ON_CUDA: &str = "synchronize the stream, and call the method without _on_cuda";

fn missing(what: &str, remedy: &str) -> PyErr {
    PyNotImplementedError::new_err(format!("{what} is not in Millstream; {remedy}"))
}
