//! The requests of a queue pair for data: READs and atomic operations that are under way.

use std::collections::VecDeque;

use crate::budget::cost;

/// A request packet whose answers have not all come.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    /// One past the last of its numbers.
    end: u64,
    /// How many of them have not been answered.
    left: u64,
    /// What these take of the receive budget.
    charge: u64,
}

/// The requests under way, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Fetches {
    queue: VecDeque<Fetch>,
    /// Answers that have not come.
    left: u64,
}

impl Fetches {
    /// How many requests there are.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// How many packets are to come.
    pub(crate) fn packets(&self) -> u64 {
        self.left
    }

    /// `packets` up to `end` were asked for.
    pub(crate) fn begin(&mut self, end: u64, packets: u64, charge: u64) {
        self.queue.push_back(Fetch { end, left: packets, charge });
        self.left += packets;
    }

    /// The packet with this number came, with so many bytes: returns what it gives back to the
    /// budget.
    pub(crate) fn arrived(&mut self, psn: u64, bytes: u64) -> u64 {
        let Some(oldest) = self.queue.front_mut() else { return 0 };
        if oldest.left == 0 || psn + oldest.left < oldest.end {
            return 0;
        }
        oldest.left -= 1;
        self.left -= 1;
        let freed = cost(bytes, 1).min(oldest.charge);
        oldest.charge -= freed;
        freed
    }

    /// All before `psn` was answered: returns what that gives back.
    pub(crate) fn forget_before(&mut self, psn: u64) -> u64 {
        let mut freed = 0;
        while let Some(oldest) = self.queue.pop_front_if(|oldest| oldest.end <= psn) {
            freed += self.removed(oldest);
        }
        freed
    }

    /// What reaches beyond `psn` will be asked for again: returns what that gives back.
    pub(crate) fn forget_from(&mut self, psn: u64) -> u64 {
        let mut freed = 0;
        while let Some(newest) = self.queue.pop_back_if(|newest| newest.end > psn) {
            freed += self.removed(newest);
        }
        freed
    }

    fn removed(&mut self, fetch: Fetch) -> u64 {
        self.left -= fetch.left;
        fetch.charge
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_and_what_is_given_up_is_given_back_once() {
        let mut fetches = Fetches::default();
        fetches.begin(10, 4, cost(3500, 4));
        fetches.begin(12, 2, cost(2000, 2));
        assert_eq!((fetches.len(), fetches.packets()), (2, 6));
        assert_eq!(fetches.arrived(5, 1000), 0, "nobody asked for it");
        for psn in 6..9 {
            assert_eq!(fetches.arrived(psn, 1000), cost(1000, 1));
        }
        assert_eq!(fetches.arrived(9, 500), cost(500, 1));
        assert_eq!(fetches.forget_before(10), 0);
        assert_eq!(fetches.arrived(10, 1000), cost(1000, 1));
        // The rest of a request in the middle.
        assert_eq!(fetches.forget_from(11), cost(1000, 1));
        assert_eq!((fetches.len(), fetches.packets()), (0, 0));
        assert_eq!(fetches.arrived(11, 1000), 0);
    }

    #[test]
    fn what_was_not_charged_is_not_given_back() {
        let mut fetches = Fetches::default();
        fetches.begin(10, 2, 0);
        assert_eq!(fetches.arrived(8, 4096), 0);
        assert_eq!(fetches.forget_from(0), 0);
        assert_eq!(fetches.packets(), 0);
    }
}
