//! What can go wrong. One enum for each operation; `code` gives the number that Mooncake's C API
//! has for it.

mod submit;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use millstream_metadata::{CallError, CallErrorKind, NameError, OpenStoreError, StoreError};
use millstream_net::cuda::{CudaError, FindError};
use millstream_net::guarded::Fault;
use millstream_net::own_memory::Defect;
use millstream_topology::MatrixFileError;
use millstream_verbs::{CreateError, DeviceError};
use thiserror::Error;

use crate::{Batch, FailureReason, SegmentId};

pub use self::submit::SubmitError;

mod code {
    pub(super) const INVALID_ARGUMENT: i32 = -1;
    pub(super) const TOO_MANY_REQUESTS: i32 = -2;
    pub(super) const ADDRESS_NOT_REGISTERED: i32 = -3;
    pub(super) const BATCH_BUSY: i32 = -4;
    pub(super) const DEVICE_NOT_FOUND: i32 = -6;
    pub(super) const ADDRESS_OVERLAPPED: i32 = -7;
    pub(super) const DNS: i32 = -101;
    pub(super) const SOCKET: i32 = -102;
    pub(super) const MALFORMED_JSON: i32 = -103;
    pub(super) const METADATA: i32 = -200;
    pub(super) const ENDPOINT: i32 = -201;
    pub(super) const CONTEXT: i32 = -202;
    pub(super) const MEMORY: i32 = -302;
}

fn store_code(error: &StoreError) -> i32 {
    match error {
        StoreError::Name(_) => code::INVALID_ARGUMENT,
        StoreError::Call(error) => match error.kind {
            CallErrorKind::Resolve(_) => code::DNS,
            CallErrorKind::Meaning(_) => code::METADATA,
            _ => code::SOCKET,
        },
        StoreError::Descriptor { .. } => code::MALFORMED_JSON,
        StoreError::BadName { .. } => code::INVALID_ARGUMENT,
        StoreError::Shared(error) => store_code(error),
        StoreError::NotFound { .. }
        | StoreError::TooLong { .. }
        | StoreError::Server(_)
        | StoreError::Taken { .. } => code::METADATA,
    }
}

/// Why an address cannot be listened at, and what to do.
fn listen_failure(address: SocketAddr, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => format!(
            "no interface of this machine has the address {}: see `ip address` for those",
            address.ip()
        ),
        io::ErrorKind::AddrInUse if address.port() != 0 => {
            "another process listens there".to_owned()
        }
        _ => error.to_string(),
    }
}

/// Why an engine could not be made.
#[derive(Debug, Error)]
pub enum NewError {
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {}", listen_failure(*address, error))]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// Its name would be none that peers can connect to.
    #[error(
        "an engine that listens at {0} needs the host name or address that peers shall connect to"
    )]
    HostMissing(SocketAddr),
    /// The host is none.
    #[error("host {0}")]
    Host(#[from] NameError),
    /// There is no such metadata store.
    #[error(transparent)]
    Metadata(#[from] OpenStoreError),
    /// Its name or descriptor could not be published.
    #[error(transparent)]
    Publish(#[from] StoreError),
    /// Its classes of requests are not possible.
    #[error(transparent)]
    PolicyFile(#[from] crate::PolicyFileError),
    /// A value of the configuration is out of range.
    #[error("{name} = {value} is out of range: {min} to {max}")]
    OutOfRange {
        /// Which.
        name: &'static str,
        /// What was given.
        value: usize,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
    },
}

impl NewError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Publish(error) => store_code(error),
            Self::Listen { .. } => code::SOCKET,
            Self::HostMissing(_)
            | Self::Host(_)
            | Self::Metadata(_)
            | Self::PolicyFile(_)
            | Self::OutOfRange { .. } => code::INVALID_ARGUMENT,
        }
    }
}

