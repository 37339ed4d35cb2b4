//! Deadlines of many queue pairs in one heap.

use core::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Instant;

/// The earliest deadlines of queue pairs, by index.
///
/// Deadlines move with every acknowledgement; entries do not. A queue pair keeps the true deadline
/// and at most a few entries here, none later than it; an entry that comes up early is put back.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
}

impl Timers {
    /// Adds an entry.
    pub(crate) fn push(&mut self, at: Instant, index: u32) {
        self.heap.push(Reverse((at, index)));
    }

    /// The earliest entry's time.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Removes and returns the earliest entry that is due.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<u32> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, index))| index)
    }
}
