//! The driver's sleep, which several threads end earlier than it would.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::super::driver::Doze;
use super::super::timer::NEVER;
use crate::Polling;
use crate::model::{check, kernel};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A driver that has nothing to do but to be awake at three times.
struct Driver {
    doze: Doze,
    deadlines: [AtomicU64; 3],
    met: AtomicUsize,
}

impl Driver {
    fn new() -> Self {
        Self {
            doze: Doze::new(Polling::keeping(Duration::ZERO)).unwrap(),
            deadlines: [(); 3].map(|()| AtomicU64::new(NEVER)),
            met: AtomicUsize::new(0),
        }
    }

    fn next(&self) -> u64 {
        let deadlines = self.deadlines.iter().map(|deadline| deadline.load(Ordering::SeqCst));
        deadlines.min().expect("there are three")
    }

    fn run(&self) {
        loop {
            for deadline in &self.deadlines {
                if deadline.load(Ordering::SeqCst) <= kernel::now() {
                    deadline.store(NEVER, Ordering::SeqCst);
                    self.met.fetch_add(1, Ordering::SeqCst);
                }
            }
            if self.met.load(Ordering::SeqCst) == self.deadlines.len() {
                return;
            }
            let time = self.next();
            self.doze.sleep(time, None, || self.next() < time).unwrap();
        }
    }

    /// As who sets a deadline does.
    fn cover(&self, index: usize, deadline: u64) {
        self.deadlines[index].store(deadline, Ordering::SeqCst);
        self.doze.cover(deadline);
    }
}

#[test]
fn no_deadline_is_slept_through() {
    check(2, || {
        kernel::let_time_pass();
        let driver = Arc::new(Driver::new());
        let running = {
            let driver = Arc::clone(&driver);
            thread::spawn(move || driver.run())
        };
        let other = {
            let driver = Arc::clone(&driver);
            thread::spawn(move || driver.cover(0, 1))
        };
        driver.cover(1, 2);
        other.join().unwrap();
        // A trace that the others have left in the timer must not matter.
        driver.cover(2, kernel::now() + 1);
        running.join().unwrap();
    });
}
