//! What engines say that they have done, as numbers and as text for Prometheus.

mod common;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use common::node::{self, Node};
use common::{LONG, address, engine, private, request, shared};
use millstream_transfer::{
    Batch, Histogram, Metric, MetricKind, Metrics, Opcode, RailMetrics, RailStatus, RequestCounts,
    SubmitOptions, TcpConfig, TransferEngine, TransferRequest, TransferState, TransportMetrics,
};

/// The processes that the other tests start. As a test of its own, nothing.
#[test]
fn a_node() {
    node::run();
}

const BLOCK: u64 = 100_000;
/// In slices of 64 KiB with a rest that is no fragment.
const SLICES: u64 = 2;

/// An engine with one transport besides `local`.
fn with(transport: &str) -> TransferEngine {
    match transport {
        "rdma" => engine(1),
        other => {
            let engine = TransferEngine::new(common::config(address())).unwrap();
            match other {
                "shm" => engine.install_shm().unwrap(),
                "tcp" => engine.install_tcp(TcpConfig::default()).unwrap(),
                _ => {}
            }
            engine
        }
    }
}

fn of<'a>(metrics: &'a Metrics, transport: &str) -> &'a TransportMetrics {
    metrics.transports.iter().find(|it| it.transport == transport).unwrap()
}

fn rails<'a>(metrics: &'a Metrics, transport: &str) -> Vec<&'a RailMetrics> {
    metrics.rails.iter().filter(|rail| rail.transport == transport).collect()
}

#[test]
fn every_transport_counts_its_requests_and_bytes() {
    for transport in ["local", "shm", "rdma", "tcp"] {
        let (target, initiator) = (with(transport), with(transport));
        let target = if transport == "local" { &initiator } else { &target };
        let remote = shared(target, 10 * BLOCK as usize);
        let local = private(&initiator, 10 * BLOCK as usize);
        let segment = initiator.open_segment(target.name()).unwrap();
        let before = initiator.metrics();
        assert_eq!(of(&before, transport).requests, RequestCounts::default(), "{transport}");
        let opcode = |index| if index < 7 { Opcode::Write } else { Opcode::Read };
        let requests: Vec<_> = (0..10)
            .map(|index| {
                let at = index * BLOCK;
                request(opcode(index), (&local, at), &segment, at, BLOCK)
            })
            .collect();
        // One submission in 16 is timed where who submits copies.
        for _ in 0..16 {
            assert_eq!(initiator.submit_and_wait(&requests, LONG).unwrap(), 10 * BLOCK);
        }
        let metrics = initiator.metrics();
        let TransportMetrics { requests, read_bytes, written_bytes, stages, .. } =
            of(&metrics, transport).clone();
        let expected = RequestCounts { submitted: 160, completed: 160, ..RequestCounts::default() };
        assert_eq!(requests, expected, "{transport}");
        assert_eq!((read_bytes, written_bytes), (48 * BLOCK, 112 * BLOCK), "{transport}");
        // A stage is as often in its histogram as another, and the stages are all of the time.
        let timed = stages.all.count();
        assert!((1..=16).contains(&timed), "{transport}: {timed} were timed");
        let parts = [&stages.queued, &stages.transferring, &stages.completing];
        assert!(parts.iter().all(|part| part.count() == timed), "{transport}: {stages:?}");
        let sum: u64 = parts.iter().map(|part| part.sum_ns).sum();
        assert_eq!(sum, stages.all.sum_ns, "{transport}");
        assert!(stages.all.quantile(0.5).unwrap() <= LONG);

        let rails = rails(&metrics, transport);
        assert_eq!(rails.len(), 1, "{transport}: {rails:?}");
        let rail = rails[0];
        assert_eq!(rail.state, RailStatus::Up, "{transport}: {rail:?}");
        assert_eq!(rail.peer, target.name(), "{transport}");
        let bytes = (rail.read_bytes, rail.written_bytes, rail.posted_bytes);
        assert_eq!(bytes, (48 * BLOCK, 112 * BLOCK, 160 * BLOCK), "{transport}: {rail:?}");
        assert_eq!((rail.slices_in_flight, rail.bytes_in_flight), (0, 0), "{transport}");
        assert_eq!((rail.failed_slices, rail.posted_slices), (0, rail.completed_slices));
        if transport == "rdma" {
            assert_eq!(rail.completed_slices, 160 * SLICES, "{transport}: {rail:?}");
        }
        if transport == "rdma" {
            assert_eq!((rail.connections, rail.failures, rail.fences), (1, 0, 0));
            assert!(rail.peak_rate_bytes_per_s.is_some() && rail.smallest_round_trip_s.is_some());
            assert!(!rail.local_nic.is_empty() && !rail.peer_nic.is_empty());
            let sent = metrics.devices[0].payload_bytes_sent;
            assert!(sent >= 112 * BLOCK || sent == 0, "a device of the system may not say");
        }
        let served = of(&target.metrics(), transport).connections_served;
        assert_eq!(served > 0, ["rdma", "tcp"].contains(&transport), "{transport}: {served}");
        assert_eq!(
            (metrics.registrations, metrics.registered_bytes > 0),
            (before.registrations, true)
        );
        drop(remote);
    }
}

