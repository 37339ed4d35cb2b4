//! The endpoint: one device's queue pairs, completion queues and memory, and who gets what.

use std::collections::VecDeque;

use millstream_wire::{Bth, Mtu, Opcode, Operation, Packet, ParseError, Psn, Qpn, Reth};

use crate::Instant;
use crate::attributes::{Attribute, ModifyError, QueuePairAttributes, QueuePairState};
use crate::budget::{ReceiveBudget, cost};
use crate::completion::{
    Completion, CompletionQueue, CompletionQueueId, CompletionStatus, MAX_COMPLETIONS,
};
use crate::config::{EndpointConfig, QueuePairCapabilities, QueuePairConfig, Transport};
use crate::counters::{Baseline, Counters, QueuePairCounters};
use crate::error::{CreateError, PostError};
use crate::events::{AsyncEvent, Events};
use crate::icrc_check::Solvers;
use crate::inline::MAX_INLINE;
use crate::memory::Memory;
use crate::node::{DatagramMeta, Node, Transmit};
use crate::notifications::Notifications;
use crate::numbers::{INDEX_BITS, Numbers};
use crate::queue_pair::QueuePair;
use crate::receives::{Receives, SharedReceiveQueues};
use crate::requester::window_limit;
use crate::timers::Timers;
use crate::work::{Piece, ReceiveRequest, SendRequest};

/// Packets that one queue pair sends before the next has its turn: what a segmented send holds.
pub(crate) const BURST: u32 = 16;

/// What queue pairs share.
#[derive(Debug)]
pub(crate) struct Shared<M> {
    pub(crate) config: EndpointConfig,
    pub(crate) memory: M,
    pub(crate) counters: Counters,
    pub(crate) budget: ReceiveBudget,
    completion_queues: Vec<Option<CompletionQueue>>,
    pub(crate) receive_queues: SharedReceiveQueues,
    events: Events,
    notifications: Notifications,
    /// Some completion queue lost a completion.
    overrun: bool,
}

impl<M> Shared<M> {
    pub(crate) fn complete(&mut self, queue: CompletionQueueId, completion: Completion) {
        self.complete_receive(queue, completion, false);
    }

    /// With whether the sender asked for a solicited event.
    pub(crate) fn complete_receive(
        &mut self,
        queue: CompletionQueueId,
        completion: Completion,
        solicited: bool,
    ) {
        let solicits = solicited || completion.status != CompletionStatus::Success;
        self.notifications.completed(queue, solicits);
        let queue_entry = self.completion_queues.get_mut(queue.0 as usize);
        if let Some(Some(entry)) = queue_entry
            && !entry.push(completion, solicited)
        {
            self.overrun = true;
            self.event(AsyncEvent::CompletionQueueOverrun(queue));
        }
    }

    /// Whether a completion queue lost a completion.
    fn is_overrun(&self, queue: CompletionQueueId) -> bool {
        let entry = self.completion_queues.get(queue.0 as usize).and_then(Option::as_ref);
        entry.is_some_and(CompletionQueue::is_overrun)
    }

    /// Completions that wait, and the room for them.
    pub(crate) fn completion_usage(&self) -> (usize, usize) {
        let queues = || self.completion_queues.iter().flatten();
        (queues().map(CompletionQueue::len).sum(), queues().map(CompletionQueue::capacity).sum())
    }

    pub(crate) fn event(&mut self, event: AsyncEvent) {
        self.notifications.events = true;
        if !self.events.push(event) {
            self.counters.events_lost += 1;
        }
    }
}

/// One RoCEv2 device as a state machine. See the crate's documentation for how to drive it.
#[derive(Debug)]
pub struct Endpoint<M> {
    pub(crate) shared: Shared<M>,
    pub(crate) queue_pairs: Vec<Option<Box<QueuePair>>>,
    numbers: Numbers,
    /// Queue pairs that may have something to send, each once (its `ready` flag).
    ready: VecDeque<u32>,
    burst: u32,
    pub(crate) timers: Timers,
    pub(crate) solvers: Solvers,
    /// Whose packets the memory has not flushed: a queue pair's, and whether they are responses.
    unflushed: Option<(u32, bool)>,
    /// [`Endpoint::fail_all`] was called.
    failed: bool,
}

