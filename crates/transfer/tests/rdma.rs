//! Engines that move bytes between each other over soft devices on loopback addresses.

mod common;

use common::{LONG, contents, engine, pattern, private, request, shared};
use millstream_transfer::{Opcode, TransferState};

const MIB: usize = 1 << 20;

#[test]
fn bytes_arrive_and_come_back_whatever_their_number() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 64 * MIB + 13);
    let local = private(&initiator, 64 * MIB + 13);
    let segment = initiator.open_segment(target.name()).unwrap();
    for (seed, length) in
        [1, 2, 4095, 4096, 4097, 65_535, 65_536, 81_920, 81_921, 3 * MIB + 7, 64 * MIB]
            .into_iter()
            .enumerate()
    {
        // Neither end on a boundary, but for the longest.
        let offset = 13;
        let bytes = pattern(length, seed as u64 + 1);
        local.write(offset, &bytes).unwrap();
        let write =
            request(Opcode::Write, (&local, offset as u64), &segment, offset as u64, length as u64);
        assert_eq!(initiator.submit_and_wait(&[write], LONG).unwrap(), length as u64);
        assert!(contents(&remote, offset, length) == bytes, "written: {length}");

        local.write(offset, &vec![0xee; length]).unwrap();
        let read =
            request(Opcode::Read, (&local, offset as u64), &segment, offset as u64, length as u64);
        assert_eq!(initiator.submit_and_wait(&[read], LONG).unwrap(), length as u64);
        assert!(contents(&local, offset, length) == bytes, "read: {length}");
    }
}

#[test]
fn nothing_beyond_a_request_is_touched() {
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, MIB);
    let local = private(&initiator, MIB);
    local.write(0, &[0xaa; MIB]).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 1001, 300_001);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    let bytes = contents(&remote, 0, MIB);
    assert!(bytes[..1001].iter().all(|&byte| byte == 0));
    assert!(bytes[1001..301_002].iter().all(|&byte| byte == 0xaa));
    assert!(bytes[301_002..].iter().all(|&byte| byte == 0));
}

#[test]
fn many_small_requests_from_two_threads() {
    const REQUESTS: usize = 3000;
    const STRIDE: usize = 512;
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, 2 * REQUESTS * STRIDE);
    let segment = initiator.open_segment(target.name()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (initiator, segment, remote) = (&initiator, &segment, &remote);
            scope.spawn(move || {
                let bytes = pattern(REQUESTS * STRIDE, thread as u64 + 1);
                let local = private(initiator, bytes.len());
                local.write(0, &bytes).unwrap();
                let start = thread * REQUESTS * STRIDE;
                let batch = initiator.allocate_batch(REQUESTS).unwrap();
                let mut expected = vec![0; bytes.len()];
                for number in 0..REQUESTS {
                    let (offset, length) = (number * STRIDE, 1 + number % STRIDE);
                    expected[offset..offset + length]
                        .copy_from_slice(&bytes[offset..offset + length]);
                    let write = request(
                        Opcode::Write,
                        (&local, offset as u64),
                        segment,
                        (start + offset) as u64,
                        length as u64,
                    );
                    // One at a time: the batch grows while it runs.
                    initiator.submit(&batch, &[write]).unwrap();
                }
                assert!(initiator.wait(&batch, LONG));
                for status in initiator.statuses(&batch) {
                    assert_eq!(status.state, TransferState::Completed);
                }
                initiator.free(batch).unwrap();
                assert!(contents(remote, start, bytes.len()) == expected);
            });
        }
    });
}

#[test]
fn requests_go_both_ways_at_the_same_time() {
    let (one, two) = (engine(1), engine(1));
    std::thread::scope(|scope| {
        for (own, other, seed) in [(&one, &two, 1), (&two, &one, 2)] {
            // The buffers of both are published before either is opened: nobody waits.
            let remote = shared(other, 4 * MIB);
            scope.spawn(move || {
                let local = private(own, 8 * MIB);
                let bytes = pattern(4 * MIB, seed);
                local.write(0, &bytes).unwrap();
                let segment = own.open_segment(other.name()).unwrap();
                let length = 4 * MIB as u64;
                let write = request(Opcode::Write, (&local, 0), &segment, 0, length);
                own.submit_and_wait(&[write], LONG).unwrap();
                let read = request(Opcode::Read, (&local, length), &segment, 0, length);
                own.submit_and_wait(&[read], LONG).unwrap();
                assert!(contents(&local, 4 * MIB, 4 * MIB) == bytes);
                assert!(contents(&remote, 0, 4 * MIB) == bytes);
            });
        }
    });
}

#[test]
fn several_devices_share_the_work() {
    for (targets, initiators) in [(2, 2), (1, 3), (2, 1)] {
        let (target, initiator) = (engine(targets), engine(initiators));
        assert_eq!((target.devices().len(), initiator.devices().len()), (targets, initiators));
        let remote = shared(&target, 8 * MIB);
        let local = private(&initiator, 8 * MIB);
        let bytes = pattern(8 * MIB, 7);
        local.write(0, &bytes).unwrap();
        let segment = initiator.open_segment(target.name()).unwrap();
        let parts: Vec<_> = (0..4)
            .map(|part| part * 2 * MIB as u64)
            .map(|at| request(Opcode::Write, (&local, at), &segment, at, 2 * MIB as u64))
            .collect();
        assert_eq!(initiator.submit_and_wait(&parts, LONG).unwrap(), 8 * MIB as u64);
        assert!(contents(&remote, 0, 8 * MIB) == bytes);
    }
}

#[test]
fn several_queue_pairs_share_the_work() {
    let config = |pairs| millstream_transfer::RdmaConfig {
        queue_pairs_per_endpoint: pairs,
        send_queue_depth: 3,
        ..millstream_transfer::RdmaConfig::new(&[common::address()])
    };
    let (target, initiator) = (common::engine_with(config(1)), common::engine_with(config(4)));
    let remote = shared(&target, 8 * MIB);
    let local = private(&initiator, 8 * MIB);
    let bytes = pattern(8 * MIB, 9);
    local.write(0, &bytes).unwrap();
    let segment = initiator.open_segment(target.name()).unwrap();
    for opcode in [Opcode::Write, Opcode::Read] {
        let all = request(opcode, (&local, 0), &segment, 0, 8 * MIB as u64);
        initiator.submit_and_wait(&[all], LONG).unwrap();
        assert!(contents(&remote, 0, 8 * MIB) == bytes);
        assert!(contents(&local, 0, 8 * MIB) == bytes);
    }
}

#[test]
fn one_engine_reads_what_another_wrote() {
    let (target, writer, reader) = (engine(1), engine(1), engine(1));
    let _remote = shared(&target, MIB);
    let bytes = pattern(MIB, 3);
    let from = private(&writer, MIB);
    from.write(0, &bytes).unwrap();
    let segment = writer.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&from, 0), &segment, 0, MIB as u64);
    writer.submit_and_wait(&[write], LONG).unwrap();
    // COMPLETED means applied at the target: another peer sees it.
    let to = private(&reader, MIB);
    let segment = reader.open_segment(target.name()).unwrap();
    let read = request(Opcode::Read, (&to, 0), &segment, 0, MIB as u64);
    reader.submit_and_wait(&[read], LONG).unwrap();
    assert!(contents(&to, 0, MIB) == bytes);
}
