//! Datagrams that are not packets of the connection: dropped, counted, and nothing else changes.

mod common;

use std::net::IpAddr;

use common::forge::Forge;
use common::{Options, Pair, connect, meta, pattern, piece};
use millstream_roce::{
    Counters, DatagramMeta, Identification, Instant, Node, QueuePairAttributes,
    QueuePairCapabilities, QueuePairConfig, QueuePairState,
};
use millstream_wire::{Opcode, Qpn, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
/// The first PSN of host 0's requests, which host 1 expects.
const FIRST: u32 = 100;

fn options() -> Options {
    Options { psn: [FIRST, 200], ..Options::default() }
}

/// Host 1 with a region and a posted receive; a good WRITE of 6 bytes from host 0.
struct Victim {
    pair: Pair,
    key: u32,
    write: Forge,
}

impl Victim {
    fn new() -> Self {
        let mut pair = Pair::with(options());
        let key = pair.register(1, REMOTE, pattern(64, 7));
        pair.receive(1, 1, &[piece(key, REMOTE, 64)]);
        let write = Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST)
            .reth(REMOTE, key, 6)
            .payload(b"hammer")
            .acknowledge_request();
        Self { pair, key, write }
    }

    /// Hands host 1 a datagram that must only count, in the one counter that `count` reads.
    fn only_counts(
        &mut self,
        datagram: &[u8],
        meta: &DatagramMeta,
        count: impl Fn(&Counters) -> u64,
        what: &str,
    ) {
        let before = (self.pair.snapshot(1, &[self.key]), self.pair.counters(1));
        let now = self.pair.now;
        self.pair.hosts[1].endpoint.handle_datagram(now, meta, datagram);
        assert_eq!(self.pair.answers(1), [], "{what}");
        assert_eq!(self.pair.snapshot(1, &[self.key]), before.0, "{what}");
        let after = self.pair.counters(1);
        assert_eq!(count(&after), count(&before.1) + 1, "{what}: {after:?}");
        assert_eq!(dropped(&after), dropped(&before.1) + 1, "{what}: {after:?}");
        assert_eq!(after.packets_received, before.1.packets_received + 1, "{what}");
    }

    fn meta(&self) -> DatagramMeta {
        meta(self.pair.hosts[0].address, self.pair.hosts[1].address)
    }

    /// The connection still works: the good WRITE is executed.
    fn still_works(mut self) {
        self.write.inject(&mut self.pair);
        assert_eq!(self.pair.answers(1).len(), 1);
        assert_eq!(&self.pair.region(1, self.key)[..6], b"hammer");
    }
}

fn dropped(c: &Counters) -> u64 {
    c.dropped_malformed
        + c.dropped_icrc
        + c.dropped_opcode
        + c.dropped_qpn
        + c.dropped_source
        + c.dropped_partition_key
        + c.dropped_state
        + c.dropped_response
}

#[test]
fn truncated_at_every_length() {
    for opcode in [Opcode::RcWriteOnlyWithImmediate, Opcode::RcSendOnly, Opcode::RcAcknowledge] {
        let mut victim = Victim::new();
        let mut forge = Forge::new(&victim.pair, 1, opcode, FIRST).payload(&[1; 40]);
        if opcode.has_reth() {
            forge = forge.reth(REMOTE, victim.key, 40);
        }
        let datagram = forge.datagram(&victim.pair);
        let meta = victim.meta();
        for length in 0..datagram.len() {
            let count = |c: &Counters| c.dropped_malformed + c.dropped_icrc;
            victim.only_counts(&datagram[..length], &meta, count, &format!("{opcode:?} {length}"));
        }
        victim.still_works();
    }
}

#[test]
fn every_flipped_bit_is_noticed_but_those_that_switches_may_change() {
    let mut victim = Victim::new();
    let datagram = victim.write.datagram(&victim.pair);
    let meta = victim.meta();
    for bit in 0..datagram.len() * 8 {
        // Byte 4 of the BTH (FECN, BECN and reserved bits) is left out of the ICRC.
        if bit / 8 == 4 {
            continue;
        }
        let mut damaged = datagram.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        victim.only_counts(&damaged, &meta, dropped, &format!("bit {bit}"));
    }
    assert!(victim.pair.counters(1).dropped_icrc > 200);
    victim.still_works();
}

#[test]
fn a_guessed_identification_still_leaves_a_check() {
    let mut victim = Victim::new();
    let datagram = victim.write.datagram(&victim.pair);
    let meta = DatagramMeta { identification: Identification::Guessed(9), ..victim.meta() };
    for bit in (12 * 8)..datagram.len() * 8 {
        let mut damaged = datagram.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        victim.only_counts(&damaged, &meta, |c| c.dropped_icrc, &format!("bit {bit}"));
    }
    let now = victim.pair.now;
    victim.pair.hosts[1].endpoint.handle_datagram(now, &meta, &datagram);
    assert_eq!(&victim.pair.region(1, victim.key)[..6], b"hammer");
}