/// The index that a queue pair number holds.
pub(crate) const fn index_of(qpn: Qpn) -> u32 {
    qpn.value() & ((1 << INDEX_BITS) - 1)
}

impl<M: Memory> Endpoint<M> {
    /// A device without queue pairs.
    pub fn new(config: EndpointConfig, memory: M) -> Self {
        let numbers = Numbers::new(config.queue_pair_numbers, config.seed);
        Self {
            shared: Shared {
                config,
                memory,
                counters: Counters::default(),
                budget: ReceiveBudget::UNLIMITED,
                completion_queues: Vec::new(),
                receive_queues: SharedReceiveQueues::default(),
                events: Events::default(),
                notifications: Notifications::default(),
                overrun: false,
            },
            queue_pairs: Vec::new(),
            numbers,
            ready: VecDeque::new(),
            burst: 0,
            timers: Timers::default(),
            solvers: Solvers::default(),
            unflushed: None,
            failed: false,
        }
    }

    /// What it was made with.
    pub fn config(&self) -> &EndpointConfig {
        &self.shared.config
    }

    /// What it delivers into.
    pub fn memory(&self) -> &M {
        &self.shared.memory
    }

    /// What it delivers into, to change.
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.shared.memory
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// What one of its queue pairs has counted since it was made; `None` when there is none of this number.
    pub fn queue_pair_counters(&self, qpn: Qpn) -> Option<QueuePairCounters> {
        Some(self.queue_pairs[self.index(qpn)?].as_ref()?.counters)
    }

    /// Says how many bytes of packets its receive buffer holds, which all queue pairs share: no more
    /// is asked for by READs at a time, and peers are granted shares of it. Without this there is
    /// no limit. Queue pairs that are connected already may ask for more with one request.
    pub fn set_receive_budget(&mut self, bytes: u64) {
        self.shared.budget.set_limit(bytes);
    }

    /// What a new peer with so many queue pairs is to be told that it may have in flight to this
    /// device, in bytes of packets and of what the buffer needs beside them: as much as such queue
    /// pairs have in flight if they are made like ours, but an eighth of the budget at most, and half
    /// of what no other peer has, unless a fast connection needs more. `None` when there is no limit.
    ///
    /// As long as all shares fit the budget, what peers send within them finds room. The more peers
    /// there are at the same time, the less is guaranteed: then some of it may be lost, and
    /// congestion control finds out how much is too much.
    pub fn grant_receive_share(&mut self, queue_pairs: usize) -> Option<u64> {
        let window = u64::from(self.shared.config.max_window);
        let packet = cost(Mtu::B4096.bytes() as u64, 1);
        self.shared.budget.grant(window.saturating_mul(packet).saturating_mul(queue_pairs as u64))
    }

    /// What each of so many new peers is to be told that it may have in flight to one queue pair of this device, in bytes
    /// as of [`Endpoint::grant_receive_share`]: of peers that come together and send at the same time, as the children of
    /// a switch do. It is as much as one such queue pair has in flight with this path MTU, but its part of half of the
    /// budget that no other peer has at most; of a buffer too small for that, its part of all. `None` when there is no limit.
    pub fn grant_receive_shares(&mut self, peers: usize, path_mtu: Mtu) -> Option<u64> {
        let window = u64::from(window_limit(self.shared.config.max_window, path_mtu));
        let packet = cost(path_mtu.bytes() as u64, 1);
        self.shared.budget.grant_each(peers as u64, window.saturating_mul(packet))
    }

    /// A peer that was granted this is gone.
    pub fn withdraw_receive_share(&mut self, bytes: u64) {
        self.shared.budget.withdraw(bytes);
    }

    /// What READs have asked for and what has not come, in bytes of the budget.
    pub fn requested_bytes(&self) -> u64 {
        self.shared.budget.requested()
    }

