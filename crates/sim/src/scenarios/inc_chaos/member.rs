//! A rank of a communicator: its calls one after the other, its worker, and what it finds in its memory.

use core::time::Duration;

use millstream_inc::{CollectiveError, Command, HostWorker};
use millstream_roce::{
    CompletionQueueId, CompletionStatus, Endpoint, Instant, OwnedMemory, QueuePairAttributes,
    QueuePairState,
};
use millstream_wire::Qpn;

use super::call::Arena;
use crate::Rng;
use crate::rank::{carry_out, message};

/// Ids of requests that a rank posts past its worker.
pub(super) const RUDE: u64 = 1 << 60;

/// How often a rank that waits asks whether the switch lives.
pub(super) const PROBE_EVERY: Duration = Duration::from_millis(100);

/// How long a call may take. Whatever breaks is found in less.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(60);

/// How long a rank whose deadline has passed waits for an end.
const OVERDUE_PATIENCE: Duration = Duration::from_secs(5);

/// One of the calls of a rank.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) key: u32,
    pub(super) arena: Arena,
    /// How long after the one before has ended.
    pub(super) pause: Duration,
    /// When it was started.
    pub(super) started: Option<Instant>,
}

/// A rank of a communicator.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) group: usize,
    /// The communicator that its group is a tree of.
    pub(super) family: usize,
    pub(super) rank: u32,
    pub(super) qpn: Qpn,
    pub(super) completions: CompletionQueueId,
    pub(super) control_key: u32,
    pub(super) control_address: u64,
    pub(super) worker: HostWorker,
    pub(super) calls: Vec<Call>,
    /// Calls that have ended well.
    pub(super) ended: usize,
    /// When the next one starts; none while one is under way.
    pub(super) start_at: Option<Instant>,
    /// A call that it does not make, nor any after it.
    pub(super) leaves_out: Option<usize>,
    pub(super) call_limit: Duration,
    pub(super) deadline: Option<Instant>,
    /// The switch was told that a deadline has passed.
    pub(super) overdue: bool,
    pub(super) probe_at: Option<Instant>,
    pub(super) probe_every: Duration,
    pub(super) failed: Option<CollectiveError>,
    pub(super) failed_at: Option<Instant>,
    /// Some rank breaks the protocol in such a way that the results of this one need not be right.
    pub(super) is_confused: bool,
    pub(super) rng: Rng,
}

impl Member {
    /// Whether nothing more comes of it.
    pub(super) const fn is_over(&self) -> bool {
        self.failed.is_some() || self.ended == self.calls.len()
    }

    /// Is to start its next call, if it makes that, when its pause is over.
    pub(super) fn plan_start(&mut self, now: Instant) {
        let next = self.calls.get(self.ended).filter(|_| self.leaves_out != Some(self.ended));
        self.start_at = next.map(|next| now + next.pause);
    }

    /// Whether the same rank has failed on another tree of its communicator.
    pub(super) fn sibling_failed(&self, all: &[Self]) -> bool {
        let ours = (self.family, self.rank);
        all.iter().any(|it| (it.family, it.rank) == ours && it.failed.is_some())
    }

    pub(super) fn run(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        wrong: &mut Vec<String>,
    ) {
        let mut polled = Vec::new();
        loop {
            let mut busy = self.keep_time(now, wrong);
            while let Some(command) = self.worker.poll_command() {
                busy = true;
                match carry_out(now, endpoint, (self.qpn, self.control_key), command) {
                    Ok(true) => {}
                    // Who takes itself for another rank may take itself for a root, which has a vector.
                    Ok(false) if self.is_confused && matches!(command, Command::Load(_)) => {}
                    Ok(false) => wrong.push(format!("there is no memory for {command:?}")),
                    Err(error) => {
                        wrong.push(format!("the worker asks for more than fits: {error}"));
                    }
                }
            }
            endpoint.poll_completions(self.completions, &mut polled, usize::MAX);
            for completion in polled.drain(..) {
                busy = true;
                let rude = completion.id & RUDE != 0 && completion.id >> 61 == 0;
                if !rude || completion.status != CompletionStatus::Success {
                    let control = endpoint.memory().region(self.control_key).unwrap_or_default();
                    self.worker.handle_completion(&completion, |at| message(control, at));
                }
            }
            match self.worker.poll_outcome() {
                Some(Ok(_)) => {
                    self.succeeded(now, endpoint, wrong);
                    busy = true;
                }
                Some(Err(error)) => self.end(now, endpoint, error, wrong),
                None => {}
            }
            // Between calls too.
            if let (None, Some(error)) = (self.failed, self.worker.failure()) {
                self.end(now, endpoint, error, wrong);
            }
            if !busy || self.failed.is_some() {
                break;
            }
        }
    }

