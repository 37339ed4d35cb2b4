//! Lanes of the driver.

use std::ptr;

use super::context::Primary;
use super::ffi::{self, Stream};
use super::{Backend, CudaError, Lane};

// SAFETY: the driver pins so many bytes, or fails.
unsafe impl Backend for Primary {
    fn open_lane(&self, length: usize) -> Result<Box<dyn Lane>, CudaError> {
        let pinned = Pinned::allocate(self, length)?;
        let mut stream = ptr::null_mut();
        self.call("cuStreamCreate", |f| {
            // SAFETY: the pointer is to one that lives; `DriverLane` destroys the stream.
            unsafe { (f.create_stream)(&raw mut stream, ffi::NON_BLOCKING) }
        })?;
        Ok(Box::new(DriverLane { stream, pinned }))
    }
}

/// Pinned memory of the host.
#[derive(Debug)]
struct Pinned {
    pointer: *mut u8,
    length: usize,
    primary: Primary,
}

// SAFETY: it owns its memory, which any thread may access and free.
unsafe impl Send for Pinned {}

impl Pinned {
    fn allocate(primary: &Primary, length: usize) -> Result<Self, CudaError> {
        let mut pointer = ptr::null_mut();
        primary.call("cuMemHostAlloc", |f| {
            // SAFETY: the pointer is to one that lives; `Pinned` frees the memory.
            unsafe { (f.allocate_host)(&raw mut pointer, length, ffi::PORTABLE) }
        })?;
        Ok(Self { pointer: pointer.cast(), length, primary: primary.clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was allocated so, and nobody uses it any more. The driver waits for copies.
        let freed =
            self.primary.call("cuMemFreeHost", |f| unsafe { (f.free_host)(self.pointer.cast()) });
        if let Err(error) = freed {
            tracing::debug!(%error, "pinned memory is not freed");
        }
    }
}

/// A lane of the driver.
#[derive(Debug)]
struct DriverLane {
    stream: Stream,
    pinned: Pinned,
}

// SAFETY: a stream may be used on any thread, here on one at a time.
unsafe impl Send for DriverLane {}

impl DriverLane {
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        debug_assert!(offset + length <= self.pinned.length);
        self.pinned.pointer.wrapping_add(offset)
    }
}

// SAFETY: the memory is pinned as long as `Pinned` lives, and nobody else's. `wait` waits for its stream, on which all
// copies are; when that fails, the context is lost, and with it what was under way.
unsafe impl Lane for DriverLane {
    fn buffer(&self) -> *mut u8 {
        self.pinned.pointer
    }

    fn length(&self) -> usize {
        self.pinned.length
    }

    unsafe fn write(&mut self, offset: usize, to: u64, length: usize) -> Result<(), CudaError> {
        let from = self.at(offset, length).cast();
        self.pinned.primary.call("cuMemcpyHtoDAsync", |f| {
            // SAFETY: the buffer is pinned as long as `self` lives; the rest is the caller's promise.
            unsafe { (f.copy_in)(to, from, length, self.stream) }
        })
    }

    unsafe fn read(&mut self, from: u64, offset: usize, length: usize) -> Result<(), CudaError> {
        let to = self.at(offset, length).cast();
        self.pinned.primary.call("cuMemcpyDtoHAsync", |f| {
            // SAFETY: as in `write`.
            unsafe { (f.copy_out)(to, from, length, self.stream) }
        })
    }

    unsafe fn copy(&mut self, from: u64, to: u64, length: usize) -> Result<(), CudaError> {
        self.pinned.primary.call("cuMemcpyDtoDAsync", |f| {
            // SAFETY: the caller's promise.
            unsafe { (f.copy_within)(to, from, length, self.stream) }
        })
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        self.pinned.primary.call("cuStreamSynchronize", |f| {
            // SAFETY: the stream lives as long as `self`.
            unsafe { (f.synchronize)(self.stream) }
        })
    }
}

impl Drop for DriverLane {
    fn drop(&mut self) {
        let _ = self.wait();
        let destroyed = self.pinned.primary.call("cuStreamDestroy", |f| {
            // SAFETY: nothing is under way on it, and nobody uses it any more.
            unsafe { (f.destroy_stream)(self.stream) }
        });
        if let Err(error) = destroyed {
            tracing::debug!(%error, "a stream is not destroyed");
        }
    }
}
