//! Congestion marks and notifications (RoCEv2, annex A17.9).

mod common;

use std::time::Duration;

use common::forge::Forge;
use common::{Options, Pair, everything, meta, pattern, piece};
use millstream_roce::{Node, SendOperation};
use millstream_wire::{Opcode, Syndrome};

const FIRST: u32 = 100;
const ADDRESS: u64 = 0x1000_0000;

fn pair() -> (Pair, u32) {
    let mut pair =
        Pair::with(Options { psn: [FIRST, FIRST], access: everything(), ..Options::default() });
    let key = pair.register(1, ADDRESS, pattern(1 << 20, 2));
    (pair, key)
}

/// Gives host 1 a packet with the congestion mark.
fn inject_marked(pair: &mut Pair, forge: &Forge) {
    let datagram = forge.datagram(pair);
    let mut meta = meta(pair.hosts[0].address, pair.hosts[1].address);
    meta.congestion_experienced = true;
    pair.hosts[1].endpoint.handle_datagram(pair.now, &meta, &datagram);
}

fn write(pair: &Pair, key: u32, psn: u32) -> Forge {
    let forge = Forge::new(pair, 1, Opcode::RcWriteOnly, psn).reth(ADDRESS, key, 4);
    forge.payload(b"data").acknowledge_request()
}

#[test]
fn a_mark_is_notified_once_an_interval() {
    let (mut pair, key) = pair();
    for psn in 0..3 {
        let marked = write(&pair, key, FIRST + psn);
        inject_marked(&mut pair, &marked);
    }
    let opcodes = |pair: &mut Pair| -> Vec<Opcode> {
        pair.answers(1).iter().map(|answer| answer.opcode).collect()
    };
    assert_eq!(opcodes(&mut pair), [Opcode::CongestionNotification, Opcode::RcAcknowledge]);
    pair.now = pair.now + Duration::from_micros(50);
    let marked = write(&pair, key, FIRST + 3);
    inject_marked(&mut pair, &marked);
    assert_eq!(opcodes(&mut pair), [Opcode::CongestionNotification, Opcode::RcAcknowledge]);
    assert_eq!(pair.counters(1).congestion_notifications_sent, 2);
    // What carries no data is not slowed down by slowing data down.
    pair.now = pair.now + Duration::from_micros(50);
    let bare = Forge::new(&pair, 1, Opcode::RcAcknowledge, FIRST).syndrome(Syndrome::ACK_UNLIMITED);
    inject_marked(&mut pair, &bare);
    assert_eq!(opcodes(&mut pair), []);
}

/// Data waits, both that of requests and that of READ responses; acknowledgements do not.
#[test]
fn a_notification_slows_data_down() {
    let (mut pair, key) = pair();
    let read = Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST).reth(ADDRESS, key, 256 << 10);
    read.inject(&mut pair);
    let local = piece(key, ADDRESS, 1 << 16);
    let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
    pair.post(1, 1, operation, &[local]);
    let before: usize = pair.answers(1).iter().map(|answer| answer.payload).sum();
    assert_eq!(before, (256 << 10) + (1 << 14), "all of the READ, and a window of the WRITE");
    Forge::new(&pair, 1, Opcode::CongestionNotification, 0).inject(&mut pair);
    let read = Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST + 1024);
    read.reth(ADDRESS, key, 1 << 18).inject(&mut pair);
    let first: usize = pair.answers(1).iter().map(|answer| answer.payload).sum();
    assert!(first < 1 << 15, "{first}");
    let next = pair.hosts[1].endpoint.poll_timeout().expect("a time to go on");
    assert!(next > pair.now && next < pair.now + Duration::from_millis(1));
    pair.now = next;
    pair.hosts[1].endpoint.handle_timeout(next);
    let more: usize = pair.answers(1).iter().map(|answer| answer.payload).sum();
    assert!((1..1 << 17).contains(&more), "{more}");
}
