//! Seeded random packets that pass every check of the wire (ICRC, address, queue pair), near
//! everything that the endpoint expects. Whatever a peer does, it hurts nobody but itself.
//!
//! `MILLSTREAM_FUZZ_SEEDS=N` makes N peers in place of the usual number.

mod common;

use common::forge::Forge;
use common::{DOMAIN, Lcg, Options, Pair, connect, everything, pattern, piece};
use millstream_roce::{
    Access, Counters, Instant, Node, ProtectionDomainId, QueuePairCapabilities, QueuePairConfig,
    QueuePairState, SendOperation,
};
use millstream_wire::{Opcode, Qpn, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const LENGTH: usize = 2048;
const START: [u32; 2] = [0xff_fff0, 0x12_3456];

struct Fuzz {
    lcg: Lcg,
    pair: Pair,
    /// A region that host 0 may use as it likes.
    open: u32,
    /// Regions that it may only read, only write, and not touch.
    guarded: [u32; 4],
    /// Where the next request that host 1 expects may be, roughly.
    psn: u32,
}

impl Fuzz {
    fn new(seed: u64) -> Self {
        let mut pair = Pair::with(Options { psn: START, timeout: 10, ..Options::default() });
        let memory = pair.hosts[1].endpoint.memory_mut();
        let mut region = |domain, i: u64, access| {
            let address = REMOTE + i * LENGTH as u64;
            memory.register(ProtectionDomainId(domain), address, access, pattern(LENGTH, i as u8))
        };
        let local = Access::LOCAL_WRITE;
        let guarded = [
            region(DOMAIN.0, 0, Access::REMOTE_READ).unwrap(),
            region(DOMAIN.0, 1, Access::empty()).unwrap(),
            region(DOMAIN.0 + 1, 2, everything()).unwrap(),
            // Posted receives write into it, remotes may not.
            region(DOMAIN.0, 3, local).unwrap(),
        ];
        let open = region(DOMAIN.0, 4, everything()).unwrap();
        Self { lcg: Lcg(seed), pair, open, guarded, psn: START[0] }
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.lcg.below(limit)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.lcg.below(of.len() as u32) as usize]
    }

    /// Host 1 has receives posted and requests in flight.
    fn refill(&mut self) {
        let host = &self.pair.hosts[1];
        if host.endpoint.queue_pair_state(host.qpn) != Some(QueuePairState::ReadyToSend) {
            return;
        }
        if self.below(8) == 0 {
            let length = self.pick(&[0, 4, 100, 256, 600]);
            let address = REMOTE + 3 * LENGTH as u64 + u64::from(self.below(1000));
            self.pair.receive(1, 1000, &[piece(self.guarded[3], address, length)]);
        }
        if self.below(16) == 0 {
            let address = REMOTE + 4 * LENGTH as u64;
            let (remote_address, remote_key) = (LOCAL, 0x100);
            let operation = match self.below(4) {
                0 => SendOperation::Send { immediate: None },
                1 => SendOperation::Write { remote_address, remote_key, immediate: None },
                2 => SendOperation::FetchAdd { remote_address, remote_key, add: 1 },
                _ => SendOperation::Read { remote_address, remote_key },
            };
            let length = if operation.is_atomic() { 8 } else { self.pick(&[0, 4, 256, 700]) };
            self.pair.post(1, 2000, operation, &[piece(self.open, address, length)]);
        }
    }

    fn packet(&mut self) -> Forge {
        let ours = Opcode::ALL.iter().filter(|opcode| opcode.is_reliable_connection());
        let all: Vec<_> = ours.copied().collect();
        let opcode = self.pick(&all);
        let near =
            self.pick(&[0, 0, 0, 0, 0, 1, 2, 5, 20, 0xff_ffff, 0xff_fffe, 0xff_fff0, 1 << 23]);
        let psn = if opcode.is_response() {
            START[1].wrapping_add(self.below(40)).wrapping_sub(3)
        } else {
            self.psn.wrapping_add(near)
        };
        let length = self.pick(&[0, 0, 1, 4, 100, 255, 256, 256, 257, 1024, 4096]);
        let mut forge = Forge::new(&self.pair, 1, opcode, psn & 0xff_ffff);
        if !matches!(opcode, Opcode::RcReadRequest | Opcode::RcAcknowledge) || self.below(8) == 0 {
            forge = forge.payload(&vec![0xee; length as usize]);
        }
        let keys = [self.open, self.open, self.guarded[0], self.guarded[1], self.guarded[2], 0];
        let key = self.pick(&keys);
        let place = REMOTE + u64::from(self.below(5 * LENGTH as u32 + 600)) - 300;
        let dma = self.pick(&[length, length, length, 300, 700, 1 << 20, u32::MAX]);
        if opcode.has_reth() {
            let inside = REMOTE + 4 * LENGTH as u64 + u64::from(self.below(512));
            let address = if self.below(2) == 0 { inside } else { place };
            forge = forge.reth(address, key, dma);
        }
        if opcode.has_atomic() {
            let inside = REMOTE + 4 * LENGTH as u64 + u64::from(self.below(64)) * 8;
            let address = if self.below(2) == 0 { inside } else { place };
            forge = forge.atomic(address, key);
        }
        if opcode.has_aeth() {
            let byte = self.pick(&[0x1f, 0x1f, 0x1f, 0x00, 0x21, 0x60, 0x61, 0x62, 0x63, 0x7f]);
            forge = forge.syndrome(Syndrome::from_byte(byte));
        }
        forge.bth.acknowledge_request = self.below(2) == 0;
        forge.bth.solicited_event = self.below(2) == 0;
        forge.bth.migration_request = self.below(2) == 0;
        forge
    }

    /// What host 1 says shows where it is: the fuzzer stays near.
    fn listen(&mut self) -> usize {
        let answers = self.pair.answers(1);
        for answer in &answers {
            if let Some(Syndrome::Nak(_) | Syndrome::ReceiverNotReady { .. }) = answer.syndrome {
                self.psn = answer.psn;
            } else if answer.opcode.is_response() {
                self.psn = (answer.psn + 1) & 0xff_ffff;
            }
        }
        answers.len()
    }

    fn untouched(&self, seed: u64) {
        for (i, &key) in self.guarded[..3].iter().enumerate() {
            assert_eq!(
                self.pair.region(1, key),
                pattern(LENGTH, i as u8),
                "seed {seed} region {i}"
            );
        }
    }
}

