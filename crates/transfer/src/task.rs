//! Tasks: what is left to do of a request, counted in slices.
//!
//! Slices are not stored. A task has a counter of the next one; whoever has room in a send queue
//! claims it. So a request of any length takes no memory, several queues can work on one request,
//! and the faster does more of it.

mod ended;
mod few;
mod handle;
mod leaving;
mod owners;

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use millstream_transfer_core::TaskId;

pub(crate) use self::ended::EndedTasks;
use self::few::Few;
pub(crate) use self::handle::TaskHandle;
pub(crate) use self::owners::OwnerNumber;
use self::owners::{Owned, Owners};
use crate::admission::Admitted;
use crate::notify::Submission;
use crate::pieces::Shape;
use crate::segment::OpenSegment;
use crate::slicing::Slicing;
use crate::transport::{EndTask, MAX_MOVES, name_of};
use crate::{Opcode, PiecesRequest, TransferError, TransferRequest, TransferState, TransferStatus};

/// The places of a batch's tasks.
#[derive(Debug)]
pub(crate) struct Tasks {
    all: Few<Task>,
    /// Who does each, where they have owners.
    owned: OnceLock<Few<Owned>>,
    owners: Owners,
    rare: OnceLock<Box<[Rare]>>,
}

/// What each task has. It is short: a batch may have many tasks, most of which end at once.
#[derive(Debug, Default)]
pub(crate) struct Task {
    source: AtomicU64,
    target: AtomicU64,
    length: AtomicU64,
    slices: AtomicU64,
    /// The next slice that nobody has claimed. Once its transport leaves it, none is claimed any more: its next one
    /// takes it as a whole.
    next: AtomicU64,
    /// Slices that are not finished, claimed or not.
    unfinished: AtomicU64,
    transferred: AtomicU64,
    opcode: AtomicU8,
    /// The final state that it gets when all that was claimed has ended; 0 for a good end.
    end_as: AtomicU8,
    /// The number of the transport that does it; 0 before there is one. With [`LEFT`] and [`MOVED`].
    transport: AtomicU8,
    /// 0 while unfinished, then the final state.
    state: AtomicU8,
    /// All of it was claimed for an owner.
    given_away: AtomicBool,
    /// It was to be ended before it had an owner.
    end_wanted: AtomicBool,
    target_undefined: AtomicBool,
    unconfirmed: AtomicBool,
}

/// Its transport has given it up, and another one may go on with it.
const LEFT: u8 = 0x40;
/// Another one did it before.
const MOVED: u8 = 0x80;

/// A batch of many tasks is made, filled and read in little more time than its memory takes.
const _: () = assert!(size_of::<Task>() <= 64);

/// What only some tasks have.
#[derive(Debug, Default)]
struct Rare {
    deadline: OnceLock<Instant>,
    /// Those that were submitted with it, if something is to follow them.
    submission: OnceLock<Arc<Submission>>,
    /// What it takes of limits.
    admitted: OnceLock<Admitted>,
    /// Its pieces, where it has several.
    shape: OnceLock<Shape>,
    /// If it leaves the transport that did it first.
    moves: OnceLock<Box<Moves>>,
    /// Who does it gives up what was claimed of it when it is to end.
    can_be_given_up: AtomicBool,
    error: OnceLock<TransferError>,
}

/// Of a task that goes on over another transport.
#[derive(Debug, Default)]
struct Moves {
    /// How often it does.
    count: AtomicU8,
    /// It has moved, and its next owner has not taken it yet.
    unclaimed: AtomicBool,
    /// Bytes that had arrived before: they have, whatever becomes of them when all is done again.
    arrived: AtomicU64,
    /// Who does it after each move.
    owned: [Owned; MAX_MOVES],
    /// Why it left what copies, which has no owner that knows it.
    error: OnceLock<TransferError>,
    /// Where it waits while its segment's process is asked whether it is there.
    segment: OnceLock<Weak<OpenSegment>>,
}

/// A task's place in a batch.
#[derive(Clone, Copy)]
pub(crate) struct TaskRef<'a> {
    task: &'a Task,
    tasks: &'a Tasks,
    index: usize,
}

/// How a task ended, as its owner tells it.
#[derive(Debug)]
pub(crate) struct TaskEnd {
    /// A final one.
    pub(crate) state: TransferState,
    /// At least so many bytes have arrived.
    pub(crate) transferred: u64,
    pub(crate) target_undefined: bool,
    pub(crate) unconfirmed: bool,
    /// Of one that failed.
    pub(crate) error: Option<TransferError>,
}