#[test]
fn what_did_not_complete_is_counted_by_how_it_ended() {
    let length = 64 << 20;
    let (mut target, initiator) = (Node::start(1, length as usize), engine(1));
    let local = private(&initiator, length as usize);
    let segment = initiator.open_segment(&target.name).unwrap();
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, length);
    let submit = |count, options: &SubmitOptions| {
        let batch = initiator.allocate_batch(count).unwrap();
        initiator.submit_with(&batch, &vec![whole; count], options).unwrap();
        batch
    };
    let ends = |batch: &Batch| {
        assert!(initiator.wait(batch, LONG));
        let statuses = initiator.statuses(batch);
        statuses.iter().map(|status| status.state).collect::<Vec<_>>()
    };
    // Nothing can be connected while its process is stopped.
    target.signal("STOP");
    let batch = submit(1, &SubmitOptions::default());
    assert_eq!(of(&initiator.metrics(), "rdma").requests.in_flight, 1);
    initiator.cancel(&batch, 0).unwrap();
    assert_eq!(ends(&batch), [TransferState::Canceled]);
    // With TENT one that has passed would be refused.
    let deadline = Some(Instant::now() + Duration::from_millis(500));
    let soon = SubmitOptions { deadline, ..SubmitOptions::default() };
    assert_eq!(ends(&submit(1, &soon)), [TransferState::Timeout]);
    target.signal("CONT");
    let small = [TransferRequest { length: 1, ..whole }];
    assert_eq!(initiator.submit_and_wait(&small, LONG).unwrap(), 1);
    // Its process goes away in the middle. Soft devices stop with it; those of the system go on, so it is much.
    target.signal("STOP");
    let posted = || rails(&initiator.metrics(), "rdma")[0].posted_slices;
    let before = posted();
    let batch = submit(32, &SubmitOptions::default());
    let start = Instant::now();
    while posted() == before {
        assert!(start.elapsed() < LONG);
        std::thread::yield_now();
    }
    target.kill();
    let states = ends(&batch);
    let count = |state| states.iter().filter(|&&it| it == state).count() as u64;
    let (completed, failed) = (count(TransferState::Completed), count(TransferState::Failed));
    assert!(failed > 0 && completed + failed == 32, "{states:?}");
    let metrics = initiator.metrics();
    let found = of(&metrics, "rdma").requests;
    let expected = RequestCounts {
        submitted: 35,
        completed: completed + 1,
        failed,
        canceled: 1,
        timeout: 1,
        moved: 0,
        in_flight: 0,
    };
    assert_eq!(found, expected);
    let timed = of(&metrics, "rdma").stages.all.count();
    assert!(timed <= completed + 1, "what failed says nothing of stages: {timed}");
    let rail = rails(&metrics, "rdma")[0];
    assert!(rail.state != RailStatus::Up && rail.failed_slices > 0, "{rail:?}");
    assert!(rail.reason.as_ref().is_some_and(|reason| !reason.is_empty()), "{rail:?}");
}

