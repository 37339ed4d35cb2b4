//! Controllers that are restarted or stand still, and peers that come back.

use super::*;
use crate::protocol::{HeldNode, LostSwitch, MAX_HELD, MAX_TERM, Resume, SwitchBelow};

pub(super) const IDENTITY: [u64; 2] = [11, 12];
pub(super) const NUMBER: u64 = 77;

pub(super) fn claim(group: &str, world: u32, rank: u32) -> Resume {
    Resume {
        term: 5,
        group: group.to_owned(),
        identity: IDENTITY,
        communicator: NUMBER,
        world,
        rank,
        address: hello(group, world, rank).address,
        departed: false,
        more_addresses: Vec::new(),
    }
}

pub(super) fn back(world: &mut World, connection: u64, resume: Resume) -> ConnectionId {
    let connection = ConnectionId(connection);
    world.connect(connection);
    world.say(connection, ToController::Resume(resume));
    connection
}

/// The claim of a rank of a group that is there.
fn claim_of(world: &World, name: &str, rank: u32) -> Resume {
    let mut groups = world.controller.groups.values();
    let group = groups.find(|group| group.name == name).unwrap();
    let communicator = group.nodes[0].communicator;
    Resume { identity: group.identity, communicator, ..claim(name, group.world, rank) }
}

pub(super) fn node(group: [u64; 2], communicator: u64) -> HeldNode {
    HeldNode { group, communicator, children: 3, below: Vec::new(), tree: 0 }
}

pub(super) fn holding(held: u32) -> Presence {
    Presence { incarnation: 3, term: 4, held }
}

fn lost(rank: u32, detail: &str) -> [FromController; 1] {
    let detail = detail.to_owned();
    [FromController::Abort { reason: AbortReason::PeerLost { rank, detail } }]
}

#[test]
fn a_restarted_controller_goes_on_with_what_ranks_and_switches_claim() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(2));
    // It is known what it has when it has named all.
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    assert_eq!(world.heard(SWITCH), []);
    world.say(SWITCH, ToController::Held { nodes: vec![node([1, 1], 78)] });
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
    assert_eq!(world.controller.census().communicators, 2);
    let hosts = [0, 1, 2].map(|rank| back(&mut world, rank.into(), claim("g", 3, rank)));
    for host in hosts {
        assert_eq!(world.heard(host), [FromController::Resumed]);
        assert_eq!(world.terms[&host], 6);
    }
    assert_eq!(world.terms[&SWITCH], 5);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
    // Nobody claims the other node.
    world.pass(seconds(9.9));
    assert_eq!(world.heard(SWITCH), []);
    world.pass(seconds(0.1));
    assert_eq!(world.heard(SWITCH), [FromController::EndCommunicator { communicator: 78 }]);
    world.pass(seconds(86_400.0));
    assert!(hosts.iter().all(|&host| world.heard(host).is_empty()));
    // From here on it is as any other.
    world.say(hosts[0], ToController::Leave { collectives: 4 });
    assert_eq!(world.heard(hosts[1]), [FromController::Left { rank: 0, collectives: 4 }]);
    world.say(hosts[1], ToController::Leave { collectives: 4 });
    world.say(hosts[2], ToController::Leave { collectives: 4 });
    let destroy = FromController::DestroyCommunicator { communicator: NUMBER };
    assert_eq!(world.heard(SWITCH), [destroy]);
    assert_eq!(world.heard(hosts[0]), [FromController::Closed]);
    world.assert_quiet();
}

#[test]
fn who_says_a_high_term_has_a_higher_one_for_himself_alone() {
    let mut world = World::new();
    let high = Presence { term: MAX_TERM - 1, ..holding(0) };
    world.switch_with(SWITCH, "s", 1, high);
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
    let liar = back(&mut world, 1, Resume { term: MAX_TERM - 2, ..claim("lies", 2, 0) });
    let out_of_range = back(&mut world, 2, Resume { term: MAX_TERM, ..claim("lies", 2, 1) });
    assert!(matches!(world.refusal(out_of_range), Refusal::Protocol { .. }));
    let honest = back(&mut world, 3, Resume { identity: [1, 1], ..claim("g", 2, 0) });
    let fresh = world.join(4, "h", 2, 0);
    world.pass(seconds(1.0));
    assert_eq!([SWITCH, liar, honest].map(|it| world.terms[&it]), [MAX_TERM, MAX_TERM - 1, 6]);
    assert_eq!((world.terms[&fresh], world.controller.term()), (1, 1));
    // Also the last that they hear.
    world.say(honest, ToController::Fail { reason: "it has to".to_owned(), cause: None });
    assert_eq!(world.heard(honest).last(), Some(&FromController::Closed));
    world.say(
        liar,
        ToController::Connect {
            qpn: Qpn::new(1),
            psn: Psn::new(1),
            path_mtu: Mtu::B1024,
            more: Vec::new(),
            receive_share: None,
        },
    );
    assert!(matches!(world.refusal(liar), Refusal::Protocol { .. }));
    assert_eq!([liar, honest].map(|it| world.terms[&it]), [MAX_TERM - 1, 6]);
    // Nobody else has it from them.
    let again = back(&mut world, 5, Resume { identity: [1, 2], ..claim("i", 2, 0) });
    assert_eq!((world.terms[&again], world.controller.term()), (6, 1));
}

