//! Tasks on their way to a file: those that wait, and the parts of them that are under way.
//!
//! Slices that follow each other are claimed in *groups*, and a group is moved in one or several *parts*,
//! requests of limited length. A group counts when all its parts have ended.

mod overdue;
#[cfg(test)]
pub(super) mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use self::overdue::Overdue;
pub(super) use self::overdue::stuck;

use millstream_metadata::{BufferDesc, SegmentDesc};
use millstream_transfer_core::{Opcode as RailOpcode, RailCounters};

use super::protocol::{EIO, MAX_LENGTH, Outcome};
use crate::batch::BatchShared;
use crate::gpu;
use crate::memory::LocalMemory;
use crate::segment::OpenSegment;
use crate::task::{EndedTasks, TaskHandle, WideSlice};
use crate::transport::Run;
use crate::{FailureReason, Opcode, TransferError, TransferState};

/// A group ends with the slice that makes it so long.
const GROUP_LENGTH: u64 = 768 << 10;

/// What is under way at a time, in all.
const MAX_PARTS: usize = 64;
const MAX_BYTES: u64 = 8 << 20;

/// How often a request is sent again after its connection was lost.
pub(super) const MAX_ATTEMPTS: u32 = 2;

/// Tasks that wait, and what is known of both of their ends.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) ends: Ends,
    batch: Arc<BatchShared>,
    next: usize,
    end: usize,
}

/// Registered memory here, and a file.
#[derive(Clone)]
pub(super) struct Ends {
    pub(super) local: Arc<LocalMemory>,
    segment: Arc<OpenSegment>,
    descriptor: Arc<SegmentDesc>,
    pub(super) buffer: usize,
    durable: bool,
}

/// Slices of one task.
struct Group {
    ends: Ends,
    batch: Arc<BatchShared>,
    task: usize,
    opcode: Opcode,
    slice: WideSlice,
    slices: u64,
    /// Parts that have begun and not ended.
    parts: usize,
    /// All of its parts have begun.
    begun: bool,
    /// Why one of them was not done.
    failed: Option<Outcome>,
    /// Since when its task is to end whatever becomes of it.
    unwanted: Option<Instant>,
    /// One of its parts that was not done had been sent before, over a connection that was lost.
    sent_in_vain: bool,
}

/// A request.
#[derive(Clone)]
pub(super) struct Part {
    pub(super) id: u64,
    group: usize,
    pub(super) opcode: Opcode,
    pub(super) durable: bool,
    pub(super) local: Arc<LocalMemory>,
    pub(super) key: u128,
    /// Which of the segment's files.
    pub(super) buffer: usize,
    /// Of the first byte in local memory.
    pub(super) address: u64,
    /// Of the first byte in the file.
    pub(super) offset: u64,
    pub(super) length: u32,
    begun: Instant,
    /// Connections that were lost after it had begun over them.
    attempts: u32,
    /// Somebody is at its local memory.
    in_use: bool,
    /// Its group has ended without it: it is there until the target has answered.
    pub(super) given_up: bool,
}

/// What waits and what is under way, to one target. Its user has the lock.
#[derive(Default)]
pub(super) struct Flow {
    queue: VecDeque<Entry>,
    groups: Slots<Group>,
    parts: Slots<Part>,
    /// The group that parts are made of, and what is left of it.
    current: Option<(usize, WideSlice)>,
    bytes: u64,
    /// Parts whose connection has ended: before they were begun at the target, or they are READs, or it is fenced before.
    again: VecDeque<usize>,
    serial: u64,
    /// Tasks that were late when it was their turn: see [`Flow::take_late`].
    late: Vec<TaskHandle>,
    /// No deadline is earlier, if there is any.
    earliest: Option<Instant>,
    counters: RailCounters,
}

/// What a flow had, to fail.
pub(super) struct Rest {
    queue: VecDeque<Entry>,
    groups: Vec<Group>,
    /// Of the queue WRITEs only: READs among them wait still.
    writes_only: bool,
}

/// A group that has ended, to be told without the lock.
#[must_use]
pub(super) struct EndedGroup {
    group: Group,
    /// Not all of its parts have ended.
    parts_left: bool,
}

impl Entry {
    pub(super) fn new(batch: &Arc<BatchShared>, run: &Run, durable: bool) -> Self {
        let ends = Ends {
            local: Arc::clone(&run.local),
            segment: Arc::clone(&run.segment),
            descriptor: Arc::clone(&run.view.descriptor),
            buffer: run.buffer,
            durable,
        };
        let (next, end) = (run.tasks.start, run.tasks.end);
        Self { ends, batch: Arc::clone(batch), next, end }
    }

