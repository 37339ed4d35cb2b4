//! Batches: tasks that are submitted, watched and freed together.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millstream_verbs::{Device, Waiters};

use crate::finished::{Finished, Wakers};
use crate::metrics::{Counters, Timing};
use crate::slicing::Slicing;
use crate::task::{TaskHandle, Tasks};
use crate::tcp::Progress;
use crate::transport::Run;
use crate::{BatchError, BatchStatus, FreeError, TransferState, TransferStatus};

/// The most tasks in a batch.
const MAX_CAPACITY: usize = 1 << 20;

/// Runs of requests that a batch has room for from the start.
const ROOM: usize = 8;

/// A batch of tasks, made by [`crate::TransferEngine::allocate_batch`].
///
/// Dropping one whose tasks are unfinished does not stop them; free it instead, or cancel them.
#[derive(Debug)]
pub struct Batch {
    pub(crate) shared: Arc<BatchShared>,
}

#[derive(Debug)]
pub(crate) struct BatchShared {
    pub(crate) tasks: Tasks,
    pub(crate) slicing: Slicing,
    /// Tasks submitted: the first so many of `tasks`.
    submitted: AtomicUsize,
    unfinished: AtomicUsize,
    /// Held while requests are added, with room for what is known of them.
    adding: Mutex<Vec<Run>>,
    /// Some of its tasks go over streams, which those who wait work on.
    over_streams: AtomicBool,
    /// Until `unfinished` is 0.
    waiters: Waiters,
    /// Of one of its tasks.
    timing: Timing,
    pub(crate) counters: Arc<Counters>,
    pub(crate) wakers: Wakers,
}

impl Batch {
    /// `owned`: its tasks may have owners.
    pub(crate) fn new(
        capacity: usize,
        slicing: Slicing,
        owned: bool,
        counters: &Arc<Counters>,
    ) -> Result<Self, BatchError> {
        if capacity == 0 || capacity > MAX_CAPACITY {
            return Err(BatchError::Capacity { capacity, max: MAX_CAPACITY });
        }
        let shared = BatchShared {
            tasks: Tasks::new(capacity, owned),
            slicing,
            submitted: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            adding: Mutex::new(Vec::with_capacity(capacity.min(ROOM))),
            over_streams: AtomicBool::new(false),
            waiters: Waiters::with_room(1),
            timing: Timing::default(),
            counters: Arc::clone(counters),
            wakers: Wakers::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// How many tasks it holds in all.
    pub fn capacity(&self) -> usize {
        self.shared.tasks.len()
    }

    /// How many tasks were submitted.
    pub fn len(&self) -> usize {
        self.shared.submitted()
    }

    /// Whether none was.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A future that is ready when all submitted tasks are finished, for good or bad.
    pub fn finished(&self) -> Finished<'_> {
        Finished { batch: self }
    }

    pub(crate) fn status(&self, index: usize) -> Result<TransferStatus, BatchError> {
        let count = self.len();
        match index < count {
            true => Ok(self.shared.tasks.get(index).status()),
            false => Err(BatchError::NoTask { index, count }),
        }
    }

    pub(crate) fn statuses(&self) -> impl Iterator<Item = TransferStatus> {
        (0..self.len()).map(|index| self.shared.tasks.get(index).status())
    }

    /// How all tasks stand together, without a status for each.
    pub(crate) fn status_of_all(&self) -> BatchStatus {
        let (mut over, mut transferred_bytes, mut first) = (true, 0_u64, None);
        for index in 0..self.len() {
            let task = self.shared.tasks.get(index);
            let state = task.state();
            // After the state: of a task that is over it is final.
            transferred_bytes = transferred_bytes.saturating_add(task.transferred());
            if state != TransferState::Completed {
                over &= state.is_final();
                first = first.or(Some((index, state)));
            }
        }
        let state = match first {
            None => TransferState::Completed,
            Some((_, state)) if over => state,
            Some(_) => TransferState::Pending,
        };
        let first_incomplete = first.map(|(index, _)| index);
        BatchStatus { state, transferred_bytes, first_incomplete }
    }

    pub(crate) fn task(&self, index: usize) -> Result<TaskHandle, BatchError> {
        let count = self.len();
        if index < count {
            Ok(TaskHandle { batch: Arc::clone(&self.shared), index })
        } else {
            Err(BatchError::NoTask { index, count })
        }
    }

    /// Whether all submitted tasks are finished. Makes no progress.
    pub fn is_finished(&self) -> bool {
        self.shared.unfinished.load(Ordering::SeqCst) == 0
    }

    /// Waits until all submitted tasks are finished; `false` when that takes longer. Makes the
    /// progress of these devices meanwhile.
    pub(crate) fn wait(&self, timeout: Duration, devices: &[Device]) -> bool {
        let look = || self.is_finished().then_some(());
        millstream_verbs::wait(devices, &self.shared.waiters, timeout, look).is_some()
    }

    /// As [`Batch::wait`], working on streams while something of that is under way; returns then too.
    pub(crate) fn wait_for_streams(&self, timeout: Duration, progress: &Progress) {
        if self.shared.over_streams.load(Ordering::Relaxed) {
            progress.wait(&self.shared.waiters, timeout, || self.is_finished());
        }
    }

    /// By the states of its tasks, which are seen a moment before the batch is told that they ended:
    /// whoever has seen the last of them end may free it.
    pub(crate) fn free(self) -> Result<(), FreeError> {
        if self.is_finished() {
            return Ok(());
        }
        match self.statuses().filter(|status| !status.state.is_final()).count() {
            0 => Ok(()),
            unfinished => Err(FreeError { batch: self, unfinished }),
        }
    }
}

impl BatchShared {
    /// Tasks submitted so far.
    pub(crate) fn submitted(&self) -> usize {
        self.submitted.load(Ordering::Acquire)
    }

