//! Trees on networks.

mod ways;

use core::net::{IpAddr, Ipv4Addr};
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::plan::{Child, TreeNode};
use crate::topology::tests::{down, host, ip, rate, switch, two_levels, up};
use crate::topology::{ConnectionEntry, Link, LinkRate, SwitchEntry};

/// What there is, which a test changes.
struct Net {
    topology: Topology,
    states: Vec<Option<SwitchState>>,
    users: Vec<u32>,
    fan_in: FanIn,
}

impl Net {
    /// Each switch has the number of its entry.
    fn new(entries: &[SwitchEntry]) -> Self {
        let topology = Topology::new(entries).unwrap();
        let state = |index| {
            let switch = SwitchId(index);
            Some(SwitchState {
                switch,
                nodes: 0,
                free_nodes: 64,
                free_bytes: 1 << 30,
                free_queue_pairs: 4096,
            })
        };
        let states = (0..entries.len() as u64).map(state).collect();
        let users = vec![0; topology.links().len()];
        Self { topology, states, users, fan_in: FanIn::MAX }
    }

    fn state(&mut self, switch: usize) -> &mut SwitchState {
        self.states[switch].as_mut().unwrap()
    }

    fn place(&self, hosts: &[IpAddr]) -> Result<Placed, PlaceError> {
        self.topology.place(&Demand {
            hosts,
            switches: &self.states,
            users: &self.users,
            fan_in: self.fan_in,
            segment_bytes: 256 << 10,
            window: 8,
        })
    }

    fn nodes(&self, hosts: &[&str]) -> Vec<TreeNode> {
        let hosts: Vec<IpAddr> = hosts.iter().map(|host| ip(host)).collect();
        self.place(&hosts).unwrap().tree.nodes().to_vec()
    }

    /// The root of the tree for these hosts.
    fn root(&self, hosts: &[&str]) -> u64 {
        self.nodes(hosts)[0].switch.0
    }
}

fn node(switch: u64, parent: Option<usize>, children: &[Child]) -> TreeNode {
    TreeNode { switch: SwitchId(switch), parent, children: children.to_vec() }
}

fn rank(rank: u32) -> Child {
    Child::Host { rank }
}

fn below(node: usize) -> Child {
    Child::Switch { node }
}

const HOSTS: [&str; 4] = ["10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4"];

#[test]
fn the_tree_that_was_written_down_is_the_plan() {
    let net = Net::new(&two_levels());
    let tree = [
        node(0, None, &[below(1), below(2)]),
        node(1, Some(0), &[rank(0), rank(1)]),
        node(2, Some(0), &[rank(2), rank(3)]),
    ];
    assert_eq!(net.nodes(&HOSTS), tree);
    // Ranks are where their addresses are, in whatever order, and several at one address.
    let [a, b, c, d] = HOSTS;
    assert_eq!(
        net.nodes(&[d, a, b, c, a])[1..],
        [node(1, Some(0), &[rank(1), rank(4), rank(2)]), node(2, Some(0), &[rank(0), rank(3)])]
    );
    // What is not above two of them is not part of it.
    assert_eq!(net.nodes(&[c, d]), [node(2, None, &[rank(0), rank(1)])]);
    assert_eq!(net.nodes(&[b]), [node(1, None, &[rank(0)])]);
    assert_eq!(
        net.nodes(&[a, d]),
        [
            node(0, None, &[below(1), below(2)]),
            node(1, Some(0), &[rank(0)]),
            node(2, Some(0), &[rank(1)])
        ]
    );
    let links = net.place(&HOSTS.map(ip)).unwrap().links;
    assert_eq!(links, (0..6).collect::<Vec<_>>());
}

/// Two spines above two leaves with two hosts each.
fn fat_tree() -> Vec<SwitchEntry> {
    let mut entries = two_levels();
    entries[0].root = false;
    entries.push(switch(3, &[down("10.0.3.1", "10.0.1.1"), down("10.0.3.1", "10.0.2.1")]));
    entries
}

#[test]
fn of_several_roots_the_one_with_the_least_load_is_taken() {
    let mut net = Net::new(&fat_tree());
    assert_eq!(net.root(&HOSTS), 0);
    net.state(0).nodes = 1;
    assert_eq!(net.root(&HOSTS), 3);
    net.state(3).nodes = 2;
    assert_eq!(net.root(&HOSTS), 0);
    // Trees on its links weigh more than nodes on it.
    net.users[0] = 1;
    assert_eq!(net.root(&HOSTS), 3);
    // No spine is needed below one leaf.
    assert_eq!(net.root(&HOSTS[..2]), 1);
}

