//! Why bytes are not a packet.

use thiserror::Error;

/// Why bytes are not the header or packet they were taken for.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum ParseError {
    /// The buffer ends before the header or packet does.
    #[error("truncated: {needed} bytes needed, {available} there")]
    Truncated {
        /// Bytes that the header or packet needs.
        needed: usize,
        /// Bytes that were there.
        available: usize,
    },
    /// The BTH opcode is not one that this crate knows the headers of.
    #[error("unknown opcode {0:#04x}")]
    UnknownOpcode(u8),
    /// A version field holds what the format does not allow.
    #[error("unsupported version {0}")]
    Version(u8),
    /// A length field contradicts the buffer or the format.
    #[error("length field {field} does not fit {available} bytes")]
    Length {
        /// What the field says.
        field: usize,
        /// Bytes that it can mean: counted as the field counts, with or without its header.
        available: usize,
    },
    /// The pad count is larger than the payload.
    #[error("pad count {pad} exceeds the payload of {payload} bytes")]
    Pad {
        /// The pad count of the BTH.
        pad: u8,
        /// Bytes between the headers and the ICRC.
        payload: usize,
    },
    /// A header checksum is wrong.
    #[error("wrong header checksum")]
    Checksum,
}

/// The first `N` bytes of `bytes`, or [`ParseError::Truncated`].
pub(crate) fn prefix<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], ParseError> {
    bytes.first_chunk().ok_or(ParseError::Truncated { needed: N, available: bytes.len() })
}
