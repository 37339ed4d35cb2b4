//! A communicator that goes on when a switch is lost: the calls of its rank, on the trees that there are now.
//!
//! Each set of trees has an [`Engine`]. When one fails for want of a switch, a thread of this rank ([`recovery`]) waits until
//! nothing of the old trees can arrive any more, joins the other ranks again under a name that only they know, makes up for
//! what is missing of calls under way, and starts those anew that not all ranks had started. Callers wait meanwhile.
//!
//! The lowest rank of a host with several ranks does so for all of them, whose chunks are its calls ([`Host`]).
//!
//! Calls have numbers of their own, since the engines' begin anew, and the new trees do other collectives first.
//!
//! The memory of a call is its caller's again once the caller was told its end. What others may still lack of it is
//! copied before that ([`retained`]).

mod beside;
mod host;
mod meeting;
mod recovery;
mod retained;
mod state;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, mem, thread};

use millstream_inc::{CollectiveCall, Ranks};
use millstream_net::ends_between_forks;

use crate::control::{Sender, given_up};
use crate::engine::{Engine, MAX_STARTED};
use crate::hosted::HostedSwitch;
use crate::join::{JoinConfig, Joined};
use crate::joining::Cancellation;
use crate::local::LocalEngine;
use crate::memory::{Domains, Operands, Regions, operand, writable};
use crate::tree::Work;
use crate::{CollectiveError, LONGEST};

pub(crate) use beside::BesideWire;
pub(crate) use host::{Host, OnWire};

use meeting::PATIENCE;
use retained::Retained;
use state::{Call, Entry, Line, Phase, State, is_loss};

/// So many calls are remembered, from the first on whose end was not told: nobody has waited for it.
const MAX_CALLS: usize = 1 << 16;

/// How long who is on the wire for others of its host may look for other trees, where a call may take so long: until the
/// ranks have met, and made up for what was lost.
pub(crate) fn longest_search(call_limit: Duration) -> Duration {
    PATIENCE * 2 + call_limit.clamp(PATIENCE, LONGEST)
}

/// A communicator has gone on over other trees.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FailoverReport {
    /// Why: which switch was lost, and how that is known.
    pub reason: String,
    /// Name and address of the switch of each of the new trees.
    pub switches: Vec<(String, IpAddr)>,
    /// Why these are the ranks' own, if they are.
    pub fallback: Option<String>,
    /// From the failure to the first call on the new trees.
    pub took: Duration,
}

