//! What switches have from before, which of several has it, and what is known of those that are lost.

use super::resume::{IDENTITY, NUMBER, back, claim, holding, node, switch_lost};
use super::*;
use crate::protocol::{HeldNode, LostSwitch, Resume, SwitchBelow};

const OTHER: ConnectionId = ConnectionId(1001);

#[test]
fn a_new_node_has_no_number_that_another_one_has() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (_, first) = world.ready(10, "g", 2);
    // An earlier controller has drawn the next two.
    world.switch_with(OTHER, "t", 2, holding(2));
    let nodes = vec![node(IDENTITY, first + 1), node(IDENTITY, first + 2)];
    world.say(OTHER, ToController::Held { nodes });
    let host = world.join(20, "i", 1, 0);
    world.end(host);
    let heard = [SWITCH, OTHER].map(|switch| world.heard(switch)).concat();
    let made = heard.iter().find_map(|message| match message {
        FromController::CreateCommunicator { communicator, .. } => Some(*communicator),
        _ => None,
    });
    assert_eq!(made, Some(first + 3), "{heard:?}");
}

#[test]
fn a_number_is_that_of_one_group_on_one_switch() {
    for (switch, group) in [(OTHER, IDENTITY), (SWITCH, [5, 6])] {
        let mut world = World::new();
        world.switch_with(SWITCH, "s", 1, holding(2));
        world.switch_with(OTHER, "t", 2, holding(2));
        world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
        world.say(switch, ToController::Held { nodes: vec![node(group, NUMBER)] });
        let end = FromController::EndCommunicator { communicator: NUMBER };
        assert!(world.heard(switch).contains(&end), "{group:?}");
        assert_eq!(world.controller.held[&NUMBER].group, IDENTITY);
    }
}

#[test]
fn a_switch_has_all_its_time_to_name_what_it_has() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(1));
    // Who waits is told each second that he does.
    world.join(1, "g", 2, 0);
    world.pass(seconds(9.9));
    assert_eq!(world.heard(SWITCH), []);
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
}

#[test]
fn of_switches_that_are_away_those_that_serve_somebody_are_known() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(1));
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    world.switch_with(OTHER, "t", 2, holding(1));
    world.say(OTHER, ToController::Held { nodes: vec![node([5, 6], 78)] });
    let host = back(&mut world, 1, claim("g", 2, 0));
    assert_eq!(world.heard(host), [FromController::Resumed]);
    // What the one has nobody has claimed.
    world.close(OTHER);
    assert!(world.controller.held.keys().eq([&NUMBER]), "{:?}", world.controller.held.keys());
    // The other comes back as another process.
    world.close(SWITCH);
    let presence = Presence { incarnation: 9, ..holding(0) };
    world.switch_with(ConnectionId(1002), "s", 1, presence);
    assert_eq!(world.heard(host), switch_lost("s", 1, "it was restarted", Some(3)));
}

#[test]
fn a_switch_of_before_that_is_lost_has_the_name_of_the_process_that_it_was() {
    for (address, incarnation, name) in
        [(1, Some(3), "s"), (1, Some(4), ""), (1, None, ""), (2, Some(3), "")]
    {
        let mut world = World::new();
        world.switch_with(SWITCH, "s", 1, holding(0));
        let host = back(&mut world, 1, claim("g", 2, 0));
        world.heard(host);
        let lost = LostSwitch { address: IpAddr::from([127, 0, 1, address]), incarnation };
        let (detail, switch) = ("silent".to_owned(), Some(lost));
        world.say(host, ToController::SwitchLost { detail, tree: 0, switch, further_up: false });
        let detail = "rank 0 cannot reach it: silent";
        assert_eq!(world.heard(host), switch_lost(name, address, detail, incarnation));
    }
}

