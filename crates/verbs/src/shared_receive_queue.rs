//! Receive queues that several queue pairs share.

use std::convert::Infallible;
use std::sync::Arc;

use millstream_roce::{CreateError, PostError, ReceiveRequest, SharedReceiveQueueId};

use crate::provider::Provided;
use crate::soft;

/// A receive queue that several queue pairs take from. Clones are handles to the same queue, and so
/// are its queue pairs. Requests that are still in it when it goes end without completions.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue {
    /// The provider `ibverbs` makes none.
    pub(crate) queue: Provided<Arc<soft::SharedReceiveQueue>, Infallible>,
}

impl SharedReceiveQueue {
    /// What events call it.
    pub fn id(&self) -> SharedReceiveQueueId {
        self.soft().id()
    }

    /// Appends requests, in order. On error, the number that were accepted before the one that was
    /// not.
    pub fn post_receive(&self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        self.soft().post_receive(requests)
    }

    /// Asks for one [`crate::AsyncEvent::SharedReceiveLimit`], when a queue pair takes a request
    /// and fewer than `limit` are left. 0 asks for none.
    pub fn set_limit(&self, limit: usize) -> Result<(), CreateError> {
        self.soft().set_limit(limit)
    }

    pub(crate) fn soft(&self) -> &Arc<soft::SharedReceiveQueue> {
        match &self.queue {
            Provided::Soft(queue) => queue,
            Provided::Ibverbs(never) => match *never {},
        }
    }
}
