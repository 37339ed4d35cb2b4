//! Groups on a network that was written down.

use core::cell::Cell;

use super::resume::{IDENTITY, NUMBER, back, claim};
use super::trees::{Answer, Lab, address, connection};
use super::world::{World, hello, seconds};
use super::*;
use crate::protocol::{LostSwitch, Presence, Resume, SwitchLimits};
use crate::topology::{ConnectionEntry, SwitchEntry};

fn host(rank: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, rank + 1])
}

fn switch(number: u64, hosts: core::ops::Range<u8>, above: &[usize]) -> SwitchEntry {
    let my_ip = address(number as usize);
    let connection = |up, host_id, peer_ip| ConnectionEntry {
        up,
        host_id,
        my_ip,
        my_mac: None,
        peer_ip,
        peer_mac: Some("00:11:22:33:44:55".parse().unwrap()),
        rate: None,
    };
    let down = hosts.map(|rank| connection(false, Some(u64::from(rank) + 50), host(rank)));
    let up = above.iter().map(|&switch| connection(true, None, address(switch)));
    let connections = down.chain(up).collect();
    SwitchEntry { id: number + 10, name: None, root: false, fan_in: None, connections }
}

/// Two leaves of two hosts each, switches 0 and 1, and two spines above both, switches 2 and 3.
fn config() -> ControllerConfig {
    let mut spines = [switch(2, 0..0, &[]), switch(3, 0..0, &[])];
    for (spine, number) in spines.iter_mut().zip([2, 3]) {
        let down = |leaf| ConnectionEntry {
            up: false,
            peer_ip: address(leaf),
            my_ip: address(number),
            host_id: None,
            peer_mac: None,
            my_mac: None,
            rate: None,
        };
        spine.connections = vec![down(0), down(1)];
    }
    let [a, b] = spines;
    let leaves = [switch(0, 0..2, &[2, 3]), switch(1, 2..4, &[2, 3])];
    let topology = Topology::new(&leaves.into_iter().chain([a, b]).collect::<Vec<_>>()).unwrap();
    ControllerConfig {
        topology: Some(Arc::new(topology)),
        report_placements: true,
        ..ControllerConfig::new(7)
    }
}

/// Two switches with a host each, which nothing connects.
pub(super) fn apart() -> ControllerConfig {
    let topology = Topology::new(&[switch(0, 0..1, &[]), switch(1, 1..2, &[])]).unwrap();
    ControllerConfig { topology: Some(Arc::new(topology)), ..ControllerConfig::new(7) }
}

fn switches(lab: &Lab, nodes: &[u64]) -> Vec<usize> {
    nodes.iter().map(|node| lab.nodes[node].switch).collect()
}

#[test]
fn groups_are_spread_over_the_spines() {
    let mut lab = Lab::with(config(), 4);
    let (_, first) = lab.ready("a", 1, 4);
    let (_, second) = lab.ready("b", 100, 4);
    let (_, third) = lab.ready("c", 200, 4);
    let mut roots = Vec::new();
    for nodes in [&first, &second, &third] {
        let mut switches = switches(&lab, nodes);
        switches.sort_unstable();
        assert_eq!(switches[..2], [0, 1]);
        roots.push(switches[2]);
    }
    assert_eq!(roots, [2, 3, 2]);
}

#[test]
fn what_the_network_does_not_have_is_refused() {
    let mut world = World::with(config());
    world.switch(connection(0), "any", 0);
    assert_eq!(world.heard(connection(0)), [FromController::Registered]);
    world.switch(connection(9), "x", 9);
    assert_eq!(
        world.refusal(connection(9)).to_string(),
        "the controller's topology has no switch \"x\" with the address 127.0.1.9: add it to the file, or give \
         this one the name and an address of one that is in it"
    );
    let stranger = ConnectionId(1);
    world.connect(stranger);
    world.say(stranger, ToController::Join(Hello { rank: 1, ..hello("g", 2, 4) }));
    assert_eq!(
        world.refusal(stranger).to_string(),
        "rank 1 is at 127.0.0.5, and the controller's topology has no host there: add it to the file, or give \
         the rank an address that is in it"
    );
    world.assert_quiet();
}

