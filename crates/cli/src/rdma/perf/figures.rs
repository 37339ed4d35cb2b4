//! What is measured, and what is computed of it.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// What the client has measured for one size.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Outcome {
    /// Messages of all queue pairs.
    pub(super) iterations: u64,
    /// From the first posted to the last completed.
    pub(super) seconds: f64,
    /// Messages per second at the fastest; 0 when that was not looked at.
    pub(super) peak_per_s: f64,
    /// For tests of latency.
    pub(super) latency: Option<Latency>,
}

/// Microseconds.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Latency {
    pub(super) min: f64,
    pub(super) max: f64,
    /// The median.
    pub(super) typical: f64,
    pub(super) average: f64,
    pub(super) standard_deviation: f64,
    pub(super) p99: f64,
    pub(super) p999: f64,
}

/// When messages were posted and completed, for the peak.
///
/// perftest keeps a time for each message and compares all pairs of them. Here, neighbours are
/// merged when there are many, so that a long test takes no more memory and time in the end than a
/// short one.
#[derive(Debug)]
pub(super) struct Timeline {
    start: Instant,
    posted: Events,
    completed: Events,
    /// The last completion, which is always kept.
    last: (u64, u64),
}

#[derive(Debug, Default)]
struct Events {
    /// Nanoseconds since the start, and messages so far.
    events: Vec<(u64, u64)>,
    /// Of this many events one is kept.
    stride: u32,
    /// Events since one was kept.
    since: u32,
}

/// Events kept of each kind. The search for the peak looks at each pair.
const EVENTS_MAX: usize = 2048;

impl Timeline {
    pub(super) fn new(start: Instant) -> Self {
        Self { start, posted: Events::new(), completed: Events::new(), last: (0, 0) }
    }

    /// More messages are about to be posted, after `before` others.
    pub(super) fn posting(&mut self, now: Instant, before: u64) {
        self.posted.add(self.nanoseconds(now), before);
    }

    /// So many messages are completed.
    pub(super) fn completed(&mut self, now: Instant, count: u64) {
        self.last = (self.nanoseconds(now), count);
        self.completed.add(self.nanoseconds(now), count);
    }

    /// The most messages per second between a posting and a later completion, as perftest has it.
    pub(super) fn peak_per_s(&self) -> f64 {
        // The whole is a stretch, too.
        let (nanoseconds, count) = self.last;
        let mut peak = count as f64 * 1e9 / nanoseconds.max(1) as f64;
        for &(posted_at, before) in &self.posted.events {
            let later = self.completed.events.partition_point(|&(_, count)| count <= before);
            for &(completed_at, count) in &self.completed.events[later..] {
                let nanoseconds = completed_at.saturating_sub(posted_at).max(1);
                peak = f64::max(peak, (count - before) as f64 * 1e9 / nanoseconds as f64);
            }
        }
        peak
    }

    fn nanoseconds(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_nanos() as u64
    }
}

impl Events {
    fn new() -> Self {
        Self { events: Vec::with_capacity(EVENTS_MAX), stride: 1, since: 0 }
    }

    fn add(&mut self, nanoseconds: u64, count: u64) {
        self.since += 1;
        if self.since < self.stride {
            return;
        }
        self.since = 0;
        if self.events.len() == EVENTS_MAX {
            let mut index = 0;
            self.events.retain(|_| {
                index += 1;
                index % 2 == 0
            });
            self.stride = self.stride.saturating_mul(2);
        }
        self.events.push((nanoseconds, count));
    }
}

/// Times of messages, one after the other.
pub(super) struct Latencies {
    histogram: Histogram<u64>,
    /// In parts of a round trip: perftest calls half of it the latency where both sides send.
    share: f64,
    min: u64,
    max: u64,
    sum: f64,
    sum_of_squares: f64,
}

impl Latencies {
    /// Ten minutes, in nanoseconds: what is longer counts as that for the percentiles.
    const LONGEST: u64 = 600_000_000_000;

    pub(super) fn new(share: f64) -> anyhow::Result<Self> {
        let histogram = Histogram::new_with_bounds(1, Self::LONGEST, 3)?;
        Ok(Self { histogram, share, min: u64::MAX, max: 0, sum: 0.0, sum_of_squares: 0.0 })
    }

