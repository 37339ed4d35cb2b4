//! Processes that are forked off: such a one has one thread, which has all thread-local values and statics of the other
//! process, and locks that its other threads held then.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// See [`forks`].
static FORKS: AtomicU32 = AtomicU32::new(0);

/// How often this process was forked off another one, since this was asked first. What was made at another number is
/// of another process, or of one of its threads: it is left alone there, and nothing of it is waited for.
pub fn forks() -> u32 {
    // No `Once`, which another thread may be in when a process is forked off.
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.load(Ordering::Acquire) && !WATCHED.swap(true, Ordering::AcqRel) {
        // SAFETY: the functions are there as long as this code is, and do only what one may there.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
    }
    FORKS.load(Ordering::Relaxed)
}

/// Held while a library is looked for: the dynamic linker of a process that is forked off meanwhile crashes.
struct Loading(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a mutex is for several threads.
unsafe impl Sync for Loading {}

static LOADING: Loading = Loading(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

/// Does something with the dynamic linker while no process is forked off.
pub(crate) fn loading<R>(load: impl FnOnce() -> R) -> R {
    struct Held;
    impl Drop for Held {
        fn drop(&mut self) {
            after();
        }
    }
    forks();
    before();
    let _held = Held;
    load()
}

extern "C" fn before() {
    // SAFETY: it is initialized, and stays where it is.
    unsafe { libc::pthread_mutex_lock(LOADING.0.get()) };
}

extern "C" fn after() {
    // SAFETY: as above; this thread has locked it, or it is the same one in the process that was forked off.
    unsafe { libc::pthread_mutex_unlock(LOADING.0.get()) };
}

extern "C" fn in_child() {
    after();
    FORKS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(all(test, not(millstream_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_forked_off_has_another_number() {
        let before = forks();
        // SAFETY: the other process does no more than may be done there.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(forks() == before)) };
        }
        assert!(child > 0);
        let mut status = -1;
        // SAFETY: the status is there.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(forks(), before);
    }
}