/// What has become of a task by the end of slices.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    /// Others are under way.
    GoesOn,
    /// It has ended: the batch must be told.
    Ended,
    /// Nothing of it is under way, and its transport has given it up.
    Left,
}

/// What was claimed of a task: a slice, or several one after the other.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct WideSlice {
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) length: u64,
}

impl Moves {
    /// Who does it since the last move, if there was one.
    fn owned(&self) -> Option<&Owned> {
        self.owned.get(usize::from(self.count.load(Ordering::SeqCst)).checked_sub(1)?)
    }
}

impl Tasks {
    /// So many. Where most of them will be `owned`, there is room for that from the start. What only some have is allocated
    /// for all of them at once, when the first one needs it.
    pub(crate) fn new(count: usize, owned: bool) -> Self {
        let (all, owners) = (Few::new(count), Owners::default());
        let tasks = Self { all, owned: OnceLock::new(), owners, rare: OnceLock::new() };
        if owned {
            tasks.owned();
        }
        tasks
    }

    /// The number of an owner, for tasks that [belong to it](TaskRef::belongs_to).
    pub(crate) fn owner(&self, owner: &Weak<dyn EndTask>) -> OwnerNumber {
        self.owners.number(owner)
    }

    fn owned(&self) -> &[Owned] {
        self.owned.get_or_init(|| Few::new(self.all.len()))
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn get(&self, index: usize) -> TaskRef<'_> {
        TaskRef { task: &self.all[index], tasks: self, index }
    }

    fn room(&self) -> &[Rare] {
        self.rare.get_or_init(|| self.all.iter().map(|_| Rare::default()).collect())
    }
}

impl Deref for TaskRef<'_> {
    type Target = Task;

    fn deref(&self) -> &Task {
        self.task
    }
}

