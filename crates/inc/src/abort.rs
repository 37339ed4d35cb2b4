//! Why a communicator ended, and the message that tells its hosts.
//!
//! ```text
//!  0  magic "MSIA"      4  version   5  kind   6  detail   7  0
//!  8  rank, 4 bytes    12  reference rank or code, 4 bytes
//! 16  sequence         24  expected            32  found      8 bytes each
//! ```
//!
//! Little-endian. `detail` is a field of the descriptor or the kind of violation. Of a collective that is overdue the
//! second word is how many ranks are awaited, and in place of the last two numbers are four of these.

use core::fmt;

use thiserror::Error;

use crate::descriptor::{Descriptor, DescriptorError, Field};

/// Bytes of the message.
pub const ABORT_BYTES: usize = 40;

const MAGIC: [u8; 4] = *b"MSIA";
const VERSION: u8 = 1;

/// Why a communicator ended.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum Abort {
    /// The ranks do not agree on what to compute.
    #[error("{0}")]
    Mismatch(Mismatch),
    /// The switch lost the connection to this rank.
    #[error("rank {rank} no longer answers the switch: its process or its network is gone")]
    PeerLost {
        /// Which.
        rank: u32,
    },
    /// A rank broke the protocol.
    #[error("rank {rank} broke the protocol: {violation}")]
    Violation {
        /// Which.
        rank: u32,
        /// How.
        violation: Violation,
    },
    /// A switch lost the connection to the one above it in the tree, or that one broke the protocol.
    #[error("a switch of the tree no longer hears the one above it")]
    ParentLost,
    /// A switch lost the connection to one below it in the tree. The ranks below that one may live.
    #[error(
        "a switch of the tree no longer answers the one above it; the lowest rank below is {rank}"
    )]
    SwitchBelowLost {
        /// The lowest of these ranks: no more is known there of that switch.
        rank: u32,
    },
    /// A rank waits no longer for a collective.
    #[error("{0}")]
    Overdue(Overdue),
    /// Whoever owns the communicator asked for it, with a code of its own.
    #[error("the communicator was aborted on request (code {code})")]
    Requested {
        /// What it means is the requester's affair.
        code: u32,
    },
}

/// How many ranks [`Overdue`] names.
pub const NAMED_RANKS: usize = 4;

/// A collective that did not end before the deadline of some rank, and who is to blame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Overdue {
    /// The collective.
    pub sequence: u64,
    /// How many ranks have not called it, or have not sent what they may.
    pub count: u32,
    /// Some of them: as many as there are, or [`NAMED_RANKS`]; the rest is [`u32::MAX`].
    pub ranks: [u32; NAMED_RANKS],
}

impl Overdue {
    /// Nobody is to blame.
    pub(crate) const fn new(sequence: u64) -> Self {
        Self { sequence, count: 0, ranks: [u32::MAX; NAMED_RANKS] }
    }

    /// One more is.
    pub(crate) fn add(&mut self, rank: u32) {
        if let Some(place) = self.ranks.get_mut(self.count as usize) {
            *place = rank;
        }
        self.count = self.count.saturating_add(1);
    }

    /// Those of another part of the tree are, too.
    pub(crate) fn merge(&mut self, other: &Self) {
        let named = other.ranks.iter().take(other.count as usize);
        let count = self.count.saturating_add(other.count);
        named.for_each(|&rank| self.add(rank));
        self.count = count;
    }

    /// These ranks are.
    pub fn of(sequence: u64, ranks: impl Iterator<Item = u32>) -> Self {
        let mut overdue = Self::new(sequence);
        ranks.for_each(|rank| overdue.add(rank));
        overdue
    }

    /// Those that are named.
    pub fn named(&self) -> &[u32] {
        &self.ranks[..NAMED_RANKS.min(self.count as usize)]
    }
}

impl fmt::Display for Overdue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective {} did not end in time: ", self.sequence)?;
        let named: Vec<String> = self.named().iter().map(u32::to_string).collect();
        let rest = self.count as usize - named.len();
        match (&named[..], rest) {
            ([], _) => return f.write_str("all ranks have called it and sent what they may"),
            ([rank], _) => write!(f, "rank {rank} has")?,
            ([ranks @ .., last], 0) => write!(f, "ranks {} and {last} have", ranks.join(", "))?,
            (ranks, rest) => write!(f, "ranks {} and {rest} more have", ranks.join(", "))?,
        }
        f.write_str(" not called it, or not sent what is due")
    }
}

/// The first difference found between the descriptors of the ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mismatch {
    /// The collective.
    pub sequence: u64,
    /// The lowest rank that differs from most others.
    pub rank: u32,
    /// A rank of those others.
    pub reference: u32,
    /// The field that differs.
    pub field: Field,
    /// Its value at `reference`.
    pub expected: u64,
    /// Its value at `rank`.
    pub found: u64,
}