#[test]
fn a_group_waits_for_the_switches_that_it_needs_and_is_told_which() {
    let mut world = World::with(config());
    for (number, name) in [(0, "leaf"), (3, "spine")] {
        world.switch(connection(number), name, number as u8);
    }
    let hosts: Vec<ConnectionId> =
        (0..4).map(|rank| world.join(rank, "g", 4, rank as u32)).collect();
    world.pass(seconds(1.5));
    assert_eq!(world.waiting[&hosts[2]].0, "switch 11 (127.0.1.1) of the topology");
    world.pass(seconds(30.0));
    assert_eq!(
        world.refusal(hosts[3]).to_string(),
        "group \"g\" needs what the controller's topology has and what has not registered: switch 11 \
         (127.0.1.1); start it, or look why it does not register"
    );
    // What is below one leaf does not need the other.
    let pair: Vec<ConnectionId> =
        (0..2).map(|rank| world.join(10 + rank, "h", 2, rank as u32)).collect();
    for (&host, address) in pair.iter().zip([address(0); 2]) {
        assert!(
            matches!(world.heard(host)[..], [FromController::GroupReady { switch_address, .. }] if switch_address == address)
        );
    }
    // The one that comes is taken at once.
    let all: Vec<ConnectionId> =
        (0..4).map(|rank| world.join(20 + rank, "g", 4, rank as u32)).collect();
    assert_eq!(world.heard(all[0]), []);
    world.switch(connection(1), "leaf 2", 1);
    assert!(matches!(world.heard(all[3])[..], [FromController::GroupReady { .. }]));
}

#[test]
fn when_a_spine_refuses_the_other_is_the_root() {
    let mut lab = Lab::with(config(), 4);
    let hosts = lab.join("g", 1, 4);
    // The two leaves first, then a spine.
    lab.run(|request| if request == 2 { Answer::Failed } else { Answer::Done });
    assert!(lab.nodes.is_empty());
    hosts.iter().for_each(|&host| lab.world.end(host));
    lab.run(|_| Answer::Done);
    let nodes: Vec<u64> = lab.nodes.keys().copied().collect();
    assert_eq!(switches(&lab, &nodes), [3, 0, 1]);
    // A leaf has no other: its words are what the group hears.
    let mut lab = Lab::with(config(), 4);
    let hosts = lab.join("g", 1, 4);
    let first = Cell::new(true);
    lab.run(|_| if first.take() { Answer::Failed } else { Answer::Done });
    let text = lab.world.refusal(hosts[0]).to_string();
    assert_eq!(text, "switch \"s0\" could not make the communicator: out of memory");
    lab.assert_quiet();
}

#[test]
fn when_a_leaf_cannot_be_connected_the_other_spine_is_the_root() {
    let mut lab = Lab::with(config(), 4);
    let hosts = lab.join("g", 1, 4);
    // The two leaves, a spine, then a leaf is to connect to it.
    lab.run(|request| if request == 3 { Answer::Failed } else { Answer::Done });
    assert!(lab.nodes.is_empty());
    hosts.iter().for_each(|&host| lab.world.end(host));
    lab.run(|_| Answer::Done);
    let nodes: Vec<u64> = lab.nodes.keys().copied().collect();
    assert_eq!(switches(&lab, &nodes), [3, 0, 1]);
    // Without another spine there is no other tree, with or without the leaf.
    let mut lab = Lab::with(config(), 3);
    let hosts = lab.join("g", 1, 4);
    lab.run(|request| if request == 3 { Answer::Failed } else { Answer::Done });
    let text = lab.world.refusal(hosts[0]).to_string();
    assert_eq!(text, "switch \"s0\" could not make the communicator: out of memory");
    lab.assert_quiet();
}

#[test]
fn switches_are_asked_for_no_more_than_their_limits() {
    let mut world = World::with(config());
    for number in 0..4 {
        let communicators = if number == 1 { 1 } else { 9 };
        let limits = SwitchLimits { communicators, ..SwitchLimits::NONE };
        world.connect(connection(number));
        let (name, address) = (format!("s{number}"), address(number));
        world.say(
            connection(number),
            ToController::Register { name, address, limits, presence: Presence::default() },
        );
    }
    let mut join = |first: u64, group: &str| {
        (0..4).map(|rank| world.join(first + rank, group, 4, rank as u32)).last().unwrap()
    };
    let (first, second) = (join(1, "a"), join(10, "b"));
    assert!(matches!(world.heard(first)[..], [FromController::GroupReady { .. }]));
    let text = world.refusal(second).to_string();
    assert!(
        text.starts_with("the controller's topology has no tree for group \"b\": switch 11 (127.0.1.1) would serve 1 nodes")
            && text.contains("has room for 0 with "),
        "{text}"
    );
}

