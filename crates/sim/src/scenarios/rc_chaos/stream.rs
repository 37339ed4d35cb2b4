//! The reference model of one direction of a connection: what must happen next at either end.
//!
//! Requests are executed in the order in which they were posted, each packet once. So at any time
//! there is exactly one place where the next byte may appear, and one byte that it may be. Every
//! operation of a run has bytes and places of its own: whatever is executed twice, late, out of
//! order, in another life of the connection or on another queue pair is seen when it is written.

use millstream_roce::{
    AtomicOperation, Completion, CompletionOperation, CompletionStatus, Instant,
};

use super::operation::{COUNTERS, Kind, Operation, Outcome};
use super::pattern::Pattern;
use super::world::{Role, StreamPlan};

/// What regions are filled with: what must still be there where nothing was to be written.
const UNTOUCHED: u8 = 0xa5;
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
    counters: [u64; COUNTERS],
    /// Bytes of the regions for SENDs and WRITEs, and for READs.
    lengths: [u32; 2],

    // The initiator.
    sending_life: u32,
    /// The next request to post.
    pub(super) next: usize,
    /// All requests before this one have ended.
    pub(super) ended: usize,
    /// A request of this life failed.
    failed: bool,
    /// The next byte that a READ brings: operation and offset.
    reading: (usize, u32),
    /// The initiator waits for completions before it posts more.
    pub(super) blocked: bool,
    /// The send queue is drained: this request and what follows must wait.
    pub(super) held: Option<usize>,
    /// When the last request posted must have ended.
    pub(super) deadline: Instant,

    // The responder.
    receiving_life: u32,
    /// The next byte that a SEND or WRITE brings: operation and offset.
    executing: (usize, u32),
    /// The operation that the next receive request is for, or one before it.
    receive_next: usize,
    /// The operation whose receive request completes next, or one before it.
    receive_ended: usize,
    /// Receive requests posted, and not completed.
    pub(super) receives: usize,
    /// No receive requests are posted before this.
    pub(super) starved_until: Instant,
}