impl Mismatch {
    /// Who differs from most others, of ranks in their order. Among equally many the side of the lowest rank is taken
    /// for the right one.
    pub fn among(mut described: impl Iterator<Item = (u32, Descriptor)> + Clone) -> Option<Self> {
        let same = |ours: &Descriptor| {
            described.clone().filter(|(_, other)| ours.difference(other).is_none()).count()
        };
        let (mut reference, mut ours) = described.clone().next()?;
        for (rank, descriptor) in described.clone() {
            if same(&descriptor) > same(&ours) {
                (reference, ours) = (rank, descriptor);
            }
        }
        described.find_map(|(rank, descriptor)| {
            let (field, expected, found) = ours.difference(&descriptor)?;
            Some(Self { sequence: ours.sequence, rank, reference, field, expected, found })
        })
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, rank, reference, field, expected, found } = *self;
        write!(
            f,
            "the ranks do not agree on collective {sequence}: rank {rank} has {name} {found} where \
             rank {reference} has {expected}",
            name = field.name(),
            found = field.value(found),
            expected = field.value(expected),
        )
    }
}

/// How a rank broke the protocol.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[repr(u8)]
pub enum Violation {
    /// A message that should be a descriptor is none.
    #[error("a message that is not a valid descriptor")]
    Descriptor = 1,
    /// A descriptor out of turn: the collective before it is not over.
    #[error("a descriptor before the collective before it was over")]
    Early = 2,
    /// A descriptor that does not bear the next number, or a note about a collective that it may not be about.
    #[error("a descriptor or a note with the wrong sequence number")]
    Sequence = 3,
    /// What the descriptor asks for is not offered.
    #[error("a collective, data type or operation that the switch does not support")]
    Unsupported = 4,
    /// Data beyond what the descriptor announced.
    #[error("more data than its descriptor announced")]
    Unannounced = 5,
    /// A segment of the wrong length.
    #[error("a segment of the wrong length")]
    Length = 6,
    /// A segment beyond the window.
    #[error("a segment beyond the window")]
    Window = 7,
    /// An RDMA READ, or a request that the reliable connection forbids.
    #[error("an RDMA request that is neither a SEND nor a WRITE, or is malformed")]
    Request = 8,
    /// A WRITE with immediate data.
    #[error("an RDMA WRITE with immediate data")]
    Immediate = 9,
    /// The result cannot be written where the rank wants it.
    #[error("a destination that the switch is not allowed to write to")]
    Destination = 10,
    /// There is no receive request for what the switch sends.
    #[error("fewer receive requests than answers that it is owed")]
    Receives = 11,
    /// Its answers make no sense, or it finds that ours do not.
    #[error("an answer that does not fit what the switch sent")]
    Response = 12,
    /// A descriptor of a longer vector than there may be.
    #[error("a descriptor with more elements than a collective can have")]
    Count = 13,
    /// A descriptor whose root is no rank.
    #[error("a descriptor with a root that is no rank of the communicator")]
    Root = 14,
}

impl Violation {
    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Descriptor,
            2 => Self::Early,
            3 => Self::Sequence,
            4 => Self::Unsupported,
            5 => Self::Unannounced,
            6 => Self::Length,
            7 => Self::Window,
            8 => Self::Request,
            9 => Self::Immediate,
            10 => Self::Destination,
            11 => Self::Receives,
            12 => Self::Response,
            13 => Self::Count,
            14 => Self::Root,
            _ => return None,
        })
    }
}

impl From<DescriptorError> for Violation {
    fn from(error: DescriptorError) -> Self {
        match error {
            DescriptorError::Count(_) => Self::Count,
            DescriptorError::Collective(_)
            | DescriptorError::Operation(_)
            | DescriptorError::DataType(_) => Self::Unsupported,
            DescriptorError::Length(_)
            | DescriptorError::Magic
            | DescriptorError::Version(_)
            | DescriptorError::Flags(_)
            | DescriptorError::Stripe(..) => Self::Descriptor,
        }
    }
}

