//! One rank at work: the workers' state machines between the caller, the devices' own threads and the
//! thread that listens to the controller.
//!
//! There is a worker for each tree of the communicator. A collective is over when all of its parts are, and all
//! before it.
//!
//! The caller posts the beginning of a collective, unless another one is under way: then it comes after that.
//! Completions are handled by the caller while it waits, or on the device's thread while nobody does, and what
//! follows from them is posted at once, the tree's next collective included.
//! All do it with the state locked, because the switch tells segments apart by the order in which
//! they come, and send after the lock is released.

mod ending;
mod state;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_inc::{CollectiveCall, CollectiveError as E, StartError, Stripe, send_window_up};
use millstream_verbs::{
    Access, Completion, CompletionQueue, Device, Mtu, Psn, QueuePairAttributes, QueuePairState,
    Waiters,
};

use self::state::{Failure, Outcome, State};
use crate::CollectiveError;
use crate::tree::{Link, Tree, Work};

/// What a rank shares with the other threads.
pub(crate) struct Engine {
    state: Mutex<State>,
    changed: Condvar,
    /// Until the collective is over: they make progress, those who wait for `changed` do not.
    waiters: Waiters,
    /// One for each tree.
    links: Vec<Link>,
    /// So many devices, those of the first trees: further trees are on the same.
    devices: usize,
}

/// So many collectives may be started and not over.
pub(crate) const MAX_STARTED: usize = 64;

/// How long a failure that the switch reports may wait for what the controller says about it. What
/// it says is better, and when it has spoken, the group's name is free for the next attempt.
const VERDICT_PATIENCE: Duration = Duration::from_millis(250);

/// Finds the engine that completions are for. The queue pair needs the completion queue, and the
/// engine the queue pair, so the queue's handler gets to know the engine last.
#[derive(Clone, Default)]
pub(crate) struct EngineSlot(Arc<OnceLock<Weak<Engine>>>);

impl EngineSlot {
    pub(crate) fn handle(&self, tree: usize, completions: &[Completion]) {
        if let Some(engine) = self.0.get().and_then(Weak::upgrade) {
            engine.completed(tree, completions);
        }
    }
}

/// The switch's end of the connection.
pub(crate) struct Edge {
    pub(crate) qpn: millstream_verbs::Qpn,
    pub(crate) psn: Psn,
    pub(crate) path_mtu: Mtu,
    /// Bytes that may be in flight to it.
    pub(crate) receive_share: Option<u32>,
}

/// Acknowledgement timeout on the way to the switch: 4.096 us * 2^16 = 0.27 s. A switch that is
/// silent for eight of these is lost.
const TIMEOUT: u8 = 16;
const RETRY_COUNT: u8 = 7;
const SWITCH_PATIENCE: Duration =
    Duration::from_nanos((4096_u64 << TIMEOUT) * (RETRY_COUNT as u64 + 1));

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({} trees)", self.links.len())
    }
}

