//! Batches under way, by the numbers that callers have.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_transfer::{Batch, Segment, TransferEngine, TransferState, TransferStatus};

use super::bounce::Bounce;

/// Requests that were submitted together.
pub(crate) enum Job {
    Submitted {
        batch: Batch,
        bounce: Option<Bounce>,
        bytes: u64,
        /// Where they go, and which start of its process that was.
        segment: Segment,
        incarnation: Option<u64>,
    },
    /// There was nothing to do.
    Nothing,
    /// They were refused, which is told as if they had failed. It was said why.
    Refused,
}

/// How a job has ended.
#[derive(Debug)]
pub(crate) enum End {
    Completed,
    /// Why, unless that was said before.
    Failed(Option<String>),
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
            let is_done = matches!(self, Self::Nothing);
            return Some(if is_done { End::Completed } else { End::Failed(None) });
        };
        let statuses = engine.statuses(batch);
        if statuses.iter().any(|status| !status.state.is_final()) {
            return None;
        }
        let has_failed = |status: &&TransferStatus| {
            !matches!(status.state, TransferState::Completed | TransferState::Timeout)
        };
        let mut failed = statuses.iter().filter(has_failed).peekable();
        if failed.peek().is_some() {
            let error = failed.find_map(|status| status.error.as_ref());
            let why = error.map_or("a transfer was canceled".to_owned(), ToString::to_string);
            return Some(End::Failed(Some(why)));
        }
        if statuses.iter().any(|status| status.state == TransferState::Timeout) {
            return Some(End::Timeout);
        }
        Some(match bounce.as_ref().map_or(Ok(()), Bounce::finish) {
            Ok(()) => End::Completed,
            Err(fault) => End::Failed(Some(fault.to_string())),
        })
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
