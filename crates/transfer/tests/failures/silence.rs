//! Peers that do not answer: for how long they are waited for, and what then becomes of tasks.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_metadata::HandShakeDesc;
use millstream_transfer::{
    Config, FailureReason, Opcode, SegmentError, SubmitAndWaitError, SubmitError, SubmitOptions,
    TransferEngine, TransferState,
};

use super::fixture::{
    against, failure, failure_of, fake_peer, impatient, with_limits, with_patience,
};
use crate::common::{self, LONG, address, engine, private, request, shared};

#[test]
fn a_deadline_that_has_passed_ends_a_task_that_cannot_go_on() {
    let initiator = with_patience(LONG);
    let server = fake_peer(|_, _| None);
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    for opcode in [Opcode::Read, Opcode::Write] {
        let batch = initiator.allocate_batch(1).unwrap();
        let late = Instant::now() + Duration::from_millis(50);
        let options = SubmitOptions { deadline: Some(late), ..SubmitOptions::default() };
        let work = request(opcode, (&local, 0), &segment, 0, 4096);
        initiator.submit_with(&batch, &[work], &options).unwrap();
        assert!(initiator.wait(&batch, LONG));
        let status = initiator.status(&batch, 0).unwrap();
        assert_eq!(status.state, TransferState::Timeout, "{status:?}");
        // Nothing was sent.
        assert_eq!((status.transferred_bytes, status.target_undefined), (0, false));
        assert!(Instant::now() >= late);
    }
}

#[test]
fn without_a_fence_the_target_is_undefined() {
    let initiator = impatient();
    // It promises a queue pair where there is none, and does not know of fences.
    let server = fake_peer(|request, _| {
        Some(HandShakeDesc { qp_num: vec![7], incarnation: None, ..request.clone() })
    });
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    for (opcode, undefined) in [(Opcode::Write, true), (Opcode::Read, false)] {
        let batch = initiator.allocate_batch(1).unwrap();
        initiator.submit(&batch, &[request(opcode, (&local, 0), &segment, 0, 4096)]).unwrap();
        assert!(initiator.wait(&batch, LONG));
        let status = initiator.status(&batch, 0).unwrap();
        assert_eq!(status.state, TransferState::Failed, "{status:?}");
        assert_eq!(status.target_undefined, undefined, "{status:?}");
    }
}

#[test]
fn a_peer_whose_queue_pair_does_not_answer_is_gone() {
    // It promises a queue pair where there is none, and does not know of fences.
    let error = against(|request, _| {
        Some(HandShakeDesc { qp_num: vec![7], local_gid: None, ..request.clone() })
    });
    assert!(
        error.to_string().contains("retry count exceeded: the peer does not answer;"),
        "{error}"
    );
}

#[test]
fn patience_outlasts_handshakes_without_a_reply_and_connections_that_break() {
    // The last answer is one that no patience helps against: it shows that all before were tried.
    let answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc> = |request, before| match before {
        0..2 => None,
        2 => Some(HandShakeDesc { qp_num: vec![7], local_gid: None, ..request.clone() }),
        _ => Some(HandShakeDesc::refusal("enough")),
    };
    let error = failure_of(&with_patience(LONG), Opcode::Read, answer);
    assert!(error.to_string().ends_with("it refused to connect: enough"), "{error}");
}

/// Three failures pause a rail, here the only one, for a second.
#[test]
fn what_comes_after_a_failure_does_not_wait_for_the_end_of_a_pause() {
    // How often it is asked until the first request has failed is a matter of time.
    static ANSWERS: AtomicBool = AtomicBool::new(false);
    let initiator = impatient();
    let server =
        fake_peer(|_, _| ANSWERS.load(Ordering::Relaxed).then(|| HandShakeDesc::refusal("enough")));
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    let error = failure(&initiator, write);
    assert!(matches!(error.reason, FailureReason::Unreachable(_)), "{error}");
    ANSWERS.store(true, Ordering::Relaxed);
    let error = failure(&initiator, write);
    assert!(error.to_string().ends_with("it refused to connect: enough"), "{error}");
}

#[test]
fn patience_comes_to_an_end() {
    let error = failure_of(&with_patience(Duration::from_millis(300)), Opcode::Read, |_, _| None);
    assert!(matches!(error.reason, FailureReason::Unreachable(_)), "{error}");
}

#[test]
fn a_patient_engine_stops_at_once() {
    let initiator = with_patience(Duration::MAX);
    let local = private(&initiator, 100);
    let peer = engine(1);
    let _remote = shared(&peer, 100);
    // A handshake that is never answered: the port of a listener that accepts nothing.
    let segment = initiator.open_segment(peer.name()).unwrap();
    let address: SocketAddr = peer.name().parse().unwrap();
    drop(peer);
    let _silent = std::net::TcpListener::bind(address).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit(&batch, &[write]).unwrap();
    drop(initiator);
    let other = engine(1);
    let error = other.status(&batch, 0).unwrap().error.unwrap();
    assert!(matches!(error.reason, FailureReason::ShutDown), "{error}");
}

#[test]
fn a_peer_that_is_silent_is_not_waited_for_long() {
    let silent = std::net::TcpListener::bind((address(), 0)).unwrap();
    let initiator = with_limits(Duration::ZERO, Duration::from_millis(200));
    let error = initiator.open_segment(&silent.local_addr().unwrap().to_string()).unwrap_err();
    assert!(error.to_string().contains("gave no whole reply within 200ms"), "{error}");
}

/// Submissions to it: one waits, the next does not. A refresh asks again at any time.
#[test]
fn submissions_do_not_all_wait_for_a_peer_that_is_silent() {
    let initiator = impatient();
    let local = private(&initiator, 1000);
    let target = engine(1);
    let listen = target.listening_at();
    let remote = shared(&target, 1000);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 1000);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    drop((remote, target));
    let refused = || match initiator.submit_and_wait(&[write], LONG) {
        Err(SubmitAndWaitError::Submit(SubmitError::Refresh(error))) => error,
        other => panic!("{other:?}"),
    };
    // It has said that it closes. What is refused at once is asked for by each submission.
    for _ in 0..2 {
        let error = refused();
        assert!(matches!(error, SegmentError::Store { .. }), "{error}");
    }
    let silent = std::net::TcpListener::bind(listen).unwrap();
    let error = refused();
    assert!(matches!(error, SegmentError::Store { .. }), "{error}");
    let error = refused();
    assert!(matches!(error, SegmentError::Silent { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("segment \"{}\" did not answer ", segment.name())), "{text}");
    let error = initiator.refresh_segment(segment.id()).unwrap_err();
    assert!(matches!(error, SegmentError::Store { .. }), "{error}");
    // Another one answers: it is asked again, and what it says holds.
    drop(silent);
    let config = Config { listen, ..common::config(listen.ip()) };
    let again = TransferEngine::new(config).unwrap();
    initiator.refresh_segment(segment.id()).unwrap();
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert!(
        matches!(error, SubmitAndWaitError::Submit(SubmitError::TargetOutOfRange { .. })),
        "{error}"
    );
    drop(again);
}
