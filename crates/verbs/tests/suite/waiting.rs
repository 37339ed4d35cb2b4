//! Polling, waiting, handlers, and closing in any order.

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use millstream_verbs::{
    Completion, CompletionStatus, Piece, Provider, QueuePair, QueuePairState, ReceiveRequest,
    SendOperation, SendRequest,
};

use crate::harness::{
    CAPABILITIES, End, PATIENCE, SEND, USUAL, connect, next, next_good, open_device, piece,
    register, request, to, to_init, two, write_to,
};

const EMPTY: Piece = Piece { key: 0, address: 0, length: 0 };

fn receive(id: u64) -> ReceiveRequest<[Piece; 0]> {
    ReceiveRequest { id, pieces: [] }
}

#[test]
fn waiting_for_nothing_ends() {
    let [a, _b] = two();
    assert!(!a.completions.wait(Duration::ZERO));
    assert!(!a.completions.wait(Duration::from_millis(20)));
    assert_eq!(a.completions.poll(&mut Vec::new(), 10), 0);
}

#[test]
fn waiters_wake_when_a_completion_arrives() {
    let [a, b] = two();
    for round in 0..20 {
        b.pair.post_receive(&[receive(round)]).unwrap();
        thread::scope(|scope| {
            // For ever, as far as a clock can tell.
            let waiter = scope.spawn(|| b.completions.wait(Duration::MAX));
            a.pair.post_send(&[request(round, SEND, EMPTY)]).unwrap();
            assert!(waiter.join().unwrap());
        });
        // What one waited for is there for the next too, until it is polled.
        assert!(b.completions.wait(Duration::ZERO));
        let mut out = Vec::new();
        assert_eq!(b.completions.poll(&mut out, 10), 1);
        assert_eq!(out[0].id, round);
        next_good(&a.completions, 1);
    }
}

/// Who waits for solicited events sleeps through what nobody asked to be woken for.
#[test]
fn a_solicited_event_wakes_who_waits_for_one() {
    let [a, b] = two();
    let soft = b.device.provider() == Provider::Soft;
    let send = |id, solicited| SendRequest { solicited, ..SendRequest::new(id, SEND, []) };
    let mut received = Vec::new();
    for round in 0..10 {
        b.pair.post_receive(&[0, 1, 2, 3].map(receive)).unwrap();
        a.pair.post_send(&[send(1, false), send(2, false)]).unwrap();
        next_good(&a.completions, 2);
        assert!(b.completions.wait(PATIENCE));
        // They are there, but nobody is to be woken. Devices of the system do not tell which
        // completions are solicited, so they return for any.
        assert_eq!(b.completions.wait_solicited(Duration::ZERO), !soft);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                while received.len() < 4 * (round + 1) {
                    assert!(b.completions.wait_solicited(PATIENCE));
                    let count = b.completions.poll(&mut received, 16);
                    assert!(count == 4 || !soft, "{count}: it was woken for the others");
                }
            });
            a.pair.post_send(&[send(3, false), send(4, true)]).unwrap();
            waiter.join().unwrap();
        });
        next_good(&a.completions, 2);
    }
    assert!(received.iter().all(|c| c.status == CompletionStatus::Success));
    // A failure wakes too: nobody solicits those.
    b.pair.post_receive(&[receive(9)]).unwrap();
    b.pair.modify(&to(QueuePairState::Error)).unwrap();
    assert!(b.completions.wait_solicited(PATIENCE));
    assert_eq!(next(&b.completions, 1)[0].status, CompletionStatus::Flushed);
}

#[test]
fn several_threads_share_a_queue() {
    let [a, b] = two();
    let count = 48;
    let receives: Vec<_> = (0..count).map(receive).collect();
    b.pair.post_receive(&receives).unwrap();
    let polled = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while (polled.lock().unwrap().len() as u64) < count {
                    // Another thread may take what this one waits for.
                    b.completions.wait(Duration::from_millis(20));
                    let mut polled = polled.lock().unwrap();
                    b.completions.poll(&mut polled, 1);
                }
            });
        }
        for id in 0..count {
            a.pair.post_send(&[request(id, SEND, EMPTY)]).unwrap();
        }
    });
    let polled = polled.into_inner().unwrap();
    assert!(polled.iter().map(|c| c.id).eq(0..count), "{polled:?}");
}

