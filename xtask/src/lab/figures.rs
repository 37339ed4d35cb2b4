//! Rates over time, from counters.

use std::time::Duration;

/// How many bytes had come at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) at: Duration,
    pub(super) bytes: u64,
}

/// The time over which a rate is taken: some packets of each link, and less than what is asked about.
const WINDOW: Duration = Duration::from_millis(100);

/// Mbit/s over the window that ends at each sample.
pub(super) fn rates(samples: &[Sample]) -> Vec<(Duration, f64)> {
    let mut first = 0;
    let mut rates = Vec::with_capacity(samples.len());
    for sample in samples {
        while sample.at.saturating_sub(samples[first + 1].at) >= WINDOW {
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

/// When a rate is first reached in a time whose window lies in it.
pub(super) fn first_at(
    rates: &[(Duration, f64)],
    from: Duration,
    to: Duration,
    rate: f64,
) -> Option<Duration> {
    let inside = rates.iter().filter(|(at, _)| (from + WINDOW..to).contains(at));
    inside.into_iter().find(|(_, reached)| *reached >= rate).map(|(at, _)| *at)
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
        let rates = rates(&samples);
        let at = |at: u64| rates.iter().find(|rate| rate.0 == ms(at)).unwrap().1;
        assert!((at(200) - 8.0).abs() < 1e-9 && at(320) == 0.0 && (at(560) - 16.0).abs() < 1e-9);
        assert_eq!(first_at(&rates, ms(300), ms(600), 15.9), Some(ms(500)));
        assert_eq!(first_at(&rates, ms(0), ms(400), 15.9), None);
        assert!((mean(&rates, ms(120), ms(200)) - 8.0).abs() < 1e-9);
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
