//! The switch: an endpoint whose memory adds, and the bookkeeping around it.

mod create;
mod ports;
mod serving;

use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use millstream_roce::{
    Completion, CompletionOperation, CompletionQueueId, CompletionStatus, Counters, DatagramMeta,
    Endpoint, EndpointConfig, IcrcCheck, Instant, Node, Piece, QueuePairAttributes,
    QueuePairNumbers, QueuePairState, Transmit,
};
use millstream_wire::{Mtu, Opcode, Operation, Qpn};

use crate::abort::{Abort, Mismatch, Overdue, Violation};
use crate::aggregator::Aggregator;
use crate::answer::Answer;
use crate::communicator::{Communicator, CommunicatorStatistics, Progress, Tag};

pub use create::{CreateError, Created, Edge, PreparedCommunicator, Uplink};
pub use ports::{CommunicatorCounts, PortCounts};
pub use serving::packets_too_long;

/// How often at most nodes tell those above what the first has called while others have not: ranks that call at
/// nearly the same time cost few further messages.
const FIRST_CALL_PATIENCE: Duration = Duration::from_millis(10);

/// A communicator has a queue pair for each port, and a switch so many.
pub const MAX_QUEUE_PAIRS: usize = 4096;

/// What a switch is made with.
#[derive(Clone, Debug)]
pub struct SwitchConfig {
    /// Its address on the data network.
    pub address: IpAddr,
    /// Seeds queue pair numbers and first packet sequence numbers. A restarted switch must use
    /// another one, so that packets meant for the old one do not match.
    pub seed: u64,
    /// The queue pair numbers that it may use: some, where others have its address too.
    pub queue_pair_numbers: QueuePairNumbers,
    /// How the ICRC of arriving packets is checked.
    pub icrc: IcrcCheck,
    /// At most so many communicators. Together they have 4,096 ports at most: 63 nodes with 64 children and a way up, and
    /// more that have fewer.
    pub max_communicators: usize,
    /// At most so many bytes of slots and queues in all communicators.
    pub max_memory: u64,
    /// Acknowledgement timeout on every edge: 4.096 us * 2^n.
    pub timeout: u8,
    /// A child that is silent for `retry_count` + 1 timeouts is lost.
    pub retry_count: u8,
    /// How often whoever is awaited and has nothing to acknowledge is asked whether it lives: hosts that owe data
    /// or have not called what others have, and switches.
    pub probe_interval: Duration,
    /// How long a communicator that is aborted waits for its ports to hear of it. Those that have not acknowledged
    /// that by then are closed, however much else they acknowledge.
    pub abort_timeout: Duration,
}

impl SwitchConfig {
    /// The defaults: 64 communicators, 1 GiB, children lost after 4.3 s of silence, and 4 s after an abort.
    pub const fn new(address: IpAddr, seed: u64) -> Self {
        Self {
            address,
            seed,
            queue_pair_numbers: QueuePairNumbers::All,
            icrc: IcrcCheck::AnyIdentification,
            max_communicators: 64,
            max_memory: 1 << 30,
            timeout: 17,
            retry_count: 7,
            probe_interval: Duration::from_secs(1),
            abort_timeout: Duration::from_secs(4),
        }
    }
}

