//! Groups whose hosts take the place of switches. The test plays the hosts.

use std::collections::BTreeSet;

use millstream_wire::{Mtu, Psn, Qpn};

use super::world::{World, hello, seconds};
use super::*;
use crate::CommunicatorOptions;
use crate::protocol::{
    Failover, FallbackOffer, Hello, HostQueuePair, HostsTrees, LostSwitch, MAX_AVOIDED,
    MAX_TEXT_BYTES, MeetingPoint, Plan, Presence, Resume, SECRET_BYTES, Secret, SwitchEdge,
    SwitchUplink,
};
use crate::stripe::MAX_TREES;

fn able(world: u32, rank: u32) -> Hello {
    Hello { fallback: FallbackOffer::Able, ..hello("g", world, rank) }
}

fn join(world: &mut World, hello: Hello) -> ConnectionId {
    let connection = ConnectionId(100 + u64::from(hello.rank));
    world.connect(connection);
    world.say(connection, ToController::Join(hello));
    connection
}

/// Hosts that do what they are told, and what they were told in the end.
struct Hosts {
    all: Vec<ConnectionId>,
    trees: BTreeMap<ConnectionId, HostsTrees>,
    plans: BTreeMap<ConnectionId, Plan>,
    /// The node that each request was for, and who was asked.
    nodes: Vec<(ConnectionId, u64)>,
    next_qpn: u32,
}

impl Hosts {
    fn new(all: Vec<ConnectionId>) -> Self {
        let (trees, plans, nodes) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Self { all, trees, plans, nodes, next_qpn: 100 }
    }

    fn pair(&mut self) -> (Qpn, Psn) {
        self.next_qpn += 1;
        (Qpn::new(self.next_qpn), Psn::new(self.next_qpn))
    }

    fn run(&mut self, world: &mut World) {
        loop {
            let told: Vec<_> = self
                .all
                .clone()
                .into_iter()
                .flat_map(|host| world.heard(host).into_iter().map(move |it| (host, it)))
                .collect();
            if told.is_empty() {
                return;
            }
            for (host, message) in told {
                self.act(world, host, message);
            }
        }
    }

    fn act(&mut self, world: &mut World, host: ConnectionId, message: FromController) {
        let answer = match message {
            FromController::GroupReady { more_switches, hosts, .. } => {
                self.trees.extend(hosts.map(|hosts| (host, hosts)));
                let (qpn, psn) = self.pair();
                let mut another = |_: &IpAddr| {
                    let (qpn, psn) = self.pair();
                    HostQueuePair { qpn, psn, receive_share: None }
                };
                let more = more_switches.iter().map(&mut another).collect();
                ToController::Connect { qpn, psn, path_mtu: Mtu::B1024, more, receive_share: None }
            }
            FromController::CreateCommunicator { communicator, children, has_parent, .. } => {
                assert!(self.trees[&host].serves, "{host:?} runs no switch");
                self.nodes.push((host, communicator));
                let mut edge = |child: &SwitchChild| {
                    let (rank, (qpn, psn)) = (child.ranks.first().unwrap(), self.pair());
                    SwitchEdge { rank, qpn, psn, receive_share: None }
                };
                let edges = children.iter().map(&mut edge).collect();
                let (qpn, psn) = self.pair();
                let uplink = has_parent.then_some(SwitchUplink { qpn, psn, receive_share: None });
                ToController::CommunicatorCreated { communicator, edges, uplink }
            }
            FromController::ConnectParent { communicator, .. } => {
                ToController::ParentConnected { communicator }
            }
            FromController::Plan(plan) => {
                self.plans.insert(host, plan);
                return;
            }
            message => panic!("{message:?}"),
        };
        world.say(host, answer);
    }
}

/// Not all groups that wait are planned at once.
#[test]
fn hosts_do_not_take_the_place_of_a_switch_that_has_come_just_before() {
    let mut world = World::new();
    let waiting: Vec<ConnectionId> = (100..140).map(ConnectionId).collect();
    for &connection in &waiting {
        let hello = Hello { group: format!("g{}", connection.0), ..able(1, 0) };
        world.connect(connection);
        world.say(connection, ToController::Join(hello));
    }
    world.pass(seconds(2.999));
    world.switch(ConnectionId(1), "s", 1);
    world.pass(seconds(0.001));
    for host in waiting {
        let heard = world.heard(host);
        let [FromController::GroupReady { hosts, .. }] = &heard[..] else { panic!("{heard:?}") };
        assert_eq!(*hosts, None, "{host:?}");
    }
}

