//! Fail-over across transports: a request for which a transport has no way any more goes on over the next one that
//! leads to its segment.
//!
//! Only what has ended at the first transport moves: nothing of it can arrive any more, which the target has
//! confirmed where that was needed. All of it is done again. It never goes back to a transport that it left, which is
//! not chosen for that segment for a while. After that one submission tries it again, and others follow when something
//! of that was completed.
//!
//! Where the peer's process is not there, no other transport is tried: the first one's error says so. `rdma` asks its
//! peers anyhow; for the others the process is asked here (`question.rs`), and tasks wait for that in `departures.rs`.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use millstream_metadata::{Frame, FrameType, Probe};

use crate::TransferState;
use crate::batch::BatchShared;
use crate::departures::Departures;
use crate::engine::Inner;
use crate::memory::LocalMemory;
use crate::path::{Place, in_order};
use crate::segment::OpenSegment;
use crate::task::{EndedTasks, TaskEnd, TaskHandle, WideSlice};
use crate::tcp::relay;
use crate::terms::Terms;
use crate::transport::{NAMES, Run, code_of};

/// For how long a transport is not chosen that requests had to leave: at first, and at the most. Each time that it
/// is tried in vain it is twice as long.
const AVOIDED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// For how long others wait for what becomes of the submission that tries a transport again.
const TRIAL: Duration = Duration::from_secs(5);

/// A task that its transport has given up, and of which nothing is under way or can arrive any more.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub(crate) task: TaskHandle,
    /// The transport that it leaves.
    pub(crate) from: &'static str,
    pub(crate) local: Arc<LocalMemory>,
    /// Which start of the segment's process it is for, if that is known.
    pub(crate) incarnation: Option<u64>,
    /// On what terms, with the transports that may do it.
    pub(crate) terms: Terms,
    /// How it ends if no other transport goes on with it. Without, as [`TaskHandle::end_left`] says.
    pub(crate) end: Option<TaskEnd>,
}

impl Leaving {
    /// Ends it: as it is to end by now, if so, or as what has failed.
    pub(crate) fn end(self) {
        let state = self.task.is_to_end();
        self.end_as(state);
    }

    /// Ends it with this state, or as what has failed. All that its transport has done of it counts.
    pub(crate) fn end_as(self, state: Option<TransferState>) {
        let TaskHandle { batch, index } = &self.task;
        let end = self.end.map(|end| match state {
            Some(state) => TaskEnd { state, error: None, ..end },
            None => end,
        });
        match end {
            Some(end) => EndedTasks::default().ended(batch, *index, end),
            None => self.task.end_left(state),
        }
    }

    /// The task as another transport is given it; `None` where its segment has no such memory any more.
    fn run(&self, segment: &Arc<OpenSegment>) -> Option<Run> {
        let view = segment.view();
        let WideSlice { target, length, .. } = match self.task.shape() {
            Some(shape) => shape.piece(0),
            None => self.task.whole(),
        };
        let buffer = view.find(target, length)?;
        Some(Run {
            transport: usize::MAX,
            transport_name: self.from,
            copies: false,
            tasks: self.task.index..self.task.index + 1,
            claimed: self.task.index,
            allowed: self.terms.allowed,
            local: Arc::clone(&self.local),
            segment: Arc::clone(segment),
            view,
            buffer,
        })
    }
}

/// Whether the process of a segment is there. All tasks that wait end if this is dropped without an answer.
struct Question {
    segment: Arc<OpenSegment>,
    /// From when there were no more tasks, whoever comes asks anew.
    is_over: Cell<bool>,
}

impl Question {
    fn new(segment: &Arc<OpenSegment>) -> Self {
        Self { segment: Arc::clone(segment), is_over: Cell::new(false) }
    }