    fn keep_time(&mut self, now: Instant, wrong: &mut Vec<String>) -> bool {
        let mut busy = false;
        if self.failed.is_none() && self.start_at.is_some_and(|at| at <= now) {
            self.start_at = None;
            self.deadline = Some(now + self.call_limit);
            self.probe_at = Some(now + self.probe_every);
            busy = true;
            let Call { arena, started, .. } = &mut self.calls[self.ended];
            *started = Some(now);
            let Arena { number, request, .. } = arena;
            if let Err(error) = self.worker.start_as(*number, request)
                && self.worker.failure().is_none()
            {
                wrong.push(format!("call {} was not started: {error}", self.ended));
            }
        }
        if self.probe_at.is_some_and(|at| at <= now) {
            self.probe_at = Some(now + self.probe_every);
            self.worker.probe();
        }
        if self.deadline.is_some_and(|at| at <= now) {
            // First it says so, and the switch should say whom it waits for.
            if core::mem::replace(&mut self.overdue, true) {
                self.deadline = None;
                self.worker.fail(self.worker.timed_out());
            } else {
                self.deadline = Some(now + OVERDUE_PATIENCE);
                self.worker.give_up();
            }
            busy = true;
        }
        busy
    }

    /// A call has its result. Its memory is the caller's again, who changes all of it at once.
    fn succeeded(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        wrong: &mut Vec<String>,
    ) {
        let Call { key, arena, .. } = &mut self.calls[self.ended];
        let call = arena.request;
        if let Some(region) = endpoint.memory_mut().region_mut(*key) {
            match &arena.expected {
                None => wrong.push(format!("{call:?} succeeded though ranks do not agree")),
                Some(expected) if *region != **expected && !self.is_confused => {
                    let at = region.iter().zip(expected).position(|(a, b)| a != b);
                    let target = &arena.destination;
                    wrong.push(format!("{call:?}: wrong from {at:?} on; result at {target:?}"));
                }
                Some(_) => {}
            }
            self.rng.fill(&mut arena.bytes);
            region.copy_from_slice(&arena.bytes);
        }
        self.ended += 1;
        self.deadline = None;
        self.probe_at = None;
        self.plan_start(now);
    }

    /// The communicator is of no more use.
    pub(super) fn end(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        error: CollectiveError,
        wrong: &mut Vec<String>,
    ) {
        (self.failed, self.failed_at) = (Some(error), Some(now));
        (self.start_at, self.deadline, self.probe_at) = (None, None, None);
        let attributes = QueuePairAttributes {
            state: Some(QueuePairState::Error),
            ..QueuePairAttributes::default()
        };
        if let Err(error) = endpoint.modify_queue_pair(now, self.qpn, &attributes) {
            wrong.push(format!("the queue pair cannot be closed: {error}"));
        }
        let Some(Call { key, arena, .. }) = self.calls.get_mut(self.ended) else { return };
        let Some(region) = endpoint.memory().region(*key) else { return };
        let confused = self.is_confused;
        let right = |(at, &byte): (usize, &u8)| {
            let result = arena.expected.as_ref().map(|expected| expected[at]);
            let target = arena.destination.contains(&at);
            byte == arena.bytes[at] || target && (confused || result == Some(byte))
        };
        if let Some(at) = region.iter().enumerate().position(|pair| !right(pair)) {
            let (call, target) = (&arena.request, &arena.destination);
            wrong.push(format!("{call:?} failed, and wrote at {at}; result at {target:?}"));
        }
        arena.bytes.copy_from_slice(region);
    }

    pub(super) fn wake(&self) -> Option<Instant> {
        [self.start_at, self.deadline, self.probe_at].into_iter().flatten().min()
    }
}

/// How a rank's part in a communicator ended, as a tally names it.
pub(super) const fn name_of_end(failed: Option<CollectiveError>) -> &'static str {
    use millstream_inc::Abort;
    match failed {
        None => "ranks: all calls ended well",
        Some(CollectiveError::Aborted(Abort::Mismatch(_))) => "ranks: told of a mismatch",
        Some(CollectiveError::Aborted(Abort::PeerLost { .. })) => "ranks: told of a lost rank",
        Some(CollectiveError::Aborted(Abort::ParentLost)) => "ranks: told of a lost switch",
        Some(CollectiveError::Aborted(Abort::SwitchBelowLost { .. })) => {
            "ranks: told of a lost switch below"
        }
        Some(CollectiveError::Aborted(Abort::Violation { .. })) => "ranks: told of a violation",
        Some(CollectiveError::Aborted(Abort::Overdue(_))) => "ranks: told who is awaited",
        Some(CollectiveError::Aborted(Abort::Requested { .. })) => "ranks: told of a request",
        Some(CollectiveError::Transport(CompletionStatus::RetryExceeded)) => "ranks: no answer",
        Some(CollectiveError::Transport(_)) => "ranks: connection broken",
        Some(CollectiveError::Protocol(_)) => "ranks: switch broke the protocol",
        Some(CollectiveError::TimedOut { .. }) => "ranks: timed out",
    }
}