#[test]
fn a_rank_that_does_not_come_back_is_named_to_the_others_within_5_s() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(1));
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    world.heard(SWITCH);
    // The last to come needs a second.
    world.pass(seconds(1.0));
    let a = back(&mut world, 1, claim("g", 4, 0));
    let b = back(&mut world, 2, claim("g", 4, 3));
    world.pass(seconds(2.9));
    assert_eq!(world.heard(a), [FromController::Resumed]);
    assert_eq!(world.heard(b), [FromController::Resumed]);
    world.pass(seconds(0.1));
    let detail = "it did not come back to a controller that was restarted, as ranks 1-2";
    assert_eq!(world.heard(a), lost(1, detail));
    assert_eq!(world.heard(b), lost(1, detail));
    let abort = FromController::AbortCommunicator { communicator: NUMBER, rank: 1 };
    assert_eq!(world.heard(SWITCH), [abort]);
    world.assert_quiet();
    // Who comes too late hears the same.
    let late = back(&mut world, 3, claim("g", 4, 2));
    assert_eq!(world.heard(late), lost(1, detail));
    assert!(world.closed.contains(&late));
}

#[test]
fn a_rank_that_dies_right_after_a_restart_is_named_as_always() {
    let mut world = World::new();
    let hosts = [0, 1].map(|rank| back(&mut world, rank.into(), claim("g", 2, rank)));
    world.heard(hosts[0]);
    world.close(hosts[1]);
    world.pass(seconds(3.0));
    assert_eq!(world.heard(hosts[0]), lost(1, PEER_LOST));
}

#[test]
fn a_connection_that_breaks_disturbs_nobody() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, communicator) = world.ready(10, "g", 2);
    let resume = claim_of(&world, "g", 1);
    world.close(hosts[1]);
    world.pass(seconds(2.9));
    let again = back(&mut world, 20, resume.clone());
    assert_eq!(world.heard(again), [FromController::Resumed]);
    // One whose old connection is half open takes its place.
    let third = back(&mut world, 21, resume);
    assert!(world.closed.contains(&again));
    world.controller.handle_closed(world.now, again);
    world.pass(seconds(60.0));
    assert_eq!(world.heard(hosts[0]), []);
    // It hears what it has missed, after it is known.
    let late = claim_of(&world, "g", 1);
    world.close(third);
    world.say(hosts[0], ToController::Leave { collectives: 9 });
    let fourth = back(&mut world, 22, late);
    let left = FromController::Left { rank: 0, collectives: 9 };
    assert_eq!(world.heard(fourth), [FromController::Resumed, left]);
    world.say(fourth, ToController::Leave { collectives: 9 });
    assert_eq!(world.heard(fourth), [FromController::Closed]);
    assert_eq!(world.heard(SWITCH), [FromController::DestroyCommunicator { communicator }]);
}

#[test]
fn a_rank_that_has_left_does_not_join_again_and_comes_back_only_to_hear_the_end() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    let resume = claim_of(&world, "g", 0);
    world.say(hosts[0], ToController::Leave { collectives: 1 });
    world.close(hosts[0]);
    let again = back(&mut world, 20, resume);
    world.heard(again);
    // Its name is free, for others: this is another group.
    let next = world.join(21, "g", 2, 0);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CreatingGroup));
    // It is not counted as there: the other one is the last to leave.
    world.say(hosts[1], ToController::Leave { collectives: 1 });
    assert_eq!(world.heard(again), [FromController::Closed]);
    assert_eq!(world.heard(next), []);
    // Nor does it come back to a group that is over.
    let over = Resume { identity: IDENTITY, ..claim("g", 2, 0) };
    world.controller.remember(IDENTITY, None);
    let late = back(&mut world, 22, over);
    assert_eq!(world.heard(late), [FromController::Closed]);
}

#[test]
fn who_does_not_come_back_where_ranks_had_left_is_not_blamed() {
    let mut world = World::new();
    let resume = Resume { departed: true, ..claim("g", 3, 2) };
    let host = back(&mut world, 1, resume);
    world.pass(seconds(60.0));
    assert_eq!(world.heard(host), [FromController::Resumed]);
    // The name was free since the first had left.
    assert_eq!(world.controller.group_state("g"), None);
    world.say(host, ToController::Leave { collectives: 1 });
    assert_eq!(world.heard(host), [FromController::Closed]);
    world.assert_quiet();
}

/// The first that comes back did not hear it.
#[test]
fn the_name_of_a_group_that_comes_back_is_free_once_a_rank_says_that_one_had_left() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    back(&mut world, 1, claim("g", 3, 2));
    assert!(world.controller.group_state("g").is_some());
    back(&mut world, 2, Resume { departed: true, ..claim("g", 3, 1) });
    assert_eq!(world.controller.group_state("g"), None);
    let new = world.join(20, "g", 1, 0);
    assert!(!world.closed.contains(&new));
}