#[test]
fn a_switch_that_is_not_there_or_has_no_room_is_gone_around() {
    let mut net = Net::new(&fat_tree());
    net.state(0).free_nodes = 0;
    assert_eq!(net.root(&HOSTS), 3);
    *net.state(0) = SwitchState { free_bytes: 1 << 20, free_nodes: 9, ..*net.state(0) };
    assert_eq!(net.root(&HOSTS), 3);
    net.states[0] = None;
    assert_eq!(net.root(&HOSTS), 3);
    net.state(3).free_nodes = 0;
    assert_eq!(net.place(&HOSTS.map(ip)).unwrap_err(), PlaceError::Missing(vec![0]));
    net.states[3] = None;
    assert_eq!(net.place(&HOSTS.map(ip)).unwrap_err(), PlaceError::Missing(vec![0]));
    // Of two that could be missing, the one that is there is not named.
    let mut net = Net::new(&fat_tree());
    (net.states[0], net.states[2]) = (None, None);
    assert_eq!(net.place(&HOSTS.map(ip)).unwrap_err(), PlaceError::Missing(vec![2]));
    let mut net = Net::new(&fat_tree());
    net.states[1] = None;
    assert_eq!(net.place(&HOSTS.map(ip)).unwrap_err(), PlaceError::Missing(vec![1]));
    assert_eq!(net.root(&HOSTS[2..]), 2);
    // One that could serve is only not there, and the other one has no room.
    for (free_nodes, free_bytes) in [(0, 1 << 30), (9, 1 << 20)] {
        let mut net = Net::new(&fat_tree());
        *net.state(0) = SwitchState { free_nodes, free_bytes, ..*net.state(0) };
        net.states[3] = None;
        assert_eq!(net.place(&HOSTS.map(ip)).unwrap_err(), PlaceError::Missing(vec![3]));
    }
    // A leaf without room has no other.
    let mut net = Net::new(&fat_tree());
    net.state(2).free_bytes = 0;
    let error = net.place(&HOSTS.map(ip)).unwrap_err();
    assert!(
        matches!(error, PlaceError::Full { switch: 2, nodes: 1, bytes, .. } if bytes > 12 << 20)
    );
    // Two hosts and the way up.
    for (free_queue_pairs, fits) in [(2, false), (3, true)] {
        let mut net = Net::new(&fat_tree());
        net.state(2).free_queue_pairs = free_queue_pairs;
        match net.place(&HOSTS.map(ip)) {
            Err(PlaceError::Full { switch: 2, nodes: 1, queue_pairs: 3, .. }) => assert!(!fits),
            placed => assert!(fits && placed.is_ok(), "{placed:?}"),
        }
    }
}

#[test]
fn rates_decide_before_hops_where_hosts_are_no_slower() {
    // A leaf pair below a slow spine, and below a fast one with a switch between.
    let entries = |uplink: &str, nic: &str| {
        let fast = |connection| rate("40gbit", connection);
        let nic = |connection: ConnectionEntry| rate(nic, connection);
        vec![
            switch(
                0,
                &[
                    rate(uplink, down("10.0.0.1", "10.0.1.1")),
                    rate(uplink, down("10.0.0.1", "10.0.2.1")),
                ],
            ),
            switch(1, &[nic(host(0, "10.0.1.1", "10.1.0.1"))]),
            switch(2, &[nic(host(1, "10.0.2.1", "10.1.0.2"))]),
            switch(3, &[fast(down("10.0.3.1", "10.0.1.1")), fast(down("10.0.3.1", "10.0.4.1"))]),
            switch(4, &[fast(down("10.0.4.1", "10.0.2.1"))]),
        ]
    };
    for (uplink, nic, root, depth) in [
        ("10gbit", "40gbit", 3, 3),
        ("40gbit", "40gbit", 0, 2),
        ("10gbit", "10gbit", 0, 2),
        ("1gbit", "10gbit", 3, 3),
    ] {
        let net = Net::new(&entries(uplink, nic));
        let tree = net.place(&[ip("10.1.0.1"), ip("10.1.0.2")]).unwrap().tree;
        assert_eq!((tree.nodes()[0].switch.0, tree.depth()), (root, depth), "{uplink} {nic}");
    }
    // A link that a tree uses leaves half of it to the next.
    let mut net = Net::new(&entries("40gbit", "40gbit"));
    net.users[0] = 1;
    assert_eq!(net.root(&["10.1.0.1", "10.1.0.2"]), 3);
}

