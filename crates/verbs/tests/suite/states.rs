//! Queue pairs go through their states with the attributes that each step needs, and no others.

use std::time::Duration;

use millstream_verbs::{
    Access, AsyncEvent, Attribute, CompletionOperation, CompletionStatus, CreateError, ModifyError,
    Mtu, PostError, QueuePairAttributes, QueuePairCapabilities, QueuePairState as State,
    ReceiveRequest, SendRequest,
};

use crate::harness::{
    CAPABILITIES, Connection, PATIENCE, SEND, USUAL, connect, connect_one, is_rxe, next, next_good,
    open, piece, read_from, register, request, to, to_init, to_rtr, to_rts, two, two_with,
    write_to,
};

#[test]
fn steps_that_are_not_complete_are_refused_and_change_nothing() {
    let [a, b] = [open(), open()];
    assert_eq!(a.pair.state(), State::Reset);
    let missing = a.pair.modify(&to(State::Initialized)).unwrap_err();
    let (from, target) = (State::Reset, State::Initialized);
    let expected = ModifyError::Missing { from, to: target, missing: vec![Attribute::Access] };
    assert_eq!(missing, expected);
    let skipping = a.pair.modify(&to_rts(USUAL)).unwrap_err();
    assert_eq!(skipping, ModifyError::InvalidTransition { from, to: State::ReadyToSend });
    assert_eq!(a.pair.state(), State::Reset);
    a.pair.modify(&to_init()).unwrap();
    assert_eq!(a.pair.state(), State::Initialized);

    let good = to_rtr(&a.device, b.device.address(), &b.pair);
    let without = QueuePairAttributes { path_mtu: None, receive_psn: None, ..good };
    let error = a.pair.modify(&without).unwrap_err();
    assert!(
        matches!(&error, ModifyError::Missing { missing, .. }
            if *missing == [Attribute::PathMtu, Attribute::ReceivePsn]),
        "{error}"
    );
    let extra = QueuePairAttributes { retry_count: Some(1), timeout: Some(1), ..good };
    let error = a.pair.modify(&extra).unwrap_err();
    assert!(
        matches!(&error, ModifyError::NotAllowed { refused, .. }
            if *refused == [Attribute::Timeout, Attribute::RetryCount]),
        "{error}"
    );
    let wrong = QueuePairAttributes { minimum_rnr_timer: Some(32), ..good };
    let error = a.pair.modify(&wrong).unwrap_err();
    assert!(
        matches!(error, ModifyError::OutOfRange { attribute: Attribute::MinimumRnrTimer, .. }),
        "{error}"
    );
    let other_family = if a.device.address().is_ipv4() { "2001:db8::1" } else { "192.0.2.1" };
    let remote_address = Some(other_family.parse().unwrap());
    let foreign = QueuePairAttributes { remote_address, ..good };
    let error = a.pair.modify(&foreign).unwrap_err();
    assert!(matches!(error, ModifyError::AddressFamily { .. }), "{error}");
    assert_eq!(a.pair.state(), State::Initialized);

    a.pair.modify(&good).unwrap();
    assert_eq!(a.pair.state(), State::ReadyToReceive);
    let wrong = to_rts(Connection { retry_count: 8, ..USUAL });
    assert!(matches!(a.pair.modify(&wrong), Err(ModifyError::OutOfRange { .. })));
    a.pair.modify(&to_rts(USUAL)).unwrap();
    assert_eq!(a.pair.state(), State::ReadyToSend);
    let error = a.pair.modify(&to_init()).unwrap_err();
    assert!(matches!(error, ModifyError::InvalidTransition { .. }), "{error}");
    let access =
        QueuePairAttributes { access: Some(Access::REMOTE_READ), ..to(State::ReadyToSend) };
    a.pair.modify(&access).unwrap();
}

#[test]
fn requests_wait_for_the_state_that_takes_them() {
    let [a, b] = [open(), open()];
    let qpn = a.pair.number();
    let receive = ReceiveRequest { id: 1, pieces: [] };
    let send = request(2, SEND, millstream_verbs::Piece::default());
    let refused = |state| Err((0, PostError::State { qpn, state }));
    assert_eq!(a.pair.post_receive(&[receive]), refused(State::Reset));
    assert_eq!(a.pair.post_send(&[send]), refused(State::Reset));
    a.pair.modify(&to_init()).unwrap();
    assert_eq!(a.pair.post_send(&[send]), refused(State::Initialized));
    // Before it is connected, so that nothing can arrive too early.
    a.pair.post_receive(&[receive]).unwrap();
    a.pair.modify(&to_rtr(&a.device, b.device.address(), &b.pair)).unwrap();
    assert_eq!(a.pair.post_send(&[send]), refused(State::ReadyToReceive));
    connect_one((&b.pair, &b.device), (&a.pair, &a.device), USUAL);
    // One that only receives does so before it is ready to send.
    b.pair.post_send(&[send]).unwrap();
    assert_eq!(next_good(&a.completions, 1)[0].id, 1);
    next_good(&b.completions, 1);
}

