//! The controller under virtual time: every row of what can go wrong.

mod counted;
mod deadlines;
mod fallback;
mod further_up;
mod identity;
mod inventory;
mod keep_alive;
mod limits;
mod overview;
mod planned;
mod quotas;
mod record;
mod resume;
mod several;
mod shared_memory;
mod topology;
mod trees;
mod world;

use core::time::Duration;
use std::sync::Arc;

use millstream_wire::{Mtu, Psn, Qpn};

use super::*;
use crate::CommunicatorOptions;
use crate::plan::FanIn;
use crate::protocol::{Failover, Hello, Plan, Presence, SwitchChild, SwitchEdge, SwitchReport};
use crate::ranks::Ranks;
use crate::topology::Topology;
use world::{World, group_ready, hello, seconds};

const SWITCH: ConnectionId = ConnectionId(1000);
const PEER_LOST: &str = "its control connection was closed";

#[test]
fn a_group_goes_from_idle_to_ready_and_back() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
    assert_eq!(world.controller.group_state("g"), None);
    let a = world.join(1, "g", 2, 0);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CreatingGroup));
    assert_eq!(world.heard(a), []);
    let b = world.join(2, "g", 2, 1);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::GroupReady));
    let switch_address = IpAddr::from([127, 0, 1, 1]);
    for host in [a, b] {
        assert_eq!(world.heard(host), [group_ready(switch_address)]);
    }
    let (qpn, psn) = (Qpn::new(22), Psn::new(3));
    world.say(
        a,
        ToController::Connect {
            qpn,
            psn,
            path_mtu: Mtu::B1024,
            more: Vec::new(),
            receive_share: None,
        },
    );
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CreatingCommunicator));
    assert_eq!(world.heard(SWITCH), []);
    world.end(b);
    let heard = world.heard(SWITCH);
    let [FromController::CreateCommunicator { communicator, path_mtu, window, children, .. }] =
        &heard[..]
    else {
        panic!("{heard:?}");
    };
    // The smallest of all.
    assert_eq!((*path_mtu, *window), (Mtu::B1024, 8));
    let (ranks, address) = (Ranks::one(0), hello("g", 2, 0).address);
    assert_eq!(
        children[0],
        SwitchChild { ranks, is_switch: false, address, qpn, psn, receive_share: None }
    );
    let edges = [1, 0].map(|rank| SwitchEdge {
        rank,
        qpn: Qpn::new(500 + rank),
        psn: Psn::new(600 + rank),
        receive_share: None,
    });
    let communicator = *communicator;
    let edges = edges.to_vec();
    world.say(SWITCH, ToController::CommunicatorCreated { communicator, edges, uplink: None });
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
    let group = world.controller.groups.values().next().unwrap().identity;
    let plan = Plan {
        communicator,
        group,
        switch: "s".to_owned(),
        address: switch_address,
        qpn: Qpn::new(501),
        psn: Psn::new(601),
        path_mtu: Mtu::B1024,
        more: Vec::new(),
        ranks: Ranks::default(),
        failover: Failover::Off,
        incarnation: 0,
        meeting: None,
        processes: Vec::new(),
        receive_share: None,
    };
    assert_eq!(world.heard(b), [FromController::Plan(plan)]);

    // A day passes, nobody is thrown out.
    world.pass(Duration::from_secs(86_400));
    world.heard(a);
    world.say(b, ToController::Leave { collectives: 5 });
    assert_eq!(world.heard(a), [FromController::Left { rank: 1, collectives: 5 }]);
    assert_eq!(world.heard(b), []);
    world.say(a, ToController::Leave { collectives: 5 });
    assert_eq!(world.heard(SWITCH), [FromController::DestroyCommunicator { communicator }]);
    for host in [a, b] {
        assert_eq!(world.heard(host), [FromController::Closed]);
        assert!(world.closed.contains(&host));
    }
    world.assert_quiet();
    assert_eq!(world.controller.census().communicators, 1);
    world.say(SWITCH, ToController::CommunicatorDestroyed { communicator });
    assert_eq!(world.controller.census().communicators, 0);
}