#[test]
fn a_poll_takes_no_more_than_it_is_asked_for() {
    let [a, b] = two();
    b.pair.post_receive(&[0, 1, 2, 3, 4].map(receive)).unwrap();
    a.pair.post_send(&[0, 1, 2, 3, 4].map(|id| request(id, SEND, EMPTY))).unwrap();
    next_good(&a.completions, 5);
    let mut out = Vec::new();
    while out.len() < 4 {
        assert!(b.completions.wait(PATIENCE));
        let count = out.len();
        assert!(b.completions.poll(&mut out, 2) <= 2);
        assert!(out.len() - count <= 2);
    }
    out.extend(next_good(&b.completions, 5 - out.len()));
    assert!(out.iter().map(|c| c.id).eq(0..5), "{out:?}");
}

#[test]
fn a_handler_gets_completions_and_may_post_more() {
    let [a, b] = two();
    let mut target = vec![0; 64];
    let mut source = vec![9; 64];
    let target_region = register(&b, &mut target);
    let source_region = register(&a, &mut source);
    let write = write_to(&target_region, 0);
    let (sender, receiver) = mpsc::channel();
    let pair: Arc<OnceLock<QueuePair>> = Arc::default();
    let (poster, whole) = (Arc::clone(&pair), piece(&source_region, 0, 64));
    let handler = Box::new(move |completions: &[Completion]| {
        for completion in completions {
            assert_eq!(completion.status, CompletionStatus::Success);
            if completion.id < 99 {
                let next = request(completion.id + 1, write, whole);
                poster.get().unwrap().post_send(&[next]).unwrap();
            } else {
                sender.send(completion.id).unwrap();
            }
        }
    });
    let queue = a.device.create_completion_queue_with_handler(256, handler).unwrap();
    let handled = a.domain.create_queue_pair(&queue, &queue, CAPABILITIES).unwrap();
    let other = b.domain.create_queue_pair(&b.completions, &b.completions, CAPABILITIES).unwrap();
    connect((&handled, &a.device), (&other, &b.device), USUAL);
    pair.set(handled).unwrap();
    pair.get().unwrap().post_send(&[request(0, write, whole)]).unwrap();
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(99));
    assert_eq!(queue.poll(&mut Vec::new(), 10), 0);
    drop((source_region, target_region));
    assert_eq!(target, source);
}

/// With no packet and no deadline to follow, only the handler's own call can bring the rest about.
#[test]
fn a_handler_that_fails_its_queue_pair_hears_of_the_flush() {
    let [a, b] = two();
    let (sender, receiver) = mpsc::channel();
    let pair: Arc<OnceLock<QueuePair>> = Arc::default();
    let failing = Arc::clone(&pair);
    let handler = Box::new(move |completions: &[Completion]| {
        for completion in completions {
            if completion.status == CompletionStatus::Success {
                failing.get().unwrap().modify(&to(QueuePairState::Error)).unwrap();
            }
            sender.send((completion.id, completion.status)).unwrap();
        }
    });
    let queue = b.device.create_completion_queue_with_handler(16, handler).unwrap();
    let handled = b.domain.create_queue_pair(&queue, &queue, CAPABILITIES).unwrap();
    let other = a.domain.create_queue_pair(&a.completions, &a.completions, CAPABILITIES).unwrap();
    connect((&handled, &b.device), (&other, &a.device), USUAL);
    pair.set(handled).unwrap();
    pair.get().unwrap().post_receive(&[receive(0), receive(1)]).unwrap();
    other.post_send(&[request(0, SEND, EMPTY)]).unwrap();
    for expected in [(0, CompletionStatus::Success), (1, CompletionStatus::Flushed)] {
        assert_eq!(receiver.recv_timeout(PATIENCE), Ok(expected));
    }
    next_good(&a.completions, 1);
}

/// A queue that is made while a handler runs may take the place of one that goes meanwhile.
#[test]
fn a_queue_that_goes_while_a_handler_runs_hears_nothing_of_its_successor() {
    let [a, b] = two();
    let (entered, running) = mpsc::channel();
    let (go, wait_to_go) = mpsc::channel();
    let busy = b.device.create_completion_queue_with_handler(
        16,
        Box::new(move |_: &[Completion]| {
            entered.send(()).unwrap();
            wait_to_go.recv().unwrap();
        }),
    );
    let busy = busy.unwrap();
    let (sender, receiver) = mpsc::channel();
    let named = |name: &'static str| {
        let sender = sender.clone();
        let handler = Box::new(move |completions: &[Completion]| {
            completions.iter().for_each(|it| sender.send((name, it.id)).unwrap());
        });
        b.device.create_completion_queue_with_handler(16, handler).unwrap()
    };
    let old = named("old");
    let handled = b.domain.create_queue_pair(&busy, &busy, CAPABILITIES).unwrap();
    let other = a.domain.create_queue_pair(&a.completions, &a.completions, CAPABILITIES).unwrap();
    connect((&handled, &b.device), (&other, &a.device), USUAL);
    handled.post_receive(&[receive(0)]).unwrap();
    other.post_send(&[request(0, SEND, EMPTY)]).unwrap();
    running.recv_timeout(PATIENCE).unwrap();
    drop(old);
    let new = named("new");
    let flushed = b.domain.create_queue_pair(&new, &new, CAPABILITIES).unwrap();
    flushed.modify(&to_init()).unwrap();
    flushed.post_receive(&[receive(7)]).unwrap();
    flushed.modify(&to(QueuePairState::Error)).unwrap();
    go.send(()).unwrap();
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(("new", 7)));
    next_good(&a.completions, 1);
}

