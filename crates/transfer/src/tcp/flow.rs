//! Tasks for one peer, and the messages that they are cut into. Its user has the lock; nothing here waits.
//!
//! A task ends when all of it was posted, or is not to be, and nothing of it is under way. What was under way on a
//! connection that broke is tried again: a READ at once, a WRITE once the peer has confirmed that nothing of that
//! connection is done any more (a *fence*). Where it cannot confirm, the target's range is undefined.

mod parts;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub(super) use self::parts::{Message, Origin};
use self::parts::{Part, Task, fill, own_fault, peers_fault};
use millstream_transfer_core::{Opcode as RailOpcode, RailCounters};

use super::ended::{AllEnded, Ended};
use super::message::Fault;
use super::original::Version;
use crate::counted::Counted;
use crate::{FailureReason, Opcode, TransferState};

/// How often a message is sent again after its connection broke.
const MAX_ATTEMPTS: u32 = 2;

/// How long a peer may take to confirm a fence.
const FENCE_PATIENCE: Duration = Duration::from_secs(2);

/// How long what is under way of a task that is to end is waited for before its connection is ended.
const ENDING_PATIENCE: Duration = Duration::from_millis(300);

/// How a peer is talked to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Framing {
    /// Of the original: one request at a time on a connection.
    Old(Version),
    Numbered,
}

/// What is known of a fence from the peer's control port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Elsewhere {
    Unasked,
    Asked,
    /// It has not confirmed it: only the port for data may.
    Refused,
}

/// A connection that broke with WRITEs under way.
struct Fence {
    connection: u128,
    messages: Vec<Message>,
    since: Instant,
    reason: FailureReason,
    asked: bool,
    /// Whether the peer was asked at its control port, too.
    elsewhere: Elsewhere,
    /// It was ended here, on purpose.
    ours: bool,
}

/// See above.
pub(super) struct Flow {
    framing: Framing,
    tasks: Vec<Option<Task>>,
    free: Vec<u32>,
    origins: Counted<Origin>,
    generation: u32,
    /// Tasks of which not all was posted, and their generations.
    queue: VecDeque<(u32, u32)>,
    again: VecDeque<Message>,
    fences: Vec<Fence>,
    spare: Vec<Message>,
    ended: Vec<Ended>,
    serial: u64,
    /// Tasks that are to end though something of them is under way.
    endings: usize,
    /// No deadline is earlier, if there is any.
    earliest: Option<Instant>,
    counters: RailCounters,
    /// Of messages that were posted and have not ended.
    in_flight: (u64, u64),
}

impl Flow {
    pub(super) fn new(framing: Framing) -> Self {
        Self {
            framing,
            tasks: Vec::new(),
            free: Vec::new(),
            origins: Counted::default(),
            generation: 0,
            queue: VecDeque::new(),
            again: VecDeque::new(),
            fences: Vec::new(),
            spare: Vec::new(),
            ended: Vec::new(),
            serial: 0,
            endings: 0,
            earliest: None,
            counters: RailCounters::default(),
            in_flight: (0, 0),
        }
    }

    /// What was done: a slice is a message here. And what is under way: messages, and their bytes.
    pub(super) fn counters(&mut self) -> (&mut RailCounters, (u64, u64)) {
        (&mut self.counters, self.in_flight)
    }

    /// Of messages that were posted and have not ended.
    pub(super) const fn bytes_under_way(&self) -> u64 {
        self.in_flight.1
    }

    /// What so many tasks are of that are [pushed](Self::push) next, at least one: its number.
    pub(super) fn begin(&mut self, origin: Origin, tasks: usize) -> u32 {
        self.origins.insert(origin, tasks)
    }

    /// One of these is not.
    pub(super) fn leave_out(&mut self, origin: u32) {
        self.origins.release(origin, 1);
    }