fn accounted(c: &Counters) -> u64 {
    c.dropped_malformed
        + c.dropped_icrc
        + c.dropped_opcode
        + c.dropped_qpn
        + c.dropped_source
        + c.dropped_partition_key
        + c.dropped_state
        + c.dropped_response
        + c.duplicates
        + c.out_of_sequence
}

#[test]
fn a_random_peer_hurts_only_itself() {
    let mut alive = 0_u64;
    let mut naks = 0;
    let mut completions = 0;
    for seed in 0..common::seeds(1500) {
        let mut fuzz = Fuzz::new(seed);
        // A second connection of the device, to somebody else, in the middle of a request.
        let other = other_connection(&mut fuzz.pair);
        for step in 0..300 {
            if fuzz.pair.state(1) == QueuePairState::Error {
                break;
            }
            alive += 1;
            fuzz.refill();
            let burst = fuzz.pick(&[1, 1, 1, 4, 64]);
            for _ in 0..burst {
                fuzz.packet().inject(&mut fuzz.pair);
            }
            if fuzz.below(10) == 0
                && let Some(at) = fuzz.pair.hosts[1].endpoint.poll_timeout()
            {
                fuzz.pair.now = fuzz.pair.now.max(at);
                let now = fuzz.pair.now;
                fuzz.pair.hosts[1].endpoint.handle_timeout(now);
            }
            // 8 READs at most wait, of at most the open region, 8 packets each; and the window.
            let sent = fuzz.listen();
            assert!(sent < 8 * 8 + 64 + 512, "seed {seed} step {step}: {sent} packets");
        }
        fuzz.untouched(seed);
        let counters = fuzz.pair.counters(1);
        assert!(accounted(&counters) <= counters.packets_received, "seed {seed}: {counters:?}");
        assert_eq!(counters.dropped_icrc + counters.dropped_qpn + counters.dropped_source, 0);
        naks += counters.naks_sent;
        let state = fuzz.pair.hosts[1].endpoint.queue_pair_state(other);
        assert_eq!(state, Some(QueuePairState::ReadyToSend), "seed {seed}");
        fuzz.pair.poll(1);
        completions += fuzz.pair.completions(1).len();
    }
    // The fuzzer got somewhere: connections lived, requests were refused, work completed.
    assert!(alive > 3000 && naks > 500 && completions > 500, "{alive} {naks} {completions}");
}

fn other_connection(pair: &mut Pair) -> Qpn {
    let host = &mut pair.hosts[1];
    let config = QueuePairConfig::new(DOMAIN, host.queue, QueuePairCapabilities::new(1, 1));
    let other = host.endpoint.create_queue_pair(&config).unwrap();
    let peer = pair.hosts[0].address;
    for attributes in connect(&Options::default(), 1, peer, Qpn::new(0x4242)) {
        pair.hosts[1].endpoint.modify_queue_pair(Instant::ZERO, other, &attributes).unwrap();
    }
    other
}

/// Random bytes, and right packets with random bytes changed, with and without their ICRC.
#[test]
fn random_bytes() {
    let mut fuzz = Fuzz::new(1);
    for step in 0..30_000_u64 {
        let mut datagram = fuzz.packet().datagram(&fuzz.pair);
        for _ in 0..1 + fuzz.below(4) {
            // Leave the queue pair number, or nearly everything stops there.
            let at = match fuzz.below(datagram.len() as u32) as usize {
                5..8 => 0,
                at => at,
            };
            datagram[at] = fuzz.below(256) as u8;
        }
        let length = datagram.len() as u32;
        if fuzz.below(3) == 0 {
            datagram.truncate(fuzz.below(length) as usize);
        }
        fuzz.pair.inject(1, &datagram);
        fuzz.pair.answers(1);
        fuzz.untouched(step);
    }
    assert_eq!(fuzz.pair.counters(1).packets_received, 30_000);
}