/// A group that is ready, on its hosts.
fn ready(world: &mut World, ranks: u32) -> Hosts {
    let mut hosts = Hosts::new((0..ranks).map(|rank| join(world, able(ranks, rank))).collect());
    world.pass(seconds(3.0));
    hosts.run(world);
    assert_eq!(world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
    assert_eq!(hosts.plans.len(), ranks as usize);
    hosts
}

#[test]
fn without_a_switch_each_host_is_the_root_of_a_tree() {
    for ranks in [1, 2, 3, 8, 20] {
        let mut world = World::new();
        let hosts = ready(&mut world, ranks);
        let trees = MAX_TREES.min(ranks as usize);
        assert_eq!(hosts.nodes.len(), trees, "all trees have one node");
        let roots: BTreeSet<ConnectionId> = hosts.nodes.iter().map(|(host, _)| *host).collect();
        assert_eq!(roots.len(), trees);
        for (host, told) in &hosts.trees {
            assert_eq!((told.serves, told.addresses), (roots.contains(host), 1));
            assert_eq!(told.reason, "no switch has registered at the controller");
        }
        let plan = &hosts.plans[&hosts.all[0]];
        assert_eq!((plan.more.len() + 1, &*plan.switch), (trees, "rank 0"));
        assert_eq!(plan.address, hello("g", ranks, 0).address);
        // They are no switches for anybody else.
        let overview = world.controller.overview();
        assert_eq!((overview.switches.len(), world.controller.census().switches), (0, 0));
        let known = overview.groups[0].fallback.as_deref();
        assert_eq!(known, Some("no switch has registered at the controller"));
        for &host in &hosts.all {
            world.say(host, ToController::Leave { collectives: 3 });
        }
        world.assert_quiet();
        assert!(world.controller.switches.is_empty());
    }
}

#[test]
fn more_hosts_than_a_node_has_children_make_deeper_trees() {
    let fan_in = FanIn::new(2).unwrap();
    let mut world = World::with(ControllerConfig { fan_in, ..ControllerConfig::new(7) });
    let hosts = ready(&mut world, 5);
    // Five trees, of three leaves and two nodes above, and one above these.
    assert_eq!(hosts.nodes.len(), 5 * 6);
    let of = |host: &ConnectionId| hosts.nodes.iter().filter(|(at, _)| at == host).count();
    assert!(hosts.all.iter().all(|host| of(host) == 6), "each has as many");
}

#[test]
fn ranks_of_one_address_have_roots_after_those_of_others() {
    let mut world = World::new();
    let address = |rank: u32| IpAddr::from([127, 0, 0, 1 + rank as u8 / 6]);
    let join = |rank| join(&mut world, Hello { address: address(rank), ..able(12, rank) });
    let mut hosts = Hosts::new((0..12).map(join).collect());
    world.pass(seconds(3.0));
    hosts.run(&mut world);
    let mut roots: Vec<u64> = hosts.nodes.iter().map(|(host, _)| host.0 - 100).collect();
    roots.sort_unstable();
    assert_eq!(roots, [0, 1, 2, 3, 6, 7, 8, 9]);
}

#[test]
fn trees_use_the_addresses_that_all_hosts_have() {
    let mut world = World::new();
    let join = |rank: u32| {
        let more_addresses = vec![IpAddr::from([127, 1, 0, rank as u8]); 1 + rank as usize];
        join(&mut world, Hello { more_addresses, ..able(3, rank) })
    };
    let mut hosts = Hosts::new((0..3).map(join).collect());
    world.pass(seconds(3.0));
    hosts.run(&mut world);
    assert!(hosts.trees.values().all(|trees| trees.addresses == 2));
    let group = world.controller.groups.values().next().unwrap();
    let of = |tree| group.address_of(&group.members[&2], tree);
    let second = IpAddr::from([127, 1, 0, 2]);
    assert_eq!([of(0), of(1), of(2)], [Some(hello("g", 3, 2).address), Some(second), of(0)]);
}

#[test]
fn a_switch_that_comes_in_time_serves() {
    let mut world = World::new();
    let hosts = [0, 1].map(|rank| join(&mut world, able(2, rank)));
    world.pass(seconds(2.9));
    world.switch(SWITCH, "s", 1);
    for host in hosts {
        let heard = world.heard(host);
        assert!(matches!(heard[..], [FromController::GroupReady { hosts: None, .. }]), "{heard:?}");
    }
    world.pass(seconds(20.0));
    assert_eq!(world.heard(hosts[0]), []);
}

#[test]
fn who_waits_less_than_twice_the_patience_waits_half_of_it_for_a_switch() {
    let mut world = World::new();
    let host = join(&mut world, Hello { timeout_ms: 1000, ..able(1, 0) });
    world.pass(seconds(0.4));
    assert_eq!(world.heard(host), []);
    world.pass(seconds(0.1));
    assert!(matches!(world.heard(host)[..], [FromController::GroupReady { hosts: Some(_), .. }]));
}

#[test]
fn a_controller_that_stood_still_reads_first_whether_there_is_a_switch() {
    let mut world = World::new();
    let host = join(&mut world, able(1, 0));
    assert!(world.controller.poll_timeout().is_some());
    world.now = world.now + seconds(10.0);
    world.controller.handle_timeout(world.now);
    world.settle();
    assert_eq!(world.heard(host), []);
    world.switch(SWITCH, "s", 1);
    assert!(matches!(world.heard(host)[..], [FromController::GroupReady { hosts: None, .. }]));
}

#[test]
fn one_host_that_does_not_want_it_decides_and_one_that_cannot_says_why() {
    let reason = "its device is an adapter".to_owned();
    for (offer, expected) in [
        (FallbackOffer::Off, None),
        (FallbackOffer::Unable { reason }, Some("rank 1: its device is an adapter".to_owned())),
    ] {
        let mut world = World::new();
        let a = join(&mut world, able(2, 0));
        let b = join(&mut world, Hello { fallback: offer, ..able(2, 1) });
        world.pass(seconds(29.9));
        assert_eq!(world.heard(a), []);
        world.pass(seconds(0.1));
        for host in [a, b] {
            let hosts = expected.clone();
            assert_eq!(world.refusal(host), Refusal::NoSwitch { group: "g".to_owned(), hosts });
        }
        world.assert_quiet();
    }
    let mut world = World::new();
    let reason = "x".repeat(MAX_TEXT_BYTES + 1);
    let host = join(&mut world, Hello { fallback: FallbackOffer::Unable { reason }, ..able(2, 1) });
    assert!(matches!(world.refusal(host), Refusal::Protocol { .. }));
}

#[test]
fn when_the_only_switch_refuses_its_hosts_take_its_place() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let all: Vec<ConnectionId> = (0..2).map(|rank| join(&mut world, able(2, rank))).collect();
    let mut hosts = Hosts::new(all);
    hosts.run(&mut world);
    assert!(hosts.trees.is_empty());
    let heard = world.heard(SWITCH);
    let Some(&FromController::CreateCommunicator { communicator, .. }) = heard.last() else {
        panic!("{heard:?}")
    };
    let reason = "no memory".to_owned();
    world.say(SWITCH, ToController::CommunicatorFailed { communicator, reason, path_mtu: None });
    hosts.run(&mut world);
    assert_eq!(hosts.plans.len(), 2);
    let reason = &hosts.trees[&hosts.all[0]].reason;
    assert_eq!(reason, "switch \"s\" could not make the communicator: no memory");
}

