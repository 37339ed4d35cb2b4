//! Small cases, all of them: every start of the PSN around its wrap with small windows; every loss,
//! every pair of losses, every doubling, every swap of neighbours in a short exchange.

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use common::{Options, Pair, Wire, pattern, piece};
use millstream_roce::{CompletionStatus, SendOperation};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
/// Five packets, five, and three, of 256 bytes.
const WRITE: usize = 4 * 256 + 100;
const READ: usize = 4 * 256 + 3;
const SEND: usize = 2 * 256 + 1;

fn options() -> Options {
    Options { timeout: 14, ..Options::default() }
}

const START: u64 = 0x1122_3344_5566_7788;

/// Posts a WRITE, a READ, a fetch-and-add, a SEND, a compare-and-swap and one more fetch-and-add,
/// runs to the end, and checks every byte and completion: no atomic operation is done twice.
fn exchange(options: Options, wire: Wire, what: &str) -> Pair {
    let mut pair = Pair::with(options);
    pair.wire = wire;
    let source = pair.register(0, LOCAL, pattern(WRITE + SEND, 1));
    let readable = pair.register(1, REMOTE, pattern(READ, 2));
    let target = pair.register(1, REMOTE * 2, vec![0; WRITE + SEND + 1]);
    let back = pair.register(0, LOCAL * 2, vec![0; READ + 1]);
    let counter = pair.register(1, REMOTE * 3, START.to_ne_bytes().to_vec());
    let originals = pair.register(0, LOCAL * 3, vec![0; 24]);
    pair.receive(1, 9, &[piece(target, REMOTE * 2 + WRITE as u64, SEND)]);
    let write =
        SendOperation::Write { remote_address: REMOTE * 2, remote_key: target, immediate: None };
    let read = SendOperation::Read { remote_address: REMOTE, remote_key: readable };
    let send = SendOperation::Send { immediate: None };
    pair.post(0, 1, write, &[piece(source, LOCAL, WRITE)]);
    pair.post(0, 2, read, &[piece(back, LOCAL * 2, READ)]);
    let (remote_address, remote_key) = (REMOTE * 3, counter);
    let add = |add| SendOperation::FetchAdd { remote_address, remote_key, add };
    let (compare, swap) = (START + 5, 77);
    let compare_swap = SendOperation::CompareSwap { remote_address, remote_key, compare, swap };
    let original = |index: u64| piece(originals, LOCAL * 3 + 8 * index, 8);
    pair.post(0, 3, add(5), &[original(0)]);
    pair.post(0, 4, send, &[piece(source, LOCAL + WRITE as u64, SEND)]);
    pair.post(0, 5, compare_swap, &[original(1)]);
    pair.post(0, 6, add(1), &[original(2)]);
    pair.run(Duration::from_secs(10));
    let ok = CompletionStatus::Success;
    let ends: Vec<_> = pair.completions(0).iter().map(|c| (c.id, c.status)).collect();
    assert_eq!(ends, [1, 2, 3, 4, 5, 6].map(|id| (id, ok)), "{what}");
    assert_eq!(pair.region(1, counter), 78_u64.to_ne_bytes(), "{what}");
    assert_eq!(pair.region(0, originals), [START, START + 5, 77].map(u64::to_ne_bytes).concat());
    let received: Vec<_> = pair.completions(1).iter().map(|c| (c.id, c.status, c.length)).collect();
    assert_eq!(received, [(9, ok, SEND as u32)], "{what}");
    let sent = [&pattern(WRITE + SEND, 1)[..], &[0]].concat();
    assert_eq!(pair.region(1, target), sent, "{what}");
    let read = [&pattern(READ, 2)[..], &[0]].concat();
    assert_eq!(pair.region(0, back), read, "{what}");
    pair
}

fn clean() -> Wire {
    Box::new(|_, datagram| vec![datagram.to_vec()])
}