#[test]
fn a_job_that_is_killed_and_started_again_at_once_forms_a_new_group() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, communicator) = world.ready(10, "g", 2);
    let resume = claim_of(&world, "g", 1);
    // The rank that is still connected cannot be joined as.
    world.close(hosts[0]);
    let taken = world.join(20, "g", 2, 1);
    assert!(matches!(world.refusal(taken), Refusal::RankTaken { rank: 1, .. }));
    assert_eq!(world.heard(hosts[1]), []);
    let new = world.join(21, "g", 2, 0);
    let gone = lost(0, "another process has joined in its place");
    assert_eq!(world.heard(hosts[1]), gone);
    let abort = FromController::AbortCommunicator { communicator, rank: 0 };
    assert_eq!(world.heard(SWITCH), [abort]);
    // Who comes back to the old one does not get into the new one.
    let late = back(&mut world, 22, resume);
    assert_eq!(world.heard(late), gone);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CreatingGroup));
    let other = world.join(23, "g", 2, 1);
    for host in [new, other] {
        assert!(matches!(world.heard(host)[..], [FromController::GroupReady { .. }]));
    }
    // All of it at once, and with another number of ranks: one that was none before comes first.
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    hosts.iter().for_each(|&host| world.close(host));
    (0..3).rev().for_each(|rank| {
        world.join(20 + u64::from(rank), "g", 3, rank);
    });
    assert_eq!(world.controller.group_state("g"), Some(GroupState::GroupReady));
    world.pass(seconds(4.0));
    assert_eq!(world.controller.census().groups, 1);
}

#[test]
fn a_rank_is_displaced_only_when_its_connection_is_dead() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    // It is asked at once, so that the kernel of a machine that does not know the connection closes it.
    let other = ConnectionId(20);
    world.controller.handle_connected(world.now, other);
    let join = ToController::Join(hello("g", 2, 1));
    world.controller.handle_message(world.now, other, join);
    let ping = Output::Send { connection: hosts[1], term: 1, message: FromController::Ping };
    assert_eq!(world.controller.poll_output(), Some(ping));
    world.settle();
    assert!(matches!(world.refusal(other), Refusal::RankTaken { rank: 1, .. }));
    // Who answers stays.
    world.pass(seconds(10.0));
    let other = world.join(21, "g", 2, 1);
    assert!(matches!(world.refusal(other), Refusal::RankTaken { rank: 1, .. }));
    for &host in &hosts {
        assert_eq!(world.heard(host), []);
    }
    world.close(hosts[1]);
    let again = world.join(22, "g", 2, 1);
    assert_eq!(world.heard(again), []);
    assert_eq!(world.heard(hosts[0]), lost(1, "another process has joined in its place"));
}

/// However many want its place.
#[test]
fn who_has_a_place_is_asked_whether_it_is_there_once_until_it_answers() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    let join = ToController::Join(hello("g", 2, 1));
    let (name, address) = ("s".to_owned(), IpAddr::from([127, 0, 1, 1]));
    let (limits, presence) = (SwitchLimits::NONE, Presence::default());
    let register = ToController::Register { name, address, limits, presence };
    let mut others = 20..;
    for (has_it, wanted) in [(hosts[1], join), (SWITCH, register)] {
        let mut pings = |world: &mut World| {
            for other in others.by_ref().take(5) {
                let other = ConnectionId(other);
                world.controller.handle_connected(world.now, other);
                world.controller.handle_message(world.now, other, wanted.clone());
            }
            let outputs = std::iter::from_fn(|| world.controller.poll_output());
            let ping = Output::Send { connection: has_it, term: 1, message: FromController::Ping };
            outputs.filter(|output| *output == ping).count()
        };
        assert_eq!((pings(&mut world), pings(&mut world)), (1, 0), "{has_it:?}");
        world.say(has_it, ToController::Pong);
        assert_eq!(pings(&mut world), 1);
    }
}

/// Of a process that was killed the memory may go before its queue pairs, which the switch takes for a breach.
#[test]
fn a_breach_by_a_rank_whose_connection_has_ended_is_its_loss() {
    for away in [false, true] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        let (hosts, communicator) = world.ready(10, "g", 2);
        if away {
            world.close(hosts[1]);
        }
        let detail = "it may not write there".to_owned();
        let report = SwitchReport::Violation { rank: 1, detail: detail.clone() };
        world.say(SWITCH, ToController::Report { communicator, report });
        let reason = match away {
            true => AbortReason::PeerLost { rank: 1, detail },
            false => AbortReason::Violation { rank: 1, detail },
        };
        assert_eq!(world.heard(hosts[0]), [FromController::Abort { reason }]);
    }
}