#[test]
fn a_group_that_waits_gets_the_room_of_one_that_ends() {
    // How nodes of the first group end: they were not made yet; their switches are told to destroy them, or
    // say that they have ended, or do not say it in time.
    for end in ["not made", "destroyed", "ended", "overdue"] {
        let mut lab = Lab::with(config(), 3);
        lab.world.close(connection(2));
        lab.world.connect(connection(2));
        let limits = SwitchLimits { communicators: 1, ..SwitchLimits::NONE };
        let (name, address) = ("s2".to_owned(), address(2));
        lab.world.say(
            connection(2),
            ToController::Register { name, address, limits, presence: Presence::default() },
        );
        lab.world.heard(connection(2));
        let (first, nodes) = match end {
            "not made" => {
                let join = |rank: u32| lab.world.join(1 + u64::from(rank), "a", 4, rank);
                ((0..4).map(join).collect(), Vec::new())
            }
            _ => lab.ready("a", 1, 4),
        };
        let join = |rank: u32| lab.world.join(100 + u64::from(rank), "b", 4, rank);
        let second: Vec<ConnectionId> = (0..4).map(join).collect();
        let is_ready = |lab: &mut Lab| {
            matches!(lab.world.heard(second[3])[..], [FromController::GroupReady { .. }])
        };
        lab.world.pass(seconds(1.0));
        assert_eq!(lab.world.waiting[&second[0]].0, "switch 13 (127.0.1.3) of the topology");
        assert!(!is_ready(&mut lab), "{end}");
        if end == "destroyed" {
            for host in first {
                lab.world.say(host, ToController::Leave { collectives: 0 });
            }
        } else {
            lab.world.lose(first[1]);
        }
        match end {
            "ended" => {
                assert!(!is_ready(&mut lab));
                let communicator = nodes[0];
                let ended = ToController::CommunicatorDestroyed { communicator };
                lab.world.say(connection(2), ended);
            }
            "overdue" => {
                lab.world.pass(seconds(9.9));
                assert!(!is_ready(&mut lab));
                lab.world.pass(seconds(0.1));
            }
            _ => {}
        }
        assert!(is_ready(&mut lab), "{end}");
    }
}

/// A group of one rank below the first leaf, whose process it has lost before or not.
fn join_alone(world: &mut World, number: u64, has_lost: bool) -> ConnectionId {
    let connection = ConnectionId(number);
    world.connect(connection);
    let lost = LostSwitch { address: address(0), incarnation: Some(0) };
    let avoid = if has_lost { vec![lost] } else { Vec::new() };
    let hello = Hello { avoid, ..hello(&format!("g{number}"), 1, 0) };
    world.say(connection, ToController::Join(hello));
    connection
}

#[test]
fn groups_that_wait_are_planned_some_at_a_time_in_their_order_however_often_there_is_room() {
    let mut world = World::with(config());
    world.switch(connection(0), "s0", 0);
    let waiting: Vec<ConnectionId> =
        (100..300).map(|number| join_alone(&mut world, number, true)).collect();
    let planned = |world: &World| world.controller.chosen.take();
    assert_eq!(planned(&world), 200);
    for number in 500..550 {
        let host = join_alone(&mut world, number, false);
        world.close(host);
    }
    assert_eq!(planned(&world), 50 + 16);
    // The others follow, and then all once more, as there was room after the first were planned.
    world.pass(seconds(0.019));
    assert_eq!(planned(&world), 0);
    world.pass(seconds(0.001));
    assert_eq!(planned(&world), 16);
    world.pass(seconds(0.28));
    assert_eq!(planned(&world), 200 - 2 * 16);
    world.pass(seconds(1.0));
    assert_eq!(planned(&world), 200);
    world.pass(seconds(5.0));
    assert_eq!(planned(&world), 0);
    // Each gets its turn when another process is there.
    let ready = |world: &mut World| {
        let is_ready = |&host: &ConnectionId| {
            matches!(world.heard(host)[..], [FromController::GroupReady { .. }])
        };
        waiting.iter().copied().filter(is_ready).collect::<Vec<_>>()
    };
    world.close(connection(0));
    let presence = Presence { incarnation: 9, ..Presence::default() };
    world.switch_with(connection(9), "s0", 0, presence);
    assert_eq!(ready(&mut world), waiting[..16]);
    world.pass(seconds(0.3));
    assert_eq!(ready(&mut world), waiting[16..]);
}