/// Why a transport could not be installed.
#[derive(Debug, Error)]
pub enum InstallError {
    /// It is there already.
    #[error("the transport {0} is installed already")]
    Twice(&'static str),
    /// A transport that is required was not installed.
    #[error("the transport {0} is not installed")]
    Missing(String),
    /// Memory that is registered already cannot be registered with it.
    #[error("memory was registered before it: {0}")]
    Register(#[from] RegisterError),
    /// The transport tcp does not work here.
    #[error("the transport tcp: {0}")]
    Tcp(String),
    /// The transport relay does not work here, or this engine cannot be a relay.
    #[error("the transport relay: {0}")]
    Relay(String),
    /// There must be at least one address.
    #[error("the transport rdma needs at least one local address")]
    NoAddress,
    /// An address was given twice.
    #[error("{0} is given twice: there is one device for each address")]
    DuplicateAddress(IpAddr),
    /// Two addresses are of one device.
    #[error("two of the addresses are of the device {0}: give one of them")]
    DuplicateDevice(String),
    /// A value of the configuration is out of range.
    #[error("{name} = {value} is out of range: {min} to {max}")]
    OutOfRange {
        /// Which.
        name: &'static str,
        /// What was given.
        value: usize,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
    },
    /// The file that says which NICs are near to which memory is of no use.
    #[error("rdma.topology_file: {0}")]
    Topology(#[source] MatrixFileError),
    /// A device could not be opened.
    #[error(transparent)]
    Open(#[from] DeviceError),
    /// A device lacks something.
    #[error("device {device}: {error}")]
    Create {
        /// Which.
        device: String,
        /// What.
        error: CreateError,
    },
    /// Memory cannot be shared with other processes.
    #[error("memory cannot be shared with other processes: {0}")]
    SharedMemory(String),
    /// Files cannot be read and written for others.
    #[error("files cannot be offered: {0}")]
    Files(String),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The descriptor could not be published.
    #[error(transparent)]
    Publish(#[from] StoreError),
}

impl InstallError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Twice(_)
            | Self::Missing(_)
            | Self::Relay(_)
            | Self::NoAddress
            | Self::DuplicateAddress(_)
            | Self::DuplicateDevice(_)
            | Self::OutOfRange { .. }
            | Self::Topology(_) => code::INVALID_ARGUMENT,
            Self::Open(_) => code::DEVICE_NOT_FOUND,
            Self::Create { .. }
            | Self::SharedMemory(_)
            | Self::Files(_)
            | Self::Tcp(_)
            | Self::Thread(_) => code::CONTEXT,
            Self::Register(error) => error.code(),
            Self::Publish(error) => store_code(error),
        }
    }
}

/// Why memory was not registered or unregistered. What was to be registered is not then. Of what was to
/// be unregistered, [`RegisterError::InUse`] and [`RegisterError::Publish`] say what is still so.
#[derive(Debug, Error)]
pub enum RegisterError {
    /// Nothing to register.
    #[error("memory of 0 bytes cannot be registered")]
    Empty,
    /// Null, or beyond the end of the address space.
    #[error("{length} bytes at {address:#x} are no memory")]
    Invalid {
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// Some of it is registered already.
    #[error(
        "{length} bytes at {address:#x} overlap the {other_length} bytes at {other_address:#x} \
         that are registered already"
    )]
    Overlap {
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
        /// First byte of what is registered.
        other_address: u64,
        /// Bytes of what is registered.
        other_length: u64,
    },
    /// Not all of it is mapped, readable and writable.
    #[error(
        "{length} bytes at {address:#x} cannot be registered: at {first:#x}, {defect}, and it is no memory \
         of a GPU"
    )]
    Defective {
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
        /// The first byte that cannot be accessed.
        first: u64,
        /// Why.
        defect: Defect,
    },
    /// It begins in memory of a GPU, but not all of it is what was allocated there.
    #[error("{length} bytes at {address:#x} cannot be registered: {reason}")]
    Gpu {
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
        /// Why.
        reason: FindError,
    },
    /// A GPU does not give memory.
    #[error("no {length} bytes of GPU {ordinal}: {source}")]
    GpuAllocation {
        /// The GPU.
        ordinal: u32,
        /// Bytes.
        length: usize,
        /// Why.
        source: CudaError,
    },
    /// A location has a name of printable characters.
    #[error(
        "{location:?} is no location of memory: it is \"*\", or a name as \"cpu:0\", up to {limit} \
         characters that can be printed"
    )]
    Location {
        /// What was given, or its beginning.
        location: String,
        /// The most characters.
        limit: usize,
    },
    /// No registered memory starts there.
    #[error("no memory that starts at {address:#x} is registered")]
    Unknown {
        /// First byte.
        address: u64,
    },
    /// Too many registrations.
    #[error("no more than {limit} pieces of memory can be registered")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// The system has no such amount of memory.
    #[error("the system does not give {length} bytes of memory: ask for less")]
    OutOfMemory {
        /// Bytes.
        length: usize,
    },
    /// A transport could not register it.
    #[error("transport {transport}, {length} bytes at {address:#x}: {reason}")]
    Transport {
        /// Which.
        transport: &'static str,
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
        /// Why.
        reason: String,
    },
    /// Another process still accesses it. It cannot begin anew, but what it has begun may still come.
    #[error("the memory at {address:#x} cannot be unregistered yet: {reason}; try again")]
    InUse {
        /// First byte.
        address: u64,
        /// Who, and why.
        reason: String,
    },
    /// The new descriptor could not be published. What was unregistered is so nevertheless.
    #[error(transparent)]
    Publish(#[from] StoreError),
    /// The engine is gone.
    #[error("the engine has been shut down")]
    ShutDown,
}