impl Stream {
    pub(super) fn new(index: usize, plan: StreamPlan) -> Self {
        let region = |role: usize| Region {
            // Far apart, and aligned to nothing, but for the counters.
            address: ((index as u64 * 8 + role as u64 + 1) << 32) + 12 + role as u64,
            key: 0,
            absent: None,
        };
        let mut stream = Self {
            index,
            allowed: plan.operations.len(),
            plan,
            regions: core::array::from_fn(region),
            counters: [0; COUNTERS],
            lengths: [GAP; 2],
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
        };
        for operation in &mut stream.plan.operations {
            let length = &mut stream.lengths[usize::from(operation.kind.reads())];
            operation.offset = *length;
            *length += operation.length + GAP;
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

    // ---- Memory.

    /// What a region of this role holds now.
    pub(super) fn content(&self, role: Role) -> Vec<u8> {
        if role == Role::Counters {
            return self.counters.iter().flat_map(|counter| counter.to_ne_bytes()).collect();
        }
        let reads = matches!(role, Role::Sink | Role::Readable);
        let mut bytes = vec![UNTOUCHED; self.lengths[usize::from(reads)] as usize];
        for (index, operation) in self.plan.operations.iter().enumerate() {
            if operation.kind.reads() != reads {
                continue;
            }
            let slot = &mut bytes[operation.offset as usize..][..operation.length as usize];
            let pattern = self.pattern(index);
            match role {
                Role::Source => fill(pattern, operation.layout.runs(operation.length), slot),
                Role::Readable => pattern.fill(0, slot),
                Role::Sink | Role::Target if operation.erased => {}
                Role::Sink if operation.kind.is_atomic() => {
                    // It comes in one packet, which is written piece by piece.
                    let value = operation.original.unwrap_or_default().to_ne_bytes();
                    let mut value = &value[..operation.applied as usize];
                    for (at, run) in operation.layout.runs(operation.length) {
                        let (now, rest) = value.split_at(value.len().min(run as usize));
                        slot[at as usize..][..now.len()].copy_from_slice(now);
                        value = rest;
                    }
                }
                Role::Sink | Role::Target | Role::Counters => {
                    let runs = operation.arrival_layout().runs(operation.arrival_length());
                    fill(pattern, prefix(runs, operation.applied), slot);
                }
            }
        }
        bytes
    }

    /// The host of a region is gone, and what was written into it.
    pub(super) fn erase(&mut self, role: Role) {
        let reads = match role {
            Role::Source | Role::Readable => return,
            Role::Counters => {
                self.counters = [0; COUNTERS];
                return;
            }
            Role::Sink => true,
            Role::Target => false,
        };
        for operation in &mut self.plan.operations {
            operation.erased |= operation.kind.reads() == reads && operation.applied > 0;
        }
    }

    /// Bytes appeared in a region, at this offset.
    pub(super) fn written(
        &mut self,
        role: Role,
        remote: bool,
        place: u64,
        bytes: &[u8],
    ) -> Result<(), String> {
        let reads = role == Role::Sink;
        let (life, cursor) = match role {
            Role::Sink => (self.sending_life, &mut self.reading),
            Role::Target => (self.receiving_life, &mut self.executing),
            Role::Source | Role::Readable | Role::Counters => {
                return Err(format!("{} bytes written into the {role:?} region", bytes.len()));
            }
        };
        let posted = &mut self.plan.operations[..self.next];
        let (index, operation) = loop {
            let Some(operation) = posted.get_mut(cursor.0).filter(|next| next.life == life) else {
                return Err(format!(
                    "{} bytes written at {role:?} + {place}, where all {} requests of life {life} \
                     were executed before",
                    bytes.len(),
                    self.next,
                ));
            };
            // An atomic operation is done at one end, and then its result written at the other.
            let is_next = operation.kind.reads() == reads || operation.kind.is_atomic();
            if is_next && operation.length > 0 {
                break (cursor.0, operation);
            }
            *cursor = (cursor.0 + 1, 0);
        };
        if !reads && self.held.is_some_and(|held| index >= held) {
            return Err(format!("request {index} is executed while the send queue is drained"));
        }
        let (fence, offset) = (operation.fence, cursor.1);
        let (at, left) = operation.arrival_layout().place(operation.arrival_length(), offset);
        let right_place = u64::from(operation.offset + at) == place
            && bytes.len() <= left as usize
            && remote == matches!(operation.kind, Kind::Write | Kind::WriteImmediate)
            && operation.kind.reads() == reads;
        if !right_place {
            return Err(format!(
                "{} bytes written at {role:?} + {place}{}, where byte {offset} of request {index} \
                 ({:?}, {} bytes) is next, at + {}",
                bytes.len(),
                if remote { " by a WRITE" } else { "" },
                operation.kind,
                operation.length,
                operation.offset + at,
            ));
        }
        let wrong = match (operation.kind.is_atomic(), operation.original) {
            (false, _) => Pattern::new(self.index, index, 0).first_difference(offset.into(), bytes),
            (true, None) => Some(0),
            (true, Some(original)) => {
                let right = &original.to_ne_bytes()[offset as usize..][..bytes.len()];
                right.iter().zip(bytes).position(|(right, byte)| right != byte)
            }
        };
        if let Some(wrong) = wrong {
            return Err(format!(
                "byte {} of request {index} ({:?}, {} bytes) is wrong: {:#04x}",
                offset as usize + wrong,
                operation.kind,
                operation.length,
                bytes[wrong],
            ));
        }
        cursor.1 += bytes.len() as u32;
        operation.applied = cursor.1;
        if operation.applied == operation.length {
            *cursor = (index + 1, 0);
        }
        if fence && !reads { self.keeps_fence(index) } else { Ok(()) }
    }

    /// A fenced request was begun: everything that fetches before it must have its data.
    fn keeps_fence(&self, fenced: usize) -> Result<(), String> {
        let life = self.plan.operations[fenced].life;
        let waits = |operation: &&Operation| {
            operation.life == life && operation.kind.reads() && operation.applied < operation.length
        };
        match self.plan.operations[..fenced].iter().find(waits) {
            None => Ok(()),
            Some(before) => Err(format!("fenced request {fenced} is executed before {before:?}")),
        }
    }

    /// Whether what is written next is the first of its message.
    pub(super) const fn is_at_start(&self) -> bool {
        self.executing.1 == 0
    }

    /// An atomic operation was done at this offset of the counters, and returned `original`.
    pub(super) fn changed(
        &mut self,
        role: Role,
        place: u64,
        atomic: AtomicOperation,
        original: u64,
    ) -> Result<(), String> {
        let (life, posted) = (self.receiving_life, &mut self.plan.operations[..self.next]);
        let (first, _) = self.executing;
        let mut rest = (first..).zip(posted.get_mut(first..).unwrap_or_default());
        let next = rest.find(|(_, next)| {
            next.life != life || next.kind.is_atomic() || (!next.kind.reads() && next.length > 0)
        });
        let expected = next.as_ref().map(|(index, next)| (*index, next.kind));
        let Some((index, operation)) = next.filter(|(_, next)| {
            next.life == life
                && next.kind.is_atomic()
                && next.atomic == atomic
                && next.counter as u64 * 8 == place
                && role == Role::Counters
        }) else {
            return Err(format!(
                "{atomic:?} done at {role:?} + {place}, where {expected:?} is next"
            ));
        };
        if self.held.is_some_and(|held| index >= held) {
            return Err(format!("request {index} is executed while the send queue is drained"));
        }
        let counter = &mut self.counters[operation.counter];
        if *counter != original {
            return Err(format!("{atomic:?} returned {original}, where {counter} is right"));
        }
        *counter = atomic.apply(original);
        operation.original = Some(original);
        let fence = operation.fence;
        self.executing = (index + 1, 0);
        if fence { self.keeps_fence(index) } else { Ok(()) }
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
            Kind::Send | Kind::SendImmediate => CompletionOperation::Send,
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
        if operation.applied == operation.length {
            return Ok(());
        }
        Err(format!(
            "request {index} ({:?}) succeeded with {} of {} bytes in place",
            operation.kind, operation.applied, operation.length
        ))
    }

    /// The operation that the next receive request is for.
    pub(super) fn next_receive(&self) -> Option<(u64, &Operation)> {
        let index = self.next_taker(self.receive_next)?;
        let id = RECEIVE | u64::from(self.receiving_life) << 32 | index as u64;
        Some((id, &self.plan.operations[index]))
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
        completion.id & RECEIVE != 0
    }

    /// A receive request of ours ended. `lossy`: completions before it may be lost.
    pub(super) fn received(
        &mut self,
        completion: &Completion,
        lossy: bool,
    ) -> Result<&Operation, String> {
        let life = (completion.id & !RECEIVE) >> 32;
        if life != u64::from(self.receiving_life) {
            return Err(format!("completion in life {}: {completion:?}", self.receiving_life));
        }
        let index = completion.id as u32 as usize;
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
        self.receive_ended = index + 1;
        self.receives -= 1;
        let operation = &self.plan.operations[index];
        if completion.status != CompletionStatus::Success {
            return Ok(operation);
        }
        let right = match operation.kind {
            Kind::WriteImmediate => CompletionOperation::ReceiveWrite,
            _ => CompletionOperation::Receive,
        };
        let immediate = operation.kind.has_immediate().then_some(self.immediate(index));
        if index >= self.next
            || operation.life != self.receiving_life
            || operation.applied != operation.length
            || completion.operation != right
            || completion.length != operation.length
            || completion.immediate != immediate
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
        self.deadline = now;
    }
}

fn fill(pattern: Pattern, runs: impl Iterator<Item = (u32, u32)>, slot: &mut [u8]) {
    let mut offset = 0;
    for (at, length) in runs {
        pattern.fill(offset, &mut slot[at as usize..][..length as usize]);
        offset += u64::from(length);
    }
}

/// The runs of the first `length` bytes.
fn prefix(
    runs: impl Iterator<Item = (u32, u32)>,
    mut length: u32,
) -> impl Iterator<Item = (u32, u32)> {
    runs.map(move |(at, run)| {
        let taken = run.min(length);
        length -= taken;
        (at, taken)
    })
}