#[test]
fn too_long_for_any_path() {
    let mut victim = Victim::new();
    let meta = victim.meta();
    for length in [4097, 8000, 65_507, 70_000] {
        let mut datagram = victim.write.datagram(&victim.pair);
        datagram.resize(length + 12 + 16 + 4, 0);
        victim.only_counts(&datagram, &meta, |c| c.dropped_malformed, &format!("{length}"));
    }
    victim.still_works();
}

#[test]
fn opcodes_of_no_or_another_service() {
    let mut victim = Victim::new();
    let meta = victim.meta();
    let good = victim.write.datagram(&victim.pair);
    for byte in 0..=u8::MAX {
        let known = Opcode::from_byte(byte);
        let ours =
            known.is_ok_and(|o| o.is_reliable_connection() || o == Opcode::CongestionNotification);
        if !ours {
            let mut datagram = good.clone();
            datagram[0] = byte;
            datagram[1] &= 0xcf;
            victim.only_counts(&datagram, &meta, |c| c.dropped_opcode, &format!("{byte:#x}"));
        }
    }
    victim.still_works();
}

#[test]
fn wrong_fields_of_the_first_header() {
    type Spoil = fn(&mut Forge);
    type Count = fn(&Counters) -> u64;
    let table: [(&str, Spoil, Count); 6] = [
        ("unknown queue pair", |f| f.bth.destination_qpn = Qpn::new(0x77_7777), |c| c.dropped_qpn),
        (
            "the index of a queue pair under another number",
            |f| f.bth.destination_qpn = Qpn::new(f.bth.destination_qpn.value() ^ (1 << 23)),
            |c| c.dropped_qpn,
        ),
        ("management queue pair", |f| f.bth.destination_qpn = Qpn::new(1), |c| c.dropped_qpn),
        ("other partition", |f| f.bth.partition_key = 0x8001, |c| c.dropped_partition_key),
        ("version", |f| f.bth.version = 1, |c| c.dropped_malformed),
        ("pad count that makes no words", |f| f.bth.pad_count = 1, |c| c.dropped_malformed),
    ];
    for (what, spoil, count) in table {
        let mut victim = Victim::new();
        let mut forge = victim.write.clone();
        spoil(&mut forge);
        let (datagram, meta) = (forge.datagram(&victim.pair), victim.meta());
        victim.only_counts(&datagram, &meta, count, what);
        victim.still_works();
    }
}

#[test]
fn the_limited_member_of_the_partition_is_heard() {
    let mut victim = Victim::new();
    victim.write.bth.partition_key = 0x7fff;
    victim.still_works();
}

#[test]
fn padding_must_exist_and_make_words() {
    for (payload, pad) in (0..8_usize).flat_map(|n| (0..4_u8).map(move |pad| (n, pad))) {
        let mut victim = Victim::new();
        // `payload` bytes between headers and ICRC, of which the header says `pad` are padding.
        let mut forge = Forge::new(&victim.pair, 1, Opcode::RcSendOnly, FIRST);
        forge = forge.payload(&vec![9; payload]);
        let mut datagram = forge.datagram(&victim.pair);
        datagram.truncate(12 + payload + 4);
        datagram[1] = datagram[1] & 0xcf | pad << 4;
        if usize::from(pad) <= payload && payload.is_multiple_of(4) {
            continue;
        }
        let meta = victim.meta();
        let what = format!("{payload} bytes, pad {pad}");
        victim.only_counts(&datagram, &meta, |c| c.dropped_malformed, &what);
        victim.still_works();
    }
}

#[test]
fn from_or_to_another_address() {
    let mut victim = Victim::new();
    let good = victim.meta();
    let other = IpAddr::from([10, 0, 0, 3]);
    for meta in [
        DatagramMeta { source: other, ..good },
        DatagramMeta { destination: other, ..good },
        DatagramMeta { source: "::1".parse().unwrap(), ..good },
        DatagramMeta { source: "::ffff:10.0.0.1".parse().unwrap(), ..good },
    ] {
        let datagram = victim.write.datagram(&victim.pair);
        victim.only_counts(&datagram, &meta, |c| c.dropped_source, &format!("{meta:?}"));
    }
    victim.still_works();
}

#[test]
fn a_port_that_the_check_does_not_cover_is_noticed() {
    let mut victim = Victim::new();
    let meta = DatagramMeta { source_port: 4792, ..victim.meta() };
    let datagram = victim.write.datagram(&victim.pair);
    victim.only_counts(&datagram, &meta, |c| c.dropped_icrc, "other source port");
    victim.still_works();
}