    /// The slices to move next. Tasks that are late are put there.
    fn claim(&mut self, late: &mut Vec<TaskHandle>) -> Option<Group> {
        while self.next < self.end {
            let task = TaskHandle { batch: Arc::clone(&self.batch), index: self.next };
            if task.is_late() {
                late.push(task);
                self.next += 1;
                continue;
            }
            // Before it is claimed: who cancels it in between finds nothing to take back.
            task.can_be_given_up();
            let claimed = if task.has_pieces() {
                // They need not follow each other.
                let piece = task.claim();
                self.next += usize::from(piece.is_none());
                piece.map(|piece| (piece, 1))
            } else if task.whole().length <= GROUP_LENGTH {
                self.next += 1;
                task.claim_rest()
            } else {
                let several = claim_several(&task);
                self.next += usize::from(several.is_none());
                several
            };
            if let Some((slice, slices)) = claimed {
                task.batch.posted(task.index);
                return Some(Group {
                    ends: self.ends.clone(),
                    opcode: task.opcode(),
                    batch: task.batch,
                    task: task.index,
                    slice,
                    slices,
                    parts: 0,
                    begun: false,
                    failed: None,
                    unwanted: None,
                    sent_in_vain: false,
                });
            }
        }
        None
    }

    /// Of its tasks, which were submitted at a time.
    fn deadline(&self) -> Option<Instant> {
        TaskHandle { batch: Arc::clone(&self.batch), index: self.next.min(self.end - 1) }.deadline()
    }

    /// Nothing of it is done any more.
    pub(super) fn fail(&self, reason: &FailureReason) {
        self.tasks().for_each(|task| self.fail_task(&task, reason));
    }

    /// Its WRITEs are not done any more.
    fn fail_writes(&self, reason: &FailureReason) {
        let writes = self.tasks().filter(|task| task.opcode() == Opcode::Write);
        writes.for_each(|task| self.fail_task(&task, reason));
    }

    fn tasks(&self) -> impl Iterator<Item = TaskHandle> {
        (self.next..self.end).map(|index| TaskHandle { batch: Arc::clone(&self.batch), index })
    }

    fn fail_task(&self, task: &TaskHandle, reason: &FailureReason) {
        if task.is_late() {
            // Nobody has looked since.
            task.end_rest(TransferState::Timeout);
            return;
        }
        let whole = task.whole();
        let place = self.ends.place(whole.target, whole.length);
        task.fail_rest(&self.ends.error(reason, &place));
    }
}

/// Slices of a long task that follow each other.
fn claim_several(task: &TaskHandle) -> Option<(WideSlice, u64)> {
    let mut slice = task.claim()?;
    let mut count = 1;
    while slice.length < GROUP_LENGTH
        && let Some(next) = task.claim()
    {
        // A task is one transport's, and only who has its entry claims.
        debug_assert_eq!(next.target, slice.target + slice.length);
        slice.length += next.length;
        count += 1;
    }
    Some((slice, count))
}

impl Ends {
    fn file(&self) -> &BufferDesc {
        &self.descriptor.buffers[self.buffer]
    }

    /// A range of the segment, for people.
    fn place(&self, target: u64, length: u64) -> String {
        let file = self.file();
        let path = file.file_path.as_deref().unwrap_or("?");
        let start = target.saturating_sub(file.addr);
        format!("file {path}, bytes {start} to {}", start.saturating_add(length))
    }

    fn error(&self, reason: &FailureReason, place: &str) -> TransferError {
        let reason = match reason {
            FailureReason::File(text) => FailureReason::File(format!("{place}: {text}").into()),
            other => other.clone(),
        };
        TransferError::new(self.segment.name.as_str().into(), super::NAME, reason)
    }
}

impl Flow {
    /// Takes tasks to do.
    pub(super) fn push(&mut self, entry: Entry) {
        self.earliest = self.earliest.into_iter().chain(entry.deadline()).min();
        self.queue.push_back(entry);
    }

    /// Whether nothing is left to begin.
    pub(super) fn has_nothing_to_begin(&self) -> bool {
        self.queue.is_empty() && self.current.is_none() && self.again.is_empty()
    }

    /// Whether nothing is under way.
    pub(super) const fn is_at_rest(&self) -> bool {
        self.groups.count == 0
    }

    /// What was done: a slice is a request here. And what is under way: requests, and their bytes.
    pub(super) const fn counters(&mut self) -> (&mut RailCounters, (u64, u64)) {
        let in_flight = (self.parts.count as u64, self.bytes);
        (&mut self.counters, in_flight)
    }

