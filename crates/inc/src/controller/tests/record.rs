//! What controllers leave for those after them, and controllers that do not lead.

use super::*;
use crate::protocol::{HeldNode, Resume};

fn config() -> ControllerConfig {
    ControllerConfig { keep_records: true, report_placements: true, ..ControllerConfig::new(7) }
}

/// What is to be stored, by its key.
fn records(world: &mut World) -> BTreeMap<String, Option<String>> {
    core::iter::from_fn(|| world.controller.poll_record()).collect()
}

fn parse(records: &BTreeMap<String, Option<String>>) -> Vec<Record> {
    let texts = records.iter().filter_map(|(key, text)| Some((key, text.as_ref()?)));
    texts.map(|(key, text)| Record::parse(key, text).unwrap()).collect()
}

/// A rank of a recorded communicator comes back.
fn back(world: &mut World, connection: u64, record: &Record, rank: u32) -> ConnectionId {
    let Record { group, identity, communicator, world: size, .. } = record.clone();
    let connection = ConnectionId(connection);
    world.connect(connection);
    let address = hello("g", size, rank).address;
    let resume = Resume {
        term: 8,
        group,
        identity,
        communicator,
        world: size,
        rank,
        address,
        departed: false,
        more_addresses: Vec::new(),
    };
    world.say(connection, ToController::Resume(resume));
    connection
}

/// A group of three on one switch, and its record after its last rank has left.
fn recorded() -> Record {
    let mut world = World::with(config());
    world.switch(SWITCH, "s", 1);
    let hosts = world.ready(1, "g", 3).0;
    let first = parse(&records(&mut world));
    assert_eq!(first[0].departed, []);
    assert_eq!(first[0].placement.as_ref().unwrap().nodes.len(), 1);
    world.say(hosts[2], ToController::Leave { collectives: 4 });
    let second = parse(&records(&mut world));
    let address = hello("g", 3, 2).address;
    let departed = vec![Departed { rank: 2, address, collectives: 4 }];
    assert_eq!(second, [Record { departed, ..first[0].clone() }]);
    // When it is over, nothing is to be kept.
    for host in &hosts[..2] {
        world.say(*host, ToController::Leave { collectives: 4 });
    }
    let key = Record::key(second[0].identity);
    assert_eq!(records(&mut world), BTreeMap::from([(key, None)]));
    second.into_iter().next().unwrap()
}

#[test]
fn a_new_leader_knows_who_had_left_and_where_it_is() {
    let record = recorded();
    let mut world = World::with(config());
    world.controller.lead(Instant::ZERO, 20, vec![record.clone()]);
    let hosts = [0, 1].map(|rank| back(&mut world, rank.into(), &record, rank));
    for host in hosts {
        let left = FromController::Left { rank: 2, collectives: 4 };
        assert_eq!(world.heard(host), [FromController::Resumed, left]);
    }
    assert_eq!(world.controller.term(), 20);
    let placement = record.placement.clone().unwrap();
    let communicator = placement.communicator;
    let placed = PlacementChange::Ready(placement);
    assert_eq!(world.controller.poll_placement(), Some(placed));
    // The name is free for the next run, and nobody is taken for lost.
    world.pass(seconds(60.0));
    assert!(hosts.iter().all(|&host| world.heard(host).is_empty()));
    assert_eq!(world.controller.group_state("g"), None);
    world.say(hosts[0], ToController::Leave { collectives: 5 });
    let again = parse(&records(&mut world));
    assert_eq!((again[0].departed.len(), &again[0].placement), (2, &record.placement));
    world.say(hosts[1], ToController::Leave { collectives: 5 });
    assert_eq!(world.controller.poll_placement(), Some(PlacementChange::Over { communicator }));
    assert_eq!(records(&mut world), BTreeMap::from([(Record::key(record.identity), None)]));
    world.assert_quiet();
}

/// It has ended the node meanwhile, so it does not name it.
#[test]
fn what_a_switch_says_of_a_root_that_it_had_counts_where_it_may_have_had_it() {
    let record = recorded();
    for (name, address, other_node, counts) in [
        ("s", 1, false, true),
        ("t", 1, false, false),
        ("s", 2, false, false),
        ("t", 2, false, false),
        // It has a part in the group, as it knows its identity.
        ("t", 2, true, true),
    ] {
        let mut world = World::with(config());
        world.controller.lead(Instant::ZERO, 20, vec![record.clone()]);
        let host = back(&mut world, 1, &record, 0);
        world.heard(host);
        let presence = Presence { held: other_node.into(), ..Presence::default() };
        world.switch_with(SWITCH, name, address, presence);
        if other_node {
            let (group, communicator) = (record.identity, record.communicator + 1);
            let node = HeldNode { group, communicator, children: 1, below: Vec::new(), tree: 1 };
            world.say(SWITCH, ToController::Held { nodes: vec![node] });
        }
        let report = SwitchReport::PeerLost { rank: 1, detail: "silent".to_owned(), switch: None };
        let communicator = record.communicator;
        world.say(SWITCH, ToController::Report { communicator, report });
        let is_over = matches!(world.heard(host)[..], [FromController::Abort { .. }]);
        assert_eq!(is_over, counts, "{name} {address} {other_node}");
    }
}

