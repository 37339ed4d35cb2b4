//! What switches say, and which groups they serve.

use core::net::IpAddr;
use std::collections::{BTreeSet, HashMap};

use super::Output;
use super::group::{End, Group};
use super::{ConnectionId, Controller, ControllerConfig, GroupId, Role, Switch, is_name};
use crate::plan::{Candidate, Child, PlanOptions, SwitchId, Tree};
use crate::protocol::{AbortReason, FromController, Refusal, SwitchReport, shortened};

impl Controller {
    pub(super) fn register(&mut self, connection: ConnectionId, name: String, address: IpAddr) {
        if !is_name(&name) {
            self.turn_away(connection, Refusal::Name { what: "switch".to_owned() });
            return;
        }
        let taken = self.switches.values().find_map(|other| {
            let what = match () {
                () if other.name == name => "name",
                () if other.address == address => "address",
                () => return None,
            };
            let (name, address, what) = (other.name.clone(), other.address, what.to_owned());
            Some(Refusal::SwitchTaken { name, address, what })
        });
        if let Some(refusal) = taken {
            self.turn_away(connection, refusal);
            return;
        }
        let id = SwitchId(self.next_switch);
        self.next_switch += 1;
        self.set_role(connection, Role::Switch(id));
        let communicators = BTreeSet::new();
        self.switches.insert(id, Switch { connection, name, address, communicators });
        self.send(connection, FromController::Registered);
        let waiting = |(&id, group): (&GroupId, &Group)| group.is_full().then_some(id);
        let waiting: Vec<GroupId> = self.groups.iter().filter_map(waiting).collect();
        for id in waiting {
            self.plan(id);
        }
    }

    /// Plans the tree of a full group that has none, if there is a switch, and tells the ranks.
    pub(super) fn plan(&mut self, id: GroupId) {
        let mut planned: HashMap<SwitchId, usize> = HashMap::new();
        for switch in self.groups.values().flat_map(Group::planned) {
            *planned.entry(switch).or_default() += 1;
        }
        let candidate = |(&switch, state): (&SwitchId, &Switch)| {
            let planned = planned.get(&switch).copied().unwrap_or_default();
            Candidate { switch, communicators: state.communicators.len() + planned }
        };
        let candidates: Vec<Candidate> = self.switches.iter().map(candidate).collect();
        let Some(group) = self.groups.get_mut(&id).filter(|group| group.tree.is_none()) else {
            return;
        };
        let hosts: Vec<IpAddr> = group.members.values().map(|member| member.address).collect();
        let options = PlanOptions { fan_in: self.config.fan_in, hosts: &hosts };
        // Without a switch the group waits for one until its deadline.
        let Ok(tree) = Tree::plan(group.world, &candidates, &options) else { return };
        for (&rank, member) in &group.members {
            let leaf = tree.leaf_of(rank).and_then(|node| tree.nodes().get(node));
            let switch = leaf.and_then(|leaf| self.switches.get(&leaf.switch));
            if let Some(&Switch { address: switch_address, .. }) = switch {
                let ControllerConfig { segment_bytes, window, .. } = self.config;
                let message = FromController::GroupReady { switch_address, segment_bytes, window };
                let connection = member.connection;
                self.outputs.push_back(Output::Send { connection, message });
            }
        }
        group.tree = Some(tree);
    }

    /// A communicator ends by itself; the switch destroys it when all below and above have heard.
    pub(super) fn reported(&mut self, switch: SwitchId, communicator: u64, report: SwitchReport) {
        let Some((id, node)) = self.find(switch, communicator) else { return };
        let reason = match report {
            SwitchReport::PeerLost { rank, detail } => {
                let detail = shortened(detail);
                match self.switch_below(id, node, rank) {
                    // All that the switch above knows of it is the lowest rank below.
                    Some(Switch { name, address, .. }) => {
                        AbortReason::SwitchLost { name: name.clone(), address: *address, detail }
                    }
                    None => AbortReason::PeerLost { rank, detail },
                }
            }
            SwitchReport::Mismatch { rank, detail } => {
                AbortReason::Mismatch { rank, detail: shortened(detail) }
            }
            SwitchReport::Violation { rank, detail } => {
                AbortReason::Violation { rank, detail: shortened(detail) }
            }
            SwitchReport::Overdue { rank, detail } => {
                AbortReason::Overdue { rank, detail: shortened(detail) }
            }
        };
        self.gone(id, node);
        self.end_group(id, &End::Aborted(reason));
    }

    /// The switch of a node's child, if its edge has the name of this rank and it is no host.
    fn switch_below(&self, id: GroupId, node: usize, rank: u32) -> Option<&Switch> {
        let tree = self.groups.get(&id)?.tree.as_ref()?;
        let mut children = tree.nodes()[node].children.iter();
        match *children.find(|&&child| tree.lowest_rank(child) == rank)? {
            Child::Host { .. } => None,
            Child::Switch { node } => self.switches.get(&tree.nodes()[node].switch),
        }
    }

    pub(super) fn switch_lost(&mut self, id: SwitchId, detail: &str) {
        let Some(switch) = self.switches.remove(&id) else { return };
        let uses = |(&group, state): (&GroupId, &Group)| state.uses(id).then_some(group);
        let groups: Vec<GroupId> = self.groups.iter().filter_map(uses).collect();
        for group in groups {
            let (name, address) = (switch.name.clone(), switch.address);
            let reason = AbortReason::SwitchLost { name, address, detail: detail.to_owned() };
            self.end_group(group, &End::Aborted(reason));
        }
    }
}