    /// Whether as much is under way as may be.
    pub(super) fn is_full(&self, most: usize) -> bool {
        self.parts.count >= most.min(MAX_PARTS) || self.bytes >= MAX_BYTES
    }

    /// Begins the next part, if there is one and no more than `most` are under way.
    pub(super) fn begin(&mut self, most: usize) -> Option<Part> {
        if let Some(slot) = self.again.pop_front() {
            return self.named(slot);
        }
        if self.is_full(most) {
            return None;
        }
        let (index, rest) = match self.current.take() {
            Some(current) => current,
            None => self.next_group()?,
        };
        let length = rest.length.min(MAX_LENGTH.into());
        let left = rest.length - length;
        let group = self.groups.at(index)?;
        let file = group.ends.file();
        let part = Part {
            id: 0,
            group: index,
            opcode: group.opcode,
            durable: group.ends.durable && group.opcode == Opcode::Write,
            local: Arc::clone(&group.ends.local),
            key: file.file_key.map_or(0, |key| key.0),
            buffer: group.ends.buffer,
            address: rest.source,
            offset: rest.target - file.addr,
            length: length as u32,
            begun: Instant::now(),
            attempts: 0,
            in_use: false,
            given_up: false,
        };
        group.parts += 1;
        group.begun = left == 0;
        if left > 0 {
            let (source, target) = (rest.source + length, rest.target + length);
            self.current = Some((index, WideSlice { source, target, length: left }));
        }
        self.bytes += length;
        let slot = self.parts.insert(part);
        self.named(slot)
    }

    /// A part with a number of its own.
    fn named(&mut self, slot: usize) -> Option<Part> {
        self.serial += 1;
        let part = self.parts.at(slot)?;
        self.counters.posted(part.length.into());
        // Numbers of parts that have ended mean nothing.
        part.id = self.serial << 8 | slot as u64;
        part.begun = Instant::now();
        Some(part.clone())
    }

    fn next_group(&mut self) -> Option<(usize, WideSlice)> {
        loop {
            if let Some(group) = self.queue.front_mut()?.claim(&mut self.late) {
                let slice = group.slice;
                return Some((self.groups.insert(group), slice));
            }
            self.queue.pop_front();
        }
    }

    /// What [`Flow::begin`] has found to be late, to be told without the lock: who is told may submit more.
    pub(super) fn take_late(&mut self) -> Overdue {
        Overdue::of_tasks(std::mem::take(&mut self.late))
    }

    /// The part of this number, if it is under way.
    pub(super) fn part(&mut self, id: u64) -> Option<&Part> {
        self.parts.at((id & 0xff) as usize).filter(|part| part.id == id).map(|part| &*part)
    }

    /// A part has ended. The group that is over by that is to be told.
    pub(super) fn end(&mut self, id: u64, outcome: Outcome) -> Option<EndedGroup> {
        self.part(id)?;
        let part = self.parts.remove((id & 0xff) as usize)?;
        self.bytes -= u64::from(part.length);
        if outcome == Outcome::Done {
            let opcode = match part.opcode {
                Opcode::Read => RailOpcode::Read,
                Opcode::Write => RailOpcode::Write,
            };
            self.counters.completed(opcode, part.length.into());
        }
        if part.given_up {
            return None;
        }
        let group = self.groups.at(part.group)?;
        group.parts -= 1;
        if outcome != Outcome::Done {
            group.sent_in_vain |= part.attempts > 0;
            if outcome == Outcome::Abandoned && group.handle().ends_early() {
                group.unwanted.get_or_insert_with(Instant::now);
            } else {
                // The first one is told.
                group.failed.get_or_insert(outcome);
            }
            if let Some((index, _)) = self.current
                && index == part.group
            {
                // The others are in vain.
                self.current = None;
                group.begun = true;
            }
        }
        let over = group.parts == 0 && group.begun;
        if !over {
            return None;
        }
        let group = self.groups.remove(part.group)?;
        Some(EndedGroup { group, parts_left: false })
    }

    /// All that is under way begins again, over the next connection.
    pub(super) fn begin_again(&mut self) {
        self.again.clear();
        for slot in 0..self.parts.slots.len() {
            let Some(part) = self.parts.at(slot) else { continue };
            if !part.given_up {
                (part.in_use, part.begun) = (false, Instant::now());
                self.again.push_back(slot);
            } else if let Some(part) = self.parts.remove(slot) {
                self.bytes -= u64::from(part.length);
            }
        }
    }