impl<'a> TaskRef<'a> {
    /// What it has that only some have, unless none of the batch has any.
    fn rare(&self) -> Option<&'a Rare> {
        self.tasks.rare.get().map(|rare| &rare[self.index])
    }

    fn rare_room(&self) -> &'a Rare {
        &self.tasks.room()[self.index]
    }

    /// Sets what is to be done. Called before anybody else knows of the task.
    pub(crate) fn start(
        &self,
        request: &TransferRequest,
        slicing: &Slicing,
        deadline: Option<Instant>,
    ) {
        if let Some(deadline) = deadline {
            let _ = self.rare_room().deadline.set(deadline);
        }
        let slices = slicing.count(request.length);
        self.opcode.store(request.opcode as u8, Ordering::Relaxed);
        self.source.store(request.source, Ordering::Relaxed);
        self.target.store(request.target_offset, Ordering::Relaxed);
        self.length.store(request.length, Ordering::Relaxed);
        self.slices.store(slices, Ordering::Relaxed);
        self.unfinished.store(slices, Ordering::Relaxed);
    }

    /// Makes it one of several pieces, each of which is a slice. Called before anybody else knows of it.
    pub(crate) fn start_pieces(
        &self,
        request: &PiecesRequest<'_>,
        length: u64,
        deadline: Option<Instant>,
    ) {
        let shape = request.pieces.shape();
        self.opcode.store(request.opcode as u8, Ordering::Relaxed);
        self.length.store(length, Ordering::Relaxed);
        self.slices.store(shape.count(), Ordering::Relaxed);
        self.unfinished.store(shape.count(), Ordering::Relaxed);
        let _ = self.rare_room().shape.set(shape);
        if let Some(deadline) = deadline {
            let _ = self.rare_room().deadline.set(deadline);
        }
    }

    /// The number of the transport that does it. Called before anybody else knows of it.
    pub(crate) fn goes_by(&self, transport: u8) {
        self.transport.store(transport, Ordering::Relaxed);
    }

    /// That number.
    pub(crate) fn transport(&self) -> u8 {
        self.transport.load(Ordering::Relaxed) & !(LEFT | MOVED)
    }

    /// Bytes of it that have arrived at least, over whichever transport: the number does not shrink.
    #[inline]
    pub(crate) fn transferred(&self) -> u64 {
        // First: who sees the zero that a move has left sees the move, too.
        let transferred = self.transferred.load(Ordering::Acquire);
        if self.transport.load(Ordering::Relaxed) & MOVED == 0 {
            return transferred;
        }
        let moves = self.rare().and_then(|rare| rare.moves.get());
        moves.map_or(0, |moves| moves.arrived.load(Ordering::Relaxed)).max(transferred)
    }

    /// Tells this of its end. Called before anybody else knows of it.
    pub(crate) fn belongs_with(&self, submission: &Arc<Submission>) {
        let _ = self.rare_room().submission.set(Arc::clone(submission));
    }

    /// It takes this of limits, until it has ended. Called before anybody else knows of it.
    pub(crate) fn is_admitted(&self, admitted: Admitted) {
        let _ = self.rare_room().admitted.set(admitted);
    }

    /// Its pieces, if it has several.
    pub(crate) fn shape(&self) -> Option<&'a Shape> {
        self.rare()?.shape.get()
    }

    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length.load(Ordering::Relaxed)
    }

    /// When its time is over, if ever.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.rare()?.deadline.get().copied()
    }

    /// Whether its time is over.
    pub(crate) fn is_late(&self) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= Instant::now())
    }

    /// How many slices it has in all.
    pub(crate) fn slices(&self) -> u64 {
        self.slices.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn state(&self) -> TransferState {
        match self.state.load(Ordering::Acquire) {
            3 => TransferState::Canceled,
            4 => TransferState::Completed,
            5 => TransferState::Timeout,
            6 => TransferState::Failed,
            _ if self.is_waiting() => TransferState::Waiting,
            _ => TransferState::Pending,
        }
    }

    pub(crate) fn status(&self) -> TransferStatus {
        let state = self.state();
        TransferStatus {
            state,
            transferred_bytes: self.transferred(),
            target_undefined: self.target_undefined.load(Ordering::Relaxed),
            unconfirmed: self.unconfirmed.load(Ordering::Relaxed),
            transport: name_of(self.transport()),
            // Set early, when the first slice fails; meant only once the others have ended too.
            error: if state == TransferState::Failed { self.copied_error() } else { None },
        }
    }

    #[cold]
    fn copied_error(&self) -> Option<TransferError> {
        self.error().cloned()
    }

    /// Whether all of it was claimed for an owner that is not known yet.
    fn is_given_away(&self) -> bool {
        self.given_away.load(Ordering::SeqCst) && self.state.load(Ordering::Acquire) == 0
    }

    fn is_waiting(&self) -> bool {
        match self.tasks.owned.get().map(|all| &all[self.index]) {
            _ if self.has_left() => false,
            Some(owned) if owned.get().is_some() => !owned.has_begun(),
            _ => self.next.load(Ordering::Relaxed) == 0,
        }
    }

    /// Whether the transport that was to do it leaves it to others, or another one does it already.
    pub(crate) fn has_left(&self) -> bool {
        self.transport.load(Ordering::Relaxed) & (LEFT | MOVED) != 0
    }

    /// Its owner has begun to do it.
    pub(crate) fn begin(&self) {
        self.tasks.owned()[self.index].begin();
    }

    /// So many bytes have arrived. Whether those were the last.
    pub(crate) fn moved(&self, length: u64) -> bool {
        self.transferred.fetch_add(length, Ordering::Relaxed) + length == self.length()
    }

    /// Who does it, as a whole, once all of it was claimed. `false` when it was to be ended before: then
    /// its owner shall end it.
    pub(crate) fn belongs_to(&self, owner: OwnerNumber, name: TaskId) -> bool {
        self.moved_owned().unwrap_or_else(|| &self.tasks.owned()[self.index]).set(owner, name);
        // Either this sees that it is to be ended, or `cancel` sees the owner.
        !self.end_wanted.load(Ordering::SeqCst)
    }

    /// Who does it since the last move, if there was one.
    fn moved_owned(&self) -> Option<&'a Owned> {
        self.rare()?.moves.get()?.owned()
    }

    /// It begins anew, over the transport of this number. Nothing of it is under way, and whoever did it does not
    /// end it. `false` when it has moved as often as it may.
    pub(crate) fn moves_to(&self, transport: u8) -> bool {
        let moves = self.rare_room().moves.get_or_init(Box::default);
        let count = moves.count.load(Ordering::Relaxed);
        if usize::from(count) >= MAX_MOVES {
            return false;
        }
        let transferred = self.transferred();
        moves.arrived.store(transferred, Ordering::Relaxed);
        // From here on who cancels it waits for its next owner.
        self.given_away.store(true, Ordering::SeqCst);
        moves.count.store(count + 1, Ordering::SeqCst);
        self.transport.store(transport | MOVED, Ordering::Relaxed);
        self.transferred.store(0, Ordering::Release);
        self.unfinished.store(self.slices(), Ordering::Relaxed);
        // Not by its slices: a thread that was about to claim some for its transport of before may do so yet.
        debug_assert!(self.next.load(Ordering::Relaxed) >= self.slices());
        moves.unclaimed.store(true, Ordering::Release);
        true
    }

    /// Claims all of it for who does it as a whole: how many slices that is, if any.
    pub(crate) fn claim_whole(&self) -> Option<u64> {
        if self.transport.load(Ordering::Relaxed) & MOVED != 0 {
            let moves = self.rare().and_then(|rare| rare.moves.get());
            let unclaimed = moves.is_some_and(|it| it.unclaimed.swap(false, Ordering::Acquire));
            return unclaimed.then(|| self.slices());
        }
        let rest = self.stop();
        self.given_away.store(rest > 0, Ordering::SeqCst);
        (rest > 0).then_some(rest)
    }

    /// Which way.
    pub(crate) fn opcode(&self) -> Opcode {
        Opcode::from_byte(self.opcode.load(Ordering::Relaxed))
    }

    /// What the whole task is.
    pub(crate) fn whole(&self) -> WideSlice {
        WideSlice {
            source: self.source.load(Ordering::Relaxed),
            target: self.target.load(Ordering::Relaxed),
            length: self.length.load(Ordering::Relaxed),
        }
    }

    /// Claims all of it for who submits it. Called before anybody else knows of it.
    pub(crate) fn claim_early(&self) {
        self.next.store(self.slices(), Ordering::Relaxed);
    }

    /// Gives back what was claimed early, of which nothing was done.
    pub(crate) fn give_back(&self) {
        // Who sees that there is something to claim sees whose it is.
        self.next.store(0, Ordering::Release);
    }

    /// All of it has arrived, with so many bytes: nobody else has any of it, or will. The batch must be told.
    pub(crate) fn arrived(&self, length: u64) {
        self.transferred.store(length, Ordering::Relaxed);
        self.unfinished.store(0, Ordering::Relaxed);
        self.end();
    }

    /// Makes sure that no slice is claimed any more; returns how many were not.
    fn stop(&self) -> u64 {
        let slices = self.slices.load(Ordering::Relaxed);
        slices - self.next.swap(slices, Ordering::Relaxed).min(slices)
    }

    /// Lets it end with this state whatever becomes of its slices; whether nothing else was decided.
    fn end_claimed(&self, state: TransferState) -> bool {
        let undecided = self.state.load(Ordering::Acquire) == 0;
        let (as_it_is, early) = (Ordering::Relaxed, state as u8);
        undecided && self.end_as.compare_exchange(0, early, as_it_is, as_it_is).is_ok()
    }

    /// So many slices have ended; what has become of the task.
    fn end_slices(&self, slices: u64) -> Step {
        // Release what this thread has written before, the error above all; the last to come here
        // acquires what all others have.
        if self.unfinished.fetch_sub(slices, Ordering::AcqRel) != slices {
            return Step::GoesOn;
        }
        let left = self.transport.load(Ordering::Relaxed) & LEFT != 0;
        if left && self.error().is_none() && self.end_as.load(Ordering::Relaxed) == 0 {
            return Step::Left;
        }
        self.end();
        Step::Ended
    }

    /// Why it fails, if it does.
    fn error(&self) -> Option<&'a TransferError> {
        self.rare()?.error.get()
    }

    /// The first error is the one to report.
    #[cold]
    fn set_error(&self, error: TransferError) {
        if self.error().is_some() {
            return;
        }
        let range = error.range.or_else(|| Some(self.remote_range()));
        let _ = self.rare_room().error.set(TransferError { range, ..error });
    }

    /// The first address at the peer, and bytes: of several pieces, the smallest range that has all of them.
    fn remote_range(&self) -> (u64, u64) {
        let Some(shape) = self.shape() else {
            let whole = self.whole();
            return (whole.target, whole.length);
        };
        let pieces = || (0..shape.count()).map(|index| shape.piece(index));
        let first = pieces().map(|it| it.target).min().unwrap_or(0);
        let end = pieces().map(|it| it.target.saturating_add(it.length)).max().unwrap_or(first);
        (first, end - first)
    }

    /// Sets the final state.
    fn end(&self) {
        let state = if self.error().is_some() {
            TransferState::Failed
        } else {
            match self.end_as.load(Ordering::Relaxed) {
                3 => TransferState::Canceled,
                5 => TransferState::Timeout,
                _ => TransferState::Completed,
            }
        };
        self.set_state(state);
    }

    /// It is over.
    fn set_state(&self, state: TransferState) {
        debug_assert!(state.is_final());
        // First what is to follow: whoever sees the state may end the engine.
        if let Some(submission) = self.rare().and_then(|rare| rare.submission.get()) {
            submission.task_ended(state);
        }
        if let Some(admitted) = self.rare().and_then(|rare| rare.admitted.get()) {
            admitted.release();
        }
        self.state.store(state as u8, Ordering::Release);
    }
}
