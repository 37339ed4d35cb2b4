//! Copies: what `local` and `shm` do with tasks.
//!
//! Who submits does small ones on its own thread. The others are queued, for threads of the copier and
//! for who waits for a batch. Each takes a *group* at a time: slices of one task, or many small tasks.

mod early;
mod failed;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;
use std::{io, iter};

use millstream_net::ends_between_forks;
use millstream_net::guarded::{self, Caching};
use millstream_net::shared_memory::{Key, Peer};

use self::failed::{Failed, not_exchanged, reason, visit};
use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::fail_over::{Leaving, leave};
use crate::memory::LocalMemory;
use crate::segment::OpenSegment;
use crate::task::{EndedTasks, TaskHandle, WideSlice};
use crate::terms::Terms;
use crate::transport::Run;
use crate::workers::join;
use crate::{FailureReason, Opcode, TransferError, TransferState};

/// So many bytes of one submission are copied by who submits: some ten microseconds' work.
pub(crate) const INLINE: u64 = 512 << 10;

/// A group ends with the slice that makes it so long.
const GROUP_BYTES: u64 = 128 << 10;
const GROUP_PIECES: usize = 64;

/// Deadlines are looked at after so many bytes, at the latest: about a millisecond's work.
const STEP_BYTES: u64 = 4 << 20;

/// A group where memory of a GPU is an end: each copy takes the driver some ten microseconds.
const GPU_GROUP_BYTES: u64 = 4 << 20;

/// Requests of so many bytes are written around the caches, of which they would take most.
const AROUND_CACHES: u64 = 256 << 10;

/// Threads that copy, beside those that wait.
const MAX_THREADS: usize = 4;

/// Where bytes go, or come from.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) local: Arc<LocalMemory>,
    pub(crate) other: Other,
    pub(crate) segment: Arc<OpenSegment>,
    /// Which start of the segment's process it is, if it says so.
    pub(crate) incarnation: Option<u64>,
}

/// The memory at the other end.
#[derive(Clone)]
pub(crate) enum Other {
    /// Of this process.
    Own(Arc<LocalMemory>),
    /// Of another one on this host.
    Peer(Arc<Peer>, Key),
}

impl Way {
    /// Whether copies can begin without a wait. Those of a GPU wait for its driver.
    fn is_open(&self) -> bool {
        match &self.other {
            _ if self.has_gpu() => false,
            Other::Own(_) => true,
            Other::Peer(peer, key) => peer.region(*key).is_some(),
        }
    }

    /// Whether an end is memory of a GPU.
    fn has_gpu(&self) -> bool {
        let other = match &self.other {
            Other::Own(other) => other.is_gpu(),
            Other::Peer(..) => false,
        };
        other || self.local.is_gpu()
    }

    /// How to make groups of what goes this way.
    fn grouping(&self) -> Grouping {
        Grouping {
            within: matches!(self.other, Other::Own(_)),
            bytes: if self.has_gpu() { GPU_GROUP_BYTES } else { GROUP_BYTES },
        }
    }

    /// Copies a group, and tells its tasks: returns those of which nothing is under way and that another transport may
    /// go on with. May wait for the peer if the way is not open.
    fn copy(&self, batch: &Arc<BatchShared>, group: &Group) -> Vec<usize> {
        let mut left = Vec::new();
        for &index in &group.late {
            TaskHandle { batch: Arc::clone(batch), index }.end_rest(TransferState::Timeout);
        }
        if group.count == 0 {
            return left;
        }
        let mut failures = Vec::new();
        if let Err(failed) = self.try_copy(batch, group, &mut failures) {
            // None of it counts.
            let failed = |index| (index, Broken::Failed(failed.clone()));
            failures = (0..group.pieces().len()).map(failed).collect();
        }
        let mut failures = failures.into_iter().peekable();
        let (mut done, mut copied) = (0, [0; 2]);
        let mut ended = EndedTasks::default();
        // Pieces of one task that follow each other are told at once: others work on it too, and who writes what they
        // read waits for it.
        let mut told = Arrived::default();
        for (index, piece) in group.pieces().iter().enumerate() {
            match failures.next_if(|(failed, _)| *failed == index) {
                None => {
                    done += 1;
                    copied[piece.opcode as usize] += piece.slice.length;
                    if told.slices > 0 && told.task != piece.task {
                        left.extend(told.tell(batch, &mut ended));
                    }
                    told.task = piece.task;
                    told.slices += piece.slices;
                    told.length += piece.slice.length;
                }
                Some((_, Broken::Late(done))) => {
                    let task = TaskHandle { batch: Arc::clone(batch), index: piece.task };
                    task.slices_late(piece.slices, done);
                }
                Some((_, Broken::Failed(failed))) => {
                    left.extend(self.fail(batch, piece.task, piece.slices, failed));
                }
            }
        }
        left.extend(told.tell(batch, &mut ended));
        // Before those who wait are told.
        self.segment.traffic.add(done, copied);
        drop(ended);
        if done > 0 {
            self.works();
        }
        left
    }