    /// Whether a WRITE was begun over the connection that there is, and has no answer.
    pub(super) fn has_writes(&self) -> bool {
        let begun =
            self.parts.slots.iter().enumerate().filter(|(slot, _)| !self.again.contains(slot));
        begun.filter_map(|(_, part)| part.as_ref()).any(|part| part.opcode == Opcode::Write)
    }

    /// Takes what fails with a connection that was lost. All else begins again, up to a number of times: READs, by which no
    /// byte of the file changes, and, if they `can_be_fenced`, WRITEs. What a target has of a WRITE may be written at any
    /// time, also after one that was sent later, until it has confirmed that nothing of its connection comes any more.
    pub(super) fn take_lost(&mut self, can_be_fenced: bool) -> Rest {
        let mut lost = Vec::new();
        self.parts.slots.iter_mut().flatten().for_each(|part| part.attempts += 1);
        // What waits still has had nothing to do with that connection.
        for &slot in &self.again {
            if let Some(part) = self.parts.slots.get_mut(slot).and_then(Option::as_mut) {
                part.attempts -= 1;
            }
        }
        for index in 0..self.groups.slots.len() {
            let Some(group) = self.groups.at(index) else { continue };
            let own = |part: &&mut Part| part.group == index && !part.given_up;
            let mut parts = self.parts.slots.iter_mut().flatten().filter(own);
            let can_go_on = can_be_fenced || group.opcode == Opcode::Read;
            if can_go_on && parts.all(|part| part.attempts <= MAX_ATTEMPTS) {
                continue;
            }
            lost.extend(self.give_up_group(index));
        }
        self.begin_again();
        if can_be_fenced {
            return Rest { queue: VecDeque::new(), groups: lost, writes_only: false };
        }
        // Of what waits, READs stay.
        let (mut queue, mut waiting) = (VecDeque::new(), VecDeque::new());
        for entry in self.queue.drain(..) {
            let has = |opcode| entry.tasks().any(|task| task.opcode() == opcode);
            if has(Opcode::Read) {
                waiting.push_back(entry.clone());
            }
            if has(Opcode::Write) {
                queue.push_back(entry);
            }
        }
        self.queue = waiting;
        Rest { queue, groups: lost, writes_only: true }
    }

    /// Takes the WRITEs that were sent over connections that were lost: no target has confirmed that nothing of these comes
    /// any more. Nothing is under way over the one that there is.
    pub(super) fn take_unconfirmed(&mut self) -> Rest {
        let mut groups = Vec::new();
        for index in 0..self.groups.slots.len() {
            let mut parts = self.parts.slots.iter().flatten();
            let sent = parts.any(|it| it.group == index && !it.given_up && it.attempts > 0);
            if sent && self.groups.at(index).is_some_and(|group| group.opcode == Opcode::Write) {
                groups.extend(self.give_up_group(index));
            }
        }
        self.begin_again();
        Rest { queue: VecDeque::new(), groups, writes_only: true }
    }

    /// Ends a group whatever becomes of its parts.
    fn give_up_group(&mut self, index: usize) -> Option<Group> {
        let parts = self.parts.slots.iter_mut().flatten();
        parts.filter(|part| part.group == index).for_each(|part| part.given_up = true);
        if self.current.is_some_and(|(current, _)| current == index) {
            self.current = None;
        }
        self.groups.remove(index)
    }

    /// Forgets what was given up: its connection has ended. To be called when nothing else is under way.
    pub(super) fn forget_given_up(&mut self) {
        debug_assert!(self.is_at_rest());
        self.parts = Slots::default();
        self.again.clear();
        self.bytes = 0;
    }

    /// Takes what waits, where all that is under way was given up: that stays, and fills the window.
    pub(super) fn take_waiting(&mut self) -> Rest {
        self.current = None;
        self.earliest = None;
        let groups = std::mem::take(&mut self.groups);
        let queue = std::mem::take(&mut self.queue);
        let groups = groups.slots.into_iter().flatten().collect();
        Rest { queue, groups, writes_only: false }
    }

    /// Takes all that there is.
    pub(super) fn take(&mut self) -> Rest {
        let all = std::mem::take(self);
        // Replies to what was are not for what will be.
        (self.serial, self.counters) = (all.serial, all.counters);
        let groups = all.groups.slots.into_iter().flatten().collect();
        Rest { queue: all.queue, groups, writes_only: false }
    }
}

impl Rest {
    /// Lets the next submissions ask for the descriptors again.
    pub(super) fn mark_stale(&self) {
        let of_groups = self.groups.iter().map(|group| &group.ends);
        let waiting = self.queue.iter().map(|entry| &entry.ends);
        for ends in of_groups.chain(waiting) {
            ends.segment.mark_stale();
        }
    }

