//! Sockets and threads: where the state machines of `millstream_roce` meet the kernel.
//!
//! [`Progress`] runs one [`millstream_roce::Node`] over one UDP socket on one thread. Its parts
//! are public too: [`udp`] is the socket, with segmentation offload (UDP_SEGMENT and UDP_GRO) where
//! the kernel has it; [`address`] finds addresses to bind; [`baseline`] measures what the machine
//! can do without us, for comparison.
//!
//! The system calls are here, and all `unsafe` below the verbs.

pub mod address;
pub mod baseline;
mod batch;
mod clock;
mod counters;
mod link;
mod progress;
mod socket;
pub mod udp;

pub use clock::now;
pub use counters::DriverCounters;
pub use progress::{Failure, Guard, Progress, ProgressConfig, Shared};
pub use socket::{OpenError, SocketConfig, SocketInfo};
