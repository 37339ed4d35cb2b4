//! `bench transfer` as perftest is used: without flags, with one row, interrupted, and with a peer
//! that is not there or dies.

mod common;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::Duration;

use common::{
    Output, Running, address, child, eventually, millstream, node, processes_of_group,
    processor_ticks, run, transfer,
};
use millstream_net::affinity;
use serde_json::Value;

/// Little processor time passes before something is measured.
const SMALL: &str = "--working-set=1MiB";
/// From the death of the peer to the error.
const BOUND: Duration = Duration::from_secs(10);

/// Starts a bench with its own peer, in a process group of its own.
fn start(arguments: &[&str]) -> Running {
    let mut command = millstream();
    command.args(["bench", "transfer"]).args(arguments).process_group(0);
    Running::start("bench transfer", &mut command)
}

/// Reads what is printed before the first row.
fn skip_header(bench: &mut Running) -> String {
    let segment = bench.line().split(' ').nth(1).unwrap().to_owned();
    assert!(bench.line().starts_with("op "));
    segment
}

fn assert_figures(row: &Value) {
    for key in ["bytes", "seconds", "gb_per_s", "requests_per_s", "cpu_s_per_gb"] {
        assert!(row[key].as_f64().is_some_and(|figure| figure > 0.0), "{key} in {row}");
    }
    for key in ["p50", "p99", "p999"] {
        assert!(row["latency_us"][key].as_f64().is_some_and(|figure| figure > 0.0), "{row}");
    }
}

#[test]
fn without_flags_there_is_a_table_over_sizes_both_ways() {
    let bench = start(&["--duration=1ms"]);
    let group = bench.id();
    let output = bench.output().success();
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert!(lines[0].starts_with("segment 127.0.0."), "{}", lines[0]);
    let columns: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!(columns[..5], ["op", "bytes", "batch", "threads", "requests"]);
    let rows: Vec<String> = lines[2..]
        .iter()
        .map(|line| line.split_whitespace().take(3).collect::<Vec<_>>().join(" "))
        .collect();
    let sizes = ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB"];
    let of = |op: &str| sizes.map(|size| format!("{op} {size}"));
    assert_eq!(rows, [of("write"), of("read")].concat());
    assert_eq!(processes_of_group(group), [0; 0]);
}

#[test]
fn several_rows_are_one_object_and_one_row_is_that_of_the_contract() {
    let all = run(&["bench", "transfer", "--block-size=4KiB", "--duration=1ms", "--json"]);
    let all = all.success().json();
    let rows = all["rows"].as_array().unwrap();
    assert_eq!([&rows[0]["op"], &rows[1]["op"]], ["write", "read"]);
    assert!(all.get("interrupted").is_none());
    rows.iter().for_each(assert_figures);
    let one = ["--op=read", "--block-size=1MiB", "--threads=2", "--duration=1ms", "--json"];
    let one = run(&[&["bench", "transfer"], &one[..]].concat()).success().json();
    assert_eq!(one["block_size"], 1 << 20);
    assert_eq!(one["working_set"], 256 << 20);
    assert_figures(&one);
}

