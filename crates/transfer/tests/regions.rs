//! Memory that is longer than a region of a device can be: several regions, each with keys of its own, and
//! one piece of memory for requests.

mod common;

use common::{LONG, address, contents, engine_with, pattern, private, request, shared};
use millstream_transfer::{
    Buffer, Opcode, Pieces, PiecesRequest, RdmaConfig, Segment, SegmentId, SubmitOptions,
    TransferEngine, TransferPiece, TransferRequest,
};

const LENGTH: usize = (1 << 20) + 5000;
const KIB: u64 = 1 << 10;

/// An engine with two soft devices, whose regions have at most so many bytes.
fn engine(max_region_length: u64) -> TransferEngine {
    engine_with(RdmaConfig { max_region_length, ..RdmaConfig::new(&[address(), address()]) })
}

/// Both ends, with memory there and here.
struct Ends {
    initiator: TransferEngine,
    _target: TransferEngine,
    remote: Buffer,
    local: Buffer,
    segment: Segment,
}

fn ends(there: u64, here: u64) -> Ends {
    let (target, initiator) = (engine(there), engine(here));
    let (remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
    let segment = initiator.open_segment(target.name()).unwrap();
    Ends { initiator, _target: target, remote, local, segment }
}

#[test]
fn requests_go_across_the_borders_of_regions() {
    // Borders at the same places, at others, at one end only, and where no slice begins.
    for (there, here) in [
        (256 * KIB, 256 * KIB),
        (256 * KIB, 100 * KIB),
        (1 << 40, 92 * KIB),
        (92 * KIB, 1 << 40),
        (4 * KIB, 8 * KIB),
    ] {
        let Ends { initiator, remote, local, segment, .. } = &ends(there, here);
        let regions = (LENGTH as u64).div_ceil(there);
        assert_eq!(segment.buffers().len() as u64, regions, "a buffer for each region");
        let bytes = pattern(LENGTH, there ^ here);
        local.write(0, &bytes).unwrap();
        // All of it at once, from an offset that differs.
        let whole = request(Opcode::Write, (local, 0), segment, 1000, LENGTH as u64 - 1000);
        initiator.submit_and_wait(&[whole], LONG).unwrap();
        assert!(contents(remote, 1000, LENGTH - 1000) == bytes[..LENGTH - 1000]);
        // In parts, each of which begins where the one before has ended, and backwards.
        let other = pattern(LENGTH, there + here);
        remote.write(0, &other).unwrap();
        let step = 131_071;
        let part = |index: u64| {
            let (at, left) = (index * step, LENGTH as u64 - index * step);
            request(Opcode::Read, (local, at), segment, at, left.min(step))
        };
        let parts: Vec<_> = (0..(LENGTH as u64).div_ceil(step)).rev().map(part).collect();
        initiator.submit_and_wait(&parts, LONG).unwrap();
        assert!(contents(local, 0, LENGTH) == other, "regions of {there} and {here}");
        let beyond = TransferRequest { length: LENGTH as u64 + 1, ..part(0) };
        assert!(initiator.submit_and_wait(&[beyond], LONG).is_err());
        let within = TransferRequest { target_offset: whole.target_offset, ..whole };
        let beyond = TransferRequest { target_offset: within.target_offset + 1, ..within };
        assert!(initiator.submit_and_wait(&[beyond], LONG).is_err(), "a byte beyond the end");
    }
}

#[test]
fn pieces_go_across_the_borders_of_regions() {
    let Ends { initiator, remote, local, segment, .. } = &ends(64 * KIB, 36 * KIB);
    let bytes = pattern(LENGTH, 9);
    local.write(0, &bytes).unwrap();
    let piece = |at: u64, length| TransferPiece {
        source: local.address() + at,
        target_offset: segment.address_of(0, at, length).unwrap(),
        length,
    };
    // Every second 10,000 bytes; then the others, the last one first.
    let (length, count) = (10_000, LENGTH as u64 / 20_000);
    let even = Pieces::Strided {
        first: piece(0, length),
        count: count as u32,
        source_stride: 20_000,
        target_stride: 20_000,
    };
    let rest = LENGTH as u64 - count * 20_000;
    let mut odd: Vec<_> = (0..count).map(|it| piece(it * 20_000 + 10_000, length)).collect();
    odd.push(piece(count * 20_000, rest));
    odd.reverse();
    let (opcode, target) = (Opcode::Write, segment.id());
    let batch = initiator.allocate_batch(2).unwrap();
    for pieces in [even, Pieces::List(&odd)] {
        let request = PiecesRequest { opcode, target, pieces };
        initiator.submit_pieces(&batch, &[request], &SubmitOptions::default()).unwrap();
    }
    assert!(initiator.wait(&batch, LONG));
    for status in initiator.statuses(&batch) {
        assert!(status.error.is_none(), "{:?}", status.error);
    }
    assert!(contents(remote, 0, LENGTH) == bytes);
}

/// Copies within the engine do not care.
#[test]
fn the_own_segment_is_one_piece() {
    let engine = engine(64 * KIB);
    let (from, to) = (shared(&engine, LENGTH), shared(&engine, LENGTH));
    let bytes = pattern(LENGTH, 4);
    from.write(0, &bytes).unwrap();
    let copy = TransferRequest {
        opcode: Opcode::Write,
        source: from.address(),
        target: SegmentId::LOCAL,
        target_offset: to.address(),
        length: LENGTH as u64,
    };
    engine.submit_and_wait(&[copy], LONG).unwrap();
    assert!(contents(&to, 0, LENGTH) == bytes);
}

/// Its descriptor would have no room for all of them.
#[test]
fn there_are_not_more_regions_than_a_descriptor_has_buffers() {
    let engine = engine(4 * KIB);
    let error = engine.allocate_buffer((65_536 << 12) + 1, "*", true).unwrap_err();
    assert!(error.to_string().contains("rdma.max_region_length"), "{error}");
    let buffer = shared(&engine, 1 << 20);
    drop(buffer);
}