#[test]
fn rails_end_with_the_last_segment_that_leads_to_their_peer() {
    let (target, initiator) = (engine(1), engine(1));
    let (_remote, local) = (shared(&target, 1), private(&initiator, 1));
    for _ in 0..2 {
        let segment = initiator.open_segment(target.name()).unwrap();
        let byte = [request(Opcode::Write, (&local, 0), &segment, 0, 1)];
        assert_eq!(initiator.submit_and_wait(&byte, LONG).unwrap(), 1);
        assert_eq!(rails(&initiator.metrics(), "rdma").len(), 1);
        initiator.close_segment(segment.id()).unwrap();
        // A thread may have it for a moment.
        let start = Instant::now();
        while !rails(&initiator.metrics(), "rdma").is_empty() {
            assert!(start.elapsed() < LONG);
            std::thread::yield_now();
        }
    }
}

#[test]
fn json_has_all_of_it() {
    let engine = engine(1);
    let metrics = engine.metrics();
    let text = serde_json::to_string(&metrics).unwrap();
    let read: Metrics = serde_json::from_str(&text).unwrap();
    // Who reads JSON may be off by the last bit of a number.
    let times = |of: &Metrics| [of.started_at_s, of.uptime_s];
    for (read, written) in times(&read).into_iter().zip(times(&metrics)) {
        assert!((read - written).abs() <= written * f64::EPSILON, "{read} {written}");
    }
    let Metrics { started_at_s, uptime_s, .. } = metrics;
    assert_eq!(Metrics { started_at_s, uptime_s, ..read }, metrics);
    assert_eq!(metrics.segment, engine.name());
    assert!(text.contains(r#""transport":"rdma""#), "{text}");
}

/// A sample: the name of its metric with its suffix, its labels, its value.
type Sample = (String, BTreeMap<String, String>, f64);

/// Reads the text format as Prometheus does: strictly.
fn parse(text: &str) -> (HashMap<String, String>, Vec<Sample>) {
    let (mut types, mut samples) = (HashMap::new(), Vec::new());
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            assert!(rest.split_once(' ').is_some_and(|(_, help)| !help.is_empty()), "{line}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{line}: twice");
        } else {
            samples.push(sample(line));
        }
    }
    (types, samples)
}

fn sample(line: &str) -> Sample {
    let end = line.find(['{', ' ']).unwrap();
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    while let Some(after) = rest.strip_prefix(['{', ',']) {
        let (label, after) = after.split_once("=\"").unwrap();
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().unwrap() {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next().unwrap().1 {
                    'n' => '\n',
                    c @ ('\\' | '"') => c,
                    other => panic!("{line}: \\{other}"),
                }),
                (_, c) => value.push(c),
            }
        };
        assert!(labels.insert(label.to_owned(), value).is_none(), "{line}");
        rest = &after[end + 1..];
    }
    let value = rest.strip_prefix('}').unwrap_or(rest).strip_prefix(' ').unwrap();
    (name.to_owned(), labels, value.parse().unwrap())
}

/// The metric that a sample is of.
fn metric_of(name: &str) -> &'static Metric {
    let is_it = |metric: &&Metric| match name.strip_prefix(metric.name) {
        Some("") => metric.kind != MetricKind::Histogram,
        Some("_bucket" | "_sum" | "_count") => metric.kind == MetricKind::Histogram,
        _ => false,
    };
    Metric::ALL.iter().find(is_it).unwrap_or_else(|| panic!("no metric has the sample {name}"))
}

/// Metrics in which every number that there can be is there.
fn full() -> Metrics {
    let histogram = Histogram { counts: (1..=30).collect(), sum_ns: 5_000_000_000 };
    let stages = millstream_transfer::Stages {
        queued: histogram.clone(),
        transferring: histogram.clone(),
        completing: histogram.clone(),
        all: histogram,
    };
    Metrics {
        segment: "host:1".to_owned(),
        transports: vec![TransportMetrics {
            transport: "rdma".to_owned(),
            stages,
            ..TransportMetrics::default()
        }],
        rails: vec![RailMetrics {
            transport: "rdma".to_owned(),
            // Whoever names a peer does not add lines, labels or metrics.
            peer: "a\"} 1\n\\evil{".to_owned(),
            written_bytes: 1 << 60,
            limit_bytes: Some(1),
            peak_rate_bytes_per_s: Some(2),
            smallest_round_trip_s: Some(0.000_001_5),
            oldest_age_s: Some(0.25),
            state: RailStatus::Paused,
            ..RailMetrics::default()
        }],
        devices: vec![Default::default()],
        ..Metrics::default()
    }
}