#[test]
fn what_nobody_claims_is_taken_out_of_the_store_in_time() {
    let record = recorded();
    let mut world = World::with(config());
    world.controller.lead(Instant::ZERO, 20, vec![record.clone()]);
    world.pass(seconds(9.9));
    assert_eq!(records(&mut world), BTreeMap::new());
    world.pass(seconds(0.1));
    assert_eq!(records(&mut world), BTreeMap::from([(Record::key(record.identity), None)]));
    // Who comes then is served all the same, and recorded anew.
    let host = back(&mut world, 1, &record, 0);
    assert_eq!(world.heard(host), [FromController::Resumed]);
    let again = parse(&records(&mut world));
    assert_eq!((again[0].identity, &again[0].placement), (record.identity, &None));
}

#[test]
fn records_that_make_no_sense_are_errors_or_change_nothing() {
    let record = recorded();
    let text = serde_json::to_string(&record).unwrap();
    let key = Record::key(record.identity);
    assert_eq!(Record::parse(&key, &text), Ok(record.clone()));
    for (key, text, what) in [
        ("x", text.as_str(), "another group"),
        (&key, &text[1..], "record"),
        (&key, &" ".repeat(MAX_RECORD_BYTES + 1), "too long"),
    ] {
        let error = Record::parse(key, text).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    // Of a rank that there is not, and of all that there are.
    let departed = |rank| Departed { rank, ..record.departed[0].clone() };
    for departed in [vec![departed(9)], (0..3).map(departed).collect()] {
        let mut world = World::with(config());
        world.controller.lead(Instant::ZERO, 20, vec![Record { departed, ..record.clone() }]);
        let hosts = [0, 1, 2].map(|rank| back(&mut world, rank.into(), &record, rank));
        for host in hosts {
            assert_eq!(world.heard(host), [FromController::Resumed]);
        }
        assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
    }
}

#[test]
fn a_controller_that_does_not_lead_says_who_does() {
    let mut world = World::new();
    let leader: SocketAddr = "10.0.0.9:52200".parse().unwrap();
    let standby = StandBy { leader: Some(leader), trouble: None };
    world.controller.stand_by(standby);
    let a = world.join(1, "g", 1, 0);
    let detail = "the one at 10.0.0.9:52200 does".to_owned();
    assert_eq!(world.refusal(a), Refusal::NotLeader { leader: Some(leader), detail });
    let trouble = Some("etcd://a:1: down".to_owned());
    world.controller.stand_by(StandBy { leader: None, trouble });
    let b = world.join(2, "g", 1, 0);
    assert!(world.refusal(b).to_string().contains("etcd://a:1: down"));
    let c = back(&mut world, 3, &recorded(), 0);
    assert!(matches!(world.refusal(c), Refusal::NotLeader { .. }));
    assert_eq!(world.controller.census(), Census::default());
    assert!(!world.controller.overview().leadership.leads);
    world.controller.lead(world.now, 3, Vec::new());
    world.switch(SWITCH, "s", 1);
    world.ready(10, "g", 2);
}

#[test]
fn who_is_known_hears_where_all_controllers_are() {
    let mut world = World::new();
    let controllers: Vec<SocketAddr> =
        ["10.0.0.1:1", "10.0.0.2:1"].map(|it| it.parse().unwrap()).into();
    let told = FromController::Controllers { controllers: controllers.clone() };
    world.controller.set_controllers(&controllers);
    world.switch(SWITCH, "s", 1);
    assert_eq!(world.heard(SWITCH), [FromController::Registered, told.clone()]);
    let host = back(&mut world, 1, &recorded(), 0);
    assert_eq!(world.heard(host), [FromController::Resumed, told]);
}

#[test]
fn who_is_connected_hears_of_a_controller_that_is_started_later() {
    let mut world = World::new();
    let at = |ports: &[u16]| -> Vec<SocketAddr> {
        ports.iter().map(|&port| SocketAddr::from(([10, 0, 0, 1], port))).collect()
    };
    world.controller.set_controllers(&at(&[1]));
    world.switch(SWITCH, "s", 1);
    let (ready, _) = world.ready(10, "g", 2);
    let forming = world.join(20, "h", 2, 0);
    let stranger = ConnectionId(30);
    world.connect(stranger);
    let naming = ConnectionId(31);
    world.switch_with(naming, "t", 2, Presence { held: 1, ..Presence::default() });
    world.heard(SWITCH);
    for (ports, is_new) in [(&[1, 2][..], true), (&[1, 2], false), (&[2], true), (&[], false)] {
        world.controller.set_controllers(&at(ports));
        world.settle();
        let told = FromController::Controllers { controllers: at(ports) };
        for known in [SWITCH, ready[0], ready[1]] {
            assert_eq!(world.heard(known), if is_new { vec![told.clone()] } else { vec![] });
        }
        for other in [forming, stranger, naming] {
            assert_eq!(world.heard(other), []);
        }
    }
    // It commands nobody any more.
    world.controller.stand_by(StandBy::default());
    world.controller.set_controllers(&at(&[3, 4]));
    world.settle();
    assert_eq!(world.heard(SWITCH), []);
}

#[test]
fn a_record_is_found_by_both_halves_of_its_group() {
    let key = crate::controller::record::Record::key([1, 0xabc]);
    assert_eq!(key, "00000000000000010000000000000abc");
}
