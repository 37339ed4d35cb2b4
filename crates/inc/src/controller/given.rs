//! Where a communicator is: its trees with the queue pairs of both ends of each edge, as whoever watches the
//! network wants to know it.

use core::net::IpAddr;

use millstream_wire::{Mtu, Qpn};
use serde::{Deserialize, Serialize};

use super::group::Group;
use super::{Controller, GroupId};
use crate::plan::Child;
use crate::protocol::fields;
use crate::topology::MacAddress;

/// A communicator that is ready.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Placement {
    /// Its group's name.
    pub group: String,
    /// Its number: that of its root node.
    pub communicator: u64,
    /// Payload bytes per packet on every edge.
    #[serde(with = "fields::mtu")]
    pub path_mtu: Mtu,
    /// The nodes of its trees, one tree after the other, each with its root first.
    pub nodes: Vec<PlacedNode>,
}

/// A node of the tree.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PlacedNode {
    /// The number of its switch in the topology; without one, and for the second node of a switch, one that no
    /// other node has.
    pub id: u64,
    /// The name of its switch.
    pub name: String,
    /// Of which tree it is, from 0.
    pub tree: usize,
    /// Its number.
    pub communicator: u64,
    /// Its edges: up first.
    pub edges: Vec<PlacedEdge>,
}

/// An edge of a node.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PlacedEdge {
    /// Whether the peer is above.
    pub up: bool,
    /// The peer's number in the topology (without one its rank), and its rank, if it is a host.
    pub host: Option<(u64, u32)>,
    /// The node's end.
    pub my: EdgeEnd,
    /// The peer's end.
    pub peer: EdgeEnd,
}

/// An end of an edge.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EdgeEnd {
    /// Its address.
    pub ip: IpAddr,
    /// Its MAC address, where the topology has it.
    pub mac: Option<MacAddress>,
    /// Its queue pair.
    #[serde(with = "fields::qpn")]
    pub qpn: Qpn,
}

/// What has become of a communicator.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PlacementChange {
    /// It is ready.
    Ready(Placement),
    /// It is over.
    Over {
        /// Its number.
        communicator: u64,
    },
}

impl Controller {
    /// The next change of a placement. Only with [`super::ControllerConfig::report_placements`] are there any.
    pub fn poll_placement(&mut self) -> Option<PlacementChange> {
        self.placements.pop_front()
    }

    pub(super) fn report_ready(&mut self, id: GroupId) {
        if let Some(identity) = self.groups.get(&id).map(|group| group.identity) {
            self.record_changed(identity);
        }
        let Some(group) = self.groups.get(&id).filter(|_| self.config.report_placements) else {
            return;
        };
        if let Some(placement) = self.placement(group) {
            self.placements.push_back(PlacementChange::Ready(placement));
        }
    }

    pub(super) fn report_over(&mut self, group: &Group) {
        if group.ready {
            self.record_changed(group.identity);
        }
        let restored = group.revived.as_ref().and_then(|revived| revived.placement.as_ref());
        let root = group.nodes.first().map(|node| node.communicator);
        let reported = root.or(restored.map(|placement| placement.communicator));
        if let Some(communicator) =
            reported.filter(|_| group.ready && self.config.report_placements)
        {
            self.placements.push_back(PlacementChange::Over { communicator });
        }
    }

    pub(super) fn placement(&self, group: &Group) -> Option<Placement> {
        let trees = group.trees.as_ref()?;
        let ids = self.ids(group)?;
        let topology = self.config.topology.as_deref();
        let end = |ip: IpAddr, qpn: Qpn| EdgeEnd {
            ip,
            mac: topology.and_then(|topology| topology.mac(ip)),
            qpn,
        };
        let mut nodes = Vec::with_capacity(ids.len());
        for ((place, node), id) in trees.nodes().iter().zip(&group.nodes).zip(ids) {
            let switch = self.switches.get(&place.switch)?;
            let tree = trees.tree_of(nodes.len());
            let mut edges = Vec::with_capacity(place.children.len() + 1);
            if let (Some(parent), Some(uplink)) = (place.parent, node.uplink) {
                let above = self.switches.get(&trees.nodes()[parent].switch)?;
                let mut children =
                    trees.nodes()[parent].children.iter().zip(&group.nodes[parent].edges);
                let ours = Child::Switch { node: nodes.len() };
                let (_, edge) = children.find(|&(&child, _)| child == ours)?;
                let (my, peer) = (end(switch.address, uplink.qpn), end(above.address, edge.qpn));
                edges.push(PlacedEdge { up: true, host: None, my, peer });
            }
            for (child, edge) in place.children.iter().zip(&node.edges) {
                let (host, peer) = match *child {
                    Child::Host { rank } => {
                        let member = group.members.get(&rank)?;
                        let id = topology.and_then(|topology| topology.host_id(member.address));
                        let peer = end(group.address_of(member, tree)?, member.ends.get(tree)?.qpn);
                        (Some((id.unwrap_or(u64::from(rank)), rank)), peer)
                    }
                    Child::Switch { node } => {
                        let below = self.switches.get(&trees.nodes()[node].switch)?;
                        (None, end(below.address, group.nodes.get(node)?.uplink?.qpn))
                    }
                };
                edges.push(PlacedEdge { up: false, host, my: end(switch.address, edge.qpn), peer });
            }
            let (name, communicator) = (switch.name.clone(), node.communicator);
            nodes.push(PlacedNode { id, name, tree, communicator, edges });
        }
        let communicator = nodes.first()?.communicator;
        Some(Placement { group: group.name.clone(), communicator, path_mtu: group.path_mtu, nodes })
    }

    /// A number for each node of a group's trees.
    fn ids(&self, group: &Group) -> Option<Vec<u64>> {
        let trees = group.trees.as_ref()?;
        let Some(topology) = &self.config.topology else {
            return Some((0..trees.nodes().len() as u64).collect());
        };
        let mut next = topology.switches().iter().map(|switch| switch.id).max()?;
        let mut seen = std::collections::HashSet::new();
        trees
            .nodes()
            .iter()
            .map(|node| {
                if seen.insert(node.switch) {
                    let place = self.switches.get(&node.switch)?.place?;
                    return Some(topology.switches()[place].id);
                }
                next += 1;
                Some(next)
            })
            .collect()
    }
}
