//! Which groups are planned, and what those get that a switch does not serve.

use super::resume::{back, claim};
use super::topology::apart;
use super::trees::{Answer, Lab};
use super::*;
use crate::protocol::FallbackOffer;

const OTHER: ConnectionId = ConnectionId(1001);

fn join(world: &mut World, fallback: &FallbackOffer, rank: u32) -> ConnectionId {
    let connection = ConnectionId(1 + u64::from(rank));
    world.connect(connection);
    let hello = Hello { fallback: fallback.clone(), ..hello("g", 2, rank) };
    world.say(connection, ToController::Join(hello));
    connection
}

#[test]
fn when_a_switch_comes_no_group_is_planned_that_has_trees_or_is_ready() {
    let mut world = World::new();
    // Its only rank is back, and an earlier controller has made it.
    let revived = back(&mut world, 1, claim("old", 1, 0));
    assert_eq!(world.heard(revived), [FromController::Resumed]);
    world.switch(SWITCH, "s", 1);
    let (ready, _) = world.ready(10, "ready", 2);
    let planned = world.join(20, "planned", 1, 0);
    assert!(matches!(world.heard(planned)[..], [FromController::GroupReady { .. }]));
    world.switch(OTHER, "t", 2);
    for host in ready.into_iter().chain([revived, planned]) {
        assert_eq!(world.heard(host), []);
    }
}

#[test]
fn where_no_switch_is_above_its_hosts_these_take_the_place_of_one_if_all_would() {
    for (fallback, falls_back) in [(FallbackOffer::Able, true), (FallbackOffer::Off, false)] {
        let mut world = World::with(apart());
        let hosts = [0, 1].map(|rank| join(&mut world, &fallback, rank));
        for host in hosts {
            match &world.heard(host)[..] {
                [FromController::GroupReady { hosts: Some(hosts), .. }] => {
                    assert!(hosts.reason.contains("no switch is above all hosts"), "{hosts:?}");
                    assert!(falls_back);
                }
                [FromController::Refused { reason: Refusal::NotPlaced { .. } }] => {
                    assert!(!falls_back);
                }
                heard => panic!("{heard:?}"),
            }
        }
    }
}

#[test]
fn a_group_asks_so_many_switches_that_refuse_and_no_more() {
    for refusals in [16, 17] {
        // One more would serve it.
        let mut lab = Lab::with(ControllerConfig::new(7), 18);
        let hosts = lab.join("g", 1, 1);
        for _ in 0..refusals {
            lab.run(|_| Answer::Failed);
            if lab.world.controller.group_state("g").is_some() {
                lab.world.end(hosts[0]);
            }
        }
        lab.run(|_| Answer::Done);
        let ready = (refusals == 16).then_some(GroupState::CommunicatorReady);
        assert_eq!(lab.world.controller.group_state("g"), ready, "{refusals}");
    }
}

#[test]
fn a_switch_that_refuses_what_it_has_made_ends_the_group() {
    // Another switch is there, or the ranks would take its place: those that have a plan get no other.
    for (others, fallback) in [(1, FallbackOffer::Off), (0, FallbackOffer::Able)] {
        let mut world = World::new();
        world.switch(SWITCH, "s", 1);
        let hosts = [0, 1].map(|rank| join(&mut world, &fallback, rank));
        hosts.iter().for_each(|&host| world.end(host));
        let communicator = world.create();
        hosts.iter().for_each(|&host| drop(world.heard(host)));
        (0..others).for_each(|_| world.switch(OTHER, "t", 2));
        let (reason, path_mtu) = ("out of memory".to_owned(), None);
        world.say(SWITCH, ToController::CommunicatorFailed { communicator, reason, path_mtu });
        for host in hosts {
            assert!(matches!(world.refusal(host), Refusal::SwitchFailed { .. }));
        }
        world.assert_quiet();
    }
}

#[test]
fn a_host_in_the_place_of_a_switch_that_refuses_ends_the_group_if_there_is_no_other() {
    let mut world = World::new();
    let connection = ConnectionId(1);
    world.connect(connection);
    let hello = Hello { fallback: FallbackOffer::Able, ..hello("g", 1, 0) };
    world.say(connection, ToController::Join(hello));
    world.pass(seconds(3.0));
    world.end(connection);
    let heard = world.heard(connection);
    let Some(&FromController::CreateCommunicator { communicator, .. }) = heard.last() else {
        panic!("{heard:?}");
    };
    let (reason, path_mtu) = ("out of memory".to_owned(), None);
    world.say(connection, ToController::CommunicatorFailed { communicator, reason, path_mtu });
    assert!(matches!(world.refusal(connection), Refusal::SwitchFailed { .. }));
    world.assert_quiet();
}