#[test]
fn full_queues_say_how_much_they_hold() {
    let [a, _b] = [open(), open()];
    a.pair.modify(&to_init()).unwrap();
    let limit = CAPABILITIES.max_receive_requests;
    let receives: Vec<_> = (0..=limit as u64).map(|id| ReceiveRequest { id, pieces: [] }).collect();
    let refused = a.pair.post_receive(&receives);
    assert_eq!(refused, Err((limit, PostError::QueueFull { limit })));
}

#[test]
fn an_error_that_was_asked_for_flushes_and_is_no_event() {
    let [a, b] = two();
    let receive = |id| ReceiveRequest { id, pieces: [] };
    a.pair.post_receive(&[receive(1), receive(2)]).unwrap();
    a.pair.modify(&to(State::Error)).unwrap();
    assert_eq!(a.pair.state(), State::Error);
    let flushed = next(&a.completions, 2);
    assert!(flushed.iter().all(|c| c.status == CompletionStatus::Flushed), "{flushed:?}");
    assert!(flushed.iter().map(|c| c.id).eq(1..=2), "{flushed:?}");
    // New ones are flushed at once.
    a.pair.post_receive(&[receive(3)]).unwrap();
    let flushed = next(&a.completions, 1)[0];
    assert_eq!((flushed.id, flushed.operation), (3, CompletionOperation::Receive));
    assert_eq!(flushed.status, CompletionStatus::Flushed);
    let send =
        SendRequest { signaled: false, ..request(4, SEND, millstream_verbs::Piece::default()) };
    a.pair.post_send(&[send]).unwrap();
    let flushed = next(&a.completions, 1)[0];
    assert_eq!((flushed.id, flushed.operation), (4, CompletionOperation::Send));
    assert_eq!(flushed.status, CompletionStatus::Flushed);
    assert_eq!(a.device.poll_event(), None);
    drop(b);
}

#[test]
fn a_queue_pair_is_reset_and_connected_again() {
    let [a, b] = two();
    let (mut source, mut target) = (vec![1; 100], vec![0; 100]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let write =
        |offset| request(1, write_to(&target_region, offset), piece(&source_region, 0, 100));
    a.pair.post_send(&[write(1)]).unwrap();
    assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::RemoteAccess);
    for end in [&a, &b] {
        end.pair.modify(&to(State::Reset)).unwrap();
        assert_eq!(end.pair.state(), State::Reset);
    }
    assert!(matches!(a.pair.post_send(&[write(0)]), Err((0, PostError::State { .. }))));
    connect((&a.pair, &a.device), (&b.pair, &b.device), USUAL);
    a.pair.post_send(&[write(0)]).unwrap();
    next_good(&a.completions, 1);
    assert_eq!(a.pair.state(), State::ReadyToSend);
    drop((source_region, target_region));
    assert_eq!(target, source);
}

#[test]
fn a_send_queue_drains_and_sends_again() {
    let [a, b] = two();
    let (mut source, mut target) = (vec![1; 100_000], vec![0; 100_000]);
    let source_region = register(&a, &mut source);
    let target_region = register(&b, &mut target);
    let write = |id| request(id, write_to(&target_region, 0), piece(&source_region, 0, 100_000));
    a.pair.post_send(&[write(1), write(2)]).unwrap();
    a.pair.modify(&to(State::SendQueueDrained)).unwrap();
    assert_eq!(a.pair.state(), State::SendQueueDrained);
    let drained = AsyncEvent::SendQueueDrained(a.pair.number());
    assert_eq!(a.device.wait_event(PATIENCE), Some(drained));
    // It takes requests and keeps them, and it receives.
    a.pair.post_send(&[write(3)]).unwrap();
    let empty = millstream_verbs::Piece::default();
    a.pair.post_receive(&[ReceiveRequest { id: 9, pieces: [] }]).unwrap();
    b.pair.post_send(&[request(8, SEND, empty)]).unwrap();
    next_good(&b.completions, 1);
    let patient = QueuePairAttributes { retry_count: Some(5), ..Default::default() };
    a.pair.modify(&patient).unwrap();
    a.pair.modify(&to(State::ReadyToSend)).unwrap();
    // The kernel's soft-RoCE begins the one that waits when it gets another.
    a.pair.post_send(&[write(4)]).unwrap();
    let mut done: Vec<_> = next_good(&a.completions, 5).iter().map(|c| c.id).collect();
    done.sort_unstable();
    assert_eq!(done, [1, 2, 3, 4, 9]);
    assert_eq!(a.device.poll_event(), None);
    drop((source_region, target_region));
    assert_eq!(target, source);
}

