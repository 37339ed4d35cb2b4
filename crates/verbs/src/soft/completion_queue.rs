//! Completion queues of soft devices: polled, waited for, or handled as completions come.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millstream_roce::{Completion, CompletionQueueId, CreateError, Endpoint};

use super::device::Device;
use super::host_memory::HostMemory;
use super::waiters::Waiters;
use crate::CompletionHandler;

/// A completion queue.
pub(crate) struct CompletionQueue {
    device: Arc<Device>,
    notice: Arc<Notice>,
}

/// What the progress thread needs of a queue.
pub(super) struct Notice {
    pub(super) id: CompletionQueueId,
    /// The queue is no more, and its number may be another's. Set and read with the endpoint locked.
    gone: AtomicBool,
    waiters: Waiters,
    solicited_waiters: Waiters,
    handler: Option<Mutex<CompletionHandler>>,
}

impl CompletionQueue {
    pub(crate) fn create(
        device: &Arc<Device>,
        capacity: usize,
        handler: Option<CompletionHandler>,
    ) -> Result<Self, CreateError> {
        let mut endpoint = device.lock().ok_or(CreateError::DeviceFailed)?;
        let id = endpoint.create_completion_queue(capacity)?;
        endpoint.release_without_waking();
        let notice = Arc::new(Notice {
            id,
            gone: AtomicBool::new(false),
            waiters: Waiters::default(),
            solicited_waiters: Waiters::default(),
            handler: handler.map(Mutex::new),
        });
        device.notices().push(Arc::clone(&notice));
        Ok(Self { device: Arc::clone(device), notice })
    }

    pub(crate) fn poll(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        if self.notice.handler.is_some() {
            return 0;
        }
        // Taking completions leaves nothing to send.
        let mut endpoint = self.device.lock_regardless();
        let count = endpoint.poll_completions(self.id(), out, limit);
        endpoint.release_without_waking();
        count
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
        if self.notice.handler.is_some() {
            return false;
        }
        let look = || {
            let endpoint = self.device.lock_regardless();
            let found = some(&endpoint, self.id());
            endpoint.release_without_waking();
            found.then_some(())
        };
        let over = || self.device.failure().is_some();
        waiters.wait(timeout, look, over).is_some()
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
        self.device.notices().retain(|notice| !Arc::ptr_eq(notice, &self.notice));
        let mut endpoint = self.device.lock_regardless();
        self.notice.gone.store(true, Ordering::Relaxed);
        // No queue pair is left that uses it: they hold clones of the handle.
        let _ = endpoint.destroy_completion_queue(self.notice.id);
    }
}

impl Notice {
    pub(super) fn has_handler(&self) -> bool {
        self.handler.is_some()
    }

    /// Whether the queue is no more. To be asked with the endpoint locked.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Wakes who waits for this queue, and who waits for something solicited if that is there.
    pub(super) fn wake(&self, solicited: bool) {
        self.waiters.wake();
        if solicited {
            self.solicited_waiters.wake();
        }
    }

    /// Runs the handler, if there is one.
    pub(super) fn handle(&self, completions: &[Completion]) {
        if let Some(handler) = &self.handler {
            handler.lock().unwrap_or_else(PoisonError::into_inner)(completions);
        }
    }
}
