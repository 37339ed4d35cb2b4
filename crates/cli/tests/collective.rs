//! `controller`, `switch`, `allreduce` and `bench allreduce`, as processes.

mod common;

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;
use socket2::{Domain, Socket, Type};

use common::{Output, Running, address, millstream, run, serve, serve_with, skip};

fn host(controller: &str, world: u32, rank: u32, more: &[&str]) -> Running {
    let bind = address();
    let (world, rank) = (world.to_string(), rank.to_string());
    let mut command = millstream();
    command.args(["allreduce", "--controller", controller, "--group=g", "--world", &world]);
    command.args(["--rank", &rank, "--bind", &bind, "--dtype=int32", "--op=sum"]).args(more);
    if !more.iter().any(|argument| argument.starts_with("--path")) {
        command.arg("--path=switch");
    }
    if !more.iter().any(|argument| argument.starts_with("--fallback")) {
        command.arg("--fallback=off");
    }
    Running::start(&format!("rank {rank}"), &mut command)
}

#[test]
fn every_element_of_every_rank_is_right() {
    let (_daemons, controller) = serve();
    // A group's name may be used again when it is done.
    for (world, size, iterations) in [(1, 4, 1), (2, 4096, 3), (3, 1_000_004, 2), (3, 0, 2)] {
        let size_argument = format!("--size={size}");
        let iterations_argument = format!("--iters={iterations}");
        let arguments = [&*size_argument, &iterations_argument, "--verify", "--json"];
        let hosts: Vec<Running> =
            (0..world).map(|rank| host(&controller, world, rank, &arguments)).collect();
        for (rank, host) in hosts.into_iter().enumerate() {
            let report = host.output().success().json();
            assert_eq!(report["rank"], rank);
            assert_eq!(report["checked"], size / 4 * iterations);
            assert_eq!(report["wrong"], 0);
        }
    }
}

/// Its packets are whole IP packets then, headers and invariant CRC. Over loopback the hosts have to send so too.
#[test]
fn a_switch_on_a_packet_socket_is_as_exact() {
    if let Err(error) = Socket::new(Domain::PACKET, Type::DGRAM, None) {
        return skip(&format!("a packet socket needs CAP_NET_RAW: {error}"));
    }
    let ([_controller, switch], controller) = serve_with(&["--driver=packet"]);
    assert!(has_packet_socket(switch.id()));
    let arguments = ["--size=1000004", "--iters=3", "--verify", "--json", "--driver=packet"];
    let hosts: Vec<Running> = (0..3).map(|rank| host(&controller, 3, rank, &arguments)).collect();
    for host in hosts {
        let report = host.output().success().json();
        assert_eq!([&report["checked"], &report["wrong"]], [750_003, 0]);
    }
}

/// By the numbers of its sockets, among those of all packet sockets.
fn has_packet_socket(process: u32) -> bool {
    let table = fs::read_to_string("/proc/net/packet").unwrap();
    let numbers: Vec<_> =
        table.lines().skip(1).filter_map(|line| line.split_whitespace().last()).collect();
    fs::read_dir(format!("/proc/{process}/fd")).unwrap().any(|entry| {
        let target = fs::read_link(entry.unwrap().path()).unwrap_or_default();
        let target = target.to_string_lossy();
        let number = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        number.is_some_and(|number| numbers.contains(&number))
    })
}

#[test]
fn a_rank_that_dies_fails_the_others_with_its_number() {
    let (_daemons, controller) = serve();
    let arguments = ["--size=4MiB", "--iters=100000"];
    let mut hosts: Vec<Running> =
        (0..3).map(|rank| host(&controller, 3, rank, &arguments)).collect();
    let mut victim = hosts.remove(1);
    // Now the group is there, and has begun or is about to.
    assert!(victim.line().starts_with("rank 1 of 3 in group g, over switch s0 at 127."));
    victim.signal("KILL");
    victim.output();
    for survivor in hosts {
        let output = survivor.output();
        assert!(output.failure(1).contains("rank 1"), "{}", output.stderr);
    }
}

#[test]
fn a_later_size_that_fails_is_an_object_as_each_before_it() {
    let (_daemons, controller) = serve();
    let arguments = ["--size=4,4KiB,4MiB", "--iters=300", "--json"];
    let [mut survivor, victim] = [0, 1].map(|rank| host(&controller, 2, rank, &arguments));
    for bytes in [4, 4096] {
        let report: Value = serde_json::from_str(&survivor.line()).unwrap();
        assert_eq!(report["bytes"], bytes, "{report}");
    }
    victim.signal("KILL");
    let output = survivor.output();
    let sentence = output.failure(1);
    assert!(sentence.contains("rank 1"), "{sentence}");
    let failure = output.json();
    assert_eq!(failure["error"]["exit_status"], 1, "{failure}");
    let message = failure["error"]["message"].as_str().unwrap();
    assert!(sentence.starts_with(message), "{failure}");
}