/// Something that whoever controls the switch should know.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SwitchEvent {
    /// The connection to a child broke, and with it the communicator. Unless the child is silent, what it has done follows as a
    /// [`SwitchEvent::Violation`].
    ChildLost {
        /// The communicator.
        communicator: u64,
        /// The child: of a switch, the lowest rank below it.
        rank: u32,
        /// Whether the child is a switch, and that its lowest rank.
        is_switch: bool,
        /// How its connection ended.
        status: CompletionStatus,
    },
    /// The connection to the switch above broke, or that switch broke the protocol, and with it the communicator.
    ParentLost {
        /// The communicator.
        communicator: u64,
        /// How its connection ended: with a bad response where it broke the protocol.
        status: CompletionStatus,
    },
    /// The ranks do not agree on what to compute; the communicator is being aborted.
    Mismatch {
        /// The communicator.
        communicator: u64,
        /// Who differs, and in what.
        mismatch: Mismatch,
    },
    /// A collective did not end before the deadline of some rank; the communicator is being aborted.
    Overdue {
        /// The communicator.
        communicator: u64,
        /// Who is to blame.
        overdue: Overdue,
    },
    /// A rank broke the protocol; the communicator is being aborted.
    Violation {
        /// The communicator.
        communicator: u64,
        /// Who.
        rank: u32,
        /// How.
        violation: Violation,
    },
    /// Every child that can be reached has confirmed that it knows of the abort, or has had
    /// [`SwitchConfig::abort_timeout`] for it. What is left is to destroy the communicator.
    Aborted {
        /// The communicator.
        communicator: u64,
        /// Why.
        abort: Abort,
    },
}

/// A switch that computes: a [`Node`] for drivers and the simulator.
#[derive(Debug)]
pub struct SwitchNode {
    config: SwitchConfig,
    endpoint: Endpoint<Aggregator>,
    /// Index of the aggregator, by number.
    communicators: BTreeMap<u64, u32>,
    /// Index and child, by queue pair.
    edges: BTreeMap<Qpn, (u32, usize)>,
    /// Ways up that are not connected yet, by number.
    uplinks: BTreeMap<u64, (Uplink, Mtu)>,
    /// Bytes of the receive buffer that those at the other ends of a communicator's ports may fill, by number.
    granted: BTreeMap<u64, u64>,
    /// By index.
    queues: Vec<Option<CompletionQueueId>>,
    memory_used: u64,
    /// Communicators that packets have come for since they were last drained.
    touched: Vec<u32>,
    events: VecDeque<SwitchEvent>,
    /// When ports that are silent are asked whether they live.
    probe_at: Option<Instant>,
    /// When nodes above are told what has been called here.
    tell_at: Option<Instant>,
    /// Until when communicators that are aborted wait for their ports, by index, the first first.
    ending: VecDeque<(Instant, u32)>,
    /// Kept for its allocation.
    completions: Vec<Completion>,
    random: u64,
}

impl SwitchNode {
    /// A switch without communicators.
    pub fn new(config: SwitchConfig) -> Self {
        let endpoint_config = EndpointConfig {
            icrc: config.icrc,
            queue_pair_numbers: config.queue_pair_numbers,
            max_completion_queues: config.max_communicators,
            max_queue_pairs: MAX_QUEUE_PAIRS,
            ..EndpointConfig::new(config.address, config.seed)
        };
        Self {
            endpoint: Endpoint::new(endpoint_config, Aggregator::default()),
            communicators: BTreeMap::new(),
            edges: BTreeMap::new(),
            uplinks: BTreeMap::new(),
            granted: BTreeMap::new(),
            queues: Vec::new(),
            memory_used: 0,
            touched: Vec::new(),
            events: VecDeque::new(),
            probe_at: None,
            tell_at: None,
            ending: VecDeque::new(),
            completions: Vec::new(),
            // Another sequence than the one that the endpoint takes queue pair numbers from.
            random: config.seed ^ 0x6a09_e667_f3bc_c908,
            config,
        }
    }

    /// What it was made with.
    pub fn config(&self) -> &SwitchConfig {
        &self.config
    }

    /// Says how many bytes of packets its receive buffer holds, which the ports of all communicators share: those at their
    /// other ends are to be told how much of it they may fill ([`Edge::receive_share`]). Without this there is no limit.
    pub fn set_receive_budget(&mut self, bytes: u64) {
        self.endpoint.set_receive_budget(bytes);
    }

    /// What its endpoint has counted.
    pub fn counters(&self) -> &Counters {
        self.endpoint.counters()
    }

    /// How many communicators there are.
    pub fn communicators(&self) -> usize {
        self.communicators.len()
    }

    /// Bytes of slots and queues in all communicators.
    pub fn memory_used(&self) -> u64 {
        self.memory_used
    }

