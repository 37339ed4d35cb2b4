//! Between two engines no request costs an allocation, on any thread: submission, posting, the
//! progress threads of both sides, completions. The allocator counts for the whole process, so this
//! one test has a binary to itself.

mod common;

use std::alloc::System;
use std::time::Duration;

use common::{LONG, address, engine_with, private, request, shared};
use millstream_transfer::{Opcode, RdmaConfig, TransferEngine, TransferRequest};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BLOCK: u64 = 4096;
/// More than a send queue holds.
const REQUESTS: u64 = 200;
const ROUNDS: usize = 100;

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
    let batches: Vec<_> =
        (0..3 * ROUNDS).map(|_| initiator.allocate_batch(requests.len()).unwrap()).collect();
    let run = |batches: &[millstream_transfer::Batch]| {
        for batch in batches {
            initiator.submit(batch, &requests).unwrap();
            assert!(initiator.wait(batch, LONG));
        }
    };
    // Long enough that every list has had its greatest length, whatever the machine's load.
    let (warm_up, measured) = batches.split_at(2 * ROUNDS);
    run(warm_up);
    let region = Region::new(ALLOCATOR);
    run(measured);
    let change = region.change();
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
    let batches: Vec<_> =
        (0..2 * ROUNDS).map(|_| own.allocate_batch(requests.len()).unwrap()).collect();
    let run = |batches: &[millstream_transfer::Batch]| {
        for batch in batches {
            own.submit(batch, &requests).unwrap();
            assert!(own.wait(batch, LONG));
        }
    };
    let (warm_up, measured) = batches.split_at(ROUNDS);
    run(warm_up);
    let region = Region::new(ALLOCATOR);
    run(measured);
    let change = region.change();
    assert!(change.allocations <= 1 && change.reallocations == 0, "{change:?}");

    let region = Region::new(ALLOCATOR);
    drop(std::hint::black_box(vec![0_u8; 100]));
    assert_eq!(region.change().allocations, 1, "the counter counts");
}
