//! Buffers of the engine's own: registered memory that safe code can use.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::{fmt, ptr};

use millstream_net::cuda::{Allocation, CopyError};
use millstream_net::guarded::{self, Caching};
use millstream_net::own_memory::Pages;
use millstream_net::shared_memory::SharedMemory;

use crate::engine::Inner;
use crate::memory::RawMemory;
use crate::transport::ANY_LOCATION;
use crate::{BufferError, RegisterError, TransferEngine};

impl TransferEngine {
    /// Allocates and registers zeroed, page-aligned memory; see
    /// [`TransferEngine::register_memory`]. From 2 MiB on it has huge pages, where the system gives any.
    pub fn allocate_buffer(
        &self,
        length: usize,
        location: &str,
        remote_accessible: bool,
    ) -> Result<Buffer, RegisterError> {
        if length == 0 {
            return Err(RegisterError::Empty);
        }
        let shared = remote_accessible && self.inner.shares_memory();
        let bytes = Bytes::allocate(length, shared).ok_or(RegisterError::OutOfMemory { length })?;
        let mut buffer = Buffer { bytes, registered: false, engine: Arc::clone(&self.inner) };
        let (pointer, shared) = (buffer.pointer(), buffer.bytes.shared());
        // SAFETY: `Buffer` frees the memory only after it has unregistered it, and gives out no
        // references to it.
        let memory = unsafe { RawMemory::new(pointer, length, shared) };
        self.inner.register(vec![memory], location, remote_accessible)?;
        buffer.registered = true;
        Ok(buffer)
    }
}

impl TransferEngine {
    /// Allocates and registers zeroed memory of the GPU with this number, at the location `cuda:N`. Loads and
    /// initialises the CUDA driver, if this process has not done so.
    pub fn allocate_gpu_buffer(
        &self,
        length: usize,
        ordinal: u32,
        remote_accessible: bool,
    ) -> Result<Buffer, RegisterError> {
        if length == 0 {
            return Err(RegisterError::Empty);
        }
        let refused = |source| RegisterError::GpuAllocation { ordinal, length, source };
        let allocation = Allocation::new(ordinal, length).map_err(refused)?;
        let gpu = Arc::clone(allocation.gpu());
        let (bytes, engine) = (Bytes::Gpu(allocation), Arc::clone(&self.inner));
        let mut buffer = Buffer { bytes, registered: false, engine };
        // SAFETY: as of `allocate_buffer`; nobody follows the pointer.
        let mut memory = unsafe { RawMemory::new(buffer.pointer(), length, None) };
        memory.set_gpu(gpu);
        self.inner.register(vec![memory], ANY_LOCATION, remote_accessible)?;
        buffer.registered = true;
        Ok(buffer)
    }
}

impl From<CopyError> for BufferError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Fault(fault) => Self::Fault(fault),
            CopyError::Driver(error) => Self::Gpu(error),
        }
    }
}

/// Memory of the engine's own, zeroed and page-aligned.
enum Bytes {
    Private(ManuallyDrop<Pages>),
    /// Other processes can map it.
    Shared(Arc<SharedMemory>),
    Gpu(Allocation),
}

impl Bytes {
    fn allocate(length: usize, shared: bool) -> Option<Self> {
        if shared {
            match SharedMemory::new(length) {
                Ok(memory) => return Some(Self::Shared(Arc::new(memory))),
                // As when there are no more descriptors: other processes have to copy.
                Err(error) => tracing::debug!(%error, length, "no shared memory"),
            }
        }
        Pages::new(length).ok().map(|pages| Self::Private(ManuallyDrop::new(pages)))
    }

    fn shared(&self) -> Option<Arc<SharedMemory>> {
        match self {
            Self::Private(_) | Self::Gpu(_) => None,
            Self::Shared(memory) => Some(Arc::clone(memory)),
        }
    }
}

