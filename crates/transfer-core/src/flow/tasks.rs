//! Tasks from their submission to their end.

use super::Flow;
use crate::chain::List;
use crate::earliest::Earliest;
use crate::measure::Mark;
use crate::pieces::{Cursor, Limits, Runs};
use crate::rail::Cause;
use crate::slab::Key;
use crate::{
    End, Ended, Failure, Instant, Opcode, Output, Piece, Policy, PriorityLevel, Progress, Request,
    SliceId, SubmitError, TaskId,
};

#[derive(Debug)]
pub(super) struct Task {
    pub(super) user: u64,
    pub(super) opcode: Opcode,
    /// Its queue.
    pub(super) queue: u16,
    pub(super) runs: Runs,
    pub(super) limits: Limits,
    /// Where the next slice starts.
    pub(super) next: Cursor,
    pub(super) length: u64,
    /// Bytes of no slice yet.
    pub(super) uncut: u64,
    pub(super) transferred: u64,
    /// Its slices.
    pub(super) slices: List,
    /// How it will end, once its slices have ended.
    pub(super) end: Option<End>,
    pub(super) target_undefined: bool,
    pub(super) deadline: bool,
    /// When there was first no rail for it. Those that were submitted after that have none yet, and
    /// are the last of their queue.
    pub(super) stranded_at: Option<Instant>,
}

/// Where a slice is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// In flight on its rail.
    Posted,
    /// On its rail, which is fenced.
    Held,
    /// In its queue, to be posted again.
    Queued,
}

#[derive(Debug)]
pub(super) struct Slice {
    pub(super) task: u32,
    pub(super) rail: u16,
    pub(super) place: Place,
    pub(super) attempt: u8,
    /// How often it was on a rail that was silent while others completed.
    pub(super) silences: u8,
    pub(super) start: Cursor,
    pub(super) first: Piece,
    pub(super) length: u32,
    pub(super) pieces: u32,
    /// When it was posted, or came back to its queue.
    pub(super) since: Instant,
    /// What had completed on its rail when it was posted.
    pub(super) posted: Mark,
}

/// What of a level waits to be posted between a pair of locations.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) local_location: u16,
    pub(super) peer_location: u16,
    /// The number of that pair.
    pub(super) pair: u16,
    pub(super) level: PriorityLevel,
    /// It is counted as one that is not empty.
    pub(super) counted: bool,
    /// What of higher levels had been posted when a slice of it was, or it began to wait.
    pub(super) share_mark: u64,
    /// Slices that were thrown back, which go first.
    pub(super) again: List,
    /// Tasks of which something is to be cut, as they came.
    pub(super) tasks: List,
    /// Those of them that have deadlines, if these count.
    pub(super) earliest: Earliest,
    /// Slices by deadlines since one was of the task that came first.
    pub(super) since_oldest: u32,
    /// There was no room for its first slice when the flow's `room` was this.
    pub(super) blocked_at: Option<u64>,
    /// Since when there has been no rail for what waits in it.
    pub(super) stranded_since: Option<Instant>,
}

/// One slice in so many of a queue is of the task that came first, whatever the deadlines of others.
const OLDEST_SHARE: u32 = 8;

impl Queue {
    pub(super) const fn is_empty(&self) -> bool {
        self.again.is_empty() && self.tasks.is_empty()
    }

    /// The task of which a slice is to be cut next.
    pub(super) fn next_task(&self) -> Option<u32> {
        let by_deadline = self.earliest.first().filter(|_| self.since_oldest + 1 < OLDEST_SHARE);
        by_deadline.or_else(|| self.tasks.first())
    }

    /// A slice of a task was cut.
    pub(super) fn cut(&mut self, task: u32) {
        let is_oldest = self.tasks.first() == Some(task);
        self.since_oldest = if is_oldest { 0 } else { self.since_oldest.saturating_add(1) };
    }
}

