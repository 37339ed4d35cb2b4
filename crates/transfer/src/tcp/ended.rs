//! Tasks that have ended, to be told with no lock held.

use std::sync::Arc;

use crate::batch::BatchShared;
use crate::segment::OpenSegment;
use crate::task::{EndedTasks, TaskEnd};
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
}

/// Tells their batches.
pub(super) fn tell(ended: &mut Vec<Ended>) {
    let mut tasks = EndedTasks::default();
    for ended in ended.drain(..) {
        let Ended { batch, index, segment, state, transferred, .. } = ended;
        let error = ended.failure.map(|reason| TransferError {
            peer: segment.name.as_str().into(),
            nic: super::NAME.into(),
            reason,
        });
        let (target_undefined, unconfirmed) = (ended.undefined, ended.unconfirmed);
        tasks.ended(
            &batch,
            index,
            TaskEnd { state, transferred, target_undefined, unconfirmed, error },
        );
    }
}