#[test]
fn another_host_takes_the_place_of_one_that_makes_no_node() {
    let mut world = World::new();
    let all: Vec<ConnectionId> = (0..3).map(|rank| join(&mut world, able(3, rank))).collect();
    world.pass(seconds(3.0));
    let mut hosts = Hosts::new(all.clone());
    for &host in &all {
        let heard = world.heard(host);
        heard.into_iter().for_each(|message| hosts.act(&mut world, host, message));
    }
    let heard = world.heard(all[1]);
    let &[FromController::CreateCommunicator { communicator, .. }] = &heard[..] else {
        panic!("{heard:?}")
    };
    let reason = "out of memory".to_owned();
    world.say(all[1], ToController::CommunicatorFailed { communicator, reason, path_mtu: None });
    // The others destroy what they were asked for.
    for &host in &all {
        for message in world.heard(host) {
            if !matches!(message, FromController::DestroyCommunicator { .. })
                && !matches!(message, FromController::CreateCommunicator { .. })
            {
                hosts.act(&mut world, host, message);
            }
        }
    }
    hosts.run(&mut world);
    assert_eq!(hosts.plans.len(), 3);
    assert!(hosts.nodes.iter().all(|(host, _)| *host != all[1]));
    assert!(!hosts.trees[&all[1]].serves);
}

