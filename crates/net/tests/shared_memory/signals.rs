//! Signals that come to a thread while it waits for another process.

use std::io::Read;
use std::sync::mpsc;
use std::time::Duration;
use std::{mem, ptr, thread};

use millstream_net::shared_memory::{Key, Peer};

use super::fake::{self, FakeOwner, MAPPED, key};
use super::fixture::incarnation;

/// Has signals come to a thread that is alive, or not joined yet. They do nothing.
fn disturb(thread: libc::pthread_t) {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = nothing as *const () as libc::sighandler_t;
    // SAFETY: alive during the call, and the handler does nothing.
    let set = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()) };
    assert_eq!(set, 0);
    for _ in 0..5 {
        // SAFETY: the caller has not joined it.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        thread::sleep(Duration::from_millis(1));
    }
}

/// It answers a little later, and has been waited for until then.
#[test]
fn a_signal_is_not_taken_for_silence() {
    let incarnation = incarnation();
    let owner = FakeOwner::new(incarnation, &[4096]);
    let file = fake::sealed(c"fake-answer", 4096);
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            // SAFETY: no arguments.
            tell.send(unsafe { libc::pthread_self() }).unwrap();
            let peer = Peer::connect(owner.name(), incarnation).unwrap();
            peer.open(Key(key(0))).unwrap();
        });
        let asker = told.recv().unwrap();
        let socket = owner.welcome_after(|| disturb(asker));
        assert_eq!((&socket).read(&mut [0; 64]).unwrap(), 40, "it asks for the memory");
        disturb(asker);
        fake::send(&socket, &fake::message(MAPPED, [key(0), 1, 0, 0]), &[&file]);
        asking.join().unwrap();
    });
}
