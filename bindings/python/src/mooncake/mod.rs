//! The contract of the module `mooncake.engine`: return codes in place of exceptions, addresses in place of objects.
//!
//! The package `millstream-mooncake` shows these classes by that name. Addresses are the caller's word: memory is
//! copied so that a wrong one is a code and no crash, where the processor can tell.

mod arguments;
mod bounce;
mod engine;
mod jobs;
mod start;
mod started;

pub(crate) use arguments::{TransferNotify, TransferOpcode};
pub(crate) use engine::MooncakeEngine;
