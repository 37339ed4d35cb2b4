//! What switches have from before, their nodes of trees, and switches that are away.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use millstream_roce::Instant;

use super::group::{End, Group};
use super::quotas::OwnedNode;
use super::{ConnectionId, Controller, GroupId, Role, Switch};
use crate::plan::{Forest, SwitchId};
use crate::protocol::{
    AbortReason, FromController, GroupIdentity, HeldNode, MAX_HELD, MAX_HELD_AT_ONCE, Presence,
    Refusal, SwitchBelow, SwitchLimits, SwitchReport, shortened,
};
use crate::slots::MAX_CHILDREN;

/// Nodes of all switches that come back and were made by an earlier controller.
const MAX_ALL_HELD: usize = 1 << 16;

/// Reports of one switch that are kept until their groups are claimed.
const MAX_EARLY: usize = 1024;

/// A node that a switch has, of a tree that this controller has not made.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) switch: SwitchId,
    pub(super) group: GroupIdentity,
    pub(super) children: usize,
    /// Of which tree of its group it is.
    pub(super) tree: usize,
    below: Vec<SwitchBelow>,
    /// Its switch knows that it is over.
    gone: bool,
}

/// A node that ends by itself: its switch is told to destroy it if it is there at some time still.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    pub(super) until: Instant,
    pub(super) switch: SwitchId,
    pub(super) communicator: u64,
    pub(super) children: usize,
}

impl Switch {
    /// That it is lost, and how that is known.
    pub(super) fn lost(&self, detail: String) -> AbortReason {
        let (name, incarnation) = (self.name.clone(), Some(self.incarnation));
        AbortReason::SwitchLost { name, address: self.address, detail, incarnation }
    }
}

impl Controller {
    /// Whether what a switch says of itself can be.
    pub(super) fn check_presence(&self, presence: &Presence) -> Result<(), Refusal> {
        if presence.held > MAX_HELD {
            let detail = format!("{} nodes are out of range: up to {MAX_HELD}", presence.held);
            return Err(Refusal::Protocol { detail });
        }
        let announced = self.switches.values().map(|switch| switch.unnamed as usize);
        let all = self.held.len() + announced.sum::<usize>() + presence.held as usize;
        if all > MAX_ALL_HELD {
            let what = "nodes that switches have from before".to_owned();
            return Err(Refusal::Limit { what, limit: MAX_ALL_HELD });
        }
        Ok(())
    }

    /// A switch that was away is there again. `false` when it is another process: that one is lost. While the old
    /// connection is open and answers, the new one is refused.
    pub(super) fn comes_back(
        &mut self,
        connection: ConnectionId,
        name: &str,
        address: IpAddr,
        limits: SwitchLimits,
        presence: Presence,
    ) -> bool {
        let mut all = self.switches.iter();
        let is_it = |it: &Switch| it.host.is_none() && it.name == name && it.address == address;
        let Some((&id, _)) = all.find(|(_, switch)| is_it(switch)) else { return false };
        let Some(switch) = self.switches.get_mut(&id) else { return false };
        if let Some(old) = switch.connection.filter(|old| self.connections.contains_key(old)) {
            // Anybody can say this name. If nobody is there, this closes the old connection.
            self.ask_whether_there(Some(old));
            let (name, address, what) = (name.to_owned(), address, "name".to_owned());
            self.turn_away(connection, Refusal::SwitchTaken { name, address, what });
            return true;
        }
        if switch.incarnation == presence.incarnation {
            switch.connection = Some(connection);
            (switch.limits, switch.unnamed) = (limits, presence.held);
            switch.unjudged = presence.held == 0;
            switch.communicators.clear();
            switch.inventory_until = Some(self.now + self.config.inventory_grace);
            // Answers of the old connection may be lost.
            self.end_forming(id, "its control connection was closed");
            self.connections.set_role(connection, Role::Switch(id));
            if presence.held == 0 {
                // Its reports, which may say why, are behind this message. It answers when it has written them all.
                self.send(connection, FromController::Ping);
            }
        } else {
            self.switch_lost(id, "it was restarted");
        }
        self.switches.contains_key(&id)
    }

    /// A switch answers: it has written all that it says first.
    pub(super) fn has_introduced_itself(&mut self, id: SwitchId) {
        if self.switches.get(&id).is_some_and(|switch| switch.unjudged) {
            self.all_named(id);
        }
    }

