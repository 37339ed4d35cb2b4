//! Threads that wait for something that the progress thread announces.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Threads that wait for one thing. With none, announcing it costs a load.
#[derive(Default)]
pub(super) struct Waiters {
    count: AtomicUsize,
    lock: Mutex<()>,
    arrived: Condvar,
}

impl Waiters {
    /// Waits until `look` finds something, at most `timeout`; gives up at once when `over` says
    /// that nothing more will come.
    pub(super) fn wait<T>(
        &self,
        timeout: Duration,
        mut look: impl FnMut() -> Option<T>,
        over: impl Fn() -> bool,
    ) -> Option<T> {
        // A time that a clock cannot tell is never reached.
        let deadline = Instant::now().checked_add(timeout);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Counted before the first look: whoever adds something after that look sees us.
        self.count.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            let found = look();
            if found.is_some() {
                break found;
            }
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() || over() {
                break None;
            }
            let waited = self.arrived.wait_timeout(guard, left);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        self.count.fetch_sub(1, Ordering::SeqCst);
        found
    }

    /// Wakes them, to look again.
    pub(super) fn wake(&self) {
        if self.count.load(Ordering::SeqCst) > 0 {
            // Taking the lock makes sure that a waiter that has looked is waiting by now.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.arrived.notify_all();
        }
    }
}
