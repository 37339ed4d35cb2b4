//! Nodes and commands that find each other at a metadata server: real processes, killed and restarted.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Folder, Output, Running, address, bytes, eventually, millstream};
use millstream_metadata::{HttpKeyValue, KeyValue};

/// All entries are back so long after the server is.
const BACK: Duration = Duration::from_secs(20);
/// Soon, on a busy machine too.
const SOON: Duration = Duration::from_secs(10);

/// A metadata server at an address, and its URI.
fn server(listen: &str, more: &[&str]) -> (Running, String) {
    let mut command = millstream();
    let mut server =
        Running::start("server", command.args(["metadata-server", "--listen", listen]).args(more));
    let ready = server.ready();
    let uri = ready["metadata"].as_str().unwrap().to_owned();
    assert_eq!(uri, format!("http://{}/metadata", ready["listen"].as_str().unwrap()));
    (server, uri)
}

fn start_node(name: &str, uri: &str, bind: &str, more: &[&str]) -> Running {
    let mut command = millstream();
    command.args(["node", "--name", name, "--metadata", uri, "--protocol", "rdma:soft"]);
    command.args(["--bind", bind, "--buffer", "1MiB"]).args(more);
    Running::start("node", &mut command)
}

/// A node of this name.
fn node(name: &str, uri: &str) -> Running {
    let mut node = start_node(name, uri, &address(), &[]);
    let ready = node.ready();
    assert_eq!((ready["segment"].as_str(), ready["metadata"].as_str()), (Some(name), Some(uri)));
    node
}

/// Runs a command towards a segment.
fn towards(uri: &str, segment: &str, command: &[&str], more: &[&str]) -> Output {
    let bind = address();
    let mut process = millstream();
    process.args(command).args(["--metadata", uri, "--protocol", "rdma", "--bind", &bind]);
    process.args(["--segment", segment]).args(more);
    Running::start(command[0], &mut process).output()
}

#[test]
fn a_file_is_copied_to_a_node_that_has_a_name() {
    let folder = Folder::new();
    let (file, copy) = (folder.file("a"), folder.file("b"));
    let content = bytes(500_000, 1);
    fs::write(&file, &content).unwrap();
    let (_server, uri) = server(&format!("{}:0", address()), &[]);
    let node = node("node-a", &uri);
    towards(&uri, "node-a", &["put"], &[&file]).success();
    // Without a local address, too: the server says where the node is.
    let arguments = ["get", "--metadata", &uri, "--segment", "node-a", "--length=500000", &copy];
    common::run(&arguments).success();
    assert_eq!(fs::read(&copy).unwrap(), content);
    // It takes its entries back.
    let client = HttpKeyValue::new(&uri).unwrap();
    assert!(client.get("mooncake/ram/node-a").unwrap().is_some());
    node.signal("TERM");
    node.output().success();
    assert_eq!(client.get("mooncake/ram/node-a").unwrap(), None);
    assert_eq!(client.get("mooncake/rpc_meta/node-a").unwrap(), None);
    let output = towards(&uri, "node-a", &["put"], &[&file]);
    let error = output.failure(1);
    assert!(error.contains("there is no segment \"node-a\"") && error.contains(&uri), "{error}");
}

#[test]
fn a_server_that_is_killed_disturbs_nobody_and_has_all_entries_again() {
    let (mut metadata, uri) = server(&format!("{}:0", address()), &[]);
    let listen = uri.trim_start_matches("http://").trim_end_matches("/metadata").to_owned();
    let _nodes = [node("node-a", &uri), node("node-b", &uri)];
    let bind = address();
    let mut bench = millstream();
    bench.args(["bench", "transfer", "--metadata", &uri, "--protocol", "rdma", "--bind", &bind]);
    bench.args(["--segment", "node-a", "--op=write", "--block-size=4KiB", "--batch-size=4"]);
    bench.args(["--working-set=1MiB", "--duration=4s", "--json"]);
    let client = HttpKeyValue::new(&uri).unwrap();
    let bench = Running::start("bench", &mut bench);
    eventually("the bench has connected", || common::processor_ticks(bench.id()) > 20);
    metadata.signal("KILL");
    eventually("it is dead", || !metadata.is_running());
    bench.output().success();
    (metadata, _) = server(&listen, &[]);
    let start = Instant::now();
    let has = |key: &str| client.get(key).is_ok_and(|value| value.is_some());
    eventually("all entries are back", || {
        ["ram/node-a", "ram/node-b", "rpc_meta/node-a", "rpc_meta/node-b"]
            .iter()
            .all(|key| has(&format!("mooncake/{key}")))
    });
    assert!(start.elapsed() < BACK, "{:?}", start.elapsed());
    drop(metadata);
}

#[test]
fn a_node_that_was_killed_has_its_name_again_and_a_live_one_keeps_it() {
    let (_server, uri) = server(&format!("{}:0", address()), &[]);
    let mut first = node("node-a", &uri);
    let second = start_node("node-a", &uri, &address(), &[]).output();
    let error = second.failure(1);
    assert!(error.contains("segment name \"node-a\" is taken"), "{error}");
    assert!(error.contains("for the engine at 127."), "{error}");
    first.signal("KILL");
    eventually("it is dead", || !first.is_running());
    let again = node("node-a", &uri);
    again.signal("TERM");
    again.output().success();
}

