//! Targets in processes of their own that are killed or stopped in the middle of a batch.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::node::{self, Node, sum};
use common::{LONG, engine, pattern, private, request, wait_for_first_bytes};
use millstream_lab::{Stopwatch, Took};
use millstream_transfer::{
    Batch, Buffer, FailureReason, Opcode, Segment, TransferEngine, TransferRequest, TransferState,
    TransferStatus,
};

const LENGTH: usize = 16 << 20;

/// What ends within this: a batch whose target's host says that the process is gone.
const REFUSED: Duration = Duration::from_secs(1);

/// And one whose target is silent.
const SILENT: Duration = Duration::from_secs(5);

/// For how many seconds a process is stopped that is not waited for, if not 6: `10,60`.
const STOPPED: &str = "MILLSTREAM_TEST_STOPPED";

/// The processes that the other tests start. As a test of its own, nothing.
#[test]
fn a_node() {
    node::run();
}

/// So many requests of this length, one after the other.
fn requests(
    opcode: Opcode,
    local: &Buffer,
    segment: &Segment,
    count: usize,
    length: usize,
) -> Vec<TransferRequest> {
    let one = |index| {
        let offset = (index * length % LENGTH) as u64;
        request(opcode, (local, offset), segment, offset, length as u64)
    };
    (0..count).map(one).collect()
}

fn submit(engine: &TransferEngine, requests: &[TransferRequest]) -> Batch {
    let batch = engine.allocate_batch(requests.len()).unwrap();
    engine.submit(&batch, requests).unwrap();
    batch
}

fn is_failed(status: &TransferStatus) -> bool {
    status.state != TransferState::Completed
}

/// Does batches until one fails, with `harm` done once some have succeeded. Returns the one that
/// failed, and how long after the harm it ended.
fn until_failure(
    engine: &TransferEngine,
    requests: &[TransferRequest],
    harm: impl FnOnce() + Send,
) -> (Batch, Took) {
    thread::scope(|scope| {
        let mut harm = Some(harm);
        let mut harming = None;
        for round in 0.. {
            let batch = submit(engine, requests);
            if round == 2 {
                let harm = harm.take();
                harming = harm.map(|harm| {
                    scope.spawn(|| {
                        harm();
                        Stopwatch::start()
                    })
                });
            }
            assert!(engine.wait(&batch, LONG), "{:?}", engine.statuses(&batch));
            if engine.statuses(&batch).iter().any(is_failed) {
                let stopwatch = harming.unwrap().join().unwrap();
                return (batch, stopwatch.took());
            }
        }
        unreachable!()
    })
}

