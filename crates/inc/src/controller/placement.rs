//! Which trees a full group gets: balanced over all switches, or on the topology; and which ones next, when a
//! switch refuses.
//!
//! There is a tree for each address that all of its ranks have. Each is planned as if those before it were another
//! group's.

use core::net::IpAddr;
use std::collections::{HashMap, HashSet};

use millstream_wire::Mtu;

use super::fallback::Fallback;
use super::group::{End, Group, Step};
use super::{Controller, ControllerConfig, GroupId, Output, Switch};
use crate::plan::{Candidate, Forest, PlanOptions, SwitchId, Tree};
use crate::protocol::{FromController, HostsTrees, Refusal, shortened};
use crate::spec::{node_bytes, node_queue_pairs};
use crate::topology::{Demand, LinkIndex, PlaceError, SwitchIndex, SwitchState, Topology};

/// How many trees of a group may be refused before it ends.
const MAX_REFUSED: usize = 16;

/// More switches than so many are counted, and not named.
const NAMED_SWITCHES: usize = 8;

/// A tree, and the links of the topology that it uses.
type Choice = (Tree, Vec<LinkIndex>);

/// Why there is no tree.
enum NoTree {
    /// It waits for a switch, or for those that are named.
    Yet(Option<String>),
    /// There is none.
    Ever(Refusal),
}

/// What a switch has been asked for.
#[derive(Clone, Copy, Default)]
struct Taken {
    nodes: usize,
    bytes: u64,
    queue_pairs: usize,
}

impl Taken {
    /// For one more node, with so many children.
    fn add(&mut self, children: usize, bytes: u64) {
        self.nodes += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.queue_pairs += node_queue_pairs(children);
    }
}

impl Controller {
    /// Plans the trees of a full group that has none, if the switches are there, and tells the ranks.
    pub(super) fn plan(&mut self, id: GroupId) {
        let Some(group) = self.groups.get(&id).filter(|group| group.waits_for_trees()) else {
            return;
        };
        let choice = self.choose(id, group).and_then(|choice| {
            check_plain(group, &choice.0).map_err(NoTree::Ever)?;
            if group.fallback.is_none() {
                self.check_trees(id, &choice.0).map_err(NoTree::Ever)?;
            }
            Ok(choice)
        });
        let falls_back = group.may_fall_back();
        let patience = self.config.fallback_patience;
        let Some(group) = self.groups.get_mut(&id) else { return };
        let (trees, links) = match choice {
            Ok(choice) => choice,
            // Until its deadline.
            Err(NoTree::Yet(missing)) => {
                if falls_back && let Some(reason) = self.config.hosts_only.clone() {
                    return self.fall_back(id, &reason);
                }
                group.missing = missing;
                if falls_back {
                    group.fall_back_after(self.now, patience);
                }
                return;
            }
            Err(NoTree::Ever(refusal @ Refusal::NotPlaced { .. })) if falls_back => {
                return self.fall_back(id, &refusal.to_string());
            }
            Err(NoTree::Ever(refusal)) => return self.end_group(id, &End::Refused(refusal)),
        };
        let segment_bytes = group.segment_bytes(&trees, self.config.segment_bytes);
        group.fall_back_at = None;
        let servers: HashSet<SwitchId> = trees.nodes().iter().map(|node| node.switch).collect();
        let hosts = |rank: u32| {
            let Fallback { reason, addresses, switches } = group.fallback.as_ref()?;
            let serves = switches.get(rank as usize).is_some_and(|it| servers.contains(it));
            Some(HostsTrees { reason: reason.clone(), serves, addresses: *addresses })
        };
        for (rank, member) in group.wired() {
            let leaf_address = |tree| {
                let switch = self.switches.get(&trees.leaf_of(tree, rank)?.switch);
                switch.map(|switch| switch.address)
            };
            if let Some(switch_address) = leaf_address(0) {
                let ControllerConfig { window, .. } = self.config;
                let more_switches = (1..trees.trees()).filter_map(leaf_address).collect();
                let message = FromController::GroupReady {
                    switch_address,
                    segment_bytes,
                    window,
                    more_switches,
                    hosts: hosts(rank),
                };
                if let Some(connection) = member.connection {
                    let term = self.connections.get(&connection).map_or(self.term, |it| it.term);
                    self.outputs.push_back(Output::Send { connection, term, message });
                }
            }
        }
        group.unconnected = group.wired().map(|(rank, _)| rank).collect();
        (group.trees, group.links) = (Some(trees), links);
    }

