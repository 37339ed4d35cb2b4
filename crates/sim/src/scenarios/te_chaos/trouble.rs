//! What goes wrong beside single packets and messages.

use core::time::Duration;

use millstream_transfer_core::RailState;

use super::director::{Director, Event, Network, core_time};
use super::process::{incarnation, life_of};
use super::world::{PROCESSES, duration};
use crate::NodeId;

/// Something that lasts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    /// A NIC is away.
    Nic(NodeId),
    /// Nothing goes from one NIC to another.
    Path(NodeId, NodeId),
    /// A process is down.
    Process(usize),
}

impl Director {
    pub(super) fn trouble(&mut self, network: &mut Network<'_>) {}

    pub(super) fn end_trouble(&mut self, network: &mut Network<'_>, trouble: Trouble) {}

    /// A process has asked an initiator in vain whether it is there.
    pub(super) fn notice_gone(&mut self, network: &mut Network<'_>, own: usize, gone: u64) {}
}
