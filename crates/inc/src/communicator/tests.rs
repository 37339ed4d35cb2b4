//! One node by itself: what comes on its ports, and what it posts on them.

mod above;
mod first_calls;
mod overdue;
mod plain;

use core::net::{IpAddr, Ipv4Addr};
use core::ops::Range;

use millstream_wire::{Mtu, Psn};

use super::*;
use crate::spec::ChildSpec;

/// Two packets of 256 bytes, or 128 elements. 52 elements fit a packet behind the descriptor.
const SEGMENT_BYTES: u32 = 512;

fn child(ranks: Range<u32>, is_switch: bool) -> ChildSpec {
    let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let ranks = [ranks].into_iter().collect();
    ChildSpec { ranks, address, qpn: Qpn::new(5), psn: Psn::new(0), is_switch, receive_share: None }
}

fn host(rank: u32) -> ChildSpec {
    child(rank..rank + 1, false)
}

fn node_of(world: u32, children: Vec<ChildSpec>, has_parent: bool) -> Communicator {
    let spec = CommunicatorSpec {
        id: 1,
        path_mtu: Mtu::B256,
        segment_bytes: SEGMENT_BYTES,
        window: 2,
        world,
        children,
        has_parent,
        options: crate::CommunicatorOptions::default(),
    };
    spec.check().unwrap();
    Communicator::new(&spec, Slots::of(&spec), 1, (0..).map(ProtectionDomainId))
}

/// A root with ranks 0 and 1.
fn root() -> Communicator {
    node_of(2, vec![host(0), host(1)], false)
}

fn call(sequence: u64, count: u64) -> Descriptor {
    Descriptor {
        sequence,
        stripe: crate::Stripe::WHOLE,
        collective: Collective::AllReduce,
        operation: ReduceOperation::Sum,
        data_type: DataType::Int32,
        root: 0,
        count,
        mode: Mode::Write,
        destination_address: 0x7000,
        destination_key: 7,
    }
}

/// A descriptor of a child arrives, with a vector behind it. Whether there is something to send then.
fn announce(
    node: &mut Communicator,
    child: usize,
    descriptor: &Descriptor,
    vector: &[u8],
) -> Result<bool, Violation> {
    let [piece] = node.receive_request(child, 0).pieces;
    let message = [&descriptor.to_bytes()[..], vector].concat();
    let _ = node.store(child, piece.address, &message).unwrap();
    node.announce(child, 0, message.len()).map(|progress| progress == Progress::Ready)
}

/// A WRITE of a child arrives.
fn write(node: &mut Communicator, child: usize, address: u64, key: u32, payload: &[u8]) {
    node.authorize(child, address, key, payload.len() as u32).unwrap();
    for packet in payload.chunks(256) {
        let _ = node.contribute(child, packet).unwrap();
    }
}

/// All that is to be posted on a port now.
fn sends(node: &mut Communicator, port: usize) -> Vec<SendRequest> {
    core::iter::from_fn(|| node.next_send(port)).collect()
}

/// The other end has all of this.
fn deliver(node: &mut Communicator, requests: &[SendRequest]) {
    for request in requests {
        let (tag, port) = Tag::from_id(request.id);
        let _ = node.delivered(port, tag);
    }
}

/// What a SEND says.
fn note(request: &SendRequest) -> Option<Answer> {
    match request.operation {
        SendOperation::Send { immediate } => immediate.and_then(Answer::from_immediate),
        _ => None,
    }
}

const QUESTION: SendOperation =
    SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };

#[test]
fn ids_of_work_requests_say_what_and_where() {
    let tags = [Tag::Result, Tag::Cell, Tag::Agreed, Tag::Abort, Tag::Up, Tag::Probe];
    let receives = (0..RECEIVES_PER_CHILD).map(|buffer| Tag::Receive { buffer });
    for tag in tags.into_iter().chain(receives) {
        for port in [0, 1, 64] {
            assert_eq!(Tag::from_id(tag.id(port)), (tag, port));
        }
    }
}

