//! Rates over time, from counters.

use std::time::Duration;

/// How many bytes had come at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) at: Duration,
    pub(super) bytes: u64,
}

/// Mbit/s over the window that ends at each sample.
pub(super) fn rates(samples: &[Sample], window: Duration) -> Vec<(Duration, f64)> {
    let mut first = 0;
    let mut rates = Vec::with_capacity(samples.len());
    for sample in samples {
        while sample.at.saturating_sub(samples[first + 1].at) >= window {
            first += 1;
        }
        let seconds = sample.at.saturating_sub(samples[first].at).as_secs_f64();
        if seconds > 0.0 {
            let bytes = sample.bytes.saturating_sub(samples[first].bytes);
            rates.push((sample.at, bytes as f64 * 8e-6 / seconds));
        }
    }
    rates
}

/// When a rate is first reached in a time, in which the windows are to lie.
pub(super) fn first_at(
    rates: &[(Duration, f64)],
    window: Duration,
    (from, to): (Duration, Duration),
    rate: f64,
) -> Option<Duration> {
    let inside = rates.iter().filter(|(at, _)| (from + window..to).contains(at));
    inside.into_iter().find(|(_, reached)| *reached >= rate).map(|(at, _)| *at)
}

/// When all had come but so many bytes.
pub(super) fn all_but(samples: &[Sample], rest: u64) -> Option<Duration> {
    let all = samples.last()?.bytes;
    samples.iter().find(|sample| sample.bytes + rest >= all).map(|sample| sample.at)
}

/// The longest time in which nothing came, of those that begin in a time.
pub(super) fn longest_gap(samples: &[Sample], from: Duration, to: Duration) -> Duration {
    let mut since = from;
    let mut longest = Duration::ZERO;
    for pair in samples.windows(2).filter(|pair| (from..to).contains(&pair[0].at)) {
        if pair[1].bytes > pair[0].bytes {
            longest = longest.max(pair[1].at.saturating_sub(since));
            since = pair[1].at;
        }
    }
    longest.max(to.saturating_sub(since))
}

/// The mean of a time.
pub(super) fn mean(rates: &[(Duration, f64)], from: Duration, to: Duration) -> f64 {
    let inside: Vec<f64> =
        rates.iter().filter(|(at, _)| (from..to).contains(at)).map(|rate| rate.1).collect();
    inside.iter().sum::<f64>() / inside.len() as f64
}

/// The middle one, or the mean of the two in the middle.
pub(super) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let (low, high) = (figures.len().saturating_sub(1) / 2, figures.len() / 2);
    match figures.get(high) {
        Some(figure) => f64::midpoint(figures[low], *figure),
        None => f64::NAN,
    }
}

/// Bytes received by all interfaces but loopback, in the kernel's table.
pub(super) fn received(table: &str) -> u64 {
    let nics = table.lines().filter_map(|line| line.split_once(':'));
    nics.filter(|(name, _)| name.trim() != "lo")
        .filter_map(|(_, numbers)| numbers.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_rate_is_that_of_the_window_before() {
        // 1 MB/s for 200 ms, then nothing for 200 ms, then 2 MB/s.
        let bytes = |at: u64| match at {
            0..=200 => at * 1000,
            201..=400 => 200_000,
            _ => 200_000 + (at - 400) * 2000,
        };
        let samples: Vec<Sample> =
            (0..=30).map(|step| Sample { at: ms(step * 20), bytes: bytes(step * 20) }).collect();
        let window = ms(100);
        let rates = rates(&samples, window);
        let at = |at: u64| rates.iter().find(|rate| rate.0 == ms(at)).unwrap().1;
        assert!((at(200) - 8.0).abs() < 1e-9 && at(320) == 0.0 && (at(560) - 16.0).abs() < 1e-9);
        assert_eq!(first_at(&rates, window, (ms(300), ms(600)), 15.9), Some(ms(500)));
        assert_eq!(first_at(&rates, window, (ms(0), ms(400)), 15.9), None);
        assert!((mean(&rates, ms(120), ms(200)) - 8.0).abs() < 1e-9);
    }

    #[test]
    fn gaps_are_as_long_as_nothing_comes() {
        let sample = |(at, bytes)| Sample { at: ms(at), bytes };
        let samples = [(0, 1), (5, 2), (10, 2), (15, 2), (20, 3), (25, 4), (30, 4)].map(sample);
        assert_eq!(longest_gap(&samples, ms(0), ms(30)), ms(15));
        assert_eq!(longest_gap(&samples, ms(20), ms(30)), ms(5));
        assert_eq!(longest_gap(&samples, ms(25), ms(60)), ms(35), "nothing came any more");
    }

    #[test]
    fn all_has_come_before_the_rest() {
        let samples = [(0, 0), (5, 90), (10, 99), (15, 99), (20, 100)];
        let samples = samples.map(|(at, bytes)| Sample { at: ms(at), bytes });
        assert_eq!(
            [0, 1, 10].map(|rest| all_but(&samples, rest)),
            [20, 10, 5].map(|at| Some(ms(at)))
        );
        assert_eq!(all_but(&[], 0), None);
    }

    #[test]
    fn medians() {
        assert!(median(Vec::new()).is_nan());
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0])), (2.0, 2.5));
    }

    #[test]
    fn loopback_does_not_count() {
        let table = "Inter-|   Receive\n face |bytes    packets\n    lo:  7 1 0\n  eth0: 10 1 0\n\
                     eth1:20 1 0\n";
        assert_eq!(received(table), 30);
    }
}
