//! Groups whose ranks are of one machine.

use super::resume::{back, claim};
use super::*;
use crate::CommunicatorOptions;
use crate::protocol::{
    Failover, FallbackOffer, MAX_HOST_BYTES, MeetingPoint, Resume, SECRET_BYTES, SameMachine,
    Secret, SharedMemoryPlan,
};

/// A rank that can share memory with those who say the same host.
fn sharing(world: u32, rank: u32, host: &str) -> Hello {
    let same = SameMachine { host: host.into(), socket: format!("of {rank}"), required: false };
    Hello { rank, same_machine: Some(same), ..hello("g", world, rank.min(99)) }
}

fn join(world: &mut World, hello: Hello) -> ConnectionId {
    let connection = ConnectionId(100 + u64::from(hello.rank));
    world.connect(connection);
    world.say(connection, ToController::Join(hello));
    connection
}

/// What a rank was told, which is the plan.
fn plan(world: &mut World, rank: ConnectionId) -> SharedMemoryPlan {
    match &world.heard(rank)[..] {
        [FromController::SharedMemory(plan)] => plan.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_of_one_host_need_no_switch_and_meet_at_rank_0() {
    let mut world = World::new();
    let [b, c, a] = [1, 2, 0].map(|rank| join(&mut world, sharing(3, rank, "h")));
    let plans = [a, b, c].map(|rank| plan(&mut world, rank));
    assert_eq!(plans[0].socket, "of 0");
    assert!(plans.iter().all(|other| *other == plans[0]));
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
    world.pass(seconds(86_400.0));
    // One is cut off, and comes back.
    world.close(b);
    let SharedMemoryPlan { communicator, group, .. } = plans[0];
    let term = world.controller.term();
    let resume = Resume { term, identity: group, communicator, ..claim("g", 3, 1) };
    let b = back(&mut world, 7, resume);
    assert_eq!(world.heard(b), [FromController::Resumed]);
    world.say(a, ToController::Leave { collectives: 4 });
    assert_eq!(world.heard(b), [FromController::Left { rank: 0, collectives: 4 }]);
    for rank in [b, c] {
        world.say(rank, ToController::Leave { collectives: 4 });
    }
    assert_eq!(world.heard(a), [FromController::Closed]);
    world.assert_quiet();
}

#[test]
fn no_switch_has_a_part_in_ranks_that_share_memory() {
    let mut world = World::new();
    let ranks = [0, 1].map(|rank| join(&mut world, sharing(2, rank, "h")));
    let [communicator, _] = ranks.map(|rank| plan(&mut world, rank).communicator);
    world.switch(SWITCH, "s", 1);
    let report = SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None };
    world.say(SWITCH, ToController::Report { communicator, report });
    for rank in ranks {
        assert_eq!(world.heard(rank), []);
    }
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
}

#[test]
fn a_rank_that_is_lost_ends_those_that_share_memory_with_it() {
    let mut world = World::new();
    let [a, b] = [0, 1].map(|rank| join(&mut world, sharing(2, rank, "h")));
    for rank in [a, b] {
        plan(&mut world, rank);
    }
    world.say(b, ToController::Fail { reason: "no memory".to_owned(), cause: None });
    let detail = "it gave up: no memory".to_owned();
    let reason = AbortReason::PeerLost { rank: 1, detail };
    assert_eq!(world.heard(a), [FromController::Abort { reason }]);
    world.assert_quiet();
}

#[test]
fn ranks_of_several_hosts_or_that_want_the_switch_get_it() {
    let other = |rank| sharing(2, rank, "other");
    let switch = |rank| hello("g", 2, rank);
    for (first, second) in [
        (sharing(2, 0, "h"), other(1)),
        (switch(0), sharing(2, 1, "h")),
        (sharing(2, 0, "h"), switch(1)),
    ] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        let ranks = [first, second].map(|hello| join(&mut world, hello));
        for rank in ranks {
            assert!(matches!(world.heard(rank)[..], [FromController::GroupReady { .. }]));
        }
    }
}