    /// Something was copied.
    fn works(&self) {
        if let Other::Peer(..) = self.other {
            self.segment.avoided.works(self.name());
        }
    }

    /// So many slices of a task have failed. The task, if another transport may go on with it and nothing of it is
    /// under way.
    fn fail(
        &self,
        batch: &Arc<BatchShared>,
        index: usize,
        slices: u64,
        failed: Failed,
    ) -> Option<usize> {
        if let Other::Peer(..) = self.other {
            // Its memory is not what it was when it was asked.
            self.segment.mark_stale();
        }
        let peer = self.segment.name.as_str().into();
        let error = TransferError::new(peer, self.name(), failed.reason);
        self.segment.traffic.failed(slices);
        let task = TaskHandle { batch: Arc::clone(batch), index };
        if failed.elsewhere {
            return task.slices_left(slices, &error).then_some(index);
        }
        task.slices_failed(slices, &error);
        None
    }

    fn name(&self) -> &'static str {
        match self.other {
            Other::Own(_) => "local",
            Other::Peer(..) => "shm",
        }
    }

    /// Copies each piece, or says why not; fails when none of them counts.
    fn try_copy(
        &self,
        batch: &Arc<BatchShared>,
        group: &Group,
        failures: &mut Vec<(usize, Broken)>,
    ) -> Result<(), Failed> {
        let enter = || self.local.enter().ok_or(FailureReason::Unregistered);
        let pieces = group.pieces();
        match &self.other {
            Other::Own(other) => {
                let local = enter()?;
                let other = other.enter().ok_or(FailureReason::Unregistered)?;
                let copy_one = |piece: &Piece| {
                    let Piece { opcode, caching, .. } = *piece;
                    let copied = piece.in_steps(batch, true, |near, far, length| match opcode {
                        Opcode::Write => local.copy_to(near, &other, far, length, caching),
                        Opcode::Read => other.copy_to(far, &local, near, length, caching),
                    });
                    broken(copied.map_err(Failed::from))
                };
                if self.has_gpu() {
                    group.for_each_joined(copy_one, failures);
                } else {
                    for_each(
                        pieces,
                        |four, opcode, length| match opcode {
                            Opcode::Write => local.copy_four_to(&other, four, length),
                            Opcode::Read => {
                                let four = four.map(|(near, far)| (far, near));
                                other.copy_four_to(&local, four, length)
                            }
                        },
                        |index, piece| failures.extend(copy_one(piece).map(|why| (index, why))),
                    );
                }
            }
            Other::Peer(peer, key) => {
                let region = match peer.region(*key) {
                    Some(region) => region,
                    None => peer.open(*key).map_err(reason)?,
                };
                // Only now: whoever unregisters it waits for us, and the peer may have let us wait.
                let local = enter()?;
                let visit = visit(peer, &region)?;
                let copy_one = |piece: &Piece| {
                    let Piece { opcode, caching, .. } = *piece;
                    let copied = piece.in_steps(batch, false, |near, far, length| {
                        local.exchange(opcode, near, &visit, far, length, caching)
                    });
                    broken(copied.map_err(|error| not_exchanged(&local, error)))
                };
                if self.has_gpu() {
                    group.for_each_joined(copy_one, failures);
                } else {
                    for_each(
                        pieces,
                        |four, opcode, length| local.exchange_four(opcode, &visit, four, length),
                        |index, piece| failures.extend(copy_one(piece).map(|why| (index, why))),
                    );
                }
                visit.confirm().map_err(reason)?;
            }
        }
        Ok(())
    }
}

