//! Processes that die, become another program, or stop.

use std::time::Duration;

use millstream_lab::Stopwatch;
use millstream_net::shared_memory::{AccessError, ConnectError, Key, Peer};

use super::actor::{offering, writing};
use super::fixture::{LONG, Offered, write};

#[test]
fn a_process_that_has_ended_is_noticed_at_once() {
    let (mut actor, place) = offering();
    let peer = Peer::connect(&place.socket, place.incarnation).unwrap();
    let regions = place.keys.map(|key| peer.open(key).unwrap());
    actor.child.kill().unwrap();
    actor.child.wait().unwrap();
    for (region, address) in regions.iter().zip(place.addresses) {
        let error = write(&peer, region, address, &[1]).unwrap_err();
        assert!(matches!(error, AccessError::Ended), "{error}");
    }
    assert!(!peer.is_alive());
    let unopened = peer.open(Key(place.keys[0].0 + 1)).unwrap_err();
    assert!(matches!(unopened, AccessError::Ended), "{unopened}");
    let error = Peer::connect(&place.socket, place.incarnation).unwrap_err();
    assert!(matches!(error, ConnectError::Nobody), "{error}");
}

/// A process that was killed while it copied holds nothing up.
#[test]
fn who_is_killed_inside_is_not_waited_for() {
    let offered = Offered::new(16);
    let [mapped, copied] = offered.addresses();
    for (registration, address) in [(&offered.mapped, mapped), (&offered.copied, copied)] {
        let mut actor = writing(&offered, registration, address);
        assert_eq!(actor.hear(), "writing");
        // Nearly always within a copy.
        actor.signal(libc::SIGKILL);
        let stopwatch = Stopwatch::start();
        registration.revoke(LONG).unwrap();
        let took = stopwatch.took();
        assert!(took.own() < Duration::from_secs(1), "{took}");
    }
}

/// It keeps its number, and its memory is gone.
#[test]
fn who_runs_another_program_is_not_waited_for() {
    let offered = Offered::new(16);
    let [mapped, copied] = offered.addresses();
    for (registration, address) in [(&offered.mapped, mapped), (&offered.copied, copied)] {
        let mut actor = writing(&offered, registration, address);
        assert_eq!(actor.hear(), "writing");
        // Nearly always within a copy.
        actor.run_another_program();
        registration.revoke(Duration::ZERO).unwrap();
    }
}

#[test]
fn memory_of_another_program_is_not_accessed() {
    let (mut actor, place) = offering();
    let peer = Peer::connect(&place.socket, place.incarnation).unwrap();
    let regions = place.keys.map(|key| peer.open(key).unwrap());
    assert!(peer.is_alive());
    actor.run_another_program();
    assert!(!peer.is_alive());
    let [mapped, copied] = &regions;
    let error = write(&peer, mapped, place.addresses[0], &[1]).unwrap_err();
    assert!(matches!(error, AccessError::Ended), "{error}");
    assert!(matches!(peer.enter(copied), Err(AccessError::Ended)));
}

/// A process that was stopped while it copied may go on later: the memory is not taken for unused.
#[test]
fn who_is_stopped_inside_is_waited_for_until_the_deadline() {
    for _ in 0..20 {
        let offered = Offered::new(16);
        let mut actor = writing(&offered, &offered.mapped, offered.addresses()[0]);
        assert_eq!(actor.hear(), "writing");
        actor.signal(libc::SIGSTOP);
        actor.wait_until_stopped();
        let Err(error) = offered.mapped.revoke(Duration::from_millis(50)) else {
            // Stopped between two copies.
            continue;
        };
        assert_eq!(error.pid as u32, actor.child.id());
        assert!(offered.mapped.revoke(Duration::from_millis(1)).is_err());
        actor.signal(libc::SIGCONT);
        offered.mapped.revoke(LONG).unwrap();
        assert_eq!(actor.hear(), "the memory is not registered there any more");
        return;
    }
    panic!("never stopped inside");
}
