//! Engines that end properly when their process does: by `exit`, SIGTERM or SIGINT.

use std::ffi::c_int;
use std::io::Read;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::{mem, ptr, thread};

use millstream_net::{ends_between_forks, forks};

use super::engine::{self, Call};
use super::layout::EnginePointer;
use crate::boundary::{self, Failure, code};

/// Signals that end a process.
const SIGNALS: [c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// Where the handler of signals writes which one came.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// Whose thread reads that.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// At how many of [`forks`] the handlers and their thread were made, and one more; 0 before.
static INSTALLED: AtomicU32 = AtomicU32::new(0);

/// When the process ends, peers and metadata servers are told that the engine does. Signals that the program handles
/// itself are left to it.
#[unsafe(no_mangle)]
pub(super) extern "C" fn enableGracefulShutdown(engine: EnginePointer) {
    boundary::value((), || {
        let engine = Call::on(engine)?;
        // No `Once`, which another thread may be in when a process is forked off.
        let (before, now) = (INSTALLED.load(Ordering::Acquire), forks() + 1);
        let first = before != now
            && INSTALLED.compare_exchange(before, now, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if first {
            let installed = install(before == 0);
            installed
                .map_err(|error| Failure::new(code::CONTEXT, format!("no shutdown: {error}")))?;
        }
        engine.graceful.store(true, Ordering::Relaxed);
        Ok(())
    });
}

/// A fork has the functions and handlers of the other process already, but not its thread.
fn install(first: bool) -> std::io::Result<()> {
    if first {
        // SAFETY: the function is there as long as the library, which is not unloaded: a thread of it runs.
        unsafe { libc::atexit(at_exit) };
    }
    let (reader, writer) = std::io::pipe()?;
    // SAFETY: a plain call.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Release);
    PIPE.store(OwnedFd::from(writer).into_raw_fd(), Ordering::Release);
    thread::Builder::new()
        .name("graceful-shutdown".to_owned())
        .spawn(ends_between_forks(move || end_at(reader)))?;
    for signal in SIGNALS {
        // SAFETY: zero is a `sigaction` without a handler, and the handler does only what one may.
        unsafe {
            let mut before: libc::sigaction = mem::zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut before);
            if before.sa_sigaction == libc::SIG_DFL {
                let mut action: libc::sigaction = mem::zeroed();
                action.sa_sigaction = on_signal as *const () as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
    }
    Ok(())
}

extern "C" fn at_exit() {
    boundary::value((), || {
        engine::destroy_graceful();
        Ok(())
    });
}

/// A handler may do next to nothing: it tells the thread.
extern "C" fn on_signal(signal: c_int) {
    let byte = [signal as u8];
    // SAFETY: `getpid`, `signal`, `kill` and `write` may be called in a handler; the byte is there. The pipe is never
    // closed.
    unsafe {
        if libc::getpid() != PROCESS.load(Ordering::Acquire) {
            // One that was forked off: the pipe leads to the other one, which is not meant.
            libc::signal(signal, libc::SIG_DFL);
            libc::kill(libc::getpid(), signal);
            return;
        }
        libc::write(PIPE.load(Ordering::Acquire), byte.as_ptr().cast(), 1);
    }
}

/// Waits for a signal, ends the engines, and lets the signal do what it does.
fn end_at(mut reader: std::io::PipeReader) {
    let mut byte = [0];
    if reader.read_exact(&mut byte).is_err() {
        return;
    }
    at_exit();
    let signal = c_int::from(byte[0]);
    // SAFETY: plain calls.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
}
