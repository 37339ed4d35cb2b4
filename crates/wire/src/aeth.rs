//! ACK Extended Transport Header (IBTA 9.7.5): acknowledgements, RNR and NAK codes.

use crate::error::prefix;
use crate::{ParseError, Psn};

/// ACK Extended Transport Header, 4 bytes: on acknowledgements and on the first, last and only
/// packets of a READ response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Aeth {
    /// The syndrome byte; [`Aeth::syndrome`] decodes it.
    pub raw_syndrome: u8,
    /// Message sequence number: messages completed by the responder, mod 2^24.
    pub msn: Psn,
}

/// What the syndrome byte of an [`Aeth`] says (IBTA table 45).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Syndrome {
    /// Acknowledged; the five bits are the credit count, 31 = no limit.
    Ack {
        /// Encoded end-to-end credits.
        credits: u8,
    },
    /// Receiver not ready: try again after the time that the five bits name.
    ReceiverNotReady {
        /// Encoded RNR timer (IBTA table 46).
        timer: u8,
    },
    /// Not acknowledged.
    Nak(NakCode),
    /// A code that the specification reserves.
    Reserved(u8),
}

/// Why a packet was not acknowledged (IBTA table 47).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NakCode {
    /// A packet is missing: the PSN of the NAK is the one expected.
    PsnSequenceError,
    /// The request is malformed or not supported.
    InvalidRequest,
    /// The rkey, range or access right is wrong.
    RemoteAccessError,
    /// The responder failed inside.
    RemoteOperationalError,
}

impl Syndrome {
    /// The ACK that promises no credit limit, which is what rxe and we send.
    pub const ACK_UNLIMITED: Self = Self::Ack { credits: 31 };

    /// Decodes the byte.
    pub const fn from_byte(byte: u8) -> Self {
        match (byte >> 5, byte & 0x1f) {
            (0, credits) => Self::Ack { credits },
            (1, timer) => Self::ReceiverNotReady { timer },
            (3, 0) => Self::Nak(NakCode::PsnSequenceError),
            (3, 1) => Self::Nak(NakCode::InvalidRequest),
            (3, 2) => Self::Nak(NakCode::RemoteAccessError),
            (3, 3) => Self::Nak(NakCode::RemoteOperationalError),
            _ => Self::Reserved(byte),
        }
    }

    /// Encodes it.
    pub const fn to_byte(self) -> u8 {
        match self {
            Self::Ack { credits } => credits & 0x1f,
            Self::ReceiverNotReady { timer } => 0x20 | (timer & 0x1f),
            Self::Nak(NakCode::PsnSequenceError) => 0x60,
            Self::Nak(NakCode::InvalidRequest) => 0x61,
            Self::Nak(NakCode::RemoteAccessError) => 0x62,
            Self::Nak(NakCode::RemoteOperationalError) => 0x63,
            Self::Reserved(byte) => byte,
        }
    }
}

impl Aeth {
    /// Bytes of the header.
    pub const LENGTH: usize = 4;

    /// A header that says this.
    pub const fn new(syndrome: Syndrome, msn: Psn) -> Self {
        Self { raw_syndrome: syndrome.to_byte(), msn }
    }

    /// What the syndrome byte says.
    pub const fn syndrome(&self) -> Syndrome {
        Syndrome::from_byte(self.raw_syndrome)
    }

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let [raw_syndrome, a, b, c] = *prefix::<4>(bytes)?;
        Ok(Self { raw_syndrome, msn: Psn::from_bytes([a, b, c]) })
    }

    /// The header's bytes.
    pub const fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let [a, b, c] = self.msn.to_bytes();
        [self.raw_syndrome, a, b, c]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syndrome_byte_round_trips() {
        for byte in 0..=u8::MAX {
            assert_eq!(Syndrome::from_byte(byte).to_byte(), byte);
        }
        // What rxe puts in its acknowledgements: 0x1f, "no credit limit".
        assert_eq!(Syndrome::from_byte(0x1f), Syndrome::ACK_UNLIMITED);
    }
}
