//! Groups over trees of switches, which the test plays.

use millstream_wire::{Mtu, Psn, Qpn};

use super::world::{World, seconds, share_of};
use super::*;
use crate::protocol::{
    Plan, Presence, SwitchChild, SwitchEdge, SwitchLimits, SwitchReport, SwitchUplink,
};
use crate::ranks::Ranks;

/// What a switch does when it is asked for something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Answer {
    Done,
    Failed,
    /// A neighbour takes packets of so many bytes only.
    Shorter(Mtu),
    Silence,
    /// Its connection ends.
    Death,
}

/// A node that was made.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) switch: usize,
    world: u32,
    children: Vec<SwitchChild>,
    pub(super) edges: Vec<SwitchEdge>,
    pub(super) uplink: Option<SwitchUplink>,
    /// The node above has its queue pair, and it has that of the node above.
    connected: bool,
}

impl Made {
    fn ranks(&self) -> Ranks {
        self.children.iter().flat_map(|child| child.ranks.ranges().to_vec()).collect()
    }
}

/// A controller, switches and hosts.
pub(super) struct Lab {
    pub(super) world: World,
    switches: u8,
    pub(super) nodes: BTreeMap<u64, Made>,
    /// How many requests the switches have had.
    requests: usize,
    next_qpn: u32,
    dead: BTreeSet<usize>,
    refused: BTreeSet<u64>,
    path_mtus: BTreeMap<u64, Mtu>,
    /// Nodes that are no more, which others may still be told of.
    lost: Vec<Made>,
}

pub(super) fn connection(switch: usize) -> ConnectionId {
    ConnectionId(2000 + switch as u64)
}

pub(super) fn address(switch: usize) -> IpAddr {
    IpAddr::from([127, 0, 1, switch as u8])
}

impl Lab {
    pub(super) fn new(fan_in: u32, switches: u8) -> Self {
        let fan_in = FanIn::new(fan_in).unwrap();
        Self::with(ControllerConfig { fan_in, ..ControllerConfig::new(7) }, switches)
    }

    pub(super) fn with(config: ControllerConfig, switches: u8) -> Self {
        let mut world = World::with(config);
        for switch in 0..switches {
            let (connection, name) = (connection(switch.into()), format!("s{switch}"));
            world.switch(connection, &name, switch);
            assert_eq!(world.heard(connection), [FromController::Registered]);
        }
        Self {
            world,
            switches,
            nodes: BTreeMap::new(),
            requests: 0,
            next_qpn: 100_000,
            dead: BTreeSet::new(),
            refused: BTreeSet::new(),
            path_mtus: BTreeMap::new(),
            lost: Vec::new(),
        }
    }

    /// Ranks that have joined, and have connected where they were told.
    pub(super) fn join(&mut self, group: &str, first: u64, ranks: u32) -> Vec<ConnectionId> {
        let join = |rank: u32| self.world.join(first + u64::from(rank), group, ranks, rank);
        let hosts: Vec<ConnectionId> = (0..ranks).map(join).collect();
        hosts.iter().for_each(|&host| self.world.end(host));
        hosts
    }

    /// What the switches were told and have not acted on.
    fn told(&mut self) -> Vec<(usize, FromController)> {
        let switches = 0..usize::from(self.switches);
        let told = |switch| {
            let told = self.world.heard(connection(switch));
            told.into_iter().map(move |message| (switch, message))
        };
        switches.flat_map(told).collect()
    }

    pub(super) fn say(&mut self, switch: usize, message: ToController) {
        self.world.say(connection(switch), message);
    }

    fn next_qpn(&mut self) -> (Qpn, Psn) {
        self.next_qpn += 1;
        (Qpn::new(self.next_qpn), Psn::new(self.next_qpn * 3))
    }

    /// Has the switches do what they are told, until they are told no more. `answer` decides by the
    /// number of the request.
    pub(super) fn run(&mut self, answer: impl Fn(usize) -> Answer) {
        loop {
            let told = self.told();
            if told.is_empty() {
                return;
            }
            for (switch, message) in told {
                if !self.dead.contains(&switch) {
                    self.act(switch, message, &answer);
                }
            }
        }
    }