    /// Takes a task of what [`begin`](Self::begin) has numbered, by its index in the batch; its name.
    pub(super) fn push(&mut self, origin: u32, index: usize) -> u64 {
        self.generation = self.generation.wrapping_add(1);
        let task = self.origins[origin].batch.tasks.get(index);
        if let Some(deadline) = task.deadline() {
            self.earliest = Some(self.earliest.map_or(deadline, |other| other.min(deadline)));
        }
        let new = Some(Task {
            generation: self.generation,
            origin,
            // A batch has at most a million.
            index: index as u32,
            under_way: 0,
            next: 0,
            offset: 0,
            done: 0,
            opcode: task.opcode(),
            posted: false,
            stranded: false,
            undefined: false,
            unconfirmed: false,
            ending: None,
            failure: None,
        });
        let slot = match self.free.pop() {
            Some(slot) => {
                self.tasks[slot as usize] = new;
                slot
            }
            None => {
                self.tasks.push(new);
                self.tasks.len() as u32 - 1
            }
        };
        self.queue.push_back((slot, self.generation));
        u64::from(self.generation) << 32 | u64::from(slot)
    }

    fn task(&mut self, slot: u32) -> Option<&mut Task> {
        at(&mut self.tasks, slot)
    }

    /// Whether there is something to post.
    pub(super) fn has_more(&self) -> bool {
        !self.queue.is_empty()
            || !self.again.is_empty()
            || self.fences.iter().any(|fence| !fence.asked)
    }

    /// How many tasks there are.
    pub(super) fn unfinished(&self) -> usize {
        self.tasks.len() - self.free.len()
    }

    /// Whether there is something for [`take_ended`](Self::take_ended).
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// What ended since the last call, into `into`, which is empty.
    pub(super) fn take_ended(&mut self, into: &mut AllEnded) {
        debug_assert!(into.tasks.is_empty() && into.origins.is_empty());
        std::mem::swap(&mut self.ended, &mut into.tasks);
        for tasks in into.tasks.chunk_by_mut(|one, next| one.origin == next.origin) {
            let number = tasks[0].origin;
            let last = self.origins.release(number, tasks.len());
            into.origins.push(last.unwrap_or_else(|| self.origins[number].clone()));
            let place = into.origins.len() as u32 - 1;
            tasks.iter_mut().for_each(|task| task.origin = place);
        }
    }

    /// What to post next.
    pub(super) fn next_message(&mut self) -> Option<Message> {
        if let Some(fence) = self.fences.iter_mut().find(|fence| !fence.asked) {
            fence.asked = true;
            let connection = fence.connection;
            self.counters.fences += 1;
            let mut message = self.blank();
            message.fence = connection;
            return Some(message);
        }
        while let Some(mut message) = self.again.pop_front() {
            self.drop_unwanted(&mut message);
            if !message.parts.is_empty() {
                message.pieces.begin_again(message.parts.iter().map(|part| part.length));
                message.has_data = false;
                message.parts.iter_mut().for_each(|part| part.fault = None);
                self.posted(&message);
                return Some(message);
            }
            self.recycle(message);
        }
        let mut message = self.blank();
        while let Some(&(slot, generation)) = self.queue.front() {
            let task = at(&mut self.tasks, slot).filter(|task| task.generation == generation);
            let Some(task) = task.filter(|task| !task.posted && task.is_wanted()) else {
                self.queue.pop_front();
                continue;
            };
            if message.opcode.is_some_and(|opcode| opcode != task.opcode) {
                break;
            }
            message.opcode = Some(task.opcode);
            let (origin, index) = (&self.origins[task.origin], task.index as usize);
            origin.batch.tasks.get(index).begin();
            origin.batch.posted(index);
            let full = fill(&mut message, slot, task, origin, self.framing);
            if task.posted {
                self.queue.pop_front();
            } else if full {
                // Others have their turn.
                self.queue.rotate_left(1);
            }
            if full {
                break;
            }
        }
        if message.parts.is_empty() {
            self.recycle(message);
            return None;
        }
        self.posted(&message);
        Some(message)
    }

    fn posted(&mut self, message: &Message) {
        self.counters.posted(message.length);
        self.in_flight.0 += 1;
        self.in_flight.1 += message.length;
    }

    /// A message that was posted is not under way any more.
    fn returned(&mut self, message: &Message) {
        self.in_flight.0 -= 1;
        self.in_flight.1 -= message.length;
    }

    fn blank(&mut self) -> Message {
        let mut message = self.spare.pop().unwrap_or_default();
        self.serial += 1;
        message.pieces.clear(self.framing != Framing::Numbered);
        message.parts.clear();
        (message.id, message.opcode, message.length, message.attempts) = (self.serial, None, 0, 0);
        message.has_data = false;
        message
    }

