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

    /// Hosts that are at the second of two sizes.
    fn hosts(&self, group: &str, world: usize, more: &[&str]) -> Vec<Running> {
        let start = |rank: usize| {
            let (bind, count, number) = (address(), world.to_string(), rank.to_string());
            let mut command = millstream();
            command.args(["collective", "--path=switch", "--json", "--verify", "--fallback=on"]);
            command.args(["--controller", &self.controller, "--group", group, "--bind", &bind]);
            command.args(["--world", &count, "--rank", &number, "--size=8,3000000"]).args(more);
            Running::start(&format!("rank {rank} of {group}"), &mut command)
        };
        let mut hosts: Vec<Running> = (0..world).map(start).collect();
        hosts.iter_mut().for_each(|host| drop(host.line()));
        hosts
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

#[test]
fn a_switch_that_is_killed_in_mid_call_changes_no_result() {
    let cluster = Cluster::new();
    let apart = cluster.hosts("apart", 2, &["--collective=allreduce", "--iters=40"]);
    let floats =
        cluster.hosts("floats", 3, &["--collective=allreduce", "--iters=40", "--dtype=fp32"]);
    let in_place =
        cluster.hosts("in-place", 3, &["--collective=allreduce", "--iters=40", "--in-place"]);
    let mode = ["--collective=reducescatter", "--iters=40", "--in-place", "--mode=send"];
    let scatter = cluster.hosts("scatter", 2, &mode);
    cluster.switch.signal("KILL");
    for hosts in [apart, floats, in_place, scatter] {
        all_right(hosts, &cluster.at);
    }
}

#[test]
fn a_switch_that_stands_still_in_mid_call_and_wakes_changes_no_byte() {
    let cluster = Cluster::new();
    let apart = cluster.hosts("apart", 3, &["--collective=allreduce", "--iters=200"]);
    let in_place =
        cluster.hosts("in-place", 2, &["--collective=allreduce", "--in-place", "--iters=200"]);
    cluster.switch.signal("STOP");
    // As long as it may take the ranks to go on, and more: what it sends then is late.
    thread::sleep(Duration::from_secs(10));
    cluster.switch.signal("CONT");
    for hosts in [apart, in_place] {
        all_right(hosts, &cluster.at);
    }
}
