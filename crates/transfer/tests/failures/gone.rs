//! A side that dies or is started again, memory that is taken back, and tasks that are canceled.

use std::time::Duration;

use millstream_transfer::{
    Batch, Buffer, Config, FailureReason, Opcode, RdmaConfig, Segment, SubmitAndWaitError,
    SubmitError, TransferEngine, TransferRequest, TransferState,
};

use super::fixture::MIB;
use crate::common::{
    self, LONG, address, contents, devices, engine, pattern, private, request, shared,
    wait_for_first_bytes,
};

/// Submits `count` times the whole buffer.
fn submit_all(engine: &TransferEngine, local: &Buffer, segment: &Segment, count: usize) -> Batch {
    let whole = request(Opcode::Write, (local, 0), segment, 0, local.length() as u64);
    let batch = engine.allocate_batch(count).unwrap();
    engine.submit(&batch, &vec![whole; count]).unwrap();
    batch
}

#[test]
fn a_peer_that_dies_half_way_fails_the_task_and_is_named() {
    let (target, initiator) = (engine(1), engine(1));
    let name = target.name().to_owned();
    let nic = target.devices()[0].clone();
    let remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(&name).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 64);
    wait_for_first_bytes(&initiator, &batch);
    drop((target, remote));
    assert!(initiator.wait(&batch, LONG));
    let last = initiator.status(&batch, 63).unwrap();
    assert_eq!(last.state, TransferState::Failed);
    let error = last.error.unwrap();
    assert!(error.to_string().starts_with(&format!("peer {name} (nic {nic}): ")), "{error}");
    // It has said so, or nobody listens there any more.
    use FailureReason::{Closed, Unreachable};
    assert!(matches!(error.reason, Closed | Unreachable(_)), "{error}");
    for status in initiator.statuses(&batch) {
        match status.state {
            TransferState::Completed => assert_eq!(status.transferred_bytes, 16 * MIB),
            TransferState::Failed => assert!(status.transferred_bytes < 16 * MIB),
            other => panic!("{other:?}"),
        }
    }
    initiator.free(batch).unwrap();
    // And the next finds out at once.
    let again = request(Opcode::Read, (&local, 0), &segment, 0, 1);
    let error = initiator.submit_and_wait(&[again], LONG).unwrap_err();
    assert!(error.to_string().contains("no process listens there"), "{error}");
}

#[test]
fn the_initiator_may_die_half_way_too() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(target.name()).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 16);
    wait_for_first_bytes(&initiator, &batch);
    drop(initiator);
    // What was begun has ended: the batch does not depend on its engine.
    let other = engine(1);
    assert!(other.wait(&batch, LONG));
    let last = other.status(&batch, 15).unwrap();
    assert_eq!(last.state, TransferState::Failed);
    assert!(matches!(last.error.unwrap().reason, FailureReason::ShutDown));
    drop(local);
    // The target serves others.
    let local = private(&other, 100);
    local.write(0, &[7; 100]).unwrap();
    let segment = other.open_segment(target.name()).unwrap();
    other.submit_and_wait(&[request(Opcode::Write, (&local, 0), &segment, 5, 100)], LONG).unwrap();
    assert_eq!(contents(&remote, 5, 100), [7; 100]);
}

