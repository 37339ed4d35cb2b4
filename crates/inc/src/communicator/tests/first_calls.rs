//! What a rank has called is told above while others have not called.

use super::*;
use crate::abort::Mismatch;
use crate::descriptor::{DESCRIPTOR_BYTES, Field};

/// Of [`leaf`] and [`between`].
const UP: usize = 2;

/// Ranks 0 and 1 of 8, with an open way up.
fn leaf() -> Communicator {
    let mut node = node_of(8, vec![host(0), host(1)], true);
    node.connected();
    node
}

/// Switches with ranks 0 and 1, and 2 and 3, of 8, with an open way up.
fn between() -> Communicator {
    let mut node = node_of(8, vec![child(0..2, true), child(2..4, true)], true);
    node.connected();
    node
}

/// A root with two switches and rank 4.
fn root_of_switches() -> Communicator {
    node_of(5, vec![child(0..2, true), child(2..4, true), host(4)], false)
}

fn maximum(sequence: u64) -> Descriptor {
    Descriptor { operation: ReduceOperation::Maximum, ..call(sequence, 100) }
}

/// A switch below tells what a rank has called.
fn hear(
    node: &mut Communicator,
    port: usize,
    rank: u32,
    descriptor: &Descriptor,
) -> Result<Progress, Violation> {
    let [piece] = node.receive_request(port, 0).pieces;
    let _ = node.store(port, piece.address, &descriptor.to_bytes()).unwrap();
    node.called_below(port, 0, rank)
}

fn bytes_of(node: &Communicator, request: &SendRequest) -> Vec<u8> {
    node.bytes(&request.pieces[0]).unwrap().to_vec()
}

#[test]
fn what_the_first_has_called_is_told_once_while_others_have_not() {
    let mut node = leaf();
    assert!(!node.has_first_call_to_tell(), "nobody has called");
    for sequence in 0..5 {
        announce(&mut node, 1, &call(sequence, 0), &[]).unwrap();
        assert_eq!(sends(&mut node, UP), [], "the other may come at once");
        assert!(node.has_first_call_to_tell());
        assert_eq!(node.tell_first_call(), Progress::Ready);
        assert_eq!(node.tell_first_call(), Progress::None);
        let [told] = sends(&mut node, UP)[..] else { panic!("one note") };
        assert_eq!(note(&told), Some(Answer::Called(1)));
        let own = Descriptor { destination_address: 0, destination_key: 0, ..call(sequence, 0) };
        assert_eq!(bytes_of(&node, &told), own.to_bytes());
        assert!(!node.has_first_call_to_tell(), "it is told");
        assert_eq!(node.tell_first_call(), Progress::None);
        announce(&mut node, 0, &call(sequence, 0), &[]).unwrap();
        let [called] = sends(&mut node, UP)[..] else { panic!("the descriptor") };
        assert_eq!(note(&called), None);
        // Should it have to be sent again, it is as it was: both are from one place.
        assert_eq!(told.pieces, called.pieces);
        assert_eq!(bytes_of(&node, &told), own.to_bytes());
        assert_eq!(bytes_of(&node, &called), own.to_bytes());
        deliver(&mut node, &[told, called]);
        let agreed = Some(Answer::agreed(sequence).to_immediate());
        assert_eq!(node.answered(agreed, false, 0), Progress::Ready);
        (0..2).for_each(|port| assert_eq!(sends(&mut node, port).len(), 1));
    }
    // All have called: there is nothing to add.
    for port in 0..2 {
        announce(&mut node, port, &call(5, 0), &[]).unwrap();
    }
    assert!(!node.has_first_call_to_tell());
    assert_eq!(sends(&mut node, UP).len(), 1);
    // A root has nobody to tell.
    let mut node = root();
    announce(&mut node, 1, &call(0, 100), &[]).unwrap();
    assert!(!node.has_first_call_to_tell());
}

