//! New trees for all ranks: nodes on switches, and connections to them.

use std::collections::BTreeMap;

use millstream_inc::failover::Lost;
use millstream_inc::{
    ACKNOWLEDGEMENT_DELAY, CONTROL_BYTES, ChildSpec, CommunicatorOptions, CommunicatorSpec,
    HostConfig, HostWorker, ParentSpec, Ranks, Uplink,
};
use millstream_roce::{Endpoint, OwnedMemory, QueuePairCapabilities, QueuePairConfig};
use millstream_wire::{Psn, Qpn};

use super::super::build::{Network, number};
use super::super::director::Director;
use super::super::outsider::Known;
use super::super::world::address;
use super::director::{endpoint, register, tree_number};
use super::draw::{Group, Line};
use super::engine::{Engine, Tree};
use crate::connection::{Remote, connect};
use crate::rank::DOMAIN;
use crate::{ConnectionOptions, NodeId};

/// The queue pairs of hosts, by their lowest rank, and the first packet sequence number of each.
type Ends = BTreeMap<u32, (Qpn, Psn)>;

impl Director {
    /// Makes a set of trees; each host's ends of them, and what it has to know when they are lost.
    pub(super) fn make_trees(
        &mut self,
        network: &mut Network<'_>,
        group: &Group,
        line: usize,
    ) -> Vec<(Engine, Lost)> {
        let trees = &group.lines[line];
        let world = trees.sizes.world;
        let mut engines = Vec::new();
        // By tree, and by the lowest rank of each host.
        let mut ends: Vec<Ends> = trees.trees.iter().map(|_| Ends::new()).collect();
        for (ranks, host) in group.connections() {
            let mut own = Vec::new();
            for of_tree in &mut ends {
                let Some(endpoint) = endpoint(network.machine_mut(NodeId(host))) else { continue };
                let tree = make_end(endpoint, trees, ranks);
                of_tree.insert(ranks[0], (tree.qpn, Psn::new(self.rng.bits() as u32)));
                own.push(tree);
            }
            let lost = Lost {
                communicator: tree_number(line, 0) as u64,
                rank: ranks[0],
                ranks: ranks.iter().copied().collect(),
                world,
                trees: trees.trees.len() as u8,
                segment_bytes: trees.sizes.segment_bytes,
                window: trees.sizes.window,
                path_mtu: trees.path_mtu,
            };
            engines.push((Engine::new(own, world, group.keeps_overwritten), lost));
        }
        for (tree, ends) in ends.iter().enumerate() {
            self.make_nodes(network, group, (line, tree), ends);
        }
        engines
    }

