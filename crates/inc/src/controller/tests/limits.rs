//! What is just within a limit is taken, and what is just beyond it is not.

use super::*;
use crate::protocol::{
    FallbackOffer, HeldNode, LostSwitch, MAX_AVOIDED, MAX_HELD, MAX_HELD_AT_ONCE, MAX_HOST_BYTES,
    MAX_TEXT_BYTES, Resume, SameMachine, SwitchBelow,
};
use crate::slots::MAX_CHILDREN;
use crate::stripe::MAX_TREES;

const IDENTITY: [u64; 2] = [11, 12];

fn claim(world: u32, rank: u32) -> Resume {
    Resume {
        term: 5,
        group: "g".to_owned(),
        identity: IDENTITY,
        communicator: 77,
        world,
        rank,
        address: hello("g", world, 0).address,
        departed: false,
        more_addresses: Vec::new(),
    }
}

/// Whether a new connection that says this is not turned away.
fn is_taken(world: &mut World, connection: u64, message: ToController) -> bool {
    let connection = ConnectionId(connection);
    world.connect(connection);
    world.say(connection, message);
    !world.closed.contains(&connection)
}

fn holding(held: u32) -> Presence {
    Presence { incarnation: 3, term: 4, held }
}

fn node(communicator: u64) -> HeldNode {
    HeldNode { group: IDENTITY, communicator, children: 3, below: Vec::new(), tree: 0 }
}

#[test]
fn the_largest_group_is_as_large_as_there_can_be_ranks() {
    for max_ranks in [64, 4096] {
        let config = ControllerConfig { max_ranks, ..ControllerConfig::new(7) };
        let most = max_ranks as u32;
        for (size, rank, taken) in [
            (most, most - 1, true),
            (most + 1, 0, false),
            (0, 0, false),
            (1, 0, true),
            (most, most, false),
        ] {
            let mut world = World::with(config.clone());
            let join = ToController::Join(Hello { rank, ..hello("g", size, 0) });
            assert_eq!(is_taken(&mut world, 1, join), taken, "rank {rank} of {size} joins");
            let mut world = World::with(config.clone());
            let resume = ToController::Resume(claim(size, rank));
            assert_eq!(is_taken(&mut world, 1, resume), taken, "rank {rank} of {size} comes back");
        }
    }
}

/// Strangers take no place of ranks or switches, nor those of each other.
#[test]
fn the_largest_group_is_made_with_its_switch_while_strangers_come() {
    let (max_ranks, max_switches, max_strangers) = (16, 1, 3);
    let config =
        ControllerConfig { max_ranks, max_switches, max_strangers, ..ControllerConfig::new(7) };
    assert_eq!(config.max_connections(), 20);
    let mut world = World::with(config);
    (500..510).for_each(|number| world.connect(ConnectionId(number)));
    world.switch(SWITCH, "s", 1);
    world.heard(SWITCH);
    world.ready(1, "g", 16);
    let rank = world.join(100, "h", 1, 0);
    assert_eq!(world.refusal(rank).to_string(), "the controller has its 16 ranks already");
    let switch = ConnectionId(1001);
    world.switch(switch, "t", 2);
    assert_eq!(world.refusal(switch).to_string(), "the controller has its 1 switches already");
    let held = world.controller.census().connections;
    assert!((17..=20).contains(&held), "{held}");
    // Who comes back has the place of its connection of before.
    let identity = world.controller.groups.values().next().unwrap().identity;
    let communicator = world.controller.groups.values().next().unwrap().nodes[0].communicator;
    let address = hello("g", 16, 3).address;
    let resume = Resume { identity, communicator, address, ..claim(16, 3) };
    assert!(is_taken(&mut world, 200, ToController::Resume(Resume { term: 0, ..resume })));
}

