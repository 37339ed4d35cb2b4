//! The IPv4 header (RFC 791), without options: RoCEv2 does not use them.

use core::net::Ipv4Addr;

use crate::error::prefix;
use crate::{Checksum, ParseError};

/// An IPv4 header without options, 20 bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ipv4Header {
    /// Differentiated services (6 bits) and congestion notification (2 bits).
    pub type_of_service: u8,
    /// Bytes of header and payload.
    pub total_length: u16,
    /// Identification: covered by the ICRC.
    pub identification: u16,
    /// Three flags and the fragment offset; don't fragment is `0x4000`.
    pub flags: u16,
    /// Time to live.
    pub time_to_live: u8,
    /// What the packet holds; UDP is 17.
    pub protocol: u8,
    /// Header checksum as it stands.
    pub checksum: u16,
    /// Sender.
    pub source: Ipv4Addr,
    /// Receiver.
    pub destination: Ipv4Addr,
}

impl Ipv4Header {
    /// Bytes of the header.
    pub const LENGTH: usize = 20;

    /// Reads the header from the start of `bytes`; returns it and the payload that its length
    /// field delimits. The checksum is not checked: see [`Ipv4Header::computed_checksum`].
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), ParseError> {
        let [
            version,
            type_of_service,
            l0,
            l1,
            i0,
            i1,
            f0,
            f1,
            time_to_live,
            protocol,
            c0,
            c1,
            s @ ..,
            d0,
            d1,
            d2,
            d3,
        ] = *prefix::<20>(bytes)?;
        if version != 0x45 {
            return Err(ParseError::Version(version));
        }
        let header = Self {
            type_of_service,
            total_length: u16::from_be_bytes([l0, l1]),
            identification: u16::from_be_bytes([i0, i1]),
            flags: u16::from_be_bytes([f0, f1]),
            time_to_live,
            protocol,
            checksum: u16::from_be_bytes([c0, c1]),
            source: Ipv4Addr::from(s),
            destination: Ipv4Addr::new(d0, d1, d2, d3),
        };
        let error =
            ParseError::Length { field: header.total_length.into(), available: bytes.len() };
        let payload = bytes.get(Self::LENGTH..header.total_length.into()).ok_or(error)?;
        Ok((header, payload))
    }

    /// The header's bytes, with the checksum field as it stands.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = 0x45;
        bytes[1] = self.type_of_service;
        bytes[2..4].copy_from_slice(&self.total_length.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.identification.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.flags.to_be_bytes());
        bytes[8] = self.time_to_live;
        bytes[9] = self.protocol;
        bytes[10..12].copy_from_slice(&self.checksum.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.source.octets());
        bytes[16..].copy_from_slice(&self.destination.octets());
        bytes
    }

    /// The checksum that the header should have (RFC 1071).
    pub fn computed_checksum(&self) -> u16 {
        let mut checksum = Checksum::new();
        checksum.update(&Self { checksum: 0, ..*self }.to_bytes());
        checksum.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header whose words are 0x4500, those given, and zeros.
    fn header(total_length: u16, identification: u16, flags: u16) -> Ipv4Header {
        Ipv4Header {
            type_of_service: 0,
            total_length,
            identification,
            flags,
            time_to_live: 0,
            protocol: 0,
            checksum: 0xabcd, // Whatever stands there does not count.
            source: Ipv4Addr::UNSPECIFIED,
            destination: Ipv4Addr::UNSPECIFIED,
        }
    }

    #[test]
    fn checksums_carry_around() {
        assert_eq!(header(0, 0, 0).computed_checksum(), !0x4500);
        // 0x4500 + 0xbaff = 0xffff: no carry.
        assert_eq!(header(0xbaff, 0, 0).computed_checksum(), 0);
        // One carry: 0x1_0000 is 1.
        assert_eq!(header(0xbb00, 0, 0).computed_checksum(), !1);
        // A carry that brings another: 0x1_ffff is 0x1_0000 is 1.
        assert_eq!(header(0xbaff, 0xffff, 1).computed_checksum(), !1);
    }
}
