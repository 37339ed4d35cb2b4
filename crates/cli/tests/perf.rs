//! `rdma send-bw`, `write-bw`, `read-bw` between two of ours.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use common::{Output, Running, address, millstream, run, skip};
use serde_json::Value;

const PORT: &str = "18515";
const TESTS: [&str; 3] = ["send-bw", "write-bw", "read-bw"];

fn start(test: &str, bind: &str, arguments: &[&str]) -> Running {
    let mut command = millstream();
    command.args(["rdma", test, "--bind", bind, "--port", PORT]).args(arguments);
    Running::start(test, &mut command)
}

/// A server on `bind` that listens.
fn server(test: &str, bind: &str, arguments: &[&str]) -> Running {
    let mut server = start(test, bind, arguments);
    server.listens(&format!("{bind}:{PORT}"));
    server
}

fn client(test: &str, host: &str, arguments: &[&str]) -> Running {
    start(test, &address(), &[arguments, &[host]].concat())
}

/// The outputs of a server and a client.
fn both(test: &str, arguments: &[&str]) -> [Output; 2] {
    let bind = address();
    let server = server(test, &bind, arguments);
    let client = client(test, &bind, arguments).output();
    [server.output(), client]
}

fn both_json(test: &str, arguments: &[&str]) -> [Value; 2] {
    both(test, &[arguments, &["--json"]].concat()).map(|output| output.success().json())
}

/// The columns of the table's only row.
fn row(output: &Output) -> Vec<f64> {
    let lines: Vec<&str> = output.stdout.lines().collect();
    let head = lines.iter().position(|line| line.starts_with(" #bytes")).unwrap();
    assert!(lines[head - 1].starts_with("-----") && lines[head + 2].starts_with("-----"));
    lines[head + 1].split_whitespace().map(|column| column.parse().unwrap()).collect()
}

#[test]
fn bandwidth_is_shown_as_perftest_shows_it() {
    for (test, title) in TESTS.into_iter().zip(["Send BW", "RDMA_Write BW", "RDMA_Read BW"]) {
        for output in both(test, &["--iters=50"]) {
            let output = output.success();
            let text = &output.stdout;
            for expected in [
                &format!("{title} Test"),
                "Number of qps   : 1\t\tTransport type : IB",
                "Connection type : RC",
                "Mtu             : 4096[B]",
                " local address: LID 0000 QPN 0x",
                " remote address: LID 0000 QPN 0x",
                " GID: 00:00:00:00:00:00:00:00:00:00:255:255:127:",
                "BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]",
            ] {
                assert!(text.contains(expected), "{expected:?} is not in {text}");
            }
            let row = row(&output);
            let [bytes, iterations, peak, average, rate, ..] = row[..] else { panic!("{row:?}") };
            assert!((bytes - 65536.0).abs() + (iterations - 50.0).abs() < 0.1, "{row:?}");
            assert!(peak >= average && average > 0.0, "{row:?}");
            // MiB of 64 KiB messages.
            assert!((average / 0.0625 - rate * 1e6).abs() < rate * 1e6 * 0.01 + 1.0, "{row:?}");
        }
    }
}

#[test]
fn latency_is_shown_as_perftest_shows_it() {
    for test in TESTS {
        for output in both(test, &["--latency", "--iters=200", "--size=64"]) {
            let output = output.success();
            assert!(output.stdout.contains("Latency Test"), "{}", output.stdout);
            assert!(output.stdout.contains("t_min[usec]    t_max[usec]  t_typical[usec]"));
            let row = row(&output);
            let [bytes, iterations, min, max, typical, average, _, p99, p999] = row[..] else {
                panic!("{row:?}")
            };
            assert!((bytes - 64.0).abs() + (iterations - 200.0).abs() < 0.1, "{row:?}");
            assert!(0.0 < min && min <= typical && typical <= p99 && p99 <= p999, "{row:?}");
            assert!(p999 <= max * 1.001 && min <= average && average <= max, "{row:?}");
        }
    }
}

#[test]
fn json_is_one_object_and_both_sides_tell_the_same() {
    for test in TESTS {
        let objects = both_json(test, &["--iters=100", "--size=5000", "--qps=3", "--mtu=1024"]);
        for (object, side) in objects.iter().zip(["server", "client"]) {
            assert_eq!(
                (object["side"].as_str(), object["test"].as_str()),
                (Some(side), Some(test))
            );
            assert_eq!((&object["queue_pairs"], &object["path_mtu"]), (&3.into(), &1024.into()));
            assert_eq!(object["provider"], "soft");
            let result = &object["results"][0];
            assert_eq!((&result["size"], &result["iterations"]), (&5000.into(), &300.into()));
            assert_eq!(result["bytes"], 1_500_000);
            assert_eq!(result["checked_bytes"], 15_000, "each queue pair's message");
            for figure in ["average_mib_per_s", "peak_mib_per_s", "messages_per_s", "gb_per_s"] {
                assert!(result[figure].as_f64().unwrap() > 0.0, "{figure}: {result}");
            }
            assert!(result["cpu_s_per_gb"].as_f64().is_some());
        }
        assert_eq!(objects[0]["results"][0]["seconds"], objects[1]["results"][0]["seconds"]);
    }
}

