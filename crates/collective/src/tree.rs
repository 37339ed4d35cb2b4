//! One tree of a communicator on this rank: its worker, and what it is at.

mod overwritten;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_inc::failover::Position;
use millstream_inc::{
    ABORT_BYTES, CONTROL_BYTES, CollectiveCall, CollectiveError as E, Command, DESCRIPTOR_BYTES,
    Descriptor, Halted, HostConfig, HostWorker, Mode, StartError,
};
use millstream_verbs::{
    Completion, CompletionStatus, Device, QueuePair, QueuePairAttributes, QueuePairState,
    ReceiveRequest, ReceiveShare, SendRequest,
};

use overwritten::{Overwritten, overwrites};

use crate::memory::{ControlBlock, Operands, Span};
use crate::{CollectiveError, LONGEST};

/// A collective to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Without keys.
    pub(crate) call: CollectiveCall,
    pub(crate) operands: Operands,
    /// Whether the operands are there. Only small vectors can do without.
    pub(crate) registered: bool,
    /// This rank's vector. A small one is copied from there, when the collective begins.
    pub(crate) source: Span,
    /// Where the result is to be. That of a small vector is copied to there.
    pub(crate) destination: Span,
    /// How long it may take.
    pub(crate) limit: Duration,
}

/// What a tree has of a collective.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// The collective's number, of all trees.
    pub(crate) sequence: u64,
    pub(crate) call: CollectiveCall,
    pub(crate) source: Span,
    pub(crate) destination: Span,
    pub(crate) limit: Duration,
}

#[derive(Clone, Copy)]
pub(crate) struct Running {
    pub(crate) sequence: u64,
    pub(crate) deadline: Instant,
    pub(crate) limit: Duration,
    /// The deadline has passed, and the switch was told.
    pub(crate) overdue: bool,
    call: CollectiveCall,
    source: Span,
    destination: Span,
    /// Results may be written over the source, and differ from it.
    overwrites: bool,
}

/// The connection to the switch of a tree.
pub(crate) struct Link {
    pub(crate) pair: QueuePair,
    pub(crate) device: Device,
    pub(crate) switch: IpAddr,
    /// What the switch may have in flight to the pair. None where nothing limits it, and once it is given back.
    pub(crate) receive_share: Mutex<Option<ReceiveShare>>,
}

/// How much the other end of a connection may have in flight, as it is told.
pub(crate) fn granted(share: Option<&ReceiveShare>) -> Option<u32> {
    share.map(|share| u32::try_from(share.bytes_of_one()).unwrap_or(u32::MAX))
}

/// The state of a tree.
pub(crate) struct Tree {
    pub(crate) worker: HostWorker,
    control: ControlBlock<CONTROL_BYTES>,
    /// What is under way.
    pub(crate) running: Option<Running>,
    /// What comes after it, in order.
    pub(crate) waiting: VecDeque<Part>,
    /// What results overwrite, if a copy of that is kept.
    overwritten: Option<Overwritten>,
    /// What was begun last. It was under way when the worker failed if that has been halted.
    last: Option<Running>,
    /// The first of those that waited when it was stopped.
    stopped_before: Option<u64>,
    /// Kept for their allocation.
    sends: Vec<SendRequest>,
    receives: Vec<ReceiveRequest>,
}

impl Work {
    /// What all ranks must say alike.
    pub(crate) fn descriptor(&self) -> Descriptor {
        Self::descriptor_of(&self.call)
    }

    pub(crate) fn descriptor_of(call: &CollectiveCall) -> Descriptor {
        let &CollectiveCall { collective, operation, data_type, root, count, stripe, mode, .. } =
            call;
        Descriptor {
            sequence: 0,
            collective,
            operation,
            data_type,
            root,
            count,
            stripe,
            mode,
            destination_address: 0,
            destination_key: 0,
        }
    }

    /// What a tree does of it, whose keys are those of its own device.
    pub(crate) fn part(&self, sequence: u64, device: usize, call: CollectiveCall) -> Part {
        let Self { operands, source, destination, limit, .. } = *self;
        let [source_key, destination_key] =
            [operands.source, operands.destination].map(|it| it.keys[device]);
        let destination_key = match call.mode {
            Mode::Write => destination_key.remote,
            Mode::Send => destination_key.local,
        };
        let call = CollectiveCall { source_key: source_key.local, destination_key, ..call };
        Part { sequence, call, source, destination, limit }
    }
}

