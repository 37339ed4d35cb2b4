//! Atomic operations: results, rights, and that each is done exactly once, whatever the wire does
//! (IBTA 9.4.5, 9.7.5.1.4).

mod common;

use std::time::Duration;

use common::forge::{Forge, nak};
use common::{Lcg, Options, Pair, pattern, piece};
use millstream_roce::{
    Access, AtomicOperation, CompletionOperation, CompletionStatus, Endpoint, EndpointConfig, Node,
    OwnedMemory, PostError, SendOperation, SendRequest, Transmit,
};
use millstream_wire::{AtomicEth, NakCode, Opcode, Packet, Psn, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const FIRST: u32 = 100;
const LENGTH: usize = 64;

fn pair_with(depth: u8) -> Pair {
    Pair::with(Options { psn: [FIRST, 200], timeout: 14, depth, ..Options::default() })
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn values(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

const fn fetch_add(remote_key: u32, remote_address: u64, add: u64) -> SendOperation {
    SendOperation::FetchAdd { remote_address, remote_key, add }
}

const fn compare_swap(remote_key: u32, compare: u64, swap: u64) -> SendOperation {
    SendOperation::CompareSwap { remote_address: REMOTE, remote_key, compare, swap }
}

#[test]
fn what_becomes_of_the_value_and_what_is_returned() {
    let swap = |compare, swap| SendOperation::CompareSwap {
        remote_address: REMOTE + 8,
        remote_key: 0,
        compare,
        swap,
    };
    let add = |add| fetch_add(0, REMOTE + 8, add);
    for (operation, before, after) in [
        (add(0), 5, 5),
        (add(1), 5, 6),
        (add(u64::MAX), 5, 4),
        (add(0x0102_0304_0506_0708), u64::MAX, 0x0102_0304_0506_0707),
        (swap(5, 9), 5, 9),
        (swap(6, 9), 5, 5),
        (swap(0x1122_3344_5566_7788, 0), 0x1122_3344_5566_7788, 0),
    ] {
        let mut pair = pair_with(4);
        let counters = pair.register(1, REMOTE, words(&[1, before, 3]));
        let result = pair.register(0, LOCAL, words(&[7; 3]));
        let operation = match operation {
            SendOperation::FetchAdd { remote_address, add, .. } => {
                fetch_add(counters, remote_address, add)
            }
            SendOperation::CompareSwap { remote_address, compare, swap, .. } => {
                let remote_key = counters;
                SendOperation::CompareSwap { remote_address, remote_key, compare, swap }
            }
            other => other,
        };
        pair.post(0, 1, operation, &[piece(result, LOCAL + 8, 8)]);
        pair.run(Duration::from_secs(1));
        let [done] = pair.completions(0)[..] else { panic!("one completion") };
        assert_eq!((done.status, done.length), (CompletionStatus::Success, 8));
        assert_eq!(done.operation, operation.completes_as());
        assert_eq!(values(pair.region(1, counters)), [1, after, 3], "{operation:?}");
        assert_eq!(values(pair.region(0, result)), [7, before, 7], "{operation:?}");
        // The peer's application hears nothing.
        assert_eq!(pair.completions(1), []);
    }
}

#[test]
fn completions_name_the_operation() {
    let (remote_address, remote_key) = (0, 0);
    use CompletionOperation as C;
    for (operation, expected) in [
        (
            SendOperation::CompareSwap { remote_address, remote_key, compare: 0, swap: 0 },
            C::CompareSwap,
        ),
        (SendOperation::FetchAdd { remote_address, remote_key, add: 0 }, C::FetchAdd),
        (SendOperation::Read { remote_address, remote_key }, C::Read),
    ] {
        assert_eq!(operation.completes_as(), expected);
    }
}

/// On the wire the numbers are big-endian, in the order of the AtomicETH (IBTA 9.3.4).
#[test]
fn the_request_on_the_wire() {
    let mut pair = pair_with(4);
    let result = pair.register(0, LOCAL, vec![0; 8]);
    pair.post(0, 1, compare_swap(0x55, 2, 3), &[piece(result, LOCAL, 8)]);
    pair.post(0, 2, fetch_add(0x66, REMOTE + 16, 9), &[piece(result, LOCAL, 8)]);
    let host = &mut pair.hosts[0];
    let mut seen = Vec::new();
    let mut transmit = Transmit::new();
    while host.endpoint.poll_transmit(pair.now, &mut transmit) {
        let mut datagram = Vec::new();
        assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
        let packet = Packet::parse(&datagram).unwrap();
        assert!(packet.bth.acknowledge_request && packet.payload.is_empty());
        seen.push((packet.opcode, packet.bth.psn, packet.extended.atomic.unwrap()));
    }
    let header = |virtual_address, remote_key, compare, swap_or_add| AtomicEth {
        virtual_address,
        remote_key,
        swap_or_add,
        compare,
    };
    let expected = [
        (Opcode::RcCompareSwap, Psn::new(FIRST), header(REMOTE, 0x55, 2, 3)),
        (Opcode::RcFetchAdd, Psn::new(FIRST + 1), header(REMOTE + 16, 0x66, 0, 9)),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn the_result_goes_into_pieces_of_eight_bytes_together() {
    let mut pair = pair_with(4);
    let counter = pair.register(1, REMOTE, words(&[0x0102_0304_0506_0708]));
    let result = pair.register(0, LOCAL, vec![0xee; 20]);
    let pieces = [piece(result, LOCAL + 1, 3), piece(result, LOCAL + 10, 5)];
    pair.post(0, 1, fetch_add(counter, REMOTE, 1), &pieces);
    pair.run(Duration::from_secs(1));
    assert_eq!(pair.completions(0)[0].status, CompletionStatus::Success);
    let mut expected = vec![0xee; 20];
    let original = 0x0102_0304_0506_0708_u64.to_ne_bytes();
    expected[1..4].copy_from_slice(&original[..3]);
    expected[10..15].copy_from_slice(&original[3..]);
    assert_eq!(pair.region(0, result), expected);
    // Anything but 8 bytes is refused, and an address that is not aligned; nothing is posted.
    let host = &mut pair.hosts[0];
    for address in [REMOTE + 1, REMOTE + 4, u64::MAX] {
        let pieces = [piece(result, LOCAL, 8)];
        let request = SendRequest::new(2, fetch_add(counter, address, 1), pieces);
        let refused = host.endpoint.post_send(pair.now, host.qpn, &request);
        assert_eq!(refused, Err(PostError::AtomicAlignment { address }));
    }
    for length in [0, 7, 9, 16] {
        let pieces = [piece(result, LOCAL, length)];
        let request = SendRequest::new(2, fetch_add(counter, REMOTE, 1), pieces);
        let host = &mut pair.hosts[0];
        let refused = host.endpoint.post_send(pair.now, host.qpn, &request);
        assert_eq!(refused, Err(PostError::AtomicLength { length: length as u64 }));
    }
    pair.run(Duration::from_secs(1));
    assert_eq!((pair.completions(0), pair.completions(1)), (vec![], vec![]));
}

#[test]
fn results_need_the_right_to_write_locally() {
    let mut pair = pair_with(4);
    let counter = pair.register(1, REMOTE, words(&[1]));
    let memory = pair.hosts[0].endpoint.memory_mut();
    let result = memory.register(common::DOMAIN, LOCAL, Access::empty(), vec![0; 8]).unwrap();
    pair.post(0, 1, fetch_add(counter, REMOTE, 1), &[piece(result, LOCAL, 8)]);
    pair.run(Duration::from_secs(1));
    assert_eq!(pair.completions(0)[0].status, CompletionStatus::LocalProtection);
    assert_eq!(values(pair.region(1, counter)), [1]);
}

#[test]
fn a_queue_pair_without_initiator_depth_has_no_atomics() {
    let mut pair = pair_with(0);
    let pieces = [piece(0, 0, 8)];
    for operation in [fetch_add(0, REMOTE, 1), compare_swap(0, 1, 2)] {
        let host = &mut pair.hosts[0];
        let request = SendRequest::new(1, operation, pieces);
        let refused = host.endpoint.post_send(pair.now, host.qpn, &request);
        assert_eq!(refused, Err(PostError::NoReads(host.qpn)));
    }
}

/// IBTA 9.4.5: a responder refuses an address that is not naturally aligned as an invalid request.
#[test]
fn addresses_that_are_not_aligned_and_bytes_outside() {
    let end = REMOTE + LENGTH as u64;
    for opcode in [Opcode::RcCompareSwap, Opcode::RcFetchAdd] {
        for (address, code) in [
            (REMOTE + 1, NakCode::InvalidRequest),
            (REMOTE + 4, NakCode::InvalidRequest),
            (REMOTE + 7, NakCode::InvalidRequest),
            (end - 4, NakCode::InvalidRequest),
            (u64::MAX, NakCode::InvalidRequest),
            (REMOTE - 8, NakCode::RemoteAccessError),
            (end, NakCode::RemoteAccessError),
            (0, NakCode::RemoteAccessError),
            (u64::MAX - 7, NakCode::RemoteAccessError),
        ] {
            let mut pair = pair_with(4);
            let key = pair.register(1, REMOTE, pattern(LENGTH, 1));
            Forge::new(&pair, 1, opcode, FIRST).atomic(address, key).inject(&mut pair);
            assert_eq!(pair.short_answers(1), [nak(FIRST, code)], "{address:#x}");
            assert_eq!(pair.region(1, key), pattern(LENGTH, 1), "{address:#x}");
        }
        // A region that begins or ends inside the 8 bytes.
        for (start, length) in [(REMOTE + 4, LENGTH), (REMOTE, 7), (REMOTE - 60, 64)] {
            let mut pair = pair_with(4);
            let key = pair.register(1, start, pattern(length, 1));
            Forge::new(&pair, 1, opcode, FIRST).atomic(REMOTE, key).inject(&mut pair);
            assert_eq!(pair.short_answers(1), [nak(FIRST, NakCode::RemoteAccessError)]);
            assert_eq!(pair.region(1, key), pattern(length, 1));
        }
    }
}

fn originals(pair: &mut Pair) -> Vec<(Opcode, u32, Option<u64>)> {
    pair.answers(1).iter().map(|answer| (answer.opcode, answer.psn, answer.original)).collect()
}

const ATOMIC_ACK: Opcode = Opcode::RcAtomicAcknowledge;

#[test]
fn a_repeat_is_answered_from_memory_and_not_done_again() {
    let mut pair = pair_with(3);
    let key = pair.register(1, REMOTE, words(&[10, 20]));
    let requests = [
        Forge::new(&pair, 1, Opcode::RcFetchAdd, FIRST).atomic_of(REMOTE, key, 0, 1),
        Forge::new(&pair, 1, Opcode::RcCompareSwap, FIRST + 1).atomic_of(REMOTE, key, 11, 50),
        Forge::new(&pair, 1, Opcode::RcFetchAdd, FIRST + 2).atomic_of(REMOTE + 8, key, 0, 5),
    ];
    let expected = [(ATOMIC_ACK, FIRST, Some(10)), (ATOMIC_ACK, FIRST + 1, Some(11))];
    requests[..2].iter().for_each(|request| request.inject(&mut pair));
    assert_eq!(originals(&mut pair), expected);
    for _ in 0..5 {
        for (request, answer) in requests.iter().zip(expected) {
            request.inject(&mut pair);
            assert_eq!(originals(&mut pair), [answer]);
        }
    }
    assert_eq!(values(pair.region(1, key)), [50, 20]);
    // Before the answer is out, a repeat adds none. The third goes on where the others ended.
    requests[2].inject(&mut pair);
    requests[2].inject(&mut pair);
    assert_eq!(originals(&mut pair), [(ATOMIC_ACK, FIRST + 2, Some(20))]);
    // The right may be gone, and the region: the answer is still the one from before.
    pair.hosts[1].endpoint.memory_mut().deregister(key).unwrap();
    requests.iter().for_each(|request| request.inject(&mut pair));
    let third = (ATOMIC_ACK, FIRST + 2, Some(20));
    assert_eq!(originals(&mut pair), [expected[0], expected[1], third]);
    assert_eq!(pair.counters(1).duplicates, 14);
}

#[test]
fn what_is_no_longer_remembered_or_is_another_operation_gets_no_answer() {
    let mut pair = pair_with(2);
    let key = pair.register(1, REMOTE, words(&[10, 20]));
    let add = |pair: &Pair, index| {
        Forge::new(pair, 1, Opcode::RcFetchAdd, FIRST + index).atomic_of(REMOTE, key, 0, 1)
    };
    for index in 0..3 {
        add(&pair, index).inject(&mut pair);
        assert_eq!(originals(&mut pair).len(), 1);
    }
    let other = |pair: &Pair, opcode, address, key, compare, add| {
        Forge::new(pair, 1, opcode, FIRST + 2).atomic_of(address, key, compare, add)
    };
    let fetch_add = Opcode::RcFetchAdd;
    let bad = [
        // Only two are remembered.
        add(&pair, 0),
        other(&pair, fetch_add, REMOTE + 8, key, 0, 1),
        other(&pair, fetch_add, REMOTE, key ^ 1, 0, 1),
        other(&pair, fetch_add, REMOTE, key, 0, 2),
        other(&pair, Opcode::RcCompareSwap, REMOTE, key, 0, 1),
        // A READ where an atomic operation was.
        Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST + 2).reth(REMOTE, key, 8),
    ];
    for request in bad {
        request.inject(&mut pair);
        assert_eq!(originals(&mut pair), []);
    }
    add(&pair, 1).inject(&mut pair);
    assert_eq!(originals(&mut pair), [(ATOMIC_ACK, FIRST + 1, Some(11))]);
    assert_eq!(values(pair.region(1, key)), [13, 20]);
}

/// An atomic operation where a READ was executed is not executed, and not answered.
#[test]
fn a_read_is_not_repeated_as_an_atomic_operation() {
    let mut pair = pair_with(4);
    let key = pair.register(1, REMOTE, words(&[10]));
    Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST).reth(REMOTE, key, 8).inject(&mut pair);
    assert_eq!(pair.answers(1).len(), 1);
    Forge::new(&pair, 1, Opcode::RcFetchAdd, FIRST).atomic(REMOTE, key).inject(&mut pair);
    assert_eq!(originals(&mut pair), []);
    assert_eq!(values(pair.region(1, key)), [10]);
}

#[test]
fn more_at_a_time_than_the_responder_resources() {
    let mut pair = pair_with(2);
    let key = pair.register(1, REMOTE, words(&[10]));
    Forge::new(&pair, 1, Opcode::RcFetchAdd, FIRST).atomic(REMOTE, key).inject(&mut pair);
    Forge::new(&pair, 1, Opcode::RcReadRequest, FIRST + 1).reth(REMOTE, key, 8).inject(&mut pair);
    Forge::new(&pair, 1, Opcode::RcFetchAdd, FIRST + 2).atomic(REMOTE, key).inject(&mut pair);
    let answers = pair.answers(1);
    let opcodes: Vec<_> = answers.iter().map(|answer| answer.opcode).collect();
    assert_eq!(opcodes, [ATOMIC_ACK, Opcode::RcReadResponseOnly, Opcode::RcAcknowledge]);
    assert_eq!(answers[2].syndrome, Some(Syndrome::Nak(NakCode::InvalidRequest)));
    assert_eq!(values(pair.region(1, key)), [11]);
}

/// Requests fill the responder's resources and no more, READs and atomic operations together.
#[test]
fn no_more_in_flight_than_the_initiator_depth() {
    let mut pair = pair_with(3);
    let result = pair.register(0, LOCAL, vec![0; 1024]);
    let read = SendOperation::Read { remote_address: REMOTE, remote_key: 5 };
    for id in 0..8 {
        let operation = if id % 2 == 0 { fetch_add(5, REMOTE, 1) } else { read };
        pair.post(0, id, operation, &[piece(result, LOCAL, 8)]);
    }
    assert_eq!(pair.answers(0).len(), 3);
    Forge::new(&pair, 0, ATOMIC_ACK, FIRST)
        .syndrome(Syndrome::ACK_UNLIMITED)
        .original(9)
        .inject(&mut pair);
    assert_eq!(pair.answers(0).len(), 1);
    assert_eq!(values(&pair.region(0, result)[..8]), [9]);
}

/// An acknowledgement of what follows says that the operation was done, but not with what result.
#[test]
fn an_acknowledgement_past_it_means_that_the_result_was_lost() {
    let mut pair = pair_with(4);
    let result = pair.register(0, LOCAL, vec![0; 8]);
    pair.post(0, 1, fetch_add(5, REMOTE, 1), &[piece(result, LOCAL, 8)]);
    pair.post(0, 2, SendOperation::Send { immediate: None }, &[]);
    assert_eq!(pair.answers(0).len(), 2);
    let acknowledge = Forge::new(&pair, 0, Opcode::RcAcknowledge, FIRST + 1);
    acknowledge.syndrome(Syndrome::ACK_UNLIMITED).inject(&mut pair);
    pair.poll(0);
    assert_eq!(pair.completions(0), []);
    let again: Vec<_> = pair.answers(0).iter().map(|answer| (answer.opcode, answer.psn)).collect();
    assert_eq!(again, [(Opcode::RcFetchAdd, FIRST), (Opcode::RcSendOnly, FIRST + 1)]);
}

/// Both ends add to the same two counters at the same time, over a bad wire: the sums are exact,
/// and every original value is seen once.
#[test]
fn counters_are_exact_over_a_faulty_wire() {
    const EACH: u64 = 60;
    for seed in 0..120 {
        let depth = [1, 2, 7, 128][seed as usize % 4];
        let mut pair = Pair::with(Options { timeout: 12, depth, ..Options::default() });
        let mut lcg = Lcg(seed);
        let one_in = [4, 10, 40][seed as usize % 3];
        let mut held: [Option<Vec<u8>>; 2] = [None, None];
        pair.wire = Box::new(move |to, datagram| {
            let datagram = datagram.to_vec();
            let mut out = match lcg.below(4 * one_in) {
                0 | 1 => vec![],
                2 => vec![datagram.clone(), datagram],
                3 => {
                    held[to].get_or_insert(datagram);
                    return vec![];
                }
                _ => vec![datagram],
            };
            if lcg.below(3) == 0 {
                out.extend(held[to].take());
            }
            out
        });
        let counters = [0, 1].map(|host| pair.register(host, REMOTE, words(&[0, 0])));
        let results = [0, 1].map(|host| pair.register(host, LOCAL, vec![0xff; 8 * EACH as usize]));
        for id in 0..EACH {
            for host in 0..2 {
                let key = counters[1 - host];
                let operation = fetch_add(key, REMOTE + id % 2 * 8, 1);
                pair.post(host, id, operation, &[piece(results[host], LOCAL + 8 * id, 8)]);
            }
        }
        pair.run(Duration::from_secs(60));
        for host in 0..2 {
            let done = pair.completions(host);
            assert_eq!(done.len() as u64, EACH, "seed {seed}");
            assert!(done.iter().all(|c| c.status == CompletionStatus::Success), "seed {seed}");
            assert_eq!(values(pair.region(host, counters[host])), [EACH / 2; 2], "seed {seed}");
            // In order, since one queue pair's requests are.
            let expected: Vec<_> = (0..EACH).map(|id| id / 2).collect();
            assert_eq!(values(pair.region(host, results[host])), expected, "seed {seed}");
        }
    }
}

#[test]
fn a_compare_and_swap_that_wins_is_told_so_once() {
    for seed in 0..60 {
        let mut pair = Pair::with(Options { timeout: 16, ..Options::default() });
        let mut lcg = Lcg(seed);
        pair.wire = Box::new(move |_, datagram| {
            let copies = [0, 1, 1, 2, 2, 3][lcg.below(6) as usize];
            vec![datagram.to_vec(); copies]
        });
        let lock = pair.register(1, REMOTE, words(&[0]));
        let results = pair.register(0, LOCAL, vec![0xff; 8 * 20]);
        for id in 0..20 {
            let operation = compare_swap(lock, id, id + 1);
            pair.post(0, id, operation, &[piece(results, LOCAL + 8 * id, 8)]);
        }
        pair.run(Duration::from_secs(60));
        // Done twice, one of them would find its own value and fail.
        let expected: Vec<_> = (0..20).collect();
        assert_eq!(values(pair.region(0, results)), expected, "seed {seed}");
        assert_eq!(values(pair.region(1, lock)), [20], "seed {seed}");
    }
}

#[test]
fn the_operations_as_arithmetic() {
    let swap = AtomicOperation::CompareSwap { compare: 3, swap: 4 };
    assert_eq!([swap.apply(3), swap.apply(4), swap.apply(5)], [4, 4, 5]);
    assert_eq!(AtomicOperation::FetchAdd { add: 2 }.apply(u64::MAX), 1);
}

/// What a switch is: a memory that has no atomic operations.
#[test]
fn a_memory_without_atomic_operations_refuses_them() {
    use millstream_roce::{
        AccessDenied, AccessKind, Destination, Memory, Piece, ProtectionDomainId, RemoteAccess,
    };
    struct Plain(OwnedMemory);
    impl Memory for Plain {
        fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied> {
            self.0.authorize(access)
        }
        fn write(&mut self, to: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
            self.0.write(to, payload)
        }
        fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied> {
            self.0.bytes(piece)
        }
        fn check_local(
            &self,
            domain: ProtectionDomainId,
            piece: &Piece,
            write: bool,
        ) -> Result<(), AccessDenied> {
            self.0.check_local(domain, piece, write)
        }
    }
    let address = std::net::IpAddr::from([10, 0, 0, 1]);
    let mut endpoint = Endpoint::new(EndpointConfig::new(address, 1), Plain(OwnedMemory::new(1)));
    let access = RemoteAccess {
        qpn: millstream_wire::Qpn::new(2),
        domain: common::DOMAIN,
        kind: AccessKind::Atomic,
        key: 0,
        address: 0,
        length: 8,
    };
    let refused = endpoint.memory_mut().atomic(&access, AtomicOperation::FetchAdd { add: 1 });
    assert_eq!(refused, Err(AccessDenied::InvalidRequest));
}