#[test]
fn a_host_is_reached_over_the_interface_that_it_joined_with() {
    // Two planes: each host has an interface at each.
    let net = Net::new(&[
        switch(0, &[host(0, "10.0.0.1", "10.1.0.1"), host(1, "10.0.0.1", "10.1.0.2")]),
        switch(1, &[host(0, "10.0.1.1", "10.2.0.1"), host(1, "10.0.1.1", "10.2.0.2")]),
    ]);
    assert_eq!(net.root(&["10.1.0.1", "10.1.0.2"]), 0);
    assert_eq!(net.root(&["10.2.0.1", "10.2.0.2"]), 1);
    let mixed = net.place(&[ip("10.1.0.1"), ip("10.2.0.2")]);
    assert_eq!(mixed.unwrap_err(), PlaceError::Apart);
    // One interface at two switches.
    let mut net = Net::new(&[
        switch(0, &[host(0, "10.0.0.1", "10.1.0.1"), host(1, "10.0.0.1", "10.1.0.2")]),
        switch(1, &[host(0, "10.0.1.1", "10.1.0.1"), host(1, "10.0.1.1", "10.1.0.2")]),
    ]);
    assert_eq!(net.root(&["10.1.0.1", "10.1.0.2"]), 0);
    net.states[0] = None;
    assert_eq!(net.root(&["10.1.0.1", "10.1.0.2"]), 1);
}

#[test]
fn what_does_not_fit_a_node_has_several_on_its_switch() {
    let mut entries = two_levels();
    entries[1].fan_in = FanIn::new(1);
    let net = Net::new(&entries);
    assert_eq!(net.place(&HOSTS.map(ip)).unwrap_err(), PlaceError::Depth);
    entries[1].fan_in = FanIn::new(2);
    let mut net = Net::new(&entries);
    let [a, b, c, _] = HOSTS;
    assert_eq!(
        net.nodes(&[a, a, b, b, c]),
        [
            node(0, None, &[below(1), below(4)]),
            node(1, Some(0), &[below(2), below(3)]),
            node(1, Some(1), &[rank(0), rank(1)]),
            node(1, Some(1), &[rank(2), rank(3)]),
            node(2, Some(0), &[rank(4)]),
        ]
    );
    net.state(1).free_nodes = 2;
    let error = net.place(&[a, a, b, b, c].map(ip)).unwrap_err();
    assert!(matches!(error, PlaceError::Full { switch: 1, nodes: 3, .. }));
}

#[test]
fn hosts_of_no_network_and_trees_that_are_too_deep_are_refused() {
    let net = Net::new(&two_levels());
    let address = ip("10.0.1.1");
    assert_eq!(
        net.place(&[ip(HOSTS[0]), address]).unwrap_err(),
        PlaceError::UnknownHost { rank: 1, address }
    );
    // A chain of switches, each with a host.
    let chain = |length: u8| {
        let address = |number: u8| format!("10.0.{number}.1");
        let entry = |number: u8| {
            let own = address(number);
            let host = host(number.into(), &own, &format!("10.1.0.{number}"));
            let mut connections = vec![host];
            connections.extend((number > 1).then(|| up(&own, &address(number - 1))));
            switch(number.into(), &connections)
        };
        Net::new(&(1..=length).map(entry).collect::<Vec<_>>())
    };
    let ends = |length: u8| [ip("10.1.0.1"), ip(&format!("10.1.0.{length}"))];
    assert_eq!(chain(6).place(&ends(6)).unwrap().tree.depth(), 6);
    assert_eq!(chain(7).place(&ends(7)).unwrap_err(), PlaceError::Depth);
}

