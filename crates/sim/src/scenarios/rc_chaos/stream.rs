//! The reference model of one direction of a connection: what must happen next at either end.
//!
//! Requests are executed in the order in which they were posted, each packet once. So at any time
//! there is exactly one place where the next byte may appear, and one byte that it may be. Every
//! operation of a run has bytes and places of its own: whatever is executed twice, late, out of
//! order, in another life of the connection or on another queue pair is seen when it is written
//! (the module `execution`).

use std::collections::VecDeque;

use millstream_roce::{Completion, CompletionOperation, CompletionStatus, Instant};

use super::operation::{COUNTERS, Kind, Operation, Outcome};
use super::pattern::Pattern;
use super::pool::Pool;
use super::world::{Role, StreamPlan};

/// Bytes between slots that nobody may touch; odd, so that slots have every alignment.
const GAP: u32 = 5;
/// Set in the number of a receive request.
const RECEIVE: u64 = 1 << 63;

/// A region of a stream, where it is registered.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) address: u64,
    /// Its key, or the last one that it had.
    pub(super) key: u32,
    /// Its bytes, while it is not registered.
    pub(super) absent: Option<Vec<u8>>,
    /// A request to invalidate it was posted.
    pub(super) dying: bool,
    /// It is invalidated.
    pub(super) dead: bool,
}

/// One direction of a connection: requests of the initiator, and their execution.
#[derive(Debug)]
pub(super) struct Stream {
    /// Twice the number of its connection, plus the end that is the initiator.
    pub(super) index: usize,
    pub(super) plan: StreamPlan,
    /// How many requests may be posted for now.
    pub(super) allowed: usize,
    pub(super) regions: [Region; Role::COUNT],
    /// What atomic operations have made of the counters.
    pub(super) counters: [u64; COUNTERS],
    /// Bytes of the regions.
    pub(super) lengths: [u32; Role::COUNT],

    // The initiator.
    pub(super) sending_life: u32,
    /// The next request to post.
    pub(super) next: usize,
    /// All requests before this one have ended.
    pub(super) ended: usize,
    /// A request of this life failed.
    failed: bool,
    /// The next byte that a READ brings: operation and offset.
    pub(super) reading: (usize, u32),
    /// The initiator waits for completions before it posts more.
    pub(super) blocked: bool,
    /// The send queue is drained: this request and what follows must wait.
    pub(super) held: Option<usize>,
    /// When the last request posted must have ended.
    pub(super) deadline: Instant,

    // The responder.
    pub(super) receiving_life: u32,
    /// The next byte that a SEND or WRITE brings: operation and offset.
    pub(super) executing: (usize, u32),
    /// The operation that the next receive request is for, or one before it.
    receive_next: usize,
    /// The operation whose receive request completes next, or one before it.
    receive_ended: usize,
    /// Receive requests posted, and not completed.
    pub(super) receives: usize,
    /// No receive requests are posted before this.
    pub(super) starved_until: Instant,
    /// Of a shared receive queue: the request that comes next to one, or one before it,
    pub(super) taking: usize,
    /// and requests that have one, with which, until they complete.
    pub(super) claims: VecDeque<(usize, usize)>,
}

impl Stream {
    pub(super) fn new(index: usize, plan: StreamPlan) -> Self {
        let region = |role: usize| Region {
            // Far apart, and aligned to nothing, but for the counters.
            address: ((index as u64 * 8 + role as u64 + 1) << 32) + 11 + role as u64,
            key: 0,
            absent: None,
            dying: false,
            dead: false,
        };
        let mut stream = Self {
            index,
            allowed: plan.operations.len(),
            plan,
            regions: core::array::from_fn(region),
            counters: [0; COUNTERS],
            lengths: [GAP; Role::COUNT],
            sending_life: 0,
            next: 0,
            ended: 0,
            failed: false,
            reading: (0, 0),
            blocked: false,
            held: None,
            deadline: Instant::ZERO,
            receiving_life: 0,
            executing: (0, 0),
            receive_next: 0,
            receive_ended: 0,
            receives: 0,
            starved_until: Instant::ZERO,
            taking: 0,
            claims: VecDeque::new(),
        };
        let shares = stream.plan.shares;
        for operation in &mut stream.plan.operations {
            let places = [operation.local(), Some(operation.remote())];
            for (offset, role) in operation.offsets.iter_mut().zip(places) {
                let Some(role) = role.filter(|&role| !shares || role != Role::Inbox) else {
                    continue;
                };
                let length = &mut stream.lengths[role as usize];
                *offset = *length;
                *length += operation.length + GAP;
            }
        }
        stream
    }

