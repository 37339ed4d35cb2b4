//! WRITEs that go out as one message for each packet, so that all packets are equally long.

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use common::{Options, Pair, pattern, piece};
use millstream_roce::{
    Completion, CompletionStatus, MAX_INLINE, QueuePairAttributes, QueuePairState, SendOperation,
    SendRequest,
};
use millstream_wire::{Mtu, Opcode, Packet};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const LIMIT: Duration = Duration::from_secs(10);
const MTU: usize = 256;
/// Five packets, the last of which is short.
const LENGTH: usize = 4 * MTU + 7;
/// The longest WRITE that is split, as documented.
const LONGEST: usize = 128 << 10;

fn options() -> Options {
    Options { split_writes: true, ..Options::default() }
}

fn write(remote_key: u32, immediate: Option<u32>) -> SendOperation {
    SendOperation::Write { remote_address: REMOTE, remote_key, immediate }
}

/// A pair with a region of `length` bytes at each side: their keys.
fn scene(options: Options, length: usize) -> (Pair, u32, u32) {
    let mut pair = Pair::with(options);
    let local = pair.register(0, LOCAL, pattern(length, 3));
    let remote = pair.register(1, REMOTE, vec![0xaa; length]);
    (pair, local, remote)
}

/// Opcode, range, length of the datagram, and whether it asks for an acknowledgement.
type Sent = (Opcode, Option<(u64, u32)>, usize, bool);

/// Notes what goes to host 1, and the message numbers of what it answers.
fn record(pair: &mut Pair) -> Rc<RefCell<(Vec<Sent>, Vec<u32>)>> {
    let log = Rc::new(RefCell::new((Vec::new(), Vec::new())));
    let notes = Rc::clone(&log);
    pair.wire = Box::new(move |to, datagram| {
        let packet = Packet::parse(datagram).unwrap();
        let mut notes = notes.borrow_mut();
        if let Some(aeth) = packet.extended.aeth {
            notes.1.push(aeth.msn.value());
        }
        if to == 1 {
            let range = packet.extended.reth.map(|reth| (reth.virtual_address, reth.dma_length));
            let asks = packet.bth.acknowledge_request;
            notes.0.push((packet.opcode, range, datagram.len(), asks));
        }
        vec![datagram.to_vec()]
    });
    log
}

fn statuses(completions: &[Completion]) -> Vec<(u64, CompletionStatus, u32)> {
    completions.iter().map(|c| (c.id, c.status, c.length)).collect()
}

#[test]
fn a_message_for_each_packet_and_one_completion_for_all() {
    // No packet but the last asks for an acknowledgement for its number.
    let (mut pair, local, remote) = scene(Options { psn: [1, 1], ..options() }, LENGTH);
    let log = record(&mut pair);
    pair.post(0, 7, write(remote, None), &[piece(local, LOCAL, LENGTH)]);
    pair.run(LIMIT);
    let full = |index: u64| {
        let range = (REMOTE + index * MTU as u64, MTU as u32);
        (Opcode::RcWriteOnly, Some(range), 12 + 16 + MTU + 4, false)
    };
    let last = (Opcode::RcWriteOnly, Some((REMOTE + 4 * MTU as u64, 7)), 12 + 16 + 8 + 4, true);
    assert_eq!(log.borrow().0, [full(0), full(1), full(2), full(3), last]);
    // The responder counts five messages, and says so once.
    assert_eq!(log.borrow().1, [5]);
    let done = [(7, CompletionStatus::Success, LENGTH as u32)];
    assert_eq!(statuses(&pair.completions(0)), done);
    assert_eq!(pair.completions(1), []);
    assert_eq!(pair.region(1, remote), pattern(LENGTH, 3));
}

#[test]
fn only_where_it_is_allowed_and_pays() {
    let first = |options, length, immediate: Option<u32>| {
        let (mut pair, local, remote) = scene(options, length + 1);
        let log = record(&mut pair);
        pair.receive(1, 50, &[]);
        pair.post(0, 1, write(remote, immediate), &[piece(local, LOCAL, length)]);
        pair.run(LIMIT);
        assert_eq!(pair.region(1, remote)[..length], pattern(length + 1, 3)[..length]);
        let sent = log.borrow().0[0];
        (sent.0, sent.1.unwrap().1 as usize)
    };
    let mtu = Mtu::B4096;
    assert_eq!(first(options(), 2 * MTU, None), (Opcode::RcWriteOnly, MTU));
    assert_eq!(first(options(), MTU, None), (Opcode::RcWriteOnly, MTU));
    assert_eq!(first(options(), 0, None), (Opcode::RcWriteOnly, 0));
    assert_eq!(first(Options { mtu, ..options() }, LONGEST, None), (Opcode::RcWriteOnly, 4096));
    let whole = (Opcode::RcWriteFirst, LONGEST + 1);
    assert_eq!(first(Options { mtu, ..options() }, LONGEST + 1, None), whole);
    assert_eq!(first(options(), 2 * MTU, Some(9)), (Opcode::RcWriteFirst, 2 * MTU));
    assert_eq!(first(Options::default(), 2 * MTU, None), (Opcode::RcWriteFirst, 2 * MTU));
}

