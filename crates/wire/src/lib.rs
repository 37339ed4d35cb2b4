//! RoCEv2 packet formats: Ethernet, IPv4, IPv6, UDP, the Base Transport Header and every extended
//! header of the reliable-connection (RC) service, and the invariant CRC that covers them.
//!
//! Each header is one file with one plain struct. `parse` takes bytes and returns the struct or a
//! [`ParseError`]; `to_bytes` gives back, byte for byte, what was parsed, reserved bits included.
//! Nothing here allocates, panics on input, or keeps state, but for the choice of how CRCs are
//! computed ([`crc32`]), which changes no result.
//!
//! [`Packet`] puts the transport headers together: it is what a UDP datagram to port
//! [`ROCE_PORT`] holds.

#![forbid(unsafe_code)]

mod aeth;
mod atomic;
mod bth;
mod checksum;
pub mod crc32;
mod error;
pub mod ethernet;
#[doc(hidden)]
pub mod fuzz;
pub mod icrc;
mod immediate;
pub mod ipv4;
pub mod ipv6;
mod mtu;
mod opcode;
mod packet;
mod psn;
mod qpn;
mod reth;
pub mod udp;

pub use aeth::{Aeth, NakCode, Syndrome};
pub use atomic::{AtomicAckEth, AtomicEth};
pub use bth::Bth;
pub use checksum::Checksum;
pub use error::ParseError;
pub use immediate::{Deth, Ieth, ImmDt};
pub use mtu::Mtu;
pub use opcode::{Opcode, Operation, Position};
pub use packet::{ExtendedHeaders, MAX_HEADER_LENGTH, Packet};
pub use psn::Psn;
pub use qpn::Qpn;
pub use reth::Reth;

/// The UDP destination port of RoCEv2 (IANA: `roce`).
pub const ROCE_PORT: u16 = 4791;

/// Bytes of the invariant CRC at the end of every packet.
pub const ICRC_LENGTH: usize = 4;

/// The default partition key: full member of the default partition (IBTA 10.9.1.2).
pub const DEFAULT_PARTITION_KEY: u16 = 0xffff;
