//! Every refusal reaches who has to know, names what is wrong, and touches nothing.

use millstream_verbs::{
    Access, AsyncEvent, Completion, CompletionOperation, CompletionStatus, QueuePairState,
    ReceiveRequest, RegionError, SendOperation,
};

use crate::harness::{
    ALL_ACCESS, Connection, End, PATIENCE, SEND, USUAL, is_rxe, next, next_good, piece, read_from,
    register, register_with, request, two, two_with, write_to,
};

/// Waits until a queue pair has failed.
fn await_error(end: &End) {
    let start = std::time::Instant::now();
    while end.pair.state() != QueuePairState::Error {
        assert!(start.elapsed() < PATIENCE, "still in {}", end.pair.state());
        std::thread::yield_now();
    }
}

#[test]
fn remote_access_errors_reach_the_sender_and_touch_nothing() {
    for (offset, wrong_key) in [(1_u64, 0_u32), (0, 0x100), (u64::MAX - 2000, 0)] {
        let [a, b] = two();
        let mut source = vec![1; 1000];
        let mut target = vec![0; 1000];
        let source_region = register(&a, &mut source);
        let target_region = register(&b, &mut target);
        let operation = SendOperation::Write {
            remote_address: target_region.address().wrapping_add(offset),
            remote_key: target_region.remote_key() ^ wrong_key,
            immediate: None,
        };
        a.pair.post_send(&[request(1, operation, piece(&source_region, 0, 1000))]).unwrap();
        let failed = next(&a.completions, 1)[0];
        assert_eq!(failed.status, CompletionStatus::RemoteAccess);
        assert_eq!((failed.id, failed.operation), (1, CompletionOperation::Write));
        assert_eq!((failed.length, failed.qpn), (1000, a.pair.number()));
        assert_eq!(a.pair.state(), QueuePairState::Error);
        await_error(&b);
        // No completion tells the peer, and the kernel's soft-RoCE makes no event of it.
        if !is_rxe(&b.device) {
            let denied = AsyncEvent::QueuePairAccessError(b.pair.number());
            assert_eq!(b.device.wait_event(PATIENCE), Some(denied));
        }
        drop((source_region, target_region));
        assert_eq!(target, [0; 1000]);
    }
}

#[test]
fn rights_that_were_not_granted_are_refused() {
    for (access, write) in [
        (Access::LOCAL_WRITE | Access::REMOTE_READ, true),
        (Access::LOCAL_WRITE | Access::REMOTE_WRITE, false),
    ] {
        let [a, b] = two();
        let (mut local, mut remote) = (vec![1; 100], vec![0; 100]);
        let local_region = register(&a, &mut local);
        let remote_region = register_with(&b.domain, &mut remote, access);
        let operation = if write { write_to(&remote_region, 0) } else { read_from(&remote_region) };
        a.pair.post_send(&[request(1, operation, piece(&local_region, 0, 100))]).unwrap();
        assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::RemoteAccess);
        drop((local_region, remote_region));
        assert_eq!((local, remote), (vec![1; 100], vec![0; 100]));
    }
}

#[test]
fn a_region_of_another_domain_is_refused() {
    let [a, b] = two();
    let other = b.device.allocate_protection_domain();
    let (mut source, mut target) = (vec![1; 100], vec![0; 100]);
    let source_region = register(&a, &mut source);
    let target_region = register_with(&other, &mut target, ALL_ACCESS);
    let write = request(1, write_to(&target_region, 0), piece(&source_region, 0, 100));
    a.pair.post_send(&[write]).unwrap();
    assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::RemoteAccess);
    drop((source_region, target_region));
    assert_eq!(target, [0; 100]);
}

#[test]
fn a_region_that_is_gone_is_refused() {
    let [a, b] = two();
    let (mut source, mut target) = (vec![1; 100], vec![0; 100]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let write = request(1, write_to(&target_region, 0), piece(&source_region, 0, 100));
    a.pair.post_send(&[write]).unwrap();
    next_good(&a.completions, 1);
    drop(target_region);
    target.fill(0);
    a.pair.post_send(&[write]).unwrap();
    assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::RemoteAccess);
    assert_eq!(target, [0; 100]);
    drop(source_region);
}