    /// A switch names nodes that it has.
    pub(super) fn holds(&mut self, id: SwitchId, nodes: Vec<HeldNode>) {
        let Some(switch) = self.switches.get_mut(&id) else { return };
        let Some(connection) = switch.connection else { return };
        let count = nodes.len();
        let broken = |node: &HeldNode| {
            node.children as usize > MAX_CHILDREN || node.below.len() > node.children as usize
        };
        if count == 0
            || count > MAX_HELD_AT_ONCE.min(switch.unnamed as usize)
            || nodes.iter().any(broken)
        {
            let detail = "it named more nodes than it has, or nodes that cannot be".to_owned();
            return self.misbehaved(connection, detail);
        }
        switch.unnamed -= count as u32;
        let last = switch.unnamed == 0;
        let owned = |node: &HeldNode| {
            let &HeldNode { communicator, group, children, .. } = node;
            // Others can say its number, too.
            let owned = match self.is_known(id, communicator, group) {
                Some(true) => self.owned_node(communicator, children as usize),
                Some(false) | None => OwnedNode::default(),
            };
            (communicator, owned)
        };
        let owned: Vec<_> = nodes.iter().map(owned).collect();
        if let Some(switch) = self.switches.get_mut(&id) {
            switch.communicators.extend(owned);
        }
        let until = self.now + self.config.inventory_grace;
        for HeldNode { group, communicator, children, below, tree } in nodes {
            let children = children as usize;
            let tree = tree.into();
            let held = Held { switch: id, group, children, tree, below, gone: false };
            if let Some(same) = self.is_known(id, communicator, group) {
                if !same {
                    // Another one has the number: nobody can ask for this one.
                    let message = FromController::EndCommunicator { communicator };
                    self.end_node(&held, communicator, message);
                }
                continue;
            }
            if self.ended.iter().any(|ended| ended.group == group) {
                let message = FromController::DestroyCommunicator { communicator };
                self.end_node(&held, communicator, message);
            } else {
                self.held.insert(communicator, held);
                self.unclaimed.push_back((until, communicator));
            }
        }
        self.apply_early_reports();
        if last && self.switches.contains_key(&id) {
            self.all_named(id);
        }
    }

    /// Keeps what a switch that has just come says of a group that no rank has claimed yet.
    pub(super) fn keep_early_report(
        &mut self,
        id: SwitchId,
        communicator: u64,
        mut report: SwitchReport,
    ) {
        let Some(switch) = self.switches.get(&id) else { return };
        let known = switch.unnamed as usize + switch.communicators.len();
        let kept = self.early.get(&id).map_or(0, BTreeMap::len);
        if switch.inventory_until.is_none() || kept >= (known + 64).min(MAX_EARLY) {
            return;
        }
        let (SwitchReport::PeerLost { detail, .. }
        | SwitchReport::ParentLost { detail, .. }
        | SwitchReport::Mismatch { detail, .. }
        | SwitchReport::Violation { detail, .. }
        | SwitchReport::Overdue { detail, .. }) = &mut report;
        *detail = shortened(core::mem::take(detail));
        self.early.entry(id).or_default().entry(communicator).or_insert(report);
    }

    /// Acts on reports whose groups are known now.
    pub(super) fn apply_early_reports(&mut self) {
        let early = |(&id, reports): (&SwitchId, &BTreeMap<u64, SwitchReport>)| {
            let known = |&&number: &&u64| self.find_claimed(id, number).is_some();
            reports.keys().filter(known).map(|&number| (id, number)).collect::<Vec<_>>()
        };
        let known: Vec<(SwitchId, u64)> = self.early.iter().flat_map(early).collect();
        for (id, communicator) in known {
            let Some(reports) = self.early.get_mut(&id) else { continue };
            let report = reports.remove(&communicator);
            if reports.is_empty() {
                self.early.remove(&id);
            }
            if let Some(report) = report {
                self.reported(id, communicator, report);
            }
        }
    }

    /// Switches had time to name what they have.
    pub(super) fn end_inventories(&mut self, now: Instant) {
        let (mut late, mut mute) = (Vec::new(), Vec::new());
        for id in self.switches.due(now) {
            let Some(switch) = self.switches.get_mut(&id) else { continue };
            switch.inventory_until = None;
            self.early.remove(&id);
            late.extend(switch.connection.filter(|_| switch.unnamed > 0));
            mute.extend(switch.unjudged.then_some(id));
        }
        for connection in late {
            self.misbehaved(connection, "it did not name the nodes that it has in time".to_owned());
        }
        for switch in mute {
            self.all_named(switch);
        }
    }