impl Abort {
    /// The message.
    pub fn to_bytes(&self) -> [u8; ABORT_BYTES] {
        let (kind, detail, rank, other, numbers) = match *self {
            Self::Mismatch(m) => {
                (1, m.field as u8, m.rank, m.reference, [m.sequence, m.expected, m.found])
            }
            Self::PeerLost { rank } => (2, 0, rank, 0, [0; 3]),
            Self::Violation { rank, violation } => (3, violation as u8, rank, 0, [0; 3]),
            Self::Requested { code } => (4, 0, 0, code, [0; 3]),
            Self::ParentLost => (5, 0, 0, 0, [0; 3]),
            Self::SwitchBelowLost { rank } => (7, 0, rank, 0, [0; 3]),
            Self::Overdue(Overdue { sequence, count, ranks: [a, b, c, d] }) => {
                let pair = |low, high| u64::from(low) | u64::from(high) << 32;
                (6, 0, 0, count, [sequence, pair(a, b), pair(c, d)])
            }
        };
        let mut bytes = [0; ABORT_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = kind;
        bytes[6] = detail;
        bytes[8..12].copy_from_slice(&u32::to_le_bytes(rank));
        bytes[12..16].copy_from_slice(&u32::to_le_bytes(other));
        for (place, number) in bytes[16..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Reads the message; `None` when it is not one.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ABORT_BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let double = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[..4] != MAGIC || bytes[4] != VERSION {
            return None;
        }
        let (rank, other) = (word(8), word(12));
        let abort = match bytes[5] {
            1 => Self::Mismatch(Mismatch {
                sequence: double(16),
                rank,
                reference: other,
                field: Field::from_code(bytes[6])?,
                expected: double(24),
                found: double(32),
            }),
            2 => Self::PeerLost { rank },
            3 => Self::Violation { rank, violation: Violation::from_code(bytes[6])? },
            4 => Self::Requested { code: other },
            5 => Self::ParentLost,
            6 => Self::Overdue(Overdue {
                sequence: double(16),
                count: other,
                ranks: [word(24), word(28), word(32), word(36)],
            }),
            7 => Self::SwitchBelowLost { rank },
            _ => return None,
        };
        // Nothing but what this version writes.
        (abort.to_bytes() == *bytes).then_some(abort)
    }

    /// Whether a text is, or has within it, what a switch says that has lost another one. What ranks hear is passed on as text,
    /// and the switch that has told it is not the lost one.
    pub fn tells_of_other_switch(text: &str) -> bool {
        text.contains("a switch of the tree no longer ")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::DataType;

    const MISMATCH: Mismatch = Mismatch {
        sequence: 5,
        rank: 2,
        reference: 0,
        field: Field::Count,
        expected: 10,
        found: 12,
    };

    #[test]
    fn every_reason_survives_the_wire() {
        let mut reasons = vec![
            Abort::Mismatch(MISMATCH),
            Abort::PeerLost { rank: 63 },
            Abort::Requested { code: 0xdead_beef },
            Abort::ParentLost,
            Abort::SwitchBelowLost { rank: 63 },
            Abort::Overdue(Overdue { sequence: 1 << 40, count: 5, ranks: [1, 2, 3, 4] }),
        ];
        reasons.extend((1..=14).map(|code| Abort::Violation {
            rank: 1,
            violation: Violation::from_code(code).unwrap(),
        }));
        for reason in reasons {
            let mut bytes = reason.to_bytes();
            assert_eq!(Abort::parse(&bytes), Some(reason));
            let of_other = matches!(reason, Abort::ParentLost | Abort::SwitchBelowLost { .. });
            assert_eq!(Abort::tells_of_other_switch(&format!("so: {reason}")), of_other);
            bytes[7] = 1;
            assert_eq!(Abort::parse(&bytes), None);
            assert_eq!(Abort::parse(&bytes[1..]), None);
        }
        assert!(Violation::from_code(15).is_none());
    }

    #[test]
    fn who_is_awaited_is_named_up_to_a_few() {
        let mut overdue = Overdue::new(7);
        let start = "collective 7 did not end in time: ";
        for (count, text) in [
            (0, "all ranks have called it and sent what they may"),
            (1, "rank 1 has not called it, or not sent what is due"),
            (2, "ranks 1 and 2 have not called it, or not sent what is due"),
            (4, "ranks 1, 2, 3 and 4 have not called it, or not sent what is due"),
            (6, "ranks 1, 2, 3, 4 and 2 more have not called it, or not sent what is due"),
        ] {
            (overdue.count + 1..=count).for_each(|rank| overdue.add(rank));
            assert_eq!(overdue.to_string(), format!("{start}{text}"));
        }
        let mut other = Overdue::new(7);
        other.add(9);
        other.merge(&overdue);
        assert_eq!((other.count, other.named()), (7, &[9, 1, 2, 3][..]));
    }

    #[test]
    fn a_mismatch_says_who_has_what() {
        assert_eq!(
            Abort::Mismatch(MISMATCH).to_string(),
            "the ranks do not agree on collective 5: rank 2 has count 12 where rank 0 has 10"
        );
        let mismatch = Mismatch {
            field: Field::DataType,
            expected: DataType::Int32.code().into(),
            found: DataType::Float64.code().into(),
            ..MISMATCH
        };
        assert_eq!(
            mismatch.to_string(),
            "the ranks do not agree on collective 5: rank 2 has data type fp64 where rank 0 has \
             int32"
        );
        let mismatch = Mismatch { field: Field::Mode, expected: 0, found: 1, ..MISMATCH };
        let text = mismatch.to_string();
        assert!(text.ends_with("rank 2 has mode SEND where rank 0 has WRITE"), "{text}");
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_stands_for_itself(bytes in any::<[u8; ABORT_BYTES]>()) {
            let mut bytes = bytes;
            prop_assert_eq!(Abort::parse(&bytes), None);
            bytes[..5].copy_from_slice(b"MSIA\x01");
            if let Some(abort) = Abort::parse(&bytes) {
                prop_assert_eq!(abort.to_bytes(), bytes);
            }
        }
    }
}
