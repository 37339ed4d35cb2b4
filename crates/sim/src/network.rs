//! The simulator: machines, links between them, and virtual time.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::BTreeMap;
use std::io::{self, Write};

use millstream_roce::{Instant, Transmit};
use millstream_wire::{Bth, Packet, ROCE_PORT};

use crate::checker::Checker;
use crate::event::EventQueue;
use crate::link::{Fate, Link};
use crate::record::{self, Happening, Record, Subject};
use crate::{
    Datagram, Digest, LinkOptions, Machine, PacketInfo, PcapWriter, Rng, Rule, Verdict, Violation,
};

/// A machine of a [`Simulation`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NodeId(pub usize);

/// A link of a [`Simulation`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct LinkId(pub usize);

/// How a machine's operating system sends and receives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HostOptions {
    /// UDP source port of what it sends.
    pub source_port: u16,
    /// Where the IPv4 identification comes from.
    pub identification: IdentificationSource,
    /// Whether it sees IP headers, as a raw socket does, or takes every identification for 0, as
    /// behind a UDP socket.
    pub sees_ip_header: bool,
    /// How long arrivals gather before the machine takes them in one go, as a busy host does: it
    /// answers only after the last of them. Zero: it takes each at once.
    pub coalescing: Duration,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            source_port: ROCE_PORT,
            identification: IdentificationSource::Zero,
            sees_ip_header: true,
            coalescing: Duration::ZERO,
        }
    }
}

/// Where a host takes the IPv4 identification from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum IdentificationSource {
    /// Always 0: a UDP socket with "don't fragment" set.
    Zero,
    /// A counter of the host.
    Counter,
}

/// How [`Simulation::run_until`] ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The condition holds.
    Done,
    /// Nothing is going to happen any more.
    Quiet,
    /// Time is up.
    Deadline,
    /// A checker objected: see [`Simulation::violations`].
    Violated,
}

enum Event {
    Deliver(NodeId, Datagram),
    /// What has gathered at a machine is taken.
    Take(NodeId),
    Wake(NodeId),
    Change(Change),
}

#[derive(Clone, Copy)]
enum Change {
    Cut(LinkId),
    Heal(LinkId),
    Crash(NodeId),
    Restart(NodeId),
}

struct Place<M> {
    address: IpAddr,
    machine: M,
    options: HostOptions,
    next_identification: u16,
    up: bool,
    /// What has arrived and waits to be taken.
    inbox: Vec<Datagram>,
    /// The earliest wake event that is queued.
    wake: Option<Instant>,
}

/// A network of machines in virtual time. The same seed and the same calls give the same run,
/// packet for packet.
pub struct Simulation<'a, M> {
    seed: u64,
    now: Instant,
    events: EventQueue<Event>,
    places: Vec<Place<M>>,
    by_address: BTreeMap<IpAddr, NodeId>,
    links: Vec<Link>,
    routes: BTreeMap<(NodeId, NodeId), LinkId>,
    rules: Vec<Box<dyn Rule + 'a>>,
    pcap: Option<PcapWriter<&'a mut dyn Write>>,
    log: Option<&'a mut dyn Write>,
    output_error: Option<io::Error>,
    digest: Digest,
    counts: [u64; Happening::COUNT],
    bytes_sent: u64,
    checker: Checker,
    violations: Vec<Violation>,
    /// Events since time last moved.
    events_now: u32,
    next_number: u64,
    transmit: Transmit,
    outbox: Vec<Datagram>,
    /// Buffers of datagrams that have arrived, for the next ones.
    spare: Vec<Vec<u8>>,
}

impl<'a, M: Machine> Simulation<'a, M> {
    /// More events than this at one point in time, or datagrams from one machine, mean that
    /// something answers itself for ever.
    const EVENTS_AT_ONE_TIME: u32 = 1 << 20;
    /// The first violations tell what is wrong.
    const VIOLATIONS: usize = 16;

