//! One switch and some hosts on a small network with virtual time and a seeded fault injector.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses a part of it")]

mod host;

use core::cmp::Reverse;
use core::net::{IpAddr, Ipv4Addr};
use core::ops::Range;
use core::time::Duration;
use std::collections::{BTreeMap, BinaryHeap};

use millstream_inc::{
    ChildSpec, Collective, CollectiveCall, CollectiveError, CommunicatorOptions, CommunicatorSpec,
    Completed, DataType, Mode, ParentSpec, Ranks, ReduceOperation, SwitchConfig, SwitchEvent,
    SwitchNode, Uplink,
};
use millstream_roce::{
    Access, DatagramMeta, IcrcCheck, Identification, Instant, Node, ProtectionDomainId, Transmit,
};
use millstream_wire::{Mtu, Opcode, Psn};

/// The communicator of the first hosts; the next has the next number.
pub const COMMUNICATOR: u64 = 7;
const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);
const SWITCH: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 254));
const SOURCE_PORT: u16 = 50_000;

pub use host::{Host, RAW, vector_address};

pub type Outcome = Result<Completed, CollectiveError>;

/// Chances out of 1000.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub loss: u64,
    pub duplication: u64,
    pub reordering: u64,
    pub corruption: u64,
    /// Of acknowledgements only.
    pub acknowledgement_loss: u64,
}

/// Nothing is done then, nor after it.
const NEVER: Duration = Duration::from_secs(3600);

/// A node of a tree: on which switch it is, the number of its parent, which comes before it, and the hosts
/// below it.
#[derive(Clone, Copy, Debug)]
pub struct NodeShape {
    pub switch: usize,
    pub parent: Option<usize>,
    pub hosts: &'static [u32],
}

#[derive(Clone, Debug)]
pub struct Setup {
    /// The tree, the root first, with hosts 0 to `hosts`. Without nodes: one switch for all groups.
    pub tree: &'static [NodeShape],
    /// Communicators, each with hosts of its own.
    pub groups: u32,
    /// Hosts of each.
    pub hosts: u32,
    pub path_mtu: Mtu,
    pub segment_bytes: u32,
    pub window: u32,
    pub faults: Faults,
    pub seed: u64,
    pub first_psn: Psn,
    pub icrc: IcrcCheck,
    pub probe_interval: Duration,
    pub options: CommunicatorOptions,
    /// The root takes its children for switches. Without a tree.
    pub hosts_are_switches: bool,
    /// Switches act on what has come once all has that comes at the same time.
    pub rounds: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            tree: &[],
            groups: 1,
            hosts: 4,
            path_mtu: Mtu::B256,
            segment_bytes: 512,
            window: 4,
            faults: Faults::default(),
            seed: 1,
            first_psn: Psn::new(0x12_3456),
            icrc: IcrcCheck::Off,
            probe_interval: NEVER,
            options: CommunicatorOptions::default(),
            hosts_are_switches: false,
            rounds: false,
        }
    }
}

impl Setup {
    /// How many 32-bit elements a segment holds.
    pub fn elements(&self) -> usize {
        self.segment_bytes as usize / 4
    }
}

/// Knuth's MMIX generator: good enough to lose packets by.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed);
        random.next();
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn chance(&mut self, per_mille: u64) -> bool {
        self.next() % 1000 < per_mille
    }
}

/// A datagram under way: when it arrives, a number that breaks ties, where it goes.
type Flight = Reverse<(Instant, u64, usize, IpAddr, Vec<u8>)>;

pub struct Network {
    pub now: Instant,
    /// Datagrams that a switch has acted on together with the one after it.
    pub in_one_round: u64,
    pub switch: SwitchNode,
    /// Those below.
    pub others: Vec<SwitchNode>,
    /// Switches that send nothing and hear nothing any more.
    pub dead_switches: Vec<usize>,
    pub hosts: Vec<Host>,
    pub setup: Setup,
    pub events: Vec<SwitchEvent>,
    pub random: Random,
    /// The last acknowledgement that each has sent, by address.
    acknowledgements: BTreeMap<IpAddr, Vec<u8>>,
    flights: BinaryHeap<Flight>,
    sent: u64,
}

/// Where the switch of this number is.
fn switch_address(number: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 254 - number as u8))
}

