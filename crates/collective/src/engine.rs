//! One rank at work: the worker's state machine between the caller, the device's own thread and the
//! thread that listens to the controller.
//!
//! The caller posts the beginning of a collective, unless another one is under way: then it comes after that.
//! Completions are handled by the caller while it waits, or on the device's thread while nobody does, and what
//! follows from them is posted at once, the next collective included.
//! All do it with the state locked, because the switch tells segments apart by the order in which
//! they come, and send after the lock is released.

use std::collections::VecDeque;
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

use crate::memory::{ControlBlock, Span};
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
    /// How many of them have ended with a result.
    finished: u64,
    /// The one under way.
    running: Option<Running>,
    /// Those that come after it, in their order.
    waiting: VecDeque<Work>,
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

/// A collective to do.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) call: CollectiveCall,
    /// What a small vector is copied from, when the collective begins.
    pub(crate) source: Span,
    /// What the result of a small vector is copied to.
    pub(crate) destination: Span,
    /// How long it may take.
    pub(crate) limit: Duration,
}

#[derive(Clone, Copy)]
struct Running {
    sequence: u64,
    deadline: Instant,
    limit: Duration,
    /// The deadline has passed, and the switch was told.
    overdue: bool,
    destination: Span,
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
            finished: 0,
            running: None,
            waiting: VecDeque::with_capacity(MAX_STARTED),
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

    /// Starts a collective; returns its number.
    ///
    /// Its memory is the engine's until [`Engine::wait`] has said that it is over.
    pub(crate) fn start(&self, work: &Work) -> Result<u64, CollectiveError> {
        // So that nothing is sent with the state locked.
        self.device.postpone_sending(|| self.begin(work))
    }

    fn begin(&self, work: &Work) -> Result<u64, CollectiveError> {
        let mut state = self.lock();
        // Otherwise those before it go on, and what comes after them is looked at when it is its turn.
        let is_next = state.running.is_none() && state.waiting.is_empty();
        if is_next
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
        if state.waiting.len() + usize::from(state.running.is_some()) >= MAX_STARTED {
            return Err(CollectiveError::TooMany { limit: MAX_STARTED });
        }
        let refused = |error| CollectiveError::from_start(error, self.switch);
        state.worker.check(&work.call).map_err(refused)?;
        let sequence = state.started;
        state.started += 1;
        state.waiting.push_back(*work);
        if self.advance(&mut state) {
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
            let Some(running) = state.running else {
                return Some(Err(CollectiveError::NotStarted));
            };
            let now = Instant::now();
            drop(state);
            if now >= running.deadline {
                self.expire(running.sequence);
                continue;
            }
            if end.is_some_and(|end| now >= end) {
                return None;
            }
            let until = end.map_or(running.deadline, |end| end.min(running.deadline));
            let is_over = || {
                let state = self.lock();
                let same = state.running.is_some_and(|it| it.sequence == running.sequence);
                (!same || state.outcome(sequence).is_some()).then_some(())
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
        let _ = self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::Error),
            ..QueuePairAttributes::default()
        });
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

    /// Carries out what the worker wants, and begins the next collective when one is over; `true` when those who
    /// wait must know.
    fn advance(&self, state: &mut State) -> bool {
        let mut over = false;
        loop {
            over |= !state.begin_next(self.switch);
            self.carry_out(state);
            let Some(outcome) = state.worker.poll_outcome() else { return over };
            state.finished += u64::from(outcome.is_ok());
            state.running = None;
            if state.failure.is_some() {
                state.waiting.clear();
            }
            over = true;
        }
    }

