//! Who is to blame when a rank waits no longer.

use super::*;
use crate::abort::Overdue;

/// A root with two switches and rank 4.
fn tree() -> Communicator {
    node_of(5, vec![child(0..2, true), child(2..4, true), host(4)], false)
}

fn overdue(sequence: u64, ranks: &[u32]) -> Overdue {
    let mut overdue = Overdue::new(sequence);
    ranks.iter().for_each(|&rank| overdue.add(rank));
    overdue
}

/// A switch below says who is awaited there.
fn found(node: &mut Communicator, port: usize, who: &Overdue) -> Result<Progress, Violation> {
    let [piece] = node.receive_request(port, 0).pieces;
    let _ = node.store(port, piece.address, &Abort::Overdue(*who).to_bytes()).unwrap();
    node.found(port, 0)
}

#[test]
fn who_has_all_results_on_their_way_gives_up_in_vain() {
    let mut node = root();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 1), &[1; 4]).unwrap();
        let _ = sends(&mut node, port);
    }
    let _ = sends(&mut node, 0);
    assert_eq!(node.gave_up(0, Answer::overdue(0)), Ok(Progress::None));
    assert_eq!(node.aborted(), None);
    // Nor does it wait for what it has not called.
    assert_eq!(node.gave_up(0, Answer::overdue(1)), Err(Violation::Sequence));
    // Of the next one nothing is on its way.
    announce(&mut node, 0, &call(1, 1), &[1; 4]).unwrap();
    assert_eq!(node.gave_up(0, Answer::overdue(1)), Ok(Progress::Ready));
    assert_eq!(node.aborted(), Some(Abort::Overdue(overdue(1, &[1]))));
}

/// The result was on its way to the leaf, so above nothing followed.
#[test]
fn a_leaf_tells_of_each_collective_that_a_rank_waits_no_longer_for() {
    const UP: usize = 2;
    let mut leaf = node_of(4, vec![host(0), host(1)], true);
    leaf.connected();
    for port in 0..2 {
        announce(&mut leaf, port, &call(0, 1), &[1; 4]).unwrap();
    }
    let told = |node: &mut Communicator| -> Vec<_> { sends(node, UP).iter().map(note).collect() };
    let _ = told(&mut leaf);
    assert_eq!(leaf.gave_up(0, Answer::overdue(0)), Ok(Progress::Ready));
    assert_eq!(told(&mut leaf), [Some(Answer::overdue(0))]);
    // Once of each.
    assert_eq!(leaf.gave_up(1, Answer::overdue(0)), Ok(Progress::None));
    let agreed = Some(Answer::agreed(0).to_immediate());
    assert_eq!(leaf.answered(agreed, false, 4), Progress::Ready);
    (0..2).for_each(|port| assert_eq!(sends(&mut leaf, port).len(), 1));
    announce(&mut leaf, 0, &call(1, 1), &[1; 4]).unwrap();
    assert_eq!(leaf.gave_up(0, Answer::overdue(1)), Ok(Progress::Ready));
    assert_eq!(told(&mut leaf), [Some(Answer::overdue(1))]);
}

#[test]
fn a_result_that_is_not_on_its_way_to_all_is_waited_for() {
    let mut node = root();
    for port in 0..2 {
        announce(&mut node, port, &call(0, 100), &[]).unwrap();
        let _ = sends(&mut node, port);
    }
    write(&mut node, 0, 0, 0, &[1; 400]);
    assert_eq!(node.gave_up(0, Answer::overdue(0)), Ok(Progress::Ready));
    assert_eq!(node.aborted(), Some(Abort::Overdue(overdue(0, &[1]))));
}

#[test]
fn a_note_about_any_other_collective_is_refused() {
    for number in [1, 2, u64::from(u32::MAX)] {
        let gave_up = root().gave_up(0, Answer::overdue(number));
        assert_eq!(gave_up, Err(Violation::Sequence), "{number}");
    }
}

#[test]
fn a_note_with_a_message_is_of_a_switch_and_as_long_as_an_abort() {
    let (node, whole) = (tree(), ABORT_BYTES as u32);
    let note = |child, note: Answer, length| node.note_below(child, note.to_immediate(), length);
    for right in [Answer::missing(0), Answer::overdue(0)] {
        assert_eq!(note(0, right, whole), Some(right));
        for length in [0, whole - 1, whole + 1] {
            assert_eq!(note(0, right, length), None);
        }
        assert_eq!(note(2, right, whole), None, "of a host");
    }
    for other in [Answer::awaited(0), Answer::credit(0), Answer::Aborted] {
        assert_eq!(note(0, other, whole), None, "{other:?}");
    }
}

