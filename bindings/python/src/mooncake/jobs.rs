//! Batches under way, by the numbers that callers have.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_transfer::{Batch, TransferEngine, TransferState};

use super::bounce::Bounce;

/// Requests that were submitted together.
pub(crate) enum Job {
    Submitted {
        batch: Batch,
        bounce: Option<Bounce>,
        bytes: u64,
    },
    /// There was nothing to do.
    Nothing,
    /// They were refused, which is told as if they had failed.
    Refused,
}

/// How a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Completed,
    Failed,
    Timeout,
}

impl Job {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Submitted { bytes, .. } => *bytes,
            Self::Nothing | Self::Refused => 0,
        }
    }

    /// How it has ended, if it has: once all of its requests are over, since memory of the caller's, or of the engine's
    /// in its place, is touched until then. What READs have brought is where the caller wants it before anybody is told.
    pub(crate) fn end(&self, engine: &TransferEngine) -> Option<End> {
        let Self::Submitted { batch, bounce, .. } = self else {
            return Some(if matches!(self, Self::Nothing) { End::Completed } else { End::Failed });
        };
        let mut end = Some(End::Completed);
        let mut worst = None;
        for status in engine.statuses(batch) {
            match status.state {
                TransferState::Completed => {}
                TransferState::Timeout => worst = worst.or(Some(End::Timeout)),
                state if state.is_final() => worst = Some(End::Failed),
                _ => end = None,
            }
        }
        if end.is_none() || worst.is_some() {
            return end.and(worst);
        }
        match bounce.as_ref().map_or(Ok(()), Bounce::finish) {
            Ok(()) => end,
            Err(_) => Some(End::Failed),
        }
    }
}

/// All that were not freed.
#[derive(Default)]
pub(crate) struct Jobs {
    last: AtomicU64,
    jobs: Mutex<HashMap<u64, Arc<Job>>>,
}

impl Jobs {
    fn jobs(&self) -> MutexGuard<'_, HashMap<u64, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a job, which is never 0.
    pub(crate) fn add(&self, job: Job) -> u64 {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.jobs().insert(number, Arc::new(job));
        number
    }

    pub(crate) fn find(&self, number: u64) -> Option<Arc<Job>> {
        self.jobs().get(&number).cloned()
    }

    pub(crate) fn free(&self, number: u64) {
        let job = self.jobs().remove(&number);
        drop(job);
    }
}