#[test]
fn a_restarted_peer_is_not_taken_for_the_one_before() {
    let device = address();
    let start = |port: u16| {
        let config = Config { listen: (device, port).into(), ..common::config(device) };
        let engine = TransferEngine::new(config).unwrap();
        engine.install_rdma(RdmaConfig::new(&[device])).unwrap();
        engine
    };
    let initiator = engine(1);
    let local = private(&initiator, 1000);
    let first = start(0);
    let name = first.name().to_owned();
    let port = name.rsplit_once(':').unwrap().1.parse().unwrap();
    let remote = shared(&first, 1000);
    let segment = initiator.open_segment(&name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1000);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    drop(first);

    // The same address in memory even: it is the same process, after all.
    let second = start(port);
    let address = std::ptr::with_exposed_provenance_mut::<u8>(remote.address() as usize);
    assert!(second.unregister_memory(address).is_err());
    // The first has said that it closes. So its segment is asked for again, once in vain.
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(matches!(error, SubmitAndWaitError::Submit(SubmitError::Restarted { .. })), "{error}");

    // It has other buffers now.
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(
        matches!(error, SubmitAndWaitError::Submit(SubmitError::TargetOutOfRange { .. })),
        "{error}"
    );
    let remote = shared(&second, 1000);
    local.write(0, &[9; 1000]).unwrap();
    initiator.refresh_segment(segment.id()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1000);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(contents(&remote, 0, 1000), [9; 1000]);
}

#[test]
fn memory_that_a_peer_took_back_fails_only_the_tasks_that_use_it() {
    let (target, initiator) = (engine(1), engine(1));
    let kept = shared(&target, 4 << 20);
    let taken = shared(&target, 4 << 20);
    let local = private(&initiator, 4 << 20);
    let bytes = pattern(4 << 20, 4);
    local.write(0, &bytes).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let to = |buffer: &Buffer| TransferRequest {
        opcode: Opcode::Write,
        source: local.address(),
        target: segment.id(),
        target_offset: buffer.address(),
        length: 4 * MIB,
    };
    let requests = [to(&kept), to(&taken), to(&kept)];
    drop(taken);
    let batch = initiator.allocate_batch(4).unwrap();
    initiator.submit(&batch, &requests).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let states: Vec<_> = initiator.statuses(&batch).iter().map(|status| status.state).collect();
    use TransferState::{Completed, Failed};
    assert_eq!(states, [Completed, Failed, Completed]);
    let error = initiator.status(&batch, 1).unwrap().error.unwrap();
    assert!(error.to_string().contains("remote access error"), "{error}");
    assert!(contents(&kept, 0, 4 << 20) == bytes);
    // The descriptor has proven wrong, so it is asked for again.
    let error = initiator.submit(&batch, &requests[1..2]).unwrap_err();
    assert!(matches!(error, SubmitError::TargetOutOfRange { .. }), "{error}");
}

#[test]
fn memory_taken_back_here_fails_what_still_needs_it() {
    let (target, initiator) = (engine(1), engine(1));
    let _remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(target.name()).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 16);
    wait_for_first_bytes(&initiator, &batch);
    drop(local);
    assert!(initiator.wait(&batch, LONG));
    let last = initiator.status(&batch, 15).unwrap();
    assert_eq!(last.state, TransferState::Failed);
    let text = last.error.unwrap().to_string();
    // The kernel's soft-RoCE calls it a "local QP operation error", 2.
    let rxe = devices::are_of_the_system() && text.contains("work completion status 2");
    assert!(text.contains("local protection error") || rxe, "{text}");
}

#[test]
fn what_is_canceled_stops() {
    let (target, initiator) = (engine(1), engine(1));
    let _remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    let segment = initiator.open_segment(target.name()).unwrap();
    let batch = submit_all(&initiator, &local, &segment, 16);
    wait_for_first_bytes(&initiator, &batch);
    assert!(initiator.cancel(&batch, 15).unwrap());
    assert!(!initiator.cancel(&batch, 15).unwrap());
    assert!(initiator.cancel(&batch, 16).is_err());
    assert!(initiator.wait(&batch, LONG));
    assert_eq!(initiator.status(&batch, 15).unwrap().state, TransferState::Canceled);
    assert_eq!(initiator.status(&batch, 0).unwrap().state, TransferState::Completed);

    // Running out of time is the same, for all of them.
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, 16 * MIB);
    let error = initiator.submit_and_wait(&[whole; 16], Duration::ZERO).unwrap_err();
    assert!(matches!(error, SubmitAndWaitError::Timeout { .. }), "{error}");
    initiator.submit_and_wait(&[whole], LONG).unwrap();
}