    fn act(&mut self, switch: usize, message: FromController, answer: impl Fn(usize) -> Answer) {
        let communicator = match message {
            FromController::CreateCommunicator { communicator, .. }
            | FromController::ConnectParent { communicator, .. } => communicator,
            FromController::DestroyCommunicator { communicator } => {
                // The controller may not know yet that it was refused.
                if self.refused.remove(&communicator) {
                    return;
                }
                let destroyed = self.nodes.remove(&communicator).unwrap();
                assert_eq!(destroyed.switch, switch);
                self.lost.push(destroyed);
                self.say(switch, ToController::CommunicatorDestroyed { communicator });
                return;
            }
            message => panic!("{message:?}"),
        };
        let number = self.requests;
        self.requests += 1;
        let answer = answer(number);
        match message {
            FromController::CreateCommunicator {
                children, world, has_parent, path_mtu, ..
            } => {
                self.create(switch, communicator, children, world, has_parent, answer);
                self.path_mtus.insert(communicator, path_mtu);
            }
            FromController::ConnectParent { address, qpn, psn, receive_share, .. } => {
                self.connect_parent(switch, communicator, address, (qpn, psn, receive_share));
            }
            _ => unreachable!("see above"),
        }
        match answer {
            Answer::Done if self.nodes[&communicator].connected => {
                self.say(switch, ToController::ParentConnected { communicator });
            }
            Answer::Done => {
                let Made { edges, uplink, .. } = &self.nodes[&communicator];
                let (edges, uplink) = (edges.clone(), *uplink);
                let created = ToController::CommunicatorCreated { communicator, edges, uplink };
                self.say(switch, created);
            }
            Answer::Failed => {
                self.lost.extend(self.nodes.remove(&communicator));
                self.refused.insert(communicator);
                let (reason, path_mtu) = ("out of memory".to_owned(), None);
                let failed = ToController::CommunicatorFailed { communicator, reason, path_mtu };
                self.say(switch, failed);
            }
            Answer::Shorter(mtu) => {
                self.lost.extend(self.nodes.remove(&communicator));
                self.refused.insert(communicator);
                let (reason, path_mtu) = ("packets are too long".to_owned(), Some(mtu));
                let failed = ToController::CommunicatorFailed { communicator, reason, path_mtu };
                self.say(switch, failed);
            }
            Answer::Silence => {}
            Answer::Death => self.kill(switch),
        }
    }

    fn kill(&mut self, switch: usize) {
        self.dead.insert(switch);
        self.lost.extend(
            self.nodes.extract_if(.., |_, made| made.switch == switch).map(|(_, made)| made),
        );
        self.world.close(connection(switch));
    }

    fn create(
        &mut self,
        switch: usize,
        communicator: u64,
        children: Vec<SwitchChild>,
        world: u32,
        has_parent: bool,
        answer: Answer,
    ) {
        for child in &children {
            // Below is a node that was made, by the queue pair that it has, or a host.
            let &SwitchChild { qpn, psn, receive_share, .. } = child;
            let uplink = Some(SwitchUplink { qpn, psn, receive_share });
            match self.nodes.values().chain(&self.lost).find(|made| made.uplink == uplink) {
                Some(below) => {
                    assert!(child.is_switch);
                    assert_eq!(
                        (child.address, &child.ranks),
                        (address(below.switch), &below.ranks())
                    );
                }
                None => {
                    assert_eq!((child.ranks.len(), child.is_switch), (1, false));
                    let rank = child.ranks.first().unwrap();
                    assert_eq!(child.address, IpAddr::from([127, 0, 0, rank as u8 + 1]));
                    assert_eq!(child.psn.value(), child.qpn.value() - 100);
                    assert_eq!(child.receive_share, share_of(child.qpn));
                }
            }
        }
        let mut edge = |child: &SwitchChild| {
            let (qpn, psn) = self.next_qpn();
            let rank = child.ranks.first().unwrap();
            SwitchEdge { rank, qpn, psn, receive_share: share_of(qpn) }
        };
        let mut edges: Vec<SwitchEdge> = children.iter().map(&mut edge).collect();
        // In whatever order.
        edges.reverse();
        let (qpn, psn) = self.next_qpn();
        let receive_share = share_of(qpn);
        let uplink = has_parent.then_some(SwitchUplink { qpn, psn, receive_share });
        let connected = false;
        let made = Made { switch, world, children, edges, uplink, connected };
        assert!(answer != Answer::Done || made.has_all(has_parent));
        assert!(self.nodes.insert(communicator, made).is_none());
    }

