//! In-network collectives as pure state machines: slots, switch, host worker, controller.
//!
//! The switches of a communicator are a tree with the hosts as leaves, at any level. A switch
//! ([`SwitchNode`]) has a reliable connection to each of its children and to the switch above, to which it is
//! as a host. What arrives from below is added up in slots; when all children have contributed to a cell,
//! it goes up, or at the root back down, to whoever is to get it. A host ([`HostWorker`]) turns one
//! [`CollectiveCall`] into work requests and completions.
//!
//! On every edge:
//!
//! - The child opens a collective with a SEND: the [`Descriptor`]. Its vector follows at once, a message
//!   for each segment: in WRITE mode an RDMA WRITE whose address and key are those of the host's own
//!   destination, which the switch keeps and gives to no one but the host that they came from; in SEND mode
//!   a SEND. For segments of which it has no bytes, an empty SEND says so (a credit).
//! - A vector that fits a packet behind the descriptor comes with it, and its result with the answer to it.
//! - When all hosts have sent the same descriptor, the switch answers with an empty SEND. When all
//!   have contributed to a cell of a segment, it answers with that part of the result: an RDMA WRITE to where
//!   the host wants it, or a SEND of the whole segment. The last one of a segment has immediate
//!   data, so that the host sees the result as the completion of a receive; who is to get nothing of a
//!   segment gets an empty one.
//! - A host that waits no longer says so, and the root asks down the tree who has not announced or contributed
//!   before it ends the communicator ([`Overdue`]).
//! - When hosts disagree, break the protocol or die, the rest gets a SEND that says who did what
//!   ([`Abort`]), and the communicator is over. A host whose next receive is in its own memory, for a result
//!   of SEND mode, finds its connection closed instead.
//!
//! Who belongs to a communicator and which switch serves it is the business of a controller
//! ([`controller::Controller`]), with which both ends speak the messages of [`protocol`].
//!
//! Segments are numbered from 0 over the life of the communicator, in 64 bits. A host is never
//! more than a window of segments ahead of its last result, and the switch has slots for two
//! windows, which is what the fastest can be ahead of the slowest.

#![forbid(unsafe_code)]

mod abort;
mod aggregator;
mod answer;
mod call;
mod communicator;
pub mod controller;
pub mod controllers;
mod data_type;
mod descriptor;
pub mod election;
mod error;
pub mod failover;
mod held_nodes;
mod host;
pub mod kernels;
mod layout;
mod mix;
pub mod plan;
pub mod protocol;
mod ranks;
mod slots;
mod spec;
mod stripe;
mod switch;
pub mod topology;

pub use abort::{ABORT_BYTES, Abort, Mismatch, NAMED_RANKS, Overdue, Violation};
pub use call::{CollectiveCall, Mode};
pub use communicator::CommunicatorStatistics;
pub use data_type::{Collective, DataType, ReduceOperation, UnknownName};
pub use descriptor::{DESCRIPTOR_BYTES, Descriptor, DescriptorError, Field, MAX_COLLECTIVE_BYTES};
pub use error::{CollectiveError, StartError};
pub use held_nodes::HeldNodes;
pub use host::{
    CONTROL_BYTES, Command, Completed, Halted, HostConfig, HostConfigError, HostWorker,
};
pub use kernels::Kernel;
pub use ranks::Ranks;
pub use spec::{
    ACKNOWLEDGEMENT_DELAY, ChildSpec, CommunicatorOptions, CommunicatorSpec, MAX_SEGMENT_BYTES,
    MAX_WINDOW, MAX_WORLD, ParentSpec, SpecError, send_window_up,
};
pub use stripe::{MAX_TREES, Stripe};
pub use switch::{
    CommunicatorCounts, CreateError, Created, Edge, MAX_QUEUE_PAIRS, PortCounts,
    PreparedCommunicator, SwitchConfig, SwitchEvent, SwitchNode, Uplink, packets_too_long,
};
