//! Tasks that have ended, to be told with no lock held.

use std::sync::{Arc, Weak};

use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::fail_over::{Leaving, leave};
use crate::memory::LocalMemory;
use crate::segment::OpenSegment;
use crate::task::{EndedTasks, TaskEnd, TaskHandle};
use crate::terms::Terms;
use crate::{FailureReason, TransferError, TransferState};

/// A task that has ended.
pub(super) struct Ended {
    pub(super) batch: Arc<BatchShared>,
    pub(super) index: usize,
    pub(super) segment: Arc<OpenSegment>,
    pub(super) state: TransferState,
    pub(super) transferred: u64,
    pub(super) undefined: bool,
    pub(super) unconfirmed: bool,
    pub(super) failure: Option<FailureReason>,
    /// If another transport may go on with it: nothing of it can arrive any more.
    pub(super) leaves: Option<(Arc<LocalMemory>, Terms)>,
}

/// Tells their batches, or has another transport of the engine go on with them: all are of one segment, whose process
/// has this incarnation, and went over the transport of this name.
pub(super) fn tell(
    ended: &mut Vec<Ended>,
    engine: Option<&Weak<Inner>>,
    incarnation: Option<u64>,
    transport: &'static str,
) {
    let mut tasks = EndedTasks::default();
    let (mut leaving, mut left) = (Vec::new(), None);
    for ended in ended.drain(..) {
        let Ended { batch, index, segment, state, transferred, .. } = ended;
        if state == TransferState::Completed {
            segment.avoided.works(transport);
        }
        let error = ended.failure.map(|reason| TransferError {
            peer: segment.name.as_str().into(),
            nic: transport.into(),
            reason,
        });
        let (target_undefined, unconfirmed) = (ended.undefined, ended.unconfirmed);
        let end = TaskEnd { state, transferred, target_undefined, unconfirmed, error };
        match ended.leaves.filter(|_| engine.is_some()) {
            None => tasks.ended(&batch, index, end),
            Some((local, terms)) => {
                let (task, from) = (TaskHandle { batch, index }, transport);
                let end = Some(end);
                leaving.push(Leaving { task, from, local, incarnation, terms, end });
                left = Some(segment);
            }
        }
    }
    drop(tasks);
    if let Some(segment) = left {
        leave(engine, &segment, leaving);
    }
}
