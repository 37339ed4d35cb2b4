//! Which threads call handlers, and threads that wait beside them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use millstream_verbs::{
    Completion, CompletionQueue, CompletionStatus, Piece, Provider, QueuePair, QueuePairState,
    ReceiveRequest, Waiters, wait,
};

use crate::harness::{
    CAPABILITIES, End, PATIENCE, SEND, USUAL, connect, next_good, request, to, two,
};

const EMPTY: Piece = Piece { key: 0, address: 0, length: 0 };

fn receive(id: u64) -> ReceiveRequest<[Piece; 0]> {
    ReceiveRequest { id, pieces: [] }
}

/// A queue pair of `a` that completes into `queue`, connected to one of `b`.
fn pair_of(a: &End, queue: &CompletionQueue, b: &End) -> (QueuePair, QueuePair) {
    let pair = a.domain.create_queue_pair(queue, queue, CAPABILITIES).unwrap();
    let other = b.domain.create_queue_pair(&b.completions, &b.completions, CAPABILITIES).unwrap();
    connect((&pair, &a.device), (&other, &b.device), USUAL);
    (pair, other)
}

/// Whatever brings the completion about: a packet, the state of the queue pair, a request that names
/// no memory. The waiting threads hold a lock that the handler takes.
#[test]
fn handlers_run_on_no_thread_that_posts_or_waits() {
    let [a, b] = two();
    let lock = Arc::new(Mutex::new(()));
    let (sender, receiver) = mpsc::channel();
    let taken = Arc::clone(&lock);
    let handler = Box::new(move |completions: &[Completion]| {
        let _guard = taken.lock().unwrap();
        for completion in completions {
            sender.send((thread::current().id(), completion.id)).unwrap();
        }
    });
    let queue = a.device.create_completion_queue_with_handler(256, handler).unwrap();
    let (pair, other) = pair_of(&a, &queue, &b);
    let expect = |ids: &[u64]| {
        for &id in ids {
            let (thread, got) = receiver.recv_timeout(PATIENCE).unwrap();
            assert_eq!(got, id);
            assert_ne!(thread, thread::current().id());
        }
    };
    for round in 0..50 {
        let guard = lock.lock().unwrap();
        pair.post_receive(&[receive(round)]).unwrap();
        other.post_send(&[request(round, SEND, EMPTY)]).unwrap();
        // This thread makes the progress, and brings the completion about.
        b.pair.post_receive(&[receive(round)]).unwrap();
        a.pair.post_send(&[request(round, SEND, EMPTY)]).unwrap();
        next_good(&a.completions, 1);
        next_good(&b.completions, 2);
        drop(guard);
        expect(&[round]);
    }
    let own = thread::current().id();
    let guard = lock.lock().unwrap();
    let broken = Piece { key: 0xdead_beef, address: 16, length: 8 };
    pair.post_send(&[request(1, SEND, broken)]).unwrap();
    pair.modify(&to(QueuePairState::Error)).unwrap();
    pair.post_receive(&[receive(2)]).unwrap();
    pair.post_send(&[request(3, SEND, EMPTY)]).unwrap();
    a.completions.wait(Duration::from_millis(5));
    drop(guard);
    // Devices of the system flush the one queue without regard to the other.
    let mut ids = [(); 3].map(|()| {
        let (thread, id) = receiver.recv_timeout(PATIENCE).unwrap();
        assert_ne!(thread, own);
        id
    });
    ids.sort_unstable();
    assert_eq!(ids, [1, 2, 3]);
}

/// What a progress handler has seen.
#[derive(Default)]
struct Seen {
    running: AtomicBool,
    /// A thread that posts, and must not be called then.
    posting: Mutex<Option<ThreadId>>,
    next: AtomicU64,
    waiters: Waiters,
    threads: Mutex<Vec<ThreadId>>,
}

impl Seen {
    fn handle(&self, completions: &[Completion]) {
        assert!(!self.running.swap(true, Ordering::SeqCst), "two at once");
        let this = thread::current().id();
        assert_ne!(*self.posting.lock().unwrap(), Some(this), "called within a post");
        for completion in completions {
            assert_eq!(completion.id, self.next.fetch_add(1, Ordering::SeqCst), "in order");
        }
        let mut threads = self.threads.lock().unwrap();
        if !threads.contains(&this) {
            threads.push(this);
        }
        drop(threads);
        self.running.store(false, Ordering::SeqCst);
        self.waiters.wake();
    }

    fn post(&self, post: impl FnOnce()) {
        *self.posting.lock().unwrap() = Some(thread::current().id());
        post();
        *self.posting.lock().unwrap() = None;
    }

    fn wait(&self, ends: &[&End], count: u64) -> bool {
        let look = || (self.next.load(Ordering::SeqCst) >= count).then_some(());
        wait(ends.iter().map(|end| &end.device), &self.waiters, PATIENCE, look).is_some()
    }
}

