//! One rank at work: the worker's state machine between the caller, the device's own thread and the
//! thread that listens to the controller.
//!
//! The caller posts the beginning of a collective. Completions are handled by the caller while it
//! waits, or on the device's thread while nobody does, and what follows from them is posted at once.
//! All do it with the state locked, because the switch tells segments apart by the order in which
//! they come, and send after the lock is released.

use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_inc::{
    ABORT_BYTES, CONTROL_BYTES, CollectiveCall, CollectiveError as E, Command, DESCRIPTOR_BYTES,
    HostWorker,
};
use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, Mtu, Psn, QueuePair,
    QueuePairAttributes, QueuePairState, ReceiveRequest, SendRequest, Waiters,
};

use crate::memory::ControlBlock;
use crate::{CollectiveError, LONGEST};

/// What a rank shares with the other threads.
pub(crate) struct Engine {
    state: Mutex<State>,
    changed: Condvar,
    /// Until the collective is over: they make progress, those who wait for `changed` do not.
    waiters: Waiters,
    pair: QueuePair,
    device: Device,
    switch: IpAddr,
}

struct State {
    worker: HostWorker,
    control: ControlBlock<CONTROL_BYTES>,
    /// How many collectives were started.
    started: u64,
    /// The number and deadline of the one under way.
    running: Option<Running>,
    outcome: Option<Outcome>,
    /// Where the result of a small vector is in the control region, until the next collective.
    result_at: usize,
    /// Why the communicator is of no more use.
    failure: Option<Failure>,
    /// Ranks that have left, and how many collectives they have called.
    left: Vec<(u32, u64)>,
    /// Nothing more will be heard from the controller.
    closed: bool,
    /// Kept for their allocation.
    sends: Vec<SendRequest>,
    receives: Vec<ReceiveRequest>,
}

#[derive(Clone, Copy)]
struct Running {
    sequence: u64,
    deadline: Instant,
    limit: Duration,
    /// The deadline has passed, and the switch was told.
    overdue: bool,
}

#[derive(Clone, Copy)]
enum Outcome {
    Done,
    /// [`State::failure`] says why.
    Failed,
}

struct Failure {
    error: CollectiveError,
    /// The controller may know better, as long as nobody was told this.
    provisional: bool,
}

/// How long a failure that the switch reports may wait for what the controller says about it. What
/// it says is better, and when it has spoken, the group's name is free for the next attempt.
const VERDICT_PATIENCE: Duration = Duration::from_millis(250);

/// Finds the engine that completions are for. The queue pair needs the completion queue, and the
/// engine the queue pair, so the queue's handler gets to know the engine last.
#[derive(Clone, Default)]
pub(crate) struct EngineSlot(Arc<OnceLock<Weak<Engine>>>);

