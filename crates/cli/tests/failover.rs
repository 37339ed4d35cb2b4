//! Hosts whose switch is killed, or stands still, in mid-call: they go on, and say so.

mod common;

use std::time::Duration;
use std::{fs, thread};

use common::{Folder, Output, Running, address, millstream};
use serde_json::Value;

struct Cluster {
    process: Running,
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
        Self { process: controller, controller: listen, switch, at }
    }

    /// Ranks that do collectives of two sizes: each for itself, or those of so many hosts.
    fn hosts(
        &self,
        group: &str,
        world: usize,
        hosts: Option<usize>,
        more: &[&str],
    ) -> Vec<Running> {
        let binds: Vec<String> = (0..world).map(|_| address()).collect();
        let own = |rank: usize| match hosts {
            None => vec!["--path=switch".to_owned()],
            Some(hosts) => vec![format!("--host-label=h{}", rank % hosts)],
        };
        self.hosts_at(group, &binds, own, more)
    }

    /// Hosts at these addresses, each with arguments of its own.
    fn hosts_at(
        &self,
        group: &str,
        binds: &[String],
        own: impl Fn(usize) -> Vec<String>,
        more: &[&str],
    ) -> Vec<Running> {
        let world = binds.len();
        let start = |rank: usize| {
            let (bind, count, number) = (&binds[rank], world.to_string(), rank.to_string());
            let mut command = millstream();
            command.args(["collective", "--json", "--verify", "--fallback=on"]).args(own(rank));
            command.args(["--controller", &self.controller, "--group", group, "--bind", bind]);
            command.args(["--world", &count, "--rank", &number, "--size=8,3000000"]).args(more);
            Running::start(&format!("rank {rank} of {group}"), &mut command)
        };
        (0..world).map(start).collect()
    }
}

/// All results are right, and the hosts say what has happened.
fn all_right(outputs: Vec<Output>, switch: &str, reason: &str) {
    for output in outputs {
        let output = output.success();
        let report = output.json();
        assert_eq!(report["wrong"], 0, "{report}");
        let failover = report["failovers"][0].as_str().unwrap();
        let lost = format!("the switch at {switch} is lost: ");
        assert!(failover.starts_with(&lost), "{failover}");
        let over = format!("the ranks take the place of a switch: {reason}");
        assert!(failover.contains(&over), "{failover}");
        assert!(output.stderr.contains(&format!("note: {failover}")), "{}", output.stderr);
    }
}

/// How often each size is called. This process may stand still for longer than the hosts need for the second size: then
/// they are called more often, until the signal comes in between.
const ITERATIONS: [&str; 4] = ["--iters=100", "--iters=400", "--iters=1600", "--iters=6400"];

/// So often it is tried to kill a switch amid a long call.
const MOMENTS: u32 = 10;

/// What happens to whom.
struct Blow {
    signal: &'static str,
    /// Whether the controller gets it, too.
    controller: bool,
    /// And rank 0.
    rank_zero: bool,
    /// After so long, they get one to go on.
    pause: Option<Duration>,
    /// No rank can go on, if it comes amid a long call. Between those is a small one, of which nothing is overwritten.
    ends: bool,
    /// The ranks are of so many hosts, and share memory there.
    hosts: Option<usize>,
}

const KILL: Blow = Blow {
    signal: "KILL",
    controller: false,
    rank_zero: false,
    pause: None,
    ends: false,
    hosts: None,
};

/// As long as it takes the ranks to go on, or nearly: what the switch sends then is late.
const STOP: Blow = Blow { signal: "STOP", pause: Some(Duration::from_secs(10)), ..KILL };

/// Hosts of a group whose switch gets a signal when they are at the second size. Gives them with the switch's address.
fn with(blow: &Blow, world: usize, more: &[&str]) -> (Vec<Output>, String) {
    let (mut longer, mut moments) = (ITERATIONS.into_iter().peekable(), 0);
    while let Some(&iterations) = longer.peek() {
        let cluster = Cluster::new();
        let arguments = [&["--collective=allreduce", iterations], more].concat();
        let mut hosts = cluster.hosts("job", world, blow.hosts, &arguments);
        // They are in step: when the last begins with the second size, none has done much of it.
        hosts.iter_mut().for_each(|host| drop(host.line()));
        if blow.ends {
            // At its beginning nothing is overwritten yet, and the ranks go on. Nobody tells how far a call is.
            thread::sleep(Duration::from_millis(100));
        }
        let signal = |signal: &str| {
            cluster.switch.signal(signal);
            if blow.controller {
                cluster.process.signal(signal);
            }
        };
        signal(blow.signal);
        if blow.rank_zero {
            hosts.remove(0).signal(blow.signal);
        }
        if let Some(pause) = blow.pause {
            thread::sleep(pause);
            signal("CONT");
        }
        let outputs: Vec<Output> = hosts.into_iter().map(Running::output).collect();
        let failovers = |report: Value| report["failovers"].as_array().map_or(0, Vec::len);
        let mut done = outputs.iter().filter(|output| output.status.success()).peekable();
        let has_done = done.peek().is_some();
        if !done.all(|output| failovers(output.json()) > 0) {
            longer.next();
        } else if blow.ends && has_done {
            // The signal came between long calls: at another moment, and not with more of them.
            moments += 1;
            assert!(moments < MOMENTS, "the switch is never killed amid a long call");
        } else {
            return (outputs, cluster.at);
        }
    }
    panic!("the hosts are always done before their switch gets a signal");
}