#[test]
fn progress_handlers_run_one_at_a_time_in_order_and_never_in_a_post() {
    const ROUNDS: u64 = 100;
    const EACH: u64 = 8;
    let [a, b] = two();
    let seen = Arc::<Seen>::default();
    let handled = Arc::clone(&seen);
    let handler = Box::new(move |completions: &[Completion]| handled.handle(completions));
    let queue = a.device.create_completion_queue_with_progress_handler(256, handler).unwrap();
    let (pair, other) = pair_of(&a, &queue, &b);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| assert!(seen.wait(&[&a], ROUNDS * EACH)));
        }
        scope.spawn(|| {
            while seen.next.load(Ordering::SeqCst) < ROUNDS * EACH {
                a.device.progress();
                thread::yield_now();
            }
        });
        for round in 0..ROUNDS {
            let ids = round * EACH..(round + 1) * EACH;
            other.post_receive(&ids.clone().map(receive).collect::<Vec<_>>()).unwrap();
            let sends: Vec<_> = ids.map(|id| request(id, SEND, EMPTY)).collect();
            seen.post(|| pair.post_send(&sends).unwrap());
            assert!(seen.wait(&[&a], (round + 1) * EACH));
            next_good(&b.completions, EACH as usize);
        }
    });
    // Completions that the post itself brings about.
    pair.modify(&to(QueuePairState::Error)).unwrap();
    for id in ROUNDS * EACH..ROUNDS * EACH + 20 {
        seen.post(|| {
            a.device.postpone_sending(|| pair.post_receive(&[receive(id)]).unwrap());
        });
        assert!(seen.wait(&[&a], id + 1));
    }
    if a.device.provider() == Provider::Soft {
        assert!(seen.threads.lock().unwrap().len() > 1, "threads that wait call it too");
    }
}

#[test]
fn several_devices_are_waited_for_at_once() {
    let ends = [two(), two()];
    let [[a, _], [c, _]] = &ends;
    let seen = Arc::<Seen>::default();
    // In the order in which they are asked for, over both devices.
    let pairs = ends.each_ref().map(|[near, far]| {
        let seen = Arc::clone(&seen);
        let handler = Box::new(move |completions: &[Completion]| seen.handle(completions));
        let queue =
            near.device.create_completion_queue_with_progress_handler(256, handler).unwrap();
        (pair_of(near, &queue, far), far)
    });
    for id in 0..200 {
        let ((pair, other), far) = &pairs[id as usize % 3 % 2];
        other.post_receive(&[receive(id)]).unwrap();
        seen.post(|| pair.post_send(&[request(id, SEND, EMPTY)]).unwrap());
        assert!(seen.wait(&[a, c], id + 1));
        next_good(&far.completions, 1);
    }
}

#[test]
fn many_threads_wait_each_for_its_own_queue() {
    let [a, b] = two();
    thread::scope(|scope| {
        for thread in 0..5 {
            let [a, b] = [&a, &b];
            scope.spawn(move || {
                let near = a.device.create_completion_queue(64).unwrap();
                let far = b.device.create_completion_queue(64).unwrap();
                let pair = a.domain.create_queue_pair(&near, &near, CAPABILITIES).unwrap();
                let other = b.domain.create_queue_pair(&far, &far, CAPABILITIES).unwrap();
                connect((&pair, &a.device), (&other, &b.device), USUAL);
                for round in 0..200 {
                    other.post_receive(&[receive(round)]).unwrap();
                    pair.post_send(&[request(round, SEND, EMPTY)]).unwrap();
                    // Some look for one end first, some for the other.
                    let order = if thread % 2 == 0 { [&near, &far] } else { [&far, &near] };
                    for queue in order {
                        assert_eq!(next_good(queue, 1)[0].id, round);
                    }
                }
            });
        }
    });
}

/// With nobody who waits or polls the peer is answered, and also while one only looks now and then.
#[test]
fn a_peer_is_answered_when_nobody_waits() {
    let [a, b] = two();
    for round in 0..40 {
        b.pair.post_receive(&[receive(round)]).unwrap();
        assert!(!b.completions.wait(Duration::from_micros(200)));
        a.pair.post_send(&[request(round, SEND, EMPTY)]).unwrap();
        next_good(&a.completions, 1);
        let mut out = Vec::new();
        let end = Instant::now() + PATIENCE;
        while b.completions.poll(&mut out, 1) == 0 {
            assert!(Instant::now() < end);
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((out[0].id, out[0].status), (round, CompletionStatus::Success));
    }
}

/// There it would wait for itself.
#[test]
fn waiting_in_a_handler_ends_at_its_time() {
    for progress in [false, true] {
        let [a, b] = two();
        let (sender, receiver) = mpsc::channel();
        let idle = a.device.create_completion_queue(16).unwrap();
        let device: Arc<OnceLock<_>> = Arc::default();
        let waited_for = Arc::clone(&device);
        let handler = Box::new(move |_: &[Completion]| {
            let (start, timeout) = (Instant::now(), Duration::from_millis(2));
            assert!(!idle.wait(timeout));
            let waiters = Waiters::default();
            let found: Option<()> = wait(waited_for.get(), &waiters, timeout, || None);
            assert_eq!(found, None);
            assert!(start.elapsed() >= 2 * timeout);
            sender.send(()).unwrap();
        });
        let queue = match progress {
            false => a.device.create_completion_queue_with_handler(16, handler),
            true => a.device.create_completion_queue_with_progress_handler(16, handler),
        };
        let queue = queue.unwrap();
        let (pair, other) = pair_of(&a, &queue, &b);
        assert!(device.set(a.device.clone()).is_ok());
        for round in 0..5 {
            other.post_receive(&[receive(round)]).unwrap();
            pair.post_send(&[request(round, SEND, EMPTY)]).unwrap();
            next_good(&b.completions, 1);
            receiver.recv_timeout(PATIENCE).unwrap();
        }
        // The device goes on.
        b.pair.post_receive(&[receive(1)]).unwrap();
        a.pair.post_send(&[request(1, SEND, EMPTY)]).unwrap();
        next_good(&a.completions, 1);
        assert!(a.device.failure().is_none());
    }
}
