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

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_inc::failover::Position;
use millstream_inc::{
    CollectiveCall, CollectiveError as E, HostConfig, MAX_TREES, StartError, Stripe,
};
use millstream_verbs::{
    Access, Completion, CompletionQueue, Device, Mtu, Psn, QueuePairAttributes, QueuePairState,
    Waiters,
};

use crate::CollectiveError;
use crate::tree::{Link, Running, Tree, Work};

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

struct State {
    trees: Vec<Tree>,
    world: u32,
    /// How many collectives were started.
    started: u64,
    /// How many of them have ended with a result.
    finished: u64,
    /// Of those that come after these, in their order, on how many trees they are not over.
    parts: VecDeque<u8>,
    /// Why the communicator is of no more use.
    failure: Option<Failure>,
    /// Ranks that have left, and how many collectives they have called.
    left: Vec<(u32, u64)>,
    /// Nothing more will be heard from the controller.
    closed: bool,
    /// Nobody waits for a failure any more.
    abandoned: bool,
    /// How long a failure may wait for what the controller says about it.
    verdict_patience: Duration,
}

#[derive(Clone, Copy)]
enum Outcome {
    Done,
    /// [`State::failure`] says why.
    Failed,
}

/// So many collectives may be started and not over.
pub(crate) const MAX_STARTED: usize = 64;

struct Failure {
    error: CollectiveError,
    /// On which tree it was found, if on one.
    tree: Option<usize>,
    /// The controller may know better, as long as nobody was told this.
    provisional: bool,
}

/// How long a failure that the switch reports may wait for what the controller says about it. What
/// it says is better, and when it has spoken, the group's name is free for the next attempt.
const VERDICT_PATIENCE: Duration = Duration::from_millis(250);

/// As above, where more depends on it: the switch above a switch that is lost says that a rank is, and the controller knows
/// better.
const FAILOVER_PATIENCE: Duration = Duration::from_secs(1);

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
}

/// Acknowledgement timeout on the way to the switch: 4.096 us * 2^16 = 0.27 s. A switch that is
/// silent for eight of these is lost.
const TIMEOUT: u8 = 16;
const RETRY_COUNT: u8 = 7;