    /// Makes a completion queue that holds `capacity` completions.
    pub fn create_completion_queue(
        &mut self,
        capacity: usize,
    ) -> Result<CompletionQueueId, CreateError> {
        if capacity == 0 || capacity > MAX_COMPLETIONS {
            let (what, limit) = ("completion queue capacity", MAX_COMPLETIONS);
            return Err(CreateError::OutOfRange { what, value: capacity, limit });
        }
        let queues = &mut self.shared.completion_queues;
        let limit = self.shared.config.max_completion_queues;
        let index = match queues.iter().position(Option::is_none) {
            Some(index) => index,
            None if queues.len() < limit => {
                queues.push(None);
                queues.len() - 1
            }
            None => return Err(CreateError::TooMany { what: "completion queues", limit }),
        };
        queues[index] = Some(CompletionQueue::new(capacity));
        Ok(CompletionQueueId(index as u32))
    }

    /// Removes a completion queue that no queue pair uses.
    pub fn destroy_completion_queue(&mut self, id: CompletionQueueId) -> Result<(), CreateError> {
        let used = |pair: &QueuePair| pair.send_completions == id || pair.receive_completions == id;
        if self.queue_pairs.iter().flatten().any(|pair| used(pair)) {
            return Err(CreateError::InUse(id));
        }
        let queue = self.shared.completion_queues.get_mut(id.0 as usize);
        queue.and_then(Option::take).map(drop).ok_or(CreateError::UnknownCompletionQueue(id))
    }

    /// Makes a queue pair in state RESET.
    pub fn create_queue_pair(&mut self, config: &QueuePairConfig) -> Result<Qpn, CreateError> {
        let limit = self.shared.config.max_work_requests;
        let QueuePairCapabilities { max_send_requests, max_receive_requests, .. } =
            config.capabilities;
        for (what, value) in [
            ("max_send_requests", max_send_requests),
            ("max_receive_requests", max_receive_requests),
        ] {
            let unused = what == "max_receive_requests" && config.shared_receive_queue.is_some();
            if !unused && (value == 0 || value > limit) {
                return Err(CreateError::OutOfRange { what, value, limit });
            }
        }
        let (value, limit) = (config.capabilities.max_inline, MAX_INLINE);
        if value > limit {
            return Err(CreateError::OutOfRange { what: "max_inline", value, limit });
        }
        if let Some(id) = config.shared_receive_queue
            && !self.shared.receive_queues.contains(id)
        {
            return Err(CreateError::UnknownSharedReceiveQueue(id));
        }
        for id in [config.send_completions, config.receive_completions] {
            if !matches!(self.shared.completion_queues.get(id.0 as usize), Some(Some(_))) {
                return Err(CreateError::UnknownCompletionQueue(id));
            }
        }
        let limit = self.shared.config.max_queue_pairs.min(1 << INDEX_BITS);
        let free = if self.numbers.in_use() < limit { self.numbers.take() } else { None };
        let (index, qpn) = free.ok_or(CreateError::TooMany { what: "queue pairs", limit })?;
        if index == self.queue_pairs.len() {
            self.queue_pairs.push(None);
        }
        let pair = QueuePair::new(qpn, config, &self.shared.config);
        self.queue_pairs[index] = Some(Box::new(pair));
        Ok(qpn)
    }

    /// Removes a queue pair. Its outstanding requests end without completions.
    pub fn destroy_queue_pair(&mut self, qpn: Qpn) -> bool {
        let Some(index) = self.index(qpn) else { return false };
        if let Some(pair) = &mut self.queue_pairs[index] {
            pair.requester.stop(&mut self.shared.budget);
            self.shared.budget.leave(index as u32, &mut pair.requester.turn);
        }
        self.queue_pairs[index] = None;
        self.ready.retain(|&other| other as usize != index);
        self.timers.forget(index as u32);
        self.numbers.give_back(index);
        true
    }

    /// The state of a queue pair.
    pub fn queue_pair_state(&self, qpn: Qpn) -> Option<QueuePairState> {
        let index = self.index(qpn)?;
        self.queue_pairs[index].as_ref().map(|pair| pair.state)
    }

