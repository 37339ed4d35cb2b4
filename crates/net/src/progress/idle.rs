//! The time in which a thread that makes progress finds nothing to do.

use std::hint;
use std::time::Instant;

use crate::{BusyPoll, Wait};

/// Begins with the first round in which there was nothing to do.
#[derive(Default)]
pub(super) struct Idle(Option<Wait>);

impl Idle {
    pub(super) const fn has_begun(&self) -> bool {
        self.0.is_some()
    }

    /// Whether to look for work again. If not, the thread is to sleep.
    pub(super) fn looks(&mut self, busy_poll: &BusyPoll) -> bool {
        let wait = self.0.get_or_insert_with(|| busy_poll.begin(false, []));
        let looks = busy_poll.looks(wait);
        if looks {
            hint::spin_loop();
        }
        looks
    }

    /// It ends, if it has begun, as there is something to do: something that has come, unless somebody else
    /// waits for that now.
    pub(super) fn end(self, busy_poll: &mut BusyPoll, came: bool) {
        if let Some(wait) = self.0 {
            busy_poll.end(&wait, Instant::now(), came);
        }
    }
}