#[test]
fn a_placement_has_the_queue_pairs_of_both_ends() {
    let mut lab = Lab::with(config(), 4);
    let (hosts, nodes) = lab.ready("g", 1, 4);
    let Some(PlacementChange::Ready(placement)) = lab.world.controller.poll_placement() else {
        panic!("no placement");
    };
    assert_eq!(lab.world.controller.poll_placement(), None);
    assert_eq!((placement.group.as_str(), placement.communicator), ("g", nodes[0]));
    let ids: Vec<(u64, &str)> =
        placement.nodes.iter().map(|node| (node.id, node.name.as_str())).collect();
    assert_eq!(ids, [(12, "s2"), (10, "s0"), (11, "s1")]);
    // Each edge between switches is there from both ends.
    let ends = |up: bool| {
        let edges = placement.nodes.iter().flat_map(|node| &node.edges);
        let mut ends: Vec<_> = edges
            .filter(|edge| edge.up == up && edge.host.is_none())
            .map(
                |edge| if up { (edge.peer.qpn, edge.my.qpn) } else { (edge.my.qpn, edge.peer.qpn) },
            )
            .collect();
        ends.sort_unstable_by_key(|(upper, _)| upper.value());
        ends
    };
    assert_eq!(ends(true), ends(false));
    assert_eq!(ends(true).len(), 2);
    for (node, communicator) in placement.nodes.iter().zip(&nodes) {
        assert_eq!(node.communicator, *communicator);
        let made = &lab.nodes[communicator];
        for edge in &node.edges {
            assert_eq!(edge.my.ip, address(made.switch));
            match edge.up {
                true => assert_eq!(edge.my.qpn, made.uplink.unwrap().qpn),
                false => assert!(made.edges.iter().any(|own| own.qpn == edge.my.qpn)),
            }
            if let Some((id, rank)) = edge.host {
                assert_eq!((id, edge.peer.ip), (u64::from(rank) + 50, host(rank as u8)));
                // As the ranks of these tests have them.
                assert_eq!(edge.peer.qpn, Qpn::new(100 + 1 + rank));
                assert!(edge.peer.mac.is_some());
            }
        }
    }
    // One end is enough.
    lab.world.lose(hosts[1]);
    let over = PlacementChange::Over { communicator: nodes[0] };
    assert_eq!(lab.world.controller.poll_placement(), Some(over));
    assert_eq!(lab.world.controller.poll_placement(), None);
}

#[test]
fn further_nodes_of_a_switch_have_numbers_that_no_switch_has() {
    let topology = Topology::new(&[switch(0, 0..4, &[]), switch(9, 4..5, &[])]).unwrap();
    let topology = Some(Arc::new(topology));
    let fan_in = FanIn::new(2).unwrap();
    let config = ControllerConfig { topology, fan_in, ..config() };
    let mut lab = Lab::with(config, 1);
    lab.ready("g", 1, 4);
    let Some(PlacementChange::Ready(placement)) = lab.world.controller.poll_placement() else {
        panic!("no placement");
    };
    assert!(placement.nodes.iter().map(|node| node.id).eq([10, 20, 21]));
}