/// What is taken together.
#[derive(Clone, Copy)]
struct Grouping {
    /// Both ends are in one process.
    within: bool,
    /// A group ends with the slice that makes it so long.
    bytes: u64,
}

/// What one thread copies at a time.
struct Group {
    pieces: [Piece; GROUP_PIECES],
    count: usize,
    /// Tasks whose deadline has passed. Nobody is told of their end under a lock.
    late: Vec<usize>,
}

/// Why a piece was not copied, or not to its end.
#[derive(Clone)]
enum Broken {
    Failed(Failed),
    /// The deadline of its task passed when so many bytes had been.
    Late(u64),
}

/// Slices of a task that have arrived, and are not told.
#[derive(Default)]
struct Arrived {
    task: usize,
    slices: u64,
    length: u64,
}

impl Arrived {
    /// Their task, if it [is left](TaskHandle::slices_left).
    fn tell(&mut self, batch: &Arc<BatchShared>, ended: &mut EndedTasks) -> Option<usize> {
        if self.slices == 0 {
            return None;
        }
        let left = ended.slices_done(batch, self.task, self.slices, self.length);
        (self.slices, self.length) = (0, 0);
        left.then_some(self.task)
    }
}

/// What is wrong with a piece that was copied with this result.
fn broken(copied: Result<Option<u64>, Failed>) -> Option<Broken> {
    match copied {
        Ok(late) => late.map(Broken::Late),
        Err(failed) => Some(Broken::Failed(failed)),
    }
}

/// Slices of one task.
#[derive(Clone, Copy)]
struct Piece {
    task: usize,
    opcode: Opcode,
    slice: WideSlice,
    slices: u64,
    caching: Caching,
}

/// Has these pieces copied: four at a time where they are of one length and go around the caches, and one by
/// one where `four` does not. After that, others may be told; in what order the bytes were there until then is not said.
fn for_each(
    pieces: &[Piece],
    mut four: impl FnMut([(u64, u64); 4], Opcode, u64) -> bool,
    mut one: impl FnMut(usize, &Piece),
) {
    // Once for all: it waits until they are in memory. Also if one panics.
    struct Fence(bool);
    impl Drop for Fence {
        fn drop(&mut self) {
            if self.0 {
                guarded::fence();
            }
        }
    }
    let (mut index, mut fence) = (0, Fence(false));
    while let Some(piece) = pieces.get(index) {
        let together = pieces[index..].first_chunk().filter(|next| alike(next));
        if let Some(next) = together {
            fence.0 = true;
            let ends = next.map(|it| (it.slice.source, it.slice.target));
            if four(ends, piece.opcode, piece.slice.length) {
                index += next.len();
                continue;
            }
        }
        one(index, piece);
        index += 1;
    }
}

/// Whether these are to be copied together. Longer ones are streams enough for themselves.
fn alike(pieces: &[Piece; 4]) -> bool {
    let [first, ..] = pieces;
    let same = |it: &Piece| {
        it.caching == Caching::Around
            && it.opcode == first.opcode
            && it.slice.length == first.slice.length
    };
    (1 << 10..16 << 10).contains(&first.slice.length) && pieces.iter().all(same)
}

impl Piece {
    /// Copies it step by step, and looks between whether the time of its task is over: then it says how many
    /// bytes were copied. Both ends may be in one process and overlap: no step writes what one after it reads.
    fn in_steps<E>(
        &self,
        batch: &Arc<BatchShared>,
        one_process: bool,
        mut copy: impl FnMut(u64, u64, u64) -> Result<(), E>,
    ) -> Result<Option<u64>, E> {
        let WideSlice { source: near, target: far, length } = self.slice;
        if length <= STEP_BYTES {
            return copy(near, far, length).map(|()| None);
        }
        let upwards = match self.opcode {
            Opcode::Write => far > near,
            Opcode::Read => near > far,
        };
        let mut done = 0;
        while done < length {
            if done > 0 && batch.tasks.get(self.task).is_late() {
                return Ok(Some(done));
            }
            let step = STEP_BYTES.min(length - done);
            let offset = if one_process && upwards { length - done - step } else { done };
            copy(near + offset, far + offset, step)?;
            done += step;
        }
        Ok(None)
    }
}