    /// Switches do not make a node of a group: another tree is tried without the first of them that there is
    /// one without.
    pub(super) fn refused(&mut self, id: GroupId, suspects: &[SwitchId], refusal: Refusal) {
        let again = suspects.iter().any(|&switch| self.has_tree_without(id, switch));
        let falls_back = !again && self.groups.get(&id).is_some_and(Group::may_fall_back);
        if !again && !falls_back {
            return self.end_group(id, &End::Refused(refusal));
        }
        let Some(mut group) = self.groups.remove(&id) else { return };
        self.end_nodes(&group, |communicator| {
            Some(FromController::DestroyCommunicator { communicator })
        });
        group.start_over();
        self.groups.insert(id, group);
        match falls_back {
            true => self.fall_back(id, &refusal.to_string()),
            false => self.plan(id),
        }
    }

    /// Leaves a switch out of a group's trees, if there is one without it.
    fn has_tree_without(&mut self, id: GroupId, switch: SwitchId) -> bool {
        let Some(group) = self.groups.get_mut(&id) else { return false };
        let is_new = group.refused.insert(switch);
        let (attempts, ready) = (group.refused.len(), group.ready);
        let another = |group: &Group| self.choose(id, group).is_ok();
        let again = !ready && attempts <= MAX_REFUSED && self.groups.get(&id).is_some_and(another);
        if !again
            && is_new
            && let Some(group) = self.groups.get_mut(&id)
        {
            group.refused.remove(&switch);
        }
        again
    }

    /// The trees of a group. There are fewer than there could be where a further one has no place: no switch above all
    /// of its addresses, or none with room. A switch that is still to come is waited for.
    fn choose(&self, id: GroupId, group: &Group) -> Result<(Forest, Vec<LinkIndex>), NoTree> {
        #[cfg(test)]
        self.chosen.set(self.chosen.get() + 1);
        if let Some(fallback) = &group.fallback {
            let trees = self.choose_hosts(group, fallback);
            return trees.map(|trees| (trees, Vec::new())).map_err(NoTree::Ever);
        }
        let mut taken = self.taken(id);
        let links = self.config.topology.as_ref().map_or(0, |topology| topology.links().len());
        let mut users = vec![0; links];
        for (_, other) in self.groups.iter().filter(|&(&other, _)| other != id) {
            other.links.iter().for_each(|&link| users[link] += 1);
        }
        for stored in self.records.unclaimed.values() {
            stored.links.iter().for_each(|&link| users[link] += 1);
        }
        let addresses = group.wired().map(|(_, member)| 1 + member.more_addresses.len());
        let (mut trees, mut links) = (Vec::new(), Vec::new());
        for number in 0..addresses.min().unwrap_or(1) {
            let hosts = group.wired().filter_map(|(_, member)| member.address_of(number));
            let hosts: Vec<IpAddr> = hosts.collect();
            let (tree, its_links) = match self.choose_one(group, &hosts, &taken, &users, number) {
                Ok(choice) => choice,
                Err(NoTree::Yet(Some(missing))) if group.refused.is_empty() => {
                    return Err(NoTree::Yet(Some(missing)));
                }
                Err(_) if number > 0 => break,
                Err(error) => return Err(error),
            };
            for place in tree.nodes() {
                let children = place.children.len();
                taken.entry(place.switch).or_default().add(children, self.node_bytes(children));
            }
            its_links.iter().for_each(|&link| users[link] += 1);
            trees.push(tree);
            links.extend(its_links);
        }
        Ok((group.forest(trees), links))
    }

