//! Who should hear of what has happened.

use crate::completion::CompletionQueueId;

/// What has happened since somebody asked ([`crate::Endpoint::take_notifications`]). Completion queues
/// have a bit each, or share it: 31 bits are enough for most, and who looks for nothing loses little.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Notifications {
    /// Queues that have got completions: the bits of [`Notifications::bit`].
    pub queues: u32,
    /// The same of completions that were solicited, or are of a failure.
    pub solicited: u32,
    /// There are events.
    pub events: bool,
}

impl Notifications {
    /// The bit of a queue: one of the lower 31.
    pub const fn bit(queue: CompletionQueueId) -> u32 {
        1 << (queue.0 % 31)
    }

    pub(crate) const fn completed(&mut self, queue: CompletionQueueId, solicited: bool) {
        let bit = Self::bit(queue);
        self.queues |= bit;
        if solicited {
            self.solicited |= bit;
        }
    }
}