    /// Only the first `count` operations may be posted for now.
    pub(super) fn allow(&mut self, count: usize) {
        self.allowed = count.min(self.plan.operations.len());
    }

    pub(super) const fn outstanding(&self) -> usize {
        self.next - self.ended
    }

    /// The last request that is not known to be complete, and whose completion will tell.
    pub(super) fn last_signaled(&self) -> Option<usize> {
        (self.ended..self.next).rev().find(|&index| self.plan.operations[index].signaled)
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.next >= self.allowed && self.outstanding() == 0
    }

    pub(super) fn pattern(&self, operation: usize) -> Pattern {
        Pattern::new(self.index, operation, 0)
    }

    // ---- Completions.

    /// The number of a request.
    pub(super) fn id(&self, operation: usize) -> u64 {
        u64::from(self.sending_life) << 32 | operation as u64
    }

    /// The next request was posted.
    pub(super) fn posted(&mut self, now: Instant) {
        let operation = &mut self.plan.operations[self.next];
        operation.outcome = Outcome::Posted;
        operation.life = self.sending_life;
        operation.posted_at = now;
        if let Some(role) = operation.names() {
            let region = &mut self.regions[role as usize];
            let invalidates = operation.kind == Kind::SendInvalidate;
            // Of nothing, the key does not matter.
            operation.doomed = region.dying && (operation.length > 0 || invalidates);
            region.dying |= invalidates && !operation.has_wrong_key();
        }
        self.next += 1;
    }

    /// A request of ours ended. `lossy`: completions before it may be lost.
    pub(super) fn completed(
        &mut self,
        completion: &Completion,
        lossy: bool,
    ) -> Result<&Operation, String> {
        let (life, index) = ((completion.id >> 32) as u32, completion.id as u32 as usize);
        if life != self.sending_life {
            return Err(format!("completion in life {}: {completion:?}", self.sending_life));
        }
        if index < self.ended || index >= self.next {
            return Err(format!(
                "{completion:?} twice, or out of order, or of nothing posted: {} of {} ended",
                self.ended, self.next
            ));
        }
        for before in self.ended..index {
            if (self.plan.operations[before].signaled || self.failed) && !lossy {
                return Err(format!("{completion:?} before one of request {before}"));
            }
            if lossy {
                self.plan.operations[before].outcome = Outcome::InDoubt;
            } else {
                self.succeed(before)?;
            }
        }
        self.ended = index + 1;
        if completion.status != CompletionStatus::Success {
            self.failed = true;
            let operation = &mut self.plan.operations[index];
            operation.outcome = Outcome::InDoubt;
            return Ok(operation);
        }
        self.succeed(index)?;
        let operation = &self.plan.operations[index];
        let right = match operation.kind {
            Kind::Send | Kind::SendImmediate | Kind::SendInvalidate => CompletionOperation::Send,
            Kind::Write | Kind::WriteImmediate => CompletionOperation::Write,
            Kind::Read => CompletionOperation::Read,
            Kind::CompareSwap => CompletionOperation::CompareSwap,
            Kind::FetchAdd => CompletionOperation::FetchAdd,
        };
        if !operation.signaled
            || completion.operation != right
            || completion.length != operation.length
            || self.failed
        {
            return Err(format!("{completion:?} for {operation:?}"));
        }
        Ok(operation)
    }

    /// The initiator's queue pair is in the error state, and all completions were seen: failures
    /// complete even where success does not, so what has none succeeded.
    pub(super) fn flushed(&mut self) -> Result<(), String> {
        for index in self.ended..self.next {
            if self.plan.operations[index].signaled {
                return Err(format!("request {index} was not flushed in the error state"));
            }
            self.succeed(index)?;
        }
        self.ended = self.next;
        Ok(())
    }

    /// The initiator believes that a request is done. So it must be.
    fn succeed(&mut self, index: usize) -> Result<(), String> {
        let operation = &mut self.plan.operations[index];
        operation.outcome = Outcome::Succeeded;
        if operation.is_done() && !operation.doomed {
            return Ok(());
        }
        Err(format!(
            "request {index} ({:?}) succeeded with {} of {} bytes in place{}{}",
            operation.kind,
            operation.applied,
            operation.length,
            if operation.invalidated { ", its region invalidated" } else { "" },
            if operation.doomed { ", by a key that was invalidated" } else { "" },
        ))
    }

