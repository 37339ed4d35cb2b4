//! Completion queues of soft devices: polled, waited for, or handled as completions come.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use millstream_net::Waiters;
use millstream_roce::{Completion, CompletionQueueId, CreateError, Endpoint};

use super::deliverer::{HandlerThreads, Notice};
use super::device::Device;
use super::host_memory::HostMemory;
use crate::CompletionHandler;

/// A completion queue.
pub(crate) struct CompletionQueue {
    device: Arc<Device>,
    notice: Arc<Notice>,
}

impl CompletionQueue {
    pub(crate) fn create(
        device: &Arc<Device>,
        capacity: usize,
        handler: Option<(CompletionHandler, HandlerThreads)>,
    ) -> Result<Self, CreateError> {
        let mut endpoint = device.lock().ok_or(CreateError::DeviceFailed)?;
        let id = endpoint.create_completion_queue(capacity)?;
        endpoint.release_without_waking();
        let notice = Arc::new(Notice::new(id, handler));
        device.notices().add(Arc::clone(&notice));
        Ok(Self { device: Arc::clone(device), notice })
    }

    pub(crate) fn poll(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        if self.notice.has_handler() {
            return 0;
        }
        // Taking completions leaves nothing to send.
        let poll = |out: &mut Vec<Completion>| {
            self.device.lock_regardless().poll_completions(self.id(), out, limit)
        };
        match poll(out) {
            0 if limit > 0 => {
                self.device.shared().progress();
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
        let look = || some(&self.device.lock_regardless(), self.id()).then_some(());
        self.device.wait(waiters, timeout, look).is_some()
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
        let mut endpoint = self.device.lock_regardless();
        self.notice.set_gone();
        // No queue pair is left that uses it: they hold clones of the handle.
        let _ = endpoint.destroy_completion_queue(self.notice.id);
    }
}