impl EngineSlot {
    pub(crate) fn handle(&self, completions: &[Completion]) {
        if let Some(engine) = self.0.get().and_then(Weak::upgrade) {
            engine.completed(completions);
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

impl Engine {
    pub(crate) fn new(
        worker: HostWorker,
        control: ControlBlock<CONTROL_BYTES>,
        pair: QueuePair,
        device: Device,
        switch: IpAddr,
        slot: &EngineSlot,
    ) -> Arc<Self> {
        let state = State {
            sends: Vec::with_capacity(worker.required_send_requests() as usize),
            receives: Vec::with_capacity(worker.required_receive_requests() as usize),
            worker,
            control,
            started: 0,
            running: None,
            outcome: None,
            result_at: 0,
            failure: None,
            left: Vec::new(),
            closed: false,
        };
        let state = Mutex::new(state);
        let (changed, waiters) = (Condvar::new(), Waiters::default());
        let engine = Arc::new(Self { state, changed, waiters, pair, device, switch });
        // A slot is for one engine.
        let _ = slot.0.set(Arc::downgrade(&engine));
        engine
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all who wait for a change of the state.
    fn notify(&self) {
        self.changed.notify_all();
        self.waiters.wake();
    }

    /// Connects the queue pair, and posts the first receives.
    pub(crate) fn connect(
        &self,
        edge: &Edge,
        psn: Psn,
    ) -> Result<(), millstream_verbs::ModifyError> {
        let none = QueuePairAttributes::default();
        self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            // Regions say where the switch may write. It asks by a WRITE of no bytes whether this rank lives, at
            // any time.
            access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            ..none
        })?;
        self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(self.switch),
            path_mtu: Some(edge.path_mtu),
            destination_qpn: Some(edge.qpn),
            receive_psn: Some(edge.psn),
            responder_resources: Some(0),
            minimum_rnr_timer: Some(1),
            ..none
        })?;
        self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(psn),
            timeout: Some(TIMEOUT),
            retry_count: Some(RETRY_COUNT),
            // The switch asks for patience when descriptors come too fast; deadlines end that.
            rnr_retry: Some(7),
            initiator_depth: Some(0),
            ..none
        })?;
        self.advance(&mut self.lock());
        Ok(())
    }

    /// Whether the vector of a call is small: it is copied, and needs no registered memory.
    pub(crate) fn is_small(&self, call: &CollectiveCall) -> bool {
        self.lock().worker.is_small(call)
    }

    /// Starts a collective; returns its number. `source` has what a small vector is copied from.
    pub(crate) fn start(
        &self,
        call: &CollectiveCall,
        source: &[u8],
        limit: Duration,
    ) -> Result<u64, CollectiveError> {
        // So that nothing is sent with the state locked.
        self.device.postpone_sending(|| self.begin(call, source, limit))
    }

    fn begin(
        &self,
        call: &CollectiveCall,
        source: &[u8],
        limit: Duration,
    ) -> Result<u64, CollectiveError> {
        let mut state = self.lock();
        if let Some(Running { sequence, .. }) = state.running {
            return Err(CollectiveError::Busy(sequence));
        }
        if state.failure.is_none()
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
        let deadline = Instant::now() + limit.min(LONGEST);
        let sequence = state
            .worker
            .start(call)
            .map_err(|error| CollectiveError::from_start(error, self.switch))?;
        // Nothing is under way from there.
        state.control.store(DESCRIPTOR_BYTES, source);
        state.started = sequence + 1;
        state.running = Some(Running { sequence, deadline, limit, overdue: false });
        self.advance(&mut state);
        Ok(sequence)
    }

    /// Waits for the collective under way, for at most so long. `None` when it goes on after that.
    pub(crate) fn wait(&self, patience: Duration) -> Option<Result<(), CollectiveError>> {
        let end = Instant::now().checked_add(patience);
        loop {
            let state = self.lock();
            if let Some(outcome) = state.outcome {
                return Some(self.ended(state, outcome));
            }
            let Some(running) = state.running else {
                return Some(Err(CollectiveError::NotStarted));
            };
            let now = Instant::now();
            if now >= running.deadline && !running.overdue {
                drop(state);
                self.give_up();
                continue;
            }
            if now >= running.deadline {
                let error = state.timed_out(running);
                drop(state);
                self.fail(error);
                continue;
            }
            drop(state);
            if end.is_some_and(|end| now >= end) {
                return None;
            }
            let until = end.map_or(running.deadline, |end| end.min(running.deadline));
            let is_over = || {
                let state = self.lock();
                (state.outcome.is_some() || state.running.is_none()).then_some(())
            };
            millstream_verbs::wait([&self.device], &self.waiters, until - now, is_over);
        }
    }

    /// Lets the controller say what it knows of a failure.
    fn await_verdict<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let open = |state: &mut State| {
            !state.closed && state.failure.as_ref().is_some_and(|failure| failure.provisional)
        };
        let waited = self.changed.wait_timeout_while(state, VERDICT_PATIENCE, open);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The collective is over: how, for the caller.
    fn ended(&self, state: MutexGuard<'_, State>, outcome: Outcome) -> Result<(), CollectiveError> {
        let mut state = self.await_verdict(state);
        state.running = None;
        state.outcome = None;
        match (outcome, &mut state.failure) {
            (Outcome::Failed, Some(failure)) => {
                failure.provisional = false;
                Err(failure.error.clone())
            }
            // A communicator may fail just after its collective is done.
            _ => Ok(()),
        }
    }

    /// Copies the result of a small vector that has ended well.
    pub(crate) fn take_result(&self, destination: &mut [u8]) {
        let state = self.lock();
        state.control.load(state.result_at, destination);
    }

    /// Takes completions, on the device's own thread or one that waits.
    fn completed(&self, completions: &[Completion]) {
        let mut state = self.lock();
        for completion in completions {
            let State { worker, control, .. } = &mut *state;
            worker.handle_completion(completion, |offset| {
                let mut message = [0; ABORT_BYTES];
                control.load(offset, &mut message);
                message
            });
        }
        if self.advance(&mut state) {
            drop(state);
            self.notify();
        }
    }

    /// Carries out what the worker wants, and looks whether it is done; `true` when the caller
    /// must know.
    fn advance(&self, state: &mut State) -> bool {
        while let Some(command) = state.worker.poll_command() {
            match command {
                Command::Store(bytes) => state.control.store(0, &bytes),
                // When it was started.
                Command::Load(_) => {}
                // By the caller, when he has heard that it is there.
                Command::Deliver { offset, .. } => state.result_at = offset,
                Command::Receive(request) => state.receives.push(request),
                Command::Send(request) => state.sends.push(request),
            }
        }
        // Receives first: what is sent is answered into them.
        let mut posted = true;
        if !state.receives.is_empty() {
            posted &= self.pair.post_receive(&state.receives).is_ok();
            state.receives.clear();
        }
        if !state.sends.is_empty() {
            posted &= self.pair.post_send(&state.sends).is_ok();
            state.sends.clear();
        }
        if !posted {
            // Only a device that has failed refuses what fits its queues.
            let flushed = CompletionStatus::Flushed;
            state.worker.fail(E::Transport(flushed));
        }
        if let Some(error) = state.worker.failure()
            && state.failure.is_none()
        {
            // Unless it is our own device, the controller may know more.
            let device = self.device.failure().map(CollectiveError::Device);
            let error = match state.running {
                // It closes the connection of who has a receive for a result there.
                Some(running) if running.overdue && matches!(error, E::Transport(_)) => {
                    state.timed_out(running)
                }
                _ => CollectiveError::from_switch(error, self.switch),
            };
            let error = device.unwrap_or(error);
            let known = |it: &CollectiveError| {
                matches!(it, CollectiveError::Device(_) | CollectiveError::Overdue { .. })
            };
            let provisional = !known(&error);
            state.failure = Some(Failure { error, provisional });
        }
        let Some(outcome) = state.worker.poll_outcome() else { return false };
        state.outcome = Some(if outcome.is_ok() { Outcome::Done } else { Outcome::Failed });
        true
    }

    /// Ends the communicator, and the collective under way, with this reason unless there is one.
    pub(crate) fn fail(&self, error: CollectiveError) {
        self.device.postpone_sending(|| self.end(error));
    }

    fn end(&self, error: CollectiveError) {
        let mut state = self.lock();
        if state.failure.as_ref().is_none_or(|failure| failure.provisional) {
            state.failure = Some(Failure { error, provisional: false });
        }
        state.worker.fail(E::Transport(CompletionStatus::Flushed));
        self.advance(&mut state);
        drop(state);
        self.notify();
        let _ = self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::Error),
            ..QueuePairAttributes::default()
        });
    }

    /// The deadline of the collective under way has passed.
    fn give_up(&self) {
        let ended = self.device.postpone_sending(|| {
            let mut state = self.lock();
            if let Some(running) = &mut state.running {
                running.overdue = true;
                running.deadline = Instant::now() + OVERDUE_PATIENCE;
            }
            state.worker.give_up();
            self.advance(&mut state)
        });
        if ended {
            self.notify();
        }
    }

    /// Asks the switch whether it is there, if the collective under way would not show.
    pub(crate) fn probe(&self) {
        let ended = self.device.postpone_sending(|| {
            let mut state = self.lock();
            state.worker.probe();
            self.advance(&mut state)
        });
        if ended {
            self.notify();
        }
    }

    /// A rank has left after so many collectives.
    pub(crate) fn peer_left(&self, rank: u32, collectives: u64) {
        let mut state = self.lock();
        state.left.push((rank, collectives));
        let error = state.running.and_then(|running| state.outlived(running.sequence));
        drop(state);
        if let Some(error) = error {
            self.fail(error);
        }
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

    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.lock().failure.as_ref().map(|failure| failure.error.clone())
    }

    /// How many collectives were started, and whether one is under way.
    pub(crate) fn progress(&self) -> (u64, bool) {
        let state = self.lock();
        (state.started, state.running.is_some())
    }
}

impl State {
    /// Why a collective can never end, if a rank has left before it.
    fn outlived(&self, sequence: u64) -> Option<CollectiveError> {
        let &(rank, collectives) = self.left.iter().find(|&&(_, called)| called <= sequence)?;
        let detail = format!("it left after {collectives} collectives");
        Some(CollectiveError::PeerLost { rank, detail })
    }

    fn timed_out(&self, running: Running) -> CollectiveError {
        let Running { sequence, limit, .. } = running;
        let (_, results, segments) = self.worker.progress().unwrap_or_default();
        CollectiveError::Timeout { sequence, results, segments, limit }
    }
}

/// A completion queue whose completions go to the engine of `slot`.
pub(crate) fn completion_queue(
    device: &Device,
    capacity: usize,
    slot: &EngineSlot,
) -> Result<CompletionQueue, millstream_verbs::CreateError> {
    let slot = slot.clone();
    let handler = Box::new(move |completions: &[Completion]| slot.handle(completions));
    device.create_completion_queue_with_progress_handler(capacity, handler)
}
