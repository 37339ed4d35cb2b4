//! What waits to be sent between two NICs, and what is under way: bookkeeping without I/O.

use std::collections::VecDeque;

use crate::TransferError;
use crate::task::{Slice, TaskHandle};

/// A task that may have slices left to claim, with its keys for this pair of NICs.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) task: TaskHandle,
    pub(super) local_key: u32,
    pub(super) remote_key: u32,
    /// Which start of the peer's process the remote key is of, if it says.
    pub(super) incarnation: Option<u64>,
}

/// A slice that was claimed.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) task: TaskHandle,
    pub(super) slice: Slice,
    pub(super) local_key: u32,
    pub(super) remote_key: u32,
    pub(super) incarnation: Option<u64>,
}

/// The work of an endpoint. Slices under way sit in slots, whose numbers are the identifiers of
/// work requests; there is a fixed number of them for each queue pair.
#[derive(Debug)]
pub(super) struct SendQueue {
    /// Slots of each queue pair.
    depth: usize,
    pending: VecDeque<Pending>,
    /// Slices of a connection that broke.
    retry: VecDeque<InFlight>,
    slots: Vec<Option<InFlight>>,
    /// For each queue pair, its free slots.
    free: Vec<Vec<u32>>,
}

/// Work that will not be done.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    pending: VecDeque<Pending>,
    slices: VecDeque<InFlight>,
}

impl SendQueue {
    pub(super) fn new(queue_pairs: usize, depth: usize) -> Self {
        let slots = queue_pairs * depth;
        let own = |pair| (pair * depth..(pair + 1) * depth).rev().map(|slot| slot as u32).collect();
        Self {
            depth,
            pending: VecDeque::new(),
            retry: VecDeque::with_capacity(slots),
            slots: (0..slots).map(|_| None).collect(),
            free: (0..queue_pairs).map(own).collect(),
        }
    }

    pub(super) fn push(&mut self, pending: Pending) {
        self.pending.push_back(pending);
    }

    /// Whether anything waits. May be wrong about tasks that other endpoints have finished.
    pub(super) fn has_waiting(&self) -> bool {
        !self.retry.is_empty() || !self.pending.is_empty()
    }

    /// How many slices are under way.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.iter().map(Vec::len).sum::<usize>()
    }

    /// The queue pair with the most room.
    pub(super) fn roomiest(&self) -> usize {
        let room = |&pair: &usize| self.free[pair].len();
        // Of equals, the first: keeps single requests on one queue pair.
        (0..self.free.len()).rev().max_by_key(room).unwrap_or(0)
    }

    /// Gives the next slice a slot of this queue pair; `None` when there is no slot or no slice.
    pub(super) fn begin(&mut self, queue_pair: usize) -> Option<(u32, &InFlight)> {
        if self.free[queue_pair].is_empty() {
            return None;
        }
        let next = self.next()?;
        let slot = self.free[queue_pair].pop()?;
        Some((slot, self.slots[slot as usize].insert(next)))
    }

    /// Takes the slice out of a slot, which is free then.
    pub(super) fn end(&mut self, slot: u32) -> Option<InFlight> {
        let found = self.slots.get_mut(slot as usize)?.take()?;
        self.free[slot as usize / self.depth].push(slot);
        Some(found)
    }

    /// Does a slice again, before what waits.
    pub(super) fn again(&mut self, slice: InFlight) {
        self.retry.push_back(slice);
    }

    /// Gives up all that waits; what is under way stays.
    pub(super) fn drop_waiting(&mut self) -> Dropped {
        Dropped {
            pending: std::mem::take(&mut self.pending),
            slices: std::mem::take(&mut self.retry),
        }
    }

    /// Gives up what waits and was meant for another start of the peer's process.
    pub(super) fn drop_foreign(&mut self, is_foreign: impl Fn(Option<u64>) -> bool) -> Dropped {
        let mut dropped = Dropped::default();
        for pending in std::mem::take(&mut self.pending) {
            let foreign = is_foreign(pending.incarnation);
            let list = if foreign { &mut dropped.pending } else { &mut self.pending };
            list.push_back(pending);
        }
        for slice in std::mem::take(&mut self.retry) {
            let foreign = is_foreign(slice.incarnation);
            let list = if foreign { &mut dropped.slices } else { &mut self.retry };
            list.push_back(slice);
        }
        dropped
    }

    /// Gives up everything.
    pub(super) fn drop_all(&mut self) -> Dropped {
        let mut dropped = self.drop_waiting();
        for slot in 0..self.slots.len() as u32 {
            dropped.slices.extend(self.end(slot));
        }
        dropped
    }

    fn next(&mut self) -> Option<InFlight> {
        while let Some(slice) = self.retry.pop_front() {
            if !slice.task.is_over() {
                return Some(slice);
            }
            slice.task.abandoned();
        }
        while let Some(pending) = self.pending.front() {
            let Pending { task, local_key, remote_key, incarnation } = pending;
            if let Some(slice) = task.claim() {
                let (local_key, remote_key) = (*local_key, *remote_key);
                let (task, incarnation) = (task.clone(), *incarnation);
                return Some(InFlight { task, slice, local_key, remote_key, incarnation });
            }
            self.pending.pop_front();
        }
        None
    }
}