impl Link {
    /// Nothing is sent from here on, and nothing that arrives is written anywhere.
    pub(crate) fn disconnect(&self) {
        self.enter(QueuePairState::Error);
    }

    /// As above, and when this returns no memory is read or written for it any more: in the error state a device may be at that
    /// until the last request is flushed. Its number stays taken.
    pub(crate) fn halt(&self) {
        self.disconnect();
        self.enter(QueuePairState::Reset);
    }

    /// How much the switch is told that it may have in flight.
    pub(crate) fn granted(&self) -> Option<u32> {
        granted(self.share().as_ref())
    }

    /// Others may have what the switch had of the receive buffer: nothing of it is awaited any more.
    pub(crate) fn give_back_share(&self) {
        let share = self.share().take();
        drop(share);
    }

    fn share(&self) -> MutexGuard<'_, Option<ReceiveShare>> {
        self.receive_share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, state: QueuePairState) {
        // Every state leads to both; a failed device has ended everything already.
        let none = QueuePairAttributes::default();
        let _ = self.pair.modify(&QueuePairAttributes { state: Some(state), ..none });
    }
}

impl Tree {
    pub(crate) fn new(
        worker: HostWorker,
        control: ControlBlock<CONTROL_BYTES>,
        most_started: usize,
    ) -> Self {
        Self {
            sends: Vec::with_capacity(worker.required_send_requests() as usize),
            receives: Vec::with_capacity(worker.required_receive_requests() as usize),
            worker,
            control,
            running: None,
            waiting: VecDeque::with_capacity(most_started),
            overwritten: None,
            last: None,
            stopped_before: None,
        }
    }

    /// Keeps copies of what results overwrite, from the next collective on.
    pub(crate) fn keep_overwritten(&mut self) {
        let HostConfig { window, segment_bytes, .. } = self.worker.config();
        self.overwritten = Some(Overwritten::new(window, segment_bytes));
    }

    #[cfg(test)]
    pub(crate) fn keeps_overwritten(&self) -> bool {
        self.overwritten.as_ref().is_some_and(Overwritten::holds)
    }

    /// Frees these copies. There is no further collective.
    pub(crate) fn forget_overwritten(&mut self) {
        self.overwritten = None;
    }

    /// Takes a completion of its queue pair.
    pub(crate) fn completed(&mut self, completion: &Completion) {
        let Self { worker, control, .. } = self;
        worker.handle_completion(completion, |offset| {
            let mut message = [0; ABORT_BYTES];
            control.load(offset, &mut message);
            message
        });
    }

    /// Begins a part. It was checked, so only a worker that has failed refuses it.
    pub(crate) fn begin(&mut self, part: &Part) -> Result<(), StartError> {
        let &Part { sequence, ref call, source, destination, limit } = part;
        self.worker.start_as(sequence, call)?;
        let is_small = self.worker.is_small(call);
        if is_small {
            // Nothing is under way from there.
            self.control.copy_from(DESCRIPTOR_BYTES, source);
        }
        // The result of a small vector comes in one piece.
        let overwrites = !is_small && overwrites(call, source, destination);
        if let Some(overwritten) = self.overwritten.as_mut().filter(|_| overwrites) {
            overwritten.prepare();
        }
        let (deadline, overdue) = (Instant::now() + limit.min(LONGEST), false);
        let call = *call;
        self.running = Some(Running {
            sequence,
            deadline,
            limit,
            overdue,
            call,
            source,
            destination,
            overwrites,
        });
        self.last = self.running;
        Ok(())
    }

