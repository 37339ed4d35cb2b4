//! What every provider must do alike: two devices, data, errors, states, waiting, closing.
//!
//! `MILLSTREAM_TEST_PROVIDER` chooses: `soft` (the default) on loopback addresses, by the driver
//! that `MILLSTREAM_TEST_DRIVER` names (`udp`, the default, or `packet`, which needs CAP_NET_RAW),
//! or `ibverbs` on a device of the system, opened twice and sending to itself: the one that
//! `MILLSTREAM_TEST_DEVICE` names, or the first that works, with the GID of `MC_GID_INDEX`, or the
//! best. `cargo xtask test` runs this binary over packet sockets too, and `cargo xtask interop` on the
//! kernel's soft-RoCE.

mod atomics;
mod data;
mod datagrams;
mod deregistration;
mod errors;
mod handlers;
mod harness;
mod requests;
mod shared_receives;
mod states;
mod waiting;

/// Of soft devices. `sharded_suite.rs` has more.
const SHARDS: usize = 1;