    /// Carries out what the worker wants.
    fn carry_out(&self, state: &mut State) {
        while let Some(command) = state.worker.poll_command() {
            let destination = state.running.map_or(Span::EMPTY, |running| running.destination);
            match command {
                Command::Store(bytes) => state.control.store(0, &bytes),
                // When it began.
                Command::Load(_) => {}
                Command::Deliver { offset, .. } => state.control.copy_to(offset, destination),
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
    }

    /// Ends the communicator, and the collective under way, with this reason unless there is one.
    pub(crate) fn fail(&self, error: CollectiveError) {
        self.device.postpone_sending(|| self.end(self.lock(), error));
    }

    fn end(&self, mut state: MutexGuard<'_, State>, error: CollectiveError) {
        if state.failure.as_ref().is_none_or(|failure| failure.provisional) {
            state.failure = Some(Failure { error, provisional: false });
        }
        state.worker.fail(E::Transport(CompletionStatus::Flushed));
        self.advance(&mut state);
        drop(state);
        self.notify();
        self.disconnect();
    }

    /// Ends the communicator with this reason, unless the collective is over.
    pub(crate) fn cancel(&self, sequence: u64, error: CollectiveError) -> bool {
        self.device.postpone_sending(|| {
            let state = self.lock();
            let over = state.outcome(sequence).is_some();
            if !over {
                self.end(state, error);
            }
            !over
        })
    }

    /// The deadline of a collective has passed: the first time the switch is told, the second time the communicator
    /// ends. Whoever saw that has unlocked the state since, so it is looked at again: the collective may be over, the next
    /// one under way, or another thread have told the switch.
    fn expire(&self, sequence: u64) {
        let ended = self.device.postpone_sending(|| {
            let mut state = self.lock();
            let now = Instant::now();
            let expired = |it: &&mut Running| it.sequence == sequence && now >= it.deadline;
            let Some(running) = state.running.as_mut().filter(expired) else { return false };
            if running.overdue {
                let running = *running;
                let error = state.timed_out(running);
                self.end(state, error);
                return false;
            }
            running.overdue = true;
            running.deadline = now + OVERDUE_PATIENCE;
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
        // Told again after the connection to the controller broke.
        if !state.left.contains(&(rank, collectives)) {
            state.left.push((rank, collectives));
        }
        let error = state.running.and_then(|running| state.outlived(running.sequence));
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
    /// Begins the next collective, if it is time. `false` when it can never end, nor those after it.
    fn begin_next(&mut self, switch: IpAddr) -> bool {
        if self.running.is_some() || self.failure.is_some() {
            return true;
        }
        let Some(work) = self.waiting.pop_front() else { return true };
        let sequence = self.finished;
        let refused = |error| CollectiveError::from_start(error, switch);
        let begun = match self.outlived(sequence) {
            Some(error) => Err(error),
            // It was checked, so only a worker that has failed refuses it.
            None => self.worker.start(&work.call).map_err(refused),
        };
        if let Err(error) = begun {
            self.failure = Some(Failure { error, provisional: false });
            self.worker.fail(E::Transport(CompletionStatus::Flushed));
            self.waiting.clear();
            return false;
        }
        // Nothing is under way from there.
        self.control.copy_from(DESCRIPTOR_BYTES, work.source);
        let Work { destination, limit, .. } = work;
        let deadline = Instant::now() + limit.min(LONGEST);
        self.running = Some(Running { sequence, deadline, limit, overdue: false, destination });
        true
    }

    /// How a collective has ended, if it has.
    fn outcome(&self, sequence: u64) -> Option<Outcome> {
        match () {
            () if sequence < self.finished => Some(Outcome::Done),
            () if self.running.is_none() && self.failure.is_some() => Some(Outcome::Failed),
            () => None,
        }
    }

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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use millstream_inc::{Collective, DataType, HostConfig, Mode, ReduceOperation};
    use millstream_verbs::{QueuePairCapabilities, SoftConfig};

    use super::*;

    /// Rank 0 of 2, whose switch is a queue pair that asks for patience for ever, since nothing is posted there.
    fn engine() -> (Arc<Engine>, QueuePair) {
        let process = std::process::id();
        let host = Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, next_host());
        let device = Device::open_soft(&SoftConfig::new(host.into())).unwrap();
        let domain = device.allocate_protection_domain();
        let control = ControlBlock::new(&domain).unwrap();
        let crate::memory::Operand { local_key, address, .. } = control.operand();
        let worker = HostWorker::new(HostConfig {
            segment_bytes: 65536,
            window: 4,
            control_key: local_key,
            control_address: address,
            rank: 0,
            world: 2,
            path_mtu: Mtu::B1024,
        });
        let worker = worker.unwrap();
        let capabilities = QueuePairCapabilities::new(
            worker.required_send_requests() as usize,
            worker.required_receive_requests() as usize,
        );
        let slot = EngineSlot::default();
        let queue = completion_queue(&device, 1000, &slot).unwrap();
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
        let engine = Engine::new(worker, control, pair, device, host.into(), &slot);
        engine.connect(&edge, Psn::new(0)).unwrap();
        (engine, switch)
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
            mode: Mode::Write,
            source_key: 0,
            source_address: 0,
            destination_key: 0,
            destination_address: 0,
        };
        Work { call, source: Span::EMPTY, destination: Span::EMPTY, limit }
    }

    /// Whether the collective under way is overdue.
    fn overdue(engine: &Engine) -> Option<bool> {
        engine.lock().running.map(|running| running.overdue)
    }

    #[test]
    fn a_deadline_ends_only_the_collective_that_it_is_of_and_that_once() {
        let (engine, _switch) = engine();
        assert_eq!(engine.start(&barrier(Duration::ZERO)), Ok(0));
        assert_eq!(engine.start(&barrier(Duration::ZERO)), Ok(1));
        // As if another one had been under way when the time was looked at.
        engine.expire(1);
        assert_eq!((overdue(&engine), engine.failure()), (Some(false), None));
        engine.expire(0);
        assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
        // As if another thread had been first.
        engine.expire(0);
        assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
        engine.lock().running.as_mut().unwrap().deadline = Instant::now();
        engine.expire(1);
        assert_eq!((overdue(&engine), engine.failure()), (Some(true), None));
        engine.expire(0);
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
}
