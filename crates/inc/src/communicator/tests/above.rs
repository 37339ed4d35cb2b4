//! The port to the switch above.

use super::*;
use crate::descriptor::DESCRIPTOR_BYTES;

/// A node with ranks 0 and 1 of 4, and a way up that is not open yet. The way up is port 2.
fn closed() -> Communicator {
    node_of(4, vec![host(0), host(1)], true)
}

const UP: usize = 2;

/// The same, with a call of so many elements that both ranks have announced, and that went up.
fn announced(descriptor: &Descriptor) -> Communicator {
    let mut node = closed();
    node.connected();
    for port in 0..2 {
        announce(&mut node, port, descriptor, &[]).unwrap();
    }
    assert_eq!(sends(&mut node, UP).len(), 1);
    node
}

/// And that the switch above has agreed to.
fn agreed(descriptor: &Descriptor) -> Communicator {
    let mut node = announced(descriptor);
    assert_eq!(answer(&mut node, Answer::agreed(0), false, 0), Progress::Ready);
    (0..2).for_each(|port| assert_eq!(sends(&mut node, port).len(), 1));
    node
}

/// And that both ranks have sent all bytes of.
fn contributed(descriptor: &Descriptor) -> Communicator {
    let mut node = agreed(descriptor);
    for port in 0..2 {
        let bytes = descriptor.bytes().unwrap() as usize;
        for segment in vec![1; bytes].chunks(SEGMENT_BYTES as usize) {
            write(&mut node, port, 0x5000, 50, segment);
        }
    }
    node
}

fn answer(node: &mut Communicator, answer: Answer, write: bool, length: u32) -> Progress {
    node.answered(Some(answer.to_immediate()), write, length)
}

#[test]
fn nothing_goes_up_before_the_way_is_open() {
    let mut node = closed();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 1), &[port as u8 + 1, 0, 0, 0]).unwrap();
    }
    assert_eq!(sends(&mut node, UP), []);
    assert!(!node.awaits(UP));
    node.connected();
    assert!(node.awaits(UP));
    let requests = sends(&mut node, UP);
    let [request] = &requests[..] else { panic!("{requests:?}") };
    let bytes = node.bytes(&request.pieces[0]).unwrap();
    let destination = Descriptor { destination_address: 0, destination_key: 0, ..call(0, 1) };
    assert_eq!(bytes, [&destination.to_bytes()[..], &[3, 0, 0, 0]].concat());
    // It is a sign of life itself.
    assert_eq!(node.probe(UP), None);
    deliver(&mut node, &requests);
    assert_eq!(node.probe(UP).map(|request| request.operation), Some(QUESTION));
}

#[test]
fn an_answer_is_awaited_only_of_what_went_up() {
    let mut node = closed();
    node.connected();
    assert!(!node.awaits(UP));
    announce(&mut node, 0, &call(0, 1), &[1; 4]).unwrap();
    assert!(!node.awaits(UP));
    announce(&mut node, 1, &call(0, 1), &[1; 4]).unwrap();
    assert!(node.awaits(UP));
    let _ = sends(&mut node, UP);
    assert_eq!(answer(&mut node, Answer::agreed(0), false, 4), Progress::Ready);
    assert!(!node.awaits(UP));
    assert!(agreed(&call(0, 100)).awaits(UP), "its segment has no result");
}

#[test]
fn a_segment_that_is_on_its_way_up_asks_whether_the_node_above_lives() {
    let mut node = closed();
    node.connected();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 100), &[]).unwrap();
    }
    let descriptor = sends(&mut node, UP);
    deliver(&mut node, &descriptor);
    assert_eq!(answer(&mut node, Answer::agreed(0), false, 0), Progress::Ready);
    for port in 0..2 {
        let _ = sends(&mut node, port);
        write(&mut node, port, 0x5000, 50, &[1; 400]);
    }
    let segment = sends(&mut node, UP);
    assert_eq!(segment.len(), 1);
    assert!(node.awaits(UP));
    assert_eq!(node.probe(UP), None);
    deliver(&mut node, &segment);
    assert_eq!(node.probe(UP).map(|request| request.operation), Some(QUESTION));
}

#[test]
fn an_abort_has_nobody_to_tell_above_before_the_way_is_open() {
    for open in [false, true] {
        let mut node = closed();
        if open {
            node.connected();
        }
        let abort = Abort::Requested { code: 1 };
        assert_eq!(node.abort(abort), Progress::Ready);
        assert_eq!(node.abort(Abort::ParentLost), Progress::None, "the first reason stays");
        assert_eq!((node.take_report(), node.take_report()), (Some(abort), None));
        for port in 0..2 {
            assert_eq!(sends(&mut node, port).len(), 1);
            assert_eq!(node.take_ended(), None);
            node.end(port);
        }
        let up = sends(&mut node, UP);
        assert_eq!(up.len(), usize::from(open));
        if let [request] = up[..] {
            let bytes = node.bytes(&request.pieces[0]).and_then(Abort::parse);
            assert_eq!(bytes, Some(abort));
            assert_eq!(node.take_ended(), None);
            node.end(UP);
        }
        assert_eq!((node.take_ended(), node.take_ended()), (Some(abort), None));
    }
}

