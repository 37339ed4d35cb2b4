//! Posting slices, and what becomes of them.

use core::time::Duration;

use super::Flow;
use super::tasks::{Place, Slice};
use crate::measure::Mark;
use crate::priority::ByLevel;
use crate::rail::{Access, Cause};
use crate::{
    End, Failure, Instant, Moved, Opcode, Pick, Policy, Post, PriorityLevel, RailId, RailState,
    Rails, SliceId, SliceInfo, SliceResult,
};

/// While there is something to do, nothing is posted and nothing completes for so many nanoseconds.
const QUIET: u64 = 10_000_000;

/// Where something of a level was posted, more of it is expected for so long.
const COMES_AGAIN: Duration = Duration::from_secs(1);

impl<P: Policy> Flow<P> {
    /// Posts the next slice for which there is room. Queues of a level take turns.
    pub(super) fn next_post(&mut self, now: Instant) -> Option<Post> {
        if self.waiting == ByLevel::default() {
            return None;
        }
        if !self.policy.has_priorities() {
            return self.next_post_of(now, PriorityLevel::default());
        }
        let waiting = PriorityLevel::ALL.map(|level| self.waits(level));
        // What waits below others may have its turn.
        if waiting.iter().filter(|waits| **waits).count() > 1
            && let Some(post) = self.next_post_due(now)
        {
            return Some(post);
        }
        PriorityLevel::ALL.into_iter().find_map(|level| match waiting[level.index()] {
            true => self.next_post_of(now, level),
            false => None,
        })
    }

    /// Posts the next slice of a queue whose turn it is before higher levels: of the higher level first.
    fn next_post_due(&mut self, now: Instant) -> Option<Post> {
        for level in PriorityLevel::ALL.into_iter().skip(1) {
            for at in 0..self.queues.len() {
                let queue = &self.queues[at];
                if queue.level == level
                    && !queue.is_empty()
                    && queue.blocked_at != Some(self.room)
                    && self.is_due(at)
                    && let Some(post) = self.post_from(now, at)
                {
                    return Some(post);
                }
            }
        }
        None
    }

    /// Whether it is the turn of a queue before higher levels.
    fn is_due(&self, at: usize) -> bool {
        let queue = &self.queues[at];
        let waiting = self.waiting[queue.level.index()];
        self.shares.is_due(queue.level, queue.share_mark, waiting)
    }

    fn next_post_of(&mut self, now: Instant, level: PriorityLevel) -> Option<Post> {
        for _ in 0..self.queues.len() {
            let turn = &mut self.turns[level.index()];
            let at = *turn;
            *turn = if at + 1 < self.queues.len() { at + 1 } else { 0 };
            let queue = &self.queues[at];
            if queue.level != level || queue.is_empty() || queue.blocked_at == Some(self.room) {
                continue;
            }
            if let Some(post) = self.post_from(now, at) {
                return Some(post);
            }
        }
        None
    }

    /// Whether something of a level waits.
    const fn waits(&self, level: PriorityLevel) -> bool {
        self.waiting[level.index()] > 0
    }

    /// Something was put in a queue, or taken out.
    pub(super) fn recount(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        let waits = !queue.is_empty();
        let waiting = &mut self.waiting[queue.level.index()];
        match (queue.counted, waits) {
            (false, true) => {
                *waiting += 1;
                // What did not wait has nothing to catch up.
                queue.share_mark = self.shares.mark(queue.level);
            }
            (true, false) => *waiting -= 1,
            _ => {}
        }
        queue.counted = waits;
        debug_assert!(self.queues.iter().all(|queue| queue.counted != queue.is_empty()));
    }

    /// Whether a level is to leave room for higher ones: something of these comes.
    fn yields(&self, now: Instant, level: PriorityLevel) -> bool {
        let recent = |at: Instant| now.saturating_duration_since(at) < COMES_AGAIN;
        let mut higher = PriorityLevel::ALL.into_iter().filter(|higher| *higher < level);
        higher.any(|it| self.posted_at[it.index()].is_some_and(recent) || self.waits(it))
    }