    pub(super) fn record(&mut self, round_trip: Duration) {
        let nanoseconds = round_trip.as_nanos() as u64;
        self.histogram.saturating_record(nanoseconds);
        self.min = self.min.min(nanoseconds);
        self.max = self.max.max(nanoseconds);
        self.sum += nanoseconds as f64;
        self.sum_of_squares += nanoseconds as f64 * nanoseconds as f64;
    }

    pub(super) fn summarize(&self) -> Latency {
        let microseconds = |nanoseconds: f64| nanoseconds * self.share / 1e3;
        let count = self.histogram.len().max(1) as f64;
        let average = self.sum / count;
        // The difference of two large numbers may come out below 0.
        let variance = (self.sum_of_squares / count - average * average).max(0.0);
        let quantile = |quantile| self.histogram.value_at_quantile(quantile) as f64;
        let min = if self.histogram.is_empty() { 0 } else { self.min };
        Latency {
            min: microseconds(min as f64),
            max: microseconds(self.max as f64),
            typical: microseconds(quantile(0.5)),
            average: microseconds(average),
            standard_deviation: microseconds(variance.sqrt()),
            p99: microseconds(quantile(0.99)),
            p999: microseconds(quantile(0.999)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_peak_is_the_fastest_stretch() {
        let start = Instant::now();
        let mut timeline = Timeline::new(start);
        // 10 messages in 10 ms, then 10 in 1 ms, then 10 in 10 ms again.
        for (at, before) in [(0, 0), (10, 10), (11, 20)] {
            timeline.posting(start + MS * at, before);
        }
        for (at, count) in [(10, 10), (11, 20), (21, 30)] {
            timeline.completed(start + MS * at, count);
        }
        assert!((timeline.peak_per_s() - 10_000.0).abs() < 1.0, "{}", timeline.peak_per_s());
    }

    #[test]
    fn long_tests_keep_few_events_and_the_same_peak() {
        let start = Instant::now();
        let mut timeline = Timeline::new(start);
        for message in 0..1_000_000_u32 {
            timeline.posting(start + Duration::from_micros(1) * message, message.into());
            let after = u64::from(message) + 1;
            timeline.completed(start + Duration::from_micros(1) * (message + 1), after);
        }
        assert!(timeline.posted.events.len() <= EVENTS_MAX);
        assert!(timeline.completed.events.len() <= EVENTS_MAX);
        let peak = timeline.peak_per_s();
        assert!((0.99e6..1.01e6).contains(&peak), "{peak}");
    }

    #[test]
    fn the_peak_is_never_below_the_average() {
        let start = Instant::now();
        let mut timeline = Timeline::new(start);
        // A fast start, which merging forgets, and then one message in each millisecond.
        timeline.posting(start, 0);
        timeline.completed(start + MS, 1_000_000);
        for message in 0..5000_u32 {
            let before = 1_000_000 + u64::from(message);
            timeline.posting(start + MS * (message + 1), before);
            timeline.completed(start + MS * (message + 2), before + 1);
        }
        let average = 1_005_000.0 / 5.001;
        assert!(timeline.peak_per_s() >= average, "{} {average}", timeline.peak_per_s());
    }

    #[test]
    fn nothing_measured_is_no_division_by_zero() {
        let none = Timeline::new(Instant::now()).peak_per_s();
        assert!(none.abs() < f64::EPSILON);
        let latency = Latencies::new(1.0).unwrap().summarize();
        assert!(latency.average.abs() < f64::EPSILON && latency.min.abs() < f64::EPSILON);
    }

    #[test]
    fn latencies_in_the_columns_of_perftest() {
        let mut latencies = Latencies::new(0.5).unwrap();
        for milliseconds in 1..=1000 {
            latencies.record(MS * milliseconds);
        }
        let Latency { min, max, typical, average, standard_deviation, p99, p999 } =
            latencies.summarize();
        let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 2e-3;
        assert!(near(min, 500.0) && near(max, 500_000.0), "{min} {max}");
        assert!(near(typical, 250_000.0) && near(average, 250_250.0), "{typical} {average}");
        assert!(near(p99, 495_000.0) && near(p999, 499_500.0), "{p99} {p999}");
        // Of the numbers from 1 to n: sqrt((n^2 - 1) / 12).
        assert!(near(standard_deviation, 144_337.0), "{standard_deviation}");
    }
}