#[test]
fn who_told_of_an_abort_is_not_told() {
    let mut node = announced(&call(0, 100));
    let abort = Abort::PeerLost { rank: 3 };
    let [piece] = node.receive_request(UP, 0).pieces;
    let _ = node.store(UP, piece.address, &abort.to_bytes()).unwrap();
    assert_eq!(answer(&mut node, Answer::Aborted, false, ABORT_BYTES as u32), Progress::Ready);
    assert_eq!(node.aborted(), Some(abort));
    assert_eq!(sends(&mut node, UP), []);
    for port in 0..2 {
        let told = sends(&mut node, port);
        assert_eq!(told.iter().map(note).collect::<Vec<_>>(), [Some(Answer::Aborted)]);
        node.end(port);
    }
    assert_eq!(node.take_ended(), Some(abort));
}

/// What the last message has left is not read again.
#[test]
fn an_abort_that_is_told_by_a_write_is_none_of_the_protocol() {
    let mut node = announced(&call(0, 100));
    let [piece] = node.receive_request(UP, 0).pieces;
    let _ = node.store(UP, piece.address, &Abort::PeerLost { rank: 3 }.to_bytes()).unwrap();
    assert_eq!(answer(&mut node, Answer::Aborted, true, ABORT_BYTES as u32), Progress::Ready);
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
    assert_eq!(sends(&mut node, UP).len(), 1, "the node above is told");
}

#[test]
fn a_message_from_above_touches_nothing_of_the_children() {
    let mut node = closed();
    node.connected();
    announce(&mut node, 0, &call(0, 52), &[1; 208]).unwrap();
    let [piece] = node.receive_request(UP, 0).pieces;
    assert_eq!(piece.length, 256);
    let _ = node.store(UP, piece.address, &[0xff; 256]).unwrap();
    announce(&mut node, 1, &call(0, 52), &[2; 208]).unwrap();
    let _ = node.store(UP, piece.address, &[0xff; 256]).unwrap();
    let request = node.next_send(UP).unwrap();
    assert_eq!(node.bytes(&request.pieces[0]).unwrap()[DESCRIPTOR_BYTES..], [3; 208]);
    // Its result replaces what went up.
    let _ = node.store(UP, piece.address, &[9; 208]).unwrap();
    assert_eq!(answer(&mut node, Answer::agreed(0), false, 208), Progress::Ready);
    for port in 0..2 {
        let request = node.next_send(port).unwrap();
        assert_eq!(node.bytes(&request.pieces[0]), Some(&[9; 208][..]));
    }
}

#[test]
fn receives_lie_in_the_buffers_of_their_port() {
    let node = closed();
    let up = node.receive_request(UP, 0).pieces[0];
    for (piece, at_uplink, at_child) in [
        (up, true, false),
        (Piece { address: up.address - 1, ..up }, false, false),
        (Piece { address: up.address + 1, ..up }, false, false),
        (Piece { length: up.length + 1, ..up }, false, false),
        (Piece { address: up.address + 1, length: up.length - 1, ..up }, true, false),
        (Piece { address: CONTROL_BASE, length: 16, ..up }, false, false),
        (Piece { address: 0, length: 16, ..up }, false, false),
        (Piece { address: RECEIVE_BASE, length: 2 * SEGMENT_BYTES, ..up }, false, true),
        (Piece { address: RECEIVE_BASE, length: 2 * SEGMENT_BYTES + 1, ..up }, false, false),
        (Piece { address: u64::MAX, length: 2, ..up }, false, false),
    ] {
        assert_eq!(node.check_local(UP, &piece, true), at_uplink, "{piece:?}");
        assert_eq!(node.check_local(0, &piece, true), at_child, "{piece:?}");
    }
    // Of a window of 2: its answers, an agreement and an abort.
    assert_eq!((node.receives(UP), node.receives(0)), (4, RECEIVES_PER_CHILD));
}