#[test]
fn a_group_that_leaves_is_over_and_one_that_was_not_ready_was_never_there() {
    let mut lab =
        Lab::with(ControllerConfig { report_placements: true, ..ControllerConfig::new(7) }, 1);
    let (hosts, nodes) = lab.ready("g", 1, 2);
    let ready = lab.world.controller.poll_placement();
    // Without a topology nodes and hosts have numbers from 0.
    let Some(PlacementChange::Ready(Placement { nodes: placed, .. })) = ready else {
        panic!("{ready:?}");
    };
    assert_eq!(placed.iter().map(|node| node.id).collect::<Vec<_>>(), [0]);
    assert_eq!(
        placed[0].edges.iter().map(|edge| edge.host).collect::<Vec<_>>(),
        [Some((0, 0)), Some((1, 1))]
    );
    for host in hosts {
        lab.world.say(host, ToController::Leave { collectives: 1 });
    }
    let over = PlacementChange::Over { communicator: nodes[0] };
    assert_eq!(lab.world.controller.poll_placement(), Some(over));
    let hosts = lab.join("h", 10, 2);
    lab.world.close(hosts[0]);
    assert_eq!(lab.world.controller.poll_placement(), None);
}

#[test]
fn switches_and_hosts_are_shown_with_their_numbers_in_the_network() {
    let mut world = World::with(config());
    world.switch(connection(1), "leaf", 1);
    world.join(1, "g", 2, 1);
    let overview = world.controller.overview();
    assert!(overview.switches.iter().map(|it| it.topology_id).eq([Some(11)]));
    assert!(overview.groups[0].members.iter().map(|it| it.topology_id).eq([Some(51)]));
}

/// A spine above so many leaves of one host each.
fn star(leaves: u8) -> ControllerConfig {
    let mut spine = switch(20, 0..0, &[]);
    let down = |leaf: u8| ConnectionEntry {
        up: false,
        peer_ip: address(leaf.into()),
        my_ip: address(20),
        host_id: None,
        peer_mac: None,
        my_mac: None,
        rate: None,
    };
    spine.connections = (0..leaves).map(down).collect();
    let leaves = (0..leaves).map(|leaf| switch(leaf.into(), leaf..leaf + 1, &[20]));
    let topology = Topology::new(&leaves.chain([spine]).collect::<Vec<_>>()).unwrap();
    ControllerConfig { topology: Some(Arc::new(topology)), ..ControllerConfig::new(7) }
}

#[test]
fn of_many_switches_that_are_missing_some_are_named() {
    for (leaves, named, rest) in
        [(2, 3, ""), (7, 8, ""), (8, 8, " and 1 more"), (12, 8, " and 5 more")]
    {
        let mut world = World::with(star(leaves));
        let join = |rank: u8| world.join(rank.into(), "g", leaves.into(), rank.into());
        let hosts: Vec<ConnectionId> = (0..leaves).map(join).collect();
        world.pass(seconds(1.5));
        let text = &world.waiting[&hosts[0]].0;
        assert_eq!(text.matches("127.0.1.").count(), named, "{text}");
        assert!(text.ends_with(&format!("){rest} of the topology")), "{text}");
    }
}

#[test]
fn trees_keep_off_the_links_of_communicators_from_before() {
    for (spine, other, returns) in [(2, 3, false), (3, 2, false), (2, 3, true), (3, 2, true)] {
        let mut world = World::with(config());
        let ends = |leaf| (address(spine), address(leaf));
        let record = Record {
            group: "a".to_owned(),
            identity: IDENTITY,
            communicator: NUMBER,
            world: 2,
            departed: Vec::new(),
            links: vec![ends(0), ends(1), (address(0), host(0)), (address(1), host(2))],
            placement: None,
        };
        world.controller.lead(world.now, 20, vec![record]);
        if returns {
            let resume = Resume { term: 8, address: host(0), ..claim("a", 2, 0) };
            back(&mut world, 50, resume);
        }
        for number in 0..4 {
            world.switch(connection(number), &format!("s{number}"), number as u8);
        }
        // Hosts that no link of the other communicator leads to.
        for (rank, at) in [(0, host(1)), (1, host(3))] {
            let host = ConnectionId(1 + u64::from(rank));
            world.connect(host);
            world.say(host, ToController::Join(Hello { address: at, ..hello("b", 2, rank) }));
        }
        let groups = &mut world.controller.groups.values();
        let trees = groups.find_map(|group| group.trees.as_ref()).unwrap();
        let switches = trees.nodes().iter().map(|node| node.switch);
        let places: BTreeSet<_> =
            switches.map(|switch| world.controller.switches[&switch].address).collect();
        assert_eq!(places, BTreeSet::from([0, 1, other].map(address)), "{spine} {returns}");
    }
}