/// Its groups need it, whoever has come in its place meanwhile; another process of its name serves nobody.
#[test]
fn a_switch_that_comes_back_is_taken_where_there_are_as_many_as_there_may_be() {
    for (incarnation, taken) in [(3, true), (4, false)] {
        let config = ControllerConfig { max_switches: 1, ..ControllerConfig::new(7) };
        let mut world = World::with(config);
        let presence = Presence { incarnation: 3, ..Presence::default() };
        world.switch_with(SWITCH, "s", 1, presence);
        let (hosts, communicator) = world.ready(10, "g", 2);
        world.close(SWITCH);
        world.switch(ConnectionId(1001), "t", 2);
        assert_eq!(world.heard(ConnectionId(1001)), [FromController::Registered]);
        let back = ConnectionId(1002);
        world.switch_with(back, "s", 1, Presence { incarnation, held: 1, ..presence });
        assert_eq!(!world.closed.contains(&back), taken);
        if taken {
            let group = world.controller.groups.values().next().unwrap().identity;
            let nodes = vec![HeldNode { group, ..node(communicator) }];
            world.say(back, ToController::Held { nodes });
            assert_eq!(world.heard(back), [FromController::Registered]);
        }
        let aborted =
            world.heard(hosts[0]).iter().any(|it| matches!(it, FromController::Abort { .. }));
        assert_eq!(aborted, !taken);
    }
}

/// So it is whether a rank has claimed the node that it has, or one may yet.
#[test]
fn a_switch_that_comes_back_with_as_much_as_it_can_have_is_asked_for_nothing_more() {
    let limits = |communicators, queue_pairs| SwitchLimits {
        communicators,
        memory_bytes: 1 << 40,
        queue_pairs,
    };
    let widest = HeldNode { children: 64, ..node(77) };
    for (limits, has_room) in [
        (limits(1, 4096), false),
        (limits(2, 4096), true),
        // Of 65 each.
        (limits(9, 129), false),
        (limits(9, 130), true),
    ] {
        for is_claimed in [false, true] {
            let mut world = World::new();
            let presence = holding(1);
            let address = IpAddr::from([127, 0, 1, 1]);
            let register = || {
                let name = "s".to_owned();
                ToController::Register { name, address, limits, presence }
            };
            // The other one has more nodes: it is asked only for what finds no room at the first.
            let other = ConnectionId(1001);
            world.switch_with(other, "t", 2, holding(2));
            let nodes = [78, 79].map(|it| HeldNode { group: [1, it], ..node(it) });
            world.say(other, ToController::Held { nodes: nodes.to_vec() });
            for connection in [SWITCH, ConnectionId(1002)] {
                world.connect(connection);
                world.say(connection, register());
                world.say(connection, ToController::Held { nodes: vec![widest.clone()] });
                assert_eq!(world.heard(connection), [FromController::Registered]);
                if connection == SWITCH {
                    if is_claimed {
                        let resume = Resume { world: 64, ..claim(64, 0) };
                        assert!(is_taken(&mut world, 200, ToController::Resume(resume)));
                    }
                    world.close(SWITCH);
                }
            }
            let host = world.join(300, "h", 1, 0);
            let heard = world.heard(host);
            let [FromController::GroupReady { switch_address, .. }] = heard[..] else {
                panic!("{heard:?}");
            };
            let place = if has_room { 1 } else { 2 };
            assert_eq!(switch_address, IpAddr::from([127, 0, 1, place]), "{limits:?} {is_claimed}");
        }
    }
}

#[test]
fn a_tree_may_be_as_deep_as_switches_are() {
    let fan_in = FanIn::new(2).unwrap();
    let config = ControllerConfig { fan_in, ..ControllerConfig::new(7) };
    for (size, taken) in [(64, true), (65, false)] {
        let join = ToController::Join(hello("g", size, 0));
        assert_eq!(is_taken(&mut World::with(config.clone()), 1, join), taken, "{size}");
    }
}

