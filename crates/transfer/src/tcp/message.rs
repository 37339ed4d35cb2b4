//! The framing between two engines of this project, bytes only: numbered messages of many pieces.
//!
//! An initiator says [`Hello`] and goes on at once. A message has a header, then its pieces, then, of a WRITE, its
//! data. The target does messages in their order and answers each, so several can be under way. It says of each piece
//! whether it failed: the others count.
//!
//! All numbers are little-endian.

use crate::Opcode;

/// Versions of this framing, as descriptors and [`Hello`] have them: a target that has the second takes the first, too.
pub(super) const PLAIN: u32 = 1;
/// All that follows the hello is in records with checksums (`line/checked.rs`).
pub(super) const CHECKED: u32 = 2;
/// As the second; of descriptors only: memory of GPUs is read and written, too.
pub(super) const STAGED: u32 = 3;

/// The most pieces of a message, and bytes of its data.
pub(super) const MAX_PIECES: usize = 256;
pub(super) const MAX_DATA: u64 = 1 << 20;

/// The first eight bytes of a connection. As the original would read them: a length of more than 2^63.
const MAGIC: u64 = u64::from_le_bytes(*b"MILLSTR\xff");

/// No opcode of the original, where it has its opcode.
const HELLO_CODE: u8 = 0x7f;

/// What an initiator says first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Hello {
    pub(super) version: u32,
    /// Drawn for this connection: who knows it can end it by a fence.
    pub(super) connection: u128,
    /// Which start of the target's process is meant: addresses mean nothing to another one.
    pub(super) incarnation: u64,
}

impl Hello {
    pub(super) const LENGTH: usize = 48;

    /// Whether a connection that begins with these bytes says hello, which is longer.
    pub(super) fn begins(bytes: &[u8; 24]) -> bool {
        bytes[..8] == MAGIC.to_le_bytes() && bytes[16] == HELLO_CODE
    }

    pub(super) fn emit(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[16] = HELLO_CODE;
        bytes[24..40].copy_from_slice(&self.connection.to_le_bytes());
        bytes[40..].copy_from_slice(&self.incarnation.to_le_bytes());
        if self.version == CHECKED {
            let checksum = crc32c::crc32c(&bytes);
            bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
        }
        bytes
    }

    /// `None` when it is none, or not as it was sent.
    pub(super) fn parse(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let (first, rest) = bytes.split_first_chunk::<24>()?;
        let (connection, incarnation) = rest.split_first_chunk::<16>()?;
        let hello = Self::begins(first).then_some(Self {
            version: u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
            connection: u128::from_le_bytes(*connection),
            incarnation: u64::from_le_bytes(*incarnation.first_chunk()?),
        })?;
        (hello.version != CHECKED || hello.emit() == *bytes).then_some(hello)
    }
}

/// What a target says first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Welcome {
    Taken,
    /// It does not know the version.
    OtherVersion,
    /// Another process was meant.
    OtherIncarnation,
    /// A fence has ended the connection before it began.
    Fenced,
    /// It is for a segment that the target relays to, and it relays for as many as it may.
    Full,
}

impl Welcome {
    pub(super) const LENGTH: usize = 16;

    const CODES: [Self; 5] =
        [Self::Taken, Self::OtherVersion, Self::OtherIncarnation, Self::Fenced, Self::Full];

    pub(super) fn emit(self) -> [u8; Self::LENGTH] {
        let code = Self::CODES.iter().position(|known| *known == self).unwrap_or_default() as u32;
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&code.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let code = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize;
        Self::CODES.get(code).copied().filter(|_| bytes[..8] == MAGIC.to_le_bytes())
    }
}

/// What a message is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Purpose {
    Move(Opcode),
    /// To end another connection, and to say when nothing of it is done any more. Its piece is the number of the
    /// connection.
    Fence,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Header {
    pub(super) purpose: Purpose,
    pub(super) id: u64,
    /// How many.
    pub(super) pieces: u32,
    /// Bytes of all pieces.
    pub(super) length: u64,
}

