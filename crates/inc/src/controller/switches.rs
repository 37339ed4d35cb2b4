//! What switches say, and which groups they serve.

use core::net::IpAddr;
use std::collections::BTreeSet;

use super::group::{End, Group};
use super::{ConnectionId, Controller, GroupId, Role, Switch, is_name};
use crate::plan::{Child, SwitchId};
use crate::protocol::{
    AbortReason, FromController, Refusal, SwitchLimits, SwitchReport, shortened,
};

impl Controller {
    pub(super) fn register(
        &mut self,
        connection: ConnectionId,
        name: String,
        address: IpAddr,
        limits: SwitchLimits,
    ) {
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
        let place = match self.place_of(&name, address) {
            Ok(place) => place,
            Err(refusal) => {
                self.turn_away(connection, refusal);
                return;
            }
        };
        let id = SwitchId(self.next_switch);
        self.next_switch += 1;
        self.set_role(connection, Role::Switch(id));
        let communicators = BTreeSet::new();
        self.switches
            .insert(id, Switch { connection, name, address, limits, place, communicators });
        self.send(connection, FromController::Registered);
        self.plan_waiting();
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
