//! Registered memory of these commands.
//!
//! The device reads and writes it at any time, and so may the peer. So no reference to it ever
//! exists: bytes are copied in and out.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use anyhow::{Context, ensure};
use millstream_verbs::{Access, MemoryRegion, Piece, ProtectionDomain};

/// Counters for atomic operations must be aligned to 8 bytes, and hardware likes whole pages.
const PAGE: usize = 4096;

/// Memory that was registered for as long as it exists.
pub(super) struct Buffer {
    // Dropped before the memory: then nobody else knows of it any more.
    region: MemoryRegion,
    memory: Memory,
}

impl Buffer {
    /// Registers `length` bytes of zeros; at least one, as a region cannot be empty.
    pub(super) fn new(
        domain: &ProtectionDomain,
        length: usize,
        access: Access,
    ) -> anyhow::Result<Self> {
        let length = length.max(1);
        let memory = Memory::new(length)?;
        // SAFETY: the memory outlives the region by the order of the fields, and no reference to
        // its bytes is ever made.
        let region = unsafe { domain.register_memory(memory.pointer.as_ptr(), length, access) };
        let region = region.with_context(|| {
            format!("cannot register {length} bytes: is `ulimit -l` below that?")
        })?;
        Ok(Self { region, memory })
    }

    /// The list that names `length` of its bytes in a work request.
    pub(super) fn pieces(&self, offset: usize, length: u32) -> [Piece; 1] {
        let address = self.region.address() + offset as u64;
        let piece = Piece { key: self.region.key(), address, length };
        [piece]
    }

    /// The list that names all of it.
    pub(super) fn whole(&self) -> [Piece; 1] {
        self.pieces(0, self.memory.layout.size() as u32)
    }

    /// The virtual address of its first byte.
    pub(super) fn address(&self) -> u64 {
        self.region.address()
    }

    /// The key that opens it to a peer.
    pub(super) fn remote_key(&self) -> u32 {
        self.region.remote_key()
    }

    /// Copies `bytes` into it. What a request that names them sends meanwhile is unspecified.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) -> anyhow::Result<()> {
        let pointer = self.memory.at(offset, bytes.len())?;
        // SAFETY: `at` has found all the bytes within the memory, which `self` keeps. `bytes` is
        // other memory, as no reference to ours exists.
        unsafe { pointer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of it, as they are at the moment.
    pub(super) fn read(&self, offset: usize, bytes: &mut [u8]) -> anyhow::Result<()> {
        let pointer = self.memory.at(offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { pointer.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Owned memory, aligned to pages.
struct Memory {
    pointer: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    /// `length` zeros; it is not 0.
    fn new(length: usize) -> anyhow::Result<Self> {
        let explain = || format!("there is no memory for {length} bytes: choose a smaller --size");
        let layout = Layout::from_size_align(length, PAGE).ok().with_context(explain)?;
        ensure!(length > 0, "memory of no bytes");
        // SAFETY: the layout is not of size 0.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }).with_context(explain)?;
        Ok(Self { pointer, layout })
    }

    /// A pointer to `length` bytes from `offset` on.
    fn at(&self, offset: usize, length: usize) -> anyhow::Result<*mut u8> {
        let end = offset.checked_add(length);
        let available = self.layout.size();
        ensure!(
            end.is_some_and(|end| end <= available),
            "{length} bytes at {offset} are not within a buffer of {available}"
        );
        Ok(self.pointer.as_ptr().wrapping_add(offset))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout in `new`, and is freed nowhere else.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
    }
}
