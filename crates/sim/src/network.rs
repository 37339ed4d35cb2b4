//! The simulator: machines, links between them, and virtual time.

mod steps;

use core::net::IpAddr;
use core::time::Duration;
use std::collections::BTreeMap;
use std::io::{self, Write};

use millstream_roce::{Instant, Transmit};
use millstream_wire::{Qpn, ROCE_PORT};

use crate::checker::Checker;
use crate::event::EventQueue;
use crate::link::Link;
use crate::record::Happening;
use crate::{Datagram, Digest, LinkOptions, Machine, PcapWriter, Rng, Rule, Violation};

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
    /// What may gather before newcomers are dropped: the length of a socket's buffer by the kernel's
    /// account, which charges twice what a datagram and 256 bytes take.
    pub receive_buffer: u64,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            source_port: ROCE_PORT,
            identification: IdentificationSource::Zero,
            sees_ip_header: true,
            coalescing: Duration::ZERO,
            receive_buffer: u64::MAX,
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
    /// Nothing, but time moves here.
    Alarm,
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
    /// And what that takes of the receive buffer.
    inbox_account: u64,
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
    /// Each with the queue pair that sent it.
    outbox: Vec<(Qpn, Datagram)>,
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

    /// Lets one machine do so: see [`Simulation::allow_changed_sources`].
    pub fn allow_changed_sources_of(&mut self, node: NodeId) {
        self.checker.changing.insert(self.places[node.0].address);
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
            inbox_account: 0,
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

    /// Cuts a link now, or heals it.
    pub fn set_cut(&mut self, link: LinkId, cut: bool) {
        self.change(if cut { Change::Cut(link) } else { Change::Heal(link) });
    }

    /// Stops a machine now, or starts it again.
    pub fn set_up(&mut self, node: NodeId, up: bool) {
        self.change(if up { Change::Restart(node) } else { Change::Crash(node) });
    }

    /// What a link is like from now on.
    pub fn set_link(&mut self, link: LinkId, options: LinkOptions) {
        self.links[link.0].set_options(self.now, options);
    }

    /// Lets [`Simulation::run_until`] ask again at this time.
    pub fn alarm(&mut self, at: Instant) {
        self.events.push(at.max(self.now), Event::Alarm);
    }

    /// Writes a line of the caller's to the log, if there is one. `note` is not called otherwise.
    pub fn note(&mut self, note: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            let result = writeln!(log, "{:>16} {:>8} {}", self.now.to_string(), "", note());
            self.keep_error(result);
        }
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

    /// Forgets what the checker knows of what a queue pair sent: it starts anew.
    pub fn forget_queue_pair(&mut self, node: NodeId, qpn: Qpn) {
        self.checker.forget_queue_pair(self.places[node.0].address, qpn);
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

    /// Sends a datagram that no machine made, from a machine's place in the network: what an
    /// outsider could do. The checker does not see it.
    pub fn inject(&mut self, from: NodeId, mut datagram: Datagram) {
        datagram.number = self.next_number;
        self.next_number += 1;
        self.send(from, datagram);
    }

    /// So much later than now.
    pub fn after(&self, delay: Duration) -> Instant {
        self.now + delay
    }
}