    /// Whether a node with this number is known to be on this switch, for this group. `None` when no node has the
    /// number.
    fn is_known(&self, id: SwitchId, communicator: u64, group: GroupIdentity) -> Option<bool> {
        if self.nodes.contains_key(&communicator) {
            let found = self.find(id, communicator).and_then(|(known, _)| self.groups.get(&known));
            return Some(found.is_some_and(|known| known.identity == group));
        }
        let held = self.held.get(&communicator)?;
        Some(held.switch == id && held.group == group)
    }

    /// It is known what a switch has: what it should have and has not is lost.
    pub(super) fn all_named(&mut self, id: SwitchId) {
        if let Some(switch) = self.switches.get_mut(&id) {
            switch.unjudged = false;
        }
        let Some(switch) = self.switches.get(&id) else { return };
        let Some(connection) = switch.connection else { return };
        let reason = switch.lost("it has lost its part of the communicator".to_owned());
        let has = |communicator: &u64| switch.communicators.contains_key(communicator);
        let mut lost: BTreeSet<GroupId> = BTreeSet::new();
        for (&group, state) in self.groups.iter() {
            let places = state.trees.iter().flat_map(Forest::nodes).zip(&state.nodes);
            let mut ours = places.filter(|(place, _)| place.switch == id);
            if state.ready && !ours.all(|(_, node)| has(&node.communicator)) {
                lost.insert(group);
            }
        }
        let missing = |(&communicator, held): (&u64, &Held)| {
            (held.switch == id && !has(&communicator)).then_some((communicator, held.group))
        };
        let missing: Vec<(u64, GroupIdentity)> = self.held.iter().filter_map(missing).collect();
        if !missing.is_empty() {
            for (communicator, group) in missing {
                self.held.remove(&communicator);
                lost.extend(self.group_of(group));
            }
            self.unclaimed.retain(|(_, communicator)| self.held.contains_key(communicator));
        }
        for group in lost {
            self.end_group(group, &End::Aborted(reason.clone()));
        }
        self.send(connection, FromController::Registered);
        self.tell_controllers(connection);
        self.replanning.has_new_room = true;
    }

    /// The connection of a switch is gone. Communicators that are ready do without.
    pub(super) fn switch_away(&mut self, id: SwitchId, detail: &str) {
        let Some(switch) = self.switches.get_mut(&id) else { return };
        switch.connection = None;
        (switch.unnamed, switch.unjudged) = (0, false);
        switch.inventory_until = None;
        self.early.remove(&id);
        self.end_forming(id, detail);
        self.forget_switches();
    }

    /// Ends the groups that are being made with a switch.
    fn end_forming(&mut self, id: SwitchId, detail: &str) {
        let Some(switch) = self.switches.get(&id) else { return };
        let reason = switch.lost(detail.to_owned());
        let uses =
            |(&group, state): (&GroupId, &Group)| (state.uses(id) && !state.ready).then_some(group);
        let groups: Vec<GroupId> = self.groups.iter().filter_map(uses).collect();
        for group in groups {
            self.end_group(group, &End::Aborted(reason.clone()));
        }
    }

    /// Forgets switches that are away and serve no group.
    pub(super) fn forget_switches(&mut self) {
        let away = |switch: &Switch| switch.connection.is_none() && switch.host.is_none();
        let away = self.switches.iter().filter(|(_, switch)| away(switch));
        let away: Vec<SwitchId> = away.map(|(&id, _)| id).collect();
        for id in away {
            let used = self.groups.values().any(|group| group.uses(id));
            let held = |held: &Held| held.switch == id && self.group_of(held.group).is_some();
            if !used && !self.held.values().any(held) {
                self.switches.remove(&id);
                self.forget_held(id);
            }
        }
    }

    /// Forgets what a switch has, which is gone.
    pub(super) fn forget_held(&mut self, id: SwitchId) {
        self.held.retain(|_, held| held.switch != id);
        self.unclaimed.retain(|(_, communicator)| self.held.contains_key(communicator));
    }

    /// The group of a node that an earlier controller has made, on this switch.
    pub(super) fn find_held(&self, switch: SwitchId, communicator: u64) -> Option<GroupId> {
        let held = self.held.get(&communicator).filter(|held| held.switch == switch)?;
        self.group_of(held.group)
    }