/// With figures of no account, since there is no time for others.
#[test]
fn figures_stand_beside_what_is_aimed_at() {
    let output = run(&["bench", "transfer", "--figures", "--duration=10ms", "--json"]);
    let figures = output.success().json();
    let rows = figures["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    for row in rows {
        assert!(row["memory_copy_gb_per_s"].as_f64().unwrap() > 0.0, "{row}");
        for lane in ["local", "shm", "rdma:soft"] {
            assert!(row["gb_per_s"][lane].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    let aims = figures["aims"].as_array().unwrap();
    for what in ["memcpy", "requests/s", "p50", "pieces", "plain verbs, WRITE", "asleep"] {
        let named = |aim: &&Value| aim["what"].as_str().unwrap().contains(what);
        let aim = aims.iter().find(named).unwrap();
        assert!(aim["at_least"].is_number() || aim["at_most"].is_number(), "{aim}");
        assert!(aim["figure"].is_number() && aim["met"].is_boolean(), "{aim}");
    }
    // Only where each end has a processor to itself.
    let polls = aims.iter().any(|aim| aim["what"].as_str().unwrap().contains("busy polling"));
    assert_eq!(polls, affinity::processors().unwrap().len() > 1);
    let both = run(&["bench", "transfer", "--figures", "--op=read"]);
    assert_eq!(both.status.code(), Some(2));
}

#[test]
fn each_side_walks_through_the_working_set() {
    let measure = |more: &[&str]| {
        let arguments = ["bench", "transfer", "--op=write", "--duration=1ms", "--json"];
        run(&[&arguments, more].concat()).success().json()
    };
    // Of the sizes that nobody asked for, those whose batches fit.
    let table = measure(&["--working-set=1MiB"]);
    let rows = table["rows"].as_array().unwrap();
    let sizes: Vec<u64> = rows.iter().map(|row| row["block_size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [4 << 10, 16 << 10, 64 << 10]);
    assert!(rows.iter().all(|row| row["working_set"] == 1 << 20), "{table}");
    // Batches that need more than the default get it.
    let one = measure(&["--block-size=4MiB", "--batch-size=65"]);
    assert_eq!(one["working_set"], 260 << 20);
    let (_node, segment) = node("2MiB", &[]);
    let of_node = |set| {
        let arguments = ["--op=write", "--block-size=4KiB", "--duration=1ms", "--json", set];
        transfer(&["bench", "transfer"], &segment, &arguments)
    };
    assert_eq!(of_node("--working-set=2MiB").success().json()["working_set"], 2 << 20);
    let output = of_node("--working-set=3MiB");
    let sentence = output.failure(2);
    assert!(sentence.contains("--working-set 3145728: the buffer of segment"), "{sentence}");
    assert!(sentence.contains("has only 2097152 bytes"), "{sentence}");
}

#[test]
fn sizes_that_do_not_fit_a_segment_are_left_out() {
    let (_node, segment) = node("64KiB", &[]);
    let arguments = ["--duration=1ms", "--op=write", "--json"];
    let table = transfer(&["bench", "transfer"], &segment, &arguments).success().json();
    let rows = table["rows"].as_array().unwrap();
    let sizes: Vec<u64> = rows.iter().map(|row| row["block_size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [4 << 10, 16 << 10, 64 << 10]);
    let (_node, segment) = node("1KiB", &[]);
    let output = transfer(&["bench", "transfer"], &segment, &arguments);
    assert!(output.failure(2).contains("has only 1024 bytes"), "{}", output.stderr);
}

#[test]
fn what_cannot_be_measured_is_told() {
    let check = |arguments: &[&str], code, expected: &str| {
        let output = run(&[&["bench", "transfer"], arguments].concat());
        let sentence = output.failure(code);
        assert!(sentence.contains(expected), "{sentence}");
    };
    check(&["--duration=0s"], 2, "--duration 0s");
    check(&["--block-size=0"], 2, "--block-size");
    check(&["--working-set=1023KiB"], 2, "--working-set 1047552: choose 1MiB or more");
    let too_much = ["--working-set=1MiB", "--block-size=64KiB", "--batch-size=17"];
    check(&too_much, 2, "--working-set 1048576: the batches of all threads have 1114112 bytes");
    check(&["--working-set=1MiB", "--threads=17"], 2, "have 1114112 bytes");
    check(&["--protocol=ip"], 2, "rdma:soft");
    check(&["--threads=1024", "--batch-size=65536", "--block-size=1GiB"], 1, "no memory for");
    check(&["--segment=nowhere:1"], 1, "nowhere:1");
    let nobody = format!("{}:1", address());
    check(&["--segment", &nobody], 1, &nobody);
}

#[test]
fn a_peer_that_cannot_start_is_told_in_its_words() {
    // The only port that it may have is taken, on all addresses.
    let held = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = held.local_addr().unwrap().port().to_string();
    let mut command = millstream();
    command.args(["bench", "transfer"]).env("MC_MIN_RPC_PORT", &port).env("MC_MAX_RPC_PORT", &port);
    let output = Running::start("bench", &mut command).output();
    let sentence = output.failure(1);
    assert!(sentence.starts_with("cannot start a node to measure against"), "{sentence}");
    assert!(sentence.contains(&format!("each port from {port} to {port} is in use")), "{sentence}");
}

#[test]
fn a_peer_that_is_killed_fails_the_bench_in_time_and_is_named() {
    let mut bench = start(&["--op=write", "--block-size=64KiB", "--duration=600s", SMALL]);
    let segment = skip_header(&mut bench);
    eventually("it measures", || processor_ticks(bench.id()) > 20);
    let peer = child(bench.id(), &["node"]).unwrap().to_string();
    assert!(Command::new("kill").args(["-s", "KILL", &peer]).status().unwrap().success());
    let output = bench.output_within(BOUND);
    let sentence = output.failure(1);
    assert!(sentence.contains(&segment) && sentence.contains("signal: 9"), "{sentence}");
}

/// Tells a bench to stop when it has measured something; returns what it printed.
fn interrupted(mut arguments: Vec<&str>, signal: &str, whole_group: bool) -> Output {
    arguments.extend(["--op=write", "--block-size=4KiB", "--duration=600s", SMALL]);
    let bench = start(&arguments);
    let group = bench.id();
    eventually("it measures", || processor_ticks(group) > 30);
    // What a terminal does, or what `kill` does.
    let target = if whole_group { format!("-{group}") } else { group.to_string() };
    let mut kill = Command::new("kill");
    assert!(kill.args(["-s", signal, "--", &target]).status().unwrap().success());
    let output = bench.output_within(BOUND);
    let number = if signal == "INT" { 2 } else { 15 };
    assert_eq!(output.status.signal(), Some(number), "{}", output.stderr);
    assert_eq!(processes_of_group(group), [0; 0]);
    assert!(output.stderr.is_empty(), "{}", output.stderr);
    output
}

#[test]
fn control_c_leaves_the_figures_so_far_and_nothing_else() {
    for whole_group in [true, false] {
        let output = interrupted(Vec::new(), "INT", whole_group);
        let row = output.stdout.lines().nth(2).unwrap_or_else(|| panic!("{}", output.stdout));
        let fields: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(fields[..3], ["write", "4", "KiB"]);
        assert!(fields[5].parse::<u64>().unwrap() > 0, "{row}");
    }
    assert_figures(&interrupted(vec!["--json"], "TERM", false).json());
    assert_figures(&interrupted(vec!["--json"], "INT", true).json());
}

#[test]
fn the_machine_itself_can_be_measured_too() {
    let arguments = ["--block-size=64KiB", "--duration=1ms", "--baseline", "--json"];
    let bench = ["bench", "transfer", "--protocol=rdma:soft"];
    let table = run(&[&bench, &arguments[..]].concat()).success().json();
    for row in table["rows"].as_array().unwrap() {
        for key in ["udp_stream_gb_per_s", "memory_copy_gb_per_s", "ratio_to_udp_stream"] {
            assert!(row["baseline"][key].as_f64().unwrap() > 0.0, "{key} in {row}");
        }
        assert_eq!(row["baseline"].get("block_copy_gb_per_s"), None);
    }
}

#[test]
fn copies_are_compared_with_copies() {
    for protocol in ["shm", "local"] {
        let arguments = ["--protocol", protocol, "--block-size=64KiB", "--op=read", "--baseline"];
        let more = ["--duration=1ms", "--working-set=16MiB", "--json"];
        let row = run(&[&["bench", "transfer"], &arguments[..], &more].concat()).success().json();
        assert_figures(&row);
        for key in ["block_copy_gb_per_s", "ratio_to_block_copy", "ratio_to_process_copy"] {
            assert!(row["baseline"][key].as_f64().unwrap() > 0.0, "{key} in {row}");
        }
    }
}