#[test]
fn a_handler_keeps_up_with_many_completions() {
    let [a, b] = two();
    let (sender, receiver) = mpsc::channel();
    let handler = Box::new(move |completions: &[Completion]| {
        for completion in completions {
            sender.send((completion.id, completion.status)).unwrap();
        }
    });
    let queue = b.device.create_completion_queue_with_handler(1024, handler).unwrap();
    let handled = b.domain.create_queue_pair(&queue, &queue, CAPABILITIES).unwrap();
    let other = a.domain.create_queue_pair(&a.completions, &a.completions, CAPABILITIES).unwrap();
    connect((&handled, &b.device), (&other, &a.device), USUAL);
    for round in 0..10 {
        let ids = (0..40).map(|i| round * 40 + i);
        handled.post_receive(&ids.clone().map(receive).collect::<Vec<_>>()).unwrap();
        let sends: Vec<_> = ids.clone().map(|id| request(id, SEND, EMPTY)).collect();
        other.post_send(&sends).unwrap();
        for id in ids {
            let expected = Ok((id, CompletionStatus::Success));
            assert_eq!(receiver.recv_timeout(PATIENCE), expected);
        }
        next_good(&a.completions, 40);
    }
}

#[test]
fn completions_outlive_their_queue_pair_and_requests_do_not() {
    let [a, b] = two();
    a.pair.post_receive(&[receive(1), receive(2)]).unwrap();
    a.pair.post_send(&[request(3, SEND, EMPTY)]).unwrap();
    b.pair.post_receive(&[receive(4)]).unwrap();
    // On its way from the device, or in the queue by now.
    assert!(a.completions.wait(PATIENCE));
    let End { pair, completions, .. } = a;
    drop(pair);
    let mut out = Vec::new();
    assert_eq!(completions.poll(&mut out, 10), 1, "{out:?}");
    assert_eq!((out[0].id, out[0].status), (3, CompletionStatus::Success));
    assert!(!completions.wait(Duration::from_millis(20)));
}

#[test]
fn handles_may_be_dropped_in_any_order() {
    let [a, b] = two();
    let mut bytes = vec![1; 100];
    let region = register(&a, &mut bytes);
    b.pair.post_receive(&[receive(1)]).unwrap();
    // The queue pair keeps what it needs.
    let End { pair, completions, domain, device } = a;
    drop(device);
    drop(domain);
    let immediate = SendOperation::Send { immediate: Some(1) };
    pair.post_send(&[request(2, immediate, EMPTY)]).unwrap();
    next_good(&b.completions, 1);
    drop(completions);
    drop(pair);
    drop(region);
}

#[test]
fn a_handler_may_drop_the_last_handles_of_its_device() {
    let device = open_device();
    let peer = open_device();
    let (sender, receiver) = mpsc::channel();
    let slot: Arc<Mutex<Option<(QueuePair, _)>>> = Arc::default();
    let held = Arc::clone(&slot);
    let handler = Box::new(move |completions: &[Completion]| {
        let handles = held.lock().unwrap().take();
        drop(handles);
        sender.send(completions.len()).unwrap();
    });
    let domain = device.allocate_protection_domain();
    let queue = device.create_completion_queue_with_handler(16, handler).unwrap();
    let pair = domain.create_queue_pair(&queue, &queue, CAPABILITIES).unwrap();
    let peer_domain = peer.allocate_protection_domain();
    let peer_queue = peer.create_completion_queue(16).unwrap();
    let peer_pair = peer_domain.create_queue_pair(&peer_queue, &peer_queue, CAPABILITIES).unwrap();
    connect((&pair, &device), (&peer_pair, &peer), USUAL);
    pair.post_receive(&[receive(1)]).unwrap();
    drop(domain);
    *slot.lock().unwrap() = Some((pair, (queue, device)));
    peer_pair.post_send(&[request(1, SEND, EMPTY)]).unwrap();
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(1));
}
