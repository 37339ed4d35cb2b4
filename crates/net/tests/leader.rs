//! Threads that wait make the progress: one leads, others follow, and the driver takes over when all
//! have left.

mod common;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant as SystemInstant};

use common::{PATIENCE, address, config, eventually};
use millstream_net::{Failure, Hook, Progress, ProgressConfig, Shared, Waiters, Worker, wait};
use millstream_roce::{DatagramMeta, Instant, Node, Piece, Transmit};

const PING: u8 = 0x0a;
const PONG: u8 = 0x11;
const SLOTS: usize = 16;

/// Asks a peer of its kind, which answers. Nothing is asked again: a lost question is a hang.
struct Echo {
    outbox: VecDeque<(IpAddr, u8, u8)>,
    answered: [u64; SLOTS],
    deadline: Option<Instant>,
    fired: u64,
    panic: bool,
}

impl Echo {
    fn new() -> Self {
        let outbox = VecDeque::with_capacity(1024);
        Self { outbox, answered: [0; SLOTS], deadline: None, fired: 0, panic: false }
    }
}

impl Node for Echo {
    fn handle_datagram(&mut self, _now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        match datagram[0] {
            PING => self.outbox.push_back((meta.source, PONG, datagram[8])),
            _ => self.answered[usize::from(datagram[8])] += 1,
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        assert!(!self.panic, "the test wants a panic");
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            self.fired += 1;
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.deadline
    }

    fn poll_transmit(&mut self, _now: Instant, transmit: &mut Transmit) -> bool {
        let Some((to, kind, slot)) = self.outbox.pop_front() else { return false };
        let mut headers = [0; 12];
        (headers[0], headers[8]) = (kind, slot);
        transmit.set(to, &headers, &[], 0);
        true
    }

    fn bytes(&self, _piece: &Piece) -> Option<&[u8]> {
        None
    }
}

/// Wakes who waits, and counts the rounds of each kind of thread.
#[derive(Default)]
struct Heard {
    waiters: Waiters,
    by_driver: AtomicU64,
    by_leaders: AtomicU64,
    /// No leader is told of anything: it is for the driver.
    only_driver: AtomicBool,
    panic: AtomicBool,
}

struct Tell(Arc<Heard>);

impl Hook<Echo> for Tell {
    fn observe(&self, _node: &mut Echo, eventful: bool) -> u64 {
        u64::from(eventful)
    }

    fn announce(&self, shared: &Shared<Echo>, observed: u64, worker: Worker) -> u64 {
        match worker {
            Worker::Driver => &self.0.by_driver,
            Worker::Leader | Worker::Poster => &self.0.by_leaders,
        }
        .fetch_add(1, Ordering::Relaxed);
        assert_eq!(shared.is_progress_thread(), worker != Worker::Poster);
        assert!(!self.0.panic.swap(false, Ordering::Relaxed), "the test wants a panic");
        if worker != Worker::Driver && self.0.only_driver.load(Ordering::Relaxed) {
            return observed;
        }
        self.0.waiters.wake();
        0
    }
}

struct End {
    heard: Arc<Heard>,
    address: IpAddr,
    progress: Progress<Echo>,
}

fn open(busy_poll: Option<Duration>) -> End {
    open_at(address(), busy_poll)
}

fn open_at(address: IpAddr, busy_poll: Option<Duration>) -> End {
    let heard = Arc::<Heard>::default();
    let config = ProgressConfig { busy_poll, ..config(address) };
    let hook = Tell(Arc::clone(&heard));
    // SAFETY: an `Echo` names no memory.
    let progress = unsafe { Progress::start_with(config, Echo::new(), hook) }.unwrap();
    End { heard, address, progress }
}

impl End {
    fn shared(&self) -> &Arc<Shared<Echo>> {
        self.progress.shared()
    }

