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

fn pass(pair: &mut Pair, time: Duration) {
    pair.now = pair.now + time;
    pair.hosts[0].endpoint.handle_timeout(pair.now);
}

fn answer(pair: &mut Pair, numbers: Range<u32>, read: &Range<u32>) {
    for number in numbers {
        let data = [number as u8; MTU];
        Forge::read_answer(pair, number, read.clone()).payload(&data).inject(pair);
    }
}

/// One READ after the other whose answers come in two bursts. Returns which of them was asked for twice.
fn asked_twice(reads: u32, second_burst: impl Fn(u32) -> Duration) -> Vec<u32> {
    let mut pair = Pair::with(Options { psn: [0, 200], timeout: 14, ..Options::default() });
    let key = pair.register(0, LOCAL, vec![0; PACKETS as usize * MTU]);
    let operation = SendOperation::Read { remote_address: REMOTE, remote_key: 7 };
    let mut twice = Vec::new();
    for number in 0..reads {
        let read = number * PACKETS..(number + 1) * PACKETS;
        pair.post(0, 1, operation, &[piece(key, LOCAL, PACKETS as usize * MTU)]);
        let asked: Vec<_> = pair.answers(0).iter().map(|it| (it.opcode, it.psn)).collect();
        assert_eq!(asked, [(Opcode::RcReadRequest, read.start)]);
        pass(&mut pair, ROUND_TRIP);
        answer(&mut pair, read.start..read.start + 2, &read);
        pass(&mut pair, second_burst(number));
        if !pair.answers(0).is_empty() {
            twice.push(number);
        }
        answer(&mut pair, read.start + 2..read.end, &read);
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
        0 | 30 => BURST,
        _ => ROUND_TRIP,
    };
    assert_eq!(asked_twice(31, times), [0, 30]);
}