/// The rank, on the trees that there are now.
pub(crate) struct Failover {
    config: JoinConfig,
    domains: Domains,
    /// What the ranks of its host share memory by, for which this one is on the wire. That has this, as its wire.
    local: Option<Weak<LocalEngine>>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Failover {
    /// Of a rank that has joined over switches, whether for itself or for those that it shares memory with.
    pub(crate) fn start(
        config: &JoinConfig,
        joined: Joined,
        local: Option<&Arc<LocalEngine>>,
    ) -> io::Result<Arc<Self>> {
        let domains = joined.domains.clone();
        let ranks = match local {
            Some(local) => local.members().ranks().iter().copied().collect(),
            None => Ranks::one(config.rank),
        };
        let local = local.map(Arc::downgrade);
        let Some(line) = Line::new(joined, config, ranks, 0, (0, 0)) else {
            return Err(io::Error::other("it has no trees"));
        };
        let retained = (0..line.lost.trees).map(|_| Retained::default()).collect();
        let state = State {
            line,
            phase: Phase::Serving,
            starting: 0,
            awaits_starts: false,
            front: 0,
            calls: VecDeque::with_capacity(MAX_STARTED),
            retained,
            reports: Vec::new(),
            retired: Vec::new(),
            cancellation: Cancellation::default(),
            avoid: Vec::new(),
            canceled: None,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let failover = Arc::new(Self { config: config.clone(), domains, local, state, changed });
        let watch = Arc::clone(&failover);
        thread::Builder::new()
            .name("failover".to_owned())
            .spawn(ends_between_forks(move || watch.run()))?;
        Ok(failover)
    }

    fn local(&self) -> Option<Arc<LocalEngine>> {
        self.local.as_ref().and_then(Weak::upgrade)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while this is so, at most until `end`.
    fn wait_while<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        end: Option<Instant>,
        mut condition: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        let left = end.map_or(LONGEST, |end| end.saturating_duration_since(Instant::now()));
        let waited = self.changed.wait_timeout_while(state, left, &mut condition);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The engine of the trees that there are now.
    fn engine(&self) -> Arc<Engine> {
        Arc::clone(&self.lock().line.engine)
    }

    pub(crate) fn copies(&self, call: &CollectiveCall) -> bool {
        self.engine().is_small(call)
    }

    /// Starts a call; returns its number. While other trees are looked for, waits.
    pub(crate) fn begin(&self, work: &Work) -> Result<u64, CollectiveError> {
        loop {
            if let Some(begun) = self.begin_within(work, LONGEST) {
                return begun;
            }
        }
    }

    /// As above; `None` when other trees were looked for, whether they are there now or still are not after so long: what the
    /// call has of its time is to be looked at again.
    pub(crate) fn begin_within(
        &self,
        work: &Work,
        patience: Duration,
    ) -> Option<Result<u64, CollectiveError>> {
        let end = Instant::now().checked_add(patience);
        let mut state = self.lock();
        if state.is_recovering() {
            drop(self.wait_while(state, end, |state| state.is_recovering()));
            return None;
        }
        if let Phase::Over(error) = &state.phase {
            return Some(Err(error.clone()));
        }
        if state.calls.len() >= MAX_CALLS {
            return Some(Err(CollectiveError::TooMany { limit: MAX_CALLS }));
        }
        let (engine, generation) = (Arc::clone(&state.line.engine), state.line.generation);
        // The recovery does not begin before this has ended.
        state.starting += 1;
        drop(state);
        let started = self.start_on(&engine, work);
        let mut state = self.lock();
        state.starting -= 1;
        if state.starting == 0 && state.awaits_starts {
            self.changed.notify_all();
        }
        match started {
            Ok(call) => {
                let number = state.line.call_of(call.sequence);
                state.started(number, call);
                Some(Ok(number))
            }
            // One that the engine has not failed of brings no news: after a rank has left, a tree may be lost that no
            // call needs.
            Err(error) if is_loss(&error) && engine.failure().is_some() => {
                drop(self.await_news(state, generation, end));
                None
            }
            Err(error) => Some(Err(error)),
        }
    }

    /// Waits until what follows from a loss is known: other trees, or that there are none.
    fn await_news<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        generation: u32,
        end: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        let is_open = |state: &mut State| {
            state.line.generation == generation && !matches!(state.phase, Phase::Over(_))
        };
        self.wait_while(state, end, is_open)
    }

    fn start_on(&self, engine: &Engine, work: &Work) -> Result<Call, CollectiveError> {
        let (mut work, mut regions) = (*work, [None, None]);
        if !work.registered && !engine.is_small(&work.call) {
            let access = writable(work.call.mode);
            let destination = self.domains.register_span(work.destination, access)?;
            // It may be the same memory.
            let source = self.domains.register_span(work.source, millstream_verbs::Access::empty());
            let source = source?;
            work.operands = Operands {
                source: operand(source.as_ref()),
                destination: operand(destination.as_ref()),
            };
            work.call.source_address = work.operands.source.address;
            work.call.destination_address = work.operands.destination.address;
            regions = [source, destination];
        }
        let sequence = engine.start(&work)?;
        Ok(Call { work, sequence, done: false, regions })
    }

    /// How a call has ended, if it does within `patience`.
    pub(crate) fn wait(
        &self,
        number: u64,
        patience: Duration,
    ) -> Option<Result<(), CollectiveError>> {
        let end = Instant::now().checked_add(patience);
        let is_late = || end.is_some_and(|end| Instant::now() >= end);
        loop {
            let mut state = self.lock();
            let (front, is_recovering) = (state.front, state.is_recovering());
            let (sequence, done) = match state.entry(number) {
                None if number >= front => return Some(Err(CollectiveError::NotStarted)),
                None | Some(Entry::Told) => return Some(Ok(())),
                Some(Entry::Coming) => return Some(Err(CollectiveError::NotStarted)),
                Some(Entry::Call(call)) => (call.sequence, call.done),
            };
            if done && !is_recovering {
                state.tell(number);
                return Some(Ok(()));
            }
            let (engine, generation) = (Arc::clone(&state.line.engine), state.line.generation);
            match &state.phase {
                Phase::Serving => {}
                Phase::Joining | Phase::Repairing(_) => {
                    drop(self.wait_while(state, end, |state| state.is_recovering()));
                    if is_late() {
                        return None;
                    }
                    continue;
                }
                Phase::Over(error) if !engine.has_result(sequence) => {
                    let error = error.clone();
                    return Some(Err(failed(state, number, error)));
                }
                Phase::Over(_) => {
                    state.tell(number);
                    return Some(Ok(()));
                }
            }
            drop(state);
            let left = end.map_or(LONGEST, |end| end.saturating_duration_since(Instant::now()));
            let outcome = engine.wait(sequence, left)?;
            let state = self.lock();
            match outcome {
                Ok(()) => {
                    let mut state = state;
                    // What was under way meanwhile may be needed by others.
                    if state.line.generation == generation && !state.is_recovering() {
                        state.tell(number);
                        return Some(Ok(()));
                    }
                }
                Err(error) if is_loss(&error) => {
                    drop(self.await_news(state, generation, end));
                    if is_late() {
                        return None;
                    }
                }
                Err(error) => return Some(Err(failed(state, number, error))),
            }
        }
    }

    /// Ends the communicator with this reason, unless the call is over.
    pub(crate) fn cancel(&self, number: u64, error: CollectiveError) -> bool {
        loop {
            let mut state = self.lock();
            let sequence = match state.entry(number) {
                Some(Entry::Call(call)) if call.done => None,
                Some(Entry::Call(call)) => Some(call.sequence),
                _ => return false,
            };
            let engine = Arc::clone(&state.line.engine);
            let has_result = sequence.is_none_or(|sequence| engine.has_result(sequence));
            match (&state.phase, sequence) {
                (Phase::Over(_), _) => return false,
                (Phase::Joining | Phase::Repairing(_), _) if has_result => {
                    // Others may need what it has.
                    drop(self.wait_while(state, None, |state| state.is_recovering()));
                    continue;
                }
                (Phase::Joining | Phase::Repairing(_), _) => {
                    self.end(state, error);
                    return true;
                }
                (Phase::Serving, Some(sequence)) if !has_result => {
                    let generation = state.line.generation;
                    drop(state);
                    if engine.cancel(sequence, error.clone()) {
                        return true;
                    }
                    let state = self.lock();
                    if !engine.has_result(sequence) && state.line.generation == generation {
                        // It has failed, and if that is for want of a switch it would go on.
                        let lasts = engine.failure().is_some_and(|failure| !is_loss(&failure));
                        let is_over = lasts || matches!(state.phase, Phase::Over(_));
                        if !is_over {
                            self.end(state, error);
                        }
                        return !is_over;
                    }
                }
                (Phase::Serving, _) => {
                    state.tell(number);
                    return false;
                }
            }
        }
    }

    /// Ends the communicator with this reason.
    pub(crate) fn fail(&self, error: CollectiveError) {
        loop {
            let mut state = self.lock();
            let Phase::Serving = state.phase else { return self.end(state, error) };
            let (engine, generation) = (Arc::clone(&state.line.engine), state.line.generation);
            // Who says so of a loss has no use for other trees.
            if is_loss(&error) {
                state.phase = Phase::Over(error.clone());
            }
            drop(state);
            engine.fail(error.clone());
            let state = self.lock();
            if state.line.generation == generation {
                // It may have lost a switch just before, and would go on over other trees.
                if engine.failure().is_some_and(|failure| is_loss(&failure)) {
                    self.end(state, error);
                }
                return;
            }
        }
    }

    /// Ends it, whatever it is at: no vector of a call is touched after this.
    fn end(&self, mut state: MutexGuard<'_, State>, error: CollectiveError) {
        match &state.phase {
            Phase::Over(_) => return,
            Phase::Serving | Phase::Joining => {
                // The others are not to wait for this rank.
                let cause = self.local().and_then(|local| local.cause(&error));
                state.cancellation.cancel(given_up(&error, cause));
                state.phase = Phase::Over(error);
            }
            Phase::Repairing(engine) => {
                let engine = Arc::clone(engine);
                state.canceled = Some(error.clone());
                drop(state);
                engine.fail(error);
                let is_repairing = |state: &mut State| matches!(state.phase, Phase::Repairing(_));
                drop(self.wait_while(self.lock(), None, is_repairing));
                return;
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// How many calls were started on the trees that there are now, and whether one is under way. A rank that waits for none
    /// of its own may be needed by others to go on.
    pub(crate) fn progress(&self) -> (u64, bool) {
        let mut state = self.lock();
        if state.calls.is_empty() {
            let generation = state.line.generation;
            if state.line.engine.failure().is_some_and(|error| is_loss(&error)) {
                state = self.await_news(state, generation, None);
            }
            state = self.wait_while(state, None, |state| state.is_recovering());
        }
        let (started, running) = state.line.engine.progress();
        (started, running || state.is_recovering())
    }

    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        let state = self.lock();
        match &state.phase {
            Phase::Over(error) => Some(error.clone()),
            Phase::Joining | Phase::Repairing(_) => None,
            Phase::Serving => state.line.engine.failure().filter(|error| !is_loss(error)),
        }
    }

    /// What has become of it, since it was joined.
    pub(crate) fn reports(&self) -> Vec<FailoverReport> {
        self.lock().reports.clone()
    }

    /// The connection to the controller, and the switch of this process, that there are now.
    pub(crate) fn sender(&self) -> Arc<Sender> {
        Arc::clone(&self.lock().line.sender)
    }

    pub(crate) fn hosted(&self) -> Option<Arc<HostedSwitch>> {
        self.lock().line.hosted.clone()
    }

    pub(crate) fn failed_tree(&self) -> usize {
        self.engine().failed_tree()
    }

    pub(crate) fn wait_closed(&self, patience: Duration) {
        self.engine().wait_closed(patience);
    }

    pub(crate) fn wait_released(&self) {
        self.engine().wait_released();
    }

    /// Ends its connections, and its threads soon: one that is joining does when that succeeds or fails.
    pub(crate) fn close(&self) {
        let mut state = loop {
            let state = self.lock();
            if !state.is_recovering() {
                break state;
            }
            self.end(state, CollectiveError::Closed);
        };
        let (engine, watcher) = (Arc::clone(&state.line.engine), state.line.watcher.take());
        let (coordinator, retired) = (state.line.coordinator.take(), mem::take(&mut state.retired));
        let regions: Vec<_> = state.calls.iter_mut().filter_map(regions_of).collect();
        if let Phase::Serving = state.phase {
            state.phase = Phase::Over(CollectiveError::Closed);
        }
        drop(state);
        self.changed.notify_all();
        engine.abandon();
        engine.disconnect();
        drop((regions, watcher, coordinator, retired));
    }
}

/// What a caller is told whose call has failed. Nothing arrives for it any more, and its memory is its own again.
fn failed(
    mut state: MutexGuard<'_, State>,
    number: u64,
    error: CollectiveError,
) -> CollectiveError {
    let regions = state.take_regions(number);
    // What that waits for needs no lock of ours.
    drop(state);
    drop(regions);
    error
}

fn regions_of(entry: &mut Entry) -> Option<[Option<Regions>; 2]> {
    match entry {
        Entry::Call(call) => Some(mem::take(&mut call.regions)),
        Entry::Coming | Entry::Told => None,
    }
}
