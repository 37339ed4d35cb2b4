//! The trees of a rank, as the library's engine has them (`crates/collective/src/engine.rs` and `tree.rs`): each does its
//! parts of calls one after the other, and what fails on one is over on all.

use core::ops::Range;
use std::collections::VecDeque;

use millstream_inc::failover::Position;
use millstream_inc::{
    Collective, CollectiveCall, CollectiveError, Command, HostWorker, MAX_TREES, Stripe,
};
use millstream_roce::{
    CompletionQueueId, CompletionStatus, Destination, Endpoint, Instant, Memory, OwnedMemory,
    QueuePairAttributes, QueuePairState,
};
use millstream_wire::Qpn;

use crate::rank::{DOMAIN, carry_out, message};

/// A call, and where the vectors of this rank are.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) call: CollectiveCall,
    pub(super) source: Range<u64>,
    pub(super) destination: Range<u64>,
}

/// What a tree has of a call.
#[derive(Clone, Debug)]
struct Part {
    sequence: u64,
    work: Work,
    /// Results may be written over the source, and differ from it.
    overwrites: bool,
}

/// A segment that was sent from where its result comes to.
#[derive(Clone, Debug)]
struct Copied {
    segment: u64,
    address: u64,
    bytes: Vec<u8>,
}

/// A connection to a switch, and what is done over it.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) qpn: Qpn,
    pub(super) completions: CompletionQueueId,
    pub(super) control_key: u32,
    pub(super) worker: HostWorker,
    running: Option<Part>,
    waiting: VecDeque<Part>,
    /// What was begun last.
    last: Option<Part>,
    /// The first of those that waited when it was stopped.
    stopped_before: Option<u64>,
    /// How many calls it has begun.
    pub(super) begun: u64,
    /// The last segments, a window at most.
    copies: VecDeque<Copied>,
}

/// All trees of a rank.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) trees: Vec<Tree>,
    world: u32,
    keeps_overwritten: bool,
    started: u64,
    finished: u64,
    /// Of the calls that come after these, on how many trees they are not over.
    parts: VecDeque<u8>,
    pub(super) failed: Option<CollectiveError>,
}

impl Tree {
    pub(super) fn new(
        (qpn, completions): (Qpn, CompletionQueueId),
        control_key: u32,
        worker: HostWorker,
    ) -> Self {
        Self {
            qpn,
            completions,
            control_key,
            worker,
            running: None,
            waiting: VecDeque::new(),
            last: None,
            stopped_before: None,
            begun: 0,
            copies: VecDeque::new(),
        }
    }

    /// Begins what comes next, if nothing is under way.
    fn begin_next(&mut self, wrong: &mut Vec<String>) -> bool {
        if self.running.is_some() {
            return false;
        }
        let Some(part) = self.waiting.pop_front() else { return false };
        let started = self.worker.start_as(part.sequence, &part.work.call);
        if let Err(error) = started
            && self.worker.failure().is_none()
        {
            wrong.push(format!("call {} was not started: {error}", part.sequence));
        }
        self.begun += 1;
        self.last = Some(part.clone());
        self.running = Some(part);
        true
    }

    fn carry_out(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        keeps_overwritten: bool,
        wrong: &mut Vec<String>,
    ) -> bool {
        let mut busy = false;
        while let Some(command) = self.worker.poll_command() {
            busy = true;
            if keeps_overwritten && let Command::Send(request) = &command {
                let [piece] = request.pieces;
                let source = piece.address..piece.address + u64::from(piece.length);
                self.keep(HostWorker::segment_of(request.id), piece.key, source, endpoint);
            }
            match carry_out(now, endpoint, (self.qpn, self.control_key), command) {
                Ok(true) => {}
                Ok(false) => wrong.push(format!("there is no memory for {command:?}")),
                Err(error) => wrong.push(format!("the worker asks for more than fits: {error}")),
            }
        }
        let mut polled = Vec::new();
        endpoint.poll_completions(self.completions, &mut polled, usize::MAX);
        for completion in polled {
            busy = true;
            let control = endpoint.memory().region(self.control_key).unwrap_or_default();
            self.worker.handle_completion(&completion, |at| message(control, at));
        }
        busy
    }

    /// Copies a segment that is about to be sent, if a result may be written over it.
    fn keep(
        &mut self,
        segment: Option<u64>,
        key: u32,
        source: Range<u64>,
        endpoint: &Endpoint<OwnedMemory>,
    ) {
        let (Some(segment), Some(part)) = (segment, &self.running) else { return };
        let destination = &part.work.destination;
        let meets = source.start < destination.end && destination.start < source.end;
        if !part.overwrites || !meets {
            return;
        }
        let length = (source.end - source.start) as u32;
        let piece = millstream_roce::Piece { key, address: source.start, length };
        let Ok(bytes) = endpoint.memory().bytes(&piece) else { return };
        if self.copies.len() >= self.worker.config().window as usize {
            self.copies.pop_front();
        }
        self.copies.push_back(Copied { segment, address: source.start, bytes: bytes.to_vec() });
    }

    /// Ends it, and what is under way.
    fn stop(&mut self) {
        self.worker.fail(CollectiveError::Transport(CompletionStatus::Flushed));
        let next = self.waiting.front().map(|part| part.sequence);
        self.stopped_before = self.stopped_before.or(next);
        self.waiting.clear();
        // It is over on all trees.
        let _ = self.worker.poll_outcome();
        self.running = None;
    }

