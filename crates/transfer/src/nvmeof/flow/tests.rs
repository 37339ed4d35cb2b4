use std::time::Duration;

use super::*;
use crate::batch::Batch;
use crate::segment::SegmentTable;
use crate::slicing::Slicing;
use crate::tcp::testing::Room;
use crate::{SegmentId, TransferRequest};

const LENGTH: u64 = 100;

/// A task of each of these, all of them an entry.
fn submit(flow: &mut Flow, room: &Room, opcodes: &[Opcode]) -> Batch {
    submit_from(flow, &room.local, LENGTH, opcodes)
}

/// The same, each of all of this memory.
pub(in super::super) fn submit_from(
    flow: &mut Flow,
    local: &Arc<LocalMemory>,
    length: u64,
    opcodes: &[Opcode],
) -> Batch {
    submit_until(flow, local, length, opcodes, None)
}

fn submit_until(
    flow: &mut Flow,
    local: &Arc<LocalMemory>,
    length: u64,
    opcodes: &[Opcode],
    deadline: Option<Instant>,
) -> Batch {
    let count = opcodes.len();
    let batch = Batch::new(count, Slicing::new(1024, 4), true, &Arc::default()).unwrap();
    for (index, &opcode) in opcodes.iter().enumerate() {
        let (source, target) = (local.span().first, SegmentId::LOCAL);
        let request = TransferRequest { opcode, source, target, target_offset: 0, length };
        batch.shared.tasks.get(index).start(&request, &batch.shared.slicing, deadline);
    }
    batch.shared.added(count);
    let text = r#"{"name":"nvmeof/a:1/f","protocol":"nvmeof","buffers":[{"length":4096,"file_path":"/f"}]}"#;
    let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
    let segment = SegmentTable::new(descriptor).by_id(SegmentId::LOCAL).unwrap();
    let run = Run {
        transport: 0,
        transport_name: super::super::NAME,
        copies: false,
        tasks: 0..count,
        claimed: 0,
        allowed: crate::path::Allowed::default(),
        local: Arc::clone(local),
        view: segment.view(),
        segment,
        buffer: 0,
    };
    flow.push(Entry::new(&batch.shared, &run, false));
    batch
}

/// Begins so many parts; their ids.
fn begin(flow: &mut Flow, count: usize) -> Vec<u64> {
    (0..count).map(|_| flow.begin(usize::MAX).unwrap().id).collect()
}

/// The connection breaks, and cannot be fenced.
fn lose(flow: &mut Flow) {
    flow.take_lost(false).fail(&FailureReason::File("it broke".into()));
}

/// The connection breaks, and can be fenced.
fn lose_behind_fence(flow: &mut Flow) {
    flow.take_lost(true).fail(&FailureReason::File("it broke".into()));
}

fn state(batch: &Batch, index: usize) -> TransferState {
    batch.status(index).unwrap().state
}

/// Which tasks have failed.
fn failed(batch: &Batch) -> Vec<usize> {
    let count = batch.shared.tasks.len();
    (0..count).filter(|&index| state(batch, index) == TransferState::Failed).collect()
}

#[test]
fn a_read_counts_the_connections_that_were_lost_after_it_was_sent_over_them() {
    let (mut flow, room) = (Flow::default(), Room::new(LENGTH as usize));
    let batch = submit(&mut flow, &room, &[Opcode::Read; 3]);
    begin(&mut flow, 3);
    lose(&mut flow);
    // The first one only is sent over these, while the others wait for their turn.
    for _ in 1..MAX_ATTEMPTS {
        begin(&mut flow, 1);
        lose(&mut flow);
    }
    assert!(failed(&batch).is_empty());
    begin(&mut flow, 1);
    lose(&mut flow);
    assert_eq!(failed(&batch), [0]);
    for _ in 1..MAX_ATTEMPTS {
        begin(&mut flow, 2);
        lose(&mut flow);
    }
    assert_eq!(failed(&batch), [0]);
    let ids = begin(&mut flow, 2);
    flow.end(ids[0], Outcome::Done).unwrap().tell(&mut EndedTasks::default());
    lose(&mut flow);
    assert_eq!(failed(&batch), [0, 2]);
    assert_eq!(state(&batch, 1), TransferState::Completed);
    assert!(flow.has_nothing_to_begin() && flow.is_at_rest());
}

#[test]
fn writes_that_fail_with_a_connection_leave_the_queue() {
    let (mut flow, room) = (Flow::default(), Room::new(LENGTH as usize));
    // They wait, as does all that was submitted after it.
    let writes = submit(&mut flow, &room, &[Opcode::Write; 2]);
    lose(&mut flow);
    assert_eq!(failed(&writes), [0, 1]);
    assert!(flow.has_nothing_to_begin(), "nobody connects for what has failed");
    let writes = submit(&mut flow, &room, &[Opcode::Write; 2]);
    let both = submit(&mut flow, &room, &[Opcode::Write, Opcode::Read, Opcode::Write]);
    lose(&mut flow);
    assert_eq!((failed(&writes), failed(&both)), (vec![0, 1], vec![0, 2]));
    let read = flow.begin(usize::MAX).unwrap();
    assert_eq!(read.opcode, Opcode::Read);
    assert!(flow.begin(usize::MAX).is_none() && flow.has_nothing_to_begin());
    flow.end(read.id, Outcome::Done).unwrap().tell(&mut EndedTasks::default());
    assert_eq!(state(&both, 1), TransferState::Completed);
}