    /// An empty network.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            now: Instant::ZERO,
            events: EventQueue::new(),
            places: Vec::new(),
            by_address: BTreeMap::new(),
            links: Vec::new(),
            routes: BTreeMap::new(),
            rules: Vec::new(),
            pcap: None,
            log: None,
            output_error: None,
            digest: Digest::new(),
            counts: [0; Happening::COUNT],
            bytes_sent: 0,
            checker: Checker::default(),
            violations: Vec::new(),
            events_now: 0,
            next_number: 0,
            transmit: Transmit::new(),
            outbox: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Lets machines send a packet again with other content, as they do when an application lets
    /// its source be overwritten before everything sent from it is acknowledged. That is allowed
    /// when something else shows that it has arrived: an allreduce does it.
    pub fn allow_changed_sources(&mut self) {
        self.checker.changed_sources = true;
    }

    /// Captures every datagram, as it is sent, into `output`.
    pub fn capture(&mut self, output: &'a mut dyn Write) -> io::Result<()> {
        self.pcap = Some(PcapWriter::new(output)?);
        Ok(())
    }

    /// Writes one line for each event to `output`.
    pub fn log(&mut self, output: &'a mut dyn Write) {
        self.log = Some(output);
    }

    /// Adds a machine with this address, which no other may have. It runs for the first time with
    /// the next step.
    ///
    /// # Panics
    /// When another one has it.
    pub fn add_machine(&mut self, address: IpAddr, machine: M, options: HostOptions) -> NodeId {
        let id = NodeId(self.places.len());
        let other = self.by_address.insert(address, id);
        assert!(other.is_none(), "two machines have the address {address}");
        self.places.push(Place {
            address,
            machine,
            options,
            next_identification: 0,
            up: true,
            inbox: Vec::new(),
            wake: Some(self.now),
        });
        self.events.push(self.now, Event::Wake(id));
        id
    }

    /// Adds a link that leads nowhere yet.
    pub fn add_link(&mut self, options: LinkOptions) -> LinkId {
        let id = self.links.len();
        self.links.push(Link::new(options, Rng::fork(self.seed, id as u64)));
        LinkId(id)
    }

    /// Sends what `from` has for `to` over `link`, which other pairs may share.
    pub fn route(&mut self, from: NodeId, to: NodeId, link: LinkId) {
        self.routes.insert((from, to), link);
    }

    /// Joins two machines by a link in each direction: from `a` to `b`, and back.
    pub fn connect(&mut self, a: NodeId, b: NodeId, options: LinkOptions) -> [LinkId; 2] {
        [(a, b), (b, a)].map(|(from, to)| {
            let link = self.add_link(options);
            self.route(from, to, link);
            link
        })
    }

    /// Adds a rule after those that are there.
    pub fn add_rule(&mut self, rule: impl Rule + 'a) {
        self.rules.push(Box::new(rule));
    }

    /// Cuts links for a while: what is sent over them then is dropped, what is under way arrives.
    pub fn partition(&mut self, links: &[LinkId], from: Instant, until: Instant) {
        for &link in links {
            self.events.push(from, Event::Change(Change::Cut(link)));
            self.events.push(until, Event::Change(Change::Heal(link)));
        }
    }

    /// Stops a machine at this time: it neither sends nor receives nor wakes.
    pub fn crash(&mut self, node: NodeId, at: Instant) {
        self.events.push(at, Event::Change(Change::Crash(node)));
    }

    /// Starts a stopped machine again at this time.
    pub fn restart(&mut self, node: NodeId, at: Instant) {
        self.events.push(at, Event::Change(Change::Restart(node)));
    }

    /// Now.
    pub const fn now(&self) -> Instant {
        self.now
    }

    /// A machine.
    pub fn machine(&self, node: NodeId) -> &M {
        &self.places[node.0].machine
    }

    /// A machine, to look into and empty; what is to cause packets goes through
    /// [`Simulation::with_machine`].
    pub fn machine_mut(&mut self, node: NodeId) -> &mut M {
        &mut self.places[node.0].machine
    }

    /// Whether a machine is up.
    pub fn is_up(&self, node: NodeId) -> bool {
        self.places[node.0].up
    }

