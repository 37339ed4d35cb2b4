//! Rails that come and go, and the fences of those that break.
//!
//! What was in flight on a connection that broke, or that was broken to end a task, is held. READs
//! are free when local access has ended; WRITEs when the peer has confirmed, too, that nothing of
//! the connection can arrive. Then they are posted again, or their tasks end. If the peer does not
//! confirm in time, their tasks end with a target range that is undefined.

use super::Flow;
use super::tasks::Place;
use crate::rail::{Access, Cause, Fence};
use crate::{End, Failure, Instant, Output, Policy, RailId, RailState};

impl<P: Policy> Flow<P> {
    /// A rail is connected. One that has failed before, or that is not needed since there are others, is
    /// tested before it gets slices: what it does not complete waits for a fence.
    pub fn rail_up(&mut self, now: Instant, id: RailId, epoch: u64) {
        if self.is_in(id, epoch, RailState::Connecting) {
            // While there are others, it need not be trusted with more before it has shown what it can.
            let measured = |rail: &crate::Rail| rail.peak_rate().is_some();
            let others = self.rails.iter().any(|rail| rail.is_up() && measured(rail));
            let rail = &mut self.rails[usize::from(id.0)];
            rail.probing |= others && !measured(rail);
            if rail.probing && rail.spec.access != Access::Own {
                self.test(id.0);
            } else {
                self.begin_using(now, id.0);
            }
        }
    }

    /// A test of a connection was answered.
    pub fn rail_tested(&mut self, now: Instant, id: RailId, epoch: u64) {
        if self.is_in(id, epoch, RailState::Connecting) && self.rails[usize::from(id.0)].testing {
            self.begin_using(now, id.0);
        } else if self.is_in(id, epoch, RailState::Up) {
            let rail = &mut self.rails[usize::from(id.0)];
            (rail.testing, rail.completed_at) = (false, now);
            self.room += 1;
        }
    }

    /// Tests a connection, unless that is under way.
    pub(super) fn test(&mut self, index: u16) {
        let rail = &mut self.rails[usize::from(index)];
        if !core::mem::replace(&mut rail.testing, true) {
            let (rail, epoch) = (RailId(index), rail.epoch);
            self.outputs.push_back(Output::Test { rail, epoch });
        }
    }

    fn begin_using(&mut self, now: Instant, index: u16) {
        let rail = &mut self.rails[usize::from(index)];
        (rail.state, rail.testing, rail.timer) = (RailState::Up, false, None);
        (rail.last_completion, rail.suspected_at, rail.overdue_at) = (now, None, None);
        rail.counters.connections += 1;
        self.changed();
    }

    /// A rail could not be connected, or its connection broke, or one of its NICs went away.
    pub fn rail_down(&mut self, now: Instant, id: RailId, epoch: u64) {
        if self.is_in(id, epoch, RailState::Connecting) {
            match self.rails[usize::from(id.0)].testing {
                true => self.give_up_connecting(now, id.0, true),
                false => self.rest(now, id.0, true),
            }
        } else if self.is_in(id, epoch, RailState::Up) {
            self.break_rail(now, id.0, Cause::Failure);
        }
    }

    /// A NIC here works again. Its rails are tried as if they had never failed, and need not wait for the end
    /// of a pause.
    pub fn nic_works(&mut self, now: Instant, local_nic: u16) {
        for rail in self.rails.iter_mut().filter(|rail| rail.spec.local_nic == local_nic) {
            rail.forgive(now);
        }
        self.changed();
    }

    /// The peer refuses the epoch of a connection, since it takes only higher ones than `floor`.
    pub fn rail_refused(&mut self, now: Instant, id: RailId, epoch: u64, floor: u64) {
        // Of a connection that is there, and tested, it says that the request for it came twice.
        let testing = self.rails.get(usize::from(id.0)).is_some_and(|rail| rail.testing);
        if self.is_in(id, epoch, RailState::Connecting) && !testing {
            // What a peer says does not use up the numbers.
            self.epoch = self.epoch.max(floor.min(u64::MAX / 2));
            self.rest(now, id.0, true);
        }
    }

    /// Nothing here touches memory for a connection any more, and no completion of it will come.
    pub fn rail_aborted(&mut self, now: Instant, id: RailId, epoch: u64) {
        if self.is_in(id, epoch, RailState::Fencing) {
            self.rails[usize::from(id.0)].fence.aborted = true;
            self.go_on_fencing(now, id.0);
        }
    }

