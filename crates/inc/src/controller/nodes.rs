//! The nodes of a group's trees, made from the leaves up and connected from the root down.

use std::collections::{BTreeMap, BTreeSet};

use millstream_wire::Mtu;

use super::group::{End, Group, Node, Step};
use super::{Controller, ControllerConfig, GroupId, Switch};
use crate::plan::{Child, Forest, SwitchId};
use crate::protocol::{
    Failover, FromController, HostQueuePair, LostSwitch, MAX_PROCESSES, Plan, PlannedTree, Refusal,
    SwitchChild, SwitchEdge, SwitchUplink, shortened,
};

impl Controller {
    /// All ranks have connected: their leaves can be made.
    pub(super) fn begin(&mut self, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(trees) = &group.trees else { return };
        let mut leaves = Vec::new();
        for (index, node) in trees.nodes().iter().enumerate() {
            self.next_communicator += 1;
            // An earlier controller may have drawn the same numbers.
            while self.held.contains_key(&self.next_communicator) {
                self.next_communicator += 1;
            }
            group.nodes.push(Node::new(self.next_communicator));
            self.nodes.insert(self.next_communicator, (id, index));
            if !node.children.iter().any(|child| matches!(child, Child::Switch { .. })) {
                leaves.push(index);
            }
        }
        for leaf in leaves {
            self.request(id, leaf);
        }
    }

    /// Has a switch make a node, whose children are there.
    fn request(&mut self, id: GroupId, index: usize) {
        let Some((children, path_mtu)) = self.children(id, index) else { return };
        let Some(group) = self.groups.get(&id) else { return };
        let Some(trees) = &group.trees else { return };
        let (place, node) = (&trees.nodes()[index], &group.nodes[index]);
        let (at, communicator) = (place.switch, node.communicator);
        let (has_parent, tree) = (place.parent.is_some(), trees.tree_of(index) as u8);
        let (options, segment_bytes) =
            (group.options(), group.segment_bytes(trees, self.config.segment_bytes));
        let owned = self.owned_node(communicator, children.len());
        let Some(switch) = self.switches.get_mut(&at) else { return };
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.nodes[index].step = Step::Creating;
        switch.communicators.insert(communicator, owned);
        let ControllerConfig { window, .. } = self.config;
        let message = FromController::CreateCommunicator {
            communicator,
            group: group.identity,
            path_mtu,
            segment_bytes,
            window,
            world: group.world,
            has_parent,
            children,
            tree,
            options,
        };
        let connection = switch.connection;
        self.send_to(connection, message);
    }

    /// A node's children as its switch needs to know them; `None` when one is not there.
    fn children(&self, id: GroupId, index: usize) -> Option<(Vec<SwitchChild>, Mtu)> {
        let group = self.groups.get(&id)?;
        let trees = group.trees.as_ref()?;
        let tree = trees.tree_of(index);
        let of = |&child: &Child| {
            let ranks = trees.ranks(child);
            Some(match child {
                Child::Host { rank } => {
                    let member = group.members.get(&rank)?;
                    let &HostQueuePair { qpn, psn, receive_share } = member.ends.get(tree)?;
                    let (address, is_switch) = (group.address_of(member, tree)?, false);
                    SwitchChild { ranks, is_switch, address, qpn, psn, receive_share }
                }
                Child::Switch { node } => {
                    let address = self.switches.get(&trees.nodes()[node].switch)?.address;
                    let SwitchUplink { qpn, psn, receive_share } = group.nodes.get(node)?.uplink?;
                    SwitchChild { ranks, is_switch: true, address, qpn, psn, receive_share }
                }
            })
        };
        let children: Option<_> = trees.nodes().get(index)?.children.iter().map(of).collect();
        Some((children?, group.path_mtu))
    }

    /// The node of a communicator that this switch has.
    pub(super) fn find(&self, switch: SwitchId, communicator: u64) -> Option<(GroupId, usize)> {
        let &(id, index) = self.nodes.get(&communicator)?;
        let trees = self.groups.get(&id)?.trees.as_ref()?;
        (trees.nodes()[index].switch == switch).then_some((id, index))
    }

