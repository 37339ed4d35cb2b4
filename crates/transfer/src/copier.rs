//! Copies: what `local` and `shm` do with tasks.
//!
//! Who submits does small ones on its own thread. The others are queued, for threads of the copier and
//! for who waits for a batch. Each takes a *group* at a time: slices of one task, or many small tasks.

mod early;
mod failed;
mod group;
mod way;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use millstream_net::ends_between_forks;

use self::group::Group;
pub(crate) use self::way::{Other, Way};
use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::fail_over::{Leaving, leave};
use crate::task::TaskHandle;
use crate::terms::Terms;
use crate::transport::Run;
use crate::workers::join;
use crate::{FailureReason, TransferError, TransferState};

/// So many bytes of one submission are copied by who submits: some ten microseconds' work.
pub(crate) const INLINE: u64 = 512 << 10;

/// Threads that copy, beside those that wait.
const MAX_THREADS: usize = 4;

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
    /// A thread asks a peer for its memory, so that a group can be copied. So no more than one waits for peers that do not
    /// answer, and the others do what can be done.
    asking: bool,
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

    /// Queues all tasks of a batch, of which nobody is told.
    #[cfg(test)]
    pub(crate) fn keep(&self, way: Way, batch: &Arc<BatchShared>) {
        let (batch, end, terms) = (Arc::clone(batch), batch.submitted(), Terms::default());
        self.shared.lock().queue.push_back(Entry { way, batch, next: 0, end, terms });
        self.shared.queued.fetch_add(1, Ordering::Release);
    }

    /// Copies a group on this thread; `false` when there is none that can begin without a wait.
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
        let taken = self.shared.take(&mut state, Way::is_open);
        let Some((way, batch, terms, group)) = taken else { return false };
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

/// As long as a thread asks.
struct Asking<'a>(&'a Shared);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.lock().asking = false;
        // What it has asked for can be copied by any of them.
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one more thread if none is idle and there may be more.
    fn grow(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        // One more where one waits for a peer.
        let most = threads() + usize::from(state.asking);
        if state.idle == 0 && state.threads.len() < most {
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

    /// What to copy next, by a way of which this holds.
    fn take(
        &self,
        state: &mut State,
        suits: impl Fn(&Way) -> bool,
    ) -> Option<(Way, Arc<BatchShared>, Terms, Group)> {
        loop {
            let index = state.queue.iter().position(|entry| suits(&entry.way))?;
            let entry = state.queue.get_mut(index)?;
            let grouping = entry.way.grouping();
            let group = Group::claim(&entry.batch, &mut entry.next, entry.end, grouping);
            if entry.next < entry.end {
                let batch = Arc::clone(&entry.batch);
                return Some((entry.way.clone(), batch, entry.terms, group));
            }
            let Entry { way, batch, terms, .. } = state.queue.remove(index)?;
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
            let alone = !state.asking;
            if let Some(late) = self.take_late(&mut state) {
                drop(state);
                late.time_out();
                state = self.lock();
            } else if let Some((way, batch, terms, group)) =
                self.take(&mut state, |way| alone || !way.is_shut())
            {
                let asks = alone && way.is_shut();
                state.asking |= asks;
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
                if asks {
                    let _asking = Asking(self);
                    way.ask();
                }
                self.copy(&way, &batch, &terms, &group);
                drop((way, batch));
                state = self.lock();
            } else if state.stopping {
                return;
            } else {
                // What another thread asks for may be late before that has an answer.
                let deadline = state.deadline.filter(|_| !state.queue.is_empty());
                let left = deadline.map(|it| it.saturating_duration_since(Instant::now()));
                state.idle += 1;
                state = match left {
                    Some(left) => {
                        let waited = self.changed.wait_timeout(state, left);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                    None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                };
                state.idle -= 1;
            }
        }
    }
}