    /// The machines, in the order they were added.
    pub fn machines(&self) -> impl Iterator<Item = &M> {
        self.places.iter().map(|place| &place.machine)
    }

    /// Gives a machine to `act` from outside; what comes of it happens before this returns.
    pub fn with_machine<R>(&mut self, node: NodeId, act: impl FnOnce(&mut M, Instant) -> R) -> R {
        let result = act(&mut self.places[node.0].machine, self.now);
        self.settle(node);
        result
    }

    /// How often this happened.
    pub const fn count(&self, happening: Happening) -> u64 {
        self.counts[happening as usize]
    }

    /// UDP payload bytes sent.
    pub const fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    /// The digest of all that happened so far.
    pub const fn digest(&self) -> Digest {
        self.digest
    }

    /// What the checkers objected to.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Adds an objection of a checker outside; only the first few are kept.
    pub fn violate(&mut self, what: String) {
        if self.violations.len() < Self::VIOLATIONS {
            self.violations.push(Violation { at: self.now, what });
        }
    }

    /// Forgets what the checker knows of the connections of a machine: they start anew.
    pub fn forget_connections(&mut self, node: NodeId) {
        self.checker.forget(self.places[node.0].address);
    }

    /// Ends the run: flushes the outputs, or returns the first error that one of them had.
    pub fn finish(&mut self) -> io::Result<()> {
        if let Some(pcap) = self.pcap.take() {
            pcap.finish()?;
        }
        if let Some(log) = &mut self.log {
            log.flush()?;
        }
        self.output_error.take().map_or(Ok(()), Err)
    }

    /// Takes steps until `done`, which is asked before the first one and after each.
    pub fn run_until(
        &mut self,
        deadline: Instant,
        mut done: impl FnMut(&mut Self) -> bool,
    ) -> Outcome {
        loop {
            if !self.violations.is_empty() {
                return Outcome::Violated;
            }
            if done(self) {
                return Outcome::Done;
            }
            match self.events.next_at() {
                None => return Outcome::Quiet,
                Some(at) if at > deadline => {
                    self.now = self.now.max(deadline);
                    return Outcome::Deadline;
                }
                Some(_) => {
                    self.step();
                }
            }
        }
    }

    /// Lets the next event happen; `false` when there is none.
    pub fn step(&mut self) -> bool {
        let Some((at, event)) = self.events.pop() else { return false };
        assert!(at >= self.now, "an event was queued for the past");
        self.events_now = if at == self.now { self.events_now + 1 } else { 0 };
        self.now = at;
        if self.events_now > Self::EVENTS_AT_ONE_TIME {
            self.violate(
                "time stands still: the machines wake or answer each other for ever".into(),
            );
        }
        match event {
            Event::Deliver(node, datagram) => self.deliver(node, datagram),
            Event::Take(node) => self.take(node),
            Event::Wake(node) => self.wake(node),
            Event::Change(change) => self.change(change),
        }
        true
    }

    fn deliver(&mut self, node: NodeId, datagram: Datagram) {
        let place = &mut self.places[node.0];
        if !place.up {
            self.record(Happening::ReceiverDown, Subject::Datagram(&datagram));
            return self.recycle(datagram);
        }
        place.inbox.push(datagram);
        let coalescing = place.options.coalescing;
        if coalescing.is_zero() {
            self.take(node);
        } else if place.inbox.len() == 1 {
            self.events.push(self.now + coalescing, Event::Take(node));
        }
    }

    fn take(&mut self, node: NodeId) {
        let mut inbox = core::mem::take(&mut self.places[node.0].inbox);
        for datagram in inbox.drain(..) {
            self.record(Happening::Delivered, Subject::Datagram(&datagram));
            let place = &mut self.places[node.0];
            let meta = datagram.meta(place.options.sees_ip_header);
            place.machine.handle_datagram(self.now, &meta, &datagram.payload);
            self.recycle(datagram);
        }
        self.places[node.0].inbox = inbox;
        self.settle(node);
    }

