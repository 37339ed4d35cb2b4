//! Why memory or a file is not registered or unregistered.

use std::io;

use millstream_metadata::{NameError, StoreError};
use millstream_net::cuda::{CudaError, FindError};
use millstream_net::own_memory::Defect;
use thiserror::Error;

use super::{code, store_code};

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
    /// No registered memory starts there, or none any more: nobody touches it then.
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