#[test]
fn a_result_goes_by_cells_to_where_the_bytes_of_the_segment_came_with() {
    let mut node = root();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 128), &[]).unwrap();
    }
    for port in 0..2 {
        let agreed = sends(&mut node, port);
        assert_eq!(agreed.iter().map(note).collect::<Vec<_>>(), [Some(Answer::agreed(0))]);
        assert!(agreed[0].solicited, "who waits for events is woken");
    }
    write(&mut node, 0, 0x5000, 50, &[1; 256]);
    assert_eq!(sends(&mut node, 0), []);
    write(&mut node, 1, 0x6000, 60, &[1; 256]);
    let sent = |node: &mut Communicator, port: usize| {
        let requests = sends(node, port);
        let [SendRequest { id, operation, pieces: [piece], solicited, .. }] = requests[..] else {
            panic!("{requests:?}");
        };
        (Tag::from_id(id), operation, piece.length, solicited)
    };
    let to = |remote_address, remote_key, immediate: Option<Answer>| SendOperation::Write {
        remote_address,
        remote_key,
        immediate: immediate.map(Answer::to_immediate),
    };
    let first = ((Tag::Cell, 0), to(0x5000, 50, None), 256, false);
    assert_eq!(sent(&mut node, 0), first, "as soon as both have sent a packet");
    write(&mut node, 0, 0x9999, 99, &[1; 256]);
    write(&mut node, 1, 0x9999, 99, &[1; 256]);
    // Who waits for events is woken by the last part, and not before.
    let last = Some(Answer::result(0));
    assert_eq!(sent(&mut node, 0), ((Tag::Result, 0), to(0x5100, 50, last), 256, true));
    assert_eq!(sent(&mut node, 1), ((Tag::Result, 1), to(0x6000, 60, last), 512, true));
    assert_eq!(node.statistics().bytes, 4 * 256);
}

#[test]
fn where_others_send_the_bytes_a_result_goes_to_where_the_descriptor_says() {
    let mut node = root();
    let broadcast = Descriptor { collective: Collective::Broadcast, ..call(0, 128) };
    for port in 0..2 {
        announce(&mut node, port, &broadcast, &[]).unwrap();
        let _ = sends(&mut node, port);
    }
    let _ = node.credit(1, Answer::credit(1)).unwrap();
    write(&mut node, 0, 0x5000, 50, &[1; 512]);
    for port in 0..2 {
        let operation = sends(&mut node, port).pop().map(|request| request.operation);
        let immediate = Some(Answer::result(0).to_immediate());
        let wanted = SendOperation::Write { remote_address: 0x7000, remote_key: 7, immediate };
        assert_eq!(operation, Some(wanted));
    }
}

/// A node with one host, and packets that are longer than a descriptor.
fn of_one_host() -> Communicator {
    let spec = CommunicatorSpec {
        id: 1,
        path_mtu: Mtu::B1024,
        segment_bytes: 128 << 10,
        window: 1,
        world: 1,
        children: vec![host(0)],
        has_parent: false,
        options: crate::CommunicatorOptions::default(),
    };
    Communicator::new(&spec, Slots::of(&spec), 1, (0..).map(ProtectionDomainId))
}

#[test]
fn a_cell_is_a_small_part_of_a_vector_in_whole_packets() {
    let node = of_one_host();
    for (bytes, cell) in [
        (0, 1024),
        (32 * 1024, 1024),
        (32 * 1025, 2048),
        (32 * 4096, 4096),
        (32 * (64 << 10), 64 << 10),
        (1 << 48, 64 << 10),
    ] {
        assert_eq!(node.cell_for(bytes), cell, "{bytes}");
    }
    // No longer than a segment.
    assert_eq!(root().cell_for(1 << 30), SEGMENT_BYTES);
}

#[test]
fn a_root_or_a_length_that_the_world_has_not_is_refused() {
    for (descriptor, wrong) in [
        (Descriptor { root: 1, ..call(0, 100) }, None),
        (Descriptor { root: 2, ..call(0, 100) }, Some(Violation::Root)),
        (Descriptor { root: u32::MAX, ..call(0, 100) }, Some(Violation::Root)),
        // Within the limit alone, and beyond it with the other rank's part.
        (Descriptor { collective: Collective::AllGather, ..call(0, 1 << 45) }, None),
        (
            Descriptor { collective: Collective::AllGather, ..call(0, (1 << 45) + 1) },
            Some(Violation::Count),
        ),
        (Descriptor { collective: Collective::AllReduce, ..call(0, (1 << 45) + 1) }, None),
        // Beyond it alone.
        (call(0, (1 << 46) + 1), Some(Violation::Count)),
        (call(0, u64::MAX), Some(Violation::Count)),
    ] {
        let outcome = announce(&mut root(), 0, &descriptor, &[]);
        assert_eq!(outcome, wrong.map_or(Ok(false), Err), "{descriptor:?}");
    }
}

#[test]
fn a_call_is_early_while_the_one_before_is_not_over() {
    // Vectors without segments: the answer to the descriptor is all that there is.
    let mut node = root();
    announce(&mut node, 0, &call(0, 1), &[1; 4]).unwrap();
    assert_eq!(announce(&mut node, 0, &call(1, 1), &[1; 4]), Err(Violation::Early), "agreed on");
    let mut node = root();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 1), &[1; 4]).unwrap();
    }
    let _ = sends(&mut node, 1);
    assert_eq!(announce(&mut node, 1, &call(1, 1), &[1; 4]), Ok(false));
    assert_eq!(announce(&mut node, 0, &call(1, 1), &[1; 4]), Err(Violation::Early), "answered");
}

