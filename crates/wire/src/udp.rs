//! The UDP header (RFC 768).

use crate::ParseError;
use crate::error::prefix;

/// The IP protocol number of UDP.
pub const PROTOCOL: u8 = 17;

/// A UDP header, 8 bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UdpHeader {
    /// Sender's port: any; RoCEv2 uses it as flow entropy.
    pub source_port: u16,
    /// Receiver's port.
    pub destination_port: u16,
    /// Bytes of header and payload.
    pub length: u16,
    /// Checksum; 0 = none, which RoCEv2 senders use: the ICRC covers the packet.
    pub checksum: u16,
}

impl UdpHeader {
    /// Bytes of the header.
    pub const LENGTH: usize = 8;

    /// Reads the header from the start of `bytes`; returns it and the payload that its length
    /// field delimits.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), ParseError> {
        let [s0, s1, d0, d1, l0, l1, c0, c1] = *prefix::<8>(bytes)?;
        let header = Self {
            source_port: u16::from_be_bytes([s0, s1]),
            destination_port: u16::from_be_bytes([d0, d1]),
            length: u16::from_be_bytes([l0, l1]),
            checksum: u16::from_be_bytes([c0, c1]),
        };
        let error = ParseError::Length { field: header.length.into(), available: bytes.len() };
        let payload = bytes.get(Self::LENGTH..header.length.into()).ok_or(error)?;
        Ok((header, payload))
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let [s0, s1] = self.source_port.to_be_bytes();
        let [d0, d1] = self.destination_port.to_be_bytes();
        let [l0, l1] = self.length.to_be_bytes();
        let [c0, c1] = self.checksum.to_be_bytes();
        [s0, s1, d0, d1, l0, l1, c0, c1]
    }
}
