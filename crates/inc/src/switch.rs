//! The switch: an endpoint whose memory adds, and the bookkeeping around it.

use core::net::IpAddr;
use std::collections::{HashMap, VecDeque};

use millstream_roce::{
    Access, AsyncEvent, Completion, CompletionOperation, CompletionQueueId, CompletionStatus,
    Counters, DatagramMeta, Endpoint, EndpointConfig, IcrcCheck, Instant, Node, Piece,
    QueuePairAttributes, QueuePairCapabilities, QueuePairConfig, QueuePairState, Transmit,
};
use millstream_wire::{Psn, Qpn};
use thiserror::Error;

use crate::abort::{Abort, Mismatch, Violation};
use crate::aggregator::Aggregator;
use crate::communicator::{CommunicatorStatistics, Tag};
use crate::spec::{ChildSpec, CommunicatorSpec, RECEIVES_PER_CHILD, SpecError};

/// What a switch is made with.
#[derive(Clone, Debug)]
pub struct SwitchConfig {
    /// Its address on the data network.
    pub address: IpAddr,
    /// Seeds queue pair numbers and first packet sequence numbers. A restarted switch must use
    /// another one, so that packets meant for the old one do not match.
    pub seed: u64,
    /// How the ICRC of arriving packets is checked.
    pub icrc: IcrcCheck,
    /// At most so many communicators.
    pub max_communicators: usize,
    /// At most so many bytes of slots in all communicators.
    pub max_memory: u64,
    /// Acknowledgement timeout on every edge: 4.096 us * 2^n.
    pub timeout: u8,
    /// A child that is silent for `retry_count` + 1 timeouts is lost.
    pub retry_count: u8,
}

impl SwitchConfig {
    /// The defaults: 64 communicators, 1 GiB, children lost after 4.3 s of silence.
    pub const fn new(address: IpAddr, seed: u64) -> Self {
        Self {
            address,
            seed,
            icrc: IcrcCheck::AnyIdentification,
            max_communicators: 64,
            max_memory: 1 << 30,
            timeout: 17,
            retry_count: 7,
        }
    }
}

/// The switch's end of the connection to one child.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Edge {
    /// The child.
    pub rank: u32,
    /// The switch's queue pair for it.
    pub qpn: Qpn,
    /// The first packet sequence number that the switch sends to it.
    pub psn: Psn,
}

/// Something that whoever controls the switch should know.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SwitchEvent {
    /// The connection to a child broke, and with it the communicator.
    ChildLost {
        /// The communicator.
        communicator: u64,
        /// The child.
        rank: u32,
        /// How its connection ended.
        status: CompletionStatus,
    },
    /// The ranks do not agree on what to compute; the communicator is being aborted.
    Mismatch {
        /// The communicator.
        communicator: u64,
        /// Who differs, and in what.
        mismatch: Mismatch,
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
    /// Every child that can be reached has confirmed that it knows of the abort. What is left is
    /// to destroy the communicator.
    Aborted {
        /// The communicator.
        communicator: u64,
        /// Why.
        abort: Abort,
    },
}

/// Why a communicator could not be made. Nothing is left of it.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum CreateError {
    /// The specification is no good.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is one with this number.
    #[error("communicator {0} exists already")]
    Exists(u64),
    /// The switch has as many as it can.
    #[error("the switch has its {limit} communicators already")]
    TooMany {
        /// How many.
        limit: usize,
    },
    /// The slots would take more memory than is left.
    #[error(
        "the slots need {needed} bytes and the switch has {available} left: \
         use a smaller window or segment, or raise max_memory"
    )]
    Memory {
        /// What the specification takes.
        needed: u64,
        /// What is left.
        available: u64,
    },
    /// The device refused a queue.
    #[error("the switch's device cannot serve the communicator: {0}")]
    Device(#[from] millstream_roce::CreateError),
    /// A queue pair could not be connected.
    #[error("the queue pair for rank {rank} cannot be connected: {error}")]
    Connect {
        /// The child.
        rank: u32,
        /// Why.
        error: millstream_roce::ModifyError,
    },
}

