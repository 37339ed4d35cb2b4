//! A million hostile packets of all kinds, and what an endpoint keeps of them: its heap does not
//! grow. An allocator that counts is global to its process, so this test has a binary to itself.

mod common;

use core::time::Duration;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::IpAddr;

use common::forge::Forge;
use common::{DOMAIN, Lcg, Options, Pair, connect, meta, pattern, piece};
use millstream_roce::{
    Counters, DatagramMeta, Identification, Instant, Node, QueuePairAttributes,
    QueuePairCapabilities, QueuePairConfig, QueuePairState as State, ReceiveRequest, SendOperation,
    Transport,
};
use millstream_wire::{Opcode, Psn, Qpn, Syndrome};

thread_local! {
    /// Bytes that this thread has allocated and not freed: the test harness has other threads.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged, whose promises hold for us. The
// counters are plain cells, built at compile time, that need no allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.get() + layout.size() as isize;
        LIVE.set(live);
        PEAK.set(PEAK.get().max(live));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as isize);
        // SAFETY: the pointer came from `alloc` above, that is from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const REMOTE: u64 = 0x2000_0000_0000;
const START: [u32; 2] = [0xff_fff0, 0x12_3456];
const QUEUE_KEY: u32 = 0x1111_1111;

fn options() -> Options {
    let reordering = Duration::from_micros(100);
    Options { psn: START, timeout: 14, reordering, ..Options::default() }
}

/// Host 1 under a flood: a connection, one that takes from a shared receive queue, and a queue pair
/// for datagrams.
struct Flood {
    lcg: Lcg,
    pair: Pair,
    key: u32,
    shared: Qpn,
    datagrams: Qpn,
    /// A number that the connection is likely to expect.
    near: u32,
}

