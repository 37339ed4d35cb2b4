//! Tasks that have ended, to be told with no lock held.

use std::sync::Weak;

use super::flow::Origin;
use crate::engine::Inner;
use crate::fail_over::{Leaving, leave};
use crate::task::{EndedTasks, TaskEnd, TaskHandle};
use crate::{FailureReason, TransferError, TransferState};

/// A task that has ended.
pub(super) struct Ended {
    /// What it is of, and its index in the batch of that.
    pub(super) origin: u32,
    pub(super) index: u32,
    pub(super) transferred: u64,
    pub(super) state: TransferState,
    pub(super) undefined: bool,
    pub(super) unconfirmed: bool,
    /// Another transport may go on with it: nothing of it can arrive any more.
    pub(super) leaves: bool,
    pub(super) failure: Option<Box<FailureReason>>,
}

/// Tasks that have ended, and what they are of, by its place here.
#[derive(Default)]
pub(super) struct AllEnded {
    pub(super) tasks: Vec<Ended>,
    pub(super) origins: Vec<Origin>,
}

impl AllEnded {
    /// Tells their batches, or has another transport of the engine go on with them: all are of one segment, whose
    /// process has this incarnation, and went over the transport of this name. Nothing is left in it but room.
    pub(super) fn tell(
        &mut self,
        engine: Option<&Weak<Inner>>,
        incarnation: Option<u64>,
        transport: &'static str,
    ) {
        let mut tasks = EndedTasks::default();
        let (mut leaving, mut left, mut works) = (Vec::new(), None, None);
        for ended in self.tasks.drain(..) {
            let Origin { batch, local, segment, terms } = &self.origins[ended.origin as usize];
            let (state, index) = (ended.state, ended.index as usize);
            // Once for all of one origin.
            if state == TransferState::Completed
                && works.replace(ended.origin) != Some(ended.origin)
            {
                segment.avoided.works(transport);
            }
            let error = ended
                .failure
                .map(|reason| TransferError::new(segment.name.as_str().into(), transport, *reason));
            let Ended { transferred, undefined: target_undefined, unconfirmed, .. } = ended;
            let end = TaskEnd { state, transferred, target_undefined, unconfirmed, error };
            if !ended.leaves || engine.is_none() {
                tasks.ended(batch, index, end);
                continue;
            }
            let (task, from) = (TaskHandle { batch: batch.clone(), index }, transport);
            let (local, terms, end) = (local.clone(), *terms, Some(end));
            leaving.push(Leaving { task, from, local, incarnation, terms, end });
            left = Some(segment.clone());
        }
        drop(tasks);
        self.origins.clear();
        if let Some(segment) = left {
            leave(engine, &segment, leaving);
        }
    }
}
