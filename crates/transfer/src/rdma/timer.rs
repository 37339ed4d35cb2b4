//! The thread that tells flows when their time has come.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use millstream_net::ends_between_forks;
use millstream_transfer_core::Instant;

use super::peer::Peer;
use crate::workers::join;

/// Nothing is due.
const NEVER: u64 = u64::MAX;

/// The clock of all flows: nanoseconds since the transport was installed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(std::time::Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(std::time::Instant::now())
    }

    pub(super) fn now(&self) -> Instant {
        Instant::from_nanos(self.0.elapsed().as_nanos() as u64)
    }

    /// The same point in time by this clock. What was before its start is at its start, and what 64 bits do not hold, as the
    /// longest of deadlines, is at their end.
    pub(super) fn at(&self, time: std::time::Instant) -> Instant {
        let since = time.saturating_duration_since(self.0).as_nanos();
        Instant::from_nanos(u64::try_from(since).unwrap_or(u64::MAX))
    }
}

/// When a peer wants to be told.
#[derive(Debug)]
pub(super) struct Due(AtomicU64);

impl Default for Due {
    fn default() -> Self {
        Self(AtomicU64::new(NEVER))
    }
}

/// Wakes the thread, and ends it.
pub(super) struct Timer {
    clock: Clock,
    /// When the thread looks next; `NEVER` while it looks.
    wakes_at: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    peers: Vec<Weak<Peer>>,
    /// Somebody wants to be told before `wakes_at`.
    poked: bool,
    stopped: bool,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    /// Starts the thread.
    pub(super) fn start(clock: Clock) -> std::io::Result<Arc<Self>> {
        let timer = Arc::new(Self {
            clock,
            wakes_at: AtomicU64::new(NEVER),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&timer);
        let thread = thread::Builder::new().name("rdma-timer".to_owned());
        let thread = thread.spawn(ends_between_forks(move || own.run()))?;
        timer.lock().thread = Some(thread);
        Ok(timer)
    }

    /// Tells this peer from now on.
    pub(super) fn add(&self, peer: &Arc<Peer>) {
        let mut state = self.lock();
        state.peers.retain(|peer| peer.strong_count() > 0);
        state.peers.push(Arc::downgrade(peer));
    }

    /// All peers that are told.
    pub(super) fn peers(&self) -> Vec<Arc<Peer>> {
        self.lock().peers.iter().filter_map(Weak::upgrade).collect()
    }

    /// The peer wants to be told then, or not at all.
    pub(super) fn set(&self, due: &Due, at: Option<Instant>) {
        let at = at.map_or(NEVER, Instant::nanos);
        // As a later time only makes the thread look once more, only an earlier one is told. Either the
        // thread sees it in its look, or this sees when it will look next.
        due.0.store(at, Ordering::SeqCst);
        if at < self.wakes_at.load(Ordering::SeqCst) {
            self.lock().poked = true;
            self.changed.notify_one();
        }
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let thread = state.thread.take();
        drop(state);
        self.changed.notify_one();
        join(thread);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut peers = Vec::new();
        loop {
            let mut state = self.lock();
            if state.stopped {
                return;
            }
            state.poked = false;
            // Before the peers are looked at: who comes now pokes.
            self.wakes_at.store(NEVER, Ordering::SeqCst);
            peers.extend(state.peers.iter().filter_map(Weak::upgrade));
            drop(state);
            let now = self.clock.now();
            let mut next = NEVER;
            for peer in peers.drain(..) {
                if peer.due.0.load(Ordering::SeqCst) <= now.nanos() {
                    peer.handle_timeout();
                }
                next = next.min(peer.due.0.load(Ordering::SeqCst));
            }
            self.wakes_at.store(next, Ordering::SeqCst);
            let state = self.lock();
            if state.poked || state.stopped {
                continue;
            }
            let waiting = |state: &mut State| !state.poked && !state.stopped;
            if next == NEVER {
                drop(self.changed.wait_while(state, waiting));
            } else {
                let left = Duration::from_nanos(next.saturating_sub(self.clock.now().nanos()));
                drop(self.changed.wait_timeout_while(state, left, waiting));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_in_time_that_is_too_late_for_64_bits_is_not_in_the_past() {
        let clock = Clock::start();
        let after = |late: Duration| clock.at(std::time::Instant::now().checked_add(late).unwrap());
        assert_eq!(clock.at(clock.0), Instant::ZERO);
        assert_eq!(clock.at(clock.0 + Duration::from_secs(7)), Instant::from_nanos(7_000_000_000));
        for micros in [u64::MAX, i64::MAX as u64, u64::MAX / 1000 + 1] {
            assert_eq!(after(Duration::from_micros(micros)), Instant::from_nanos(u64::MAX));
        }
        assert_eq!(after(Duration::from_secs(1 << 60)), Instant::from_nanos(u64::MAX));
    }
}