/// Ranks of two hosts on their way to a communicator, and what the switch is told to make.
fn two_hosts(adapt: impl Fn(Hello) -> Hello) -> (World, Vec<ConnectionId>, FromController) {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let hosts = (0..).zip(["h", "k", "k", "h"]);
    let ranks: Vec<_> =
        hosts.map(|(rank, host)| join(&mut world, adapt(sharing(4, rank, host)))).collect();
    let mut lowest = Vec::new();
    for &rank in &ranks {
        match &world.heard(rank)[..] {
            [FromController::GroupReady { .. }] => lowest.push(rank),
            [] => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lowest, [ranks[0], ranks[1]], "the lowest of each host");
    for rank in lowest {
        let (qpn, psn, path_mtu) = (Qpn::new(50), Psn::new(6), Mtu::B1024);
        world.say(
            rank,
            ToController::Connect { qpn, psn, path_mtu, more: Vec::new(), receive_share: None },
        );
    }
    let order = world.heard(SWITCH).pop().expect("it is to make a node");
    (world, ranks, order)
}

/// As above, and the switch has made the node.
fn two_ready_hosts() -> (World, Vec<ConnectionId>) {
    two_ready_hosts_of(|hello| hello)
}

fn two_ready_hosts_of(adapt: impl Fn(Hello) -> Hello) -> (World, Vec<ConnectionId>) {
    let (mut world, ranks, order) = two_hosts(adapt);
    let FromController::CreateCommunicator { communicator, world: all, children, .. } = order
    else {
        panic!("{order:?}")
    };
    let below: Vec<Vec<u32>> = children
        .iter()
        .map(|child| child.ranks.ranges().iter().cloned().flatten().collect())
        .collect();
    assert_eq!((all, below), (4, vec![vec![0, 3], vec![1, 2]]));
    assert!(children.iter().all(|child| !child.is_switch));
    let edge =
        |rank| SwitchEdge { rank, qpn: Qpn::new(70 + rank), psn: Psn::new(7), receive_share: None };
    let edges = vec![edge(0), edge(1)];
    world.say(SWITCH, ToController::CommunicatorCreated { communicator, edges, uplink: None });
    (world, ranks)
}

#[test]
fn of_several_hosts_the_lowest_rank_of_each_is_connected_for_the_others() {
    let (mut world, ranks) = two_ready_hosts();
    let mut of = Vec::new();
    for &rank in &ranks {
        of.push(match &world.heard(rank)[..] {
            [FromController::Plan(plan)] => (plan.ranks.clone(), None),
            [FromController::SharedMemory(plan)] => (plan.ranks.clone(), Some(plan.socket.clone())),
            other => panic!("{other:?}"),
        });
    }
    let [h, k] = [[0, 3], [1, 2]].map(|ranks| ranks.into_iter().collect::<Ranks>());
    let [first, second] = ["of 0", "of 1"].map(|socket| Some(socket.to_owned()));
    assert_eq!(of, [(h.clone(), None), (k.clone(), None), (k, second), (h, first)]);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
}

#[test]
fn all_ranks_of_several_hosts_hear_whether_they_go_on_when_a_switch_is_lost_and_where_they_meet() {
    let (address, secret) = (([10, 0, 0, 1], 4000).into(), Secret([7; SECRET_BYTES]));
    let point = Box::new(MeetingPoint { address, secret });
    let able = |hello: Hello| Hello {
        fallback: FallbackOffer::Able,
        meeting: Some(point.clone()).filter(|_| hello.rank == 0),
        ..hello
    };
    // One that is beside the wire decides, too.
    let unwilling = |hello: Hello| match hello.rank {
        3 => Hello { fallback: FallbackOffer::Off, ..hello },
        _ => able(hello),
    };
    let exact = |hello: Hello| match hello.rank {
        2 => {
            let options = CommunicatorOptions { reproducible: true, plain: false };
            Hello { options, ..able(hello) }
        }
        _ => able(hello),
    };
    type Adapt<'a> = &'a dyn Fn(Hello) -> Hello;
    let cases: [(Adapt<'_>, Failover, bool); 3] = [
        (&able, Failover::On, true),
        (&unwilling, Failover::Off, false),
        (&exact, Failover::Reproducible, false),
    ];
    for (adapt, failover, meets) in cases {
        let (mut world, ranks) = two_ready_hosts_of(adapt);
        let expected = (failover, Some(point.clone()).filter(|_| meets));
        for &rank in &ranks {
            let found = match &world.heard(rank)[..] {
                [FromController::Plan(plan)] => (plan.failover, plan.meeting.clone()),
                [FromController::SharedMemory(plan)] => (plan.failover, plan.meeting.clone()),
                other => panic!("{other:?}"),
            };
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn who_is_not_connected_for_its_host_cannot_connect() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let ranks =
        [(0, "h"), (1, "h"), (2, "k")].map(|(rank, host)| join(&mut world, sharing(3, rank, host)));
    let (qpn, psn, path_mtu) = (Qpn::new(50), Psn::new(6), Mtu::B1024);
    world.say(
        ranks[1],
        ToController::Connect { qpn, psn, path_mtu, more: Vec::new(), receive_share: None },
    );
    let heard = world.heard(ranks[1]);
    let [FromController::Refused { reason: Refusal::Protocol { detail } }] = &heard[..] else {
        panic!("{heard:?}")
    };
    assert!(detail.contains("cannot send Connect now"), "{detail}");
}

#[test]
fn what_a_rank_says_of_one_of_its_host_is_believed_and_of_others_it_is_not() {
    for (blamed, believed) in [(2, true), (3, false)] {
        let (mut world, ranks) = two_ready_hosts();
        for rank in &ranks {
            world.heard(*rank);
        }
        let cause = AbortReason::PeerLost { rank: blamed, detail: "it has ended".to_owned() };
        let (reason, said) = ("tired".to_owned(), Some(cause.clone()));
        world.say(ranks[1], ToController::Fail { reason, cause: said });
        let detail = "it gave up: tired".to_owned();
        let reason = if believed { cause } else { AbortReason::PeerLost { rank: 1, detail } };
        for rank in [0, 2, 3] {
            let abort = FromController::Abort { reason: reason.clone() };
            assert_eq!(world.heard(ranks[rank]), [abort], "{blamed}");
        }
        let AbortReason::PeerLost { rank, .. } = reason else { unreachable!("made above") };
        let heard = world.heard(SWITCH);
        let told =
            matches!(heard[..], [FromController::AbortCommunicator { rank: it, .. }] if it == rank);
        assert!(told, "{heard:?}");
    }
}

#[test]
fn whom_a_rank_blames_before_its_group_is_ready_is_believed_once_all_ranks_are_there() {
    let cause = AbortReason::PeerLost { rank: 3, detail: "it has ended".to_owned() };
    let fail = ToController::Fail { reason: "tired".to_owned(), cause: Some(cause.clone()) };
    let (mut world, ranks, _) = two_hosts(|hello| hello);
    world.say(ranks[0], fail.clone());
    let reason = Refusal::Aborted { reason: cause };
    for &rank in &ranks[1..] {
        assert_eq!(world.heard(rank), [FromController::Refused { reason: reason.clone() }]);
    }
    // Another one may still come in the place of who is missing.
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let ranks = [0, 3].map(|rank| join(&mut world, sharing(4, rank, "h")));
    world.say(ranks[0], fail);
    assert_eq!(world.heard(ranks[1]), []);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CreatingGroup));
}

#[test]
fn what_a_rank_has_found_switches_hear_from_the_controller() {
    let (mut world, ranks) = two_ready_hosts();
    let cause = AbortReason::Mismatch { rank: 2, detail: "count".to_owned() };
    let (reason, cause) = ("it differs".to_owned(), Some(cause));
    world.say(ranks[1], ToController::Fail { reason, cause });
    let heard = world.heard(SWITCH);
    assert!(matches!(heard[..], [FromController::DestroyCommunicator { .. }]), "{heard:?}");
}

#[test]
fn a_host_with_more_ranks_than_can_share_memory_uses_the_switch_for_each() {
    for (count, shared) in [(257, true), (258, false)] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 10);
        let host = |rank| if rank == 0 { "other" } else { "h" };
        let ranks: Vec<_> =
            (0..count).map(|rank| join(&mut world, sharing(count, rank, host(rank)))).collect();
        let ready = ranks.iter().filter(|&&rank| !world.heard(rank).is_empty()).count();
        assert_eq!(ready, if shared { 2 } else { count as usize }, "{count}");
    }
}

