//! Processes that are killed in the middle of a transfer leave nothing behind at the node.

mod common;

use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;

use common::{Running, address, eventually, millstream};

/// Killed at a time, one after the other in each of the threads.
const THREADS: usize = 4;
const EACH: usize = 40;
const ROUNDS: usize = 5;

/// Of one round, after the first two, which fill what is kept for use again: 2 KiB for each that was killed. Of a
/// connection that is over 1.5 KiB are remembered, until there are 8192 such; one that is not forgotten costs 5 KiB,
/// which would be 800 KiB here (docs/dead-peers.md).
const GROWTH_KIB: i64 = 320;

/// Starts a `get` and kills it when its first byte has come, so in mid-transfer.
fn kill_one(segment: &str, bind: &str) {
    let mut command: Command = millstream();
    command.args(["get", "--protocol=rdma:soft", "--bind", bind, "--segment", segment]);
    command.arg("/dev/stdout").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut get = command.spawn().unwrap();
    let mut first = [0];
    get.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    get.kill().unwrap();
    get.wait().unwrap();
}

/// Connections that a node serves.
fn served(http: &str) -> u64 {
    let status = ureq::get(format!("http://{http}/status")).header("Connection", "close");
    let status = status.call().unwrap().body_mut().read_to_string().unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let of = |transport: &serde_json::Value| transport["connections_served"].as_u64().unwrap();
    status["transports"].as_array().unwrap().iter().map(of).sum()
}

/// Memory of a process that is resident, in KiB.
fn resident(node: &Running) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_node_forgets_those_that_were_killed() {
    let bind = address();
    let mut command = millstream();
    command.env("MILLSTREAM_LOG", "millstream_transfer=debug");
    command.args(["node", "--buffer=64MiB", "--protocol=rdma:soft", "--http=127.0.0.1:0"]);
    command.args(["--bind", &bind]);
    let mut node = Running::start("node", &mut command);
    let ready = node.ready();
    let [segment, http] = ["segment", "http"].map(|key| ready[key].as_str().unwrap().to_owned());
    let mut sizes = Vec::new();
    for _ in 0..ROUNDS {
        thread::scope(|scope| {
            for _ in 0..THREADS {
                let (segment, bind) = (&segment, address());
                scope.spawn(move || (0..EACH).for_each(|_| kill_one(segment, &bind)));
            }
        });
        // Now and then one has the port of one before, whose place it takes.
        for _ in 0..THREADS * EACH * 9 / 10 {
            while !node.error_line().contains("forgotten") {}
        }
        eventually("all are forgotten", || served(&http) == 0);
        sizes.push(resident(&node));
    }
    // A leak costs the same in every round. That more were connected at once than ever before, as a loaded machine
    // makes it come about, costs once.
    let mut growths: Vec<i64> = sizes[1..].windows(2).map(|pair| pair[1] - pair[0]).collect();
    growths.sort_unstable();
    let median = growths[growths.len() / 2];
    assert!(median <= GROWTH_KIB, "resident KiB after each round: {sizes:?}");
    node.signal("TERM");
    node.output().success();
}
