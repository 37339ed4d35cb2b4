//! Registered memory. All `unsafe` of this crate is here: memory that a caller promises, and
//! buffers of the engine's own.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, PoisonError, RwLock};

use millstream_verbs::{Access, MemoryRegion, ProtectionDomain, RegionError};

use crate::engine::Inner;
use crate::regions::RegionMap;
use crate::transport::Registration;
use crate::{BufferError, Opcode, RegisterError, TransferEngine};

/// Alignment of the engine's own buffers: a page.
const PAGE: usize = 4096;

/// Memory that stays valid as long as this value, by the promise made to [`RawMemory::new`].
#[derive(Debug)]
pub(crate) struct RawMemory {
    pointer: *mut u8,
    length: usize,
}

// SAFETY: the promise made to `new` holds on every thread, and what the methods do with the memory
// is what a device would do.
unsafe impl Send for RawMemory {}
// SAFETY: as above.
unsafe impl Sync for RawMemory {}

impl RawMemory {
    /// # Safety
    /// As long as the value or a [`MemoryRegion`] made from it lives, the bytes must stay mapped and
    /// writable, and no reference may be held to them that conflicts with reading or writing them
    /// at any time, from any thread.
    unsafe fn new(pointer: *mut u8, length: usize) -> Self {
        Self { pointer, length }
    }

    /// Registers it with a device.
    pub(crate) fn register(
        &self,
        domain: &ProtectionDomain,
        access: Access,
    ) -> Result<MemoryRegion, RegionError> {
        // SAFETY: this is what `new` asked its caller to promise; the caller there keeps the region
        // with the value (`Region`), and drops the region first.
        unsafe { domain.register_memory(self.pointer, self.length, access) }
    }
}

/// A piece of registered memory, and what each transport keeps with it.
pub(crate) struct Region {
    /// Dropped before `memory`: fields are dropped in their order.
    pub(crate) registrations: Vec<Registration>,
    pub(crate) memory: RawMemory,
    pub(crate) location: String,
    pub(crate) remote: bool,
}

/// All registered memory of an engine.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) regions: RwLock<RegionMap<Region>>,
}

impl Memory {
    /// Copies within registered memory: a WRITE from `source` to `target`, a READ the other way.
    /// `false` when one of the ranges is not registered (any more).
    pub(crate) fn copy(&self, opcode: Opcode, source: u64, target: u64, length: u32) -> bool {
        // Held over the copy: whoever unregisters waits.
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let pointer = |address: u64| {
            let (first, region) = regions.find(address, length.into())?;
            Some(region.memory.pointer.wrapping_add((address - first) as usize))
        };
        let (Some(source), Some(target)) = (pointer(source), pointer(target)) else {
            return false;
        };
        let (from, to) = match opcode {
            Opcode::Write => (source, target),
            Opcode::Read => (target, source),
        };
        // SAFETY: `find` has found all `length` bytes of both ranges within registered memory,
        // which stays valid while `regions` is locked. The ranges may overlap.
        unsafe { ptr::copy(from, to, length as usize) };
        true
    }
}

impl TransferEngine {
    /// Registers memory, so that transfers can use it and, if it is `remote_accessible`, peers can
    /// read and write it. `location` names where it is (`cpu:0`); `"*"` leaves that open.
    ///
    /// # Safety
    /// Until [`TransferEngine::unregister_memory`] has returned for it, or the engine and all its
    /// buffers have been dropped, the bytes must stay mapped and writable, and no Rust reference
    /// may be held to them that conflicts with what transfers and peers do: peers read and write at
    /// any time. [`TransferEngine::allocate_buffer`] needs no such promise.
    pub unsafe fn register_memory(
        &self,
        address: *mut u8,
        length: usize,
        location: &str,
        remote_accessible: bool,
    ) -> Result<(), RegisterError> {
        // SAFETY: the caller promises it.
        let memory = unsafe { RawMemory::new(address, length) };
        let address = address.expose_provenance() as u64;
        self.inner.register(address, length as u64, memory, location, remote_accessible)
    }

