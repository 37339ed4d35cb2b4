//! The peer's process: whether it is there, and whether it is the one that is meant.

use std::mem;
use std::sync::Weak;
use std::time::Duration;

use millstream_transfer_core::{Instant, RailId};

use super::super::runs::Runs;
use super::super::shared::Shared;
use super::{Peer, SILENT, STALL, State};
use crate::FailureReason;
use crate::transport::Run;

/// When there has been no rail for so long, another transport goes on where one leads to the peer.
const NO_RAIL: Duration = Duration::from_millis(250);

/// When a peer has not answered for so long, it is not there for other transports.
const UNANSWERED: Duration = Duration::from_secs(1);

impl Peer {
    /// The flow's time has come, or the peer is to be asked whether it is there.
    pub(in super::super) fn handle_timeout(&self) {
        let mut state = self.lock();
        let now = self.now();
        state.flow.handle_timeout(now);
        if state.ask_at.is_some_and(|at| at <= now) {
            let age = state.oldest_age(now);
            // If it has died since it completed something last, this is when it is to be asked.
            let wait = STALL.checked_sub(age).filter(|wait| !wait.is_zero()).unwrap_or(STALL);
            // What waits for a rail goes on over another transport once the peer has said that it is there.
            let is_stranded = self.shared.context.elsewhere.is_some()
                && state.flow.stranded(now, NO_RAIL).next().is_some();
            if (age >= STALL || is_stranded) && self.has_incarnation {
                state.silent_since.get_or_insert(now);
                if !mem::replace(&mut state.asking, true) {
                    self.in_background(Self::ask);
                }
            }
            let silent = state.silent_since.is_some_and(|since| since + SILENT <= now);
            let Shared { config, context, .. } = &*self.shared;
            if silent && config.patience.max(context.calls.timeout()) <= SILENT {
                (state.silent_since, state.given_up) = (None, true);
                state.flow.give_up();
            }
            let silent_at = state.silent_since.map(|since| since + SILENT);
            let silent_at = silent_at.filter(|&at| at > now);
            let next = silent_at.into_iter().chain([now + wait]).min();
            state.ask_at = next.filter(|_| state.flow.tasks() > 0);
        }
        let asks = self.has_incarnation;
        self.act(now, state);
        // Others say nothing of that.
        if !asks {
            self.leave_to_others();
        }
    }

    /// Ends those tasks for which there has been no rail for long enough, and which another transport goes on with. The
    /// engine is asked without the lock.
    pub(in super::super) fn leave_to_others(&self) {
        let Some(engine) = self.shared.context.elsewhere.as_ref().and_then(Weak::upgrade) else {
            return;
        };
        let mut stranded = self.lock().stranded(self.now());
        stranded.retain(|(_, run)| engine.leads_elsewhere(run));
        if stranded.is_empty() {
            return;
        }
        let may_go = |user| stranded.iter().any(|(known, _)| Runs::of_one_run(*known, user));
        let mut state = self.lock();
        let now = self.now();
        state.flow.give_up_stranded(now, NO_RAIL, may_go);
        self.act(now, state);
    }

    /// Another start of the peer's process has answered than was asked.
    pub(in super::super) fn restarted(&self, asked: Option<u64>, incarnation: u64) {
        let mut state = self.lock();
        let now = self.now();
        let there = state.flow.incarnation();
        // An answer of the one before may be late, and so may one to who asked that.
        if there != incarnation && asked.unwrap_or(0) == there && !state.buried.has(incarnation) {
            tracing::info!(peer = &*self.name, "the peer was restarted");
            state.bury();
            state.last = None;
            state.reasons.fill(None);
            state.mark_stale();
            state.since = std::time::Instant::now();
            state.flow.peer_restarted(now, incarnation);
        }
        self.act(now, state);
    }

    /// Nobody listens where the peer was when it had this incarnation, or it has said that it closes.
    pub(in super::super) fn gone(&self, asked: Option<u64>, reason: FailureReason) {
        let mut state = self.lock();
        let now = self.now();
        // Another one may have come since.
        if asked.unwrap_or(0) == state.flow.incarnation() {
            tracing::info!(peer = &*self.name, %reason, "the peer is gone");
            state.mark_stale();
            state.reasons.fill(Some(reason.clone()));
            state.last = Some((RailId(0), reason));
            state.flow.peer_gone(now);
        }
        self.act(now, state);
    }

    /// Which start of the peer's process it is, if that is known.
    pub(in super::super) fn incarnation(&self) -> Option<u64> {
        let incarnation = self.lock().flow.incarnation();
        (self.has_incarnation && incarnation != 0).then_some(incarnation)
    }

    /// Whether it is this start of the peer's process.
    pub(in super::super) fn is(&self, incarnation: u64) -> bool {
        self.has_incarnation && self.lock().flow.incarnation() == incarnation
    }

    /// It has answered something.
    pub(in super::super) fn answered(&self) {
        self.lock().heard();
    }

    /// It was asked whether it is there.
    pub(in super::super) fn asked(&self) {
        self.lock().asking = false;
    }

    /// Ends everything: what is left fails. Returns whether there was a connection.
    pub(in super::super) fn stop(&self) -> bool {
        let mut state = self.lock();
        let now = self.now();
        state.stopped = true;
        // Nothing is posted any more, and what is in flight is held.
        state.flow.shut_down(now);
        let up = state.connections.iter().flatten().map(|connected| &connected.connection);
        let aborting = state.aborting.iter().map(|(_, _, connection)| connection);
        let connections: Vec<_> = up.chain(aborting).cloned().collect();
        drop(state);
        // Before the tasks are told: from here on nothing touches their memory. One that is being reset
        // may be reset twice.
        connections.iter().for_each(|connection| connection.halt());
        let mut state = self.lock();
        for index in 0..self.rails.len() as u16 {
            let epoch = state.flow.rails()[usize::from(index)].epoch();
            state.flow.rail_aborted(now, RailId(index), epoch);
        }
        self.act(now, state);
        !connections.is_empty()
    }
}

impl State {
    /// The peer has done or said something.
    pub(super) fn heard(&mut self) {
        (self.silent_since, self.given_up) = (None, false);
        self.last.take_if(|(_, reason)| matches!(reason, FailureReason::Unreachable(_)));
    }

    /// Whether the peer's process cannot be asked anything, so that no other transport finds it.
    pub(super) fn is_unreachable(&self, now: Instant) -> bool {
        // It need not have had the time to answer.
        let silent = self.silent_since.is_some_and(|since| since + UNANSWERED <= now);
        silent || self.given_up || matches!(self.last, Some((_, FailureReason::Unreachable(_))))
    }

    /// A task of each run for which there has been no rail for long, where the peer's process can be asked things: if
    /// it cannot, no other transport finds it.
    fn stranded(&self, now: Instant) -> Vec<(u64, Run)> {
        if self.is_unreachable(now) || self.silent_since.is_some() {
            return Vec::new();
        }
        let mut found: Vec<(u64, Run)> = Vec::new();
        for user in self.flow.stranded(now, NO_RAIL) {
            if !found.iter().any(|(known, _)| Runs::of_one_run(*known, user)) {
                found.extend(self.runs.run(user).map(|(run, _)| (user, run)));
            }
        }
        found
    }
}
