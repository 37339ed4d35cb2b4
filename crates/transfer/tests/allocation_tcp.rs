//! Over TCP no request costs an allocation either, on any thread of both ends. The allocator counts for the whole
//! process, so this one test has a binary to itself.

mod common;

use std::alloc::System;

use common::{LONG, address, private, request, shared};
use millstream_transfer::{Config, Opcode, TcpConfig, TransferEngine, TransferRequest};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BLOCK: u64 = 4096;
const REQUESTS: u64 = 100;
const ROUNDS: usize = 100;

#[test]
fn no_request_over_tcp_costs_an_allocation() {
    let engine = || {
        let engine = TransferEngine::new(Config::new(address())).unwrap();
        // One connection: each more is made when it is needed first, however late that is.
        engine.install_tcp(TcpConfig { lanes: 1, ..TcpConfig::default() }).unwrap();
        engine
    };
    let (initiator, target) = (engine(), engine());
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
    let (warm_up, measured) = batches.split_at(2 * ROUNDS);
    run(warm_up);
    let region = Region::new(ALLOCATOR);
    run(measured);
    let change = region.change();
    // A thread that leads for the first time has lists, which it keeps. Nothing comes and goes.
    assert!(change.allocations <= 8 && change.reallocations <= 8, "{change:?}");
    assert_eq!(change.deallocations, 0, "{change:?}");
    drop(remote);

    let region = Region::new(ALLOCATOR);
    drop(std::hint::black_box(vec![0_u8; 100]));
    assert_eq!(region.change().allocations, 1, "the counter counts");
}
