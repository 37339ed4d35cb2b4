//! A timer that any thread may set earlier.

use std::io;

use millstream_roce::Instant;

use crate::descriptors::{TimerDescriptor, Watched};
use crate::sync::atomic::{AtomicU64, Ordering};

/// Never.
pub(super) const NEVER: u64 = u64::MAX;

/// Readable once its time has come. One thread watches it, and clears it then.
pub(super) struct Timer {
    descriptor: TimerDescriptor,
    /// When it is readable at the latest, in nanoseconds of [`crate::now`].
    at: AtomicU64,
}

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { descriptor: TimerDescriptor::new()?, at: AtomicU64::new(NEVER) })
    }

    /// When it is readable at the latest; [`NEVER`] when it is not set.
    pub(super) fn at(&self) -> u64 {
        self.at.load(Ordering::SeqCst)
    }

    /// Sees to it that it is readable at `at` or before.
    pub(super) fn set(&self, at: u64) {
        if self.at.fetch_min(at, Ordering::SeqCst) > at {
            self.tell(at);
        }
    }

    /// It is not set any more if its time has come.
    pub(super) fn clear_if_due(&self) {
        if self.at() <= crate::now().nanos() {
            self.at.store(NEVER, Ordering::SeqCst);
            // The system may be late: what is only read now could become readable afterwards, and
            // nobody would clear it any more.
            self.tell(NEVER);
        }
    }

    pub(super) fn watched(&self) -> Watched<'_> {
        self.descriptor.watched()
    }

    /// Tells the system that the time is `at` now. Another thread may change it too, and the system
    /// learn of its time first: whoever finds that the time has changed meanwhile says it again.
    fn tell(&self, mut at: u64) {
        loop {
            // Never is in some centuries.
            let left = Instant::from_nanos(at).saturating_duration_since(crate::now());
            self.descriptor.set(left);
            let now = self.at.load(Ordering::SeqCst);
            if now == at {
                return;
            }
            at = now;
        }
    }
}

#[cfg(all(test, not(millstream_loom)))]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::socket::wait;

    fn in_time(timer: &Timer, at: u64) {
        assert!(wait(timer.watched(), libc::POLLIN, Duration::from_secs(20)).unwrap());
        assert!(crate::now().nanos() >= at);
    }

    #[test]
    fn it_is_readable_at_the_earliest_time_that_it_was_set_to() {
        let timer = Timer::new().unwrap();
        let now = crate::now().nanos();
        timer.set(now + 3_000_000_000_000);
        timer.set(now + 2_000_000);
        timer.set(now + 1_000_000_000_000);
        assert_eq!(timer.at(), now + 2_000_000);
        in_time(&timer, now + 2_000_000);
        timer.clear_if_due();
        assert_eq!(timer.at(), NEVER);
        assert!(!wait(timer.watched(), libc::POLLIN, Duration::ZERO).unwrap());
        // A time that has passed is now.
        timer.set(now);
        in_time(&timer, now);
    }

    #[test]
    fn what_was_cleared_before_the_system_said_so_is_not_readable_afterwards() {
        const LATE: Duration = Duration::from_millis(2);
        let timer = Timer::new().unwrap();
        timer.at.store(crate::now().nanos(), Ordering::SeqCst);
        timer.descriptor.set(LATE);
        timer.clear_if_due();
        assert_eq!(timer.at(), NEVER);
        assert!(!wait(timer.watched(), libc::POLLIN, 3 * LATE).unwrap());
    }

    #[test]
    fn many_threads_set_it() {
        let timer = Timer::new().unwrap();
        for _ in 0..200 {
            let now = crate::now().nanos();
            thread::scope(|scope| {
                for earlier in [900, 500, 100, 700] {
                    let timer = &timer;
                    // Seconds, but for one.
                    let later = if earlier == 100 { 100_000 } else { earlier * 1_000_000_000 };
                    scope.spawn(move || timer.set(now + later));
                }
            });
            in_time(&timer, now + 100_000);
            timer.clear_if_due();
        }
    }
}