    /// What a communicator has counted.
    pub fn statistics(&self, id: u64) -> Option<CommunicatorStatistics> {
        let index = *self.communicators.get(&id)?;
        Some(self.endpoint.memory().get(index)?.statistics())
    }

    /// Whether all ports have what they are owed: what was contributed is answered, and all that was sent acknowledged. Of a
    /// communicator that is aborted: whether all have heard of it.
    pub fn is_settled(&self) -> bool {
        let of = |&index: &u32| self.endpoint.memory().get(index);
        self.communicators.values().filter_map(of).all(Communicator::is_settled)
    }

    /// The next thing that happened.
    pub fn poll_event(&mut self) -> Option<SwitchEvent> {
        self.events.pop_front()
    }

    /// Ends a communicator: tells every child why, then breaks the connections. `false` when there
    /// is none. An abort under way keeps its reason.
    pub fn abort_communicator(&mut self, now: Instant, id: u64, abort: Abort) -> bool {
        let Some(&index) = self.communicators.get(&id) else { return false };
        let memory = self.endpoint.memory_mut();
        if let Some(communicator) = memory.get_mut(index) {
            let progress = communicator.abort(abort);
            memory.mark(index, progress);
        }
        self.settle(now);
        true
    }

    /// Takes what the endpoint has to report of one communicator.
    fn drain(&mut self, now: Instant, index: u32) {
        let Some(&Some(queue)) = self.queues.get(index as usize) else { return };
        let mut completions = core::mem::take(&mut self.completions);
        self.endpoint.poll_completions(queue, &mut completions, usize::MAX);
        for completion in completions.drain(..) {
            self.completed(now, index, &completion);
        }
        self.completions = completions;
    }

    fn completed(&mut self, now: Instant, index: u32, completion: &Completion) {
        let (tag, child) = Tag::from_id(completion.id);
        match (completion.status, tag) {
            // Says nothing of its own: what broke the queue pair is another completion or the
            // event that follows.
            (CompletionStatus::Flushed, _) => {}
            (CompletionStatus::Success, Tag::Receive { buffer }) => {
                self.received(index, child, buffer, completion);
                let memory = self.endpoint.memory();
                if memory.get(index).is_some_and(Communicator::has_first_call_to_tell) {
                    self.tell_at.get_or_insert(now + FIRST_CALL_PATIENCE);
                }
            }
            // A SEND that is longer than any descriptor.
            (CompletionStatus::LocalLength, Tag::Receive { .. }) => {
                let memory = self.endpoint.memory_mut();
                let plain = memory.get(index).is_some_and(Communicator::is_plain);
                let violation = if plain { Violation::Length } else { Violation::Descriptor };
                memory.violation(index, child, violation);
            }
            (CompletionStatus::Success, tag) => {
                let memory = self.endpoint.memory_mut();
                if let Some(communicator) = memory.get_mut(index) {
                    let progress = communicator.delivered(child, tag);
                    let goes_on = communicator.is_plain() && tag == Tag::Result;
                    let request = communicator.receive_request(child, 0);
                    let qpn = communicator.qpn(child);
                    memory.mark(index, progress);
                    if goes_on {
                        // It may send one more.
                        let posted = self.endpoint.post_receive(qpn, &request);
                        debug_assert_eq!(
                            posted,
                            Ok(()),
                            "a window of messages has answers to come"
                        );
                    }
                }
                if tag == Tag::Abort {
                    self.end(now, index, child);
                }
            }
            (status, _) => self.lost(now, index, child, status),
        }
    }

