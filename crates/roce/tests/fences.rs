//! Fenced requests wait for the READs and atomic operations before them (IBTA 10.8.3.3).

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use common::forge::Forge;
use common::operations::{REMOTE, SEND, fetch_add, read, write};
use common::{Lcg, Options, Pair, pattern, piece};
use millstream_roce::{CompletionStatus, Piece, SendOperation, SendRequest};
use millstream_wire::{Opcode, Packet, Psn, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const FIRST: u32 = 100;

fn compare_swap(remote_key: u32) -> SendOperation {
    SendOperation::CompareSwap { remote_address: REMOTE, remote_key, compare: 0, swap: 1 }
}

fn post(pair: &mut Pair, id: u64, operation: SendOperation, local: Piece, fence: bool) {
    let pieces = [local];
    let request = SendRequest { fence, ..SendRequest::new(id, operation, pieces) };
    let host = &mut pair.hosts[0];
    host.endpoint.post_send(pair.now, host.qpn, &request).unwrap();
}

fn pair() -> Pair {
    Pair::with(Options { psn: [FIRST, 200], timeout: 14, ..Options::default() })
}

/// The opcodes that go out now.
fn sent(pair: &mut Pair) -> Vec<Opcode> {
    pair.answers(0).iter().map(|answer| answer.opcode).collect()
}

#[test]
fn a_fenced_request_goes_out_when_the_data_is_there() {
    for (before, answer) in [
        (read(5), Opcode::RcReadResponseOnly),
        (fetch_add(5), Opcode::RcAtomicAcknowledge),
        (compare_swap(5), Opcode::RcAtomicAcknowledge),
    ] {
        for (after, opcode) in [
            (SEND, Opcode::RcSendOnly),
            (write(5), Opcode::RcWriteOnly),
            (read(5), Opcode::RcReadRequest),
            (fetch_add(5), Opcode::RcFetchAdd),
        ] {
            for fence in [true, false] {
                let what = format!("{before:?} {after:?} {fence}");
                let mut pair = pair();
                let key = pair.register(0, LOCAL, vec![0; 16]);
                post(&mut pair, 1, before, piece(key, LOCAL, 8), false);
                post(&mut pair, 2, after, piece(key, LOCAL + 8, 8), fence);
                assert_eq!(sent(&mut pair).len(), if fence { 1 } else { 2 }, "{what}");
                let mut forge =
                    Forge::new(&pair, 0, answer, FIRST).syndrome(Syndrome::ACK_UNLIMITED);
                if answer == Opcode::RcReadResponseOnly {
                    forge = forge.payload(&[1; 8]);
                }
                // An acknowledgement alone is not the data.
                let acknowledge = Forge::new(&pair, 0, Opcode::RcAcknowledge, FIRST);
                if fence {
                    acknowledge.syndrome(Syndrome::ACK_UNLIMITED).inject(&mut pair);
                    assert!(!sent(&mut pair).contains(&opcode) || before == after, "{what}");
                }
                forge.inject(&mut pair);
                let rest = sent(&mut pair);
                assert_eq!(rest, if fence { vec![opcode] } else { vec![] }, "{what}");
            }
        }
    }
}

#[test]
fn only_reads_and_atomic_operations_before_it_are_waited_for() {
    let mut pair = pair();
    let key = pair.register(0, LOCAL, vec![0; 16]);
    post(&mut pair, 1, SEND, piece(key, LOCAL, 8), false);
    post(&mut pair, 2, write(5), piece(key, LOCAL, 8), true);
    post(&mut pair, 3, SEND, piece(key, LOCAL, 8), true);
    post(&mut pair, 4, read(5), piece(key, LOCAL, 8), true);
    use Opcode as O;
    assert_eq!(sent(&mut pair), [O::RcSendOnly, O::RcWriteOnly, O::RcSendOnly, O::RcReadRequest]);
    // What follows a fenced request waits with it: a queue is in order.
    post(&mut pair, 5, SEND, piece(key, LOCAL, 8), true);
    post(&mut pair, 6, SEND, piece(key, LOCAL, 8), false);
    assert_eq!(sent(&mut pair), []);
    let answer = Forge::new(&pair, 0, O::RcReadResponseOnly, FIRST + 3).payload(&[1; 8]);
    answer.syndrome(Syndrome::ACK_UNLIMITED).inject(&mut pair);
    assert_eq!(sent(&mut pair), [O::RcSendOnly, O::RcSendOnly]);
}

/// A READ of many packets counts to its last.
#[test]
fn all_of_a_long_read_is_waited_for() {
    let mut pair = pair();
    let source = pair.register(1, REMOTE, pattern(256 * 50, 1));
    let target = pair.register(0, LOCAL, vec![0; 256 * 50]);
    let seen = Rc::new(RefCell::new(Vec::new()));
    let log = seen.clone();
    pair.wire = Box::new(move |to, datagram| {
        let packet = Packet::parse(datagram).unwrap();
        log.borrow_mut().push((to, packet.opcode, packet.bth.psn));
        vec![datagram.to_vec()]
    });
    post(&mut pair, 1, read(source), piece(target, LOCAL, 256 * 50), false);
    post(&mut pair, 2, write(source), piece(target, LOCAL, 0), true);
    pair.run(Duration::from_secs(1));
    let seen = seen.borrow();
    let last = (0, Opcode::RcReadResponseLast, Psn::new(FIRST + 49));
    let at = |wanted| seen.iter().position(|&entry| entry == wanted).unwrap();
    assert!(at(last) < at((1, Opcode::RcWriteOnly, Psn::new(FIRST + 50))));
    assert_eq!(pair.completions(0).len(), 2);
}

/// What fences are for: what was read is passed on, what was read may be overwritten.
#[test]
fn what_was_read_is_passed_on_whatever_the_wire_does() {
    const LENGTH: usize = 256 * 5 + 3;
    for seed in 0..100 {
        let mut pair = Pair::with(Options { timeout: 14, ..Options::default() });
        let mut lcg = Lcg(seed);
        pair.wire = Box::new(move |_, datagram| {
            let copies = [0, 1, 1, 1, 1, 1, 1, 1, 1, 2][lcg.below(10) as usize];
            vec![datagram.to_vec(); copies]
        });
        let source = pair.register(1, REMOTE, pattern(LENGTH, 1));
        let here = pair.register(0, LOCAL, vec![0; LENGTH]);
        let zeros = pair.register(0, LOCAL * 2, vec![0; LENGTH]);
        let counter = pair.register(1, REMOTE * 2, 7_u64.to_ne_bytes().to_vec());
        let original = pair.register(0, LOCAL * 3, vec![0; 8]);
        let target = pair.register(1, REMOTE * 3, vec![0; LENGTH + 8]);
        for id in 0..2 {
            let (at, length) = [(0, LENGTH), (LENGTH as u64, 8)][id as usize];
            pair.receive(1, id, &[piece(target, REMOTE * 3 + at, length)]);
        }
        let add =
            SendOperation::FetchAdd { remote_address: REMOTE * 2, remote_key: counter, add: 1 };
        post(&mut pair, 1, read(source), piece(here, LOCAL, LENGTH), false);
        post(&mut pair, 2, write(source), piece(zeros, LOCAL * 2, LENGTH), true);
        post(&mut pair, 3, add, piece(original, LOCAL * 3, 8), false);
        post(&mut pair, 4, SEND, piece(here, LOCAL, LENGTH), false);
        post(&mut pair, 5, SEND, piece(original, LOCAL * 3, 8), true);
        pair.run(Duration::from_secs(60));
        let done = pair.completions(0);
        assert!(done.iter().map(|c| c.id).eq(1..=5), "seed {seed}: {done:?}");
        assert!(done.iter().all(|c| c.status == CompletionStatus::Success), "seed {seed}");
        let expected = [pattern(LENGTH, 1), 7_u64.to_ne_bytes().to_vec()].concat();
        assert_eq!(pair.region(1, target), expected, "seed {seed}");
        assert_eq!(pair.region(1, source), vec![0; LENGTH], "seed {seed}");
    }
}