/// Does to the datagram with each number, from 0, what `act` says.
fn numbered(mut act: impl FnMut(usize, usize, &[u8]) -> Vec<Vec<u8>> + 'static) -> Wire {
    let mut count = 0;
    Box::new(move |to, datagram| {
        count += 1;
        act(count - 1, to, datagram)
    })
}

/// How many datagrams the exchange takes without faults.
fn datagrams() -> usize {
    let count = Rc::new(RefCell::new(0));
    let counted = count.clone();
    let wire = numbered(move |_, _, datagram| {
        *counted.borrow_mut() += 1;
        vec![datagram.to_vec()]
    });
    exchange(options(), wire, "clean");
    let count = *count.borrow();
    assert!(count >= 20, "5 + 1 + 5 + 2 + 3 + 2 + 2 and at least one acknowledgement: {count}");
    count
}

#[test]
fn every_start_around_the_wrap_with_small_windows() {
    for start in (1 << 24) - 20..(1 << 24) + 20 {
        for max_window in [1, 2, 3, 5, 32] {
            let psn = [start & 0xff_ffff, (start + 7) & 0xff_ffff];
            let what = format!("{start:#x} {max_window}");
            let pair = exchange(Options { psn, max_window, ..options() }, clean(), &what);
            assert_eq!(pair.counters(0).retransmissions, 0, "{what}");
            assert_eq!(pair.counters(1).out_of_sequence, 0, "{what}");
            // And with every seventh datagram lost.
            let wire = numbered(|i, _, d| if i % 7 == 3 { vec![] } else { vec![d.to_vec()] });
            exchange(Options { psn, max_window, ..options() }, wire, &what);
        }
    }
}

#[test]
fn every_start_around_the_middle_of_the_circle() {
    for start in (1 << 23) - 20..(1 << 23) + 20 {
        let psn = [start, start];
        exchange(Options { psn, ..options() }, clean(), &format!("{start:#x}"));
    }
}

#[test]
fn every_loss_and_every_pair_of_losses() {
    // Retransmissions count on: a pair's second loss may hit one of them.
    let count = datagrams() + 8;
    for first in 0..count {
        for second in first..count {
            let wire =
                numbered(
                    move |i, _, datagram| {
                        if i == first || i == second { vec![] } else { vec![datagram.to_vec()] }
                    },
                );
            exchange(options(), wire, &format!("lost {first} and {second}"));
        }
    }
}

#[test]
fn every_doubling() {
    let count = datagrams();
    for doubled in 0..count {
        for copies in [2, 3, 20] {
            let wire = numbered(move |i, _, datagram| {
                vec![datagram.to_vec(); if i == doubled { copies } else { 1 }]
            });
            exchange(options(), wire, &format!("{doubled} times {copies}"));
        }
    }
}

#[test]
fn every_swap_of_neighbours() {
    let count = datagrams();
    for swapped in 0..count {
        let mut held: [Option<Vec<u8>>; 2] = [None, None];
        let wire = numbered(move |i, to, datagram| {
            if i == swapped {
                held[to] = Some(datagram.to_vec());
                return vec![];
            }
            // The one held back comes behind the next to the same host.
            [Some(datagram.to_vec()), held[to].take()].into_iter().flatten().collect()
        });
        exchange(options(), wire, &format!("swapped {swapped}"));
    }
}

/// A copy of each datagram arrives `delay` datagrams to the same host later, for all delays: long
/// after the exchange has moved on.
#[test]
fn every_late_copy() {
    let count = datagrams();
    for late in 0..count {
        for delay in 1..count {
            let mut held = None;
            let wire = numbered(move |i, to, datagram| {
                if i == late {
                    held = Some((to, delay, datagram.to_vec()));
                }
                let mut out = vec![datagram.to_vec()];
                if let Some((host, left, _)) = &mut held
                    && *host == to
                {
                    *left -= 1;
                    if *left == 0
                        && let Some((_, _, copy)) = held.take()
                    {
                        out.push(copy);
                    }
                }
                out
            });
            exchange(options(), wire, &format!("copy of {late} after {delay}"));
        }
    }
}