    /// Carries out what the worker wants.
    pub(crate) fn carry_out(&mut self, pair: &QueuePair) {
        while let Some(command) = self.worker.poll_command() {
            match command {
                Command::Store(bytes) => self.control.store(0, &bytes),
                // When it began.
                Command::Load(_) => {}
                Command::Deliver { offset, to } => {
                    if let Some(Running { call, destination, .. }) = &self.running {
                        let at = to.address.wrapping_sub(call.destination_address) as usize;
                        self.control.copy_to(offset, *destination, at, to.length as usize);
                    }
                }
                Command::Receive(request) => self.receives.push(request),
                Command::Send(request) => {
                    self.keep(&request);
                    self.sends.push(request);
                }
            }
        }
        // Receives first: what is sent is answered into them.
        let mut posted = true;
        if !self.receives.is_empty() {
            posted &= pair.post_receive(&self.receives).is_ok();
            self.receives.clear();
        }
        if !self.sends.is_empty() {
            posted &= pair.post_send(&self.sends).is_ok();
            self.sends.clear();
        }
        if !posted {
            // Only a device that has failed refuses what fits its queues.
            self.worker.fail(E::Transport(CompletionStatus::Flushed));
        }
    }

    /// Copies a segment that is about to be sent, if a result may be written over it.
    fn keep(&mut self, request: &SendRequest) {
        let Some(running) = self.running.filter(|running| running.overwrites) else { return };
        let (Some(overwritten), Some(segment)) =
            (&mut self.overwritten, HostWorker::segment_of(request.id))
        else {
            return;
        };
        let Running { call, source, destination, .. } = running;
        let [piece] = request.pieces;
        let offset = piece.address.wrapping_sub(call.source_address) as usize;
        let length = piece.length as usize;
        if source.overlaps(offset, length, destination) {
            overwritten.keep(segment, source, offset, length);
        }
    }

    /// Ends it, and what is under way.
    pub(crate) fn stop(&mut self) {
        self.worker.fail(E::Transport(CompletionStatus::Flushed));
        let next = self.waiting.front().map(|part| part.sequence);
        self.stopped_before = self.stopped_before.or(next);
        self.waiting.clear();
    }

    /// How far it has come, once it was stopped, of so many collectives that were started.
    pub(crate) fn position(&self, started: u64) -> Position {
        match self.worker.halted() {
            Some(Halted { number, results, .. }) => Position { sequence: number, results },
            None => Position { sequence: self.stopped_before.unwrap_or(started), results: 0 },
        }
    }

    /// The number of what was under way when it was stopped, and until when that was to be over.
    pub(crate) fn was_due(&self) -> Option<(u64, Instant)> {
        let Running { sequence, deadline, .. } = self.last?;
        let halted = self.worker.halted()?;
        (halted.number == sequence).then_some((sequence, deadline))
    }

    /// What was under way when it was stopped, if results may have been written over its source.
    fn halted(&self) -> Option<(Running, Halted)> {
        let running = self.last.filter(|running| running.overwrites)?;
        let halted = self.worker.halted()?;
        (halted.number == running.sequence).then_some((running, halted))
    }

    /// Puts back what results may have been written over, other than whole segments. Gives the number of the
    /// collective if there is no copy. Nothing may arrive any more.
    pub(crate) fn restore(&self) -> Option<u64> {
        let (running, halted) = self.halted()?;
        match &self.overwritten {
            Some(overwritten) => {
                overwritten.restore(halted.next_segment, running.source);
                None
            }
            None => Some(running.sequence),
        }
    }

    /// Whether the switch may have closed the connection because it was told that a deadline has passed, this rank's or that of
    /// another one. It says whom it waits for, but to who has a receive for a result in SEND mode: there it closes it without a
    /// word, and acknowledges nothing that comes afterwards. In WRITE mode silence means that it is lost.
    pub(crate) fn may_be_closed(&self) -> bool {
        self.running.is_some_and(|running| running.overdue && running.call.mode == Mode::Send)
    }

    /// The error of what is under way, or was when the worker failed.
    pub(crate) fn timed_out(&self, running: Running) -> CollectiveError {
        let Running { sequence, limit, .. } = running;
        let (results, segments) = match (self.worker.progress(), self.worker.halted()) {
            (Some((_, results, segments)), _) => (results, segments),
            // The result of a small vector counts there, and is no segment.
            (None, Some(Halted { results, segments, .. })) => (results.min(segments), segments),
            (None, None) => (0, 0),
        };
        CollectiveError::Timeout { sequence, results, segments, limit }
    }
}
