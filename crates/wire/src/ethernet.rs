//! The Ethernet II header (IEEE 802.3), without VLAN tags.

use crate::ParseError;
use crate::error::prefix;

/// EtherType of IPv4.
pub const IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const IPV6: u16 = 0x86dd;

/// An Ethernet II header, 14 bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct EthernetHeader {
    /// Receiver's address.
    pub destination: [u8; 6],
    /// Sender's address.
    pub source: [u8; 6],
    /// What the frame holds: [`IPV4`], [`IPV6`].
    pub ether_type: u16,
}

impl EthernetHeader {
    /// Bytes of the header.
    pub const LENGTH: usize = 14;

    /// Reads the header from the start of `bytes`; returns it and the rest of the frame.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), ParseError> {
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1] = *prefix::<14>(bytes)?;
        let header = Self {
            destination: [d0, d1, d2, d3, d4, d5],
            source: [s0, s1, s2, s3, s4, s5],
            ether_type: u16::from_be_bytes([t0, t1]),
        };
        Ok((header, &bytes[Self::LENGTH..]))
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..6].copy_from_slice(&self.destination);
        bytes[6..12].copy_from_slice(&self.source);
        bytes[12..].copy_from_slice(&self.ether_type.to_be_bytes());
        bytes
    }
}
