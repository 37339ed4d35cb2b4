//! The machines: hosts with ranks of several communicators, and switches. Any of them may stand still for a
//! while.

use core::time::Duration;

use millstream_inc::{CollectiveError, Command, HostWorker, SwitchEvent, SwitchNode};
use millstream_roce::{
    CompletionQueueId, CompletionStatus, Counters, DatagramMeta, Endpoint, Instant, Node,
    OwnedMemory, Piece, QueuePairAttributes, QueuePairState, SendRequest, Transmit,
};
use millstream_wire::Qpn;

use super::call::Arena;
use super::failover;
use crate::rank::{carry_out, message};
use crate::{Machine, Rng};

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
    pub(super) deadline: Option<Instant>,
    /// The switch was told that a deadline has passed.
    pub(super) overdue: bool,
    pub(super) probe_at: Option<Instant>,
    pub(super) probe_every: Duration,
    pub(super) failed: Option<CollectiveError>,
    /// Some rank breaks the protocol in such a way that the results of this one need not be right.
    pub(super) is_confused: bool,
    pub(super) rng: Rng,
}

impl Member {
    /// Whether nothing more comes of it.
    pub(super) const fn is_over(&self) -> bool {
        self.failed.is_some() || self.ended == self.calls.len()
    }

    /// Whether the same rank has failed on another tree of its communicator.
    fn sibling_failed(&self, all: &[Self]) -> bool {
        let ours = (self.family, self.rank);
        all.iter().any(|it| (it.family, it.rank) == ours && it.failed.is_some())
    }

    fn run(&mut self, now: Instant, endpoint: &mut Endpoint<OwnedMemory>, wrong: &mut Vec<String>) {
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
            self.deadline = Some(now + CALL_LIMIT);
            self.probe_at = Some(now + self.probe_every);
            busy = true;
            let Arena { number, request, .. } = &self.calls[self.ended].arena;
            let started = self.worker.start_as(*number, request);
            if let Err(error) = started
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
        self.start_at = self.calls.get(self.ended).map(|next| now + next.pause);
    }

    /// The communicator is of no more use.
    fn end(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        error: CollectiveError,
        wrong: &mut Vec<String>,
    ) {
        self.failed = Some(error);
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

    fn wake(&self) -> Option<Instant> {
        [self.start_at, self.deadline, self.probe_at].into_iter().flatten().min()
    }
}

/// What a machine is.
#[derive(Debug)]
pub(super) enum Kind {
    /// With ranks, and those that go on when a switch is lost.
    Host(Box<Endpoint<OwnedMemory>>, Vec<Member>, Vec<failover::Rank>),
    Switch(Box<SwitchNode>),
    /// Somebody else, who takes nothing.
    Outsider,
}

/// A machine of a run.
#[derive(Debug)]
pub(super) struct Participant {
    pub(super) kind: Kind,
    stands_until: Option<Instant>,
    /// What has come since it stands still.
    backlog: Vec<(DatagramMeta, Vec<u8>)>,
    pub(super) events: Vec<SwitchEvent>,
    pub(super) wrong: Vec<String>,
}

impl Participant {
    pub(super) fn new(kind: Kind) -> Self {
        let (backlog, events, wrong) = (Vec::new(), Vec::new(), Vec::new());
        Self { kind, stands_until: None, backlog, events, wrong }
    }

    pub(super) fn stand_still(&mut self, until: Instant) {
        self.stands_until = Some(until);
    }

    pub(super) fn members(&self) -> &[Member] {
        if let Kind::Host(_, members, _) = &self.kind { members } else { &[] }
    }

    /// Whether it stands still.
    pub(super) const fn stands(&self) -> bool {
        self.stands_until.is_some()
    }

    pub(super) fn switch(&self) -> Option<&SwitchNode> {
        if let Kind::Switch(node) = &self.kind { Some(node) } else { None }
    }

    pub(super) fn switch_mut(&mut self) -> Option<&mut SwitchNode> {
        if let Kind::Switch(node) = &mut self.kind { Some(node) } else { None }
    }

    pub(super) fn counters(&self) -> Option<&Counters> {
        match &self.kind {
            Kind::Host(endpoint, ..) => Some(endpoint.counters()),
            Kind::Switch(node) => Some(node.counters()),
            Kind::Outsider => None,
        }
    }

    /// Posts a request past the worker of a rank that is at work; whether it took it.
    pub(super) fn post(
        &mut self,
        now: Instant,
        group: usize,
        rank: u32,
        request: impl FnOnce(&Member) -> Option<SendRequest>,
    ) -> bool {
        let Kind::Host(endpoint, members, _) = &mut self.kind else { return false };
        let mut all = members.iter();
        let member = all.find(|it| (it.group, it.rank) == (group, rank) && !it.is_over());
        let Some(member) = member else { return false };
        request(member).is_some_and(|it| endpoint.post_send(now, member.qpn, &it).is_ok())
    }