impl Group {
    const NONE: Piece = Piece {
        task: 0,
        opcode: Opcode::Read,
        slice: WideSlice { source: 0, target: 0, length: 0 },
        slices: 0,
        caching: Caching::Through,
    };

    /// Claims slices of these tasks, and moves on in them. None are left when it is empty.
    fn claim(batch: &Arc<BatchShared>, next: &mut usize, end: usize, grouping: Grouping) -> Self {
        let Grouping { within, bytes: limit } = grouping;
        let mut group = Self { pieces: [Self::NONE; GROUP_PIECES], count: 0, late: Vec::new() };
        let mut task = TaskHandle { batch: Arc::clone(batch), index: 0 };
        let mut bytes = 0;
        while *next < end && group.count < GROUP_PIECES && bytes < limit {
            task.index = *next;
            // Another transport claims it.
            if batch.tasks.get(*next).has_left() {
                *next += 1;
                continue;
            }
            if task.is_late() {
                group.late.push(*next);
                *next += 1;
                continue;
            }
            let opcode = task.opcode();
            let whole = task.whole();
            let caching = caching_of(whole.length);
            if let Some(shape) = task.shape() {
                let pieces = task.claim_pieces(GROUP_PIECES - group.count, limit - bytes);
                if pieces.is_empty() {
                    *next += 1;
                    continue;
                }
                batch.posted(task.index);
                for slice in pieces.map(|index| shape.piece(index)) {
                    let task = task.index;
                    group.pieces[group.count] = Piece { task, opcode, slice, slices: 1, caching };
                    group.count += 1;
                    bytes += slice.length;
                }
                continue;
            }
            // What overlaps is one copy, in the direction that is right for all of it.
            let at_once = whole.length <= limit || (within && overlaps(&whole));
            let claimed = match at_once {
                true => task.claim_rest(),
                false => task.claim().map(|slice| (slice, 1)),
            };
            if at_once || claimed.is_none() {
                *next += 1;
            }
            if let Some((slice, slices)) = claimed {
                batch.posted(task.index);
                let task = task.index;
                group.pieces[group.count] = Piece { task, opcode, slice, slices, caching };
                group.count += 1;
                bytes += slice.length;
            }
        }
        group
    }

    fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }

    /// Its pieces, and their places in the list. Slices of a task that follow each other at both ends are one,
    /// as long as one step takes it.
    fn joined(&self) -> impl Iterator<Item = (Range<usize>, Piece)> {
        let mut next = 0;
        iter::from_fn(move || {
            let first = next;
            let mut all = *self.pieces().get(first)?;
            next += 1;
            while let Some(piece) = self.pieces().get(next)
                && all.task == piece.task
                && all.slice.source + all.slice.length == piece.slice.source
                && all.slice.target + all.slice.length == piece.slice.target
                && all.slice.length + piece.slice.length <= STEP_BYTES
            {
                all.slice.length += piece.slice.length;
                next += 1;
            }
            Some((first..next, all))
        })
    }

    /// Has its pieces copied, those that follow each other at once.
    fn for_each_joined(
        &self,
        copy_one: impl Fn(&Piece) -> Option<Broken>,
        failures: &mut Vec<(usize, Broken)>,
    ) {
        for (indexes, piece) in self.joined() {
            if let Some(why) = copy_one(&piece) {
                failures.extend(indexes.map(|index| (index, why.clone())));
            }
        }
    }
}

/// How a request of so many bytes goes about caches.
const fn caching_of(length: u64) -> Caching {
    match length >= AROUND_CACHES {
        true => Caching::Around,
        false => Caching::Through,
    }
}

/// Whether its ends have bytes in common, if they are in one process.
fn overlaps(slice: &WideSlice) -> bool {
    slice.source.abs_diff(slice.target) < slice.length
}

