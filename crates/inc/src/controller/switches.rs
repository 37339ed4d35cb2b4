//! What switches say, and which groups they serve.

use core::net::IpAddr;
use std::collections::{BTreeMap, HashSet};

use super::group::{End, Group};
use super::{ConnectionId, Controller, GroupId, Role, Switch, TokenKind, is_name};
use crate::plan::{Child, SwitchId};
use crate::protocol::{
    AbortReason, GroupIdentity, Presence, Refusal, SwitchLimits, SwitchReport, shortened,
};

impl Controller {
    pub(super) fn register(
        &mut self,
        connection: ConnectionId,
        name: String,
        address: IpAddr,
        limits: SwitchLimits,
        presence: Presence,
    ) {
        if let Err(refusal) = self.check_token(connection, TokenKind::Switch) {
            return self.turn_away(connection, refusal);
        }
        if let Some(reason) = &self.config.hosts_only {
            let detail = format!("no switch is taken here: {reason}");
            return self.turn_away(connection, Refusal::Protocol { detail });
        }
        if !is_name(&name) {
            self.turn_away(connection, Refusal::Name { what: "switch".to_owned() });
            return;
        }
        if let Err(refusal) = self.check_presence(&presence) {
            self.turn_away(connection, refusal);
            return;
        }
        if self.comes_back(connection, &name, address, limits, presence) {
            return;
        }
        if let Err(refusal) = self.check_switches() {
            return self.turn_away(connection, refusal);
        }
        let taken = self.real_switches().find_map(|other| {
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
        self.connections.set_role(connection, Role::Switch(id));
        let Presence { incarnation, held, .. } = presence;
        let (connection, communicators) = (Some(connection), BTreeMap::new());
        let switch = Switch {
            connection,
            incarnation,
            unnamed: held,
            unjudged: false,
            name,
            address,
            limits,
            host: None,
            place,
            communicators,
            inventory_until: Some(self.now + self.config.inventory_grace),
        };
        self.switches.insert(id, switch);
        if held == 0 {
            self.all_named(id);
        }
    }

    /// A communicator ends by itself; the switch destroys it when all below and above have heard.
    pub(super) fn reported(&mut self, switch: SwitchId, communicator: u64, report: SwitchReport) {
        let (id, node) = match self.find(switch, communicator) {
            Some((id, node)) => (id, Some(node)),
            None => match self.find_claimed(switch, communicator) {
                Some(id) => (id, None),
                None => return self.keep_early_report(switch, communicator, report),
            },
        };
        let reason = match report {
            SwitchReport::PeerLost { rank, detail, switch: below } => {
                let detail = self.on_tree(id, node, communicator, Some(rank), detail);
                // All that the data path of the switch above knows of it is the lowest rank below.
                let known = node.and_then(|node| self.switch_below(id, node, rank));
                let below = below.or_else(|| self.switch_below_held(communicator, rank));
                match (known, below.filter(|_| node.is_none())) {
                    (Some(switch), _) => switch.lost(detail),
                    (None, Some(address)) => self.lost_at(id, address, detail),
                    (None, None) => AbortReason::PeerLost { rank, detail },
                }
            }
            SwitchReport::ParentLost { address, detail } => {
                let detail = self.on_tree(id, node, communicator, None, detail);
                match self.switch_above(id, node) {
                    Some(switch) => switch.lost(detail),
                    None => self.lost_at(id, address, detail),
                }
            }
            SwitchReport::Mismatch { rank, detail } => {
                AbortReason::Mismatch { rank, detail: shortened(detail) }
            }
            // Of a process that was killed its memory may go before its queue pairs.
            SwitchReport::Violation { rank, detail } if self.is_away(id, rank) => {
                AbortReason::PeerLost { rank, detail: shortened(detail) }
            }
            SwitchReport::Violation { rank, detail } => {
                AbortReason::Violation { rank, detail: shortened(detail) }
            }
            SwitchReport::Overdue { rank, detail } => {
                AbortReason::Overdue { rank, detail: shortened(detail) }
            }
        };
        match node {
            Some(node) => self.gone(id, node),
            None => self.held_gone(communicator),
        }
        self.end_group(id, &End::Aborted(reason));
    }

    /// Whether the connection of a rank here has ended.
    fn is_away(&self, id: GroupId, rank: u32) -> bool {
        let member = self.groups.get(&id).and_then(|group| group.members.get(&rank));
        member.is_some_and(|member| member.connection.is_none())
    }

    /// What a switch says of a connection, with the tree that it is of and a rank's address there, where there are
    /// several trees.
    fn on_tree(
        &self,
        id: GroupId,
        node: Option<usize>,
        communicator: u64,
        rank: Option<u32>,
        detail: String,
    ) -> String {
        let Some(group) = self.groups.get(&id) else { return shortened(detail) };
        let (tree, trees) = match (&group.trees, node) {
            (Some(trees), Some(node)) => (trees.tree_of(node), trees.trees()),
            _ => {
                let held = self.held.values().filter(|held| held.group == group.identity);
                let last = held.map(|held| held.tree).max().unwrap_or_default();
                (self.held.get(&communicator).map_or(0, |held| held.tree), last + 1)
            }
        };
        if trees == 1 {
            return shortened(detail);
        }
        let address = rank.and_then(|rank| group.address_of(group.members.get(&rank)?, tree));
        let at = address.map_or_else(String::new, |address| format!(" at {address}"));
        shortened(format!("tree {tree}{at}: {detail}"))
    }

    /// The switch of the node above a node of a tree that this controller has made.
    fn switch_above(&self, id: GroupId, node: Option<usize>) -> Option<&Switch> {
        let nodes = self.groups.get(&id)?.trees.as_ref()?.nodes();
        self.switches.get(&nodes[nodes[node?].parent?].switch)
    }

    /// The switch of a node's child, if its edge has the name of this rank and it is no host.
    fn switch_below(&self, id: GroupId, node: usize, rank: u32) -> Option<&Switch> {
        let trees = self.groups.get(&id)?.trees.as_ref()?;
        let mut children = trees.nodes()[node].children.iter();
        match *children.find(|&&child| trees.lowest_rank(child) == rank)? {
            Child::Host { .. } => None,
            Child::Switch { node } => self.switches.get(&trees.nodes()[node].switch),
        }
    }

    pub(super) fn switch_lost(&mut self, id: SwitchId, detail: &str) {
        let Some(switch) = self.switches.remove(&id) else { return };
        self.early.remove(&id);
        let held: HashSet<GroupIdentity> =
            self.held.values().filter(|held| held.switch == id).map(|held| held.group).collect();
        self.forget_held(id);
        let uses = |(&group, state): (&GroupId, &Group)| {
            (state.uses(id) || held.contains(&state.identity)).then_some(group)
        };
        let groups: Vec<GroupId> = self.groups.iter().filter_map(uses).collect();
        for group in groups {
            let reason = switch.lost(detail.to_owned());
            self.end_group(group, &End::Aborted(reason));
        }
    }
}