#[test]
fn who_is_to_send_does_not_write() {
    let mut node = root();
    let descriptor = Descriptor { mode: Mode::Send, ..call(0, 128) };
    announce(&mut node, 0, &descriptor, &[]).unwrap();
    assert!(node.authorize(0, 0x5000, 50, 256).is_err());
    let abort = Abort::Violation { rank: 0, violation: Violation::Unannounced };
    assert_eq!(node.aborted(), Some(abort));
}

#[test]
fn who_has_nothing_for_segments_says_so_of_those_and_within_the_window() {
    // Three segments, which are of rank 0; the window is of two.
    let broadcast = Descriptor { collective: Collective::Broadcast, ..call(0, 384) };
    for (port, end, outcome) in [
        (1, 0, Err(Violation::Window)),
        (1, 1, Ok(())),
        (1, 2, Ok(())),
        (1, 3, Err(Violation::Window)),
        (0, 1, Err(Violation::Length)),
    ] {
        let mut node = root();
        for port in 0..2 {
            announce(&mut node, port, &broadcast, &[]).unwrap();
        }
        assert_eq!(node.credit(port, Answer::credit(end)).map(|_| ()), outcome, "{port}, {end}");
    }
    let mut node = root();
    for port in 0..2 {
        announce(&mut node, port, &Descriptor { count: 128, ..broadcast }, &[]).unwrap();
    }
    assert_eq!(node.credit(1, Answer::credit(2)), Err(Violation::Length), "there is one segment");
}

#[test]
fn packets_of_a_segment_that_is_sent_have_the_length_of_packets_but_for_the_last() {
    // One segment of 512 bytes and one of 288.
    for (packets, right) in [
        (&[256, 256, 256, 32][..], true),
        (&[255][..], false),
        (&[1], false),
        (&[257], false),
        (&[256, 255], false),
        (&[256, 256, 256, 31], false),
        (&[256, 256, 256, 33], false),
        (&[256, 256, 256, 256], false),
    ] {
        let mut node = root();
        let descriptor = Descriptor { mode: Mode::Send, ..call(0, 200) };
        announce(&mut node, 0, &descriptor, &[]).unwrap();
        let [piece] = node.receive_request(0, 0).pieces;
        let (last, before) = packets.split_last().unwrap();
        for (number, &length) in before.iter().enumerate() {
            assert!(node.store(0, piece.address, &vec![1; length]).is_ok(), "{packets:?}");
            if number == 1 {
                assert_eq!(node.end_segment(0), Ok(Progress::None), "the first segment");
            }
        }
        assert_eq!(node.store(0, piece.address, &vec![1; *last]).is_ok(), right, "{packets:?}");
        let abort = Abort::Violation { rank: 0, violation: Violation::Length };
        assert_eq!(node.aborted(), (!right).then_some(abort), "{packets:?}");
    }
}

#[test]
fn a_send_ends_with_its_segment() {
    // A segment of one packet, of two with another one behind it, and of two that are all.
    for (count, packets) in [(64, 1), (200, 2), (128, 2)] {
        for more in [1, 4, 256] {
            let mut node = root();
            let descriptor = Descriptor { mode: Mode::Send, ..call(0, count) };
            announce(&mut node, 0, &descriptor, &[]).unwrap();
            let [piece] = node.receive_request(0, 0).pieces;
            for _ in 0..packets {
                assert!(node.store(0, piece.address, &[1; 256]).is_ok());
            }
            assert!(node.is_segment(0));
            assert!(node.store(0, piece.address, &vec![1; more]).is_err(), "{count}, {more}");
            let abort = Abort::Violation { rank: 0, violation: Violation::Length };
            assert_eq!(node.aborted(), Some(abort), "{count}, {more}");
        }
    }
}

#[test]
fn a_queue_that_was_full_goes_on_when_there_is_room() {
    let mut node = root();
    let mut posted = 0;
    // Agreements that nobody acknowledges.
    for sequence in 0.. {
        for port in 0..2 {
            announce(&mut node, port, &call(sequence, 1), &[1; 4]).unwrap();
        }
        let _ = sends(&mut node, 1);
        let Some(request) = node.next_send(0) else { break };
        assert_eq!(note(&request), Some(Answer::agreed(sequence)));
        posted += 1;
        // Of the other child they are.
        assert_eq!(node.delivered(1, Tag::Agreed), Progress::None);
    }
    assert_eq!(posted, node.send_limit);
    assert_eq!(node.delivered(0, Tag::Agreed), Progress::Ready);
    assert_eq!(sends(&mut node, 0).len(), 1);
    assert_eq!(node.delivered(0, Tag::Agreed), Progress::Ready);
    assert_eq!(node.delivered(0, Tag::Agreed), Progress::None);
}