/// A rank below a switch waits no longer for a collective with this number.
fn gave_up_below(
    node: &mut Communicator,
    port: usize,
    note: Answer,
    message: &Abort,
) -> Result<Progress, Violation> {
    let [piece] = node.receive_request(port, 0).pieces;
    let _ = node.store(port, piece.address, &message.to_bytes()).unwrap();
    node.gave_up_below(port, 0, note)
}

/// Of several trees each has some of the collectives, so their numbers have gaps there.
#[test]
fn the_number_that_is_told_is_that_of_whoever_waits_no_longer() {
    let mut node = tree();
    for port in 0..3 {
        announce(&mut node, port, &call(4, 0), &[]).unwrap();
    }
    (0..3).for_each(|port| assert_eq!(sends(&mut node, port).len(), 1));
    // Number 5 is on another tree, and of number 6 only a rank below the first switch knows.
    let number = Abort::Overdue(overdue(6, &[]));
    assert_eq!(gave_up_below(&mut node, 0, Answer::overdue(1), &number), Ok(Progress::Ready));
    for port in 0..2 {
        let asked = sends(&mut node, port);
        assert_eq!(asked.iter().map(note).collect::<Vec<_>>(), [Some(Answer::missing(1))]);
        let _ = found(&mut node, port, &overdue(1, &[])).unwrap();
    }
    assert_eq!(node.aborted(), Some(Abort::Overdue(overdue(6, &[4]))));
    // Messages that are no such number.
    for other in [Abort::ParentLost, Abort::Overdue(overdue(6, &[1]))] {
        let outcome = gave_up_below(&mut tree(), 0, Answer::overdue(0), &other);
        assert_eq!(outcome, Err(Violation::Immediate), "{other:?}");
    }
}

/// One collective is looked for, once.
#[test]
fn who_waits_no_longer_after_the_first_changes_nothing() {
    let mut node = tree();
    for port in 1..3 {
        announce(&mut node, port, &call(4, 0), &[]).unwrap();
    }
    assert_eq!(node.gave_up(2, Answer::overdue(0)), Ok(Progress::Ready));
    let asked = |node: &mut Communicator| (0..2).map(|port| sends(node, port).len()).sum::<usize>();
    assert_eq!(asked(&mut node), 2);
    // Nor is it looked at what is said with it.
    let number = Abort::Overdue(overdue(9, &[]));
    for message in [number, Abort::ParentLost] {
        assert_eq!(gave_up_below(&mut node, 1, Answer::overdue(0), &message), Ok(Progress::None));
    }
    for note in [Answer::overdue(0), Answer::overdue(7)] {
        assert_eq!(node.gave_up(2, note), Ok(Progress::None));
    }
    assert_eq!(asked(&mut node), 0);
    for (port, ranks) in [(0, &[0, 1][..]), (1, &[])] {
        let _ = found(&mut node, port, &overdue(0, ranks)).unwrap();
    }
    assert_eq!(node.aborted(), Some(Abort::Overdue(overdue(4, &[0, 1]))));
}

#[test]
fn who_waits_no_longer_after_an_abort_changes_nothing() {
    let mut node = tree();
    let abort = Abort::PeerLost { rank: 1 };
    assert_eq!(node.abort(abort), Progress::Ready);
    let gave_up = gave_up_below(&mut node, 0, Answer::overdue(0), &Abort::ParentLost);
    assert_eq!(gave_up, Ok(Progress::None));
    assert_eq!(node.gave_up(2, Answer::overdue(7)), Ok(Progress::None));
    assert_eq!(node.aborted(), Some(abort));
}

#[test]
fn a_node_is_asked_once_who_is_awaited_below_it() {
    let mut node = node_of(8, vec![child(0..2, true), child(2..4, true)], true);
    node.connected();
    let missing = Some(Answer::missing(0).to_immediate());
    assert_eq!(node.answered(missing, false, 0), Progress::Ready);
    assert_eq!(node.aborted(), None);
    assert_eq!(node.answered(missing, false, 0), Progress::Ready);
    assert_eq!(node.aborted(), Some(Abort::ParentLost));
}

