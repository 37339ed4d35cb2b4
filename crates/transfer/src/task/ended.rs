//! Tasks that have ended, told to their batch together.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Step, TaskEnd};
use crate::TransferState;
use crate::batch::BatchShared;
use crate::metrics::Tally;

/// Tasks that have ended and whose batch is not told yet. It is when tasks of another follow, or
/// this is dropped.
#[derive(Default)]
pub(crate) struct EndedTasks {
    batch: Option<Arc<BatchShared>>,
    count: usize,
    /// The number of their transport.
    transport: u8,
    tally: Tally,
}

impl EndedTasks {
    /// So many slices of a task have arrived, with so many bytes. Whether another transport is to be looked for, as
    /// [`TaskHandle::slices_left`](super::TaskHandle::slices_left) says.
    pub(crate) fn slices_done(
        &mut self,
        batch: &Arc<BatchShared>,
        task: usize,
        slices: u64,
        length: u64,
    ) -> bool {
        let found = batch.tasks.get(task);
        if slices == found.slices() {
            found.arrived(length);
        } else {
            found.transferred.fetch_add(length, Ordering::Relaxed);
            match found.end_slices(slices) {
                Step::Ended => {}
                step => return step == Step::Left,
            }
        }
        self.count(batch, task);
        false
    }

    /// A task has ended that had an owner.
    pub(crate) fn ended(&mut self, batch: &Arc<BatchShared>, task: usize, end: TaskEnd) {
        let TaskEnd { state, transferred, target_undefined, unconfirmed, error } = end;
        let found = batch.tasks.get(task);
        found.transferred.store(transferred, Ordering::Relaxed);
        found.target_undefined.store(target_undefined, Ordering::Relaxed);
        found.unconfirmed.store(unconfirmed, Ordering::Relaxed);
        if let Some(error) = error {
            found.set_error(error);
        }
        found.set_state(state);
        self.count(batch, task);
    }

    /// The batch is to be told of one more task.
    pub(super) fn count(&mut self, batch: &Arc<BatchShared>, index: usize) {
        let task = batch.tasks.get(index);
        let transport = task.transport();
        if !self.batch.as_ref().is_some_and(|ended| Arc::ptr_eq(ended, batch))
            || transport != self.transport
        {
            self.tell();
            (self.batch, self.transport) = (Some(Arc::clone(batch)), transport);
        }
        self.count += 1;
        let state = task.state.load(Ordering::Relaxed);
        let opcode = usize::from(task.opcode.load(Ordering::Relaxed));
        self.tally.bytes[opcode & 1] += task.transferred();
        match state == TransferState::Completed as u8 {
            true => self.tally.completed += 1,
            false => batch.counters.not_completed(transport, state),
        }
        batch.state_told(index, transport, state);
    }

    fn tell(&mut self) {
        if let Some(batch) = self.batch.take() {
            batch.counters.completed(self.transport, &std::mem::take(&mut self.tally));
            batch.tasks_finished(std::mem::take(&mut self.count));
        }
    }
}

impl Drop for EndedTasks {
    fn drop(&mut self) {
        self.tell();
    }
}
