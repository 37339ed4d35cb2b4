//! In steady state no packet costs an allocation, whatever it carries and whatever is lost. An
//! allocator that counts is global to its process, so this test has a binary to itself.

mod common;

use core::time::Duration;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use common::{DOMAIN, Lcg, Options, Pair, meta, pattern, piece};
use millstream_roce::{
    Completion, CompletionStatus, DatagramDestination, DatagramMeta, Identification, Instant, Node,
    Piece, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig, QueuePairState,
    ReceiveRequest, SendOperation, SendRequest, Transmit, Transport,
};
use millstream_wire::Psn;

thread_local! {
    /// Allocations of this thread: the test harness has others, which allocate when they like.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged, whose promises hold for us. The
// counter is a plain cell, built at compile time, that needs no allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, that is from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often this thread allocates in `work`.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const LENGTH: usize = 20_000;

/// More pieces than an entry of a queue has room for.
fn three(key: u32, address: u64, length: usize) -> [Piece; 3] {
    let part = length / 3;
    let at = |index| address + (index * part) as u64;
    [piece(key, at(0), part), piece(key, at(1), part), piece(key, at(2), length - 2 * part)]
}

struct Traffic {
    pair: Pair,
    requests: Vec<SendRequest<[Piece; 3]>>,
    receive: ReceiveRequest<[Piece; 3]>,
    datagram: Vec<u8>,
    completions: Vec<Completion>,
    lcg: Lcg,
    /// One datagram in so many is lost; 0 = none.
    one_in: u32,
    /// The IPv4 identification that senders use and receivers do not see.
    identification: u16,
}

impl Traffic {
    fn new(one_in: u32, identification: u16) -> Self {
        let reordering = Duration::from_micros(100);
        let mut pair =
            Pair::with(Options { timeout: 14, max_inline: 100, reordering, ..Options::default() });
        let source = pair.register(0, LOCAL, pattern(LENGTH, 1));
        let target = pair.register(1, REMOTE, vec![0; LENGTH]);
        let (remote_address, remote_key) = (REMOTE, target);
        let operations = [
            SendOperation::Write { remote_address, remote_key, immediate: None },
            SendOperation::Read { remote_address, remote_key },
            SendOperation::Send { immediate: Some(1) },
            SendOperation::Write { remote_address, remote_key, immediate: Some(2) },
            SendOperation::FetchAdd { remote_address, remote_key, add: 3 },
            SendOperation::CompareSwap { remote_address, remote_key, compare: 1, swap: 2 },
        ];
        let request = |operation: SendOperation| {
            let length = if operation.is_atomic() { 8 } else { LENGTH };
            SendRequest::new(1, operation, three(source, LOCAL, length))
        };
        let pieces = three(target, REMOTE, LENGTH);
        Self {
            pair,
            requests: operations.map(request).to_vec(),
            receive: ReceiveRequest { id: 1, pieces },
            datagram: Vec::with_capacity(8192),
            completions: Vec::with_capacity(64),
            lcg: Lcg(1),
            one_in,
            identification,
        }
    }

    /// Every kind of message once, to its end. Receives are posted late: RNR NAKs are part of it.
    fn round(&mut self) {
        for request in &self.requests {
            let host = &mut self.pair.hosts[0];
            host.endpoint.post_send(self.pair.now, host.qpn, request).unwrap();
        }
        let (remote_address, remote_key) = (REMOTE, self.receive.pieces[0].key);
        let operation = SendOperation::Write { remote_address, remote_key, immediate: None };
        let request = SendRequest::new(1, operation, []);
        let host = &mut self.pair.hosts[0];
        host.endpoint.post_send_inline(self.pair.now, host.qpn, &request, &[7; 100]).unwrap();
        self.completions.clear();
        let naks = self.pair.counters(1).rnr_naks_sent;
        let mut posted = 0;
        while self.completions.len() < 9 {
            self.flush();
            let next = self.pair.hosts.iter_mut().filter_map(|h| h.endpoint.poll_timeout()).min();
            if self.completions.len() < 9 {
                self.pair.now = next.expect("a deadline while requests are open");
                self.pair.hosts.iter_mut().for_each(|h| h.endpoint.handle_timeout(self.pair.now));
                // One for each time that the peer was asked to wait.
                let naks = self.pair.counters(1).rnr_naks_sent - naks;
                if posted < 2 && naks > posted {
                    let host = &mut self.pair.hosts[1];
                    host.endpoint.post_receive(host.qpn, &self.receive).unwrap();
                    posted += 1;
                }
            }
        }
        assert!(self.completions.iter().all(|c| c.status == CompletionStatus::Success));
    }

    /// Delivers until nobody has anything to send.
    fn flush(&mut self) {
        let mut transmit = Transmit::new();
        let mut quiet = 0;
        let mut from = 0;
        while quiet < 2 {
            quiet += 1;
            let [a, b] = &mut self.pair.hosts;
            let (sender, receiver) = if from == 0 { (a, b) } else { (b, a) };
            let meta = DatagramMeta {
                identification: Identification::Guessed(0),
                ..meta(sender.address, receiver.address)
            };
            while sender.endpoint.poll_transmit(self.pair.now, &mut transmit) {
                quiet = 0;
                self.datagram.clear();
                let (address, buffer) = (sender.address, &mut self.datagram);
                let id = self.identification;
                assert!(transmit.assemble(&sender.endpoint, address, 4791, id, buffer));
                if self.one_in == 0 || self.lcg.below(self.one_in) > 0 {
                    receiver.endpoint.handle_datagram(self.pair.now, &meta, &self.datagram);
                }
            }
            from = 1 - from;
        }
        for host in &mut self.pair.hosts {
            host.endpoint.poll_completions(host.queue, &mut self.completions, usize::MAX);
        }
    }
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(black_box(vec![0_u8; 100]))), 1);
    assert_eq!(allocations(|| ()), 0);
}