fn goes_on(blow: &Blow, world: usize, more: &[&str]) {
    let (outputs, switch) = with(blow, world, more);
    let reason = if blow.controller { "no controller can be reached" } else { "" };
    all_right(outputs, &switch, reason);
}

#[test]
fn a_switch_that_is_killed_in_mid_call_changes_no_result() {
    goes_on(&KILL, 2, &[]);
}

#[test]
fn a_switch_that_is_killed_amid_floats_in_place_changes_no_result() {
    goes_on(&KILL, 3, &["--in-place", "--dtype=fp32"]);
}

#[test]
fn a_switch_that_stands_still_in_mid_call_and_wakes_changes_no_byte() {
    goes_on(&STOP, 3, &[]);
}

#[test]
fn a_switch_that_stands_still_amid_calls_in_place_and_wakes_changes_no_byte() {
    goes_on(&STOP, 2, &["--in-place"]);
}

#[test]
fn without_copies_calls_in_place_end_when_their_switch_is_killed() {
    let blow = Blow { ends: true, ..KILL };
    let (outputs, _) = with(&blow, 2, &["--in-place", "--keep-overwritten=off"]);
    for output in outputs {
        let told = output.failure(1).contains("keeps no copy of what results overwrite");
        assert!(told, "{}", output.stderr);
    }
}

#[test]
fn a_controller_that_is_killed_with_the_switch_changes_no_result() {
    goes_on(&Blow { controller: true, ..KILL }, 3, &["--in-place", "--dtype=fp32"]);
}

#[test]
fn a_controller_that_stands_still_with_the_switch_and_wakes_changes_no_byte() {
    // Long enough for the ranks to give up the controller.
    let pause = Some(Duration::from_secs(14));
    goes_on(&Blow { controller: true, pause, ..STOP }, 2, &[]);
}

#[test]
fn without_controller_and_rank_0_all_others_end_and_say_where_it_was() {
    let (outputs, _) = with(&Blow { controller: true, rank_zero: true, ..KILL }, 3, &[]);
    assert_eq!(outputs.len(), 2);
    for output in outputs {
        let told = output.failure(1);
        assert!(
            told.contains("do not go on over other trees: cannot reach the controller"),
            "{told}"
        );
        assert!(told.contains("rank 0, which takes the place of the controller at 127."), "{told}");
    }
}

#[test]
fn a_switch_of_hosts_with_several_ranks_that_is_killed_changes_no_result() {
    // One of three hosts has one rank.
    goes_on(&Blow { hosts: Some(2), ..KILL }, 4, &[]);
    goes_on(&Blow { hosts: Some(3), ..KILL }, 5, &["--in-place", "--dtype=fp32"]);
}

#[test]
fn a_switch_of_hosts_with_several_ranks_that_stands_still_and_wakes_changes_no_byte() {
    goes_on(&Blow { hosts: Some(2), ..STOP }, 4, &["--in-place"]);
}

#[test]
fn a_controller_that_is_killed_with_the_switch_of_hosts_with_several_ranks_changes_no_result() {
    goes_on(&Blow { controller: true, hosts: Some(2), ..KILL }, 3, &["--dtype=fp32"]);
}

#[test]
fn without_controller_and_rank_0_hosts_with_several_ranks_end_and_say_where_it_was() {
    // Rank 0 is on the wire for rank 2, too, which sees that it has ended.
    let blow = Blow { controller: true, rank_zero: true, hosts: Some(2), ..KILL };
    let (outputs, _) = with(&blow, 4, &[]);
    for (output, rank) in outputs.into_iter().zip(1..) {
        let told = output.failure(1);
        let named =
            if rank == 2 { "rank 0 is lost: process " } else { "the place of the controller" };
        assert!(told.contains(named), "rank {rank}: {told}");
    }
}