#[test]
fn results_from_above_come_in_order_where_they_belong_and_in_whole_packets() {
    // Segments of 512 and 288 bytes.
    for (address, length, right) in [
        (0, 512, true),
        (0, 256, true),
        (0, 0, true),
        (0, 255, false),
        (0, 511, false),
        (0, 513, false),
        (0, 768, false),
        (256, 256, false),
        (1, 512, false),
        (512, 288, false),
        (u64::MAX, 256, false),
    ] {
        let mut node = contributed(&call(0, 200));
        let _ = sends(&mut node, UP);
        assert_eq!(node.admit_result(address, length).is_ok(), right, "{length} at {address}");
        assert_eq!(node.aborted(), (!right).then_some(Abort::ParentLost));
    }
    let mut node = contributed(&call(0, 200));
    let _ = sends(&mut node, UP);
    for (address, length, progress) in
        [(0, 256, Progress::Ready), (256, 256, Progress::Ready), (512, 256, Progress::Ready)]
    {
        assert_eq!(node.admit_result(address, length), Ok(()));
        assert_eq!(node.take_result(&vec![7; length as usize]), Ok(progress));
    }
    assert_eq!(node.admit_result(768, 32), Ok(()));
    assert_eq!(node.take_result(&[7; 32]), Ok(Progress::Ready));
    let _ = answer(&mut node, Answer::result(1), true, 32);
    assert_eq!(node.aborted(), None);
    // That was all.
    assert!(node.admit_result(800, 256).is_err());
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
}

#[test]
fn no_result_comes_from_above_before_its_call_is_agreed_on() {
    let mut node = announced(&call(0, 100));
    assert!(node.admit_result(0, 400).is_err());
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
}

#[test]
fn no_result_comes_from_above_before_it_went_up() {
    let mut node = contributed(&call(0, 100));
    assert_eq!(node.admit_result(0, 400), Ok(()));
    assert!(node.take_result(&[7; 256]).is_err());
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
}

#[test]
fn who_is_to_have_nothing_gets_no_bytes_from_above() {
    let reduce = Descriptor { collective: Collective::Reduce, root: 3, ..call(0, 100) };
    let mut node = contributed(&reduce);
    let _ = sends(&mut node, UP);
    assert!(node.admit_result(0, 400).is_err());
    // What comes in its place is said once, in order, and only when all of it went up.
    for (sent, wanted, answers) in [
        (true, true, &[Answer::result(0)][..]),
        (true, false, &[Answer::result(1)]),
        (true, false, &[Answer::result(0), Answer::result(1)]),
        (false, false, &[Answer::result(0)]),
    ] {
        let mut node = contributed(&reduce);
        if sent {
            let _ = sends(&mut node, UP);
        }
        for &it in answers {
            let _ = answer(&mut node, it, true, 0);
        }
        assert_eq!(node.aborted().is_none(), wanted, "{answers:?}, sent: {sent}");
    }
    // Who gets one gets it with bytes.
    let mut node = contributed(&call(0, 100));
    let _ = sends(&mut node, UP);
    let _ = answer(&mut node, Answer::result(0), true, 0);
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
}

#[test]
fn messages_from_above_that_are_none_of_the_protocol_end_it() {
    for (number, write, length) in [
        // Another collective, a result that is not due, and an agreement by WRITE.
        (Answer::agreed(1), false, 0),
        (Answer::agreed(0), false, 4),
        (Answer::agreed(0), true, 0),
        (Answer::result(0), true, 4),
        (Answer::result(u64::MAX), false, 4),
        (Answer::Aborted, true, 0),
        (Answer::awaited(0), true, 0),
        (Answer::awaited(0), false, 1),
        (Answer::missing(0), true, 0),
        (Answer::missing(0), false, 1),
        (Answer::missing(1), false, 0),
        (Answer::overdue(0), false, 0),
        (Answer::credit(0), false, 0),
    ] {
        let mut node = announced(&call(0, 100));
        let _ = answer(&mut node, number, write, length);
        assert_eq!(node.aborted(), Some(Abort::ParentLost), "{number:?} {write} {length}");
    }
    for nothing in [None, Some(0x8000_0001)] {
        let mut node = announced(&call(0, 100));
        let _ = node.answered(nothing, false, 0);
        assert_eq!(node.aborted(), Some(Abort::ParentLost));
    }
    // Before this node has called.
    let mut node = closed();
    node.connected();
    let _ = answer(&mut node, Answer::agreed(0), false, 0);
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
    // An agreement before the descriptor went up.
    let mut node = closed();
    node.connected();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 100), &[]).unwrap();
    }
    let _ = answer(&mut node, Answer::agreed(0), false, 0);
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
}

#[test]
fn the_end_of_a_result_that_has_come_has_its_number() {
    for (number, write, right) in [
        (Answer::result(0), true, true),
        (Answer::result(1), true, false),
        (Answer::result(0), false, false),
    ] {
        let mut node = contributed(&call(0, 200));
        let _ = sends(&mut node, UP);
        for address in [0, 256] {
            assert_eq!(node.admit_result(address, 256), Ok(()));
            let _ = node.take_result(&[7; 256]).unwrap();
        }
        let _ = answer(&mut node, number, write, 256);
        assert_eq!(node.aborted().is_none(), right, "{number:?} {write}");
    }
}