    /// Keeps others from adding tasks meanwhile.
    pub(crate) fn add(&self) -> MutexGuard<'_, Vec<Run>> {
        self.adding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Some of its tasks go over streams.
    pub(crate) fn goes_over_streams(&self) {
        self.over_streams.store(true, Ordering::Relaxed);
    }

    /// Times one of these tasks perhaps, of which nobody else knows yet.
    pub(crate) fn time_one(&self, first: usize, count: usize, copies: bool) {
        self.timing.begin(first, count, copies, &self.counters);
    }

    /// Something of a task is posted, or begins to be copied.
    pub(crate) fn posted(&self, task: usize) {
        self.timing.posted(task, &self.counters);
    }

    /// All of a task has arrived.
    pub(crate) fn acknowledged(&self, task: usize) {
        self.timing.acknowledged(task, &self.counters);
    }

    /// These tasks are COMPLETED, and their states say so.
    pub(crate) fn completed(&self, tasks: Range<usize>, transport: u8) {
        self.timing.completed(tasks, transport, &self.counters);
    }

    /// The state of a task is final.
    pub(crate) fn state_told(&self, task: usize, transport: u8, state: u8) {
        self.timing.told(task, transport, state, &self.counters);
    }

    /// So many more tasks count from now on; they have been started.
    pub(crate) fn added(&self, count: usize) {
        self.unfinished.fetch_add(count, Ordering::AcqRel);
        self.submitted.fetch_add(count, Ordering::AcqRel);
    }

