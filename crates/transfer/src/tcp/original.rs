//! The framing of the original transfer engine, bytes only: requests, and the status that answers them.
//!
//! A request is a C structure as it lies in memory on x86-64: size, address, opcode and seven bytes of padding.
//! The data of a WRITE follows it. In version 1 the data of a READ answers, and a WRITE has no answer. In version 2
//! a status answers both, before the data of a READ and after that of a WRITE, and the connection goes on only
//! after a good one. A connection has one request at a time.

use crate::Opcode;

/// Bytes of a request, without its data.
pub(super) const REQUEST_LENGTH: usize = 24;

/// Bytes of a status.
pub(super) const STATUS_LENGTH: usize = 8;

/// The bit of the opcode that says that the request is of version 2.
const VERSION_TWO: u8 = 0x80;

/// The upper half of every status.
const STATUS_MAGIC: u64 = 0x4d43_5456;

/// The framings of the original.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Version {
    /// WRITEs are not acknowledged.
    One,
    /// They are.
    Two,
}

/// What a connection of this framing asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Request {
    pub(super) version: Version,
    pub(super) opcode: Opcode,
    /// Virtual address in the target's process.
    pub(super) address: u64,
    /// Bytes.
    pub(super) length: u64,
}

impl Request {
    pub(super) fn emit(&self) -> [u8; REQUEST_LENGTH] {
        let mut bytes = [0; REQUEST_LENGTH];
        bytes[..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        let opcode = match self.opcode {
            Opcode::Read => 0,
            Opcode::Write => 1,
        };
        let version = if self.version == Version::Two { VERSION_TWO } else { 0 };
        bytes[16] = opcode | version;
        bytes
    }

    /// `None` when it is no request. What the padding holds does not matter.
    pub(super) fn parse(bytes: &[u8; REQUEST_LENGTH]) -> Option<Self> {
        let [l0, l1, l2, l3, l4, l5, l6, l7, a0, a1, a2, a3, a4, a5, a6, a7, code, ..] = *bytes;
        let opcode = match code & !VERSION_TWO {
            0 => Opcode::Read,
            1 => Opcode::Write,
            _ => return None,
        };
        let version = if code & VERSION_TWO == 0 { Version::One } else { Version::Two };
        let length = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
        let address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        Some(Self { version, opcode, address, length })
    }
}

/// The answer to a request of version 2.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Status {
    Done,
    /// With this code. 1: the address range is not in a registered buffer.
    Rejected(u32),
}

impl Status {
    pub(super) const ADDRESS_REJECTED: Self = Self::Rejected(1);

    pub(super) fn emit(self) -> [u8; STATUS_LENGTH] {
        let code = match self {
            Self::Done => 0,
            Self::Rejected(code) => code,
        };
        (STATUS_MAGIC << 32 | u64::from(code)).to_le_bytes()
    }

    /// `None` when it is no status.
    pub(super) fn parse(bytes: [u8; STATUS_LENGTH]) -> Option<Self> {
        let word = u64::from_le_bytes(bytes);
        match (word >> 32, word as u32) {
            (STATUS_MAGIC, 0) => Some(Self::Done),
            (STATUS_MAGIC, code) => Some(Self::Rejected(code)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bytes_are_those_of_the_original() {
        let write = Request {
            version: Version::Two,
            opcode: Opcode::Write,
            address: 0x1122_3344_5566_7788,
            length: 0x10_0000,
        };
        let mut expected = [0; REQUEST_LENGTH];
        expected[2] = 0x10;
        expected[8..17].copy_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x81]);
        assert_eq!(write.emit(), expected);
        let read = Request { version: Version::One, opcode: Opcode::Read, ..write };
        assert_eq!(read.emit()[16], 0);
        assert_eq!(Status::Done.emit(), *b"\0\0\0\0VTCM");
        assert_eq!(Status::ADDRESS_REJECTED.emit(), *b"\x01\0\0\0VTCM");
    }

    proptest! {
        #[test]
        fn requests_come_back(bytes: [u8; REQUEST_LENGTH]) {
            match Request::parse(&bytes) {
                None => prop_assert!(bytes[16] & 0x7f > 1),
                Some(request) => prop_assert_eq!(&request.emit()[..17], &bytes[..17]),
            }
        }

        #[test]
        fn statuses_come_back(bytes: [u8; STATUS_LENGTH], code: u32) {
            prop_assert!(Status::parse(bytes).is_none_or(|status| status.emit() == bytes));
            let status = if code == 0 { Status::Done } else { Status::Rejected(code) };
            prop_assert_eq!(Status::parse(status.emit()), Some(status));
        }
    }
}
