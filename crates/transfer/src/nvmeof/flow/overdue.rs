//! What is under way and not to be waited for any more: its task was canceled or its time is over, or the
//! device does not answer.
//!
//! The target cannot take back what it has given to a device. So a WRITE is waited for a little while, and
//! then its task ends with an undefined target range. Its parts stay in the window until they are answered.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{EndedGroup, Entry, Flow, Part};
use crate::task::TaskHandle;
use crate::{Opcode, TransferState};

/// For how long a WRITE that is not wanted any more is waited for.
const GRACE: Duration = Duration::from_secs(2);

/// How often canceled tasks are looked for.
const LOOK: Duration = Duration::from_millis(200);

/// Why nothing is done any more where all that fills a window was given up.
pub(in super::super) fn stuck(limit: Duration) -> String {
    format!("its device has not answered for {limit:?}, and all that may be under way waits for it")
}

/// What has ended, to be told without the lock.
#[must_use]
#[derive(Default)]
pub(in super::super) struct Overdue {
    late: VecDeque<Entry>,
    tasks: Vec<TaskHandle>,
    groups: Vec<EndedGroup>,
}

impl Overdue {
    pub(in super::super) fn is_empty(&self) -> bool {
        self.late.is_empty() && self.tasks.is_empty() && self.groups.is_empty()
    }

    pub(super) fn of_tasks(tasks: Vec<TaskHandle>) -> Self {
        Self { tasks, ..Self::default() }
    }

    pub(in super::super) fn tell(self) {
        for entry in self.late {
            entry.end_late();
        }
        for task in self.tasks {
            task.end_rest(TransferState::Timeout);
        }
        for group in self.groups {
            group.tell(&mut crate::task::EndedTasks::default());
        }
    }
}

impl Entry {
    fn end_late(&self) {
        for index in self.next..self.end {
            let task = TaskHandle { batch: self.batch.clone(), index };
            task.end_rest(TransferState::Timeout);
        }
    }
}

impl Flow {
    /// How long nobody need look after it.
    pub(in super::super) fn next_look(&self, now: Instant) -> Duration {
        let deadline = self.earliest.map_or(LOOK, |time| time.saturating_duration_since(now));
        // A group that is in use at its deadline is looked at again soon.
        deadline.clamp(Duration::from_millis(1), LOOK)
    }

    /// Ends what is not to be waited for any more; `limit` is that of a device. To be called by the thread
    /// that moves the data of READs to local memory, or while that is marked as in use.
    pub(in super::super) fn look_after(&mut self, now: Instant, limit: Duration) -> Overdue {
        let mut overdue = Overdue::default();
        if self.earliest.is_some_and(|earliest| earliest <= now) {
            let is_late = |entry: &Entry| entry.deadline().is_some_and(|deadline| deadline <= now);
            let (late, rest) = std::mem::take(&mut self.queue).into_iter().partition(is_late);
            (overdue.late, self.queue) = (late, rest);
        }
        for index in 0..self.groups.slots.len() {
            self.look_after_group(index, now, limit, &mut overdue.groups);
        }
        let groups = self.groups.slots.iter().flatten().filter(|group| group.unwanted.is_none());
        let deadlines = groups.filter_map(|group| group.handle().deadline());
        self.earliest = deadlines.chain(self.queue.iter().filter_map(Entry::deadline)).min();
        overdue
    }

    /// The same while there is no connection: what is to begin again is at no target, so that it ends at once. Unless it is
    /// a WRITE of which a connection that was lost may still bring something: a fence is awaited for as long as an answer is.
    pub(in super::super) fn look_after_unconnected(&mut self, now: Instant) -> Overdue {
        for slot in std::mem::take(&mut self.again) {
            let Some(part) = self.parts.at(slot) else { continue };
            let (group, length) = (part.group, part.length);
            let may_come = part.opcode == Opcode::Write && part.attempts > 0;
            match self.groups.at(group) {
                Some(group) if group.handle().ends_early() && !may_come => group.parts -= 1,
                _ => {
                    self.again.push_back(slot);
                    continue;
                }
            }
            self.parts.remove(slot);
            self.bytes -= u64::from(length);
        }
        // No device has any of it.
        self.look_after(now, Duration::MAX)
    }

    fn look_after_group(
        &mut self,
        index: usize,
        now: Instant,
        limit: Duration,
        ended: &mut Vec<EndedGroup>,
    ) {
        let Some(group) = self.groups.at(index) else { return };
        if group.unwanted.is_none() && group.handle().ends_early() {
            group.unwanted = Some(now);
            group.begun = true;
            if self.current.is_some_and(|(current, _)| current == index) {
                self.current = None;
            }
        }
        let own = |part: &&mut Part| part.group == index && !part.given_up;
        // What is to begin again is with no device.
        let begun =
            self.parts.slots.iter().enumerate().filter(|(slot, _)| !self.again.contains(slot));
        let hung = begun.filter_map(|(_, part)| part.as_ref()).any(|part| {
            let is_own = part.group == index && !part.given_up;
            is_own && now.saturating_duration_since(part.begun) >= limit
        });
        let mut parts = self.parts.slots.iter_mut().flatten().filter(own);
        if parts.any(|part| part.in_use) {
            if hung {
                // So whoever is at its memory leaves.
                group.failed.get_or_insert(super::Outcome::Hung(limit));
            }
            return;
        }
        let waited = group.unwanted.map(|since| now.saturating_duration_since(since));
        let over = match (waited, group.opcode) {
            (Some(_), Opcode::Read) => true,
            (Some(waited), Opcode::Write) => group.parts == 0 || waited >= GRACE,
            (None, _) => hung,
        };
        if !over {
            return;
        }
        if waited.is_none() {
            group.failed.get_or_insert(super::Outcome::Hung(limit));
            if self.current.is_some_and(|(current, _)| current == index) {
                self.current = None;
            }
        }
        let parts = self.parts.slots.iter_mut().flatten().filter(own);
        parts.for_each(|part| part.given_up = true);
        if let Some(group) = self.groups.remove(index) {
            let parts_left = group.parts > 0;
            ended.push(EndedGroup { group, parts_left });
        }
    }

    /// Whether all that is under way was given up, some of it long ago: nothing else can be on its way, be it
    /// that it fills the window, or that the rest of a WRITE finds no room.
    pub(in super::super) fn is_stuck(&self, now: Instant, limit: Duration) -> bool {
        let mut parts = self.parts.slots.iter().flatten();
        parts.clone().all(|part| part.given_up)
            && parts.any(|part| now.saturating_duration_since(part.begun) >= limit)
    }

    /// Marks the local memory of a part as in use; `false` when it is not to be touched any more.
    pub(in super::super) fn enter(&mut self, id: u64) -> bool {
        let wanted = self.is_wanted(id);
        if let Some(part) = self.parts.at((id & 0xff) as usize)
            && part.id == id
        {
            part.in_use = wanted;
        }
        wanted
    }

    /// Nobody is at the local memory of a part any more.
    pub(in super::super) fn leave(&mut self, id: u64) {
        if let Some(part) = self.parts.at((id & 0xff) as usize)
            && part.id == id
        {
            part.in_use = false;
        }
    }

    /// Whether a part is to be done.
    pub(in super::super) fn is_wanted(&mut self, id: u64) -> bool {
        let Some(part) = self.part(id) else { return false };
        let (given_up, group) = (part.given_up, part.group);
        !given_up
            && self
                .groups
                .at(group)
                .is_some_and(|group| group.failed.is_none() && !group.handle().ends_early())
    }
}