/// Makes all nodes of the tree, from the leaves up, and connects them and the hosts.
fn connect_tree(setup: &Setup, switches: &mut [SwitchNode], hosts: &mut [Host]) {
    let mut ways_up: Vec<Option<(Ranks, Uplink)>> = setup.tree.iter().map(|_| None).collect();
    for (number, node) in setup.tree.iter().enumerate().rev() {
        let mut children: Vec<ChildSpec> = node
            .hosts
            .iter()
            .map(|&rank| {
                let Host { address, qpn, .. } = hosts[rank as usize];
                let ranks = Ranks::one(rank);
                ChildSpec {
                    ranks,
                    address,
                    qpn,
                    psn: setup.first_psn,
                    is_switch: false,
                    receive_share: None,
                }
            })
            .collect();
        let below = |other: &&(usize, NodeShape)| other.1.parent == Some(number);
        let shapes: Vec<_> = setup.tree.iter().copied().enumerate().collect();
        for &(child, shape) in shapes.iter().filter(below) {
            let (ranks, Uplink { qpn, psn, .. }) = ways_up[child].clone().unwrap();
            let address = switch_address(shape.switch);
            children.push(ChildSpec {
                ranks,
                address,
                qpn,
                psn,
                is_switch: true,
                receive_share: None,
            });
        }
        let ranks = children.iter().flat_map(|child| child.ranks.ranges().iter().cloned());
        let ranks: Ranks = ranks.collect();
        let spec = CommunicatorSpec {
            id: COMMUNICATOR + number as u64,
            path_mtu: setup.path_mtu,
            segment_bytes: setup.segment_bytes,
            window: setup.window,
            world: setup.hosts,
            children,
            has_parent: node.parent.is_some(),
            options: setup.options,
        };
        let created = switches[node.switch].create_communicator(Instant::ZERO, &spec).unwrap();
        ways_up[number] = created.uplink.map(|uplink| (ranks, uplink));
        let address = switch_address(node.switch);
        for edge in created.edges {
            let parent = ParentSpec { address, qpn: edge.qpn, psn: edge.psn, receive_share: None };
            let child = shapes.iter().filter(below).find(|(child, _)| {
                ways_up[*child].as_ref().unwrap().0.first() == Some(edge.rank)
                    && !node.hosts.contains(&edge.rank)
            });
            match child {
                None => hosts[edge.rank as usize].connect(setup, address, edge.qpn, edge.psn),
                Some(&(child, shape)) => {
                    let id = COMMUNICATOR + child as u64;
                    let switch = &mut switches[shape.switch];
                    assert!(switch.connect_parent(Instant::ZERO, id, &parent).unwrap());
                }
            }
        }
    }
}

impl Network {
    pub fn new(setup: Setup) -> Self {
        let count = setup.groups * setup.hosts;
        let mut hosts: Vec<Host> = (0..count).map(|number| Host::new(number, &setup)).collect();
        let switch = |number: usize| {
            let seed = setup.seed + 100 * number as u64;
            let config = SwitchConfig::new(switch_address(number), seed);
            let probe_interval = setup.probe_interval;
            SwitchNode::new(SwitchConfig { icrc: setup.icrc, probe_interval, ..config })
        };
        let count = setup.tree.iter().map(|node| node.switch + 1).max().unwrap_or(1);
        let mut switches: Vec<SwitchNode> = (0..count).map(switch).collect();
        connect_tree(&setup, &mut switches, &mut hosts);
        let others = switches.split_off(1);
        let mut switch = switches.remove(0);
        let groups = if setup.tree.is_empty() { &mut hosts[..] } else { &mut [] };
        for (group, hosts) in groups.chunks_mut(setup.hosts as usize).enumerate() {
            let children = hosts.iter().enumerate().map(|(rank, host)| ChildSpec {
                ranks: Ranks::one(rank as u32),
                address: host.address,
                qpn: host.qpn,
                psn: setup.first_psn,
                is_switch: setup.hosts_are_switches,
                receive_share: None,
            });
            let spec = CommunicatorSpec {
                id: COMMUNICATOR + group as u64,
                path_mtu: setup.path_mtu,
                segment_bytes: setup.segment_bytes,
                window: setup.window,
                // The switch must not depend on the order.
                children: children.rev().collect(),
                world: setup.hosts,
                has_parent: false,
                options: setup.options,
            };
            let created = switch.create_communicator(Instant::ZERO, &spec).unwrap();
            for edge in created.edges {
                hosts[edge.rank as usize].connect(&setup, SWITCH, edge.qpn, edge.psn);
            }
        }
        let random = Random::new(setup.seed);
        let mut network = Self {
            now: Instant::ZERO,
            switch,
            others,
            dead_switches: Vec::new(),
            hosts,
            setup,
            in_one_round: 0,
            events: Vec::new(),
            random,
            acknowledgements: BTreeMap::new(),
            flights: BinaryHeap::new(),
            sent: 0,
        };
        (0..network.nodes()).for_each(|node| network.service(node));
        network
    }

