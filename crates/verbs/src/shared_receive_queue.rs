//! Receive queues that several queue pairs share.

use std::sync::Arc;

use millstream_roce::{CreateError, Piece, PostError, ReceiveRequest, SharedReceiveQueueId};

use crate::provider::{Provided, either};
use crate::{ibverbs, soft};

/// A receive queue that several queue pairs take from. Clones are handles to the same queue, and so
/// are its queue pairs. Requests that are still in it when it goes end without completions.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue {
    pub(crate) queue: Provided<Arc<soft::SharedReceiveQueue>, Arc<ibverbs::SharedReceiveQueue>>,
}

impl SharedReceiveQueue {
    /// What events call it.
    pub fn id(&self) -> SharedReceiveQueueId {
        either!(&self.queue, queue => queue.id())
    }

    /// Appends requests, in order. On error, the number that were accepted before the one that was
    /// not.
    pub fn post_receive<P: AsRef<[Piece]>>(
        &self,
        requests: &[ReceiveRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        either!(&self.queue, queue => queue.post_receive(requests))
    }

    /// Asks for one [`crate::AsyncEvent::SharedReceiveLimit`], when a queue pair takes a request
    /// and fewer than `limit` are left. 0 asks for none.
    pub fn set_limit(&self, limit: usize) -> Result<(), CreateError> {
        either!(&self.queue, queue => queue.set_limit(limit))
    }
}