/// Tasks that wait for a thread.
struct Entry {
    way: Way,
    batch: Arc<BatchShared>,
    next: usize,
    end: usize,
    /// Of its tasks.
    terms: Terms,
}

/// Does copies. One for all transports of an engine that copy.
#[derive(Default)]
pub(crate) struct Copier {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Entries in the queue.
    queued: AtomicUsize,
    /// Who finds another transport for what cannot be copied, where that is done.
    engine: OnceLock<Weak<Inner>>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Entry>,
    /// No deadline in the queue is before this.
    deadline: Option<Instant>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    stopping: bool,
}

impl Copier {
    /// What cannot be copied goes on over other transports of this engine.
    pub(crate) fn leave_to(&self, engine: Weak<Inner>) {
        let _ = self.shared.engine.set(engine);
    }

    /// Begins to do the tasks of these runs. Those of a run without a way fail.
    pub(crate) fn submit(
        &self,
        batch: &Arc<BatchShared>,
        runs: &[Run],
        terms: &Terms,
        way: impl Fn(&Run) -> Result<Way, FailureReason>,
    ) {
        let mut left = INLINE;
        for run in runs {
            let way = match way(run) {
                Ok(way) => way,
                Err(reason) => {
                    let peer = run.segment.name.as_str().into();
                    let error = TransferError::new(peer, "memory", reason);
                    run.give_back(batch);
                    run.handles(batch).for_each(|task| task.fail_rest(&error));
                    continue;
                }
            };
            let grouping = way.grouping();
            let terms = Terms { allowed: run.allowed, ..*terms };
            let (mut next, end) = (run.tasks.start, run.tasks.end);
            match way.copy_early(batch, next..run.claimed, &mut left) {
                Some(tasks) => {
                    self.shared.leave(&way, batch, &terms, tasks);
                    next = run.claimed;
                }
                None => run.give_back(batch),
            }
            if next < end && way.is_open() {
                while next < end && batch.tasks.get(next).length() <= left {
                    // No more than is left: the tasks that follow may be long.
                    let mut until = next;
                    while until < end && batch.tasks.get(until).length() <= left {
                        left -= batch.tasks.get(until).length();
                        until += 1;
                    }
                    while next < until {
                        let group = Group::claim(batch, &mut next, until, grouping);
                        let tasks = way.copy(batch, &group);
                        self.shared.leave(&way, batch, &terms, tasks);
                    }
                }
            }
            if next < end {
                self.enqueue(Entry { way, batch: Arc::clone(batch), next, end, terms });
            }
        }
    }

    fn enqueue(&self, entry: Entry) {
        let mut state = self.shared.lock();
        if state.stopping {
            drop(state);
            return entry.fail();
        }
        if let Err(error) = self.shared.grow(&mut state)
            && state.threads.is_empty()
        {
            tracing::error!(%error, "cannot start a thread to copy");
            drop(state);
            return entry.fail();
        }
        state.deadline = state.deadline.into_iter().chain(entry.terms.deadline).min();
        state.queue.push_back(entry);
        self.shared.queued.fetch_add(1, Ordering::Release);
        let idle = state.idle > 0;
        drop(state);
        if idle {
            self.shared.changed.notify_one();
        }
    }

    /// Copies a group on this thread; `false` when none waits, or the first one needs a wait.
    pub(crate) fn help(&self) -> bool {
        if self.shared.queued.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut state = self.shared.lock();
        if let Some(late) = self.shared.take_late(&mut state) {
            drop(state);
            late.time_out();
            return true;
        }
        if !state.queue.front().is_some_and(|entry| entry.way.is_open()) {
            return false;
        }
        let Some((way, batch, terms, group)) = self.shared.take(&mut state) else { return false };
        drop(state);
        self.shared.copy(&way, &batch, &terms, &group);
        true
    }

    /// Ends all copies, and its threads. What waits fails.
    pub(crate) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        let queue = std::mem::take(&mut state.queue);
        self.shared.queued.store(0, Ordering::Release);
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.shared.changed.notify_all();
        queue.iter().for_each(Entry::fail);
        join(threads);
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How many threads copy: one processor is left for who waits. To find out reads files, so it is done once.
fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        (processors - 1).clamp(1, MAX_THREADS)
    })
}