#[test]
fn a_switch_below_is_named_where_it_has_nodes_of_the_group() {
    for (group, name, incarnation) in [(IDENTITY, "t", Some(3)), ([5, 6], "", None)] {
        let mut world = World::new();
        let host = back(&mut world, 1, claim("g", 2, 0));
        world.heard(host);
        world.switch_with(SWITCH, "s", 1, holding(1));
        let below = vec![SwitchBelow { rank: 1, address: IpAddr::from([127, 0, 1, 2]) }];
        let nodes = vec![HeldNode { below, ..node(IDENTITY, NUMBER) }];
        world.say(SWITCH, ToController::Held { nodes });
        world.switch_with(OTHER, "t", 2, holding(1));
        world.say(OTHER, ToController::Held { nodes: vec![node(group, 78)] });
        let report = SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None };
        world.say(SWITCH, ToController::Report { communicator: NUMBER, report });
        assert_eq!(world.heard(host), switch_lost(name, 2, "silent", incarnation));
    }
}

#[test]
fn a_switch_of_before_that_is_lost_ends_the_groups_that_it_serves() {
    let mut world = World::new();
    for (switch, name, address, group, number) in
        [(SWITCH, "s", 1, IDENTITY, NUMBER), (OTHER, "t", 2, [5, 6], 78)]
    {
        world.switch_with(switch, name, address, holding(1));
        world.say(switch, ToController::Held { nodes: vec![node(group, number)] });
    }
    let host = back(&mut world, 1, claim("g", 1, 0));
    let resume = Resume { identity: [5, 6], communicator: 78, ..claim("h", 1, 0) };
    let other = back(&mut world, 2, resume);
    for host in [host, other] {
        assert_eq!(world.heard(host), [FromController::Resumed]);
    }
    world.say(SWITCH, ToController::Leave { collectives: 1 });
    let detail = "a switch cannot send Leave now";
    assert_eq!(world.heard(host), switch_lost("s", 1, detail, Some(3)));
    assert_eq!(world.heard(other), []);
}

#[test]
fn what_a_node_of_before_finds_it_tells_its_own_tree_and_the_controller_the_others() {
    let mut world = World::new();
    let third = ConnectionId(1002);
    for (switch, name, address, communicator, tree) in
        [(SWITCH, "s", 1, NUMBER, 0), (OTHER, "t", 2, 78, 1), (third, "u", 3, 79, 1)]
    {
        world.switch_with(switch, name, address, holding(1));
        let nodes = vec![HeldNode { tree, ..node(IDENTITY, communicator) }];
        world.say(switch, ToController::Held { nodes });
        world.heard(switch);
    }
    let host = back(&mut world, 1, claim("g", 1, 0));
    world.heard(host);
    let (rank, detail) = (0, "count".to_owned());
    let report = SwitchReport::Mismatch { rank, detail: detail.clone() };
    world.say(OTHER, ToController::Report { communicator: 78, report });
    let reason = AbortReason::Mismatch { rank, detail };
    assert_eq!(world.heard(host), [FromController::Abort { reason }]);
    let destroy = FromController::DestroyCommunicator { communicator: NUMBER };
    assert_eq!(world.heard(SWITCH), [destroy]);
    assert_eq!((world.heard(OTHER), world.heard(third)), (vec![], vec![]));
    // Those of its tree end by themselves, and nobody can claim any of them.
    assert_eq!((world.controller.census().held, world.controller.census().ending), (0, 2));
    assert!(world.controller.unclaimed.is_empty());
}

#[test]
fn what_a_rank_has_found_nodes_of_before_hear_from_the_controller() {
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 1, holding(1));
    world.say(SWITCH, ToController::Held { nodes: vec![node(IDENTITY, NUMBER)] });
    let host = back(&mut world, 1, claim("g", 1, 0));
    let _ = [SWITCH, host].map(|it| world.heard(it));
    let cause = Some(AbortReason::Mismatch { rank: 0, detail: "count".to_owned() });
    world.say(host, ToController::Fail { reason: "it differs".to_owned(), cause });
    let destroy = FromController::DestroyCommunicator { communicator: NUMBER };
    assert_eq!(world.heard(SWITCH), [destroy]);
}

#[test]
fn a_group_whose_ranks_that_came_back_have_left_is_over_when_the_others_had_time_to_come() {
    let mut world = World::new();
    let host = back(&mut world, 1, claim("g", 2, 0));
    assert_eq!(world.heard(host), [FromController::Resumed]);
    world.say(host, ToController::Leave { collectives: 1 });
    assert_eq!(world.heard(host), []);
    world.pass(seconds(60.0));
    assert_eq!(world.heard(host), [FromController::Closed]);
    world.assert_quiet();
}