    fn connect_parent(
        &mut self,
        switch: usize,
        communicator: u64,
        parent: IpAddr,
        (qpn, psn, receive_share): (Qpn, Psn, Option<u32>),
    ) {
        let rank = self.nodes[&communicator].ranks().first().unwrap();
        let edge = SwitchEdge { rank, qpn, psn, receive_share };
        let mut known = self.nodes.values().chain(&self.lost);
        let above = known.find(|made| made.edges.contains(&edge)).unwrap();
        assert_eq!(address(above.switch), parent);
        let made = self.nodes.get_mut(&communicator).unwrap();
        assert_eq!((made.switch, made.connected), (switch, false));
        made.connected = true;
    }

    /// Makes a group that is ready, and returns its hosts, and the nodes of its tree.
    pub(super) fn ready(
        &mut self,
        group: &str,
        first: u64,
        ranks: u32,
    ) -> (Vec<ConnectionId>, Vec<u64>) {
        let before: Vec<u64> = self.nodes.keys().copied().collect();
        let hosts = self.join(group, first, ranks);
        self.run(|_| Answer::Done);
        assert_eq!(self.world.controller.group_state(group), Some(GroupState::CommunicatorReady));
        hosts.iter().for_each(|&host| drop(self.world.heard(host)));
        let nodes = self.nodes.keys().copied().filter(|node| !before.contains(node)).collect();
        (hosts, nodes)
    }

    /// No group, and no node of any tree, is left.
    pub(super) fn assert_quiet(&self) {
        self.world.assert_quiet();
        assert_eq!(self.nodes.len(), 0);
        assert_eq!(self.world.controller.census().communicators, 0);
        assert!(self.world.controller.nodes.is_empty());
    }
}

impl Made {
    /// Whether it is as a node of its place should be: only below the root are all ranks.
    fn has_all(&self, has_parent: bool) -> bool {
        (self.ranks().len() == u64::from(self.world)) != has_parent
    }
}

#[test]
fn trees_are_made_from_the_leaves_up_and_connected_downwards() {
    for (ranks, fan_in, switches, nodes) in
        [(1, 64, 1, 1), (8, 2, 1, 7), (8, 2, 3, 7), (8, 2, 20, 7), (7, 3, 2, 4), (65, 64, 3, 3)]
    {
        let mut lab = Lab::new(fan_in, switches);
        let hosts = lab.join("g", 1, ranks);
        assert_eq!(lab.world.controller.group_state("g"), Some(GroupState::CreatingCommunicator));
        lab.run(|_| Answer::Done);
        // Each node was made, and all but the root were connected.
        assert_eq!((lab.nodes.len(), lab.requests), (nodes, 2 * nodes - 1));
        assert!(lab.nodes.values().all(|made| made.connected == made.uplink.is_some()));
        assert!(lab.nodes.values().all(|made| made.world == ranks));
        let used: BTreeSet<usize> = lab.nodes.values().map(|made| made.switch).collect();
        assert_eq!(used.len(), nodes.min(switches.into()));
        for (rank, &host) in (0..).zip(&hosts) {
            let heard = lab.world.heard(host);
            let [FromController::GroupReady { switch_address, .. }, FromController::Plan(plan)] =
                &heard[..]
            else {
                panic!("{heard:?}");
            };
            let Plan { address, qpn, psn, receive_share, .. } = *plan;
            assert_eq!(*switch_address, address);
            let edge = SwitchEdge { rank, qpn, psn, receive_share };
            let leaf = lab.nodes.values().find(|made| made.edges.contains(&edge)).unwrap();
            assert!(leaf.children.iter().any(|child| child.ranks == Ranks::one(rank)));
            assert_eq!(
                (self::address(leaf.switch), format!("s{}", leaf.switch)),
                (address, plan.switch.clone())
            );
            assert!(lab.nodes[&plan.communicator].uplink.is_none(), "the root's number");
        }
        // All is destroyed when all have left.
        for &host in &hosts {
            lab.world.say(host, ToController::Leave { collectives: 1 });
        }
        lab.run(|_| Answer::Done);
        lab.assert_quiet();
    }
}