/// A network of layers: each switch but those of the highest has links to some of the next one's, and each host
/// to one or two of the lowest.
fn network() -> impl Strategy<Value = Vec<SwitchEntry>> {
    let link = (any::<prop::sample::Index>(), 0_u8..4);
    let links = || prop::collection::vec(link.clone(), 1..4);
    let layers = prop::collection::vec(prop::collection::vec(links(), 1..5), 1..4);
    let fan_ins = prop::collection::vec(prop::option::of(2_u32..6), 16);
    (layers, prop::collection::vec(links(), 1..24), fan_ins).prop_map(|(layers, hosts, fan_ins)| {
        let address = |layer: usize, switch: usize| {
            IpAddr::V4(Ipv4Addr::new(10, layer as u8, 0, switch as u8 + 1))
        };
        let with_rate = |connection: ConnectionEntry, rate: u8| {
            let text = ["1gbit", "10gbit", "40gbit"].get(usize::from(rate));
            let rate: Option<LinkRate> = text.and_then(|text| text.parse().ok());
            ConnectionEntry { rate, ..connection }
        };
        let entry = |up, host_id, my_ip, peer_ip| ConnectionEntry {
            up,
            host_id,
            my_ip,
            my_mac: None,
            peer_ip,
            peer_mac: None,
            rate: None,
        };
        let mut entries: Vec<Vec<SwitchEntry>> = Vec::new();
        for (layer, switches) in layers.iter().enumerate() {
            let entry_of = |(number, links): (usize, &Vec<(prop::sample::Index, u8)>)| {
                let mut seen = BTreeSet::new();
                let above = layers.get(layer + 1).map_or(0, Vec::len);
                let mut connections = Vec::new();
                for (index, rate) in links {
                    if above > 0 && seen.insert(index.index(above)) {
                        let peer = address(layer + 1, index.index(above));
                        let up = entry(true, None, address(layer, number), peer);
                        connections.push(with_rate(up, *rate));
                    }
                }
                SwitchEntry {
                    fan_in: fan_ins[layer * 4 + number].and_then(FanIn::new),
                    ..switch((layer * 4 + number) as u64, &connections)
                }
            };
            entries.push(switches.iter().enumerate().map(entry_of).collect());
        }
        for (host, links) in hosts.iter().enumerate() {
            let mut seen = BTreeSet::new();
            for (index, rate) in links {
                let leaf = index.index(entries[0].len());
                if seen.insert(leaf) {
                    let at = IpAddr::from([10, 9, 0, host as u8 + 1]);
                    let down = entry(false, Some(host as u64), address(0, leaf), at);
                    entries[0][leaf].connections.push(with_rate(down, *rate));
                }
            }
        }
        // The highest have addresses by their links down.
        let lower: Vec<(IpAddr, IpAddr)> = entries
            .iter()
            .flatten()
            .flat_map(|entry| &entry.connections)
            .filter(|connection| connection.up)
            .map(|connection| (connection.my_ip, connection.peer_ip))
            .collect();
        for (layer, switches) in entries.iter_mut().enumerate() {
            for (number, switch) in switches.iter_mut().enumerate() {
                let own = address(layer, number);
                let ours = lower.iter().filter(|&&(_, upper)| upper == own);
                switch.connections.extend(ours.map(|&(peer, _)| entry(false, None, own, peer)));
            }
        }
        entries.into_iter().flatten().filter(|entry| !entry.connections.is_empty()).collect()
    })
}

/// Whether a switch is above a host, over switches that are there.
fn is_above(net: &Net, switch: SwitchIndex, host: IpAddr) -> bool {
    let mut next = vec![switch];
    let mut seen = BTreeSet::new();
    while let Some(at) = next.pop() {
        if net.states[at].is_none() || !seen.insert(at) {
            continue;
        }
        let below = |link: &&Link| link.upper == at;
        for link in net.topology.links().iter().filter(below) {
            match link.lower {
                Lower::Host(_) if link.lower_address == host => return true,
                Lower::Host(_) => {}
                Lower::Switch(lower) => next.push(lower),
            }
        }
    }
    false
}

