//! What a responder does with packets that came before their turn.

mod common;

use core::time::Duration;

use common::forge::{Forge, ack, nak};
use common::operations::REMOTE;
use common::{Lcg, Options, Pair, pattern, piece};
use millstream_roce::{CompletionStatus, QueuePairState, SendOperation};
use millstream_wire::{NakCode, Opcode};

const LOCAL: u64 = 0x1000_0000;
const FIRST: u32 = 100;
const REORDERING: Duration = Duration::from_micros(100);

fn options() -> Options {
    Options { psn: [FIRST, 200], timeout: 14, reordering: REORDERING, ..Options::default() }
}

fn pair() -> (Pair, u32) {
    let mut pair = Pair::with(options());
    let key = pair.register(1, REMOTE, vec![0; 8192]);
    (pair, key)
}

/// Writes the number of the packet where the one before it has written its own.
fn write(pair: &mut Pair, psn: u32, key: u32) {
    Forge::new(pair, 1, Opcode::RcWriteOnly, FIRST + psn)
        .reth(REMOTE, key, 4)
        .payload(&psn.to_be_bytes())
        .acknowledge_request()
        .inject(pair);
}

fn last_written(pair: &Pair, key: u32) -> u32 {
    u32::from_be_bytes(*pair.region(1, key).first_chunk().unwrap())
}

#[test]
fn what_was_overtaken_is_waited_for_and_all_is_executed_in_order() {
    for order in [&[1, 0][..], &[3, 1, 2, 0], &[1, 2, 3, 0, 4], &[1, 1, 1, 0], &[2, 0, 1]] {
        let (mut pair, key) = pair();
        for &psn in order {
            write(&mut pair, psn, key);
        }
        let last = *order.iter().max().unwrap();
        assert_eq!(last_written(&pair, key), last, "{order:?}");
        assert_eq!(pair.short_answers(1), [ack(FIRST + last)], "{order:?}");
        pair.pass(1, Duration::from_secs(1));
        assert_eq!(pair.short_answers(1), [], "{order:?}");
        assert_eq!(pair.counters(1).naks_sent, 0);
    }
}

#[test]
fn what_does_not_come_in_time_was_lost() {
    let (mut pair, key) = pair();
    write(&mut pair, 1, key);
    pair.pass(1, REORDERING - Duration::from_nanos(1));
    write(&mut pair, 3, key);
    assert_eq!(pair.short_answers(1), []);
    pair.pass(1, Duration::from_nanos(1));
    assert_eq!(pair.short_answers(1), [nak(FIRST, NakCode::PsnSequenceError)]);
    // What is still on its way says nothing new.
    write(&mut pair, 4, key);
    pair.pass(1, REORDERING);
    assert_eq!((pair.short_answers(1), pair.early_packets(1)), (vec![], 2));
    // All is sent again. What was kept takes its turn.
    write(&mut pair, 0, key);
    assert_eq!(pair.short_answers(1), [ack(FIRST + 1)]);
    pair.pass(1, REORDERING);
    assert_eq!(pair.short_answers(1), [], "the next gap is on its way again");
    write(&mut pair, 2, key);
    assert_eq!((pair.short_answers(1), last_written(&pair, key)), (vec![ack(FIRST + 3)], 3));
    assert_eq!(pair.counters(1).reordered, 2);
}

/// What comes from behind a gap again, and without what was missing there, says that it was lost again.
#[test]
fn a_gap_in_what_is_sent_again_is_reported() {
    let (mut pair, key) = pair();
    write(&mut pair, 1, key);
    write(&mut pair, 3, key);
    pair.pass(1, REORDERING);
    assert_eq!(pair.short_answers(1), [nak(FIRST, NakCode::PsnSequenceError)]);
    write(&mut pair, 0, key);
    write(&mut pair, 3, key);
    assert_eq!(pair.short_answers(1), [ack(FIRST + 1)]);
    pair.pass(1, REORDERING);
    assert_eq!(pair.short_answers(1), [nak(FIRST + 2, NakCode::PsnSequenceError)]);
}