#[test]
fn no_packet_costs_an_allocation() {
    for (one_in, identification) in [(0, 0), (0, 77), (20, 0), (20, 77)] {
        let mut traffic = Traffic::new(one_in, identification);
        (0..200).for_each(|_| traffic.round());
        let packets = traffic.pair.counters(1).packets_received;
        let count = allocations(|| (0..200).for_each(|_| traffic.round()));
        assert_eq!(count, 0, "one in {one_in} lost, identification {identification}");
        assert!(traffic.pair.counters(1).packets_received > packets + 10_000);
        let naks = traffic.pair.counters(1).rnr_naks_sent;
        // With losses the receives are often there before the message is.
        assert!(naks >= if one_in == 0 { 400 } else { 20 }, "{naks}");
    }
}

#[test]
fn no_datagram_costs_an_allocation() {
    let mut traffic = Traffic::new(0, 0);
    let [sender, receiver] = [0, 1].map(|side| {
        let host = &mut traffic.pair.hosts[side];
        let queue = host.endpoint.create_shared_receive_queue(DOMAIN, 8).unwrap();
        let config = QueuePairConfig {
            transport: Transport::UnreliableDatagram,
            shared_receive_queue: Some(queue),
            ..QueuePairConfig::new(DOMAIN, host.queue, QueuePairCapabilities::new(8, 0))
        };
        let qpn = host.endpoint.create_queue_pair(&config).unwrap();
        for (state, queue_key, send_psn) in [
            (QueuePairState::Initialized, Some(5), None),
            (QueuePairState::ReadyToReceive, None, None),
            (QueuePairState::ReadyToSend, None, Some(Psn::new(0))),
        ] {
            let state = Some(state);
            let step = QueuePairAttributes { state, queue_key, send_psn, ..Default::default() };
            host.endpoint.modify_queue_pair(Instant::ZERO, qpn, &step).unwrap();
        }
        (qpn, queue)
    });
    let address = traffic.pair.hosts[1].address;
    let message = traffic.requests[0].pieces.map(|piece| Piece { length: 300, ..piece });
    let request = SendRequest {
        datagram: Some(DatagramDestination { address, qpn: receiver.0, queue_key: 5 }),
        ..SendRequest::new(1, SendOperation::Send { immediate: None }, message)
    };
    let mut round = || {
        let [a, b] = &mut traffic.pair.hosts;
        for _ in 0..8 {
            b.endpoint.post_shared_receive(receiver.1, &traffic.receive).unwrap();
            a.endpoint.post_send(Instant::ZERO, sender.0, &request).unwrap();
        }
        traffic.completions.clear();
        traffic.flush();
        traffic.pair.hosts[0].endpoint.handle_timeout(traffic.pair.now);
        traffic.flush();
        assert_eq!(traffic.completions.len(), 16);
        assert!(traffic.completions.iter().all(|c| c.status == CompletionStatus::Success));
    };
    (0..100).for_each(|_| round());
    assert_eq!(allocations(|| (0..1000).for_each(|_| round())), 0);
}

/// Garbage costs nothing but the look at it.
#[test]
fn garbage_costs_no_allocation() {
    let mut traffic = Traffic::new(0, 0);
    traffic.round();
    let hosts = &mut traffic.pair.hosts;
    let meta = meta(hosts[0].address, hosts[1].address);
    let endpoint = &mut hosts[1].endpoint;
    let bytes = pattern(4096, 3);
    let count = allocations(|| {
        for length in 0..bytes.len() {
            endpoint.handle_datagram(traffic.pair.now, &meta, &bytes[..length]);
            endpoint.handle_datagram(traffic.pair.now, &meta, &bytes[4096 - length..]);
        }
    });
    assert_eq!(count, 0);
}
