//! Tasks that leave their transports, until the process of their segment has said whether it is there.
//!
//! Nothing of them is under way. So one that is canceled, or whose time is over, ends at once, whatever becomes of the
//! question.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{mem, thread};

use millstream_net::ends_between_forks;

use crate::TransferState;
use crate::fail_over::Leaving;
use crate::segment::OpenSegment;
use crate::task::TaskHandle;

/// See above.
#[derive(Debug, Default)]
pub(crate) struct Departures {
    departing: Mutex<Departing>,
    /// There are others than before.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Departing {
    tasks: VecDeque<Leaving>,
    /// The process is being asked.
    asking: bool,
    /// A thread looks after deadlines.
    watched: bool,
}

impl Departures {
    fn lock(&self) -> MutexGuard<'_, Departing> {
        self.departing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds tasks to those of a segment; whether its process is to be asked.
    pub(crate) fn add(segment: &Arc<OpenSegment>, tasks: Vec<Leaving>) -> bool {
        tasks.iter().for_each(|leaving| leaving.task.departs(segment));
        let own = &segment.departures;
        let mut departing = own.lock();
        // Either this sees that one is to end, or who cancels it finds it here.
        let (ending, waiting): (Vec<_>, Vec<_>) =
            tasks.into_iter().partition(|leaving| leaving.task.is_to_end().is_some());
        let is_timed = waiting.iter().any(|leaving| leaving.task.deadline().is_some());
        departing.tasks.extend(waiting);
        let asks = !departing.tasks.is_empty() && !mem::replace(&mut departing.asking, true);
        let watches = is_timed && !mem::replace(&mut departing.watched, true);
        drop(departing);
        own.changed.notify_all();
        if watches {
            let segment = Arc::clone(segment);
            let watch = move || segment.departures.watch();
            let started = thread::Builder::new()
                .name("fail-over".to_owned())
                .spawn(ends_between_forks(watch));
            if let Err(error) = started {
                tracing::warn!(%error, "deadlines wait until a peer has answered");
                own.lock().watched = false;
            }
        }
        ending.into_iter().for_each(Leaving::end);
        asks
    }

    /// Those that wait for the answer. When there are none, the next one asks again.
    pub(crate) fn take(&self) -> VecDeque<Leaving> {
        let mut departing = self.lock();
        departing.asking = !departing.tasks.is_empty();
        let tasks = mem::take(&mut departing.tasks);
        drop(departing);
        self.changed.notify_all();
        tasks
    }

    /// Cancels a task; `false` if it is not here.
    pub(crate) fn cancel(&self, task: &TaskHandle) -> bool {
        let is_it = |leaving: &Leaving| {
            leaving.task.index == task.index && Arc::ptr_eq(&leaving.task.batch, &task.batch)
        };
        let mut departing = self.lock();
        let found = departing.tasks.iter().position(is_it);
        let found = found.and_then(|index| departing.tasks.remove(index));
        drop(departing);
        let is_here = found.is_some();
        found.into_iter().for_each(|leaving| leaving.end_as(Some(TransferState::Canceled)));
        is_here
    }