#[test]
fn all_sizes_are_measured_and_checked() {
    for test in TESTS {
        for object in both_json(test, &["--all", "--iters=3"]) {
            let results = object["results"].as_array().unwrap();
            assert_eq!(results.len(), 23);
            for (power, result) in (1..).zip(results) {
                assert_eq!(result["size"], 1_u64 << power);
                assert_eq!(result["checked_bytes"], 1_u64 << power);
            }
        }
    }
}

#[test]
fn atomic_operations_are_each_checked_and_so_is_the_counter() {
    for op in ["--op=fetch-add", "--op=compare-swap"] {
        for (more, operations) in [
            (&["--iters=300", "--qps=3", "--tx-depth=7"][..], 900_u64),
            (&["--iters=50", "--latency"], 50),
        ] {
            for object in both_json("atomic", &[&[op], more].concat()) {
                let result = &object["results"][0];
                assert_eq!(
                    (&result["size"], &result["iterations"]),
                    (&8.into(), &operations.into())
                );
                let counters = object["queue_pairs"].as_u64().unwrap() * 8;
                assert_eq!(result["checked_bytes"], operations * 8 + counters);
            }
        }
    }
    let [server, client] = both("atomic", &["--duration=50ms"]);
    for output in [server.success(), client.success()] {
        assert!(output.stdout.contains("Atomic FETCH_AND_ADD BW Test"), "{}", output.stdout);
        assert!(row(&output)[1] > 0.0);
    }
}

#[test]
fn a_duration_bounds_the_test_and_both_sides_count_the_same() {
    for arguments in [&["--duration=100ms", "--size=4KiB"][..], &["--duration=50ms", "--latency"]] {
        for test in TESTS {
            let [server, client] = both_json(test, arguments);
            let result = &client["results"][0];
            assert!(result["seconds"].as_f64().unwrap() >= 0.05, "{result}");
            assert!(result["iterations"].as_u64().unwrap() > 0);
            assert_eq!(server["results"][0]["iterations"], result["iterations"]);
        }
    }
}

#[test]
fn shallow_queues_and_single_bytes_work() {
    let arguments = ["--tx-depth=1", "--rx-depth=1", "--size=1", "--iters=30", "--no-verify"];
    for test in TESTS {
        for more in [&[][..], &["--latency"]] {
            for object in both_json(test, &[&arguments, more].concat()) {
                assert_eq!(object["results"][0]["iterations"], 30);
                assert_eq!(object["results"][0]["checked_bytes"], 0);
                assert_eq!(object["verified"], false);
            }
        }
    }
}

#[test]
fn threads_that_look_for_work_all_the_time_do_the_same() {
    let arguments = ["--busy-poll", "--latency", "--iters=20"];
    for object in both_json("write-bw", &arguments) {
        assert_eq!(object["results"][0]["checked_bytes"], 4, "2 bytes on each side");
    }
}

#[test]
fn the_packet_driver_works_or_says_what_it_needs() {
    let [server, client] = both("write-bw", &["--driver=packet", "--iters=50", "--json"]);
    if !server.status.success() {
        assert!(server.failure(1).contains("CAP_NET_RAW"), "{}", server.stderr);
        return skip("packet sockets need CAP_NET_RAW");
    }
    for object in [server.json(), client.success().json()] {
        assert_eq!((&object["driver"], &object["provider"]), (&"packet".into(), &"soft".into()));
        assert_eq!(object["results"][0]["checked_bytes"], 65536);
    }
}

#[test]
fn gigabits_are_an_option() {
    let [_, client] = both("write-bw", &["--report-gbits", "--iters=10"]);
    let client = client.success();
    assert!(client.stdout.contains("BW average[Gb/sec]"), "{}", client.stdout);
    let row = row(&client);
    assert!((row[3] * 1e9 / 8.0 / 65536.0 / (row[4] * 1e6) - 1.0).abs() < 0.02, "{row:?}");
}

#[test]
fn sides_that_differ_both_say_in_what() {
    for (test, arguments, expected) in [
        ("write-bw", &["--size=4KiB"][..], "--size is 65536 here, 4096 there"),
        ("read-bw", &[], "the test is write-bw here, read-bw there"),
        ("write-bw", &["--latency"], "the test is write-bw here, write-lat there"),
        ("write-bw", &["--iters=7"], "the length is --iters 5000 here, --iters 7 there"),
        ("write-bw", &["--qps=2"], "--qps is 1 here, 2 there"),
        ("write-bw", &["--all"], "--size is 65536 here, --all there"),
        ("atomic", &[], "the test is write-bw here, fetch-add-bw there"),
    ] {
        let bind = address();
        let server = server("write-bw", &bind, &[]);
        let client = client(test, &bind, arguments).output();
        let server = server.output();
        assert!(server.failure(1).contains(expected), "{}", server.stderr);
        let sentence = client.failure(1);
        assert!(sentence.contains("the server runs something else"), "{sentence}");
    }
}

