//! Models of what a thread sleeps on.

use std::sync::Arc;

use loom::thread;

use super::check;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::waiters::Waiters;
use crate::wake::Wake;

/// Sleeps until `look` says so.
fn sleep_until(wake: &Wake, look: impl Fn() -> bool) {
    loop {
        wake.take();
        if look() {
            return;
        }
        wake.sleep([], None, || false).unwrap();
    }
}

#[test]
fn no_request_is_slept_through() {
    check(3, || {
        let wake = Arc::new(Wake::new().unwrap());
        let asked = Arc::new([(); 2].map(|()| AtomicBool::new(false)));
        let wakers: Vec<_> = (0..2)
            .map(|index| {
                let (wake, asked) = (Arc::clone(&wake), Arc::clone(&asked));
                thread::spawn(move || {
                    asked[index].store(true, Ordering::Relaxed);
                    wake.request();
                })
            })
            .collect();
        sleep_until(&wake, || asked.iter().all(|asked| asked.load(Ordering::Relaxed)));
        wakers.into_iter().for_each(|waker| waker.join().unwrap());
    });
}

/// What a sleeper finds when it is asked `stay`, wakers that look at nothing of [`Wake`] but whether
/// it is asleep rely on.
#[test]
fn what_is_looked_for_last_is_not_slept_through() {
    check(3, || {
        let wake = Arc::new(Wake::new().unwrap());
        let until = Arc::new(AtomicBool::new(false));
        let deadline = Arc::new(AtomicBool::new(false));
        let other = {
            let (wake, until, deadline) =
                (Arc::clone(&wake), Arc::clone(&until), Arc::clone(&deadline));
            thread::spawn(move || {
                deadline.store(true, Ordering::SeqCst);
                if until.load(Ordering::SeqCst) {
                    wake.request();
                }
            })
        };
        while !deadline.load(Ordering::SeqCst) {
            wake.take();
            until.store(true, Ordering::SeqCst);
            wake.sleep([], None, || deadline.load(Ordering::SeqCst)).unwrap();
            until.store(false, Ordering::SeqCst);
        }
        other.join().unwrap();
    });
}

#[test]
fn who_waits_hears_of_what_came_after_its_last_look() {
    check(3, || {
        let waiters = Arc::new(Waiters::default());
        let found = Arc::new(Mutex::new(0));
        let others: Vec<_> = [false, true]
            .into_iter()
            .map(|one| {
                let (waiters, found) = (Arc::clone(&waiters), Arc::clone(&found));
                thread::spawn(move || {
                    *found.lock().unwrap() += 1;
                    if one { waiters.wake_one() } else { waiters.wake() }
                })
            })
            .collect();
        let wake = Arc::new(Wake::new().unwrap());
        let entry = waiters.enter(&wake);
        sleep_until(&wake, || *found.lock().unwrap() == 2);
        drop(entry);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}