impl<P: Policy> Flow<P> {
    /// Takes a request in. It is posted by [`Flow::poll_output`].
    pub fn submit(&mut self, request: &Request<'_>) -> Result<TaskId, SubmitError> {
        if request.incarnation != self.incarnation {
            return Err(SubmitError::Stale { current: self.incarnation });
        }
        if self.tasks.len() >= self.config.max_tasks {
            return Err(SubmitError::TooManyTasks { limit: self.config.max_tasks });
        }
        let level = match self.policy.has_priorities() {
            true => request.priority,
            false => PriorityLevel::default(),
        };
        let queue = self.queue(request.local_location, request.peer_location, level)?;
        let (runs, length) = self.pieces.take(&request.ranges)?;
        let key = self.tasks.insert(Task {
            user: request.user,
            opcode: request.opcode,
            queue,
            runs,
            limits: Limits { local: request.local_borders, peer: request.peer_borders },
            next: runs.start(),
            length,
            uncut: length,
            transferred: 0,
            slices: List::EMPTY,
            end: None,
            target_undefined: false,
            deadline: request.deadline.is_some(),
            stranded_at: None,
        });
        if let Some(deadline) = request.deadline {
            self.deadlines.set(key.index, deadline);
        }
        let by_deadline = self.policy.has_priorities();
        let at = usize::from(queue);
        let queue = &mut self.queues[at];
        if queue.is_empty() || queue.stranded_since.is_some() {
            // What had no room is over; or its patience is to begin, as soon as there is no rail for it.
            queue.blocked_at = None;
        }
        self.task_chain.push_back(&mut queue.tasks, key.index);
        if let Some(deadline) = request.deadline.filter(|_| by_deadline) {
            queue.earliest.insert(key.index, deadline);
            // It may go before what had no room.
            queue.blocked_at = None;
        }
        self.recount(at);
        Ok(TaskId(key))
    }

    /// The queue of a level of a pair of locations.
    fn queue(
        &mut self,
        local_location: u16,
        peer_location: u16,
        level: PriorityLevel,
    ) -> Result<u16, SubmitError> {
        let is_pair = |queue: &&Queue| {
            (queue.local_location, queue.peer_location) == (local_location, peer_location)
        };
        let mut of_pair = self.queues.iter().enumerate().filter(|(_, queue)| is_pair(queue));
        if let Some((index, _)) = of_pair.find(|(_, queue)| queue.level == level) {
            return Ok(index as u16);
        }
        let known = self.queues.iter().find(is_pair).map(|queue| queue.pair);
        let pair = match known {
            Some(pair) => pair,
            None => {
                let pairs = self.queues.iter().map(|queue| usize::from(queue.pair) + 1).max();
                let (pairs, limit) = (pairs.unwrap_or_default(), self.config.max_locations);
                if pairs >= limit.min(usize::from(u16::MAX) / PriorityLevel::ALL.len()) {
                    return Err(SubmitError::TooManyLocations { limit });
                }
                pairs as u16
            }
        };
        self.queues.push(Queue {
            local_location,
            peer_location,
            pair,
            level,
            counted: false,
            share_mark: 0,
            again: List::EMPTY,
            tasks: List::EMPTY,
            earliest: Earliest::default(),
            since_oldest: 0,
            blocked_at: None,
            stranded_since: None,
        });
        Ok(self.queues.len() as u16 - 1)
    }

    /// How a task stands; `None` when it is over.
    pub fn progress(&self, task: TaskId) -> Option<Progress> {
        let task = self.tasks.find(task.0)?;
        Some(Progress {
            waiting: task.uncut == task.length,
            transferred: task.transferred,
            length: task.length,
        })
    }

    /// The pieces of a slice that was posted, as long as it is not over.
    pub fn pieces(&self, slice: SliceId) -> impl Iterator<Item = Piece> {
        let slice = self.slices.find(slice.0);
        slice.into_iter().flat_map(|slice| {
            let runs = self.tasks.at(slice.task).runs;
            self.pieces.of_slice(runs, slice.start, slice.length)
        })
    }

