//! Groups whose ranks have several addresses: a tree for each.

use super::resume::{IDENTITY, holding, node};
use super::world::{World, hello, seconds};
use super::*;
use crate::protocol::{HeldNode, HostQueuePair, PlannedTree, Resume, SwitchLimits};
use crate::stripe::MAX_TREES;
use crate::topology::{ConnectionEntry, SwitchEntry};

const OTHER: ConnectionId = ConnectionId(1001);

/// Address `number` of a rank.
fn at(rank: u32, number: u8) -> IpAddr {
    IpAddr::from([127, 0, number, rank as u8 + 1])
}

fn switch_at(number: u8) -> IpAddr {
    IpAddr::from([127, 0, 1, number])
}

fn join(world: &mut World, rank: u32, of: u32, addresses: u8) -> ConnectionId {
    let connection = ConnectionId(rank.into());
    world.connect(connection);
    let more_addresses = (1..addresses).map(|number| at(rank, 10 * number)).collect();
    world.say(connection, ToController::Join(Hello { more_addresses, ..hello("g", of, rank) }));
    connection
}

/// What a host says with queue pairs for so many trees.
fn connect(rank: u32, trees: u32) -> ToController {
    let pair = |tree: u32| HostQueuePair {
        qpn: Qpn::new(100 + 10 * tree + rank),
        psn: Psn::new(tree),
        receive_share: None,
    };
    let HostQueuePair { qpn, psn, .. } = pair(0);
    let more = (1..trees).map(pair).collect();
    ToController::Connect { qpn, psn, path_mtu: Mtu::B4096, more, receive_share: None }
}

/// Makes what a switch was asked for: the tree and the children's addresses of each.
fn create(world: &mut World, switch: ConnectionId) -> Vec<(u64, u8, Vec<IpAddr>)> {
    let mut made = Vec::new();
    for message in world.heard(switch) {
        let FromController::CreateCommunicator { communicator, children, tree, .. } = message
        else {
            continue;
        };
        let edge = |child: &SwitchChild| {
            let rank = child.ranks.first().unwrap();
            SwitchEdge {
                rank,
                qpn: Qpn::new(500 + 10 * u32::from(tree) + rank),
                psn: Psn::new(rank),
                receive_share: Some(7000 + 10 * u32::from(tree) + rank),
            }
        };
        let edges = children.iter().map(edge).collect();
        world.say(switch, ToController::CommunicatorCreated { communicator, edges, uplink: None });
        made.push((communicator, tree, children.iter().map(|child| child.address).collect()));
    }
    made
}

/// Two ranks over two switches that have a tree each: the ranks and the nodes.
fn ready(world: &mut World) -> ([ConnectionId; 2], [u64; 2]) {
    world.switch(SWITCH, "s", 1);
    world.switch(OTHER, "t", 2);
    let hosts = [join(world, 0, 2, 2), join(world, 1, 2, 2)];
    for (rank, host) in (0..).zip(hosts) {
        world.say(host, connect(rank, 2));
    }
    let nodes = [SWITCH, OTHER].map(|switch| create(world, switch)[0].0);
    for host in hosts {
        world.heard(host);
    }
    (hosts, nodes)
}

