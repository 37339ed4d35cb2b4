//! Whether stdin or stdout was closed when this process was started, as by `<&-` or `>&-`.
//!
//! Rust's runtime opens `/dev/null` in place of a closed descriptor before `main`, so that a file
//! opened later does not become stdout. From then on what is printed vanishes without an error, and
//! nothing tells that from an intended `>/dev/null`, which some open for reading too. So this looks
//! before the runtime does.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: [AtomicBool; 2] = [AtomicBool::new(false), AtomicBool::new(false)];

/// An error when this descriptor, 0 or 1, was closed.
pub(crate) fn check(descriptor: i32) -> io::Result<()> {
    match CLOSED.get(descriptor as usize) {
        Some(closed) if closed.load(Ordering::Relaxed) => Err(io::Error::other("it is closed")),
        _ => Ok(()),
    }
}

// SAFETY: the loader calls each function of this section once, before `main`, while there is one
// thread. It is a function of C that makes system calls and writes atomics, and so needs nothing
// that the runtime has yet to set up.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    for (descriptor, closed) in (0..).zip(&CLOSED) {
        // SAFETY: takes no pointers.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
        // It fails only where there is no such descriptor.
        closed.store(flags == -1, Ordering::Relaxed);
    }
}