#[test]
fn the_first_word_of_a_rank_that_leaves_counts() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    world.say(hosts[0], ToController::Leave { collectives: 1 });
    world.say(hosts[0], ToController::Leave { collectives: 9 });
    let resume = claim_of(&world, "g", 1);
    let again = back(&mut world, 20, resume);
    let left = FromController::Left { rank: 0, collectives: 1 };
    assert_eq!(world.heard(again), [FromController::Resumed, left]);
}

#[test]
fn two_jobs_of_one_name_do_not_mix_after_a_restart() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let a = back(&mut world, 1, claim("g", 2, 0));
    // Another job has the name: it cannot take the place of the rank that is still to come.
    let stranger = ConnectionId(2);
    world.connect(stranger);
    world.say(stranger, ToController::Join(hello("g", 2, 1)));
    assert_eq!(world.refusal(stranger), Refusal::GroupTaken { group: "g".to_owned() });
    // Nor does a rank of another run of it, which lives as well.
    let other = Resume { identity: [1, 2], communicator: 5, ..claim("g", 2, 1) };
    let other = back(&mut world, 3, other);
    assert_eq!(world.heard(other), [FromController::Resumed]);
    assert_eq!(world.controller.census().groups, 2);
    // What does not fit the group is refused.
    for (number, wrong) in [
        (4, Resume { world: 3, ..claim("g", 3, 1) }),
        (5, Resume { communicator: 1, ..claim("g", 2, 1) }),
        (6, Resume { group: "h".to_owned(), ..claim("g", 2, 1) }),
        (7, Resume { term: MAX_TERM, ..claim("g", 2, 1) }),
        (8, claim("g", 2, 2)),
        (9, claim("g", 0, 0)),
        (10, claim("", 2, 1)),
    ] {
        let wrong = back(&mut world, number, wrong);
        world.refusal(wrong);
    }
    let b = back(&mut world, 11, claim("g", 2, 1));
    for host in [a, b] {
        assert_eq!(world.heard(host), [FromController::Resumed]);
    }
    // Only the other one lacks a rank.
    world.pass(seconds(60.0));
    let detail = "it did not come back to a controller that was restarted";
    assert_eq!(world.heard(other), lost(0, detail));
    assert_eq!(world.heard(a), []);
}

#[test]
fn a_group_that_forms_is_not_mixed_with_one_that_comes_back_later() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let new = world.join(1, "g", 2, 0);
    let old = [0, 1].map(|rank| back(&mut world, 10 + u64::from(rank), claim("g", 2, rank)));
    let other = world.join(2, "g", 2, 1);
    assert!(matches!(world.heard(new)[..], [FromController::GroupReady { .. }]));
    assert!(matches!(world.heard(other)[..], [FromController::GroupReady { .. }]));
    assert_eq!(world.heard(old[0]), [FromController::Resumed]);
}

#[test]
fn a_standstill_of_the_controller_ends_nothing_before_it_has_read() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    let resume = claim_of(&world, "g", 1);
    // A rank is away when the controller stops, and back before it goes on; a stranger has not spoken yet.
    world.close(hosts[1]);
    world.pass(seconds(2.5));
    let stranger = ConnectionId(50);
    world.connect(stranger);
    world.controller.poll_timeout();
    world.now = world.now + seconds(30.0);
    world.controller.handle_timeout(world.now);
    world.settle();
    world.pass(seconds(0.9));
    let again = back(&mut world, 20, resume);
    world.say(stranger, ToController::Join(hello("h", 2, 1)));
    assert_eq!(world.heard(again), [FromController::Resumed]);
    assert_eq!(world.heard(hosts[0]), []);
    assert_eq!(world.heard(stranger), []);
    // One that is not back is lost a little later.
    world.close(again);
    world.pass(seconds(2.5));
    world.controller.poll_timeout();
    world.now = world.now + seconds(30.0);
    world.controller.handle_timeout(world.now);
    world.settle();
    assert_eq!(world.heard(hosts[0]), []);
    world.pass(seconds(3.0));
    assert_eq!(world.heard(hosts[0]), lost(1, PEER_LOST));
}

#[test]
fn what_has_come_is_read_before_a_deadline_that_is_seen_late() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    // Due 3 s after its connection was closed, and back half a second before that is seen.
    let late = |world: &mut World, connection: ConnectionId| {
        world.close(connection);
        world.pass(seconds(2.9));
        world.controller.poll_timeout();
        world.now = world.now + seconds(0.6);
        world.controller.handle_timeout(world.now);
        world.settle();
        assert_eq!(world.heard(hosts[0]), []);
    };
    let resume = claim_of(&world, "g", 1);
    late(&mut world, hosts[1]);
    let again = back(&mut world, 20, resume);
    world.pass(seconds(10.0));
    assert_eq!(world.heard(again), [FromController::Resumed]);
    assert_eq!(world.heard(hosts[0]), []);
    // Who is not back is lost a little later, though that is seen late again.
    late(&mut world, again);
    world.controller.poll_timeout();
    world.now = world.now + seconds(0.9);
    world.controller.handle_timeout(world.now);
    world.settle();
    assert_eq!(world.heard(hosts[0]), lost(1, PEER_LOST));
}

