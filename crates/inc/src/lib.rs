//! In-network collectives as pure state machines: slots, switch, host worker, controller.
//!
//! A switch ([`SwitchNode`]) has a reliable connection to every host of a communicator. What
//! arrives is added up in slots, and when all have contributed, the result goes back to everyone.
//! A host ([`HostWorker`]) turns one AllReduce into work requests and completions.
//!
//! On every edge, in WRITE mode:
//!
//! - The host opens a collective with a SEND: the [`Descriptor`]. Its vector follows at once as
//!   RDMA WRITEs, one for each segment, whose address and key are those of the host's own
//!   destination. The switch keeps them, and gives them to no one but the host that they came from.
//! - When all hosts have sent the same descriptor, the switch answers with an empty SEND. When all
//!   have contributed to a cell of a segment, it answers with an RDMA WRITE of that part of the
//!   result, to the address and key that the host gave. The last one of a segment has immediate
//!   data, so that the host sees the result as the completion of a receive.
//! - When hosts disagree, break the protocol or die, the rest gets a SEND that says who did what
//!   ([`Abort`]), and the communicator is over.
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
mod data_type;
mod descriptor;
mod error;
mod host;
pub mod kernels;
mod layout;
pub mod plan;
pub mod protocol;
mod ranks;
mod slots;
mod spec;
mod switch;

pub use abort::{ABORT_BYTES, Abort, Mismatch, Violation};
pub use call::{CollectiveCall, Mode};
pub use communicator::CommunicatorStatistics;
pub use data_type::{Collective, DataType, ReduceOperation, UnknownName};
pub use descriptor::{DESCRIPTOR_BYTES, Descriptor, DescriptorError, Field, MAX_COLLECTIVE_BYTES};
pub use error::{CollectiveError, StartError};
pub use host::{CONTROL_BYTES, Command, Completed, HostConfig, HostConfigError, HostWorker};
pub use kernels::Kernel;
pub use ranks::Ranks;
pub use spec::{
    ChildSpec, CommunicatorSpec, MAX_SEGMENT_BYTES, MAX_WINDOW, MAX_WORLD, ParentSpec, SpecError,
};
pub use switch::{CreateError, Created, Edge, SwitchConfig, SwitchEvent, SwitchNode, Uplink};