#[test]
fn ranks_with_two_addresses_get_two_trees_in_one_plan() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    world.switch(OTHER, "t", 2);
    // As many as the rank with the fewest has.
    let hosts = [join(&mut world, 0, 2, 3), join(&mut world, 1, 2, 2)];
    for host in hosts {
        let heard = world.heard(host);
        let [FromController::GroupReady { switch_address, more_switches, .. }] = &heard[..] else {
            panic!("{heard:?}");
        };
        assert_eq!((*switch_address, &more_switches[..]), (switch_at(1), &[switch_at(2)][..]));
    }
    for (rank, host) in (0..).zip(hosts) {
        world.say(host, connect(rank, 2));
    }
    let [first] = &create(&mut world, SWITCH)[..] else { panic!("one node") };
    assert_eq!((first.1, &first.2[..]), (0, &[at(0, 0), at(1, 0)][..]));
    assert_eq!(world.heard(hosts[0]), []);
    let [second] = &create(&mut world, OTHER)[..] else { panic!("one node") };
    assert_eq!((second.1, &second.2[..]), (1, &[at(0, 10), at(1, 10)][..]));
    for (rank, host) in (0..).zip(hosts) {
        let heard = world.heard(host);
        let [FromController::Plan(plan)] = &heard[..] else { panic!("{heard:?}") };
        assert_eq!((plan.communicator, plan.qpn), (first.0, Qpn::new(500 + rank)));
        assert_eq!(plan.receive_share, Some(7000 + rank));
        let (switch, address) = ("t".to_owned(), switch_at(2));
        let (qpn, psn) = (Qpn::new(510 + rank), Psn::new(rank));
        let tree = PlannedTree {
            switch,
            address,
            qpn,
            psn,
            incarnation: 0,
            receive_share: Some(7010 + rank),
        };
        assert_eq!(plan.more, [tree]);
    }
    let overview = world.controller.overview();
    let communicator = overview.groups[0].communicator.as_ref().unwrap();
    let nodes: Vec<_> = communicator.nodes.iter().map(|it| (&*it.switch, it.tree)).collect();
    assert_eq!((communicator.trees, &nodes[..]), (2, &[("s", 0), ("t", 1)][..]));
    assert_eq!(communicator.nodes[1].edges[0].peer.ip, Some(at(0, 10)));
    world.say(hosts[0], ToController::Leave { collectives: 0 });
    world.say(hosts[1], ToController::Leave { collectives: 0 });
    for (switch, node) in [(SWITCH, first.0), (OTHER, second.0)] {
        let destroy = FromController::DestroyCommunicator { communicator: node };
        assert_eq!(world.heard(switch), [destroy]);
    }
    world.assert_quiet();
}

#[test]
fn what_is_wrong_on_one_tree_ends_all() {
    let (rank, detail) = (1, "count".to_owned());
    let mut world = World::new();
    let (hosts, nodes) = ready(&mut world);
    let report = SwitchReport::Mismatch { rank, detail: detail.clone() };
    world.say(OTHER, ToController::Report { communicator: nodes[1], report });
    let reason = AbortReason::Mismatch { rank, detail };
    for host in hosts {
        assert_eq!(world.heard(host), [FromController::Abort { reason: reason.clone() }]);
    }
    // The second switch tells its own; nobody else tells those of the first.
    let destroy = FromController::DestroyCommunicator { communicator: nodes[0] };
    assert_eq!((world.heard(SWITCH), world.heard(OTHER)), (vec![destroy], vec![]));
    world.assert_quiet();
}

#[test]
fn who_is_lost_on_a_tree_is_named_with_tree_address_and_switch() {
    let lost = |world: &mut World, hosts: [ConnectionId; 2]| {
        let heard = world.heard(hosts[0]);
        let [FromController::Abort { reason }] = &heard[..] else { panic!("{heard:?}") };
        reason.to_string()
    };
    let mut world = World::new();
    let (hosts, nodes) = ready(&mut world);
    let report = SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None };
    world.say(OTHER, ToController::Report { communicator: nodes[1], report });
    assert_eq!(lost(&mut world, hosts), "rank 1 is lost: tree 1 at 127.0.10.2: silent");
    let mut world = World::new();
    let (hosts, _) = ready(&mut world);
    world.say(
        hosts[1],
        ToController::SwitchLost {
            detail: "silent".to_owned(),
            tree: 1,
            switch: None,
            further_up: false,
        },
    );
    let wanted = "switch \"t\" at 127.0.1.2 is lost: rank 1 cannot reach it: silent";
    assert_eq!(lost(&mut world, hosts), wanted);
}

#[test]
fn a_host_has_as_many_queue_pairs_as_trees_and_no_more_addresses_than_there_can_be_trees() {
    for trees in [1, 3] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        let host = join(&mut world, 0, 1, 2);
        world.heard(host);
        world.say(host, connect(0, trees));
        let reason = world.refusal(host).to_string();
        assert!(reason.contains("cannot send Connect now"), "{reason}");
    }
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let most = join(&mut world, 0, 1, MAX_TREES as u8);
    let heard = world.heard(most);
    assert!(
        matches!(&heard[..], [FromController::GroupReady { more_switches, .. }] if more_switches.len() == 7)
    );
    let host = join(&mut world, 1, 2, MAX_TREES as u8 + 1);
    let reason = world.refusal(host).to_string();
    assert!(reason.contains("up to 8 addresses, not 9"), "{reason}");
}

