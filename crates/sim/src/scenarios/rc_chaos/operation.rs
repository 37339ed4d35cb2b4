//! One work request of a run: what it does, where its bytes lie, and what became of it.

use millstream_roce::{
    ATOMIC_LENGTH, AtomicOperation, Instant, MAX_INLINE, MAX_SCATTER_GATHER, Piece,
};

use super::draw::pick;
use super::world::Role;
use crate::Rng;

/// What a work request does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Send,
    SendImmediate,
    /// It ends the access of remotes to a region of the target.
    SendInvalidate,
    Write,
    WriteImmediate,
    Read,
    CompareSwap,
    FetchAdd,
}

impl Kind {
    pub(super) const ALL: [Self; 8] = [
        Self::Send,
        Self::SendImmediate,
        Self::SendInvalidate,
        Self::Write,
        Self::WriteImmediate,
        Self::Read,
        Self::CompareSwap,
        Self::FetchAdd,
    ];

    /// Whether it takes a receive request at the other end.
    pub(super) const fn takes_receive(self) -> bool {
        self.is_send() || matches!(self, Self::WriteImmediate)
    }

    pub(super) const fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendImmediate | Self::SendInvalidate)
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
/// the message or in the reverse. Of a short message some are empty.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Layout {
    pub(super) count: u8,
    pub(super) reversed: bool,
}

impl Layout {
    pub(super) const ONE: Self = Self { count: 1, reversed: false };

    pub(super) fn draw(rng: &mut Rng) -> Self {
        let several = rng.below(3) == 0;
        let most = *pick(rng, &[4, MAX_SCATTER_GATHER as u64]);
        let layout = Self { count: rng.between(1, most) as u8, reversed: rng.below(2) == 0 };
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
    pub(super) fn pieces(self, key: u32, address: u64, length: u32) -> Vec<Piece> {
        let piece = |(at, run)| Piece { key, address: address + u64::from(at), length: run };
        self.runs(length).map(piece).take(usize::from(self.count)).collect()
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
    /// Where its slot is in its region at the initiator, and in that at the target.
    pub(super) offsets: [u32; 2],
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
    /// It brings its bytes along.
    pub(super) inline: bool,
    /// Which region a SEND with invalidate is to invalidate. Of [`Role::Inbox`], remotes may not.
    pub(super) invalidates: Role,
    /// It names a key that no region has.
    pub(super) unknown_key: bool,
    /// It is posted whatever becomes of the region that it names.
    pub(super) reckless: bool,
    /// The key that it names.
    pub(super) key: u32,
    /// A request before it invalidates that key.
    pub(super) doomed: bool,
    /// The region that it was to invalidate is invalidated.
    pub(super) invalidated: bool,
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
        let length = if kind.is_atomic() { ATOMIC_LENGTH } else { length };
        let reckless = rng.below(20) == 0;
        let wrong_key = kind == Kind::SendInvalidate && rng.below(40) == 0;
        let invalidates = match wrong_key {
            true => Role::Inbox,
            false => *pick(rng, &[Role::Target, Role::Readable, Role::Counters]),
        };
        Self {
            kind,
            length,
            offsets: [0; 2],
            layout: Layout::draw(rng),
            receive_layout: Layout::draw(rng),
            signaled: rng.below(4) > 0,
            solicited: rng.below(8) == 0,
            // What is read must be there before nobody may read it any more.
            fence: rng.below(4) == 0 || kind == Kind::SendInvalidate && !reckless,
            short: false,
            inline: !kind.reads() && length as usize <= MAX_INLINE && rng.below(2) == 0,
            invalidates,
            unknown_key: rng.below(2) == 0 && wrong_key,
            reckless,
            key: 0,
            doomed: false,
            invalidated: false,
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

    /// Names no key that is not to be named.
    pub(super) fn heed(&mut self) {
        self.reckless = false;
        self.unknown_key = false;
        self.fence |= self.kind == Kind::SendInvalidate;
        if self.invalidates == Role::Inbox {
            self.invalidates = Role::Target;
        }
    }

    /// The initiator's memory that it names.
    pub(super) const fn local(&self) -> Option<Role> {
        match self.kind {
            Kind::Read | Kind::CompareSwap | Kind::FetchAdd => Some(Role::Sink),
            _ if self.inline => None,
            _ => Some(Role::Source),
        }
    }

    /// The target's memory that it works on.
    pub(super) const fn remote(&self) -> Role {
        match self.kind {
            Kind::Send | Kind::SendImmediate | Kind::SendInvalidate => Role::Inbox,
            Kind::Write | Kind::WriteImmediate => Role::Target,
            Kind::Read => Role::Readable,
            Kind::CompareSwap | Kind::FetchAdd => Role::Counters,
        }
    }

    /// The target's memory whose key it names, if it names one.
    pub(super) const fn names(&self) -> Option<Role> {
        match self.kind {
            Kind::Send | Kind::SendImmediate => None,
            Kind::SendInvalidate => Some(self.invalidates),
            _ => Some(self.remote()),
        }
    }

    /// Whether it must fail for the key that it names.
    pub(super) fn has_wrong_key(&self) -> bool {
        self.kind == Kind::SendInvalidate && self.invalidates == Role::Inbox
    }

    /// Whether everything that it was to do at the target is done.
    pub(super) fn is_done(&self) -> bool {
        self.applied == self.length && (self.kind != Kind::SendInvalidate || self.invalidated)
    }

    /// Where its bytes arrive: how they lie there.
    pub(super) fn arrival_layout(&self) -> Layout {
        match self.kind {
            Kind::Send | Kind::SendImmediate | Kind::SendInvalidate => self.receive_layout,
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
        for count in [1, 2, 3, 4, 16] {
            for reversed in [false, true] {
                let layout = Layout { count, reversed };
                for length in [0, 1, 3, 4, 10, 1000] {
                    let mut places: Vec<u32> =
                        (0..length).map(|offset| layout.place(length, offset).0).collect();
                    let pieces = layout.pieces(1, 100, length);
                    assert_eq!(pieces.iter().map(|piece| piece.length).sum::<u32>(), length);
                    if let (Some(piece), Some(place)) =
                        (pieces.iter().find(|piece| piece.length > 0), places.first())
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