    /// None of it is done any more.
    pub(super) fn fail(self, reason: &FailureReason) {
        for group in self.groups {
            if group.opcode == Opcode::Write {
                group.handle().target_is_undefined();
            }
            let reason = match (reason, group.opcode) {
                (FailureReason::File(text), Opcode::Write) => {
                    let text = format!("{text}; what the file holds there is undefined");
                    FailureReason::File(text.into())
                }
                (reason, _) => reason.clone(),
            };
            group.fail(&reason);
        }
        for entry in self.queue {
            if self.writes_only {
                entry.fail_writes(reason);
            } else {
                entry.fail(reason);
            }
        }
    }
}

impl EndedGroup {
    /// Tells its task.
    pub(super) fn tell(self, ended: &mut EndedTasks) {
        let Self { group, parts_left } = self;
        let is_write = group.opcode == Opcode::Write;
        let writing_left = parts_left && is_write;
        let Some(outcome) = group.failed else {
            if group.unwanted.is_some() {
                return group.handle().slices_given_up(group.slices, writing_left);
            }
            // Only copies are left by their transport.
            ended.slices_done(&group.batch, group.task, group.slices, group.slice.length);
            return;
        };
        let sent_before = group.sent_in_vain && is_write;
        if writing_left || sent_before {
            group.handle().target_is_undefined();
        }
        if matches!(outcome, Outcome::UnknownFile | Outcome::OutOfRange) {
            group.ends.segment.mark_stale();
        }
        let local = &group.ends.local;
        let reason = match outcome {
            Outcome::Abandoned if local.is_gpu() && !local.is_closed() => gpu::not_staged(),
            outcome => failure(group.opcode, outcome, sent_before),
        };
        group.fail(&reason);
    }
}

impl Group {
    fn handle(&self) -> TaskHandle {
        TaskHandle { batch: Arc::clone(&self.batch), index: self.task }
    }

    fn fail(&self, reason: &FailureReason) {
        let task = self.handle();
        // Other slices may have ended as badly.
        let whole = task.whole();
        let place = self.ends.place(whole.target, whole.length);
        task.slices_failed(self.slices, &self.ends.error(reason, &place));
    }
}

/// Why something was not done, and what to do about that. Some of a WRITE may have been done by a connection that it was
/// `sent_before` over.
fn failure(opcode: Opcode, outcome: Outcome, sent_before: bool) -> FailureReason {
    let refused = !matches!(outcome, Outcome::Hung(_) | Outcome::System(_));
    let undefined = match opcode {
        Opcode::Write if sent_before || !refused => "; what the file holds there is undefined",
        _ => "",
    };
    let text = match outcome {
        Outcome::UnknownFile => {
            "it is not registered any more, or was registered anew: refresh or \
                                 open the segment again"
                .to_owned()
        }
        Outcome::OutOfRange => "these are not all in what its process has registered: refresh the \
                                segment"
            .to_owned(),
        Outcome::ReadOnly => "it is offered for reading only: register it as writable".to_owned(),
        Outcome::Truncated => "it has become shorter than it was when it was registered: register \
                               it again"
            .to_owned(),
        Outcome::Abandoned => return FailureReason::Unregistered,
        Outcome::ShutDown | Outcome::Done => return FailureReason::ShutDown,
        Outcome::Hung(limit) => {
            format!("its device has not answered for {limit:?}: see whether it is well")
        }
        Outcome::System(errno) => {
            let remedy = match errno {
                ENOSPC | EDQUOT => "make room on its file system",
                EIO => "its device has failed: see the kernel's log there",
                EROFS => "its file system is mounted for reading only",
                _ => "look at the file where it is",
            };
            format!("{}: {remedy}", std::io::Error::from_raw_os_error(errno))
        }
    };
    FailureReason::File(format!("{text}{undefined}").into())
}

/// As in errno(3), on Linux.
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EDQUOT: i32 = 122;

/// Values by small numbers.
struct Slots<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
    count: usize,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), count: 0 }
    }
}

impl<T> Slots<T> {
    fn insert(&mut self, value: T) -> usize {
        self.count += 1;
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = Some(value);
                index
            }
            None => {
                self.slots.push(Some(value));
                self.slots.len() - 1
            }
        }
    }

    fn at(&mut self, index: usize) -> Option<&mut T> {
        self.slots.get_mut(index)?.as_mut()
    }

    fn remove(&mut self, index: usize) -> Option<T> {
        let value = self.slots.get_mut(index)?.take()?;
        self.free.push(index);
        self.count -= 1;
        Some(value)
    }
}
