//! One rank at work: collectives in their order, each done by whoever waits for it, or by a thread that is started for
//! those that nobody waits for.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use millstream_inc::protocol::{AbortReason, shortened};
use millstream_inc::{Collective, CollectiveCall, Kernel};
use millstream_net::ends_between_forks;
use millstream_net::shared_memory::MemberProcesses;

use super::area::Area;
use super::failure::Failure;
use super::members::Members;
use super::recovery::Recovery;
use super::run::{Runner, Stop};
use super::wait::NAP;
use super::wire::Wire;
use crate::engine::MAX_STARTED;
use crate::path::Way;
use crate::tree::Work;
use crate::{CollectiveError, LONGEST};

/// How long a rank that cannot go on waits until the controller has let go of it.
const RELEASE_PATIENCE: Duration = Duration::from_millis(250);

/// What a rank shares with its threads.
pub(crate) struct LocalEngine {
    /// Its place among those that share memory.
    place: u32,
    members: Members,
    /// Of who is connected to switches for all of them, once that is so.
    wire: OnceLock<Way>,
    area: OnceLock<Arc<Area>>,
    processes: OnceLock<Arc<MemberProcesses>>,
    state: Mutex<State>,
    changed: Condvar,
    /// The collective under way must end. Set with the state locked.
    stop: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// Not there before the group has met, and while a collective is under way.
    runner: Option<Box<Runner>>,
    running: bool,
    /// How many collectives were started.
    started: u64,
    /// How many of them have ended with a result.
    finished: u64,
    /// Those that are not begun, in their order.
    waiting: VecDeque<Work>,
    failure: Option<CollectiveError>,
    /// Ranks that have left, as far as it is told, and how many collectives they have called.
    left: Vec<(u32, u64)>,
    /// Nothing more will be heard from the controller.
    closed: bool,
    /// No thread begins anything any more.
    over: bool,
    /// There is a thread for what nobody waits for.
    attended: bool,
    /// How many threads wait for `changed`.
    sleepers: usize,
}

impl LocalEngine {
    /// One of these, by its place.
    pub(crate) fn new(place: u32, members: Members) -> Arc<Self> {
        let state = State {
            runner: None,
            running: false,
            started: 0,
            finished: 0,
            waiting: VecDeque::with_capacity(MAX_STARTED),
            failure: None,
            left: Vec::new(),
            closed: false,
            over: false,
            attended: false,
            sleepers: 0,
        };
        Arc::new(Self {
            place,
            members,
            wire: OnceLock::new(),
            area: OnceLock::new(),
            processes: OnceLock::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
        })
    }

    /// The group has met, which took so many barriers.
    pub(super) fn begin(
        &self,
        area: Area,
        processes: MemberProcesses,
        barriers: u64,
        wire: Option<Wire>,
    ) {
        let (area, processes) = (Arc::new(area), Arc::new(processes));
        let runner =
            Runner::new(Arc::clone(&area), Arc::clone(&processes), self.place, barriers, wire);
        // It meets once.
        let _ = self.processes.set(processes);
        let _ = self.area.set(area);
        let mut state = self.lock();
        state.runner = Some(Box::new(runner));
        self.notify(&state);
    }

    /// Its place among those that share memory.
    pub(super) const fn place(&self) -> (u32, &Members) {
        (self.place, &self.members)
    }

    /// Those that share memory.
    pub(crate) const fn members(&self) -> &Members {
        &self.members
    }

    /// It has the connection to switches for all of them, where there are other hosts.
    pub(crate) fn connect(&self, wire: Way) {
        // It connects once.
        let _ = self.wire.set(wire);
    }