#[test]
fn ranks_of_one_machine_need_no_switch_and_one_that_wants_it_decides() {
    let listen = format!("{}:0", address());
    let mut controller =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let arguments = ["--size=4,1000004", "--iters=3", "--verify"];
    let ways = ["--path=auto", "--path=shared-memory", "--path=auto"];
    let hosts: Vec<Running> = (0..3)
        .map(|rank| host(&listen, 3, rank, &[&arguments[..], &[ways[rank as usize]]].concat()))
        .collect();
    for (rank, host) in hosts.into_iter().enumerate() {
        let output = host.output().success();
        let first = output.stdout.lines().next().unwrap();
        assert_eq!(first, format!("rank {rank} of 3 in group g, through shared memory"));
        assert!(output.stdout.contains("750003 elements checked, 0 wrong"), "{}", output.stdout);
    }
    let ways = ["--path=switch", "--path=shared-memory"];
    let hosts = [0, 1].map(|rank| host(&listen, 2, rank, &["--size=4", ways[rank as usize]]));
    for host in hosts {
        let output = host.output();
        let told =
            output.failure(1).contains("cannot use shared memory as rank 1 wants it: rank 0 at");
        assert!(told, "{}", output.stderr);
    }
}

#[test]
fn no_controller_is_told() {
    let nowhere = format!("{}:1", address());
    let output = host(&nowhere, 2, 0, &["--size=4"]).output();
    assert!(output.failure(1).contains(&nowhere), "{}", output.stderr);
    let output = host("nonsense", 2, 0, &["--size=4"]).output();
    assert!(output.failure(2).contains("HOST:PORT"), "{}", output.stderr);
}

#[test]
fn a_rank_that_waits_says_for_whom() {
    let listen = format!("{}:0", address());
    let mut controller =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let arguments = ["--size=4", "--timeout=3500ms"];
    let waits = |output: &Output, what: &str| {
        let first = output.stderr.lines().next().unwrap();
        assert_eq!(output.code(), Some(1));
        assert!(first.starts_with(&format!("note: waiting for {what}; giving up in ")), "{first}");
    };
    let ranks = [0, 2].map(|rank| host(&listen, 4, rank, &arguments));
    for rank in ranks {
        waits(&rank.output(), "ranks 1, 3 of 4 in group g");
    }
    waits(&host(&listen, 1, 0, &arguments).output(), "a switch for group g");
    let silent = std::net::TcpListener::bind((address(), 0)).unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    let output = host(&silent, 1, 0, &["--size=4", "--timeout=0s"]).output();
    waits(&output, &format!("an answer of the controller at {silent}"));
}

#[test]
fn a_rank_that_gets_no_connection_says_so() {
    // Once enough connections wait to be accepted, the kernel drops those that want to follow.
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(address().parse().unwrap(), 0).into()).unwrap();
    socket.listen(0).unwrap();
    let full = socket.local_addr().unwrap().as_socket().unwrap();
    let connect = |_| TcpStream::connect_timeout(&full, Duration::from_millis(200)).ok();
    let waiting: Vec<TcpStream> = (0..100).map_while(connect).collect();
    assert!(waiting.len() < 100);
    let output = host(&full.to_string(), 1, 0, &["--size=4", "--timeout=2500ms"]).output();
    let told = format!("note: waiting for an answer of the controller at {full}; giving up in ");
    assert!(output.stderr.starts_with(&told), "{}", output.stderr);
    assert_eq!(output.code(), Some(1));
    assert!(output.stderr.contains("cannot reach the controller"), "{}", output.stderr);
}

#[test]
fn a_rank_waits_for_a_controller_when_it_is_asked_to() {
    // Free now, and on an address that nobody else uses.
    let listener = std::net::TcpListener::bind((address(), 0)).unwrap();
    let listen = listener.local_addr().unwrap().to_string();
    drop(listener);
    let mut command = millstream();
    command.args(["allreduce", "--world=1", "--rank=0", "--size=4,4KiB", "--verify", "--wait=60s"]);
    command.args(["--path=switch", "--fallback=off"]);
    let mut rank = Running::start("rank 0", command.args(["--controller", &listen]));
    let _controller =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let _switch = Running::start("switch", millstream().args(["switch", "--controller", &listen]));
    // What has a default has it.
    let line = rank.line();
    assert!(line.starts_with("rank 0 of 1 in group default, over switch switch-127."), "{line}");
    let output = rank.output().success();
    assert!(output.stdout.contains("1 elements checked, 0 wrong"), "{}", output.stdout);
    assert!(output.stdout.contains("1024 elements checked, 0 wrong"), "{}", output.stdout);
}

#[test]
fn bench_allreduce_prints_the_figures_of_the_contract() {
    let common = ["bench", "allreduce", "--hosts=3", "--size=64KiB", "--dtype=int32", "--op=sum"];
    let report = |more: &[&str]| -> Output { run(&[&common[..], more].concat()).success() };
    let json = report(&["--iters=5", "--fan-in=3", "--json"]).json();
    for key in ["algbw_mb_per_s", "busbw_mb_per_s"] {
        assert!(json[key].as_f64().unwrap() > 0.0, "{key} in {json}");
    }
    let latency = |key: &str| json["latency_us"][key].as_f64().unwrap();
    assert!(latency("p50") > 0.0 && latency("p50") <= latency("p99"), "{json}");
    assert_eq!(json["wrong"], 0);
    assert_eq!(json["checked"], 3 * 5 * (16 << 10));
}
