use super::*;
use crate::batch::Batch;
use crate::tcp::message::{Fault, MAX_DATA, MAX_PIECES};
use crate::tcp::testing::{self, Room, tasks, with_deadline};

fn reason() -> FailureReason {
    FailureReason::Connection("it broke".into())
}

/// A flow with tasks of these lengths, their names, and what must live meanwhile.
fn flow(framing: Framing, opcode: Opcode, lengths: &[u64]) -> (Flow, Vec<u64>, Room, Batch) {
    let (mut flow, room) = (Flow::new(framing), Room::new(4096));
    let names = push(&mut flow, &room, opcode, lengths);
    (flow, names.0, room, names.1)
}

fn push(flow: &mut Flow, room: &Room, opcode: Opcode, lengths: &[u64]) -> (Vec<u64>, Batch) {
    let (batch, handles) = tasks(opcode, room.address(), lengths);
    (testing::push(flow, room, &handles), batch)
}

fn ended(flow: &mut Flow) -> Vec<(usize, TransferState, u64, bool)> {
    let mut all = AllEnded::default();
    flow.take_ended(&mut all);
    let what = |it: &Ended| (it.index as usize, it.state, it.transferred, it.undefined);
    all.tasks.iter().map(what).collect()
}

fn all_messages(flow: &mut Flow) -> Vec<Message> {
    std::iter::from_fn(|| flow.next_message()).collect()
}

#[test]
fn a_flow_without_tasks_has_nothing_to_say() {
    let mut flow = Flow::new(Framing::Numbered);
    assert!(!flow.has_more() && flow.next_message().is_none());
    flow.tick(Instant::now());
    flow.lost(&mut VecDeque::new(), 0, 1, &reason(), false);
    flow.fail_all(&reason());
    assert!(!flow.has_more() && ended(&mut flow).is_empty());
}

#[test]
fn a_long_task_is_several_messages_and_ends_once_with_the_last_in_any_order() {
    let length = 2 * MAX_DATA + 1;
    let (mut flow, _, _room, _batch) = flow(Framing::Numbered, Opcode::Write, &[length]);
    let mut messages = all_messages(&mut flow);
    let cut: Vec<_> = messages.iter().flat_map(Message::remote).collect();
    assert_eq!(cut, [(0, MAX_DATA), (MAX_DATA, MAX_DATA), (2 * MAX_DATA, 1)]);
    assert!(messages.windows(2).all(|two| two[0].id < two[1].id));
    messages.rotate_left(1);
    for (index, message) in messages.into_iter().enumerate() {
        assert!(ended(&mut flow).is_empty(), "{index}");
        flow.done(message, true);
    }
    assert_eq!(ended(&mut flow), [(0, TransferState::Completed, length, false)]);
    assert_eq!((flow.unfinished(), flow.counters().1), (0, (0, 0)));
}

#[test]
fn a_message_has_so_many_pieces_of_one_kind_and_a_fault_is_of_its_own_task() {
    let lengths = vec![1; MAX_PIECES + 1];
    let (mut flow, _, room, _batch) = flow(Framing::Numbered, Opcode::Write, &lengths);
    let (_, _reads) = push(&mut flow, &room, Opcode::Read, &[5]);
    let mut messages = all_messages(&mut flow);
    let shapes: Vec<_> = messages.iter().map(|it| (it.opcode, it.remote().len())).collect();
    let (write, read) = (Some(Opcode::Write), Some(Opcode::Read));
    assert_eq!(shapes, [(write, MAX_PIECES), (write, 1), (read, 1)]);
    let mut first = messages.remove(0);
    assert!(first.set_fault(7, Fault::Gone) && !first.set_fault(MAX_PIECES as u32, Fault::Gone));
    flow.done(first, true);
    let ended = ended(&mut flow);
    assert_eq!(ended.len(), MAX_PIECES);
    for (index, state, transferred, undefined) in ended {
        let failed = index == 7;
        assert_eq!(state == TransferState::Failed, failed, "{index}");
        assert_eq!((transferred, undefined), (u64::from(!failed), false), "{index}");
    }
}

