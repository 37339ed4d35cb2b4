//! How tasks end that are not simply done: deadlines, futures, and what follows.

mod common;

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use common::{LONG, contents, engine, pattern, private, request, shared, wait_for_first_bytes};
use millstream_transfer::{Notification, Opcode, SubmitOptions, TransferEngine, TransferState};

const MIB: u64 = 1 << 20;

#[test]
fn a_deadline_in_mid_transfer_leaves_nothing_that_can_still_arrive() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 64 << 20);
    let local = private(&initiator, 64 << 20);
    local.write(0, &pattern(64 << 20, 3)).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, 64 * MIB);
    let batch = initiator.allocate_batch(17).unwrap();
    let options = SubmitOptions {
        deadline: Some(Instant::now() + Duration::from_millis(100)),
        ..SubmitOptions::default()
    };
    initiator.submit_with(&batch, &[whole; 16], &options).unwrap();
    // One without a deadline, which shares the connection.
    let other = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    initiator.submit(&batch, &[other]).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let statuses = initiator.statuses(&batch);
    assert_eq!(statuses[16].state, TransferState::Completed);
    assert_eq!(statuses[15].state, TransferState::Timeout, "1 GiB takes longer");
    for status in &statuses[..16] {
        assert!(!status.target_undefined, "the peer answers: {status:?}");
    }
    // So the target can be used for something else at once.
    remote.write(0, &vec![0; 64 << 20]).unwrap();
    let small = request(Opcode::Read, (&local, 0), &segment, 0, 1);
    (0..100).for_each(|_| _ = initiator.submit_and_wait(&[small], LONG).unwrap());
    assert!(contents(&remote, 0, 64 << 20).iter().all(|&byte| byte == 0));
}

#[test]
fn a_canceled_write_does_not_arrive_later() {
    let (target, initiator) = (engine(2), engine(2));
    let remote = shared(&target, 16 << 20);
    let local = private(&initiator, 16 << 20);
    local.write(0, &pattern(16 << 20, 4)).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    for round in 0..20 {
        let batch = initiator.allocate_batch(1).unwrap();
        let whole = request(Opcode::Write, (&local, 0), &segment, 0, 16 * MIB);
        initiator.submit(&batch, &[whole]).unwrap();
        if round % 2 == 0 {
            wait_for_first_bytes(&initiator, &batch);
        }
        initiator.cancel(&batch, 0).unwrap();
        assert!(initiator.wait(&batch, LONG));
        let status = initiator.status(&batch, 0).unwrap();
        assert!(
            matches!(status.state, TransferState::Canceled | TransferState::Completed),
            "{status:?}"
        );
        assert!(!status.target_undefined);
        remote.write(0, &vec![0; 16 << 20]).unwrap();
        let small = request(Opcode::Read, (&local, 0), &segment, 0, 1);
        initiator.submit_and_wait(&[small], LONG).unwrap();
        assert!(contents(&remote, 0, 16 << 20).iter().all(|&byte| byte == 0), "{round}");
        initiator.free(batch).unwrap();
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_batch_is_a_future() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 1 << 20);
    let local = private(&initiator, 1 << 20);
    let bytes = pattern(1 << 20, 5);
    local.write(0, &bytes).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    for _ in 0..50 {
        let batch = initiator.allocate_batch(1).unwrap();
        let whole = request(Opcode::Write, (&local, 0), &segment, 0, MIB);
        initiator.submit(&batch, &[whole]).unwrap();
        let mut finished = pin!(batch.finished());
        let start = Instant::now();
        while finished.as_mut().poll(&mut context) == Poll::Pending {
            thread::park_timeout(LONG);
            assert!(start.elapsed() < LONG, "nobody has woken it");
        }
        assert_eq!(initiator.status(&batch, 0).unwrap().state, TransferState::Completed);
    }
    assert!(contents(&remote, 0, 1 << 20) == bytes);
}

fn message(text: &str) -> Notification {
    Notification { name: "test".to_owned(), text: text.to_owned() }
}

/// Waits until a message has come.
fn messages(engine: &TransferEngine) -> Vec<Notification> {
    let end = Instant::now() + LONG;
    loop {
        let messages = engine.take_notifications();
        if !messages.is_empty() {
            return messages;
        }
        assert!(Instant::now() < end);
        thread::yield_now();
    }
}

#[test]
fn messages_come_once_the_data_is_there() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 1 << 20);
    let local = private(&initiator, 1 << 20);
    let segment = initiator.open_segment(target.name()).unwrap();
    for round in 0..20 {
        let bytes = pattern(1 << 20, round);
        local.write(0, &bytes).unwrap();
        let batch = initiator.allocate_batch(2).unwrap();
        let halves = [0, MIB / 2]
            .map(|offset| request(Opcode::Write, (&local, offset), &segment, offset, MIB / 2));
        let notify = Some(message(&round.to_string()));
        initiator
            .submit_with(&batch, &halves, &SubmitOptions { notify, ..SubmitOptions::default() })
            .unwrap();
        assert_eq!(messages(&target), [message(&round.to_string())]);
        assert!(contents(&remote, 0, 1 << 20) == bytes);
    }
}

#[test]
fn messages_are_sent_alone_too_and_refused_where_nobody_is() {
    let (target, initiator) = (engine(1), engine(1));
    let segment = initiator.open_segment(target.name()).unwrap();
    initiator.notify(segment.id(), &message("hello")).unwrap();
    assert_eq!(target.take_notifications(), [message("hello")]);
    assert!(target.take_notifications().is_empty());
    let own = initiator.open_segment(initiator.name()).unwrap();
    initiator.notify(own.id(), &message("self")).unwrap();
    assert_eq!(initiator.take_notifications(), [message("self")]);
    initiator.probe(target.name()).unwrap();
    drop(target);
    let error = initiator.notify(segment.id(), &message("late")).unwrap_err().to_string();
    assert!(error.contains("no process listens there"), "{error}");
    assert!(initiator.probe(segment.name()).is_err());
    initiator.close_segment(segment.id()).unwrap();
    assert!(initiator.notify(segment.id(), &message("closed")).is_err());
}

#[test]
fn a_failed_task_sends_no_message() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 4096);
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    drop(remote);
    let batch = initiator.allocate_batch(1).unwrap();
    let options = SubmitOptions { notify: Some(message("lie")), ..SubmitOptions::default() };
    initiator.submit_with(&batch, &[write], &options).unwrap();
    assert!(initiator.wait(&batch, LONG));
    assert_eq!(initiator.status(&batch, 0).unwrap().state, TransferState::Failed);
    // What comes after it is there.
    initiator.notify(segment.id(), &message("after")).unwrap();
    // Another thread sends what follows a task: it would be there after some more round trips.
    for round in 0..10 {
        assert_eq!(target.take_notifications(), [message("after")], "{round}");
        initiator.notify(segment.id(), &message("after")).unwrap();
    }
}
