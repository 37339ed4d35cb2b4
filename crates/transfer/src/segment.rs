//! Segments that are open, and the engine's own.

mod open;
mod table;
#[cfg(test)]
mod tests;
mod view;

use std::sync::Arc;

use millstream_metadata::BufferDesc;

pub(crate) use self::open::OpenSegment;
pub(crate) use self::table::SegmentTable;
pub(crate) use self::view::View;
use crate::BufferError;

/// The number of an open segment in its engine.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SegmentId(pub u32);

impl SegmentId {
    /// The engine's own segment.
    pub const LOCAL: Self = Self(0);
}

/// An open segment. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Segment {
    pub(crate) open: Arc<OpenSegment>,
}

/// A buffer of a segment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SegmentBuffer {
    /// Virtual address of its first byte, in its process.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// Where its memory is: `cpu:0`.
    pub location: String,
    /// What is wrong with it in the segment's descriptor, if anything: requests to it are refused.
    pub fault: Option<&'static str>,
}

impl Segment {
    /// Its number, for requests.
    pub fn id(&self) -> SegmentId {
        self.open.id
    }

    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.open.name
    }

    /// How its buffers are reached: `rdma`.
    pub fn protocol(&self) -> String {
        self.open.descriptor().protocol.clone()
    }

    /// Which start of its process this is, as a random number, when it was opened or refreshed.
    /// `None` where the peer does not say, as Mooncake does not.
    pub fn incarnation(&self) -> Option<u64> {
        self.open.descriptor().incarnation
    }

    /// Its buffers, as they were when it was opened or refreshed. One that makes no sense is among them, so that the others
    /// have their places ([`SegmentBuffer::fault`]).
    pub fn buffers(&self) -> Vec<SegmentBuffer> {
        let buffer = |buffer: &BufferDesc| SegmentBuffer {
            address: buffer.addr,
            // A bad one may say that it goes on beyond the last address.
            length: buffer.length.min(u64::MAX - buffer.addr),
            location: buffer.name.clone(),
            fault: buffer.fault,
        };
        self.open.descriptor().buffers.iter().map(buffer).collect()
    }

    /// The address, as requests want it, of the byte at `offset` from the start of a buffer (0: the
    /// first), from where `length` bytes lie in the buffer, or in it and those that follow it in the same
    /// piece of memory ([`Segment::length_from`]).
    pub fn address_of(&self, buffer: usize, offset: u64, length: u64) -> Result<u64, BufferError> {
        let view = self.open.view();
        let count = view.descriptor.buffers.len();
        let found = view.descriptor.buffers.get(buffer);
        let found = found.ok_or(BufferError::NoBuffer { index: buffer, count })?;
        if let Some(what) = view.descriptor.unusable(buffer) {
            return Err(BufferError::Unusable(what));
        }
        let buffer_length = match offset.checked_add(length) {
            Some(end) if end <= found.length => return Ok(found.addr + offset),
            _ => view.length_from(buffer),
        };
        match offset.checked_add(length) {
            Some(end) if end <= buffer_length => Ok(found.addr + offset),
            _ => Err(BufferError::OutOfRange { offset, length, buffer_length }),
        }
    }

    /// Bytes from the start of a buffer to the end of the piece of memory that it is of, all of which one
    /// request can have: memory whose pages are on several NUMA nodes, or that is several regions of each
    /// device, is as many buffers. 0 when there is no such buffer.
    pub fn length_from(&self, buffer: usize) -> u64 {
        self.open.view().length_from(buffer)
    }
}
