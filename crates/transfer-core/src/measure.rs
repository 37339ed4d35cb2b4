//! What a rail is measured to do: its recent peak rate and its smallest round trip.

use core::time::Duration;

use crate::Instant;

/// A rate is taken over at least so long, so that completions which come in bursts do not make it
/// too high.
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
    sample_start: Instant,
    sample_bytes: u64,
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
        self.sample_start = now;
        self.sample_bytes = 0;
    }

    /// So many bytes have completed that were posted at `posted_at`.
    pub(crate) fn completed(&mut self, now: Instant, posted_at: Instant, bytes: u64) {
        let took = now.saturating_duration_since(posted_at).as_nanos() as u64;
        self.round_trip.add(now, took, u64::min);
        self.sample_bytes += bytes;
        let elapsed = now.saturating_duration_since(self.sample_start);
        if elapsed >= SAMPLE {
            let rate = u128::from(self.sample_bytes) * 1_000_000_000 / elapsed.as_nanos();
            self.rate.add(now, rate.min(u64::MAX.into()) as u64, u64::max);
            self.begin(now);
        }
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

    #[test]
    fn the_peak_of_the_recent_past_counts() {
        let mut measure = Measure::default();
        assert_eq!((measure.peak_rate(), measure.smallest_round_trip()), (None, None));
        measure.begin(at(100));
        measure.completed(at(101), at(100), 500);
        assert_eq!(measure.peak_rate(), None, "too short a time");
        measure.completed(at(104), at(100), 1500);
        assert_eq!(measure.peak_rate(), Some(500_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(1)));
        // A pause says nothing.
        measure.begin(at(1000));
        measure.completed(at(1002), at(1000), 100);
        assert_eq!(measure.peak_rate(), Some(500_000));
        // The first epoch is the past of the second and forgotten in the third.
        measure.begin(at(6000));
        measure.completed(at(6010), at(6000), 1000);
        assert_eq!(measure.peak_rate(), Some(500_000));
        measure.begin(at(11_000));
        measure.completed(at(11_010), at(11_000), 900);
        assert_eq!(measure.peak_rate(), Some(100_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(10)));
        // After two epochs without any nothing of the past is recent; nor after more.
        let mut best = Best::default();
        best.add(at(0), 9, u64::max);
        best.add(at(9999), 5, u64::max);
        assert_eq!(best.get(u64::max), Some(9));
        best.add(at(19_999), 3, u64::max);
        assert_eq!(best.get(u64::max), Some(3));
        measure.begin(at(90_000));
        measure.completed(at(90_020), at(90_000), 200);
        assert_eq!(measure.peak_rate(), Some(10_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(20)));
    }
}
