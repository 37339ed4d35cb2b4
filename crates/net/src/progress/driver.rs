//! The node's own thread: makes progress when nobody else does.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;
use std::{io, mem};

use millstream_roce::Node;

use super::hook::{LAST, Worker};
use super::idle::Idle;
use super::seat::failed;
use super::shared::{Failure, Shared};
use super::timer::{NEVER, Timer};
use crate::descriptors::Watched;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::wake::Wake;
use crate::{BusyPoll, Polling};

/// What the driver sleeps on, and until when.
pub(super) struct Doze {
    wake: Wake,
    /// Set by others who want it awake earlier than it would be.
    timer: Timer,
    /// When it wakes up by itself; 0 while it is awake, as it looks at all deadlines before it sleeps.
    until: AtomicU64,
    polling: Arc<Polling>,
}

impl Doze {
    pub(super) fn new(polling: Arc<Polling>) -> io::Result<Self> {
        let (wake, timer) = (Wake::new()?, Timer::new()?);
        Ok(Self { wake, timer, until: AtomicU64::new(0), polling })
    }

    /// How those who wait for the node look for work before they sleep.
    pub(super) const fn polling(&self) -> &Arc<Polling> {
        &self.polling
    }

    /// Wakes it for something that is no round of this thread's.
    pub(super) fn wake(&self) {
        self.wake.request();
    }

    /// Sees to it that it is awake at this time.
    pub(super) fn cover(&self, deadline: u64) {
        if deadline < self.until.load(Ordering::SeqCst) {
            self.timer.set(deadline);
        }
    }

    /// The driver sleeps until `time` at most, until somebody wakes it or sets an earlier time, or
    /// until `socket` is readable; not at all when `stay` says so, which is asked once others can see
    /// until when it sleeps. The result says whether it had to be woken.
    pub(super) fn sleep(
        &self,
        time: u64,
        socket: Option<Watched<'_>>,
        stay: impl FnOnce() -> bool,
    ) -> io::Result<bool> {
        self.until.store(time, Ordering::SeqCst);
        let timeout = Duration::from_nanos(time.saturating_sub(crate::now().nanos()));
        let timeout = Some(timeout).filter(|_| time != NEVER);
        let watched = socket.into_iter().chain([self.timer.watched()]);
        let woken = self.wake.sleep(watched, timeout, stay);
        self.until.store(0, Ordering::SeqCst);
        self.timer.clear_if_due();
        woken
    }
}

/// The thread's whole life.
pub(super) fn run<N: Node>(shared: &Arc<Shared<N>>) {
    precise_timers();
    let address = shared.address();
    // The node that a panic broke is not used again: its lock is poisoned.
    let failure = match panic::catch_unwind(AssertUnwindSafe(|| work(shared))) {
        Ok(Ok(())) => Failure::Closed { address },
        Ok(Err(failure)) => failure,
        Err(_panic) => Failure::Panicked { address },
    };
    shared.fail(failure);
    // If the hook was what panicked, it may do so again.
    let _ = panic::catch_unwind(AssertUnwindSafe(|| shared.announce(LAST, Worker::Driver)));
}

pub(super) fn work<N: Node>(shared: &Shared<N>) -> Result<(), Failure> {
    let driver = &shared.driver;
    let mut busy_poll = BusyPoll::new(driver.polling());
    let mut idle = Idle::default();
    loop {
        // Before all that others may wake it for: what they say after this, they wake it for again.
        driver.wake.take();
        if shared.stop.load(Ordering::SeqCst) {
            return Ok(());
        }
        if let Some(failure) = shared.failure() {
            return Err(failure.clone());
        }
        // Others watch the socket, or did a moment ago; what only this thread may do, it does.
        let rests = rests(shared);
        let mut busy = false;
        let mut observed = shared.owed.swap(0, Ordering::SeqCst);
        if !rests {
            let round = shared.round()?;
            busy = round.received || round.more;
            observed |= round.observed;
        }
        shared.announce(observed, Worker::Driver);
        if rests && (shared.is_requested() || shared.deadline() <= crate::now()) {
            shared.do_requests(Worker::Driver);
        }
        if busy || observed != 0 || !rests && shared.is_requested() {
            mem::take(&mut idle).end(&mut busy_poll, !rests);
            continue;
        }
        if rests {
            // A leader looks in its place.
            mem::take(&mut idle).end(&mut busy_poll, false);
        } else if idle.looks(&busy_poll) {
            continue;
        }
        sleep(shared)?;
    }
}

fn rests<N: Node>(shared: &Shared<N>) -> bool {
    // Only the socket can wait until somebody leads again.
    let ends = || shared.leadership.grace_ends().min(shared.deadline().nanos());
    shared.leadership.is_present() || crate::now().nanos() < ends()
}

/// Sleeps until there is something to do, or others may have stopped doing it.
fn sleep<N: Node>(shared: &Shared<N>) -> Result<(), Failure> {
    // While somebody leads, deadlines are the leader's, and so are requests.
    let when = || {
        if shared.leadership.is_present() {
            return NEVER;
        }
        let deadline = shared.deadline().nanos();
        match shared.leadership.grace_ends() {
            ends if crate::now().nanos() < ends => ends.min(deadline),
            _ => deadline,
        }
    };
    let rests = rests(shared);
    let time = when();
    // Whoever sets an earlier deadline, or leaves, after this is asked sees until when we sleep.
    let stay = || {
        when() < time
            || shared.owed.load(Ordering::SeqCst) != 0
            // While it rests, whoever is at a round looks for requests after it, and a leader before
            // it sleeps and when it leaves: to look for them here would be to wait in a circle.
            || !rests && shared.is_requested()
            || rests && !self::rests(shared)
    };
    let socket = (!rests).then(|| shared.socket.watched());
    let woken = shared.driver.sleep(time, socket, stay);
    shared.count_sleep(woken.map_err(failed(shared, "ppoll"))?);
    Ok(())
}

/// Lets this thread's sleeps end within a microsecond of their deadline, instead of the usual 50.
fn precise_timers() {
    const NANOSECONDS: libc::c_ulong = 1_000;
    // SAFETY: takes no pointers, and concerns only this thread. Failing, it changes nothing.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, NANOSECONDS) };
}
