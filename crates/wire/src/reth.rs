//! RDMA Extended Transport Header (IBTA 9.2): where a WRITE goes or a READ comes from.

use crate::ParseError;
use crate::error::prefix;

/// RDMA Extended Transport Header, 16 bytes: on the first or only packet of a WRITE and on a READ
/// request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Reth {
    /// Virtual address at the responder.
    pub virtual_address: u64,
    /// Remote key of the memory region.
    pub remote_key: u32,
    /// Bytes of the whole message.
    pub dma_length: u32,
}

impl Reth {
    /// Bytes of the header.
    pub const LENGTH: usize = 16;

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, l0, l1, l2, l3] = *prefix(bytes)?;
        Ok(Self {
            virtual_address: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            remote_key: u32::from_be_bytes([k0, k1, k2, k3]),
            dma_length: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&self.virtual_address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.remote_key.to_be_bytes());
        bytes[12..].copy_from_slice(&self.dma_length.to_be_bytes());
        bytes
    }
}
