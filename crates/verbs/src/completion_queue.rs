//! Completion queues: polled, waited for, or handled as completions come.

use std::sync::Arc;
use std::time::Duration;

use millstream_roce::Completion;

use crate::provider::{Provided, either};
use crate::{ibverbs, soft};

/// Called on the device's own thread with completions, in order, with no lock held: it may post
/// more work. It should be quick: the device's other queues wait meanwhile.
pub type CompletionHandler = Box<dyn FnMut(&[Completion]) + Send>;

/// A completion queue. Clones are handles to the same queue.
#[derive(Clone, Debug)]
pub struct CompletionQueue {
    pub(crate) queue: Provided<Arc<soft::CompletionQueue>, Arc<ibverbs::CompletionQueue>>,
}

impl CompletionQueue {
    /// Moves up to `limit` completions to the end of `out`; returns how many. Always 0 for a queue
    /// with a handler.
    pub fn poll(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        either!(&self.queue, queue => queue.poll(out, limit))
    }

    /// Waits until there is a completion to poll, at most `timeout`; returns whether there is one.
    /// Returns `false` at once when the device has failed, see [`crate::Device::failure`], and for a
    /// queue with a handler.
    pub fn wait(&self, timeout: Duration) -> bool {
        either!(&self.queue, queue => queue.wait(timeout))
    }

    /// As [`CompletionQueue::wait`], but sleeps on while nothing comes that somebody should be woken
    /// for: receives whose sender asked for a solicited event, and requests that failed.
    ///
    /// Take all completions before, and take `true` as a reason to look, no more. Soft devices return
    /// it only when such a completion waits. A device of the system says of no completion whether it
    /// was solicited; it only wakes for those that come after it was asked to. So there `true` is
    /// returned at once when any completion waits, and also when an unsolicited one comes just as the
    /// device is asked, or while another thread is in [`CompletionQueue::wait`] for the same queue.
    pub fn wait_solicited(&self, timeout: Duration) -> bool {
        either!(&self.queue, queue => queue.wait_solicited(timeout))
    }

    pub(crate) fn id(&self) -> millstream_roce::CompletionQueueId {
        either!(&self.queue, queue => queue.id())
    }
}
