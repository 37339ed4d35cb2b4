//! Who is at registered memory, on behalf of this process: copies enter before they touch it, and
//! whoever takes the memory back closes the gate and waits until nobody is inside.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// Nobody enters any more. The bits below count who is inside.
const CLOSED: usize = 1 << (usize::BITS - 1);

#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: AtomicUsize,
    waiting: Mutex<()>,
    left: Condvar,
}

/// Somebody is inside as long as this lives.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
}

impl Gate {
    /// `None` once it was closed.
    pub(crate) fn enter(&self) -> Option<Pass<'_>> {
        let open = self.state.fetch_add(1, Ordering::Acquire) & CLOSED == 0;
        // Dropped, it leaves.
        let entered = Pass { gate: self };
        open.then_some(entered)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.load(Ordering::Relaxed) & CLOSED != 0
    }

    /// Lets nobody in any more, and waits until all have left: a copy is short.
    pub(crate) fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while self.state.load(Ordering::Acquire) != CLOSED {
            waiting = self.left.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.gate.state.fetch_sub(1, Ordering::Release) == CLOSED + 1 {
            // Who closes it is asleep, or has not looked yet.
            let waiting = self.gate.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            drop(waiting);
            self.gate.left.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn nobody_is_inside_once_it_is_closed() {
        for _ in 0..500 {
            let (gate, closed, begun) =
                (Gate::default(), AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        while let Some(_pass) = gate.enter() {
                            assert!(!closed.load(Ordering::SeqCst));
                            begun.store(true, Ordering::SeqCst);
                        }
                    });
                }
                while !begun.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                gate.close();
                closed.store(true, Ordering::SeqCst);
            });
            assert!(gate.is_closed() && gate.enter().is_none());
            gate.close();
        }
    }
}