#[test]
fn who_asks_for_the_impossible_is_refused_and_nobody_else_notices() {
    let mut world = World::new();
    let first = world.join(1, "g", 4, 1);
    let name = |group: &str| Hello { group: group.to_owned(), ..hello("", 4, 0) };
    let a_name = "the name of a group has 1 to 128 bytes and no control characters, \
                  and is neither `.` nor `..`";
    for (number, wrong, text) in [
        (10, hello("g", 4, 4), "rank 4 is out of range: a group of 4 has ranks 0 to 3"),
        (11, hello("g", 0, 0), "a group of 0 ranks is out of range: 1 to 4096"),
        (12, hello("g", 4097, 0), "a group of 4097 ranks is out of range: 1 to 4096"),
        (13, hello("g", 3, 0), "rank 0 says that group \"g\" has 3 ranks, the others say 4"),
        (
            14,
            hello("g", 4, 1),
            "group \"g\" has a rank 1 already, at 127.0.0.2: \
             give every process its own rank, or another group name",
        ),
        (15, name(""), a_name),
        (16, name("a\nb"), a_name),
        (17, name(&"x".repeat(129)), a_name),
        // They cannot be asked for over HTTP: clients take them for folders.
        (18, name("."), a_name),
        (19, name(".."), a_name),
    ] {
        let connection = ConnectionId(number);
        world.connect(connection);
        world.say(connection, ToController::Join(wrong));
        assert_eq!(world.refusal(connection).to_string(), text);
    }
    assert_eq!(world.heard(first), []);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CreatingGroup));
    assert_eq!(world.controller.census().connections, 1);
}

#[test]
fn who_does_not_come_in_time_is_named_to_all() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let hosts = [0, 2, 3].map(|rank| world.join(u64::from(rank), "g", 6, rank));
    world.pass(seconds(29.9));
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CreatingGroup));
    world.pass(seconds(0.1));
    for host in hosts {
        assert_eq!(
            world.refusal(host).to_string(),
            "group \"g\" is incomplete: 3 of its 6 ranks did not join in time: 1, 4-5"
        );
    }
    world.assert_quiet();
    // And the name is free.
    world.ready(10, "g", 2);
}

#[test]
fn who_waits_is_told_for_what() {
    let mut world = World::new();
    let a = world.join(1, "g", 3, 0);
    let told = |world: &mut World| {
        world.waiting.clear();
        world.pass(seconds(1.0));
        std::mem::take(&mut world.waiting).into_iter().collect::<Vec<_>>()
    };
    assert_eq!(told(&mut world), [(a, ("ranks 1-2".to_owned(), 29_000))]);
    let b = world.join(2, "g", 3, 1);
    let rank = ("rank 2".to_owned(), 28_000);
    assert_eq!(told(&mut world), [(a, rank.clone()), (b, rank)]);
    let c = world.join(3, "g", 3, 2);
    let switch = |left_ms| ("a switch".to_owned(), left_ms);
    assert_eq!(told(&mut world), [a, b, c].map(|host| (host, switch(27_000))));
    world.switch(SWITCH, "s", 1);
    world.end(b);
    let connections = ("ranks 0, 2 to connect".to_owned(), 26_000);
    assert_eq!(told(&mut world), [a, b, c].map(|host| (host, connections.clone())));
    world.end(a);
    world.end(c);
    let communicator = ("switch \"s\" to make the communicator".to_owned(), 25_000);
    assert_eq!(told(&mut world), [a, b, c].map(|host| (host, communicator.clone())));
    world.create();
    assert_eq!(told(&mut world), []);
}

