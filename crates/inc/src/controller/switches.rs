//! What switches say, and which groups they serve.

use core::net::IpAddr;
use std::collections::BTreeSet;

use super::Output;
use super::group::{End, Group};
use super::{ConnectionId, Controller, ControllerConfig, GroupId, Role, Switch, is_name};
use crate::plan::{Candidate, PlanOptions, SwitchId, Tree};
use crate::protocol::{
    AbortReason, FromController, Plan, Refusal, SwitchEdge, SwitchReport, shortened,
};

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

    /// Finds a switch for a full group that has none, if there is one, and tells the ranks.
    pub(super) fn plan(&mut self, id: GroupId) {
        let planned = |switch| {
            let asked_for = |group: &&Group| group.uses(switch) && !group.requested;
            self.groups.values().filter(asked_for).count()
        };
        let candidates: Vec<Candidate> = self
            .switches
            .iter()
            .map(|(&switch, state)| {
                let communicators = state.communicators.len() + planned(switch);
                Candidate { switch, communicators }
            })
            .collect();
        let Some(group) = self.groups.get_mut(&id).filter(|group| group.tree.is_none()) else {
            return;
        };
        // Without a switch the group waits for one until its deadline.
        let options = PlanOptions::default();
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

    /// The group of a communicator that this switch serves.
    fn find(&self, switch: SwitchId, communicator: u64) -> Option<GroupId> {
        let is_it = |group: &Group| group.communicator == Some(communicator) && group.uses(switch);
        self.groups.iter().find(|(_, group)| is_it(group)).map(|(&id, _)| id)
    }

    pub(super) fn created(&mut self, switch: SwitchId, communicator: u64, edges: &[SwitchEdge]) {
        // When there is none, it has failed meanwhile, and the switch was told.
        let Some(id) = self.find(switch, communicator) else { return };
        let (Some(group), Some(switch)) = (self.groups.get_mut(&id), self.switches.get(&switch))
        else {
            return;
        };
        if group.ready {
            return;
        }
        let path_mtu = group.children().map(|(_, path_mtu)| path_mtu);
        let plans = path_mtu.zip(edges.first()).and_then(|(path_mtu, edge)| {
            let plan = Plan {
                communicator,
                switch: switch.name.clone(),
                address: switch.address,
                qpn: edge.qpn,
                psn: edge.psn,
                path_mtu,
            };
            group.plans(edges, &plan)
        });
        let Some(plans) = plans else {
            let reason = "it made the wrong queue pairs".to_owned();
            let refusal = Refusal::SwitchFailed { name: switch.name.clone(), reason };
            self.end_group(id, &End::Refused(refusal));
            return;
        };
        group.ready = true;
        group.deadline = None;
        for (connection, plan) in plans {
            self.send(connection, FromController::Plan(plan));
        }
    }

    pub(super) fn not_created(&mut self, switch: SwitchId, communicator: u64, reason: String) {
        let group = self.find(switch, communicator);
        let Some(switch) = self.switches.get_mut(&switch) else { return };
        switch.communicators.remove(&communicator);
        let (name, reason) = (switch.name.clone(), shortened(reason));
        if let Some(id) = group {
            self.forget_request(id);
            self.end_group(id, &End::Refused(Refusal::SwitchFailed { name, reason }));
        }
    }

    /// A communicator ends by itself; the switch destroys it when all hosts have heard.
    pub(super) fn reported(&mut self, switch: SwitchId, communicator: u64, report: SwitchReport) {
        let Some(id) = self.find(switch, communicator) else { return };
        let reason = match report {
            SwitchReport::PeerLost { rank, detail } => {
                AbortReason::PeerLost { rank, detail: shortened(detail) }
            }
            SwitchReport::Mismatch { rank, detail } => {
                AbortReason::Mismatch { rank, detail: shortened(detail) }
            }
            SwitchReport::Violation { rank, detail } => {
                AbortReason::Violation { rank, detail: shortened(detail) }
            }
        };
        self.forget_request(id);
        self.end_group(id, &End::Aborted(reason));
    }

    /// The switch knows that the communicator is over.
    fn forget_request(&mut self, id: GroupId) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.requested = false;
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
