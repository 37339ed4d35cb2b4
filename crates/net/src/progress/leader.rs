//! Threads that wait make the progress that they wait for: one of them leads, the others follow.
//!
//! The leader does rounds, and sleeps on the socket. It leaves when it has found what it waited for,
//! when its time is over, or by a panic; then a follower leads on. If nobody leads for a while, the
//! driver watches the socket again; until then it sleeps, so that a thread that waits often wakes
//! nobody else. That while is 50 us, and longer when somebody has led nearly all of the time for long:
//! an eighth of that time, half a millisecond at most. A timer each 50 us is a tenth of a processor
//! on a virtual machine, and what waited long and often will most likely wait again.

use std::mem;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use millstream_roce::Node;

use super::hook::Worker;
use super::idle::Idle;
use super::shared::Shared;
use super::timer::NEVER;
use crate::descriptors::MAX_WATCHED;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use crate::sync::{Mutex, MutexGuard};
use crate::waiters::{Entry, Waiters, own_wake};
use crate::wake::Wake;
use crate::{BusyPoll, Polling};

/// The shortest and the longest time, in nanoseconds, after which the driver takes over when the last
/// leader has left.
const GRACE: (u64, u64) = (50_000, 500_000);

/// It is a part of the time for which there was a leader without a gap of [`GRACE`].
const GRACE_PART: u64 = 8;

/// How long a thread that cannot be woken sleeps before it looks again.
const BLIND: Duration = Duration::from_millis(1);

/// Who leads.
pub(super) struct Leadership {
    present: AtomicBool,
    /// Until when nobody else needs to watch since the last leader left.
    grace_ends: AtomicU64,
    /// When the last leader left, or a thread had sent what it posted since.
    active_at: AtomicU64,
    /// Since when there were leaders without a gap.
    since: AtomicU64,
    /// What the leader sleeps on.
    wake: Mutex<Option<Arc<Wake>>>,
    /// When a sleeping leader wakes up by itself; 0 while it is awake.
    until: AtomicU64,
    /// Those who would lead if nobody did.
    followers: Waiters,
    /// How leaders look for work before they sleep, by what they waited for before.
    busy_poll: Mutex<BusyPoll>,
}

impl Leadership {
    pub(super) fn new(polling: &Arc<Polling>) -> Self {
        Self {
            present: AtomicBool::default(),
            grace_ends: AtomicU64::default(),
            active_at: AtomicU64::default(),
            since: AtomicU64::default(),
            wake: Mutex::default(),
            until: AtomicU64::default(),
            followers: Waiters::default(),
            busy_poll: Mutex::new(BusyPoll::new(polling)),
        }
    }

    pub(super) fn is_present(&self) -> bool {
        self.present.load(Ordering::SeqCst)
    }

    /// Until when nobody else has to watch the socket after the last leader has left.
    pub(super) fn grace_ends(&self) -> u64 {
        self.grace_ends.load(Ordering::SeqCst)
    }

    /// Whether there is a leader, who is awake at this time then.
    pub(super) fn cover(&self, deadline: u64) -> bool {
        if !self.is_present() {
            return false;
        }
        if deadline < self.until.load(Ordering::SeqCst)
            && let Some(wake) = &*self.wake.lock().unwrap_or_else(PoisonError::into_inner)
        {
            wake.request();
        }
        true
    }

    /// A thread has sent what it posted: the time that this took is no gap.
    pub(super) fn posted(&self) {
        self.active_at.store(crate::now().nanos(), Ordering::Relaxed);
    }

    /// Leads from now on, unless another thread does. Those who set earlier deadlines wake `wake`.
    fn try_enter(&self, wake: Option<&Arc<Wake>>) -> bool {
        if self.present.load(Ordering::SeqCst) || self.present.swap(true, Ordering::SeqCst) {
            return false;
        }
        let now = crate::now().nanos();
        if now.saturating_sub(self.active_at.load(Ordering::Relaxed)) > GRACE.0 {
            self.since.store(now, Ordering::Relaxed);
        }
        *self.wake.lock().unwrap_or_else(PoisonError::into_inner) = wake.cloned();
        true
    }