#[test]
fn a_switch_that_is_cut_off_serves_what_it_serves() {
    let mut world = World::new();
    let presence = Presence { incarnation: 3, ..Presence::default() };
    world.switch_with(SWITCH, "s", 1, presence);
    let (hosts, communicator) = world.ready(10, "g", 2);
    let (over, ended) = world.ready(20, "over", 1);
    world.close(SWITCH);
    // New groups wait for one that can be asked.
    let new = world.join(30, "new", 1, 0);
    world.pass(seconds(20.0));
    assert_eq!(world.heard(new), []);
    assert_eq!(world.heard(hosts[0]), []);
    // What ends meanwhile it is told to end when it is back.
    world.say(over[0], ToController::Leave { collectives: 1 });
    let back = ConnectionId(1001);
    world.switch_with(back, "s", 1, Presence { held: 2, ..presence });
    let group = claim_of(&world, "g", 0).identity;
    let gone = world.controller.ended.back().unwrap().group;
    let nodes = vec![node(group, communicator), node(gone, ended)];
    world.say(back, ToController::Held { nodes });
    let destroy = FromController::DestroyCommunicator { communicator: ended };
    assert_eq!(world.heard(back), [destroy, FromController::Registered]);
    assert!(matches!(world.heard(new)[..], [FromController::GroupReady { .. }]));
    world.pass(seconds(5.0));
    assert_eq!(world.heard(hosts[0]), []);
    // One that has lost a node ends its communicator, unless a report says why.
    world.close(back);
    let again = ConnectionId(1002);
    world.switch_with(again, "s", 1, presence);
    let detail = "it has lost its part of the communicator".to_owned();
    let (name, address) = ("s".to_owned(), IpAddr::from([127, 0, 1, 1]));
    let incarnation = Some(3);
    let reason = AbortReason::SwitchLost { name, address, detail, incarnation };
    assert_eq!(world.heard(hosts[0]), [FromController::Abort { reason }]);
}

/// A switch writes all that it says first before it reads what it is asked.
#[test]
fn what_a_switch_reports_that_comes_back_without_nodes_is_read_before_it_is_judged() {
    let presence = Presence { incarnation: 3, ..Presence::default() };
    let address = IpAddr::from([127, 0, 1, 1]);
    for reports in [true, false] {
        let mut world = World::new();
        world.switch_with(SWITCH, "s", 1, presence);
        let (hosts, communicator) = world.ready(10, "g", 2);
        world.close(SWITCH);
        let back = ConnectionId(1001);
        world.connect(back);
        let (name, limits) = ("s".to_owned(), SwitchLimits::NONE);
        let register = ToController::Register { name, address, limits, presence };
        world.controller.handle_message(world.now, back, register);
        let term = world.controller.term();
        let ping = Output::Send { connection: back, term, message: FromController::Ping };
        assert_eq!(world.controller.poll_output(), Some(ping));
        assert_eq!(world.controller.poll_output(), None);
        // Nothing new is asked of it meanwhile.
        let new = world.join(30, "new", 1, 0);
        assert_eq!(world.heard(new), []);
        let reason = if reports {
            let (rank, detail) = (1, "count".to_owned());
            let report = SwitchReport::Mismatch { rank, detail: detail.clone() };
            world.say(back, ToController::Report { communicator, report });
            world.say(back, ToController::Pong);
            AbortReason::Mismatch { rank, detail }
        } else {
            // It says this and that, but does not answer.
            world.controller.end_inventories(world.now + seconds(10.0));
            world.say(back, ToController::CommunicatorDestroyed { communicator });
            let (name, detail) = ("s".to_owned(), "it has lost its part of the communicator");
            let (detail, incarnation) = (detail.to_owned(), Some(3));
            AbortReason::SwitchLost { name, address, detail, incarnation }
        };
        for host in hosts {
            assert_eq!(world.heard(host), [FromController::Abort { reason: reason.clone() }]);
        }
        assert_eq!(world.heard(back).pop(), Some(FromController::Registered));
        assert!(matches!(world.heard(new)[..], [FromController::GroupReady { .. }]));
    }
}

#[test]
fn a_switch_is_displaced_only_when_its_connection_is_dead() {
    let mut world = World::new();
    let presence = Presence { incarnation: 3, ..Presence::default() };
    world.switch_with(SWITCH, "s", 1, presence);
    let (hosts, _) = world.ready(10, "g", 2);
    // Anybody can say its name and its number.
    for (number, incarnation) in [(1001, 3), (1002, 4)] {
        let other = ConnectionId(number);
        world.switch_with(other, "s", 1, Presence { incarnation, ..presence });
        let refusal = world.refusal(other);
        assert!(matches!(refusal, Refusal::SwitchTaken { .. }), "{refusal}");
    }
    world.pass(seconds(10.0));
    assert_eq!(world.heard(hosts[0]), []);
    world.heard(SWITCH);
    assert!(!world.closed.contains(&SWITCH));
    // It is asked at once, so that the kernel of a machine that does not know the connection closes it.
    let third = ConnectionId(1003);
    world.controller.handle_connected(world.now, third);
    let (name, address) = ("s".to_owned(), IpAddr::from([127, 0, 1, 1]));
    let limits = SwitchLimits::NONE;
    let register = ToController::Register { name, address, limits, presence };
    world.controller.handle_message(world.now, third, register);
    let ping = Output::Send { connection: SWITCH, term: 1, message: FromController::Ping };
    assert_eq!(world.controller.poll_output(), Some(ping));
    world.settle();
    world.close(SWITCH);
    let again = ConnectionId(1004);
    world.switch_with(again, "s", 1, Presence { incarnation: 4, ..presence });
    assert_eq!(world.heard(again), [FromController::Registered]);
    let heard = world.heard(hosts[0]);
    let [FromController::Abort { reason: AbortReason::SwitchLost { detail, .. } }] = &heard[..]
    else {
        panic!("{heard:?}");
    };
    assert_eq!(detail, "it was restarted");
}

