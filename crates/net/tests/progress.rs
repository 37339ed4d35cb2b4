//! The progress thread: deadlines, wake-ups, failures, and its end.

mod common;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use common::{Signal, StreamNode, address, config, start};
use millstream_net::{Failure, Progress, ProgressConfig, Shared, Waiters, wait};
use millstream_roce::Instant;

fn quiet(address: IpAddr) -> StreamNode {
    StreamNode::new(address, address, &[100])
}

#[test]
fn deadlines_fire_in_time_and_never_early() {
    let own = address();
    let signal = Signal::default();
    let end = start(config(own), quiet(own), &signal);
    let wanted: Vec<Instant> = {
        let mut node = end.shared().lock().unwrap();
        let now = end.shared().now();
        // Set from another thread, while the progress thread sleeps without a deadline.
        node.deadlines = (1..=20).rev().map(|n| now + Duration::from_micros(500 * n)).collect();
        node.deadlines.iter().rev().copied().collect()
    };
    signal.wait_until("all deadlines", || {
        end.shared().lock_without_waking().unwrap().fired.len() == wanted.len()
    });
    let fired = end.shared().lock_without_waking().unwrap().fired.clone();
    assert_eq!(fired.iter().map(|&(deadline, _)| deadline).collect::<Vec<_>>(), wanted);
    assert!(fired.iter().all(|(deadline, noticed)| noticed >= deadline));
}

/// Somebody else watches the socket again only half a millisecond after a thread that has waited for
/// some milliseconds. Deadlines have no such time.
#[test]
fn a_deadline_soon_after_a_wait_fires_in_time() {
    const GRACE: Duration = Duration::from_micros(500);
    let own = address();
    let signal = Signal::default();
    let end = start(config(own), quiet(own), &signal);
    let shared = &**end.shared();
    // A thread may get its processor late, but not always.
    let in_time = (1..=200).any(|count| {
        let left = shared.now() + 10 * GRACE;
        // This thread hears of it from the node, when another one has passed while it waits.
        let deadline = left + GRACE / 4;
        shared.lock().unwrap().deadlines = vec![deadline, shared.now() + 5 * GRACE];
        let is_over = || (shared.now() >= left).then_some(());
        wait([shared], &Waiters::default(), 10 * GRACE, is_over);
        let has_fired = || shared.lock_without_waking().unwrap().fired.len() == 2 * count;
        signal.wait_until("the deadline", has_fired);
        let (_, noticed) = shared.lock_without_waking().unwrap().fired[2 * count - 1];
        noticed < deadline + GRACE / 4
    });
    assert!(in_time, "no deadline was kept");
}

#[test]
fn a_deadline_of_the_new_node_fires() {
    let own = address();
    let signal = Signal::default();
    for microseconds in [0, 1000] {
        let mut node = quiet(own);
        node.deadlines = vec![millstream_net::now() + Duration::from_micros(microseconds)];
        let end = start(config(own), node, &signal);
        signal.wait_until("the deadline", || {
            end.shared().lock_without_waking().unwrap().fired.len() == 1
        });
    }
}

/// Each request meets a thread that sleeps, or is just about to: a lost wake-up hangs.
fn ping_pong(busy_poll: Option<Duration>) {
    let (here, there) = (address(), address());
    let signal = Signal::default();
    let mut node = StreamNode::new(here, there, &[100]);
    node.total = 0;
    let sender = start(ProgressConfig { busy_poll, ..config(here) }, node, &signal);
    let receiver = start(config(there), StreamNode::new(there, here, &[100]), &signal);
    for count in 1..=3000 {
        sender.shared().lock().unwrap().total = count;
        signal.wait_until("the acknowledgement", || {
            sender.shared().lock_without_waking().unwrap().acknowledged == count
        });
    }
    assert_eq!(receiver.shared().lock_without_waking().unwrap().received, 3000);
}

#[test]
fn requests_wake_the_thread() {
    ping_pong(Some(Duration::ZERO));
}