#[test]
fn the_first_packet_before_ready_to_send_is_an_event() {
    let [a, b] = [open(), open()];
    a.pair.modify(&to_init()).unwrap();
    a.pair.modify(&to_rtr(&a.device, b.device.address(), &b.pair)).unwrap();
    a.pair.post_receive(&[ReceiveRequest { id: 1, pieces: [] }]).unwrap();
    connect_one((&b.pair, &b.device), (&a.pair, &a.device), USUAL);
    assert_eq!(a.device.wait_event(Duration::ZERO), None);
    b.pair.post_send(&[request(2, SEND, millstream_verbs::Piece::default())]).unwrap();
    // The kernel's soft-RoCE does not tell.
    if !is_rxe(&a.device) {
        let established = AsyncEvent::CommunicationEstablished(a.pair.number());
        assert_eq!(a.device.wait_event(PATIENCE), Some(established));
    }
    next_good(&b.completions, 1);
}

#[test]
fn an_error_is_possible_from_every_state() {
    for steps in 0..4 {
        let [a, b] = [open(), open()];
        let all = [to_init(), to_rtr(&a.device, b.device.address(), &b.pair), to_rts(USUAL)];
        all[..steps].iter().for_each(|attributes| a.pair.modify(attributes).unwrap());
        a.pair.modify(&to(State::Error)).unwrap();
        assert_eq!(a.pair.state(), State::Error);
        a.pair.post_receive(&[ReceiveRequest { id: 1, pieces: [] }]).unwrap();
        assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::Flushed);
        a.pair.modify(&to(State::Reset)).unwrap();
        assert_eq!(a.pair.state(), State::Reset);
    }
}

#[test]
fn reads_need_a_depth() {
    let [a, b] = two_with(Connection { initiator_depth: 0, ..USUAL });
    let (mut local, mut remote) = (vec![1; 100], vec![0; 100]);
    let local_region = register(&a, &mut local);
    let remote_region = register(&b, &mut remote);
    let bytes = piece(&local_region, 0, 100);
    let requests = [
        request(1, write_to(&remote_region, 0), bytes),
        request(2, read_from(&remote_region), bytes),
    ];
    let refused = a.pair.post_send(&requests);
    assert_eq!(refused, Err((1, PostError::NoReads(a.pair.number()))));
    assert_eq!(next_good(&a.completions, 1)[0].id, 1);
    drop((local_region, remote_region));
}

#[test]
fn what_a_device_cannot_hold_is_refused() {
    let end = open();
    let limits = end.device.attributes();
    assert!(limits.max_work_requests >= 1024 && limits.max_scatter_gather >= 2, "{limits:?}");
    assert!(limits.max_message_length >= 1 << 23 && limits.max_reads >= 1, "{limits:?}");
    let too_many = limits.max_work_requests + 1;
    for capabilities in [
        QueuePairCapabilities { max_send_requests: 0, ..CAPABILITIES },
        QueuePairCapabilities { max_receive_requests: 0, ..CAPABILITIES },
        QueuePairCapabilities { max_send_requests: too_many, ..CAPABILITIES },
    ] {
        let refused =
            end.domain.create_queue_pair(&end.completions, &end.completions, capabilities);
        assert!(matches!(refused, Err(CreateError::OutOfRange { .. })), "{capabilities:?}");
    }
    for capacity in [0, usize::MAX] {
        let refused = end.device.create_completion_queue(capacity);
        assert!(matches!(refused, Err(CreateError::OutOfRange { .. })), "{capacity}");
    }
}

#[test]
fn queues_of_another_device_are_refused() {
    let [a, b] = [open(), open()];
    for (send, receive) in [(&a.completions, &b.completions), (&b.completions, &a.completions)] {
        let mixed = a.domain.create_queue_pair(send, receive, CAPABILITIES);
        assert!(matches!(mixed, Err(CreateError::UnknownCompletionQueue(_))));
    }
}

#[test]
fn a_device_knows_itself() {
    let end = open();
    let device = &end.device;
    assert!(!device.name().is_empty());
    assert_eq!(device.gid().len(), 39);
    assert!(device.path_mtu(device.address()).unwrap() >= Mtu::B1024);
    assert_eq!(device.failure(), None);
    assert_eq!(device.poll_event(), None);
}

#[test]
fn the_expected_number_moves_with_requests_of_the_peer_only() {
    let [a, b] = two();
    let mut bytes = vec![0; 64];
    let region = register(&b, &mut bytes);
    let before = b.pair.receive_psn().unwrap();
    let mine = a.pair.receive_psn().unwrap();
    a.pair.post_send(&[SendRequest::new(1, write_to(&region, 0), [])]).unwrap();
    next_good(&a.completions, 1);
    assert_ne!(b.pair.receive_psn().unwrap(), before);
    assert_eq!(a.pair.receive_psn().unwrap(), mine, "an acknowledgement is no request");
}