#[test]
fn behind_a_fence_writes_are_sent_again_so_often_as_reads() {
    let (mut flow, room) = (Flow::default(), Room::new(LENGTH as usize));
    let batch = submit(&mut flow, &room, &[Opcode::Write, Opcode::Read]);
    let waiting = submit(&mut flow, &room, &[Opcode::Write]);
    begin(&mut flow, 2);
    for _ in 0..MAX_ATTEMPTS {
        assert!(flow.has_writes());
        lose_behind_fence(&mut flow);
        assert!(!flow.has_writes(), "none was begun over the next connection");
        let mut begun = [(); 2].map(|()| flow.begin(usize::MAX).unwrap().opcode);
        begun.sort_unstable_by_key(|&opcode| opcode as u8);
        assert_eq!(begun, [Opcode::Read, Opcode::Write]);
    }
    assert!(failed(&batch).is_empty());
    lose_behind_fence(&mut flow);
    assert_eq!(failed(&batch), [0, 1]);
    assert!(batch.status(0).unwrap().target_undefined);
    let ids = begin(&mut flow, 1);
    flow.end(ids[0], Outcome::Done).unwrap().tell(&mut EndedTasks::default());
    assert_eq!(state(&waiting, 0), TransferState::Completed);
}

#[test]
fn writes_whose_fence_is_not_confirmed_fail_and_all_else_goes_on() {
    let (mut flow, room) = (Flow::default(), Room::new(LENGTH as usize));
    let batch = submit(&mut flow, &room, &[Opcode::Write, Opcode::Read]);
    let waiting = submit(&mut flow, &room, &[Opcode::Write]);
    begin(&mut flow, 2);
    lose_behind_fence(&mut flow);
    flow.take_unconfirmed().fail(&FailureReason::File("it did not confirm".into()));
    assert_eq!(failed(&batch), [0]);
    assert!(batch.status(0).unwrap().target_undefined);
    for _ in 0..2 {
        let part = flow.begin(usize::MAX).unwrap();
        flow.end(part.id, Outcome::Done).unwrap().tell(&mut EndedTasks::default());
    }
    assert_eq!(state(&batch, 1), TransferState::Completed);
    assert_eq!(state(&waiting, 0), TransferState::Completed);
    assert!(flow.begin(usize::MAX).is_none());
    assert!(flow.has_nothing_to_begin() && flow.is_at_rest());
}

/// What was sent over the connection that was lost may have been done, in part.
#[test]
fn a_write_that_is_refused_when_it_is_sent_again_leaves_its_target_undefined() {
    for again in [false, true] {
        let (mut flow, room) = (Flow::default(), Room::new(LENGTH as usize));
        let batch = submit(&mut flow, &room, &[Opcode::Write]);
        let mut ids = begin(&mut flow, 1);
        if again {
            lose_behind_fence(&mut flow);
            ids = begin(&mut flow, 1);
        }
        let ended = flow.end(ids[0], Outcome::UnknownFile).unwrap();
        ended.tell(&mut EndedTasks::default());
        let status = batch.status(0).unwrap();
        assert_eq!((status.state, status.target_undefined), (TransferState::Failed, again));
        let text = status.error.unwrap().to_string();
        assert_eq!(text.contains("what the file holds there is undefined"), again, "{text}");
    }
}

/// It ends once the fence is confirmed, or when that was awaited for long enough.
#[test]
fn a_write_that_is_canceled_before_its_fence_is_confirmed_waits_for_that() {
    for confirmed in [true, false] {
        let (mut flow, room) = (Flow::default(), Room::new(LENGTH as usize));
        let batch = submit(&mut flow, &room, &[Opcode::Write]);
        begin(&mut flow, 1);
        lose_behind_fence(&mut flow);
        assert!(batch.task(0).unwrap().cancel());
        let now = Instant::now();
        flow.look_after_unconnected(now).tell();
        assert_ne!(state(&batch, 0), TransferState::Canceled);
        if confirmed {
            let id = begin(&mut flow, 1)[0];
            assert!(!flow.enter(id), "it is not sent");
            flow.end(id, Outcome::Abandoned).unwrap().tell(&mut EndedTasks::default());
        } else {
            flow.look_after_unconnected(now + Duration::from_secs(3)).tell();
        }
        let status = batch.status(0).unwrap();
        assert_eq!((status.state, status.target_undefined), (TransferState::Canceled, !confirmed));
    }
}

#[test]
fn who_is_late_when_it_is_his_turn_is_told_without_the_lock() {
    let (mut flow, room) = (Flow::default(), Room::new(LENGTH as usize));
    let opcodes = [Opcode::Read, Opcode::Write];
    let late = submit_until(&mut flow, &room.local, LENGTH, &opcodes, Some(Instant::now()));
    let timely = submit(&mut flow, &room, &[Opcode::Read]);
    // Whoever begins has the lock.
    begin(&mut flow, 1);
    assert!((0..2).all(|index| state(&late, index) != TransferState::Timeout));
    flow.take_late().tell();
    assert!((0..2).all(|index| state(&late, index) == TransferState::Timeout));
    assert!(flow.take_late().is_empty() && state(&timely, 0) != TransferState::Timeout);
}
