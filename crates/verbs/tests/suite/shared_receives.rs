//! Receive queues that several queue pairs share.

use millstream_verbs::{
    AsyncEvent, CompletionStatus, CreateError, PostError, QueuePair, QueuePairCapabilities,
    QueuePairOptions, QueuePairState, ReceiveRequest, SharedReceiveQueue,
};

use crate::harness::{
    CAPABILITIES, End, PATIENCE, SEND, USUAL, connect, is_rxe, next, next_good, not_offered, open,
    pattern, piece, register, request, to,
};

/// A queue of 16 at `end`; `None`, with a word, where the device offers none.
fn shared(end: &End) -> Option<SharedReceiveQueue> {
    match end.domain.create_shared_receive_queue(16) {
        Ok(queue) => Some(queue),
        Err(CreateError::Unsupported(what)) => {
            not_offered(&end.device, what);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Two connections from `a` to `b`, which takes from `queue`.
fn two_on(queue: &SharedReceiveQueue, a: &End, b: &End) -> [[QueuePair; 2]; 2] {
    [0, 1].map(|_| {
        let sender = a.domain.create_queue_pair(&a.completions, &a.completions, CAPABILITIES);
        let options = QueuePairOptions {
            shared_receives: Some(queue),
            ..QueuePairOptions::new(&b.completions, QueuePairCapabilities::new(16, 0))
        };
        let pair = [sender.unwrap(), b.domain.create_queue_pair_with(&options).unwrap()];
        connect((&pair[0], &a.device), (&pair[1], &b.device), USUAL);
        pair
    })
}

#[test]
fn queue_pairs_take_from_one_queue_each_request_once() {
    let [a, b] = [open(), open()];
    let Some(queue) = shared(&b) else { return };
    let pairs = two_on(&queue, &a, &b);
    let (mut source, mut target) = (pattern(5000, 3), vec![0; 50_000]);
    let (source_region, target_region) = (register(&a, &mut source), register(&b, &mut target));
    let receives = (0..10)
        .map(|id| ReceiveRequest { id, pieces: [piece(&target_region, id as usize * 5000, 5000)] });
    queue.post_receive(&receives.collect::<Vec<_>>()).unwrap();
    for id in 0..10 {
        let [sender, _] = &pairs[id as usize % 2];
        sender.post_send(&[request(id, SEND, piece(&source_region, 0, 5000))]).unwrap();
    }
    next_good(&a.completions, 10);
    let mut received = next_good(&b.completions, 10);
    for (index, [_, receiver]) in pairs.iter().enumerate() {
        let taken = received.iter().filter(|c| c.qpn == receiver.number()).count();
        assert_eq!(taken, 5, "{index}");
    }
    received.sort_unstable_by_key(|c| c.id);
    assert!(received.iter().map(|c| c.id).eq(0..10), "{received:?}");
    drop((source_region, target_region));
    assert_eq!(target, source.repeat(10));
}

#[test]
fn the_limit_and_the_last_request_are_events() {
    let [a, b] = [open(), open()];
    let Some(queue) = shared(&b) else { return };
    let pairs = two_on(&queue, &a, &b);
    let empty = |id| ReceiveRequest { id, pieces: [] };
    queue.post_receive(&[1, 2, 3].map(empty)).unwrap();
    queue.set_limit(2).unwrap();
    let message = request(1, SEND, millstream_verbs::Piece::default());
    pairs[0][0].post_send(&[message, message]).unwrap();
    next_good(&b.completions, 2);
    let reached = AsyncEvent::SharedReceiveLimit(queue.id());
    assert_eq!(b.device.wait_event(PATIENCE), Some(reached));
    // The one that is left stays for the other queue pair.
    let gone = &pairs[0][1];
    gone.modify(&to(QueuePairState::Error)).unwrap();
    // The kernel's soft-RoCE has no such event when there is nothing to flush.
    if !is_rxe(&b.device) {
        let last = AsyncEvent::LastReceiveRequest(gone.number());
        assert_eq!(b.device.wait_event(PATIENCE), Some(last));
    }
    pairs[1][0].post_send(&[message]).unwrap();
    let received = next(&b.completions, 1)[0];
    assert_eq!((received.id, received.qpn), (3, pairs[1][1].number()));
    assert_eq!(received.status, CompletionStatus::Success);
    assert_eq!(b.device.poll_event(), None);
}

#[test]
fn a_queue_pair_of_a_shared_queue_has_none_of_its_own() {
    let [a, b] = [open(), open()];
    let Some(queue) = shared(&b) else { return };
    let [[_, pair], _] = two_on(&queue, &a, &b);
    let empty = |id| ReceiveRequest { id, pieces: [] };
    let refused = pair.post_receive(&[empty(1)]);
    assert_eq!(refused, Err((0, PostError::SharedReceives(pair.number()))));
    // Nor may it share one of another device.
    let options = QueuePairOptions {
        shared_receives: Some(&queue),
        ..QueuePairOptions::new(&a.completions, CAPABILITIES)
    };
    let refused = a.domain.create_queue_pair_with(&options);
    assert!(matches!(refused, Err(CreateError::UnknownSharedReceiveQueue(_))));
    let full: Vec<_> = (0..20).map(empty).collect();
    assert_eq!(queue.post_receive(&full), Err((16, PostError::QueueFull { limit: 16 })));
    assert!(matches!(queue.set_limit(17), Err(CreateError::OutOfRange { .. })));
}