#[test]
fn a_tree_has_the_path_mtu_of_the_link_that_takes_the_shortest_packets() {
    let mut found = BTreeMap::new();
    // Whichever of seven nodes it is, when it is made or when it is connected, and then another one. Nodes that were
    // given up meanwhile say so in vain.
    for first in 0..13 {
        for second in [first + 1, first + 8, usize::MAX] {
            let mut lab = Lab::new(2, 3);
            let hosts = lab.join("g", 1, 8);
            lab.run(|request| match request {
                _ if request == first => Answer::Shorter(Mtu::B2048),
                _ if request == second => Answer::Shorter(Mtu::B512),
                _ => Answer::Done,
            });
            assert_eq!(lab.nodes.len(), 7, "{first} {second}");
            let wanted = *lab.path_mtus.last_key_value().unwrap().1;
            *found.entry((second == usize::MAX, wanted)).or_insert(0) += 1;
            for communicator in lab.nodes.keys() {
                assert_eq!(lab.path_mtus[communicator], wanted, "{first} {second}");
            }
            for &host in &hosts {
                let heard = lab.world.heard(host);
                // Its end is the same.
                let [FromController::GroupReady { .. }, FromController::Plan(plan)] = &heard[..]
                else {
                    panic!("{heard:?}");
                };
                assert_eq!(plan.path_mtu, wanted);
            }
            hosts.iter().for_each(|&host| {
                lab.world.say(host, ToController::Leave { collectives: 1 });
            });
            lab.run(|_| Answer::Done);
            lab.assert_quiet();
        }
    }
    assert_eq!(found.get(&(true, Mtu::B2048)), Some(&13), "{found:?}");
    assert!(found.contains_key(&(false, Mtu::B512)), "{found:?}");
    assert!(!found.keys().any(|&(_, mtu)| mtu > Mtu::B2048), "{found:?}");
}

#[test]
fn a_switch_that_is_content_with_no_path_mtu_makes_nothing() {
    let mut lab = Lab::new(2, 1);
    let hosts = lab.join("g", 1, 2);
    // One that is no shorter than what was asked for is no reason to ask again.
    lab.run(|_| Answer::Shorter(Mtu::B1024));
    for host in hosts {
        let refusal = lab.world.refusal(host).to_string();
        assert!(refusal.contains("packets are too long"), "{refusal}");
    }
    assert_eq!(lab.requests, 2);
    lab.run(|_| Answer::Done);
    lab.assert_quiet();
}

#[test]
fn nobody_is_told_before_all_nodes_are_connected() {
    // Four leaves, two nodes above them and a root, and six connections.
    for number in 0..13 {
        let mut lab = Lab::new(2, 3);
        let hosts = lab.join("g", 1, 8);
        lab.run(|request| if request == number { Answer::Silence } else { Answer::Done });
        for host in hosts {
            assert!(matches!(lab.world.heard(host)[..], [FromController::GroupReady { .. }]));
        }
        let waited = lab.world.controller.group_state("g");
        assert_eq!(waited, Some(GroupState::CreatingCommunicator));
    }
}

#[test]
fn what_a_switch_cannot_do_ends_the_group_and_leaves_nothing() {
    for number in 0..13 {
        for wrong in [Answer::Silence, Answer::Death] {
            let mut lab = Lab::new(2, 3);
            let hosts = lab.join("g", 1, 8);
            let failing = std::cell::Cell::new(false);
            lab.run(|request| {
                failing.set(failing.get() || request == number);
                if request == number { wrong } else { Answer::Done }
            });
            assert!(failing.get());
            let reason = match wrong {
                Answer::Silence => {
                    lab.world.pass(seconds(30.0));
                    "could not make the communicator: it did not answer in time"
                }
                _ => "is lost: its control connection was closed",
            };
            lab.run(|_| Answer::Done);
            let told: Vec<String> =
                hosts.iter().map(|&host| lab.world.refusal(host).to_string()).collect();
            assert!(told[0].contains("switch \"s") && told[0].ends_with(reason), "{}", told[0]);
            assert!(told.iter().all(|text| *text == told[0]));
            lab.assert_quiet();
            // What is left serves the next.
            lab.ready("g", 100, 8);
        }
    }
}