/// How long a rank whose deadline has passed waits for the switch to say whom it waits for: for several processes
/// to answer, on busy machines.
const OVERDUE_PATIENCE: Duration = Duration::from_secs(2);

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
            if now >= running.deadline {
                self.expire(tree, running.sequence);
                continue;
            }
            if end.is_some_and(|end| now >= end) {
                return None;
            }
            let until = end.map_or(running.deadline, |end| end.min(running.deadline));
            let is_over = || {
                let state = self.lock();
                let now = state.trees[tree].running;
                let same = now.is_some_and(|it| it.sequence == running.sequence);
                (!same || state.outcome(sequence).is_some()).then_some(())
            };
            let devices = self.links[..self.devices].iter().map(|link| &link.device);
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
            // It closes the connection of who has a receive for a result there.
            Some(running) if running.overdue && matches!(error, E::Transport(_)) => {
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

    /// Ends the communicator, and the collective under way, with this reason unless there is one.
    pub(crate) fn fail(&self, error: CollectiveError) {
        self.post(|| self.end(self.lock(), error));
    }

    fn end(&self, mut state: MutexGuard<'_, State>, error: CollectiveError) {
        if state.failure.as_ref().is_none_or(|failure| failure.provisional) {
            state.failure = Some(Failure { error, tree: None, provisional: false });
        }
        state.trees.iter_mut().for_each(Tree::stop);
        self.advance(&mut state, 0);
        drop(state);
        self.notify();
        self.disconnect();
    }

    /// Ends the communicator with this reason, unless the collective is over.
    pub(crate) fn cancel(&self, sequence: u64, error: CollectiveError) -> bool {
        self.post(|| {
            let state = self.lock();
            match state.outcome(sequence) {
                None => {
                    self.end(state, error);
                    true
                }
                Some(outcome) => {
                    drop(state);
                    if matches!(outcome, Outcome::Failed) {
                        // Of one tree, perhaps: on the others the switch may still write.
                        self.disconnect();
                    }
                    false
                }
            }
        })
    }

    /// The deadline of a collective has passed: the first time the switch is told, the second time the communicator
    /// ends. Whoever saw that has unlocked the state since, so it is looked at again: the collective may be over, the next
    /// one under way, or another thread have told the switch.
    fn expire(&self, tree: usize, sequence: u64) {
        let ended = self.post(|| {
            let mut state = self.lock();
            let now = Instant::now();
            let expired = |it: &&mut Running| it.sequence == sequence && now >= it.deadline;
            let of = &mut state.trees[tree];
            let Some(running) = of.running.as_mut().filter(expired) else { return false };
            if running.overdue {
                let running = *running;
                let error = of.timed_out(running);
                self.end(state, error);
                return false;
            }
            running.overdue = true;
            running.deadline = now + OVERDUE_PATIENCE;
            of.worker.give_up();
            self.advance(&mut state, tree)
        });
        if ended {
            self.notify();
        }
    }

    /// Asks the switches whether they are there, if the collectives under way would not show.
    pub(crate) fn probe(&self) {
        let ended = self.post(|| {
            let mut state = self.lock();
            let mut ended = false;
            for tree in 0..self.links.len() {
                state.trees[tree].worker.probe();
                ended |= self.advance(&mut state, tree);
            }
            ended
        });
        if ended {
            self.notify();
        }
    }

    /// A rank has left after so many collectives.
    pub(crate) fn peer_left(&self, rank: u32, collectives: u64) {
        let mut state = self.lock();
        // Told again after the connection to the controller broke.
        if !state.left.contains(&(rank, collectives)) {
            state.left.push((rank, collectives));
        }
        let error = state.never_ends();
        drop(state);
        if let Some(error) = error {
            self.fail(error);
        }
    }

    /// Whether some rank has left.
    pub(crate) fn has_departed(&self) -> bool {
        !self.lock().left.is_empty()
    }

    /// Everyone has left, or nobody will say so any more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.notify();
    }

    /// Waits until everyone has left, or there is no point in waiting, but not for ever.
    pub(crate) fn wait_closed(&self, patience: Duration) {
        let waiting = |state: &mut State| !state.closed && state.failure.is_none();
        drop(self.changed.wait_timeout_while(self.lock(), patience, waiting));
    }

    /// Waits until the controller has let go of us, but not for long.
    pub(crate) fn wait_released(&self) {
        let waiting = |state: &mut State| !state.closed;
        drop(self.changed.wait_timeout_while(self.lock(), VERDICT_PATIENCE, waiting));
    }

    /// Waits until the communicator has failed, and says why when that is known. `None` once nobody is to wait any more.
    pub(crate) fn await_failure(&self) -> Option<CollectiveError> {
        let fine = |state: &mut State| !state.abandoned && state.failure.is_none();
        let state = self.changed.wait_while(self.lock(), fine);
        let mut state = self.await_verdict(state.unwrap_or_else(PoisonError::into_inner));
        if state.abandoned {
            return None;
        }
        let failure = state.failure.as_mut()?;
        failure.provisional = false;
        Some(failure.error.clone())
    }

    /// Ends [`Engine::await_failure`].
    pub(crate) fn abandon(&self) {
        self.lock().abandoned = true;
        self.notify();
    }

    /// Others are to take the place of these trees when a switch is lost. Keeps copies of what results overwrite for
    /// [`Engine::halt`], if that is wanted.
    pub(crate) fn prepare_failover(&self, keep_overwritten: bool) {
        let mut state = self.lock();
        state.verdict_patience = FAILOVER_PATIENCE;
        if keep_overwritten {
            state.trees.iter_mut().for_each(Tree::keep_overwritten);
        }
    }

    /// Whether a collective is over, with a result.
    pub(crate) fn has_result(&self, sequence: u64) -> bool {
        sequence < self.lock().finished
    }

    /// What the workers are made with, and how many they are: one for each tree.
    pub(crate) fn shape(&self) -> (HostConfig, u8) {
        let state = self.lock();
        (state.trees[0].worker.config(), state.trees.len() as u8)
    }

    /// After a failure: ends the connections, puts back what was overwritten by halves, and says how far each tree has
    /// come, of how many collectives that were started; and the number of one that was overwritten and of which there
    /// is no copy. The collectives that were started and not waited for must still have their memory.
    pub(crate) fn halt(&self) -> (u64, [Position; MAX_TREES], Option<u64>) {
        self.disconnect();
        let state = self.lock();
        let mut positions = [Position::default(); MAX_TREES];
        let mut lost = None;
        for (tree, position) in state.trees.iter().zip(&mut positions) {
            *position = tree.position(state.started);
            lost = lost.or(tree.restore());
        }
        (state.started, positions, lost)
    }

    /// Other trees have taken the place of these, which have been halted: what they keep of calls is freed.
    pub(crate) fn retire(&self) {
        self.lock().trees.iter_mut().for_each(Tree::forget_overwritten);
    }

    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.as_ref().map(|failure| failure.error.clone())
    }

    /// The tree on which the failure was found; the first where it was not found on one.
    pub(crate) fn failed_tree(&self) -> usize {
        self.lock().failure.as_ref().and_then(|failure| failure.tree).unwrap_or_default()
    }

    /// How many collectives were started, and whether one is under way.
    pub(crate) fn progress(&self) -> (u64, bool) {
        let state = self.lock();
        (state.started, state.is_running())
    }
}

