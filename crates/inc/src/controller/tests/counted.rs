//! What switches say that they have counted, some of which is not so.

use super::*;
use crate::protocol::PortCounters;

fn port(rank: Option<u32>, bytes: u64) -> PortCounters {
    PortCounters { rank, payload_bytes_sent: bytes, ..PortCounters::default() }
}

fn counters(communicator: u64, at_ns: u64, ports: Vec<PortCounters>) -> ToController {
    ToController::Counters { communicator, at_ns, collectives: 3, ports }
}

/// What is shown of the edges of the only node: bytes sent and their rate.
fn shown(world: &World) -> Vec<(Option<u64>, Option<f64>)> {
    let overview = world.controller.overview();
    let [group] = &overview.groups[..] else { panic!("{overview:?}") };
    let edges = &group.communicator.as_ref().unwrap().nodes[0].edges;
    let shown = |edge: &EdgeOverview| {
        let rate = edge.rates.map(|rates| rates.payload_bytes_sent);
        (edge.counters.map(|counters| counters.payload_bytes_sent), rate)
    };
    edges.iter().map(shown).collect()
}

#[test]
fn switches_that_serve_somebody_are_asked() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    world.heard(SWITCH);
    world.controller.read_counters();
    world.settle();
    assert_eq!(world.heard(SWITCH), []);
    world.ready(1, "g", 2);
    world.controller.read_counters();
    world.settle();
    assert_eq!(world.heard(SWITCH), [FromController::ReadCounters]);
}

#[test]
fn rates_are_those_of_the_time_between_two_answers() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (_, communicator) = world.ready(1, "g", 2);
    assert_eq!(shown(&world), [(None, None), (None, None)]);
    let say = |world: &mut World, at_ns, ports| {
        world.say(SWITCH, counters(communicator, at_ns, ports));
        shown(world)
    };
    let first = say(&mut world, 2_000_000_000, vec![port(Some(0), 10), port(Some(1), 20)]);
    assert_eq!(first, [(Some(10), None), (Some(20), None)]);
    let second = say(&mut world, 2_500_000_000, vec![port(Some(0), 110), port(Some(1), 20)]);
    assert_eq!(second, [(Some(110), Some(200.0)), (Some(20), Some(0.0))]);
    // It counts backwards, then its clock stands still, then goes back, then a port is gone.
    let third = say(&mut world, 3_500_000_000, vec![port(Some(0), 5), port(Some(1), 30)]);
    assert_eq!(third, [(Some(5), Some(0.0)), (Some(30), Some(10.0))]);
    for at_ns in [3_500_000_000, 0] {
        let still = say(&mut world, at_ns, vec![port(Some(0), 50), port(Some(1), 300)]);
        assert_eq!(still, [(Some(50), None), (Some(300), None)]);
    }
    assert_eq!(say(&mut world, u64::MAX, vec![]), [(None, None), (None, None)]);
}

#[test]
fn what_is_not_so_is_left_out() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, communicator) = world.ready(1, "g", 2);
    let ports: Vec<_> = (0..600).map(|rank| port(Some(rank % 70), 1)).collect();
    world.say(SWITCH, counters(communicator, 1, [ports, vec![port(None, 1)]].concat()));
    assert_eq!(shown(&world), [(Some(1), None), (Some(1), None)]);
    // Of a node that is not there, and of one that another switch has.
    world.say(SWITCH, counters(communicator + 1, 1, vec![port(Some(0), 7)]));
    let other = ConnectionId(1001);
    world.switch(other, "t", 2);
    world.say(other, counters(communicator, 1, vec![port(Some(0), 7)]));
    assert_eq!(shown(&world), [(Some(1), None), (Some(1), None)]);
    assert!(world.closed.is_empty());
    // A host counts nothing.
    world.say(hosts[0], counters(communicator, 1, vec![]));
    let refusal = world.refusal(hosts[0]).to_string();
    assert!(refusal.contains("a host cannot send Counters now"), "{refusal}");
}

#[test]
fn a_group_is_shown_from_its_first_rank_to_its_last() {
    let mut world = World::new();
    let state = |world: &World| {
        let overview = world.controller.overview();
        let group = overview.groups.first().map(|it| (it.state, it.waits_for.clone()));
        group.unwrap_or(("none", None))
    };
    let first = world.join(1, "g", 2, 1);
    assert_eq!(state(&world), ("creating_group", Some("rank 0".to_owned())));
    let second = world.join(2, "g", 2, 0);
    assert_eq!(state(&world), ("group_ready", Some("a switch".to_owned())));
    world.switch(SWITCH, "s", 1);
    world.end(first);
    assert_eq!(state(&world).0, "creating_communicator");
    world.end(second);
    world.create();
    assert_eq!(state(&world), ("communicator_ready", None));
    world.say(first, ToController::Leave { collectives: 1 });
    assert_eq!(state(&world), ("leaving", None));
    world.say(second, ToController::Leave { collectives: 1 });
    assert_eq!(state(&world).0, "none");
}

#[test]
fn the_collectives_of_a_node_are_shown_as_its_switch_counts_them() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (_, communicator) = world.ready(1, "g", 2);
    let collectives = |world: &World| {
        let overview = world.controller.overview();
        overview.groups[0].communicator.as_ref().unwrap().nodes[0].collectives
    };
    assert_eq!(collectives(&world), None);
    world.say(SWITCH, counters(communicator, 1, vec![port(Some(0), 1)]));
    assert_eq!(collectives(&world), Some(3));
}
