//! What a responder does with repeats, gaps and queues that fill (IBTA 9.7.3 to 9.7.5).

mod common;

use core::time::Duration;

use common::forge::{Answer, Forge, ack, nak};
use common::{DOMAIN, Lcg, Options, Pair, everything, pattern, piece};
use millstream_roce::{Access, Node, QueuePairAttributes, QueuePairState, SendOperation};
use millstream_wire::{NakCode, Opcode, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const FIRST: u32 = 100;

fn pair_with(depth: u8) -> (Pair, u32) {
    let options = Options { psn: [FIRST, 200], depth, access: everything(), ..Options::default() };
    let mut pair = Pair::with(options);
    let key = pair.register(1, REMOTE, pattern(8192, 2));
    (pair, key)
}

fn read(pair: &mut Pair, psn: u32, key: u32, offset: u64, length: u32) {
    Forge::new(pair, 1, Opcode::RcReadRequest, psn).reth(REMOTE + offset, key, length).inject(pair);
}

fn write(pair: &mut Pair, psn: u32, key: u32) {
    Forge::new(pair, 1, Opcode::RcWriteOnly, psn)
        .reth(REMOTE, key, 4)
        .payload(b"fine")
        .acknowledge_request()
        .inject(pair);
}

/// PSN and bytes of each READ response.
fn responses(answers: &[Answer]) -> Vec<(u32, usize)> {
    let data = |a: &&Answer| a.opcode != Opcode::RcAcknowledge;
    answers.iter().filter(data).map(|a| (a.psn, a.payload)).collect()
}

#[test]
fn one_nak_for_a_gap() {
    let (mut pair, key) = pair_with(4);
    for psn in [1, 2, 3, 9, 2, 1, 1000] {
        write(&mut pair, FIRST + psn, key);
    }
    assert_eq!(pair.short_answers(1), [nak(FIRST, NakCode::PsnSequenceError)]);
    assert_eq!(pair.counters(1).out_of_sequence, 7);
    assert_eq!(pair.region(1, key), pattern(8192, 2));
    write(&mut pair, FIRST, key);
    write(&mut pair, FIRST + 2, key);
    let expected = [ack(FIRST), nak(FIRST + 1, NakCode::PsnSequenceError)];
    assert_eq!(pair.short_answers(1), expected);
}

/// A requester that has gone back shows it by the numbers that start again. Without its first
/// packet this is another gap, and without a NAK it would have to wait for a timeout.
#[test]
fn a_gap_is_reported_again_when_the_requester_has_gone_back() {
    let (mut pair, key) = pair_with(4);
    let sequence = nak(FIRST, NakCode::PsnSequenceError);
    for psn in [1, 2, 3, 4] {
        write(&mut pair, FIRST + psn, key);
    }
    assert_eq!(pair.short_answers(1), [sequence]);
    for psn in [5, 6] {
        write(&mut pair, FIRST + psn, key);
        assert_eq!(pair.short_answers(1), [], "what was under way says nothing new");
    }
    write(&mut pair, FIRST + 1, key);
    assert_eq!(pair.short_answers(1), [sequence]);
    write(&mut pair, FIRST + 2, key);
    assert_eq!(pair.short_answers(1), []);
}

#[test]
fn repeats_are_acknowledged_again_and_not_executed() {
    let (mut pair, key) = pair_with(4);
    write(&mut pair, FIRST, key);
    write(&mut pair, FIRST + 1, key);
    assert_eq!(pair.short_answers(1), [ack(FIRST + 1)]);
    pair.hosts[1].endpoint.memory_mut().region_mut(key).unwrap().fill(7);
    write(&mut pair, FIRST, key);
    let answers = pair.answers(1);
    // The newest acknowledgement, with the messages that are done by then (IBTA 9.7.5.1.2).
    assert_eq!((answers[0].psn, answers[0].msn), (FIRST + 1, Some(2)));
    assert_eq!(pair.region(1, key), [7; 8192]);
    assert_eq!(pair.counters(1).duplicates, 1);
}

/// Only its data answers a READ. Its number in an acknowledgement would tell a requester that lost
/// the data that it has it: Linux's soft-RoCE believes that.
#[test]
fn a_repeat_does_not_acknowledge_a_read_that_came_after_it() {
    let (mut pair, key) = pair_with(4);
    let told = |pair: &mut Pair| {
        let answers = pair.answers(1);
        answers.iter().map(|a| (a.opcode, a.psn - FIRST, a.msn)).collect::<Vec<_>>()
    };
    write(&mut pair, FIRST, key);
    read(&mut pair, FIRST + 1, key, 0, 100);
    Forge::new(&pair, 1, Opcode::RcFetchAdd, FIRST + 2).atomic(REMOTE, key).inject(&mut pair);
    let _ = told(&mut pair);
    let first = (Opcode::RcAcknowledge, 0, Some(1));
    write(&mut pair, FIRST, key);
    assert_eq!(told(&mut pair), [first]);
    write(&mut pair, FIRST + 3, key);
    let second = (Opcode::RcAcknowledge, 3, Some(4));
    assert_eq!(told(&mut pair), [second]);
    read(&mut pair, FIRST + 4, key, 0, 100);
    let _ = told(&mut pair);
    write(&mut pair, FIRST, key);
    assert_eq!(told(&mut pair), [second], "the newest that it may");
}

/// The message sequence number goes with the packet that is acknowledged, not with the moment at
/// which the answer leaves.
#[test]
fn an_acknowledgement_counts_the_messages_up_to_its_own() {
    let (mut pair, key) = pair_with(4);
    write(&mut pair, FIRST, key);
    read(&mut pair, FIRST + 1, key, 0, 300);
    write(&mut pair, FIRST + 3, key);
    read(&mut pair, FIRST + 4, key, 0, 4);
    let told: Vec<_> = pair.answers(1).iter().map(|a| (a.psn, a.msn)).collect();
    let expected = [(0, Some(1)), (1, Some(2)), (2, Some(2)), (3, Some(3)), (4, Some(4))];
    assert_eq!(told, expected.map(|(psn, msn)| (FIRST + psn, msn)));
}

/// A message counts once, with its last packet.
#[test]
fn a_message_of_many_packets_counts_once() {
    let (mut pair, key) = pair_with(4);
    for (opcode, psn, length) in [
        (Opcode::RcWriteFirst, 0, 256),
        (Opcode::RcWriteMiddle, 1, 256),
        (Opcode::RcWriteLast, 2, 88),
    ] {
        let mut packet = Forge::new(&pair, 1, opcode, FIRST + psn).payload(&vec![1; length]);
        if opcode.has_reth() {
            packet = packet.reth(REMOTE, key, 600);
        }
        packet.acknowledge_request().inject(&mut pair);
        let told = pair.answers(1)[0];
        assert_eq!((told.psn, told.msn), (FIRST + psn, Some(u32::from(psn == 2))));
    }
    read(&mut pair, FIRST + 3, key, 0, 600);
    write(&mut pair, FIRST + 6, key);
    let told: Vec<_> = pair.answers(1).iter().map(|a| a.msn).collect();
    // The middle of a READ response has no such header.
    assert_eq!(told, [Some(2), None, Some(2), Some(3)]);
    read(&mut pair, FIRST + 3, key, 0, 600);
    assert_eq!(pair.answers(1)[0].msn, Some(3), "what is done by now");
}

#[test]
fn a_repeated_read_is_executed_again_from_where_it_is_asked() {
    let (mut pair, key) = pair_with(4);
    read(&mut pair, FIRST, key, 0, 1000);
    assert_eq!(pair.answers(1).len(), 4);
    read(&mut pair, FIRST + 2, key, 512, 488);
    let expected = [(FIRST + 2, 256), (FIRST + 3, 232)];
    assert_eq!(responses(&pair.answers(1)), expected);
    assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
}

/// Each repeat says what the requester has. Answers to old ones would keep it waiting, so that it
/// asks again: a READ of 4 MiB by the Linux kernel's soft-RoCE never ended so.
#[test]
fn repeats_of_one_read_are_answered_once_from_where_the_last_one_asks() {
    let whole = |first: u32| (first..8).map(|i| (FIRST + i, 256)).collect::<Vec<_>>();
    for (asked, answered_from) in [
        (&[2, 4, 6][..], 6),
        (&[6, 4, 2], 2),
        (&[2, 6, 4], 4),
        (&[3, 3, 3, 3, 3, 3], 3),
        (&[0, 7, 0], 0),
    ] {
        let (mut pair, key) = pair_with(2);
        read(&mut pair, FIRST, key, 0, 2048);
        assert_eq!(responses(&pair.answers(1)), whole(0));
        for &from in asked {
            read(&mut pair, FIRST + from, key, u64::from(from) * 256, 2048 - from * 256);
        }
        assert_eq!(responses(&pair.answers(1)), whole(answered_from), "{asked:?}");
    }
}

/// A requester that goes back repeats all that it waits for, and each has its answer.
#[test]
fn repeats_of_several_reads_are_answered_each_in_order() {
    let (mut pair, key) = pair_with(2);
    for round in 0..3 {
        read(&mut pair, FIRST, key, 0, 512);
        read(&mut pair, FIRST + 2, key, 512, 512);
        let expected = [0, 1, 2, 3].map(|i| (FIRST + i, 256));
        assert_eq!(responses(&pair.answers(1)), expected, "round {round}");
    }
}

/// The first of two executed READs is asked for while the second still waits.
#[test]
fn a_repeat_of_a_part_leaves_what_waits_behind_it() {
    let (mut pair, key) = pair_with(2);
    read(&mut pair, FIRST, key, 0, 1024);
    assert_eq!(pair.answers(1).len(), 4);
    read(&mut pair, FIRST + 2, key, 512, 512);
    read(&mut pair, FIRST, key, 0, 256);
    let expected = [(FIRST + 2, 256), (FIRST + 3, 256), (FIRST, 256)];
    assert_eq!(responses(&pair.answers(1)), expected);
}

/// A repeated READ must lie within one that was executed (IBTA 9.7.5.1.2, C9-123 ff.; rxe and real
/// devices look it up among their responder resources).
#[test]
fn repeats_of_reads_that_never_were() {
    let (mut pair, key) = pair_with(2);
    write(&mut pair, FIRST, key);
    read(&mut pair, FIRST + 1, key, 0, 1024);
    write(&mut pair, FIRST + 5, key);
    pair.answers(1);
    // Another region at the same address: only the key tells them apart.
    let other = pair.register(1, REMOTE, pattern(4096, 9));
    for (what, psn, key, offset, length) in [
        ("in the place of a WRITE", 0, key, 0, 4),
        ("in the place of a WRITE behind", 5, key, 0, 4),
        ("before the connection began", u32::MAX, key, 0, 4),
        ("beyond the executed one", 1, key, 0, 1025),
        ("from a packet before it", 0, key, 0, 1024),
        ("another address", 1, key, 1, 1023),
        ("an earlier address for a later packet", 2, key, 0, 768),
        ("beyond its end from the middle", 4, key, 768, 257),
        ("another key", 1, other, 0, 4),
        ("a packet of the next message", 5, key, 1024, 4),
        ("nothing, behind its end", 5, key, 1024, 0),
    ] {
        read(&mut pair, FIRST.wrapping_add(psn) & 0xff_ffff, key, offset, length);
        assert_eq!(responses(&pair.answers(1)), [], "{what}");
        assert_eq!(pair.state(1), QueuePairState::ReadyToSend, "{what}");
    }
    read(&mut pair, FIRST + 1, key, 0, 1024);
    assert_eq!(pair.answers(1).len(), 4);
}

/// Rights are those of now, not those of the first time.
#[test]
fn repeats_of_reads_that_are_not_allowed_any_more() {
    let (mut pair, key) = pair_with(2);
    read(&mut pair, FIRST, key, 0, 600);
    pair.answers(1);
    // So often registered again that the key is the same: now nobody may read.
    let memory = pair.hosts[1].endpoint.memory_mut();
    let mut bytes = memory.deregister(key).unwrap();
    loop {
        let new = memory.register(DOMAIN, REMOTE, Access::empty(), bytes).unwrap();
        if new == key {
            break;
        }
        bytes = memory.deregister(new).unwrap();
    }
    read(&mut pair, FIRST, key, 0, 600);
    assert_eq!(pair.answers(1), []);

    let (mut pair, key) = pair_with(2);
    read(&mut pair, FIRST, key, 0, 600);
    read(&mut pair, FIRST + 3, key, 0, 0);
    pair.answers(1);
    let attributes = QueuePairAttributes { access: Some(Access::empty()), ..Default::default() };
    let host = &mut pair.hosts[1];
    host.endpoint.modify_queue_pair(pair.now, host.qpn, &attributes).unwrap();
    read(&mut pair, FIRST, key, 0, 600);
    read(&mut pair, FIRST + 3, key, 0, 0);
    assert_eq!(pair.answers(1), []);
    assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
}

/// However many repeats of a READ come, and whatever they ask for: one answer of it waits.
#[test]
fn repeats_that_wait_are_bounded() {
    let (mut pair, key) = pair_with(2);
    read(&mut pair, FIRST, key, 0, 8192);
    assert_eq!(pair.answers(1).len(), 32);
    // Each asks for one packet more than the one before.
    for first in (0..32).rev() {
        read(&mut pair, FIRST + first, key, u64::from(first) * 256, 8192 - first * 256);
    }
    assert_eq!(responses(&pair.answers(1)).len(), 32);
    for _ in 0..10 {
        read(&mut pair, FIRST, key, 0, 8192);
        read(&mut pair, FIRST + 30, key, 30 * 256, 512);
    }
    assert_eq!(responses(&pair.answers(1)).len(), 2);
    // Single packets that begin before what waits and end before it: as many as there are resources.
    for first in (0..32).rev() {
        read(&mut pair, FIRST + first, key, u64::from(first) * 256, 256);
    }
    assert_eq!(responses(&pair.answers(1)).len(), 2);
}

#[test]
fn receiver_not_ready_is_said_once_a_batch() {
    let (mut pair, _) = pair_with(2);
    for _ in 0..100 {
        Forge::new(&pair, 1, Opcode::RcSendOnly, FIRST).inject(&mut pair);
    }
    assert_eq!(pair.answers(1).len(), 1);
}

/// A failure of our own requests, or of the device, closes the responder half too.
#[test]
fn a_failed_queue_pair_says_nothing_more() {
    let (mut pair, key) = pair_with(4);
    read(&mut pair, FIRST, key, 0, 8000);
    write(&mut pair, FIRST + 32, key);
    pair.hosts[1].endpoint.fail_all();
    assert_eq!(pair.state(1), QueuePairState::Error);
    assert_eq!(pair.answers(1), []);
}

/// Of a repeat that waits to be answered, the requester knows nothing: it must not cost it one of
/// its outstanding READs.
#[test]
fn repeats_do_not_use_up_the_responder_resources() {
    let (mut pair, key) = pair_with(1);
    read(&mut pair, FIRST, key, 0, 4);
    assert_eq!(responses(&pair.answers(1)), [(FIRST, 4)]);
    // A copy of the request that was late, and the next READ: the driver reads both at once.
    read(&mut pair, FIRST, key, 0, 4);
    read(&mut pair, FIRST + 1, key, 4, 4);
    assert_eq!(responses(&pair.answers(1)), [(FIRST, 4), (FIRST + 1, 4)]);
    assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
}

#[test]
fn a_repeat_whose_region_went_away_while_it_waited_is_dropped() {
    let (mut pair, key) = pair_with(1);
    read(&mut pair, FIRST, key, 0, 4);
    pair.answers(1);
    read(&mut pair, FIRST, key, 0, 4);
    pair.hosts[1].endpoint.memory_mut().deregister(key).unwrap();
    assert_eq!(pair.answers(1), []);
    assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
}

/// The data went away in the middle of a READ: the refusal comes in its place, and nothing after.
#[test]
fn a_region_that_goes_away_in_the_middle_of_a_read() {
    let (mut pair, key) = pair_with(4);
    let other = pair.register(1, REMOTE * 2, pattern(600, 5));
    read(&mut pair, FIRST, key, 0, 300);
    Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST + 2)
        .reth(REMOTE * 2, other, 600)
        .inject(&mut pair);
    read(&mut pair, FIRST + 5, key, 0, 300);
    write(&mut pair, FIRST + 7, key);
    pair.hosts[1].endpoint.memory_mut().deregister(other).unwrap();
    let answers = pair.answers(1);
    assert_eq!(responses(&answers), [(FIRST, 256), (FIRST + 1, 44)]);
    assert_eq!(answers.len(), 3);
    assert_eq!(
        (answers[2].psn, answers[2].syndrome),
        (FIRST + 2, Some(Syndrome::Nak(NakCode::RemoteAccessError)))
    );
    assert_eq!(pair.state(1), QueuePairState::Error);
}