impl Entry {
    /// Ends what nobody has begun.
    fn time_out(&self) {
        for index in self.next..self.end {
            let task = TaskHandle { batch: Arc::clone(&self.batch), index };
            task.end_rest(TransferState::Timeout);
        }
    }

    fn fail(&self) {
        let peer = self.way.segment.name.as_str().into();
        let error = TransferError::new(peer, self.way.name(), FailureReason::ShutDown);
        for index in self.next..self.end {
            TaskHandle { batch: Arc::clone(&self.batch), index }.fail_rest(&error);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one more thread if none is idle and there may be more.
    fn grow(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        if state.idle == 0 && state.threads.len() < threads() {
            let shared = Arc::clone(self);
            let thread = thread::Builder::new().name("copy".to_owned());
            state.threads.push(thread.spawn(ends_between_forks(move || shared.work()))?);
        }
        Ok(())
    }

    /// Tasks whose time is over while others are copied. They end without the lock.
    fn take_late(&self, state: &mut State) -> Option<Entry> {
        let now = state.deadline.map(|_| Instant::now())?;
        if state.deadline? > now {
            return None;
        }
        let late = |entry: &Entry| entry.terms.deadline.is_some_and(|deadline| deadline <= now);
        let found = state.queue.iter().position(late);
        let entry = found.and_then(|index| state.queue.remove(index));
        if entry.is_some() {
            self.queued.fetch_sub(1, Ordering::Release);
        } else {
            state.deadline = state.queue.iter().filter_map(|entry| entry.terms.deadline).min();
        }
        entry
    }

    /// Copies a group, and has other transports go on with what this one gives up.
    fn copy(&self, way: &Way, batch: &Arc<BatchShared>, terms: &Terms, group: &Group) {
        let tasks = way.copy(batch, group);
        self.leave(way, batch, terms, tasks);
    }

    /// Has other transports go on with these tasks, or ends them.
    fn leave(&self, way: &Way, batch: &Arc<BatchShared>, terms: &Terms, tasks: Vec<usize>) {
        if tasks.is_empty() {
            return;
        }
        let leaving = |index| Leaving {
            task: TaskHandle { batch: Arc::clone(batch), index },
            from: way.name(),
            local: Arc::clone(&way.local),
            incarnation: way.incarnation,
            terms: *terms,
            end: None,
        };
        let all = tasks.into_iter().map(leaving).collect();
        leave(self.engine.get(), &way.segment, all);
    }

    /// What to copy next.
    fn take(&self, state: &mut State) -> Option<(Way, Arc<BatchShared>, Terms, Group)> {
        loop {
            let entry = state.queue.front_mut()?;
            let grouping = entry.way.grouping();
            let group = Group::claim(&entry.batch, &mut entry.next, entry.end, grouping);
            if entry.next < entry.end {
                let batch = Arc::clone(&entry.batch);
                return Some((entry.way.clone(), batch, entry.terms, group));
            }
            let Entry { way, batch, terms, .. } = state.queue.pop_front()?;
            self.queued.fetch_sub(1, Ordering::Release);
            // Empty when others had claimed the last of it, or it was canceled.
            if group.count > 0 || !group.late.is_empty() {
                return Some((way, batch, terms, group));
            }
        }
    }

    /// What each thread does.
    fn work(self: &Arc<Self>) {
        let mut state = self.lock();
        loop {
            if let Some(late) = self.take_late(&mut state) {
                drop(state);
                late.time_out();
                state = self.lock();
            } else if let Some((way, batch, terms, group)) = self.take(&mut state) {
                // Another one can work on the same task.
                let left = !state.queue.is_empty() && !state.stopping;
                let more = left && state.idle > 0;
                if left && let Err(error) = self.grow(&mut state) {
                    tracing::debug!(%error, "no more threads to copy");
                }
                drop(state);
                if more {
                    self.changed.notify_one();
                }
                self.copy(&way, &batch, &terms, &group);
                drop((way, batch));
                state = self.lock();
            } else if state.stopping {
                return;
            } else {
                state.idle += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}