#[test]
fn a_rank_that_gives_up_ends_only_its_own_wait_until_all_are_there() {
    let missing = |refusal: Refusal| match refusal {
        Refusal::Incomplete { missing, .. } => missing.to_string(),
        refusal => panic!("{refusal}"),
    };
    let mut world = World::new();
    let patient = world.join(1, "g", 3, 0);
    let hasty = |world: &mut World, number, rank| {
        let connection = ConnectionId(number);
        world.connect(connection);
        let hello = Hello { timeout_ms: 500, ..hello("g", 3, rank) };
        world.say(connection, ToController::Join(hello));
        connection
    };
    let first = hasty(&mut world, 2, 1);
    world.pass(seconds(0.5));
    assert_eq!(missing(world.refusal(first)), "2");
    assert_eq!(world.heard(patient), []);
    // It comes again, and dies; then its time is nobody's.
    let again = hasty(&mut world, 3, 1);
    world.close(again);
    world.pass(seconds(1.0));
    // All are there, and there is no switch: without one of them the group cannot be.
    let (b, c) = (hasty(&mut world, 4, 1), hasty(&mut world, 5, 2));
    world.pass(seconds(0.5));
    for host in [patient, b, c] {
        assert!(matches!(world.refusal(host), Refusal::NoSwitch { .. }));
    }
    world.assert_quiet();
    // Who has come and given up is not who never came, unless there is no other.
    let patient = world.join(10, "g", 3, 0);
    let lapsed = hasty(&mut world, 11, 1);
    world.pass(seconds(1.0));
    assert_eq!(missing(world.refusal(lapsed)), "2");
    world.pass(seconds(29.0));
    assert_eq!(missing(world.refusal(patient)), "2");
    let patient = world.join(12, "g", 2, 0);
    world.pass(seconds(29.0));
    world.close(patient);
    world.assert_quiet();
    let eternal = ConnectionId(3);
    world.connect(eternal);
    world.say(eternal, ToController::Join(Hello { timeout_ms: u64::MAX, ..hello("g", 3, 1) }));
    world.pass(seconds(3599.9));
    assert_eq!(world.heard(eternal), []);
    world.pass(seconds(0.1));
    assert!(matches!(world.refusal(eternal), Refusal::Incomplete { .. }));
}

#[test]
fn a_rank_that_dies_before_the_group_is_full_can_come_again() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let dead = world.join(1, "g", 2, 0);
    world.close(dead);
    world.assert_quiet();
    let a = world.join(2, "g", 2, 0);
    let b = world.join(3, "g", 2, 1);
    assert_eq!(world.heard(a).len(), 1);
    assert_eq!(world.heard(b).len(), 1);
    // Or leave politely.
    let polite = world.join(4, "h", 2, 0);
    world.say(polite, ToController::Leave { collectives: 0 });
    assert_eq!(world.heard(polite), [FromController::Closed]);
    assert_eq!(world.controller.group_state("h"), None);
}

#[test]
fn without_a_switch_the_group_waits_for_one_and_says_so() {
    let mut world = World::new();
    let a = world.join(1, "g", 2, 0);
    let b = world.join(2, "g", 2, 1);
    world.pass(seconds(29.0));
    assert_eq!(world.controller.group_state("g"), Some(GroupState::GroupReady));
    assert_eq!(world.heard(a), []);
    world.pass(seconds(1.0));
    for host in [a, b] {
        let refusal = world.refusal(host);
        assert_eq!(refusal, Refusal::NoSwitch { group: "g".to_owned(), hosts: None });
        assert!(refusal.to_string().starts_with("there is no switch for group \"g\": start one"));
    }
    // One that comes in time serves.
    let a = world.join(3, "g", 1, 0);
    world.pass(seconds(29.0));
    world.switch(SWITCH, "s", 1);
    assert!(matches!(world.heard(a)[..], [FromController::GroupReady { .. }]));
}

#[test]
fn a_rank_that_joins_and_does_not_connect_is_named() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let hosts = [0, 1, 2].map(|rank| world.join(u64::from(rank), "g", 3, rank));
    world.end(hosts[1]);
    world.pass(seconds(30.0));
    assert_eq!(
        world.refusal(hosts[1]).to_string(),
        "group \"g\" was complete, but these ranks did not connect: 0, 2"
    );
    world.assert_quiet();
    // The switch never heard of it.
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
}

/// A rank that leaves says nothing new where one has left after no more collectives: in a large group all leave at once.
#[test]
fn who_has_left_is_told_where_it_has_done_less_than_those_before() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 5);
    let left = |rank, collectives| FromController::Left { rank, collectives };
    for (rank, collectives) in [(4, 7), (2, 7), (3, 6), (1, 8)] {
        world.say(hosts[rank], ToController::Leave { collectives });
    }
    assert_eq!(world.heard(hosts[0]), [left(4, 7), left(3, 6)]);
    assert_eq!(world.heard(hosts[1]), [left(4, 7), left(3, 6)]);
    assert_eq!(world.heard(hosts[2]), [left(4, 7)]);
    world.say(hosts[0], ToController::Leave { collectives: 8 });
    for host in hosts {
        assert_eq!(world.heard(host).pop(), Some(FromController::Closed));
    }
}

