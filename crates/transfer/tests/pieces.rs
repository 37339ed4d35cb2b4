//! Requests of several pieces, over each transport.

mod common;

use common::{LONG, address, contents, engine, engine_with, pattern, private, shared};
use millstream_transfer::{
    Batch, Buffer, Opcode, Pieces, PiecesRequest, RdmaConfig, Segment, SubmitError, SubmitOptions,
    TransferEngine, TransferPiece, TransferState,
};

const LENGTH: usize = 1 << 20;

struct Ends {
    target: TransferEngine,
    initiator: TransferEngine,
}

/// Two engines with `rdma` between them, also with queues that hold few pieces, and with `shm`.
fn all() -> Vec<(&'static str, Ends)> {
    let rdma = Ends { target: engine(2), initiator: engine(2) };
    let shm = Ends { target: engine(1), initiator: engine(1) };
    for engine in [&shm.target, &shm.initiator] {
        engine.install_shm().unwrap();
    }
    let short = |queue_pairs| RdmaConfig {
        queue_pairs_per_endpoint: queue_pairs,
        send_queue_depth: 24,
        ..RdmaConfig::new(&[address(), address()])
    };
    let few = Ends { target: engine_with(short(1)), initiator: engine_with(short(3)) };
    vec![("rdma", rdma), ("rdma with short queues", few), ("shm", shm)]
}

fn submit(
    engine: &TransferEngine,
    request: PiecesRequest<'_>,
) -> Result<(Batch, TransferState), SubmitError> {
    let batch = engine.allocate_batch(1).unwrap();
    engine.submit_pieces(&batch, &[request], &SubmitOptions::default())?;
    assert!(engine.wait(&batch, LONG));
    let status = engine.status(&batch, 0).unwrap();
    assert!(status.error.is_none(), "{status:?}");
    Ok((batch, status.state))
}

/// Where the pieces of a list come from, at the one side and at the other.
fn scattered(local: &Buffer, segment: &Segment) -> Vec<TransferPiece> {
    let to = |offset| segment.address_of(0, offset, 1).unwrap();
    let piece = |source: u64, target: u64, length| TransferPiece {
        source: local.address() + source,
        target_offset: to(target),
        length,
    };
    // Long and short ones, in no order, some one after the other at one side or at both.
    vec![
        piece(500_000, 1000, 200_000),
        piece(0, 300_000, 1),
        piece(1, 300_001, 4095),
        piece(10_000, 304_096, 70_000),
        piece(400_000, 0, 1000),
        piece(900_000, 900_000, 100_000),
    ]
}

#[test]
fn lists_and_strides_arrive_where_they_should() {
    for (name, Ends { target, initiator }) in all() {
        let remote = shared(&target, LENGTH);
        let local = private(&initiator, LENGTH);
        let segment = initiator.open_segment(target.name()).unwrap();
        for opcode in [Opcode::Write, Opcode::Read] {
            let (here, there) = (pattern(LENGTH, 1), pattern(LENGTH, 2));
            local.write(0, &here).unwrap();
            remote.write(0, &there).unwrap();
            let list = scattered(&local, &segment);
            let strided = TransferPiece {
                source: local.address() + 100_000,
                target_offset: segment.address_of(0, 400_000, 1).unwrap(),
                length: 333,
            };
            let strided = Pieces::Strided {
                first: strided,
                count: 100,
                source_stride: 700,
                target_stride: 999,
            };
            let (mut expected_here, mut expected_there) = (here.clone(), there.clone());
            let mut exchange = |source: u64, target: u64, length: u64| {
                let near = (source - local.address()) as usize..;
                let far = (target - segment.address_of(0, 0, 1).unwrap()) as usize..;
                let length = length as usize;
                match opcode {
                    Opcode::Write => {
                        expected_there[far][..length].copy_from_slice(&here[near][..length]);
                    }
                    Opcode::Read => {
                        expected_here[near][..length].copy_from_slice(&there[far][..length]);
                    }
                }
            };
            list.iter().for_each(|piece| exchange(piece.source, piece.target_offset, piece.length));
            let Pieces::Strided { first, count, source_stride, target_stride } = strided else {
                unreachable!()
            };
            for index in 0..u64::from(count) {
                let (near, far) = (index * source_stride, index * target_stride);
                exchange(first.source + near, first.target_offset + far, first.length);
            }
            for pieces in [Pieces::List(&list), strided] {
                let request = PiecesRequest { opcode, target: segment.id(), pieces };
                let (batch, state) = submit(&initiator, request).unwrap();
                assert_eq!(state, TransferState::Completed, "{name}");
                let moved = initiator.status(&batch, 0).unwrap().transferred_bytes;
                let all = match pieces {
                    Pieces::List(list) => list.iter().map(|piece| piece.length).sum(),
                    Pieces::Strided { first, count, .. } => first.length * u64::from(count),
                };
                assert_eq!(moved, all, "{name}");
            }
            assert!(contents(&local, 0, LENGTH) == expected_here, "{name} {opcode:?}");
            assert!(contents(&remote, 0, LENGTH) == expected_there, "{name} {opcode:?}");
        }
    }
}

