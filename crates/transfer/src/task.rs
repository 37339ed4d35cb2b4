//! Tasks: what is left to do of a request, counted in slices.
//!
//! Slices are not stored. A task has a counter of the next one; whoever has room in a send queue
//! claims it. So a request of any length takes no memory, several queues can work on one request,
//! and the faster does more of it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::batch::BatchShared;
use crate::slicing::Slicing;
use crate::{Opcode, TransferError, TransferRequest, TransferState, TransferStatus};

/// A task's place in a batch.
#[derive(Debug, Default)]
pub(crate) struct Task {
    opcode: AtomicU8,
    source: AtomicU64,
    target: AtomicU64,
    length: AtomicU64,
    slices: AtomicU64,
    /// The next slice that nobody has claimed.
    next: AtomicU64,
    /// Slices that are not finished, claimed or not.
    unfinished: AtomicU64,
    transferred: AtomicU64,
    canceled: AtomicBool,
    /// 0 while unfinished, then the final state.
    state: AtomicU8,
    error: OnceLock<TransferError>,
}

/// A slice that was claimed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Slice {
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) length: u32,
}

/// Several slices of one task, one after the other.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct WideSlice {
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) length: u64,
}

/// A handle to a task, and what keeps its batch alive. Each slice that was claimed must be
/// finished by exactly one of `done`, `failed` and `abandoned`.
#[derive(Clone, Debug)]
pub(crate) struct TaskHandle {
    pub(crate) batch: Arc<BatchShared>,
    pub(crate) index: usize,
}

impl Task {
    /// Sets what is to be done. Called before anybody else knows of the task.
    pub(crate) fn start(&self, request: &TransferRequest, slicing: &Slicing) {
        let slices = slicing.count(request.length);
        self.opcode.store(request.opcode as u8, Ordering::Relaxed);
        self.source.store(request.source, Ordering::Relaxed);
        self.target.store(request.target_offset, Ordering::Relaxed);
        self.length.store(request.length, Ordering::Relaxed);
        self.slices.store(slices, Ordering::Relaxed);
        self.unfinished.store(slices, Ordering::Relaxed);
    }

    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length.load(Ordering::Relaxed)
    }

    /// How many slices it has in all.
    pub(crate) fn slices(&self) -> u64 {
        self.slices.load(Ordering::Relaxed)
    }

    pub(crate) fn status(&self) -> TransferStatus {
        let state = match self.state.load(Ordering::Acquire) {
            3 => TransferState::Canceled,
            4 => TransferState::Completed,
            6 => TransferState::Failed,
            _ if self.next.load(Ordering::Relaxed) == 0 => TransferState::Waiting,
            _ => TransferState::Pending,
        };
        TransferStatus {
            state,
            transferred_bytes: self.transferred.load(Ordering::Relaxed),
            // Set early, when the first slice fails; meant only once the others have ended too.
            error: (state == TransferState::Failed).then(|| self.error.get().cloned()).flatten(),
        }
    }

    /// Makes sure that no slice is claimed any more; returns how many were not.
    fn stop(&self) -> u64 {
        let slices = self.slices.load(Ordering::Relaxed);
        slices - self.next.swap(slices, Ordering::Relaxed).min(slices)
    }

    /// So many slices have ended; whether the task has. Then the batch must be told.
    fn end_slices(&self, slices: u64) -> bool {
        // Release what this thread has written before, the error above all; the last to come here
        // acquires what all others have.
        if self.unfinished.fetch_sub(slices, Ordering::AcqRel) != slices {
            return false;
        }
        self.end();
        true
    }

    /// Sets the final state.
    fn end(&self) {
        let state = if self.error.get().is_some() {
            TransferState::Failed
        } else if self.canceled.load(Ordering::Relaxed) {
            TransferState::Canceled
        } else {
            TransferState::Completed
        };
        self.state.store(state as u8, Ordering::Release);
    }
}

impl TaskHandle {
    fn task(&self) -> &Task {
        &self.batch.tasks[self.index]
    }

    pub(crate) fn opcode(&self) -> Opcode {
        Opcode::from_byte(self.task().opcode.load(Ordering::Relaxed))
    }

