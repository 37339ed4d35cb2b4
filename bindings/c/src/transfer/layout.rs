//! The structures of the header.

use std::ffi::{c_char, c_int, c_void};
use std::time::{Duration, Instant};

use millstream_transfer::{
    FileOptions, Notification, Opcode, PriorityLevel, SegmentId, SubmitOptions, TransferRequest,
    TransferStatus,
};

use crate::boundary::{self, Failure};

/// An engine's handle.
pub(super) type EnginePointer = *mut c_void;

/// `INVALID_BATCH`.
pub(super) const INVALID_BATCH: u64 = u64::MAX;

/// `struct transfer_request`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawRequest {
    opcode: c_int,
    source: *mut c_void,
    target_id: i32,
    target_offset: u64,
    length: u64,
}

impl RawRequest {
    pub(super) fn checked(&self, index: usize) -> Result<TransferRequest, Failure> {
        let opcode = match self.opcode {
            0 => Opcode::Read,
            1 => Opcode::Write,
            other => {
                let text = format!("request {index}: {other} is no opcode: 0 is READ, 1 is WRITE");
                return Err(Failure::invalid(text));
            }
        };
        let target = u32::try_from(self.target_id).map_err(|_| {
            Failure::invalid(format!("request {index}: segment {} is not open", self.target_id))
        })?;
        let source = self.source.expose_provenance() as u64;
        let Self { target_offset, length, .. } = *self;
        Ok(TransferRequest { opcode, source, target: SegmentId(target), target_offset, length })
    }
}

/// `struct millstream_submit_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawOptions {
    size: usize,
    priority: c_int,
    durable: c_int,
    timeout_us: u64,
    transport: *const c_char,
    policy: *const c_char,
    intent: *const c_char,
    notify_name: *const c_char,
    notify_msg: *const c_char,
}

impl RawOptions {
    /// What it says.
    ///
    /// # Safety
    ///
    /// Its texts are null or end with a zero, and nobody changes them during the call.
    pub(super) unsafe fn checked(&self) -> Result<SubmitOptions, Failure> {
        let Self { size, priority, durable, timeout_us, transport, policy, intent, .. } = *self;
        if size != size_of::<Self>() || !(0..=1).contains(&durable) {
            let text = format!(
                "options: size is {size} and durable {durable}, not {} and 0 or 1: is it all of \
                 struct millstream_submit_options, with zeros?",
                size_of::<Self>()
            );
            return Err(Failure::invalid(text));
        }
        let priority = match priority {
            0 => None,
            1 => Some(PriorityLevel::Latency),
            2 => Some(PriorityLevel::Normal),
            3 => Some(PriorityLevel::Bulk),
            other => {
                let text = format!("options: {other} is no priority: see MILLSTREAM_PRIORITY_...");
                return Err(Failure::invalid(text));
            }
        };
        let timeout = (timeout_us > 0).then(|| Duration::from_micros(timeout_us));
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        // SAFETY: the caller promises it of all five.
        let (transport, policy, intent, name, text) = unsafe {
            (
                boundary::optional("options: transport", transport)?,
                boundary::optional("options: policy", policy)?,
                boundary::optional("options: intent", intent)?,
                boundary::optional("options: notify_name", self.notify_name)?,
                boundary::optional("options: notify_msg", self.notify_msg)?,
            )
        };
        let notify = match (name, text) {
            (None, None) => None,
            (name, text) => Some(Notification {
                name: name.unwrap_or_default().to_owned(),
                text: text.unwrap_or_default().to_owned(),
            }),
        };
        Ok(SubmitOptions {
            deadline,
            notify,
            priority,
            transport: transport.map(str::to_owned),
            policy: policy.map(str::to_owned),
            intent: intent.map(str::to_owned),
            durable: durable == 1,
        })
    }
}

/// `struct millstream_local_path`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawLocalPath {
    server: *const c_char,
    path: *const c_char,
}

/// `struct millstream_file_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawFileOptions {
    size: usize,
    name: *const c_char,
    length: u64,
    local_paths: *const RawLocalPath,
    local_path_count: usize,
    writable: c_int,
}

impl RawFileOptions {
    /// What it says.
    ///
    /// # Safety
    ///
    /// It has as many local paths as it says. Its texts and theirs are null or end with a zero, and nobody changes them
    /// during the call.
    pub(super) unsafe fn checked(&self) -> Result<FileOptions, Failure> {
        let Self { size, name, length, local_paths, local_path_count, writable } = *self;
        if size != size_of::<Self>() || !(0..=1).contains(&writable) {
            let text = format!(
                "options: size is {size} and writable {writable}, not {} and 0 or 1: is it all of \
                 struct millstream_file_options, with zeros?",
                size_of::<Self>()
            );
            return Err(Failure::invalid(text));
        }
        // SAFETY: the caller promises it of both.
        let (name, places) = unsafe {
            (
                boundary::optional("options: name", name)?,
                boundary::array("options: local_paths", local_paths, local_path_count)?,
            )
        };
        let mut options = FileOptions {
            name: name.map(str::to_owned),
            length: (length > 0).then_some(length),
            writable: writable == 1,
            ..FileOptions::default()
        };
        for (index, place) in places.iter().enumerate() {
            let what = format!("options: local_paths[{index}]");
            // SAFETY: the caller promises it of both.
            let (server, path) = unsafe {
                (
                    boundary::text(&format!("{what}: server"), place.server)?,
                    boundary::text(&format!("{what}: path"), place.path)?,
                )
            };
            let mapped = options.map(server, path);
            mapped.map_err(|error| Failure::invalid(format!("{what}: {error}")))?;
        }
        Ok(options)
    }
}

/// `struct transfer_status`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawStatus {
    status: c_int,
    transferred_bytes: u64,
}

impl RawStatus {
    pub(super) fn new(status: &TransferStatus) -> Self {
        let TransferStatus { state, transferred_bytes, .. } = *status;
        Self { status: state as c_int, transferred_bytes }
    }

    /// Of a request that is done without a transfer.
    pub(super) fn without_transfer(state: millstream_transfer::TransferState) -> Self {
        Self { status: state as c_int, transferred_bytes: 0 }
    }
}

/// `struct notify_msg`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawMessage {
    pub(super) name: *mut c_char,
    pub(super) msg: *mut c_char,
}

/// `struct buffer_entry`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawBuffer {
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
}

/// `struct nic_load_stat`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawNicLoad {
    pub(super) device_name: [c_char; 64],
    pub(super) inflight_bytes: u64,
    pub(super) ewma_bandwidth_bps: f64,
}
