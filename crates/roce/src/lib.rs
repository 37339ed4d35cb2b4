//! The RoCEv2 endpoint, reliable connections and unreliable datagrams, as a pure state machine.
//!
//! An [`Endpoint`] is one device: queue pairs, completion queues and the protocol between them.
//! Bytes, time and randomness go in; bytes, deadlines, completions and events come out. It owns no
//! socket, thread or clock, so the same code runs under real drivers and under the simulator.
//!
//! It delivers what arrives to a [`Memory`]. A host's memory stores; a switch's memory adds.
//!
//! Vocabulary, as in other sans-IO stacks:
//! - inputs: [`Node::handle_datagram`], [`Node::handle_timeout`];
//! - commands: [`Endpoint::post_send`], [`Endpoint::post_receive`],
//!   [`Endpoint::modify_queue_pair`];
//! - outputs: [`Node::poll_transmit`], [`Node::poll_timeout`],
//!   [`Endpoint::poll_completions`], [`Endpoint::poll_event`].
//!
//! After every input or command, call `poll_transmit` until it returns `false`, then `poll_timeout`.
//! Time must not go backwards.

#![forbid(unsafe_code)]

mod admission;
mod attributes;
mod budget;
mod completion;
mod config;
mod congestion;
mod counters;
mod datagrams;
mod early;
mod endpoint;
mod error;
mod events;
mod fetches;
mod icrc_check;
mod inline;
mod memory;
mod node;
mod notifications;
mod numbers;
mod owned_memory;
mod pieces;
mod port_address;
mod queue_pair;
mod receives;
mod region;
mod replies;
mod request_packets;
mod requester;
mod responder;
mod rnr;
mod round_trip;
mod time;
mod timers;
mod transitions;
mod usage;
mod window;
mod work;

pub use attributes::{Attribute, ModifyError, QueuePairAttributes, QueuePairState};
pub use completion::{
    Completion, CompletionOperation, CompletionQueueId, CompletionStatus, MAX_COMPLETIONS,
};
pub use config::{EndpointConfig, QueuePairCapabilities, QueuePairConfig, Transport};
pub use counters::{Counters, QueuePairCounters};
pub use datagrams::{DatagramDestination, GLOBAL_ROUTE_HEADER_LENGTH};
pub use endpoint::Endpoint;
pub use error::{CreateError, PostError};
pub use events::AsyncEvent;
pub use icrc_check::IcrcCheck;
pub use inline::MAX_INLINE;
pub use memory::{AccessDenied, AccessKind, AtomicOperation, Destination, Memory, RemoteAccess};
pub use node::{DatagramMeta, Identification, Node, Transmit, icrc};
pub use notifications::Notifications;
pub use numbers::{QueuePairNumbers, SLOTS, slot_of};
pub use owned_memory::OwnedMemory;
pub use port_address::PortAddress;
pub use receives::SharedReceiveQueueId;
pub use region::{Access, ProtectionDomainId, Region, RegionError, RegionTable};
pub use rnr::{RNR_TIMERS, encode_rnr_timer};
pub use time::Instant;
pub use transitions::attributes_of_transition;
pub use usage::Usage;
pub use work::{
    ATOMIC_LENGTH, MAX_SCATTER_GATHER, Piece, ReceiveRequest, SendOperation, SendRequest,
};
