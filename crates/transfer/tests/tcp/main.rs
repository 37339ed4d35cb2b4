//! The transport `tcp`: engines with each other, in each framing, and strangers at their ports.

#[path = "../common/mod.rs"]
mod common;

#[cfg(feature = "tls")]
#[path = "../common/authority.rs"]
mod authority;
mod busy_poll;
mod checksums;
mod closing;
mod ending;
mod fixture;
mod framings;
mod memory;
mod peers;
mod strangers;
#[cfg(feature = "tls")]
mod tls;
mod token;