    /// The group of a node that a switch has, or has had: what it has not any more it does not name. Of those the root is
    /// known, by the number that the ranks say, and believed of switches that may have had it.
    pub(super) fn find_claimed(&self, id: SwitchId, communicator: u64) -> Option<GroupId> {
        if self.held.contains_key(&communicator) || self.nodes.contains_key(&communicator) {
            return self.find_held(id, communicator);
        }
        let switch = self.switches.get(&id)?;
        if switch.unnamed > 0 || switch.inventory_until.is_none() {
            return None;
        }
        let has_others = |group: &Group| {
            self.held.values().any(|held| held.switch == id && held.group == group.identity)
        };
        let had_root = |group: &Group| {
            let revived = group.revived.as_ref().filter(|it| it.communicator == communicator);
            let from_before = revived.filter(|it| !it.made_here);
            from_before.is_some_and(|it| it.may_be_rooted_on(switch) || has_others(group))
        };
        self.groups.iter().find(|(_, group)| had_root(group)).map(|(&id, _)| id)
    }

    pub(super) fn held_gone(&mut self, communicator: u64) {
        if let Some(held) = self.held.get_mut(&communicator) {
            held.gone = true;
        }
    }

    /// Whether a node of a group has ended, which has then told those of its tree why.
    pub(super) fn has_held_gone(&self, group: GroupIdentity) -> bool {
        self.held.values().any(|held| held.group == group && held.gone)
    }

    /// The address of the switch of a child of such a node, if its edge has the name of this rank and it is no host.
    pub(super) fn switch_below_held(&self, communicator: u64, rank: u32) -> Option<IpAddr> {
        let mut below = self.held.get(&communicator)?.below.iter();
        Some(below.find(|below| below.rank == rank)?.address)
    }

    /// The name of a switch, where it has registered; empty where none has, or it may have been another one.
    pub(super) fn name_of(&self, address: IpAddr, incarnation: Option<u64>) -> String {
        let is_it = |it: &&Switch| it.address == address && incarnation == Some(it.incarnation);
        let switch = self.real_switches().find(is_it);
        switch.map(|switch| switch.name.clone()).unwrap_or_default()
    }

    /// That a switch is lost of which no more is known than its address. Which process it was is known where the one that
    /// is there now has nodes of the group: it may be a later one.
    pub(super) fn lost_at(&self, id: GroupId, address: IpAddr, detail: String) -> AbortReason {
        let identity = self.groups.get(&id).map(|group| group.identity);
        let has = |id| self.held.values().any(|it| it.switch == id && Some(it.group) == identity);
        let mut switches = self.switches.iter().filter(|(_, switch)| switch.address == address);
        let known = switches.find(|&(&id, switch)| switch.host.is_none() && has(id));
        match known {
            Some((_, switch)) => switch.lost(detail),
            None => {
                let (name, incarnation) = (String::new(), None);
                AbortReason::SwitchLost { name, address, detail, incarnation }
            }
        }
    }

    /// As [`Group::nodes_elsewhere`], of such nodes.
    pub(super) fn held_elsewhere(&self, group: GroupIdentity) -> Vec<u64> {
        let ours = || self.held.iter().filter(move |(_, held)| held.group == group);
        let ended: BTreeSet<usize> =
            ours().filter(|(_, held)| held.gone).map(|(_, held)| held.tree).collect();
        let elsewhere = ours().filter(|(_, held)| !ended.is_empty() && !ended.contains(&held.tree));
        elsewhere.map(|(&communicator, _)| communicator).collect()
    }

    /// Has the switches end such nodes of a group that is over.
    pub(super) fn end_held(
        &mut self,
        group: GroupIdentity,
        message: impl Fn(u64) -> Option<FromController>,
    ) {
        let ours = self.held.extract_if(.., |_, held| held.group == group);
        let ours: Vec<(u64, Held)> = ours.collect();
        if !ours.is_empty() {
            self.unclaimed.retain(|(_, communicator)| self.held.contains_key(communicator));
        }
        for (communicator, held) in ours {
            let message = message(communicator).filter(|_| !held.gone);
            if !matches!(message, Some(FromController::DestroyCommunicator { .. })) {
                let until = self.now + self.config.abort_timeout;
                let Held { switch, children, .. } = held;
                self.ending.push_back(Ending { until, switch, communicator, children });
            }
            if let Some(message) = message {
                self.end_node(&held, communicator, message);
            }
        }
    }

    pub(super) fn end_node(&mut self, held: &Held, communicator: u64, message: FromController) {
        let Some(switch) = self.switches.get(&held.switch) else { return };
        if switch.communicators.contains_key(&communicator) {
            self.send_to(switch.connection, message);
        }
    }
}