#[test]
fn pieces_that_cannot_be_are_refused() {
    let (target, initiator) = (engine(1), engine(1));
    let _remote = shared(&target, 1000);
    let local = private(&initiator, 1000);
    let segment = initiator.open_segment(target.name()).unwrap();
    let good = TransferPiece {
        source: local.address(),
        target_offset: segment.address_of(0, 0, 1).unwrap(),
        length: 10,
    };
    let refused = |list: &[TransferPiece]| {
        let pieces = Pieces::List(list);
        let request = PiecesRequest { opcode: Opcode::Write, target: segment.id(), pieces };
        submit(&initiator, request).unwrap_err()
    };
    let beyond = |source, target| TransferPiece {
        source: good.source + source,
        target_offset: good.target_offset + target,
        ..good
    };
    assert!(matches!(refused(&[]), SubmitError::ZeroLength { index: 0 }));
    let empty = TransferPiece { length: 0, ..good };
    assert!(matches!(refused(&[good, empty]), SubmitError::ZeroLength { .. }));
    let wraps = TransferPiece { source: u64::MAX, ..good };
    assert!(matches!(refused(&[good, wraps]), SubmitError::Overflow { .. }));
    assert!(matches!(refused(&[good, beyond(991, 0)]), SubmitError::SourceNotRegistered { .. }));
    assert!(matches!(refused(&[good, beyond(0, 991)]), SubmitError::TargetOutOfRange { .. }));
}

/// Enough for them to go around the caches, four at a time; one is left over.
#[test]
fn pieces_of_one_length_arrive_where_they_should() {
    const COUNT: usize = 261;
    for length in [1024, 4096, 4999] {
        let bytes = 300 * 5010;
        let mut all = all();
        let alone = engine(1);
        for (name, Ends { target, initiator }) in &mut all {
            let (remote, local) = (shared(target, bytes), private(initiator, bytes));
            let segment = initiator.open_segment(target.name()).unwrap();
            exchange(name, initiator, &local, (&remote, &segment), length, COUNT);
        }
        let (remote, local) = (shared(&alone, bytes), shared(&alone, bytes));
        let segment = alone.open_segment(alone.name()).unwrap();
        exchange("local", &alone, &local, (&remote, &segment), length, COUNT);
    }
}

fn exchange(
    name: &str,
    engine: &TransferEngine,
    local: &Buffer,
    (remote, segment): (&Buffer, &Segment),
    length: usize,
    count: usize,
) {
    let (near, far) = (5000, 5003);
    for opcode in [Opcode::Write, Opcode::Read] {
        let (here, there) = (pattern(local.length(), 5), pattern(local.length(), 6));
        local.write(0, &here).unwrap();
        remote.write(0, &there).unwrap();
        let first = TransferPiece {
            source: local.address() + 7,
            target_offset: remote.address() + 64,
            length: length as u64,
        };
        let (source_stride, target_stride) = (near as u64, far as u64);
        let pieces = Pieces::Strided { first, count: count as u32, source_stride, target_stride };
        let request = PiecesRequest { opcode, target: segment.id(), pieces };
        let (_, state) = submit(engine, request).unwrap();
        assert_eq!(state, TransferState::Completed, "{name}");
        let (mut expected_here, mut expected_there) = (here.clone(), there.clone());
        for index in 0..count {
            let (a, b) = (7 + index * near, 64 + index * far);
            match opcode {
                Opcode::Write => {
                    expected_there[b..b + length].copy_from_slice(&here[a..a + length]);
                }
                Opcode::Read => {
                    expected_here[a..a + length].copy_from_slice(&there[b..b + length]);
                }
            }
        }
        assert!(contents(local, 0, here.len()) == expected_here, "{name} {opcode:?} {length}");
        assert!(contents(remote, 0, there.len()) == expected_there, "{name} {opcode:?} {length}");
    }
}