    /// So many tasks have ended, at least one.
    pub(crate) fn tasks_finished(&self, count: usize) {
        if self.unfinished.fetch_sub(count, Ordering::SeqCst) == count {
            self.waiters.wake();
            self.wakers.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use millstream_transfer_core::TaskId;

    use super::*;
    use crate::task::{EndedTasks, TaskEnd};
    use crate::transport::EndTask;
    use crate::{
        FailureReason, Opcode, Pieces, PiecesRequest, SegmentId, TransferError, TransferPiece,
        TransferRequest,
    };

    const SECOND: Duration = Duration::from_secs(1);

    /// A batch with one task of `length` bytes in slices of 1 KiB.
    fn batch(length: u64) -> (Batch, TaskHandle) {
        let batch = Batch::new(2, Slicing::new(1024, 4), false, &Arc::default()).unwrap();
        let request = TransferRequest {
            opcode: Opcode::Read,
            source: 10_000,
            target: SegmentId::LOCAL,
            target_offset: 90_000,
            length,
        };
        batch.shared.tasks.get(0).start(&request, &batch.shared.slicing, None);
        batch.shared.added(1);
        let task = batch.task(0).unwrap();
        (batch, task)
    }

    fn error() -> TransferError {
        TransferError::new("p".into(), "n", FailureReason::Restarted)
    }

    #[test]
    fn the_last_slice_completes_the_task_and_bytes_are_counted_as_they_arrive() {
        let (batch, task) = batch(3000);
        let status = || batch.status(0).unwrap();
        assert_eq!(status().state, TransferState::Waiting);
        let slices: Vec<_> = std::iter::from_fn(|| task.claim()).collect();
        assert_eq!(
            slices[1],
            crate::task::WideSlice { source: 11_024, target: 91_024, length: 1024 }
        );
        assert_eq!(slices.len(), 3);
        assert_eq!((status().state, status().transferred_bytes), (TransferState::Pending, 0));
        task.done(1024);
        task.done(1024);
        assert_eq!((status().state, status().transferred_bytes), (TransferState::Pending, 2048));
        assert!(!batch.wait(Duration::ZERO, &[]));
        task.done(952);
        assert_eq!((status().state, status().transferred_bytes), (TransferState::Completed, 3000));
        assert!(batch.wait(Duration::ZERO, &[]));
        assert!(batch.free().is_ok());
    }

    #[test]
    fn a_batch_is_completed_when_all_its_tasks_are_and_names_the_first_that_is_not() {
        let (batch, first) = batch(1024);
        let request = TransferRequest {
            opcode: Opcode::Read,
            source: 10_000,
            target: SegmentId::LOCAL,
            target_offset: 90_000,
            length: 2048,
        };
        batch.shared.tasks.get(1).start(&request, &batch.shared.slicing, None);
        batch.shared.added(1);
        let second = batch.task(1).unwrap();
        let status = || {
            let BatchStatus { state, transferred_bytes, first_incomplete } = batch.status_of_all();
            (state, transferred_bytes, first_incomplete)
        };
        assert_eq!(status(), (TransferState::Pending, 0, Some(0)));
        first.claim().unwrap();
        first.done(1024);
        second.claim().unwrap();
        second.done(1024);
        assert_eq!(status(), (TransferState::Pending, 2048, Some(1)));
        second.cancel();
        assert_eq!(status(), (TransferState::Canceled, 2048, Some(1)));
        let (batch, task) = self::batch(1024);
        task.claim().unwrap();
        task.done(1024);
        let all = batch.status_of_all();
        assert_eq!((all.state, all.first_incomplete), (TransferState::Completed, None));
    }

    #[test]
    fn a_failed_slice_fails_the_task_once_the_others_have_ended() {
        let (batch, task) = batch(4096);
        task.claim().unwrap();
        task.claim().unwrap();
        task.slices_failed(1, &error());
        assert_eq!(batch.status(0).unwrap().state, TransferState::Pending);
        assert!(batch.status(0).unwrap().error.is_none());
        assert_eq!(task.claim(), None, "nothing more is begun");
        task.done(1024);
        let status = batch.status(0).unwrap();
        assert_eq!((status.state, status.transferred_bytes), (TransferState::Failed, 1024));
        assert!(status.error.is_some());
    }

    #[test]
    fn failing_the_rest_of_a_task_that_is_all_claimed_changes_nothing() {
        let (batch, task) = batch(1024);
        task.claim().unwrap();
        task.fail_rest(&error());
        task.done(1024);
        assert_eq!(batch.status(0).unwrap().state, TransferState::Completed);
    }

    #[test]
    fn a_canceled_task_ends_with_the_slices_under_way() {
        let (batch, task) = batch(4096);
        task.claim().unwrap();
        assert!(task.cancel());
        assert!(!task.cancel());
        assert_eq!(batch.status(0).unwrap().state, TransferState::Pending);
        task.done(1024);
        let status = batch.status(0).unwrap();
        assert_eq!((status.state, status.transferred_bytes), (TransferState::Canceled, 1024));
    }

    #[test]
    fn a_waiting_task_is_canceled_at_once() {
        let (batch, task) = batch(4096);
        assert!(task.cancel());
        assert_eq!(batch.status(0).unwrap().state, TransferState::Canceled);
    }

    #[test]
    fn what_was_claimed_early_is_nobody_elses_until_it_is_given_back() {
        let (batch, task) = batch(4096);
        let early = batch.shared.tasks.get(0);
        early.claim_early();
        assert_eq!(batch.status(0).unwrap().state, TransferState::Pending);
        assert!(task.claim().is_none() && !task.cancel());
        early.give_back();
        assert_eq!(batch.status(0).unwrap().state, TransferState::Waiting);
        assert!(task.cancel());
        assert_eq!(batch.status(0).unwrap().state, TransferState::Canceled);
    }

    /// Who does tasks, and was asked to end one.
    #[derive(Debug, Default)]
    struct Owner(AtomicBool);

    impl EndTask for Owner {
        fn cancel(&self, _task: TaskId) -> bool {
            !self.0.swap(true, Ordering::SeqCst)
        }
    }

    #[test]
    fn a_task_that_goes_on_over_another_transport_is_ended_there() {
        let (batch, task) = batch(4096);
        let place = batch.shared.tasks.get(0);
        let owners = [(); 2].map(|()| Arc::new(Owner::default()));
        let own = |owner: &Arc<Owner>| {
            let weak = Arc::downgrade(owner);
            place.belongs_to(task.batch.tasks.owner(&(weak as _)), TaskId::from_bits(1))
        };
        assert_eq!(task.claim_whole(), Some(4));
        assert!(own(&owners[0]));
        assert!(!place.moved(1024) && place.moves_to(5));
        let status = || batch.status(0).unwrap();
        let counted = || (status().transferred_bytes, status().state, status().transport);
        // What has arrived has arrived, though all is done again.
        assert_eq!(counted(), (1024, TransferState::Pending, Some("tcp")));
        assert_eq!(task.claim_whole(), Some(4), "all of it is done again");
        place.moved(512);
        assert_eq!(status().transferred_bytes, 1024);
        place.moved(1024);
        assert_eq!(status().transferred_bytes, 1536);
        assert!(own(&owners[1]));
        assert!(task.cancel() && !task.cancel());
        assert!(!owners[0].0.load(Ordering::SeqCst) && owners[1].0.load(Ordering::SeqCst));
    }

    #[test]
    fn the_bytes_of_a_task_that_moves_do_not_become_fewer_whatever_its_end() {
        let (batch, task) = batch(4096);
        let place = batch.shared.tasks.get(0);
        task.claim_whole();
        place.moved(3072);
        assert!(place.moves_to(5) && place.moves_to(3), "twice");
        assert!(!place.moves_to(5), "and no more");
        task.claim_whole();
        assert!(!place.moved(1024));
        let state = TransferState::Canceled;
        let (target_undefined, unconfirmed, error) = (false, false, None);
        let end = TaskEnd { state, transferred: 1024, target_undefined, unconfirmed, error };
        EndedTasks::default().ended(&task.batch, 0, end);
        let status = batch.status(0).unwrap();
        assert_eq!((status.state, status.transferred_bytes), (state, 3072));
    }

    #[test]
    fn a_task_is_left_when_the_last_of_its_slices_has_ended() {
        let (batch, task) = batch(4096);
        let place = batch.shared.tasks.get(0);
        assert!(task.claim().is_some() && task.claim().is_some());
        assert!(!task.slices_left(1, &error()), "another one is being copied");
        assert_eq!(task.claim(), None, "nothing more is begun");
        let mut ended = EndedTasks::default();
        assert!(ended.slices_done(&task.batch, 0, 1, 1024));
        let status = || batch.status(0).unwrap();
        assert_eq!((status().state, status().transferred_bytes), (TransferState::Pending, 1024));
        // Another transport does all of it, or none does.
        assert!(place.moves_to(5));
        assert_eq!((task.claim_whole(), status().transferred_bytes), (Some(4), 1024));
        ended.slices_done(&task.batch, 0, 4, 4096);
        assert_eq!((status().state, status().transferred_bytes), (TransferState::Completed, 4096));

        let (batch, task) = self::batch(4096);
        task.claim().unwrap();
        assert!(task.slices_left(1, &error()));
        task.end_left(None);
        let status = batch.status(0).unwrap();
        assert!(status.state == TransferState::Failed && status.error.is_some());
        assert!(batch.is_finished());
    }

    /// A thread that copies looks whether a task has left, and claims a slice of it later.
    #[test]
    fn who_was_about_to_claim_slices_of_a_task_that_moves_gets_none() {
        for length in [1024, 4096] {
            let (batch, task) = batch(length);
            let place = batch.shared.tasks.get(0);
            assert!(!place.has_left());
            let whole = task.claim_rest().unwrap().1;
            assert!(task.slices_left(whole, &error()) && place.moves_to(5));
            let none = || {
                assert_eq!((task.claim(), task.claim_rest()), (None, None), "{length}");
                assert!(!task.end_rest(TransferState::Timeout));
                task.fail_rest(&error());
                assert_eq!(batch.status(0).unwrap().state, TransferState::Pending);
            };
            none();
            assert_eq!(task.claim_whole(), Some(whole), "it is its next owner's");
            assert_eq!(task.claim_whole(), None);
            none();
            EndedTasks::default().slices_done(&task.batch, 0, whole, length);
            assert_eq!(batch.status(0).unwrap().state, TransferState::Completed);
            assert!(batch.is_finished());
        }
    }

    #[test]
    fn a_task_that_moves_to_where_there_is_no_way_fails() {
        let (batch, task) = batch(4096);
        assert_eq!(task.claim_whole(), Some(4));
        assert!(batch.shared.tasks.get(0).moves_to(5));
        task.fail_whole(&error());
        task.fail_whole(&error());
        assert_eq!(batch.status(0).unwrap().state, TransferState::Failed);
        assert!(batch.is_finished());
    }

    #[test]
    fn a_task_that_is_to_end_is_not_left() {
        let (batch, task) = batch(4096);
        assert!(task.claim().is_some() && task.cancel());
        assert!(!task.slices_left(1, &error()));
        assert_eq!(batch.status(0).unwrap().state, TransferState::Canceled);
        // One that is canceled while another transport is looked for ends, if there is none.
        let (batch, task) = self::batch(4096);
        task.claim().unwrap();
        assert!(task.slices_left(1, &error()) && task.cancel());
        task.end_left(task.is_to_end());
        assert_eq!(batch.status(0).unwrap().state, TransferState::Canceled);
        assert!(!task.cancel(), "it is over");
    }

    #[test]
    fn a_task_that_is_canceled_between_two_transports_is_ended_by_the_second() {
        let (batch, task) = batch(4096);
        let place = batch.shared.tasks.get(0);
        let owners = [(); 2].map(|()| Arc::new(Owner::default()));
        task.claim_whole();
        let numbers = [0, 1].map(|it| task.batch.tasks.owner(&(Arc::downgrade(&owners[it]) as _)));
        place.belongs_to(numbers[0], TaskId::from_bits(1));
        owners[0].0.store(true, Ordering::SeqCst);
        assert!(place.moves_to(5));
        assert!(task.cancel());
        task.claim_whole();
        assert!(!place.belongs_to(numbers[1], TaskId::from_bits(1)), "it is to be ended");
    }

    #[test]
    fn pieces_are_claimed_up_to_a_number_and_so_many_bytes() {
        let batch = Batch::new(1, Slicing::new(1024, 4), false, &Arc::default()).unwrap();
        let first = TransferPiece { source: 1000, target_offset: 9000, length: 100 };
        let pieces = Pieces::Strided { first, count: 10, source_stride: 100, target_stride: 200 };
        let request = PiecesRequest { opcode: Opcode::Read, target: SegmentId::LOCAL, pieces };
        batch.shared.tasks.get(0).start_pieces(&request, 1000, None);
        batch.shared.added(1);
        let task = batch.task(0).unwrap();
        let claims = [(3, u64::MAX), (64, 201), (0, 100), (64, 1), (64, u64::MAX), (1, 1)];
        let claimed = claims.map(|(most, bytes)| task.claim_pieces(most, bytes));
        assert_eq!(claimed.map(|it| it.count()), [3, 3, 0, 1, 3, 0]);
        assert!(!task.cancel(), "all of it is claimed");
    }

    #[test]
    fn a_batch_with_unfinished_tasks_is_not_freed() {
        let (batch, task) = batch(1024);
        let refused = batch.free().unwrap_err();
        assert_eq!((refused.code(), refused.unfinished), (-4, 1));
        task.cancel();
        assert!(refused.batch.free().is_ok());
    }

    #[test]
    fn the_last_task_wakes_who_waits() {
        let (batch, task) = batch(1024);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| batch.wait(60 * SECOND, &[]));
            task.claim().unwrap();
            task.done(1024);
            assert!(waiting.join().unwrap());
        });
    }