#[test]
fn a_closed_queue_pair_says_nothing_more() {
    for state in [QueuePairState::Error, QueuePairState::Reset] {
        let (mut pair, key) = pair_with(4);
        read(&mut pair, FIRST, key, 0, 8000);
        write(&mut pair, FIRST + 32, key);
        let attributes = QueuePairAttributes { state: Some(state), ..Default::default() };
        let host = &mut pair.hosts[1];
        host.endpoint.modify_queue_pair(pair.now, host.qpn, &attributes).unwrap();
        assert_eq!(pair.answers(1), [], "{state}");
    }
}

/// Repeats and refusals by turns: each deserves an answer of its own, but not endlessly many when
/// the driver cannot send.
#[test]
fn answers_that_wait_are_bounded() {
    let (mut pair, key) = pair_with(4);
    write(&mut pair, FIRST, key);
    for _ in 0..100_000 {
        Forge::new(&pair, 1, Opcode::RcSendOnly, FIRST + 1).inject(&mut pair);
        write(&mut pair, FIRST, key);
        read(&mut pair, FIRST, key, 0, 4);
    }
    let answers = pair.answers(1);
    assert!(answers.len() <= 64, "{}", answers.len());
    assert_eq!(pair.counters(1).duplicates, 200_000);
    assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
}