    /// One tree, for the addresses with this number of the ranks that are connected to it.
    fn choose_one(
        &self,
        group: &Group,
        hosts: &[IpAddr],
        taken: &HashMap<SwitchId, Taken>,
        users: &[u32],
        number: usize,
    ) -> Result<Choice, NoTree> {
        let avoided = group.avoided();
        let usable = |(id, switch): &(&SwitchId, &Switch)| {
            let is_refused = group.refused.contains(id) || switch.is_one_of(&avoided);
            switch.serves() && switch.host.is_none() && !is_refused
        };
        let states = self.switches.iter().filter(usable);
        let states = states.map(|(&id, switch)| {
            let taken = taken.get(&id).copied().unwrap_or_default();
            let state = SwitchState {
                switch: id,
                nodes: taken.nodes,
                free_nodes: switch.limits.communicators.saturating_sub(taken.nodes),
                free_bytes: switch.limits.memory_bytes.saturating_sub(taken.bytes),
                free_queue_pairs: switch.limits.queue_pairs.saturating_sub(taken.queue_pairs),
            };
            (switch.place, state)
        });
        let Some(topology) = &self.config.topology else {
            let states = states.map(|(_, state)| state).collect();
            return self.choose_balanced(group, hosts, states, number);
        };
        let mut switches = vec![None; topology.switches().len()];
        for (place, state) in states {
            if let Some(place) = place {
                switches[place] = Some(state);
            }
        }
        let ControllerConfig { fan_in, segment_bytes, window, .. } = self.config;
        let demand = Demand { hosts, switches: &switches, users, fan_in, segment_bytes, window };
        let placed = topology.place(&demand);
        let placed = placed.map_err(|error| self.not_placed(topology, group, &switches, error))?;
        Ok((placed.tree, placed.links))
    }

    fn choose_balanced(
        &self,
        group: &Group,
        hosts: &[IpAddr],
        states: Vec<SwitchState>,
        number: usize,
    ) -> Result<Choice, NoTree> {
        let options = PlanOptions { fan_in: self.config.fan_in, hosts };
        let children = options.fan_in.get() as usize;
        let most = (self.node_bytes(children).max(1), node_queue_pairs(children));
        let candidate = |state: &SwitchState| {
            let free = state.free_nodes.min((state.free_bytes / most.0) as usize);
            let free = free.min(state.free_queue_pairs / most.1);
            Candidate { switch: state.switch, communicators: state.nodes, free }
        };
        let mut candidates: Vec<Candidate> = states.iter().map(candidate).collect();
        let mut tree = Tree::plan(hosts.len() as u32, &candidates, &options);
        if tree.is_err() && group.refused.is_empty() && number == 0 {
            // They say themselves what they lack.
            candidates.iter_mut().for_each(|candidate| candidate.free = usize::MAX);
            tree = Tree::plan(hosts.len() as u32, &candidates, &options);
        }
        tree.map(|tree| (tree, Vec::new())).map_err(|_| NoTree::Yet(None))
    }