    fn ping(&self, to: &Self, slot: usize) {
        self.shared().lock().unwrap().outbox.push_back((to.address, PING, slot as u8));
    }

    fn answered(&self, slot: usize) -> u64 {
        self.shared().lock_regardless().answered[slot]
    }

    /// Waits until so many answers have come.
    fn wait_for(&self, slot: usize, count: u64) {
        let look = || (self.answered(slot) >= count).then_some(());
        let found = wait([&**self.shared()], &self.heard.waiters, PATIENCE, look);
        assert!(found.is_some(), "answer {count} of slot {slot}: {}", self.answered(slot));
    }

    /// Leads or follows for a while, in which there is nothing to find.
    fn wait_in_vain(&self, timeout: Duration) {
        let found: Option<()> = wait([&**self.shared()], &self.heard.waiters, timeout, || None);
        assert_eq!(found, None);
    }
}

const HOW_TO_POLL: [Option<Duration>; 3] =
    [Some(Duration::ZERO), Some(Duration::from_micros(20)), None];

/// Some numbers that are different each time, and the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn pause(&mut self, longest: u64) {
        (0..self.below(longest)).for_each(|_| std::hint::spin_loop());
    }
}

#[test]
fn who_waits_makes_the_progress() {
    const ROUNDS: u64 = 2000;
    for busy_poll in HOW_TO_POLL {
        let [a, b] = [open(busy_poll), open(busy_poll)];
        for round in 1..=ROUNDS {
            a.ping(&b, 0);
            a.wait_for(0, round);
        }
        let driver = a.heard.by_driver.load(Ordering::Relaxed);
        let leader = a.heard.by_leaders.load(Ordering::Relaxed);
        // It steps in when the waiting thread is kept from running, between two waits, for long.
        assert!(driver < ROUNDS / 4, "{driver} rounds by the driver, {leader} by the thread");
        assert!(leader > ROUNDS, "{leader}");
    }
}

#[test]
fn who_asks_without_waiting_makes_the_progress_too() {
    const ROUNDS: u64 = 500;
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    for round in 1..=ROUNDS {
        a.ping(&b, 0);
        let end = SystemInstant::now() + PATIENCE;
        while a.answered(0) < round {
            a.wait_in_vain(Duration::ZERO);
            assert!(SystemInstant::now() < end, "answer {round}");
        }
    }
    // One for each question, which is sent by who asks, and more only for answers that it took.
    let asking = a.heard.by_leaders.load(Ordering::Relaxed);
    assert!(asking > ROUNDS + ROUNDS / 4, "{asking}");
}

#[test]
fn many_wait_and_all_get_theirs() {
    const ROUNDS: u64 = 1500;
    for busy_poll in HOW_TO_POLL {
        let [a, b] = [open(busy_poll), open(busy_poll)];
        thread::scope(|scope| {
            for slot in 0..6 {
                let [a, b] = [&a, &b];
                scope.spawn(move || {
                    let mut random = Random(slot as u64);
                    for round in 1..=ROUNDS {
                        a.ping(b, slot);
                        random.pause(2000);
                        a.wait_for(slot, round);
                        random.pause(2000);
                    }
                });
            }
        });
    }
}

/// The one that leads has waited first and finds its answer first, over and over; those that remain
/// are for the others.
#[test]
fn those_who_follow_go_on_when_the_leader_leaves() {
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    for round in 1..=300 {
        thread::scope(|scope| {
            for slot in 0..4 {
                let a = &a;
                scope.spawn(move || a.wait_for(slot, round));
            }
            let mut random = Random(round);
            let first = random.below(4) as usize;
            for slot in 0..4 {
                random.pause(20_000);
                a.ping(&b, (first + slot) % 4);
            }
        });
    }
}