#[test]
fn a_switch_that_cannot_or_does_not_answer_is_named() {
    let mut world = World::new();
    world.switch(SWITCH, "tor", 1);
    let host = world.join(1, "g", 1, 0);
    world.end(host);
    let heard = world.heard(SWITCH);
    let Some(&FromController::CreateCommunicator { communicator, .. }) = heard.last() else {
        panic!("{heard:?}");
    };
    let reason = "out of memory".to_owned();
    let failed = ToController::CommunicatorFailed { communicator, reason, path_mtu: None };
    world.say(SWITCH, failed);
    assert_eq!(
        world.refusal(host).to_string(),
        "switch \"tor\" could not make the communicator: out of memory"
    );
    assert_eq!(world.heard(SWITCH), []);
    assert_eq!(world.controller.census().communicators, 0);

    let host = world.join(2, "g", 1, 0);
    world.end(host);
    world.heard(SWITCH);
    world.pass(seconds(30.0));
    assert_eq!(
        world.refusal(host).to_string(),
        "switch \"tor\" could not make the communicator: it did not answer in time"
    );
    let heard = world.heard(SWITCH);
    let [FromController::DestroyCommunicator { communicator }] = heard[..] else {
        panic!("{heard:?}");
    };
    // The answer comes late: nobody minds.
    world.say(
        SWITCH,
        ToController::CommunicatorCreated { communicator, edges: Vec::new(), uplink: None },
    );
    assert_eq!(world.heard(SWITCH), []);

    // Edges that do not fit the ranks.
    let host = world.join(3, "g", 1, 0);
    world.end(host);
    let heard = world.heard(SWITCH);
    let Some(&FromController::CreateCommunicator { communicator, .. }) = heard.last() else {
        panic!("{heard:?}");
    };
    let edges =
        vec![SwitchEdge { rank: 1, qpn: Qpn::new(9), psn: Psn::new(0), receive_share: None }];
    world.say(SWITCH, ToController::CommunicatorCreated { communicator, edges, uplink: None });
    assert_eq!(
        world.refusal(host).to_string(),
        "switch \"tor\" could not make the communicator: it made the wrong queue pairs"
    );
    assert_eq!(world.heard(SWITCH), [FromController::DestroyCommunicator { communicator }]);
    world.assert_quiet();
}

#[test]
fn a_host_that_dies_is_named_to_the_switch_and_the_others() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (other, _) = world.ready(10, "other", 2);
    let (hosts, communicator) = world.ready(20, "g", 3);
    world.lose(hosts[1]);
    assert_eq!(world.heard(SWITCH), [FromController::AbortCommunicator { communicator, rank: 1 }]);
    let detail = PEER_LOST.to_owned();
    let reason = AbortReason::PeerLost { rank: 1, detail };
    for host in [hosts[0], hosts[2]] {
        assert_eq!(world.heard(host), [FromController::Abort { reason: reason.clone() }]);
        assert!(world.closed.contains(&host));
    }
    assert_eq!(world.heard(hosts[1]), []);
    // The other group goes on.
    assert_eq!(world.heard(other[0]), []);
    assert_eq!(world.controller.group_state("other"), Some(GroupState::CommunicatorReady));
    // The name is free at once.
    world.ready(30, "g", 3);
}

#[test]
fn a_host_that_gives_up_is_named_with_its_reason() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(20, "g", 2);
    world.say(hosts[0], ToController::Fail { reason: "x".repeat(5000), cause: None });
    let heard = world.heard(hosts[1]);
    let [FromController::Abort { reason: AbortReason::PeerLost { rank: 0, detail } }] = &heard[..]
    else {
        panic!("{heard:?}");
    };
    assert!(detail.starts_with("it gave up: xxx") && detail.len() == 1024);
    assert_eq!(world.heard(hosts[0]), [FromController::Closed]);
    assert!(world.closed.contains(&hosts[0]));
}