#[test]
fn a_server_that_dies_ends_the_client_by_the_retry_count() {
    for arguments in [&["--duration=60s"][..], &["--duration=60s", "--latency"]] {
        for test in TESTS {
            let bind = address();
            let server = server(test, &bind, arguments);
            let mut client = client(test, &bind, arguments);
            while !client.line().starts_with(" #bytes") {}
            server.signal("KILL");
            let output = client.output();
            let sentence = output.failure(1);
            // Unless it owed us a message, and no acknowledgement.
            let closed = sentence.contains("the server has closed the connection")
                || sentence.contains("the server is gone");
            let ping_pong = arguments.len() == 2 && test != "read-bw";
            assert!(
                sentence.contains("retry count exceeded") || ping_pong && closed,
                "{test}: {sentence}"
            );
            assert!(sentence.contains(&bind), "{sentence}");
            drop(server);
        }
    }
}

#[test]
fn a_client_that_dies_ends_the_server() {
    for arguments in [&["--duration=60s"][..], &["--duration=60s", "--latency"]] {
        for test in TESTS {
            let bind = address();
            let mut server = server(test, &bind, arguments);
            let client = client(test, &bind, arguments);
            while !server.line().starts_with(" #bytes") {}
            client.signal("INT");
            let output = server.output();
            let sentence = output.failure(1);
            let said = ["the client has closed the connection", "retry count exceeded", "is gone"];
            assert!(said.iter().any(|said| sentence.contains(said)), "{test}: {sentence}");
            assert_eq!(client.output().code(), None, "it ended by the signal");
        }
    }
}

#[test]
fn a_client_that_falls_silent_ends_the_server_in_time() {
    let latency = ["--duration=60s", "--latency"];
    let bandwidth = &latency[..1];
    let tests = [
        ("send-bw", bandwidth),
        ("write-bw", bandwidth),
        ("atomic", bandwidth),
        ("send-bw", &latency[..]),
        ("read-bw", &latency[..]),
    ];
    let stopped = tests.map(|(test, arguments)| {
        let bind = address();
        // Answers that are not acknowledged are sent again for longer than the client may be silent.
        let patience = ["--timeout=2s", "--qp-timeout=20"];
        let mut server = server(test, &bind, &[arguments, &patience].concat());
        let client = client(test, &bind, arguments);
        while !server.line().starts_with(" #bytes") {}
        client.signal("STOP");
        (test, server, client)
    });
    for (test, server, _client) in stopped {
        let output = server.output_within(Duration::from_secs(30));
        let sentence = output.failure(1);
        assert!(sentence.contains("--timeout"), "{test}: {sentence}");
    }
}

#[test]
fn a_client_that_works_for_longer_than_the_timeout_is_waited_for() {
    let arguments = ["--duration=12s", "--size=4KiB"];
    let latency = ["--latency"];
    let tests = [("write-bw", &latency[..0]), ("read-bw", &latency[..])];
    let begun = tests.map(|(test, more)| {
        let bind = address();
        let arguments = [&arguments[..], more].concat();
        let server = server(test, &bind, &[&arguments[..], &["--timeout=5s"]].concat());
        (server, client(test, &bind, &arguments))
    });
    for (server, client) in begun {
        server.output().success();
        client.output().success();
    }
}

#[test]
fn no_server_is_an_error() {
    let host = address();
    let output = run(&["rdma", "write-bw", "--port", PORT, &host]);
    let sentence = output.failure(1);
    assert!(sentence.contains(&host) && sentence.contains("write-bw server"), "{sentence}");
}

#[test]
fn a_pingpong_is_told_from_a_test() {
    let bind = address();
    let server = server("write-bw", &bind, &[]);
    let client = start("pingpong", &address(), &["--iters=3", &bind]);
    let server = server.output();
    let sentence = server.failure(1);
    assert!(sentence.contains("the client"), "{sentence}");
    assert_eq!(client.output().code(), Some(1));
}

#[test]
fn what_speaks_no_test_is_refused() {
    let bind = address();
    let listener = TcpListener::bind(format!("{bind}:{PORT}")).unwrap();
    let client = client("write-bw", &bind, &[]);
    let (mut stream, _) = listener.accept().unwrap();
    let mut message = [0; 52];
    stream.read_exact(&mut message).unwrap();
    stream.write_all(&message).unwrap();
    let mut done = [0; 5];
    stream.read_exact(&mut done).unwrap();
    assert_eq!(&done, b"done\0");
    stream.write_all(b"{\"hello\":\"world\"}\n").unwrap();
    let output = client.output();
    assert!(output.failure(1).contains("same version"), "{}", output.stderr);
}