    /// Has `with` take all tasks that wait for the answer.
    fn answered(&self, mut with: impl FnMut(Leaving)) {
        loop {
            let tasks = self.segment.departures.take();
            if tasks.is_empty() {
                return self.is_over.set(true);
            }
            tasks.into_iter().for_each(&mut with);
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if !self.is_over.get() {
            self.answered(Leaving::end);
        }
    }
}

/// Ends tasks of a segment, or gives them to other transports of an engine if it is there; see [`Inner::leave`].
pub(crate) fn leave(engine: Option<&Weak<Inner>>, segment: &Arc<OpenSegment>, all: Vec<Leaving>) {
    match engine.and_then(Weak::upgrade) {
        Some(engine) => engine.leave(segment, all),
        None => all.into_iter().for_each(Leaving::end),
    }
}

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
        if self.is_stopped() || self.required.is_set() {
            return None;
        }
        let Run { segment, view, buffer, .. } = run;
        let place = Place { segment, descriptor: &view.descriptor, buffer: *buffer };
        self.with_transports(|all| {
            let found = in_order(all).find(|(_, transport)| {
                // A relay is for what is led to by nothing else (docs/relay.md).
                ![run.transport_name, relay::NAME].contains(&transport.name())
                    && !transport.capabilities().copies
                    && run.allowed.has(transport.name())
                    && (transport.capabilities().gpu_memory || !run.local.is_gpu())
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
        // What was found before may be of before that one was installed.
        if !run.local.is_known_to(index) {
            let span = run.local.span();
            let Some(local) = self.memory().find(span.first, span.length) else { return false };
            run.local = local;
        }
        let before = run.transport_name;
        let (from, to) = (code_of(before), code_of(name));
        debug_assert_eq!(run.tasks.len(), 1);
        if !run.tasks.clone().all(|index| batch.tasks.get(index).moves_to(to)) {
            return false;
        }
        batch.counters.moved(from, to, run.tasks.len());
        if run.segment.avoided.leave(before) {
            let segment = &*run.segment.name;
            tracing::warn!(segment, before, name, "requests go on over another transport");
        }
        (run.transport, run.transport_name, run.copies) = (index, name, false);
        (run.claimed, run.allowed) = (run.tasks.start, run.allowed.without(before));
        transport.submit(batch, &[run], terms);
        true
    }

    /// Gives tasks of one segment to other transports, once its process has said that it is there. They end where it
    /// does not, or where there is no other transport. Does not wait.
    fn leave(&self, segment: &Arc<OpenSegment>, mut all: Vec<Leaving>) {
        let leads = |it: &mut Leaving| it.run(segment).is_some_and(|it| self.leads_elsewhere(&it));
        let leading: Vec<_> = all.extract_if(.., leads).collect();
        all.into_iter().for_each(Leaving::end);
        if leading.is_empty() || !Departures::add(segment, leading) {
            return;
        }
        let (own, question) = (self.own.clone(), Question::new(segment));
        let probe = |reply: &Frame| serde_json::from_slice::<Probe>(&reply.body).ok();
        let who = move |reply: &Frame| probe(reply)?.incarnation;
        let frame = Frame::new(FrameType::Probe, b"{}".to_vec());
        self.ask_process(segment, frame, who, move |reply| {
            let probe = reply.and_then(|reply| probe(&reply));
            let engine = own.upgrade();
            question.answered(|leaving| {
                let moves = engine.as_ref().zip(probe.as_ref()).is_some_and(|(engine, probe)| {
                    leaving.incarnation.is_none_or(|it| probe.incarnation == Some(it))
                        && engine.go_on(&leaving, &question.segment)
                });
                if !moves {
                    leaving.end();
                }
            });
        });
    }

    fn go_on(&self, leaving: &Leaving, segment: &Arc<OpenSegment>) -> bool {
        // What is known of the segment may be of another start by now.
        let run = leaving.run(segment);
        let run = run.filter(|run| run.view.descriptor.incarnation == leaving.incarnation);
        run.is_some_and(|run| self.go_on_elsewhere(&leaving.task.batch, run, &leaving.terms))
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
