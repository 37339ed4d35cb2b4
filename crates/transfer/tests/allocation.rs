//! Between two engines no request costs an allocation, on any thread: submission, posting, the
//! progress threads of both sides, completions. What a batch keeps besides for some of its tasks is allocated
//! once for all of them. The allocator counts for the whole process, so this one test has a binary to itself.

mod common;

use std::alloc::System;
use std::time::{Duration, Instant};

use common::{LONG, address, engine_with, private, request, shared};
use millstream_transfer::{
    Batch, Opcode, Pieces, PiecesRequest, RdmaConfig, SubmitOptions, TransferEngine, TransferPiece,
    TransferRequest, TransferState,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, Stats, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BLOCK: u64 = 4096;
/// More than a send queue holds.
const REQUESTS: u64 = 200;
const ROUNDS: usize = 100;
/// Of requests of pieces: how many there are, and bytes of each.
const PIECES: u64 = 8;
const PIECE: u64 = 256;

/// What batches of so many tasks cost, and these batches, all of which have ended.
fn cost(
    engine: &TransferEngine,
    tasks: usize,
    warm_up: usize,
    submit: &dyn Fn(&Batch),
) -> (Stats, Vec<Batch>) {
    let batches: Vec<_> =
        (0..warm_up + ROUNDS).map(|_| engine.allocate_batch(tasks).unwrap()).collect();
    let run = |batches: &[Batch]| {
        for batch in batches {
            submit(batch);
            assert!(engine.wait(batch, LONG));
        }
    };
    let (warm_up, measured) = batches.split_at(warm_up);
    run(warm_up);
    let region = Region::new(ALLOCATOR);
    run(measured);
    (region.change(), batches)
}

#[test]
fn no_request_costs_an_allocation() {
    // Nobody is asked meanwhile whether he is there.
    let quiet = || RdmaConfig {
        keep_alive_interval: Duration::from_secs(3600),
        ..RdmaConfig::new(&[address()])
    };
    let (initiator, target) = (engine_with(quiet()), engine_with(quiet()));
    let length = (REQUESTS * BLOCK) as usize;
    let (local, remote) = (private(&initiator, length), shared(&target, length));
    let segment = initiator.open_segment(target.name()).unwrap();
    let requests: Vec<TransferRequest> = (0..REQUESTS)
        .map(|index| {
            let opcode = if index % 2 == 0 { Opcode::Write } else { Opcode::Read };
            let at = index * BLOCK;
            request(opcode, (&local, at), &segment, at, BLOCK)
        })
        .collect();
    // Long enough that every list has had its greatest length, whatever the machine's load.
    let (change, _batches) = cost(&initiator, requests.len(), 2 * ROUNDS, &|batch| {
        initiator.submit(batch, &requests).unwrap();
    });
    // The first time that the caller and a progress thread post at once, there is one list more.
    assert!(change.allocations <= 1 && change.reallocations == 0, "{change:?}");
    drop(remote);

    // Copies within an engine, by who submits.
    let own = TransferEngine::new(common::config(address())).unwrap();
    let (local, _remote) = (private(&own, length), shared(&own, length));
    let segment = own.open_segment(own.name()).unwrap();
    let requests: Vec<TransferRequest> = (0..REQUESTS / 2)
        .map(|index| index * BLOCK)
        .map(|at| request(Opcode::Write, (&local, at), &segment, at, BLOCK))
        .collect();
    let (change, _batches) =
        cost(&own, requests.len(), ROUNDS, &|batch| own.submit(batch, &requests).unwrap());
    assert!(change.allocations <= 1 && change.reallocations == 0, "{change:?}");

    // Between two processes' engines by shared memory, here of one process.
    let shm = [(); 2].map(|()| {
        let engine = TransferEngine::new(common::config(address())).unwrap();
        engine.install_shm().unwrap();
        engine
    });
    other_requests("shm", &shm);
    other_requests("rdma", &[initiator, target]);

    let region = Region::new(ALLOCATOR);
    drop(std::hint::black_box(vec![0_u8; 100]));
    assert_eq!(region.change().allocations, 1, "the counter counts");
}

/// Requests of each kind, between two engines. What some tasks have besides, as a deadline or several pieces, is kept in
/// room that a batch gets when the first of them is submitted: one allocation for all of them. A list of pieces is copied,
/// which is one for each request; what is strided is not.
fn other_requests(over: &str, [initiator, target]: &[TransferEngine; 2]) {
    let length = (REQUESTS * BLOCK) as usize;
    let (local, _remote) = (private(initiator, length), shared(target, length));
    let segment = initiator.open_segment(target.name()).unwrap();
    initiator.refresh_segment(segment.id()).unwrap();
    let opcode = |index| if index % 2 == 0 { Opcode::Write } else { Opcode::Read };
    let whole: Vec<TransferRequest> = (0..REQUESTS)
        .map(|index| {
            request(opcode(index), (&local, index * BLOCK), &segment, index * BLOCK, BLOCK)
        })
        .collect();
    let piece = |at| {
        let target_offset = segment.address_of(0, at, PIECE).unwrap();
        TransferPiece { source: local.address() + at, target_offset, length: PIECE }
    };
    let list = |index| (0..PIECES).map(|it| piece(index * BLOCK + 2 * it * PIECE)).collect();
    let lists: Vec<Vec<TransferPiece>> = (0..REQUESTS).map(list).collect();
    let one = |index, pieces| PiecesRequest { opcode: opcode(index), target: segment.id(), pieces };
    let listed: Vec<_> =
        (0..REQUESTS).map(|index| one(index, Pieces::List(&lists[index as usize]))).collect();
    let strides = |index| Pieces::Strided {
        first: piece(index * BLOCK),
        count: PIECES as u32,
        source_stride: 2 * PIECE,
        target_stride: 2 * PIECE,
    };
    let strided: Vec<_> = (0..REQUESTS).map(|index| one(index, strides(index))).collect();
    let plain = SubmitOptions::default();
    let deadline = Some(Instant::now() + Duration::from_secs(3600));
    let timed = SubmitOptions { deadline, ..SubmitOptions::default() };
    let count = |what: &str, for_each_batch: u64, submit: &dyn Fn(&Batch)| {
        let (change, batches) = cost(initiator, whole.len(), 2 * ROUNDS, submit);
        println!("{over}, {what}: {change:?}");
        let most = ROUNDS * for_each_batch as usize + 1;
        assert!(change.allocations <= most, "{over}, {what}: {change:?}");
        assert_eq!(change.reallocations, 0, "{over}, {what}: {change:?}");
        for batch in batches {
            let states = initiator.statuses(&batch).into_iter().map(|status| status.state);
            assert!(states.into_iter().all(|state| state == TransferState::Completed));
        }
    };
    count("whole", 0, &|batch| initiator.submit(batch, &whole).unwrap());
    count("deadlines", 1, &|batch| initiator.submit_with(batch, &whole, &timed).unwrap());
    count("strides", 1, &|batch| initiator.submit_pieces(batch, &strided, &plain).unwrap());
    count("lists", 1 + REQUESTS, &|batch| initiator.submit_pieces(batch, &listed, &plain).unwrap());
}
