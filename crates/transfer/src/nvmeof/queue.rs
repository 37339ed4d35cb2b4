//! Tasks for a thread, and the thread: it is started when there is first something to do.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{io, mem};

use millstream_net::ends_between_forks;

use super::flow::{Entry, Flow};
use crate::FailureReason;

/// What waits for a thread of its own and is under way there.
#[derive(Default)]
pub(super) struct Queue<X> {
    state: Mutex<State<X>>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct State<X> {
    pub(super) flow: Flow,
    /// What else the thread shares with others.
    pub(super) own: X,
    pub(super) stopping: bool,
    /// Whether the thread waits for more.
    waiting: bool,
    thread: Option<JoinHandle<()>>,
}

impl<X> Queue<X> {
    pub(super) fn lock(&self) -> MutexGuard<'_, State<X>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread look, if it waits.
    pub(super) fn wake(&self, mut state: MutexGuard<'_, State<X>>) {
        let waiting = mem::take(&mut state.waiting);
        drop(state);
        if waiting {
            self.changed.notify_all();
        }
    }

    /// What the thread does when it has nothing to do.
    pub(super) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<X>>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, State<X>> {
        state.waiting = true;
        match timeout {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let waited = self.changed.wait_timeout(state, timeout);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// Takes tasks, and starts the thread unless it is there: `work`, which ends when it is told to stop.
    pub(super) fn submit(&self, entry: Entry, name: &str, work: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        if state.stopping {
            drop(state);
            return entry.fail(&FailureReason::ShutDown);
        }
        if state.thread.is_none() {
            match thread::Builder::new().name(name.to_owned()).spawn(ends_between_forks(work)) {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => {
                    drop(state);
                    return entry.fail(&FailureReason::File(no_thread(&error).into()));
                }
            }
        }
        state.flow.push(entry);
        self.wake(state);
    }

    /// Whether there is nothing to do.
    pub(super) fn is_at_rest(&self) -> bool {
        let state = self.lock();
        state.flow.has_nothing_to_begin() && state.flow.is_at_rest()
    }

    /// Tells the thread to stop, calls `also` with what it shares, and waits for its end.
    pub(super) fn stop(&self, also: impl FnOnce(&X)) {
        let mut state = self.lock();
        state.stopping = true;
        also(&state.own);
        let thread = state.thread.take();
        self.wake(state);
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

pub(super) fn no_thread(error: &io::Error) -> String {
    format!("cannot start a thread: {error}: raise its limit")
}
