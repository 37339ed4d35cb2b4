//! The transfer engine's decisions as pure state machines.

#![forbid(unsafe_code)]
#![allow(dead_code, unused_imports, reason = "what uses this comes with the flow")]

mod chain;
mod classic;
mod config;
mod flow;
mod measure;
mod output;
mod pieces;
mod policy;
mod rail;
mod request;
mod slab;
mod time;
mod wheel;

pub use classic::{Classic, Order, Priority};
pub use config::Config;
pub use flow::{Flow, MAX_RAILS};
pub use output::{End, Ended, Failure, Output, Post, Progress, SliceResult};
pub use policy::{Pick, Policy, Rails, SliceInfo};
pub use rail::{Access, Rail, RailId, RailSpec, RailState};
pub use request::{Opcode, Piece, Ranges, Request, SliceId, SubmitError, TaskId};
pub use time::Instant;
