//! Jobs that wait for whoever does them.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::{Job, JobsDone};
use crate::descriptors::EventDescriptor;

/// Where jobs are handed in. As many wait as their owners have buffers.
pub struct JobQueue<T> {
    state: Mutex<State<T>>,
    /// For threads.
    pub(super) changed: Condvar,
    /// For a thread that sleeps in the kernel's ring.
    pub(super) event: OnceLock<EventDescriptor>,
    done: Box<dyn JobsDone<T>>,
}

pub(super) struct State<T> {
    pub(super) jobs: VecDeque<Job<T>>,
    /// No more are handed in from outside.
    pub(super) stopping: bool,
    /// Taken and not done.
    pub(super) under_way: usize,
    /// Whether the thread with the event sleeps, or is about to.
    pub(super) asleep: bool,
    /// Nobody takes any more.
    ended: bool,
}

impl<T> JobQueue<T> {
    pub(super) fn new(done: Box<dyn JobsDone<T>>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), event: OnceLock::new(), done }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a job done. One that comes too late fails at once, on this thread.
    pub fn submit(&self, job: Job<T>) {
        let mut state = self.lock();
        if state.ended {
            drop(state);
            let ended =
                io::Error::new(io::ErrorKind::BrokenPipe, "nobody reads and writes files any more");
            return (self.done)(self, job, Err(ended));
        }
        state.jobs.push_back(job);
        self.tell(state);
    }

    /// Wakes one who takes jobs.
    fn tell(&self, mut state: MutexGuard<'_, State<T>>) {
        let asleep = mem::take(&mut state.asleep);
        drop(state);
        match self.event.get() {
            Some(event) if asleep => event.write(),
            Some(_) => {}
            None => self.changed.notify_one(),
        }
    }

    /// The end, once all jobs are done.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopping = true;
        self.tell(state);
        self.changed.notify_all();
    }

    /// Tells the owner of a job that was taken. It may hand in the next one before this one counts as
    /// done, so that the end waits for that too.
    pub(super) fn finish(&self, job: Job<T>, result: io::Result<()>) {
        (self.done)(self, job, result);
        let mut state = self.lock();
        state.under_way -= 1;
        let last = state.is_over();
        drop(state);
        if last {
            self.changed.notify_all();
        }
    }
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self { jobs: VecDeque::new(), stopping: false, under_way: 0, asleep: false, ended: false }
    }
}

impl<T> State<T> {
    /// Takes a job.
    pub(super) fn take(&mut self) -> Option<Job<T>> {
        let job = self.jobs.pop_front()?;
        self.under_way += 1;
        Some(job)
    }

    /// Whether nothing is left to do, and nothing comes.
    pub(super) fn is_over(&mut self) -> bool {
        self.ended |= self.stopping && self.under_way == 0 && self.jobs.is_empty();
        self.ended
    }
}

impl<T> fmt::Debug for JobQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobQueue").finish_non_exhaustive()
    }
}