#[test]
fn what_a_hosts_switch_reports_ends_the_group_and_names_the_rank() {
    let mut world = World::new();
    let hosts = ready(&mut world, 3);
    let (host, communicator) = hosts.nodes[0];
    let report = SwitchReport::PeerLost { rank: 2, detail: "silent".to_owned(), switch: None };
    world.say(host, ToController::Report { communicator, report });
    for &host in &hosts.all {
        let heard = world.heard(host);
        let Some(FromController::Abort { reason }) = heard.last() else { panic!("{heard:?}") };
        assert!(matches!(reason, AbortReason::PeerLost { rank: 2, .. }), "{reason:?}");
    }
    world.assert_quiet();
    assert!(world.controller.switches.is_empty());
}

#[test]
fn a_host_whose_switch_is_silent_is_lost_as_a_rank() {
    let mut world = World::new();
    let hosts = ready(&mut world, 3);
    let (of_tree_1, _) = hosts.nodes[1];
    let rank = (of_tree_1.0 - 100) as u32;
    let detail = "it does not answer".to_owned();
    world.say(
        hosts.all[0],
        ToController::SwitchLost { detail, tree: 1, switch: None, further_up: false },
    );
    let heard = world.heard(hosts.all[0]);
    let Some(FromController::Abort { reason: AbortReason::PeerLost { rank: named, .. } }) =
        heard.last()
    else {
        panic!("{heard:?}")
    };
    assert_eq!(*named, rank);
}

#[test]
fn hosts_come_back_and_are_asked_at_their_new_connections() {
    let mut world = World::new();
    let hosts = ready(&mut world, 2);
    let Plan { communicator, group, .. } = hosts.plans[&hosts.all[1]].clone();
    world.close(hosts.all[1]);
    let resume = Resume {
        term: world.controller.term(),
        group: "g".to_owned(),
        identity: group,
        communicator,
        world: 2,
        rank: 1,
        address: hello("g", 2, 1).address,
        departed: false,
        more_addresses: Vec::new(),
    };
    let new = ConnectionId(7);
    world.connect(new);
    world.say(new, ToController::Resume(resume.clone()));
    assert_eq!(world.heard(new), [FromController::Resumed]);
    for host in [new, hosts.all[0]] {
        world.say(host, ToController::Leave { collectives: 1 });
    }
    let destroyed =
        |message: &FromController| matches!(message, FromController::DestroyCommunicator { .. });
    assert!(world.heard(new).iter().any(destroyed));
    world.assert_quiet();
    // To a controller that was restarted, what its switch says is nothing.
    let mut world = World::new();
    world.connect(new);
    let again = resume.clone();
    world.say(new, ToController::Resume(resume));
    let report = SwitchReport::PeerLost { rank: 0, detail: "silent".to_owned(), switch: None };
    world.say(new, ToController::Report { communicator, report });
    world.say(new, ToController::CommunicatorDestroyed { communicator });
    assert_eq!(world.heard(new), [FromController::Resumed]);
    // There, the host that is away is lost, and not the one that cannot reach that any more.
    let mut world = World::new();
    let [stays, goes] = [8, 9].map(ConnectionId);
    for (rank, host) in [stays, goes].into_iter().enumerate() {
        let rank = rank as u32;
        let address = hello("g", 2, rank).address;
        world.connect(host);
        world.say(host, ToController::Resume(Resume { rank, address, ..again.clone() }));
    }
    world.close(goes);
    world.say(
        stays,
        ToController::SwitchLost {
            detail: "silent".to_owned(),
            tree: 0,
            switch: None,
            further_up: false,
        },
    );
    let heard = world.heard(stays);
    let lost = |message: &FromController| format!("{message:?}").contains("PeerLost { rank: 1");
    assert!(heard.iter().any(lost), "{heard:?}");
    // As a switch, others may not speak.
    let mut world = World::new();
    let host = join(&mut world, able(2, 0));
    world.say(host, ToController::ParentConnected { communicator });
    assert!(matches!(world.refusal(host), Refusal::Protocol { .. }));
}

