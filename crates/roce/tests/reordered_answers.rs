//! What a requester does with answers that came before those of a READ or an atomic operation.

mod common;

use core::ops::Range;
use core::time::Duration;

use common::forge::Forge;
use common::operations::REMOTE;
use common::{Lcg, Options, Pair, pattern, piece};
use millstream_roce::{CompletionStatus, QueuePairState, SendOperation};
use millstream_wire::{NakCode, Opcode, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const FIRST: u32 = 100;
const KEY: u32 = 7;
const MTU: usize = 256;
const REORDERING: Duration = Duration::from_micros(100);

fn options() -> Options {
    Options { psn: [FIRST, 200], timeout: 14, reordering: REORDERING, ..Options::default() }
}

/// Host 0 has asked for so many packets by one READ, and has these requests behind it.
fn reading(packets: usize, behind: &[SendOperation]) -> (Pair, u32) {
    let mut pair = Pair::with(options());
    let key = pair.register(0, LOCAL, vec![0; 8192]);
    let read = SendOperation::Read { remote_address: REMOTE, remote_key: KEY };
    pair.post(0, 1, read, &[piece(key, LOCAL, packets * MTU)]);
    for (&operation, id) in behind.iter().zip(2..) {
        pair.post(0, id, operation, &[piece(key, LOCAL + 4096, 8)]);
    }
    let numbered = behind.iter().map(opcode).zip(packets as u32..);
    let expected: Vec<_> = [(Opcode::RcReadRequest, 0)].into_iter().chain(numbered).collect();
    assert_eq!(asked(&mut pair), expected);
    (pair, key)
}

fn opcode(operation: &SendOperation) -> Opcode {
    match operation {
        SendOperation::Write { .. } => Opcode::RcWriteOnly,
        SendOperation::FetchAdd { .. } => Opcode::RcFetchAdd,
        other => panic!("{other:?}"),
    }
}

const WRITE: SendOperation =
    SendOperation::Write { remote_address: REMOTE, remote_key: KEY, immediate: None };
const ADD: SendOperation =
    SendOperation::FetchAdd { remote_address: REMOTE, remote_key: KEY, add: 1 };

/// The requests that host 0 sends now.
fn asked(pair: &mut Pair) -> Vec<(Opcode, u32)> {
    pair.answers(0).iter().map(|it| (it.opcode, it.psn - FIRST)).collect()
}

/// What a packet of the answer to a READ of so many carries.
fn data(number: u32) -> [u8; MTU] {
    [(number as u8).wrapping_add(1); MTU]
}

/// An answer to the READ of so many packets that was sent first.
fn answer(pair: &mut Pair, number: u32, packets: u32) {
    answer_to(pair, number, 0..packets);
}

fn answer_to(pair: &mut Pair, number: u32, read: Range<u32>) {
    let read = FIRST + read.start..FIRST + read.end;
    Forge::read_answer(pair, FIRST + number, read).payload(&data(number)).inject(pair);
}

fn acknowledge(pair: &mut Pair, number: u32, syndrome: Syndrome) {
    Forge::new(pair, 0, Opcode::RcAcknowledge, FIRST + number).syndrome(syndrome).inject(pair);
}

/// The ids of the requests that are complete, and how.
fn ended(pair: &mut Pair) -> Vec<(u64, CompletionStatus)> {
    pair.poll(0);
    pair.completions(0).iter().map(|it| (it.id, it.status)).collect()
}

const fn success(id: u64) -> (u64, CompletionStatus) {
    (id, CompletionStatus::Success)
}

fn assert_read(pair: &Pair, key: u32, packets: u32) {
    let expected: Vec<u8> = (0..packets).flat_map(data).collect();
    assert!(pair.region(0, key)[..expected.len()] == expected);
}

#[test]
fn answers_that_overtake_each_other_are_not_asked_for_again() {
    for order in [[1, 0, 2, 3], [3, 2, 1, 0], [0, 2, 3, 1], [1, 3, 0, 2], [3, 3, 1, 2]] {
        let (mut pair, key) = reading(4, &[]);
        order.iter().for_each(|&number| answer(&mut pair, number, 4));
        if order.iter().all(|&number| number != 0) {
            answer(&mut pair, 0, 4);
        }
        assert_eq!(ended(&mut pair), [success(1)], "{order:?}");
        assert_read(&pair, key, 4);
        assert_eq!((asked(&mut pair), pair.early_packets(0)), (vec![], 0), "{order:?}");
        pair.pass(0, Duration::from_secs(1));
        assert_eq!(asked(&mut pair), [], "{order:?}");
        assert_eq!(pair.counters(0).retransmissions, 0);
    }
}

#[test]
fn what_does_not_come_in_time_is_asked_for_again_and_what_was_kept_is_used() {
    let (mut pair, key) = reading(4, &[]);
    answer(&mut pair, 0, 4);
    answer(&mut pair, 2, 4);
    pair.pass(0, REORDERING - Duration::from_nanos(1));
    assert_eq!(asked(&mut pair), []);
    pair.pass(0, Duration::from_nanos(1));
    assert_eq!(asked(&mut pair), [(Opcode::RcReadRequest, 1)]);
    // What is on its way still says nothing new, and is used.
    answer(&mut pair, 3, 4);
    pair.pass(0, REORDERING);
    assert_eq!(asked(&mut pair), []);
    answer(&mut pair, 1, 4);
    assert_eq!(ended(&mut pair), [success(1)]);
    assert_read(&pair, key, 4);
    assert_eq!(pair.counters(0).reordered, 2);
    assert_eq!(pair.counters(0).retransmissions, 1);
}

#[test]
fn each_gap_has_its_own_time_unless_it_was_asked_for_again() {
    for lost in [false, true] {
        let (mut pair, _) = reading(4, &[]);
        answer(&mut pair, 1, 4);
        answer(&mut pair, 3, 4);
        let time = if lost { REORDERING } else { REORDERING - Duration::from_nanos(1) };
        pair.pass(0, time);
        let first = if lost { vec![(Opcode::RcReadRequest, 0)] } else { vec![] };
        assert_eq!(asked(&mut pair), first);
        answer(&mut pair, 0, 4);
        pair.pass(0, REORDERING - Duration::from_nanos(1));
        assert_eq!(asked(&mut pair), []);
        pair.pass(0, Duration::from_nanos(1));
        let second = if lost { vec![] } else { vec![(Opcode::RcReadRequest, 2)] };
        assert_eq!(asked(&mut pair), second);
    }
}

/// Answers to later requests acknowledge what is before them, when the data has come.
#[test]
fn an_acknowledgement_waits_for_data_that_it_has_overtaken() {
    for times in [1, 3] {
        let (mut pair, key) = reading(1, &[WRITE]);
        for _ in 0..times {
            acknowledge(&mut pair, 1, Syndrome::ACK_UNLIMITED);
        }
        assert_eq!((ended(&mut pair), pair.early_packets(0)), (vec![], 1));
        answer(&mut pair, 0, 1);
        assert_eq!(ended(&mut pair), [success(1), success(2)]);
        assert_read(&pair, key, 1);
        assert_eq!((asked(&mut pair), pair.early_packets(0)), (vec![], 0));
    }
}

#[test]
fn the_answer_to_an_atomic_operation_waits_too() {
    let (mut pair, key) = reading(1, &[ADD]);
    Forge::new(&pair, 0, Opcode::RcAtomicAcknowledge, FIRST + 1)
        .syndrome(Syndrome::ACK_UNLIMITED)
        .original(7)
        .inject(&mut pair);
    answer(&mut pair, 0, 1);
    assert_eq!(ended(&mut pair), [success(1), success(2)]);
    assert_eq!(pair.region(0, key)[4096..4104], 7_u64.to_ne_bytes());
}

#[test]
fn a_refusal_that_has_overtaken_data_counts_when_the_data_has_come() {
    type Row<'a> = (Syndrome, &'a [(u64, CompletionStatus)], &'a [(Opcode, u32)]);
    let table: [Row<'_>; 3] = [
        (
            Syndrome::Nak(NakCode::RemoteAccessError),
            &[success(1), (2, CompletionStatus::RemoteAccess)],
            &[],
        ),
        (Syndrome::Nak(NakCode::PsnSequenceError), &[success(1)], &[(Opcode::RcWriteOnly, 1)]),
        (Syndrome::ReceiverNotReady { timer: 1 }, &[success(1)], &[]),
    ];
    for (syndrome, completions, again) in table {
        let (mut pair, _) = reading(1, &[WRITE]);
        acknowledge(&mut pair, 1, syndrome);
        assert_eq!((ended(&mut pair), asked(&mut pair)), (vec![], vec![]), "{syndrome:?}");
        answer(&mut pair, 0, 1);
        assert_eq!(ended(&mut pair), completions, "{syndrome:?}");
        assert_eq!(asked(&mut pair), again, "{syndrome:?}");
        let counters = pair.counters(0);
        assert_eq!(counters.naks_received + counters.rnr_naks_received, 1, "{syndrome:?}");
    }
}

/// It stands where data should, which was lost.
#[test]
fn an_acknowledgement_in_place_of_data_does_not_wait() {
    for number in [0, 2] {
        let (mut pair, key) = reading(3, &[]);
        acknowledge(&mut pair, number, Syndrome::ACK_UNLIMITED);
        assert_eq!(asked(&mut pair), [(Opcode::RcReadRequest, 0)], "{number}");
        (0..3).for_each(|number| answer(&mut pair, number, 3));
        assert_eq!((ended(&mut pair), asked(&mut pair)), (vec![success(1)], vec![]));
        assert_read(&pair, key, 3);
    }
}

/// What the peer has refused it may take when it is sent again.
#[test]
fn a_refusal_from_before_all_was_sent_again_is_forgotten() {
    for (syndrome, by_the_timer) in [
        (Syndrome::Nak(NakCode::PsnSequenceError), false),
        (Syndrome::Nak(NakCode::RemoteOperationalError), false),
        (Syndrome::ReceiverNotReady { timer: 1 }, false),
        (Syndrome::ReceiverNotReady { timer: 1 }, true),
    ] {
        let (mut pair, key) = reading(1, &[WRITE]);
        acknowledge(&mut pair, 1, syndrome);
        pair.pass(0, REORDERING);
        let again = [(Opcode::RcReadRequest, 0), (Opcode::RcWriteOnly, 1)];
        assert_eq!(asked(&mut pair), again, "{syndrome:?}");
        if by_the_timer {
            acknowledge(&mut pair, 1, syndrome);
            assert_eq!(pair.early_packets(0), 1);
            pair.pass(0, Duration::from_millis(40));
            assert_eq!(asked(&mut pair)[0], again[0], "{syndrome:?}");
        }
        answer(&mut pair, 0, 1);
        // After a silence they are sent one after the other.
        let then = if by_the_timer { vec![again[1]] } else { vec![] };
        assert_eq!((ended(&mut pair), asked(&mut pair)), (vec![success(1)], then));
        acknowledge(&mut pair, 1, Syndrome::ACK_UNLIMITED);
        assert_eq!(ended(&mut pair), [success(2)], "{syndrome:?}");
        assert_read(&pair, key, 1);
        let counters = pair.counters(0);
        assert_eq!((counters.naks_received, counters.rnr_naks_received), (0, 0));
    }
}

/// It is not kept in place of the true one.
#[test]
fn an_answer_that_contradicts_the_request_does_not_wait() {
    let (mut pair, key) = reading(3, &[]);
    Forge::read_answer(&pair, FIRST + 1, FIRST..FIRST + 3).payload(b"short").inject(&mut pair);
    assert_eq!((pair.early_packets(0), asked(&mut pair)), (0, vec![(Opcode::RcReadRequest, 0)]));
    (0..3).for_each(|number| answer(&mut pair, number, 3));
    assert_eq!(ended(&mut pair), [success(1)]);
    assert_read(&pair, key, 3);
}

/// A peer whose answers come is not silent, whatever the timer has learned of its haste.
#[test]
fn the_timer_does_not_end_what_waits_for_its_turn() {
    const LONG: Duration = Duration::from_millis(2);
    for behind in [&[][..], &[WRITE]] {
        let mut pair = Pair::with(Options { reordering: LONG, ..options() });
        let key = pair.register(0, LOCAL, vec![0; 8192]);
        let read = SendOperation::Read { remote_address: REMOTE, remote_key: KEY };
        let round_trip = Duration::from_micros(200);
        for number in 0..20 {
            pair.post(0, 1, read, &[piece(key, LOCAL, MTU)]);
            asked(&mut pair);
            pair.pass(0, round_trip);
            answer_to(&mut pair, number, number..number + 1);
        }
        let packets = if behind.is_empty() { 2 } else { 1 };
        pair.post(0, 1, read, &[piece(key, LOCAL, packets * MTU)]);
        for &operation in behind {
            pair.post(0, 2, operation, &[piece(key, LOCAL + 4096, 8)]);
        }
        asked(&mut pair);
        pair.pass(0, round_trip);
        match behind {
            [] => answer_to(&mut pair, 21, 20..22),
            _ => acknowledge(&mut pair, 21, Syndrome::ACK_UNLIMITED),
        }
        pair.pass(0, LONG / 2);
        pair.pass(0, LONG / 2 - Duration::from_nanos(1));
        assert_eq!((asked(&mut pair), pair.early_packets(0)), (vec![], 1), "{behind:?}");
        assert_eq!(pair.counters(0).timeouts, 0, "{behind:?}");
    }
}

/// It may be no part of the stream: the packet that is may come much later.
#[test]
fn what_is_kept_goes_when_nothing_comes_before_it() {
    for early in [&[2][..], &[1, 3, 0]] {
        let (mut pair, key) = reading(4, &[]);
        early.iter().for_each(|&number| answer(&mut pair, number, 4));
        assert_eq!(pair.early_packets(0), 1);
        for _ in 0..100 {
            pair.pass(0, Duration::from_millis(1));
        }
        assert_eq!(pair.early_packets(0), 0, "{early:?}");
        (0..4).for_each(|number| answer(&mut pair, number, 4));
        assert_eq!(ended(&mut pair), [success(1)], "{early:?}");
        assert_read(&pair, key, 4);
    }
}

/// Requests that wait for their turn take places, too.
#[test]
fn what_finds_no_room_is_asked_for_at_once() {
    let room = Pair::with(options()).hosts[0].endpoint.limits().early_packets as u32;
    for requests in [room - 1, room] {
        let (mut pair, _) = reading(2, &[]);
        let target = pair.register(0, REMOTE, vec![0; 8]);
        for number in 1..=requests {
            Forge::new(&pair, 0, Opcode::RcWriteOnly, 200 + number)
                .reth(REMOTE, target, 4)
                .payload(b"fine")
                .inject(&mut pair);
        }
        assert_eq!(pair.early_packets(0), requests as usize);
        answer(&mut pair, 1, 2);
        let is_full = requests == room;
        assert_eq!(!asked(&mut pair).is_empty(), is_full, "{requests}");
        assert_eq!(pair.early_packets(0), room as usize);
    }
}

#[test]
fn more_than_there_is_room_for_and_what_is_far_ahead_is_not_waited_for() {
    const PACKETS: u32 = 16;
    let read_of = |number: u32| {
        let start = number / PACKETS * PACKETS;
        start..start + PACKETS
    };
    let room = Pair::with(options()).hosts[0].endpoint.limits().early_packets as u32;
    let after_many = (1..=room + 1).collect::<Vec<_>>();
    for numbers in [after_many, vec![room + 1], vec![1, room + 15]] {
        let mut pair = Pair::with(Options { max_window: 256, depth: 16, ..options() });
        let key = pair.register(0, LOCAL, vec![0; PACKETS as usize * MTU]);
        let read = SendOperation::Read { remote_address: REMOTE, remote_key: KEY };
        let target = [piece(key, LOCAL, PACKETS as usize * MTU)];
        let post = |pair: &mut Pair| {
            pair.post(0, 1, read, &target);
            asked(pair);
        };
        // Some, four at a time, open the window for the others.
        let first = 32 * PACKETS;
        (0..4).for_each(|_| post(&mut pair));
        for number in 0..first {
            answer_to(&mut pair, number, read_of(number));
            if (number + 1).is_multiple_of(PACKETS) {
                post(&mut pair);
            }
        }
        pair.post(0, 1, read, &target);
        assert_eq!(asked(&mut pair), [(Opcode::RcReadRequest, first + 4 * PACKETS)]);
        let answer = |pair: &mut Pair, number: u32| {
            answer_to(pair, first + number, read_of(first + number));
        };
        let (last, others) = numbers.split_last().unwrap();
        others.iter().for_each(|&number| answer(&mut pair, number));
        assert_eq!(
            (asked(&mut pair), pair.early_packets(0)),
            (vec![], others.len()),
            "{numbers:?}"
        );
        answer(&mut pair, *last);
        assert_eq!(asked(&mut pair)[0], (Opcode::RcReadRequest, first), "{numbers:?}");
    }
}

#[test]
fn what_is_kept_goes_with_its_queue_pair() {
    let ends: [fn(&mut Pair); 3] = [
        |pair| assert!(pair.hosts[0].endpoint.destroy_queue_pair(pair.hosts[0].qpn)),
        |pair| pair.modify(0, QueuePairState::Reset),
        |pair| pair.modify(0, QueuePairState::Error),
    ];
    for end in ends {
        let (mut pair, _) = reading(3, &[]);
        answer(&mut pair, 1, 3);
        assert_eq!(pair.early_packets(0), 1);
        end(&mut pair);
        assert_eq!(pair.early_packets(0), 0);
        pair.pass(0, REORDERING);
        assert_eq!(asked(&mut pair), []);
    }
}

/// Through the whole of two endpoints: what overtakes costs no packet that is sent again.
#[test]
fn reads_whose_answers_overtake_each_other_are_not_sent_again() {
    const LENGTH: usize = 200 * MTU;
    let mut pair = Pair::with(options());
    let mut held: Option<Vec<u8>> = None;
    let mut random = Lcg(7);
    pair.wire = Box::new(move |_, datagram| {
        let mut arrive = Vec::new();
        let is_answer = Opcode::from_byte(datagram[0]).is_ok_and(Opcode::is_response);
        if is_answer && held.is_none() && random.below(10) == 0 {
            held = Some(datagram.to_vec());
            return arrive;
        }
        arrive.push(datagram.to_vec());
        if is_answer && random.below(3) == 0 {
            arrive.extend(held.take());
        }
        arrive
    });
    let target = pair.register(0, LOCAL, vec![0; LENGTH]);
    let source = pair.register(1, REMOTE, pattern(LENGTH, 3));
    for at in (0..LENGTH).step_by(LENGTH / 8) {
        let (remote_address, remote_key) = (REMOTE + at as u64, source);
        let operation = SendOperation::Read { remote_address, remote_key };
        pair.post(0, 1, operation, &[piece(target, LOCAL + at as u64, LENGTH / 8)]);
    }
    pair.run(Duration::from_secs(10));
    let completions = pair.completions(0);
    assert_eq!(completions.len(), 8);
    assert!(completions.iter().all(|it| it.status == CompletionStatus::Success));
    assert_eq!(pair.region(0, target), pattern(LENGTH, 3));
    let counters = pair.counters(0);
    assert!(counters.reordered > 10, "{counters:?}");
    assert_eq!(counters.retransmissions, 0, "{counters:?}");
}
