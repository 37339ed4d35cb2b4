//! Registered bytes of one connection, for control messages.

use std::ptr::NonNull;

use millstream_verbs::{Access, MemoryRegion, ProtectionDomain, RegionError};

use super::Span;

/// Room for control messages: descriptors out, aborts in.
pub(crate) struct ControlBlock<const BYTES: usize> {
    /// Goes before the bytes do.
    region: Option<MemoryRegion>,
    bytes: NonNull<[u8; BYTES]>,
}

// SAFETY: it owns its bytes.
unsafe impl<const BYTES: usize> Send for ControlBlock<BYTES> {}

impl<const BYTES: usize> ControlBlock<BYTES> {
    pub(crate) fn new(domain: &ProtectionDomain) -> Result<Self, RegionError> {
        let bytes = NonNull::from(Box::leak(Box::new([0; BYTES])));
        let mut block = Self { region: None, bytes };
        // SAFETY: the bytes are ours until `drop`, where the region goes first, and never referred
        // to: `load` and `store` copy. Remotes cannot write here, only receives of ours can.
        let region =
            unsafe { domain.register_memory(bytes.as_ptr().cast(), BYTES, Access::LOCAL_WRITE)? };
        block.region = Some(region);
        Ok(block)
    }

    /// The key of its region, and its address.
    pub(crate) fn place(&self) -> (u32, u64) {
        self.region.as_ref().map_or((0, 0), |region| (region.key(), region.address()))
    }

    /// Copies what it holds from an offset on to a part of a caller's memory, as far as that goes.
    pub(crate) fn copy_to(&self, offset: usize, destination: Span, at: usize, length: usize) {
        let there = destination.length.saturating_sub(at);
        let length = length.min(there).min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation, as in `load`. Who made the span promised that so many bytes there can be
        // written; the allocation was never given away, so they are others.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            let to = destination.address.as_ptr().add(at);
            std::ptr::copy_nonoverlapping(start, to, length);
        }
    }

    /// Copies a caller's memory to it, from an offset on, as far as there is room.
    pub(crate) fn copy_from(&mut self, offset: usize, source: Span) {
        let length = source.length.min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation. Who made the span promised that so many bytes there can be read; the
        // allocation was never given away, so they are others.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(source.address.as_ptr(), start, length);
        }
    }

    /// Copies what it holds now, from an offset on. What is beyond its end is left out.
    pub(crate) fn load(&self, offset: usize, bytes: &mut [u8]) {
        let length = bytes.len().min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation, which is initialised, and `bytes` is another one. What the device may
        // be writing belongs to a receive that is not complete; a message is loaded when it is.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(start, bytes.as_mut_ptr(), length);
        }
    }

    /// Copies bytes to it, from an offset on. Those beyond its end are left out.
    pub(crate) fn store(&mut self, offset: usize, bytes: &[u8]) {
        let length = bytes.len().min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation, and `bytes` is another one.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, length);
        }
    }
}

impl<const BYTES: usize> Drop for ControlBlock<BYTES> {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: from the box in `new`, and nobody else has it.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}