#[test]
fn states_that_do_not_receive() {
    use QueuePairState as S;
    for state in [S::Reset, S::Initialized, S::Error] {
        let mut pair = Pair::with(options());
        let key = pair.register(1, REMOTE, pattern(64, 7));
        let steps = connect(&options(), 1, pair.hosts[0].address, pair.hosts[0].qpn);
        let host = &mut pair.hosts[1];
        let go = |state| QueuePairAttributes { state: Some(state), ..Default::default() };
        let mut modify = |a| host.endpoint.modify_queue_pair(Instant::ZERO, host.qpn, &a).unwrap();
        match state {
            S::Initialized => {
                modify(go(S::Reset));
                modify(steps[0]);
            }
            _ => modify(go(state)),
        }
        let before = pair.snapshot(1, &[key]);
        let mut count = 0;
        for &opcode in Opcode::ALL.iter().filter(|o| o.is_reliable_connection()) {
            let mut forge = Forge::new(&pair, 1, opcode, FIRST);
            if opcode.has_reth() {
                forge = forge.reth(REMOTE, key, 0);
            }
            forge.inject(&mut pair);
            count += 1;
            assert_eq!(pair.counters(1).dropped_state, count, "{state} {opcode:?}");
            assert_eq!(pair.answers(1), [], "{state} {opcode:?}");
        }
        assert_eq!(pair.snapshot(1, &[key]), before, "{state}");
    }
}

#[test]
fn a_queue_pair_that_only_receives_answers_requests_and_hears_no_responses() {
    let mut pair = Pair::with(options());
    let key = pair.register(1, REMOTE, pattern(64, 7));
    let steps = connect(&options(), 1, pair.hosts[0].address, pair.hosts[0].qpn);
    let host = &mut pair.hosts[1];
    let reset = QueuePairAttributes { state: Some(QueuePairState::Reset), ..Default::default() };
    for attributes in [reset, steps[0], steps[1]] {
        host.endpoint.modify_queue_pair(Instant::ZERO, host.qpn, &attributes).unwrap();
    }
    assert_eq!(pair.state(1), QueuePairState::ReadyToReceive);
    Forge::new(&pair, 1, Opcode::RcAcknowledge, 200).inject(&mut pair);
    assert_eq!(pair.counters(1).dropped_state, 1);
    // IBTA 10.3.1.4: RTR responds.
    Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST).reth(REMOTE, key, 64).inject(&mut pair);
    Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST + 1)
        .reth(REMOTE, key, 4)
        .payload(b"only")
        .acknowledge_request()
        .inject(&mut pair);
    let answers = pair.answers(1);
    assert_eq!(answers[0].opcode, Opcode::RcReadResponseOnly);
    assert_eq!((answers[1].psn, answers[1].syndrome), (FIRST + 1, Some(Syndrome::ACK_UNLIMITED)));
    assert_eq!(&pair.region(1, key)[..4], b"only");
}

#[test]
fn congestion_notifications_only_count() {
    let mut victim = Victim::new();
    let before = victim.pair.snapshot(1, &[victim.key]);
    Forge::new(&victim.pair, 1, Opcode::CongestionNotification, 0).inject(&mut victim.pair);
    assert_eq!(victim.pair.counters(1).congestion_notifications, 1);
    assert_eq!(victim.pair.snapshot(1, &[victim.key]), before);
    victim.still_works();
}

#[test]
fn congestion_notifications_of_others_are_dropped() {
    let mut victim = Victim::new();
    let forge = Forge::new(&victim.pair, 1, Opcode::CongestionNotification, 0);
    let meta = DatagramMeta { source: IpAddr::from([10, 0, 0, 3]), ..victim.meta() };
    let datagram = forge.datagram(&victim.pair);
    victim.only_counts(&datagram, &meta, |c| c.dropped_source, "from a stranger");
    assert_eq!(victim.pair.counters(1).congestion_notifications, 0);
    victim.still_works();
}

#[test]
fn another_queue_pair_of_the_device_is_not_touched() {
    let mut pair = Pair::with(options());
    let host = &mut pair.hosts[1];
    let config = QueuePairConfig::new(common::DOMAIN, host.queue, QueuePairCapabilities::new(8, 8));
    let other = host.endpoint.create_queue_pair(&config).unwrap();
    // The other one is connected to another peer.
    for attributes in connect(&options(), 1, IpAddr::from([10, 0, 0, 9]), Qpn::new(0x1234)) {
        host.endpoint.modify_queue_pair(Instant::ZERO, other, &attributes).unwrap();
    }
    let key = pair.register(1, LOCAL, vec![0; 8]);
    let write = |pair: &Pair, qpn| {
        let mut forge = Forge::new(pair, 1, Opcode::RcWriteOnly, FIRST).reth(LOCAL, key, 4);
        forge.bth.destination_qpn = qpn;
        forge.payload(b"evil")
    };
    // Host 0 writes into a queue pair that is not its own.
    write(&pair, other).inject(&mut pair);
    assert_eq!(pair.counters(1).dropped_source, 1);
    assert_eq!(pair.region(1, key), [0; 8]);
    // Host 0 breaks its own connection: the other one goes on.
    let own = pair.hosts[1].qpn;
    let mut broken = Forge::new(&pair, 1, Opcode::RcSendMiddle, FIRST);
    broken.bth.destination_qpn = own;
    broken.inject(&mut pair);
    assert_eq!(pair.state(1), QueuePairState::Error);
    let state = pair.hosts[1].endpoint.queue_pair_state(other);
    assert_eq!(state, Some(QueuePairState::ReadyToSend));
}
