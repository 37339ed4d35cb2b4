//! Sockets and threads: where the state machines of `millstream_roce` meet the kernel.
//!
//! [`Progress`] runs one [`millstream_roce::Node`] over one socket. Whoever asks something of the node
//! sends it on its own thread. Whoever waits for something of it, by [`wait`], receives and lets the node
//! work; of several who wait one does, and the others follow. A thread of its own, the driver, does so
//! when nobody waits. The socket is one of two kinds, see [`Driver`]: a UDP socket ([`udp`], public for those who measure), or a packet
//! socket. Both use segmentation offload where the kernel has it. [`address`] finds addresses to
//! bind; [`baseline`] measures what the machine can do without us, for comparison.
//!
//! The system calls are here, and all `unsafe` below the verbs.

// With `--cfg millstream_loom` only the model checks are built, and not all code is in them.
#![cfg_attr(millstream_loom, allow(dead_code))]

pub mod address;
pub mod affinity;
mod allocator;
#[cfg(not(millstream_loom))]
pub mod baseline;
mod batch;
mod busy_poll;
#[cfg_attr(millstream_loom, path = "model/clock.rs")]
mod clock;
mod control;
mod counters;
mod crc32;
mod credentials;
#[cfg(not(millstream_loom))]
pub mod cuda;
#[cfg_attr(millstream_loom, path = "model/descriptors.rs")]
mod descriptors;
mod driver;
pub mod exposition;
#[cfg(not(millstream_loom))]
pub mod file_io;
pub mod file_table;
mod forks;
pub mod guarded;
mod link;
#[cfg(millstream_loom)]
mod model;
#[cfg(not(millstream_loom))]
mod names;
#[cfg(not(millstream_loom))]
pub mod own_memory;
#[cfg(not(millstream_loom))]
mod packet;
#[cfg(not(millstream_loom))]
mod polling;
mod prefetch;
#[cfg(not(millstream_loom))]
pub mod probe;
mod progress;
mod shared_address;
#[cfg(not(millstream_loom))]
pub mod shared_memory;
mod socket;
#[cfg(not(millstream_loom))]
pub mod stream;
#[cfg_attr(millstream_loom, path = "model/sync.rs")]
mod sync;
#[cfg(not(millstream_loom))]
pub mod tls;
#[cfg(not(millstream_loom))]
pub mod token;
pub mod udp;
mod waiters;
mod wake;

pub use allocator::give_back_large_blocks;
pub use busy_poll::{BusyPoll, Polling, Wait};
pub use clock::now;
pub use counters::DriverCounters;
pub use driver::{Driver, UnknownDriver};
pub use forks::{ends_between_forks, forks};
#[cfg(not(millstream_loom))]
pub use names::lookup;
#[cfg(not(millstream_loom))]
pub use polling::{PollSet, Sleeper, Waiting};
pub use prefetch::{prefetch, prefetch_all};
pub use progress::{
    AfterRound, Failure, Guard, Hook, MAX_ROUND_DATAGRAMS, NodeGuard, Opened, Progress,
    ProgressConfig, Shared, Worker, wait,
};
pub use socket::{OpenError, SocketConfig, SocketInfo};
pub use waiters::Waiters;