impl RegisterError {
    /// The number of the C API: -1 for zero length, -7 for an overlap, -3 for unknown memory.
    pub fn code(&self) -> i32 {
        match self {
            Self::Empty
            | Self::Invalid { .. }
            | Self::Defective { .. }
            | Self::Gpu { .. }
            | Self::Location { .. } => code::INVALID_ARGUMENT,
            Self::Overlap { .. } => code::ADDRESS_OVERLAPPED,
            Self::Unknown { .. } => code::ADDRESS_NOT_REGISTERED,
            Self::TooMany { .. } => code::TOO_MANY_REQUESTS,
            Self::OutOfMemory { .. } | Self::GpuAllocation { .. } => code::MEMORY,
            Self::Transport { .. } | Self::InUse { .. } | Self::ShutDown => code::CONTEXT,
            Self::Publish(error) => store_code(error),
        }
    }
}

/// Why a file was not registered or unregistered.
#[derive(Debug, Error)]
pub enum FileError {
    /// The transport is not there.
    #[error("files need the transport nvmeof, which is not installed")]
    NotInstalled,
    /// It cannot be called so.
    #[error("file {0}")]
    Name(#[from] NameError),
    /// There is one of this name.
    #[error("a file is registered as {0:?} already: give it another name")]
    Twice(String),
    /// It cannot be opened.
    #[error("cannot offer file {path}: {error}")]
    Open {
        /// Where it is.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// No file is registered by this name.
    #[error("no file is registered as segment {0:?}")]
    Unknown(String),
    /// Too many files.
    #[error("no more than {limit} files can be registered")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// Its descriptor could not be published.
    #[error(transparent)]
    Publish(#[from] StoreError),
    /// The engine is gone.
    #[error("the engine has been shut down")]
    ShutDown,
}

impl FileError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Name(_) | Self::Open { .. } => code::INVALID_ARGUMENT,
            Self::Twice(_) => code::ADDRESS_OVERLAPPED,
            Self::Unknown(_) => code::ADDRESS_NOT_REGISTERED,
            Self::TooMany { .. } => code::TOO_MANY_REQUESTS,
            Self::NotInstalled | Self::ShutDown => code::CONTEXT,
            Self::Publish(error) => store_code(error),
        }
    }
}