    /// The connection to switches, of who has it for all of them.
    pub(crate) fn wire(&self) -> Option<&Way> {
        self.wire.get()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until something has changed, or it is time.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        until: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        state.sleepers += 1;
        let mut state = match until {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                let waited = self.changed.wait_timeout(state, left);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.sleepers -= 1;
        state
    }

    fn notify(&self, state: &State) {
        if state.sleepers > 0 {
            self.changed.notify_all();
        }
    }

    /// Starts a collective; returns its number. Its memory is the engine's until [`LocalEngine::wait`] has said that it
    /// is over. What nobody waits for goes on all the same, if it is `unattended`.
    pub(crate) fn start(
        self: &Arc<Self>,
        work: &Work,
        unattended: bool,
    ) -> Result<u64, CollectiveError> {
        let mut state = self.lock();
        // Otherwise those before it go on, and what comes after them is looked at when it is its turn.
        let is_next = !state.running && state.waiting.is_empty();
        if self.failure_of(&mut state).is_none() && is_next {
            state.failure = state.outlived(state.finished);
        }
        if let Some(error) = state.failure.clone() {
            return Err(error);
        }
        self.check(&work.call)?;
        if state.waiting.len() + usize::from(state.running) >= MAX_STARTED {
            return Err(CollectiveError::TooMany { limit: MAX_STARTED });
        }
        if unattended && !state.attended {
            let engine = Arc::clone(self);
            let thread = thread::Builder::new().name("collectives".to_owned());
            let attended = thread.spawn(ends_between_forks(move || engine.attend()));
            attended.map_err(|error| CollectiveError::Device(format!("no thread: {error}")))?;
            state.attended = true;
        }
        let sequence = state.started;
        state.started += 1;
        state.waiting.push_back(*work);
        if unattended {
            self.notify(&state);
        }
        // Otherwise the caller does it, once it waits.
        Ok(sequence)
    }

    /// Whether a call can be done at all.
    fn check(&self, call: &CollectiveCall) -> Result<(), CollectiveError> {
        let &CollectiveCall { collective, operation, data_type, root, count, .. } = call;
        let world = self.members.world();
        let reduces = match collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => true,
            Collective::Broadcast | Collective::AllGather | Collective::Barrier => false,
        };
        if reduces && Kernel::of(data_type, operation).is_none() {
            return Err(CollectiveError::Unsupported { collective, operation, data_type });
        }
        if root >= world {
            return Err(CollectiveError::Root { root, world });
        }
        let bytes = Work::descriptor_of(call).total_bytes(world);
        bytes.map(|_| ()).ok_or(CollectiveError::TooLong { count, data_type })
    }