    /// Posts the first slice of a queue that is not empty.
    fn post_from(&mut self, now: Instant, at: usize) -> Option<Post> {
        let queue = &self.queues[at];
        let (task, again, info, cut) = match queue.again.first() {
            Some(slice) => {
                let found = self.slices.at(slice);
                let info = (found.length, found.attempt);
                (found.task, Some(slice), info, None)
            }
            None => {
                let index = queue.next_task()?;
                let task = self.tasks.at(index);
                let cut = self.pieces.cut(&task.runs, task.next, &self.slicing, &task.limits)?;
                (index, None, (cut.length, 0), Some(cut))
            }
        };
        let opcode = self.tasks.at(task).opcode;
        let info = SliceInfo {
            opcode,
            length: info.0,
            room: if self.is_due(at) { 1 } else { info.0 },
            level: queue.level,
            yields: self.yields(now, queue.level),
            attempt: info.1,
            class: queue.pair,
            local_location: queue.local_location,
            peer_location: queue.peer_location,
        };
        let rail = loop {
            let rails = Rails { all: &self.rails, version: self.version };
            match self.policy.pick(now, &info, &rails) {
                Pick::Post(rail) if self.rail(rail).is_some_and(|r| r.has_room(info.room)) => {
                    break rail;
                }
                Pick::Connect(rail) if self.rail(rail).is_some_and(|r| r.may_connect(now)) => {
                    self.connect(now, rail);
                }
                Pick::NoRail => {
                    self.strand(now, at);
                    return None;
                }
                // A policy that asks for what cannot be waits as well.
                pick => {
                    if let Pick::WaitUntil(until) = pick {
                        self.ask_at = Some(self.ask_at.map_or(until, |before| before.min(until)));
                    }
                    self.queues[at].blocked_at = Some(self.room);
                    self.queues[at].stranded_since = None;
                    self.note_full(now, &info);
                    return None;
                }
            }
        };
        let queue = &mut self.queues[at];
        queue.stranded_since = None;
        let slice = match (again, cut) {
            (Some(slice), _) => {
                self.slice_chain.remove(&mut queue.again, slice);
                slice
            }
            (None, Some(cut)) => {
                let found = self.tasks.at_mut(task);
                found.next = cut.end;
                found.uncut -= u64::from(cut.length);
                queue.cut(task);
                if found.uncut == 0 {
                    self.task_chain.remove(&mut queue.tasks, task);
                    queue.earliest.remove(task);
                }
                let key = self.slices.insert(Slice {
                    task,
                    rail: rail.0,
                    place: Place::Posted,
                    attempt: 0,
                    silences: 0,
                    start: cut.start,
                    first: cut.first,
                    length: cut.length,
                    pieces: cut.pieces,
                    since: now,
                    posted: Mark::default(),
                });
                self.siblings.push_back(&mut found.slices, key.index);
                key.index
            }
            (None, None) => return None,
        };
        let level = info.level;
        self.recount(at);
        self.posted_at[level.index()] = Some(now);
        self.shares.posted(level, info.length);
        self.queues[at].share_mark = self.shares.mark(level);
        self.rails[usize::from(rail.0)].level_bytes[level.index()] += u64::from(info.length);
        Some(self.post(now, rail, slice))
    }

    /// Something waits: the rails that have no room for it carry all that they can.
    fn note_full(&mut self, now: Instant, slice: &SliceInfo) {
        for rail in &mut self.rails {
            if rail.is_up() && self.policy.is_full(rail, slice) {
                rail.full_at = Some(now);
            }
        }
    }

    fn rail(&self, rail: RailId) -> Option<&crate::Rail> {
        self.rails.get(usize::from(rail.0))
    }

    fn post(&mut self, now: Instant, id: RailId, index: u32) -> Post {
        self.works_at(now);
        let name = SliceId(self.slices.key(index));
        let slice = self.slices.at_mut(index);
        if slice.rail != id.0 {
            self.rails[usize::from(slice.rail)].counters.moved_slices += 1;
        }
        (slice.rail, slice.place, slice.since) = (id.0, Place::Posted, now);
        let rail = &mut self.rails[usize::from(id.0)];
        rail.counters.posted(slice.length.into());
        if rail.slices == 0 {
            rail.measure.begin(now, self.held_up);
            rail.oldest = Some(now);
        }
        slice.posted = rail.measure.mark();
        rail.slices += 1;
        rail.requests += slice.pieces;
        rail.bytes += u64::from(slice.length);
        self.slice_chain.push_back(&mut rail.posted, index);
        let &mut Slice { first, pieces, length, task, .. } = slice;
        let (epoch, timed) = (rail.epoch, rail.timer.is_some());
        let task = self.tasks.at(task);
        let (user, opcode) = (task.user, task.opcode);
        if !timed {
            self.set_timer(id.0, now + self.config.least_regular_silence);
        }
        Post { rail: id, epoch, slice: name, user, opcode, first, pieces, length }
    }