/// The plans of a group of two that a switch serves.
fn plans_of(hellos: [Hello; 2]) -> [Plan; 2] {
    const SWITCH: ConnectionId = ConnectionId(1);
    let mut world = World::new();
    world.switch_with(SWITCH, "s", 9, Presence { incarnation: 77, ..Presence::default() });
    let hosts = hellos.map(|hello| join(&mut world, hello));
    for host in hosts {
        let (qpn, psn, path_mtu) = (Qpn::new(5), Psn::new(6), Mtu::B1024);
        world.say(
            host,
            ToController::Connect { qpn, psn, path_mtu, more: Vec::new(), receive_share: None },
        );
        world.heard(host);
    }
    let asked = world.heard(SWITCH);
    let Some(&FromController::CreateCommunicator { communicator, .. }) = asked.last() else {
        panic!("{asked:?}")
    };
    let edge =
        |rank| SwitchEdge { rank, qpn: Qpn::new(7 + rank), psn: Psn::new(8), receive_share: None };
    let edges = vec![edge(0), edge(1)];
    world.say(SWITCH, ToController::CommunicatorCreated { communicator, edges, uplink: None });
    hosts.map(|host| match &world.heard(host)[..] {
        [FromController::Plan(plan)] => plan.clone(),
        heard => panic!("{heard:?}"),
    })
}

#[test]
fn ranks_hear_whether_they_go_on_when_a_switch_is_lost() {
    let options = CommunicatorOptions { reproducible: true, plain: false };
    let exact = |rank| Hello { options, ..able(2, rank) };
    let unable = FallbackOffer::Unable { reason: "an adapter".to_owned() };
    for (second, failover) in [
        (able(2, 1), Failover::On),
        // Another switch may serve.
        (Hello { fallback: unable, ..able(2, 1) }, Failover::On),
        (Hello { fallback: FallbackOffer::Off, ..able(2, 1) }, Failover::Off),
        (exact(1), Failover::Reproducible),
        (Hello { fallback: FallbackOffer::Off, ..exact(1) }, Failover::Off),
    ] {
        let plans = plans_of([able(2, 0), second.clone()]);
        assert_eq!(plans.map(|plan| plan.failover), [failover; 2], "{second:?}");
    }
    let mut world = World::new();
    let hosts = ready(&mut world, 2);
    assert!(hosts.plans.values().all(|plan| plan.failover == Failover::Off));
}

fn point(last: u8) -> Box<MeetingPoint> {
    let (address, secret) = (([10, 0, 0, last], 4000).into(), Secret([last; SECRET_BYTES]));
    Box::new(MeetingPoint { address, secret })
}

#[test]
fn ranks_hear_where_rank_0_takes_the_place_of_the_controller_if_all_can_go_on_there() {
    let first = Hello { meeting: Some(point(1)), ..able(2, 0) };
    // What others say of themselves is nothing.
    let second = Hello { meeting: Some(point(2)), ..able(2, 1) };
    let plans = plans_of([first.clone(), second.clone()]);
    assert!(plans.iter().all(|plan| plan.meeting == Some(point(1))), "{plans:?}");
    assert!(plans.iter().all(|plan| plan.incarnation == 77), "{plans:?}");
    let unable = FallbackOffer::Unable { reason: "an adapter".to_owned() };
    let options = CommunicatorOptions { reproducible: true, plain: false };
    for hellos in [
        [able(2, 0), second.clone()],
        [first.clone(), Hello { fallback: unable, ..able(2, 1) }],
        [first.clone(), Hello { fallback: FallbackOffer::Off, ..able(2, 1) }],
        [first, Hello { options, ..able(2, 1) }],
    ] {
        let plans = plans_of(hellos);
        assert!(plans.iter().all(|plan| plan.meeting.is_none()), "{plans:?}");
    }
}

