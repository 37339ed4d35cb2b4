//! The suite of all providers on soft devices with two shards: what one shard does, two must do alike.

#[path = "suite/atomics.rs"]
mod atomics;
#[path = "suite/data.rs"]
mod data;
#[path = "suite/datagrams.rs"]
mod datagrams;
#[path = "suite/deregistration.rs"]
mod deregistration;
#[path = "suite/errors.rs"]
mod errors;
#[path = "suite/handlers.rs"]
mod handlers;
#[path = "suite/harness.rs"]
mod harness;
#[path = "suite/requests.rs"]
mod requests;
#[path = "suite/shared_receives.rs"]
mod shared_receives;
#[path = "suite/states.rs"]
mod states;
#[path = "suite/waiting.rs"]
mod waiting;

/// Of each device.
const SHARDS: usize = 2;
