//! What time brings about.

use super::Flow;
use crate::{Instant, Policy};

impl<P: Policy> Flow<P> {
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
        let since = *queue.stranded_since.get_or_insert(now);
        self.note_timer(since + self.config.patience);
    }
}