    /// Waits for a collective that was started, for at most so long. `None` when it goes on after that. Once it is
    /// over, nothing is copied to or from its memory any more.
    pub(crate) fn wait(
        &self,
        sequence: u64,
        patience: Duration,
    ) -> Option<Result<(), CollectiveError>> {
        let end = Instant::now().checked_add(patience);
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.outcome(sequence) {
                return Some(outcome);
            }
            // Who waits as long as it takes does it.
            if patience == Duration::MAX && state.can_run() {
                state = self.run_next(state);
                continue;
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                return None;
            }
            state = self.sleep(state, end);
        }
    }

    /// Does what nobody waits for.
    fn attend(&self) {
        let mut state = self.lock();
        while !state.over {
            state = match state.can_run() {
                true => self.run_next(state),
                false => self.sleep(state, None),
            };
        }
    }

    /// Does the next collective.
    fn run_next<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        // It was started before the other one had left.
        if let Some(error) = state.outlived(state.finished) {
            // What is known of one that is dead says more.
            let error = self.failure_of(&mut state).unwrap_or(error);
            state.failure = Some(error.clone());
            state.waiting.clear();
            let state = self.cut_wire(state, error);
            self.notify(&state);
            return state;
        }
        let Some(mut runner) = state.runner.take() else { return state };
        let Some(work) = state.waiting.pop_front() else {
            state.runner = Some(runner);
            return state;
        };
        state.running = true;
        let sequence = state.finished;
        drop(state);
        let deadline = Instant::now() + work.limit.min(LONGEST);
        let outcome = runner.run(sequence, &work, deadline, &self.stop);
        let mut state = self.lock();
        state.runner = Some(runner);
        state.running = false;
        match outcome {
            Ok(()) => state.finished += 1,
            // Unless this rank has ended it.
            Err(Stop::Failed(error)) => {
                state.failure = state.failure.take().or(Some(error));
            }
            // Who told has said why.
            Err(Stop::Told) => {}
        }
        if let Some(error) = self.failure_of(&mut state) {
            state.waiting.clear();
            state = self.cut_wire(state, error);
        }
        self.notify(&state);
        state
    }

    /// The group is over: nothing more is sent or arrives.
    fn cut_wire<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        error: CollectiveError,
    ) -> MutexGuard<'a, State> {
        let Some(wire) = self.wire() else { return state };
        drop(state);
        wire.fail(error);
        self.lock()
    }

    /// Why the communicator is of no more use, if so.
    fn failure_of(&self, state: &mut State) -> Option<CollectiveError> {
        if state.failure.is_none() {
            let heard = self.area.get().and_then(|area| area.failure());
            state.failure = heard.map(CollectiveError::from);
        }
        state.failure.clone()
    }

    /// Ends the communicator, and the collective under way, with this reason unless there is one.
    pub(crate) fn fail(&self, error: CollectiveError) {
        let mut state = self.lock();
        if self.failure_of(&mut state).is_none() {
            if error == CollectiveError::Closed {
                self.tell(&error);
            }
            state.failure = Some(error.clone());
        }
        self.end(&mut state);
        drop(self.cut_wire(state, error));
    }

    /// The host has no way to the others any more, for this reason, which its ranks hear. What is on the wire ends by itself:
    /// who says this may be what that waits for.
    pub(crate) fn cut_off(&self, error: CollectiveError) {
        let mut state = self.lock();
        // Who calls no more has left, and nothing is wrong with that.
        if state.over {
            return;
        }
        let failure = Failure::of_wire(&error, self.members.rank(self.place));
        // This rank knows more than what it says to the others.
        if self.failure_of(&mut state).is_none() {
            state.failure = Some(error);
        }
        if let Some(area) = self.area.get() {
            area.fail(&failure);
        }
        self.end(&mut state);
    }

    /// Who is on the wire looks for the trees of this generation, because of this.
    pub(crate) fn begin_recovery(&self, generation: u32, loss: &CollectiveError) {
        if let Some(area) = self.area.get() {
            let loss = Failure::of_wire(loss, self.members.rank(self.place));
            area.begin_recovery(generation, &loss);
        }
    }

    /// It is on them, after so long.
    pub(crate) fn end_recovery(&self, generation: u32, took: Duration) {
        if let Some(area) = self.area.get() {
            area.end_recovery(generation, took);
        }
    }

    /// Which trees the host is on, or looks for.
    pub(crate) fn recovery(&self) -> Option<Recovery> {
        Some(self.area.get()?.recovery())
    }

    /// What is wrong with the rank that is on the wire, if its process has ended.
    pub(crate) fn lost_wire(&self) -> Option<CollectiveError> {
        let processes = self.processes.get()?;
        processes.ended(|place| place == 0)?;
        Some(Failure::ended(self.members.rank(0), processes.pid(0).unwrap_or_default()).into())
    }

    /// Why it has looked for other trees last.
    pub(crate) fn loss(&self) -> Option<CollectiveError> {
        Some(self.area.get()?.loss()?.into())
    }

    /// Sleeps while the search for other trees is at this, until it is time to look whether there is still something to wait
    /// for.
    pub(crate) fn sleep_while(&self, recovery: Recovery) {
        match self.area.get() {
            Some(area) => area.sleep_while(recovery, NAP),
            // Until the group has met.
            None => drop(self.sleep(self.lock(), Some(Instant::now() + NAP))),
        }
    }

    /// Wakes those who sleep there, to look again.
    pub(crate) fn wake_recovery(&self) {
        if let Some(area) = self.area.get() {
            area.wake_recovery();
        }
    }

    fn end(&self, state: &mut State) {
        self.stop.store(true, Ordering::Release);
        if !state.running {
            state.waiting.clear();
        }
        if let Some(area) = self.area.get() {
            area.wake();
        }
        self.notify(state);
    }

    /// Ends the communicator with this reason, unless the collective is over. The memory is its owner's again then.
    pub(crate) fn cancel(&self, sequence: u64, error: CollectiveError) -> bool {
        let mut state = self.lock();
        if state.outcome(sequence).is_some() {
            return false;
        }
        if self.failure_of(&mut state).is_none() {
            self.tell(&error);
            state.failure = Some(error.clone());
        }
        self.end(&mut state);
        state = self.cut_wire(state, error);
        while state.running {
            state = self.sleep(state, None);
        }
        true
    }

    /// Says to the others that this rank gives up.
    fn tell(&self, error: &CollectiveError) {
        if let Some(area) = self.area.get() {
            let detail = format!("it gave up: {error}");
            area.fail(&Failure::PeerLost { rank: self.members.rank(self.place), detail });
        }
    }

    /// A rank has left after so many collectives.
    pub(crate) fn peer_left(&self, rank: u32, collectives: u64) {
        let mut state = self.lock();
        // Told again after the connection to the controller broke.
        if !state.left.contains(&(rank, collectives)) {
            state.left.push((rank, collectives));
        }
        if state.running
            && state.failure.is_none()
            && let Some(error) = state.outlived(state.finished)
        {
            state.failure = Some(error);
            self.end(&mut state);
        }
    }

    /// Whether some rank has left.
    pub(crate) fn has_departed(&self) -> bool {
        !self.lock().left.is_empty()
    }

    /// Everyone has left, or nobody will say so any more.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        self.notify(&state);
    }

    /// There is another connection to a controller.
    pub(crate) fn reopen(&self) {
        self.lock().closed = false;
    }

    /// Waits until the controller has let go of us, but not for long.
    pub(crate) fn wait_released(&self) {
        self.wait_until_closed(RELEASE_PATIENCE, |_| true);
    }

    /// Who is on the wire waits until everyone has left, or there is no point in waiting: the switch would take it for
    /// dead. Nobody needs another rank that has left.
    pub(crate) fn wait_closed(&self, patience: Duration) {
        if self.wire().is_some() {
            self.wait_until_closed(patience, |state| state.failure.is_none());
        }
    }

    fn wait_until_closed(&self, patience: Duration, goes_on: impl Fn(&State) -> bool) {
        let until = Instant::now() + patience;
        let mut state = self.lock();
        while !state.closed && goes_on(&state) && Instant::now() < until {
            state = self.sleep(state, Some(until));
        }
    }

    /// What is wrong with a rank of this host, if that is what has failed: for the controller, which others hear it from.
    pub(crate) fn cause(&self, error: &CollectiveError) -> Option<AbortReason> {
        let reason = match error.clone() {
            CollectiveError::PeerLost { rank, detail } => AbortReason::PeerLost { rank, detail },
            CollectiveError::Mismatch { rank, what } => {
                AbortReason::Mismatch { rank, detail: shortened(what) }
            }
            CollectiveError::Overdue { ranks, what } => {
                AbortReason::Overdue { rank: *ranks.first()?, detail: shortened(what) }
            }
            _ => return None,
        };
        let (AbortReason::PeerLost { rank, .. }
        | AbortReason::Mismatch { rank, .. }
        | AbortReason::Overdue { rank, .. }
        | AbortReason::Violation { rank, .. }) = reason
        else {
            return None;
        };
        self.members.place(rank).map(|_| reason)
    }

    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        let mut state = self.lock();
        self.failure_of(&mut state)
    }

    /// How many collectives were started, and whether one is not over.
    pub(crate) fn progress(&self) -> (u64, bool) {
        let state = self.lock();
        (state.started, state.running || !state.waiting.is_empty())
    }

    /// The rank calls no more: nothing is copied from here on.
    pub(crate) fn disconnect(&self) {
        let mut state = self.lock();
        state.over = true;
        self.end(&mut state);
        while state.running {
            state = self.sleep(state, None);
        }
        if state.failure.is_none() {
            state.failure = Some(CollectiveError::Closed);
            if let Some(area) = self.area.get() {
                area.leave(self.place);
            }
        }
        state.waiting.clear();
        self.notify(&state);
        drop(state);
        if let Some(wire) = self.wire() {
            wire.disconnect();
        }
    }
}

