//! A controller that stands still, is killed and started again, or is cut off, in the middle of collectives.

mod common;

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{Running, address, goes_on, millstream};

/// The bound that is promised, from the death of a rank, or the return of the controller, to the error.
const BOUND: Duration = Duration::from_secs(5);

/// All deadlines of those that should come back are over after this time.
const SETTLED: Duration = Duration::from_secs(6);

fn controller(listen: &str) -> (Running, String) {
    let mut command = millstream();
    command.env("MILLSTREAM_LOG", "millstream_control=info");
    let mut controller =
        Running::start("controller", command.args(["controller", "--listen", listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    (controller, listen)
}

fn switch(controller: &str, bind: &str) -> Running {
    let arguments = ["switch", "--controller", controller, "--name=s0", "--bind", bind];
    let mut switch = Running::start("switch", millstream().args(arguments));
    switch.ready();
    switch
}

/// A rank that goes on for minutes, however fast the machine is, and prints a line for each of its thousands of sizes.
fn rank(controller: &str, group: &str, world: u32, rank: u32) -> Running {
    let sizes = vec!["4KiB"; 20_000].join(",");
    let (world, rank) = (world.to_string(), rank.to_string());
    let mut command = millstream();
    command.args([
        "allreduce",
        "--path=switch",
        "--fallback=off",
        "--controller",
        controller,
        "--group",
        group,
        "--world",
        &world,
    ]);
    command.args(["--rank", &rank, "--bind", &address(), "--dtype=int32", "--op=sum"]);
    command.args(["--iters=500", "--verify", "--size", &sizes]);
    Running::start(&format!("rank {rank}"), &mut command)
}

fn job(controller: &str, world: u32) -> Vec<Running> {
    let mut ranks: Vec<Running> =
        (0..world).map(|number| rank(controller, "job", world, number)).collect();
    for rank in &mut ranks {
        assert!(rank.line().contains("in group job, over switch s0"));
    }
    ranks
}

/// A group that is new is served.
fn serves(controller: &str) {
    let mut command = millstream();
    command.args([
        "allreduce",
        "--path=switch",
        "--fallback=off",
        "--controller",
        controller,
        "--group=other",
        "--world=1",
    ]);
    command.args(["--rank=0", "--size=4", "--verify", "--bind", &address()]);
    Running::start("another group", &mut command).output().success();
}

/// Waits until so many hosts have come back.
fn come_back(controller: &mut Running, hosts: usize) {
    for _ in 0..hosts {
        while !controller.error_line().contains("a host comes back") {}
    }
}

/// The last rank is lost, and the others name it in time.
fn is_named(mut ranks: Vec<Running>, since: Instant) {
    let dead = ranks.len() - 1;
    drop(ranks.pop());
    for survivor in ranks {
        let output = survivor.output();
        let took = since.elapsed();
        assert!(output.failure(1).contains(&format!("rank {dead} is lost")), "{}", output.stderr);
        assert!(took < BOUND, "{took:?}: {}", output.stderr);
    }
}

fn kill(process: Running) {
    process.signal("KILL");
    drop(process);
}

#[test]
fn a_controller_that_stands_still_disturbs_no_call() {
    let (controller, listen) = controller(&format!("{}:0", address()));
    let _switch = switch(&listen, &address());
    let mut ranks = job(&listen, 2);
    for seconds in [3, 5, 30] {
        controller.signal("STOP");
        goes_on(&mut ranks, Duration::from_secs(seconds));
        controller.signal("CONT");
        goes_on(&mut ranks, SETTLED);
    }
    serves(&listen);
    let now = Instant::now();
    ranks[1].signal("KILL");
    is_named(ranks, now);
}

#[test]
fn a_controller_that_is_killed_and_started_again_disturbs_no_call() {
    let (mut daemon, listen) = controller(&format!("{}:0", address()));
    let _switch = switch(&listen, &address());
    let mut ranks = job(&listen, 3);
    for away in [0, 4] {
        kill(daemon);
        goes_on(&mut ranks, Duration::from_secs(away));
        (daemon, _) = controller(&listen);
        come_back(&mut daemon, 3);
        goes_on(&mut ranks, SETTLED);
        serves(&listen);
    }
    // A rank that dies while there is no controller is named by the switch, or when there is one again.
    kill(daemon);
    ranks[2].signal("KILL");
    let _daemon = controller(&listen);
    is_named(ranks, Instant::now());
    // The name is free when the job is over.
    let mut ranks = job(&listen, 2);
    goes_on(&mut ranks, Duration::from_secs(1));
}

#[test]
fn a_rank_that_dies_while_the_controller_stands_still_is_named() {
    let (controller, listen) = controller(&format!("{}:0", address()));
    let _switch = switch(&listen, &address());
    let mut ranks = job(&listen, 3);
    controller.signal("STOP");
    drop(ranks.pop().inspect(|last| last.signal("KILL")));
    // By the switch alone, which needs its time to be sure: 4.3 s and a probe.
    for survivor in ranks {
        let output = survivor.output();
        let named = "rank 2 is lost: it no longer answers the switch";
        assert!(output.failure(1).contains(named), "{}", output.stderr);
    }
    controller.signal("CONT");
    // What it finds then ends the old group.
    let mut ranks = job(&listen, 2);
    goes_on(&mut ranks, Duration::from_secs(1));
}

/// Carries a connection to the controller, until it is cut.
struct Relay {
    listen: String,
    streams: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl Relay {
    fn new(to: &str) -> Self {
        let listener = TcpListener::bind((address(), 0)).unwrap();
        let listen = listener.local_addr().unwrap().to_string();
        let streams = Arc::new(Mutex::new(Some(Vec::new())));
        let (to, shared): (SocketAddr, _) = (to.parse().unwrap(), Arc::clone(&streams));
        // Ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                // Closed at once while the link is cut.
                let mut streams = shared.lock().unwrap();
                let Some(streams) = &mut *streams else { continue };
                let Ok(other) = TcpStream::connect(to) else { continue };
                for (from, to) in [(&stream, &other), (&other, &stream)] {
                    let [mut from, mut to] = [from, to].map(|it| it.try_clone().unwrap());
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                streams.extend([stream, other]);
            }
        });
        Self { listen, streams }
    }

    fn cut(&self) {
        for stream in self.streams.lock().unwrap().take().into_iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn heal(&self) {
        *self.streams.lock().unwrap() = Some(Vec::new());
    }
}

#[test]
fn a_switch_that_the_controller_cannot_reach_serves_what_it_serves() {
    let (_controller, listen) = controller(&format!("{}:0", address()));
    let relay = Relay::new(&listen);
    let _switch = switch(&relay.listen, &address());
    let mut ranks = job(&listen, 2);
    for seconds in [0, 10] {
        relay.cut();
        goes_on(&mut ranks, Duration::from_secs(seconds));
        relay.heal();
        goes_on(&mut ranks, SETTLED);
        serves(&listen);
    }
}

#[test]
fn a_switch_that_is_killed_and_back_at_once_is_taken_back() {
    let (_controller, listen) = controller(&format!("{}:0", address()));
    let bind = address();
    let daemon = switch(&listen, &bind);
    let ranks = job(&listen, 2);
    kill(daemon);
    let killed = Instant::now();
    let _daemon = switch(&listen, &bind);
    assert!(killed.elapsed() < BOUND, "{:?}", killed.elapsed());
    for rank in ranks {
        let output = rank.output();
        let text = output.failure(1);
        assert!(text.contains(&format!("the switch at {bind} is lost")), "{text}");
        assert!(killed.elapsed() < BOUND, "{:?}: {text}", killed.elapsed());
    }
    let mut ranks = job(&listen, 2);
    goes_on(&mut ranks, Duration::from_secs(1));
}