#[test]
fn requests_reach_a_busy_polling_thread() {
    ping_pong(Some(Duration::from_micros(20)));
}

#[test]
fn requests_reach_a_thread_that_looks_where_that_is_of_use() {
    ping_pong(None);
}

#[test]
fn callers_get_the_lock_of_a_busy_thread() {
    let own = address();
    let signal = Signal::default();
    let mut node = StreamNode::new(own, own, &[4096]);
    node.total = usize::MAX;
    let end = start(config(own), node, &signal);
    for _ in 0..1000 {
        drop(end.shared().lock().unwrap());
    }
    signal.wait_until("some datagrams", || {
        end.shared().lock_without_waking().unwrap().received > 1000
    });
}

#[test]
fn the_hook_may_ask_the_node_for_more() {
    const TOTAL: usize = 1000;
    let own = address();
    let signal = Signal::default();
    let notify = signal.clone();
    let hook = move |shared: &Shared<StreamNode>| {
        assert!(shared.is_progress_thread());
        // What a completion handler does: look, and post the next.
        if let Ok(mut node) = shared.lock()
            && node.acknowledged == node.total
            && node.total < TOTAL
        {
            node.total += 1;
        }
        shared.quiesce();
        notify.notify();
    };
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    let end = unsafe { Progress::start(config(own), quiet(own), hook) }.unwrap();
    assert!(!end.shared().is_progress_thread());
    drop(end.shared().lock().unwrap());
    signal.wait_until("the last", || {
        end.shared().lock_without_waking().unwrap().acknowledged == TOTAL
    });
}

#[test]
fn a_hook_that_only_looks_lets_the_thread_sleep() {
    let own = address();
    let (send, calls) = mpsc::channel();
    let hook = move |shared: &Shared<StreamNode>| {
        drop(shared.lock());
        let _ = send.send(());
    };
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    let end = unsafe { Progress::start(config(own), quiet(own), hook) }.unwrap();
    drop(end.shared().lock().unwrap());
    calls.recv().unwrap();
    // Long enough for thousands of rounds, were each call to cause another.
    let_time_pass();
    // One for the request, perhaps one for the request while it was under way, one for the end.
    drop(end);
    let more = calls.iter().count();
    assert!(more <= 2, "{more} calls for nothing");
}

#[test]
fn who_asked_for_nothing_after_all_lets_the_thread_sleep() {
    let own = address();
    let (send, calls) = mpsc::channel();
    let hook = move |_: &Shared<StreamNode>| {
        let _ = send.send(());
    };
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    let end = unsafe { Progress::start(config(own), quiet(own), hook) }.unwrap();
    let calls_of_starting = calls.try_iter().count();
    for _ in 0..10 {
        end.shared().lock().unwrap().release_without_waking();
        let_time_pass();
        assert_eq!(calls.try_iter().count(), 0);
    }
    drop(end);
    assert!(calls_of_starting + calls.iter().count() <= 2);
}

/// Returns when a deadline of 20 ms has passed on another node.
fn let_time_pass() {
    let clock = address();
    let signal = Signal::default();
    let mut node = quiet(clock);
    node.deadlines = vec![millstream_net::now() + Duration::from_millis(20)];
    let other = start(config(clock), node, &signal);
    signal.wait_until("time to pass", || {
        other.shared().lock_without_waking().unwrap().fired.len() == 1
    });
}

#[test]
fn a_panic_of_the_node_ends_in_errors() {
    let own = address();
    let signal = Signal::default();
    let end = start(config(own), quiet(own), &signal);
    let shared = Arc::clone(end.shared());
    shared.lock().unwrap().panic = true;
    signal.wait_until("the failure", || shared.failure().is_some());
    assert!(matches!(shared.failure(), Some(Failure::Panicked { address }) if *address == own));
    assert!(matches!(shared.lock().err(), Some(Failure::Panicked { .. })));
    assert!(matches!(shared.lock_without_waking().err(), Some(Failure::Panicked { .. })));
    shared.quiesce();
    assert!(shared.lock_regardless().panic);
    drop(end);
}