    /// Hosts by number, then the switch.
    fn node(&mut self, index: usize) -> &mut dyn Node {
        let count = self.hosts.len();
        match self.hosts.get_mut(index) {
            Some(host) => &mut host.endpoint,
            None if index == count => &mut self.switch,
            None => &mut self.others[index - count - 1],
        }
    }

    fn address(&self, index: usize) -> IpAddr {
        let count = self.hosts.len();
        self.hosts.get(index).map_or_else(|| switch_address(index - count), |host| host.address)
    }

    /// Hosts and switches.
    fn nodes(&self) -> usize {
        self.hosts.len() + 1 + self.others.len()
    }

    /// A switch: the first is the root's.
    pub fn switch_number(&self, number: usize) -> &SwitchNode {
        number.checked_sub(1).map_or(&self.switch, |other| &self.others[other])
    }

    pub fn switch_number_mut(&mut self, number: usize) -> &mut SwitchNode {
        match number.checked_sub(1) {
            None => &mut self.switch,
            Some(other) => &mut self.others[other],
        }
    }

    /// The acknowledgement of so many packets more than the last one of a host was for.
    pub fn next_acknowledgement(&self, host: usize, packets: u32) -> Vec<u8> {
        let mut datagram = self.acknowledgements[&self.hosts[host].address].clone();
        let psn = Psn::from_bytes([datagram[9], datagram[10], datagram[11]]).add(packets);
        datagram[9..12].copy_from_slice(&psn.to_bytes());
        datagram
    }

    fn is_dead(&self, index: usize) -> bool {
        let count = self.hosts.len();
        let switch = |index: usize| self.dead_switches.contains(&(index - count));
        self.hosts.get(index).map_or_else(|| switch(index), |host| host.dead)
    }

    /// Lets a node do everything that it can do now.
    pub fn service(&mut self, index: usize) {
        let now = self.now;
        if self.is_dead(index) {
            return;
        }
        match self.hosts.get_mut(index) {
            Some(host) => host.work(now),
            None => {
                let switch = match index - self.hosts.len() {
                    0 => &mut self.switch,
                    number => &mut self.others[number - 1],
                };
                self.events.extend(core::iter::from_fn(|| switch.poll_event()));
            }
        }
        let source = self.address(index);
        let mut transmit = Transmit::new();
        while self.node(index).poll_transmit(now, &mut transmit) {
            let mut datagram = Vec::new();
            let node: &dyn Node = self.node(index);
            assert!(transmit.assemble(node, source, SOURCE_PORT, 0, &mut datagram));
            self.carry(source, transmit.destination, datagram);
        }
    }

    /// Sends a datagram over the faulty network.
    fn carry(&mut self, source: IpAddr, destination: IpAddr, datagram: Vec<u8>) {
        let Faults { loss, duplication, reordering, corruption, acknowledgement_loss } =
            self.setup.faults;
        let acknowledgement = datagram[0] == Opcode::RcAcknowledge as u8;
        if acknowledgement {
            self.acknowledgements.insert(source, datagram.clone());
        }
        if acknowledgement && self.random.chance(acknowledgement_loss) {
            return;
        }
        let copies = 1 + u64::from(self.random.chance(duplication));
        for _ in 0..copies {
            if self.random.chance(loss) {
                continue;
            }
            // In order, unless it is overtaken by what is sent in the next 40 microseconds.
            let late = if self.random.chance(reordering) { self.random.next() % 40_000 } else { 0 };
            let mut datagram = datagram.clone();
            if self.random.chance(corruption) {
                let bit = self.random.next() as usize % (datagram.len() * 8);
                datagram[bit / 8] ^= 1 << (bit % 8);
            }
            self.inject(Duration::from_nanos(5_000 + late), source, destination, datagram);
        }
    }