#[test]
fn local_memory_that_is_not_registered_is_refused() {
    let [a, b] = two();
    let (mut source, mut target) = (vec![1; 100], vec![0; 100]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let beyond = piece(&source_region, 50, 100);
    a.pair.post_send(&[request(1, write_to(&target_region, 0), beyond)]).unwrap();
    let failed = next(&a.completions, 1)[0];
    // The kernel's soft-RoCE of Linux 6.12 flushes the one at fault too.
    let flushed = is_rxe(&a.device) && failed.status == CompletionStatus::Flushed;
    assert!(failed.status == CompletionStatus::LocalProtection || flushed, "{failed:?}");
    assert_eq!((failed.id, failed.operation), (1, CompletionOperation::Write));
    assert_eq!(a.pair.state(), QueuePairState::Error);
    assert_eq!(a.device.poll_event(), Some(AsyncEvent::QueuePairFatal(a.pair.number())));
    drop((source_region, target_region));
    assert_eq!(target, [0; 100]);
}

#[test]
fn a_receive_that_is_too_short_fails_at_both_ends() {
    let [a, b] = two();
    let (mut source, mut target) = (vec![1; 5000], vec![0; 5000]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let pieces = [piece(&target_region, 0, 4999)];
    b.pair.post_receive(&[ReceiveRequest { id: 7, pieces }]).unwrap();
    a.pair.post_send(&[request(1, SEND, piece(&source_region, 0, 5000))]).unwrap();
    let sent = next(&a.completions, 1)[0].status;
    let failed = next(&b.completions, 1)[0];
    let expected = (CompletionStatus::RemoteInvalidRequest, CompletionStatus::LocalLength);
    // IBTA 9.9.3 has the responder answer so; the kernel's soft-RoCE takes it for a receive request
    // that is broken (2 is IBV_WC_LOC_QP_OP_ERR).
    let of_rxe = (CompletionStatus::RemoteOperational, CompletionStatus::Other(2));
    let actual = (sent, failed.status);
    assert!(actual == expected || is_rxe(&a.device) && actual == of_rxe, "{actual:?}");
    assert_eq!((failed.id, failed.operation), (7, CompletionOperation::Receive));
    drop((source_region, target_region));
    assert_eq!(target[4999], 0);
}

#[test]
fn a_receiver_that_is_late_is_waited_for() {
    let [a, b] = two();
    let (mut source, mut target) = (vec![1; 100], vec![0; 100]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    a.pair.post_send(&[request(1, SEND, piece(&source_region, 0, 100))]).unwrap();
    // Refused meanwhile, and sent again; if this machine is so slow that it was not, it still has
    // to arrive.
    assert!(!a.completions.wait(std::time::Duration::from_millis(50)));
    let pieces = [piece(&target_region, 0, 100)];
    b.pair.post_receive(&[ReceiveRequest { id: 2, pieces }]).unwrap();
    next_good(&a.completions, 1);
    next_good(&b.completions, 1);
    drop((source_region, target_region));
    assert_eq!(target, source);
}

#[test]
fn a_receiver_that_never_comes_is_reported() {
    let [a, b] = two_with(Connection { rnr_retry: 2, ..USUAL });
    let mut source = vec![1; 100];
    let source_region = register(&a, &mut source);
    a.pair.post_send(&[request(1, SEND, piece(&source_region, 0, 100))]).unwrap();
    let failed = next(&a.completions, 1)[0];
    assert_eq!(failed.status, CompletionStatus::ReceiverNotReadyExceeded);
    assert_eq!(a.pair.state(), QueuePairState::Error);
    drop((b, source_region));
}

#[test]
fn a_closed_peer_is_reported() {
    let [a, b] = two_with(Connection { retry_count: 2, ..USUAL });
    let mut source = vec![1; 1000];
    let source_region = register(&a, &mut source);
    drop(b);
    let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
    a.pair.post_send(&[request(1, operation, piece(&source_region, 0, 1000))]).unwrap();
    assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::RetryExceeded);
    drop(source_region);
}

#[test]
fn a_failure_flushes_what_follows_in_order_and_is_an_event_once() {
    let [a, b] = two();
    let (mut source, mut target) = (vec![1; 100], vec![0; 100]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let receives: Vec<_> = (20..25).map(|id| ReceiveRequest { id, pieces: [] }).collect();
    a.pair.post_receive(&receives).unwrap();
    let bytes = piece(&source_region, 0, 100);
    let requests: Vec<_> = (0..6)
        .map(|id| {
            let offset = if id == 2 { 1 } else { 0 };
            let read = id == 4;
            let operation =
                if read { read_from(&target_region) } else { write_to(&target_region, offset) };
            let signaled = id != 3;
            millstream_verbs::SendRequest { signaled, ..request(id, operation, bytes) }
        })
        .collect();
    a.pair.post_send(&requests).unwrap();
    // Failures complete though they are not signaled.
    let all = next(&a.completions, 11);
    let (receives, sends): (Vec<Completion>, Vec<Completion>) =
        all.into_iter().partition(|c| c.operation == CompletionOperation::Receive);
    assert!(receives.iter().all(|c| c.status == CompletionStatus::Flushed), "{receives:?}");
    assert!(receives.iter().map(|c| c.id).eq(20..25), "{receives:?}");
    assert!(sends.iter().map(|c| c.id).eq(0..6), "{sends:?}");
    let statuses: Vec<_> = sends.iter().map(|c| c.status).collect();
    let (success, flushed) = (CompletionStatus::Success, CompletionStatus::Flushed);
    let expected = [success, success, CompletionStatus::RemoteAccess, flushed, flushed, flushed];
    assert_eq!(statuses, expected);
    assert_eq!(sends[4].operation, CompletionOperation::Read);
    assert_eq!(a.device.poll_event(), Some(AsyncEvent::QueuePairFatal(a.pair.number())));
    assert_eq!(a.device.poll_event(), None);
    assert_eq!(a.device.failure(), None);
    drop((source_region, target_region));
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    let [a, _b] = two();
    let mut bytes = vec![0_u8; 16];
    let start = bytes.as_mut_ptr();
    // SAFETY: nothing is registered: each of these is refused.
    let refused = |address, length, access| unsafe {
        a.domain.register_memory(address, length, access).unwrap_err()
    };
    assert_eq!(refused(start, 0, Access::LOCAL_WRITE), RegionError::Empty);
    assert_eq!(refused(start, 16, Access::REMOTE_WRITE), RegionError::LocalWriteMissing);
    let overflow = refused(start, usize::MAX, Access::LOCAL_WRITE);
    assert!(matches!(overflow, RegionError::Overflow { .. }), "{overflow}");
}
