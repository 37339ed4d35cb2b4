//! Threads for what takes a while, as making and resetting queue pairs. They are started when needed.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use millstream_net::ends_between_forks;

pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A pool of threads. Dropping it does the jobs that are queued and waits for them.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    /// Of each thread.
    name: &'static str,
    limit: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    stopping: bool,
}

impl Workers {
    /// Up to `limit` threads of this name.
    pub(crate) fn new(name: &'static str, limit: usize) -> Self {
        Self { shared: Arc::default(), name, limit }
    }

    /// Has a thread do `job`. Gives it back when no thread is there and none can be started, or the
    /// pool was stopped.
    pub(crate) fn run(&self, job: Job) -> Result<(), Job> {
        let mut state = self.shared.lock();
        if state.stopping {
            return Err(job);
        }
        if state.idle <= state.queue.len() && state.threads.len() < self.limit {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name(self.name.to_owned());
            match thread.spawn(ends_between_forks(move || shared.work())) {
                Ok(thread) => state.threads.push(thread),
                Err(error) if state.threads.is_empty() => {
                    tracing::error!(%error, self.name, "cannot start a thread");
                    return Err(job);
                }
                Err(_) => {}
            }
        }
        state.queue.push_back(job);
        drop(state);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Jobs that no thread has begun.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.shared.lock().queue.len()
    }

    /// Takes no more jobs, drops those that have not begun, and waits for the others.
    pub(crate) fn abandon(&self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        let queued = std::mem::take(&mut state.queue);
        drop(state);
        // What a job has may take its time to go.
        drop(queued);
        self.stop();
    }

    /// Takes no more jobs, and waits for those it has.
    pub(crate) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopping = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.shared.changed.notify_all();
        join(threads);
    }
}

/// Waits for these threads, unless one of them does so. A panic of theirs was reported when it happened.
pub(crate) fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    let own = thread::current().id();
    for thread in threads.into_iter().filter(|thread| thread.thread().id() != own) {
        let _ = thread.join();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                job();
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

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn jobs_run_side_by_side_up_to_the_limit() {
        let workers = Workers::new("work", 2);
        let barrier = Arc::new(Barrier::new(2));
        let (done, results) = mpsc::channel();
        for number in 0..6 {
            let (barrier, done) = (Arc::clone(&barrier), done.clone());
            let job = move || {
                // Two at a time, or nothing would move.
                barrier.wait();
                done.send(number).unwrap();
            };
            assert!(workers.run(Box::new(job)).is_ok());
        }
        workers.stop();
        let mut numbers: Vec<i32> = results.try_iter().collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        assert!(workers.run(Box::new(|| {})).is_err());
    }
}
