//! Memory that goes while it is read and written.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use millstream_transfer::{Opcode, SubmitOptions, TcpConfig, TransferState};

use super::fixture::{Pair, Relay, engine, framings, pair, relayed};
use crate::common::{LONG, contents, private, request, shared};

const LENGTH: u64 = 16 << 20;

/// Once memory is unregistered nothing is written to it any more, whatever is under way.
#[test]
fn nothing_is_written_after_memory_was_unregistered() {
    for (name, config) in framings() {
        let Pair { segment, remote, local, target, initiator } = pair(config, LENGTH as usize);
        local.write(0, &vec![1; LENGTH as usize]).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    let _ = initiator.submit_and_wait(&[write], LONG);
                }
            });
            while contents(&remote, 0, 1) != [1] {
                thread::yield_now();
            }
            target
                .unregister_memory(std::ptr::without_provenance_mut(remote.address() as usize))
                .unwrap();
            remote.write(0, &vec![0; LENGTH as usize]).unwrap();
            thread::sleep(Duration::from_millis(100));
            let found = contents(&remote, 0, LENGTH as usize);
            assert!(found.iter().all(|&byte| byte == 0), "{name}: it was written later");
            done.store(true, Ordering::SeqCst);
        });
    }
}

/// The memory of one request goes; the others of the batch are done.
#[test]
fn own_memory_that_goes_fails_only_its_requests() {
    let (target, initiator) = (engine(TcpConfig::default()), engine(TcpConfig::default()));
    let remote = shared(&target, 2 * LENGTH as usize);
    // Slow enough that it is amid the transfer that memory goes.
    let relay = Relay::start(&target, Duration::from_millis(1));
    let (_server, segment) = relayed(&initiator, &target, &relay);
    for opcode in [Opcode::Write, Opcode::Read] {
        let (going, staying) =
            (private(&initiator, LENGTH as usize), private(&initiator, LENGTH as usize));
        staying.write(0, &vec![2; LENGTH as usize]).unwrap();
        let requests = [
            request(opcode, (&going, 0), &segment, 0, LENGTH),
            request(opcode, (&staying, 0), &segment, LENGTH, LENGTH),
        ];
        let before = relay.moved();
        let batch = initiator.submit_new(&requests, &SubmitOptions::default()).unwrap();
        while relay.moved() - before < 1 << 20 {
            assert!(!initiator.wait(&batch, Duration::from_millis(1)), "it is over already");
        }
        initiator
            .unregister_memory(std::ptr::without_provenance_mut(going.address() as usize))
            .unwrap();
        assert!(initiator.wait(&batch, LONG));
        let statuses = initiator.statuses(&batch);
        let [first, second] = &statuses[..] else { panic!("{statuses:?}") };
        assert_eq!(first.state, TransferState::Failed, "it went at once");
        assert!(first.error.as_ref().unwrap().to_string().contains("unregistered"));
        assert_eq!(second.state, TransferState::Completed, "{:?}", second.error);
    }
    assert!(contents(&remote, LENGTH as usize, LENGTH as usize).iter().all(|&byte| byte == 2));
}