/// A root and two leaves with two hosts each: their addresses, and the topology.
fn two_levels() -> (Vec<String>, Vec<String>, String) {
    let switches: Vec<String> = (0..3).map(|_| address()).collect();
    let hosts: Vec<String> = (0..4).map(|_| address()).collect();
    let link = |up: bool, host: Option<usize>, my: &str, peer: &str| {
        let host = host.map_or_else(String::new, |host| format!("host_id: {host}, "));
        format!("      - {{up: {up}, {host}my_ip: {my}, peer_ip: {peer}}}\n")
    };
    let mut text = "switches:\n  - id: 0\n    root: true\n    connections:\n".to_owned();
    for leaf in 1..3 {
        text += &link(false, None, &switches[0], &switches[leaf]);
    }
    for leaf in 1..3 {
        text += &format!("  - id: {leaf}\n    connections:\n");
        text += &link(true, None, &switches[leaf], &switches[0]);
        for (host, at) in hosts.iter().enumerate().skip(2 * (leaf - 1)).take(2) {
            text += &link(false, Some(host), &switches[leaf], at);
        }
    }
    (switches, hosts, text)
}

/// Hosts at two leaves below a root, from which something is taken when they are at the second size: by the function, which has the
/// root's cluster and the leaves. Gives them with the switches' addresses, the root's first.
fn with_two_levels(take: impl Fn(&Cluster, &[Running])) -> (Vec<Output>, Vec<String>) {
    for iterations in ITERATIONS {
        let (switches, binds, topology) = two_levels();
        let folder = Folder::new();
        let file = folder.file("topology.yaml");
        fs::write(&file, topology).unwrap();
        let listen = format!("{}:0", address());
        let arguments = ["controller", "--listen", &listen, "--topology", &file];
        let mut process = Running::start("controller", millstream().args(arguments));
        let controller = process.ready()["listen"].as_str().unwrap().to_owned();
        let start = |at: &String| {
            let arguments = ["switch", "--controller", &controller, "--bind", at];
            let mut switch = Running::start(at, millstream().args(arguments));
            switch.ready();
            switch
        };
        let leaves: Vec<Running> = switches[1..].iter().map(&start).collect();
        let (switch, at) = (start(&switches[0]), switches[0].clone());
        let cluster = Cluster { process, controller, switch, at };
        let own = |_| vec!["--path=switch".to_owned()];
        let more = ["--collective=allreduce", iterations];
        let mut hosts = cluster.hosts_at("deep", &binds, own, &more);
        hosts.iter_mut().for_each(|host| drop(host.line()));
        take(&cluster, &leaves);
        let outputs: Vec<Output> = hosts.into_iter().map(Running::output).collect();
        drop(leaves);
        let is_done = |output: &Output| {
            output.status.success()
                && output.json()["failovers"].as_array().is_none_or(Vec::is_empty)
        };
        if !outputs.iter().any(is_done) {
            return (outputs, switches);
        }
    }
    panic!("the hosts are always done before something is taken from them");
}

/// What a host says has happened, when all of its results are right.
fn failover_of(output: Output) -> String {
    let report = output.success().json();
    assert_eq!(report["wrong"], 0, "{report}");
    report["failovers"][0].as_str().unwrap().to_owned()
}

#[test]
fn a_root_that_is_killed_changes_no_result_and_no_leaf_is_taken_for_lost() {
    let (outputs, switches) = with_two_levels(|cluster, _| cluster.switch.signal("KILL"));
    for failover in outputs.into_iter().map(failover_of) {
        // The leaves live and are registered: a rank that took one for lost would say so here.
        let root = format!("switch 0 ({}) of the controller's topology", switches[0]);
        assert!(failover.contains(&root), "{failover}");
    }
}

/// A leaf below which two of four ranks are is killed, and no controller is there to say which switch it was.
fn goes_on_without_leaf(number: usize) {
    let (outputs, switches) = with_two_levels(|cluster, leaves| {
        cluster.process.signal("KILL");
        leaves[number].signal("KILL");
    });
    for (rank, failover) in outputs.into_iter().map(failover_of).enumerate() {
        let leaf = rank / 2;
        let at = &switches[1 + leaf];
        // The other leaf lives, and so do all ranks: nobody may take one of them for lost.
        let lost = match leaf == number {
            true => format!("the switch at {at} is lost: it does not answer"),
            false => {
                let lowest = 2 * number;
                format!(
                    "the switch at {at} says that another one is lost: a switch of the tree no longer answers the one \
                     above it; the lowest rank below is {lowest}"
                )
            }
        };
        assert!(failover.starts_with(&lost), "rank {rank}: {failover}");
        let over = "the ranks take the place of a switch: no controller can be reached";
        assert!(failover.contains(over), "rank {rank}: {failover}");
    }
}

#[test]
fn a_leaf_that_is_killed_with_the_controller_changes_no_result() {
    goes_on_without_leaf(1);
}

#[test]
fn a_leaf_above_rank_0_that_is_killed_with_the_controller_changes_no_result() {
    goes_on_without_leaf(0);
}