impl Engine {
    /// Of trees, each with its connection; as many of the first as there are `devices` are on different ones.
    pub(crate) fn new(
        trees: Vec<(Tree, Link)>,
        devices: usize,
        world: u32,
        slot: &EngineSlot,
    ) -> Arc<Self> {
        let (trees, links): (Vec<Tree>, Vec<Link>) = trees.into_iter().unzip();
        debug_assert!((1..=links.len()).contains(&devices), "{devices} devices");
        let state = State {
            trees,
            world,
            started: 0,
            finished: 0,
            parts: VecDeque::with_capacity(MAX_STARTED),
            failure: None,
            left: Vec::new(),
            closed: false,
            abandoned: false,
            verdict_patience: VERDICT_PATIENCE,
        };
        let state = Mutex::new(state);
        let (changed, waiters) = (Condvar::new(), Waiters::default());
        let engine = Arc::new(Self { state, changed, waiters, links, devices });
        // A slot is for one engine.
        let _ = slot.0.set(Arc::downgrade(&engine));
        engine
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all who wait for a change of the state. Those who wait for `changed` wait for a failure or an end: a result
    /// is nothing to them, and to wake them is a system call for each small collective, and a thread where there is one.
    /// Whoever brings about such an end after the look calls this, too.
    fn notify(&self) {
        let state = self.lock();
        let ends = state.failure.is_some() || state.closed || state.abandoned;
        drop(state);
        if ends {
            self.changed.notify_all();
        }
        self.waiters.wake();
    }

    /// Does what posts requests, and has them sent when it has let go of the state.
    fn post<T>(&self, work: impl FnOnce() -> T) -> T {
        // Recursion needs one type of closure.
        fn each(links: &[Link], work: &mut dyn FnMut()) {
            match links {
                [] => work(),
                [first, rest @ ..] => first.device.postpone_sending(|| each(rest, work)),
            }
        }
        let links = &self.links[..self.devices];
        if let [only] = links {
            return only.device.postpone_sending(work);
        }
        let (mut work, mut result) = (Some(work), None);
        each(links, &mut || result = work.take().map(|work| work()));
        result.expect("it is called once")
    }

    /// Connects the queue pair of a tree, and posts its first receives.
    pub(crate) fn connect(
        &self,
        tree: usize,
        edge: &Edge,
        psn: Psn,
    ) -> Result<(), millstream_verbs::ModifyError> {
        let none = QueuePairAttributes::default();
        let Link { pair, switch, .. } = &self.links[tree];
        let granted = self.links[tree].granted();
        pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            // Regions say where the switch may write. It asks by a WRITE of no bytes whether this rank lives, at
            // any time.
            access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            ..none
        })?;
        pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(*switch),
            path_mtu: Some(edge.path_mtu),
            destination_qpn: Some(edge.qpn),
            receive_psn: Some(edge.psn),
            responder_resources: Some(0),
            minimum_rnr_timer: Some(1),
            ..none
        })?;
        pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(psn),
            timeout: Some(TIMEOUT),
            retry_count: Some(RETRY_COUNT),
            // The switch asks for patience when descriptors come too fast; deadlines end that.
            rnr_retry: Some(7),
            initiator_depth: Some(0),
            send_window_bytes: send_window_up(edge.receive_share, granted),
            ..none
        })?;
        self.advance(&mut self.lock(), tree);
        Ok(())
    }

    /// Whether the vector of a call is small: it is copied, and needs no registered memory.
    pub(crate) fn is_small(&self, call: &CollectiveCall) -> bool {
        // Any worker knows.
        self.lock().trees.first().is_some_and(|tree| tree.worker.is_small(call))
    }

    /// Starts a collective; returns its number.
    ///
    /// Its memory is the engine's until [`Engine::wait`] has said that it is over.
    pub(crate) fn start(&self, work: &Work) -> Result<u64, CollectiveError> {
        self.post(|| self.begin(work))
    }

    fn begin(&self, work: &Work) -> Result<u64, CollectiveError> {
        let mut state = self.lock();
        // Otherwise those before it go on, and what comes after them is looked at when it is its turn.
        if state.finished == state.started
            && state.failure.is_none()
            && let Some(error) = state.outlived(state.started)
        {
            drop(state);
            self.fail(error);
            state = self.lock();
        }
        state = self.await_verdict(state);
        if let Some(failure) = &mut state.failure {
            failure.provisional = false;
            return Err(failure.error.clone());
        }
        if state.parts.len() >= MAX_STARTED {
            return Err(CollectiveError::TooMany { limit: MAX_STARTED });
        }
        let sequence = state.started;
        let (trees, world) = (state.trees.len() as u8, state.world);
        let stripe = |tree| Stripe::of(&work.call, world, sequence, tree, trees);
        let part_of = |tree| stripe(tree).map(|stripe| CollectiveCall { stripe, ..work.call });
        for (tree, number) in state.trees.iter().zip(0..) {
            let Some(call) = part_of(number) else { continue };
            let refused = |error| self.not_started(usize::from(number), error);
            tree.worker.check(&call).map_err(refused)?;
        }
        state.started += 1;
        let mut parts = 0;
        for number in 0..trees {
            let Some(call) = part_of(number) else { continue };
            let part = work.part(sequence, usize::from(number) % self.devices, call);
            state.trees[usize::from(number)].waiting.push_back(part);
            parts += 1;
        }
        state.parts.push_back(parts);
        let mut over = false;
        for tree in 0..self.links.len() {
            over |= self.advance(&mut state, tree);
        }
        if over {
            drop(state);
            self.notify();
        }
        Ok(sequence)
    }

    /// Waits for a collective that was started, for at most so long. `None` when it goes on after that. Once
    /// it is over, nothing is copied to or from its memory any more, and nothing more arrives there.
    pub(crate) fn wait(
        &self,
        sequence: u64,
        patience: Duration,
    ) -> Option<Result<(), CollectiveError>> {
        let end = Instant::now().checked_add(patience);
        loop {
            let state = self.lock();
            if let Some(outcome) = state.outcome(sequence) {
                return Some(self.ended(state, outcome));
            }
            // Those before it have deadlines, too.
            let Some((tree, running)) = state.next_deadline() else {
                return Some(Err(CollectiveError::NotStarted));
            };
            let now = Instant::now();
            drop(state);
            let is_over = || {
                let state = self.lock();
                let now = state.trees[tree].running;
                let same = now.is_some_and(|it| it.sequence == running.sequence);
                (!same || state.outcome(sequence).is_some()).then_some(())
            };
            let devices = self.links[..self.devices].iter().map(|link| &link.device);
            if now >= running.deadline {
                let look =
                    || millstream_verbs::wait(devices, &self.waiters, Duration::ZERO, is_over);
                // A machine that stood still has not looked who was silent meanwhile.
                if !running.overdue || look().is_none() {
                    self.expire(tree, running.sequence);
                }
                continue;
            }
            if end.is_some_and(|end| now >= end) {
                return None;
            }
            let until = end.map_or(running.deadline, |end| end.min(running.deadline));
            millstream_verbs::wait(devices, &self.waiters, until - now, is_over);
        }
    }

    /// Lets the controller say what it knows of a failure.
    fn await_verdict<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let open = |state: &mut State| {
            !state.closed && state.failure.as_ref().is_some_and(|failure| failure.provisional)
        };
        let patience = state.verdict_patience;
        let waited = self.changed.wait_timeout_while(state, patience, open);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The collective is over: how, for the caller.
    fn ended(&self, state: MutexGuard<'_, State>, outcome: Outcome) -> Result<(), CollectiveError> {
        if let Outcome::Done = outcome {
            // A communicator may fail just after its collective is done.
            return Ok(());
        }
        let mut state = self.await_verdict(state);
        let error = state.failure.as_mut().map(|failure| {
            failure.provisional = false;
            failure.error.clone()
        });
        drop(state);
        // What is on its way for this collective, or one before it, is not to arrive in the caller's memory later.
        self.disconnect();
        Err(error.unwrap_or(CollectiveError::NotStarted))
    }

    /// Nothing is sent from here on, and nothing that arrives is written anywhere.
    pub(crate) fn disconnect(&self) {
        self.links.iter().for_each(Link::disconnect);
    }

    /// Takes completions of a tree, on its device's own thread or one that waits.
    fn completed(&self, tree: usize, completions: &[Completion]) {
        let mut state = self.lock();
        for completion in completions {
            state.trees[tree].completed(completion);
        }
        if self.advance(&mut state, tree) {
            drop(state);
            self.notify();
        }
    }

    /// Carries out what the worker of a tree wants, and begins its next collective when one is over; `true` when those
    /// who wait must know.
    fn advance(&self, state: &mut State, tree: usize) -> bool {
        let mut over = false;
        let had_failed = state.failure.is_some();
        loop {
            over |= !self.begin_next(state, tree);
            let link = &self.links[tree];
            state.trees[tree].carry_out(&link.pair);
            self.look_for_failure(state, tree);
            let Some(outcome) = state.trees[tree].worker.poll_outcome() else { break };
            let running = state.trees[tree].running.take();
            if let (Ok(_), Some(running)) = (outcome, running) {
                state.finish_part(running.sequence);
            }
            over = true;
        }
        if state.failure.is_none()
            && let Some(error) = state.never_ends()
        {
            state.failure = Some(Failure { error, tree: None, provisional: false });
            over = true;
        }
        // What fails on one tree is over on all.
        if state.failure.is_some() {
            for tree in &mut state.trees {
                tree.stop();
                over |= tree.worker.poll_outcome().is_some();
                tree.running = None;
            }
        }
        // Those who wait for a failure must know, too.
        over | (!had_failed && state.failure.is_some())
    }

    /// Begins the next collective of a tree, if it is time. `false` when it can never end, nor those after it.
    fn begin_next(&self, state: &mut State, tree: usize) -> bool {
        let of = &state.trees[tree];
        let next = of.waiting.front().filter(|_| of.running.is_none() && state.failure.is_none());
        let Some(&part) = next else { return true };
        if state.outlived(part.sequence).is_some() {
            // Those before it may still end, on other trees. When they have, this ends the communicator.
            return true;
        }
        state.trees[tree].waiting.pop_front();
        let begun = state.trees[tree].begin(&part);
        let Err(error) = begun.map_err(|error| self.not_started(tree, error)) else { return true };
        // It is not over there.
        state.trees[tree].waiting.push_front(part);
        state.failure = Some(Failure { error, tree: Some(tree), provisional: false });
        false
    }

    /// Where the connection to a switch goes, for people: with several trees, they are to know which it is.
    fn name(&self, tree: usize) -> Option<String> {
        let here = self.links[tree].device.address();
        (self.links.len() > 1).then(|| format!("tree {tree}, from {here}"))
    }

    fn not_started(&self, tree: usize, error: StartError) -> CollectiveError {
        CollectiveError::from_start(error, self.links[tree].switch)
    }

    /// Says why the communicator is over, when the worker of a tree has failed and nothing is known yet.
    fn look_for_failure(&self, state: &mut State, tree: usize) {
        let Link { device, switch, .. } = &self.links[tree];
        let of = &state.trees[tree];
        let Some(error) = of.worker.failure().filter(|_| state.failure.is_none()) else { return };
        if state.is_spare(of) && device.failure().is_none() {
            // Who has left answers the switch no longer. What came before may still end, on other trees.
            return;
        }
        // Unless it is our own device, the controller may know more.
        let name = self.name(tree);
        let device = device.failure().map(CollectiveError::Device);
        let error = match of.running {
            Some(running) if of.may_be_closed() && matches!(error, E::Transport(_)) => {
                of.timed_out(running)
            }
            _ => CollectiveError::from_switch(error, *switch),
        };
        let error = device.unwrap_or(error).on_tree(name.as_deref());
        let known = |it: &CollectiveError| {
            matches!(it, CollectiveError::Device(_) | CollectiveError::Overdue { .. })
        };
        let provisional = !known(&error);
        state.failure = Some(Failure { error, tree: Some(tree), provisional });
    }
}

/// A completion queue whose completions go to the engine of `slot`.
pub(crate) fn completion_queue(
    device: &Device,
    capacity: usize,
    slot: &EngineSlot,
    tree: usize,
) -> Result<CompletionQueue, millstream_verbs::CreateError> {
    let slot = slot.clone();
    let handler = Box::new(move |completions: &[Completion]| slot.handle(tree, completions));
    device.create_completion_queue_with_progress_handler(capacity, handler)
}

#[cfg(test)]
pub(crate) mod tests;