    /// How far it has come, of so many calls that were started.
    fn position(&self, started: u64) -> Position {
        match self.worker.halted() {
            Some(halted) => Position { sequence: halted.number, results: halted.results },
            None => Position { sequence: self.stopped_before.unwrap_or(started), results: 0 },
        }
    }

    /// Puts back what results may have been written over, other than whole segments; the number of the call if there is
    /// no copy.
    fn restore(
        &self,
        endpoint: &mut Endpoint<OwnedMemory>,
        keeps_overwritten: bool,
    ) -> Option<u64> {
        let part = self.last.as_ref().filter(|part| part.overwrites)?;
        let halted = self.worker.halted().filter(|it| it.number == part.sequence)?;
        if !keeps_overwritten {
            return Some(part.sequence);
        }
        let key = part.work.call.source_key;
        for copied in self.copies.iter().filter(|it| it.segment >= halted.next_segment) {
            let at = Destination::Local { domain: DOMAIN, key, address: copied.address };
            let written = endpoint.memory_mut().write(&at, &copied.bytes);
            debug_assert_eq!(written, Ok(()));
        }
        None
    }
}

impl Engine {
    pub(super) const fn new(trees: Vec<Tree>, world: u32, keeps_overwritten: bool) -> Self {
        let parts = VecDeque::new();
        Self { trees, world, keeps_overwritten, started: 0, finished: 0, parts, failed: None }
    }

    /// Starts a call; its number.
    pub(super) fn start(&mut self, work: &Work) -> u64 {
        let sequence = self.started;
        let trees = self.trees.len() as u8;
        let combines = matches!(
            work.call.collective,
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
        );
        let (source, destination) = (&work.source, &work.destination);
        let meets = source.start < destination.end && destination.start < source.end;
        let mut parts = 0;
        for (number, tree) in (0..).zip(&mut self.trees) {
            let Some(stripe) = Stripe::of(&work.call, self.world, sequence, number, trees) else {
                continue;
            };
            let call = CollectiveCall { stripe, ..work.call };
            // The result of a small vector comes in one piece.
            let overwrites = combines && meets && !tree.worker.is_small(&call);
            let work = Work { call, ..work.clone() };
            tree.waiting.push_back(Part { sequence, work, overwrites });
            parts += 1;
        }
        self.parts.push_back(parts);
        self.started += 1;
        sequence
    }

    /// Whether a call is over, with a result.
    pub(super) const fn has_result(&self, sequence: u64) -> bool {
        sequence < self.finished
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.finished == self.started
    }

    /// Does what can be done now.
    pub(super) fn advance(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        wrong: &mut Vec<String>,
    ) -> bool {
        let (mut busy, mut ended) = (false, Vec::new());
        for tree in &mut self.trees {
            if self.failed.is_none() {
                busy |= tree.begin_next(wrong);
            }
            busy |= tree.carry_out(now, endpoint, self.keeps_overwritten, wrong);
            if let Some(Ok(_)) = tree.worker.poll_outcome()
                && let Some(part) = tree.running.take()
            {
                busy = true;
                ended.push(part.sequence);
            }
            self.failed = self.failed.or(tree.worker.failure());
        }
        for sequence in ended {
            let index = sequence.checked_sub(self.finished).map(|at| at as usize);
            if let Some(parts) = index.and_then(|index| self.parts.get_mut(index)) {
                *parts -= 1;
            }
            while self.parts.front() == Some(&0) {
                self.parts.pop_front();
                self.finished += 1;
            }
        }
        if self.failed.is_some() {
            self.trees.iter_mut().for_each(Tree::stop);
        }
        busy
    }

    /// Ends it from outside, unless it has failed.
    pub(super) fn fail(&mut self) {
        let flushed = CollectiveError::Transport(CompletionStatus::Flushed);
        self.failed = self.failed.or(Some(flushed));
        self.trees.iter_mut().for_each(Tree::stop);
    }

    /// Asks the switches whether they live.
    pub(super) fn probe(&mut self) {
        self.trees.iter_mut().for_each(|tree| tree.worker.probe());
    }

    /// Nothing is sent from here on, and nothing that arrives is written anywhere.
    pub(super) fn disconnect(
        &self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
        wrong: &mut Vec<String>,
    ) {
        let attributes = QueuePairAttributes {
            state: Some(QueuePairState::Error),
            ..QueuePairAttributes::default()
        };
        for tree in &self.trees {
            if let Err(error) = endpoint.modify_queue_pair(now, tree.qpn, &attributes) {
                wrong.push(format!("the queue pair cannot be closed: {error}"));
            }
        }
    }

    /// When nothing can arrive any more: puts back what was overwritten by halves, and says how many calls were started, how
    /// far each tree has come, and which call was overwritten and not kept.
    pub(super) fn halt(
        &self,
        endpoint: &mut Endpoint<OwnedMemory>,
    ) -> (u64, [Position; MAX_TREES], Option<u64>) {
        let mut positions = [Position::default(); MAX_TREES];
        let mut overwritten = None;
        for (tree, position) in self.trees.iter().zip(&mut positions) {
            *position = tree.position(self.started);
            overwritten = overwritten.or(tree.restore(endpoint, self.keeps_overwritten));
        }
        (self.started, positions, overwritten)
    }
}
