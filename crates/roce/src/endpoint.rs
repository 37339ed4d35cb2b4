//! The endpoint: one device's queue pairs, completion queues and memory, and who gets what.

mod node;
mod posting;
mod shared;

use std::collections::VecDeque;

use millstream_wire::{Mtu, Psn, Qpn};

pub(crate) use self::shared::Shared;
use crate::Instant;
use crate::attributes::{Attribute, ModifyError, QueuePairAttributes, QueuePairState};
use crate::budget::{ReceiveBudget, cost};
use crate::completion::{Completion, CompletionQueue, CompletionQueueId, MAX_COMPLETIONS};
use crate::config::{EndpointConfig, QueuePairCapabilities, QueuePairConfig};
use crate::counters::{Counters, QueuePairCounters};
use crate::early::EarlyPackets;
use crate::error::CreateError;
use crate::events::{AsyncEvent, Events};
use crate::icrc_check::Solvers;
use crate::inline::MAX_INLINE;
use crate::memory::Memory;
use crate::notifications::Notifications;
use crate::numbers::{INDEX_BITS, Numbers};
use crate::queue_pair::QueuePair;
use crate::receives::{Receives, SharedReceiveQueues};
use crate::requester::window_limit;
use crate::timers::Timers;

/// Packets that one queue pair sends before the next has its turn: what a segmented send holds.
pub(crate) const BURST: u32 = 16;

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
                early: EarlyPackets::default(),
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
        self.shared.early.forget_pair(index as u32);
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
                self.shared.early.forget_pair(index as u32);
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
    /// sender asked for one ([`SendRequest::solicited`](crate::SendRequest::solicited)), or of a request that failed
    /// (IBTA 11.4.2.2).
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

    fn arm(&mut self, index: usize) {
        if let Some(pair) = &self.queue_pairs[index]
            && let Some(deadline) = pair.deadline()
        {
            self.timers.arm(index as u32, deadline);
        }
    }
}
