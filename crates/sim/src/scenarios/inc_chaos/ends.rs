//! What switches promise of communicators that are aborted: each node is over in time, whatever those around it acknowledge,
//! and nothing is left of it when it is removed.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use millstream_roce::Instant;

use super::build::{Network, number};
use super::director::Director;
use crate::NodeId;

/// What is known of nodes that end.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// When each was aborted.
    began: BTreeMap<u64, Instant>,
    /// Those that are over.
    over: BTreeSet<u64>,
    /// How long each machine stood still, and so did nothing in time.
    stood: BTreeMap<usize, Duration>,
}

impl Ends {
    /// A machine stands still.
    pub(super) fn stands(&mut self, machine: usize, length: Duration) {
        *self.stood.entry(machine).or_default() += length;
    }
}

impl Director {
    /// A node is over: all know, or have had their time.
    pub(super) fn end_of_node(&mut self, network: &mut Network<'_>, machine: usize, id: u64) {
        let now = network.now();
        let began = *self.ends.began.entry(id).or_insert(now);
        self.ends.over.insert(id);
        let Some(limit) = self.end_limit(network, machine) else { return };
        let time = now.saturating_duration_since(began);
        if time > limit {
            network.violate(format!("node {id:#x} was over {time:?} after its abort"));
        } else if time == limit {
            self.tally.one("switches: some did not hear of an abort in time");
        }
    }

    /// How long it may take.
    fn end_limit(&self, network: &Network<'_>, machine: usize) -> Option<Duration> {
        let switch = network.machine(NodeId(machine)).switch()?;
        let stood = self.ends.stood.get(&machine).copied().unwrap_or_default();
        Some(switch.config().abort_timeout + stood)
    }

    /// Looks at the nodes of a switch: no more slots are in use than there are, and what is aborted ends.
    pub(super) fn check_nodes(&mut self, network: &mut Network<'_>, machine: usize) {
        let Some(limit) = self.end_limit(network, machine) else { return };
        let now = network.now();
        let nodes: Vec<(usize, usize)> = self.nodes_on(machine).collect();
        let mut wrong = Vec::new();
        for (group, node) in nodes {
            let id = number(group, node);
            let switch = network.machine(NodeId(machine)).switch();
            let Some(it) = switch.and_then(|switch| switch.statistics(id)) else { continue };
            let slots = 2 * self.world.groups[group].sizes.window;
            if it.slots_in_use > slots {
                let used = it.slots_in_use;
                wrong.push(format!("node {node} of communicator {group} uses {used} of {slots}"));
            }
            if it.abort.is_none() || self.ends.over.contains(&id) {
                continue;
            }
            let began = *self.ends.began.entry(id).or_insert(now);
            if network.is_up(NodeId(machine)) && now > began + limit {
                self.ends.over.insert(id);
                wrong.push(format!("node {id:#x} was aborted at {began} and is not over"));
            }
        }
        wrong.into_iter().for_each(|what| network.violate(what));
    }

    /// What switches keep of nodes that are gone.
    pub(super) fn check_remains(&self, network: &Network<'_>) -> Vec<String> {
        // A communicator that goes on makes nodes of its own.
        if self.failover.is_some() {
            return Vec::new();
        }
        let mut wrong = Vec::new();
        for machine in self.world.hosts..self.world.hosts + self.world.switches {
            let Some(switch) = network.machine(NodeId(machine)).switch() else { continue };
            if !network.is_up(NodeId(machine)) {
                continue;
            }
            let ids = self.nodes_on(machine).map(|(group, node)| number(group, node));
            let left: Vec<u64> = ids.filter(|&id| switch.statistics(id).is_some()).collect();
            let memory: u64 = left.iter().map(|id| self.built.memory[id]).sum();
            let found = (switch.communicators(), switch.memory_used());
            if found != (left.len(), memory) {
                wrong.push(format!(
                    "the switch at {machine} has {found:?}, and of its nodes there are {left:x?} with {memory} bytes"
                ));
            }
        }
        wrong
    }
}