    #[test]
    fn tasks_that_end_together_are_counted_as_if_one_by_one() {
        let (first, first_task) = batch(2048);
        let (second, second_task) = batch(1024);
        let state = |batch: &Batch| batch.status(0).unwrap().state;
        let mut ended = EndedTasks::default();
        for task in [&first_task, &first_task, &second_task] {
            task.claim().unwrap();
        }
        ended.slices_done(&first_task.batch, 0, 1, 1024);
        assert_eq!(state(&first), TransferState::Pending);
        ended.slices_done(&first_task.batch, 0, 1, 1024);
        assert_eq!(state(&first), TransferState::Completed);
        assert!(!first.wait(Duration::ZERO, &[]), "more of its tasks may follow");
        ended.slices_done(&second_task.batch, 0, 1, 1024);
        assert!(first.wait(Duration::ZERO, &[]) && !second.wait(Duration::ZERO, &[]));
        drop(ended);
        assert!(second.wait(Duration::ZERO, &[]));
        assert_eq!(second.status(0).unwrap().transferred_bytes, 1024);
    }

    #[test]
    fn tasks_and_capacities_are_bounded() {
        let (batch, _task) = batch(1);
        assert_eq!(batch.status(1).unwrap_err(), BatchError::NoTask { index: 1, count: 1 });
        assert_eq!(batch.status(1).unwrap_err().code(), -1);
        assert_eq!((batch.capacity(), batch.len()), (2, 1));
        for capacity in [0, MAX_CAPACITY + 1] {
            assert!(Batch::new(capacity, Slicing::new(1024, 4), false, &Arc::default()).is_err());
        }
    }
}
