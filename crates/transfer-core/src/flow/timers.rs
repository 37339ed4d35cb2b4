//! What time brings about.

use core::iter::successors;
use core::time::Duration;

use super::Flow;
use crate::rail::Cause;
use crate::{End, Failure, Instant, Policy, RailState};

impl<P: Policy> Flow<P> {
    /// When [`Flow::handle_timeout`] is to be called, if nothing else happens.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.next().into_iter().chain(self.timers).chain(self.ask_at).min()
    }

    /// Acts on times that have come. Early calls are harmless.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(task) = self.deadlines.expire(now) {
            self.end(task, End::Timeout);
            self.end_access(now, task);
        }
        if self.ask_at.take_if(|at| *at <= now).is_some() {
            self.room += 1;
        }
        if self.timers.is_none_or(|at| at > now) {
            return;
        }
        self.timers = None;
        for index in 0..self.rails.len() as u16 {
            if let Some(at) = self.rails[usize::from(index)].timer {
                if at <= now {
                    self.rails[usize::from(index)].timer = None;
                    self.rail_timer(now, index);
                } else {
                    self.note_timer(at);
                }
            }
        }
        for class in 0..self.queues.len() {
            self.give_up_late(now, class);
        }
    }

    fn rail_timer(&mut self, now: Instant, index: u16) {
        let rail = &mut self.rails[usize::from(index)];
        match rail.state {
            RailState::Connecting => self.give_up_connecting(now, index, true),
            RailState::Up => {
                if rail.oldest.is_none() {
                    return;
                }
                let since = rail.silent_since();
                let (most, silent_at) = (self.patience(index), since + self.config.silence);
                let patience = self.regular_patience(now, index).map_or(most, |it| it.min(most));
                if since + patience > now {
                    if self.is_overdue(now, index, most) {
                        return self.break_silent(now, index, true);
                    }
                    // It may be measured meanwhile, and then have less.
                    let look = now + self.config.least_silence;
                    return self.set_timer(index, look.min(since + patience));
                }
                if silent_at > now && !self.others_complete(index, since + patience / 2) {
                    // Perhaps they do soon; or it is the peer that is silent, or this process. Those that
                    // have nothing to do, since what is in flight here is waited for, are tested.
                    self.test_others(index);
                    return self.set_timer(index, silent_at.min(now + patience / 2));
                }
                // What has completed may be told later than this is looked at: so others complete once
                // more before it is judged.
                let rail = &mut self.rails[usize::from(index)];
                let suspected_at = *rail.suspected_at.get_or_insert(now);
                if silent_at > now && !self.others_complete(index, suspected_at) {
                    self.test_others(index);
                    return self.set_timer(index, silent_at.min(now + patience / 2));
                }
                self.break_silent(now, index, silent_at > now);
            }
            // The peer has answered, and the local end is waited for.
            RailState::Fencing if rail.fence.confirmed || rail.fence.lost => {}
            RailState::Fencing => {
                rail.fence.lost = rail.fence.give_up_at <= now;
                self.go_on_fencing(now, index);
                let rail = &self.rails[usize::from(index)];
                if rail.state == RailState::Fencing && !rail.fence.lost {
                    self.ask_again_for_fence(now, index);
                }
            }
            RailState::Down => self.changed(),
            RailState::Paused(_) => {
                (rail.state, rail.retry_at) = (RailState::Down, now);
                self.changed();
            }
        }
    }

    /// Whether the oldest byte of a rail on which others complete is older than the policy bears, and was when
    /// this was looked at before: what has completed may be told later than that.
    fn is_overdue(&mut self, now: Instant, index: u16, patience: core::time::Duration) -> bool {
        let most_age = self.policy.most_age(patience);
        let rail = &mut self.rails[usize::from(index)];
        let age = rail.oldest_age(now);
        if most_age.is_none_or(|most| age < Some(most)) {
            rail.overdue_at = None;
            return false;
        }
        let overdue_at = *rail.overdue_at.get_or_insert(now);
        self.others_complete(index, overdue_at)
    }

    /// A rail is given up; `early` if while others complete.
    fn break_silent(&mut self, now: Instant, index: u16, early: bool) {
        // It is the oldest that hangs, and those behind it wait.
        let Some(slice) = self.rails[usize::from(index)].posted.first() else { return };
        let slice = self.slices.at_mut(slice);
        // While others complete it is the rail, of which perhaps too much was asked.
        slice.attempt = match early {
            true => slice.attempt.max(1),
            false => slice.attempt.saturating_add(1),
        };
        let tired = !early && slice.attempt >= self.config.max_attempts;
        let task = slice.task;
        self.break_rail(now, index, if early { Cause::Silence } else { Cause::Failure });
        if tired {
            self.end(task, End::Failed(Failure::Attempts));
        }
    }

    /// How long nothing may complete on a rail while others complete. For one of which nothing is known,
    /// twice what the most patient of the others is given. A rail that was silent before is given twice as
    /// long each time, so that a slow one comes up; and so is one whose oldest slice was on silent rails,
    /// since it may be the peer's memory that is slow, on every rail.
    fn patience(&self, index: u16) -> core::time::Duration {
        let of = |rail: &crate::Rail| rail.patience(&self.config);
        let rail = &self.rails[usize::from(index)];
        let own = of(rail);
        let others = || self.rails.iter().filter(|rail| rail.is_up()).filter_map(of).max();
        let known = own.or_else(|| Some(others()?.saturating_mul(2)));
        let silences = rail.posted.first().map_or(0, |oldest| self.slices.at(oldest).silences);
        let leniency = rail.leniency() << silences.min(8);
        let patience = known.map(|patience| patience.saturating_mul(leniency));
        patience.map_or(self.config.silence, |patience| patience.min(self.config.silence))
    }

    /// The same for a rail on which slices have completed regularly, if neither it nor its oldest slice has been
    /// silent before.
    fn regular_patience(&self, now: Instant, index: u16) -> Option<core::time::Duration> {
        let rail = &self.rails[usize::from(index)];
        let was_silent = |oldest| self.slices.at(oldest).silences > 0;
        if rail.silences > 0 || rail.posted.first().is_some_and(was_silent) {
            return None;
        }
        rail.regular_patience(now, &self.config)
    }

    /// Tests the other rails that have nothing in flight.
    fn test_others(&mut self, index: u16) {
        for other in 0..self.rails.len() as u16 {
            let rail = &self.rails[usize::from(other)];
            let idle = rail.is_up() && rail.slices == 0 && rail.spec.access != crate::Access::Own;
            if other != index && idle {
                self.test(other);
            }
        }
    }

    /// Whether anything has completed after `since` on another rail than this, tests among it.
    fn others_complete(&self, index: u16, since: Instant) -> bool {
        let mut others = self.rails.iter().enumerate().filter(|(at, _)| *at != usize::from(index));
        others.any(|(_, rail)| rail.is_up() && rail.completed_at > since)
    }

    pub(super) fn set_timer(&mut self, index: u16, at: Instant) {
        self.rails[usize::from(index)].timer = Some(at);
        self.note_timer(at);
    }

    fn note_timer(&mut self, at: Instant) {
        self.timers = Some(self.timers.map_or(at, |timers| timers.min(at)));
    }

    /// A queue has nothing to post on.
    pub(super) fn strand(&mut self, now: Instant, class: usize) {
        let queue = &mut self.queues[class];
        queue.blocked_at = Some(self.room);
        queue.stranded_since.get_or_insert(now);
        let mut newest = queue.tasks.last();
        while let Some(index) = newest {
            let task = self.tasks.at_mut(index);
            if task.stranded_at.is_some() {
                break;
            }
            task.stranded_at = Some(now);
            newest = self.task_chain.previous(index);
        }
        if let Some((_, until)) = self.next_to_give_up(class) {
            self.note_timer(until);
        }
    }

    /// Ends all tasks that wait for a rail, as when it is known that none will come.
    pub fn give_up(&mut self) {
        for class in 0..self.queues.len() {
            if self.queues[class].stranded_since.take().is_some() {
                self.give_up_class(class);
            }
        }
    }

    /// The callers' numbers of the tasks of which something has waited for so long for a rail, while there was none.
    pub fn stranded(&self, now: Instant, waited: Duration) -> impl Iterator<Item = u64> {
        (0..self.queues.len()).flat_map(move |class| {
            let stranded = self.stranded_of(class, now, waited);
            stranded.map(|task| self.tasks.at(task).user)
        })
    }

    /// Ends those of them that are `wanted`, by their callers' numbers: somebody else goes on with them.
    pub fn give_up_stranded(
        &mut self,
        now: Instant,
        waited: Duration,
        wanted: impl Fn(u64) -> bool,
    ) {
        for class in 0..self.queues.len() {
            let all = self.stranded_of(class, now, waited);
            let wanted: Vec<u32> = all.filter(|&task| wanted(self.tasks.at(task).user)).collect();
            for task in wanted {
                // A task may be there by several slices.
                if self.tasks.holds(task) {
                    self.end(task, End::Failed(Failure::NoRail));
                }
            }
        }
    }

    /// The tasks of a queue of which something has waited for so long for a rail.
    fn stranded_of(
        &self,
        class: usize,
        now: Instant,
        waited: Duration,
    ) -> impl Iterator<Item = u32> {
        let queue = &self.queues[class];
        let again = successors(queue.again.first(), |&slice| self.slice_chain.next(slice));
        let again = again.map(|slice| {
            let slice = self.slices.at(slice);
            (slice.task, Some(slice.since))
        });
        let uncut = successors(queue.tasks.first(), |&task| self.task_chain.next(task));
        let uncut = uncut.map(|task| (task, self.tasks.at(task).stranded_at));
        let all = queue.stranded_since.map(|stranded| {
            let long = move |since: Instant| since.max(stranded) + waited <= now;
            again.chain(uncut).filter(move |(_, since)| since.is_some_and(long))
        });
        all.into_iter().flatten().map(|(task, _)| task)
    }

    /// Ends all tasks of which something waits in a queue.
    fn give_up_class(&mut self, class: usize) {
        let no_rail = End::Failed(Failure::NoRail);
        while let Some(task) = self.queues[class].tasks.first() {
            self.end(task, no_rail);
        }
        while let Some(slice) = self.queues[class].again.first() {
            let task = self.slices.at(slice).task;
            self.end(task, no_rail);
        }
    }

    /// Ends the tasks of a queue for which there has been no rail for too long.
    fn give_up_late(&mut self, now: Instant, class: usize) {
        while let Some((task, until)) = self.next_to_give_up(class) {
            if until > now {
                return self.note_timer(until);
            }
            self.end(task, End::Failed(Failure::NoRail));
        }
    }

    /// The task of a stranded queue that has waited longest, and how long it may.
    fn next_to_give_up(&self, class: usize) -> Option<(u32, Instant)> {
        let queue = &self.queues[class];
        let stranded = queue.stranded_since?;
        // Both lists have the oldest first.
        let again = queue.again.first().map(|slice| {
            let slice = self.slices.at(slice);
            (slice.task, slice.since)
        });
        let uncut = queue.tasks.first().and_then(|task| {
            let since = self.tasks.at(task).stranded_at?;
            Some((task, since))
        });
        let (task, since) = again.into_iter().chain(uncut).min_by_key(|&(_, since)| since)?;
        Some((task, since.max(stranded) + self.config.patience))
    }
}
