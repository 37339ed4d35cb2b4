//! One work request of a run: what it does, where its bytes lie, and what became of it.

use millstream_roce::{ATOMIC_LENGTH, AtomicOperation, Instant, Piece, ScatterGather};

use crate::Rng;

/// What a work request does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Send,
    SendImmediate,
    Write,
    WriteImmediate,
    Read,
    CompareSwap,
    FetchAdd,
}

impl Kind {
    pub(super) const ALL: [Self; 7] = [
        Self::Send,
        Self::SendImmediate,
        Self::Write,
        Self::WriteImmediate,
        Self::Read,
        Self::CompareSwap,
        Self::FetchAdd,
    ];

    /// Whether it takes a receive request at the other end.
    pub(super) const fn takes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImmediate | Self::WriteImmediate)
    }

    pub(super) const fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendImmediate)
    }

    pub(super) const fn has_immediate(self) -> bool {
        matches!(self, Self::SendImmediate | Self::WriteImmediate)
    }

    /// Whether its bytes come to the initiator.
    pub(super) const fn reads(self) -> bool {
        matches!(self, Self::Read) || self.is_atomic()
    }

    pub(super) const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }
}

/// How a list of pieces lies in its slot: `count` runs of about the same length, in the order of
/// the message or in the reverse.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Layout {
    pub(super) count: u8,
    pub(super) reversed: bool,
}

impl Layout {
    const ONE: Self = Self { count: 1, reversed: false };

    fn draw(rng: &mut Rng) -> Self {
        let several = rng.below(3) == 0;
        let layout = Self { count: rng.between(1, 4) as u8, reversed: rng.below(2) == 0 };
        if several { layout } else { Self::ONE }
    }

    /// The runs in the order of the message: offset in the slot, and length.
    pub(super) fn runs(self, length: u32) -> impl Iterator<Item = (u32, u32)> {
        let count = u32::from(self.count);
        let share = length / count;
        (0..count).map(move |i| {
            let before = share * i;
            let run = if i + 1 == count { length - before } else { share };
            (if self.reversed { length - before - run } else { before }, run)
        })
    }

    /// Where in the slot a byte of the message lies, and how many follow it there.
    pub(super) fn place(self, length: u32, mut offset: u32) -> (u32, u32) {
        for (at, run) in self.runs(length) {
            if offset < run {
                return (at + offset, run - offset);
            }
            offset -= run;
        }
        (length, 0)
    }

    /// The pieces of a slot at this address.
    pub(super) fn pieces(self, key: u32, address: u64, length: u32) -> ScatterGather {
        let mut list = [Piece::default(); 4];
        for (piece, (at, run)) in list.iter_mut().zip(self.runs(length)) {
            *piece = Piece { key, address: address + u64::from(at), length: run };
        }
        ScatterGather::new(&list[..usize::from(self.count)]).unwrap_or_default()
    }
}

/// What became of a work request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    /// It is not posted.
    Planned,
    /// It is posted, and has not ended.
    Posted,
    Succeeded,
    /// It ended badly, or its queue pair was reset under it: nobody knows what it did.
    InDoubt,
}

/// A work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    pub(super) length: u32,
    /// Where its slot is in the regions of its stream.
    pub(super) offset: u32,
    /// How the initiator's bytes lie.
    pub(super) layout: Layout,
    /// How the receive request's bytes lie.
    pub(super) receive_layout: Layout,
    pub(super) signaled: bool,
    pub(super) solicited: bool,
    /// It waits for READs and atomic operations before it.
    pub(super) fence: bool,
    /// The receive request for it is too short.
    pub(super) short: bool,
    pub(super) outcome: Outcome,
    /// The life of the connection that it was posted in.
    pub(super) life: u32,
    pub(super) posted_at: Instant,
    /// Bytes that have arrived where they were to go.
    pub(super) applied: u32,
    /// They were there, and went with their host.
    pub(super) erased: bool,
    /// What an atomic operation is to do, and to which counter.
    pub(super) atomic: AtomicOperation,
    pub(super) counter: usize,
    /// What the counter was, once it is done.
    pub(super) original: Option<u64>,
}

/// Counters of a stream.
pub(super) const COUNTERS: usize = 2;

impl Operation {
    pub(super) fn new(kind: Kind, length: u32, rng: &mut Rng) -> Self {
        // Few values, so that many comparisons come out true.
        let (small, other) = (rng.below(4), rng.below(4));
        let atomic = match kind {
            Kind::CompareSwap => AtomicOperation::CompareSwap { compare: small, swap: other },
            _ => AtomicOperation::FetchAdd { add: if other == 0 { u64::MAX } else { small } },
        };
        Self {
            kind,
            length: if kind.is_atomic() { ATOMIC_LENGTH } else { length },
            offset: 0,
            layout: Layout::draw(rng),
            receive_layout: Layout::draw(rng),
            signaled: rng.below(4) > 0,
            solicited: rng.below(8) == 0,
            fence: rng.below(4) == 0,
            short: false,
            outcome: Outcome::Planned,
            life: 0,
            posted_at: Instant::ZERO,
            applied: 0,
            erased: false,
            atomic,
            counter: rng.below(COUNTERS as u64) as usize,
            original: None,
        }
    }

    /// Where its bytes arrive: how they lie there.
    pub(super) fn arrival_layout(&self) -> Layout {
        match self.kind {
            Kind::Send | Kind::SendImmediate => self.receive_layout,
            Kind::Read | Kind::CompareSwap | Kind::FetchAdd => self.layout,
            Kind::Write | Kind::WriteImmediate => Layout::ONE,
        }
    }

    /// Bytes of the place where they arrive.
    pub(super) fn arrival_length(&self) -> u32 {
        if self.is_short() { self.length / 2 } else { self.length }
    }

    /// Whether it must fail for want of room.
    pub(super) fn is_short(&self) -> bool {
        self.short && self.length > 0 && self.kind.is_send()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_the_slot() {
        for count in 1..=4 {
            for reversed in [false, true] {
                let layout = Layout { count, reversed };
                for length in [0, 1, 3, 4, 10, 1000] {
                    let mut places: Vec<u32> =
                        (0..length).map(|offset| layout.place(length, offset).0).collect();
                    let pieces = layout.pieces(1, 100, length);
                    assert_eq!(pieces.length(), u64::from(length));
                    if let (Some(piece), Some(place)) =
                        (pieces.pieces().iter().find(|piece| piece.length > 0), places.first())
                    {
                        assert_eq!(piece.address, 100 + u64::from(*place));
                    }
                    places.sort_unstable();
                    assert!(places.into_iter().eq(0..length));
                }
            }
        }
    }
}