#[test]
fn a_node_whose_number_another_one_has_is_ended_where_it_is() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(1));
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    let host = back(&mut world, 1, claim("g", 1, 0));
    let other = ConnectionId(1001);
    world.switch_with(other, "t", 2, holding(1));
    world.say(other, ToController::Held { nodes: vec![node([5, 6], NUMBER)] });
    let end = FromController::EndCommunicator { communicator: NUMBER };
    assert_eq!(world.heard(other), [end, FromController::Registered]);
    // The first one has it still, also when it says so again.
    world.close(SWITCH);
    let again = ConnectionId(1002);
    world.switch_with(again, "s", 1, holding(1));
    world.say(again, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    assert_eq!(world.heard(again), [FromController::Registered]);
    assert_eq!(world.heard(host), [FromController::Resumed]);
}

#[test]
fn a_switch_that_has_found_a_dead_rank_meanwhile_names_it() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(1));
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    let host = back(&mut world, 1, claim("g", 2, 0));
    world.heard(host);
    let report = SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None };
    world.say(SWITCH, ToController::Report { communicator: NUMBER, report });
    assert_eq!(world.heard(host), lost(1, "silent"));
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
}

#[test]
fn what_a_switch_reports_before_the_first_rank_is_back_is_kept() {
    // It has the node still, or not any more; named before the rank is back, or after.
    for (held, host_first) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut world = World::new();
        let first = host_first.then(|| back(&mut world, 1, claim("g", 3, 0)));
        world.switch_with(SWITCH, "s", 1, holding(1));
        let report = SwitchReport::PeerLost { rank: 2, detail: "silent".to_owned(), switch: None };
        world.say(SWITCH, ToController::Report { communicator: NUMBER, report });
        let named = if held { node(IDENTITY, NUMBER) } else { node([5, 6], 1) };
        world.say(SWITCH, ToController::Held { nodes: vec![named] });
        assert_eq!(world.heard(SWITCH), [FromController::Registered]);
        let host = first.unwrap_or_else(|| back(&mut world, 1, claim("g", 3, 0)));
        let end = lost(2, "silent").into_iter();
        let expected: Vec<_> = [FromController::Resumed].into_iter().chain(end).collect();
        assert_eq!(world.heard(host), expected, "{held} {host_first}");
        let late = back(&mut world, 2, claim("g", 3, 1));
        assert_eq!(world.heard(late), lost(2, "silent"));
    }
}

#[test]
fn early_reports_are_bounded_and_forgotten() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(0));
    for communicator in 0..2000 {
        let report = SwitchReport::PeerLost { rank: 2, detail: "x".repeat(5000), switch: None };
        world.say(SWITCH, ToController::Report { communicator, report });
    }
    let early = |world: &World| world.controller.early.values().map(|it| it.len()).sum::<usize>();
    assert_eq!(early(&world), 64);
    world.pass(seconds(10.0));
    assert_eq!(early(&world), 0);
}

#[test]
fn a_switch_that_does_not_name_what_it_has_is_sent_away() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(MAX_HELD));
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    world.pass(seconds(10.0));
    assert!(world.refusal(SWITCH).to_string().contains("did not name the nodes"));
    assert_eq!(world.controller.census(), Census::default());
    assert!(world.controller.held.is_empty() && world.controller.unclaimed.is_empty());
}

#[test]
fn a_switch_below_that_is_lost_is_named_and_not_a_rank() {
    let mut world = World::new();
    world.switch(ConnectionId(1001), "leaf", 2);
    world.switch_with(SWITCH, "s", 1, holding(1));
    let below = vec![SwitchBelow { rank: 1, address: IpAddr::from([127, 0, 1, 2]) }];
    let node = HeldNode { below, ..node(IDENTITY, NUMBER) };
    world.say(SWITCH, ToController::Held { nodes: vec![node] });
    let host = back(&mut world, 1, claim("g", 2, 0));
    world.heard(host);
    let report = SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None };
    world.say(SWITCH, ToController::Report { communicator: NUMBER, report });
    let heard = world.heard(host);
    let [FromController::Abort { reason: AbortReason::SwitchLost { name, address, .. } }] =
        &heard[..]
    else {
        panic!("{heard:?}");
    };
    // Who is there now may be another process.
    assert_eq!((name.as_str(), *address), ("", IpAddr::from([127, 0, 1, 2])));
}

