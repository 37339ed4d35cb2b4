//! Every kind of message, over clean and faulty wires.

mod common;

use std::time::Duration;

use common::{Lcg, Options, Pair, Wire, pattern, piece};
use millstream_roce::{
    AsyncEvent, Completion, CompletionOperation, CompletionStatus, QueuePairState, SendOperation,
};
use millstream_wire::{Mtu, Opcode, Packet};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;

const SEND: SendOperation = SendOperation::Send { immediate: None };

fn write(key: u32, offset: u64, immediate: Option<u32>) -> SendOperation {
    SendOperation::Write { remote_address: REMOTE + offset, remote_key: key, immediate }
}

fn read(key: u32, offset: u64) -> SendOperation {
    SendOperation::Read { remote_address: REMOTE + offset, remote_key: key }
}

fn second(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A wire that loses, doubles and damages one datagram in `one_in` each.
fn faulty(seed: u64, one_in: u32) -> Wire {
    let mut lcg = Lcg(seed);
    Box::new(move |_, datagram| {
        let mut damaged = datagram.to_vec();
        match lcg.below(one_in * 3) {
            0 => vec![],
            1 => vec![datagram.to_vec(), datagram.to_vec()],
            2 => {
                let bit = lcg.below(datagram.len() as u32 * 8);
                damaged[bit as usize / 8] ^= 1 << (bit % 8);
                vec![damaged]
            }
            _ => vec![damaged],
        }
    })
}

/// Lengths around every edge of a packet and of a READ chunk.
fn lengths(mtu: usize) -> Vec<usize> {
    let chunk = 32 * mtu;
    vec![
        0,
        1,
        2,
        3,
        4,
        5,
        mtu - 1,
        mtu,
        mtu + 1,
        2 * mtu,
        3 * mtu + 7,
        chunk - 1,
        chunk,
        chunk + 1,
        5 * chunk + 3,
    ]
}

#[test]
fn write_and_read_of_every_length_and_mtu() {
    let both = [false, true];
    for (mtu, split_writes) in Mtu::ALL.into_iter().flat_map(|mtu| both.map(|split| (mtu, split))) {
        for length in lengths(mtu.bytes()) {
            let mut pair = Pair::with(Options { mtu, split_writes, ..Options::default() });
            let data = pattern(length, 3);
            let source = pair.register(0, LOCAL, [&data[..], b"end"].concat());
            let target = pair.register(1, REMOTE, vec![0xaa; length + 2]);
            let back = pair.register(0, LOCAL * 2, vec![0; length + 1]);
            pair.post(0, 1, write(target, 1, None), &[piece(source, LOCAL, length)]);
            pair.post(0, 2, read(target, 1), &[piece(back, LOCAL * 2, length)]);
            pair.run(second(1));
            let ends: Vec<_> = pair.completions(0).iter().map(|c| (c.id, c.status)).collect();
            let ok = CompletionStatus::Success;
            assert_eq!(ends, [(1, ok), (2, ok)], "{mtu} {length}");
            assert_eq!(&pair.region(1, target)[1..=length], data, "{mtu} {length}");
            assert_eq!(pair.region(1, target)[0], 0xaa);
            assert_eq!(pair.region(1, target)[length + 1], 0xaa);
            assert_eq!(&pair.region(0, back)[..length], data, "{mtu} {length}");
            assert_eq!(pair.hosts[0].endpoint.counters().retransmissions, 0, "{mtu} {length}");
        }
    }
}

/// A request asks for a quarter of the largest window, within bounds: a small window is not overrun
/// by more than 16 packets, and a large one does not take a request for every 16.
#[test]
fn a_read_is_asked_for_in_chunks_that_fit_the_window() {
    // At small path MTUs a window has four times as many packets, and a request asks for as many more.
    let small = [(1, 16), (16, 16), (24, 24), (32, 32), (128, 128), (1024, 128)];
    let large = [(1, 16), (64, 16), (128, 32), (1024, 32)];
    let small = small.map(|(max_window, chunk)| (Mtu::B256, max_window, chunk));
    let large = large.map(|(max_window, chunk)| (Mtu::B4096, max_window, chunk));
    for (mtu, max_window, chunk) in small.into_iter().chain(large) {
        let mut pair = Pair::with(Options { mtu, max_window, ..Options::default() });
        let data = pattern(200 * mtu.bytes(), 4);
        let source = pair.register(1, REMOTE, data.clone());
        let target = pair.register(0, LOCAL, vec![0; data.len()]);
        pair.post(0, 1, read(source, 0), &[piece(target, LOCAL, data.len())]);
        pair.run(second(1));
        assert!(pair.region(0, target) == data, "{mtu} {max_window}");
        assert_eq!(pair.counters(0).packets_sent, 200_u64.div_ceil(chunk), "{mtu} {max_window}");
    }
}

#[test]
fn send_and_immediate_of_every_length() {
    for length in lengths(256) {
        let mut pair = Pair::new();
        let data = pattern(length, 5);
        let source = pair.register(0, LOCAL, [&data[..], b"end"].concat());
        let target = pair.register(1, REMOTE, vec![0; length + 9]);
        // Scattered over three pieces, one of them empty.
        let first = length / 3;
        let pieces = [
            piece(target, REMOTE + 4, first),
            piece(target, REMOTE, 0),
            piece(target, REMOTE + 4 + first as u64, length - first + 5),
        ];
        for id in 0..3 {
            pair.receive(1, 100 + id, &pieces);
        }
        let local = [piece(source, LOCAL, length)];
        pair.post(0, 1, SEND, &local);
        pair.post(0, 2, SendOperation::Send { immediate: Some(77) }, &local);
        pair.post(0, 3, write(target, 4, Some(0xdead_beef)), &local);
        pair.run(second(1));
        assert_eq!(pair.completions(0).len(), 3);
        assert_eq!(&pair.region(1, target)[4..4 + length], data);
        let qpn = pair.hosts[1].qpn;
        let expected = [
            (100, CompletionOperation::Receive, None),
            (101, CompletionOperation::Receive, Some(77)),
            (102, CompletionOperation::ReceiveWrite, Some(0xdead_beef)),
        ]
        .map(|(id, operation, immediate)| Completion {
            length: length as u32,
            immediate,
            ..Completion::new(id, qpn, CompletionStatus::Success, operation)
        });
        assert_eq!(pair.completions(1), expected);
    }
}

#[test]
fn exact_data_over_a_faulty_wire() {
    // Start PSN 0xfffff0: every run crosses the wrap.
    for seed in 0..60 {
        for one_in in [100, 10] {
            let split_writes = seed % 2 == 1;
            let options = Options { timeout: 14, split_writes, ..Options::default() };
            let mut pair = Pair::with(options);
            pair.wire = faulty(seed, one_in);
            let length = 40_000;
            let data = pattern(length, seed as u8);
            let source = pair.register(0, LOCAL, data.clone());
            let target = pair.register(1, REMOTE, vec![0; 3 * length]);
            let back = pair.register(0, LOCAL * 2, vec![0; length]);
            for id in 0..2 {
                let address = REMOTE + 2 * length as u64;
                pair.receive(1, id, &[piece(target, address, length)]);
            }
            let local = [piece(source, LOCAL, length)];
            pair.post(0, 1, write(target, 0, None), &local);
            pair.post(0, 2, read(target, 0), &[piece(back, LOCAL * 2, length)]);
            pair.post(0, 3, write(target, length as u64, Some(9)), &local);
            pair.post(0, 4, SEND, &local);
            pair.post(0, 5, read(target, 0), &[piece(back, LOCAL * 2, length)]);
            pair.run(second(100));
            let ends: Vec<_> = pair.completions(0).iter().map(|c| (c.id, c.status)).collect();
            let ok = CompletionStatus::Success;
            assert_eq!(ends, [1, 2, 3, 4, 5].map(|id| (id, ok)), "seed {seed} 1/{one_in}");
            assert_eq!(pair.completions(1).len(), 2, "seed {seed} 1/{one_in}");
            assert!(pair.region(1, target).chunks(length).all(|part| part == data), "seed {seed}");
            assert_eq!(pair.region(0, back), data, "seed {seed} 1/{one_in}");
        }
    }
}

#[test]
fn receiver_not_ready_waits_for_a_receive() {
    let mut pair = Pair::new();
    let source = pair.register(0, LOCAL, pattern(1000, 1));
    let target = pair.register(1, REMOTE, vec![0; 1000]);
    pair.post(0, 1, SEND, &[piece(source, LOCAL, 1000)]);
    while pair.hosts[0].endpoint.counters().rnr_naks_received < 3 {
        assert!(pair.step());
    }
    pair.receive(1, 2, &[piece(target, REMOTE, 1000)]);
    pair.run(second(1));
    assert_eq!(pair.completions(0)[0].status, CompletionStatus::Success);
    assert_eq!(pair.region(1, target), pattern(1000, 1));
    // The packets behind the refused one are no news: they get no NAK.
    assert_eq!(pair.hosts[1].endpoint.counters().naks_sent, 0);
}

#[test]
fn a_write_with_immediate_leaves_no_trace_before_a_receive_is_posted() {
    let mut pair = Pair::with(Options { rnr_retry: 2, ..Options::default() });
    let source = pair.register(0, LOCAL, pattern(100, 1));
    let target = pair.register(1, REMOTE, vec![0; 100]);
    pair.post(0, 1, write(target, 0, Some(1)), &[piece(source, LOCAL, 100)]);
    pair.run(second(1));
    assert_eq!(pair.completions(0)[0].status, CompletionStatus::ReceiverNotReadyExceeded);
    assert_eq!(pair.hosts[1].endpoint.counters().rnr_naks_sent, 3);
    assert_eq!(pair.region(1, target), [0; 100]);
}

#[test]
fn a_dead_peer_is_noticed_within_the_retry_budget() {
    let mut pair = Pair::with(Options { timeout: 14, retry_count: 3, ..Options::default() });
    pair.wire = Box::new(|_, _| vec![]);
    let source = pair.register(0, LOCAL, pattern(1000, 1));
    pair.post(0, 1, write(1, 0, None), &[piece(source, LOCAL, 1000)]);
    pair.post(0, 2, read(1, 0), &[piece(source, LOCAL, 1000)]);
    pair.run(second(1));
    // 4.096 us * 2^14 * (3 + 1)
    assert_eq!(pair.now.nanos(), (4096 << 14) * 4);
    let ends: Vec<_> = pair.completions(0).iter().map(|c| (c.id, c.status)).collect();
    assert_eq!(ends, [(1, CompletionStatus::RetryExceeded), (2, CompletionStatus::Flushed)]);
    assert_eq!(pair.state(0), QueuePairState::Error);
    let qpn = pair.hosts[0].qpn;
    let event = pair.hosts[0].endpoint.poll_event();
    assert_eq!(event, Some(AsyncEvent::QueuePairFatal(qpn)));
    // Posting goes on to be answered: flushed.
    pair.post(0, 3, SEND, &[piece(source, LOCAL, 1)]);
    pair.step();
    assert_eq!(pair.completions(0)[0].status, CompletionStatus::Flushed);
}

#[test]
fn lost_acknowledgements_are_made_up_for() {
    for lost in 0..5 {
        let mut pair = Pair::new();
        let mut count = 0;
        pair.wire = Box::new(move |to, datagram| {
            count += usize::from(to == 0);
            if to == 0 && count <= lost { vec![] } else { vec![datagram.to_vec()] }
        });
        let source = pair.register(0, LOCAL, pattern(10_000, 1));
        let target = pair.register(1, REMOTE, vec![0; 10_000]);
        pair.post(0, 1, write(target, 0, None), &[piece(source, LOCAL, 10_000)]);
        pair.run(second(1));
        assert_eq!(pair.completions(0)[0].status, CompletionStatus::Success);
        assert_eq!(pair.region(1, target), pattern(10_000, 1));
    }
}

#[test]
fn acknowledgements_are_coalesced() {
    let mut pair = Pair::new();
    let source = pair.register(0, LOCAL, vec![1; 64]);
    let target = pair.register(1, REMOTE, vec![0; 64]);
    for id in 0..50 {
        pair.post(0, id, write(target, 0, None), &[piece(source, LOCAL, 64)]);
    }
    pair.run(second(1));
    assert_eq!(pair.completions(0).len(), 50);
    assert_eq!(pair.hosts[1].endpoint.counters().acks_sent, 1);
}

#[test]
fn unsignaled_requests_complete_silently() {
    let mut pair = Pair::new();
    let source = pair.register(0, LOCAL, vec![1; 64]);
    let target = pair.register(1, REMOTE, vec![0; 64]);
    let pieces = [piece(source, LOCAL, 64)];
    let operation = write(target, 0, None);
    let request = millstream_roce::SendRequest {
        signaled: false,
        ..millstream_roce::SendRequest::new(1, operation, pieces)
    };
    let (now, qpn) = (pair.now, pair.hosts[0].qpn);
    pair.hosts[0].endpoint.post_send(now, qpn, &request).unwrap();
    pair.post(0, 2, operation, &pieces);
    pair.run(second(1));
    assert_eq!(pair.completions(0).iter().map(|c| c.id).collect::<Vec<_>>(), [2]);
    assert_eq!(pair.region(1, target), [1; 64]);
}

#[test]
fn local_memory_that_is_not_registered_fails_in_its_turn() {
    let mut pair = Pair::new();
    let source = pair.register(0, LOCAL, vec![1; 64]);
    let target = pair.register(1, REMOTE, vec![0; 64]);
    pair.post(0, 1, write(target, 0, None), &[piece(source, LOCAL, 64)]);
    pair.post(0, 2, write(target, 0, None), &[piece(source, LOCAL, 65)]);
    pair.post(0, 3, write(target, 0, None), &[piece(source, LOCAL, 64)]);
    pair.run(second(1));
    let ends: Vec<_> = pair.completions(0).iter().map(|c| (c.id, c.status)).collect();
    use CompletionStatus as S;
    assert_eq!(ends, [(1, S::Success), (2, S::LocalProtection), (3, S::Flushed)]);
}

#[test]
fn what_a_packet_looks_like() {
    let mut pair = Pair::new();
    let source = pair.register(0, LOCAL, pattern(600, 1));
    let target = pair.register(1, REMOTE, vec![0; 600]);
    let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let log = seen.clone();
    pair.wire = Box::new(move |_, datagram| {
        let packet = Packet::parse(datagram).unwrap();
        log.borrow_mut().push((
            packet.opcode,
            packet.bth.psn.value(),
            packet.payload.len(),
            packet.padding.len(),
            packet.bth.acknowledge_request,
        ));
        vec![datagram.to_vec()]
    });
    pair.post(0, 1, write(target, 0, None), &[piece(source, LOCAL, 599)]);
    pair.post(0, 2, read(target, 0), &[piece(source, LOCAL, 300)]);
    pair.run(second(1));
    use Opcode as O;
    assert_eq!(
        *seen.borrow(),
        [
            (O::RcWriteFirst, 0xff_fff0, 256, 0, true),
            (O::RcWriteMiddle, 0xff_fff1, 256, 0, false),
            (O::RcWriteLast, 0xff_fff2, 87, 1, true),
            (O::RcReadRequest, 0xff_fff3, 0, 0, true),
            (O::RcAcknowledge, 0xff_fff2, 0, 0, false),
            (O::RcReadResponseFirst, 0xff_fff3, 256, 0, false),
            (O::RcReadResponseLast, 0xff_fff4, 44, 0, false),
        ]
    );
}

#[test]
fn a_doubled_read_request_takes_nothing_from_the_next_read() {
    let mut pair = Pair::with(Options { depth: 1, ..Options::default() });
    let target = pair.register(1, REMOTE, pattern(64, 1));
    let back = pair.register(0, LOCAL, vec![0; 64]);
    let old = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let last = old.clone();
    // The network's copy of each READ request arrives together with the next one.
    pair.wire = Box::new(move |to, datagram| {
        let mut arriving = vec![];
        if to == 1 {
            arriving.extend(last.replace(vec![datagram.to_vec()]));
        }
        arriving.push(datagram.to_vec());
        arriving
    });
    for id in 0..3 {
        pair.post(0, id, read(target, 0), &[piece(back, LOCAL, 64)]);
    }
    pair.run(second(1));
    let completions = pair.completions(0);
    assert_eq!(completions.len(), 3);
    assert!(completions.iter().all(|c| c.status == CompletionStatus::Success), "{completions:?}");
}