#[test]
fn when_a_switch_refuses_the_others_serve_the_group() {
    // Whatever is refused first: the making of a node, or its connection.
    for number in 0..13 {
        let mut lab = Lab::new(2, 3);
        let hosts = lab.join("g", 1, 8);
        lab.run(|request| if request == number { Answer::Failed } else { Answer::Done });
        let ready = |message: &FromController| matches!(message, FromController::GroupReady { .. });
        for &host in &hosts {
            let heard = lab.world.heard(host);
            assert!(heard.len() == 2 && heard.iter().all(ready), "{heard:?}");
        }
        // Nothing is left of the first tree, and the ranks connect anew.
        assert!(lab.nodes.is_empty());
        let state = lab.world.controller.group_state("g");
        assert_eq!(state, Some(GroupState::GroupReady));
        hosts.iter().for_each(|&host| lab.world.end(host));
        lab.run(|_| Answer::Done);
        for host in hosts {
            let heard = lab.world.heard(host);
            assert!(matches!(heard[..], [FromController::Plan(_)]), "{heard:?}");
        }
        let used: BTreeSet<usize> = lab.nodes.values().map(|made| made.switch).collect();
        assert_eq!(used.len(), 2, "{used:?}");
        assert_eq!((lab.nodes.len(), lab.world.controller.census().communicators), (7, 7));
    }
}

#[test]
fn when_all_switches_refuse_the_group_ends_and_nothing_is_left() {
    let mut lab = Lab::new(2, 3);
    let hosts = lab.join("g", 1, 8);
    for _ in 0..3 {
        lab.run(|_| Answer::Failed);
        for &host in &hosts {
            if lab.world.controller.group_state("g").is_some() {
                lab.world.end(host);
            }
        }
    }
    for host in hosts {
        let text = lab.world.refusal(host).to_string();
        assert!(text.ends_with("could not make the communicator: out of memory"), "{text}");
    }
    assert!(lab.told().is_empty());
    lab.assert_quiet();
    // The next group asks all of them again.
    lab.ready("g", 100, 8);
}

#[test]
fn a_switch_is_asked_for_no_more_than_it_has_room_for() {
    let mut world = World::new();
    let limits = |communicators, memory_bytes, queue_pairs| SwitchLimits {
        communicators,
        memory_bytes,
        queue_pairs,
    };
    for (number, limits) in [
        (1, limits(1, 1 << 40, 4096)),
        (2, limits(9, 30 << 20, 4096)),
        (3, limits(9, 1 << 20, 4096)),
        (4, limits(9, 1 << 40, 68)),
    ] {
        let (connection, address) = (connection(number), address(number));
        world.connect(connection);
        let name = format!("s{number}");
        world.say(
            connection,
            ToController::Register { name, address, limits, presence: Presence::default() },
        );
    }
    // One fits the first, two the second; the third has memory for none, so that the fewest nodes decide whom
    // to ask. The fourth has queue pairs for a node with 64 children, and is asked for two, which have one each.
    let places: Vec<IpAddr> = (0..6)
        .map(|number: u64| {
            let host = world.join(100 + number, &format!("g{number}"), 1, 0);
            match world.heard(host)[..] {
                [FromController::GroupReady { switch_address, .. }] => switch_address,
                ref heard => panic!("{heard:?}"),
            }
        })
        .collect();
    assert_eq!(places, [1, 2, 4, 2, 4, 3].map(address));
}

#[test]
fn queue_pairs_that_do_not_fit_the_tree_are_refused() {
    for wrong in 0..4 {
        let mut lab = Lab::new(2, 1);
        let hosts = lab.join("g", 1, 4);
        let (switch, message) = lab.told().remove(0);
        let FromController::CreateCommunicator { communicator, children, .. } = message else {
            panic!("{message:?}");
        };
        let (qpn, psn) = lab.next_qpn();
        let mut uplink = Some(SwitchUplink { qpn, psn, receive_share: None });
        let edge = |child: &SwitchChild| SwitchEdge {
            rank: child.ranks.first().unwrap(),
            qpn,
            psn,
            receive_share: None,
        };
        let mut edges: Vec<SwitchEdge> = children.iter().map(edge).collect();
        match wrong {
            0 => uplink = None,
            1 => edges[1].rank = 3,
            2 => drop(edges.pop()),
            _ => edges.push(edges[0]),
        }
        lab.say(switch, ToController::CommunicatorCreated { communicator, edges, uplink });
        for host in hosts {
            assert_eq!(
                lab.world.refusal(host).to_string(),
                "switch \"s0\" could not make the communicator: it made the wrong queue pairs"
            );
        }
        // Both leaves, though the other has not answered.
        let destroyed = lab.told().into_iter().map(|(_, message)| message);
        assert!(
            destroyed.eq([communicator, communicator + 1]
                .map(|communicator| FromController::DestroyCommunicator { communicator }))
        );
    }
}

