//! Threads that wait for batches, or ask how they stand, make the engine's progress.

mod common;

use std::time::{Duration, Instant};

use common::{LONG, contents, engine, pattern, private, request, shared};
use millstream_transfer::{Opcode, TransferState};

const LENGTH: usize = 20_000;

/// Some wait, some ask without a pause, some now and then; over one device and over several.
#[test]
fn each_thread_gets_its_own_batch() {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 150;
    for devices in [1, 3] {
        let (target, initiator) = (engine(devices), engine(devices));
        let remote = shared(&target, THREADS * LENGTH);
        let segment = initiator.open_segment(target.name()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (initiator, segment, remote) = (&initiator, &segment, &remote);
                scope.spawn(move || {
                    let local = private(initiator, LENGTH);
                    let offset = thread * LENGTH;
                    for round in 0..ROUNDS {
                        let bytes = pattern(LENGTH, round * THREADS as u64 + thread as u64);
                        local.write(0, &bytes).unwrap();
                        let place = (offset as u64, LENGTH as u64);
                        let write = request(Opcode::Write, (&local, 0), segment, place.0, place.1);
                        let batch = initiator.allocate_batch(1).unwrap();
                        initiator.submit(&batch, &[write]).unwrap();
                        let end = Instant::now() + LONG;
                        match thread {
                            0 | 1 => assert!(initiator.wait(&batch, LONG)),
                            2 => {
                                while !initiator.status(&batch, 0).unwrap().state.is_final() {
                                    assert!(Instant::now() < end);
                                }
                            }
                            // Each of these waits has a leader of its own, if nobody else leads.
                            _ => {
                                while !initiator.wait(&batch, Duration::from_micros(30)) {
                                    assert!(Instant::now() < end);
                                }
                            }
                        }
                        let status = initiator.status(&batch, 0).unwrap();
                        assert_eq!(status.state, TransferState::Completed);
                        assert!(contents(remote, offset, LENGTH) == bytes);
                        initiator.free(batch).unwrap();
                    }
                });
            }
        });
    }
}

/// More than fits into any window is under way when the only thread that waits goes.
#[test]
fn a_transfer_goes_on_when_nobody_waits() {
    const LONGER: usize = 16 << 20;
    let (target, initiator) = (engine(1), engine(1));
    let remote = shared(&target, LONGER);
    let local = private(&initiator, LONGER);
    let segment = initiator.open_segment(target.name()).unwrap();
    for round in 1..=3 {
        let bytes = pattern(LONGER, round);
        local.write(0, &bytes).unwrap();
        let batch = initiator.allocate_batch(1).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LONGER as u64);
        initiator.submit(&batch, &[write]).unwrap();
        // Far too short, unless this thread is kept from running meanwhile.
        initiator.wait(&batch, Duration::from_micros(100));
        // Only memory tells: asking how it stands would make progress.
        let end = Instant::now() + LONG;
        while contents(&remote, LONGER - 8, 8) != bytes[LONGER - 8..] {
            assert!(Instant::now() < end, "it stands still");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(initiator.wait(&batch, LONG));
        assert!(contents(&remote, 0, LONGER) == bytes);
        initiator.free(batch).unwrap();
    }
}