/// Where the first rank of a group of one that avoids this is sent, when these switches are there.
fn planned(avoid: &[LostSwitch], switches: &[u8]) -> (World, ConnectionId, Option<IpAddr>) {
    let mut world = World::new();
    for &number in switches {
        let presence = Presence { incarnation: 70 + u64::from(number), ..Presence::default() };
        let connection = ConnectionId(number.into());
        world.switch_with(connection, &format!("s{number}"), number, presence);
    }
    let host = join(&mut world, Hello { avoid: avoid.to_vec(), ..able(1, 0) });
    let heard = world.heard(host);
    let address = match &heard[..] {
        [FromController::GroupReady { switch_address, .. }] => Some(*switch_address),
        [] => None,
        heard => panic!("{heard:?}"),
    };
    (world, host, address)
}

#[test]
fn a_switch_that_the_ranks_have_lost_does_not_serve_them_again() {
    let address = |number: u8| IpAddr::from([127, 0, 1, number]);
    let lost = |number: u8, incarnation| LostSwitch { address: address(number), incarnation };
    for (avoid, expected) in [
        (vec![], address(1)),
        (vec![lost(1, Some(71))], address(2)),
        (vec![lost(1, None)], address(2)),
        // Another process is there.
        (vec![lost(1, Some(5))], address(1)),
        (vec![lost(3, None), lost(2, None)], address(1)),
    ] {
        assert_eq!(planned(&avoid, &[1, 2]).2, Some(expected), "{avoid:?}");
    }
    let both = [lost(1, Some(71)), lost(2, None)];
    let (mut world, host, address) = planned(&both, &[1, 2]);
    assert_eq!(address, None);
    world.pass(seconds(3.0));
    let heard = world.heard(host);
    let [FromController::GroupReady { hosts: Some(HostsTrees { reason, .. }), .. }] = &heard[..]
    else {
        panic!("{heard:?}")
    };
    assert_eq!(reason, "its ranks have lost the switches that have registered");
    // It leaves with the rank that has said it.
    let mut world = World::new();
    world.switch(ConnectionId(1), "s1", 1);
    let first = join(&mut world, Hello { avoid: vec![lost(1, Some(0))], ..able(3, 0) });
    join(&mut world, able(3, 1));
    world.close(first);
    let last = join(&mut world, able(3, 2));
    let again = ConnectionId(200);
    world.connect(again);
    world.say(again, ToController::Join(able(3, 0)));
    assert!(matches!(world.heard(last)[..], [FromController::GroupReady { hosts: None, .. }]));
    // What one rank says counts for all, and not without end.
    let mut world = World::new();
    world.switch(ConnectionId(1), "s1", 1);
    join(&mut world, able(2, 0));
    let second = join(&mut world, Hello { avoid: vec![lost(1, Some(0))], ..able(2, 1) });
    assert_eq!(world.heard(second), []);
    let avoid = vec![lost(1, None); MAX_AVOIDED + 1];
    let third = join(&mut world, Hello { avoid, ..hello("other", 3, 2) });
    assert!(matches!(world.refusal(third), Refusal::Protocol { .. }));
}

#[test]
fn a_controller_of_hosts_only_waits_for_no_switch_and_takes_none() {
    let reason = "no controller can be reached".to_owned();
    let mut world = World::with(ControllerConfig {
        hosts_only: Some(reason.clone()),
        ..ControllerConfig::new(7)
    });
    let switch = ConnectionId(1);
    world.switch(switch, "s", 9);
    assert!(matches!(world.refusal(switch), Refusal::Protocol { .. }));
    let all: Vec<ConnectionId> = (0..3).map(|rank| join(&mut world, able(3, rank))).collect();
    let mut hosts = Hosts::new(all);
    hosts.run(&mut world);
    assert_eq!(hosts.plans.len(), 3);
    assert!(hosts.trees.values().all(|trees| trees.reason == reason));
}
