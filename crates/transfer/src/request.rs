//! What a caller asks for.

use crate::SegmentId;

/// Which way the bytes go. The values are those of the C API.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum Opcode {
    /// From the target segment into local memory.
    Read = 0,
    /// From local memory into the target segment.
    Write = 1,
}

impl Opcode {
    pub(crate) const fn from_byte(byte: u8) -> Self {
        if byte == Self::Read as u8 { Self::Read } else { Self::Write }
    }
}

/// One contiguous piece to move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TransferRequest {
    /// Which way.
    pub opcode: Opcode,
    /// Address of the first byte in local memory, which must be registered: where a WRITE comes
    /// from and a READ goes to.
    pub source: u64,
    /// The remote segment.
    pub target: SegmentId,
    /// Virtual address of the first byte in the target's process, within one of the segment's
    /// buffers. [`crate::Segment::address_of`] makes it from an offset into a buffer. Of a segment that
    /// is a file: the offset in the file.
    pub target_offset: u64,
    /// Bytes. At least one.
    pub length: u64,
}