    /// The next slice to do, if any is left.
    pub(crate) fn claim(&self) -> Option<Slice> {
        let task = self.task();
        let slices = task.slices.load(Ordering::Relaxed);
        let next = |index| (index < slices).then_some(index + 1);
        let index = task.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        let part = self.batch.slicing.part(task.length.load(Ordering::Relaxed), index);
        Some(Slice {
            source: task.source.load(Ordering::Relaxed) + part.offset,
            target: task.target.load(Ordering::Relaxed) + part.offset,
            length: part.length,
        })
    }

    /// All that nobody has claimed yet, at once, and how many slices that is.
    pub(crate) fn claim_rest(&self) -> Option<(WideSlice, u64)> {
        let task = self.task();
        let slices = task.slices.load(Ordering::Relaxed);
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
        let task = self.task();
        WideSlice {
            source: task.source.load(Ordering::Relaxed),
            target: task.target.load(Ordering::Relaxed),
            length: task.length.load(Ordering::Relaxed),
        }
    }

    /// Whether doing more of it is in vain: it has failed or was canceled.
    pub(crate) fn is_over(&self) -> bool {
        self.task().error.get().is_some() || self.task().canceled.load(Ordering::Relaxed)
    }

    /// A slice has arrived, as [`EndedTasks`] tells more cheaply.
    #[cfg(test)]
    /// A slice has arrived, as [`EndedTasks`] tells more cheaply.
    #[cfg(test)]
    pub(crate) fn done(&self, length: u32) {
        self.task().transferred.fetch_add(length.into(), Ordering::Relaxed);
        self.finish(1);
    }

    /// A slice has failed for good, and the task with it.
    pub(crate) fn failed(&self, error: &TransferError) {
        self.slices_failed(1, error);
    }

    /// So many slices have failed for good, and the task with them.
    pub(crate) fn slices_failed(&self, slices: u64, error: &TransferError) {
        // The first error is the one to report.
        let _ = self.task().error.set(error.clone());
        self.finish(slices + self.task().stop());
    }

    /// A slice will not be done because the task is over.
    pub(crate) fn abandoned(&self) {
        self.finish(1);
    }

    /// Nobody will do the slices that were not claimed yet.
    pub(crate) fn fail_rest(&self, error: &TransferError) {
        let rest = self.task().stop();
        if rest > 0 {
            let _ = self.task().error.set(error.clone());
            self.finish(rest);
        }
    }

    /// Takes back the slices that were not claimed yet; whether there were any.
    pub(crate) fn cancel(&self) -> bool {
        let rest = self.task().stop();
        if rest > 0 {
            self.task().canceled.store(true, Ordering::Relaxed);
            self.finish(rest);
        }
        rest > 0
    }

    fn finish(&self, slices: u64) {
        if self.task().end_slices(slices) {
            self.batch.tasks_finished(1);
        }
    }
}

/// Tasks that have ended and whose batch is not told yet. It is when tasks of another follow, or
/// this is dropped.
#[derive(Default)]
pub(crate) struct EndedTasks {
    batch: Option<Arc<BatchShared>>,
    count: usize,
}

impl EndedTasks {
    /// A slice has arrived.
    pub(crate) fn done(&mut self, handle: TaskHandle, length: u32) {
        self.slices_done(&handle.batch, handle.index, 1, length.into());
    }

    /// So many slices of a task have arrived, with so many bytes.
    pub(crate) fn slices_done(
        &mut self,
        batch: &Arc<BatchShared>,
        task: usize,
        slices: u64,
        length: u64,
    ) {
        let task = &batch.tasks[task];
        if slices == task.slices() {
            // Nobody else has any of it, or will.
            task.transferred.store(length, Ordering::Relaxed);
            task.unfinished.store(0, Ordering::Relaxed);
            task.end();
        } else {
            task.transferred.fetch_add(length, Ordering::Relaxed);
            if !task.end_slices(slices) {
                return;
            }
        }
        if !self.batch.as_ref().is_some_and(|ended| Arc::ptr_eq(ended, batch)) {
            self.tell();
            self.batch = Some(Arc::clone(batch));
        }
        self.count += 1;
    }

    fn tell(&mut self) {
        if let Some(batch) = self.batch.take() {
            batch.tasks_finished(std::mem::take(&mut self.count));
        }
    }
}

impl Drop for EndedTasks {
    fn drop(&mut self) {
        self.tell();
    }
}