    fn recycle(&mut self, message: Message) {
        if self.spare.len() < 64 {
            self.spare.push(message);
        }
    }

    /// Takes out what is of tasks that are to end.
    fn drop_unwanted(&mut self, message: &mut Message) {
        let mut parts = std::mem::take(&mut message.parts);
        let mut index = 0;
        parts.retain(|part| {
            let wanted = self.task(part.slot).is_some_and(|task| task.is_wanted());
            if wanted {
                index += 1;
            } else {
                message.pieces.remove(index);
                message.length -= part.length;
                self.part_ended(part.slot);
            }
            wanted
        });
        message.parts = parts;
    }

    /// A message is done, but for what has faults.
    pub(super) fn done(&mut self, message: Message, confirmed: bool) {
        if message.opcode.is_none() {
            self.fenced(message.fence);
            return self.recycle(message);
        }
        self.returned(&message);
        let (mut done, opcode) = (0, message.opcode);
        for (part, piece) in message.parts.iter().zip(message.pieces.list()) {
            let Some(task) = at(&mut self.tasks, part.slot) else { continue };
            let (origin, index) = (&self.origins[task.origin], task.index as usize);
            let reason = match (part.fault, piece.fault) {
                (Some(fault), _) => Some(peers_fault(fault)),
                (None, Some(fault)) => Some(own_fault(fault, piece.address)),
                (None, None) => None,
            };
            match reason {
                None => {
                    done += part.length;
                    task.done += part.length;
                    if origin.batch.tasks.get(index).moved(part.length) {
                        origin.batch.acknowledged(index);
                    }
                    task.unconfirmed |= !confirmed;
                }
                Some(reason) => {
                    if part.fault.is_some() {
                        origin.segment.mark_stale();
                    }
                    task.undefined |=
                        part.fault == Some(Fault::RelayUndefined) && opcode == Some(Opcode::Write);
                    task.fail(reason, false);
                }
            }
            self.part_ended(part.slot);
        }
        match opcode {
            Some(Opcode::Read) => self.counters.completed(RailOpcode::Read, done),
            _ => self.counters.completed(RailOpcode::Write, done),
        }
        self.recycle(message);
    }

    /// A fence was confirmed.
    fn fenced(&mut self, connection: u128) {
        let Some(index) = self.fences.iter().position(|it| it.connection == connection) else {
            return;
        };
        let Fence { messages, reason, ours, .. } = self.fences.swap_remove(index);
        for message in messages {
            self.try_again(message, &reason, ours);
        }
    }

    /// The peer says that it cannot confirm this fence.
    pub(super) fn not_fenced(&mut self, message: Message) {
        if let Some(index) = self.fences.iter().position(|it| it.connection == message.fence) {
            let fence = self.fences.swap_remove(index);
            self.fail_fence(fence);
        }
        self.recycle(message);
    }

    fn fail_fence(&mut self, fence: Fence) {
        self.counters.lost_fences += 1;
        let reason = FailureReason::NotFenced(Box::new(fence.reason));
        for message in fence.messages {
            self.failed(message, &reason, true);
        }
    }

    /// A connection has ended with these under way, of which `begun` may have reached the peer.
    pub(super) fn lost(
        &mut self,
        messages: &mut VecDeque<Message>,
        begun: usize,
        connection: u128,
        reason: &FailureReason,
        ours: bool,
    ) {
        let mut writes = Vec::new();
        for (index, mut message) in messages.drain(..).enumerate() {
            if message.opcode.is_some() {
                self.returned(&message);
            }
            match (message.opcode, self.framing) {
                (None, _) => {
                    let fence = message.fence;
                    if let Some(fence) = self.fences.iter_mut().find(|it| it.connection == fence) {
                        fence.asked = false;
                    }
                    self.recycle(message);
                }
                _ if index >= begun => self.again.push_back(message),
                (Some(Opcode::Write), Framing::Numbered) => writes.push(message),
                (Some(Opcode::Write), Framing::Old(_)) => self.failed(message, reason, true),
                (Some(Opcode::Read), _) => {
                    message.pieces.rewind();
                    self.try_again(message, reason, ours);
                }
            }
        }
        if !writes.is_empty() {
            self.fences.push(Fence {
                connection,
                messages: writes,
                since: Instant::now(),
                reason: reason.clone(),
                asked: false,
                elsewhere: Elsewhere::Unasked,
                ours,
            });
        }
    }