#[test]
fn a_host_that_dies_while_the_communicator_is_made_ends_it() {
    for connected in 0..=2 {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        world.heard(SWITCH);
        let hosts = [0, 1].map(|rank| world.join(u64::from(rank), "g", 2, rank));
        hosts.iter().take(connected).for_each(|&host| world.end(host));
        world.close(hosts[0]);
        let detail = PEER_LOST.to_owned();
        let reason = AbortReason::PeerLost { rank: 0, detail };
        assert_eq!(world.refusal(hosts[1]), Refusal::Aborted { reason });
        let heard = world.heard(SWITCH);
        match connected {
            2 => assert!(
                matches!(
                    heard[..],
                    [
                        FromController::CreateCommunicator { .. },
                        FromController::DestroyCommunicator { .. }
                    ]
                ),
                "{heard:?}"
            ),
            _ => assert_eq!(heard, []),
        }
        world.assert_quiet();
    }
}

#[test]
fn a_switch_that_is_restarted_is_named_to_all_its_ranks() {
    let mut world = World::new();
    let spare = ConnectionId(2000);
    world.switch(SWITCH, "s", 1);
    let (a, _) = world.ready(10, "a", 2);
    let (b, _) = world.ready(20, "b", 1);
    // A third that is on its way: it has joined, and not connected.
    let c = world.join(30, "c", 1, 0);
    // The spare switch has the fewest communicators from here on.
    world.switch(spare, "t", 2);
    let d = world.join(40, "d", 1, 0);
    let switch_address = IpAddr::from([127, 0, 1, 2]);
    assert_eq!(world.heard(d), [group_ready(switch_address)]);

    // What is being made with it ends at once, the rest when it is known that it is gone.
    world.close(SWITCH);
    let reason = |detail: &str| {
        let (name, address) = ("s".to_owned(), IpAddr::from([127, 0, 1, 1]));
        AbortReason::SwitchLost { name, address, detail: detail.to_owned(), incarnation: Some(0) }
    };
    assert_eq!(world.refusal(c), Refusal::Aborted { reason: reason(PEER_LOST) });
    assert_eq!(world.heard(a[0]), []);
    let again = ConnectionId(2001);
    world.switch_with(again, "s", 1, Presence { incarnation: 9, ..Presence::default() });
    assert_eq!(world.heard(again), [FromController::Registered]);
    for host in [a[0], a[1], b[0]] {
        let reason = reason("it was restarted");
        assert_eq!(world.heard(host), [FromController::Abort { reason }]);
    }
    assert_eq!(world.heard(d), []);
    assert_eq!(world.controller.group_state("d"), Some(GroupState::GroupReady));
    assert_eq!(world.controller.census().switches, 2);
}

#[test]
fn two_switches_share_neither_name_nor_address() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    for (number, name, address, what) in [(1, "s", 2, "name"), (2, "t", 1, "address")] {
        world.switch(ConnectionId(number), name, address);
        assert_eq!(
            world.refusal(ConnectionId(number)).to_string(),
            format!("there is a switch \"s\" at 127.0.1.1 already: give this one its own {what}")
        );
    }
    world.switch(ConnectionId(3), "", 3);
    assert_eq!(world.refusal(ConnectionId(3)), Refusal::Name { what: "switch".to_owned() });
    assert_eq!(world.controller.census().switches, 1);
}

#[test]
fn what_one_rank_asks_of_the_communicator_all_switches_hear() {
    let options = CommunicatorOptions { reproducible: true, plain: false };
    for asks in [None, Some(0), Some(2)] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        let hosts = [0, 1, 2].map(|rank| {
            let asked = if asks == Some(rank) { options } else { CommunicatorOptions::default() };
            let connection = ConnectionId(rank.into());
            world.connect(connection);
            let hello = Hello { options: asked, ..hello("g", 3, rank) };
            world.say(connection, ToController::Join(hello));
            connection
        });
        hosts.iter().for_each(|&host| world.end(host));
        // Six windows of slots, and two of what three children may be early with.
        let wanted = if asks.is_some() { (256 << 10) * 6 / 9 / 4096 * 4096 } else { 256 << 10 };
        for host in hosts {
            let heard = world.heard(host);
            let [FromController::GroupReady { segment_bytes, .. }] = heard[..] else {
                panic!("{heard:?}");
            };
            assert_eq!(segment_bytes, wanted);
        }
        let heard = world.heard(SWITCH);
        let Some(FromController::CreateCommunicator { options: told, segment_bytes, .. }) =
            heard.last()
        else {
            panic!("{heard:?}");
        };
        assert_eq!((told.reproducible, *segment_bytes), (asks.is_some(), wanted));
    }
}

