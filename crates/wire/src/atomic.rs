//! Atomic headers (IBTA 9.2): CmpSwap and FetchAdd requests and their response.

use crate::ParseError;
use crate::error::prefix;

/// Atomic Extended Transport Header, 28 bytes: a CmpSwap or FetchAdd request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AtomicEth {
    /// Virtual address of the 8 bytes at the responder; must be a multiple of 8.
    pub virtual_address: u64,
    /// Remote key of the memory region.
    pub remote_key: u32,
    /// The value to swap in, or to add.
    pub swap_or_add: u64,
    /// The value to compare with; unused by FetchAdd.
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes of the header.
    pub const LENGTH: usize = 28;

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let header: &[u8; Self::LENGTH] = prefix(bytes)?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_be_bytes(word)
        };
        let [.., k0, k1, k2, k3] = *prefix::<12>(header)?;
        Ok(Self {
            virtual_address: word(0),
            remote_key: u32::from_be_bytes([k0, k1, k2, k3]),
            swap_or_add: word(12),
            compare: word(20),
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&self.virtual_address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.remote_key.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.swap_or_add.to_be_bytes());
        bytes[20..].copy_from_slice(&self.compare.to_be_bytes());
        bytes
    }
}

/// Atomic Acknowledge Extended Transport Header, 8 bytes: the value that was there before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AtomicAckEth {
    /// The original value of the 8 bytes.
    pub original: u64,
}

impl AtomicAckEth {
    /// Bytes of the header.
    pub const LENGTH: usize = 8;

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        Ok(Self { original: u64::from_be_bytes(*prefix(bytes)?) })
    }

    /// The header's bytes.
    pub const fn to_bytes(&self) -> [u8; Self::LENGTH] {
        self.original.to_be_bytes()
    }
}