#[test]
fn answers_that_nobody_waits_for_change_nothing() {
    let mut lab = Lab::new(2, 2);
    let (hosts, nodes) = lab.ready("g", 1, 4);
    for &communicator in &nodes {
        let (switch, edges, uplink) = {
            let made = &lab.nodes[&communicator];
            (made.switch, made.edges.clone(), made.uplink)
        };
        lab.say(switch, ToController::ParentConnected { communicator });
        lab.say(
            switch,
            ToController::CommunicatorCreated { communicator, edges: Vec::new(), uplink: None },
        );
        // Another switch's.
        let report = SwitchReport::PeerLost { rank: 0, detail: String::new(), switch: None };
        lab.say(1 - switch, ToController::Report { communicator, report });
        lab.say(1 - switch, ToController::CommunicatorCreated { communicator, edges, uplink });
    }
    assert_eq!(lab.told(), []);
    assert!(hosts.iter().all(|&host| lab.world.heard(host).is_empty()));
    assert_eq!(lab.world.controller.group_state("g"), Some(GroupState::CommunicatorReady));
}

#[test]
fn a_switch_that_dies_ends_the_trees_that_it_is_part_of_and_no_others() {
    for dead in 0..3 {
        let mut lab = Lab::new(2, 3);
        // Three nodes on three switches, then one alone on each.
        let (wide, _) = lab.ready("wide", 1, 4);
        let narrow: Vec<_> =
            (0..3).map(|number| lab.ready(&format!("n{number}"), 100 + 10 * number, 2)).collect();
        lab.kill(dead);
        assert!(lab.world.heard(wide[0]).is_empty());
        let (name, address) = (format!("s{dead}"), address(dead));
        let presence = Presence { incarnation: 9, ..Presence::default() };
        let (again, limits) = (ConnectionId(3000), SwitchLimits::NONE);
        lab.world.connect(again);
        let register = ToController::Register { name: name.clone(), address, limits, presence };
        lab.world.say(again, register);
        let detail = "it was restarted".to_owned();
        let incarnation = Some(0);
        let reason = AbortReason::SwitchLost { name, address, detail, incarnation };
        let abort = [FromController::Abort { reason }];
        for host in wide {
            assert_eq!(lab.world.heard(host), abort);
        }
        lab.run(|_| Answer::Done);
        for (hosts, nodes) in narrow {
            let lives = lab.nodes.contains_key(&nodes[0]);
            for host in hosts {
                assert_eq!(lab.world.heard(host), if lives { &[][..] } else { &abort });
            }
        }
        assert_eq!((lab.nodes.len(), lab.world.controller.census().groups), (2, 2));
        assert_eq!(lab.world.controller.census().communicators, 2);
    }
}

#[test]
fn every_node_is_told_of_a_rank_that_dies_and_destroyed_in_time() {
    let mut lab = Lab::new(2, 3);
    let (hosts, nodes) = lab.ready("g", 1, 8);
    lab.world.lose(hosts[5]);
    let told = lab.told();
    assert_eq!(told.len(), 7);
    for (switch, message) in told {
        let FromController::AbortCommunicator { communicator, rank: 5 } = message else {
            panic!("{message:?}");
        };
        assert_eq!(lab.nodes[&communicator].switch, switch);
        // Three of them end by themselves, as they should.
        if communicator <= nodes[2] {
            lab.nodes.remove(&communicator);
            lab.say(switch, ToController::CommunicatorDestroyed { communicator });
        }
    }
    lab.world.pass(seconds(9.9));
    assert_eq!(lab.told(), []);
    lab.world.pass(seconds(0.1));
    lab.run(|_| Answer::Done);
    lab.assert_quiet();
    lab.world.pass(seconds(60.0));
    assert_eq!(lab.told(), []);
}

