//! The transfer engine's decisions as pure state machines.

#![forbid(unsafe_code)]
#![allow(dead_code, unused_imports, reason = "what uses this comes with the flow")]

mod chain;
mod measure;
mod pieces;
mod request;
mod slab;
mod time;
mod wheel;

pub use request::{Opcode, Piece, Ranges, Request, SliceId, SubmitError, TaskId};
pub use time::Instant;
