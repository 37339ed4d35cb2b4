//! When what was collected for sending has been sent.

use std::sync::PoisonError;

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};

/// Lets any thread wait until the sender has let go of memory.
///
/// The sender begins while it holds the node's lock. Whoever removed memory from the node under
/// that lock therefore either sees the send that may still use it, or came before it was collected.
#[derive(Default)]
pub(super) struct Sending {
    /// Odd while a send is under way.
    epoch: AtomicU64,
    waiters: AtomicUsize,
    lock: Mutex<()>,
    ended: Condvar,
}

impl Sending {
    /// Says that a send is under way, until the result is dropped.
    pub(super) fn begin(&self) -> Underway<'_> {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst);
        debug_assert_eq!(epoch % 2, 0, "one sender at a time");
        Underway(self)
    }

    /// Returns when the send that is under way now, if any, has ended.
    pub(super) fn wait(&self) {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if epoch.is_multiple_of(2) {
            return;
        }
        // Counted before the epoch is looked at again, and the sender changes the epoch before it
        // looks at the count: one of the two sees the other.
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.epoch.load(Ordering::SeqCst) == epoch {
            lock = self.ended.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
        drop(lock);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    #[cfg(test)]
    fn waiters(&self) -> usize {
        self.waiters.load(Ordering::SeqCst)
    }
}

/// A send is under way.
pub(super) struct Underway<'a>(&'a Sending);

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        let Sending { epoch, waiters, lock, ended } = self.0;
        epoch.fetch_add(1, Ordering::SeqCst);
        if waiters.load(Ordering::SeqCst) > 0 {
            // Taken once so that no waiter is between its look at the epoch and its sleep.
            drop(lock.lock().unwrap_or_else(PoisonError::into_inner));
            ended.notify_all();
        }
    }
}

#[cfg(all(test, not(millstream_loom)))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn nothing_under_way_is_not_waited_for() {
        let sending = Sending::default();
        sending.wait();
        drop(sending.begin());
        sending.wait();
    }

    #[test]
    fn a_send_under_way_is_waited_for() {
        let sending = Sending::default();
        let ended = AtomicBool::new(false);
        let underway = sending.begin();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                sending.wait();
                ended.load(Ordering::SeqCst)
            });
            while sending.waiters() == 0 {
                thread::yield_now();
            }
            ended.store(true, Ordering::SeqCst);
            drop(underway);
            assert!(waiter.join().unwrap(), "the waiter returned during the send");
        });
        assert_eq!(sending.waiters(), 0);
    }

    #[test]
    fn later_sends_are_not_waited_for() {
        let sending = Sending::default();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            // A sender that is nearly always sending: a waiter that waited for a quiet moment
            // could wait for ever; one that waits for its send comes through every time.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(sending.begin());
                }
            });
            for _ in 0..10_000 {
                sending.wait();
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
