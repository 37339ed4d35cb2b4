//! Many peers that are killed or stopped at once, each in the middle of a batch, while batches with others
//! go on.
//!
//! `MILLSTREAM_TEST_DEAD=64x8 cargo nextest run -p millstream-transfer --test many_killed --no-capture` does so
//! with 64 peers of 8 NICs. Without, they are fewer.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{LONG, dead_peers, engine, is_emulated, numbers, private, request, shared};
use millstream_lab::Stopwatch;
use millstream_transfer::{Batch, Buffer, Opcode, Segment, TransferEngine, TransferState};

/// Set in processes that the tests start: how many engines, and devices of each.
const ROLE: &str = "MILLSTREAM_TEST_PEERS";

const PROCESSES: usize = 4;
const HEALTHY: usize = 2;
const LENGTH: usize = 1 << 20;
/// Of a batch, more than are done before its peer is dead.
const REQUESTS: usize = 256;

/// Within this all has ended that was for peers whose hosts say that they are gone.
const REFUSED: Duration = Duration::from_secs(1);
/// And for those that are silent.
const SILENT: Duration = Duration::from_secs(5);
/// A batch with a healthy peer that takes longer has waited for others.
const HELD_UP: Duration = Duration::from_secs(1);
/// In place of `REFUSED` and `HELD_UP`, where the processor is emulated.
const EMULATED: Duration = Duration::from_secs(4);

/// The processes that the tests start. As a test of its own, nothing.
#[test]
fn peers() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (engines, nics) = numbers(&role);
    let engines: Vec<_> = (0..engines).map(|_| engine(nics)).collect();
    let _buffers: Vec<_> = engines.iter().map(|engine| shared(engine, LENGTH)).collect();
    engines.iter().for_each(|engine| println!("peer: {}", engine.name()));
    // Until the test is over.
    let _ = std::io::stdin().read_line(&mut String::new());
    std::process::exit(0);
}

/// A process with several engines. Dropped, it is killed.
struct Peers {
    child: Child,
    _input: ChildStdin,
    names: Vec<String>,
}

impl Peers {
    fn start(engines: usize, nics: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "peers", "--nocapture"]).env(ROLE, format!("{engines}x{nics}"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let name = |line: String| line.split_once("peer: ").map(|(_, name)| name.to_owned());
        let names = lines.filter_map(|line| name(line.unwrap())).take(engines).collect();
        Self { _input: child.stdin.take().unwrap(), child, names }
    }
}

/// To all at once.
fn signal(processes: &mut [Peers], signal: &str) {
    // An emulated processor takes a tenth of a second to start a program.
    if signal == "KILL" {
        return processes.iter_mut().for_each(|process| process.child.kill().unwrap());
    }
    let ids = processes.iter().map(|process| process.child.id().to_string());
    assert!(Command::new("kill").args(["-s", signal]).args(ids).status().unwrap().success());
}

impl Drop for Peers {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn open(initiator: &TransferEngine, peers: &[Peers]) -> Vec<Segment> {
    let names = peers.iter().flat_map(|peers| &peers.names);
    names.map(|name| initiator.open_segment(name).unwrap()).collect()
}

/// WRITEs and READs of a peer's whole buffer by turns.
fn begin(initiator: &TransferEngine, local: &Buffer, segment: &Segment) -> Batch {
    let whole = |opcode| request(opcode, (local, 0), segment, 0, LENGTH as u64);
    let both = [whole(Opcode::Write), whole(Opcode::Read)];
    let batch = initiator.allocate_batch(REQUESTS).unwrap();
    initiator.submit(&batch, &both.repeat(REQUESTS / 2)).unwrap();
    batch
}

/// Does batches with a peer until `over`. How many, and how long the longest has taken.
fn go_on(
    initiator: &TransferEngine,
    local: &Buffer,
    segment: &Segment,
    over: &AtomicBool,
) -> (usize, Duration) {
    let write = request(Opcode::Write, (local, 0), segment, 0, 64 << 10);
    let (mut count, mut longest) = (0, Duration::ZERO);
    while !over.load(Ordering::Relaxed) {
        let start = Instant::now();
        initiator.submit_and_wait(&[write; 16], LONG).unwrap();
        (count, longest) = (count + 1, longest.max(start.elapsed()));
    }
    (count, longest)
}

/// What is dead is known to be so within `limit`.
fn all_at_once(signal: &str, limit: Duration) {
    let (peers, nics) = dead_peers().unwrap_or((16, 4));
    let start = Instant::now();
    let mut processes: Vec<_> =
        (0..PROCESSES).map(|_| Peers::start(peers / PROCESSES, nics)).collect();
    let healthy = [Peers::start(HEALTHY, 1)];
    let initiator = engine(nics);
    let [local, other] = [(); 2].map(|()| private(&initiator, LENGTH));
    let segments = open(&initiator, &processes);
    let living = open(&initiator, &healthy);
    println!("{} peers of {nics} NICs are there after {:?}", segments.len(), start.elapsed());
    for segment in &living {
        let write = request(Opcode::Write, (&other, 0), segment, 0, 1);
        initiator.submit_and_wait(&[write], LONG).unwrap();
    }
    let over = AtomicBool::new(false);
    let ended = thread::scope(|scope| {
        let batches: Vec<_> =
            segments.iter().map(|segment| begin(&initiator, &local, segment)).collect();
        // All of them are in the middle of it.
        let first = |batch| initiator.status(batch, 0).unwrap().transferred_bytes;
        for batch in &batches {
            while first(batch) == 0 {
                assert!(start.elapsed() < LONG);
                thread::yield_now();
            }
        }
        println!("all are busy after {:?}", start.elapsed());
        let last = |batch| initiator.status(batch, REQUESTS - 1).unwrap().state;
        let busy = batches.iter().all(|batch| last(batch) != TransferState::Completed);
        assert!(busy, "more requests are needed");
        let mut going = Vec::new();
        for segment in &living {
            going.push(scope.spawn(|| go_on(&initiator, &other, segment, &over)));
        }
        let stopwatch = Stopwatch::start();
        self::signal(&mut processes, signal);
        let signaled = stopwatch.took();
        assert!(batches.iter().all(|batch| initiator.wait(batch, LONG)));
        let took = stopwatch.took();
        over.store(true, Ordering::Relaxed);
        for going in going {
            let (count, longest) = going.join().unwrap();
            println!("{count} batches beside it, the longest of {longest:?}");
            // As if all that the machine took away was taken from that one.
            let most = if is_emulated() { EMULATED } else { HELD_UP } + stopwatch.took().held_up;
            assert!(count > 0 && longest < most, "{count} {longest:?}, {took}");
        }
        println!("{signal}: sent in {signaled}, all has ended after {took}");
        assert!(took.own() < limit, "{took}");
        batches
    });
    let mut undefined = 0;
    for batch in &ended {
        let statuses = initiator.statuses(batch);
        assert!(statuses.iter().any(|status| status.state == TransferState::Failed));
        for status in statuses {
            assert!(matches!(status.state, TransferState::Completed | TransferState::Failed));
            undefined += usize::from(status.target_undefined);
        }
    }
    // Who is stopped may write it later.
    assert_eq!(undefined > 0, signal == "STOP", "{undefined}");
}

#[test]
fn peers_that_are_killed_at_once_hold_up_nobody() {
    all_at_once("KILL", if is_emulated() { EMULATED } else { REFUSED });
}

#[test]
fn peers_that_are_stopped_at_once_hold_up_nobody() {
    all_at_once("STOP", SILENT);
}