    /// Allocates and registers zeroed, page-aligned memory; see
    /// [`TransferEngine::register_memory`].
    pub fn allocate_buffer(
        &self,
        length: usize,
        location: &str,
        remote_accessible: bool,
    ) -> Result<Buffer, RegisterError> {
        if length == 0 {
            return Err(RegisterError::Empty);
        }
        let layout = Layout::from_size_align(length, PAGE)
            .map_err(|_| RegisterError::OutOfMemory { length })?;
        // SAFETY: the layout is not of size 0.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or(RegisterError::OutOfMemory { length })?;
        let mut buffer =
            Buffer { pointer, layout, registered: false, engine: Arc::clone(&self.inner) };
        // SAFETY: `Buffer` frees the memory only after it has unregistered it, and gives out no
        // references to it.
        let memory = unsafe { RawMemory::new(pointer.as_ptr(), length) };
        let address = buffer.address();
        self.inner.register(address, length as u64, memory, location, remote_accessible)?;
        buffer.registered = true;
        Ok(buffer)
    }
}

/// Registered memory that the engine allocated. Dropping it unregisters it, waits until no transfer
/// touches it any more, and frees it.
///
/// There are no references to its bytes, since peers may change them at any time: they are copied
/// in and out. A copy made while someone writes the same bytes may hold old and new ones mixed.
pub struct Buffer {
    pointer: NonNull<u8>,
    layout: Layout,
    registered: bool,
    engine: Arc<Inner>,
}

// SAFETY: it owns its memory, and accesses it by copies only.
unsafe impl Send for Buffer {}
// SAFETY: as above; concurrent copies mix bytes but touch nothing else.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Address of its first byte: the `source` of requests.
    pub fn address(&self) -> u64 {
        self.pointer.as_ptr().expose_provenance() as u64
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.layout.size()
    }

    /// Copies `bytes` into it, `offset` bytes from its start.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), BufferError> {
        let to = self.range(offset, bytes.len())?;
        // SAFETY: `range` has checked that the bytes lie in the buffer, which `bytes` cannot
        // overlap, as there are no references to it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies from `offset` bytes after its start into `bytes`, filling it.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), BufferError> {
        let from = self.range(offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn range(&self, offset: usize, length: usize) -> Result<*mut u8, BufferError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length() => Ok(self.pointer.as_ptr().wrapping_add(offset)),
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
        if self.registered {
            // It may be gone already: with its engine, or by the caller's own hand.
            let _ = self.engine.unregister(self.address());
        }
        // SAFETY: allocated with this layout, and nobody uses it any more: the registration, if
        // any, has been dropped, which waits for those who do.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Config, SegmentId, TransferRequest};

    #[test]
    fn memory_of_the_caller() {
        let engine = TransferEngine::new(Config::new("127.0.0.1".parse().unwrap())).unwrap();
        let mut memory = vec![0u8; 3000].into_boxed_slice();
        memory[..1000].fill(5);
        let pointer = memory.as_mut_ptr();
        let part = |offset: usize| pointer.wrapping_add(offset);
        let register = |offset, length| {
            // SAFETY: `memory` is not used otherwise until all of it has been unregistered.
            unsafe { engine.register_memory(part(offset), length, "cpu:0", true) }
        };
        register(0, 1000).unwrap();
        register(1000, 2000).unwrap();
        assert_eq!(register(0, 1000).unwrap_err().code(), -7);
        assert_eq!(register(999, 1).unwrap_err().code(), -7);
        assert_eq!(register(0, 0).unwrap_err().code(), -1);
        let address = |offset| part(offset).expose_provenance() as u64;
        let request = TransferRequest {
            opcode: Opcode::Write,
            source: address(0),
            target: SegmentId::LOCAL,
            target_offset: address(1500),
            length: 1000,
        };
        engine.submit_and_wait(&[request], Duration::from_secs(60)).unwrap();
        let across = TransferRequest { length: 1001, ..request };
        let error = engine.submit_and_wait(&[across], Duration::from_secs(60)).unwrap_err();
        assert_eq!(error.code(), -3, "two pieces are not one: {error}");
        engine.unregister_memory(part(0)).unwrap();
        assert_eq!(engine.unregister_memory(part(0)).unwrap_err().code(), -3);
        engine.unregister_memory(part(1000)).unwrap();
        assert!(memory[1500..2500].iter().all(|&byte| byte == 5));
        assert!(memory[2500..].iter().all(|&byte| byte == 0));
    }
}