#[test]
fn who_has_a_receive_for_a_result_is_not_told_by_a_message() {
    for (agreed, other) in [(0, 1), (1, 0)] {
        let mut node = root();
        for port in 0..2 {
            let descriptor = Descriptor { mode: Mode::Send, ..call(0, 100) };
            announce(&mut node, port, &descriptor, &[]).unwrap();
        }
        // The next message to one is a result, to the other it is still the agreement.
        let _ = sends(&mut node, agreed);
        assert!(!node.closes_silently(agreed), "nothing has happened");
        assert_eq!(node.abort(Abort::Requested { code: 1 }), Progress::Ready);
        assert!(node.closes_silently(agreed));
        assert!(!node.closes_silently(agreed), "once");
        assert_eq!(sends(&mut node, agreed), []);
        assert!(!node.closes_silently(other));
        let told = sends(&mut node, other);
        assert_eq!(told.iter().map(note).collect::<Vec<_>>(), [Some(Answer::Aborted)]);
        assert!(!node.closes_silently(other));
    }
}

#[test]
fn nothing_is_awaited_of_who_is_gone_or_after_an_abort() {
    let mut node = root();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 100), &[]).unwrap();
        let _ = sends(&mut node, port);
    }
    assert!(node.awaits(0) && node.awaits(1));
    node.end(1);
    assert!(node.awaits(0) && !node.awaits(1));
    let _ = node.abort(Abort::PeerLost { rank: 1 });
    assert!(!node.awaits(0));
    // What still comes is counted, and no more than that.
    for packets in 1..=2 {
        assert_eq!(node.contribute(0, &[1; 256]).ok(), Some(Progress::None));
        assert_eq!(node.statistics().discarded_bytes, packets * 256);
    }
}

#[test]
fn a_message_that_is_longer_than_any_descriptor_is_left_out_beyond_its_place() {
    let mut node = of_one_host();
    let before = node.control.clone();
    let [piece] = node.receive_request(0, RECEIVES_PER_CHILD - 1).pieces;
    for packet in 1..u64::from(piece.length) / 1024 {
        let address = piece.address + packet * 1024;
        assert_eq!(node.store(0, address, &[1; 1024]).ok(), Some(Progress::None), "{packet}");
    }
    assert_eq!(node.control, before);
}

#[test]
fn an_abort_and_who_is_awaited_are_said_from_places_of_their_own() {
    let mut node = root();
    let start = node.note_start();
    let _ = node.abort(Abort::Requested { code: 1 });
    let [SendRequest { pieces: [piece], .. }] = sends(&mut node, 0)[..] else { panic!() };
    assert_eq!(piece.address, CONTROL_BASE + (start + ABORT_BYTES) as u64);
}

/// Who only owes data is asked whether it lives. Told that it is awaited, it would ask its ranks for ever.
#[test]
fn a_switch_below_is_told_that_it_is_awaited_only_if_somebody_has_called() {
    let mut node = node_of(3, vec![child(0..2, true), host(2)], false);
    assert!(!node.awaits(0));
    for port in 0..2 {
        announce(&mut node, port, &call(0, 100), &[]).unwrap();
        let requests = sends(&mut node, port);
        deliver(&mut node, &requests);
    }
    for _ in 0..2 {
        assert!(node.awaits(0), "it owes its segment");
        let request = node.probe(0).unwrap();
        assert_eq!((request.operation, note(&request)), (QUESTION, None));
        assert_eq!(node.probe(0), None, "what is under way asks that already");
        deliver(&mut node, &[request]);
    }
    for port in 0..2 {
        write(&mut node, port, 0, 0, &[1; 400]);
    }
    for port in 0..2 {
        let requests = sends(&mut node, port);
        deliver(&mut node, &requests);
        assert!(!node.awaits(port));
    }
    // Now somebody has.
    announce(&mut node, 1, &call(1, 100), &[]).unwrap();
    assert!(node.awaits(0));
    let request = node.probe(0).unwrap();
    assert_eq!(note(&request), Some(Answer::awaited(1)));
    deliver(&mut node, &[request]);
    // The host that owes its data is asked by nothing but a WRITE.
    assert!(node.awaits(1));
    assert_eq!(node.probe(1).map(|request| request.operation), Some(QUESTION));
}
