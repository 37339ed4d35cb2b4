//! Deadlines of many queue pairs in one heap.

use core::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Instant;

/// The earliest deadlines of queue pairs, by index.
///
/// Deadlines move with every acknowledgement; entries do not. A queue pair keeps the true deadline
/// and one live entry here, not later than it; an entry that comes up early is put back. An entry
/// that an earlier one replaced stays in the heap, dead, until its time comes or the dead are many.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
    /// The live entry of each index.
    live: Vec<Option<Instant>>,
}

impl Timers {
    /// Sees to it that `index` comes up at `at` or before.
    pub(crate) fn arm(&mut self, index: u32, at: Instant) {
        let slot = index as usize;
        if slot >= self.live.len() {
            self.live.resize(slot + 1, None);
            // As many as there can be: however the dead pile up, no more room is needed.
            self.heap.reserve(self.limit().saturating_sub(self.heap.len()));
        }
        if self.live[slot].is_some_and(|entry| entry <= at) {
            return;
        }
        self.live[slot] = Some(at);
        if self.heap.len() >= self.limit() {
            let live = &self.live;
            self.heap.retain(|Reverse((at, index))| live[*index as usize] == Some(*at));
        }
        self.heap.push(Reverse((at, index)));
    }

    /// How many entries there are, and may be.
    pub(crate) fn usage(&self) -> (usize, usize) {
        (self.heap.len(), self.limit())
    }

    /// How many entries, live and dead, there are at most.
    fn limit(&self) -> usize {
        4 * self.live.len() + 64
    }

    /// The time of the earliest entry.
    pub(crate) fn next(&mut self) -> Option<Instant> {
        while let Some(&Reverse((at, index))) = self.heap.peek() {
            if self.live[index as usize] == Some(at) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }

    /// The earliest deadline, where `deadline` says what that of an index is by now: an entry that has
    /// become too early is put back, so that nobody wakes up for it.
    pub(crate) fn earliest(
        &mut self,
        deadline: impl Fn(u32) -> Option<Instant>,
    ) -> Option<Instant> {
        loop {
            let at = self.next()?;
            let &Reverse((_, index)) = self.heap.peek()?;
            let now = deadline(index);
            if now.is_some_and(|now| now <= at) {
                return Some(at);
            }
            self.heap.pop();
            self.live[index as usize] = None;
            if let Some(now) = now {
                self.arm(index, now);
            }
        }
    }

    /// Removes and returns the earliest entry that is due.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<u32> {
        if self.next()? > now {
            return None;
        }
        let Reverse((_, index)) = self.heap.pop()?;
        self.live[index as usize] = None;
        Some(index)
    }

    /// `index` does not come up any more.
    pub(crate) fn forget(&mut self, index: u32) {
        if let Some(entry) = self.live.get_mut(index as usize) {
            *entry = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(nanos: u64) -> Instant {
        Instant::from_nanos(nanos)
    }

    #[test]
    fn the_earliest_first_and_each_once() {
        let mut timers = Timers::default();
        timers.arm(1, at(30));
        timers.arm(0, at(20));
        timers.arm(1, at(10));
        timers.arm(0, at(25));
        assert_eq!(timers.next(), Some(at(10)));
        assert_eq!(timers.pop_due(at(9)), None);
        assert_eq!(timers.pop_due(at(100)), Some(1));
        assert_eq!(timers.pop_due(at(100)), Some(0));
        assert_eq!(timers.pop_due(at(100)), None);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn what_is_forgotten_does_not_come_up() {
        let mut timers = Timers::default();
        timers.arm(0, at(10));
        timers.forget(0);
        timers.forget(7);
        assert_eq!(timers.next(), None);
        timers.arm(0, at(20));
        assert_eq!(timers.next(), Some(at(20)));
    }

    #[test]
    fn an_entry_that_has_become_too_early_wakes_nobody() {
        let mut timers = Timers::default();
        timers.arm(0, at(10));
        timers.arm(1, at(20));
        timers.arm(2, at(30));
        let now = |index| [Some(at(40)), None, Some(at(35))][index as usize];
        assert_eq!(timers.earliest(now), Some(at(35)));
        assert_eq!(timers.pop_due(at(34)), None);
        assert_eq!(timers.pop_due(at(40)), Some(2));
        assert_eq!(timers.pop_due(at(40)), Some(0));
        assert_eq!(timers.earliest(now), None);
    }

    /// A queue pair that backs off and recovers by turns, for hours.
    #[test]
    fn moving_deadlines_do_not_pile_up() {
        let mut timers = Timers::default();
        let mut now = 0;
        let mut came_up = 0;
        for _ in 0..100_000 {
            timers.arm(3, at(now + 500_000));
            timers.arm(3, at(now + 4));
            now += 5;
            while timers.pop_due(at(now)).is_some() {
                came_up += 1;
            }
            assert!(timers.heap.len() < 100, "{}", timers.heap.len());
        }
        assert_eq!(came_up, 100_000, "one live entry at a time");
    }

    /// One that is armed for earlier and earlier, before any of it comes up.
    #[test]
    fn entries_that_are_replaced_are_bounded() {
        let mut timers = Timers::default();
        for earlier in 0..100_000 {
            timers.arm(3, at(1_000_000 - earlier));
            let (entries, limit) = timers.usage();
            assert!(entries <= limit && limit < 100, "{entries} of {limit}");
        }
        assert_eq!(timers.next(), Some(at(900_001)));
    }
}
