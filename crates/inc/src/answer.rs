//! How messages on an edge say what they are: two bits of kind and thirty of number in the immediate data.
//! The second kind goes down, and the last one up.
//!
//! | kind | message | number |
//! |---|---|---|
//! | 0 | WRITE, or in SEND mode SEND: the last part of a segment's result; empty where the receiver gets none | segment |
//! | 1 | SEND: all ranks sent the same descriptor; with the result, where the vector came with that and the receiver gets one | sequence of the collective |
//! | 2 | SEND: the communicator is aborted, the payload says why | 0 |
//! | 2 | SEND, empty, down to a switch: it is awaited | 2^28, and 28 bits of the collective's sequence |
//! | 2 | SEND, up: the sender waits no longer; of a switch with the message of an abort that says the collective's number | 2^29, and the same |
//! | 2 | SEND, empty, down to a switch: who of yours is awaited? | 2^28 + 2^29, and the same |
//! | 2 | SEND, up, the answer to this: the message of an abort that says who | the same |
//! | 2 | SEND, up, of a switch with a descriptor: this rank has called that, and others below the switch have not | 1 + rank |
//! | 3 | SEND, empty, up: the sender has nothing for the segments before | segment |
//!
//! Both ends count segments and collectives in 64 bits and an edge delivers in order, so the
//! thirty bits only confirm what the host expects next.

use crate::spec::MAX_WORLD;

const KIND_SHIFT: u32 = 30;
const NUMBER: u32 = (1 << KIND_SHIFT) - 1;
/// Notes that are no answers have the kind of an abort, a kind of their own above 28 bits, and a shorter number.
const NOTE_SHIFT: u32 = 28;
const NOTE_NUMBER: u32 = (1 << NOTE_SHIFT) - 1;
const AWAITED: u32 = 1;
const OVERDUE: u32 = 2;
const MISSING: u32 = 3;
/// Without a kind of their own above, and not 0: who has called.
const RANK: u32 = MAX_WORLD - 1;

/// What a message from the switch is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Answer {
    /// The result of the segment with these low bits.
    Result(u32),
    /// Every rank sent the same descriptor for the collective with these low bits.
    Agreed(u32),
    /// The communicator is aborted.
    Aborted,
    /// The sender has nothing for the segments before the one with these low bits.
    Credit(u32),
    /// The descriptor or the data of the collective with these low bits are awaited.
    Awaited(u32),
    /// The sender waits no longer for it.
    Overdue(u32),
    /// Who is awaited with it: the question and the answer.
    Missing(u32),
    /// This rank has called what comes with it, while others have not called.
    Called(u32),
}

impl Answer {
    /// For the result of a segment.
    pub(crate) const fn result(segment: u64) -> Self {
        Self::Result((segment & NUMBER as u64) as u32)
    }

    /// For the agreement on a collective.
    pub(crate) const fn agreed(sequence: u64) -> Self {
        Self::Agreed((sequence & NUMBER as u64) as u32)
    }

    /// For the segments before this one.
    pub(crate) const fn credit(end: u64) -> Self {
        Self::Credit((end & NUMBER as u64) as u32)
    }

    /// For whoever is awaited with a collective.
    pub(crate) const fn awaited(sequence: u64) -> Self {
        Self::Awaited((sequence & NOTE_NUMBER as u64) as u32)
    }

    /// For a collective that is waited for no longer.
    pub(crate) const fn overdue(sequence: u64) -> Self {
        Self::Overdue((sequence & NOTE_NUMBER as u64) as u32)
    }

    /// For who is awaited with a collective.
    pub(crate) const fn missing(sequence: u64) -> Self {
        Self::Missing((sequence & NOTE_NUMBER as u64) as u32)
    }

