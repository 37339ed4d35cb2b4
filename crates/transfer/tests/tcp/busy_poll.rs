//! Who waits for a connection looks at it before sleeping where waits are short, and only there.

use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use millstream_transfer::{Buffer, Opcode, TcpConfig, TransferEngine, TransferRequest};

use crate::common::{LONG, private, request, shared};
use crate::fixture::{at_port, engine};

const LENGTH: u64 = 4096;
const REQUESTS: u64 = 100;
const MIB: u64 = 1 << 20;

/// Two engines, and a request of one for memory of the other.
struct Asking {
    target: TransferEngine,
    initiator: TransferEngine,
    request: TransferRequest,
    memory: [Buffer; 2],
}

/// How often threads of an engine looked, and slept.
#[derive(Clone, Copy, Debug)]
struct Polls {
    busy: u64,
    sleeps: u64,
}

impl Asking {
    fn new(opcode: Opcode, length: u64, config: &TcpConfig) -> Self {
        let config = || TcpConfig { lanes: 1, ..config.clone() };
        let (target, initiator) = (engine(config()), engine(config()));
        let memory = [private(&initiator, length as usize), shared(&target, length as usize)];
        let segment = initiator.open_segment(target.name()).unwrap();
        let request = request(opcode, (&memory[0], 0), &segment, 0, length);
        Self { target, initiator, request, memory }
    }

    fn ask(&self, count: u64) {
        for _ in 0..count {
            self.initiator.submit_and_wait(&[self.request], LONG).unwrap();
        }
    }

    /// What happened meanwhile at the initiator and at the target.
    fn polls(&self, run: impl FnOnce(&Self)) -> [Polls; 2] {
        let engines = [&self.initiator, &self.target];
        let before = engines.map(polls);
        run(self);
        let after = engines.map(polls);
        [0, 1].map(|index| Polls {
            busy: after[index].busy - before[index].busy,
            sleeps: after[index].sleeps - before[index].sleeps,
        })
    }
}

fn polls(engine: &TransferEngine) -> Polls {
    let metrics = engine.metrics();
    let tcp = metrics.transports.iter().find(|it| it.transport == "tcp").unwrap();
    Polls { busy: tcp.busy_polls, sleeps: tcp.sleeps }
}

/// Any wait is short, also on a machine that stands still for a while.
fn for_ever() -> TcpConfig {
    TcpConfig { busy_poll: Some(100 * LONG), ..TcpConfig::default() }
}

#[test]
fn requests_one_after_the_other_have_nobody_sleep() {
    for (what, config) in [
        ("messages", for_ever()),
        ("checksums", TcpConfig { checksums: true, ..for_ever() }),
        ("version 2", TcpConfig { messages: false, ..for_ever() }),
    ] {
        // Of 64 KiB some comes behind the request.
        for (opcode, length) in
            [(Opcode::Write, LENGTH), (Opcode::Read, LENGTH), (Opcode::Write, 16 * LENGTH)]
        {
            let asking = Asking::new(opcode, length, &config);
            asking.ask(10);
            // Where a thread stands still between its request and its wait, the transport's waits, which always
            // sleeps, and does not count. Others may take the processor for a while, but not each time.
            let looked = |polls: &Polls| polls.sleeps <= REQUESTS / 4 && polls.busy >= REQUESTS / 2;
            let mut all = Vec::new();
            let found = (0..10).any(|_| {
                all.push(asking.polls(|asking| asking.ask(REQUESTS)));
                all.last().is_some_and(|polls| polls.iter().all(looked))
            });
            assert!(found, "{what} {opcode:?} {length}: {all:?}");
        }
    }
}

#[test]
fn without_it_nobody_looks() {
    let config = TcpConfig { busy_poll: Some(Duration::ZERO), ..TcpConfig::default() };
    let asking = Asking::new(Opcode::Write, LENGTH, &config);
    let [initiator, target] = asking.polls(|asking| asking.ask(REQUESTS));
    assert_eq!((initiator.busy, target.busy), (0, 0));
    assert!(target.sleeps >= REQUESTS, "{target:?}");
}

#[test]
fn nobody_looks_for_requests_that_come_now_and_then() {
    const COUNT: u64 = 40;
    let config = TcpConfig { busy_poll: Some(TcpConfig::BUSY_POLL), ..TcpConfig::default() };
    let asking = Asking::new(Opcode::Write, LENGTH, &config);
    let [_, target] = asking.polls(|asking| {
        for _ in 0..COUNT {
            asking.ask(1);
            // The target is to wait for so long.
            thread::sleep(Duration::from_millis(10));
        }
    });
    assert!(target.busy <= COUNT / 4, "{target:?}");
}

#[test]
fn an_engine_that_has_nothing_to_do_looks_at_nothing() {
    let config = TcpConfig { busy_poll: Some(TcpConfig::BUSY_POLL), ..TcpConfig::default() };
    let asking = Asking::new(Opcode::Write, LENGTH, &config);
    asking.ask(10 * REQUESTS);
    let polls = asking.polls(|_| thread::sleep(Duration::from_millis(300)));
    // The target may have begun its last wait after the first count.
    assert_eq!(polls[0].busy, 0, "{polls:?}");
    assert!(polls[1].busy <= 1, "{polls:?}");
}

#[test]
fn of_a_stream_only_the_next_request_is_looked_for() {
    const COUNT: u64 = 20;
    for opcode in [Opcode::Write, Opcode::Read] {
        // Messages of 1 MiB, all of which is under way when the last one is waited for.
        let asking = Asking::new(opcode, 16 * MIB, &for_ever());
        asking.ask(COUNT);
        let [initiator, target] = asking.polls(|asking| asking.ask(COUNT));
        assert_eq!(initiator.busy, 0, "{opcode:?}: {initiator:?}");
        assert!(target.busy > 0, "{opcode:?}: {target:?}");
    }
}

#[test]
fn who_looks_sees_when_time_is_over_and_what_others_cancel() {
    let asking = Asking::new(Opcode::Write, LENGTH, &for_ever());
    asking.ask(10);
    let Asking { target, initiator, memory, .. } = &asking;
    // It takes connections, and never answers.
    let silent = TcpListener::bind(SocketAddr::new(target.listening_at().ip(), 0)).unwrap();
    let (_server, segment) = at_port(initiator, target, silent.local_addr().unwrap());
    let request = request(Opcode::Write, (&memory[0], 0), &segment, 0, LENGTH);
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit(&batch, &[request]).unwrap();
    let start = Instant::now();
    let [polls, _] = asking.polls(|asking| {
        assert!(!asking.initiator.wait(&batch, Duration::from_millis(20)));
    });
    assert!(polls.busy > 0, "{polls:?}");
    thread::scope(|scope| {
        scope.spawn(|| assert!(initiator.wait(&batch, 100 * LONG)));
        assert!(initiator.cancel(&batch, 0).unwrap());
    });
    assert!(start.elapsed() < LONG);
}

#[test]
fn an_engine_ends_while_its_threads_look() {
    let asking = Asking::new(Opcode::Write, LENGTH, &for_ever());
    asking.ask(10);
    let Asking { target, initiator, .. } = asking;
    let (tell, ended) = channel();
    thread::spawn(move || {
        drop(target);
        let _ = tell.send(());
    });
    ended.recv_timeout(LONG).expect("its thread looks for the next request, and sees no end");
    drop(initiator);
}