#[test]
fn each_gap_has_its_own_time() {
    let (mut pair, key) = pair();
    write(&mut pair, 1, key);
    write(&mut pair, 3, key);
    pair.pass(1, REORDERING - Duration::from_nanos(1));
    write(&mut pair, 0, key);
    assert_eq!(pair.short_answers(1), [ack(FIRST + 1)]);
    assert_eq!((last_written(&pair, key), pair.early_packets(1)), (1, 1));
    pair.pass(1, REORDERING - Duration::from_nanos(1));
    assert_eq!(pair.short_answers(1), []);
    pair.pass(1, Duration::from_nanos(1));
    assert_eq!(pair.short_answers(1), [nak(FIRST + 2, NakCode::PsnSequenceError)]);
}

/// Each row: what comes before the gap is reported, the gap, and what comes after that; whether it is reported
/// again in its time.
#[test]
fn a_gap_is_reported_again_when_something_from_behind_it_comes_again() {
    type Row = (&'static [u32], u32, &'static [u32], Option<u32>);
    let table: [Row; 6] = [
        // One that is sent again overtakes; 2 is lost again, and nothing follows.
        (&[1, 3], 0, &[3, 0, 1], Some(2)),
        // In order it is on its way.
        (&[1, 3], 0, &[0, 1], None),
        // Repeats of what was executed say nothing of it.
        (&[3, 1, 0], 2, &[0, 1, 0], None),
        (&[3, 1, 0], 2, &[3], Some(2)),
        // What was on its way still, behind the gap.
        (&[1, 3], 0, &[4, 5], None),
        (&[7, 3], 0, &[0, 1, 2], None),
    ];
    for (before, gap, after, again) in table {
        let (mut pair, key) = pair();
        let report = |gap: u32| nak(FIRST + gap, NakCode::PsnSequenceError);
        before.iter().for_each(|&psn| write(&mut pair, psn, key));
        pair.pass(1, REORDERING);
        assert_eq!(pair.short_answers(1).last(), Some(&report(gap)), "{before:?}");
        after.iter().for_each(|&psn| write(&mut pair, psn, key));
        pair.short_answers(1);
        pair.pass(1, REORDERING);
        let expected: Vec<_> = again.into_iter().map(report).collect();
        assert_eq!(pair.short_answers(1), expected, "{before:?} {after:?}");
    }
}

#[test]
fn a_repeat_of_what_is_kept_may_ask_for_the_acknowledgement() {
    let (mut pair, key) = pair();
    let packet = |pair: &Pair, psn| {
        Forge::new(pair, 1, Opcode::RcWriteOnly, FIRST + psn).reth(REMOTE, key, 4).payload(b"fine")
    };
    packet(&pair, 1).inject(&mut pair);
    packet(&pair, 1).acknowledge_request().inject(&mut pair);
    packet(&pair, 0).inject(&mut pair);
    assert_eq!(pair.short_answers(1), [ack(FIRST + 1)]);
}

/// What makes no progress does not make it stay.
#[test]
fn repeats_do_not_keep_what_is_kept() {
    for repeats in [0, 3] {
        let (mut pair, key) = pair();
        write(&mut pair, 0, key);
        write(&mut pair, 2, key);
        for _ in 0..3 {
            pair.pass(1, Duration::from_millis(40));
            write(&mut pair, repeats, key);
        }
        // Only what came lately is there.
        assert_eq!(pair.early_packets(1), usize::from(repeats > 0), "{repeats}");
        write(&mut pair, 1, key);
        assert_eq!(last_written(&pair, key), 1, "{repeats}");
    }
}

