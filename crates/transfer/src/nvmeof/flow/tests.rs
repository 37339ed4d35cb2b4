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
    let count = opcodes.len();
    let batch = Batch::new(count, Slicing::new(1024, 4), true, &Arc::default()).unwrap();
    for (index, &opcode) in opcodes.iter().enumerate() {
        let (source, target) = (local.span().first, SegmentId::LOCAL);
        let request = TransferRequest { opcode, source, target, target_offset: 0, length };
        batch.shared.tasks.get(index).start(&request, &batch.shared.slicing, None);
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

/// The connection breaks.
fn lose(flow: &mut Flow) {
    flow.take_all_but_reads().fail(&FailureReason::File("it broke".into()));
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
