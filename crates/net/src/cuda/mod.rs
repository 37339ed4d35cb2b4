//! Memory of GPUs, through the CUDA driver, which is loaded at run time.
//!
//! The processor does not touch such memory: the driver copies to and from *pinned* memory of the host, whose
//! pages stay where they are. A [`Lane`] is a piece of pinned memory and a stream, on which copies are done one after
//! the other.
//!
//! **Who uses CUDA.** A process that does not is left as it is. Memory of a GPU can be there only when the driver's
//! library is loaded, so [`Finder`] asks the driver only then, and never loads or initialises it; [`open`]
//! does, for who asks for a GPU by its number. Copies are made in the primary context of the GPU,
//! the one that the CUDA runtime uses; the context that is current on the caller's thread is current again
//! afterwards.
//!
//! **Order.** Copies do not wait for work that is under way on other streams: what a kernel writes is there
//! when the caller has synchronised with it, and not before.

mod allocation;
mod capture;
mod context;
mod copy;
mod driver;
mod ffi;
mod find;
mod lane;
mod pool;
pub mod pretended;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

pub use self::allocation::Allocation;
pub use self::copy::CopyError;
pub use self::driver::open;
pub use self::find::{Finder, summary};
use self::pool::Pool;

/// Why the driver did not do something.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum CudaError {
    /// The library is not on this machine, or cannot be loaded.
    #[error(
        "libcuda.so.1 cannot be loaded ({0}): install the NVIDIA driver, and in a container let it in \
         (NVIDIA Container Toolkit)"
    )]
    DriverMissing(String),
    /// The library lacks a function.
    #[error("libcuda.so.1 has no {0}: the NVIDIA driver is too old, or it is not its library")]
    Symbol(&'static str),
    /// No GPU has this number.
    #[error(
        "there is no GPU {ordinal}: this process sees {count} (CUDA_VISIBLE_DEVICES limits them)"
    )]
    NoDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A call failed.
    #[error("{call} failed: {name} ({code})")]
    Call {
        /// The call.
        call: &'static str,
        /// Its result, a `CUresult`.
        code: i32,
        /// What the driver calls that.
        name: String,
    },
}

/// Why a range is not memory of one GPU, though it begins in such memory.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum FindError {
    /// It is longer than what was allocated there.
    #[error(
        "the allocation of GPU {ordinal} there has {length} bytes at {address:#x}, and the range is not \
         within it"
    )]
    OtherAllocation {
        /// The GPU.
        ordinal: u32,
        /// First byte of the allocation.
        address: u64,
        /// Its bytes.
        length: u64,
    },
    /// It is a texture's or another opaque layout's.
    #[error("it is a CUDA array, which has no linear addresses")]
    Array,
    /// The driver does not let us at it.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

/// What a GPU is behind: the driver, or what takes its place in tests.
///
/// # Safety
/// Lanes must have the length that was asked for.
pub(crate) unsafe trait Backend: fmt::Debug + Send + Sync {
    /// Pins so much memory, and makes a stream.
    fn open_lane(&self, length: usize) -> Result<Box<dyn Lane>, CudaError>;
}

/// Pinned memory of the host, and copies between it and the GPU, in order.
///
/// # Safety
/// [`Lane::buffer`] must be valid for reads and writes of [`Lane::length`] bytes, and both the same as long as the
/// lane lives; nothing else may access it, but copies that were begun until [`Lane::wait`] has returned, also with an
/// error.
pub unsafe trait Lane: fmt::Debug + Send {
    /// Its first byte. Nobody else accesses it; it stays where it is as long as the lane lives.
    fn buffer(&self) -> *mut u8;

    /// Its bytes.
    fn length(&self) -> usize;

    /// Begins to copy from `offset` in the buffer to an address of the GPU.
    ///
    /// # Safety
    /// The target must be memory of a GPU that was registered and is meant; `offset` and `length` must be
    /// within the buffer, which nobody changes there before [`Lane::wait`] returns.
    unsafe fn write(&mut self, offset: usize, to: u64, length: usize) -> Result<(), CudaError>;

    /// Begins to copy from an address of the GPU to `offset` in the buffer.
    ///
    /// # Safety
    /// As of [`Lane::write`], and nobody reads the buffer there before [`Lane::wait`] returns.
    unsafe fn read(&mut self, from: u64, offset: usize, length: usize) -> Result<(), CudaError>;

    /// Begins to copy between two addresses of GPUs. The ranges do not overlap.
    ///
    /// # Safety
    /// Both must be memory of GPUs that was registered and is meant.
    unsafe fn copy(&mut self, from: u64, to: u64, length: usize) -> Result<(), CudaError>;

    /// Returns when all that was begun is done.
    fn wait(&mut self) -> Result<(), CudaError>;
}

/// A GPU whose memory is used.
#[derive(Debug)]
pub struct Gpu {
    ordinal: u32,
    backend: Box<dyn Backend>,
    pool: Pool,
}

impl Gpu {
    /// The GPU of this number, of which the backend has what it takes.
    pub(crate) fn new(ordinal: u32, backend: Box<dyn Backend>) -> Arc<Self> {
        Arc::new(Self { ordinal, backend, pool: Pool::default() })
    }

    /// Its number in this process.
    pub const fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its memory as a location.
    pub fn location(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    /// Pins so much memory of the host for copies to and from it.
    pub fn open_lane(&self, length: usize) -> Result<Box<dyn Lane>, CudaError> {
        self.backend.open_lane(length)
    }
}
