//! Pairs of locations of a flow, which has a queue for each of them, and a bound on these.

use crate::transport::ANYWHERE;

/// A location here and one of the peer, as policies number them.
pub(super) type Pair = (u16, u16);

/// The pairs that have a queue of their own. All others share one.
#[derive(Debug)]
pub(super) struct Pairs {
    known: Vec<Pair>,
    limit: usize,
}

impl Pairs {
    /// For a flow that has this many queues at most.
    pub(super) const fn new(queues: usize) -> Self {
        // One is for all others.
        Self { known: Vec::new(), limit: queues.saturating_sub(1) }
    }

    /// The pair by whose queue requests between these locations go.
    pub(super) fn queue_of(&mut self, pair: Pair) -> Pair {
        if self.known.contains(&pair) {
            return pair;
        }
        if self.known.len() < self.limit && pair != (ANYWHERE, ANYWHERE) {
            self.known.push(pair);
            return pair;
        }
        // Another device may be nearer, but every one leads there.
        (ANYWHERE, ANYWHERE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_beyond_the_limit_share_a_queue() {
        let mut pairs = Pairs::new(3);
        let anywhere = (ANYWHERE, ANYWHERE);
        for (pair, queue) in [
            (anywhere, anywhere),
            ((0, 0), (0, 0)),
            ((0, 1), (0, 1)),
            ((1, 0), anywhere),
            ((0, 0), (0, 0)),
            ((ANYWHERE, 0), anywhere),
            ((0, 1), (0, 1)),
        ] {
            assert_eq!(pairs.queue_of(pair), queue, "{pair:?}");
        }
    }
}