/// A switch that computes: a [`Node`] for drivers and the simulator.
#[derive(Debug)]
pub struct SwitchNode {
    config: SwitchConfig,
    endpoint: Endpoint<Aggregator>,
    /// Index of the aggregator, by number.
    communicators: HashMap<u64, u32>,
    /// Index and child, by queue pair.
    edges: HashMap<Qpn, (u32, usize)>,
    /// By index.
    queues: Vec<Option<CompletionQueueId>>,
    memory_used: u64,
    events: VecDeque<SwitchEvent>,
    /// Kept for its allocation.
    completions: Vec<Completion>,
    random: u64,
}

impl SwitchNode {
    /// A switch without communicators.
    pub fn new(config: SwitchConfig) -> Self {
        let endpoint_config = EndpointConfig {
            icrc: config.icrc,
            max_completion_queues: config.max_communicators,
            ..EndpointConfig::new(config.address, config.seed)
        };
        Self {
            endpoint: Endpoint::new(endpoint_config, Aggregator::default()),
            communicators: HashMap::new(),
            edges: HashMap::new(),
            queues: Vec::new(),
            memory_used: 0,
            events: VecDeque::new(),
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

    /// What its endpoint has counted.
    pub fn counters(&self) -> &Counters {
        self.endpoint.counters()
    }

    /// How many communicators there are.
    pub fn communicators(&self) -> usize {
        self.communicators.len()
    }

    /// What a communicator has counted.
    pub fn statistics(&self, id: u64) -> Option<CommunicatorStatistics> {
        let index = *self.communicators.get(&id)?;
        Some(self.endpoint.memory().get(index)?.statistics())
    }

    /// The next thing that happened.
    pub fn poll_event(&mut self) -> Option<SwitchEvent> {
        self.events.pop_front()
    }

    /// Makes a communicator, ready for its children, and returns its edges in the order of ranks.
    pub fn create_communicator(
        &mut self,
        now: Instant,
        spec: &CommunicatorSpec,
    ) -> Result<Vec<Edge>, CreateError> {
        spec.check()?;
        if self.communicators.contains_key(&spec.id) {
            return Err(CreateError::Exists(spec.id));
        }
        if self.communicators.len() >= self.config.max_communicators {
            return Err(CreateError::TooMany { limit: self.config.max_communicators });
        }
        let (needed, available) =
            (spec.memory_bytes(), self.config.max_memory.saturating_sub(self.memory_used));
        if needed > available {
            return Err(CreateError::Memory { needed, available });
        }
        let requests = spec.send_requests() as usize + RECEIVES_PER_CHILD;
        let queue = self.endpoint.create_completion_queue(spec.children.len() * requests)?;
        let index = self.endpoint.memory_mut().create(spec);
        if self.queues.len() <= index as usize {
            self.queues.resize(index as usize + 1, None);
        }
        self.queues[index as usize] = Some(queue);
        self.communicators.insert(spec.id, index);
        self.memory_used += needed;
        let edges = self.create_edges(now, spec, index, queue);
        if edges.is_err() {
            self.destroy(spec.id);
        }
        edges
    }

    fn create_edges(
        &mut self,
        now: Instant,
        spec: &CommunicatorSpec,
        index: u32,
        queue: CompletionQueueId,
    ) -> Result<Vec<Edge>, CreateError> {
        let mut children = spec.children.clone();
        children.sort_unstable_by_key(|child| child.rank);
        let mut edges = Vec::with_capacity(children.len());
        for (number, child) in children.iter().enumerate() {
            let Some(communicator) = self.endpoint.memory_mut().get_mut(index) else { break };
            let receives: [_; RECEIVES_PER_CHILD] =
                core::array::from_fn(|buffer| communicator.receive_request(number, buffer));
            let config = QueuePairConfig {
                domain: communicator.children[number].domain,
                send_completions: queue,
                receive_completions: queue,
                capabilities: QueuePairCapabilities {
                    max_send_requests: spec.send_requests() as usize,
                    max_receive_requests: RECEIVES_PER_CHILD,
                },
            };
            let qpn = self.endpoint.create_queue_pair(&config)?;
            self.edges.insert(qpn, (index, number));
            if let Some(communicator) = self.endpoint.memory_mut().get_mut(index) {
                communicator.children[number].qpn = qpn;
            }
            let psn = Psn::from_extended(self.random());
            for attributes in self.path_to(child, spec, psn) {
                self.endpoint
                    .modify_queue_pair(now, qpn, &attributes)
                    .map_err(|error| CreateError::Connect { rank: child.rank, error })?;
            }
            for receive in &receives {
                let posted = self.endpoint.post_receive(qpn, receive);
                debug_assert_eq!(posted, Ok(()), "there is room for as many as the queue holds");
            }
            edges.push(Edge { rank: child.rank, qpn, psn });
        }
        Ok(edges)
    }

    /// The steps that connect a queue pair to a child.
    fn path_to(
        &self,
        child: &ChildSpec,
        spec: &CommunicatorSpec,
        psn: Psn,
    ) -> [QueuePairAttributes; 3] {
        let none = QueuePairAttributes::default();
        [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(child.address),
                path_mtu: Some(spec.path_mtu),
                destination_qpn: Some(child.qpn),
                receive_psn: Some(child.psn),
                responder_resources: Some(0),
                // 0.64 ms: a child that sends descriptors faster than it may can wait.
                minimum_rnr_timer: Some(12),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(psn),
                timeout: Some(self.config.timeout),
                retry_count: Some(self.config.retry_count),
                // A host posts its receives before it sends what they answer, so a host that is
                // not ready stays so. Not 7, which would be for ever.
                rnr_retry: Some(6),
                initiator_depth: Some(0),
                ..none
            },
        ]
    }

    /// Removes a communicator at once; hosts that were not told hear nothing more. `false` when
    /// there is none.
    pub fn destroy_communicator(&mut self, _now: Instant, id: u64) -> bool {
        self.destroy(id)
    }

    fn destroy(&mut self, id: u64) -> bool {
        let Some(index) = self.communicators.remove(&id) else { return false };
        self.edges.retain(|&qpn, &mut (other, _)| {
            if other == index {
                self.endpoint.destroy_queue_pair(qpn);
            }
            other != index
        });
        if let Some(queue) = self.queues[index as usize].take() {
            let destroyed = self.endpoint.destroy_completion_queue(queue);
            debug_assert_eq!(destroyed, Ok(()), "its queue pairs are gone");
        }
        if let Some(communicator) = self.endpoint.memory().get(index) {
            self.memory_used -= communicator.memory_bytes();
        }
        self.endpoint.memory_mut().destroy(index);
        true
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
            }
            // A SEND that is longer than any descriptor.
            (CompletionStatus::LocalLength, Tag::Receive { .. }) => {
                self.endpoint.memory_mut().violation(index, child, Violation::Descriptor);
            }
            (CompletionStatus::Success, tag) => {
                let memory = self.endpoint.memory_mut();
                if let Some(communicator) = memory.get_mut(index) {
                    let progress = communicator.delivered(child, tag);
                    memory.mark(index, progress);
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
        let outcome = if completion.operation == CompletionOperation::Receive {
            communicator.announce(child, buffer, completion.length as usize)
        } else {
            Err(Violation::Immediate)
        };
        let request = communicator.receive_request(child, buffer);
        let qpn = communicator.children[child].qpn;
        match outcome {
            Ok(progress) => memory.mark(index, progress),
            Err(violation) => memory.violation(index, child, violation),
        }
        // A queue pair that has failed takes it and flushes it.
        let posted = self.endpoint.post_receive(qpn, &request);
        debug_assert_eq!(posted, Ok(()), "the request that this one replaces is complete");
    }

    /// The connection to a child is broken. Only silence means that the child is gone: all else it
    /// or its device has done.
    fn lost(&mut self, now: Instant, index: u32, child: usize, status: CompletionStatus) {
        let memory = self.endpoint.memory_mut();
        let Some(communicator) = memory.get_mut(index) else { return };
        if communicator.has_ended(child) {
            return;
        }
        let (id, rank) = (communicator.id, communicator.children[child].rank);
        if communicator.aborted().is_none() {
            let abort = match broken_by(status) {
                Some(violation) => Abort::Violation { rank, violation },
                None => Abort::PeerLost { rank },
            };
            let progress = communicator.abort(abort);
            memory.mark(index, progress);
            self.events.push_back(SwitchEvent::ChildLost { communicator: id, rank, status });
        }
        self.end(now, index, child);
    }

    /// Nothing more is expected of a child: it was told of the abort, or is lost.
    fn end(&mut self, now: Instant, index: u32, child: usize) {
        self.report(index);
        let Some(communicator) = self.endpoint.memory_mut().get_mut(index) else { return };
        let newly = communicator.end(child);
        let (id, qpn) = (communicator.id, communicator.children[child].qpn);
        if let Some(abort) = communicator.aborted()
            && newly
            && communicator.all_ended()
        {
            self.events.push_back(SwitchEvent::Aborted { communicator: id, abort });
        }
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
        let (id, abort) = (communicator.id, communicator.take_report());
        self.events.extend(match abort {
            Some(Abort::Mismatch(mismatch)) => {
                Some(SwitchEvent::Mismatch { communicator: id, mismatch })
            }
            Some(Abort::Violation { rank, violation }) => {
                Some(SwitchEvent::Violation { communicator: id, rank, violation })
            }
            // Told already, or asked for.
            Some(Abort::PeerLost { .. } | Abort::Requested { .. }) | None => None,
        });
    }

    /// Acts on events of the endpoint, then sends what communicators owe their children.
    fn settle(&mut self, now: Instant) {
        while let Some(event) = self.endpoint.poll_event() {
            // Overruns cannot be: a completion queue has room for all requests that it serves.
            if let AsyncEvent::QueuePairFatal(qpn) = event
                && let Some(&(index, child)) = self.edges.get(&qpn)
            {
                self.drain(now, index);
                self.lost(now, index, child, CompletionStatus::Flushed);
            }
        }
        while let Some(index) = self.endpoint.memory_mut().take_ready() {
            self.report(index);
            let children = self.endpoint.memory().get(index).map_or(0, |c| c.children.len());
            for child in 0..children {
                self.send(now, index, child);
            }
        }
    }

    /// Posts what a child is owed, as far as its send queue has room.
    fn send(&mut self, now: Instant, index: u32, child: usize) {
        while let Some(communicator) = self.endpoint.memory_mut().get_mut(index) {
            let Some(request) = communicator.next_send(child) else { return };
            let qpn = communicator.children[child].qpn;
            // A queue pair that has failed takes it and flushes it.
            let posted = self.endpoint.post_send(now, qpn, &request);
            debug_assert_eq!(posted, Ok(()), "next_send counts what the queue holds");
        }
    }

    /// SplitMix64, as the endpoint's queue pair numbers.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// What a child has done when its connection ends like this; `None` when it is silent.
const fn broken_by(status: CompletionStatus) -> Option<Violation> {
    Some(match status {
        CompletionStatus::RetryExceeded => return None,
        CompletionStatus::RemoteAccess => Violation::Destination,
        CompletionStatus::ReceiverNotReadyExceeded => Violation::Receives,
        CompletionStatus::BadResponse
        | CompletionStatus::RemoteInvalidRequest
        | CompletionStatus::RemoteOperational => Violation::Response,
        // Our end refused a request, which ends the connection without a word of its own.
        CompletionStatus::Flushed
        | CompletionStatus::LocalLength
        | CompletionStatus::LocalProtection
        | CompletionStatus::Success => Violation::Request,
    })
}

impl Node for SwitchNode {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        self.endpoint.handle_datagram(now, meta, datagram);
        // Only the queue pair that the packet is for can have completed anything. Its number is
        // in bytes 5 to 7 of the base transport header.
        let Some(&[a, b, c]) = datagram.get(5..8).and_then(|bytes| bytes.as_array()) else {
            return;
        };
        if let Some(&(index, _)) = self.edges.get(&Qpn::from_bytes([a, b, c])) {
            self.drain(now, index);
            self.settle(now);
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.endpoint.handle_timeout(now);
        for index in 0..self.queues.len() as u32 {
            self.drain(now, index);
        }
        self.settle(now);
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.endpoint.poll_timeout()
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        self.endpoint.poll_transmit(now, transmit)
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        self.endpoint.bytes(piece)
    }
}