    /// What to say where the topology has no tree.
    fn not_placed(
        &self,
        topology: &Topology,
        group: &Group,
        switches: &[Option<SwitchState>],
        error: PlaceError,
    ) -> NoTree {
        let refused = |reason: String| {
            let (group, reason) = (group.name.clone(), shortened(reason));
            NoTree::Ever(Refusal::NotPlaced { group, reason })
        };
        match error {
            PlaceError::Missing(missing) => NoTree::Yet(Some(names(topology, &missing))),
            PlaceError::Full { switch, nodes, bytes, queue_pairs } => {
                let state = switches.get(switch).copied().flatten();
                let free = |state: SwitchState| {
                    (state.free_nodes, state.free_bytes, state.free_queue_pairs)
                };
                let (free_nodes, free_bytes, free_queue_pairs) = state.map_or((0, 0, 0), free);
                let switch = topology.describe(switch);
                refused(format!(
                    "switch {switch} would serve {nodes} nodes of its tree with {bytes} bytes and \
                     {queue_pairs} queue pairs, and has room for {free_nodes} with {free_bytes} bytes and \
                     {free_queue_pairs} queue pairs; no other tree has room"
                ))
            }
            error => refused(error.to_string()),
        }
    }

    /// What all switches have been asked for by other groups, and what is ending on them.
    fn taken(&self, id: GroupId) -> HashMap<SwitchId, Taken> {
        let mut taken: HashMap<SwitchId, Taken> = HashMap::new();
        let mut add = |switch: SwitchId, children: usize| {
            taken.entry(switch).or_default().add(children, self.node_bytes(children));
        };
        for (_, group) in self.groups.iter().filter(|&(&other, _)| other != id) {
            let places = group.trees.iter().flat_map(Forest::nodes);
            for (index, place) in places.enumerate() {
                // What is gone is ending, or told to.
                if group.nodes.get(index).is_none_or(|node| node.step != Step::Gone) {
                    add(place.switch, place.children.len());
                }
            }
        }
        for held in self.held.values() {
            add(held.switch, held.children);
        }
        let ending = self.ending.iter().map(|it| ((it.switch, it.communicator), it.children));
        for ((switch, communicator), children) in ending.collect::<HashMap<_, _>>() {
            let there = self.switches.get(&switch);
            if there.is_some_and(|switch| switch.communicators.contains_key(&communicator)) {
                add(switch, children);
            }
        }
        taken
    }

    /// What a node with so many children takes, with the largest path MTU.
    pub(super) fn node_bytes(&self, children: usize) -> u64 {
        let ControllerConfig { segment_bytes, window, .. } = self.config;
        node_bytes(children, true, segment_bytes, window, Mtu::B4096)
    }

    /// The place of a switch in the topology, if there is a topology. The error says why it has none.
    pub(super) fn place_of(
        &self,
        name: &str,
        address: IpAddr,
    ) -> Result<Option<SwitchIndex>, Refusal> {
        let Some(topology) = &self.config.topology else { return Ok(None) };
        let unknown = || Refusal::UnknownSwitch { name: name.to_owned(), address };
        let place = topology.switch(name, address).ok_or_else(unknown)?;
        let taken = self.switches.values().find(|other| other.place == Some(place));
        match taken {
            None => Ok(Some(place)),
            Some(Switch { name, address, .. }) => Err(Refusal::SwitchTaken {
                name: name.clone(),
                address: *address,
                what: "entry in the topology".to_owned(),
            }),
        }
    }
}

/// Whether a group may have these trees: one switch, where its hosts send no descriptors.
fn check_plain(group: &Group, trees: &Forest) -> Result<(), Refusal> {
    let nodes = trees.nodes().len();
    if !group.options().plain || nodes == 1 {
        return Ok(());
    }
    let reason = format!(
        "its hosts send no descriptors, for which it needs one switch above all of them, and it would have {nodes} \
         nodes: raise --fan-in, use fewer hosts, or one address for each"
    );
    Err(Refusal::NotPlaced { group: group.name.clone(), reason })
}

/// Switches as people know them.
fn names(topology: &Topology, switches: &[SwitchIndex]) -> String {
    let named = switches.iter().take(NAMED_SWITCHES).map(|&switch| topology.describe(switch));
    let mut text = named.collect::<Vec<_>>().join(", ");
    if switches.len() > NAMED_SWITCHES {
        text += &format!(" and {} more", switches.len() - NAMED_SWITCHES);
    }
    shortened(text)
}