    /// Whether a queue pair has a READ that is not sent yet, because its answer does not fit the receive
    /// buffer beside those that are on their way.
    pub fn waits_for_receive_buffer(&self, qpn: Qpn) -> bool {
        let pair = self.index(qpn).and_then(|index| self.queue_pairs[index].as_ref());
        pair.is_some_and(|pair| pair.requester.turn.waits_for.is_some())
    }

    /// The packet sequence number that a queue pair expects next (`rq_psn` of `ibv_query_qp`). It
    /// moves with each request of the peer.
    pub fn receive_psn(&self, qpn: Qpn) -> Option<Psn> {
        let index = self.index(qpn)?;
        self.queue_pairs[index].as_ref().map(|pair| pair.responder.receive_psn())
    }

    /// Changes attributes and state of a queue pair; on error nothing changes.
    pub fn modify_queue_pair(
        &mut self,
        _now: Instant,
        qpn: Qpn,
        attributes: &QueuePairAttributes,
    ) -> Result<(), ModifyError> {
        let config = &self.shared.config;
        let index = self.index(qpn).ok_or(ModifyError::Unknown(qpn))?;
        let Some(pair) = self.queue_pairs[index].as_mut() else {
            return Err(ModifyError::Unknown(qpn));
        };
        let to = attributes.check(pair.transport, pair.state, config.address.into())?;
        if let Some(index) = attributes.partition_key_index
            && config.partition_key(index).is_none()
        {
            let (attribute, value) = (Attribute::PartitionKeyIndex, index.into());
            let range = "an index into EndpointConfig::partition_keys";
            return Err(ModifyError::OutOfRange { attribute, value, range });
        }
        match to {
            QueuePairState::Reset => {
                pair.requester.stop(&mut self.shared.budget);
                self.shared.budget.leave(index as u32, &mut pair.requester.turn);
                pair.reset(config);
            }
            QueuePairState::Error => pair.close(&mut self.shared),
            _ => {
                if pair.is_draining() {
                    return Err(ModifyError::Draining(qpn));
                }
                pair.apply(attributes, config, &self.shared.budget);
                pair.enter(to);
            }
        }
        self.after_change(index);
        Ok(())
    }

    /// Appends a request to the send queue.
    pub fn post_send<P: AsRef<[Piece]>>(
        &mut self,
        now: Instant,
        qpn: Qpn,
        request: &SendRequest<P>,
    ) -> Result<(), PostError> {
        self.post_sends(now, qpn, core::slice::from_ref(request)).map_err(|(_, error)| error)
    }

