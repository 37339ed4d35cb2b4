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

/// Waits until all hosts are at the second size.
fn are_at_it(groups: &mut [Vec<Running>]) {
    groups.iter_mut().flatten().for_each(|host| drop(host.line()));
}

#[test]
fn a_switch_that_is_killed_in_mid_call_changes_no_result() {
    let cluster = Cluster::new();
    let floats = ["--collective=allreduce", "--iters=60", "--in-place", "--dtype=fp32"];
    let mut groups = [
        cluster.hosts("apart", 2, &["--collective=allreduce", "--iters=60"]),
        cluster.hosts("in-place", 3, &floats),
    ];
    are_at_it(&mut groups);
    cluster.switch.signal("KILL");
    groups.into_iter().for_each(|hosts| all_right(hosts, &cluster.at));
}

#[test]
fn a_switch_that_stands_still_in_mid_call_and_wakes_changes_no_byte() {
    let cluster = Cluster::new();
    let apart = ["--collective=allreduce", "--iters=60"];
    let in_place = ["--collective=allreduce", "--iters=60", "--in-place"];
    let mut groups = [cluster.hosts("apart", 3, &apart), cluster.hosts("in-place", 2, &in_place)];
    are_at_it(&mut groups);
    cluster.switch.signal("STOP");
    // As long as it takes the ranks to go on, or nearly: what it sends then is late.
    thread::sleep(Duration::from_secs(10));
    cluster.switch.signal("CONT");
    groups.into_iter().for_each(|hosts| all_right(hosts, &cluster.at));
}
