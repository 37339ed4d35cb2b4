//! Packets that come later than any queue pair waits: a relay between the NICs of an initiator and of a
//! target keeps them back for as long as a test wants, and then lets them go.

mod common;

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use common::relay::Setup;
use common::{LONG, contents, pattern, private, request, shared};
use millstream_transfer::{Opcode, SubmitOptions, TransferState, TransferStatus};

const LENGTH: usize = 1 << 20;

/// How a WRITE is brought to its end while its packets are kept back.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Cancel,
    Deadline,
    /// Nobody ends it: its queue pair gives up, and it is sent again.
    Retries,
}

/// Writes, keeps back its packets, has it end, and lets them go after everything is over. Returns its
/// status, and whether something of it was written after that.
fn late(by: By, confirms: bool) -> (TransferStatus, bool) {
    let setup = Setup::new();
    let Setup { target, initiator, relay, name, .. } = &setup;
    let remote = shared(target, LENGTH);
    let local = private(initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    // Through the relay, with nothing kept back.
    local.write(0, &pattern(LENGTH, 1)).unwrap();
    initiator.submit_and_wait(&[whole], LONG).unwrap();
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 1));
    assert!(relay.forth.passed.load(Ordering::Relaxed) > 0, "it goes through the relay");

    local.write(0, &pattern(LENGTH, 2)).unwrap();
    relay.hold();
    relay.passes_control.store(confirms, Ordering::SeqCst);
    let batch = initiator.allocate_batch(1).unwrap();
    // Before it, packets are on their way, also on a busy machine.
    let deadline = (by == By::Deadline).then(|| Instant::now() + Duration::from_millis(500));
    let options = SubmitOptions { deadline, ..SubmitOptions::default() };
    initiator.submit_with(&batch, &[whole], &options).unwrap();
    relay.wait_for_held(8);
    if by == By::Cancel {
        initiator.cancel(&batch, 0).unwrap();
    }
    assert!(initiator.wait(&batch, LONG));
    let status = initiator.status(&batch, 0).unwrap();
    // From here on the range is the target's again, as far as the status says.
    remote.write(0, &pattern(LENGTH, 3)).unwrap();
    relay.passes_control.store(true, Ordering::SeqCst);
    assert!(relay.release() >= 8);
    // What comes behind them has arrived, so they have.
    let into = private(initiator, LENGTH);
    let read = request(Opcode::Read, (&into, 0), &segment, 0, LENGTH as u64);
    let (first, written) = {
        let first = initiator.submit_and_wait(&[read], LONG).map(drop);
        (first, contents(&remote, 0, LENGTH) != pattern(LENGTH, 3))
    };
    println!("{by:?}, {confirms}: {status:?}, written: {written}, then {first:?}");
    first.unwrap();
    (status, written)
}

#[test]
fn packets_of_a_write_that_was_ended_are_not_written_later() {
    for (by, state) in [
        (By::Cancel, TransferState::Canceled),
        (By::Deadline, TransferState::Timeout),
        (By::Retries, TransferState::Failed),
    ] {
        let (status, written) = late(by, true);
        assert_eq!(status.state, state, "{status:?}");
        assert!(!status.target_undefined && !written, "{by:?}");
    }
}

#[test]
fn a_write_whose_end_the_target_does_not_confirm_is_undefined() {
    for by in [By::Cancel, By::Deadline, By::Retries] {
        let start = Instant::now();
        let (status, _) = late(by, false);
        assert!(status.target_undefined, "{by:?}: {status:?}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

/// Its first packets come after it was sent again over another connection and is done.
#[test]
fn packets_of_a_write_that_was_sent_again_are_not_written_later() {
    let setup = Setup::new();
    let Setup { target, initiator, relay, name, .. } = &setup;
    let remote = shared(target, LENGTH);
    let local = private(initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[whole], LONG).unwrap();
    local.write(0, &pattern(LENGTH, 2)).unwrap();
    relay.hold();
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit(&batch, &[whole]).unwrap();
    relay.wait_for_held(8);
    let before = relay.fenced.load(Ordering::SeqCst);
    // Until its queue pair has given up. What was kept back so far is let go when it is over.
    let end = Instant::now() + LONG;
    while relay.fenced.load(Ordering::SeqCst) == before {
        assert!(Instant::now() < end);
        thread::yield_now();
    }
    let late = std::mem::take(&mut *relay.forth.held.lock().unwrap());
    relay.release();
    assert!(initiator.wait(&batch, LONG));
    let status = initiator.status(&batch, 0).unwrap();
    assert_eq!(status.state, TransferState::Completed, "{status:?}");
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 2));
    remote.write(0, &pattern(LENGTH, 3)).unwrap();
    relay.hold();
    relay.forth.held.lock().unwrap().extend(late);
    assert!(relay.release() >= 8);
    let into = private(initiator, LENGTH);
    let read = request(Opcode::Read, (&into, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 3));
}