#[test]
fn what_a_node_reports_ends_the_whole_tree() {
    let detail = "as the switch says".to_owned();
    for (report, aborted) in [
        (SwitchReport::PeerLost { rank: 7, detail: detail.clone(), switch: None }, true),
        (SwitchReport::Mismatch { rank: 7, detail: detail.clone() }, false),
        (SwitchReport::Violation { rank: 7, detail: detail.clone() }, false),
        // It is the lowest below a switch, which is well.
        (SwitchReport::Overdue { rank: 4, detail: detail.clone() }, false),
    ] {
        // From the root, from between, and from a leaf.
        for reporter in [0, 2, 6] {
            let mut lab = Lab::new(2, 3);
            let (hosts, nodes) = lab.ready("g", 1, 8);
            let communicator = nodes[reporter];
            let switch = lab.nodes[&communicator].switch;
            lab.say(switch, ToController::Report { communicator, report: report.clone() });
            for host in hosts {
                let heard = lab.world.heard(host);
                let [FromController::Abort { reason }] = &heard[..] else { panic!("{heard:?}") };
                match reason {
                    AbortReason::PeerLost { rank: 7, detail: told }
                    | AbortReason::Mismatch { rank: 7, detail: told }
                    | AbortReason::Overdue { rank: 4, detail: told }
                    | AbortReason::Violation { rank: 7, detail: told } => {
                        assert_eq!(*told, detail);
                    }
                    reason => panic!("{reason:?}"),
                }
            }
            // The reporter knows. The others hear of it along the edges, or from the controller.
            let told = lab.told();
            let names = |message: &FromController| match *message {
                FromController::AbortCommunicator { communicator, rank: 7 } => communicator,
                ref message => panic!("{message:?}"),
            };
            let mut told: Vec<u64> = told.iter().map(|(_, message)| names(message)).collect();
            told.sort_unstable();
            let mut others = nodes.clone();
            others.retain(|&node| aborted && node != communicator);
            assert_eq!(told, others);
            lab.world.pass(seconds(10.0));
            lab.run(|_| Answer::Done);
            lab.assert_quiet();
        }
    }
}

#[test]
fn a_switch_that_does_not_answer_the_one_above_is_named() {
    let mut lab = Lab::new(2, 3);
    let (hosts, nodes) = lab.ready("g", 1, 8);
    // The root's second child, below which 4 is the lowest rank; and the same rank from its leaf.
    for (reporter, below) in [(0, Some(2)), (5, None)] {
        let (hosts, nodes) = match below {
            Some(_) => (hosts.clone(), nodes.clone()),
            None => lab.ready("h", 100, 8),
        };
        let below = below.map(|node: usize| lab.nodes[&nodes[node]].switch);
        let (communicator, detail) = (nodes[reporter], "it does not answer".to_owned());
        let switch = lab.nodes[&communicator].switch;
        let report = SwitchReport::PeerLost { rank: 4, detail: detail.clone(), switch: None };
        lab.say(switch, ToController::Report { communicator, report });
        let reason = match below {
            Some(switch) => {
                let (name, address) = (format!("s{switch}"), address(switch));
                let incarnation = Some(0);
                AbortReason::SwitchLost { name, address, detail, incarnation }
            }
            None => AbortReason::PeerLost { rank: 4, detail },
        };
        for host in hosts {
            let abort = FromController::Abort { reason: reason.clone() };
            assert_eq!(lab.world.heard(host), [abort]);
        }
        lab.told();
        lab.nodes.clear();
    }
}

#[test]
fn a_group_that_would_need_too_deep_a_tree_is_refused() {
    let mut lab = Lab::new(2, 1);
    let host = lab.world.join(1, "g", 65, 0);
    assert_eq!(
        lab.world.refusal(host).to_string(),
        "a group of 65 ranks needs more than 6 levels of switches with 2 children each: \
         start the controller with a larger --fan-in"
    );
    lab.assert_quiet();
    lab.ready("g", 100, 64);
}
