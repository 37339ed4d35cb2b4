//! What one side of a connection is going to do: work requests, drawn at random from a seed.

use millstream_roce::{Piece, SendOperation};

use crate::Rng;

/// Pieces of an operation: a part of what seeds mean, and so not the endpoint's limit.
const MAX_PIECES: usize = 4;

/// A kind of work request.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Kind {
    /// SEND.
    Send,
    /// SEND with immediate data.
    SendImmediate,
    /// WRITE.
    Write,
    /// WRITE with immediate data.
    WriteImmediate,
    /// READ.
    Read,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Send, Self::SendImmediate, Self::Write, Self::WriteImmediate, Self::Read];

    /// Whether it takes a receive request at the other side.
    pub const fn takes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImmediate | Self::WriteImmediate)
    }

    /// Whether it brings immediate data.
    pub const fn has_immediate(self) -> bool {
        matches!(self, Self::SendImmediate | Self::WriteImmediate)
    }
}

/// One work request. It moves the bytes at `offset` of a source buffer to the same offset of a
/// target buffer; no two of a plan overlap.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Operation {
    /// What it does.
    pub kind: Kind,
    /// Where its bytes are in the buffers.
    pub offset: usize,
    /// How many there are.
    pub length: u32,
    /// How many pieces the local side is in.
    pub pieces: usize,
    /// Whether success makes a completion.
    pub signaled: bool,
}

impl Operation {
    /// The bytes that it moves.
    pub fn range(&self) -> core::ops::Range<usize> {
        self.offset..self.offset + self.length as usize
    }

    /// Its bytes in a buffer at this address, in as many pieces as it says.
    pub(crate) fn gather(&self, key: u32, address: u64) -> Vec<Piece> {
        let mut list = [Piece::default(); MAX_PIECES];
        let count = self.pieces.clamp(1, MAX_PIECES);
        let share = self.length / count as u32;
        for (i, piece) in list[..count].iter_mut().enumerate() {
            let before = share * i as u32;
            let length = if i + 1 == count { self.length - before } else { share };
            let address = address + self.offset as u64 + u64::from(before);
            *piece = Piece { key, address, length };
        }
        list[..count].to_vec()
    }

    /// What to post, given the peer's buffer; `immediate` is used when the kind has one.
    pub(crate) fn request(&self, address: u64, remote_key: u32, immediate: u32) -> SendOperation {
        let remote_address = address + self.offset as u64;
        let immediate = self.kind.has_immediate().then_some(immediate);
        match self.kind {
            Kind::Send | Kind::SendImmediate => SendOperation::Send { immediate },
            Kind::Write | Kind::WriteImmediate => {
                SendOperation::Write { remote_address, remote_key, immediate }
            }
            Kind::Read => SendOperation::Read { remote_address, remote_key },
        }
    }
}

/// The work requests of one side, in order.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Plan {
    /// The work requests.
    pub operations: Vec<Operation>,
    /// Bytes that the buffers must have: all operations and a gap after each, which must stay as
    /// it is.
    pub buffer_length: usize,
}

impl Plan {
    /// Bytes between the ranges of two operations.
    const GAP: usize = 5;

    /// `count` operations of random kinds out of `kinds`, with 0 to `max_length` bytes each. Small
    /// lengths, and those around multiples of the path MTU, come often. With a `unit` other than
    /// 1, lengths are rounded up to its multiples, and none is 0.
    pub fn random(rng: &mut Rng, count: usize, kinds: &[Kind], max_length: u32, unit: u32) -> Self {
        let mut plan = Self::default();
        for index in 0..count {
            let length = match rng.below(8) {
                0 => rng.below(5),
                1 => (rng.below(5) * 1024 + rng.below(3)).saturating_sub(1),
                2 => (rng.below(5) * 4096 + rng.below(3)).saturating_sub(1),
                _ => rng.between(0, max_length.into()),
            };
            let last = index + 1 == count;
            let length = length.min(max_length.into()) as u32;
            plan.push(Operation {
                kind: kinds[rng.below(kinds.len() as u64) as usize],
                offset: 0,
                length: if unit > 1 { length.max(1).next_multiple_of(unit) } else { length },
                pieces: 1 + rng.below(MAX_PIECES as u64) as usize,
                signaled: rng.below(4) > 0 || last,
            });
        }
        plan
    }

    /// `count` operations of one kind and length.
    pub fn uniform(count: usize, kind: Kind, length: u32) -> Self {
        let mut plan = Self::default();
        for _ in 0..count {
            plan.push(Operation { kind, offset: 0, length, pieces: 1, signaled: true });
        }
        plan
    }

    /// Appends an operation; its offset is set.
    fn push(&mut self, operation: Operation) {
        let offset = self.buffer_length;
        self.operations.push(Operation { offset, ..operation });
        self.buffer_length = offset + operation.length as usize + Self::GAP;
    }

    /// Bytes that all operations move.
    pub fn bytes(&self) -> u64 {
        self.operations.iter().map(|operation| u64::from(operation.length)).sum()
    }

    /// The operations that take a receive request, by index.
    pub(crate) fn receives(&self) -> Vec<usize> {
        let takes = |index: &usize| self.operations[*index].kind.takes_receive();
        (0..self.operations.len()).filter(takes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_covers_its_buffer_without_overlap() {
        let plan = Plan::random(&mut Rng::new(1), 200, &Kind::ALL, 20_000, 1);
        let mut end = 0;
        for operation in &plan.operations {
            assert_eq!(operation.offset, end);
            end = operation.range().end + Plan::GAP;
            let list = operation.gather(1, 0x1000);
            let length: u32 = list.iter().map(|piece| piece.length).sum();
            assert_eq!(length, operation.length);
        }
        assert_eq!(plan.buffer_length, end);
        for kind in Kind::ALL {
            assert!(plan.operations.iter().any(|operation| operation.kind == kind), "{kind:?}");
        }
        assert!(plan.operations.last().is_some_and(|operation| operation.signaled));
    }
}
