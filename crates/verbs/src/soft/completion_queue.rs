//! Completion queues of soft devices: polled, waited for, or handled as completions come.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use millstream_net::Waiters;
use millstream_roce::{Completion, CompletionQueueId, CreateError, Endpoint};

use super::deliverer::{HandlerThreads, Notice};
use super::device::Device;
use super::host_memory::HostMemory;
use super::shards::Shard;
use crate::CompletionHandler;

/// A completion queue. It has a part in each shard of its device, which holds as many completions as
/// were asked for, as all of them may be of one shard.
pub(crate) struct CompletionQueue {
    device: Arc<Device>,
    notice: Arc<Notice>,
    /// How often queue pairs of each shard name it.
    users: Box<[AtomicUsize]>,
}

impl CompletionQueue {
    pub(crate) fn create(
        device: &Arc<Device>,
        capacity: usize,
        handler: Option<(CompletionHandler, HandlerThreads)>,
    ) -> Result<Self, CreateError> {
        let shards = device.shards();
        shards.check()?;
        let id = shards.make(|_, endpoint| endpoint.create_completion_queue(capacity))?;
        let notice = Arc::new(Notice::new(id, handler));
        device.notices().add(Arc::clone(&notice));
        let users = shards.all().iter().map(|_| AtomicUsize::new(0)).collect();
        Ok(Self { device: Arc::clone(device), notice, users })
    }

    pub(crate) fn poll(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        if self.notice.has_handler() {
            return 0;
        }
        // Taking completions leaves nothing to send.
        let poll = |out: &mut Vec<Completion>| self.notice.poll(self.device.shards(), out, limit);
        match poll(out) {
            0 if limit > 0 => {
                self.device.progress(|shard| self.concerns(shard));
                poll(out)
            }
            count => count,
        }
    }

    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let some = |endpoint: &Endpoint<_>, id| endpoint.completions_waiting(id) > 0;
        self.wait_for(timeout, &self.notice.waiters, some)
    }

    pub(crate) fn wait_solicited(&self, timeout: Duration) -> bool {
        let some = |endpoint: &Endpoint<_>, id| endpoint.solicited_waiting(id);
        self.wait_for(timeout, &self.notice.solicited_waiters, some)
    }

    fn wait_for(
        &self,
        timeout: Duration,
        waiters: &Waiters,
        some: impl Fn(&Endpoint<HostMemory>, CompletionQueueId) -> bool,
    ) -> bool {
        if self.notice.has_handler() {
            return false;
        }
        let shards = self.device.shards().all();
        let some = |shard: &Arc<Shard>| some(&shard.lock_regardless(), self.id());
        let look = || shards.iter().any(some).then_some(());
        self.device.wait(|shard| self.concerns(shard), waiters, timeout, look).is_some()
    }

    /// Whether something of this shard may complete into it: others make their progress without who
    /// waits for this queue.
    fn concerns(&self, shard: usize) -> bool {
        self.users.len() == 1 || self.users[shard].load(Ordering::Relaxed) > 0
    }

    /// A queue pair of this shard completes into it.
    pub(super) fn enter(&self, shard: usize) {
        self.users[shard].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn leave(&self, shard: usize) {
        self.users[shard].fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn id(&self) -> CompletionQueueId {
        self.notice.id
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionQueue").field(&self.id()).finish()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.device.notices().remove(&self.notice);
        self.device.shards().remove(|endpoint| {
            self.notice.set_gone();
            // No queue pair is left that uses it: they hold clones of the handle.
            let _ = endpoint.destroy_completion_queue(self.notice.id);
        });
    }
}
