//! Registered bytes of the library's own, for results that are sent on and those that come back.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

use millstream_verbs::{Access, RegionError};

use super::{Domains, Operand, Regions, Span, operand};

/// Bytes that are registered for reading and writing: what is sent for other memory, as that of all ranks of a host, and the
/// results of that. Collectives that use it are over before it goes.
pub(crate) struct Scratch {
    /// They go before the bytes do.
    regions: Option<Regions>,
    bytes: NonNull<u8>,
    length: usize,
}

// SAFETY: it owns its bytes.
unsafe impl Send for Scratch {}

impl Scratch {
    /// So many bytes, which is not 0, for the connections of these domains.
    pub(crate) fn new(domains: &Domains, length: usize) -> Result<Self, RegionError> {
        let bytes = Box::into_raw(vec![0_u8; length].into_boxed_slice()).cast::<u8>();
        // A pointer to a boxed slice is never null.
        let bytes = NonNull::new(bytes).unwrap_or(NonNull::dangling());
        let mut scratch = Self { regions: None, bytes, length };
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        // SAFETY: the bytes are ours until `drop`, where the regions go first, and never referred to: spans copy.
        scratch.regions = Some(unsafe { domains.register_memory(bytes.as_ptr(), length, access)? });
        Ok(scratch)
    }

    /// All of it, as work requests name it.
    pub(crate) fn operand(&self) -> Operand {
        operand(self.regions.as_ref())
    }

    /// From this byte on.
    pub(crate) fn operand_at(&self, offset: usize) -> Operand {
        debug_assert!(offset <= self.length);
        let whole = self.operand();
        Operand { address: whole.address + offset as u64, ..whole }
    }

    /// All of it, for as long as it lives: its owner ends what uses that before.
    pub(crate) fn span(&self) -> Span {
        self.part(0..self.length)
    }

    /// A part of it, for as long.
    pub(crate) fn part(&self, range: Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?}");
        // SAFETY: within the bytes, to which nobody refers.
        unsafe { Span::new(self.bytes.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.regions = None;
        let bytes = std::ptr::slice_from_raw_parts_mut(self.bytes.as_ptr(), self.length);
        // SAFETY: from a box of this length, and nobody else has it.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({})", self.length)
    }
}
