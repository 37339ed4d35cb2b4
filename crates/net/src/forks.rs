//! Processes that are forked off: such a one has one thread, which has all thread-local values and statics of the other
//! process, and locks that its other threads held then.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

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
    let _held = Held::lock();
    load()
}

/// Names that are looked up. The C library has locks for that which a process that is forked off meanwhile finds taken for
/// ever (glibc 2.36: `resolv_conf.c`).
static LOOKUPS: AtomicUsize = AtomicUsize::new(0);

/// So often a fork looks whether they are over, each time after a millisecond: it must not wait for a name server that does
/// not answer.
const LOOKS: usize = 200;

/// Looks a name up. Processes are forked off before it begins or after it has ended, unless it takes long.
pub(crate) fn looking_up<R>(look: impl FnOnce() -> R) -> R {
    struct Counted;
    impl Drop for Counted {
        fn drop(&mut self) {
            // Whoever is forked off by the lookup itself has none under way.
            less(&LOOKUPS);
        }
    }
    let held = Held::lock();
    LOOKUPS.fetch_add(1, Ordering::AcqRel);
    let _counted = Counted;
    drop(held);
    look()
}

/// Threads that end. The standard library takes a lock of its own then, after all that the thread was started for: a
/// process that is forked off meanwhile finds it taken for ever, and no thread of it can end any more.
static ENDING: AtomicUsize = AtomicUsize::new(0);

/// So often a fork looks whether they have ended. They wait for nothing but a processor.
const LOOKS_FOR_ENDS: usize = 10_000;

/// What a thread is to do, so that it ends before or after a process is forked off, and not meanwhile. Every thread of a
/// library is started with that.
pub fn ends_between_forks<R>(work: impl FnOnce() -> R) -> impl FnOnce() -> R {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            let held = Held::lock();
            ENDING.fetch_add(1, Ordering::AcqRel);
            // The C library ends it after all that the standard library does at the end of a thread.
            if ENDED.try_with(|_| {}).is_err() {
                less(&ENDING);
            }
            drop(held);
        }
    }
    struct Ended;
    impl Drop for Ended {
        fn drop(&mut self) {
            less(&ENDING);
        }
    }
    thread_local! {
        static ENDED: Ended = const { Ended };
    }
    move || {
        let _ends = Ends;
        work()
    }
}

/// One less, where whoever is counted was not left behind by a fork.
fn less(count: &AtomicUsize) {
    let _ = count.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |count| count.checked_sub(1));
}

/// Waits until there are none, and looks so often at the most; whether there are none.
fn wait_for(count: &AtomicUsize, looks: usize, mut pause: impl FnMut()) -> bool {
    for _ in 0..looks {
        if count.load(Ordering::Acquire) == 0 {
            return true;
        }
        pause();
    }
    false
}

/// Nobody forks, or begins to look up or to load, as long as this is there.
struct Held;

impl Held {
    fn lock() -> Self {
        forks();
        lock();
        Self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        after();
    }
}

fn lock() {
    // SAFETY: it is initialized, and stays where it is.
    unsafe { libc::pthread_mutex_lock(LOADING.0.get()) };
}

extern "C" fn before() {
    lock();
    let pause = || thread::sleep(Duration::from_millis(1));
    // After that a process is forked off all the same.
    let _ = wait_for(&LOOKUPS, LOOKS, pause);
    let _ = wait_for(&ENDING, LOOKS_FOR_ENDS, pause);
}

extern "C" fn after() {
    // SAFETY: as above; this thread has locked it, or it is the same one in the process that was forked off.
    unsafe { libc::pthread_mutex_unlock(LOADING.0.get()) };
}

extern "C" fn in_child() {
    // Those who were at it are not here.
    LOOKUPS.store(0, Ordering::Release);
    ENDING.store(0, Ordering::Release);
    after();
    FORKS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(all(test, not(millstream_loom)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn who_forks_waits_for_lookups_that_end_and_not_for_ever_for_others() {
        let (lookups, mut pauses) = (AtomicUsize::new(2), 0);
        let none = wait_for(&lookups, LOOKS, || {
            pauses += 1;
            if pauses % 3 == 0 {
                lookups.fetch_sub(1, Ordering::AcqRel);
            }
        });
        assert!(none);
        assert_eq!((pauses, lookups.load(Ordering::Acquire)), (6, 0));
        let (lookups, mut pauses) = (AtomicUsize::new(1), 0);
        assert!(!wait_for(&lookups, LOOKS, || pauses += 1));
        assert_eq!(pauses, LOOKS);
        // It is counted while it is under way, and by nobody who was forked off; and a fork waits for it.
        let start = std::time::Instant::now();
        let child = looking_up(|| {
            assert!(LOOKUPS.load(Ordering::Acquire) > 0);
            // SAFETY: the other process does no more than may be done there.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(LOOKUPS.load(Ordering::Acquire) != 0)) };
            }
            child
        });
        assert!(start.elapsed() >= Duration::from_millis(LOOKS as u64));
        let mut status = -1;
        // SAFETY: the status is there.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn who_forks_waits_for_threads_that_end() {
        /// What a thread returns that nobody waits for: dropped by that thread when its work is over.
        struct Returned(mpsc::Sender<usize>);
        impl Drop for Returned {
            fn drop(&mut self) {
                let _ = self.0.send(ENDING.load(Ordering::Acquire));
            }
        }
        let ((tell, seen), (go, wait)) = (mpsc::channel(), mpsc::channel::<()>());
        let work = move || wait.recv().map(|()| Returned(tell));
        drop(thread::spawn(ends_between_forks(work)));
        go.send(()).unwrap();
        assert!(seen.recv().unwrap() > 0, "its end is counted");
        let pause = || thread::sleep(Duration::from_millis(1));
        assert!(wait_for(&ENDING, LOOKS_FOR_ENDS, pause), "it has ended");

        let (ended, told) = (AtomicBool::new(false), mpsc::channel());
        thread::scope(|scope| {
            scope.spawn(|| {
                forks();
                ENDING.fetch_add(1, Ordering::AcqRel);
                told.0.send(()).unwrap();
                // Another thread forks by now, and does not come to its end.
                // SAFETY: the mutex is initialized, and stays where it is.
                while unsafe { libc::pthread_mutex_trylock(LOADING.0.get()) } == 0 {
                    after();
                    thread::yield_now();
                }
                for _ in 0..20 {
                    assert!(!ended.load(Ordering::SeqCst), "a process was forked off meanwhile");
                    thread::sleep(Duration::from_millis(1));
                }
                less(&ENDING);
            });
            told.1.recv().unwrap();
            // SAFETY: the other process does no more than may be done there.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe { libc::_exit(ENDING.load(Ordering::Acquire) as i32) };
            }
            ended.store(true, Ordering::SeqCst);
            let mut status = -1;
            // SAFETY: the status is there.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        });
    }

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
