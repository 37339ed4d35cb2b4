//! `node`, `put`, `get` and `bench transfer`, as processes.

mod common;

use std::fs;
use std::io::Read;
use std::process::Command;
use std::time::Duration;

use common::{Folder, Running, bytes, millstream, node, run, towards, transfer};

/// The bound of the contract for a transfer whose peer dies.
const BOUND: Duration = Duration::from_secs(10);

#[test]
fn a_file_comes_back_byte_for_byte() {
    let folder = Folder::new();
    let (original, copy) = (folder.file("original"), folder.file("copy"));
    let (_node, segment) = node("32MiB", &[]);
    // Less than a chunk, several rounds of the buffer, an odd rest, an odd offset, nothing.
    for (length, offset) in [(1, 0), (1000, 5), (20_000_003, 7), (8 << 20, 1 << 20), (0, 9)] {
        let content = bytes(length, length as u64);
        fs::write(&original, &content).unwrap();
        let offset = format!("--offset={offset}");
        let put = transfer(&["put"], &segment, &[&offset, "--json", &original]).success().json();
        let length = format!("--length={length}");
        let get = transfer(&["get"], &segment, &[&offset, &length, "--json", &copy]);
        let get = get.success().json();
        assert_eq!(put["bytes"], content.len());
        assert_eq!(put["crc32c"], format!("{:08x}", crc32c::crc32c(&content)));
        assert_eq!(get["crc32c"], put["crc32c"]);
        assert!(fs::read(&copy).unwrap() == content, "{length} bytes, but other ones");
    }
}

/// As processes of one user; `rdma` is there for others.
#[test]
fn a_file_comes_back_through_shared_memory() {
    let folder = Folder::new();
    let (original, copy) = (folder.file("original"), folder.file("copy"));
    let address = common::address();
    for protocols in ["shm", "shm,rdma:soft"] {
        let mut command = millstream();
        command.args(["node", "--protocol", protocols, "--bind", &address, "--buffer", "8MiB"]);
        let mut node = Running::start("node", &mut command);
        let segment = node.ready()["segment"].as_str().unwrap().to_owned();
        let content = bytes(5_000_003, 1);
        fs::write(&original, &content).unwrap();
        let towards = |more: [&str; 3]| {
            let [command, last, file] = more;
            run(&[command, "--protocol=shm", "--segment", &segment, "--offset=7", last, file])
        };
        towards(["put", "--verify", &original]).success();
        towards(["get", "--length=5000003", &copy]).success();
        assert!(fs::read(&copy).unwrap() == content, "{protocols}");
    }
    let (_node, segment) = node("8MiB", &[]);
    let output = run(&["put", "--protocol=shm", "--segment", &segment, &original]);
    assert!(output.failure(1).contains("does not share its memory"), "{}", output.stderr);
}

#[test]
fn the_checksum_is_castagnolis() {
    let folder = Folder::new();
    let file = folder.file("digits");
    fs::write(&file, "123456789").unwrap();
    let (_node, segment) = node("1KiB", &[]);
    let put = transfer(&["put"], &segment, &["--offset=0", &file]).success();
    assert!(put.stdout.contains("CRC-32C e3069283"), "{}", put.stdout);
}

#[test]
fn a_preloaded_file_is_in_the_segment_and_zeros_follow() {
    let folder = Folder::new();
    let (file, copy) = (folder.file("file"), folder.file("copy"));
    let content = bytes(3_000_000, 1);
    fs::write(&file, &content).unwrap();
    let (node, segment) = node("4000000", &["--file", &file]);
    // Without --length, up to the end of the buffer.
    transfer(&["get"], &segment, &["--offset=1000000", &copy]).success();
    let mut expected = content[1_000_000..].to_vec();
    expected.resize(3_000_000, 0);
    assert!(fs::read(&copy).unwrap() == expected);
    drop(node);
    let small = run(&[
        "node",
        "--name=a",
        "--metadata=p2p",
        "--protocol=rdma",
        "--buffer=1MiB",
        "--file",
        &file,
    ]);
    assert!(small.failure(2).contains("3000000 bytes"), "{}", small.stderr);
    let missing = run(&[
        "node",
        "--name=a",
        "--metadata=p2p",
        "--protocol=rdma",
        "--buffer=1MiB",
        "--file=missing",
    ]);
    assert!(missing.failure(1).contains("missing"), "{}", missing.stderr);
}

