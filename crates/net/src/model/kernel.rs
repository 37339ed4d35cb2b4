//! A kernel with a clock, descriptors, and one call that waits for them.

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Condvar, Mutex};
use loom::thread;

loom::lazy_static! {
    static ref KERNEL: Kernel = Kernel::default();
}

#[derive(Default)]
struct Kernel {
    now: AtomicU64,
    descriptors: Mutex<Descriptors>,
    changed: Condvar,
}

#[derive(Default)]
struct Descriptors {
    list: Vec<Descriptor>,
    /// Whoever sleeps until a time finds that it has come.
    time_passes: bool,
}

#[derive(Default)]
struct Descriptor {
    readable: bool,
    /// From when on it is readable too.
    at: Option<u64>,
}

impl Descriptor {
    fn is_readable(&self, now: u64) -> bool {
        self.readable || self.at.is_some_and(|at| at <= now)
    }

    fn drain(&mut self, now: u64) -> bool {
        let readable = self.is_readable(now);
        self.readable = false;
        self.at = self.at.filter(|at| *at > now);
        readable
    }
}

/// About when no time passes any more.
const NEVER: u64 = u64::MAX / 2;

/// A descriptor's number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Number(usize);

/// What time it is.
pub(crate) fn now() -> u64 {
    KERNEL.now.load(Ordering::Acquire)
}

/// So many nanoseconds go by, at once.
pub(crate) fn pass(nanos: u64) {
    let _descriptors = KERNEL.descriptors.lock().unwrap();
    KERNEL.now.store(now() + nanos, Ordering::Release);
    KERNEL.changed.notify_all();
}

/// From now on time goes by whenever somebody sleeps until a time. For the end of a model: before
/// that, all times at which a thread may be late are those at which [`pass`] can come.
pub(crate) fn let_time_pass() {
    KERNEL.descriptors.lock().unwrap().time_passes = true;
    KERNEL.changed.notify_all();
}

/// A new descriptor, that is not readable.
pub(crate) fn open() -> Number {
    let mut descriptors = KERNEL.descriptors.lock().unwrap();
    descriptors.list.push(Descriptor::default());
    Number(descriptors.list.len() - 1)
}

/// Makes it readable.
pub(crate) fn write(number: Number) {
    KERNEL.descriptors.lock().unwrap().list[number.0].readable = true;
    KERNEL.changed.notify_all();
}

/// Makes it readable so long from now, and not before.
pub(crate) fn set(number: Number, left: u64) {
    let mut descriptors = KERNEL.descriptors.lock().unwrap();
    descriptors.list[number.0] =
        Descriptor { readable: false, at: Some(now().saturating_add(left)) };
    KERNEL.changed.notify_all();
}

/// It is not readable any more; whether it was.
pub(crate) fn drain(number: Number) -> bool {
    let drained = KERNEL.descriptors.lock().unwrap().list[number.0].drain(now());
    if drained {
        KERNEL.changed.notify_all();
    }
    drained
}

pub(crate) fn is_readable(number: Number) -> bool {
    KERNEL.descriptors.lock().unwrap().list[number.0].is_readable(now())
}

/// Waits until somebody has drained it.
pub(crate) fn wait_until_drained(number: Number) {
    let mut descriptors = KERNEL.descriptors.lock().unwrap();
    while descriptors.list[number.0].is_readable(now()) {
        descriptors = KERNEL.changed.wait(descriptors).unwrap();
    }
}

/// Waits until one of them is readable or `timeout` has passed. Drains `event`, and says whether
/// there was something to drain.
pub(crate) fn poll(event: Number, watched: &[Number], timeout: Option<u64>) -> bool {
    let mut descriptors = KERNEL.descriptors.lock().unwrap();
    let ends = timeout.map(|timeout| now().saturating_add(timeout));
    loop {
        let now = now();
        let all = || [event].into_iter().chain(watched.iter().copied());
        if all().any(|number| descriptors.list[number.0].is_readable(now)) {
            let woken = descriptors.list[event.0].drain(now);
            drop(descriptors);
            // Other threads get on even if this one never sleeps.
            thread::yield_now();
            return woken;
        }
        if ends.is_some_and(|ends| ends <= now) {
            return false;
        }
        let times = all().filter_map(|number| descriptors.list[number.0].at).chain(ends);
        match times.min().filter(|next| descriptors.time_passes && *next < NEVER) {
            Some(next) => KERNEL.now.store(next, Ordering::Release),
            None => descriptors = KERNEL.changed.wait(descriptors).unwrap(),
        }
    }
}