    /// A child's SEND has arrived.
    fn received(&mut self, index: u32, child: usize, buffer: usize, completion: &Completion) {
        let memory = self.endpoint.memory_mut();
        let Some(communicator) = memory.get_mut(index) else { return };
        let send = completion.operation == CompletionOperation::Receive;
        let outcome = match completion.immediate {
            immediate if communicator.is_uplink(child) => {
                Ok(communicator.answered(immediate, !send, completion.length))
            }
            // No note: such hosts know none.
            Some(_) if communicator.is_plain() => Err(Violation::Immediate),
            Some(immediate) if send && completion.length == 0 => {
                match Answer::from_immediate(immediate) {
                    Some(end @ Answer::Credit(_)) => communicator.credit(child, end),
                    Some(note @ Answer::Overdue(_)) => communicator.gave_up(child, note),
                    _ => Err(Violation::Immediate),
                }
            }
            Some(immediate) if send => {
                match communicator.note_below(child, immediate, completion.length) {
                    Some(note @ Answer::Overdue(_)) => {
                        communicator.gave_up_below(child, buffer, note)
                    }
                    Some(Answer::Called(rank)) => communicator.called_below(child, buffer, rank),
                    Some(_) => communicator.found(child, buffer),
                    None => Err(Violation::Immediate),
                }
            }
            None if send && communicator.is_segment(child) => communicator.end_segment(child),
            None if send => communicator.announce(child, buffer, completion.length as usize),
            _ => Err(Violation::Immediate),
        };
        let request = communicator.receive_request(child, buffer);
        let qpn = communicator.qpn(child);
        let is_plain = communicator.is_plain();
        match outcome {
            Ok(progress) => memory.mark(index, progress),
            Err(violation) => memory.violation(index, child, violation),
        }
        if is_plain {
            // When it has the answer.
            return;
        }
        // A queue pair that has failed takes it and flushes it.
        let posted = self.endpoint.post_receive(qpn, &request);
        debug_assert_eq!(posted, Ok(()), "the request that this one replaces is complete");
    }

    /// The connection to a child is broken. Only silence means that the child is gone: all else it
    /// or its device has done. Of a switch that is gone the ranks below may live, so that none of them is named.
    fn lost(&mut self, now: Instant, index: u32, child: usize, status: CompletionStatus) {
        let memory = self.endpoint.memory_mut();
        let Some(communicator) = memory.get_mut(index) else { return };
        if communicator.has_ended(child) {
            return;
        }
        let id = communicator.id;
        let lost = communicator.children.get(child).map(|child| (child.rank, child.is_switch));
        if communicator.aborted().is_none() {
            let abort = match (lost, broken_by(status)) {
                (Some((rank, true)), _) => Abort::SwitchBelowLost { rank },
                (Some((rank, false)), Some(violation)) => Abort::Violation { rank, violation },
                (Some((rank, false)), None) => Abort::PeerLost { rank },
                (None, _) => Abort::ParentLost,
            };
            let progress = communicator.abort(abort);
            memory.mark(index, progress);
            self.events.push_back(match lost {
                Some((rank, is_switch)) => {
                    SwitchEvent::ChildLost { communicator: id, rank, is_switch, status }
                }
                None => SwitchEvent::ParentLost { communicator: id, status },
            });
        }
        self.end(now, index, child);
    }

    /// Nothing more is expected of a child: it was told of the abort, or is lost.
    fn end(&mut self, now: Instant, index: u32, child: usize) {
        self.report(index);
        let Some(communicator) = self.endpoint.memory_mut().get_mut(index) else { return };
        communicator.end(child);
        let qpn = communicator.qpn(child);
        self.report_end(index);
        if self.endpoint.queue_pair_state(qpn) == Some(QueuePairState::Error) {
            // It failed by itself; closing it would take back the answer that says why.
            return;
        }
        let error = QueuePairAttributes {
            state: Some(QueuePairState::Error),
            ..QueuePairAttributes::default()
        };
        let modified = self.endpoint.modify_queue_pair(now, qpn, &error);
        debug_assert_eq!(modified, Ok(()), "any state leads to ERR");
    }