impl Dropped {
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.slices.is_empty()
    }

    pub(super) fn fail(self, error: &TransferError) {
        self.slices.iter().for_each(|slice| slice.task.failed(error));
        self.pending.iter().for_each(|pending| pending.task.fail_rest(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slicing::Slicing;
    use crate::{Batch, FailureReason, Opcode, SegmentId, TransferRequest, TransferState};

    /// A task of so many slices of 1 KiB.
    fn task(slices: u64) -> (Batch, TaskHandle) {
        let batch = Batch::new(1, Slicing::new(1024, 4)).unwrap();
        let request = TransferRequest {
            opcode: Opcode::Write,
            source: 0,
            target: SegmentId(1),
            target_offset: 0,
            length: slices * 1024,
        };
        batch.shared.tasks[0].start(&request, &batch.shared.slicing);
        batch.shared.added(1);
        let task = batch.task(0).unwrap();
        (batch, task)
    }

    fn pending(task: &TaskHandle) -> Pending {
        Pending { task: task.clone(), local_key: 1, remote_key: 2, incarnation: None }
    }

    fn state(batch: &Batch) -> TransferState {
        batch.status(0).unwrap().state
    }

    fn error() -> TransferError {
        TransferError { peer: "p".into(), nic: "n".into(), reason: FailureReason::Restarted }
    }

    #[test]
    fn slots_bound_what_is_under_way() {
        let (batch, task) = task(5);
        let mut queue = SendQueue::new(1, 2);
        queue.push(pending(&task));
        let first = queue.begin(0).unwrap().0;
        let second = queue.begin(0).unwrap().0;
        assert!(queue.begin(0).is_none(), "no slot");
        assert_eq!(queue.in_flight(), 2);
        queue.end(first).unwrap().task.done(1024);
        assert!(queue.end(first).is_none(), "once");
        assert!(queue.end(77).is_none());
        let third = queue.begin(0).unwrap().0;
        for slot in [second, third] {
            queue.end(slot).unwrap().task.done(1024);
        }
        for _ in 0..2 {
            let slot = queue.begin(0).unwrap().0;
            queue.end(slot).unwrap().task.done(1024);
        }
        assert!(queue.begin(0).is_none(), "no slice");
        assert!(!queue.has_waiting());
        assert_eq!(state(&batch), TransferState::Completed);
    }

    #[test]
    fn queue_pairs_share_the_work_by_their_room() {
        let (_batch, task) = task(6);
        let mut queue = SendQueue::new(2, 2);
        queue.push(pending(&task));
        let mut slots = Vec::new();
        for expected in [0, 1, 0, 1] {
            let pair = queue.roomiest();
            assert_eq!(pair, expected);
            slots.push(queue.begin(pair).unwrap().0);
        }
        assert_eq!(slots, [0, 2, 1, 3]);
        assert!(queue.begin(queue.roomiest()).is_none());
        queue.end(2);
        assert_eq!(queue.roomiest(), 1);
    }

    #[test]
    fn slices_that_come_back_go_first() {
        let (_over_batch, over) = task(1);
        let (_batch, task) = task(2);
        let mut queue = SendQueue::new(1, 4);
        queue.push(pending(&over));
        queue.push(pending(&task));
        let slots: Vec<_> = (0..2).map(|_| queue.begin(0).unwrap().0).collect();
        for slot in slots {
            let slice = queue.end(slot).unwrap();
            queue.again(slice);
        }
        over.fail_rest(&error());
        assert!(!over.is_over(), "all of it was claimed, so it goes on");
        assert_eq!(queue.begin(0).unwrap().1.slice.source, 0);
        assert_eq!(queue.begin(0).unwrap().1.slice.source, 0, "the first of the second task");
        assert_eq!(queue.begin(0).unwrap().1.slice.source, 1024);
    }

    #[test]
    fn slices_of_a_failed_task_are_abandoned() {
        let (batch, task) = task(2);
        let mut queue = SendQueue::new(1, 4);
        queue.push(pending(&task));
        let (first, second) = (queue.begin(0).unwrap().0, queue.begin(0).unwrap().0);
        queue.end(first).unwrap().task.failed(&error());
        let slice = queue.end(second).unwrap();
        queue.again(slice);
        assert_eq!(state(&batch), TransferState::Pending);
        assert!(queue.begin(0).is_none());
        assert_eq!(state(&batch), TransferState::Failed);
    }

    #[test]
    fn giving_up_fails_what_waits_and_in_the_end_what_is_under_way() {
        let (batch, task) = task(3);
        let mut queue = SendQueue::new(1, 2);
        queue.push(pending(&task));
        let first = queue.begin(0).unwrap().0;
        let slice = queue.end(first).unwrap();
        queue.again(slice);
        queue.begin(0).unwrap();
        queue.begin(0).unwrap();
        queue.drop_waiting().fail(&error());
        assert_eq!(state(&batch), TransferState::Pending);
        assert_eq!(queue.in_flight(), 2);
        queue.drop_all().fail(&error());
        assert_eq!((queue.in_flight(), queue.has_waiting()), (0, false));
        assert_eq!(state(&batch), TransferState::Failed);
    }
}
