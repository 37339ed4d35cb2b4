//! Connections that are closed to make room for others.

use std::time::Duration;

use millstream_lab::Stopwatch;
use millstream_transfer::{Config, Opcode, RdmaConfig, TransferEngine};

use super::fixture::MIB;
use crate::common::{
    self, LONG, address, contents, devices, engine, engine_with, pattern, private, request, shared,
};

#[test]
fn at_the_limit_the_oldest_connection_makes_room() {
    let limited = RdmaConfig { max_accepted_queue_pairs: 1, ..RdmaConfig::new(&[address()]) };
    let target = engine_with(limited);
    let remote = shared(&target, 100);
    let (first, second) = (engine(1), engine(1));
    let write = |engine: &TransferEngine, byte| {
        let local = private(engine, 100);
        local.write(0, &[byte; 100]).unwrap();
        let segment = engine.open_segment(target.name()).unwrap();
        engine.submit_and_wait(&[request(Opcode::Write, (&local, 0), &segment, 0, 100)], LONG)
    };
    write(&first, 1).unwrap();
    // Whoever was killed does not say goodbye, so the oldest makes room.
    write(&second, 2).unwrap();
    assert_eq!(contents(&remote, 0, 100), [2; 100]);
    // If it was still there, it connects again.
    write(&first, 3).unwrap();
    assert_eq!(contents(&remote, 0, 100), [3; 100]);
}

/// By silence, an engine would learn after so long that its connection is gone.
const SILENT: Duration = Duration::from_secs(2);

#[test]
fn who_made_room_for_another_connects_again_at_once() {
    let limited = RdmaConfig { max_accepted_queue_pairs: 1, ..RdmaConfig::new(&[address()]) };
    let target = engine_with(limited);
    let remote = shared(&target, 2 << 20);
    let device = address();
    let config = Config { host: Some("localhost".to_owned()), ..common::config(device) };
    let named = TransferEngine::new(config).unwrap();
    named.install_rdma(RdmaConfig::new(&[device])).unwrap();
    // The name of the second is no address.
    let initiators = [engine(1), named];
    let locals = [0, 1].map(|index: usize| private(&initiators[index], 1 << 20));
    let write = |index: usize, round: u64| {
        let bytes = pattern(1 << 20, 2 * round + index as u64);
        locals[index].write(0, &bytes).unwrap();
        let segment = initiators[index].open_segment(target.name()).unwrap();
        let offset = index as u64 * MIB;
        let write = request(Opcode::Write, (&locals[index], 0), &segment, offset, MIB);
        initiators[index].submit_and_wait(&[write], LONG).unwrap();
        assert!(contents(&remote, index << 20, 1 << 20) == bytes, "{index} {round}");
    };
    let mut all: Vec<Duration> = (0..20)
        .map(|turn| {
            let stopwatch = Stopwatch::start();
            write(turn % 2, turn as u64 / 2);
            stopwatch.took().own()
        })
        .collect();
    println!("20 by turns: {all:?}");
    // Each of them would take so long, wherever it runs. Emulated processors need a while for the bytes, too.
    all.sort_unstable();
    assert!(all[15] < SILENT / if devices::are_of_the_system() { 2 } else { 20 }, "{all:?}");
    // And so do those that drive out each other in the middle of it.
    std::thread::scope(|scope| {
        for index in [0, 1] {
            let write = &write;
            scope.spawn(move || (10..20).for_each(|round| write(index, round)));
        }
    });
}

/// The connection to the one is closed to make room for that to the other.
#[test]
fn an_initiator_with_room_for_one_connection_writes_to_two_targets_by_turns() {
    let initiator = engine_with(RdmaConfig { max_endpoints: 1, ..RdmaConfig::new(&[address()]) });
    let local = private(&initiator, 100);
    let targets = [engine(1), engine(1)];
    let remotes = targets.each_ref().map(|target| shared(target, 100));
    let segments = targets.each_ref().map(|target| initiator.open_segment(target.name()).unwrap());
    for round in 0..10 {
        let (index, byte) = (round % 2, round as u8);
        local.write(0, &[byte; 100]).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segments[index], 0, 100);
        initiator.submit_and_wait(&[write], LONG).unwrap();
        assert_eq!(contents(&remotes[index], 0, 100), [byte; 100]);
    }
}