#[test]
fn a_panic_of_a_caller_ends_in_errors() {
    let own = address();
    let signal = Signal::default();
    let end = start(config(own), quiet(own), &signal);
    let shared = Arc::clone(end.shared());
    let caller = thread::spawn(move || {
        let _guard = shared.lock().unwrap();
        panic!("the test wants a panic");
    });
    assert!(caller.join().is_err());
    signal.wait_until("the failure", || end.shared().failure().is_some());
    let message = end.shared().lock().err().unwrap().to_string();
    assert_eq!(
        message,
        format!("the device at {own} stopped because of a bug: the panic is reported on stderr")
    );
}

#[test]
fn a_panic_that_woke_nobody_is_found_by_the_next_caller() {
    let own = address();
    let (send, calls) = mpsc::channel();
    let hook = move |shared: &Shared<StreamNode>| {
        let _ = send.send(shared.failure().is_some());
    };
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    let end = unsafe { Progress::start(config(own), quiet(own), hook) }.unwrap();
    let shared = Arc::clone(end.shared());
    let caller = thread::spawn(move || {
        let _guard = shared.lock_without_waking().unwrap();
        panic!("the test wants a panic");
    });
    assert!(caller.join().is_err());
    assert!(matches!(end.shared().lock().err(), Some(Failure::Panicked { .. })));
    // The thread ends, and with it the hook and its channel.
    assert_eq!(calls.iter().last(), Some(true));
}

#[test]
fn dropping_ends_the_thread() {
    let own = address();
    let token = Arc::new(());
    let held = Arc::clone(&token);
    let hook = move |_: &Shared<StreamNode>| {
        let _held = &held;
    };
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    let end = unsafe { Progress::start(config(own), quiet(own), hook) }.unwrap();
    let shared = Arc::clone(end.shared());
    assert_eq!(Arc::strong_count(&token), 2);
    drop(end);
    assert_eq!(Arc::strong_count(&token), 1, "the thread has dropped its hook");
    assert!(matches!(shared.lock().err(), Some(Failure::Closed { .. })));
    shared.quiesce();
    // The socket is closed with the last user.
    drop(shared);
    start(config(own), quiet(own), &Signal::default());
}

#[test]
fn dropping_on_its_own_thread_ends_the_thread() {
    let own = address();
    let slot: Arc<Mutex<Option<Progress<StreamNode>>>> = Arc::default();
    let (send, calls) = mpsc::channel();
    let hook = {
        let slot = Arc::clone(&slot);
        move |shared: &Shared<StreamNode>| {
            drop(slot.lock().unwrap().take());
            let _ = send.send(shared.failure().cloned());
        }
    };
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    let end = unsafe { Progress::start(config(own), quiet(own), hook) }.unwrap();
    let shared = Arc::clone(end.shared());
    *slot.lock().unwrap() = Some(end);
    // The thread may have ended already, if its first round came only now.
    drop(shared.lock());
    let last = calls.iter().last().expect("the hook is called at the end");
    assert!(matches!(last, Some(Failure::Closed { .. })), "{last:?}");
}

#[test]
fn a_node_that_has_failed_lets_who_waits_for_others_sleep() {
    let (one, other) = (address(), address());
    let signal = Signal::default();
    let [failing, alive] = [one, other].map(|own| start(config(own), quiet(own), &signal));
    {
        let mut node = failing.shared().lock().unwrap();
        // Past for ever after the panic.
        node.deadlines = vec![failing.shared().now() + Duration::from_millis(20)];
    }
    failing.shared().lock_without_waking().unwrap().panic = true;
    let mut looks = 0;
    let look = || {
        looks += 1;
        None::<()>
    };
    let both = [&**failing.shared(), &**alive.shared()];
    // Long enough for thousands of sleeps that end at once.
    assert_eq!(wait(both, &Waiters::default(), Duration::from_millis(300), look), None);
    assert!(matches!(failing.shared().failure(), Some(Failure::Panicked { .. })));
    assert!(looks < 100, "{looks} looks for nothing");
}