#[test]
fn what_a_host_says_of_itself_is_as_long_as_it_may_be() {
    let same = |host: usize, socket: usize| Hello {
        same_machine: Some(SameMachine {
            host: "h".repeat(host),
            socket: "s".repeat(socket),
            required: false,
        }),
        ..hello("g", 2, 0)
    };
    let unable = |bytes: usize| Hello {
        fallback: FallbackOffer::Unable { reason: "x".repeat(bytes) },
        ..hello("g", 2, 0)
    };
    let address = IpAddr::from([127, 0, 1, 1]);
    let lost = LostSwitch { address, incarnation: None };
    let avoid = |count| Hello { avoid: vec![lost; count], ..hello("g", 2, 0) };
    let more = |count| Hello { more_addresses: vec![address; count], ..hello("g", 2, 0) };
    let named = |bytes| Hello { group: "g".repeat(bytes), ..hello("g", 2, 0) };
    for (number, (hello, taken)) in [
        (same(MAX_HOST_BYTES, MAX_HOST_BYTES), true),
        (same(MAX_HOST_BYTES + 1, 1), false),
        (same(1, MAX_HOST_BYTES + 1), false),
        (unable(MAX_TEXT_BYTES), true),
        (unable(MAX_TEXT_BYTES + 1), false),
        (avoid(MAX_AVOIDED), true),
        (avoid(MAX_AVOIDED + 1), false),
        (more(MAX_TREES - 1), true),
        (more(MAX_TREES), false),
        (named(MAX_NAME_BYTES), true),
        (named(MAX_NAME_BYTES + 1), false),
    ]
    .into_iter()
    .enumerate()
    {
        let join = ToController::Join(hello);
        assert_eq!(is_taken(&mut World::new(), 1, join), taken, "{number}");
    }
}

#[test]
fn a_switch_that_comes_back_may_have_nodes_of_any_size_and_as_many_as_there_may_be() {
    let address = IpAddr::from([127, 0, 1, 2]);
    let below = |count| vec![SwitchBelow { rank: 0, address }; count];
    let children = MAX_CHILDREN as u32;
    let widest = HeldNode { children, below: below(MAX_CHILDREN), ..node(1) };
    let many = |count: usize| (0..count as u64).map(node).collect::<Vec<_>>();
    for (held, nodes, taken) in [
        (MAX_HELD, many(MAX_HELD_AT_ONCE), true),
        (MAX_HELD, many(MAX_HELD_AT_ONCE + 1), false),
        (2, many(2), true),
        (2, vec![widest], true),
        (2, vec![HeldNode { below: below(4), ..node(1) }], false),
        (2, vec![HeldNode { children: children + 1, ..node(1) }], false),
    ] {
        let mut world = World::new();
        world.switch_with(SWITCH, "s", 1, holding(held));
        let named = nodes.len();
        world.say(SWITCH, ToController::Held { nodes });
        assert_eq!(!world.closed.contains(&SWITCH), taken, "{named} of {held}");
        let left = held as usize - named;
        let registered = taken && left == 0;
        assert_eq!(world.heard(SWITCH).contains(&FromController::Registered), registered);
    }
}

#[test]
fn a_switch_with_more_nodes_may_report_more_before_they_are_claimed() {
    for (held, most) in [(0, 64), (100, 164), (MAX_HELD, 1024)] {
        let mut world = World::new();
        world.switch_with(SWITCH, "s", 1, holding(held));
        for communicator in 0..2000 {
            let report = SwitchReport::PeerLost { rank: 2, detail: "x".to_owned(), switch: None };
            world.say(SWITCH, ToController::Report { communicator, report });
        }
        let early: usize = world.controller.early.values().map(|it| it.len()).sum();
        assert_eq!(early, most, "{held}");
    }
}

#[test]
fn one_controller_alone_need_not_be_told_of() {
    let mut world = World::new();
    world.controller.set_controllers(&[SocketAddr::from(([10, 0, 0, 1], 1))]);
    world.switch(SWITCH, "s", 1);
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
    let (hosts, _) = world.ready(10, "g", 1);
    assert_eq!(world.heard(hosts[0]), []);
}