    /// Tells of an abort that the communicator began by itself.
    fn report(&mut self, index: u32) {
        let Some(communicator) = self.endpoint.memory_mut().get_mut(index) else { return };
        let (id, is_broken_above) = (communicator.id, communicator.is_broken_above());
        let abort = communicator.take_report();
        self.events.extend(match abort {
            Some(Abort::Mismatch(mismatch)) => {
                Some(SwitchEvent::Mismatch { communicator: id, mismatch })
            }
            Some(Abort::Overdue(overdue)) => {
                Some(SwitchEvent::Overdue { communicator: id, overdue })
            }
            Some(Abort::Violation { rank, violation }) => {
                Some(SwitchEvent::Violation { communicator: id, rank, violation })
            }
            Some(Abort::ParentLost) if is_broken_above => {
                let status = CompletionStatus::BadResponse;
                Some(SwitchEvent::ParentLost { communicator: id, status })
            }
            // Told already, or asked for.
            Some(
                Abort::PeerLost { .. }
                | Abort::SwitchBelowLost { .. }
                | Abort::Requested { .. }
                | Abort::ParentLost,
            )
            | None => None,
        });
    }

    /// Tells once that all have heard of an abort.
    fn report_end(&mut self, index: u32) {
        if let Some(communicator) = self.endpoint.memory_mut().get_mut(index)
            && let (id, Some(abort)) = (communicator.id, communicator.take_ended())
        {
            self.ending.retain(|&(_, ending)| ending != index);
            self.events.push_back(SwitchEvent::Aborted { communicator: id, abort });
        }
    }

    /// From now on a communicator, if it is aborted, has so long to end.
    fn begin_end(&mut self, now: Instant, index: u32) {
        let ends = self.endpoint.memory().get(index).is_some_and(Communicator::is_ending);
        if ends && !self.ending.iter().any(|&(_, ending)| ending == index) {
            self.ending.push_back((now + self.config.abort_timeout, index));
        }
    }

    /// Closes the ports of communicators that have had their time to end.
    fn end_overdue(&mut self, now: Instant) {
        while let Some(&(_, index)) = self.ending.front().filter(|(until, _)| *until <= now) {
            self.ending.pop_front();
            let ports = self.endpoint.memory().get(index).map_or(0, Communicator::ports);
            for port in 0..ports {
                let memory = self.endpoint.memory();
                if memory.get(index).is_some_and(|it| !it.has_ended(port)) {
                    self.end(now, index, port);
                }
            }
        }
    }

    /// Acts on all packets that have come, once for all of them.
    fn catch_up(&mut self, now: Instant) {
        if self.touched.is_empty() {
            return;
        }
        self.probe_at.get_or_insert(now + self.config.probe_interval);
        let mut touched = core::mem::take(&mut self.touched);
        touched.drain(..).for_each(|index| self.drain(now, index));
        self.touched = touched;
        self.settle(now);
    }

    /// Acts on events of the endpoint, then sends what communicators owe their children.
    fn settle(&mut self, now: Instant) {
        while let Some(event) = self.endpoint.poll_event() {
            // Overruns cannot be: a completion queue has room for all requests that it serves.
            if let Some(qpn) = event.failed_queue_pair()
                && let Some(&(index, child)) = self.edges.get(&qpn)
            {
                self.drain(now, index);
                self.lost(now, index, child, CompletionStatus::Flushed);
            }
        }
        while let Some(index) = self.endpoint.memory_mut().take_ready() {
            self.report(index);
            self.begin_end(now, index);
            let ports = self.endpoint.memory().get(index).map_or(0, |c| c.ports());
            for port in 0..ports {
                let memory = self.endpoint.memory_mut();
                if memory.get_mut(index).is_some_and(|it| it.closes_silently(port)) {
                    self.end(now, index, port);
                }
                self.send(now, index, port);
            }
            self.report_end(index);
        }
    }

    /// Has nodes above told what some have called here, and others not yet.
    fn tell_first_calls(&mut self, now: Instant) {
        let memory = self.endpoint.memory_mut();
        for index in 0..self.queues.len() as u32 {
            let progress = memory.get_mut(index).map(Communicator::tell_first_call);
            memory.mark(index, progress.unwrap_or(Progress::None));
        }
        self.settle(now);
    }

