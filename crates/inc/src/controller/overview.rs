//! What there is, for people and programs that watch: a copy that nothing hangs on.

use core::net::{IpAddr, SocketAddr};

use serde::Serialize;

use super::counted::PortRates;
use super::group::{Group, Node, Step};
use super::{Controller, GroupState};
use crate::plan::{Child, Forest};
use crate::protocol::{PortCounters, SwitchLimits};

/// All that a controller has.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Overview {
    /// Whether it leads, and who else might.
    pub leadership: LeadershipOverview,
    /// Connections of switches, hosts and peers that have not said what they are.
    pub connections: usize,
    /// The switches, in the order in which they came.
    pub switches: Vec<SwitchOverview>,
    /// The groups, in the order in which they were made. A name may occur again: the last group of a name is the one
    /// that has it.
    pub groups: Vec<GroupOverview>,
}

/// Who leads.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LeadershipOverview {
    /// Whether this controller leads.
    pub leads: bool,
    /// The term that it commands with, if it leads.
    pub term: Option<u64>,
    /// The one that leads, if it is another one and known.
    pub leader: Option<SocketAddr>,
    /// What is wrong with the state that controllers share, if something is.
    pub trouble: Option<String>,
    /// Where all controllers are, if there are several.
    pub controllers: Vec<SocketAddr>,
}

/// A switch that is registered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SwitchOverview {
    /// Its name.
    pub name: String,
    /// Its address on the data network.
    pub address: IpAddr,
    /// Its number in the topology, if there is one.
    pub topology_id: Option<u64>,
    /// What it can serve.
    pub limits: SwitchLimits,
    /// Whether it is connected to the controller; one that is not may come back.
    pub connected: bool,
    /// How many nodes of trees it serves.
    pub communicators: usize,
}

/// A group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupOverview {
    /// Its name.
    pub name: String,
    /// How many ranks it has.
    pub world: u32,
    /// `creating_group`, `group_ready`, `creating_communicator`, `communicator_ready` or, once a rank has
    /// left, `leaving`.
    pub state: &'static str,
    /// What it waits for, until its communicator is ready.
    pub waits_for: Option<String>,
    /// The ranks that have joined, in their order.
    pub members: Vec<MemberOverview>,
    /// Its communicator, once it is known where that will be.
    pub communicator: Option<CommunicatorOverview>,
    /// Why its hosts take the place of switches, if they do.
    pub fallback: Option<String>,
}

/// A rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemberOverview {
    /// Which.
    pub rank: u32,
    /// Its address on the data network.
    pub address: IpAddr,
    /// Its further addresses, each for a tree of its own.
    pub more_addresses: Vec<IpAddr>,
    /// Its number in the topology, if there is one.
    pub topology_id: Option<u64>,
    /// Whether it is connected to the controller; one that is not may come back.
    pub connected: bool,
    /// Whether it has left.
    pub left: bool,
}

/// A communicator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CommunicatorOverview {
    /// Its number, which is that of its root node; none until the nodes are being made.
    pub communicator: Option<u64>,
    /// Payload bytes per packet.
    pub path_mtu: usize,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Segments that a host may be ahead of its last result.
    pub window: u32,
    /// How many trees it has.
    pub trees: usize,
    /// The nodes of its trees, one tree after the other, each with its root first.
    pub nodes: Vec<NodeOverview>,
}

/// A node of a tree.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeOverview {
    /// Its number; none until it is being made.
    pub communicator: Option<u64>,
    /// The name of its switch.
    pub switch: String,
    /// Of which tree it is, from 0.
    pub tree: usize,
    /// The index of the node above; none of a root.
    pub parent: Option<usize>,
    /// `waiting`, `creating`, `created`, `connecting`, `ready` or `gone`.
    pub state: &'static str,
    /// Collectives that it has taken part in, where its switch has said so.
    pub collectives: Option<u64>,
    /// Its edges: up first.
    pub edges: Vec<EdgeOverview>,
}

/// An edge of a node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EdgeOverview {
    /// Whether the peer is above.
    pub up: bool,
    /// The rank of the peer, if it is a host.
    pub rank: Option<u32>,
    /// The index of the peer's node, if it is a switch.
    pub node: Option<usize>,
    /// The node's end.
    pub my: EndOverview,
    /// The peer's end.
    pub peer: EndOverview,
    /// What the node's port has counted, where its switch has said so.
    pub counters: Option<PortCounters>,
    /// What moves through it per second, where its switch has said so twice.
    pub rates: Option<PortRates>,
}

/// An end of an edge.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct EndOverview {
    /// Its address; none of a switch that is lost.
    pub ip: Option<IpAddr>,
    /// Its queue pair, once it is made.
    pub qpn: Option<u32>,
}