#[test]
fn a_read_is_tried_three_times_and_then_says_why() {
    let (mut flow, _, _room, _batch) = flow(Framing::Numbered, Opcode::Read, &[10]);
    for attempt in 0..3 {
        let mut under_way = VecDeque::from([flow.next_message().unwrap()]);
        assert!(flow.next_message().is_none(), "{attempt}");
        flow.lost(&mut under_way, 1, attempt, &reason(), false);
    }
    assert!(flow.next_message().is_none());
    assert_eq!(ended(&mut flow), [(0, TransferState::Failed, 0, false)]);
}

/// Nothing of it is under way, and there may never be a connection.
#[test]
fn what_is_to_begin_again_ends_without_a_connection() {
    let (mut flow, names, room, _batch) = flow(Framing::Numbered, Opcode::Read, &[10, 20, 30]);
    let late = Some(Instant::now());
    let (_late_batch, handles) = with_deadline(Opcode::Read, room.address(), &[40], late);
    testing::push(&mut flow, &room, &handles);
    let mut under_way: VecDeque<_> = all_messages(&mut flow).into();
    let sent = under_way.len();
    flow.lost(&mut under_way, sent, 1, &reason(), false);
    assert!(ended(&mut flow).is_empty());
    assert!(flow.end(names[1], TransferState::Canceled));
    assert_eq!(ended(&mut flow), [(1, TransferState::Canceled, 0, false)]);
    flow.tick(Instant::now());
    assert_eq!(ended(&mut flow), [(0, TransferState::Timeout, 0, false)]);
    let again = flow.next_message().unwrap();
    assert_eq!(again.length, 40, "the others go on");
    flow.end_all(&reason());
    flow.done(again, true);
    let failed = |index, length| (index, TransferState::Failed, length, false);
    assert_eq!(ended(&mut flow), [failed(0, 10), failed(2, 30)]);
    assert_eq!(flow.unfinished(), 0);
}

#[test]
fn a_write_goes_again_once_its_connection_is_fenced_and_one_that_was_not_begun_at_once() {
    let (mut flow, _, room, _batch) = flow(Framing::Numbered, Opcode::Write, &[MAX_DATA]);
    let (_, _more) = push(&mut flow, &room, Opcode::Write, &[20]);
    let mut under_way: VecDeque<_> = all_messages(&mut flow).into();
    flow.lost(&mut under_way, 1, 77, &reason(), false);
    let fence = flow.next_message().unwrap();
    assert_eq!((fence.opcode, fence.fence), (None, 77));
    let second = flow.next_message().unwrap();
    assert_eq!(second.length, 20);
    assert!(flow.next_message().is_none(), "the first waits");
    // The connection with the fence breaks: it is asked for again. One of an unknown connection changes nothing.
    flow.lost(&mut VecDeque::from([fence]), 1, 78, &reason(), false);
    let fence = flow.next_message().unwrap();
    flow.done(Message { fence: 5, ..Message::default() }, true);
    assert!(flow.next_message().is_none());
    flow.done(fence, true);
    let first = flow.next_message().unwrap();
    assert_eq!(first.length, MAX_DATA);
    // Confirmed once more, when nothing waits for it.
    flow.done(Message { fence: 77, ..Message::default() }, true);
    flow.done(first, true);
    flow.done(second, true);
    let completed = |length| (0, TransferState::Completed, length, false);
    assert_eq!(ended(&mut flow), [completed(MAX_DATA), completed(20)]);
}

#[test]
fn a_write_whose_fence_is_refused_or_that_the_original_had_is_undefined() {
    for framing in [Framing::Numbered, Framing::Old(Version::Two)] {
        let (mut flow, _, _room, _batch) = flow(framing, Opcode::Write, &[10]);
        let mut under_way = VecDeque::from([flow.next_message().unwrap()]);
        flow.lost(&mut under_way, 1, 77, &reason(), false);
        if let Some(fence) = flow.next_message() {
            assert_eq!(framing, Framing::Numbered);
            flow.not_fenced(fence);
        }
        assert_eq!(ended(&mut flow), [(0, TransferState::Failed, 0, true)], "{framing:?}");
    }
}