#[test]
fn the_ready_line_says_how_to_reach_the_node() {
    let (first, second) = (common::address(), common::address());
    let mut command = millstream();
    command.args(["node", "--name=n", "--metadata=p2p", "--protocol=rdma,local", "--buffer=64KiB"]);
    let mut node = Running::start("node", command.args(["--bind", &first, "--bind", &second]));
    let ready = node.ready();
    assert!(ready["segment"].as_str().unwrap().starts_with(&format!("{first}:")), "{ready}");
    assert_eq!(ready["metadata"], "p2p");
    assert_eq!(ready["buffer"]["length"], 65_536);
    assert!(ready["buffer"]["addr"].as_u64().unwrap() > 0);
    assert_eq!(ready["protocols"], serde_json::json!(["rdma", "local"]));
    let devices = serde_json::json!([format!("soft-{first}"), format!("soft-{second}")]);
    assert_eq!(ready["devices"], devices);
}

#[test]
fn addresses_are_found_when_none_is_given() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, "some bytes").unwrap();
    let arguments = ["node", "--name=n", "--metadata=p2p", "--protocol=rdma", "--buffer=1KiB"];
    let mut node = Running::start("node", millstream().args(arguments));
    let segment = node.ready()["segment"].as_str().unwrap().to_owned();
    assert!(segment.starts_with("127.0.0."), "{segment}");
    run(&["put", "--metadata=p2p", "--protocol=rdma", "--segment", &segment, "--offset=0", &file])
        .success();
}

#[test]
fn getting_from_a_node_that_dies_fails_in_time_and_names_it() {
    let folder = Folder::new();
    let pipe = folder.file("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (node, segment) = node("64MiB", &[]);
    let mut command = millstream();
    command.arg("get").args(towards(&segment)).args(["--offset=0", &pipe]);
    let get = Running::start("get", &mut command);
    // What is not read from the pipe holds up the rest: the node dies half-way for sure.
    let mut reader = fs::File::open(&pipe).unwrap();
    reader.read_exact(&mut vec![0; 3 << 20]).unwrap();
    node.signal("KILL");
    node.output();
    let drain = std::thread::spawn(move || reader.read_to_end(&mut Vec::new()).unwrap());
    let output = get.output_within(BOUND);
    let sentence = output.failure(1);
    assert!(sentence.contains(&format!("peer {segment}")), "{sentence}");
    assert!(drain.join().unwrap() < 61 << 20);
}

#[test]
fn bench_transfer_prints_the_figures_of_the_contract() {
    let (_node, segment) = node("16MiB", &[]);
    for op in ["read", "write", "mix"] {
        let op = format!("--op={op}");
        let arguments = [
            &op,
            "--block-size=64KiB",
            "--batch-size=16",
            "--threads=2",
            "--duration=100ms",
            "--json",
        ];
        let report = transfer(&["bench", "transfer"], &segment, &arguments).success().json();
        let bytes = report["bytes"].as_u64().unwrap();
        assert!(bytes > 0 && bytes.is_multiple_of(16 << 16), "{report}");
        for key in ["gb_per_s", "requests_per_s", "cpu_s_per_gb"] {
            assert!(report[key].as_f64().unwrap() > 0.0, "{key} in {report}");
        }
        let latency = |key: &str| report["latency_us"][key].as_f64().unwrap();
        assert!(latency("p50") > 0.0 && latency("p50") <= latency("p99"));
        assert!(latency("p99") <= latency("p999"));
    }
}

#[test]
fn a_protocol_that_does_not_reach_the_segment_fails() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, "x").unwrap();
    let (_node, segment) = node("1KiB", &[]);
    let output = run(&[
        "put",
        "--metadata=p2p",
        "--protocol=local",
        "--segment",
        &segment,
        "--offset=0",
        &file,
    ]);
    assert!(output.failure(1).contains(&segment), "{}", output.stderr);
}