/// An access to a [`crate::Buffer`] or a segment's buffer beyond its end.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum BufferError {
    /// The range does not fit.
    #[error("{length} bytes at offset {offset} do not fit a buffer of {buffer_length} bytes")]
    OutOfRange {
        /// First byte, from the start of the buffer.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes of the buffer.
        buffer_length: u64,
    },
    /// The system has no memory for it, as for want of huge pages.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// It is memory of a GPU, whose driver does not copy.
    #[error(transparent)]
    Gpu(#[from] CudaError),
    /// There are not so many buffers.
    #[error("the segment has {count} buffers: there is no buffer {index}")]
    NoBuffer {
        /// Which was asked for, from 0.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The segment's descriptor says of the buffer what cannot be: which buffer, and what.
    #[error("{0}: its process must register that memory anew")]
    Unusable(String),
}

impl BufferError {
    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        match self {
            Self::OutOfRange { .. } | Self::NoBuffer { .. } | Self::Unusable(_) => {
                code::INVALID_ARGUMENT
            }
            Self::Fault(_) | Self::Gpu(_) => code::MEMORY,
        }
    }
}

/// Why a segment could not be opened or refreshed.
#[derive(Debug, Error)]
pub enum SegmentError {
    /// Its descriptor could not be had.
    #[error("cannot open segment {name:?}: {error}")]
    Store {
        /// The segment's name.
        name: String,
        /// Why.
        error: StoreError,
    },
    /// Its descriptor could not be had, from here or through a relay.
    #[error("cannot open segment {name:?}: {error}; and there is no way through a relay: {relays}")]
    NotRelayed {
        /// The segment's name.
        name: String,
        /// Why not from here.
        error: Box<StoreError>,
        /// What each relay has said.
        relays: String,
    },
    /// Another process has its name now. A relay's way to a segment is for one start of its process.
    #[error("the process of segment {name:?} was restarted, and what it held is lost")]
    Restarted {
        /// The segment's name.
        name: String,
    },
    /// A submission was about to ask for its descriptor, for which another one has just waited in vain.
    /// [`crate::TransferEngine::refresh_segment`] asks at any time.
    #[error(
        "segment {name:?} did not answer {ago:.1?} ago, for which a submission has waited {waited:.1?}: one will ask again \
         in {left:.1?}, and a refresh of the segment asks at once"
    )]
    Silent {
        /// The segment's name.
        name: String,
        /// When that ended.
        ago: Duration,
        /// How long it was waited for.
        waited: Duration,
        /// How long submissions will not ask.
        left: Duration,
    },
    /// There is no open segment of this number.
    #[error("segment {0:?} is not open")]
    Unknown(SegmentId),
    /// Too many open segments.
    #[error("no more than {limit} segments can be open")]
    TooMany {
        /// The limit.
        limit: usize,
    },
}

impl SegmentError {
    /// Whether it was waited for an answer that did not come.
    pub(crate) fn is_silence(&self) -> bool {
        let error = match self {
            Self::Store { error, .. } => error,
            Self::NotRelayed { error, .. } => error,
            _ => return false,
        };
        let error = match error {
            StoreError::Shared(error) => error,
            error => error,
        };
        matches!(
            error,
            StoreError::Call(CallError {
                kind: CallErrorKind::Unreachable { .. } | CallErrorKind::NoReply { .. },
                ..
            })
        )
    }

    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Store { error, .. } => store_code(error),
            Self::NotRelayed { error, .. } => store_code(error),
            Self::Restarted { .. } => code::METADATA,
            Self::Silent { .. } => code::SOCKET,
            Self::Unknown(_) => code::INVALID_ARGUMENT,
            Self::TooMany { .. } => code::TOO_MANY_REQUESTS,
        }
    }
}