    fn try_again(&mut self, mut message: Message, reason: &FailureReason, ours: bool) {
        message.attempts += u32::from(!ours);
        if message.attempts > MAX_ATTEMPTS {
            return self.failed(message, reason, false);
        }
        self.again.push_back(message);
    }

    fn failed(&mut self, message: Message, reason: &FailureReason, undefined: bool) {
        let undefined = undefined && message.is_write();
        for part in &message.parts {
            let Some(task) = at(&mut self.tasks, part.slot) else { continue };
            task.undefined |= undefined;
            self.origins[task.origin].segment.mark_stale();
            let with_range = reason.with_range(part.remote, part.length);
            task.fail(with_range, is_for_others(reason));
            self.part_ended(part.slot);
        }
        self.recycle(message);
    }

    /// The connections whose end the peer is to be asked for elsewhere: each once.
    pub(super) fn fences_to_ask(&mut self) -> Vec<u128> {
        let unasked = self.fences.iter_mut().filter(|it| it.elsewhere == Elsewhere::Unasked);
        let ask = |fence: &mut Fence| {
            fence.elsewhere = Elsewhere::Asked;
            fence.connection
        };
        unasked.map(ask).collect()
    }

    /// The peer has said elsewhere whether nothing of a connection is done any more.
    pub(super) fn fence_answered(&mut self, connection: u128, confirmed: bool) {
        if confirmed {
            return self.fenced(connection);
        }
        // Over another connection for data it may yet confirm it, until the time of the fence is over.
        if let Some(fence) = self.fences.iter_mut().find(|it| it.connection == connection) {
            fence.elsewhere = Elsewhere::Refused;
        }
    }

    /// The peer cannot be reached: nothing that waits is done.
    pub(super) fn fail_all(&mut self, reason: &FailureReason) {
        self.fences.iter_mut().for_each(|fence| fence.elsewhere = Elsewhere::Refused);
        self.fail_waiting(reason);
    }

    /// The same, but what waits for an answer from elsewhere.
    pub(super) fn fail_waiting(&mut self, reason: &FailureReason) {
        let lost: Vec<_> =
            self.fences.extract_if(.., |it| it.elsewhere != Elsewhere::Asked).collect();
        for fence in lost {
            self.counters.lost_fences += 1;
            fence.messages.into_iter().for_each(|message| self.failed(message, reason, true));
        }
        for message in std::mem::take(&mut self.again) {
            self.failed(message, reason, false);
        }
        for (slot, generation) in std::mem::take(&mut self.queue) {
            let task = at(&mut self.tasks, slot).filter(|task| task.generation == generation);
            let Some(task) = task else { continue };
            task.posted = true;
            self.origins[task.origin].segment.mark_stale();
            task.fail(reason.clone(), is_for_others(reason));
            self.settle(slot);
        }
    }

    fn part_ended(&mut self, slot: u32) {
        if let Some(task) = self.task(slot) {
            task.under_way -= 1;
            self.settle(slot);
        }
    }

    /// Ends a task if nothing more is to be done of it.
    fn settle(&mut self, slot: u32) {
        let Some(place) = self.tasks.get_mut(slot as usize) else { return };
        let over = |task: &mut Task| task.under_way == 0 && (task.posted || !task.is_wanted());
        let Some(task) = place.take_if(over) else { return };
        self.free.push(slot);
        let (ending, failure) = (task.ending, task.failure);
        self.endings -= usize::from(ending.is_some());
        let length = || self.origins[task.origin].batch.tasks.get(task.index as usize).length();
        let state = match ending.as_deref() {
            _ if failure.is_some() => TransferState::Failed,
            Some(&(state, _)) if task.done < length() => state,
            _ => TransferState::Completed,
        };
        self.ended.push(Ended {
            origin: task.origin,
            index: task.index,
            transferred: task.done,
            state,
            undefined: task.undefined,
            unconfirmed: task.unconfirmed && state == TransferState::Completed,
            // What was not acknowledged may arrive yet.
            leaves: task.stranded && !task.undefined && !task.unconfirmed && ending.is_none(),
            failure,
        });
    }