impl State {
    /// Whether a collective is under way, on some tree.
    fn is_running(&self) -> bool {
        self.trees.iter().any(|tree| tree.running.is_some())
    }

    /// What must end first, and on which tree.
    fn next_deadline(&self) -> Option<(usize, Running)> {
        let running = self.trees.iter().enumerate();
        let running = running.filter_map(|(number, tree)| Some((number, tree.running?)));
        running.min_by_key(|(_, running)| running.deadline)
    }

    /// One tree has ended its part of a collective, with a result.
    fn finish_part(&mut self, sequence: u64) {
        let index = sequence.checked_sub(self.finished).and_then(|at| usize::try_from(at).ok());
        if let Some(parts) = index.and_then(|index| self.parts.get_mut(index)) {
            *parts = parts.saturating_sub(1);
        }
        while self.parts.front() == Some(&0) {
            self.parts.pop_front();
            self.finished += 1;
        }
    }

    /// How a collective has ended, if it has.
    fn outcome(&self, sequence: u64) -> Option<Outcome> {
        match () {
            () if sequence < self.finished => Some(Outcome::Done),
            () if !self.is_running() && self.failure.is_some() => Some(Outcome::Failed),
            () => None,
        }
    }

    /// Whether collectives that may still end have nothing to do on a tree.
    fn is_spare(&self, tree: &Tree) -> bool {
        let Some(left) = self.left.iter().map(|&(_, called)| called).min() else { return false };
        let next = tree.waiting.front().map(|part| part.sequence);
        let first = tree.running.map(|running| running.sequence).or(next);
        self.finished < left.min(self.started) && first.is_none_or(|first| first >= left)
    }

    /// Why the first collective that is not over can never end, if a rank has left before it. Those after it are not
    /// looked at: they may be under way on one tree while this one still comes in on another.
    fn never_ends(&self) -> Option<CollectiveError> {
        self.outlived(self.finished).filter(|_| self.finished < self.started)
    }