#[test]
fn the_text_is_what_prometheus_reads() {
    let text = full().to_prometheus();
    let (types, samples) = parse(&text);
    let mut seen = HashSet::new();
    for (name, labels, _) in &samples {
        let metric = metric_of(name);
        seen.insert(metric.name);
        let mut names: HashSet<_> = labels.keys().map(String::as_str).collect();
        assert_eq!(names.remove("le"), name.ends_with("_bucket"), "{name}");
        assert_eq!(names, metric.labels.iter().copied().collect(), "{name}");
    }
    for metric in Metric::ALL {
        let Metric { name, kind, help, .. } = metric;
        assert_eq!(types[*name], kind.name(), "{name}");
        assert!(seen.contains(name), "{name} has no sample");
        // https://prometheus.io/docs/practices/naming/
        assert_eq!(name.ends_with("_total"), *kind == MetricKind::Counter, "{name}");
        assert!(name.starts_with("millstream_") && help.ends_with('.'), "{name}");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
    }
    assert_eq!(types.len(), Metric::ALL.len());
    let mut different = HashSet::new();
    for (name, labels, _) in &samples {
        assert!(different.insert((name, labels)), "{name} {labels:?}: twice");
    }
    let find = |name: &str, label: &str, value: &str| {
        let is_it = |(found, labels, _): &&Sample| {
            found == name && labels.get(label).is_some_and(|found| found == value)
        };
        samples.iter().find(is_it).unwrap_or_else(|| panic!("{name}{{{label}={value}}}")).clone()
    };
    let (_, labels, written) = find("millstream_rail_bytes_total", "opcode", "write");
    assert_eq!(written, (1_u64 << 60) as f64);
    assert_eq!(labels["peer"], "a\"} 1\n\\evil{");
    assert_eq!(find("millstream_rail_state", "state", "paused").2, 1.0);
    assert_eq!(find("millstream_rail_state", "state", "up").2, 0.0);
    assert_eq!(find("millstream_rail_oldest_unacknowledged_seconds", "transport", "rdma").2, 0.25);
}

#[test]
fn buckets_of_the_text_hold_all_below_their_bounds() {
    let (_, samples) = parse(&full().to_prometheus());
    let of_all = |suffix: &str| {
        let name = format!("millstream_request_duration_seconds{suffix}");
        samples.iter().filter(move |(found, ..)| *found == name).cloned().collect::<Vec<_>>()
    };
    let buckets = of_all("_bucket");
    let bounds: Vec<f64> = buckets
        .iter()
        .map(|(_, labels, _)| labels["le"].replace("+Inf", "inf").parse().unwrap())
        .collect();
    assert!(bounds.is_sorted() && bounds[0] == 256e-9 && bounds[29] == f64::INFINITY);
    let counts: Vec<f64> = buckets.iter().map(|(.., count)| *count).collect();
    assert!(counts.is_sorted() && counts[0] == 1.0);
    // 1 + 2 + ... + 30.
    assert_eq!((counts[29], of_all("_count")[0].2, of_all("_sum")[0].2), (465.0, 465.0, 5.0));
}

#[test]
fn the_manual_has_a_row_for_each_metric() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    let text = std::fs::read_to_string(path).unwrap();
    // Below that are those of others.
    let (text, _) = text.split_once("## Controllers and switches").unwrap();
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with("| `millstream_")).collect();
    let row = |metric: &Metric| {
        let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, kind, help) = (metric.name, metric.kind.name(), metric.help);
        format!("| `{name}` | {kind} | {} | {help} |", labels.join(", "))
    };
    let expected: Vec<_> = Metric::ALL.iter().map(row).collect();
    assert_eq!(rows, expected, "docs/metrics.md is to have these rows:\n{}", expected.join("\n"));
}
