//! How a switch's messages to a host say what they are: two bits of kind and thirty of number in
//! the immediate data.
//!
//! | kind | message | number |
//! |---|---|---|
//! | 0 | WRITE: the last part of a segment's result | segment |
//! | 1 | SEND, empty: all ranks sent the same descriptor | sequence of the collective |
//! | 2 | SEND: the communicator is aborted, the payload says why | 0 |
//!
//! Both ends count segments and collectives in 64 bits and an edge delivers in order, so the
//! thirty bits only confirm what the host expects next.

const KIND_SHIFT: u32 = 30;
const NUMBER: u32 = (1 << KIND_SHIFT) - 1;

/// What a message from the switch is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Answer {
    /// The result of the segment with these low bits.
    Result(u32),
    /// Every rank sent the same descriptor for the collective with these low bits.
    Agreed(u32),
    /// The communicator is aborted.
    Aborted,
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

    pub(crate) const fn to_immediate(self) -> u32 {
        match self {
            Self::Result(number) => number & NUMBER,
            Self::Agreed(number) => 1 << KIND_SHIFT | (number & NUMBER),
            Self::Aborted => 2 << KIND_SHIFT,
        }
    }

    pub(crate) const fn from_immediate(immediate: u32) -> Option<Self> {
        let number = immediate & NUMBER;
        match (immediate >> KIND_SHIFT, number) {
            (0, _) => Some(Self::Result(number)),
            (1, _) => Some(Self::Agreed(number)),
            (2, 0) => Some(Self::Aborted),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_round_trip_and_others_are_refused() {
        for number in [0, 1, u64::from(NUMBER), 1 << 30, u64::MAX] {
            for answer in [Answer::result(number), Answer::agreed(number), Answer::Aborted] {
                assert_eq!(Answer::from_immediate(answer.to_immediate()), Some(answer));
            }
        }
        assert_eq!(Answer::result(1 << 30), Answer::Result(0));
        assert_eq!(Answer::from_immediate(2 << 30 | 1), None);
        assert_eq!(Answer::from_immediate(3 << 30), None);
    }
}
