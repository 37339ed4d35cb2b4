//! What a rail is measured to do: its recent peak rate and its smallest round trip.

use core::time::Duration;

use crate::Instant;

/// A rate is taken over at least so long: a link may let some packets pass at once that has sent nothing
/// for a while, and a rail that may hold too much takes what others would have carried.
const SAMPLE: Duration = Duration::from_millis(2);
/// The past counts for between one and two of these.
const MEMORY: Duration = Duration::from_secs(5);

/// The best of the recent past: of the present epoch and of the one before.
#[derive(Debug, Default)]
struct Best {
    epoch_start: Instant,
    present: Option<u64>,
    past: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Measure {
    /// Bytes per second.
    rate: Best,
    /// Nanoseconds.
    round_trip: Best,
    present: Mark,
}

/// What had completed on a rail at a time: a slice keeps that of when it was posted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Mark {
    /// Bytes in all.
    bytes: u64,
    /// When the last of them did, or something was posted when nothing was in flight.
    at: Instant,
    /// When that was posted.
    posted_at: Instant,
}

impl Best {
    fn add(&mut self, now: Instant, value: u64, better: fn(u64, u64) -> u64) {
        let age = now.saturating_duration_since(self.epoch_start);
        if age >= MEMORY {
            self.past = self.present.take().filter(|_| age < 2 * MEMORY);
            self.epoch_start = now;
        }
        self.present = Some(self.present.map_or(value, |best| better(best, value)));
    }

    fn get(&self, better: fn(u64, u64) -> u64) -> Option<u64> {
        self.past.into_iter().chain(self.present).reduce(better)
    }
}

impl Measure {
    /// Something is posted on a rail that had nothing in flight: the time before says nothing.
    pub(crate) const fn begin(&mut self, now: Instant) {
        (self.present.at, self.present.posted_at) = (now, now);
    }

    /// For a slice that is posted.
    pub(crate) const fn mark(&self) -> Mark {
        self.present
    }

    /// A slice of so many bytes has completed that was posted at `posted_at`.
    ///
    /// The rate is that of all that has completed since the last completion before it was posted, over that
    /// time or over that in which it was posted, whatever is longer. So what is told in one go, after a thread
    /// was held up, is as slow as it was (Cheng et al., "Delivery Rate Estimation",
    /// draft-cheng-iccrg-delivery-rate-estimation).
    pub(crate) fn completed(&mut self, now: Instant, posted_at: Instant, posted: Mark, bytes: u64) {
        let took = now.saturating_duration_since(posted_at).as_nanos() as u64;
        self.round_trip.add(now, took, u64::min);
        self.present = Mark { bytes: self.present.bytes + bytes, at: now, posted_at };
        let completing = now.saturating_duration_since(posted.at);
        let posting = posted_at.saturating_duration_since(posted.posted_at);
        let elapsed = completing.max(posting);
        if !elapsed.is_zero() {
            let done = u128::from(self.present.bytes - posted.bytes) * 1_000_000_000;
            let rate = done / elapsed.max(SAMPLE).as_nanos();
            self.rate.add(now, rate.min(u64::MAX.into()) as u64, u64::max);
        }
    }

    /// What was measured says nothing any more.
    pub(crate) fn forget(&mut self) {
        (self.rate, self.round_trip) = (Best::default(), Best::default());
    }

    /// Bytes per second; `None` before anything was measured.
    pub(crate) fn peak_rate(&self) -> Option<u64> {
        self.rate.get(u64::max)
    }

    pub(crate) fn smallest_round_trip(&self) -> Option<Duration> {
        self.round_trip.get(u64::min).map(Duration::from_nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    /// A slice that was posted when nothing else was in flight.
    fn alone(measure: &mut Measure, posted: u64, now: u64, bytes: u64) {
        measure.begin(at(posted));
        let mark = measure.mark();
        measure.completed(at(now), at(posted), mark, bytes);
    }

    #[test]
    fn the_peak_of_the_recent_past_counts() {
        let mut measure = Measure::default();
        assert_eq!((measure.peak_rate(), measure.smallest_round_trip()), (None, None));
        alone(&mut measure, 100, 104, 2000);
        assert_eq!(measure.peak_rate(), Some(500_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(4)));
        alone(&mut measure, 1000, 1002, 100);
        assert_eq!(measure.peak_rate(), Some(500_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(2)));
        // The first epoch is the past of the second and forgotten in the third.
        alone(&mut measure, 6000, 6010, 1000);
        assert_eq!(measure.peak_rate(), Some(500_000));
        alone(&mut measure, 11_000, 11_010, 900);
        assert_eq!(measure.peak_rate(), Some(100_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(10)));
        // After two epochs without any nothing of the past is recent; nor after more.
        let mut best = Best::default();
        best.add(at(0), 9, u64::max);
        best.add(at(9999), 5, u64::max);
        assert_eq!(best.get(u64::max), Some(9));
        best.add(at(19_999), 3, u64::max);
        assert_eq!(best.get(u64::max), Some(3));
        alone(&mut measure, 90_000, 90_020, 200);
        assert_eq!(measure.peak_rate(), Some(10_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(20)));
        measure.forget();
        assert_eq!((measure.peak_rate(), measure.smallest_round_trip()), (None, None));
        alone(&mut measure, 90_100, 90_102, 100);
        assert_eq!(measure.peak_rate(), Some(50_000));
    }

    #[test]
    fn what_is_in_flight_together_is_measured_together() {
        let mut measure = Measure::default();
        measure.begin(at(0));
        // Two at once, and each that completes is followed by another.
        let mut marks = vec![(0, measure.mark()), (0, measure.mark())];
        for step in 1..=10 {
            let (posted, mark) = marks.remove(0);
            measure.completed(at(step * 4), at(posted), mark, 1000);
            marks.push((step * 4, measure.mark()));
        }
        assert_eq!(measure.peak_rate(), Some(250_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(4)));
    }

    /// As after a bucket of tokens was filled.
    #[test]
    fn a_slice_that_passes_at_once_is_no_rate() {
        let mut measure = Measure::default();
        alone(&mut measure, 100, 101, 64_000);
        assert_eq!(measure.peak_rate(), Some(32_000_000));
    }

    /// What is told after a thread was held up, while more is posted.
    #[test]
    fn a_burst_is_no_rate() {
        let mut measure = Measure::default();
        measure.begin(at(0));
        let mut marks: Vec<(u64, Mark)> = (0..8).map(|_| (0, measure.mark())).collect();
        // The first eight are told together, and each is followed by another, which takes 1 ms.
        for now in (0..30).map(|step: u64| 200 + step.saturating_sub(7)) {
            let (posted, mark) = marks.remove(0);
            measure.completed(at(now), at(posted), mark, 1000);
            marks.push((now, measure.mark()));
        }
        assert_eq!(measure.peak_rate(), Some(1_000_000), "a slice each millisecond");
    }
}