#[test]
fn where_there_is_no_room_for_a_further_tree_there_are_fewer() {
    let mut world = World::new();
    world.connect(SWITCH);
    let limits = SwitchLimits { communicators: 1, ..SwitchLimits::NONE };
    let (name, address, presence) = ("s".to_owned(), switch_at(1), Presence::default());
    world.say(SWITCH, ToController::Register { name, address, limits, presence });
    let host = join(&mut world, 0, 1, 3);
    let heard = world.heard(host);
    assert!(
        matches!(&heard[..], [FromController::GroupReady { more_switches, .. }] if more_switches.is_empty())
    );
}

#[test]
fn a_restarted_controller_knows_which_tree_a_node_is_of() {
    let identity = [11, 12];
    let back = |world: &mut World| {
        let first = 77;
        for (tree, (switch, name)) in [(SWITCH, "s"), (OTHER, "t")].into_iter().enumerate() {
            let presence = Presence { incarnation: 3, term: 4, held: 1 };
            world.switch_with(switch, name, tree as u8 + 1, presence);
            let (group, below, communicator) = (identity, Vec::new(), first + tree as u64);
            let tree = tree as u8;
            let node = HeldNode { group, communicator, children: 2, below, tree };
            world.say(switch, ToController::Held { nodes: vec![node] });
            world.heard(switch);
        }
        let host = ConnectionId(0);
        for rank in [1, 0] {
            world.connect(ConnectionId(rank.into()));
            let resume = Resume {
                term: 5,
                group: "g".to_owned(),
                identity,
                communicator: first,
                world: 2,
                rank,
                address: at(rank, 0),
                departed: false,
                more_addresses: vec![at(rank, 10)],
            };
            world.say(ConnectionId(rank.into()), ToController::Resume(resume));
        }
        world.heard(host);
        host
    };
    let mut told = Vec::new();
    for report in [
        SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None },
        SwitchReport::Mismatch { rank: 1, detail: "count".to_owned() },
    ] {
        let mut world = World::new();
        let host = back(&mut world);
        world.say(OTHER, ToController::Report { communicator: 78, report });
        let heard = world.heard(host);
        let [FromController::Abort { reason }] = &heard[..] else { panic!("{heard:?}") };
        told.push((reason.to_string(), world.heard(SWITCH), world.heard(OTHER)));
    }
    let (lost, first, _) = &told[0];
    assert_eq!(lost, "rank 1 is lost: tree 1 at 127.0.10.2: silent");
    assert_eq!(first[..], [FromController::AbortCommunicator { communicator: 77, rank: 1 }]);
    let destroy = FromController::DestroyCommunicator { communicator: 77 };
    assert_eq!((&told[1].1[..], &told[1].2[..]), (&[destroy][..], &[][..]));
    let mut world = World::new();
    let host = back(&mut world);
    world.say(
        host,
        ToController::SwitchLost {
            detail: "silent".to_owned(),
            tree: 1,
            switch: None,
            further_up: false,
        },
    );
    let heard = world.heard(host);
    let [FromController::Abort { reason }] = &heard[..] else { panic!("{heard:?}") };
    assert!(reason.to_string().starts_with("switch \"t\" at 127.0.1.2 is lost"), "{reason}");
}

/// Two leaves that every host is connected to, with an address each, and two spines above both leaves. `crossed`: each
/// leaf has a half of the hosts' first addresses, and the other half of their second ones.
fn two_rails(hosts: u32, crossed: bool) -> ControllerConfig {
    let entry = |up, host_id, my: u8, peer_ip| ConnectionEntry {
        up,
        host_id,
        my_ip: switch_at(my),
        my_mac: None,
        peer_ip,
        peer_mac: None,
        rate: None,
    };
    let leaf = |number: u8| {
        let half = |rank: u32| rank < hosts / 2 || !crossed;
        let rail = |rank: u32| if half(rank) == (number == 1) { 0 } else { 10 };
        let down = |rank: u32| entry(false, Some(rank.into()), number, at(rank, rail(rank)));
        let up = [3, 4].map(|spine| entry(true, None, number, switch_at(spine)));
        let connections = (0..hosts).map(down).chain(up).collect();
        SwitchEntry { id: number.into(), name: None, root: false, fan_in: None, connections }
    };
    let spine = |number: u8| {
        let connections = [1, 2].map(|leaf| entry(false, None, number, switch_at(leaf))).to_vec();
        SwitchEntry { id: number.into(), name: None, root: false, fan_in: None, connections }
    };
    let topology = Topology::new(&[leaf(1), leaf(2), spine(3), spine(4)]).unwrap();
    ControllerConfig { topology: Some(Arc::new(topology)), ..ControllerConfig::new(7) }
}