#[test]
fn a_note_that_has_not_left_when_all_have_called_never_does() {
    for open in [true, false] {
        let mut node = node_of(8, vec![host(0), host(1)], true);
        if open {
            node.connected();
        }
        announce(&mut node, 1, &call(0, 0), &[]).unwrap();
        assert_eq!(node.tell_first_call(), Progress::Ready);
        if !open {
            assert_eq!(sends(&mut node, UP), [], "there is no way up yet");
        }
        announce(&mut node, 0, &call(0, 0), &[]).unwrap();
        node.connected();
        let up = sends(&mut node, UP);
        assert_eq!(up.iter().map(note).collect::<Vec<_>>(), [None]);
        assert_eq!(sends(&mut node, UP), []);
        // Nor with the next collective, of which nothing is to be told yet.
        deliver(&mut node, &up);
        let agreed = Some(Answer::agreed(0).to_immediate());
        assert_eq!(node.answered(agreed, false, 0), Progress::Ready);
        (0..2).for_each(|port| assert_eq!(sends(&mut node, port).len(), 1));
        announce(&mut node, 1, &call(1, 0), &[]).unwrap();
        assert_eq!(sends(&mut node, UP), []);
    }
}

#[test]
fn what_a_switch_below_tells_is_passed_on_at_once_and_once() {
    let mut node = between();
    assert_eq!(hear(&mut node, 1, 3, &call(0, 100)), Ok(Progress::Ready));
    let [told] = sends(&mut node, UP)[..] else { panic!("one note") };
    assert_eq!(note(&told), Some(Answer::Called(3)));
    let own = Descriptor { destination_address: 0, destination_key: 0, ..call(0, 100) };
    assert_eq!(bytes_of(&node, &told), own.to_bytes());
    assert_eq!(hear(&mut node, 0, 1, &call(0, 100)), Ok(Progress::None));
    assert_eq!(sends(&mut node, UP), []);
    for (port, rank) in [(0, 0), (1, 2)] {
        assert_eq!(hear(&mut node, port, rank, &call(0, 100)), Err(Violation::Early), "once");
    }
}

#[test]
fn ranks_that_differ_are_named_wherever_they_are_and_before_all_have_called() {
    let ended = |rank, reference, expected: ReduceOperation, found: ReduceOperation| {
        Some(Abort::Mismatch(Mismatch {
            sequence: 0,
            rank,
            reference,
            field: Field::Operation,
            expected: expected.code().into(),
            found: found.code().into(),
        }))
    };
    let (sum, max) = (ReduceOperation::Sum, ReduceOperation::Maximum);
    // Two of whom switches tell.
    let mut node = root_of_switches();
    assert_eq!(hear(&mut node, 0, 1, &call(0, 100)), Ok(Progress::None));
    assert_eq!(hear(&mut node, 1, 3, &maximum(0)), Ok(Progress::Ready));
    assert_eq!(node.aborted(), ended(3, 1, sum, max));
    // One of whom a switch tells, and a host, in either order.
    let mut node = root_of_switches();
    assert_eq!(hear(&mut node, 0, 1, &call(0, 100)), Ok(Progress::None));
    assert_eq!(announce(&mut node, 2, &maximum(0), &[]), Ok(true));
    assert_eq!(node.aborted(), ended(4, 1, sum, max));
    let mut node = root_of_switches();
    assert_eq!(announce(&mut node, 2, &maximum(0), &[]), Ok(false));
    assert_eq!(hear(&mut node, 0, 1, &call(0, 100)), Ok(Progress::Ready));
    assert_eq!(node.aborted(), ended(4, 1, sum, max));
    // A switch all of whose ranks have called; and most are right.
    let mut node = root_of_switches();
    assert_eq!(announce(&mut node, 2, &maximum(0), &[]), Ok(false));
    assert_eq!(hear(&mut node, 1, 3, &maximum(0)), Ok(Progress::None));
    assert_eq!(announce(&mut node, 1, &maximum(0), &[]), Ok(false));
    assert_eq!(hear(&mut node, 0, 1, &call(0, 100)), Ok(Progress::Ready));
    assert_eq!(node.aborted(), ended(1, 2, max, sum));
}