#[test]
fn a_rank_whose_switch_is_lost_is_not_blamed() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(10, "g", 2);
    world.say(
        hosts[0],
        ToController::SwitchLost {
            detail: "silent".to_owned(),
            tree: 0,
            switch: None,
            further_up: false,
        },
    );
    let heard = world.heard(hosts[1]);
    let [FromController::Abort { reason: AbortReason::SwitchLost { name, .. } }] = &heard[..]
    else {
        panic!("{heard:?}");
    };
    assert_eq!(name, "s");
}

/// That a switch is lost, as a controller says that was restarted since.
pub(super) fn switch_lost(
    name: &str,
    address: u8,
    detail: &str,
    incarnation: Option<u64>,
) -> [FromController; 1] {
    let (name, address) = (name.to_owned(), IpAddr::from([127, 0, 1, address]));
    let detail = detail.to_owned();
    let reason = AbortReason::SwitchLost { name, address, detail, incarnation };
    [FromController::Abort { reason }]
}

#[test]
fn a_switch_that_does_not_come_back_is_told_as_a_switch_and_not_as_a_rank() {
    let mut world = World::new();
    let hosts = [0, 1].map(|rank| back(&mut world, rank.into(), claim("g", 2, rank)));
    hosts.iter().for_each(|&host| drop(world.heard(host)));
    let (address, detail) = (IpAddr::from([127, 0, 1, 1]), "silent".to_owned());
    let switch = Some(LostSwitch { address, incarnation: Some(7) });
    world.say(hosts[1], ToController::SwitchLost { detail, tree: 0, switch, further_up: false });
    let expected = switch_lost("", 1, "rank 1 cannot reach it: silent", Some(7));
    for host in hosts {
        assert_eq!(world.heard(host), expected);
    }
    // So does who comes later.
    let late = back(&mut world, 9, claim("g", 2, 0));
    assert_eq!(world.heard(late), expected);
}

/// Its machine has lost its power: as far as the controller knows all are connected.
#[test]
fn of_hosts_of_before_the_one_whose_switch_is_silent_is_lost_and_never_who_says_so() {
    let at = |rank: u32| hello("g", 4, rank).address;
    let host = |rank| Some(LostSwitch { address: at(rank), incarnation: Some(0) });
    // Ranks 1 and 3 share an address.
    for (switch, named) in [
        (host(2), Some(2)),
        (host(0), None),
        (host(1), None),
        // Who has no rank here, and the process of a switch.
        (host(9), None),
        (Some(LostSwitch { address: at(2), incarnation: Some(7) }), None),
        (None, None),
    ] {
        for further_up in [false, true] {
            let mut world = World::new();
            let hosts = [0, 1, 2, 3].map(|rank| {
                let address = if rank == 3 { at(1) } else { at(rank) };
                back(&mut world, rank.into(), Resume { address, ..claim("g", 4, rank) })
            });
            hosts.iter().for_each(|&host| drop(world.heard(host)));
            let detail = "silent".to_owned();
            let said = ToController::SwitchLost { detail, tree: 2, switch, further_up };
            world.say(hosts[0], said);
            world.pass(seconds(1.0));
            let heard = world.heard(hosts[1]);
            let [FromController::Abort { reason }] = &heard[..] else { panic!("{heard:?}") };
            match (reason, named.filter(|_| !further_up)) {
                (AbortReason::PeerLost { rank, detail }, Some(named)) => {
                    let wanted = "its switch: rank 0 cannot reach it: silent";
                    assert_eq!((*rank, detail.as_str()), (named, wanted));
                }
                (AbortReason::SwitchLost { name, address, .. }, None) => {
                    let wanted = switch.map_or(IpAddr::from([0_u8; 4]), |switch| switch.address);
                    assert_eq!((name.as_str(), *address), ("", wanted));
                }
                (reason, named) => panic!("{reason:?}, not {named:?}"),
            }
        }
    }
}

/// The one that is lost may be the one that is not back, and shares its address with one that is.
#[test]
fn of_hosts_of_before_nobody_is_lost_while_not_all_are_back() {
    let address = hello("g", 4, 1).address;
    let mut world = World::new();
    let hosts = [0, 1, 2].map(|rank| back(&mut world, rank.into(), claim("g", 4, rank)));
    hosts.iter().for_each(|&host| drop(world.heard(host)));
    let switch = Some(LostSwitch { address, incarnation: Some(0) });
    let (detail, further_up) = ("silent".to_owned(), false);
    world.say(hosts[0], ToController::SwitchLost { detail, tree: 0, switch, further_up });
    let heard = world.heard(hosts[1]);
    let [FromController::Abort { reason: AbortReason::SwitchLost { .. } }] = &heard[..] else {
        panic!("{heard:?}")
    };
}