    /// Appends requests to the send queue, in order. On error, the number that were accepted
    /// before the one that was not.
    pub fn post_sends<P: AsRef<[Piece]>>(
        &mut self,
        _now: Instant,
        qpn: Qpn,
        requests: &[SendRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        let index = self.index(qpn).ok_or((0, PostError::Unknown(qpn)))?;
        let mut requests = requests.iter().enumerate();
        let posted = requests.try_for_each(|(position, request)| {
            self.post(index, &request.borrowed(), None).map_err(|error| (position, error))
        });
        if !matches!(posted, Err((0, _))) {
            self.after_change(index);
        }
        posted
    }

    /// Appends a request to the send queue that brings its bytes along, and has no pieces. They are
    /// copied, and need no region.
    pub fn post_send_inline<P: AsRef<[Piece]>>(
        &mut self,
        _now: Instant,
        qpn: Qpn,
        request: &SendRequest<P>,
        bytes: &[u8],
    ) -> Result<(), PostError> {
        let index = self.index(qpn).ok_or(PostError::Unknown(qpn))?;
        let limit = self.queue_pairs[index].as_ref().map_or(0, |p| p.capabilities.max_inline);
        request.check_inline(qpn, bytes, limit)?;
        self.post(index, &request.borrowed(), Some(bytes))?;
        self.after_change(index);
        Ok(())
    }

    /// Appends a request to the send queue of the queue pair at this index; `after_change` must
    /// follow.
    fn post(
        &mut self,
        index: usize,
        request: &SendRequest<&[Piece]>,
        inline: Option<&[u8]>,
    ) -> Result<(), PostError> {
        // Whoever gives the index has looked it up.
        let Some(pair) = self.queue_pairs[index].as_mut() else { return Ok(()) };
        let shared = &mut self.shared;
        let (qpn, state) = (pair.qpn, pair.state);
        if !state.takes_sends() {
            return Err(PostError::State { qpn, state });
        }
        if pair.transport == Transport::UnreliableDatagram {
            return pair.post_datagram(shared, request, inline);
        }
        if request.datagram.is_some() {
            return Err(PostError::DestinationNotAllowed(qpn));
        }
        request.check_pieces()?;
        let (length, limit) = (request.length(), shared.config.max_message_length);
        if length > limit.into() {
            return Err(PostError::TooLong { length, limit });
        }
        if pair.requester.is_full() {
            return Err(PostError::QueueFull { limit: pair.capabilities.max_send_requests });
        }
        request.operation.check_atomic(length)?;
        let fetches = request.operation.fetches();
        if fetches && pair.requester.initiator_depth == 0 && state.sends() {
            return Err(PostError::NoReads(qpn));
        }
        let allowed = |piece: &Piece| {
            piece.length == 0 || shared.memory.check_local(pair.domain, piece, fetches).is_ok()
        };
        let broken = !request.pieces.iter().all(allowed);
        pair.requester.post(request, length, inline, pair.path.mtu, broken);
        if state == QueuePairState::Error {
            // IBTA 10.8.3.1: accepted, and flushed at once.
            while let Some(work) = pair.requester.take_oldest() {
                let completion = work.completion(qpn, CompletionStatus::Flushed);
                shared.complete(pair.send_completions, completion);
            }
        }
        Ok(())
    }

    /// Appends a request to the receive queue.
    pub fn post_receive<P: AsRef<[Piece]>>(
        &mut self,
        qpn: Qpn,
        request: &ReceiveRequest<P>,
    ) -> Result<(), PostError> {
        let index = self.index(qpn).ok_or(PostError::Unknown(qpn))?;
        let Some(pair) = self.queue_pairs[index].as_mut() else {
            return Err(PostError::Unknown(qpn));
        };
        if pair.state == QueuePairState::Reset {
            return Err(PostError::State { qpn, state: pair.state });
        }
        pair.responder.receives.post(qpn, &request.borrowed())?;
        if pair.state == QueuePairState::Error {
            pair.flush_receives(&mut self.shared);
        }
        Ok(())
    }

    /// Moves up to `limit` completions from a queue to the end of `out`; returns how many.
    pub fn poll_completions(
        &mut self,
        queue: CompletionQueueId,
        out: &mut Vec<Completion>,
        limit: usize,
    ) -> usize {
        match self.shared.completion_queues.get_mut(queue.0 as usize) {
            Some(Some(queue)) => queue.poll(out, limit),
            _ => 0,
        }
    }

    /// How many completions wait in a queue.
    pub fn completions_waiting(&self, queue: CompletionQueueId) -> usize {
        match self.shared.completion_queues.get(queue.0 as usize) {
            Some(Some(queue)) => queue.len(),
            _ => 0,
        }
    }

    /// Whether a completion waits in a queue that raises a solicited event: of a receive whose
    /// sender asked for one ([`SendRequest::solicited`]), or of a request that failed (IBTA 11.4.2.2).
    pub fn solicited_waiting(&self, queue: CompletionQueueId) -> bool {
        match self.shared.completion_queues.get(queue.0 as usize) {
            Some(Some(queue)) => queue.has_solicited(),
            _ => false,
        }
    }

    /// Who should hear of what has happened since the last call: once for each completion and event.
    pub fn take_notifications(&mut self) -> Notifications {
        core::mem::take(&mut self.shared.notifications)
    }

    /// Whether somebody should hear of something.
    pub fn has_notifications(&self) -> bool {
        self.shared.notifications != Notifications::default()
    }

    /// Takes every queue pair to the error state: when a driver can no longer send or receive,
    /// whoever waits for a completion gets one. The first time is an event.
    pub fn fail_all(&mut self) {
        if !core::mem::replace(&mut self.failed, true) {
            self.shared.event(AsyncEvent::DeviceFatal);
        }
        for pair in self.queue_pairs.iter_mut().flatten() {
            pair.fail_fatally(&mut self.shared, None);
        }
    }

    /// The next event that was not asked for.
    pub fn poll_event(&mut self) -> Option<AsyncEvent> {
        self.shared.events.pop()
    }

    /// How many events wait.
    pub fn events_waiting(&self) -> usize {
        self.shared.events.len()
    }

    pub(crate) fn queue_pairs(&self) -> impl Iterator<Item = &QueuePair> {
        self.queue_pairs.iter().flatten().map(|pair| &**pair)
    }

    /// What the queue pairs take their receive requests from.
    pub(crate) fn receives_of_queue_pairs(&self) -> impl Iterator<Item = &Receives> {
        self.queue_pairs().map(|pair| &pair.responder.receives)
    }

    pub(crate) fn index(&self, qpn: Qpn) -> Option<usize> {
        let index = index_of(qpn) as usize;
        let pair = self.queue_pairs.get(index)?.as_ref()?;
        (pair.qpn == qpn).then_some(index)
    }

    /// Puts a queue pair on the ready list and its deadline into the timers.
    fn after_change(&mut self, index: usize) {
        let Some(pair) = self.queue_pairs[index].as_mut() else { return };
        // Nobody can know any more what became of its requests (IBTA 11.6.3.2: the queue is in
        // error, and so are the queue pairs that complete into it).
        let queues = [pair.send_completions, pair.receive_completions];
        if self.shared.overrun
            && pair.state != QueuePairState::Reset
            && queues.iter().any(|&queue| self.shared.is_overrun(queue))
        {
            pair.fail_fatally(&mut self.shared, None);
        }
        pair.report_drained(&mut self.shared);
        if !pair.ready {
            pair.ready = true;
            self.ready.push_back(index as u32);
        }
        self.arm(index);
    }

    /// Puts the queue pair that has waited longest for the receive budget on the ready list, when
    /// there is room for what it wants.
    fn call_waiting(&mut self) {
        let budget = &self.shared.budget;
        let Some(index) = budget.first_waiting() else { return };
        if let Some(pair) = &mut self.queue_pairs[index as usize]
            && !pair.ready
            && pair.requester.turn.waits_for.is_some_and(|bytes| budget.has_room(bytes))
        {
            pair.ready = true;
            self.ready.push_back(index);
        }
    }

    /// Flushes what queue pairs have written; whether that was nothing, or went well. Whose packets did not
    /// get where they belong, that queue pair fails.
    fn flush(&mut self) -> bool {
        let Some((index, responses)) = self.unflushed.take() else { return true };
        let index = index as usize;
        let Some(pair) = self.queue_pairs[index].as_mut() else { return true };
        let flushed = match responses {
            false => pair.flush_requests(&mut self.shared),
            true => self.shared.memory.flush().is_ok(),
        };
        if !flushed {
            if responses {
                pair.fail_fatally(&mut self.shared, Some(CompletionStatus::LocalProtection));
            }
            self.after_change(index);
        }
        flushed
    }

    fn arm(&mut self, index: usize) {
        if let Some(pair) = &self.queue_pairs[index]
            && let Some(deadline) = pair.deadline()
        {
            self.timers.arm(index as u32, deadline);
        }
    }
}

impl<M: Memory> Node for Endpoint<M> {
    fn expect(&self, datagram: &[u8]) {
        if let Some((bth, rest)) = datagram.split_first_chunk::<{ Bth::LENGTH }>()
            && let Ok(opcode) = Opcode::from_byte(bth[0])
            && opcode.has_reth()
            && opcode.operation() == Operation::Write
            && let Ok(reth) = Reth::parse(rest)
        {
            // The payload, and what may follow it, as a pad and the ICRC.
            let payload = (rest.len() - Reth::LENGTH) as u64;
            let length = payload.min(reth.dma_length.into());
            self.shared.memory.expect(reth.remote_key, reth.virtual_address, length);
        }
    }

    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        self.shared.counters.packets_received += 1;
        let packet = match Packet::parse(datagram) {
            Ok(packet) => packet,
            Err(ParseError::UnknownOpcode(_)) => {
                self.shared.counters.dropped_opcode += 1;
                return;
            }
            Err(_) => {
                self.shared.counters.dropped_malformed += 1;
                return;
            }
        };
        let Some(index) = self.admit(meta, datagram, &packet) else { return };
        if let Some(pair) = self.queue_pairs[index].as_mut() {
            pair.counters.packets_received += 1;
        }
        let source = (index as u32, packet.opcode.is_response());
        if let Some(unflushed) = self.unflushed.filter(|&unflushed| unflushed != source)
            && !self.flush()
            && unflushed.0 == source.0
        {
            // Its queue pair has just failed.
            return;
        }
        let Some(pair) = self.queue_pairs[index].as_mut() else { return };
        if packet.opcode.operation() == Operation::CongestionNotification {
            self.shared.counters.congestion_notifications += 1;
            pair.congestion.notified(now);
            return;
        }
        let reliable = pair.transport == Transport::ReliableConnection;
        if meta.congestion_experienced && reliable && !packet.payload.is_empty() {
            pair.congestion.marked(now);
        }
        let before = Baseline::of(&self.shared.counters);
        pair.communicate(&mut self.shared);
        if packet.opcode.has_deth() {
            pair.receive_datagram(&mut self.shared, meta, datagram.len(), &packet);
        } else if packet.opcode.is_response() {
            pair.handle_response(now, &mut self.shared, &packet);
        } else {
            pair.handle_request(now, &mut self.shared, &packet);
        }
        pair.counters.add_since(&before, &self.shared.counters);
        self.unflushed = (!self.shared.memory.is_flushed()).then_some(source);
        self.after_change(index);
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.flush();
        self.shared.memory.unstage();
        while let Some(index) = self.timers.pop_due(now) {
            let index = index as usize;
            let Some(pair) = self.queue_pairs[index].as_mut() else { continue };
            if pair.deadline().is_some_and(|deadline| deadline <= now) {
                pair.congestion.wait_is_over(now);
                pair.complete_datagrams(&mut self.shared);
                pair.acknowledge_if_due(now, &mut self.shared);
                let before = Baseline::of(&self.shared.counters);
                pair.handle_deadline(now, &mut self.shared);
                pair.counters.add_since(&before, &self.shared.counters);
                self.after_change(index);
            } else {
                self.arm(index);
            }
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        let pairs = &self.queue_pairs;
        let pair = |index: u32| pairs.get(index as usize)?.as_ref();
        self.timers.earliest(|index| pair(index)?.deadline())
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        loop {
            self.call_waiting();
            let Some(&index) = self.ready.front() else { return false };
            let Some(pair) = self.queue_pairs[index as usize].as_mut() else {
                self.ready.pop_front();
                continue;
            };
            pair.requester.turn.asked = false;
            let before = Baseline::of(&self.shared.counters);
            let sent = pair.transmit(now, &mut self.shared, transmit);
            if !sent {
                pair.ready = false;
                // Nobody waits behind one that wants nothing now.
                if !pair.requester.turn.asked {
                    self.shared.budget.leave(index, &mut pair.requester.turn);
                }
                self.ready.pop_front();
                self.burst = 0;
                self.arm(index as usize);
                continue;
            }
            transmit.source_qpn = pair.qpn;
            self.shared.counters.packets_sent += 1;
            pair.counters.packets_sent += 1;
            pair.counters.add_since(&before, &self.shared.counters);
            self.burst += 1;
            if self.burst >= BURST {
                self.burst = 0;
                self.ready.rotate_left(1);
            }
            self.arm(index as usize);
            return true;
        }
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        self.shared.memory.bytes(piece).ok()
    }
}
