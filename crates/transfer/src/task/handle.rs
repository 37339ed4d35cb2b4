//! A task of a batch that lives as long as it: how its slices are claimed and told, and how it is ended.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use super::owners::Owned;
use super::{EndedTasks, Step, TaskRef, WideSlice};
use crate::batch::BatchShared;
use crate::pieces::Shape;
use crate::{Opcode, TransferError, TransferState};

/// A handle to a task, and what keeps its batch alive. Each slice that was claimed must be
/// finished: by [`EndedTasks::slices_done`] or `slices_failed`, or as part of its task by
/// [`EndedTasks::ended`].
#[derive(Clone, Debug)]
pub(crate) struct TaskHandle {
    pub(crate) batch: Arc<BatchShared>,
    pub(crate) index: usize,
}

impl TaskHandle {
    pub(super) fn task(&self) -> TaskRef<'_> {
        self.batch.tasks.get(self.index)
    }

    pub(crate) fn opcode(&self) -> Opcode {
        self.task().opcode()
    }

    /// The next slice to do, if any is left.
    pub(crate) fn claim(&self) -> Option<WideSlice> {
        let task = self.task();
        let slices = task.slices.load(Ordering::Relaxed);
        let next = |index| (index < slices).then_some(index + 1);
        let index = task.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        if let Some(shape) = task.shape() {
            return Some(shape.piece(index));
        }
        let part = self.batch.slicing.part(task.length.load(Ordering::Relaxed), index);
        Some(WideSlice {
            source: task.source.load(Ordering::Relaxed) + part.offset,
            target: task.target.load(Ordering::Relaxed) + part.offset,
            length: part.length.into(),
        })
    }

    /// Its pieces, if it has several.
    pub(crate) fn shape(&self) -> Option<&Shape> {
        self.task().shape()
    }

    /// Claims the next pieces: so many at most, and no more once they have so many bytes. None are left when it
    /// is empty.
    pub(crate) fn claim_pieces(&self, most: usize, bytes: u64) -> Range<u64> {
        let task = self.task();
        let Some(shape) = task.shape() else { return 0..0 };
        let slices = task.slices.load(Ordering::Relaxed);
        let mut claimed = 0..0;
        let next = |first: u64| {
            let mut end = first;
            let mut left = bytes;
            while end < slices && end - first < most as u64 && left > 0 {
                left = left.saturating_sub(shape.piece(end).length);
                end += 1;
            }
            claimed = first..end;
            (first < end).then_some(end)
        };
        match task.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(_) => claimed,
            Err(_) => 0..0,
        }
    }

    /// As [`TaskRef::claim_whole`].
    pub(crate) fn claim_whole(&self) -> Option<u64> {
        self.task().claim_whole()
    }

    /// Fails it, if nobody has begun to do it as a whole.
    pub(crate) fn fail_whole(&self, error: &TransferError) {
        if let Some(slices) = self.claim_whole() {
            self.slices_failed(slices, error);
        }
    }

    /// All that nobody has claimed yet, at once, and how many slices that is. Not of one that has
    /// several pieces.
    pub(crate) fn claim_rest(&self) -> Option<(WideSlice, u64)> {
        let task = self.task();
        let slices = task.slices.load(Ordering::Relaxed);
        debug_assert!(task.shape().is_none());
        let next = task.next.swap(slices, Ordering::Relaxed);
        if next >= slices {
            return None;
        }
        let length = task.length.load(Ordering::Relaxed);
        let offset = self.batch.slicing.part(length, next).offset;
        let slice = WideSlice {
            source: task.source.load(Ordering::Relaxed) + offset,
            target: task.target.load(Ordering::Relaxed) + offset,
            length: length - offset,
        };
        Some((slice, slices - next))
    }

    /// What the whole task is.
    pub(crate) fn whole(&self) -> WideSlice {
        self.task().whole()
    }

    /// A slice has arrived, as [`EndedTasks`] tells more cheaply.
    #[cfg(test)]
    pub(crate) fn done(&self, length: u32) {
        self.task().transferred.fetch_add(length.into(), Ordering::Relaxed);
        self.finish(1);
    }

    /// So many slices have failed for good, and the task with them.
    pub(crate) fn slices_failed(&self, slices: u64, error: &TransferError) {
        self.task().set_error(error.clone());
        self.finish(slices + self.task().stop());
    }

    /// Nobody will do the slices that were not claimed yet.
    pub(crate) fn fail_rest(&self, error: &TransferError) {
        let rest = self.task().stop();
        if rest > 0 {
            self.task().set_error(error.clone());
            self.finish(rest);
        }
    }

    /// Ends it: takes back the slices that were not claimed yet, or has its owner end it. Whether that
    /// changes anything.
    pub(crate) fn cancel(&self) -> bool {
        self.task().end_wanted.store(true, Ordering::SeqCst);
        let moved = self.task().moved_owned();
        let owned = moved.or_else(|| Some(&self.batch.tasks.owned.get()?[self.index]));
        match owned.and_then(Owned::get) {
            Some((owner, name)) => {
                let owner = self.batch.tasks.owners.get(owner);
                let owner = owner.and_then(|owner| owner.upgrade());
                return owner.is_some_and(|owner| owner.cancel(name)) || self.ends_departing();
            }
            // As well is one that is being given to its next owner.
            None if moved.is_some() => return self.task().is_given_away(),
            None => {}
        }
        // One that is being given to its owner just now is ended by that.
        let ends = self.ends_departing()
            || self.end_rest(TransferState::Canceled)
            || self.task().is_given_away();
        // Who found nothing to take back sees that of who has claimed it.
        fence(Ordering::Acquire);
        let can = self.task().rare();
        let can = can.is_some_and(|rare| rare.can_be_given_up.load(Ordering::Relaxed));
        ends || (can && self.task().end_claimed(TransferState::Canceled))
    }

    /// Says that who does it looks whether it [is to end early](Self::ends_early), and gives up what it has
    /// claimed then. It is said before that is claimed.
    pub(crate) fn can_be_given_up(&self) {
        self.task().rare_room().can_be_given_up.store(true, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// When its time is over, if ever.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.task().deadline()
    }

    /// Whether it is to end though not all of it was done: it was canceled, or its time is over.
    pub(crate) fn ends_early(&self) -> bool {
        if self.is_late() {
            self.task().end_claimed(TransferState::Timeout);
            self.end_rest(TransferState::Timeout);
        }
        self.task().end_as.load(Ordering::Relaxed) != 0
    }

    /// So many slices that were claimed were given up, as it ends early. Some of them may yet arrive where
    /// the target's range is `undefined` by that.
    pub(crate) fn slices_given_up(&self, slices: u64, undefined: bool) {
        if undefined {
            self.target_is_undefined();
        }
        self.finish(slices + self.task().stop());
    }

    /// What its target holds is undefined.
    pub(crate) fn target_is_undefined(&self) {
        self.task().target_undefined.store(true, Ordering::Relaxed);
    }

    /// Whether it has several pieces.
    pub(crate) fn has_pieces(&self) -> bool {
        self.task().shape().is_some()
    }

    /// Whether its time is over.
    pub(crate) fn is_late(&self) -> bool {
        self.task().is_late()
    }

    /// The time was over when so many bytes of these slices, which follow each other, had arrived: it ends
    /// as TIMEOUT.
    pub(crate) fn slices_late(&self, slices: u64, length: u64) {
        self.task().transferred.fetch_add(length, Ordering::Relaxed);
        self.task().end_as.store(TransferState::Timeout as u8, Ordering::Relaxed);
        self.finish(slices + self.task().stop());
    }

    /// Nobody will do the slices that were not claimed yet: it ends with this state. Whether there were
    /// any.
    pub(crate) fn end_rest(&self, state: TransferState) -> bool {
        let rest = self.task().stop();
        if rest > 0 {
            self.task().end_as.store(state as u8, Ordering::Relaxed);
            self.finish(rest);
        }
        rest > 0
    }

    pub(super) fn finish(&self, slices: u64) {
        if self.task().end_slices(slices) == Step::Ended {
            EndedTasks::default().count(&self.batch, self.index);
        }
    }
}