/// READs without end must not keep a queue pair from sending its own requests.
#[test]
fn requests_go_out_between_read_responses() {
    let (mut pair, key) = pair_with(4);
    let source = pair.register(1, LOCAL, pattern(64, 1));
    let operation =
        SendOperation::Write { remote_address: REMOTE, remote_key: key, immediate: None };
    for id in 0..4 {
        pair.post(1, id, operation, &[piece(source, LOCAL, 64)]);
    }
    read(&mut pair, FIRST, key, 0, 8192);
    read(&mut pair, FIRST + 32, key, 0, 8192);
    let answers = pair.answers(1);
    let first = answers.iter().position(|a| a.opcode == Opcode::RcWriteOnly).unwrap();
    assert!(first <= 16, "{first}");
    assert_eq!(answers.len(), 68);
}

/// Answers stay in order whatever mixture is asked for, and each READ packet comes once.
#[test]
fn mixed_requests_are_answered_in_order() {
    for seed in 0..200 {
        let (mut pair, key) = pair_with(16);
        let mut lcg = Lcg(seed);
        let mut psn = FIRST;
        let mut expected = Vec::new();
        for _ in 0..16 {
            if lcg.below(2) == 0 {
                let length = 1 + lcg.below(1000);
                read(&mut pair, psn, key, 0, length);
                expected.extend((0..length.div_ceil(256)).map(|i| psn + i));
                psn += length.div_ceil(256);
            } else {
                write(&mut pair, psn, key);
                psn += 1;
            }
        }
        let answers = pair.answers(1);
        assert!(answers.is_sorted_by_key(|a| a.psn), "seed {seed}");
        let read: Vec<_> = responses(&answers).iter().map(|&(psn, _)| psn).collect();
        assert_eq!(read, expected, "seed {seed}");
    }
}

