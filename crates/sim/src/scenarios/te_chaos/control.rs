//! The control port: requests to connect and to fence, and their answers. Messages are lost, late,
//! doubled and out of order.

use core::time::Duration;

use millstream_transfer_core::{Initiator, RailId, TargetOutput};
use millstream_wire::Psn;

use super::director::{Director, Event, Network, Phase, core_time};
use super::process::{End, Wanted, incarnation, life_of};
use super::world::{address, duration};
use crate::connection::Remote;

/// A message. `target` is the incarnation that its sender takes the peer for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Message {
    Connect {
        initiator: Initiator,
        epoch: u64,
        target: u64,
        nic: u16,
        end: End,
    },
    Accepted {
        initiator: Initiator,
        epoch: u64,
        target: u64,
        end: End,
    },
    Refused {
        initiator: Initiator,
        epoch: u64,
        target: u64,
        floor: u64,
    },
    Unable {
        initiator: Initiator,
        epoch: u64,
        target: u64,
    },
    Fence {
        initiator: Initiator,
        epoch: u64,
        target: u64,
    },
    Confirmed {
        initiator: Initiator,
        epoch: u64,
        target: u64,
    },
    /// The peer is not the one that was meant.
    Restarted {
        initiator: Initiator,
        target: u64,
        present: u64,
    },
}

impl Director {
    /// Sends a message, perhaps.
    pub(super) fn send(&mut self, network: &mut Network<'_>, message: Message) {}

    pub(super) fn receive(&mut self, network: &mut Network<'_>, message: Message) {}

    /// Does what the target's side of a process wants.
    pub(super) fn pump_target(&mut self, network: &mut Network<'_>, own: usize) {}
}