    /// Makes a datagram arrive after `delay`.
    pub fn inject(
        &mut self,
        delay: Duration,
        source: IpAddr,
        destination: IpAddr,
        datagram: Vec<u8>,
    ) {
        let to = (0..self.nodes()).find(|&node| self.address(node) == destination);
        let to = to.unwrap_or(self.hosts.len());
        self.sent += 1;
        self.flights.push(Reverse((self.now + delay, self.sent, to, source, datagram)));
    }

    /// Goes to the next thing that happens; `false` when nothing ever will.
    pub fn step(&mut self) -> bool {
        let mut timeout = None;
        for node in 0..self.nodes() {
            if !self.is_dead(node)
                && let Some(deadline) = self.node(node).poll_timeout()
                && deadline < Instant::ZERO + NEVER
                && timeout.is_none_or(|(earliest, _)| deadline < earliest)
            {
                timeout = Some((deadline, node));
            }
        }
        let arrival = self.flights.peek().map(|Reverse(flight)| flight.0);
        match (arrival, timeout) {
            (None, None) => return false,
            (Some(at), timeout) if timeout.is_none_or(|(deadline, _)| at <= deadline) => {
                let Some(Reverse((at, _, to, source, datagram))) = self.flights.pop() else {
                    return false;
                };
                self.now = at;
                if self.is_dead(to) {
                    return true;
                }
                let meta = DatagramMeta {
                    source,
                    source_port: SOURCE_PORT,
                    destination: self.address(to),
                    identification: Identification::Known(0),
                    congestion_experienced: false,
                };
                self.node(to).handle_datagram(at, &meta, &datagram);
                let next = self.flights.peek().map(|Reverse(flight)| (flight.0, flight.2));
                if self.setup.rounds && to >= self.hosts.len() && next == Some((at, to)) {
                    self.in_one_round += 1;
                    return true;
                }
                // As drivers do in each round.
                self.node(to).handle_timeout(at);
                self.service(to);
            }
            (_, Some((deadline, node))) => {
                self.now = self.now.max(deadline);
                let now = self.now;
                self.node(node).handle_timeout(now);
                self.service(node);
            }
            (Some(_), None) => unreachable!("taken by the guard above"),
        }
        true
    }

