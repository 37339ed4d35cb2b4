//! What an endpoint tells without being asked (IBTA 11.6.3).

use std::collections::VecDeque;

use millstream_wire::Qpn;

use crate::{CompletionQueueId, SharedReceiveQueueId};

/// Something that happened without being asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AsyncEvent {
    /// A packet of the peer arrived at a queue pair in RTR: the peer is ready, whatever became of
    /// the message that should have said so.
    CommunicationEstablished(Qpn),
    /// In SQD, the last request that was begun is done: attributes can be changed, and the queue
    /// pair can go back to RTS.
    SendQueueDrained(Qpn),
    /// A queue pair failed for another reason than the next two: by a request of its own, whose
    /// completion says why, by a receive request that did not fit, or with its completion queue.
    QueuePairFatal(Qpn),
    /// A queue pair failed because its peer sent a request that breaks the protocol, or that is not
    /// supported. No completion says so.
    QueuePairRequestError(Qpn),
    /// A queue pair failed because its peer asked for memory that it may not use. No completion
    /// says so.
    QueuePairAccessError(Qpn),
    /// A completion was lost because the queue was full: queue pairs that complete into it fail.
    CompletionQueueOverrun(CompletionQueueId),
    /// A queue pair of a shared receive queue is in the error state and takes nothing from the
    /// queue any more: it can be destroyed, and no request goes with it.
    LastReceiveRequest(Qpn),
    /// A shared receive queue holds fewer requests than the limit that was set. Set it again to
    /// hear of it again.
    SharedReceiveLimit(SharedReceiveQueueId),
    /// The device no longer works, and all its queue pairs have failed.
    DeviceFatal,
}

impl AsyncEvent {
    /// The queue pair whose failure it reports, if it does. A failure makes one such event, and one
    /// that the application itself asked for makes none.
    pub const fn failed_queue_pair(&self) -> Option<Qpn> {
        match *self {
            Self::QueuePairFatal(qpn)
            | Self::QueuePairRequestError(qpn)
            | Self::QueuePairAccessError(qpn) => Some(qpn),
            _ => None,
        }
    }
}

/// Events kept for an application that does not ask for them.
pub(crate) const LIMIT: usize = 1024;

/// Events in order, bounded.
#[derive(Debug, Default)]
pub(crate) struct Events {
    queue: VecDeque<AsyncEvent>,
}

impl Events {
    /// Adds an event; `false` when it is lost for want of room. The end of the device, of which
    /// there is one, has room always.
    pub(crate) fn push(&mut self, event: AsyncEvent) -> bool {
        let room = self.queue.len() < LIMIT || event == AsyncEvent::DeviceFatal;
        if room {
            self.queue.push_back(event);
        }
        room
    }

    pub(crate) fn pop(&mut self) -> Option<AsyncEvent> {
        self.queue.pop_front()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_kept_and_the_rest_is_known_to_be_lost() {
        let mut events = Events::default();
        let event = |number| AsyncEvent::QueuePairFatal(Qpn::new(number));
        let kept = (0..2000).filter(|&number| events.push(event(number))).count();
        assert_eq!((kept, events.len()), (LIMIT, LIMIT));
        assert!(events.push(AsyncEvent::DeviceFatal), "there is none after it");
        assert_eq!(events.pop(), Some(event(0)));
        assert_eq!(std::iter::from_fn(|| events.pop()).last(), Some(AsyncEvent::DeviceFatal));
    }
}