#[test]
fn how_several_groups_have_ended_is_known_when_their_ranks_come_back() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    for (name, first) in [("a", 10), ("b", 20)] {
        let (hosts, communicator) = world.ready(first, name, 1);
        let group = world.controller.groups.values().next().unwrap().identity;
        world.say(hosts[0], ToController::Leave { collectives: 1 });
        world.say(SWITCH, ToController::CommunicatorDestroyed { communicator });
        assert_eq!(world.controller.ended.back().map(|it| it.group), Some(group));
    }
    let ended: Vec<_> = world.controller.ended.iter().map(|it| it.group).collect();
    for (identity, number) in ended.into_iter().zip(30..) {
        let connection = ConnectionId(number);
        world.connect(connection);
        world.say(connection, ToController::Resume(Resume { identity, ..claim(1, 0) }));
        assert_eq!(world.heard(connection), [FromController::Closed]);
    }
    assert_eq!(world.controller.ended.len(), 2);
}

/// A record of a group of two, of which rank 1 has left, with a placement of so many nodes.
fn record(nodes: usize) -> Record {
    let placed =
        PlacedNode { id: 1, name: "s".repeat(100), tree: 0, communicator: 77, edges: Vec::new() };
    let placement = Placement {
        group: "g".to_owned(),
        communicator: 77,
        path_mtu: Mtu::B1024,
        nodes: vec![placed; nodes],
    };
    let address = hello("g", 2, 1).address;
    Record {
        group: "g".to_owned(),
        identity: IDENTITY,
        communicator: 77,
        world: 2,
        departed: vec![Departed { rank: 1, address, collectives: 3 }],
        links: Vec::new(),
        placement: Some(placement),
    }
}

#[test]
fn a_record_is_read_up_to_its_length_and_written_without_its_tree_where_it_would_be_longer() {
    let key = Record::key(IDENTITY);
    let mut text = serde_json::to_string(&record(1)).unwrap();
    text.push_str(&" ".repeat(MAX_RECORD_BYTES - text.len()));
    assert_eq!(Record::parse(&key, &text), Ok(record(1)));
    assert!(Record::parse(&key, &(text + " ")).is_err());
    // A placement that another controller has recorded is kept, if there is room.
    for (nodes, is_kept) in [(1, true), (MAX_RECORD_BYTES / 100, false)] {
        let mut world =
            World::with(ControllerConfig { keep_records: true, ..ControllerConfig::new(7) });
        world.controller.lead(Instant::ZERO, 2, vec![record(nodes)]);
        assert!(is_taken(&mut world, 1, ToController::Resume(claim(2, 0))));
        let id = *world.controller.groups.keys().next().unwrap();
        let identity = world.controller.groups[&id].identity;
        world.controller.record_changed(identity);
        let (_, text) = world.controller.poll_record().unwrap();
        let kept = Record::parse(&key, &text.unwrap()).unwrap();
        assert_eq!(kept.placement.is_some(), is_kept);
        assert_eq!(kept.departed, record(1).departed);
    }
}

#[test]
fn all_records_that_have_changed_are_given() {
    let config = ControllerConfig { keep_records: true, ..ControllerConfig::new(7) };
    let mut world = World::with(config);
    (0..3).for_each(|number| world.controller.record_changed([number, 0]));
    let keys: Vec<String> =
        core::iter::from_fn(|| world.controller.poll_record()).map(|(key, _)| key).collect();
    assert_eq!(keys, [0, 1, 2].map(|number| Record::key([number, 0])));
    // Where nobody takes them, they are no more than so many.
    (0..5000).for_each(|number| world.controller.record_changed([number, 0]));
    assert_eq!(core::iter::from_fn(|| world.controller.poll_record()).count(), 4096);
}

#[test]
fn a_recorded_rank_that_there_is_not_has_not_left() {
    let mut wrong = record(1);
    wrong.departed[0].rank = 2;
    let mut world = World::new();
    world.controller.lead(Instant::ZERO, 2, vec![wrong]);
    assert!(is_taken(&mut world, 1, ToController::Resume(claim(2, 0))));
    assert_eq!(world.heard(ConnectionId(1)), [FromController::Resumed], "nobody has left");
}