#[test]
fn a_leader_that_panics_leaves() {
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    for round in 1..=20 {
        thread::scope(|scope| {
            let follower = scope.spawn(|| a.wait_for(0, round));
            let mut looks = 0;
            let look = || -> Option<()> {
                looks += 1;
                assert!(looks < 3, "the test wants a panic");
                a.heard.waiters.wake();
                None
            };
            let waiting = || wait([&**a.shared()], &a.heard.waiters, PATIENCE, look);
            assert!(panic::catch_unwind(AssertUnwindSafe(waiting)).is_err());
            assert!(a.shared().failure().is_none());
            a.ping(&b, 0);
            follower.join().unwrap();
        });
        // And with nobody who waits, the driver.
        b.ping(&a, 0);
        eventually("an answer by the driver", || b.answered(0) == round);
    }
}

#[test]
fn a_sleeping_leader_keeps_the_deadlines_of_others() {
    for busy_poll in HOW_TO_POLL {
        let end = open(busy_poll);
        for round in 1..=500 {
            thread::scope(|scope| {
                let leader = scope.spawn(|| {
                    let look = || (end.shared().lock_regardless().fired == round).then_some(());
                    wait([&**end.shared()], &end.heard.waiters, PATIENCE, look)
                });
                Random(round).pause(60_000);
                let mut node = end.shared().lock().unwrap();
                node.deadline = Some(end.shared().now() + Duration::from_micros(300));
                drop(node);
                assert!(leader.join().unwrap().is_some(), "deadline {round} was slept through");
            });
        }
    }
}

#[test]
fn a_deadline_is_kept_after_the_leader_has_left() {
    let end = open(Some(Duration::ZERO));
    for round in 1..=100 {
        let mut node = end.shared().lock().unwrap();
        node.deadline = Some(end.shared().now() + Duration::from_millis(2));
        drop(node);
        end.wait_in_vain(Duration::from_micros(10 * round));
        eventually("the deadline", || end.shared().lock_regardless().fired == round);
    }
}

#[test]
fn a_request_of_another_thread_does_not_wait_for_the_leader() {
    for busy_poll in HOW_TO_POLL {
        let [a, b] = [open(busy_poll), open(busy_poll)];
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let leader = scope.spawn(|| {
                let look = || stop.load(Ordering::SeqCst).then_some(());
                wait([&**a.shared()], &a.heard.waiters, PATIENCE, look)
            });
            let mut random = Random(7);
            for round in 1..=2000 {
                a.ping(&b, 3);
                // It is the leader that receives the answer.
                let end = SystemInstant::now() + PATIENCE;
                while a.answered(3) < round {
                    assert!(SystemInstant::now() < end, "no answer to {round}");
                    thread::yield_now();
                }
                random.pause(3000);
            }
            stop.store(true, Ordering::SeqCst);
            a.heard.waiters.wake();
            assert!(leader.join().unwrap().is_some());
        });
    }
}

/// The peer is answered whoever is at it: a thread that waits for short whiles, one that looks now and
/// then, the driver.
#[test]
fn leaders_come_and_go_and_the_peer_is_answered() {
    for busy_poll in HOW_TO_POLL {
        let [a, b] = [open(busy_poll), open(busy_poll)];
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random(1);
                while !stop.load(Ordering::Relaxed) {
                    match random.below(3) {
                        0 => b.wait_in_vain(Duration::from_micros(random.below(200))),
                        1 => b.shared().progress(),
                        _ => random.pause(100_000),
                    }
                }
            });
            for round in 1..=2000 {
                a.ping(&b, 0);
                a.wait_for(0, round);
            }
            stop.store(true, Ordering::Relaxed);
        });
        for round in 2001..=2050 {
            b.wait_in_vain(Duration::from_micros(300));
            a.ping(&b, 0);
            a.wait_for(0, round);
        }
    }
}

