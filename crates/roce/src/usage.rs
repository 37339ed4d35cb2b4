//! What an endpoint keeps, and how much that can be: whatever a peer or a user does, the one stays
//! within the other.

use crate::endpoint::Endpoint;
use crate::memory::Memory;
use crate::{early, events};

/// How many of each an endpoint keeps, or may keep.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Usage {
    /// Send requests that are not complete.
    pub send_requests: usize,
    /// READs and atomic operations of ours that are under way.
    pub fetches: usize,
    /// Receive requests of queue pairs, and those of messages that are arriving.
    pub receive_requests: usize,
    /// Packets that came before their turn.
    pub early_packets: usize,
    /// Receive requests in shared queues.
    pub shared_receive_requests: usize,
    /// Answers that are not sent.
    pub answers: usize,
    /// READs and atomic operations of peers that they may ask for again.
    pub repeatable: usize,
    /// Completions that nobody has polled.
    pub completions: usize,
    /// Events that nobody has asked for.
    pub events: usize,
    /// Entries in the list of deadlines.
    pub deadlines: usize,
}

impl Usage {
    /// Whether nothing is more than it is in `limits`.
    pub fn is_within(&self, limits: &Self) -> bool {
        self.counts().into_iter().zip(limits.counts()).all(|(count, limit)| count <= limit)
    }

    fn counts(&self) -> [usize; 10] {
        [
            self.send_requests,
            self.fetches,
            self.receive_requests,
            self.early_packets,
            self.shared_receive_requests,
            self.answers,
            self.repeatable,
            self.completions,
            self.events,
            self.deadlines,
        ]
    }
}

impl<M: Memory> Endpoint<M> {
    /// What it keeps now.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage {
            early_packets: self.shared.early.len(),
            shared_receive_requests: self.shared.receive_queues.usage().0,
            completions: self.shared.completion_usage().0,
            events: self.events_waiting(),
            deadlines: self.timers.usage().0,
            ..Usage::default()
        };
        for pair in self.queue_pairs() {
            let (send_requests, fetches) = pair.requester.usage();
            let datagrams = pair.datagrams.as_ref().map_or(0, |datagrams| datagrams.usage());
            let (answers, repeatable) = pair.responder.replies.usage();
            usage.send_requests += send_requests + datagrams;
            usage.fetches += fetches;
            usage.receive_requests += pair.responder.receives.usage().0;
            usage.answers += answers;
            usage.repeatable += repeatable;
        }
        usage
    }

    /// How much it may keep, as long as it has these queues, and these queue pairs with their
    /// present attributes.
    pub fn limits(&self) -> Usage {
        let mut limits = Usage {
            early_packets: early::ROOM,
            shared_receive_requests: self.shared.receive_queues.usage().1,
            completions: self.shared.completion_usage().1,
            // The end of the device has room always.
            events: events::LIMIT + 1,
            deadlines: self.timers.usage().1,
            ..Usage::default()
        };
        for pair in self.queue_pairs() {
            let (answers, repeatable) = pair.responder.replies.limits();
            limits.send_requests += pair.capabilities.max_send_requests;
            limits.fetches += pair.requester.initiator_depth;
            limits.receive_requests += pair.responder.receives.usage().1;
            limits.answers += answers;
            limits.repeatable += repeatable;
        }
        limits
    }
}