    /// The operation that the next receive request is for.
    pub(super) fn next_receive(&self) -> Option<(u64, &Operation)> {
        let index = self.next_taker(self.receive_next)?;
        let id = RECEIVE | u64::from(self.receiving_life) << 32 | index as u64;
        Some((id, &self.plan.operations[index]))
    }

    /// A message took a request of the shared receive queue: this slot.
    pub(super) fn took(&mut self, slot: usize) -> Result<(), String> {
        let Some(operation) = self.next_taker(self.taking).filter(|_| self.plan.shares) else {
            return Err("a receive request was taken for nothing that was posted".into());
        };
        self.taking = operation + 1;
        self.claims.push_back((operation, slot));
        Ok(())
    }

    /// The request whose receive request completes next, of a shared receive queue, and its slot.
    pub(super) fn next_claim(&mut self) -> Option<(usize, usize)> {
        self.claims.pop_front()
    }

    fn next_taker(&self, from: usize) -> Option<usize> {
        let mut rest = (from..self.allowed).map(|index| (index, &self.plan.operations[index]));
        rest.find(|(_, operation)| operation.kind.takes_receive()).map(|(index, _)| index)
    }

    /// The next receive request was posted.
    pub(super) fn receive_posted(&mut self) {
        if let Some(index) = self.next_taker(self.receive_next) {
            self.receive_next = index + 1;
            self.receives += 1;
        }
    }

    /// Whether a completion is of a receive request.
    pub(super) const fn is_receive(completion: &Completion) -> bool {
        completion.id & RECEIVE != 0 || Pool::is_pooled(completion.id)
    }

    /// A receive request of ours ended. `lossy`: completions before it may be lost.
    pub(super) fn received(
        &mut self,
        completion: &Completion,
        lossy: bool,
    ) -> Result<&Operation, String> {
        let index = completion.id as u32 as usize;
        let life = (completion.id & !RECEIVE) >> 32;
        if life != u64::from(self.receiving_life) || self.plan.shares {
            return Err(format!("completion in life {}: {completion:?}", self.receiving_life));
        }
        let mut expected = self.next_taker(self.receive_ended);
        while lossy && expected.is_some_and(|expected| expected < index) {
            self.receives -= 1;
            expected = expected.and_then(|expected| self.next_taker(expected + 1));
        }
        if expected != Some(index) || index >= self.receive_next {
            return Err(format!(
                "{completion:?} twice, or out of order, or of nothing posted: {expected:?} is next"
            ));
        }
        self.receives -= 1;
        self.received_for(completion, index)
    }

    /// The receive request for this request ended.
    pub(super) fn received_for(
        &mut self,
        completion: &Completion,
        index: usize,
    ) -> Result<&Operation, String> {
        self.receive_ended = index + 1;
        let operation = &self.plan.operations[index];
        if completion.status != CompletionStatus::Success {
            return Ok(operation);
        }
        let right = match operation.kind {
            Kind::WriteImmediate => CompletionOperation::ReceiveWrite,
            _ => CompletionOperation::Receive,
        };
        let immediate = operation.kind.has_immediate().then_some(self.immediate(index));
        let invalidated = (operation.kind == Kind::SendInvalidate).then_some(operation.key);
        if index >= self.next
            || operation.life != self.receiving_life
            || !operation.is_done()
            || completion.operation != right
            || completion.length != operation.length
            || completion.immediate != immediate
            || completion.invalidated != invalidated
            || completion.source.is_some()
        {
            return Err(format!("{completion:?} for {operation:?}"));
        }
        Ok(operation)
    }

    /// The immediate data of an operation.
    pub(super) const fn immediate(&self, operation: usize) -> u32 {
        (self.index as u32) << 24 | operation as u32
    }

    // ---- Lives.

    /// The initiator's queue pair is gone, or as good as new: what was posted has no end.
    pub(super) fn lower_initiator(&mut self) {
        for operation in &mut self.plan.operations[self.ended..self.next] {
            operation.outcome = Outcome::InDoubt;
        }
        self.ended = self.next;
        self.sending_life += 1;
        self.failed = false;
        self.blocked = false;
        self.held = None;
    }

    /// The responder's queue pair is gone, or as good as new, and its receive requests with it.
    pub(super) fn lower_responder(&mut self) {
        self.receiving_life += 1;
        self.receives = 0;
    }

    /// Both queue pairs start anew.
    pub(super) fn begin(&mut self, now: Instant) {
        self.reading = (self.next, 0);
        self.executing = (self.next, 0);
        self.receive_next = self.next;
        self.receive_ended = self.next;
        self.taking = self.next;
        self.deadline = now;
        for region in &mut self.regions {
            region.dying = false;
        }
    }
}
