//! `bench rdma`: every measurement is made, and says what it is of.

mod common;

use std::process::{Command, Output};

use common::{address, run, skip};
use serde_json::Value;

fn positive(value: &Value, fields: &[&str]) {
    for field in fields {
        let number = value[field].as_f64();
        assert!(number.is_some_and(|number| number > 0.0), "{field} in {value}");
    }
}

#[test]
fn every_operation_is_measured_at_every_size_beside_the_kernel() {
    let sizes = ["--size=1000,64KiB", "--working-set=16MiB"];
    let arguments = [&["bench", "rdma", "--duration=30ms", "--json"][..], &sizes].concat();
    let report = run(&arguments).success().json();
    let measured: Vec<(&str, u64)> = report["bandwidth"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            positive(one, &["gb_per_s", "cpu_s_per_gb", "depth", "ratio_to_udp", "ratio_to_tcp"]);
            positive(one, &["system_calls_per_packet", "packets_per_gb"]);
            positive(one, &["sent_messages_per_packet", "received_messages_per_packet"]);
            (one["op"].as_str().unwrap(), one["size"].as_u64().unwrap())
        })
        .collect();
    let of = |size| ["write", "read", "send"].map(|op| (op, size));
    assert_eq!(measured, [of(1000), of(65_536)].concat());
    for stream in ["udp_stream", "tcp_stream", "memory_copy"] {
        positive(&report[stream], &["gb_per_s", "cpu_s_per_gb"]);
    }
    for (index, busy_poll) in [false, true].into_iter().enumerate() {
        let latency = &report["latency"][index];
        assert_eq!(latency["busy_poll"], busy_poll);
        for side in ["write", "tcp_ping_pong"] {
            positive(&latency[side], &["p50_us", "p99_us", "round_trips"]);
        }
        positive(latency, &["ratio_to_tcp"]);
    }
    positive(&report, &["seconds_each", "working_set"]);
}

#[test]
fn requests_go_round_the_queue_pairs() {
    for (queue_pairs, op) in [("4", "write"), ("16", "read"), ("16", "send")] {
        let arguments = ["--size=4KiB", "--working-set=1MiB", "--queue-pairs", queue_pairs];
        let arguments = [&arguments[..], &["--ops", op, "--duration=20ms", "--json"]].concat();
        let report = run(&[&["bench", "rdma"], &arguments[..]].concat()).success().json();
        assert_eq!(report["queue_pairs"].to_string(), queue_pairs);
        let bandwidth = report["bandwidth"].as_array().unwrap();
        assert_eq!(bandwidth.len(), 1, "{bandwidth:?}");
        assert_eq!(bandwidth[0]["op"], op);
        positive(&bandwidth[0], &["gb_per_s"]);
    }
}

#[test]
fn several_devices_share_the_working_set() {
    let arguments = ["--duration=20ms", "--devices=3", "--queue-pairs=2", "--working-set=1MiB"];
    let arguments = [&["bench", "rdma", "--ops=write,send"], &arguments[..]].concat();
    let report = run(&[&arguments[..], &["--size=64KiB", "--json"]].concat()).success().json();
    assert_eq!((&report["devices"], &report["queue_pairs"]), (&3.into(), &2.into()));
    for one in report["bandwidth"].as_array().unwrap() {
        positive(one, &["gb_per_s", "cpu_s_per_gb"]);
    }
    let output = run(&[&arguments[..], &["--size=1000"]].concat()).success();
    let first = output.stdout.lines().next();
    assert_eq!(first, Some("pairs of devices: 3, queue pairs of each: 2"), "{}", output.stdout);
    // A third of it, whole pages only.
    let output = run(&[&arguments[..], &["--size=348161"]].concat());
    assert!(output.failure(2).contains("has 348160 bytes"), "{}", output.stderr);
}