/// Registered memory that the engine allocated. Dropping it unregisters it, waits until no transfer
/// touches it any more, and frees it.
///
/// There are no references to its bytes, since peers may change them at any time: they are copied
/// in and out, on any threads at a time. Each byte is copied as by a relaxed atomic access
/// ([`millstream_net::guarded`]), and so do transfers of this process, except what soft devices send. So a
/// copy made while someone writes the same bytes may hold old and new ones mixed, and nothing worse: there
/// is no data race. What a soft device sends is read by ordinary loads. To write the same bytes meanwhile
/// is a data race by the letter of the memory model; what arrives are old and new bytes, by a packet
/// whose checksum is right.
pub struct Buffer {
    bytes: Bytes,
    registered: bool,
    engine: Arc<Inner>,
}

// SAFETY: it owns its memory, and accesses it by copies only.
unsafe impl Send for Buffer {}
// SAFETY: as above; copies are of atomic accesses to single bytes, so that concurrent ones mix bytes, and
// are no data race. What soft devices send is not read so (docs/registration.md, "Data races").
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Address of its first byte: the `source` of requests.
    pub fn address(&self) -> u64 {
        self.pointer().expose_provenance() as u64
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        match &self.bytes {
            Bytes::Private(pages) => pages.length(),
            Bytes::Shared(memory) => memory.length(),
            Bytes::Gpu(memory) => memory.length(),
        }
    }

    fn pointer(&self) -> *mut u8 {
        match &self.bytes {
            Bytes::Private(pages) => pages.pointer().as_ptr(),
            Bytes::Shared(memory) => memory.pointer().as_ptr(),
            Bytes::Gpu(memory) => ptr::with_exposed_provenance_mut(memory.address() as usize),
        }
    }

    /// Copies `bytes` into it, `offset` bytes from its start.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), BufferError> {
        let to = self.range(offset, bytes.len())?;
        if let Bytes::Gpu(memory) = &self.bytes {
            let address = memory.address() + offset as u64;
            // SAFETY: as below; the memory is the GPU's, and lives.
            unsafe { memory.gpu().copy_in(bytes.as_ptr(), address, bytes.len())? };
            return Ok(());
        }
        // SAFETY: `range` has checked that the bytes lie in the buffer, to which there are no references.
        unsafe { guarded::copy(bytes.as_ptr(), to, bytes.len(), Caching::Through)? };
        Ok(())
    }

    /// Copies from `offset` bytes after its start into `bytes`, filling it.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), BufferError> {
        let from = self.range(offset, bytes.len())?;
        if let Bytes::Gpu(memory) = &self.bytes {
            let address = memory.address() + offset as u64;
            // SAFETY: as in `write`.
            unsafe { memory.gpu().copy_out(address, bytes.as_mut_ptr(), bytes.len())? };
            return Ok(());
        }
        // SAFETY: as in `write`.
        unsafe { guarded::copy(from, bytes.as_mut_ptr(), bytes.len(), Caching::Through)? };
        Ok(())
    }

    fn range(&self, offset: usize, length: usize) -> Result<*mut u8, BufferError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length() => Ok(self.pointer().wrapping_add(offset)),
            _ => Err(BufferError::OutOfRange {
                offset: offset as u64,
                length: length as u64,
                buffer_length: self.length() as u64,
            }),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("length", &self.length())
            .finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let unregistered = match self.registered {
            // It may be gone already: with its engine, or by the caller's own hand. Who is about to do that is waited for.
            true => self.engine.unregister(&[self.address()]),
            false => Ok(()),
        };
        match &mut self.bytes {
            Bytes::Private(pages) => {
                if matches!(unregistered, Err(RegisterError::InUse { .. })) {
                    // Another process may still write to it, so it is nobody else's.
                    return;
                }
                // SAFETY: this is the only place that drops it, and nobody uses it any more: the registration,
                // if any, has been dropped, which waits for those who do.
                unsafe { ManuallyDrop::drop(pages) };
            }
            // Whoever still has access to it keeps it.
            Bytes::Shared(_) => {}
            // Freed next. Other processes have no access to it but by devices, which have ended it.
            Bytes::Gpu(_) => {}
        }
    }
}