    pub(super) fn created(
        &mut self,
        switch: SwitchId,
        communicator: u64,
        edges: &[SwitchEdge],
        uplink: Option<SwitchUplink>,
    ) {
        // When there is none, it has failed meanwhile, and the switch was told.
        let Some((id, index)) = self.find(switch, communicator) else { return };
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.nodes[index].step != Step::Creating {
            return;
        }
        let Some(trees) = &group.trees else { return };
        let place = &trees.nodes()[index];
        let edge_of = |&child: &Child| {
            let rank = trees.lowest_rank(child);
            edges.iter().find(|edge| edge.rank == rank).copied()
        };
        let ours: Option<Vec<SwitchEdge>> = place.children.iter().map(edge_of).collect();
        let fitting =
            edges.len() == place.children.len() && uplink.is_some() == place.parent.is_some();
        let Some(edges) = ours.filter(|_| fitting) else {
            let name = self.switches.get(&switch).map(|switch| switch.name.clone());
            let (name, reason) = (name.unwrap_or_default(), "it made the wrong queue pairs".into());
            self.end_group(id, &End::Refused(Refusal::SwitchFailed { name, reason }));
            return;
        };
        let node = &mut group.nodes[index];
        node.step = if place.parent.is_some() { Step::Created } else { Step::Done };
        (node.edges, node.uplink) = (edges, uplink);
        let parent = place.parent.filter(|&parent| {
            trees.nodes()[parent].children.iter().all(|child| match *child {
                Child::Host { .. } => true,
                Child::Switch { node } => group.nodes[node].step == Step::Created,
            })
        });
        if let Some(parent) = parent {
            self.request(id, parent);
        }
        self.connect_children(id, index);
        self.finish(id);
    }