impl Controller {
    /// All that there is, with what the switches have counted when they were last asked.
    pub fn overview(&self) -> Overview {
        let topology = self.config.topology.as_deref();
        let switch = |switch: &super::Switch| SwitchOverview {
            name: switch.name.clone(),
            address: switch.address,
            topology_id: topology.zip(switch.place).map(|(it, place)| it.switches()[place].id),
            limits: switch.limits,
            connected: switch.connection.is_some(),
            communicators: switch.communicators.len(),
        };
        let standby = self.standby.as_ref();
        let leadership = LeadershipOverview {
            leads: self.leads(),
            term: self.leads().then_some(self.term),
            leader: standby.and_then(|standby| standby.leader),
            trouble: standby.and_then(|standby| standby.trouble.clone()),
            controllers: self.controllers.clone(),
        };
        Overview {
            leadership,
            connections: self.connections.len(),
            switches: self.real_switches().map(switch).collect(),
            groups: self.groups.values().map(|group| self.group_overview(group)).collect(),
        }
    }

    fn group_overview(&self, group: &Group) -> GroupOverview {
        let topology = self.config.topology.as_deref();
        let member = |(&rank, member): (&u32, &super::members::Member)| MemberOverview {
            rank,
            address: member.address,
            more_addresses: member.more_addresses.clone(),
            topology_id: topology.and_then(|topology| topology.host_id(member.address)),
            connected: member.connection.is_some(),
            left: member.left.is_some(),
        };
        let leaving = group.members.values().any(|member| member.left.is_some());
        let state = match group.state() {
            _ if leaving => "leaving",
            GroupState::CreatingGroup => "creating_group",
            GroupState::GroupReady => "group_ready",
            GroupState::CreatingCommunicator => "creating_communicator",
            GroupState::CommunicatorReady => "communicator_ready",
        };
        GroupOverview {
            name: group.name.clone(),
            world: group.world,
            state,
            waits_for: (!group.ready).then(|| self.awaited(group).to_string()),
            members: group.members.iter().map(member).collect(),
            communicator: group.trees.as_ref().map(|trees| CommunicatorOverview {
                communicator: group.nodes.first().map(|node| node.communicator),
                path_mtu: group.path_mtu.bytes(),
                segment_bytes: self.config.segment_bytes,
                window: self.config.window,
                trees: trees.trees(),
                nodes: (0..trees.nodes().len()).map(|it| self.node(group, trees, it)).collect(),
            }),
            fallback: group.fallback.as_ref().map(|it| it.reason.clone()),
        }
    }

    fn node(&self, group: &Group, trees: &Forest, index: usize) -> NodeOverview {
        let place = &trees.nodes()[index];
        let tree = trees.tree_of(index);
        let switch = self.switches.get(&place.switch);
        let node = group.nodes.get(index);
        let address = |index: usize| Some(self.switches.get(&trees.nodes()[index].switch)?.address);
        let end = |ip, qpn: Option<u32>| EndOverview { ip, qpn };
        let uplink = |node: &Node| Some(node.uplink?.qpn.value());
        let edge_to = |above: usize, below: Child| {
            let at = trees.nodes()[above].children.iter().position(|&child| child == below)?;
            Some(group.nodes.get(above)?.edges.get(at)?.qpn.value())
        };
        let here = address(index);
        let count = |rank| node.map_or((None, None), |node| node.counted.port(rank));
        let mut edges = Vec::with_capacity(place.children.len() + 1);
        if let Some(parent) = place.parent {
            let (counters, rates) = count(None);
            edges.push(EdgeOverview {
                up: true,
                rank: None,
                node: Some(parent),
                my: end(here, node.and_then(uplink)),
                peer: end(address(parent), edge_to(parent, Child::Switch { node: index })),
                counters,
                rates,
            });
        }
        for &child in &place.children {
            let (counters, rates) = count(Some(trees.lowest_rank(child)));
            let (rank, below, peer) = match child {
                Child::Host { rank } => {
                    let member = group.members.get(&rank);
                    let qpn = member.and_then(|member| Some(member.ends.get(tree)?.qpn.value()));
                    let address = member.and_then(|member| group.address_of(member, tree));
                    (Some(rank), None, end(address, qpn))
                }
                Child::Switch { node } => {
                    let qpn = group.nodes.get(node).and_then(uplink);
                    (None, Some(node), end(address(node), qpn))
                }
            };
            let my = end(here, edge_to(index, child));
            edges.push(EdgeOverview { up: false, rank, node: below, my, peer, counters, rates });
        }
        NodeOverview {
            communicator: node.map(|node| node.communicator),
            switch: switch.map(|switch| switch.name.clone()).unwrap_or_default(),
            tree,
            parent: place.parent,
            state: node.map_or("waiting", |node| state_name(node.step)),
            collectives: node.and_then(|node| node.counted.collectives()),
            edges,
        }
    }
}

const fn state_name(step: Step) -> &'static str {
    match step {
        Step::Waiting => "waiting",
        Step::Creating => "creating",
        Step::Created => "created",
        Step::Connecting => "connecting",
        Step::Done => "ready",
        Step::Gone => "gone",
    }
}
