//! Seeded network simulator for RoCEv2 nodes.
//!
//! A [`Simulation`] joins [`Machine`]s by links with a rate, a latency and a queue, which lose,
//! duplicate, hold back and corrupt packets by the dice of a seed, or by the script of a
//! [`Rule`]. Time is virtual: it jumps to the next event. The same seed gives the same run, packet
//! for packet, which one comparison of [`Simulation::digest`] shows.
//!
//! On every step checkers hold the machines to the invariants of the protocol. [`scenarios`] has
//! whole runs with names, parameters and a report.

#![forbid(unsafe_code)]

mod checker;
mod connection;
mod event;
mod link;
mod machine;
mod network;
mod packet;
mod pcap;
pub mod peer;
pub mod plan;
mod probability;
pub mod rank;
mod record;
mod rng;
mod rule;
pub mod scenarios;
mod violation;

pub use connection::ConnectionOptions;
pub use link::LinkOptions;
pub use machine::Machine;
pub use network::{HostOptions, IdentificationSource, LinkId, NodeId, Outcome, Simulation};
pub use packet::Datagram;
pub use pcap::PcapWriter;
pub use peer::Peer;
pub use probability::Probability;
pub use record::{Digest, Happening};
pub use rng::Rng;
pub use rule::{PacketInfo, Rule, Verdict};
pub use violation::Violation;