#[test]
fn who_wants_no_switch_is_told_what_is_in_the_way() {
    let required = |mut hello: Hello| {
        hello.same_machine.as_mut().unwrap().required = true;
        hello
    };
    for (first, second, found) in [
        (hello("g", 2, 0), required(sharing(2, 1, "h")), "rank 0 at 127.0.0.1 wants a switch"),
        (required(sharing(2, 0, "h")), sharing(2, 1, "k"), "rank 1 at 127.0.0.2 and rank 0 are of"),
    ] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        let ranks = [first, second].map(|hello| join(&mut world, hello));
        for rank in ranks {
            let heard = world.heard(rank);
            let [FromController::Refused { reason }] = &heard[..] else { panic!("{heard:?}") };
            assert!(matches!(reason, Refusal::NotShared { .. }), "{reason:?}");
            assert!(reason.to_string().contains(found), "{reason}");
        }
        world.assert_quiet();
    }
}

#[test]
fn long_names_and_large_worlds_are_limited() {
    let mut world = World::new();
    let long = join(&mut world, sharing(2, 0, &"h".repeat(MAX_HOST_BYTES + 1)));
    let heard = world.heard(long);
    assert!(
        matches!(heard[..], [FromController::Refused { reason: Refusal::Protocol { .. } }]),
        "{heard:?}"
    );
    for (count, shared) in [(256, true), (257, false)] {
        let mut world = World::new();
        let ranks: Vec<_> =
            (0..count).map(|rank| join(&mut world, sharing(count, rank, "h"))).collect();
        assert_eq!(!world.heard(ranks[0]).is_empty(), shared, "{count}");
    }
}