    fn wake(&mut self, node: NodeId) {
        let place = &mut self.places[node.0];
        // An earlier event than this one took its place.
        if place.wake != Some(self.now) {
            return;
        }
        place.wake = None;
        if !place.up {
            return;
        }
        if place.machine.poll_timeout().is_some_and(|at| at <= self.now) {
            place.machine.handle_timeout(self.now);
        }
        self.settle(node);
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Cut(link) => {
                self.links[link.0].cut = true;
                self.record(Happening::Cut, Subject::Link(link.0));
            }
            Change::Heal(link) => {
                self.links[link.0].cut = false;
                self.record(Happening::Healed, Subject::Link(link.0));
            }
            Change::Crash(node) => {
                let place = &mut self.places[node.0];
                place.up = false;
                place.inbox.clear();
                let address = place.address;
                self.record(Happening::Crashed, Subject::Machine(address));
            }
            Change::Restart(node) => {
                let place = &mut self.places[node.0];
                place.up = true;
                place.machine.restart(self.now);
                let address = place.address;
                self.checker.forget(address);
                self.record(Happening::Restarted, Subject::Machine(address));
                self.settle(node);
            }
        }
    }

    /// Lets a machine act and send until it has nothing left to do now.
    fn settle(&mut self, node: NodeId) {
        if !self.places[node.0].up {
            return;
        }
        let mut sent = 0;
        loop {
            let place = &mut self.places[node.0];
            place.machine.run(self.now);
            while sent < Self::EVENTS_AT_ONE_TIME
                && place.machine.poll_transmit(self.now, &mut self.transmit)
            {
                sent += 1;
                let mut payload = self.spare.pop().unwrap_or_default();
                payload.clear();
                let identification = place.next_identification;
                let Place { address: source, options, .. } = *place;
                let HostOptions { source_port, .. } = options;
                if !self.transmit.assemble(
                    &place.machine,
                    source,
                    source_port,
                    identification,
                    &mut payload,
                ) {
                    continue;
                }
                if source.is_ipv4() && options.identification == IdentificationSource::Counter {
                    place.next_identification = identification.wrapping_add(1);
                }
                self.outbox.push(Datagram {
                    number: self.next_number,
                    source,
                    source_port,
                    destination: self.transmit.destination,
                    identification,
                    congestion_experienced: false,
                    payload,
                });
                self.next_number += 1;
            }
            if self.outbox.is_empty() {
                break;
            }
            let mut outbox = core::mem::take(&mut self.outbox);
            for datagram in outbox.drain(..) {
                if let Err(what) = self.checker.sent(&datagram) {
                    self.violate(format!("{}: {what}", datagram.source));
                }
                self.send(node, datagram);
            }
            self.outbox = outbox;
            if sent >= Self::EVENTS_AT_ONE_TIME {
                let address = self.places[node.0].address;
                self.violate(format!("{address} sends for ever without waiting"));
                break;
            }
        }
        self.schedule_wake(node);
    }

    fn schedule_wake(&mut self, node: NodeId) {
        let place = &mut self.places[node.0];
        let timeout = place.machine.poll_timeout();
        let wake = place.machine.poll_wake();
        let Some(at) = timeout.into_iter().chain(wake).min() else { return };
        let at = at.max(self.now);
        if place.wake.is_none_or(|queued| at < queued) {
            place.wake = Some(at);
            self.events.push(at, Event::Wake(node));
        }
    }

    /// Sends a datagram that no machine made, from a machine's place in the network: what an
    /// outsider could do. The checker does not see it.
    pub fn inject(&mut self, from: NodeId, mut datagram: Datagram) {
        datagram.number = self.next_number;
        self.next_number += 1;
        self.send(from, datagram);
    }

    /// Puts a datagram on its way.
    fn send(&mut self, from: NodeId, mut datagram: Datagram) {
        self.bytes_sent += datagram.payload.len() as u64;
        self.record(Happening::Sent, Subject::Datagram(&datagram));
        if let Some(pcap) = &mut self.pcap {
            let result = pcap.write(self.now, &datagram);
            self.keep_error(result);
        }
        let route = self.by_address.get(&datagram.destination).copied();
        let route = route.and_then(|to| Some((to, *self.routes.get(&(from, to))?)));
        let Some((to, link)) = route else {
            self.record(Happening::Unreachable, Subject::Datagram(&datagram));
            return self.recycle(datagram);
        };
        let verdict = self.verdict(from, to, link, &datagram);
        if verdict == Verdict::Drop {
            self.record(Happening::Dropped, Subject::Datagram(&datagram));
            return self.recycle(datagram);
        }
        let fate = self.links[link.0].carry(self.now, datagram.wire_length() as u64);
        let gone = match fate {
            Fate::Partitioned => Happening::Partitioned,
            Fate::Overflowed => Happening::Overflowed,
            Fate::Lost => Happening::Lost,
            Fate::Carried(carried) => {
                let mut at = carried.at;
                if let Verdict::Delay(delay) = verdict {
                    at = at + delay;
                }
                let copy_at = carried.copy_at.or((verdict == Verdict::Duplicate).then_some(at));
                if carried.held_back || at != carried.at {
                    self.record(Happening::HeldBack, Subject::Datagram(&datagram));
                }
                if carried.marked {
                    datagram.congestion_experienced = true;
                    self.record(Happening::Marked, Subject::Datagram(&datagram));
                }
                if let Some(copy_at) = copy_at {
                    self.record(Happening::Duplicated, Subject::Datagram(&datagram));
                    let copy = datagram.clone();
                    self.events.push(copy_at, Event::Deliver(to, copy));
                }
                if let Some(random) = carried.flip {
                    flip_covered_bit(&mut datagram.payload, random);
                    self.record(Happening::Corrupted, Subject::Datagram(&datagram));
                }
                self.events.push(at, Event::Deliver(to, datagram));
                return;
            }
        };
        self.record(gone, Subject::Datagram(&datagram));
        self.recycle(datagram);
    }

    fn verdict(&mut self, from: NodeId, to: NodeId, link: LinkId, datagram: &Datagram) -> Verdict {
        if self.rules.is_empty() {
            return Verdict::Pass;
        }
        let info = PacketInfo {
            now: self.now,
            source: from,
            destination: to,
            link,
            datagram,
            packet: Packet::parse(&datagram.payload).ok(),
        };
        let verdicts = self.rules.iter_mut().map(|rule| rule.on_packet(&info));
        verdicts.into_iter().find(|verdict| *verdict != Verdict::Pass).unwrap_or(Verdict::Pass)
    }

    fn record(&mut self, happening: Happening, subject: Subject<'_>) {
        let record = Record { at: self.now, happening, subject };
        self.counts[happening as usize] += 1;
        self.digest.add(&record);
        if let Some(log) = &mut self.log {
            let result = record::write_line(*log, &record);
            self.keep_error(result);
        }
    }

    fn keep_error(&mut self, result: io::Result<()>) {
        if let Err(error) = result {
            self.output_error.get_or_insert(error);
        }
    }

    fn recycle(&mut self, datagram: Datagram) {
        const KEPT: usize = 1024;
        if self.spare.len() < KEPT {
            self.spare.push(datagram.payload);
        }
    }

    /// So much later than now.
    pub fn after(&self, delay: Duration) -> Instant {
        self.now + delay
    }
}

/// Flips one of the bits that the ICRC covers: all but the byte of the BTH that routers may change
/// (FECN, BECN and six reserved bits), by which nothing is stored or acknowledged.
fn flip_covered_bit(payload: &mut [u8], random: u64) {
    const UNCOVERED: usize = 4;
    const _: () = assert!(UNCOVERED < Bth::LENGTH);
    let covered = payload.len().saturating_sub(1);
    if covered == 0 {
        return;
    }
    let bit = ((u128::from(random) * (covered as u128 * 8)) >> 64) as usize;
    let byte = bit / 8 + usize::from(bit / 8 >= UNCOVERED);
    payload[byte] ^= 1 << (bit % 8);
}