proptest! {
    #[test]
    fn plans_are_trees_of_links_within_all_limits(
        entries in network(),
        ranks in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
        absent in prop::collection::vec(prop::bool::weighted(0.1), 16),
        free in prop::collection::vec(0_usize..8, 16),
        users in prop::collection::vec(0_u32..4, 128),
        fan_in in 2_u32..=8,
    ) {
        let mut net = Net::new(&entries);
        net.fan_in = FanIn::new(fan_in).unwrap();
        net.users.iter_mut().zip(&users).for_each(|(link, &users)| *link = users);
        for index in 0..net.states.len() {
            net.state(index).free_nodes = free[index];
            if absent[index] {
                net.states[index] = None;
            }
        }
        let addresses: Vec<IpAddr> = net.topology.attachments.keys().copied().collect();
        let hosts: Vec<IpAddr> =
            ranks.iter().map(|rank| addresses[rank.index(addresses.len())]).collect();
        let placed = net.place(&hosts);
        // The same again.
        prop_assert_eq!(&net.place(&hosts), &placed);
        let Placed { tree, links } = match placed {
            Ok(placed) => placed,
            Err(PlaceError::Missing(switches)) => {
                prop_assert!(switches.iter().all(|&switch| net.states[switch].is_none()));
                return Ok(());
            }
            Err(PlaceError::Full { switch, nodes, .. }) => {
                prop_assert!(net.states[switch].is_some_and(|state| state.free_nodes < nodes));
                // More ranks could make a tree too deep.
                if hosts.len() <= 8 {
                    let mut roomy = net;
                    for (state, entry) in roomy.states.iter_mut().zip(&entries) {
                        let fan_in = entry.fan_in.map_or(fan_in, |own| own.get().min(fan_in));
                        let levels = build::levels(hosts.len(), FanIn::new(fan_in).unwrap());
                        let most: usize = levels.unwrap().iter().sum();
                        *state = state.filter(|state| state.free_nodes >= most);
                    }
                    for root in 0..roomy.states.len() {
                        prop_assert!(!hosts.iter().all(|&host| is_above(&roomy, root, host)));
                    }
                }
                return Ok(());
            }
            Err(PlaceError::Apart) => {
                let all = Net::new(&entries);
                for switch in 0..all.states.len() {
                    prop_assert!(!hosts.iter().all(|&host| is_above(&all, switch, host)));
                }
                return Ok(());
            }
            Err(PlaceError::Depth) => {
                // Not with three layers and no more than 40 children in each.
                prop_assert!(fan_in < 4 || entries.iter().any(|entry| entry.fan_in.is_some()));
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        prop_assert_eq!(tree.world() as usize, hosts.len());
        // Every edge is a link of the network, or within a switch, and those are all links.
        let mut used = BTreeSet::new();
        let index = |node: &TreeNode| node.switch.0 as usize;
        for node in tree.nodes() {
            let upper = index(node);
            let own = net.topology.switches()[upper].fan_in.map_or(fan_in, |own| own.get().min(fan_in));
            prop_assert!(node.children.len() <= own as usize);
            for &child in &node.children {
                let find = |found: &dyn Fn(&Link) -> bool| {
                    let all = || net.topology.links().iter().enumerate();
                    all().find(|&(number, link)| {
                        link.upper == upper && found(link) && links.contains(&number)
                    })
                };
                let link = match child {
                    Child::Host { rank } => {
                        let host = hosts[rank as usize];
                        find(&|link| matches!(link.lower, Lower::Host(_)) && link.lower_address == host)
                    }
                    Child::Switch { node } if index(&tree.nodes()[node]) == upper => continue,
                    Child::Switch { node } => {
                        let lower = index(&tree.nodes()[node]);
                        find(&|link| link.lower == Lower::Switch(lower))
                    }
                };
                let Some((number, _)) = link else {
                    return Err(TestCaseError::fail(format!("{child:?} of {node:?} has no link")));
                };
                used.insert(number);
            }
        }
        prop_assert_eq!(used.into_iter().collect::<Vec<_>>(), links);
        // Limits of switches.
        for (switch, state) in net.states.iter().enumerate() {
            let nodes = tree.nodes().iter().filter(|node| index(node) == switch).count();
            prop_assert!(nodes <= state.map_or(0, |state| state.free_nodes), "switch {}", switch);
        }
        // A switch connects to one switch above, over one link.
        for switch in 0..net.states.len() {
            let up = |node: &&TreeNode| {
                let parent = node.parent.map(|parent| index(&tree.nodes()[parent]));
                index(node) == switch && parent.is_some_and(|parent| parent != switch)
            };
            prop_assert!(tree.nodes().iter().filter(up).count() <= 1);
        }
    }
}