/// Its own switch has told it, and lives. It may be away itself by then.
#[test]
fn of_hosts_of_before_one_that_is_away_is_lost_and_not_who_has_heard_of_it() {
    let address = hello("g", 3, 0).address;
    let host = LostSwitch { address, incarnation: Some(0) };
    // All ranks may share an address.
    for (own, shared) in [(None, false), (Some(host), false), (Some(host), true)] {
        let mut world = World::new();
        let hosts = [0, 1, 2].map(|rank| {
            let claim = claim("g", 3, rank);
            let address = if shared { address } else { claim.address };
            back(&mut world, rank.into(), Resume { address, ..claim })
        });
        hosts.iter().for_each(|&host| drop(world.heard(host)));
        let detail = "silent".to_owned();
        let said = ToController::SwitchLost { detail, tree: 0, switch: own, further_up: true };
        world.say(hosts[0], said);
        world.close(hosts[0]);
        world.close(hosts[2]);
        world.pass(seconds(1.0));
        assert_eq!(world.heard(hosts[1]), lost(2, "silent"));
    }
}

#[test]
fn a_switch_below_that_does_not_come_back_is_told_as_a_switch() {
    let address = IpAddr::from([127, 0, 1, 2]);
    // The one above has its node still, which says whose the edge is, or says it itself.
    for held in [true, false] {
        let mut world = World::new();
        let host = back(&mut world, 1, claim("g", 2, 0));
        world.heard(host);
        world.switch_with(SWITCH, "s", 1, holding(1));
        let below = vec![SwitchBelow { rank: 1, address }];
        let ours = HeldNode { below, ..node(IDENTITY, NUMBER) };
        let named = if held { ours } else { node([5, 6], 1) };
        let switch = (!held).then_some(address);
        let report = SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch };
        world.say(SWITCH, ToController::Held { nodes: vec![named] });
        // Another process is at its address, perhaps: it has nothing of the group, and is not the one that was lost.
        world.switch(ConnectionId(1001), "t", 2);
        world.say(SWITCH, ToController::Report { communicator: NUMBER, report });
        assert_eq!(world.heard(host), switch_lost("", 2, "silent", None), "{held}");
    }
}

#[test]
fn inventories_have_limits() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(MAX_HELD + 1));
    assert!(world.refusal(SWITCH).to_string().contains("4097 nodes are out of range"));
    // More than announced, none, and ones that cannot be.
    let wrong = HeldNode { children: 65, ..node(IDENTITY, 1) };
    let address = IpAddr::from([127, 0, 1, 2]);
    let below = vec![SwitchBelow { rank: 0, address }; 4];
    for (number, nodes) in [
        (1, vec![node(IDENTITY, 1), node(IDENTITY, 2), node(IDENTITY, 3)]),
        (2, Vec::new()),
        (3, vec![wrong]),
        (4, vec![HeldNode { below, ..node(IDENTITY, 1) }]),
    ] {
        let connection = ConnectionId(number);
        world.switch_with(connection, "s", 1, holding(2));
        world.say(connection, ToController::Held { nodes });
        assert!(world.refusal(connection).to_string().contains("named more nodes than it has"));
        assert_eq!(world.controller.census(), Census::default());
        assert!(world.controller.held.is_empty());
    }
    // All switches together: those that come too much are refused for load.
    for number in 0..16 {
        world.switch_with(
            ConnectionId(100 + number),
            &format!("t{number}"),
            number as u8,
            holding(MAX_HELD),
        );
    }
    world.switch_with(ConnectionId(200), "u", 200, holding(1));
    assert!(world.refusal(ConnectionId(200)).is_for_load());
    // Those that have gone and serve nobody are forgotten.
    (0..16).for_each(|number| world.close(ConnectionId(100 + number)));
    assert_eq!(world.controller.census(), Census::default());
    // Nor does one that comes again and again leave anything.
    for number in 300..400 {
        world.switch_with(ConnectionId(number), "s", 1, holding(1));
        world.say(ConnectionId(number), ToController::Held { nodes: vec![node(IDENTITY, 1)] });
        world.close(ConnectionId(number));
    }
    assert!(world.controller.held.is_empty() && world.controller.unclaimed.is_empty());
    let resume = || claim("g", 2, 0);
    for number in 400..500 {
        let host = back(&mut world, number, resume());
        world.close(host);
    }
    assert_eq!(world.controller.away.len(), 1);
}

#[test]
fn ranks_that_come_back_are_refused_for_load_and_nothing_else_is_bounded_by_it() {
    let config = ControllerConfig { max_groups: 1, ..ControllerConfig::new(0) };
    let mut world = World::with(config);
    back(&mut world, 1, claim("g", 2, 0));
    let other = back(&mut world, 2, Resume { identity: [1, 2], ..claim("g", 2, 0) });
    assert!(world.refusal(other).is_for_load());
    // What is remembered of groups that are over is bounded too.
    (0..5000).for_each(|number| world.controller.remember([number, 0], None));
    assert_eq!(world.controller.ended.len(), 1024);
}