impl Header {
    pub(super) const LENGTH: usize = 32;

    pub(super) fn emit(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = match self.purpose {
            Purpose::Move(Opcode::Write) => 1,
            Purpose::Move(Opcode::Read) => 2,
            Purpose::Fence => 3,
        };
        bytes[4..8].copy_from_slice(&self.pieces.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// `None` when it is none, or longer than it may be.
    pub(super) fn parse(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let purpose = match bytes[0] {
            1 => Purpose::Move(Opcode::Write),
            2 => Purpose::Move(Opcode::Read),
            3 => Purpose::Fence,
            _ => return None,
        };
        let (pieces, id, length) = numbers(bytes);
        let fits = match purpose {
            Purpose::Move(_) => (1..=MAX_PIECES as u32).contains(&pieces) && length <= MAX_DATA,
            Purpose::Fence => pieces == 1 && length == 0,
        };
        fits.then_some(Self { purpose, id, pieces, length })
    }
}

/// The number of 4 bytes at 4, and those of 8 at 8 and 16.
fn numbers(bytes: &[u8; 32]) -> (u32, u64, u64) {
    let [_, _, _, _, c0, c1, c2, c3, i0, i1, i2, i3, i4, i5, i6, i7, rest @ ..] = *bytes;
    let [l0, l1, l2, l3, l4, l5, l6, l7, ..] = rest;
    (
        u32::from_le_bytes([c0, c1, c2, c3]),
        u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]),
        u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
    )
}

/// A piece: an address in the target's process and a length, or a number of 128 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) length: u64,
}

impl Piece {
    pub(super) const LENGTH: usize = 16;

    pub(super) fn emit(self) -> [u8; Self::LENGTH] {
        self.number().to_le_bytes()
    }

    pub(super) const fn parse(bytes: &[u8; Self::LENGTH]) -> Self {
        Self::of(u128::from_le_bytes(*bytes))
    }

    pub(super) const fn of(number: u128) -> Self {
        Self { address: number as u64, length: (number >> 64) as u64 }
    }

    pub(super) const fn number(self) -> u128 {
        (self.length as u128) << 64 | self.address as u128
    }
}

/// Whether pieces have as many bytes as their header says.
pub(super) fn add_up(pieces: impl Iterator<Item = u64>, length: u64) -> bool {
    let mut sum = Some(0_u64);
    for piece in pieces {
        sum = sum.filter(|_| piece > 0).and_then(|sum| sum.checked_add(piece));
    }
    sum == Some(length)
}

/// Why a piece failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Fault {
    /// It is not in a registered buffer of the target, or is not any more.
    NotRegistered,
    /// What is registered there was unmapped.
    Gone,
    /// It is memory of a GPU.
    Gpu,
    /// The connection that a fence was for has not ended.
    NotFenced,
    /// A relay has refused to do it: it has no way there, or no room.
    NotRelayed,
    /// A relay has not done it, and nothing of it can arrive any more.
    RelayFailed,
    /// A relay has not done it, and does not know whether something of it can still arrive.
    RelayUndefined,
}

impl Fault {
    const CODES: [Self; 7] = [
        Self::NotRegistered,
        Self::Gone,
        Self::Gpu,
        Self::NotFenced,
        Self::NotRelayed,
        Self::RelayFailed,
        Self::RelayUndefined,
    ];

    /// Bytes of one in an answer: the index of the piece, and this.
    pub(super) const LENGTH: usize = 8;

    pub(super) fn emit(self, piece: u32) -> [u8; Self::LENGTH] {
        let code = Self::CODES.iter().position(|known| *known == self).unwrap_or_default() as u64;
        (u64::from(piece) << 32 | code).to_le_bytes()
    }

    pub(super) fn parse(bytes: &[u8; Self::LENGTH]) -> Option<(u32, Self)> {
        let word = u64::from_le_bytes(*bytes);
        Some(((word >> 32) as u32, *Self::CODES.get(word as u32 as usize)?))
    }
}