    fn leave(&self) {
        *self.wake.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.until.store(0, Ordering::SeqCst);
        let now = crate::now().nanos();
        let led = now.saturating_sub(self.since.load(Ordering::Relaxed));
        let grace = (led / GRACE_PART).clamp(GRACE.0, GRACE.1);
        self.active_at.store(now, Ordering::Relaxed);
        self.grace_ends.store(now.saturating_add(grace), Ordering::SeqCst);
        self.present.store(false, Ordering::SeqCst);
    }
}

/// Waits until `look` finds something, at most `timeout`, and makes progress of these nodes
/// meanwhile (of the first 16; the drivers of more do).
///
/// Whoever makes `look` find something on another thread calls [`Waiters::wake`] of `waiters` then.
/// `look` is called with no lock held. A node that has failed brings about nothing more: its hook is
/// told, and who waits for it alone must look for its failure.
pub fn wait<'a, N: Node + 'a, T>(
    nodes: impl IntoIterator<Item = &'a Shared<N>>,
    waiters: &Waiters,
    timeout: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Option<T> {
    if let Some(found) = look() {
        return Some(found);
    }
    let wake = own_wake();
    let mut places = Places::new(nodes);
    if timeout.is_zero() {
        // Who asks again and again waits for no other thread.
        places.nodes().for_each(Shared::progress);
        return look();
    }
    // A time that a clock cannot tell is never reached.
    let deadline = Instant::now().checked_add(timeout);
    let left = || {
        deadline
            .map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    };
    let Some(wake) = &wake else {
        loop {
            let found = look();
            if found.is_some() || left().is_zero() {
                return found;
            }
            places.nodes().for_each(Shared::progress);
            std::thread::sleep(left().min(BLIND));
        }
    };
    // Before the next look: whoever brings about something after that look sees us.
    let _entry = waiters.enter(wake);
    let mut idle = Idle::default();
    loop {
        wake.take();
        let found = look();
        if found.is_some() || left().is_zero() {
            places.end(idle, found.is_some());
            return found;
        }
        if places.work(wake) {
            places.end(mem::take(&mut idle), true);
        } else if !places.looks(&mut idle) {
            places.sleep(wake, left());
        }
    }
}

/// Where a waiting thread stands with each of the nodes that it waits for. It leads where nobody else
/// does.
struct Places<'a, N: Node>([Option<Place<'a, N>>; MAX_WATCHED]);

struct Place<'a, N: Node> {
    node: &'a Shared<N>,
    leads: bool,
    /// It is seen by who leads.
    follows: Option<Entry<'a>>,
}

impl<'a, N: Node> Places<'a, N> {
    fn new(nodes: impl IntoIterator<Item = &'a Shared<N>>) -> Self {
        let mut places = [const { None }; MAX_WATCHED];
        for (place, node) in places.iter_mut().zip(nodes) {
            *place = Some(Place { node, leads: false, follows: None });
        }
        Self(places)
    }