    /// Has the nodes below one that was made connect to it.
    fn connect_children(&mut self, id: GroupId, index: usize) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(trees) = &group.trees else { return };
        let place = &trees.nodes()[index];
        let Some(&Switch { address, .. }) = self.switches.get(&place.switch) else { return };
        let edges = group.nodes[index].edges.clone();
        let mut messages = Vec::new();
        for (child, SwitchEdge { qpn, psn, receive_share, .. }) in place.children.iter().zip(edges)
        {
            let &Child::Switch { node } = child else { continue };
            let Some(switch) = self.switches.get(&trees.nodes()[node].switch) else { continue };
            let node = &mut group.nodes[node];
            node.step = Step::Connecting;
            let communicator = node.communicator;
            let message =
                FromController::ConnectParent { communicator, address, qpn, psn, receive_share };
            messages.push((switch.connection, message));
        }
        for (connection, message) in messages {
            self.send_to(connection, message);
        }
    }

    pub(super) fn parent_connected(&mut self, switch: SwitchId, communicator: u64) {
        let Some((id, index)) = self.find(switch, communicator) else { return };
        let Some(group) = self.groups.get_mut(&id) else { return };
        let step = &mut group.nodes[index].step;
        if *step == Step::Connecting {
            *step = Step::Done;
            self.finish(id);
        }
    }

    /// Tells the ranks once all trees are there.
    fn finish(&mut self, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let (Some(trees), Some(root)) = (&group.trees, group.nodes.first()) else { return };
        if group.ready || group.nodes.iter().any(|node| node.step != Step::Done) {
            return;
        }
        // Nodes of the first tree come first, so each rank's plan is there when a further tree is added to it.
        let mut plans: BTreeMap<u32, Plan> = BTreeMap::new();
        let (failover, meeting) = (group.failover(), group.meeting());
        let processes = match failover {
            Failover::On => processes(trees, &self.switches),
            Failover::Off | Failover::Reproducible => Vec::new(),
        };
        for (place, node) in trees.nodes().iter().zip(&group.nodes) {
            let Some(switch) = self.switches.get(&place.switch) else { return };
            for (child, edge) in place.children.iter().zip(&node.edges) {
                let &Child::Host { rank } = child else { continue };
                let (incarnation, address) = (switch.incarnation, switch.address);
                let switch = switch.name.clone();
                let SwitchEdge { qpn, psn, receive_share, .. } = *edge;
                if let Some(plan) = plans.get_mut(&rank) {
                    plan.more.push(PlannedTree {
                        switch,
                        address,
                        qpn,
                        psn,
                        incarnation,
                        receive_share,
                    });
                    continue;
                }
                let plan = Plan {
                    communicator: root.communicator,
                    group: group.identity,
                    switch,
                    address,
                    qpn,
                    psn,
                    path_mtu: group.path_mtu,
                    receive_share,
                    more: Vec::new(),
                    ranks: group.hosts.get(&rank).cloned().unwrap_or_default(),
                    failover,
                    incarnation,
                    meeting: meeting.clone(),
                    processes: processes.clone(),
                };
                plans.insert(rank, plan);
            }
        }
        group.ready = true;
        group.deadline = None;
        let connection = |rank: u32| group.members.get(&rank).and_then(|member| member.connection);
        let plans: Vec<_> =
            plans.into_iter().map(|(rank, plan)| (connection(rank), plan)).collect();
        for (connection, plan) in plans {
            self.send_to(connection, FromController::Plan(plan));
            if let Some(connection) = connection {
                self.tell_controllers(connection);
            }
        }
        self.share_hosts(id);
        self.report_ready(id);
    }

    pub(super) fn not_created(
        &mut self,
        switch: SwitchId,
        communicator: u64,
        reason: String,
        path_mtu: Option<Mtu>,
    ) {
        let found = self.find(switch, communicator);
        let Some(state) = self.switches.get_mut(&switch) else { return };
        state.communicators.remove(&communicator);
        let (name, reason) = (state.name.clone(), shortened(reason));
        if let Some((id, index)) = found {
            // Which of two switches that cannot be connected is at fault is not known. More trees are left without
            // the upper one.
            let upper = self.connecting_to(id, index);
            self.gone(id, index);
            if path_mtu.is_some_and(|path_mtu| self.make_anew(id, path_mtu)) {
                return;
            }
            let suspects: Vec<SwitchId> = upper.into_iter().chain([switch]).collect();
            self.refused(id, &suspects, Refusal::SwitchFailed { name, reason });
        }
    }

    /// Has the nodes of a group that is not ready made anew, with shorter packets, since a link of its trees does not carry
    /// those that were planned. All trees have the path MTU of the slowest link. `false` when they are no shorter.
    fn make_anew(&mut self, id: GroupId, path_mtu: Mtu) -> bool {
        let shorter = |group: &Group| !group.ready && path_mtu < group.path_mtu;
        if !self.groups.get(&id).is_some_and(shorter) {
            return false;
        }
        let Some(mut group) = self.groups.remove(&id) else { return false };
        self.end_nodes(&group, |communicator| {
            Some(FromController::DestroyCommunicator { communicator })
        });
        group.nodes.clear();
        group.path_mtu = path_mtu;
        self.groups.insert(id, group);
        self.begin(id);
        true
    }

    /// The switch that a node is being connected to, if it is.
    fn connecting_to(&self, id: GroupId, index: usize) -> Option<SwitchId> {
        let group = self.groups.get(&id)?;
        let nodes = group.trees.as_ref()?.nodes();
        let parent = nodes[index].parent.filter(|_| group.nodes[index].step == Step::Connecting)?;
        Some(nodes[parent].switch)
    }

    /// The switch knows that the node is over.
    pub(super) fn gone(&mut self, id: GroupId, index: usize) {
        if let Some(node) = self.groups.get_mut(&id).and_then(|group| group.nodes.get_mut(index)) {
            node.step = Step::Gone;
        }
    }
}

/// Which processes the switches of trees of several levels are. Of others a rank knows all that there are.
fn processes(trees: &Forest, switches: &BTreeMap<SwitchId, Switch>) -> Vec<LostSwitch> {
    let nodes = trees.nodes();
    if nodes.iter().all(|node| node.parent.is_none()) {
        return Vec::new();
    }
    let all: BTreeSet<SwitchId> = nodes.iter().map(|node| node.switch).collect();
    let of = |id: &SwitchId| {
        let &Switch { address, incarnation, .. } = switches.get(id)?;
        Some(LostSwitch { address, incarnation: Some(incarnation) })
    };
    all.iter().filter_map(of).take(MAX_PROCESSES).collect()
}
