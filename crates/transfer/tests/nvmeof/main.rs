//! Segments that are files: of another engine, through both ways to do I/O, and mapped here.

#[path = "../common/mod.rs"]
mod common;

#[cfg(feature = "tls")]
#[path = "../common/authority.rs"]
mod authority;
mod connecting;
mod ending;
mod fences;
mod fixture;
mod input_output;
mod late;
mod mapped;
mod refused;
mod strangers;
mod targets;
#[cfg(feature = "tls")]
mod tls;
mod token;
