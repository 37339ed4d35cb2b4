//! Memory of GPUs that we allocate.

use std::ptr;
use std::sync::Arc;

use super::context::Primary;
use super::driver::{Driver, open};
use super::{CudaError, Gpu};

/// Memory of a GPU, zeroed, that is freed when this is dropped.
#[derive(Debug)]
pub struct Allocation {
    address: u64,
    length: usize,
    primary: Primary,
    gpu: Arc<Gpu>,
}

impl Allocation {
    /// Allocates on the GPU with this number, as [`open`] does.
    pub fn new(ordinal: u32, length: usize) -> Result<Self, CudaError> {
        let gpu = open(ordinal)?;
        let driver = Driver::load()?;
        let primary = Primary::retain(driver, ordinal)?;
        let mut address = 0;
        primary.call("cuMemAlloc", |f| {
            // SAFETY: the pointer is to a number that lives; `Allocation` frees the memory.
            unsafe { (f.allocate)(&raw mut address, length) }
        })?;
        let allocation = Self { address, length, primary, gpu };
        driver.synchronous(address);
        // SAFETY: the memory has just been allocated, with this length.
        allocation.primary.call("cuMemsetD8", |f| unsafe { (f.fill)(address, 0, length) })?;
        allocation.settle()?;
        Ok(allocation)
    }

    /// Its address, which only the driver can use.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub const fn length(&self) -> usize {
        self.length
    }

    /// The GPU that it is of.
    pub const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Copies `bytes` into it by one call of the driver.
    ///
    /// # Panics
    /// When they do not fit there.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.at(offset, bytes.len());
        self.primary.call("cuMemcpyHtoD", |f| {
            // SAFETY: both ranges were checked to be there, and nobody writes to `bytes`.
            unsafe { (f.copy_in_now)(to, bytes.as_ptr().cast(), bytes.len()) }
        })?;
        self.settle()
    }

    /// Calls that return before they are done are done when this returns: they are of the default stream, for
    /// which lanes do not wait.
    fn settle(&self) -> Result<(), CudaError> {
        // SAFETY: null is the default stream.
        self.primary.call("cuStreamSynchronize", |f| unsafe { (f.synchronize)(ptr::null_mut()) })
    }

    /// Copies from it into `bytes` by one call of the driver.
    ///
    /// # Panics
    /// When it has not so many there.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = self.at(offset, bytes.len());
        self.primary.call("cuMemcpyDtoH", |f| {
            // SAFETY: as in `write`; nobody else has `bytes`.
            unsafe { (f.copy_out_now)(bytes.as_mut_ptr().cast(), from, bytes.len()) }
        })
    }

    fn at(&self, offset: usize, length: usize) -> u64 {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length), "out of range");
        self.address + offset as u64
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: it was allocated so, and this value was all that there is of it.
        let freed = self.primary.call("cuMemFree", |f| unsafe { (f.free)(self.address) });
        if let Err(error) = freed {
            tracing::debug!(%error, "memory of a GPU is not freed");
        }
    }
}
