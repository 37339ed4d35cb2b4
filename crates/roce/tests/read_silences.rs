//! How long a requester waits for the next answer to a READ.

mod common;

use core::ops::Range;
use core::time::Duration;

use common::forge::Forge;
use common::operations::REMOTE;
use common::{Options, Pair, piece};
use millstream_roce::{Node, SendOperation};
use millstream_wire::Opcode;

const LOCAL: u64 = 0x1000_0000;
const MTU: usize = 256;
const PACKETS: u32 = 16;
const ROUND_TRIP: Duration = Duration::from_micros(200);
/// The link lets some packets pass at once, and more when so much time has passed.
const BURST: Duration = Duration::from_micros(2600);

/// Whether something was asked for again meanwhile.
fn pass(pair: &mut Pair, time: Duration) -> bool {
    let end = pair.now + time;
    let mut asked = false;
    while let Some(next) = pair.hosts[0].endpoint.poll_timeout().filter(|&next| next <= end) {
        pair.now = next;
        pair.hosts[0].endpoint.handle_timeout(next);
        asked |= !pair.answers(0).is_empty();
    }
    pair.now = end;
    asked
}

fn answer(pair: &mut Pair, numbers: Range<u32>, read: &Range<u32>) {
    for number in numbers {
        let data = [number as u8; MTU];
        Forge::read_answer(pair, number, read.clone()).payload(&data).inject(pair);
    }
}

/// A host that reads, and what it reads into.
fn reader() -> (Pair, u32) {
    let mut pair = Pair::with(Options { psn: [0, 200], timeout: 14, ..Options::default() });
    let key = pair.register(0, LOCAL, vec![0; PACKETS as usize * MTU]);
    (pair, key)
}

/// Asks for so many packets, from this number on.
fn ask(pair: &mut Pair, key: u32, first: u32, packets: u32) -> Range<u32> {
    let operation = SendOperation::Read { remote_address: REMOTE, remote_key: 7 };
    pair.post(0, 1, operation, &[piece(key, LOCAL, packets as usize * MTU)]);
    let asked: Vec<_> = pair.answers(0).iter().map(|it| (it.opcode, it.psn)).collect();
    assert_eq!(asked, [(Opcode::RcReadRequest, first)]);
    first..first + packets
}

/// Answers in two bursts, and what is asked for again meanwhile once more. Returns whether that was so.
fn answer_in_bursts(pair: &mut Pair, read: &Range<u32>, second: Duration) -> bool {
    let rest = read.start + 2..read.end;
    answer(pair, read.start..rest.start, read);
    let again = pass(pair, second);
    answer(pair, rest.clone(), read);
    if again {
        answer(pair, rest.clone(), &rest);
    }
    again
}

/// One READ after the other whose answers come in two bursts. Returns which of them was asked for twice.
fn asked_twice(reads: u32, second_burst: impl Fn(u32) -> Duration) -> Vec<u32> {
    let (mut pair, key) = reader();
    let mut twice = Vec::new();
    for number in 0..reads {
        let read = ask(&mut pair, key, number * PACKETS, PACKETS);
        assert!(!pass(&mut pair, ROUND_TRIP));
        if answer_in_bursts(&mut pair, &read, second_burst(number)) {
            twice.push(number);
        }
        assert_eq!(pair.hosts[0].endpoint.usage().fetches, 0);
    }
    twice
}

/// What is on its way is not asked for again time and again.
#[test]
fn a_burst_that_takes_longer_than_the_path_is_waited_for_when_one_was() {
    assert_eq!(asked_twice(20, |_| BURST), [0]);
}

/// When it is no longer so, a loss is noticed soon again.
#[test]
fn that_is_forgotten_when_bursts_follow_soon() {
    let times = |number| match number {
        0 | 1 | 30 => BURST,
        _ => ROUND_TRIP,
    };
    assert_eq!(asked_twice(31, times), [0, 30]);
}

/// How long the loss of a single READ is not noticed, behind `count` others, of which each is answered by `answer`.
fn unnoticed(count: u32, answer: impl Fn(&mut Pair, u32, &Range<u32>)) -> Duration {
    let (mut pair, key) = reader();
    let mut first = 0;
    for number in 0..count {
        let read = ask(&mut pair, key, first, PACKETS);
        pass(&mut pair, ROUND_TRIP);
        answer(&mut pair, number, &read);
        first = read.end;
    }
    ask(&mut pair, key, first, PACKETS);
    let asked_at = pair.now;
    while !pass(&mut pair, Duration::from_micros(50)) {}
    pair.now.saturating_duration_since(asked_at)
}

/// A repeat may be answered as Linux's soft-RoCE does, by the middle of what was asked for first.
#[test]
fn what_was_lost_was_no_burst() {
    let noticed = unnoticed(40, |pair, number, read| {
        let last = read.end - 1;
        answer(pair, read.start..last, read);
        if number % 4 == 0 {
            assert!(pass(pair, Duration::from_millis(1)));
        }
        answer(pair, last..read.end, read);
    });
    assert!(noticed <= 2 * ROUND_TRIP, "{noticed:?}");
}

/// Whoever stood still says nothing of the path, and READs of one packet show that, too.
#[test]
fn a_standstill_is_forgotten() {
    for stands in [BURST, Duration::from_millis(400)] {
        let (mut pair, key) = reader();
        let mut first = 0;
        for number in 0..36 {
            let packets = if number == 1 { PACKETS } else { 1 };
            let read = ask(&mut pair, key, first, packets);
            pass(&mut pair, ROUND_TRIP);
            answer(&mut pair, read.start..read.start + 1, &read);
            if number == 1 {
                // Not looked at meanwhile.
                pair.now = pair.now + stands;
                answer(&mut pair, read.start + 1..read.end, &read);
            }
            first = read.end;
        }
        let read = ask(&mut pair, key, first, PACKETS);
        pass(&mut pair, ROUND_TRIP);
        answer(&mut pair, read.start..read.start + 1, &read);
        assert!(pass(&mut pair, 2 * ROUND_TRIP), "{stands:?}");
    }
}

/// Before the first answer there is no burst to wait for.
#[test]
fn a_request_that_is_lost_is_noticed_by_the_time_of_the_path() {
    let noticed = unnoticed(20, |pair, number, read| {
        assert_eq!(answer_in_bursts(pair, read, BURST), number == 0);
    });
    assert!(noticed <= 2 * ROUND_TRIP, "{noticed:?}");
}