/// Ended by a signal, a command leaves nothing at the server, and does not wait long for one that is silent.
#[test]
fn commands_that_are_told_to_stop_take_their_entries_back() {
    const PORT: &str = "15777";
    let (server, uri) = server(&format!("{}:0", address()), &[]);
    let _node = node("node-a", &uri);
    let client = HttpKeyValue::new(&uri).unwrap();
    let ports = ["first", "last"].map(|which| format!("handshake.{which}_port={PORT}"));
    let start = |words: &[&str]| {
        let bind = address();
        let mut process = millstream();
        process.args(words).args(["--metadata", &uri, "--protocol=rdma", "--segment=node-a"]);
        process.args(["--bind", &bind, "--set", &ports[0], "--set", &ports[1]]);
        let running = Running::start(words[0], process.stdin(Stdio::piped()));
        let keys = ["ram", "rpc_meta"].map(|kind| format!("mooncake/{kind}/{bind}:{PORT}"));
        let has = |key: &String| client.get(key).unwrap().is_some();
        eventually("it has its entries", || keys.iter().all(has));
        (running, keys)
    };
    let put = ["put", "-"];
    let bench = ["bench", "transfer", "--op=write", "--block-size=4KiB", "--batch-size=4"];
    let bench = [&bench[..], &["--working-set=1MiB", "--duration=60s"]].concat();
    for (words, signal, number) in [
        (&put[..], "INT", libc::SIGINT),
        (&put[..], "TERM", libc::SIGTERM),
        (&bench[..], "INT", libc::SIGINT),
    ] {
        let (running, keys) = start(words);
        running.signal(signal);
        let output = running.output_within(SOON);
        assert_eq!(output.status.signal(), Some(number), "{}", output.stderr);
        for key in keys {
            assert_eq!(client.get(&key).unwrap(), None, "{key}");
        }
    }
    let (running, _) = start(&put);
    server.signal("STOP");
    running.signal("INT");
    let output = running.output_within(SOON);
    assert_eq!(output.status.signal(), Some(libc::SIGINT), "{}", output.stderr);
}

/// What was acknowledged is there after a kill in the midst of writes.
#[test]
fn entries_on_disk_survive_kills() {
    let folder = Folder::new();
    let data = folder.file("data");
    let listen = format!("{}:0", address());
    let mut written: [u32; 4] = [0; 4];
    let (mut metadata, mut uri) = server(&listen, &["--data-dir", &data]);
    for round in 0..5 {
        let client = HttpKeyValue::new(&uri).unwrap();
        let stop = AtomicBool::new(false);
        let count = AtomicU32::new(0);
        thread::scope(|scope| {
            for (index, written) in written.iter_mut().enumerate() {
                let (client, stop, count) = (&client, &stop, &count);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let value = format!("{} {}", *written + 1, "x".repeat(10_000));
                        if client.put(&format!("mooncake/ram/{index}"), value.as_bytes()).is_err() {
                            return;
                        }
                        *written += 1;
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            eventually("something is written", || count.load(Ordering::Relaxed) > 50);
            metadata.signal("KILL");
            eventually("it is dead", || !metadata.is_running());
            stop.store(true, Ordering::Relaxed);
        });
        (metadata, uri) = server(&listen, &["--data-dir", &data]);
        let client = HttpKeyValue::new(&uri).unwrap();
        for (index, written) in written.iter_mut().enumerate() {
            let value = client.get(&format!("mooncake/ram/{index}")).unwrap().unwrap();
            let value = String::from_utf8(value).unwrap();
            let (number, rest) = value.split_once(' ').unwrap();
            let number: u32 = number.parse().unwrap();
            // The last one may have been written without an answer.
            assert!((*written..=*written + 1).contains(&number), "{round}: {number} of {written}");
            assert_eq!(rest.len(), 10_000);
            *written = number;
        }
    }
    let other = Running::start(
        "server",
        millstream().args(["metadata-server", "--listen", &listen, "--data-dir", &data]),
    );
    let other = other.output();
    assert!(other.failure(1).contains("another metadata server has it open"));
}

#[test]
fn servers_that_are_down_or_lie_are_named() {
    let folder = Folder::new();
    let file = folder.file("a");
    fs::write(&file, "a").unwrap();
    let dead = TcpListener::bind((address(), 0)).unwrap();
    let uri = format!("http://{}/metadata", dead.local_addr().unwrap());
    drop(dead);
    let output = towards(&uri, "node-a", &["put"], &[&file]);
    let error = output.failure(1);
    assert!(error.contains(&uri) && error.contains("is the server running there?"), "{error}");
    for (reply, what) in [
        (
            "HTTP/1.1 500 Oops\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfull",
            "status 500, full",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
            "no address of an engine",
        ),
        ("SSH-2.0-x\r\n", "is it a metadata server?"),
    ] {
        let listener = TcpListener::bind((address(), 0)).unwrap();
        let uri = format!("http://{}/metadata", listener.local_addr().unwrap());
        // It ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(reply.as_bytes());
            }
        });
        let arguments = ["put", "--metadata", &uri, "--segment", "node-a", &file];
        let output = common::run(&arguments);
        let error = output.failure(1);
        assert!(error.contains(&uri) && error.contains(what), "{error}");
    }
}