#[test]
fn who_is_gone_before_its_time_is_missing() {
    let mut world = World::new();
    let patient = world.join(1, "g", 3, 0);
    let gone = world.join(2, "g", 3, 1);
    world.close(gone);
    world.pass(seconds(30.0));
    let refusal = world.refusal(patient);
    let Refusal::Incomplete { missing, .. } = &refusal else { panic!("{refusal}") };
    assert_eq!(missing.to_string(), "1-2");
}

#[test]
fn hosts_without_descriptors_are_among_themselves_below_one_switch() {
    let plain = CommunicatorOptions { plain: true, reproducible: false };
    let mut next = 0;
    let mut join = |world: &mut World, of: u32, rank: u32, options| {
        next += 1;
        let connection = ConnectionId(next);
        world.connect(connection);
        let hello = Hello { options, ..hello("g", of, rank) };
        world.say(connection, ToController::Join(hello));
        connection
    };
    let mut world = World::with(ControllerConfig {
        fan_in: FanIn::new(2).unwrap(),
        ..ControllerConfig::new(7)
    });
    world.switch(SWITCH, "s", 1);
    let first = join(&mut world, 2, 0, plain);
    let other = join(&mut world, 2, 1, CommunicatorOptions::default());
    let refusal = world.refusal(other).to_string();
    assert!(refusal.contains("rank 1 sends them, who came before it sends none"), "{refusal}");
    let second = join(&mut world, 2, 1, plain);
    for host in [first, second] {
        assert!(matches!(world.heard(host)[..], [FromController::GroupReady { .. }]));
        world.end(host);
    }
    let heard = world.heard(SWITCH);
    let Some(FromController::CreateCommunicator { options, .. }) = heard.last() else {
        panic!("{heard:?}");
    };
    assert_eq!(*options, plain);
    // Three need more than one node of two children.
    let mut world = World::with(ControllerConfig {
        fan_in: FanIn::new(2).unwrap(),
        ..ControllerConfig::new(7)
    });
    world.switch(SWITCH, "s", 1);
    let hosts = [0, 1, 2].map(|rank| join(&mut world, 3, rank, plain));
    for host in hosts {
        let refusal = world.refusal(host).to_string();
        assert!(refusal.contains("it would have") && refusal.contains("--fan-in"), "{refusal}");
    }
}

#[test]
fn communicators_are_spread_over_the_switches() {
    let mut world = World::new();
    for number in 1..=3 {
        world.switch(ConnectionId(2000 + number), &format!("s{number}"), number as u8);
    }
    // Counted from the plan on, not only when they are made.
    let mut served = [0; 3];
    for number in 0..6 {
        let host = world.join(number, &format!("g{number}"), 1, 0);
        let heard = world.heard(host);
        let [FromController::GroupReady { switch_address: IpAddr::V4(address), .. }] = heard[..]
        else {
            panic!("{heard:?}");
        };
        served[usize::from(address.octets()[3]) - 1] += 1;
        if number % 2 == 0 {
            world.end(host);
        }
    }
    assert_eq!(served, [2; 3]);
}

#[test]
fn what_a_switch_reports_ends_the_group_without_an_echo() {
    for (report, reason) in [
        (
            SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None },
            AbortReason::PeerLost { rank: 1, detail: "silent".to_owned() },
        ),
        (
            SwitchReport::Mismatch { rank: 0, detail: "count".to_owned() },
            AbortReason::Mismatch { rank: 0, detail: "count".to_owned() },
        ),
        (
            SwitchReport::Violation { rank: 1, detail: "window".to_owned() },
            AbortReason::Violation { rank: 1, detail: "window".to_owned() },
        ),
    ] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        let (hosts, communicator) = world.ready(10, "g", 2);
        world.say(SWITCH, ToController::Report { communicator, report: report.clone() });
        for host in hosts {
            assert_eq!(world.heard(host), [FromController::Abort { reason: reason.clone() }]);
        }
        assert_eq!(world.heard(SWITCH), []);
        world.assert_quiet();
        // Of a group that is gone.
        world.say(SWITCH, ToController::Report { communicator, report });
        assert_eq!(world.heard(SWITCH), []);
    }
}

