//! Several initiators, and one that knows something wrong.

use std::thread;

use millstream_transfer::{Opcode, SubmitOptions, TcpConfig, TransferState};

use super::fixture::{descriptor, engine, framings, saying};
use crate::common::{LONG, contents, pattern, private, request, shared};

/// The descriptor says more than is registered, as an old one does: the target refuses, and says so.
#[test]
fn what_the_target_refuses_fails_with_the_reason_and_nothing_else_does() {
    for (name, config) in framings() {
        let (target, initiator) = (engine(TcpConfig::default()), engine(config));
        let (remote, local) = (shared(&target, 4096), private(&initiator, 8192));
        local.write(0, &[7; 8192]).unwrap();
        let mut said = descriptor(&target);
        said.buffers[0].length = 1 << 30;
        let (_server, segment) = saying(&initiator, target.listening_at().ip(), said);
        for opcode in [Opcode::Read, Opcode::Write] {
            let one = |offset| request(opcode, (&local, 0), &segment, offset, 64);
            let requests = [one(0), one(512 << 20), one(64)];
            let batch = initiator.submit_new(&requests, &SubmitOptions::default()).unwrap();
            assert!(initiator.wait(&batch, LONG), "{name}: {opcode:?} hangs");
            let statuses = initiator.statuses(&batch);
            let [first, refused, last] = &statuses[..] else { panic!("{statuses:?}") };
            for status in [first, last] {
                let error = &status.error;
                assert_eq!(status.state, TransferState::Completed, "{name}: {opcode:?} {error:?}");
            }
            if refused.unconfirmed {
                // Nobody says it in version 1.
                continue;
            }
            assert_eq!(refused.state, TransferState::Failed, "{name}: {opcode:?}");
            let error = refused.error.as_ref().unwrap().to_string();
            assert!(error.contains("registered there") || error.contains("rejected"), "{error}");
        }
        drop(remote);
    }
}

/// More initiators than one, each with its range and several threads, in each framing at once.
#[test]
fn many_initiators_at_once() {
    const EACH: u64 = 256 << 10;
    const ROUNDS: u64 = 8;
    let target = engine(TcpConfig::default());
    let kinds: Vec<_> = framings().into_iter().cycle().take(8).collect();
    let remote = shared(&target, (EACH * kinds.len() as u64) as usize);
    thread::scope(|scope| {
        for (index, (name, config)) in (0_u64..).zip(kinds) {
            let (target, remote) = (&target, &remote);
            scope.spawn(move || {
                let initiator = engine(config);
                let local = private(&initiator, 2 * EACH as usize);
                let segment = initiator.open_segment(target.name()).unwrap();
                for round in 0..ROUNDS {
                    let bytes = pattern(EACH as usize, index << 8 | round);
                    local.write(0, &bytes).unwrap();
                    let part = |opcode, from: u64, at: u64| {
                        let at = at * EACH / 4;
                        request(opcode, (&local, from + at), &segment, index * EACH + at, EACH / 4)
                    };
                    let writes = [0, 1, 2, 3].map(|at| part(Opcode::Write, 0, at));
                    initiator.submit_and_wait(&writes, LONG).unwrap();
                    // Version 1 confirms no WRITE.
                    let (first, count) = ((index * EACH) as usize, EACH as usize);
                    while name == "version 1" && contents(remote, first, count) != bytes {
                        thread::yield_now();
                    }
                    let reads = [0, 1, 2, 3].map(|at| part(Opcode::Read, EACH, at));
                    initiator.submit_and_wait(&reads, LONG).unwrap();
                    assert!(contents(&local, count, count) == bytes, "{name} {index} {round}");
                }
            });
        }
    });
}