    /// Ends a task, if it is not over: local access ends at once, and the task when no WRITE of it can
    /// arrive any more or that is not to be learned. Connections that it has slices on are fenced;
    /// slices of other tasks on them are posted again after that. If the peer does not confirm the fence,
    /// other tasks with WRITEs there fail too. Returns whether it was neither over nor about to end.
    pub fn cancel(&mut self, now: Instant, task: TaskId) -> bool {
        let Some(found) = self.tasks.find(task.0) else { return false };
        let goes_on = found.end.is_none();
        self.end(task.0.index, End::Canceled);
        // What is about to end for another reason may have to do so on a rail that is silent.
        self.end_access(now, task.0.index);
        goes_on
    }

    /// The caller's number of the task of a slice, as long as that is not over.
    pub fn user(&self, slice: SliceId) -> Option<u64> {
        let slice = self.slices.find(slice.0)?;
        Some(self.tasks.at(slice.task).user)
    }

    /// Requests of a slice, one for each piece, as long as it is not over.
    pub fn requests(&self, slice: SliceId) -> Option<u32> {
        Some(self.slices.find(slice.0)?.pieces)
    }

    /// A task shall end. Nothing more of it is posted, and what is in flight is waited for.
    pub(super) fn end(&mut self, task: u32, end: End) {
        let found = self.tasks.at_mut(task);
        if found.end.is_none() {
            found.end = Some(end);
            let at = usize::from(found.queue);
            let queue = &mut self.queues[at];
            if core::mem::take(&mut found.uncut) > 0 {
                self.task_chain.remove(&mut queue.tasks, task);
                queue.earliest.remove(task);
            }
            let mut next = self.tasks.at(task).slices.first();
            while let Some(slice) = next {
                next = self.siblings.next(slice);
                if self.slices.at(slice).place == Place::Queued {
                    self.slice_chain.remove(&mut self.queues[at].again, slice);
                    self.forget_slice(slice);
                }
            }
            self.recount(at);
        }
        self.finish_if_over(task);
    }

    /// Ends the local access of a task's slices.
    pub(super) fn end_access(&mut self, now: Instant, task: u32) {
        if !self.tasks.holds(task) {
            return;
        }
        // Breaking a rail moves no slice of the list.
        let mut next = self.tasks.at(task).slices.first();
        while let Some(slice) = next {
            let Slice { place, rail, .. } = *self.slices.at(slice);
            if place == Place::Posted {
                self.break_rail(now, rail, Cause::Other);
            } else if place == Place::Held && self.fence_is_over(now, rail) {
                // What is still held waits no longer for the peer.
                self.set_timer(rail, now);
            }
            next = self.siblings.next(slice);
        }
    }

    /// A slice is over, for the better or the worse.
    pub(super) fn forget_slice(&mut self, slice: u32) {
        if let Some(found) = self.slices.remove(slice) {
            self.siblings.remove(&mut self.tasks.at_mut(found.task).slices, slice);
        }
    }

    /// Reports a task of which nothing is left.
    pub(super) fn finish_if_over(&mut self, index: u32) {
        let task = self.tasks.at(index);
        if !task.slices.is_empty() || (task.end.is_none() && task.uncut > 0) {
            return;
        }
        let name: Key = self.tasks.key(index);
        let Some(task) = self.tasks.remove(index) else { return };
        if task.deadline {
            self.deadlines.clear(index);
        }
        self.pieces.release(&task.runs);
        // A task of which all was done is done, also when it was to end otherwise.
        let end = match task.end {
            Some(end) if task.transferred < task.length => end,
            _ => End::Completed,
        };
        self.outputs.push_back(Output::Ended(Ended {
            task: TaskId(name),
            user: task.user,
            end,
            target_undefined: task.target_undefined,
            transferred: task.transferred,
        }));
    }

    /// Ends all tasks.
    pub(super) fn end_all(&mut self, now: Instant, failure: Failure) {
        for task in 0..self.tasks.end() {
            if self.tasks.holds(task) {
                self.end(task, End::Failed(failure));
                self.end_access(now, task);
            }
        }
    }
}