#[test]
fn a_leaf_says_the_number_of_its_rank_and_a_switch_above_passes_it_on() {
    const UP: usize = 2;
    let mut leaf = node_of(4, vec![host(0), host(1)], true);
    let mut above = node_of(8, vec![child(0..2, true), child(2..4, true)], true);
    let passed = |node: &mut Communicator| {
        let [request] = &sends(node, UP)[..] else { panic!("one message") };
        assert_eq!(note(request), Some(Answer::overdue(0)));
        node.bytes(&request.pieces[0]).and_then(Abort::parse)
    };
    leaf.connected();
    above.connected();
    announce(&mut leaf, 1, &call(3, 100), &[]).unwrap();
    assert_eq!(leaf.gave_up(1, Answer::overdue(0)), Ok(Progress::Ready));
    let number = passed(&mut leaf).unwrap();
    assert_eq!(number, Abort::Overdue(overdue(3, &[])));
    assert_eq!(gave_up_below(&mut above, 0, Answer::overdue(0), &number), Ok(Progress::Ready));
    assert_eq!(passed(&mut above), Some(number));
}

#[test]
fn who_has_announced_the_next_collective_does_not_give_this_one_its_number() {
    let mut node = root();
    let reduce = Descriptor { collective: Collective::Reduce, root: 1, ..call(0, 100) };
    for port in 0..2 {
        announce(&mut node, port, &reduce, &[]).unwrap();
        let _ = sends(&mut node, port);
    }
    (0..2).for_each(|port| {
        let _ = sends(&mut node, port);
        write(&mut node, port, 0, 0, &[1; 400]);
    });
    // The root's result has not left, the other rank goes on.
    assert_eq!(sends(&mut node, 0).len(), 1);
    announce(&mut node, 0, &call(1, 100), &[]).unwrap();
    assert_eq!(node.gave_up(1, Answer::overdue(0)), Ok(Progress::Ready));
    assert_eq!(node.aborted(), Some(Abort::Overdue(overdue(0, &[]))));
}

#[test]
fn all_switches_are_asked_and_what_they_say_is_put_together() {
    let mut node = tree();
    announce(&mut node, 2, &call(0, 100), &[]).unwrap();
    write(&mut node, 2, 0, 0, &[1; 400]);
    assert_eq!(node.gave_up(0, Answer::overdue(0)), Ok(Progress::Ready));
    for port in 0..2 {
        let asked = sends(&mut node, port);
        assert_eq!(asked.iter().map(note).collect::<Vec<_>>(), [Some(Answer::missing(0))]);
    }
    assert_eq!(sends(&mut node, 2), [], "a host is not asked");
    assert_eq!(found(&mut node, 1, &overdue(0, &[3])), Ok(Progress::Ready));
    assert_eq!(node.aborted(), None);
    assert_eq!(found(&mut node, 0, &overdue(0, &[0, 1])), Ok(Progress::Ready));
    assert_eq!(node.aborted(), Some(Abort::Overdue(overdue(0, &[3, 0, 1]))));
}

#[test]
fn what_a_switch_was_not_asked_or_cannot_know_is_refused() {
    let right = overdue(0, &[0]);
    // Nobody has asked it.
    assert_eq!(found(&mut tree(), 0, &right), Err(Violation::Immediate));
    let searching = || {
        let mut node = tree();
        announce(&mut node, 2, &call(0, 100), &[]).unwrap();
        let _ = node.gave_up(0, Answer::overdue(0)).unwrap();
        node
    };
    // The question has not left.
    assert_eq!(found(&mut searching(), 0, &right), Err(Violation::Immediate));
    let asked = || {
        let mut node = searching();
        (0..2).for_each(|port| assert_eq!(sends(&mut node, port).len(), 1));
        node
    };
    assert_eq!(found(&mut asked(), 0, &right), Ok(Progress::Ready));
    for wrong in [
        overdue(1, &[0]),
        overdue(u64::MAX, &[0]),
        // Ranks that are not below it, and more than are.
        overdue(0, &[2]),
        overdue(0, &[0, 4]),
        overdue(0, &[0, 1, 0]),
        Overdue { count: u32::MAX, ..right },
    ] {
        assert_eq!(found(&mut asked(), 0, &wrong), Err(Violation::Immediate), "{wrong:?}");
    }
    // Twice, while others are still to answer.
    let mut node = asked();
    assert_eq!(found(&mut node, 0, &right), Ok(Progress::Ready));
    assert_eq!(found(&mut node, 0, &right), Err(Violation::Immediate));
    // Another reason.
    let mut node = asked();
    let [piece] = node.receive_request(0, 0).pieces;
    let _ = node.store(0, piece.address, &Abort::ParentLost.to_bytes()).unwrap();
    assert_eq!(node.found(0, 0), Err(Violation::Immediate));
}
