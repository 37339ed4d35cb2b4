//! The small extended headers: immediate data, invalidate, datagram (IBTA 9.2).

use crate::error::prefix;
use crate::{ParseError, Qpn};

/// Immediate data, 4 bytes: delivered in the receiver's completion. The value is the wire's
/// big-endian number; libibverbs users call it `imm_data` in network order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ImmDt(pub u32);

impl ImmDt {
    /// Bytes of the header.
    pub const LENGTH: usize = 4;

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        Ok(Self(u32::from_be_bytes(*prefix(bytes)?)))
    }

    /// The header's bytes.
    pub const fn to_bytes(&self) -> [u8; Self::LENGTH] {
        self.0.to_be_bytes()
    }
}

/// Invalidate Extended Transport Header, 4 bytes: the remote key to invalidate.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ieth(pub u32);

impl Ieth {
    /// Bytes of the header.
    pub const LENGTH: usize = 4;

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        Ok(Self(u32::from_be_bytes(*prefix(bytes)?)))
    }

    /// The header's bytes.
    pub const fn to_bytes(&self) -> [u8; Self::LENGTH] {
        self.0.to_be_bytes()
    }
}

/// Datagram Extended Transport Header, 8 bytes: on every packet of the UD service.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Deth {
    /// Authorises the sender to use the destination queue pair.
    pub queue_key: u32,
    /// Eight reserved bits.
    pub reserved: u8,
    /// The sender's queue pair.
    pub source_qpn: Qpn,
}

impl Deth {
    /// Bytes of the header.
    pub const LENGTH: usize = 8;

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let [k0, k1, k2, k3, reserved, q0, q1, q2] = *prefix::<8>(bytes)?;
        Ok(Self {
            queue_key: u32::from_be_bytes([k0, k1, k2, k3]),
            reserved,
            source_qpn: Qpn::from_bytes([q0, q1, q2]),
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let [k0, k1, k2, k3] = self.queue_key.to_be_bytes();
        let [q0, q1, q2] = self.source_qpn.to_bytes();
        [k0, k1, k2, k3, self.reserved, q0, q1, q2]
    }
}