#[test]
fn nothing_but_a_comparison_follows_from_a_note() {
    let mut node = root_of_switches();
    for (port, rank) in [(0, 1), (1, 2)] {
        assert_eq!(hear(&mut node, port, rank, &call(0, 100)), Ok(Progress::None));
    }
    for port in 0..3 {
        assert_eq!(sends(&mut node, port), []);
        assert!(!node.children[port].owes());
    }
    let statistics = node.statistics();
    assert_eq!((statistics.collectives, statistics.slots_in_use), (0, 0));
    // Who has called nothing may send nothing.
    assert!(node.authorize(0, 0, 0, 400).is_err());
    // With all calls it is as ever, and the next collective has notes of its own.
    let mut node = root_of_switches();
    for sequence in 0..3 {
        assert_eq!(hear(&mut node, 0, 1, &call(sequence, 0)), Ok(Progress::None));
        for port in [2, 1, 0] {
            assert_eq!(announce(&mut node, port, &call(sequence, 0), &[]), Ok(port == 0));
        }
        for port in 0..3 {
            let agreed = sends(&mut node, port);
            let wanted = [Some(Answer::agreed(sequence))];
            assert_eq!(agreed.iter().map(note).collect::<Vec<_>>(), wanted);
        }
    }
    assert_eq!(node.aborted(), None);
}

#[test]
fn a_note_that_no_switch_sends_is_refused() {
    let mut heard = root_of_switches();
    let _ = hear(&mut heard, 0, 1, &call(3, 100)).unwrap();
    assert_eq!(hear(&mut heard, 0, 1, &call(3, 100)), Err(Violation::Early), "twice");
    let mut called = root_of_switches();
    announce(&mut called, 0, &call(3, 100), &[]).unwrap();
    assert_eq!(hear(&mut called, 0, 1, &call(4, 100)), Err(Violation::Early), "it has called");
    for (rank, wrong) in [(2, Violation::Immediate), (4, Violation::Immediate)] {
        assert_eq!(hear(&mut root_of_switches(), 0, rank, &call(0, 100)), Err(wrong), "not below");
    }
    let mut node = root_of_switches();
    for port in 0..3 {
        announce(&mut node, port, &call(3, 0), &[]).unwrap();
    }
    (0..3).for_each(|port| assert_eq!(sends(&mut node, port).len(), 1));
    assert_eq!(hear(&mut node, 0, 1, &call(3, 0)), Err(Violation::Sequence), "it is over");
    assert_eq!(hear(&mut node, 0, 1, &call(4, 0)), Ok(Progress::None));
    let mut node = root_of_switches();
    let [piece] = node.receive_request(0, 0).pieces;
    let _ = node.store(0, piece.address, &[1; DESCRIPTOR_BYTES]).unwrap();
    assert_eq!(node.called_below(0, 0, 1), Err(Violation::Descriptor));
    // Nor does a host.
    let length = DESCRIPTOR_BYTES as u32;
    let immediate = Answer::Called(4).to_immediate();
    assert_eq!(node.note_below(2, immediate, length), None);
    assert_eq!(node.note_below(0, immediate, length), Some(Answer::Called(4)));
    assert_eq!(node.note_below(0, immediate, length - 1), None);
}

#[test]
fn a_note_that_meets_an_abort_changes_nothing() {
    let mut node = between();
    let _ = hear(&mut node, 0, 1, &call(0, 100)).unwrap();
    let abort = Abort::PeerLost { rank: 1 };
    assert_eq!(node.abort(abort), Progress::Ready);
    assert_eq!(hear(&mut node, 1, 3, &maximum(0)), Ok(Progress::None));
    assert_eq!(node.aborted(), Some(abort));
    let up = sends(&mut node, UP);
    assert_eq!(up.iter().map(|it| Tag::from_id(it.id).0).collect::<Vec<_>>(), [Tag::Abort]);
    assert_eq!(node.tell_first_call(), Progress::None);
}

/// Who is late is asked whether it lives, wherever those are who have called.
#[test]
fn who_has_not_called_what_is_told_of_is_awaited() {
    let mut node = root_of_switches();
    assert!((0..3).all(|port| !node.awaits(port)));
    let _ = hear(&mut node, 0, 1, &call(0, 100)).unwrap();
    assert!(node.awaits(1) && node.awaits(2));
    assert_eq!(node.probe(1).as_ref().and_then(note), Some(Answer::awaited(0)));
    assert_eq!(node.probe(2).map(|it| it.operation), Some(QUESTION));
}
