//! What a rank has sent in place, until its results are there.
//!
//! A result may be written over what this rank has contributed to it, in pieces, and the switch be lost in between. So of
//! the segments that are under way a copy is kept: a window of them at most.

use millstream_inc::{Collective, CollectiveCall};

use crate::memory::Span;

/// Copies of segments.
#[derive(Debug)]
pub(super) struct Overwritten {
    window: usize,
    segment_bytes: usize,
    /// One after the other; empty before the first call that needs it.
    bytes: Vec<u8>,
    /// What each holds.
    segments: Vec<Segment>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    /// Its number and one: 0 is none.
    after: u64,
    /// Where it is from in the source.
    offset: usize,
    length: usize,
}

/// Whether results of a call may be written over bytes of the source that they differ from.
pub(super) fn overwrites(call: &CollectiveCall, source: Span, destination: Span) -> bool {
    let combines = matches!(
        call.collective,
        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
    );
    combines && source.overlaps(0, source.length(), destination)
}

impl Overwritten {
    pub(super) const fn new(window: u32, segment_bytes: u32) -> Self {
        let (window, segment_bytes) = (window as usize, segment_bytes as usize);
        Self { window, segment_bytes, bytes: Vec::new(), segments: Vec::new() }
    }

    /// Whether it has room, and memory for it.
    #[cfg(test)]
    pub(super) fn holds(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// Makes room, the first time.
    pub(super) fn prepare(&mut self) {
        if self.segments.is_empty() {
            self.bytes.resize(self.window * self.segment_bytes, 0);
            self.segments.resize(self.window, Segment::default());
        }
    }

    /// Copies a segment that is about to be sent, from an offset of the source on.
    pub(super) fn keep(&mut self, segment: u64, source: Span, offset: usize, length: usize) {
        let Some(slot) = segment.checked_rem(self.segments.len() as u64) else { return };
        let start = slot as usize * self.segment_bytes;
        let Some(bytes) = self.bytes.get_mut(start..start + length) else { return };
        source.load(offset, bytes);
        self.segments[slot as usize] = Segment { after: segment + 1, offset, length };
    }

    /// Puts segments from this one on back where they are from.
    pub(super) fn restore(&self, first: u64, source: Span) {
        for (slot, segment) in self.segments.iter().enumerate() {
            let start = slot * self.segment_bytes;
            if segment.after > first
                && let Some(bytes) = self.bytes.get(start..start + segment.length)
            {
                source.store(segment.offset, bytes);
            }
        }
    }
}