    /// Asks all ports from which something is awaited whether anybody is there. Whether there are any.
    fn probe(&mut self, now: Instant) -> bool {
        let mut waits = false;
        for index in 0..self.queues.len() as u32 {
            let ports = self.endpoint.memory().get(index).map_or(0, |c| c.ports());
            for port in 0..ports {
                let memory = self.endpoint.memory_mut();
                let Some(communicator) = memory.get_mut(index) else { break };
                if !communicator.awaits(port) {
                    continue;
                }
                waits = true;
                let (qpn, request) = (communicator.qpn(port), communicator.probe(port));
                if let Some(request) = request {
                    let posted = self.endpoint.post_send(now, qpn, &request);
                    debug_assert_eq!(posted, Ok(()), "nothing else was under way");
                }
            }
        }
        waits
    }

    /// Posts what a port is owed, as far as its send queue has room.
    fn send(&mut self, now: Instant, index: u32, port: usize) {
        while let Some(communicator) = self.endpoint.memory_mut().get_mut(index) {
            let Some(request) = communicator.next_send(port) else { return };
            let qpn = communicator.qpn(port);
            // A queue pair that has failed takes it and flushes it.
            let posted = self.endpoint.post_send(now, qpn, &request);
            debug_assert_eq!(posted, Ok(()), "next_send counts what the queue holds");
        }
    }
}

/// What a child has done when its connection ends like this; `None` when it is silent, or has failed inside.
const fn broken_by(status: CompletionStatus) -> Option<Violation> {
    Some(match status {
        CompletionStatus::RetryExceeded | CompletionStatus::RemoteOperational => return None,
        CompletionStatus::RemoteAccess => Violation::Destination,
        CompletionStatus::ReceiverNotReadyExceeded => Violation::Receives,
        CompletionStatus::BadResponse | CompletionStatus::RemoteInvalidRequest => {
            Violation::Response
        }
        // Our end refused a request, which ends the connection without a word of its own.
        CompletionStatus::Flushed
        | CompletionStatus::LocalLength
        | CompletionStatus::LocalProtection
        | CompletionStatus::Other(_)
        | CompletionStatus::Success => Violation::Request,
    })
}

impl Node for SwitchNode {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        self.endpoint.handle_datagram_alone(now, meta, datagram);
        // Only the queue pair that the packet is for can have completed anything. Its number is
        // in bytes 5 to 7 of the base transport header, behind the opcode.
        let Some((&opcode, &[a, b, c])) =
            datagram.first().zip(datagram.get(5..8).and_then(|bytes| bytes.as_array()))
        else {
            return;
        };
        let qpn = Qpn::from_bytes([a, b, c]);
        let Some(&(index, _)) = self.edges.get(&qpn) else { return };
        // A SEND, or the end of a WRITE of the switch above: what it says comes before what follows it.
        let tells = Opcode::from_byte(opcode)
            .is_ok_and(|it| it.operation() == Operation::Send || it.has_immediate());
        if tells {
            self.drain(now, index);
        }
        while self.endpoint.handle_next_early(now, qpn) {
            self.drain(now, index);
        }
        if self.touched.last() != Some(&index) && !self.touched.contains(&index) {
            self.touched.push(index);
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        if self.endpoint.poll_timeout().is_some_and(|at| at <= now) {
            // A deadline may break any connection.
            self.touched.clear();
            self.touched.extend(0..self.queues.len() as u32);
        }
        self.endpoint.handle_timeout(now);
        // Drivers call this in each round, with what has come in it not acted on yet.
        self.catch_up(now);
        self.end_overdue(now);
        if self.tell_at.take_if(|at| *at <= now).is_some() {
            self.tell_first_calls(now);
        }
        if self.probe_at.take_if(|at| *at <= now).is_some() && self.probe(now) {
            self.probe_at = Some(now + self.config.probe_interval);
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        let ending = self.ending.front().map(|&(until, _)| until);
        let own = [self.probe_at, self.tell_at, ending];
        self.endpoint.poll_timeout().into_iter().chain(own.into_iter().flatten()).min()
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        self.catch_up(now);
        self.endpoint.poll_transmit(now, transmit)
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        self.endpoint.bytes(piece)
    }
}
