//! One tree of a communicator on this rank: its worker, and what it is at.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_inc::{
    ABORT_BYTES, CONTROL_BYTES, CollectiveCall, CollectiveError as E, Command, DESCRIPTOR_BYTES,
    Descriptor, HostWorker, Mode, StartError,
};
use millstream_verbs::{
    Completion, CompletionStatus, Device, QueuePair, QueuePairAttributes, QueuePairState,
    ReceiveRequest, SendRequest,
};

use crate::memory::{ControlBlock, Operands, Span};
use crate::{CollectiveError, LONGEST};

/// A collective to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    /// Without keys.
    pub(crate) call: CollectiveCall,
    pub(crate) operands: Operands,
    /// What a small vector is copied from, when the collective begins.
    pub(crate) source: Span,
    /// What the result of a small vector is copied to.
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
    destination: Span,
}

/// The connection to the switch of a tree.
pub(crate) struct Link {
    pub(crate) pair: QueuePair,
    pub(crate) device: Device,
    pub(crate) switch: IpAddr,
}

/// The state of a tree.
pub(crate) struct Tree {
    pub(crate) worker: HostWorker,
    control: ControlBlock<CONTROL_BYTES>,
    /// What is under way.
    pub(crate) running: Option<Running>,
    /// What comes after it, in order.
    pub(crate) waiting: VecDeque<Part>,
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
    pub(crate) fn part(&self, sequence: u64, tree: usize, call: CollectiveCall) -> Part {
        let Self { operands, source, destination, limit, .. } = *self;
        let [source_key, destination_key] =
            [operands.source, operands.destination].map(|it| it.keys[tree]);
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
        let _ = self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::Error),
            ..QueuePairAttributes::default()
        });
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
        }
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
        // Nothing is under way from there.
        self.control.copy_from(DESCRIPTOR_BYTES, source);
        let deadline = Instant::now() + limit.min(LONGEST);
        self.running = Some(Running { sequence, deadline, limit, overdue: false, destination });
        Ok(())
    }

    /// Carries out what the worker wants.
    pub(crate) fn carry_out(&mut self, pair: &QueuePair) {
        while let Some(command) = self.worker.poll_command() {
            let destination = self.running.map_or(Span::EMPTY, |running| running.destination);
            match command {
                Command::Store(bytes) => self.control.store(0, &bytes),
                // When it began.
                Command::Load(_) => {}
                Command::Deliver { offset, .. } => self.control.copy_to(offset, destination),
                Command::Receive(request) => self.receives.push(request),
                Command::Send(request) => self.sends.push(request),
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

    /// Ends it, and what is under way.
    pub(crate) fn stop(&mut self) {
        self.worker.fail(E::Transport(CompletionStatus::Flushed));
        self.waiting.clear();
    }

    pub(crate) fn timed_out(&self, running: Running) -> CollectiveError {
        let Running { sequence, limit, .. } = running;
        let (_, results, segments) = self.worker.progress().unwrap_or_default();
        CollectiveError::Timeout { sequence, results, segments, limit }
    }
}