    /// A slice has ended. What is over already is passed over. Returns what has arrived.
    pub fn completed(
        &mut self,
        now: Instant,
        slice: SliceId,
        result: SliceResult,
    ) -> Option<Moved> {
        let &Slice { task, rail, place, since, posted, length, .. } = self.slices.find(slice.0)?;
        let index = slice.0.index;
        if result == SliceResult::Done {
            self.works_at(now);
            self.unpost(index);
            let rail = &mut self.rails[usize::from(rail)];
            rail.completed(now, (since, posted), length, self.held_up);
            self.room += 1;
            let found = self.tasks.at_mut(task);
            rail.counters.completed(found.opcode, length.into());
            found.transferred += u64::from(length);
            let moved = Moved { user: found.user, length };
            self.forget_slice(index);
            self.finish_if_over(task);
            return Some(moved);
        }
        let own = self.rails[usize::from(rail)].spec.access == Access::Own;
        // Its other requests may fail, too: that is the same attempt.
        let is_first = own || place == Place::Posted;
        let found = self.slices.at_mut(index);
        let broken = is_first && result == SliceResult::Broken;
        found.attempt = found.attempt.saturating_add(u8::from(broken));
        let tired = found.attempt >= self.config.max_attempts;
        if own {
            self.unpost(index);
            self.room += 1;
            self.throw_back(now, index);
            let found = &mut self.rails[usize::from(rail)];
            if result == SliceResult::Broken && found.missed(&self.config) {
                self.break_rail(now, rail, Cause::Failure);
            }
        } else if place == Place::Posted {
            let refused = result == SliceResult::Refused;
            self.break_rail(now, rail, if refused { Cause::Other } else { Cause::Failure });
        }
        if !self.tasks.holds(task) {
            return None;
        }
        if result == SliceResult::Refused {
            self.end(task, End::Failed(Failure::Refused));
        } else if tired {
            self.end(task, End::Failed(Failure::Attempts));
        }
        None
    }

    /// Something is posted or has completed. Where nothing was for longer than usual it is this process that was
    /// held up, and no rail is slower for it.
    fn works_at(&mut self, now: Instant) {
        let quiet = now.nanos_since(self.worked_at);
        if quiet > QUIET {
            self.held_up += Duration::from_nanos(quiet - QUIET);
        }
        self.worked_at = now;
    }

    /// Takes a slice off its rail.
    pub(super) fn unpost(&mut self, index: u32) {
        let slice = self.slices.at(index);
        let rail = &mut self.rails[usize::from(slice.rail)];
        self.slice_chain.remove(&mut rail.posted, index);
        rail.slices -= 1;
        rail.requests -= slice.pieces;
        rail.bytes -= u64::from(slice.length);
        let level = self.queues[usize::from(self.tasks.at(slice.task).queue)].level;
        rail.level_bytes[level.index()] -= u64::from(slice.length);
        rail.oldest = rail.posted.first().map(|oldest| self.slices.at(oldest).since);
    }

    /// A slice that is on no rail is posted again, unless its task ends.
    pub(super) fn throw_back(&mut self, now: Instant, index: u32) {
        let task = self.slices.at(index).task;
        let found = self.tasks.at(task);
        if found.end.is_some() {
            self.forget_slice(index);
            return self.finish_if_over(task);
        }
        let at = usize::from(found.queue);
        let queue = &mut self.queues[at];
        queue.blocked_at = None;
        // What is told of it from now on is of the next time that it is posted.
        self.slices.rename(index);
        let slice = self.slices.at_mut(index);
        (slice.place, slice.since) = (Place::Queued, now);
        self.slice_chain.push_back(&mut queue.again, index);
        self.recount(at);
    }

    /// Whether a slice's access ends only when the peer says so.
    pub(super) fn needs_fence(&self, index: u32) -> bool {
        let Slice { task, rail, .. } = *self.slices.at(index);
        self.rails[usize::from(rail)].spec.access != Access::Own
            && self.tasks.at(task).opcode == Opcode::Write
    }

    fn connect(&mut self, now: Instant, id: RailId) {
        self.epoch += 1;
        let rail = &mut self.rails[usize::from(id.0)];
        rail.epoch = self.epoch;
        rail.state = RailState::Connecting;
        self.outputs.push_back(crate::Output::Connect { rail: id, epoch: self.epoch });
        self.set_timer(id.0, now + self.config.connect_timeout);
        self.changed();
    }
}
