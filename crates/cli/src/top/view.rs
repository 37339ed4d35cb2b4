//! Rates and latencies of one interval, out of what a process has said at its ends.

use std::time::Duration;

use millstream_transfer::{Histogram, RailMetrics, RailStatus, TransportMetrics};
use serde::Serialize;

use super::client::Answer;

/// All processes.
#[derive(Debug, Serialize)]
pub(super) struct View {
    pub(super) processes: Vec<Process>,
}

/// A process.
#[derive(Debug, Default, Serialize)]
pub(super) struct Process {
    /// Where it was asked.
    pub(super) address: String,
    /// Why it has not answered, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    /// The name of its segment.
    pub(super) segment: String,
    pub(super) process: u32,
    pub(super) uptime_s: f64,
    pub(super) open_segments: u64,
    pub(super) registered_bytes: u64,
    pub(super) transports: Vec<Transport>,
    pub(super) rails: Vec<Rail>,
    /// It has said nothing yet.
    #[serde(skip)]
    pub(super) waiting: bool,
}

/// What a transport has done in the interval; requests that have not completed are counted from the start.
#[derive(Debug, Serialize)]
pub(super) struct Transport {
    pub(super) transport: String,
    pub(super) requests_per_s: f64,
    pub(super) read_bytes_per_s: f64,
    pub(super) written_bytes_per_s: f64,
    pub(super) in_flight: u64,
    pub(super) failed: u64,
    pub(super) canceled: u64,
    pub(super) timeout: u64,
    pub(super) connections_served: u64,
    /// Of requests that completed in the interval; nothing of none.
    pub(super) latency_us: Option<Latency>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Latency {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

/// What was done on a rail in the interval; failures are counted from the start.
#[derive(Debug, Serialize)]
pub(super) struct Rail {
    pub(super) transport: String,
    pub(super) peer: String,
    pub(super) local_nic: String,
    pub(super) peer_nic: String,
    pub(super) state: RailStatus,
    pub(super) reason: Option<String>,
    pub(super) read_bytes_per_s: f64,
    pub(super) written_bytes_per_s: f64,
    pub(super) slices_in_flight: u64,
    pub(super) bytes_in_flight: u64,
    pub(super) oldest_age_us: Option<f64>,
    pub(super) smallest_round_trip_us: Option<f64>,
    pub(super) failed_slices: u64,
    pub(super) failovers: u64,
    pub(super) connections: u64,
    pub(super) failures: u64,
    pub(super) fences: u64,
}

impl Process {
    /// One that has said nothing yet.
    pub(super) fn asked(address: &str) -> Self {
        Self { address: address.to_owned(), waiting: true, ..Self::default() }
    }

    /// What it did between two answers; rates are 0 with one.
    pub(super) fn new(
        address: &str,
        before: Option<&Answer>,
        after: Result<&Answer, &String>,
    ) -> Self {
        let address = address.to_owned();
        let after = match after {
            Ok(after) => after,
            Err(error) => {
                return Self { address, error: Some(error.clone()), ..Self::default() };
            }
        };
        let metrics = &after.status.metrics;
        // Another start of it has begun anew.
        let before = before.filter(|it| it.status.metrics.incarnation == metrics.incarnation);
        let elapsed = before.map_or(Duration::ZERO, |it| after.at.duration_since(it.at));
        let transports = metrics.transports.iter().map(|now| {
            let known = before.map(|it| &it.status.metrics.transports);
            let is_it = |it: &&TransportMetrics| it.transport == now.transport;
            Transport::new(known.and_then(|all| all.iter().find(is_it)), now, elapsed)
        });
        let rails = metrics.rails.iter().map(|now| {
            let known = before.map(|it| &it.status.metrics.rails);
            let is_it = |it: &&RailMetrics| key(it) == key(now);
            Rail::new(known.and_then(|all| all.iter().find(is_it)), now, elapsed)
        });
        Self {
            address,
            error: None,
            segment: metrics.segment.clone(),
            process: after.status.process,
            uptime_s: metrics.uptime_s,
            open_segments: metrics.open_segments,
            registered_bytes: metrics.registered_bytes,
            transports: transports.collect(),
            rails: rails.collect(),
            waiting: false,
        }
    }
}

/// What a rail is known by.
fn key(rail: &RailMetrics) -> [&str; 4] {
    [&rail.transport, &rail.peer, &rail.local_nic, &rail.peer_nic]
}

/// How much a number has risen in a second. One that has fallen is another one's.
fn rate(before: Option<u64>, now: u64, elapsed: Duration) -> f64 {
    match before {
        Some(before) if !elapsed.is_zero() => {
            now.saturating_sub(before) as f64 / elapsed.as_secs_f64()
        }
        _ => 0.0,
    }
}

impl Transport {
    fn new(before: Option<&TransportMetrics>, now: &TransportMetrics, elapsed: Duration) -> Self {
        let of =
            |number: fn(&TransportMetrics) -> u64| rate(before.map(number), number(now), elapsed);
        let none = Histogram::default();
        let earlier = before.map_or(&none, |before| &before.stages.all);
        let between = difference(earlier, &now.stages.all);
        let us = |share| between.quantile(share).map(|time| time.as_secs_f64() * 1e6);
        Self {
            transport: now.transport.clone(),
            requests_per_s: of(|it| it.requests.completed),
            read_bytes_per_s: of(|it| it.read_bytes),
            written_bytes_per_s: of(|it| it.written_bytes),
            in_flight: now.requests.in_flight,
            failed: now.requests.failed,
            canceled: now.requests.canceled,
            timeout: now.requests.timeout,
            connections_served: now.connections_served,
            latency_us: us(0.5).zip(us(0.99)).map(|(p50, p99)| Latency { p50, p99 }),
        }
    }
}

impl Rail {
    fn new(before: Option<&RailMetrics>, now: &RailMetrics, elapsed: Duration) -> Self {
        let of = |number: fn(&RailMetrics) -> u64| rate(before.map(number), number(now), elapsed);
        let us = |time: Option<f64>| time.map(|seconds| seconds * 1e6);
        Self {
            transport: now.transport.clone(),
            peer: now.peer.clone(),
            local_nic: now.local_nic.clone(),
            peer_nic: now.peer_nic.clone(),
            state: now.state,
            reason: now.reason.clone(),
            read_bytes_per_s: of(|it| it.read_bytes),
            written_bytes_per_s: of(|it| it.written_bytes),
            slices_in_flight: now.slices_in_flight,
            bytes_in_flight: now.bytes_in_flight,
            oldest_age_us: us(now.oldest_age_s),
            smallest_round_trip_us: us(now.smallest_round_trip_s),
            failed_slices: now.failed_slices,
            failovers: now.moved_slices,
            connections: now.connections,
            failures: now.failures,
            fences: now.fences,
        }
    }
}

/// What has come to a histogram.
fn difference(before: &Histogram, now: &Histogram) -> Histogram {
    let mut earlier = before.counts.iter();
    let more = |&count: &u64| count.saturating_sub(*earlier.next().unwrap_or(&0));
    Histogram {
        counts: now.counts.iter().map(more).collect(),
        sum_ns: now.sum_ns.saturating_sub(before.sum_ns),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Instant;

    use millstream_transfer::{Metrics, RequestCounts, Stages};

    use super::*;
    use crate::status_pages::Status;

    /// An answer `second`s after the first, with so many requests and bytes.
    pub(in crate::top) fn answer(start: Instant, second: u64, count: u64) -> Answer {
        let mut counts = vec![0; 30];
        counts[4] = count;
        let all = Histogram { counts, sum_ns: 0 };
        let transport = TransportMetrics {
            transport: "rdma".to_owned(),
            requests: RequestCounts { completed: count, ..RequestCounts::default() },
            written_bytes: 1000 * count,
            stages: Stages { all, ..Stages::default() },
            ..TransportMetrics::default()
        };
        let rail = |nic: &str, factor: u64| RailMetrics {
            transport: "rdma".to_owned(),
            peer: "b:1\u{1b}[2J".to_owned(),
            local_nic: nic.to_owned(),
            read_bytes: factor * count,
            state: RailStatus::Up,
            ..RailMetrics::default()
        };
        let metrics = Metrics {
            segment: "a:1".to_owned(),
            transports: vec![transport],
            // Their order may change.
            rails: match second % 2 {
                0 => vec![rail("x", 10), rail("y", 20)],
                _ => vec![rail("y", 20), rail("x", 10)],
            },
            ..Metrics::default()
        };
        let status = Status { version: String::new(), process: 7, metrics };
        Answer { at: start + Duration::from_secs(second), status }
    }

    #[test]
    fn rates_are_of_the_interval_and_of_the_same_rail() {
        let start = Instant::now();
        let (before, after) = (answer(start, 1, 100), answer(start, 3, 300));
        let process = Process::new("h:1", Some(&before), Ok(&after));
        let transport = &process.transports[0];
        assert_eq!((transport.requests_per_s, transport.written_bytes_per_s), (100.0, 100_000.0));
        let latency = transport.latency_us.unwrap();
        assert!((2.048..=4.096).contains(&latency.p50), "{latency:?}");
        let rates: Vec<_> =
            process.rails.iter().map(|it| (&*it.local_nic, it.read_bytes_per_s)).collect();
        assert_eq!(rates, [("y", 2000.0), ("x", 1000.0)]);
    }

    #[test]
    fn without_two_answers_of_one_start_nothing_is_a_rate() {
        let start = Instant::now();
        let after = answer(start, 3, 300);
        let mut other = answer(start, 1, 100);
        other.status.metrics.incarnation = 1;
        for before in [None, Some(&other)] {
            let process = Process::new("h:1", before, Ok(&after));
            assert_eq!(process.transports[0].requests_per_s, 0.0);
            assert!(process.rails.iter().all(|rail| rail.read_bytes_per_s == 0.0));
        }
        let silent = Process::new("h:1", None, Err(&"h:1: refused".to_owned()));
        assert_eq!(silent.error.as_deref(), Some("h:1: refused"));
    }
}
