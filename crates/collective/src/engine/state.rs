//! What an engine knows of its collectives: how many were started, what is under way, what is over and how.

use std::collections::VecDeque;
use std::time::Duration;

use crate::CollectiveError;
use crate::tree::{Running, Tree};

pub(super) struct State {
    pub(super) trees: Vec<Tree>,
    pub(super) world: u32,
    /// How many collectives were started.
    pub(super) started: u64,
    /// How many of them have ended with a result.
    pub(super) finished: u64,
    /// Of those that come after these, in their order, on how many trees they are not over.
    pub(super) parts: VecDeque<u8>,
    /// Why the communicator is of no more use.
    pub(super) failure: Option<Failure>,
    /// Ranks that have left, as far as it is told, and how many collectives they have called.
    pub(super) left: Vec<(u32, u64)>,
    /// Nothing more will be heard from the controller.
    pub(super) closed: bool,
    /// Nobody waits for a failure any more.
    pub(super) abandoned: bool,
    /// How long a failure may wait for what the controller says about it.
    pub(super) verdict_patience: Duration,
}

#[derive(Clone, Copy)]
pub(super) enum Outcome {
    Done,
    /// [`State::failure`] says why.
    Failed,
}

pub(super) struct Failure {
    pub(super) error: CollectiveError,
    /// On which tree it was found, if on one.
    pub(super) tree: Option<usize>,
    /// The controller may know better, as long as nobody was told this.
    pub(super) provisional: bool,
}

impl State {
    /// Whether a collective is under way, on some tree.
    pub(super) fn is_running(&self) -> bool {
        self.trees.iter().any(|tree| tree.running.is_some())
    }

    /// What must end first, and on which tree.
    pub(super) fn next_deadline(&self) -> Option<(usize, Running)> {
        let running = self.trees.iter().enumerate();
        let running = running.filter_map(|(number, tree)| Some((number, tree.running?)));
        running.min_by_key(|(_, running)| running.deadline)
    }

    /// One tree has ended its part of a collective, with a result.
    pub(super) fn finish_part(&mut self, sequence: u64) {
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
    pub(super) fn outcome(&self, sequence: u64) -> Option<Outcome> {
        match () {
            () if sequence < self.finished => Some(Outcome::Done),
            () if !self.is_running() && self.failure.is_some() => Some(Outcome::Failed),
            () => None,
        }
    }

    /// Whether collectives that may still end have nothing to do on a tree.
    pub(super) fn is_spare(&self, tree: &Tree) -> bool {
        let Some(left) = self.left.iter().map(|&(_, called)| called).min() else { return false };
        let next = tree.waiting.front().map(|part| part.sequence);
        let first = tree.running.map(|running| running.sequence).or(next);
        self.finished < left.min(self.started) && first.is_none_or(|first| first >= left)
    }

    /// Why the first collective that is not over can never end, if a rank has left before it. Those after it are not
    /// looked at: they may be under way on one tree while this one still comes in on another.
    pub(super) fn never_ends(&self) -> Option<CollectiveError> {
        self.outlived(self.finished).filter(|_| self.finished < self.started)
    }

    /// Why a collective can never end, if a rank has left before it.
    pub(super) fn outlived(&self, sequence: u64) -> Option<CollectiveError> {
        let &(rank, collectives) = self.left.iter().find(|&&(_, called)| called <= sequence)?;
        Some(CollectiveError::left(rank, collectives))
    }
}
