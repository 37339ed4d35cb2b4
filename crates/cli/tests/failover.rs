//! Hosts whose switch is killed, or stands still, in mid-call: they go on, and say so.

mod common;

use std::thread;
use std::time::Duration;

use common::{Running, address, millstream};

struct Cluster {
    _controller: Running,
    controller: String,
    switch: Running,
    /// The switch's address.
    at: String,
}

impl Cluster {
    fn new() -> Self {
        let listen = format!("{}:0", address());
        let mut controller =
            Running::start("controller", millstream().args(["controller", "--listen", &listen]));
        let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
        let at = address();
        let arguments = ["switch", "--controller", &listen, "--name=s0", "--bind", &at];
        let mut switch = Running::start("switch", millstream().args(arguments));
        switch.ready();
        Self { _controller: controller, controller: listen, switch, at }
    }

    /// Hosts that do collectives of two sizes.
    fn hosts(&self, group: &str, world: usize, more: &[&str]) -> Vec<Running> {
        let start = |rank: usize| {
            let (bind, count, number) = (address(), world.to_string(), rank.to_string());
            let mut command = millstream();
            command.args(["collective", "--path=switch", "--json", "--verify", "--fallback=on"]);
            command.args(["--controller", &self.controller, "--group", group, "--bind", &bind]);
            command.args(["--world", &count, "--rank", &number, "--size=8,3000000"]).args(more);
            Running::start(&format!("rank {rank} of {group}"), &mut command)
        };
        (0..world).map(start).collect()
    }
}

/// All results are right, and the hosts say what has happened.
fn all_right(hosts: Vec<Running>, switch: &str) {
    for host in hosts {
        let output = host.output().success();
        let report = output.json();
        assert_eq!(report["wrong"], 0, "{report}");
        let failover = report["failovers"][0].as_str().unwrap();
        let lost = format!("the switch at {switch} is lost: ");
        assert!(failover.starts_with(&lost), "{failover}");
        assert!(failover.contains("the ranks take the place of a switch: "), "{failover}");
        assert!(output.stderr.contains(&format!("note: {failover}")), "{}", output.stderr);
    }
}

/// Hosts of a group whose switch gets a signal when all are at the second size; after `pause`, one to go on.
fn with(signal: &str, pause: Option<Duration>, world: usize, more: &[&str]) {
    let cluster = Cluster::new();
    let mut hosts = cluster.hosts("job", world, &[&["--collective=allreduce"], more].concat());
    // They are in step: when the last begins with the second size, none has done much of it.
    hosts.iter_mut().for_each(|host| drop(host.line()));
    cluster.switch.signal(signal);
    if let Some(pause) = pause {
        thread::sleep(pause);
        cluster.switch.signal("CONT");
    }
    all_right(hosts, &cluster.at);
}

/// As long as it takes the ranks to go on, or nearly: what the switch sends then is late.
const STANDS_STILL: Option<Duration> = Some(Duration::from_secs(10));

#[test]
fn a_switch_that_is_killed_in_mid_call_changes_no_result() {
    with("KILL", None, 2, &["--iters=100"]);
}

#[test]
fn a_switch_that_is_killed_amid_floats_in_place_changes_no_result() {
    with("KILL", None, 3, &["--iters=100", "--in-place", "--dtype=fp32"]);
}

#[test]
fn a_switch_that_stands_still_in_mid_call_and_wakes_changes_no_byte() {
    with("STOP", STANDS_STILL, 3, &["--iters=100"]);
}

#[test]
fn a_switch_that_stands_still_amid_calls_in_place_and_wakes_changes_no_byte() {
    with("STOP", STANDS_STILL, 2, &["--iters=100", "--in-place"]);
}