const DELAY: Duration = Duration::from_millis(1);

/// A pair of which host 1 takes SENDs, and keeps their acknowledgements for a while.
fn pair_that_waits() -> (Pair, u32) {
    let options = Options {
        psn: [FIRST, 200],
        access: everything(),
        acknowledgement_delay: DELAY,
        ..Options::default()
    };
    let mut pair = Pair::with(options);
    let key = pair.register(1, REMOTE, pattern(8192, 2));
    for id in 0..4 {
        pair.receive(1, id, &[piece(key, REMOTE, 256)]);
    }
    (pair, key)
}

fn send(pair: &mut Pair, psn: u32) {
    Forge::new(pair, 1, Opcode::RcSendOnly, psn)
        .payload(b"fine")
        .acknowledge_request()
        .inject(pair);
}

#[test]
fn an_acknowledgement_leaves_behind_the_next_request() {
    let (mut pair, key) = pair_that_waits();
    send(&mut pair, FIRST);
    send(&mut pair, FIRST + 1);
    assert_eq!(pair.short_answers(1), []);
    let operation = SendOperation::Send { immediate: None };
    pair.post(1, 9, operation, &[piece(key, REMOTE, 100)]);
    assert_eq!(pair.short_answers(1), [(Opcode::RcSendOnly, 200, None), ack(FIRST + 1)]);
    // It is not said again when its time comes.
    assert_ne!(pair.hosts[1].endpoint.poll_timeout(), Some(pair.now + DELAY));
}

