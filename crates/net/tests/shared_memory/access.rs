//! What others can touch, and until when.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use millstream_net::guarded::Caching;
use millstream_net::shared_memory::{AccessError, Key, PATIENCE, Peer};

use super::actor::offering;
use super::fixture::{LENGTH, LONG, Offered, read, write};

#[test]
fn memory_of_another_process_is_read_and_written() {
    let (mut actor, place) = offering();
    let peer = Peer::connect(&place.socket, place.incarnation).unwrap();
    for (index, (key, address)) in place.keys.into_iter().zip(place.addresses).enumerate() {
        assert_eq!(peer.obstacle(key), None);
        assert!(peer.region(key).is_none());
        let region = peer.open(key).unwrap();
        assert!(Arc::ptr_eq(&region, &peer.region(key).unwrap()));
        write(&peer, &region, address + 1000, &[1, 2, 3 + index as u8]).unwrap();
        let mut bytes = [9; 5];
        read(&peer, &region, address + 999, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 1, 2, 3 + index as u8, 0]);
        // Its last byte, and beyond.
        let end = address + LENGTH as u64;
        write(&peer, &region, end - 1, &[7]).unwrap();
        for (target, length) in [
            (end - 1, 2),
            (end, 1),
            (address - 1, 1),
            (u64::MAX, 1),
            (0, LENGTH),
            (address, LENGTH + 1),
        ] {
            let error = write(&peer, &region, target, &vec![1; length]).unwrap_err();
            assert!(matches!(error, AccessError::Unregistered), "{target:#x} {length}: {error}");
        }
    }
    actor.say("1002");
    assert_eq!(actor.hear(), "3 4");
    actor.say("1048575");
    assert_eq!(actor.hear(), "7 7");
    actor.say("revoke");
    assert_eq!(actor.hear(), "revoked");
    for (key, address) in place.keys.into_iter().zip(place.addresses) {
        let region = peer.region(key).unwrap();
        let error = write(&peer, &region, address, &[1]).unwrap_err();
        assert!(matches!(error, AccessError::Unregistered), "{error}");
        assert!(matches!(peer.open(Key(key.0 + (1 << 20))), Err(AccessError::Unregistered)));
    }
}

/// What is written after a revocation has returned stays.
#[test]
fn nothing_is_touched_after_unregistration() {
    const ROUNDS: usize = 2000;
    let offered = Offered::new(16);
    let peer = offered.connect();
    let (memory, length) = (&offered.memory, 4096);
    let [mapped, copied] = offered.addresses();
    for round in 0..ROUNDS {
        let mappable = round % 2 == 0;
        let address = if mappable { mapped } else { copied };
        let memory = mappable.then_some(memory);
        let registration = offered.offer.register(address, length as u64, memory).unwrap();
        let region = peer.open(registration.key()).unwrap();
        let (begun, entered) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let copying = scope.spawn(|| {
                let bytes = vec![round as u8 | 1; length];
                loop {
                    match write(&peer, &region, address, &bytes) {
                        Ok(()) => entered.fetch_add(1, Ordering::Relaxed),
                        Err(error) => return error,
                    };
                    begun.store(true, Ordering::Release);
                }
            });
            while !begun.load(Ordering::Acquire) {
                thread::yield_now();
            }
            registration.revoke(LONG).unwrap();
            let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: it was unregistered, so it is ours alone.
            unsafe { pointer.write_bytes(0, length) };
            let error = copying.join().unwrap();
            assert!(matches!(error, AccessError::Unregistered), "{error}");
            assert_eq!(offered.bytes(length - 1)[usize::from(!mappable)], 0, "round {round}");
            assert_eq!(offered.bytes(0)[usize::from(!mappable)], 0, "round {round}");
        });
    }
}

/// Nor does what was copied meanwhile count, once the owner has stopped waiting.
#[test]
fn what_was_copied_during_a_revocation_does_not_count() {
    let offered = Offered::new(16);
    let peer = offered.connect();
    for (registration, address) in
        [&offered.mapped, &offered.copied].into_iter().zip(offered.addresses())
    {
        let region = peer.open(registration.key()).unwrap();
        let visit = peer.enter(&region).unwrap().unwrap();
        visit.confirm().unwrap();
        assert!(registration.revoke(Duration::ZERO).is_err());
        let bytes = [1; 8];
        // SAFETY: from an array.
        unsafe { visit.write(bytes.as_ptr(), address, bytes.len(), Caching::Through).unwrap() };
        let error = visit.confirm().unwrap_err();
        assert!(matches!(error, AccessError::Unregistered), "{error}");
        drop(visit);
        registration.revoke(PATIENCE).unwrap();
    }
}

#[test]
fn a_full_table_says_so() {
    let offered = Offered::new(3);
    let [_, own] = offered.addresses();
    let third = offered.offer.register(own, 1, None).unwrap();
    let error = offered.offer.register(own, 1, None).unwrap_err();
    assert!(error.to_string().starts_with("no more than 3 pieces"), "{error}");
    drop(third);
    assert!(offered.offer.register(own, 1, None).is_ok());
}

#[test]
fn threads_of_one_peer_have_a_limit_and_no_more_is_lost() {
    let offered = Offered::new(3);
    let peer = offered.connect();
    let region = peer.open(offered.mapped.key()).unwrap();
    let visits: Vec<_> = std::iter::from_fn(|| peer.enter(&region).unwrap()).collect();
    assert_eq!(visits.len(), 64);
    assert!(offered.mapped.revoke(Duration::ZERO).is_err());
    drop(visits);
    offered.mapped.revoke(PATIENCE).unwrap();
}
