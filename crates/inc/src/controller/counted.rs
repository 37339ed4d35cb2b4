//! What switches have counted, where somebody wants to see it.
//!
//! A node keeps its last two samples, so that a rate is that of the time between them, by the switch's
//! clock. What a switch says of ports that its node does not have is left out.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Controller, SwitchId};
use crate::plan::Child;
use crate::protocol::{FromController, PortCounters};

/// What moves through a port, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PortRates {
    /// Packets that the switch sends.
    pub packets_sent: f64,
    /// Packets that it receives.
    pub packets_received: f64,
    /// Payload bytes that it sends.
    pub payload_bytes_sent: f64,
    /// Payload bytes that it receives in order.
    pub payload_bytes_received: f64,
    /// How often it goes back to send again.
    pub retransmissions: f64,
}

impl PortRates {
    /// Between two counts, the time between which is not zero.
    fn between(before: &PortCounters, after: &PortCounters, seconds: f64) -> Self {
        // A switch that counts backwards has a rate of zero.
        let rate =
            |of: fn(&PortCounters) -> u64| of(after).saturating_sub(of(before)) as f64 / seconds;
        Self {
            packets_sent: rate(|it| it.packets_sent),
            packets_received: rate(|it| it.packets_received),
            payload_bytes_sent: rate(|it| it.payload_bytes_sent),
            payload_bytes_received: rate(|it| it.payload_bytes_received),
            retransmissions: rate(|it| it.retransmissions),
        }
    }
}

/// The last two samples of a node.
#[derive(Debug, Default)]
pub(super) struct Counted {
    latest: Sample,
    before: Sample,
}

/// By the ranks that name the ports.
#[derive(Debug, Default)]
struct Sample {
    at_ns: u64,
    collectives: Option<u64>,
    ports: BTreeMap<Option<u32>, PortCounters>,
}

impl Counted {
    /// Collectives that the node has taken part in.
    pub(super) fn collectives(&self) -> Option<u64> {
        self.latest.collectives
    }

    /// What a port has counted, and its rates between the last two samples.
    pub(super) fn port(&self, rank: Option<u32>) -> (Option<PortCounters>, Option<PortRates>) {
        let latest = self.latest.ports.get(&rank);
        let elapsed = self.latest.at_ns.saturating_sub(self.before.at_ns);
        let rates = latest.zip(self.before.ports.get(&rank)).filter(|_| elapsed > 0);
        let seconds = elapsed as f64 / 1e9;
        let rates = rates.map(|(latest, before)| PortRates::between(before, latest, seconds));
        (latest.copied(), rates)
    }
}

impl Controller {
    /// Asks all switches that are connected, but not hosts in their place, what they have counted. The answers are part of [`Controller::overview`].
    pub fn read_counters(&mut self) {
        let used = self.real_switches().filter(|switch| !switch.communicators.is_empty());
        let connections: Vec<_> = used.map(|switch| switch.connection).collect();
        for connection in connections {
            self.send_to(connection, FromController::ReadCounters);
        }
    }

    /// A switch says what a node has counted.
    pub(super) fn counted(
        &mut self,
        switch: SwitchId,
        communicator: u64,
        (at_ns, collectives): (u64, u64),
        ports: &[PortCounters],
    ) {
        // It may be over, which the switch has not heard when it counted.
        let Some((id, index)) = self.find(switch, communicator) else { return };
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(place) = group.trees.as_ref().and_then(|trees| trees.nodes().get(index)) else {
            return;
        };
        let trees = group.trees.as_ref();
        let rank = |&child: &Child| trees.map(|trees| trees.lowest_rank(child));
        let up = place.parent.map(|_| None);
        let known: Vec<Option<u32>> =
            up.into_iter().chain(place.children.iter().map(rank)).collect();
        let ports = ports.iter().filter(|port| known.contains(&port.rank));
        let ports = ports.map(|&port| (port.rank, port)).collect();
        let Some(node) = group.nodes.get_mut(index) else { return };
        let latest = Sample { at_ns, collectives: Some(collectives), ports };
        node.counted.before = core::mem::replace(&mut node.counted.latest, latest);
    }
}