#[test]
fn a_no_from_elsewhere_leaves_a_fence_to_the_next_connection_while_there_may_be_one() {
    for comes in [true, false] {
        let (mut flow, _, _room, _batch) = flow(Framing::Numbered, Opcode::Write, &[10]);
        let mut under_way = VecDeque::from([flow.next_message().unwrap()]);
        flow.lost(&mut under_way, 1, 77, &reason(), false);
        assert_eq!((flow.fences_to_ask(), flow.fences_to_ask()), (vec![77], vec![]));
        flow.fail_waiting(&reason());
        flow.fence_answered(5, false);
        assert!(ended(&mut flow).is_empty(), "the answer is waited for");
        flow.fence_answered(77, false);
        assert!(ended(&mut flow).is_empty(), "another connection may come");
        if comes {
            let fence = flow.next_message().unwrap();
            flow.done(fence, true);
            let again = flow.next_message().unwrap();
            flow.done(again, true);
            assert_eq!(ended(&mut flow), [(0, TransferState::Completed, 10, false)]);
        } else {
            flow.fail_waiting(&reason());
            assert_eq!(ended(&mut flow), [(0, TransferState::Failed, 0, true)]);
        }
    }
}

#[test]
fn a_checksum_mismatch_names_the_range_of_each_task() {
    let (mut flow, _, _room, _batch) = flow(Framing::Old(Version::Two), Opcode::Write, &[10, 20]);
    let damaged = FailureReason::Checksum { here: false, range: None };
    for _ in 0..2 {
        let mut under_way = VecDeque::from([flow.next_message().unwrap()]);
        flow.lost(&mut under_way, 1, 0, &damaged, false);
    }
    let mut all = AllEnded::default();
    flow.take_ended(&mut all);
    let ranges = all.tasks.iter().map(|it| match it.failure.as_deref() {
        Some(FailureReason::Checksum { here: false, range }) => *range,
        other => panic!("{other:?}"),
    });
    assert_eq!(ranges.collect::<Vec<_>>(), [Some((0, 10)), Some((1 << 20, 20))]);
}

#[test]
fn names_wrap_and_an_old_one_ends_nobody() {
    let (mut flow, room) = (Flow::new(Framing::Numbered), Room::new(64));
    flow.generation = u32::MAX - 1;
    let mut old = Vec::new();
    for _ in 0..3 {
        let (names, _batch) = push(&mut flow, &room, Opcode::Write, &[10]);
        // All have the same place, one after the other.
        assert_eq!(names[0] as u32, 0);
        assert!(!old.contains(&names[0]));
        for name in &old {
            assert!(!flow.end(*name, TransferState::Canceled));
        }
        let message = flow.next_message().unwrap();
        flow.done(message, true);
        assert_eq!(ended(&mut flow), [(0, TransferState::Completed, 10, false)]);
        old.push(names[0]);
    }
}

#[test]
fn who_is_canceled_ends_with_what_is_under_way_and_posts_no_more() {
    let lengths = [2 * MAX_DATA, 30];
    let (mut flow, names, _room, _batch) = flow(Framing::Numbered, Opcode::Read, &lengths);
    let first = flow.next_message().unwrap();
    assert!(flow.end(names[0], TransferState::Canceled));
    assert!(!flow.end(names[0], TransferState::Timeout), "it ends already");
    assert!(flow.end(names[1], TransferState::Canceled));
    assert_eq!(ended(&mut flow), [(1, TransferState::Canceled, 0, false)]);
    assert!(flow.next_message().is_none());
    // A late answer counts.
    flow.done(first, true);
    assert_eq!(ended(&mut flow), [(0, TransferState::Canceled, MAX_DATA, false)]);
    assert_eq!(flow.unfinished(), 0);
}

