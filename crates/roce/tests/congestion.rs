//! Congestion marks and notifications (RoCEv2, annex A17.9).

mod common;

use std::time::Duration;

use common::forge::Forge;
use common::{Host, Options, Pair, everything, meta, pattern, piece};
use millstream_roce::{CompletionStatus, Node, SendOperation, SendRequest};
use millstream_wire::{Mtu, Opcode, Syndrome};

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

/// What [`Pair::step`] does, or at most the 50 microseconds to the next of the notifications that
/// keep host 0 at its lowest rate.
fn step_slowly(pair: &mut Pair) {
    Forge::new(pair, 0, Opcode::CongestionNotification, 0).inject(pair);
    let until = pair.now + Duration::from_micros(50);
    let soon = |host: &mut Host| {
        let arrival = host.inbound.front().map(|(at, _)| *at);
        [arrival, host.endpoint.poll_timeout()].into_iter().flatten().any(|at| at <= until)
    };
    if pair.hosts.iter_mut().any(soon) {
        pair.step();
    } else {
        pair.now = until;
    }
}

/// A pair of which host 0 is at its lowest rate and knows the time of a round trip; the key of its
/// memory, and a WRITE to the peer's.
fn slowed_down(options: Options) -> (Pair, u32, SendOperation) {
    let mut pair = Pair::with(Options { mtu: Mtu::B4096, ..options });
    let local = pair.register(0, ADDRESS, pattern(1 << 20, 1));
    let remote = pair.register(1, ADDRESS, pattern(1 << 20, 2));
    let operation =
        SendOperation::Write { remote_address: ADDRESS, remote_key: remote, immediate: None };
    pair.post(0, 1, operation, &[piece(local, ADDRESS, 4096)]);
    pair.run(Duration::from_secs(1));
    (0..100).for_each(|_| step_slowly(&mut pair));
    (pair, local, operation)
}

/// Between one packet and the next that the rate allows, a peer that answers at once is silent.
/// That is neither a loss nor its death.
#[test]
fn a_low_rate_is_not_taken_for_silence() {
    for (timeout, retry_count) in [(14, 7), (10, 2)] {
        let options = Options { timeout, retry_count, ..Options::default() };
        let (mut pair, local, operation) = slowed_down(options);
        pair.post(0, 2, operation, &[piece(local, ADDRESS, 256 << 10)]);
        pair.step();
        while pair.hosts[0].completions.len() < 2 {
            step_slowly(&mut pair);
        }
        let statuses = pair.completions(0).into_iter().map(|completion| completion.status);
        assert_eq!(statuses.collect::<Vec<_>>(), [CompletionStatus::Success; 2]);
        assert_eq!((pair.counters(0).retransmissions, pair.counters(0).timeouts), (0, 0));
    }
}

/// While what asks again waits for its turn, the peer's silence does not grow.
#[test]
fn a_lost_answer_at_a_low_rate_is_one_silence() {
    let (mut pair, local, operation) = slowed_down(Options { timeout: 14, ..Options::default() });
    let mut answers = 0;
    pair.wire = Box::new(move |to, datagram| {
        answers += usize::from(to == 0);
        let lost = to == 0 && answers == 1;
        (!lost).then(|| datagram.to_vec()).into_iter().collect()
    });
    pair.post(0, 2, operation, &[piece(local, ADDRESS, 256 << 10)]);
    pair.step();
    while pair.hosts[0].completions.len() < 2 {
        step_slowly(&mut pair);
    }
    assert_eq!((pair.counters(0).retransmissions, pair.counters(0).timeouts), (1, 1));
}

/// Inline bytes are data like others.
#[test]
fn inline_data_is_slowed_down_too() {
    let options = Options { mtu: Mtu::B4096, max_inline: 256, ..Options::default() };
    let mut pair = Pair::with(options);
    (0..100).for_each(|_| step_slowly(&mut pair));
    let operation =
        SendOperation::Write { remote_address: ADDRESS, remote_key: 1, immediate: None };
    for id in 0..100 {
        let request = SendRequest::new(id, operation, []);
        let Host { endpoint, qpn, .. } = &mut pair.hosts[0];
        endpoint.post_send_inline(pair.now, *qpn, &request, &[0x5a; 256]).unwrap();
    }
    let sent = pair.answers(0).len();
    assert!((1..16).contains(&sent), "{sent}");
}

/// However low the rate, a peer that is dead is found to be.
#[test]
fn a_low_rate_does_not_hide_a_dead_peer() {
    let mut pair = Pair::with(Options { mtu: Mtu::B4096, ..Options::default() });
    let local = pair.register(0, ADDRESS, pattern(1 << 20, 1));
    let operation =
        SendOperation::Write { remote_address: ADDRESS, remote_key: 1, immediate: None };
    (0..100).for_each(|_| step_slowly(&mut pair));
    pair.wire = Box::new(|_, _| Vec::new());
    pair.post(0, 1, operation, &[piece(local, ADDRESS, 256 << 10)]);
    let start = pair.now;
    pair.step();
    while pair.hosts[0].completions.is_empty() {
        step_slowly(&mut pair);
    }
    assert_eq!(pair.completions(0)[0].status, CompletionStatus::RetryExceeded);
    // Eight times 4.2 ms.
    let silence = pair.now.saturating_duration_since(start);
    assert!(silence < Duration::from_millis(34), "{silence:?}");
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