#[test]
fn pairs_of_processes_share_two_addresses() {
    // Long enough that what is under way at either end is little of it.
    let arguments = ["--duration=500ms", "--processes=3", "--queue-pairs=2", "--working-set=3MiB"];
    let arguments = [&["bench", "rdma", "--size=64KiB"], &arguments[..]].concat();
    let report = run(&[&arguments[..], &["--json"]].concat()).success().json();
    assert_eq!((&report["processes"], &report["udp_streams"]), (&3.into(), &3.into()));
    let bandwidth = report["bandwidth"].as_array().unwrap();
    assert_eq!(bandwidth.len(), 3);
    for one in bandwidth {
        positive(one, &["gb_per_s", "cpu_s_per_gb", "depth", "ratio_to_udp"]);
        // What children counted: packets of 4096 bytes, and acknowledgements.
        positive(one, &["system_calls_per_packet", "sent_messages_per_packet"]);
        let packets = one["packets_per_gb"].as_f64().unwrap();
        assert!((240_000.0..600_000.0).contains(&packets), "{one}");
    }
    positive(&report["udp_stream"], &["gb_per_s", "cpu_s_per_gb"]);
    // Each has a third of the working set.
    let output =
        run(&[&["bench", "rdma", "--processes=3", "--working-set=3MiB"][..], &["--size=2MiB"]]
            .concat());
    assert!(output.failure(2).contains("has 1048576 bytes"), "{}", output.stderr);
    let output = run(&[&arguments[..], &["--ops=write"]].concat()).success();
    let first = output.stdout.lines().next();
    assert_eq!(first, Some("pairs of processes: 3, queue pairs of each: 2"), "{}", output.stdout);
    assert!(output.stdout.contains("3 plain UDP"), "{}", output.stdout);
}

#[test]
fn shards_have_queue_pairs_and_threads_each() {
    let arguments =
        ["--duration=50ms", "--shards=2", "--size=64KiB", "--working-set=3MiB", "--json"];
    for (more, queue_pairs, streams) in
        [(&[][..], 2, 2), (&["--queue-pairs=5"][..], 5, 2), (&["--processes=2"][..], 2, 4)]
    {
        let report = run(&[&["bench", "rdma"][..], &arguments, more].concat()).success().json();
        assert_eq!(report["shards"], 2);
        assert_eq!(report["queue_pairs"], queue_pairs, "one in each shard at least");
        assert_eq!(report["udp_streams"], streams);
        for one in report["bandwidth"].as_array().unwrap() {
            positive(one, &["gb_per_s", "cpu_s_per_gb", "system_calls_per_packet"]);
        }
    }
}

#[test]
fn the_table_names_its_rows() {
    let (bind, peer) = (address(), address());
    let arguments =
        ["bench", "rdma", "--duration=10ms", "--size=64KiB", "--working-set=1MiB", "--bind", &bind];
    let output = run(&[&arguments[..], &["--peer", &peer]].concat()).success();
    for row in ["WRITE 64 KiB", "READ 64 KiB", "SEND 64 KiB", "plain UDP", "TCP", "memory copy"] {
        assert!(
            output.stdout.lines().any(|line| line.starts_with(row)),
            "{row}: {}",
            output.stdout
        );
    }
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    for (arguments, word) in [
        (&["--size=0"][..], "--size"),
        (&["--size=257MiB"], "--size"),
        (&["--size=2MiB", "--working-set=1MiB"], "--working-set"),
        (&["--working-set=1023KiB"], "1MiB"),
        (&["--queue-pairs=0"], "--queue-pairs"),
        (&["--devices=17"], "--devices"),
        (&["--processes=0"], "--processes"),
        (&["--shards=17"], "--shards"),
        (&["--shards=3", "--processes=11"], "--shards"),
        (&["--shards=2", "--devices=16", "--working-set=1MiB", "--size=1"], "2097152"),
        (&["--processes=2", "--devices=2"], "--processes"),
        (&["--devices=2", "--bind=127.0.0.1", "--peer=127.0.0.2"], "--devices"),
        (&["--ops=write,atomic"], "atomic"),
        (&["--bind=127.0.0.1"], "--peer"),
        (&["--bind=127.0.0.1", "--peer=127.0.0.1"], "--peer"),
    ] {
        let output = run(&[&["bench", "rdma", "--duration=1ms"], arguments].concat());
        assert!(output.failure(2).contains(word), "{}", output.stderr);
    }
    let output = run(&["bench", "rdma", "--duration=0s"]);
    assert!(output.failure(2).contains("--duration 0s"), "{}", output.stderr);
}

/// In a network namespace whose loopback interface has the MTU of Ethernet.
#[test]
fn the_plain_streams_follow_the_path_mtu() {
    let script = "ip link set lo mtu 1500 up && exec \"$@\"";
    let bench =
        ["bench", "rdma", "--duration=20ms", "--size=64KiB", "--working-set=1MiB", "--json"];
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "sh", "-c", script, "sh"]);
    let output = command.arg(env!("CARGO_BIN_EXE_millstream")).args(bench).output();
    let complaint = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    match &output {
        Ok(output) if !complaint(output).contains("unshare: ") => {
            assert!(output.status.success(), "{}", complaint(output));
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(report["udp_datagram"], 1024);
        }
        _ => skip("no network namespace can be made with unshare(1)"),
    }
}