    fn nodes(&self) -> impl Iterator<Item = &'a Shared<N>> {
        self.0.iter().flatten().map(|place| place.node)
    }

    fn led(&self) -> impl Iterator<Item = &'a Shared<N>> {
        self.0.iter().flatten().filter(|place| place.leads).map(|place| place.node)
    }

    /// How one of those that it leads is looked at, that for which one looks the longest; others are waited for in the same way.
    fn busy_poll(&self) -> Option<MutexGuard<'a, BusyPoll>> {
        let node = self.led().max_by_key(|node| node.driver.polling().longest())?;
        Some(node.leadership.busy_poll.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether to look for work before sleeping.
    fn looks(&self, idle: &mut Idle) -> bool {
        let Some(busy_poll) = self.busy_poll() else {
            // It led when it began to look, and does not any more.
            *idle = Idle::default();
            return false;
        };
        idle.looks(&busy_poll)
    }

    /// There is something to do, or, unless it `came`, the time is over.
    fn end(&self, idle: Idle, came: bool) {
        if idle.has_begun()
            && let Some(mut busy_poll) = self.busy_poll()
        {
            idle.end(&mut busy_poll, came);
        }
    }

    /// Does a round of each node that it leads; whether there may be more to do.
    fn work(&mut self, wake: &'a Arc<Wake>) -> bool {
        let mut more = false;
        for place in self.0.iter_mut().flatten() {
            more |= place.work(wake);
        }
        more
    }

    /// Sleeps until something comes for a node that it leads, or another thread wakes it.
    fn sleep(&self, wake: &Wake, left: Duration) {
        let deadline = || self.led().map(|node| node.deadline().nanos()).min().unwrap_or(NEVER);
        let until = deadline();
        self.led().for_each(|node| node.leadership.until.store(until, Ordering::SeqCst));
        let to_deadline = Duration::from_nanos(until.saturating_sub(crate::now().nanos()));
        let timeout = if until == NEVER { left } else { left.min(to_deadline) };
        // Whoever sets an earlier deadline from now on sees until when we sleep.
        let stay = || deadline() < until || self.led().any(Shared::is_requested);
        let timeout = Some(timeout).filter(|timeout| *timeout < Duration::MAX);
        let woken = wake.sleep(self.led().map(|node| node.socket.watched()), timeout, stay);
        for node in self.led() {
            node.leadership.until.store(0, Ordering::SeqCst);
            node.count_sleep(matches!(woken, Ok(true)));
        }
        // The arguments are right, so the kernel lacks memory.
        if woken.is_err() {
            std::thread::sleep(left.min(BLIND));
        }
    }
}

impl<'a, N: Node> Place<'a, N> {
    fn work(&mut self, wake: &'a Arc<Wake>) -> bool {
        let node = self.node;
        if !node.may_be_led() {
            // A node that has failed keeps its deadline, and what its socket has: neither is to end the
            // sleeps of who waits for others too.
            if mem::take(&mut self.leads) {
                node.leave();
            }
            return false;
        }
        self.leads = self.leads || node.leadership.try_enter(Some(wake));
        if !self.leads && self.follows.is_none() {
            // Whoever leads wakes us when it leaves, if it sees us then: so before the next try.
            self.follows = Some(node.leadership.followers.enter(wake));
            self.leads = node.leadership.try_enter(Some(wake));
        }
        if !self.leads {
            return false;
        }
        match node.round() {
            Ok(round) => {
                node.announce(round.observed, Worker::Leader);
                round.received || round.more || round.observed != 0
            }
            Err(failure) => {
                node.give_up(failure);
                false
            }
        }
    }
}

impl<N: Node> Drop for Place<'_, N> {
    fn drop(&mut self) {
        // First, or we would be woken to lead on.
        let followed = self.follows.take().is_some();
        if self.leads {
            self.node.leave();
        } else if followed && !self.node.leadership.is_present() {
            // The last leader may have left it to us.
            self.node.leadership.followers.wake_one();
        }
    }
}

impl<N: Node> Shared<N> {
    /// Not in its hook, where rounds wait for us.
    fn may_be_led(&self) -> bool {
        !self.is_progress_thread() && self.failure().is_none()
    }

    /// Receives, lets the node work, and sends, unless another thread is at it or waits for it:
    /// for who looks for something now and then, and does not wait.
    pub fn progress(&self) {
        if !self.may_be_led() || !self.leadership.try_enter(None) {
            return;
        }
        let round = self.try_round(true);
        match round {
            Some(Ok(round)) => self.announce(round.observed, Worker::Leader),
            Some(Err(failure)) => drop(self.give_up(failure)),
            None => {}
        }
        self.leave();
    }

    /// Leads no more: what was asked for meanwhile is done, and somebody else watches the socket.
    fn leave(&self) {
        self.leadership.leave();
        fence(Ordering::SeqCst);
        self.leadership.followers.wake_one();
        // Only the socket can wait so long.
        self.driver.cover(self.leadership.grace_ends().min(self.deadline().nanos()));
        if self.is_requested() {
            self.do_requests(Worker::Poster);
        }
    }
}