impl fmt::Debug for LocalEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalEngine")
            .field("place", &self.place)
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

impl State {
    fn can_run(&self) -> bool {
        self.runner.is_some() && !self.waiting.is_empty() && self.failure.is_none() && !self.over
    }

    /// How a collective has ended, if it has.
    fn outcome(&self, sequence: u64) -> Option<Result<(), CollectiveError>> {
        match &self.failure {
            _ if sequence < self.finished => Some(Ok(())),
            Some(error) if !self.running => Some(Err(error.clone())),
            _ => None,
        }
    }

    /// Why a collective can never end, if a rank has left before it.
    fn outlived(&self, sequence: u64) -> Option<CollectiveError> {
        let &(rank, collectives) = self.left.iter().find(|&&(_, called)| called <= sequence)?;
        Some(CollectiveError::left(rank, collectives))
    }
}

#[cfg(test)]
mod tests {
    use millstream_net::shared_memory::{GroupOwner, own_process};

    use super::*;
    use crate::engine::tests::barrier;
    use crate::local::layout::Layout;

    const LIMIT: Duration = Duration::from_millis(100);

    /// The rank in the first place of two, which share memory.
    fn first_of_two() -> (GroupOwner, Arc<LocalEngine>) {
        let (owner, memory) = GroupOwner::create(Layout::new(2).length()).unwrap();
        let area = Area::new(memory, Members::all(2));
        (0..2).for_each(|place| area.introduce(place, own_process().unwrap()));
        let processes = MemberProcesses::open(area.processes()).unwrap();
        let engine = LocalEngine::new(0, Members::all(2));
        engine.begin(area, processes, 0, None);
        (owner, engine)
    }