#[test]
fn batches_to_a_killed_process_end_within_a_second() {
    for (count, length) in [(128, 4096), (64, 65_536), (8, LENGTH)] {
        for opcode in [Opcode::Write, Opcode::Read] {
            for devices in [1, 2] {
                let mut node = Node::start(devices, LENGTH);
                let initiator = engine(devices);
                let local = private(&initiator, LENGTH);
                let segment = initiator.open_segment(&node.name).unwrap();
                let requests = requests(opcode, &local, &segment, count, length);
                let name = node.name.clone();
                let (batch, took) = until_failure(&initiator, &requests, || node.kill());
                println!("{opcode:?} {count} x {length} over {devices}: {took}");
                assert!(took.own() < REFUSED, "{opcode:?} {count} x {length}: {took}");
                for status in initiator.statuses(&batch) {
                    if is_failed(&status) {
                        assert_eq!(status.state, TransferState::Failed);
                        // Nobody is there to whose memory anything could come.
                        assert!(!status.target_undefined, "{status:?}");
                        let error = status.error.unwrap().to_string();
                        assert!(error.starts_with(&format!("peer {name} (nic ")), "{error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_process_that_closes_is_known_to_be_gone_at_once() {
    let mut node = Node::start(1, LENGTH);
    let initiator = engine(1);
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(&node.name).unwrap();
    let requests = requests(Opcode::Write, &local, &segment, 8, LENGTH);
    let (batch, took) = until_failure(&initiator, &requests, || node.close());
    println!("closed: {took}");
    assert!(took.own() < Duration::from_millis(200), "{took}");
    let error = initiator.status(&batch, 7).unwrap().error.unwrap();
    // It has said so, or nobody listens there any more.
    use FailureReason::{Closed, Unreachable};
    assert!(matches!(error.reason, Closed | Unreachable(_)), "{error}");
}

#[test]
fn what_a_silent_process_was_sent_is_undefined_and_it_is_found_again() {
    for devices in [1, 2] {
        let mut node = Node::start(devices, LENGTH);
        let initiator = engine(devices);
        let local = private(&initiator, LENGTH);
        let into = private(&initiator, LENGTH);
        let segment = initiator.open_segment(&node.name).unwrap();
        local.write(0, &pattern(LENGTH, 1)).unwrap();
        let mut both = requests(Opcode::Write, &local, &segment, 8, LENGTH);
        both.extend(requests(Opcode::Read, &into, &segment, 8, LENGTH));
        let (batch, took) = until_failure(&initiator, &both, || node.signal("STOP"));
        println!("silent over {devices}: {took}");
        assert!(took.own() < SILENT, "{took}");
        let statuses = initiator.statuses(&batch);
        let (writes, reads) = statuses.split_at(8);
        assert!(reads.iter().all(|status| !status.target_undefined), "{reads:?}");
        // Those that were begun: what has been sent may be written when the process goes on.
        assert!(writes.iter().any(|status| status.target_undefined), "{writes:?}");
        for status in statuses.iter().filter(|status| is_failed(status)) {
            let error = status.error.as_ref().unwrap().to_string();
            assert!(error.starts_with(&format!("peer {} (nic ", node.name)), "{error}");
        }
        // What waits in its sockets is read when it goes on, along with the request to connect.
        let others = pattern(LENGTH, 2);
        local.write(0, &others).unwrap();
        let whole = requests(Opcode::Write, &local, &segment, 1, LENGTH);
        node.signal("CONT");
        initiator.submit_and_wait(&whole, LONG).unwrap();
        for _ in 0..3 {
            assert_eq!(node.sum(), sum(&others), "nothing earlier is written any more");
            let read = requests(Opcode::Read, &into, &segment, 1, LENGTH);
            initiator.submit_and_wait(&read, LONG).unwrap();
        }
    }
}

#[test]
fn a_process_that_stands_still_for_a_second_is_waited_for() {
    let node = Node::start(1, LENGTH);
    let initiator = engine(1);
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(&node.name).unwrap();
    for opcode in [Opcode::Write, Opcode::Read] {
        let batch = submit(&initiator, &requests(opcode, &local, &segment, 16, LENGTH));
        wait_for_first_bytes(&initiator, &batch);
        node.signal("STOP");
        thread::sleep(Duration::from_secs(1));
        node.signal("CONT");
        assert!(initiator.wait(&batch, LONG));
        for status in initiator.statuses(&batch) {
            assert_eq!(status.state, TransferState::Completed, "{status:?}");
        }
    }
}

/// Each batch that is submitted meanwhile ends in time, and the first one after it succeeds.
#[test]
fn a_process_that_stands_still_for_long_is_found_again() {
    let list = std::env::var(STOPPED).unwrap_or("6".to_owned());
    for seconds in list.split(',').map(|text| text.parse().unwrap()) {
        let mut node = Node::start(1, LENGTH);
        let initiator = engine(1);
        let local = private(&initiator, LENGTH);
        let segment = initiator.open_segment(&node.name).unwrap();
        let requests = requests(Opcode::Write, &local, &segment, 8, LENGTH);
        let (batch, took) = until_failure(&initiator, &requests, || node.signal("STOP"));
        let over = Instant::now() - took.wall + Duration::from_secs(seconds);
        println!("stopped for {seconds} s: ended after {took}");
        assert!(took.own() < SILENT, "{took}");
        let statuses = initiator.statuses(&batch);
        assert!(statuses.iter().any(|status| status.target_undefined), "{statuses:?}");
        while Instant::now() < over {
            let stopwatch = Stopwatch::start();
            let error = initiator.submit_and_wait(&requests[..1], LONG).unwrap_err();
            let took = stopwatch.took();
            assert!(took.own() < SILENT, "{error}: {took}");
        }
        let bytes = pattern(LENGTH, seconds);
        local.write(0, &bytes).unwrap();
        node.signal("CONT");
        let start = Instant::now();
        initiator.submit_and_wait(&requests[..1], LONG).unwrap();
        println!("stopped for {seconds} s: found again after {:?}", start.elapsed());
        assert_eq!(node.sum(), sum(&bytes));
    }
}

#[test]
fn the_first_batch_to_a_restarted_process_succeeds_once_its_segment_is_asked_for() {
    let mut node = Node::start(1, LENGTH);
    let initiator = engine(1);
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(&node.name).unwrap();
    for round in 0..6 {
        let bytes = pattern(LENGTH, round);
        local.write(0, &bytes).unwrap();
        let whole = requests(Opcode::Write, &local, &segment, 1, LENGTH);
        initiator.submit_and_wait(&whole, LONG).unwrap();
        assert_eq!(node.sum(), sum(&bytes));
        // Half of the times the initiator has found out before.
        if round % 2 == 0 {
            until_failure(&initiator, &whole, || node.kill());
        }
        node.restart();
        initiator.refresh_segment(segment.id()).unwrap();
    }
}

#[test]
fn a_batch_whose_process_is_started_again_meanwhile_ends_within_a_second() {
    for opcode in [Opcode::Write, Opcode::Read] {
        let mut node = Node::start(2, LENGTH);
        let initiator = engine(2);
        let local = private(&initiator, LENGTH);
        local.write(0, &pattern(LENGTH, 1)).unwrap();
        let segment = initiator.open_segment(&node.name).unwrap();
        let requests = requests(opcode, &local, &segment, 8, LENGTH);
        let start = Instant::now();
        let (batch, took) = until_failure(&initiator, &requests, || node.restart());
        println!("{opcode:?}, restarted: {took} of {:?}", start.elapsed());
        assert!(took.own() < REFUSED, "{took}");
        for status in initiator.statuses(&batch).iter().filter(|status| is_failed(status)) {
            assert!(!status.target_undefined, "{status:?}");
            // It was noticed while nobody was there, or when the second was.
            use FailureReason::{Restarted, Unreachable};
            let error = status.error.as_ref().unwrap();
            assert!(matches!(error.reason, Restarted | Unreachable(_)), "{error}");
        }
        assert_eq!(node.sum(), sum(&vec![0; LENGTH]), "nothing is written to the second");
    }
}