    /// Runs until `done`, which must come true within a minute of virtual time.
    pub fn run_until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let limit = self.now + Duration::from_secs(60);
        while !done(self) {
            assert!(self.step(), "nothing happens any more, but not yet: {what}");
            assert!(self.now < limit, "a minute has passed, but not yet: {what}");
        }
    }

    /// Runs until nothing is under way any more.
    pub fn run_to_rest(&mut self) {
        let limit = self.now + Duration::from_secs(60);
        while self.step() {
            assert!(self.now < limit, "it does not come to rest");
        }
    }

    /// Registers the vectors of a rank; returns the call. `in_place`: the source is the
    /// destination.
    pub fn call<T: Copy>(
        &mut self,
        rank: usize,
        vector: &[T],
        data_type: DataType,
        operation: ReduceOperation,
        bytes: impl Fn(T) -> Vec<u8>,
        in_place: bool,
    ) -> CollectiveCall {
        let source: Vec<u8> = vector.iter().flat_map(|&element| bytes(element)).collect();
        // A canary behind the end; and regions are never empty.
        let destination = vec![0xa5; source.len() + 1];
        let memory = self.hosts[rank].endpoint.memory_mut();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let (source_address, destination_address) =
            (vector_address(rank as u32, false), vector_address(rank as u32, true));
        let mut source = source;
        source.push(0xa5);
        let source_key = memory.register(DOMAIN, source_address, access, source).unwrap();
        let (destination_key, destination_address) = if in_place {
            (source_key, source_address)
        } else {
            let key = memory.register(DOMAIN, destination_address, access, destination);
            (key.unwrap(), destination_address)
        };
        CollectiveCall {
            collective: Collective::AllReduce,
            root: 0,
            mode: Mode::Write,
            source_key,
            source_address,
            destination_key,
            destination_address,
            count: vector.len() as u64,
            stripe: millstream_inc::Stripe::WHOLE,
            data_type,
            operation,
        }
    }

    /// Starts a call on a rank.
    pub fn start(&mut self, rank: usize, call: &CollectiveCall) {
        self.hosts[rank].worker.start(call).unwrap();
        self.service(rank);
    }

    /// Takes the vectors of a call back; returns the destination, whose canary must be untouched.
    pub fn finish(&mut self, rank: usize, call: &CollectiveCall) -> Vec<u8> {
        let memory = self.hosts[rank].endpoint.memory_mut();
        let mut result = memory.deregister(call.source_key).unwrap();
        if call.destination_key != call.source_key {
            result = memory.deregister(call.destination_key).unwrap();
        }
        assert_eq!(result.pop(), Some(0xa5), "something was written behind the end");
        result
    }

    /// The hosts of a communicator.
    pub fn group(&self, group: usize) -> Range<usize> {
        let hosts = self.setup.hosts as usize;
        group * hosts..(group + 1) * hosts
    }

    /// Runs until every living one of these hosts has an outcome, and returns them.
    pub fn outcomes_of(&mut self, hosts: Range<usize>) -> Vec<Option<Outcome>> {
        self.run_until("an outcome on every rank", |network| {
            network.hosts[hosts.clone()].iter().all(|host| host.dead || host.outcome.is_some())
        });
        self.hosts[hosts].iter_mut().map(|host| host.outcome.take()).collect()
    }

    /// Runs until every living host has an outcome, and returns them.
    pub fn outcomes(&mut self) -> Vec<Option<Outcome>> {
        self.outcomes_of(0..self.hosts.len())
    }

    /// Starts an int32 sum AllReduce of made-up vectors on these hosts; returns the calls and the
    /// wanted result.
    pub fn start_all(
        &mut self,
        hosts: Range<usize>,
        count: usize,
        in_place: bool,
    ) -> (Vec<CollectiveCall>, Vec<u8>) {
        let mut wanted = vec![0_i32; count];
        let mut calls = Vec::new();
        for host in hosts.clone() {
            let vector: Vec<i32> = (0..count).map(|_| (self.random.next() << 8) as i32).collect();
            wanted.iter_mut().zip(&vector).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            let (data_type, operation) = (DataType::Int32, ReduceOperation::Sum);
            calls.push(self.call(host, &vector, data_type, operation, int32, in_place));
        }
        for (host, call) in hosts.zip(&calls) {
            self.start(host, call);
        }
        (calls, wanted.into_iter().flat_map(int32).collect())
    }

    /// Checks that a call ended with the wanted result.
    pub fn check(
        &mut self,
        host: usize,
        call: &CollectiveCall,
        outcome: Option<Outcome>,
        want: &[u8],
    ) {
        let completed = outcome.unwrap().unwrap();
        assert_eq!(completed.bytes, want.len() as u64);
        let result = self.finish(host, call);
        assert!(result == want, "wrong result on host {host}, {} bytes", want.len());
    }

    /// One int32 sum AllReduce on the hosts of each communicator, checked.
    pub fn all_reduce(&mut self, count: usize, in_place: bool) {
        let groups: Vec<_> = (0..self.setup.groups as usize)
            .map(|group| {
                let hosts = self.group(group);
                (hosts.clone(), self.start_all(hosts, count, in_place))
            })
            .collect();
        for (hosts, (calls, wanted)) in groups {
            let outcomes = self.outcomes_of(hosts.clone());
            for ((host, call), outcome) in hosts.zip(&calls).zip(outcomes) {
                self.check(host, call, outcome, &wanted);
            }
        }
    }

    /// At rest nothing is left: no slots, no packets, no timers.
    pub fn check_rest(&mut self) {
        self.run_to_rest();
        for group in 0..self.setup.groups {
            let statistics = self.switch.statistics(COMMUNICATOR + u64::from(group)).unwrap();
            assert_eq!(statistics.slots_in_use, 0, "slots are leaked");
        }
        for node in 0..self.nodes() {
            let timeout = self.node(node).poll_timeout().filter(|at| *at < Instant::ZERO + NEVER);
            assert_eq!(timeout, None, "a timer is leaked");
        }
    }
}

/// Bytes of an int32 vector.
pub fn int32(element: i32) -> Vec<u8> {
    element.to_le_bytes().to_vec()
}