/// More than a round takes is left when the leader goes.
#[test]
fn what_a_leader_leaves_unsent_is_sent() {
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    for round in 1..=50 {
        let mut node = a.shared().lock().unwrap();
        node.outbox.extend((0..700).map(|_| (b.address, PING, 0)));
        // Nobody is asked to send it.
        node.release_without_waking();
        a.ping(&b, 1);
        a.shared().progress();
        eventually("all answers", || (a.answered(0), a.answered(1)) == (700 * round, round));
    }
}

#[test]
fn several_nodes_are_waited_for_at_once() {
    let [peer, ends @ ..] = &[(); 21].map(|()| open(Some(Duration::ZERO)));
    for count in [2, 17, 20] {
        let ends = &ends[..count as usize];
        // One for all.
        let waiters = &ends[0].heard.waiters;
        let mut random = Random(count);
        for round in 1..=100 {
            let chosen = &ends[random.below(count) as usize];
            let before = chosen.answered(0);
            chosen.ping(peer, 0);
            let nodes = ends.iter().map(|end| &**end.shared());
            thread::scope(|scope| {
                let stop = Arc::new(AtomicBool::new(false));
                let stopped = Arc::clone(&stop);
                // For those whose hooks do not know of `waiters`: the driver's, from the 17th on.
                scope.spawn(move || {
                    while !stopped.load(Ordering::Relaxed) {
                        chosen.wait_in_vain(Duration::from_micros(100));
                        waiters.wake();
                    }
                });
                let look = || (chosen.answered(0) > before).then_some(());
                let found = wait(nodes, waiters, PATIENCE, look);
                stop.store(true, Ordering::Relaxed);
                assert!(found.is_some(), "round {round} of {count}");
            });
        }
    }
}

#[test]
fn one_of_several_nodes_may_be_named_twice() {
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    for round in 1..=100 {
        a.ping(&b, 0);
        let look = || (a.answered(0) == round).then_some(());
        let nodes = [&**a.shared(), &**b.shared(), &**a.shared()];
        assert!(wait(nodes, &a.heard.waiters, PATIENCE, look).is_some());
    }
}

/// Starts threads that wait for `end`, leader and followers, lets it end, and says how.
fn ends_while_threads_wait(end: End, finish: impl FnOnce(End)) -> Failure {
    let shared = Arc::clone(end.shared());
    let heard = Arc::clone(&end.heard);
    let waiting = AtomicU64::new(0);
    thread::scope(|scope| {
        let wait_for_failure = || {
            waiting.fetch_add(1, Ordering::SeqCst);
            wait([&*shared], &heard.waiters, PATIENCE, || shared.failure().cloned())
        };
        let threads = [(); 4].map(|()| scope.spawn(wait_for_failure));
        eventually("threads that wait", || waiting.load(Ordering::SeqCst) == 4);
        finish(end);
        let failures = threads.map(|thread| thread.join().unwrap().expect("they were told"));
        let [first, rest @ ..] = failures;
        assert!(rest.iter().all(|failure| failure.to_string() == first.to_string()));
        // It has ended: what is asked of it is refused, and waiting is of no use.
        assert!(shared.lock().is_err());
        shared.progress();
        first
    })
}

#[test]
fn a_node_may_end_while_threads_wait() {
    let (own, other) = (address(), address());
    for busy_poll in HOW_TO_POLL {
        for _ in 0..5 {
            let closed = ends_while_threads_wait(open_at(own, busy_poll), drop);
            assert!(matches!(closed, Failure::Closed { .. }), "{closed}");
        }
        let panicked = ends_while_threads_wait(open_at(own, busy_poll), |end| {
            end.shared().lock().unwrap().panic = true;
            eventually("the failure", || end.shared().failure().is_some());
        });
        assert!(matches!(panicked, Failure::Panicked { .. }), "{panicked}");
        // The leader's round is what panics: nobody asks for one.
        let panicked = ends_while_threads_wait(open_at(own, busy_poll), |end| {
            end.shared().lock_without_waking().unwrap().panic = true;
            end.heard.waiters.wake();
            let peer = open_at(other, Some(Duration::ZERO));
            peer.ping(&end, 0);
            eventually("the failure", || end.shared().failure().is_some());
        });
        assert!(matches!(panicked, Failure::Panicked { .. }), "{panicked}");
        // A hook that panics does not take a waiting thread with it.
        let panicked = ends_while_threads_wait(open_at(own, busy_poll), |end| {
            end.heard.panic.store(true, Ordering::Relaxed);
            let peer = open_at(other, Some(Duration::ZERO));
            peer.ping(&end, 0);
            eventually("the failure", || end.shared().failure().is_some());
        });
        assert!(matches!(panicked, Failure::Panicked { .. }), "{panicked}");
    }
}

