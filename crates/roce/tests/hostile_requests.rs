//! Requests that break the protocol or ask for memory that was not given: the NAK that the
//! specification wants (IBTA 9.7.5.2, table 58), the queue pair in error, no byte touched.

mod common;

use common::forge::{Forge, ack, nak};
use common::{DOMAIN, Options, Pair, everything, pattern, piece};
use millstream_roce::{
    Access, AsyncEvent, CompletionStatus, ProtectionDomainId, QueuePairState, SendOperation,
};
use millstream_wire::{NakCode, Opcode, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const FIRST: u32 = 100;
const LENGTH: usize = 1024;
const MTU: usize = 256;

fn pair_with(access: Access) -> Pair {
    Pair::with(Options { psn: [FIRST, 200], access, ..Options::default() })
}

fn forge(pair: &Pair, opcode: Opcode, index: u32) -> Forge {
    Forge::new(pair, 1, opcode, FIRST + index)
}

/// Sends `packets` to host 1; all but the last must be accepted in silence, and the last one
/// refused with `code`, with nothing else changed.
fn refused(mut pair: Pair, keys: &[u32], packets: &[Forge], code: NakCode, what: &str) {
    let (last, accepted) = packets.split_last().unwrap();
    for packet in accepted {
        packet.inject(&mut pair);
    }
    assert_eq!(pair.answers(1), [], "{what}");
    let mut before = pair.snapshot(1, keys);
    last.inject(&mut pair);
    assert_eq!(pair.short_answers(1), [nak(last.bth.psn.value(), code)], "{what}");
    before.queue_pair = QueuePairState::Error;
    assert_eq!(pair.snapshot(1, keys), before, "{what}");
    let qpn = pair.hosts[1].qpn;
    let event = pair.hosts[1].endpoint.poll_event();
    let expected = match code {
        NakCode::RemoteAccessError => AsyncEvent::QueuePairAccessError(qpn),
        NakCode::InvalidRequest => AsyncEvent::QueuePairRequestError(qpn),
        _ => AsyncEvent::QueuePairFatal(qpn),
    };
    assert_eq!(event, Some(expected), "{what}");
    // Nothing follows: the queue pair is closed.
    last.inject(&mut pair);
    assert_eq!(pair.answers(1), [], "{what}");
    assert_eq!(pair.snapshot(1, keys), before, "{what}");
}

/// WRITE and READ requests for these bytes of a key, and an atomic one for the first 8.
fn each(pair: &Pair, address: u64, key: u32, length: u32) -> [Forge; 3] {
    let payload = vec![0xee; (length as usize).min(MTU)];
    let write = if length as usize <= MTU { Opcode::RcWriteOnly } else { Opcode::RcWriteFirst };
    [
        forge(pair, write, 0).reth(address, key, length).payload(&payload),
        forge(pair, Opcode::RcReadRequest, 0).reth(address, key, length),
        forge(pair, Opcode::RcFetchAdd, 0).atomic(address, key),
    ]
}

#[test]
fn outside_the_region() {
    let end = REMOTE + LENGTH as u64;
    for (address, length) in [
        (REMOTE - 1, 1),
        (REMOTE - 1, 2),
        (end, 1),
        (end - 1, 2),
        (REMOTE, LENGTH as u32 + 1),
        (REMOTE - 1, LENGTH as u32),
        (REMOTE + 1, LENGTH as u32),
        (REMOTE, 1 << 30),
        (0, 1),
        (u64::MAX, 1),
        (u64::MAX, 2),
        (u64::MAX - 3, 8),
        (u64::MAX - 254, 1 << 20),
    ] {
        for which in 0..2 {
            let mut pair = pair_with(everything());
            let below = pair.register(1, REMOTE - 4096, pattern(4096, 1));
            let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
            let above = pair.register(1, end, pattern(4096, 3));
            let packet = each(&pair, address, key, length)[which].clone();
            let what = format!("{address:#x} {length} {which}");
            refused(pair, &[below, key, above], &[packet], NakCode::RemoteAccessError, &what);
        }
    }
}

#[test]
fn the_edges_of_the_region_are_inside() {
    for (address, length) in
        [(REMOTE, 1), (REMOTE + LENGTH as u64 - 1, 1), (REMOTE, 256), (REMOTE + 768, 256)]
    {
        let mut pair = pair_with(everything());
        let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
        let [write, ..] = each(&pair, address, key, length);
        write.acknowledge_request().inject(&mut pair);
        assert_eq!(pair.short_answers(1), [ack(FIRST)]);
        let start = (address - REMOTE) as usize;
        let mut expected = pattern(LENGTH, 2);
        expected[start..start + length as usize].fill(0xee);
        assert_eq!(pair.region(1, key), expected);
    }
}

#[test]
fn keys_that_open_nothing() {
    type Spoil = fn(&mut Pair, u32) -> u32;
    let table: [(&str, Spoil); 7] = [
        ("zero", |_, _| 0),
        ("all ones", |_, _| u32::MAX),
        ("another generation", |_, key| key ^ 1),
        ("another index", |_, key| key.wrapping_add(0x700)),
        ("deregistered", |pair, key| {
            pair.hosts[1].endpoint.memory_mut().deregister(key).unwrap();
            key
        }),
        ("deregistered and registered again", |pair, key| {
            let bytes = pair.hosts[1].endpoint.memory_mut().deregister(key).unwrap();
            let new = pair.register(1, REMOTE, bytes);
            assert_ne!(new, key);
            key
        }),
        ("of another protection domain", |pair, _| {
            let memory = pair.hosts[1].endpoint.memory_mut();
            let domain = ProtectionDomainId(DOMAIN.0 + 1);
            memory.register(domain, REMOTE, everything(), pattern(LENGTH, 9)).unwrap()
        }),
    ];
    for (what, spoil) in table {
        for which in 0..3 {
            let mut pair = pair_with(everything());
            let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
            let spoiled = spoil(&mut pair, key);
            let packet = each(&pair, REMOTE, spoiled, 64)[which].clone();
            let keys = [key, key ^ 3, spoiled];
            refused(pair, &keys, &[packet], NakCode::RemoteAccessError, what);
        }
    }
}

#[test]
fn rights_that_were_not_given() {
    let all = everything();
    let local = Access::LOCAL_WRITE;
    for (queue_pair, region, which) in [
        (all, local | Access::REMOTE_READ, 0),
        (all, local, 0),
        (all, Access::empty(), 0),
        (all, local | Access::REMOTE_WRITE, 1),
        (all, Access::empty(), 1),
        (all - Access::REMOTE_WRITE, all, 0),
        (all - Access::REMOTE_READ, all, 1),
        (Access::empty(), all, 0),
        (Access::empty(), all, 1),
        (all, all - Access::REMOTE_ATOMIC, 2),
        (all, Access::empty(), 2),
        (all - Access::REMOTE_ATOMIC, all, 2),
        (Access::empty(), all, 2),
    ] {
        for length in [64, 1024] {
            let mut pair = pair_with(queue_pair);
            let memory = pair.hosts[1].endpoint.memory_mut();
            let key = memory.register(DOMAIN, REMOTE, region, pattern(LENGTH, 2)).unwrap();
            let packet = each(&pair, REMOTE, key, length)[which].clone();
            let what = format!("{queue_pair:?} {region:?} {which}");
            refused(pair, &[key], &[packet], NakCode::RemoteAccessError, &what);
        }
    }
}

/// Everything that a RETH, the packets' lengths and their order can contradict.
#[test]
fn malformed_sequences() {
    use Opcode as O;
    let mtu = MTU as u32;
    // Opcode, DMA length where there is a RETH, payload. The last packet is the bad one.
    type Row = &'static [(Opcode, u32, usize)];
    let table: &[(&str, Row)] = &[
        ("WRITE First shorter than the path MTU", &[(O::RcWriteFirst, 600, 255)]),
        ("WRITE First of nothing", &[(O::RcWriteFirst, 600, 0)]),
        ("WRITE First longer than the path MTU", &[(O::RcWriteFirst, 600, 257)]),
        ("WRITE First that is the whole message", &[(O::RcWriteFirst, 256, 256)]),
        ("WRITE First of an empty message", &[(O::RcWriteFirst, 0, 256)]),
        ("WRITE Only longer than the path MTU", &[(O::RcWriteOnly, 257, 257)]),
        ("WRITE Only longer than any path MTU but one", &[(O::RcWriteOnly, 1024, 1024)]),
        ("WRITE Only with a longer DMA length", &[(O::RcWriteOnly, 100, 99)]),
        ("WRITE Only with a shorter DMA length", &[(O::RcWriteOnly, 99, 100)]),
        ("WRITE Only with a DMA length and nothing", &[(O::RcWriteOnly, 4, 0)]),
        ("WRITE Only without DMA length", &[(O::RcWriteOnly, 0, 4)]),
        ("WRITE of more than a message may have", &[(O::RcWriteFirst, u32::MAX, 256)]),
        ("WRITE of 2 GiB", &[(O::RcWriteFirst, 1 << 31, 256)]),
        ("WRITE Middle without First", &[(O::RcWriteMiddle, 0, 256)]),
        ("WRITE Last without First", &[(O::RcWriteLast, 0, 4)]),
        ("WRITE Last with immediate without First", &[(O::RcWriteLastWithImmediate, 0, 4)]),
        (
            "too many Middles",
            &[(O::RcWriteFirst, 600, 256), (O::RcWriteMiddle, 0, 256), (O::RcWriteMiddle, 0, 256)],
        ),
        ("a Middle that is the last", &[(O::RcWriteFirst, 512, 256), (O::RcWriteMiddle, 0, 256)]),
        ("Last too early", &[(O::RcWriteFirst, 600, 256), (O::RcWriteLast, 0, 88)]),
        ("Last too long", &[(O::RcWriteFirst, 300, 256), (O::RcWriteLast, 0, 45)]),
        ("Last too short", &[(O::RcWriteFirst, 300, 256), (O::RcWriteLast, 0, 43)]),
        ("Last of nothing", &[(O::RcWriteFirst, 300, 256), (O::RcWriteLast, 0, 0)]),
        ("Last beyond the path MTU", &[(O::RcWriteFirst, 556, 256), (O::RcWriteLast, 0, 300)]),
        ("Middle too short", &[(O::RcWriteFirst, 600, 256), (O::RcWriteMiddle, 0, 255)]),
        ("SEND Middle without First", &[(O::RcSendMiddle, 0, 256)]),
        ("SEND Last without First", &[(O::RcSendLast, 0, 4)]),
        ("SEND Middle in a WRITE", &[(O::RcWriteFirst, 600, 256), (O::RcSendMiddle, 0, 256)]),
        ("SEND Last in a WRITE", &[(O::RcWriteFirst, 300, 256), (O::RcSendLast, 0, 44)]),
        ("SEND in a WRITE", &[(O::RcWriteFirst, 600, 256), (O::RcSendOnly, 0, 4)]),
        ("WRITE in a WRITE", &[(O::RcWriteFirst, 600, 256), (O::RcWriteOnly, 4, 4)]),
        ("READ in a WRITE", &[(O::RcWriteFirst, 600, 256), (O::RcReadRequest, 4, 0)]),
        ("First in a WRITE", &[(O::RcWriteFirst, 600, 256), (O::RcWriteFirst, 600, 256)]),
        ("READ with payload", &[(O::RcReadRequest, 4, 4)]),
        ("READ of 2 GiB", &[(O::RcReadRequest, 1 << 31, 0)]),
        ("READ of 4 GiB - 1", &[(O::RcReadRequest, u32::MAX, 0)]),
        ("READ of more than a message may have", &[(O::RcReadRequest, (1 << 30) + 1, 0)]),
        ("compare and swap with payload", &[(O::RcCompareSwap, 0, 4)]),
        ("fetch and add with payload", &[(O::RcFetchAdd, 0, 8)]),
        ("compare and swap in a WRITE", &[(O::RcWriteFirst, 600, 256), (O::RcCompareSwap, 0, 0)]),
        ("fetch and add in a WRITE", &[(O::RcWriteFirst, 600, 256), (O::RcFetchAdd, 0, 0)]),
    ];
    assert_eq!(mtu, 256);
    for (what, row) in table {
        let mut pair = pair_with(everything());
        let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
        let packets: Vec<_> = row
            .iter()
            .zip(0..)
            .map(|(&(opcode, length, payload), index)| {
                let packet = forge(&pair, opcode, index).payload(&vec![0xee; payload]);
                match opcode {
                    _ if opcode.has_reth() => packet.reth(REMOTE, key, length),
                    _ if opcode.has_atomic() => packet.atomic(REMOTE, key),
                    _ => packet,
                }
            })
            .collect();
        refused(pair, &[key], &packets, NakCode::InvalidRequest, what);
    }
}

/// What contradicts itself is malformed, wherever it points to: the memory is not even asked.
#[test]
fn malformed_comes_before_denied() {
    for (opcode, length, payload) in [
        (Opcode::RcWriteOnly, 5, 4),
        (Opcode::RcWriteFirst, 100, 256),
        (Opcode::RcReadRequest, 4, 4),
    ] {
        let pair = pair_with(everything());
        let packet = forge(&pair, opcode, 0).reth(REMOTE, 0, length).payload(&vec![1; payload]);
        refused(pair, &[], &[packet], NakCode::InvalidRequest, &format!("{opcode:?}"));
    }
}

/// However large the receive: lengths in completions are 32 bits.
#[test]
fn a_send_longer_than_a_message_may_be() {
    let options = Options { psn: [FIRST, 200], max_message_length: 600, ..Options::default() };
    let mut pair = Pair::with(options);
    let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
    pair.receive(1, 7, &[piece(key, REMOTE, LENGTH)]);
    let rows = [Opcode::RcSendFirst, Opcode::RcSendMiddle, Opcode::RcSendMiddle];
    for (opcode, index) in rows.into_iter().zip(0..) {
        forge(&pair, opcode, index).payload(&[0xee; 256]).inject(&mut pair);
    }
    assert_eq!(pair.short_answers(1), [nak(FIRST + 2, NakCode::InvalidRequest)]);
    pair.poll(1);
    assert_eq!(pair.completions(1)[0].status, CompletionStatus::LocalLength);
    assert_eq!(pair.region(1, key)[512..], pattern(LENGTH, 2)[512..]);
}

#[test]
fn malformed_sends_end_the_posted_receive_in_error() {
    use Opcode as O;
    type Row = &'static [(Opcode, usize)];
    let table: &[(&str, Row)] = &[
        ("First too short", &[(O::RcSendFirst, 255)]),
        ("Only too long for the path", &[(O::RcSendOnly, 257)]),
        ("Middle too short", &[(O::RcSendFirst, 256), (O::RcSendMiddle, 0)]),
        ("Last of nothing", &[(O::RcSendFirst, 256), (O::RcSendLast, 0)]),
        ("SEND in a SEND", &[(O::RcSendFirst, 256), (O::RcSendOnly, 4)]),
        ("First in a SEND", &[(O::RcSendFirst, 256), (O::RcSendFirst, 256)]),
        ("WRITE Middle in a SEND", &[(O::RcSendFirst, 256), (O::RcWriteMiddle, 256)]),
        (
            "WRITE Last with immediate in a SEND",
            &[(O::RcSendFirst, 256), (O::RcWriteLastWithImmediate, 4)],
        ),
    ];
    for (what, row) in table {
        let mut pair = pair_with(everything());
        let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
        pair.receive(1, 7, &[piece(key, REMOTE, 600)]);
        pair.receive(1, 8, &[piece(key, REMOTE, 600)]);
        for (&(opcode, payload), index) in row.iter().zip(0..) {
            forge(&pair, opcode, index).payload(&vec![0xee; payload]).inject(&mut pair);
        }
        let psn = FIRST + row.len() as u32 - 1;
        assert_eq!(pair.short_answers(1), [nak(psn, NakCode::InvalidRequest)], "{what}");
        assert_eq!(pair.state(1), QueuePairState::Error, "{what}");
        pair.poll(1);
        let ends: Vec<_> = pair.completions(1).iter().map(|c| (c.id, c.status)).collect();
        let flushed = CompletionStatus::Flushed;
        assert_eq!(ends, [(7, flushed), (8, flushed)], "{what}");
        // What the bad packet held went nowhere.
        assert_eq!(pair.region(1, key)[256..], pattern(LENGTH, 2)[256..], "{what}");
    }
}

#[test]
fn a_message_longer_than_the_receive() {
    for (posted, sent) in [(0, 1), (100, 101), (256, 257), (300, 400), (600, 1000)] {
        let mut pair = pair_with(everything());
        let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
        let source = pair.register(0, LOCAL, vec![0xee; sent]);
        pair.receive(1, 7, &[piece(key, REMOTE, posted)]);
        pair.receive(1, 8, &[piece(key, REMOTE, LENGTH)]);
        let send = SendOperation::Send { immediate: None };
        pair.post(0, 1, send, &[piece(source, LOCAL, sent)]);
        pair.run(std::time::Duration::from_secs(1));
        let ends = |pair: &mut Pair, host| -> Vec<_> {
            pair.completions(host).iter().map(|c| (c.id, c.status)).collect()
        };
        use CompletionStatus as S;
        assert_eq!(ends(&mut pair, 1), [(7, S::LocalLength), (8, S::Flushed)]);
        assert_eq!(ends(&mut pair, 0), [(1, S::RemoteInvalidRequest)]);
        assert_eq!(pair.region(1, key)[posted..], pattern(LENGTH, 2)[posted..], "{posted} {sent}");
    }
}

#[test]
fn receives_into_memory_that_is_not_ours_to_write() {
    for case in 0..3 {
        let mut pair = pair_with(everything());
        let memory = pair.hosts[1].endpoint.memory_mut();
        let key = match case {
            0 => memory.register(DOMAIN, REMOTE, Access::empty(), pattern(LENGTH, 2)).unwrap(),
            1 => {
                let other = ProtectionDomainId(DOMAIN.0 + 1);
                memory.register(other, REMOTE, everything(), pattern(LENGTH, 2)).unwrap()
            }
            // One byte too far.
            _ => memory.register(DOMAIN, REMOTE - 1, everything(), pattern(64, 2)).unwrap(),
        };
        pair.receive(1, 7, &[piece(key, REMOTE, 64)]);
        let before = pair.region(1, key).to_vec();
        forge(&pair, Opcode::RcSendOnly, 0).payload(&[0xee; 64]).inject(&mut pair);
        // Not the requester's fault (IBTA 9.9.3.1: local error of the responder).
        let expected = [nak(FIRST, NakCode::RemoteOperationalError)];
        assert_eq!(pair.short_answers(1), expected, "{case}");
        pair.poll(1);
        let status = pair.completions(1)[0].status;
        assert_eq!(status, CompletionStatus::LocalProtection, "{case}");
        assert_eq!(pair.region(1, key), before, "{case}");
    }
}

#[test]
fn reads_beyond_the_responder_resources() {
    let mut pair = Pair::with(Options { psn: [FIRST, 200], depth: 2, ..Options::default() });
    let key = pair.register(1, REMOTE, pattern(LENGTH, 2));
    for index in 0..3 {
        forge(&pair, Opcode::RcReadRequest, index).reth(REMOTE, key, 64).inject(&mut pair);
    }
    let answers = pair.answers(1);
    let opcodes: Vec<_> = answers.iter().map(|a| (a.opcode, a.psn)).collect();
    use Opcode as O;
    let expected = [
        (O::RcReadResponseOnly, FIRST),
        (O::RcReadResponseOnly, FIRST + 1),
        (O::RcAcknowledge, FIRST + 2),
    ];
    assert_eq!(opcodes, expected);
    assert_eq!(answers[2].syndrome, Some(Syndrome::Nak(NakCode::InvalidRequest)));
}

#[test]
fn reads_of_nothing_need_no_key() {
    let mut pair = pair_with(everything());
    forge(&pair, Opcode::RcReadRequest, 0).reth(0, 0, 0).inject(&mut pair);
    forge(&pair, Opcode::RcWriteOnly, 1).reth(u64::MAX, 5, 0).inject(&mut pair);
    forge(&pair, Opcode::RcSendOnly, 2).inject(&mut pair);
    let answers = pair.answers(1);
    assert_eq!((answers[0].opcode, answers[0].payload), (Opcode::RcReadResponseOnly, 0));
    // The SEND found no receive; the packets before it are implied.
    assert_eq!(answers[1].psn, FIRST + 2);
    assert!(matches!(answers[1].syndrome, Some(Syndrome::ReceiverNotReady { .. })));
    assert_eq!(answers.len(), 2);
    assert_eq!(pair.state(1), QueuePairState::ReadyToSend);
}