    /// As of a rank of another host, of which nothing is in the memory of this one.
    #[test]
    fn what_was_started_before_a_rank_left_ends_when_it_is_its_turn() {
        let (_owner, engine) = first_of_two();
        let sequences = [(); 2].map(|()| engine.start(&barrier(LIMIT), false).unwrap());
        engine.peer_left(1, 0);
        for sequence in sequences {
            let outcome = engine.wait(sequence, Duration::MAX);
            assert_eq!(outcome, Some(Err(CollectiveError::left(1, 0))));
        }
        engine.disconnect();
    }

    /// All of the search was added to its limit.
    #[test]
    fn a_call_that_begins_in_a_search_for_trees_waits_no_longer_for_what_was_over_of_it() {
        let (_owner, engine) = first_of_two();
        engine.begin_recovery(1, &CollectiveError::Closed);
        let sequence = engine.start(&barrier(LIMIT), false).unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| engine.wait(sequence, Duration::MAX));
            let area = engine.area.get().unwrap();
            while area.lacks(0, 1) {
                thread::yield_now();
            }
            engine.end_recovery(1, Duration::from_secs(3600));
            let outcome = waits.join().unwrap();
            assert!(matches!(outcome, Some(Err(CollectiveError::Overdue { .. }))), "{outcome:?}");
        });
        engine.disconnect();
    }
}