#[test]
fn a_deadline_ends_what_waits_and_nobody_else() {
    let (mut flow, room, now) = (Flow::new(Framing::Numbered), Room::new(64), Instant::now());
    let later = now + Duration::from_secs(5);
    let (_batch, late) = with_deadline(Opcode::Read, room.address(), &[10], Some(later));
    testing::push(&mut flow, &room, &late);
    let (_, _others) = push(&mut flow, &room, Opcode::Read, &[20]);
    assert_eq!(flow.next_deadline(), Some(later));
    flow.tick(later - Duration::from_nanos(1));
    assert!(ended(&mut flow).is_empty());
    flow.tick(later);
    assert_eq!(ended(&mut flow), [(0, TransferState::Timeout, 0, false)]);
    assert_eq!(flow.next_deadline(), None);
    assert_eq!(flow.next_message().unwrap().length, 20);
}

#[test]
fn tasks_that_are_left_out_or_end_before_the_next_is_pushed_leave_nothing_behind() {
    let (mut flow, room) = (Flow::new(Framing::Numbered), Room::new(64));
    let (batch, _) = tasks(Opcode::Write, room.address(), &[1, 2, 3]);
    let origin = || Origin {
        batch: std::sync::Arc::clone(&batch.shared),
        local: std::sync::Arc::clone(&room.local),
        segment: testing::segment(),
        terms: crate::terms::Terms::default(),
    };
    let users = || std::sync::Arc::strong_count(&batch.shared);
    let before = users();
    let none = flow.begin(origin(), 2);
    flow.leave_out(none);
    assert_eq!(users(), before + 1);
    flow.leave_out(none);
    assert_eq!(users(), before);
    let some = flow.begin(origin(), 3);
    let first = flow.push(some, 0);
    assert!(flow.end(first, TransferState::Canceled));
    flow.leave_out(some);
    flow.push(some, 2);
    assert_eq!(ended(&mut flow), [(0, TransferState::Canceled, 0, false)]);
    let message = flow.next_message().unwrap();
    assert_eq!(message.length, 3);
    flow.done(message, true);
    assert_eq!(ended(&mut flow), [(2, TransferState::Completed, 3, false)]);
    assert_eq!((users(), flow.unfinished()), (before, 0));
}

#[test]
fn tasks_of_several_batches_that_end_together_keep_apart_what_they_are_of() {
    let (mut flow, room) = (Flow::new(Framing::Numbered), Room::new(64));
    let lengths: [&[u64]; 3] = [&[1, 2, 3], &[4], &[5, 6]];
    let batches = lengths.map(|lengths| push(&mut flow, &room, Opcode::Write, lengths).1);
    let users = || batches.each_ref().map(|batch| std::sync::Arc::strong_count(&batch.shared));
    assert_eq!(users(), [2; 3], "one for all tasks of a run");
    let name = |slot: u64| (slot + 1) << 32 | slot;
    let mut all = AllEnded::default();
    for (canceled, ended) in [(&[1, 4, 2][..], &[(0, 1), (2, 0), (0, 2)][..]), (&[3], &[(1, 0)])] {
        canceled.iter().for_each(|&slot| assert!(flow.end(name(slot), TransferState::Canceled)));
        flow.take_ended(&mut all);
        let found = all.tasks.drain(..).map(|task| {
            let batch = &all.origins[task.origin as usize].batch;
            let is_its = |it: &Batch| std::sync::Arc::ptr_eq(&it.shared, batch);
            (batches.iter().position(is_its).unwrap(), task.index)
        });
        assert_eq!(found.collect::<Vec<_>>(), ended);
        all.origins.clear();
    }
    assert_eq!(users(), [2, 1, 2]);
    let message = flow.next_message().unwrap();
    assert_eq!(message.remote().map(|(_, length)| length).collect::<Vec<_>>(), [1, 6]);
    flow.done(message, true);
    flow.take_ended(&mut all);
    drop(all);
    assert_eq!((users(), flow.unfinished()), ([1; 3], 0));
}