impl Flood {
    fn new() -> Self {
        let mut pair = Pair::with(options());
        let key = pair.register(1, REMOTE, pattern(1 << 20, 1));
        let peer = (pair.hosts[0].address, pair.hosts[0].qpn);
        let host = &mut pair.hosts[1];
        let endpoint = &mut host.endpoint;
        let queue = endpoint.create_shared_receive_queue(DOMAIN, 64).unwrap();
        let capabilities = QueuePairCapabilities::new(16, 16);
        let plain = QueuePairConfig::new(DOMAIN, host.queue, capabilities);
        let shared = QueuePairConfig { shared_receive_queue: Some(queue), ..plain };
        let shared = endpoint.create_queue_pair(&shared).unwrap();
        for attributes in connect(&options(), 1, peer.0, peer.1) {
            endpoint.modify_queue_pair(Instant::ZERO, shared, &attributes).unwrap();
        }
        let datagrams = QueuePairConfig { transport: Transport::UnreliableDatagram, ..plain };
        let datagrams = endpoint.create_queue_pair(&datagrams).unwrap();
        for (state, queue_key, send_psn) in [
            (State::Initialized, Some(QUEUE_KEY), None),
            (State::ReadyToReceive, None, None),
            (State::ReadyToSend, None, Some(Psn::new(0))),
        ] {
            let state = Some(state);
            let step = QueuePairAttributes { state, queue_key, send_psn, ..Default::default() };
            endpoint.modify_queue_pair(Instant::ZERO, datagrams, &step).unwrap();
        }
        // Receives that a flood may eat, and no more.
        let pieces = [piece(key, REMOTE, 4096 + 40)];
        for id in 0..16 {
            let request = ReceiveRequest { id, pieces };
            endpoint.post_shared_receive(queue, &request).unwrap();
            endpoint.post_receive(datagrams, &request).unwrap();
        }
        Self { lcg: Lcg(7), pair, key, shared, datagrams, near: START[0] }
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.lcg.below(limit)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.lcg.below(of.len() as u32) as usize]
    }

    /// A queue pair that an attack has broken is made again: the flood goes on against it.
    fn mend(&mut self) {
        let peer = (self.pair.hosts[0].address, self.pair.hosts[0].qpn);
        for qpn in [self.pair.hosts[1].qpn, self.shared] {
            let host = &mut self.pair.hosts[1];
            if host.endpoint.queue_pair_state(qpn) != Some(State::Error) {
                continue;
            }
            let reset = QueuePairAttributes { state: Some(State::Reset), ..Default::default() };
            let [init, rtr, rts] = connect(&options(), 1, peer.0, peer.1);
            for attributes in [reset, init, rtr, rts] {
                host.endpoint.modify_queue_pair(self.pair.now, qpn, &attributes).unwrap();
            }
            if qpn == host.qpn {
                self.near = START[0];
                // Something that answers can be made up for.
                let operation = SendOperation::Read { remote_address: 0, remote_key: 1 };
                self.pair.post(1, 1, operation, &[piece(self.key, REMOTE, 5000)]);
            }
        }
    }

    /// A packet that a peer could have sent, right or wrong.
    fn forge(&mut self) -> Forge {
        let opcode = self.pick(Opcode::ALL);
        let ahead = self.pick(&[0, 0, 0, 1, 2, 100, 0xff_ffff, 0xff_fff0, 1 << 22]);
        let psn = match opcode.is_response() {
            true => START[1].wrapping_add(self.below(40)),
            false => self.near.wrapping_add(ahead),
        };
        let mut forge = Forge::new(&self.pair, 1, opcode, psn & 0xff_ffff);
        forge.bth.destination_qpn = match opcode.has_deth() {
            true => self.datagrams,
            false => self.pick(&[self.pair.hosts[1].qpn, self.pair.hosts[1].qpn, self.shared]),
        };
        let length = self.pick(&[0, 0, 0, 4, 16, 64, 255, 256, 1000]);
        forge = forge.payload(&vec![0xee; length]);
        let address = REMOTE + u64::from(self.below((1 << 20) + 5000) & !7);
        let key = self.pick(&[self.key, self.key, self.key, 0, !0]);
        if opcode.has_reth() {
            let length = self.pick(&[length as u32, length as u32, 100_000, 1 << 20, u32::MAX]);
            forge = forge.reth(address, key, length);
        }
        if opcode.has_atomic() {
            forge = forge.atomic(address, key);
        }
        if opcode.has_aeth() {
            let byte = self.pick(&[0x1f, 0x00, 0x20, 0x2c, 0x60, 0x61, 0x62, 0x63, 0x7f, 0x80]);
            forge = forge.syndrome(Syndrome::from_byte(byte));
        }
        if opcode.has_deth() {
            let queue_key = self.pick(&[QUEUE_KEY, QUEUE_KEY, 0, !0]);
            forge = forge.deth(queue_key, self.lcg.below(1 << 24));
        }
        forge.bth.acknowledge_request = self.below(2) == 0;
        forge
    }

    /// One packet of the flood.
    fn packet(&mut self, datagram: &mut Vec<u8>) -> DatagramMeta {
        let mut meta = meta(self.pair.hosts[0].address, self.pair.hosts[1].address);
        datagram.clear();
        match self.below(8) {
            // Garbage of every length.
            0 => {
                let length = self.below(4300);
                datagram.extend((0..length).map(|i| (i ^ length) as u8));
                let bytes = self.below(1 << 24).to_be_bytes();
                let end = datagram.len().min(4);
                datagram[..end].copy_from_slice(&bytes[..end]);
            }
            // Garbage behind a good header, which is checked to the end.
            1 => {
                let length = 4 * (self.below(1024) as usize + 1);
                *datagram = Forge::new(&self.pair, 1, Opcode::RcSendOnly, self.near)
                    .payload(&[0; 4])
                    .datagram(&self.pair);
                datagram.resize(12 + length, 0x55);
                meta.identification = Identification::Guessed(0);
            }
            kind => {
                let mut forge = self.forge();
                match kind {
                    // To nobody.
                    2 => forge.bth.destination_qpn = Qpn::new(self.lcg.below(1 << 24)),
                    3 => forge.bth.partition_key = self.lcg.below(1 << 16) as u16,
                    _ => {}
                }
                *datagram = forge.datagram(&self.pair);
                match kind {
                    // As if from another machine.
                    4 => meta.source = IpAddr::from(self.lcg.below(u32::MAX).to_be_bytes()),
                    // Damaged or cut off.
                    5 => {
                        let at = self.below(datagram.len() as u32) as usize;
                        datagram[at] ^= 1 << self.below(8);
                    }
                    6 => datagram.truncate(self.lcg.below(datagram.len() as u32) as usize),
                    _ => {}
                }
            }
        }
        meta
    }

    fn run(&mut self, packets: u32) {
        let mut datagram = Vec::with_capacity(8192);
        for number in 0..packets {
            let meta = self.packet(&mut datagram);
            let (now, host) = (self.pair.now, &mut self.pair.hosts[1]);
            host.endpoint.handle_datagram(now, &meta, &datagram);
            // A driver that is slow to send, and an application that is slow to look.
            if number % 1000 == 0 {
                self.pair.now = now + Duration::from_millis(1);
                self.pair.hosts[1].endpoint.handle_timeout(self.pair.now);
                for answer in self.pair.answers(1) {
                    if let Some(Syndrome::Nak(_)) = answer.syndrome {
                        self.near = answer.psn;
                    }
                }
                self.pair.poll(1);
                self.pair.hosts[1].completions = Vec::new();
                self.mend();
            }
        }
    }
}

#[test]
fn a_million_hostile_packets_leave_the_heap_as_it_was() {
    let mut flood = Flood::new();
    // Once to what the endpoint ever needs.
    flood.run(200_000);
    let (live, before) = (LIVE.get(), flood.pair.counters(1));
    PEAK.set(live);
    flood.run(1_000_000);
    let (growth, peak) = (LIVE.get() - live, PEAK.get() - live);
    // What single packets and their answers take on the way, as the tests make them.
    assert!(growth <= 64 << 10, "{growth} bytes more are kept");
    assert!(peak <= 2 << 20, "{peak} bytes more at a time");
    assert!(live < 8 << 20, "{live} bytes");
    println!("{live} bytes kept after 200,000 packets, {growth} more after 1,000,000 more");
    // All kinds of packets came through to where they should be stopped.
    let after = flood.pair.counters(1);
    let counts: [fn(&Counters) -> u64; 16] = [
        |c| c.dropped_malformed,
        |c| c.dropped_icrc,
        |c| c.dropped_opcode,
        |c| c.dropped_qpn,
        |c| c.dropped_source,
        |c| c.dropped_partition_key,
        |c| c.dropped_queue_key,
        |c| c.dropped_no_receive,
        |c| c.dropped_state,
        |c| c.dropped_response,
        |c| c.duplicates,
        |c| c.out_of_sequence,
        |c| c.acks_sent,
        |c| c.naks_sent,
        |c| c.rnr_naks_sent,
        |c| c.payload_bytes_received,
    ];
    for (number, count) in counts.iter().enumerate() {
        assert!(count(&after) > count(&before), "{number}: {after:?}");
    }
    assert_eq!(after.packets_received, 1_200_000);
}