#[test]
fn a_name_is_free_from_the_first_who_leaves_on() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (old, first) = world.ready(10, "g", 2);
    world.say(old[0], ToController::Leave { collectives: 1 });
    let (new, second) = world.ready(20, "g", 2);
    assert_ne!(first, second);
    // The rest of the old one ends, by itself, and by death.
    world.heard(old[1]);
    world.lose(old[1]);
    assert_eq!(
        world.heard(SWITCH),
        [FromController::AbortCommunicator { communicator: first, rank: 1 }]
    );
    assert_eq!(world.heard(old[0]), [FromController::Closed]);
    assert_eq!(world.heard(new[0]), []);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
}

#[test]
fn who_has_left_may_die() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, communicator) = world.ready(10, "g", 2);
    world.say(hosts[0], ToController::Leave { collectives: 3 });
    world.say(hosts[0], ToController::Leave { collectives: 3 });
    world.close(hosts[0]);
    assert_eq!(world.heard(hosts[1]), [FromController::Left { rank: 0, collectives: 3 }]);
    world.say(hosts[1], ToController::Leave { collectives: 3 });
    assert_eq!(world.heard(hosts[1]), [FromController::Closed]);
    assert_eq!(world.heard(SWITCH), [FromController::DestroyCommunicator { communicator }]);
    world.assert_quiet();
}

#[test]
fn messages_out_of_place_end_the_connection_and_only_that() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let bystander = world.join(1, "bystander", 2, 0);
    let stranger = ConnectionId(2);
    world.connect(stranger);
    world.say(stranger, ToController::Leave { collectives: 0 });
    assert_eq!(
        world.refusal(stranger).to_string(),
        "a peer that has not said what it is cannot send Leave now"
    );
    // A second introduction.
    let host = world.join(3, "g", 2, 0);
    world.say(host, ToController::Join(hello("g", 2, 1)));
    assert_eq!(world.refusal(host).to_string(), "a host cannot send Join now");
    assert_eq!(world.controller.group_state("g"), None);
    // Connecting before the group is ready, and twice.
    let host = world.join(4, "g", 2, 0);
    world.end(host);
    assert_eq!(world.refusal(host).to_string(), "a host cannot send Connect now");
    let host = world.join(5, "g", 2, 0);
    world.join(6, "g", 2, 1);
    world.end(host);
    world.end(host);
    let reason = Refusal::Protocol { detail: "a host cannot send Connect now".to_owned() };
    assert_eq!(world.refusal(host), reason);
    // No message at all.
    let garbler = ConnectionId(7);
    world.connect(garbler);
    world.controller.handle_bad_frame(
        world.now,
        garbler,
        &FrameError::TooLong { length: 0x4745_5420, limit: 64 << 10 },
    );
    world.settle();
    assert!(world.refusal(garbler).to_string().starts_with("\"GET \" in place of the length"));
    // What is still read of a closed connection.
    world.say(garbler, ToController::Join(hello("g", 2, 0)));
    assert_eq!(world.heard(garbler), []);
    assert_eq!(world.heard(bystander), []);
    assert_eq!(world.controller.census().switches, 1);
}

#[test]
fn a_switch_that_talks_nonsense_is_a_dead_switch() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 1);
    world.say(SWITCH, ToController::Leave { collectives: 0 });
    assert!(matches!(
        world.heard(hosts[0])[..],
        [FromController::Abort { reason: AbortReason::SwitchLost { .. } }]
    ));
    assert_eq!(world.controller.census(), Census::default());
}

#[test]
fn limits_hold() {
    let config = ControllerConfig { max_ranks: 3, max_groups: 2, ..ControllerConfig::new(0) };
    let mut world = World::with(config);
    world.join(1, "a", 2, 0);
    world.join(2, "b", 2, 0);
    let third = world.join(3, "c", 2, 0);
    assert_eq!(world.refusal(third).to_string(), "the controller has its 2 groups already");
    world.join(4, "a", 2, 1);
    let fifth = world.join(5, "b", 2, 1);
    assert_eq!(world.refusal(fifth).to_string(), "the controller has its 3 ranks already");
    assert_eq!(world.controller.census().connections, 3);
}

#[test]
fn communicators_of_two_runs_have_different_numbers() {
    let number = |seed| {
        let mut world = World::with(ControllerConfig::new(seed));
        world.switch(SWITCH, "s", 1);
        world.ready(1, "g", 1).1
    };
    assert_ne!(number(1), number(2));
    assert!(number(u64::MAX) < 1 << 53);
}