    /// Lets a task end so; whether it was neither over nor about to end.
    pub(super) fn end(&mut self, name: u64, state: TransferState) -> bool {
        let ends = self.begin_to_end(name, state);
        self.drop_unwanted_again();
        ends
    }

    fn begin_to_end(&mut self, name: u64, state: TransferState) -> bool {
        let (slot, generation) = (name as u32, (name >> 32) as u32);
        let task = self.task(slot).filter(|task| task.generation == generation);
        let Some(task) = task.filter(|task| task.is_wanted()) else { return false };
        task.ending = Some(Box::new((state, Instant::now())));
        self.endings += 1;
        self.settle(slot);
        true
    }

    /// What is to end waits for no connection over which it was to begin again: nothing of it is under way.
    fn drop_unwanted_again(&mut self) {
        for _ in 0..self.again.len() {
            let Some(mut message) = self.again.pop_front() else { return };
            self.drop_unwanted(&mut message);
            match message.parts.is_empty() {
                true => self.recycle(message),
                false => self.again.push_back(message),
            }
        }
    }

    /// Has all tasks fail for this reason, once nothing of them is under way any more.
    pub(super) fn end_all(&mut self, reason: &FailureReason) {
        let now = Instant::now();
        for slot in 0..self.tasks.len() as u32 {
            let Some(task) = self.task(slot).filter(|task| task.is_wanted()) else { continue };
            task.fail(reason.clone(), false);
            task.ending = Some(Box::new((TransferState::Failed, now)));
            self.endings += 1;
            self.settle(slot);
        }
        self.drop_unwanted_again();
    }

    /// Whether something may end because its time is over.
    pub(super) fn awaits_time(&self) -> bool {
        self.earliest.is_some() || !self.fences.is_empty()
    }

    /// Ends what is to end by now.
    pub(super) fn tick(&mut self, now: Instant) {
        if self.earliest.is_some_and(|earliest| earliest <= now) {
            let mut late = Vec::new();
            self.earliest = None;
            for (slot, task) in (0_u32..).zip(&self.tasks) {
                let Some(task) = task else { continue };
                let batch = &self.origins[task.origin].batch;
                let Some(deadline) = batch.tasks.get(task.index as usize).deadline() else {
                    continue;
                };
                if deadline <= now {
                    late.push(u64::from(task.generation) << 32 | u64::from(slot));
                } else {
                    let earliest = self.earliest.map_or(deadline, |other| other.min(deadline));
                    self.earliest = Some(earliest);
                }
            }
            for name in late {
                self.begin_to_end(name, TransferState::Timeout);
            }
            self.drop_unwanted_again();
        }
        while let Some(index) =
            self.fences.iter().position(|it| now.duration_since(it.since) >= FENCE_PATIENCE)
        {
            let fence = self.fences.swap_remove(index);
            self.fail_fence(fence);
        }
    }

    /// When something is to end next, if that is known.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.earliest.filter(|_| self.unfinished() > 0)
    }

    /// Whether a task is to end for which the connection with these messages is to end.
    pub(super) fn is_to_end(&self, messages: &VecDeque<Message>, now: Instant) -> bool {
        if self.endings == 0 {
            return false;
        }
        let patience = match self.framing {
            Framing::Old(_) => Duration::ZERO,
            Framing::Numbered => ENDING_PATIENCE,
        };
        let ends = |part: &Part| {
            let task = self.tasks.get(part.slot as usize).and_then(Option::as_ref);
            let ending = task.and_then(|task| task.ending.as_deref());
            ending.is_some_and(|&(_, since)| now.duration_since(since) >= patience)
        };
        messages.iter().any(|message| message.parts.iter().any(ends))
    }
}

/// The task in a place, if there is one.
fn at(tasks: &mut [Option<Task>], slot: u32) -> Option<&mut Task> {
    tasks.get_mut(slot as usize)?.as_mut()
}

/// Whether another transport may do what failed for this reason.
const fn is_for_others(reason: &FailureReason) -> bool {
    !matches!(
        reason,
        FailureReason::ShutDown | FailureReason::Restarted | FailureReason::NotFenced(_)
    )
}