    /// The peer has confirmed that nothing of a connection can arrive any more.
    pub fn fence_confirmed(&mut self, now: Instant, id: RailId, epoch: u64) {
        if self.is_in(id, epoch, RailState::Fencing) {
            self.rails[usize::from(id.0)].fence.confirmed = true;
            self.go_on_fencing(now, id.0);
        }
    }

    /// The peer does not fence connections: there is nothing to wait for.
    pub fn fence_refused(&mut self, now: Instant, id: RailId, epoch: u64) {
        if self.is_in(id, epoch, RailState::Fencing) {
            self.rails[usize::from(id.0)].fence.lost = true;
            self.go_on_fencing(now, id.0);
        }
    }

    /// A rail is not needed now: its connection is closed, as if it had broken, but without blame.
    pub fn close_rail(&mut self, now: Instant, id: RailId, epoch: u64) {
        if self.is_in(id, epoch, RailState::Up) {
            self.break_rail(now, id.0, Cause::Other);
        } else if self.is_in(id, epoch, RailState::Connecting) {
            self.give_up_connecting(now, id.0, false);
        }
    }

    /// The peer is another process now. What was meant for the one before fails; its memory is gone,
    /// and with it everything that could still arrive there. But WRITEs on rails of [`Access::Durable`]
    /// that the process before has not confirmed leave their target ranges undefined.
    pub fn peer_restarted(&mut self, now: Instant, incarnation: u64) {
        if incarnation != self.incarnation {
            self.incarnation = incarnation;
            self.end_of_peer(now, Failure::PeerRestarted);
        }
    }

    /// The peer's process has ended, or has closed all its connections: as [`Flow::peer_restarted`], but
    /// nobody is known to be there. Requests are for incarnation 0 until another is told. A peer that
    /// lives on must say that it closes only when nobody writes for its connections any more.
    pub fn peer_gone(&mut self, now: Instant) {
        self.incarnation = 0;
        self.end_of_peer(now, Failure::PeerGone);
    }

    /// This side closes: all tasks end, and nobody waits for the peer. Answer with
    /// [`Flow::rail_aborted`] for each rail, once nothing here touches memory for it; tasks with WRITEs
    /// that were in flight end then, and their target ranges are undefined.
    pub fn shut_down(&mut self, now: Instant) {
        for index in 0..self.rails.len() as u16 {
            self.give_up_connecting(now, index, false);
            self.hold(now, index, Cause::Other);
            self.rails[usize::from(index)].fence.lost = true;
        }
        self.end_all(now, Failure::ShutDown);
        self.changed();
    }

    fn end_of_peer(&mut self, now: Instant, failure: Failure) {
        for index in 0..self.rails.len() as u16 {
            self.give_up_connecting(now, index, false);
            self.hold(now, index, Cause::Other);
            let rail = &mut self.rails[usize::from(index)];
            match rail.spec.access {
                Access::Own | Access::Connection => rail.fence.confirmed = true,
                Access::Durable => rail.fence.lost = true,
            }
            rail.fence.guilty = false;
            rail.forgive(now);
        }
        self.end_all(now, failure);
        for index in 0..self.rails.len() as u16 {
            if self.rails[usize::from(index)].state == RailState::Fencing {
                self.go_on_fencing(now, index);
            }
        }
        self.changed();
    }

    fn is_in(&self, id: RailId, epoch: u64, state: RailState) -> bool {
        let rail = self.rails.get(usize::from(id.0));
        rail.is_some_and(|rail| rail.epoch == epoch && rail.state == state)
    }

    /// A connection is not waited for any more.
    pub(super) fn give_up_connecting(&mut self, now: Instant, index: u16, guilty: bool) {
        let rail = &self.rails[usize::from(index)];
        if rail.state == RailState::Connecting {
            let (rail, epoch) = (RailId(index), rail.epoch);
            self.outputs.push_back(Output::Abort { rail, epoch });
            self.rest(now, index, guilty);
        }
    }

    /// Ends a connection: what is in flight on it is held from now on.
    pub(super) fn break_rail(&mut self, now: Instant, index: u16, cause: Cause) {
        if self.hold(now, index, cause) {
            self.rails[usize::from(index)].counters.fences += 1;
            self.ask_for_fence(now, index);
        }
    }