/// What a target says of a message. Its faults follow it, in the order of the pieces.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Answer {
    /// The data of a READ follows, of the pieces without a fault.
    Data { id: u64, faults: u32, length: u64 },
    /// All of it is done: what was written is in memory, what was read was sent. Of a READ these are the faults that
    /// came since.
    Ended { id: u64, faults: u32 },
}

impl Answer {
    pub(super) const LENGTH: usize = 32;

    pub(super) fn emit(&self) -> [u8; Self::LENGTH] {
        let (kind, id, faults, length) = match *self {
            Self::Data { id, faults, length } => (1, id, faults, length),
            Self::Ended { id, faults } => (2, id, faults, 0),
        };
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&faults.to_le_bytes());
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16..24].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let (faults, id, length) = numbers(bytes);
        let fits = faults <= MAX_PIECES as u32 && length <= MAX_DATA;
        match bytes[0] {
            1 if fits => Some(Self::Data { id, faults, length }),
            2 if fits && length == 0 => Some(Self::Ended { id, faults }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::original;
    use super::*;

    #[test]
    fn a_hello_is_no_request_of_the_original() {
        let hello = Hello { version: CHECKED, connection: u128::MAX - 5, incarnation: 7 };
        let bytes = hello.emit();
        assert_eq!(Hello::parse(&bytes), Some(hello));
        let first = bytes.first_chunk().unwrap();
        assert!(Hello::begins(first));
        assert_eq!(original::Request::parse(first), None);
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes;
            wrong[bit / 8] ^= 1 << (bit % 8);
            let as_it_was = Hello::parse(&wrong).is_some_and(|hello| hello.version == CHECKED);
            assert!(!as_it_was, "bit {bit}");
        }
    }

    #[test]
    fn pieces_add_up_without_overflow() {
        assert!(add_up([1, 2, 3].into_iter(), 6));
        for (pieces, length) in [([1, 2, 3], 7), ([6, 0, 0], 6), ([u64::MAX, 1, 6], 6)] {
            assert!(!add_up(pieces.into_iter(), length), "{pieces:?}");
        }
    }

    #[test]
    fn a_message_has_limits() {
        let header =
            |pieces, length| Header { purpose: Purpose::Move(Opcode::Read), id: 5, pieces, length };
        for (pieces, length, fits) in [
            (1, 1, true),
            (MAX_PIECES as u32, MAX_DATA, true),
            (0, 0, false),
            (MAX_PIECES as u32 + 1, 1, false),
            (1, MAX_DATA + 1, false),
            (1, 1 << 63, false),
        ] {
            let header = header(pieces, length);
            assert_eq!(Header::parse(&header.emit()), fits.then_some(header));
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_as_it_was_written(bytes: [u8; 48], code: u8) {
            let mut bytes = bytes;
            bytes[0] = code % 5;
            bytes[5..8].fill(0);
            let word: &[u8; 32] = bytes.first_chunk().unwrap();
            if let Some(header) = Header::parse(word) {
                prop_assert_eq!(Header::parse(&header.emit()), Some(header));
            }
            if let Some(answer) = Answer::parse(word) {
                prop_assert_eq!(Answer::parse(&answer.emit()), Some(answer));
            }
            if let Some(hello) = Hello::parse(&bytes) {
                prop_assert_eq!(Hello::parse(&hello.emit()), Some(hello));
            }
            let piece: &[u8; 16] = bytes.first_chunk().unwrap();
            prop_assert_eq!(&Piece::parse(piece).emit(), piece);
            let fault: &[u8; 8] = bytes.first_chunk().unwrap();
            if let Some((index, fault)) = Fault::parse(fault) {
                prop_assert_eq!(Fault::parse(&fault.emit(index)), Some((index, fault)));
            }
            let welcome: &[u8; 16] = bytes.first_chunk().unwrap();
            if let Some(welcome) = Welcome::parse(welcome) {
                prop_assert_eq!(Welcome::parse(&welcome.emit()), Some(welcome));
            }
        }
    }
}
