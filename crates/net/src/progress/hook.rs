//! Who hears of what a round has brought about.

use std::sync::PoisonError;

use super::shared::Shared;
use crate::sync::Mutex;

/// Which thread has done a round.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Worker {
    /// The node's own thread.
    Driver,
    /// A thread that waits for something of the node.
    Leader,
    /// A thread that has just asked something of the node, and may hold locks of its own.
    Poster,
}

/// What the last call of [`Hook::announce`] is for: everything.
pub(super) const LAST: u64 = u64::MAX;

/// Hears of what rounds have brought about. What that is, it says itself by bits of a number.
pub trait Hook<N>: Send + Sync {
    /// What has happened since the last call that somebody should hear of; 0 for nothing. Called at
    /// the end of each round, with the node locked. `eventful` says that in this round something
    /// arrived, a deadline passed, something was sent, or was asked for by another thread.
    fn observe(&self, node: &mut N, eventful: bool) -> u64;

    /// Tells those concerned of what was observed, after a round and with no lock held. Returns what
    /// only the driver may do: it is called with that on its own thread soon. What the driver itself
    /// leaves, it is called with again after its next round.
    ///
    /// The last call comes from the driver, with all bits set and [`Shared::failure`] saying why.
    fn announce(&self, shared: &Shared<N>, observed: u64, worker: Worker) -> u64;
}

/// A function that the driver calls after rounds.
#[derive(Debug)]
pub struct AfterRound<F>(Mutex<Option<F>>);

impl<F> AfterRound<F> {
    /// Of a function that is dropped when the node has ended.
    pub fn new(after_round: F) -> Self {
        Self(Mutex::new(Some(after_round)))
    }
}

impl<N, F: FnMut(&Shared<N>) + Send> Hook<N> for AfterRound<F> {
    fn observe(&self, _node: &mut N, eventful: bool) -> u64 {
        u64::from(eventful)
    }

    fn announce(&self, shared: &Shared<N>, observed: u64, worker: Worker) -> u64 {
        if worker != Worker::Driver {
            return observed;
        }
        let mut after_round = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(after_round) = &mut *after_round {
            after_round(shared);
        }
        if observed == LAST {
            *after_round = None;
        }
        0
    }
}
