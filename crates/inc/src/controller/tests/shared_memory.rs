//! Groups whose ranks are of one machine.

use super::*;
use crate::protocol::{MAX_HOST_BYTES, Resume, SameMachine, SharedMemoryPlan};

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
    let resume = Resume {
        term: world.controller.term(),
        group: "g".to_owned(),
        identity: group,
        communicator,
        world: 3,
        rank: 1,
        address: hello("g", 3, 1).address,
        departed: false,
        more_addresses: Vec::new(),
    };
    let b = ConnectionId(7);
    world.connect(b);
    world.say(b, ToController::Resume(resume));
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
fn a_rank_that_is_lost_ends_those_that_share_memory_with_it() {
    let mut world = World::new();
    let [a, b] = [0, 1].map(|rank| join(&mut world, sharing(2, rank, "h")));
    for rank in [a, b] {
        plan(&mut world, rank);
    }
    world.say(b, ToController::Fail { reason: "no memory".to_owned() });
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