/// Why a call on a batch was refused.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum BatchError {
    /// The capacity is out of range.
    #[error("a batch holds 1 to {max} tasks, not {capacity}")]
    Capacity {
        /// What was asked for.
        capacity: usize,
        /// The most.
        max: usize,
    },
    /// There are not so many tasks.
    #[error("the batch has {count} tasks: there is no task {index}")]
    NoTask {
        /// Which was asked for, from 0.
        index: usize,
        /// How many were submitted.
        count: usize,
    },
}

impl BatchError {
    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        code::INVALID_ARGUMENT
    }
}

/// A batch that could not be freed because tasks of it are unfinished.
#[derive(Debug, Error)]
#[error("{unfinished} tasks of the batch are unfinished: wait for them, or cancel them and wait")]
pub struct FreeError {
    /// The batch.
    pub batch: Batch,
    /// How many tasks are unfinished.
    pub unfinished: usize,
}

impl FreeError {
    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        code::BATCH_BUSY
    }
}

/// Why a task failed: which peer, and how.
#[derive(Clone, Debug, Error)]
#[error("peer {peer} (nic {nic}): {}{reason}", place(*range, local_nic.as_deref(), reason))]
pub struct TransferError {
    /// The peer's name: `host:port`.
    pub peer: Arc<str>,
    /// The peer's NIC.
    pub nic: Arc<str>,
    /// The NIC here, where it is known which one it was.
    pub local_nic: Option<Arc<str>>,
    /// What the request was for, as its `target_offset` says it: the first address in the peer's process, in segments of files
    /// the first offset; and bytes. Of several pieces, the smallest range that has all of them.
    pub range: Option<(u64, u64)>,
    /// What happened.
    pub reason: FailureReason,
}

/// The range, unless the reason says where it was, and the NIC here, as a message has them.
fn place(range: Option<(u64, u64)>, local_nic: Option<&str>, reason: &FailureReason) -> String {
    let from = local_nic.map_or_else(String::new, |nic| format!("by nic {nic} here: "));
    match range.filter(|_| !reason.says_where()) {
        Some((address, length)) if from.is_empty() => format!("{length} bytes at {address:#x}: "),
        Some((address, length)) => format!("{length} bytes at {address:#x} {from}"),
        None => from,
    }
}

impl TransferError {
    /// Of a request whose range is not known yet.
    pub(crate) fn new(peer: Arc<str>, nic: &str, reason: FailureReason) -> Self {
        Self { peer, nic: nic.into(), local_nic: None, range: None, reason }
    }

    /// The number of the C API.
    pub const fn code(&self) -> i32 {
        code::ENDPOINT
    }
}

/// Why [`crate::TransferEngine::submit_and_wait`] failed.
#[derive(Debug, Error)]
pub enum SubmitAndWaitError {
    /// The requests are too many or too few for a batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The requests were refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// A request failed.
    #[error("request {index}: {error}")]
    Failed {
        /// Which request, from 0.
        index: usize,
        /// Why.
        error: Box<TransferError>,
    },
    /// Time ran out. What was not sent by then was canceled, and nothing is under way any more.
    #[error("not done within {timeout:?}: {transferred_bytes} of {total_bytes} bytes arrived")]
    Timeout {
        /// The time given.
        timeout: Duration,
        /// At least so many bytes arrived.
        transferred_bytes: u64,
        /// Bytes of all requests.
        total_bytes: u64,
    },
}

/// Why [`crate::TransferEngine::submit_new`] did nothing.
#[derive(Debug, Error)]
pub enum SubmitNewError {
    /// The requests are too many or too few for a batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The requests were refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
}

impl SubmitNewError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Batch(error) => error.code(),
            Self::Submit(error) => error.code(),
        }
    }
}

impl SubmitAndWaitError {
    /// The number of the C API.
    pub fn code(&self) -> i32 {
        match self {
            Self::Batch(error) => error.code(),
            Self::Submit(error) => error.code(),
            Self::Failed { error, .. } => error.code(),
            Self::Timeout { .. } => code::ENDPOINT,
        }
    }
}