#[test]
fn it_stays_allowed_after_a_reset() {
    let (mut pair, local, remote) = scene(options(), LENGTH);
    let host = &mut pair.hosts[0];
    let reset = QueuePairAttributes {
        state: Some(QueuePairState::Reset),
        ..QueuePairAttributes::default()
    };
    host.endpoint.modify_queue_pair(pair.now, host.qpn, &reset).unwrap();
    let (address, qpn) = (pair.hosts[1].address, pair.hosts[1].qpn);
    let host = &mut pair.hosts[0];
    for attributes in common::connect(&options(), 0, address, qpn) {
        host.endpoint.modify_queue_pair(pair.now, host.qpn, &attributes).unwrap();
    }
    let log = record(&mut pair);
    pair.post(0, 1, write(remote, None), &[piece(local, LOCAL, LENGTH)]);
    pair.run(LIMIT);
    assert_eq!(log.borrow().0.len(), 5);
    assert!(log.borrow().0.iter().all(|sent| sent.0 == Opcode::RcWriteOnly));
}

#[test]
fn any_packet_and_any_answer_may_be_lost() {
    // A WRITE, a READ of what it wrote, and a WRITE over it that waits for the READ.
    let run = |lost: Option<usize>| {
        let (mut pair, local, remote) = scene(options(), 3 * LENGTH);
        let back = pair.register(0, LOCAL * 2, vec![0; LENGTH]);
        let mut count = 0;
        pair.wire = Box::new(move |_, datagram| {
            count += 1;
            if Some(count) == lost { vec![] } else { vec![datagram.to_vec()] }
        });
        pair.post(0, 1, write(remote, None), &[piece(local, LOCAL, LENGTH)]);
        let read = SendOperation::Read { remote_address: REMOTE, remote_key: remote };
        pair.post(0, 2, read, &[piece(back, LOCAL * 2, LENGTH)]);
        let pieces = [piece(local, LOCAL + LENGTH as u64, LENGTH)];
        let request = SendRequest::new(3, write(remote, None), pieces);
        let host = &mut pair.hosts[0];
        let fenced = SendRequest { fence: true, ..request };
        host.endpoint.post_send(pair.now, host.qpn, &fenced).unwrap();
        pair.run(LIMIT);
        let done: Vec<u64> = pair.completions(0).iter().map(|c| c.id).collect();
        assert_eq!(done, [1, 2, 3], "{lost:?}");
        let bytes = pattern(3 * LENGTH, 3);
        assert!(pair.region(0, back) == &bytes[..LENGTH], "{lost:?}");
        assert!(pair.region(1, remote)[..LENGTH] == bytes[LENGTH..2 * LENGTH], "{lost:?}");
        pair.counters(0).packets_sent + pair.counters(1).packets_sent
    };
    let datagrams = run(None) as usize;
    assert!(datagrams > 15);
    for lost in 1..=datagrams {
        run(Some(lost));
    }
}

/// The first packets of a WRITE whose end is outside the region have ranges that are right. This is
/// what a queue pair that may split them is told to know.
#[test]
fn a_wrong_range_is_refused_and_the_beginning_may_be_written() {
    for split_writes in [false, true] {
        let (mut pair, _, remote) = scene(Options { split_writes, ..options() }, 2 * MTU);
        let local = pair.register(0, LOCAL * 2, pattern(LENGTH, 5));
        pair.post(0, 1, write(remote, None), &[piece(local, LOCAL * 2, LENGTH)]);
        pair.post(0, 2, write(remote, None), &[piece(local, LOCAL * 2, 1)]);
        pair.run(LIMIT);
        let ends: Vec<_> = pair.completions(0).iter().map(|c| (c.id, c.status)).collect();
        assert_eq!(ends, [(1, CompletionStatus::RemoteAccess), (2, CompletionStatus::Flushed)]);
        assert_eq!([pair.state(0), pair.state(1)], [QueuePairState::Error; 2]);
        let written = if split_writes { pattern(2 * MTU, 5) } else { vec![0xaa; 2 * MTU] };
        assert_eq!(pair.region(1, remote), written);
    }
}

#[test]
fn bytes_of_many_pieces_and_inline_bytes_are_split_too() {
    let (mut pair, local, remote) =
        scene(Options { mtu: Mtu::B256, max_inline: MAX_INLINE, ..options() }, LENGTH);
    let log = record(&mut pair);
    let pieces = [piece(local, LOCAL + 100, 300), piece(local, LOCAL, 1), piece(local, LOCAL, 400)];
    pair.post(0, 1, write(remote, None), &pieces);
    pair.run(LIMIT);
    assert_eq!(log.borrow().0.len(), 3);
    let bytes = pattern(LENGTH, 3);
    let expected = [&bytes[100..400], &bytes[..1], &bytes[..400]].concat();
    assert_eq!(pair.region(1, remote)[..701], expected);

    let request = SendRequest::new(2, write(remote, None), []);
    let host = &mut pair.hosts[0];
    let inline = pattern(MAX_INLINE, 8);
    host.endpoint.post_send_inline(pair.now, host.qpn, &request, &inline).unwrap();
    pair.run(LIMIT);
    assert_eq!(pair.region(1, remote)[..MAX_INLINE], inline);
    assert_eq!(pair.completions(0).len(), 2);
}
