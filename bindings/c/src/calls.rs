//! Calls of threads on what another thread may destroy meanwhile.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Those that are under way on one thing.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    count: AtomicUsize,
    closing: AtomicBool,
    lock: Mutex<()>,
    none: Condvar,
}

/// One of them. Dropped, it has ended.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Calls>);

impl Calls {
    /// Begins one.
    pub(crate) fn begin(self: &Arc<Self>) -> Counted {
        self.count.fetch_add(1, Ordering::SeqCst);
        Counted(Arc::clone(self))
    }

    /// Somebody destroys what they are on, and waits for them.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Waits for their ends. None begins any more.
    pub(crate) fn close(&self) {
        while !self.close_within(Duration::MAX) {}
    }

    /// As above, for so long at most; whether they have ended.
    pub(crate) fn close_within(&self, patience: Duration) -> bool {
        self.closing.store(true, Ordering::SeqCst);
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let any = |_: &mut ()| self.count.load(Ordering::SeqCst) > 0;
        let waited = self.none.wait_timeout_while(lock, patience, any);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Self(calls) = self;
        // Sequentially consistent, as in `close`: either it sees that there is none, or this sees that it waits.
        if calls.count.fetch_sub(1, Ordering::SeqCst) == 1 && calls.is_closing() {
            let _lock = calls.lock.lock().unwrap_or_else(PoisonError::into_inner);
            calls.none.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn who_closes_waits_for_all_calls_that_have_begun() {
        let calls = Arc::new(Calls::default());
        let under_way = [(); 3].map(|()| calls.begin());
        assert!(!calls.close_within(Duration::ZERO));
        let (says, heard) = mpsc::channel();
        thread::scope(|scope| {
            let closes = scope.spawn(|| {
                calls.close();
                says.send(()).unwrap();
            });
            for call in under_way {
                assert!(heard.try_recv().is_err(), "it has not waited");
                drop(call);
            }
            closes.join().unwrap();
        });
        assert!(calls.close_within(Duration::ZERO));
    }
}