#[test]
fn trees_of_one_communicator_share_no_link_where_the_network_has_others() {
    let mut world = World::with(two_rails(4, true));
    for number in 1..=4 {
        world.switch(ConnectionId(1000 + u64::from(number)), &format!("s{number}"), number);
    }
    for rank in 0..4 {
        join(&mut world, rank, 4, 2);
    }
    let group = world.controller.groups.values().next().unwrap();
    let trees = group.trees.as_ref().unwrap();
    assert_eq!(trees.trees(), 2);
    // Three switches and four hosts each.
    let mut links = group.links.clone();
    assert_eq!(links.len(), 2 * 6);
    links.sort_unstable();
    links.dedup();
    assert_eq!(links.len(), 2 * 6, "{:?}", group.links);
    let roots = trees.nodes().iter().filter(|node| node.parent.is_none());
    let roots: Vec<SwitchId> = roots.map(|node| node.switch).collect();
    assert_eq!(roots, [SwitchId(2), SwitchId(3)]);
}

#[test]
fn a_further_tree_keeps_off_the_links_of_the_first_even_if_busy_switches_have_others() {
    let mut world = World::with(two_rails(4, true));
    for number in 1..=3 {
        world.switch(ConnectionId(1000 + u64::from(number)), &format!("s{number}"), number);
    }
    // The other spine has nodes of which it is not known what links they use.
    let busy = ConnectionId(1004);
    world.switch_with(busy, "s4", 4, holding(2));
    let nodes = vec![node(IDENTITY, 77), node([5, 6], 78)];
    world.say(busy, ToController::Held { nodes });
    for rank in 0..4 {
        join(&mut world, rank, 4, 2);
    }
    let group = world.controller.groups.values().next().unwrap();
    let roots = group.trees.as_ref().unwrap().nodes().iter().filter(|node| node.parent.is_none());
    assert!(roots.map(|node| node.switch).eq([SwitchId(2), SwitchId(3)]));
}

#[test]
fn a_further_tree_whose_only_switch_refuses_is_left_out() {
    let mut world = World::with(two_rails(2, false));
    world.switch(SWITCH, "s1", 1);
    world.switch(OTHER, "s2", 2);
    let hosts = [join(&mut world, 0, 2, 2), join(&mut world, 1, 2, 2)];
    for (rank, host) in (0..).zip(hosts) {
        world.say(host, connect(rank, 2));
        world.heard(host);
    }
    let heard = world.heard(OTHER);
    let Some(&FromController::CreateCommunicator { communicator, tree: 1, .. }) = heard.last()
    else {
        panic!("{heard:?}");
    };
    let (reason, path_mtu) = ("out of memory".to_owned(), None);
    world.say(OTHER, ToController::CommunicatorFailed { communicator, reason, path_mtu });
    for host in hosts {
        let heard = world.heard(host);
        let [FromController::GroupReady { more_switches, .. }] = &heard[..] else {
            panic!("{heard:?}")
        };
        assert!(more_switches.is_empty());
    }
}

#[test]
fn the_switch_of_a_further_tree_is_waited_for() {
    let mut world = World::with(two_rails(2, false));
    world.switch(SWITCH, "s1", 1);
    let hosts = [join(&mut world, 0, 2, 2), join(&mut world, 1, 2, 2)];
    world.pass(seconds(1.5));
    assert_eq!(world.waiting[&hosts[0]].0, "switch 2 (127.0.1.2) of the topology");
    world.switch(ConnectionId(1002), "s2", 2);
    let heard = world.heard(hosts[0]);
    let [FromController::GroupReady { more_switches, .. }] = &heard[..] else {
        panic!("{heard:?}")
    };
    assert_eq!(more_switches[..], [switch_at(2)]);
}
