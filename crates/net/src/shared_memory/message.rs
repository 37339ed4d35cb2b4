//! What two processes say over their UNIX socket: messages of five numbers, some with descriptors.

/// The bytes of a message.
pub(super) const LENGTH: usize = 40;

/// `MSshm` and the version of what is said.
const MAGIC: u64 = u64::from_le_bytes(*b"MSshm\0\x02\0");

/// A message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Message {
    /// The first one, of who connects: which start of the peer is meant, and when it itself started.
    Hello { incarnation: u64, started: u64 },
    /// The answer, with the descriptors of the table and of the presence. The canary is a number that
    /// can be read at that address of the answering process.
    Welcome { incarnation: u64, started: u64, canary: u64, canary_address: u64 },
    /// The other answer.
    Refusal(Refusal),
    /// Asks for the memory of a registration.
    Map { key: u64 },
    /// The answer, with the descriptor of the memory if it is there.
    Mapped { key: u64, found: bool },
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Refusal {
    OtherUser,
    OtherIncarnation,
    TooMany,
    NoProcess,
    NoMeans,
}

impl Message {
    pub(super) fn emit(self) -> [u8; LENGTH] {
        let numbers = match self {
            Self::Hello { incarnation, started } => [1, incarnation, started, 0],
            Self::Welcome { incarnation, started, canary, canary_address } => {
                // The kind shares its number with nothing: a welcome needs all the others.
                return emit([MAGIC ^ 2 << 56, incarnation, started, canary, canary_address]);
            }
            Self::Refusal(refusal) => [3, refusal as u64, 0, 0],
            Self::Map { key } => [4, key, 0, 0],
            Self::Mapped { key, found } => [5, key, found.into(), 0],
        };
        let [kind, first, second, third] = numbers;
        emit([MAGIC ^ kind << 56, first, second, third, 0])
    }

    /// `None` for what is no message of this version.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; LENGTH] = bytes.try_into().ok()?;
        let mut numbers = [0; 5];
        for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *number = u64::from_le_bytes(*bytes);
        }
        let [head, first, second, third, fourth] = numbers;
        let kind = head >> 56;
        if head ^ MAGIC != kind << 56 {
            return None;
        }
        Some(match kind {
            1 => Self::Hello { incarnation: first, started: second },
            2 => Self::Welcome {
                incarnation: first,
                started: second,
                canary: third,
                canary_address: fourth,
            },
            3 => Self::Refusal(match first {
                0 => Refusal::OtherUser,
                1 => Refusal::OtherIncarnation,
                2 => Refusal::TooMany,
                3 => Refusal::NoProcess,
                4 => Refusal::NoMeans,
                _ => return None,
            }),
            4 => Self::Map { key: first },
            5 => Self::Mapped { key: first, found: second != 0 },
            _ => return None,
        })
    }
}

fn emit(numbers: [u64; 5]) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    for (bytes, number) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
        *bytes = number.to_le_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_both_ways() {
        for message in [
            Message::Hello { incarnation: 5, started: u64::MAX },
            Message::Welcome { incarnation: 1, started: 2, canary: 3, canary_address: 4 },
            Message::Refusal(Refusal::OtherUser),
            Message::Refusal(Refusal::OtherIncarnation),
            Message::Refusal(Refusal::TooMany),
            Message::Refusal(Refusal::NoProcess),
            Message::Refusal(Refusal::NoMeans),
            Message::Map { key: 7 },
            Message::Mapped { key: 8, found: true },
            Message::Mapped { key: 8, found: false },
        ] {
            let bytes = message.emit();
            assert_eq!(Message::parse(&bytes), Some(message));
            assert_eq!(Message::parse(&bytes[..LENGTH - 1]), None);
            for index in 0..8 {
                let mut other = bytes;
                other[index] ^= 0x80;
                assert_eq!(Message::parse(&other), None, "{message:?} {index}");
            }
        }
        assert_eq!(Message::parse(&[]), None);
    }
}