#[test]
fn communicators_with_and_without_switches_have_different_numbers() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let shared = |world: &mut World, group: &str, first: u64| {
        let ranks = [0, 1].map(|rank| {
            let connection = ConnectionId(first + u64::from(rank));
            world.connect(connection);
            let hello = Hello { group: group.to_owned(), ..sharing(2, rank, "h") };
            world.say(connection, ToController::Join(hello));
            connection
        });
        plan(world, ranks[0]).communicator
    };
    let numbers = [
        shared(&mut world, "a", 100),
        world.ready(200, "b", 2).1,
        shared(&mut world, "c", 300),
        shared(&mut world, "d", 400),
    ];
    assert_eq!(BTreeSet::from(numbers).len(), numbers.len(), "{numbers:?}");
}

#[test]
fn whom_ranks_blame_after_a_restart_is_believed_if_the_group_has_them() {
    for (revived, blamed, believed) in
        [(true, 1, true), (true, 2, true), (true, 3, false), (true, 4, false), (false, 1, false)]
    {
        let mut world = World::new();
        let ranks = if revived {
            [0, 1, 2].map(|rank| back(&mut world, u64::from(rank), claim("g", 3, rank)))
        } else {
            world.switch(SWITCH, "s", 1);
            world.ready(1, "g", 3).0.try_into().unwrap()
        };
        ranks.iter().for_each(|&rank| drop(world.heard(rank)));
        let cause = AbortReason::PeerLost { rank: blamed, detail: "it has ended".to_owned() };
        let reason = "tired".to_owned();
        world.say(ranks[0], ToController::Fail { reason, cause: Some(cause.clone()) });
        let detail = "it gave up: tired".to_owned();
        let reason = if believed { cause } else { AbortReason::PeerLost { rank: 0, detail } };
        assert_eq!(world.heard(ranks[2]), [FromController::Abort { reason }], "{revived} {blamed}");
    }
}
