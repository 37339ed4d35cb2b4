//! The IPv6 header (RFC 8200), without extension headers.

use core::net::Ipv6Addr;

use crate::ParseError;
use crate::error::prefix;

/// An IPv6 header, 40 bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ipv6Header {
    /// Differentiated services (6 bits) and congestion notification (2 bits).
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Bytes of the payload.
    pub payload_length: u16,
    /// What the packet holds; UDP is 17.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Sender.
    pub source: Ipv6Addr,
    /// Receiver.
    pub destination: Ipv6Addr,
}

impl Ipv6Header {
    /// Bytes of the header.
    pub const LENGTH: usize = 40;

    /// Reads the header from the start of `bytes`; returns it and the payload that its length
    /// field delimits.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), ParseError> {
        let header: &[u8; 40] = prefix(bytes)?;
        let [w0, w1, w2, w3, l0, l1, next_header, hop_limit, ..] = *header;
        let word = u32::from_be_bytes([w0, w1, w2, w3]);
        if word >> 28 != 6 {
            return Err(ParseError::Version((word >> 28) as u8));
        }
        let address = |at: usize| {
            let mut octets = [0; 16];
            octets.copy_from_slice(&header[at..at + 16]);
            Ipv6Addr::from(octets)
        };
        let header = Self {
            traffic_class: (word >> 20) as u8,
            flow_label: word & 0xf_ffff,
            payload_length: u16::from_be_bytes([l0, l1]),
            next_header,
            hop_limit,
            source: address(8),
            destination: address(24),
        };
        // Unlike IPv4's length, this one does not count the header.
        let (length, rest) = (usize::from(header.payload_length), &bytes[Self::LENGTH..]);
        let error = ParseError::Length { field: length, available: rest.len() };
        let payload = rest.get(..length).ok_or(error)?;
        Ok((header, payload))
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        let word = 6 << 28 | u32::from(self.traffic_class) << 20 | (self.flow_label & 0xf_ffff);
        bytes[..4].copy_from_slice(&word.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.payload_length.to_be_bytes());
        bytes[6] = self.next_header;
        bytes[7] = self.hop_limit;
        bytes[8..24].copy_from_slice(&self.source.octets());
        bytes[24..].copy_from_slice(&self.destination.octets());
        bytes
    }
}