    /// Why a collective can never end, if a rank has left before it.
    fn outlived(&self, sequence: u64) -> Option<CollectiveError> {
        let &(rank, collectives) = self.left.iter().find(|&&(_, called)| called <= sequence)?;
        let detail = format!("it left after {collectives} collectives");
        Some(CollectiveError::PeerLost { rank, detail })
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
mod tests {
    use std::net::Ipv4Addr;

    use millstream_inc::{Collective, DataType, HostWorker, Mode, ReduceOperation};
    use millstream_verbs::{QueuePair, QueuePairCapabilities, SoftConfig};

    use super::*;
    use crate::LONGEST;
    use crate::memory::{ControlBlock, Domains, Operands, Scratch, Span};

    /// Rank 0 of 2, whose switch is a queue pair that asks for patience for ever, since nothing is posted there.
    fn engine() -> (Arc<Engine>, QueuePair) {
        let (engine, mut switches) = engine_of(1);
        (engine, switches.remove(0))
    }

    /// As above, with so many trees.
    fn engine_of(trees: usize) -> (Arc<Engine>, Vec<QueuePair>) {
        let slot = EngineSlot::default();
        let parts: Vec<_> = (0..trees).map(|tree| tree_of(&slot, tree)).collect();
        let (mut of_engine, mut others) = (Vec::new(), Vec::new());
        for (tree, link, switch, edge) in parts {
            of_engine.push((tree, link));
            others.push((switch, edge));
        }
        let engine = Engine::new(of_engine, trees, 2, &slot);
        for (tree, (_, edge)) in others.iter().enumerate() {
            engine.connect(tree, edge, Psn::new(0)).unwrap();
        }
        (engine, others.into_iter().map(|(switch, _)| switch).collect())
    }

    fn tree_of(slot: &EngineSlot, tree: usize) -> (Tree, Link, QueuePair, Edge) {
        let process = std::process::id();
        let host = Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, next_host());
        let device = Device::open_soft(&SoftConfig::new(host.into())).unwrap();
        let domain = device.allocate_protection_domain();
        let control = ControlBlock::new(&domain).unwrap();
        let (control_key, control_address) = control.place();
        let worker = HostWorker::new(HostConfig {
            segment_bytes: 65536,
            window: 4,
            control_key,
            control_address,
            rank: 0,
            world: 2,
            path_mtu: Mtu::B1024,
        });
        let worker = worker.unwrap();
        let capabilities = QueuePairCapabilities::new(
            worker.required_send_requests() as usize,
            worker.required_receive_requests() as usize,
        );
        let queue = completion_queue(&device, 1000, slot, tree).unwrap();
        let pair = domain.create_queue_pair(&queue, &queue, capabilities).unwrap();
        let others = device.create_completion_queue(1000).unwrap();
        let switch = domain.create_queue_pair(&others, &others, capabilities).unwrap();
        let none = QueuePairAttributes::default();
        let state = Some(QueuePairState::Initialized);
        switch
            .modify(&QueuePairAttributes { state, access: Some(Access::empty()), ..none })
            .unwrap();
        let ready = QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(host.into()),
            path_mtu: Some(Mtu::B1024),
            destination_qpn: Some(pair.number()),
            receive_psn: Some(Psn::new(0)),
            responder_resources: Some(0),
            minimum_rnr_timer: Some(1),
            ..none
        };
        switch.modify(&ready).unwrap();
        let edge = Edge { qpn: switch.number(), psn: Psn::new(0), path_mtu: Mtu::B1024 };
        let tree = Tree::new(worker, control, MAX_STARTED);
        (tree, Link { pair, device, switch: host.into() }, switch, edge)
    }