/// It may be no part of the stream: the packet that is may come much later.
#[test]
fn what_is_kept_goes_when_nothing_comes_before_it() {
    for gaps in [&[1][..], &[2, 0]] {
        let (mut pair, key) = pair();
        gaps.iter().for_each(|&psn| write(&mut pair, psn, key));
        let mut naks = 0;
        for _ in 0..1000 {
            pair.pass(1, Duration::from_millis(1));
            naks += pair.short_answers(1).iter().filter(|it| it.2 != ack(0).2).count();
        }
        assert_eq!((pair.early_packets(1), naks), (0, 1), "{gaps:?}");
    }
}

/// More are no matter of order; and what is far ahead may be no part of the stream, or of another one.
#[test]
fn more_than_there_is_room_for_and_what_is_far_ahead_is_not_waited_for() {
    let room = pair().0.hosts[1].endpoint.limits().early_packets as u32;
    let after_many = (1..=room + 1).collect::<Vec<_>>();
    for numbers in [after_many, vec![room + 1], vec![1, 1000], vec![(1 << 23) - 1]] {
        let (mut pair, key) = pair();
        let (last, others) = numbers.split_last().unwrap();
        others.iter().for_each(|&psn| write(&mut pair, psn, key));
        assert_eq!((pair.short_answers(1), pair.early_packets(1)), (vec![], others.len()));
        write(&mut pair, *last, key);
        assert_eq!(pair.short_answers(1), [nak(FIRST, NakCode::PsnSequenceError)]);
        assert_eq!(pair.early_packets(1), others.len());
        write(&mut pair, 0, key);
        assert_eq!(pair.short_answers(1), [ack(FIRST + others.len() as u32)]);
    }
}

#[test]
fn a_requester_that_goes_back_hears_of_the_gap_again_in_its_time() {
    let (mut pair, key) = pair();
    let sequence = nak(FIRST, NakCode::PsnSequenceError);
    write(&mut pair, 5, key);
    pair.pass(1, REORDERING);
    assert_eq!(pair.short_answers(1), [sequence]);
    write(&mut pair, 1, key);
    assert_eq!(pair.short_answers(1), [], "the first repeat may have been overtaken");
    pair.pass(1, REORDERING);
    assert_eq!(pair.short_answers(1), [sequence]);
}

#[test]
fn what_is_kept_goes_with_its_queue_pair() {
    let ends: [fn(&mut Pair); 3] = [
        |pair| assert!(pair.hosts[1].endpoint.destroy_queue_pair(pair.hosts[1].qpn)),
        |pair| pair.modify(1, QueuePairState::Reset),
        |pair| pair.modify(1, QueuePairState::Error),
    ];
    for end in ends {
        let (mut pair, key) = pair();
        write(&mut pair, 1, key);
        assert_eq!(pair.early_packets(1), 1);
        end(&mut pair);
        assert_eq!(pair.early_packets(1), 0);
        pair.pass(1, REORDERING);
        assert_eq!(pair.short_answers(1), []);
    }
}

/// Its responder goes on.
#[test]
fn what_is_kept_is_executed_where_the_send_queue_drains() {
    let (mut pair, key) = pair();
    write(&mut pair, 1, key);
    pair.modify(1, QueuePairState::SendQueueDrained);
    write(&mut pair, 0, key);
    assert_eq!((pair.short_answers(1), last_written(&pair, key)), (vec![ack(FIRST + 1)], 1));
}

/// A SEND that came too soon and finds no receive then is sent again, as one that came in time.
#[test]
fn what_finds_no_receive_in_its_turn_is_sent_again() {
    let (mut pair, key) = pair();
    for psn in [1, 2] {
        let send = Forge::new(&pair, 1, Opcode::RcSendOnly, FIRST + psn).payload(b"send");
        send.inject(&mut pair);
    }
    write(&mut pair, 0, key);
    assert_eq!(pair.counters(1).rnr_naks_sent, 0);
    assert_eq!(pair.early_packets(1), 0);
    let answers = pair.short_answers(1);
    assert_eq!(answers[0], ack(FIRST));
    assert_eq!((answers.len(), answers[1].1), (2, FIRST + 1));
    assert_eq!(pair.counters(1).rnr_naks_sent, 1);
}