    /// What was written after the calls had ended.
    pub(super) fn check_memory(&self) -> Vec<String> {
        let Kind::Host(endpoint, members, _) = &self.kind else { return Vec::new() };
        let calls = members.iter().flat_map(|it| it.calls.iter().map(move |call| (it, call)));
        let changed =
            calls.filter(|(_, call)| endpoint.memory().region(call.key) != Some(&call.arena.bytes));
        changed
            .map(|(member, call)| {
                let Member { group, rank, ended, failed, .. } = member;
                format!(
                    "communicator {group}, rank {rank}, which ended {ended} calls and then had {failed:?}: \
                     the memory of {:?} changed outside of the call",
                    call.arena.request
                )
            })
            .collect()
    }

    /// What its ranks that go on have done, for a tally.
    pub(super) fn take_tally(&mut self) -> Vec<&'static str> {
        let Kind::Host(.., ranks) = &mut self.kind else { return Vec::new() };
        ranks.iter_mut().flat_map(failover::Rank::take_tally).collect()
    }

    fn node(&mut self) -> Option<&mut dyn Node> {
        match &mut self.kind {
            Kind::Host(endpoint, ..) => Some(&mut **endpoint),
            Kind::Switch(node) => Some(&mut **node),
            Kind::Outsider => None,
        }
    }
}

impl Node for Participant {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        if self.stands_until.is_some() {
            self.backlog.push((*meta, datagram.to_vec()));
        } else if let Some(node) = self.node() {
            node.handle_datagram(now, meta, datagram);
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        if self.stands_until.is_some_and(|until| until > now) {
            return;
        }
        self.stands_until = None;
        for (meta, datagram) in core::mem::take(&mut self.backlog) {
            if let Some(node) = self.node() {
                node.handle_datagram(now, &meta, &datagram);
            }
        }
        if let Some(node) = self.node() {
            node.handle_timeout(now);
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        let until = self.stands_until;
        until.or_else(|| self.node()?.poll_timeout())
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        self.stands_until.is_none()
            && self.node().is_some_and(|node| node.poll_transmit(now, transmit))
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        match &self.kind {
            Kind::Host(endpoint, ..) => endpoint.bytes(piece),
            Kind::Switch(node) => node.bytes(piece),
            Kind::Outsider => None,
        }
    }
}

impl Machine for Participant {
    fn run(&mut self, now: Instant) {
        if self.stands_until.is_some() {
            return;
        }
        match &mut self.kind {
            Kind::Host(endpoint, members, ranks) => {
                for member in members.iter_mut() {
                    let mut wrong = Vec::new();
                    member.run(now, endpoint, &mut wrong);
                    let Member { group, rank, ended, .. } = member;
                    self.wrong.extend(wrong.into_iter().map(|what| {
                        format!("communicator {group}, rank {rank}, after {ended} calls: {what}")
                    }));
                }
                // What fails on one tree is over on all.
                let failed: Vec<bool> =
                    members.iter().map(|it| !it.is_over() && it.sibling_failed(members)).collect();
                for (member, _) in members.iter_mut().zip(failed).filter(|(_, failed)| *failed) {
                    let flushed = CollectiveError::Transport(CompletionStatus::Flushed);
                    member.end(now, endpoint, flushed, &mut self.wrong);
                }
                for rank in ranks {
                    rank.run(now, endpoint);
                    self.wrong.extend(rank.take_wrong());
                }
            }
            Kind::Switch(node) => self.events.extend(core::iter::from_fn(|| node.poll_event())),
            Kind::Outsider => {}
        }
    }

    fn poll_wake(&mut self) -> Option<Instant> {
        if self.stands() {
            return None;
        }
        let Kind::Host(_, members, ranks) = &self.kind else { return None };
        let of_ranks = ranks.iter().filter_map(failover::Rank::wake);
        members.iter().filter_map(Member::wake).chain(of_ranks).min()
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
        Some(CollectiveError::Aborted(Abort::Violation { .. })) => "ranks: told of a violation",
        Some(CollectiveError::Aborted(Abort::Overdue(_))) => "ranks: told who is awaited",
        Some(CollectiveError::Aborted(Abort::Requested { .. })) => "ranks: told of a request",
        Some(CollectiveError::Transport(CompletionStatus::RetryExceeded)) => "ranks: no answer",
        Some(CollectiveError::Transport(_)) => "ranks: connection broken",
        Some(CollectiveError::Protocol(_)) => "ranks: switch broke the protocol",
        Some(CollectiveError::TimedOut { .. }) => "ranks: timed out",
    }
}
