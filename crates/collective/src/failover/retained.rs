//! What others may lack of a call whose end was told here.

use millstream_inc::CollectiveCall;
use millstream_inc::failover::{Lost, Side};

use crate::memory::Span;
use crate::tree::Work;

/// What is kept of the last call with a part on a tree.
#[derive(Debug, Default)]
pub(super) struct Retained {
    /// Its number, on the engine that it was of, and what it was.
    call: Option<(u64, CollectiveCall)>,
    pieces: Vec<Piece>,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    side: Side,
    /// Where in the vector it begins.
    offset: usize,
    /// Where in the bytes.
    start: usize,
    length: usize,
}

impl Retained {
    /// Keeps what others may lack of a call that is over, if it has a part on this tree and is not before the one that is
    /// kept.
    pub(super) fn keep(&mut self, lost: &Lost, work: &Work, sequence: u64, tree: u8) {
        if self.call.is_some_and(|(later, _)| later > sequence)
            || !lost.has_part(&work.call, sequence, tree)
        {
            return;
        }
        self.call = Some((sequence, work.call));
        self.pieces.clear();
        self.bytes.clear();
        let Self { pieces, bytes, .. } = self;
        lost.kept(&work.call, sequence, tree, |side, range| {
            let (offset, length) = (range.start as usize, (range.end - range.start) as usize);
            let start = bytes.len();
            bytes.resize(start + length, 0);
            let span = side_of(work, side);
            span.load(offset, &mut bytes[start..]);
            pieces.push(Piece { side, offset, start, length });
        });
    }

    /// Nothing any more: the tree is another one.
    pub(super) fn clear(&mut self) {
        self.call = None;
    }

    /// What it is of.
    pub(super) fn call(&self) -> Option<(u64, CollectiveCall)> {
        self.call
    }

    /// Copies bytes of a vector to the start of a span; `false` when not all of them are here.
    pub(super) fn fetch(&self, side: Side, offset: usize, length: usize, to: Span) -> bool {
        let mut found = 0;
        for piece in self.pieces.iter().filter(|piece| piece.side == side) {
            let start = piece.offset.max(offset);
            let end = (piece.offset + piece.length).min(offset + length);
            if start < end {
                let from = piece.start + start - piece.offset;
                to.store(start - offset, &self.bytes[from..from + end - start]);
                found += end - start;
            }
        }
        found == length
    }
}

/// A vector of a call.
pub(super) const fn side_of(work: &Work, side: Side) -> Span {
    match side {
        Side::Source => work.source,
        Side::Destination => work.destination,
    }
}
