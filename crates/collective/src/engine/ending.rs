//! How a communicator ends, what is waited for until then, and what is asked about it: failures, deadlines, ranks that leave.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_inc::failover::Position;
use millstream_inc::{HostConfig, MAX_TREES};

use super::state::{Failure, Outcome, State};
use super::{Engine, SWITCH_PATIENCE, VERDICT_PATIENCE};
use crate::CollectiveError;
use crate::tree::{Link, Running, Tree};

/// As [`VERDICT_PATIENCE`], where more depends on it: of a switch that this rank is not connected to, the controller knows which
/// one is lost.
const FAILOVER_PATIENCE: Duration = Duration::from_secs(1);

/// How long a rank whose deadline has passed waits for the switch to say whom it waits for: for several processes
/// to answer, on busy machines, and for longer than a switch may be silent before a soft device says that it is lost. Other
/// devices may wait for up to four times as long (IBTA 9.7.6.1.3), and a switch that is lost is a time-out then.
const OVERDUE_PATIENCE: Duration = Duration::from_millis(2500);

const _: () = assert!(OVERDUE_PATIENCE.as_millis() > SWITCH_PATIENCE.as_millis());

impl Engine {
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
    pub(super) fn expire(&self, tree: usize, sequence: u64) {
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

    /// After a failure: ends the connections and all access to memory for them, puts back what was overwritten by halves, and says how far each tree has
    /// come, of how many collectives that were started; and the number of one that was overwritten and of which there
    /// is no copy. The collectives that were started and not waited for must still have their memory.
    pub(crate) fn halt(&self) -> (u64, [Position; MAX_TREES], Option<u64>) {
        self.links.iter().for_each(Link::halt);
        let state = self.lock();
        let mut positions = [Position::default(); MAX_TREES];
        let mut lost = None;
        for (tree, position) in state.trees.iter().zip(&mut positions) {
            *position = tree.position(state.started);
            lost = lost.or(tree.restore());
        }
        (state.started, positions, lost)
    }

    /// After a failure: the numbers of what was under way, on each tree, and until when it was to be over there.
    pub(crate) fn were_due(&self) -> Vec<(u64, Instant)> {
        self.lock().trees.iter().filter_map(Tree::was_due).collect()
    }

    /// These trees are of no more use: other ones have taken their place, or nothing does. What they keep of calls is freed,
    /// and what their switches had of the receive buffers is for others.
    pub(crate) fn retire(&self) {
        self.lock().trees.iter_mut().for_each(Tree::forget_overwritten);
        self.links.iter().for_each(Link::give_back_share);
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
