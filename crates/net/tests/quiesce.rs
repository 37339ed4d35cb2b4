//! Memory is free to go once `quiesce` has returned, or the node was closed: here it is made inaccessible at once, under a
//! thread that sends from it all the time. Were it still read, the test would crash, or the kernel
//! would refuse to send.

mod common;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{ptr, slice, thread};

use common::{Signal, address, config};
use millstream_net::{Progress, Waiters, wait};
use millstream_roce::{DatagramMeta, Instant, Node, Piece, Transmit};

const LENGTH: usize = 1 << 16;

/// Memory of its own, which faults once it is dropped. Its addresses are not used again.
struct Mapping(*mut libc::c_void);

impl Mapping {
    fn new() -> Self {
        const PROTECTION: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
        const FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping touches nothing that exists.
        let memory = unsafe { libc::mmap(ptr::null_mut(), LENGTH, PROTECTION, FLAGS, -1, 0) };
        assert_ne!(memory, libc::MAP_FAILED);
        Self(memory)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; whoever drops it has seen to it that nobody uses it.
        assert_eq!(unsafe { libc::mprotect(self.0, LENGTH, libc::PROT_NONE) }, 0);
    }
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for Mapping {}

/// Sends from its mapping for as long as it has one.
struct Endless {
    peer: IpAddr,
    mapping: Option<Mapping>,
    collected: u64,
}

impl Node for Endless {
    fn handle_datagram(&mut self, _now: Instant, _meta: &DatagramMeta, _datagram: &[u8]) {}

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_timeout(&mut self) -> Option<Instant> {
        None
    }

    fn poll_transmit(&mut self, _now: Instant, transmit: &mut Transmit) -> bool {
        if self.mapping.is_none() {
            return false;
        }
        let address = self.collected % 8 * 4096;
        let payload = [Piece { key: 0, address, length: 4096 }];
        transmit.set(self.peer, &[0; 12], &payload, 0);
        self.collected += 1;
        true
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        let mapping = self.mapping.as_ref()?;
        // SAFETY: mapped for `LENGTH` bytes, and nobody writes.
        let bytes = unsafe { slice::from_raw_parts(mapping.0.cast::<u8>(), LENGTH) };
        bytes.get(piece.address as usize..)?.get(..piece.length as usize)
    }
}

#[test]
fn memory_can_go_after_quiesce() {
    let own = address();
    let node = Endless { peer: address(), mapping: None, collected: 0 };
    let signal = Signal::default();
    // SAFETY: below, mappings are removed from the node, and go only after `quiesce`.
    let end = unsafe { Progress::start(config(own), node, signal.hook()) }.unwrap();
    let shared = end.shared();
    for _ in 0..300 {
        let mut node = shared.lock().unwrap();
        let before = node.collected;
        node.mapping = Some(Mapping::new());
        drop(node);
        signal.wait_until("a round", || shared.lock_without_waking().unwrap().collected > before);
        let mapping = shared.lock().unwrap().mapping.take();
        shared.quiesce();
        drop(mapping);
    }
    let counters = shared.driver_counters();
    assert!(counters.sent_datagrams > 0);
    // Sending from memory that is not there is refused by the kernel.
    assert_eq!(counters.unsent_datagrams, 0);
}

/// Threads that wait or post send too, and one of them may be at it when the node is closed.
#[test]
fn memory_can_go_once_the_node_is_closed() {
    let (own, peer) = (address(), address());
    for round in 0..100 {
        let mapping = Some(Mapping::new());
        let node = Endless { peer, mapping, collected: 0 };
        let signal = Signal::default();
        // SAFETY: the mapping goes only after the node was closed.
        let end = unsafe { Progress::start(config(own), node, signal.hook()) }.unwrap();
        let shared = Arc::clone(end.shared());
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // On and on, whatever becomes of the node.
                let look = || stop.load(Ordering::Relaxed).then_some(());
                while wait([&*shared], &Waiters::default(), Duration::from_millis(1), look)
                    .is_none()
                {}
            });
            scope.spawn(|| while shared.lock().is_ok() {});
            let before = shared.lock_without_waking().unwrap().collected;
            signal.wait_until("a round", || {
                shared.lock_without_waking().unwrap().collected > before + round
            });
            drop(end);
            drop(shared.lock_regardless().mapping.take());
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(shared.driver_counters().unsent_datagrams, 0);
    }
}
