//! Threads that wait for something, and how they are woken.

use std::cell::RefCell;
use std::sync::{Arc, PoisonError};

use crate::forks::forks;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, thread_local};
use crate::wake::Wake;

thread_local! {
    /// What this thread sleeps on when it waits, and at which of [`forks`] it was made; `None` when it could not be.
    static OWN: RefCell<(u32, Option<Arc<Wake>>)> = RefCell::new((forks(), new_wake()));
}

/// What this thread sleeps on. `None` when the system has no more descriptors, and while the thread
/// ends.
pub(crate) fn own_wake() -> Option<Arc<Wake>> {
    let current = |own: &RefCell<(u32, Option<Arc<Wake>>)>| {
        let mut own = own.borrow_mut();
        // That of a process of which this one is a fork has a descriptor which both have: what wakes one
        // would be taken by the other.
        if own.0 != forks() {
            *own = (forks(), new_wake());
        }
        own.1.clone()
    };
    OWN.try_with(current).ok().flatten()
}

fn new_wake() -> Option<Arc<Wake>> {
    Wake::new().ok().map(Arc::new)
}

/// Threads that wait for one thing. With none, announcing it costs a load.
#[derive(Debug, Default)]
pub struct Waiters {
    count: AtomicUsize,
    threads: Mutex<Vec<Arc<Wake>>>,
}

impl Waiters {
    /// With room for so many threads: only more of them at once cost an allocation.
    pub fn with_room(threads: usize) -> Self {
        Self { count: AtomicUsize::new(0), threads: Mutex::new(Vec::with_capacity(threads)) }
    }

    /// Counts this thread among those that wait, until the result is dropped. Whoever announces
    /// something after this sees it; what was announced before, the thread must look for.
    pub(crate) fn enter<'a>(&'a self, wake: &'a Arc<Wake>) -> Entry<'a> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.push(Arc::clone(wake));
        drop(threads);
        self.count.fetch_add(1, Ordering::SeqCst);
        Entry { waiters: self, wake }
    }

    /// Wakes all, to look again.
    pub fn wake(&self) {
        if self.count.load(Ordering::SeqCst) > 0 {
            let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            threads.iter().for_each(|wake| wake.request());
        }
    }

    /// Wakes the one that has waited longest.
    pub(crate) fn wake_one(&self) {
        if self.count.load(Ordering::SeqCst) > 0 {
            let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(wake) = threads.first() {
                wake.request();
            }
        }
    }
}

/// A thread that waits.
pub(crate) struct Entry<'a> {
    waiters: &'a Waiters,
    wake: &'a Arc<Wake>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.waiters.count.fetch_sub(1, Ordering::SeqCst);
        let mut threads = self.waiters.threads.lock().unwrap_or_else(PoisonError::into_inner);
        // The same thread may be here more than once, when it waits in a handler.
        if let Some(index) = threads.iter().rposition(|wake| Arc::ptr_eq(wake, self.wake)) {
            threads.remove(index);
        }
    }
}

#[cfg(all(test, not(millstream_loom)))]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn those_who_wait_are_woken_and_those_who_have_left_are_not() {
        let waiters = Waiters::default();
        let [first, second] = [(), ()].map(|()| Arc::new(Wake::new().unwrap()));
        let entries = (waiters.enter(&first), waiters.enter(&second));
        waiters.wake_one();
        assert_eq!((first.take(), second.take()), (true, false));
        waiters.wake();
        assert_eq!((first.take(), second.take()), (true, true));
        drop(entries.0);
        waiters.wake();
        waiters.wake_one();
        assert_eq!((first.take(), second.take()), (false, true));
        drop(entries.1);
        waiters.wake();
        assert!(!second.take());
        assert!(waiters.threads.lock().unwrap().is_empty());
    }

    #[test]
    fn each_thread_has_one_to_sleep_on() {
        let own = own_wake().unwrap();
        assert!(Arc::ptr_eq(&own, &own_wake().unwrap()));
        let other = std::thread::spawn(|| own_wake().unwrap()).join().unwrap();
        assert!(!Arc::ptr_eq(&own, &other));
        // It outlives its thread.
        other.request();
        assert!(!other.sleep([], Some(Duration::from_secs(20)), || false).unwrap());
    }
}
