//! What the queue pairs of an endpoint share.

use crate::budget::ReceiveBudget;
use crate::completion::{Completion, CompletionQueue, CompletionQueueId, CompletionStatus};
use crate::config::EndpointConfig;
use crate::counters::Counters;
use crate::early::EarlyPackets;
use crate::events::{AsyncEvent, Events};
use crate::notifications::Notifications;
use crate::receives::SharedReceiveQueues;

/// What queue pairs share.
#[derive(Debug)]
pub(crate) struct Shared<M> {
    pub(crate) config: EndpointConfig,
    pub(crate) memory: M,
    pub(crate) counters: Counters,
    pub(crate) budget: ReceiveBudget,
    pub(crate) early: EarlyPackets,
    pub(super) completion_queues: Vec<Option<CompletionQueue>>,
    pub(crate) receive_queues: SharedReceiveQueues,
    pub(super) events: Events,
    pub(super) notifications: Notifications,
    /// Some completion queue lost a completion.
    pub(super) overrun: bool,
}

impl<M> Shared<M> {
    pub(crate) fn complete(&mut self, queue: CompletionQueueId, completion: Completion) {
        self.complete_receive(queue, completion, false);
    }

    /// With whether the sender asked for a solicited event.
    pub(crate) fn complete_receive(
        &mut self,
        queue: CompletionQueueId,
        completion: Completion,
        solicited: bool,
    ) {
        let solicits = solicited || completion.status != CompletionStatus::Success;
        self.notifications.completed(queue, solicits);
        let queue_entry = self.completion_queues.get_mut(queue.0 as usize);
        if let Some(Some(entry)) = queue_entry
            && !entry.push(completion, solicited)
        {
            self.overrun = true;
            self.event(AsyncEvent::CompletionQueueOverrun(queue));
        }
    }

    /// Whether a completion queue lost a completion.
    pub(super) fn is_overrun(&self, queue: CompletionQueueId) -> bool {
        let entry = self.completion_queues.get(queue.0 as usize).and_then(Option::as_ref);
        entry.is_some_and(CompletionQueue::is_overrun)
    }

    /// Completions that wait, and the room for them.
    pub(crate) fn completion_usage(&self) -> (usize, usize) {
        let queues = || self.completion_queues.iter().flatten();
        (queues().map(CompletionQueue::len).sum(), queues().map(CompletionQueue::capacity).sum())
    }

    pub(crate) fn event(&mut self, event: AsyncEvent) {
        self.notifications.events = true;
        if !self.events.push(event) {
            self.counters.events_lost += 1;
        }
    }
}
