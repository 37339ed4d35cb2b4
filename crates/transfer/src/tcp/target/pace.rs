//! How slow an initiator may be.

use std::io;
use std::time::{Duration, Instant};

/// For how long an initiator may take over a header, and over data in addition to what the least rate gives it.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes a second that an initiator is to send and take at least, once it has begun.
const MIN_RATE: u64 = 64 << 10;

/// So many bytes are to come, or go, within the time that the least rate gives them: who was fast cannot be silent
/// for long afterwards.
const STRETCH: u64 = 1 << 20;

/// By when a stretch of data is to have come, or gone.
#[derive(Debug)]
pub(super) struct Pace {
    /// None until something was waited for.
    until: Option<Instant>,
    /// Of this stretch, and behind it.
    left: u64,
    behind: u64,
}

impl Pace {
    /// For so many bytes from now on.
    pub(super) fn new(length: u64) -> Self {
        Self::begin(Instant::now(), length)
    }

    /// For so many bytes, from the first [`wait`](Self::wait) on: what is done at once takes no look at a clock.
    pub(super) fn later(length: u64) -> Self {
        let left = length.min(STRETCH);
        Self { until: None, left, behind: length - left }
    }

    /// For so many bytes from this moment on.
    pub(super) fn begin(now: Instant, length: u64) -> Self {
        let mut pace = Self::later(length);
        pace.until = Some(pace.end(now));
        pace
    }

    fn end(&self, now: Instant) -> Instant {
        now + PATIENCE + Duration::from_millis(self.left * 1000 / MIN_RATE)
    }

    /// Something is to be waited for.
    pub(super) fn wait(&mut self) {
        if self.until.is_none() {
            self.until = Some(self.end(Instant::now()));
        }
    }

    /// So many bytes more have.
    pub(super) fn moved(&mut self, count: usize) {
        self.moved_at(Instant::now, count as u64);
    }

    fn moved_at(&mut self, now: impl FnOnce() -> Instant, count: u64) {
        match self.left.checked_sub(count) {
            Some(left) if left > 0 || self.behind == 0 => self.left = left,
            _ => *self = Self::begin(now(), (self.left + self.behind).saturating_sub(count)),
        }
    }

    pub(super) fn check(&self) -> io::Result<()> {
        self.check_at(Instant::now())
    }

    fn check_at(&self, now: Instant) -> io::Result<()> {
        let is_over = self.until.is_some_and(|until| now >= until);
        if is_over { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For how many seconds somebody keeps his place who moves `count` bytes every `pause` seconds.
    fn lasts(length: u64, count: u64, pause: u64) -> u64 {
        let start = Instant::now();
        let mut pace = Pace::begin(start, length);
        let mut left = length;
        for seconds in 0.. {
            let now = start + Duration::from_secs(seconds);
            if left == 0 || pace.check_at(now).is_err() {
                return seconds;
            }
            if seconds > 0 && seconds % pause == 0 {
                let moves = count.min(left);
                left -= moves;
                pace.moved_at(|| now, moves);
            }
        }
        unreachable!()
    }

    #[test]
    fn a_byte_now_and_then_keeps_no_place() {
        for (length, count, pause, expected) in [
            // Header or short data: ten seconds, whatever comes.
            (48, 1, 1, 10),
            (48, 1, 9, 10),
            (4096, 1, 1, 11),
            // A message, and a request of the original without end.
            (1 << 20, 1, 1, 26),
            (u64::MAX, 1, 1, 26),
            (u64::MAX, 1024, 1, 26),
            // Who keeps to the rate comes to the end.
            (4 << 20, 64 << 10, 1, 65),
            (1 << 20, 64 << 10, 1, 17),
        ] {
            assert_eq!(lasts(length, count, pause), expected, "{length} {count} {pause}");
        }
    }

    #[test]
    fn the_time_of_what_is_done_later_begins_with_the_first_wait() {
        let mut pace = Pace::later(48);
        let late = Instant::now() + 2 * PATIENCE;
        assert!(pace.check_at(late).is_ok());
        pace.moved(8);
        assert!(pace.check_at(late).is_ok());
        pace.wait();
        assert!(pace.check().is_ok() && pace.check_at(late).is_err());
        // It does so once.
        let until = pace.until;
        pace.wait();
        assert_eq!(pace.until, until);
    }

    #[test]
    fn who_was_fast_has_not_earned_a_rest() {
        let start = Instant::now();
        let mut pace = Pace::begin(start, 1 << 40);
        pace.moved_at(|| start, 1 << 39);
        assert!(pace.check_at(start + Duration::from_secs(25)).is_ok());
        assert!(pace.check_at(start + Duration::from_secs(26)).is_err());
    }
}
