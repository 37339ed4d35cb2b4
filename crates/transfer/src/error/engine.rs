//! Why an engine is not made, or a transport not installed.

use std::io;
use std::net::{IpAddr, SocketAddr};

use millstream_metadata::{NameError, OpenStoreError, StoreError};
use millstream_topology::MatrixFileError;
use millstream_verbs::{CreateError, DeviceError};
use thiserror::Error;

use super::{RegisterError, code, store_code};

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