/// The answers to READs and atomics have their packets, of which a READ has as many as its data.
#[test]
fn reads_and_atomics_that_came_too_soon_are_answered_in_their_turn() {
    let (mut pair, key) = pair();
    let add = Forge::new(&pair, 1, Opcode::RcFetchAdd, FIRST + 4).atomic(REMOTE + 4096, key);
    let read = Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST + 1).reth(REMOTE, key, 3 * 256);
    write(&mut pair, 5, key);
    for early in [&add, &add, &read] {
        early.inject(&mut pair);
    }
    assert_eq!((pair.short_answers(1), pair.early_packets(1)), (vec![], 3));
    write(&mut pair, 0, key);
    let answers = pair.answers(1);
    let answers: Vec<_> =
        answers.iter().map(|it| (it.opcode, it.psn - FIRST, it.payload)).collect();
    let expected = [
        (Opcode::RcAcknowledge, 0, 0),
        (Opcode::RcReadResponseFirst, 1, 256),
        (Opcode::RcReadResponseMiddle, 2, 256),
        (Opcode::RcReadResponseLast, 3, 256),
        (Opcode::RcAtomicAcknowledge, 4, 0),
        (Opcode::RcAcknowledge, 5, 0),
    ];
    assert_eq!(answers, expected);
    assert_eq!(pair.region(1, key)[4096..4104], 1u64.to_ne_bytes(), "added once");
    assert_eq!(last_written(&pair, key), 5);
}

/// What a packet may do is what it may do in its turn.
#[test]
fn memory_that_is_gone_when_its_turn_comes_is_refused() {
    let (mut pair, key) = pair();
    let other = pair.register(1, REMOTE + 8192, vec![0; 8]);
    Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST + 1)
        .reth(REMOTE + 8192, other, 4)
        .payload(b"late")
        .inject(&mut pair);
    pair.hosts[1].endpoint.memory_mut().deregister(other).unwrap();
    write(&mut pair, 0, key);
    let refused = nak(FIRST + 1, NakCode::RemoteAccessError);
    assert_eq!(pair.short_answers(1), [ack(FIRST), refused]);
}

/// Through the whole of two endpoints: what overtakes costs no packet that is sent again.
#[test]
fn packets_that_overtake_each_other_are_not_sent_again() {
    const LENGTH: usize = 200 * 256;
    let mut pair = Pair::with(options());
    let mut held: Option<Vec<u8>> = None;
    let mut random = Lcg(7);
    pair.wire = Box::new(move |to, datagram| {
        let mut arrive = Vec::new();
        if to == 1 && held.is_none() && random.below(10) == 0 {
            held = Some(datagram.to_vec());
            return arrive;
        }
        arrive.push(datagram.to_vec());
        if to == 1 && random.below(3) == 0 {
            arrive.extend(held.take());
        }
        arrive
    });
    let source = pair.register(0, LOCAL, pattern(LENGTH, 3));
    let target = pair.register(1, REMOTE, vec![0; LENGTH]);
    for at in (0..LENGTH).step_by(LENGTH / 8) {
        let (remote_address, remote_key) = (REMOTE + at as u64, target);
        let operation = SendOperation::Write { remote_address, remote_key, immediate: None };
        pair.post(0, 1, operation, &[piece(source, LOCAL + at as u64, LENGTH / 8)]);
    }
    pair.run(Duration::from_secs(10));
    let completions = pair.completions(0);
    assert_eq!(completions.len(), 8);
    assert!(completions.iter().all(|it| it.status == CompletionStatus::Success));
    assert_eq!(pair.region(1, target), pattern(LENGTH, 3));
    let counters = pair.counters(1);
    assert!(counters.reordered > 10, "{counters:?}");
    assert_eq!(counters.naks_sent, 0, "{counters:?}");
    assert_eq!(pair.counters(0).retransmissions, 0, "{counters:?}");
}
