//! In steady state the progress thread allocates nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{PATIENCE, Signal, StreamNode, address, config, has_packet_sockets};
use millstream_net::{Driver, Progress, ProgressConfig, Shared};

struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if COUNTING.load(Ordering::SeqCst) && WATCHED.get() {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: all work is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, length: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(memory, layout, length) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn run(driver: Driver, segmentation_offload: bool) {
    const WARM_UP: usize = 2_000;
    const MEASURED: usize = 50_000;
    let (here, there) = (address(), address());
    let signal = Signal::default();
    let run = |own, peer| {
        let node = StreamNode::new(own, peer, &[4096, 4096, 4096, 100, 20]);
        let mut notify = signal.hook();
        let hook = move |shared: &Shared<StreamNode>| {
            WATCHED.set(true);
            notify(shared);
        };
        let config = ProgressConfig { driver, segmentation_offload, ..config(own) };
        // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
        unsafe { Progress::start(config, node, hook) }.unwrap()
    };
    let (sender, receiver) = (run(here, there), run(there, here));
    for (node, peer) in [(&sender, there), (&receiver, here)] {
        assert!(node.shared().prepare(peer, PATIENCE));
    }
    let send = |total| {
        sender.shared().lock().unwrap().total = total;
        signal.wait_until("all datagrams", || {
            sender.shared().lock_without_waking().unwrap().acknowledged == total
        });
    };
    send(WARM_UP);
    COUNTING.store(true, Ordering::SeqCst);
    send(WARM_UP + MEASURED);
    COUNTING.store(false, Ordering::SeqCst);
    assert_eq!(receiver.shared().lock_without_waking().unwrap().received, WARM_UP + MEASURED);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst), 0);
}

#[test]
fn the_progress_threads_do_not_allocate() {
    // One after the other, as the count is global.
    let packet = has_packet_sockets("the_progress_threads_do_not_allocate over packet sockets");
    for driver in [Driver::Udp, Driver::Packet] {
        if driver == Driver::Udp || packet {
            run(driver, true);
            run(driver, false);
        }
    }
    // Proof that the count works.
    WATCHED.set(true);
    COUNTING.store(true, Ordering::SeqCst);
    drop(Box::new([0_u8; 100]));
    COUNTING.store(false, Ordering::SeqCst);
    assert!(ALLOCATIONS.load(Ordering::SeqCst) > 0);
}