    /// The same, but returns whether the peer is to be asked for a fence.
    fn hold(&mut self, now: Instant, index: u16, cause: Cause) -> bool {
        let rail = &self.rails[usize::from(index)];
        if rail.state != RailState::Up {
            return false;
        }
        let mut next = rail.posted.first();
        let mut writes = false;
        while let Some(slice) = next {
            let found = self.slices.at_mut(slice);
            found.place = Place::Held;
            found.silences = found.silences.saturating_add(u8::from(cause == Cause::Silence));
            writes |= self.needs_fence(slice);
            next = self.slice_chain.next(slice);
        }
        let rail = &mut self.rails[usize::from(index)];
        let mut failed_at = now;
        if cause == Cause::Silence {
            // By then it would have failed without the others.
            let silence = self.config.silence.min(self.config.connection_silence);
            failed_at = now.max(rail.silent_since() + silence);
            rail.was_silent();
        }
        let give_up_at = failed_at + self.config.fence_timeout.max(self.config.patience);
        let guilty = cause != Cause::Other;
        (rail.state, rail.testing) = (RailState::Fencing, false);
        rail.fence = Fence { guilty, asked_at: now, give_up_at, ..Fence::default() };
        let (rail, epoch) = (RailId(index), rail.epoch);
        self.outputs.push_back(Output::Abort { rail, epoch });
        self.rails[usize::from(index)].timer = None;
        self.changed();
        writes
    }

    /// Asks the peer, again if need be.
    pub(super) fn ask_for_fence(&mut self, now: Instant, index: u16) {
        let rail = &mut self.rails[usize::from(index)];
        rail.fence.ask_at = now + self.config.fence_interval;
        self.outputs.push_back(Output::Fence { rail: RailId(index), epoch: rail.epoch });
        self.await_fence(now, index);
    }

    /// Asks again if it is time to: tasks that end while a fence is waited for make no more questions.
    pub(super) fn ask_again_for_fence(&mut self, now: Instant, index: u16) {
        if self.rails[usize::from(index)].fence.ask_at <= now {
            self.ask_for_fence(now, index);
        } else {
            self.await_fence(now, index);
        }
    }

    fn await_fence(&mut self, now: Instant, index: u16) {
        let Fence { give_up_at, asked_at, ask_at, .. } = self.rails[usize::from(index)].fence;
        let over_at = asked_at + self.config.fence_timeout;
        let next = give_up_at.min(ask_at);
        self.set_timer(index, if over_at > now { next.min(over_at) } else { next });
    }

    /// Whether a fence has been waited for as long as tasks that are to end wait.
    pub(super) fn fence_is_over(&self, now: Instant, index: u16) -> bool {
        self.rails[usize::from(index)].fence.asked_at + self.config.fence_timeout <= now
    }

    /// Frees what need not be held any more.
    pub(super) fn go_on_fencing(&mut self, now: Instant, index: u16) {
        let rail = &self.rails[usize::from(index)];
        let fence = rail.fence;
        if !fence.aborted {
            return;
        }
        let is_over = self.fence_is_over(now, index);
        let mut next = rail.posted.first();
        let mut lost = false;
        while let Some(slice) = next {
            next = self.slice_chain.next(slice);
            let ends = || self.tasks.at(self.slices.at(slice).task).end.is_some();
            if fence.confirmed || !self.needs_fence(slice) {
                self.unpost(slice);
                self.throw_back(now, slice);
            } else if fence.lost || (is_over && ends()) {
                self.unpost(slice);
                self.lose(slice);
                lost = true;
            }
        }
        let rail = &mut self.rails[usize::from(index)];
        // Tasks that are to end wait for less long than those that are to go on.
        if lost && !core::mem::replace(&mut rail.fence.counted, true) {
            rail.counters.lost_fences += 1;
        }
        if rail.slices == 0 {
            self.rest(now, index, fence.guilty);
        }
    }

    /// A WRITE of which nobody knows whether it can still arrive: it must not be tried again.
    fn lose(&mut self, slice: u32) {
        let task = self.slices.at(slice).task;
        self.tasks.at_mut(task).target_undefined = true;
        self.forget_slice(slice);
        self.end(task, End::Failed(Failure::NotFenced));
    }

    /// A rail is not connected any more.
    pub(super) fn rest(&mut self, now: Instant, index: u16, guilty: bool) {
        let rail = &mut self.rails[usize::from(index)];
        rail.rest(now, guilty, &self.config);
        if let Some(at) = rail.timer {
            self.set_timer(index, at);
        }
        self.changed();
    }
}