    fn next_host() -> u8 {
        static NEXT: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(1);
        NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    fn barrier(limit: Duration) -> Work {
        let call = CollectiveCall {
            collective: Collective::Barrier,
            operation: ReduceOperation::Sum,
            data_type: DataType::UInt8,
            root: 0,
            count: 0,
            stripe: Stripe::WHOLE,
            mode: Mode::Write,
            source_key: 0,
            source_address: 0,
            destination_key: 0,
            destination_address: 0,
        };
        let operands = Operands::default();
        Work {
            call,
            operands,
            registered: false,
            source: Span::EMPTY,
            destination: Span::EMPTY,
            limit,
        }
    }

    #[test]
    fn trees_that_others_have_replaced_keep_no_copies() {
        let (engine, _switches) = engine_of(2);
        engine.prepare_failover(true);
        let domains = Domains::of(engine.links.iter().map(|link| &link.device));
        let vector = Scratch::new(&domains, 400_000).unwrap();
        let work = barrier(LONGEST);
        let (count, data_type) = (100_000, DataType::UInt32);
        let call =
            CollectiveCall { collective: Collective::AllReduce, count, data_type, ..work.call };
        let (source, destination) = (vector.span(), vector.span());
        let work = Work { call, registered: true, source, destination, ..work };
        assert_eq!(engine.start(&work), Ok(0));
        let keeps = || engine.lock().trees.iter().any(Tree::keeps_overwritten);
        assert!(keeps());
        engine.fail(CollectiveError::Closed);
        engine.halt();
        engine.retire();
        assert!(!keeps());
    }

    /// Whether the collective under way is overdue.
    fn overdue(engine: &Engine) -> Option<bool> {
        engine.lock().trees[0].running.map(|running| running.overdue)
    }

    #[test]
    fn a_deadline_ends_only_the_collective_that_it_is_of_and_that_once() {
        let (engine, _switch) = engine();
        assert_eq!(engine.start(&barrier(Duration::ZERO)), Ok(0));
        assert_eq!(engine.start(&barrier(Duration::ZERO)), Ok(1));
        // As if another one had been under way when the time was looked at.
        engine.expire(0, 1);
        assert_eq!((overdue(&engine), engine.failure()), (Some(false), None));
        engine.expire(0, 0);
        assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
        // As if another thread had been first.
        engine.expire(0, 0);
        assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
        engine.lock().trees[0].running.as_mut().unwrap().deadline = Instant::now();
        engine.expire(0, 1);
        assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
        engine.expire(0, 0);
        let failure = engine.failure();
        assert!(
            matches!(failure, Some(CollectiveError::Timeout { sequence: 0, .. })),
            "{failure:?}"
        );
        assert!(!engine.cancel(1, CollectiveError::Canceled { sequence: 1 }), "it is over");
        assert_eq!(engine.failure(), failure);
    }

    #[test]
    fn what_comes_after_one_that_goes_on_does_not_end_it_though_a_rank_has_left() {
        let (engine, _switch) = engine();
        assert_eq!(engine.start(&barrier(LONGEST)), Ok(0));
        engine.peer_left(1, 1);
        assert_eq!(engine.start(&barrier(LONGEST)), Ok(1));
        assert_eq!((engine.failure(), engine.progress()), (None, (2, true)));
        engine.peer_left(1, 0);
        let failure = engine.failure();
        assert!(matches!(failure, Some(CollectiveError::PeerLost { rank: 1, .. })), "{failure:?}");
    }

    /// As if the switch of a tree had taken the descriptor of its first collective, a barrier, and agreed.
    fn agree(engine: &Engine, tree: usize) {
        use millstream_verbs::{CompletionOperation, CompletionStatus};
        let qpn = engine.links[tree].pair.number();
        let of = |id, operation| Completion::new(id, qpn, CompletionStatus::Success, operation);
        let sent = of(1 << 62, CompletionOperation::Send);
        let agreed = of(1 << 63, CompletionOperation::Receive);
        let immediate = Some(1 << 30);
        engine.completed(tree, &[sent, Completion { immediate, ..agreed }]);
    }

    fn is_lost(failure: Option<CollectiveError>) -> bool {
        matches!(failure, Some(CollectiveError::PeerLost { rank: 1, .. }))
    }

    /// Barriers take turns on the trees.
    #[test]
    fn who_leaves_after_a_collective_does_not_end_it_where_the_next_is_under_way_on_another_tree() {
        // The next begins before the rank is known to have left, or after.
        for early in [true, false] {
            let (engine, _switches) = engine_of(2);
            let start = |number| assert_eq!(engine.start(&barrier(LONGEST)), Ok(number));
            start(0);
            if early {
                start(1);
            }
            engine.peer_left(1, 1);
            if !early {
                start(1);
            }
            start(2);
            assert_eq!((engine.failure(), engine.progress()), (None, (3, true)), "{early}");
            assert_eq!(engine.lock().trees[1].running.is_some(), early);
            agree(&engine, 0);
            assert_eq!(engine.wait(0, Duration::ZERO), Some(Ok(())));
            assert!(is_lost(engine.failure()), "{early}: {:?}", engine.failure());
            for number in [1, 2] {
                let outcome = engine.wait(number, Duration::ZERO);
                assert!(outcome.is_some_and(|it| is_lost(it.err())), "{early} {number}");
            }
        }
    }

    #[test]
    fn a_tree_that_fails_for_want_of_who_has_left_leaves_time_to_what_came_before() {
        for left in [1, 2] {
            let (engine, _switches) = engine_of(2);
            assert_eq!(engine.start(&barrier(LONGEST)), Ok(0));
            assert_eq!(engine.start(&barrier(LONGEST)), Ok(1));
            engine.peer_left(1, left);
            let lost = E::Aborted(millstream_inc::Abort::PeerLost { rank: 1 });
            // Before the rest: the device's thread tells of the disconnection, too, and advances trees.
            let mut state = engine.lock();
            // As if the switch of the second tree had missed the other rank.
            engine.links[1].disconnect();
            state.trees[1].worker.fail(lost);
            let over = engine.advance(&mut state, 1);
            drop(state);
            assert!(over);
            if left > 1 {
                // It has called the second collective, too.
                assert!(is_lost(engine.failure()), "{:?}", engine.failure());
                continue;
            }
            assert_eq!((engine.failure(), engine.progress()), (None, (2, true)));
            agree(&engine, 0);
            assert_eq!(engine.wait(0, Duration::ZERO), Some(Ok(())));
            assert!(is_lost(engine.failure()), "{:?}", engine.failure());
        }
    }
}