#[test]
fn what_is_for_the_driver_reaches_it_though_others_lead() {
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    a.heard.only_driver.store(true, Ordering::Relaxed);
    for round in 1..=1000 {
        a.ping(&b, 0);
        a.wait_for(0, round);
    }
    let driver = a.heard.by_driver.load(Ordering::Relaxed);
    assert!(driver > 0, "{driver}");
}

#[test]
fn waiting_in_the_hook_ends_at_its_time() {
    let own = address();
    let waiters = Arc::new(Waiters::default());
    let waited = Arc::new(AtomicU64::new(0));
    let hook = {
        let (waiters, waited) = (Arc::clone(&waiters), Arc::clone(&waited));
        move |shared: &Shared<Echo>| {
            let start = SystemInstant::now();
            let timeout = Duration::from_millis(1);
            let found: Option<()> = wait([shared], &waiters, timeout, || None);
            assert!(found.is_none() && start.elapsed() >= timeout);
            waited.fetch_add(1, Ordering::SeqCst);
        }
    };
    // SAFETY: an `Echo` names no memory.
    let progress = unsafe { Progress::start(config(own), Echo::new(), hook) }.unwrap();
    let peer = open(Some(Duration::ZERO));
    for round in 1..=20 {
        peer.shared().lock().unwrap().outbox.push_back((own, PING, 0));
        peer.wait_for(0, round);
    }
    eventually("a call of the hook", || waited.load(Ordering::SeqCst) > 0);
    assert!(progress.shared().failure().is_none());
}

#[test]
fn what_is_postponed_is_sent_once_and_also_after_a_panic() {
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    eventually("both drivers to sleep", || a.shared().driver_counters().rounds > 0);
    a.shared().postpone(|| {
        for slot in 0..5 {
            a.ping(&b, slot);
        }
        let unsent = a.shared().lock_regardless().outbox.len();
        assert_eq!(unsent, 5, "nothing is sent until all is asked for");
    });
    (0..5).for_each(|slot| a.wait_for(slot, 1));
    let panicking = || {
        a.shared().postpone(|| {
            a.ping(&b, 0);
            panic!("the test wants a panic");
        })
    };
    assert!(panic::catch_unwind(AssertUnwindSafe(panicking)).is_err());
    eventually("the answer", || a.answered(0) == 2);
    assert!(!a.shared().is_progress_thread());
}

#[test]
fn what_is_postponed_for_two_nodes_waits_for_the_end_of_both() {
    let [a, b] = [open(Some(Duration::ZERO)), open(Some(Duration::ZERO))];
    for end in [&a, &b] {
        eventually("both drivers to sleep", || end.shared().driver_counters().rounds > 0);
    }
    a.shared().postpone(|| {
        b.shared().postpone(|| {
            a.ping(&b, 0);
            b.ping(&a, 0);
            for end in [&a, &b] {
                assert_eq!(end.shared().lock_regardless().outbox.len(), 1, "not sent yet");
                assert!(end.shared().is_progress_thread());
            }
        });
        assert!(a.shared().is_progress_thread() && !b.shared().is_progress_thread());
    });
    assert!(!a.shared().is_progress_thread());
    a.wait_for(0, 1);
    b.wait_for(0, 1);
}