    /// Makes all nodes of a tree from the leaves up, and connects them and the hosts.
    fn make_nodes(
        &mut self,
        network: &mut Network<'_>,
        group: &Group,
        (line, number_of_tree): (usize, usize),
        ends: &Ends,
    ) {
        let Line { trees, sizes, path_mtu, .. } = &group.lines[line];
        let (tree, path_mtu) = (&trees[number_of_tree], *path_mtu);
        let options = ConnectionOptions {
            path_mtu,
            timeout: self.world.timeout,
            reads: 0,
            ..ConnectionOptions::DEFAULT
        };
        let hosts = self.world.hosts;
        let machine = |node: usize| NodeId(hosts + tree.nodes[node].switch);
        let place = |node: usize| address(machine(node).0);
        let id = |node: usize| number(tree_number(line, number_of_tree), node);
        let mut ways_up: Vec<Option<Uplink>> = vec![None; tree.nodes.len()];
        for node in (0..tree.nodes.len()).rev() {
            let of_hosts = tree.nodes[node].ranks.iter().map(|&rank| {
                let (qpn, psn) = ends[&rank];
                let address = address(group.hosts[rank as usize]);
                let ranks = group.ranks_with(rank).iter().copied().collect();
                ChildSpec { ranks, address, qpn, psn, is_switch: false, receive_share: None }
            });
            let of_nodes = tree.below(node).filter_map(|below| {
                let Uplink { qpn, psn, receive_share } = ways_up[below]?;
                let hosts = tree.ranks(below).into_iter();
                let ranks: Ranks = hosts.flat_map(|rank| group.ranks_with(rank)).copied().collect();
                Some(ChildSpec {
                    ranks,
                    address: place(below),
                    qpn,
                    psn,
                    is_switch: true,
                    receive_share,
                })
            });
            let spec = CommunicatorSpec {
                id: id(node),
                path_mtu,
                segment_bytes: sizes.segment_bytes,
                window: sizes.window,
                world: sizes.world,
                children: of_hosts.chain(of_nodes).collect(),
                has_parent: tree.nodes[node].parent.is_some(),
                options: CommunicatorOptions::default(),
            };
            let created = network.with_machine(machine(node), |it, now| {
                it.switch_mut().map(|it| it.create_communicator(now, &spec))
            });
            let Some(Ok(created)) = created else {
                return network.violate(format!("a node was not made: {created:?}"));
            };
            ways_up[node] = created.uplink;
            let uplink = created.uplink.map(|it| it.qpn);
            for qpn in created.edges.iter().map(|edge| edge.qpn).chain(uplink) {
                network.forget_queue_pair(machine(node), qpn);
            }
            for edge in created.edges {
                let (qpn, psn, receive_share) = (edge.qpn, edge.psn, edge.receive_share);
                let parent = ParentSpec { address: place(node), qpn, psn, receive_share };
                let below = tree
                    .below(node)
                    .find(|&it| tree.ranks(it).into_iter().min() == Some(edge.rank));
                let (peer, peer_qpn) = match below {
                    Some(below) => {
                        let connected = network.with_machine(machine(below), |it, now| {
                            it.switch_mut().map(|it| it.connect_parent(now, id(below), &parent))
                        });
                        if connected != Some(Ok(true)) {
                            network.violate(format!("a node was not connected: {connected:?}"));
                        }
                        (place(below), ways_up[below].map(|it| it.qpn).unwrap_or_default())
                    }
                    None => {
                        let (host, (qpn, psn)) =
                            (group.hosts[edge.rank as usize], ends[&edge.rank]);
                        let remote = Remote {
                            address: parent.address,
                            qpn: parent.qpn,
                            send_psn: psn,
                            receive_psn: parent.psn,
                            receive_share: parent.receive_share,
                        };
                        if let Some(endpoint) = endpoint(network.machine_mut(NodeId(host))) {
                            connect(endpoint, qpn, &remote, &options);
                        }
                        (address(host), qpn)
                    }
                };
                self.built.known.push(Known { address: place(node), qpn: edge.qpn, peer });
                self.built.known.push(Known { address: peer, qpn: peer_qpn, peer: place(node) });
            }
        }
    }
}

/// A host's end of a tree.
fn make_end(endpoint: &mut Endpoint<OwnedMemory>, line: &Line, ranks: &[u32]) -> Tree {
    let (control_key, control_address) = register(endpoint, vec![0; CONTROL_BYTES]);
    let config = HostConfig {
        segment_bytes: line.sizes.segment_bytes,
        window: line.sizes.window,
        control_key,
        control_address,
        rank: ranks[0],
        world: line.sizes.world,
        path_mtu: line.path_mtu,
    };
    let worker = match ranks.len() {
        1 => HostWorker::new(config),
        _ => HostWorker::of_ranks(config, ranks.iter().copied().collect()),
    };
    let worker = worker.expect("segment and window are in range");
    let sends = worker.required_send_requests() as usize;
    let receives = worker.required_receive_requests() as usize;
    let completions = endpoint.create_completion_queue(sends + receives);
    let completions = completions.expect("each tree of a rank has one completion queue");
    let capabilities = QueuePairCapabilities::new(sends, receives);
    let config = QueuePairConfig {
        acknowledgement_delay: ACKNOWLEDGEMENT_DELAY,
        ..QueuePairConfig::new(DOMAIN, completions, capabilities)
    };
    let qpn = endpoint.create_queue_pair(&config).expect("each tree of a rank has one queue pair");
    Tree::new((qpn, completions), control_key, worker)
}
