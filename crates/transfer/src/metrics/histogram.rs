//! Durations in buckets whose bounds are powers of two.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The bound of the first bucket is 2 to this power, in nanoseconds: 256 ns.
const FIRST: u32 = 8;

/// The last of these has a bound of 2^36 ns, which is a minute. One more has what took longer.
const BOUNDED: usize = 29;

/// How often durations fell into each bucket.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Histogram {
    /// Bucket `n` has those of at most 2^(8+n) ns that are in none before it; the last bucket, the 30th, all longer
    /// ones.
    pub counts: Vec<u64>,
    /// Nanoseconds of all of them together.
    pub sum_ns: u64,
}

impl Histogram {
    /// The bounds of all buckets but the last one, which has none, in nanoseconds.
    pub fn bounds_ns() -> impl Iterator<Item = u64> {
        (0..BOUNDED as u32).map(|index| 1 << (FIRST + index))
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |all, &count| all.saturating_add(count))
    }

    /// A time below which this share of them is, 0 to 1: between the bounds of its bucket, by the share of those that
    /// are in it, so it is wrong by a factor of two at most. `None` of none.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let wanted = self.count() as f64 * share.clamp(0.0, 1.0);
        let mut below = 0.0;
        let mut lower = 0.0;
        for (index, &count) in self.counts.iter().enumerate() {
            // The last one ends at twice what it begins with, as the others do.
            let upper = (1_u64 << (FIRST + (index as u32).min(BOUNDED as u32))) as f64;
            let count = count as f64;
            if count > 0.0 && below + count >= wanted {
                let within = ((wanted - below) / count).clamp(0.0, 1.0);
                return Some(Duration::from_nanos((lower + (upper - lower) * within) as u64));
            }
            (below, lower) = (below + count, upper);
        }
        None
    }
}

/// A histogram that several threads add to.
#[derive(Debug)]
pub(super) struct Buckets {
    counts: [AtomicU64; BOUNDED + 1],
    sum_ns: AtomicU64,
}

impl Default for Buckets {
    fn default() -> Self {
        Self { counts: std::array::from_fn(|_| AtomicU64::new(0)), sum_ns: AtomicU64::new(0) }
    }
}

impl Buckets {
    pub(super) fn add(&self, nanos: u64) {
        self.counts[bucket(nanos)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Adds what is in it to `sum`.
    pub(super) fn add_to(&self, sum: &mut Histogram) {
        sum.counts.resize(BOUNDED + 1, 0);
        for (sum, count) in sum.counts.iter_mut().zip(&self.counts) {
            *sum += count.load(Ordering::Relaxed);
        }
        sum.sum_ns += self.sum_ns.load(Ordering::Relaxed);
    }
}

/// The bucket of a duration.
const fn bucket(nanos: u64) -> usize {
    // Bits of the greatest number that is below it: a bound belongs to the bucket that it ends.
    let bits = 64 - nanos.saturating_sub(1).leading_zeros();
    let index = bits.saturating_sub(FIRST) as usize;
    if index < BOUNDED { index } else { BOUNDED }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(nanos: &[u64]) -> Histogram {
        let buckets = Buckets::default();
        nanos.iter().for_each(|&nanos| buckets.add(nanos));
        let mut sum = Histogram::default();
        buckets.add_to(&mut sum);
        sum
    }

    #[test]
    fn a_duration_is_in_the_first_bucket_whose_bound_it_does_not_pass() {
        for (nanos, expected) in [
            (0, 0),
            (1, 0),
            (256, 0),
            (257, 1),
            (512, 1),
            (513, 2),
            (1 << 36, 28),
            ((1 << 36) + 1, 29),
            (u64::MAX, 29),
        ] {
            assert_eq!(bucket(nanos), expected, "{nanos} ns");
            if let Some(bound) = Histogram::bounds_ns().nth(expected) {
                assert!(nanos <= bound);
            }
        }
        assert_eq!(Histogram::bounds_ns().count(), BOUNDED);
    }

    #[test]
    fn quantiles_lie_in_the_buckets_of_what_was_added() {
        assert_eq!(Histogram::default().quantile(0.5), None);
        assert_eq!(of(&[]).quantile(0.5), None);
        let histogram = of(&[[1000; 98].as_slice(), &[100_000; 2]].concat());
        assert_eq!((histogram.count(), histogram.sum_ns), (100, 298_000));
        let quantile = |share| histogram.quantile(share).unwrap().as_nanos();
        assert!((512..=1024).contains(&quantile(0.0)), "{}", quantile(0.0));
        assert!((512..=1024).contains(&quantile(0.5)), "{}", quantile(0.5));
        assert!((65_536..=131_072).contains(&quantile(0.99)), "{}", quantile(0.99));
        assert!((65_536..=131_072).contains(&quantile(7.0)), "{}", quantile(7.0));
        // What somebody else has written may have any length.
        let foreign = Histogram { counts: vec![1; 100], sum_ns: 0 };
        assert!(foreign.quantile(1.0).is_some());
    }
}