    /// Ends tasks when their time is over, until none is here that has a deadline.
    fn watch(&self) {
        let mut departing = self.lock();
        loop {
            let tasks = mem::take(&mut departing.tasks);
            let (late, left): (VecDeque<_>, _) =
                tasks.into_iter().partition(|leaving| leaving.task.is_late());
            departing.tasks = left;
            if !late.is_empty() {
                // Nobody is told under the lock.
                drop(departing);
                let end = |leaving: Leaving| leaving.end_as(Some(TransferState::Timeout));
                late.into_iter().for_each(end);
                departing = self.lock();
                continue;
            }
            let deadlines = departing.tasks.iter().filter_map(|leaving| leaving.task.deadline());
            let Some(next) = deadlines.min() else {
                departing.watched = false;
                return;
            };
            let left = next.saturating_duration_since(Instant::now());
            let waited = self.changed.wait_timeout(departing, left);
            departing = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::batch::Batch;
    use crate::task::TaskEnd;
    use crate::tcp::testing::{Room, segment, with_deadline};
    use crate::terms::Terms;
    use crate::{FailureReason, Opcode, TransferError};

    /// Longer than anything here takes, unless it hangs.
    const LONG: Duration = Duration::from_secs(60);

    fn error() -> TransferError {
        TransferError::new("p".into(), "n", FailureReason::ProcessEnded)
    }

    /// Tasks of two slices that have left their transport: what copies has no owner, and others say how they end.
    fn leaving(count: usize, owned: bool, deadline: Option<Instant>) -> (Batch, Vec<Leaving>) {
        let local = Room::new(1).local;
        let (batch, tasks) = with_deadline(Opcode::Write, 1, &vec![2048; count], deadline);
        let leave = |task: TaskHandle| {
            assert_eq!(task.claim_whole(), Some(2));
            assert!(owned || task.slices_left(2, &error()));
            let end = owned.then(|| TaskEnd {
                state: TransferState::Failed,
                transferred: 1024,
                target_undefined: false,
                unconfirmed: false,
                error: Some(error()),
            });
            let (local, terms) = (Arc::clone(&local), Terms::default());
            Leaving { task, from: "shm", local, incarnation: None, terms, end }
        };
        (batch, tasks.into_iter().map(leave).collect())
    }

    fn states(batch: &Batch) -> Vec<TransferState> {
        batch.statuses().map(|status| status.state).collect()
    }

    #[test]
    fn a_task_that_waits_for_an_answer_is_canceled_at_once() {
        use TransferState::{Canceled, Failed, Pending};
        for owned in [false, true] {
            let (segment, (batch, tasks)) = (segment(), leaving(3, owned, None));
            assert!(Departures::add(&segment, tasks), "its process is to be asked");
            let cancel = |index| batch.task(index).unwrap().cancel();
            assert!(cancel(1));
            assert_eq!(states(&batch), [Pending, Canceled, Pending], "the question is not over");
            let status = batch.status(1).unwrap();
            assert_eq!(
                (status.transferred_bytes, status.error.is_none()),
                (if owned { 1024 } else { 0 }, true)
            );
            assert!(!cancel(1), "it is over");
            // The others come when the process has answered.
            let left = segment.departures.take();
            let indexes: Vec<_> = left.iter().map(|leaving| leaving.task.index).collect();
            assert_eq!(indexes, [0, 2]);
            left.into_iter().for_each(Leaving::end);
            assert_eq!(states(&batch), [Failed, Canceled, Failed]);
            assert!(batch.is_finished() && segment.departures.take().is_empty());
        }
    }

    #[test]
    fn a_task_that_was_canceled_before_it_waits_does_not() {
        let (segment, (batch, tasks)) = (segment(), leaving(1, false, None));
        assert!(batch.task(0).unwrap().cancel());
        assert!(!Departures::add(&segment, tasks), "nothing is to be asked");
        assert_eq!(states(&batch), [TransferState::Canceled]);
    }

    #[test]
    fn a_task_that_waits_for_an_answer_ends_when_its_time_is_over() {
        use TransferState::{Pending, Timeout};
        for owned in [false, true] {
            let deadline = Instant::now() + Duration::from_millis(50);
            let segment = segment();
            let (others, waiting) = leaving(1, owned, None);
            assert!(Departures::add(&segment, waiting));
            let (batch, tasks) = leaving(2, owned, Some(deadline));
            assert!(!Departures::add(&segment, tasks), "it is being asked");
            assert!(batch.wait(LONG, &[]));
            assert!(Instant::now() >= deadline);
            assert_eq!(states(&batch), [Timeout; 2]);
            assert_eq!(states(&others), [Pending], "it has no deadline");
            // It is watched again when others come.
            let (batch, tasks) =
                leaving(1, owned, Some(Instant::now() + Duration::from_millis(20)));
            Departures::add(&segment, tasks);
            assert!(batch.wait(LONG, &[]));
            assert_eq!(segment.departures.take().len(), 1);
        }
    }
}