#[test]
fn an_acknowledgement_waits_no_longer_than_it_may() {
    let (mut pair, key) = pair_that_waits();
    send(&mut pair, FIRST);
    assert_eq!(pair.hosts[1].endpoint.poll_timeout(), Some(pair.now + DELAY));
    pair.now = pair.now + DELAY;
    pair.hosts[1].endpoint.handle_timeout(pair.now);
    assert_eq!(pair.short_answers(1), [ack(FIRST)]);
    assert_eq!(pair.hosts[1].endpoint.poll_timeout(), None);
    // Who asks again has waited enough, and who writes waits for nothing that is sent back.
    send(&mut pair, FIRST + 1);
    send(&mut pair, FIRST + 1);
    assert_eq!(pair.short_answers(1), [ack(FIRST + 1)]);
    send(&mut pair, FIRST + 2);
    write(&mut pair, FIRST + 3, key);
    assert_eq!(pair.short_answers(1), [ack(FIRST + 3)]);
    assert_eq!(pair.hosts[1].endpoint.poll_timeout(), None);
}

#[test]
fn a_queue_pair_that_is_closed_acknowledges_what_it_has_taken() {
    let (mut pair, _) = pair_that_waits();
    send(&mut pair, FIRST);
    let error = QueuePairAttributes {
        state: Some(QueuePairState::Error),
        ..QueuePairAttributes::default()
    };
    let host = &mut pair.hosts[1];
    host.endpoint.modify_queue_pair(pair.now, host.qpn, &error).unwrap();
    assert_eq!(host.endpoint.poll_timeout(), None);
    assert_eq!(pair.short_answers(1), [ack(FIRST)]);
}
