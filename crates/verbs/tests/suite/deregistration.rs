//! Memory that is deregistered while requests for it are under way: it is the owner's alone once
//! the region is dropped, and the queue pair that used it fails.

use millstream_verbs::{Completion, CompletionStatus, Piece, SendOperation};

use crate::harness::{
    End, is_rxe, next, next_good, piece, read_from, register, request, two, write_to,
};

const LENGTH: usize = 65_536;
const REQUESTS: u64 = 48;

/// Posts many requests, and one more when `interfere` has run in the middle of them. All complete.
fn under_load(
    a: &End,
    operation: SendOperation,
    local: Piece,
    interfere: impl FnOnce(),
) -> Vec<Completion> {
    let requests: Vec<_> = (0..REQUESTS).map(|id| request(id, operation, local)).collect();
    a.pair.post_send(&requests).unwrap();
    let mut all = next_good(&a.completions, 1);
    interfere();
    a.pair.post_send(&[request(REQUESTS, operation, local)]).unwrap();
    all.extend(next(&a.completions, REQUESTS as usize));
    assert!(all.iter().map(|c| c.id).eq(0..=REQUESTS), "{all:?}");
    all
}

/// Successes first, then the one failure, then what was flushed.
fn the_failure(all: &[Completion]) -> CompletionStatus {
    let mut rest = all.iter().map(|c| c.status).skip_while(|&s| s == CompletionStatus::Success);
    let failure = rest.next().expect("at least the last one fails");
    assert!(rest.all(|status| status == CompletionStatus::Flushed), "{all:?}");
    failure
}

#[test]
fn the_peers_memory_is_its_own_again() {
    for read in [false, true] {
        let [a, b] = two();
        let (mut here, mut there) = (vec![1; LENGTH], vec![2; LENGTH]);
        let here_region = register(&a, &mut here);
        let there_region = register(&b, &mut there);
        let operation = if read { read_from(&there_region) } else { write_to(&there_region, 0) };
        let all = under_load(&a, operation, piece(&here_region, 0, LENGTH), || {
            drop(there_region);
            there.fill(0x5e);
        });
        assert_eq!(the_failure(&all), CompletionStatus::RemoteAccess, "read: {read}");
        drop(here_region);
        assert!(there.iter().all(|&byte| byte == 0x5e), "written after it was deregistered");
        assert!(!here.contains(&0x5e), "read after it was deregistered");
    }
}

#[test]
fn our_own_memory_is_ours_again() {
    for read in [false, true] {
        let [a, b] = two();
        let (mut here, mut there) = (vec![1; LENGTH], vec![2; LENGTH]);
        let here_region = register(&a, &mut here);
        let there_region = register(&b, &mut there);
        let operation = if read { read_from(&there_region) } else { write_to(&there_region, 0) };
        let all = under_load(&a, operation, piece(&here_region, 0, LENGTH), || {
            drop(here_region);
            here.fill(0x5e);
        });
        let failure = the_failure(&all);
        let expected = failure == CompletionStatus::LocalProtection;
        assert!(expected || is_rxe(&a.device), "read: {read}: {failure}");
        drop(there_region);
        assert!(here.iter().all(|&byte| byte == 0x5e), "written after it was deregistered");
        assert!(!there.contains(&0x5e), "sent after it was deregistered");
    }
}
