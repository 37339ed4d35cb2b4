//! Who is let in, and what becomes of those who are not.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::Command;

use millstream_net::shared_memory::{ConnectError, Peer};
use socket2::Socket;

use super::actor::{Actor, milliseconds, starving};
use super::fake;
use super::fixture::{Offered, write};

#[test]
fn another_incarnation_is_refused() {
    let offered = Offered::new(3);
    let error = Peer::connect(offered.offer.socket(), offered.incarnation + 1).unwrap_err();
    assert!(error.to_string().contains("another process than the one that was meant"), "{error}");
}

#[test]
fn nobody_is_let_in_after_the_offer_has_ended() {
    let offered = Offered::new(3);
    let socket = offered.offer.socket().to_owned();
    let peer = offered.connect();
    let Offered { offer, incarnation, memory: _memory, own: _own, mapped, copied } = offered;
    drop(offer);
    let error = Peer::connect(&socket, incarnation).unwrap_err();
    assert!(matches!(error, ConnectError::Nobody), "{error}");
    // Those who were let in before still have to leave.
    assert!(peer.is_alive());
    drop((mapped, copied));
    assert!(!peer.is_alive());
}

/// Needs root, to be somebody else.
fn may_be_another_user() -> bool {
    // SAFETY: no arguments.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("skipped: only root can be another user");
        assert_ne!(std::env::var("MILLSTREAM_REQUIRE").as_deref(), Ok("all"));
    }
    root
}

#[test]
fn another_user_is_refused() {
    if !may_be_another_user() {
        return;
    }
    let offered = Offered::new(3);
    let (socket, incarnation) = (offered.offer.socket(), offered.incarnation);
    let role = format!("write {socket} {incarnation} 0 0");
    let mut actor = Actor::start(&role, |command| {
        command.uid(65_534);
    });
    assert_eq!(actor.hear(), "it belongs to another user: ours is 65534, and its is 0");
}

/// It is sent away by who it is, and not by what it says.
#[test]
fn another_user_is_not_listened_to() {
    if !may_be_another_user() {
        return;
    }
    let offered = Offered::new(3);
    let mut actor = Actor::start(&format!("listen {}", offered.offer.socket()), |command| {
        command.uid(65_534);
    });
    let refusal = actor.hear();
    assert!(refusal.starts_with("[77, 83, 115, 104, 109, "), "{refusal}");
}

/// Has a command run in a user namespace that has our user only, by the number that all others have there.
fn alone(command: &mut Command) {
    let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap();
    // SAFETY: no arguments.
    let own = unsafe { libc::geteuid() };
    let users = format!("{} {own} 1", overflow.trim());
    let enter = move || {
        // SAFETY: no pointers.
        match unsafe { libc::unshare(libc::CLONE_NEWUSER) } {
            0 => std::fs::write("/proc/self/uid_map", &users),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: it only makes system calls, and allocates nothing.
    unsafe { command.pre_exec(enter) };
}

/// Some systems and containers forbid it.
fn may_be_alone() -> bool {
    let mut command = Command::new("true");
    alone(&mut command);
    let entered = command.status();
    if let Err(error) = &entered {
        println!("skipped: no user namespace: {error}");
        assert_ne!(std::env::var("MILLSTREAM_REQUIRE").as_deref(), Ok("all"));
    }
    entered.is_ok()
}

/// In its user namespace, many users have the number of its own one. It neither believes nor lets in any.
#[test]
fn a_user_who_cannot_be_told_from_others_is_refused() {
    if !may_be_alone() {
        return;
    }
    let offered = Offered::new(3);
    let (socket, incarnation) = (offered.offer.socket(), offered.incarnation);
    let mut actor = Actor::start(&format!("write {socket} {incarnation} 0 0"), alone);
    let error = actor.hear();
    assert!(error.starts_with("it belongs to another user: ours is "), "{error}");
    assert!(error.ends_with("run it as another user, or without the user namespace"), "{error}");

    let mut actor = Actor::start("offer", alone);
    let line = actor.hear();
    let (socket, _) = line.split_once(' ').unwrap();
    let mut refusal = [0; 64];
    let length = fake::connect(socket).read(&mut refusal).unwrap();
    assert_eq!(refusal[..length], fake::message(fake::REFUSAL, [0; 4]));
}

/// Connections that say nothing neither keep the thread busy nor stay.
#[test]
fn strangers_are_waited_for_without_work() {
    let (mut actor, socket, incarnation) = starving();
    actor.say("1000");
    let before = milliseconds(&mut actor);
    let mut strangers: Vec<Socket> = (0..80).map(|_| fake::connect(&socket)).collect();
    // The first ones have been sent away, and there is room for the others.
    assert_eq!(strangers[0].read(&mut [0; 64]).unwrap(), 0);
    actor.say("1000");
    let used = milliseconds(&mut actor) - before;
    assert!(used < 200, "{used} ms of a second");
    drop(strangers);
    Peer::connect(&socket, incarnation).unwrap();
}

#[test]
fn want_of_descriptors_is_waited_for_without_work() {
    let (mut actor, socket, incarnation) = starving();
    // It has more already, but not as many to poll.
    actor.say("5");
    let before = milliseconds(&mut actor);
    let error = Peer::connect(&socket, incarnation).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer), "{error}");
    actor.say("1000");
    let used = milliseconds(&mut actor) - before;
    assert!(used < 200, "{used} ms of a second");
    Peer::connect(&socket, incarnation).unwrap();
}

/// It does not say that somebody else is at fault.
#[test]
fn who_lacks_descriptors_is_named() {
    let (mut actor, socket, incarnation) = starving();
    actor.say("one");
    milliseconds(&mut actor);
    let error = Peer::connect(&socket, incarnation).unwrap_err().to_string();
    assert!(error.starts_with("it refused: it lacks what it needs"), "{error}");
    actor.say("1000");
    milliseconds(&mut actor);
    Peer::connect(&socket, incarnation).unwrap();

    let offered = Offered::new(3);
    let (socket, key) = (offered.offer.socket(), offered.mapped.key().0);
    let mut actor = Actor::start(&format!("lack {socket} {} {key}", offered.incarnation), |_| {});
    let error = actor.hear();
    assert!(error.contains("this process may have no more descriptors"), "{error}");
}

/// More than are let in at a time.
#[test]
fn many_come_and_go() {
    let offered = Offered::new(3);
    let address = offered.addresses()[0];
    for _ in 0..600 {
        let peer = offered.connect();
        let region = peer.open(offered.mapped.key()).unwrap();
        write(&peer, &region, address, &[1]).unwrap();
    }
}
