//! Fail-over across transports: a request for which a transport has no way any more goes on over the next one that
//! leads to its segment.
//!
//! Only what has ended at the first transport moves: nothing of it can arrive any more, which the target has
//! confirmed where that was needed. All of it is done again, so its bytes are counted anew. The transport that it
//! left is not chosen for that segment for a while. After that one submission tries it again, and others follow
//! when something of that was completed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::path::{Place, in_order};
use crate::terms::Terms;
use crate::transport::{NAMES, Run, code_of};

/// For how long a transport is not chosen that requests had to leave: at first, and at the most. Each time that it
/// is tried in vain it is twice as long.
const AVOIDED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// For how long others wait for what becomes of the submission that tries a transport again.
const TRIAL: Duration = Duration::from_secs(5);

/// The transports that requests to a segment had to leave.
#[derive(Debug, Default)]
pub(crate) struct Avoided([Avoidance; NAMES.len()]);

#[derive(Debug, Default)]
struct Avoidance {
    /// Until then others are chosen, in [`now`]; 0 while it is not avoided.
    until: AtomicU64,
    /// For how long it is avoided, in nanoseconds.
    pause: AtomicU64,
    /// A submission tries it again.
    tried: AtomicBool,
}

/// Nanoseconds since something was asked for this first, from 1.
fn now() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    (START.elapsed().as_nanos() as u64).max(1)
}

impl Avoided {
    fn of(&self, name: &'static str) -> Option<&Avoidance> {
        self.0.get(usize::from(code_of(name)).checked_sub(1)?)
    }

    /// Whether a submission is to take another transport than this. If its time is over, whoever asks first is
    /// to try it.
    pub(crate) fn is_to_be_avoided(&self, name: &'static str) -> bool {
        self.of(name).is_some_and(|it| it.until.load(Ordering::Relaxed) != 0 && !it.try_at(now()))
    }

    /// For how long this one is avoided, if it is.
    pub(crate) fn left(&self, name: &'static str) -> Option<Duration> {
        let until = self.of(name)?.until.load(Ordering::Relaxed);
        (until != 0).then(|| Duration::from_nanos(until.saturating_sub(now())))
    }

    /// Requests had to leave this one; whether that is news.
    fn leave(&self, name: &'static str) -> bool {
        self.of(name).is_some_and(|it| it.leave_at(now()))
    }

    /// Something was completed over this one.
    pub(crate) fn works(&self, name: &'static str) {
        if let Some(it) = self.of(name)
            && it.until.load(Ordering::Relaxed) != 0
        {
            it.tried.store(false, Ordering::Relaxed);
            it.pause.store(0, Ordering::Relaxed);
            it.until.store(0, Ordering::Relaxed);
        }
    }
}

impl Avoidance {
    fn try_at(&self, now: u64) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        if until > now {
            return false;
        }
        // If nothing is heard of that submission, another one is to try.
        let again = now + TRIAL.as_nanos() as u64;
        let order = Ordering::Relaxed;
        let first = self.until.compare_exchange(until, again, order, order).is_ok();
        if first {
            self.tried.store(true, Ordering::Relaxed);
        }
        first
    }

    fn leave_at(&self, now: u64) -> bool {
        let known = self.until.load(Ordering::Relaxed) != 0;
        // Others of those that had to leave before count no more.
        if known && !self.tried.swap(false, Ordering::Relaxed) {
            return false;
        }
        let (first, most) = (AVOIDED.0.as_nanos() as u64, AVOIDED.1.as_nanos() as u64);
        let pause = (2 * self.pause.load(Ordering::Relaxed)).clamp(first, most);
        self.pause.store(pause, Ordering::Relaxed);
        self.until.store(now + pause, Ordering::Relaxed);
        !known
    }
}

impl Inner {
    /// Whether there is another transport for a run that its own has no way for.
    pub(crate) fn leads_elsewhere(&self, run: &Run) -> bool {
        self.next_transport(run).is_some()
    }

    /// Another transport that leads where a run goes and may do it, the first in the order in which they are tried: its
    /// place and its name. None that copies: whoever cancels would not be heard there.
    fn next_transport(&self, run: &Run) -> Option<(usize, &'static str)> {
        // Memory of a GPU here is for transports that say so, of which `rdma` is the last.
        if self.is_stopped() || self.required.is_set() || run.local.is_gpu() {
            return None;
        }
        let Run { segment, view, buffer, .. } = run;
        let place = Place { segment, descriptor: &view.descriptor, buffer: *buffer };
        self.with_transports(|all| {
            let found = in_order(all).find(|(index, transport)| {
                *index != run.transport
                    && !transport.copies()
                    && run.allowed.has(transport.name())
                    && place.led_to_by(*transport)
            });
            found.map(|(index, transport)| (index, transport.name()))
        })
    }

    /// Gives tasks to another transport, of which nothing is under way at their own and nothing can arrive any
    /// more. `false` where there is none: then they are to end.
    pub(crate) fn go_on_elsewhere(
        &self,
        batch: &Arc<BatchShared>,
        mut run: Run,
        terms: &Terms,
    ) -> bool {
        let Some((index, name)) = self.next_transport(&run) else { return false };
        let Some(transport) = self.with_transports(|all| all.get(index).cloned()) else {
            return false;
        };
        let before = run.transport_name;
        if run.segment.avoided.leave(before) {
            let segment = &*run.segment.name;
            tracing::warn!(segment, before, name, "requests go on over another transport");
        }
        let (from, to) = (code_of(before), code_of(name));
        for index in run.tasks.clone() {
            batch.tasks.get(index).moves_to(to);
        }
        batch.counters.moved(from, to, run.tasks.len());
        (run.transport, run.transport_name, run.copies) = (index, name, false);
        run.claimed = run.tasks.start;
        transport.submit(batch, &[run], terms);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn what_requests_had_to_leave_is_tried_by_one_after_ever_longer_times() {
        let it = Avoidance::default();
        assert!(it.leave_at(1));
        // Of a batch that left together, it is once.
        assert!(!it.leave_at(2) && !it.leave_at(3));
        assert!(!it.try_at(SECOND));
        assert!(it.try_at(SECOND + 1), "after a second");
        assert!(!it.try_at(SECOND + 2), "one submission tries it");
        assert!(!it.leave_at(SECOND + 3), "in vain, which is no news");
        assert!(!it.try_at(3 * SECOND + 2) && it.try_at(3 * SECOND + 3), "two seconds after that");
        for _ in 0..10 {
            it.leave_at(10 * SECOND);
            it.tried.store(true, Ordering::Relaxed);
        }
        assert_eq!(it.pause.load(Ordering::Relaxed), 30 * SECOND);
        // Of what tries it nothing is heard: another one does.
        assert!(it.try_at(50 * SECOND) && !it.try_at(54 * SECOND) && it.try_at(55 * SECOND));
    }

    #[test]
    fn one_transport_is_avoided_and_no_other_until_it_works() {
        let avoided = Avoided::default();
        assert!(!avoided.is_to_be_avoided("rdma"));
        assert!(avoided.leave("rdma"));
        assert!(avoided.is_to_be_avoided("rdma") && !avoided.is_to_be_avoided("tcp"));
        assert!(avoided.left("rdma").is_some_and(|left| left <= AVOIDED.0));
        avoided.works("rdma");
        assert!(!avoided.is_to_be_avoided("rdma") && avoided.left("rdma").is_none());
    }
}