    /// How far the number is behind `first`, circularly; `None` of what has no number.
    pub(crate) const fn distance_from(self, first: u64) -> Option<u64> {
        match self {
            Self::Result(number) | Self::Agreed(number) | Self::Credit(number) => {
                Some((number as u64).wrapping_sub(first) & NUMBER as u64)
            }
            Self::Aborted
            | Self::Awaited(_)
            | Self::Overdue(_)
            | Self::Missing(_)
            | Self::Called(_) => None,
        }
    }

    pub(crate) const fn to_immediate(self) -> u32 {
        match self {
            Self::Result(number) => number & NUMBER,
            Self::Agreed(number) => 1 << KIND_SHIFT | (number & NUMBER),
            Self::Aborted => 2 << KIND_SHIFT,
            Self::Awaited(number) => {
                2 << KIND_SHIFT | AWAITED << NOTE_SHIFT | (number & NOTE_NUMBER)
            }
            Self::Overdue(number) => {
                2 << KIND_SHIFT | OVERDUE << NOTE_SHIFT | (number & NOTE_NUMBER)
            }
            Self::Missing(number) => {
                2 << KIND_SHIFT | MISSING << NOTE_SHIFT | (number & NOTE_NUMBER)
            }
            Self::Called(rank) => 2 << KIND_SHIFT | (1 + (rank & RANK)),
            Self::Credit(number) => 3 << KIND_SHIFT | (number & NUMBER),
        }
    }

    pub(crate) const fn from_immediate(immediate: u32) -> Option<Self> {
        let number = immediate & NUMBER;
        match (immediate >> KIND_SHIFT, number) {
            (0, _) => Some(Self::Result(number)),
            (1, _) => Some(Self::Agreed(number)),
            (2, 0) => Some(Self::Aborted),
            (2, _) => match (number >> NOTE_SHIFT, number & NOTE_NUMBER) {
                (AWAITED, number) => Some(Self::Awaited(number)),
                (OVERDUE, number) => Some(Self::Overdue(number)),
                (MISSING, number) => Some(Self::Missing(number)),
                (0, rank @ 1..=MAX_WORLD) => Some(Self::Called(rank - 1)),
                _ => None,
            },
            (3, _) => Some(Self::Credit(number)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_are_the_documented_ones() {
        for (answer, immediate) in [
            (Answer::result(5), 5),
            (Answer::agreed(5), 0x4000_0005),
            (Answer::Aborted, 0x8000_0000),
            (Answer::awaited(5), 0x9000_0005),
            (Answer::overdue(5), 0xa000_0005),
            (Answer::missing(5), 0xb000_0005),
            (Answer::Called(0), 0x8000_0001),
            (Answer::Called(65_535), 0x8001_0000),
            (Answer::credit(5), 0xc000_0005),
        ] {
            assert_eq!(answer.to_immediate(), immediate, "{answer:?}");
            assert_eq!(Answer::from_immediate(immediate), Some(answer));
        }
    }

    #[test]
    fn immediates_round_trip_and_others_are_refused() {
        for number in [0, 1, u64::from(NUMBER), 1 << 30, u64::MAX] {
            let numbered = [Answer::result(number), Answer::agreed(number), Answer::credit(number)];
            let numbered = numbered.into_iter().chain([
                Answer::awaited(number),
                Answer::overdue(number),
                Answer::missing(number),
            ]);
            for answer in numbered.chain([Answer::Aborted]) {
                assert_eq!(Answer::from_immediate(answer.to_immediate()), Some(answer));
            }
        }
        assert_eq!(Answer::result(1 << 30), Answer::Result(0));
        assert_eq!(Answer::from_immediate(2 << 30 | (1 + MAX_WORLD)), None);
        assert_eq!(Answer::awaited(1 << 28 | 5), Answer::Awaited(5));
        assert_eq!(Answer::credit(5).distance_from(1 << 30 | 2), Some(3));
        assert_eq!(Answer::credit(1 << 30).distance_from((1 << 30) - 2), Some(2));
        assert_eq!(Answer::Aborted.distance_from(0), None);
        assert_eq!(Answer::Called(0).distance_from(0), None);
    }
}
