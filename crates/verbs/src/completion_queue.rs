//! Completion queues: polled, waited for, or handled as completions come.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use millstream_roce::{Completion, CompletionQueueId, CreateError};

use crate::device::SoftDevice;

/// Called on the device's progress thread with completions, in order, with no lock held: it may
/// post more work. It should be quick: the device stands still meanwhile.
pub type CompletionHandler = Box<dyn FnMut(&[Completion]) + Send>;

/// A completion queue. Clones are handles to the same queue.
#[derive(Clone)]
pub struct CompletionQueue {
    queue: Arc<Queue>,
}

struct Queue {
    device: Arc<SoftDevice>,
    notice: Arc<Notice>,
}

/// What the progress thread needs of a queue.
pub(crate) struct Notice {
    pub(crate) id: CompletionQueueId,
    waiters: AtomicUsize,
    lock: Mutex<()>,
    arrived: Condvar,
    handler: Option<Mutex<CompletionHandler>>,
}

impl CompletionQueue {
    pub(crate) fn create(
        device: &Arc<SoftDevice>,
        capacity: usize,
        handler: Option<CompletionHandler>,
    ) -> Result<Self, CreateError> {
        let mut endpoint = device.lock().ok_or(CreateError::DeviceFailed)?;
        let id = endpoint.create_completion_queue(capacity)?;
        endpoint.release_without_waking();
        let notice = Arc::new(Notice {
            id,
            waiters: AtomicUsize::new(0),
            lock: Mutex::new(()),
            arrived: Condvar::new(),
            handler: handler.map(Mutex::new),
        });
        device.notices().push(Arc::clone(&notice));
        Ok(Self { queue: Arc::new(Queue { device: Arc::clone(device), notice }) })
    }

    /// Moves up to `limit` completions to the end of `out`; returns how many. Always 0 for a queue
    /// with a handler.
    pub fn poll(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        if self.queue.notice.handler.is_some() {
            return 0;
        }
        // Taking completions leaves nothing to send.
        let mut endpoint = self.queue.device.lock_regardless();
        let count = endpoint.poll_completions(self.id(), out, limit);
        endpoint.release_without_waking();
        count
    }

    /// Waits until there is a completion to poll, at most `timeout`; returns whether there is one.
    /// Returns `false` at once when the device has failed, see [`crate::Device::failure`].
    pub fn wait(&self, timeout: Duration) -> bool {
        let Queue { device, notice } = &*self.queue;
        let deadline = Instant::now() + timeout;
        let mut guard = notice.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Counted before the first look: whoever adds a completion after that look sees us.
        notice.waiters.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            let endpoint = device.lock_regardless();
            let waiting = endpoint.completions_waiting(notice.id);
            endpoint.release_without_waking();
            if waiting > 0 {
                break true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || device.failure().is_some() {
                break false;
            }
            let waited = notice.arrived.wait_timeout(guard, left);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        notice.waiters.fetch_sub(1, Ordering::SeqCst);
        found
    }

    pub(crate) fn id(&self) -> CompletionQueueId {
        self.queue.notice.id
    }

    pub(crate) fn device(&self) -> &Arc<SoftDevice> {
        &self.queue.device
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionQueue").field(&self.id()).finish()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.device.notices().retain(|notice| !Arc::ptr_eq(notice, &self.notice));
        // No queue pair is left that uses it: they hold clones of the handle.
        let _ = self.device.lock_regardless().destroy_completion_queue(self.notice.id);
    }
}

impl Notice {
    pub(crate) fn has_handler(&self) -> bool {
        self.handler.is_some()
    }

    /// Wakes who waits for this queue.
    pub(crate) fn wake(&self) {
        if self.waiters.load(Ordering::SeqCst) > 0 {
            // Taking the lock makes sure that a waiter that has looked is waiting by now.
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.arrived.notify_all();
        }
    }

    /// Runs the handler, if there is one.
    pub(crate) fn handle(&self, completions: &[Completion]) {
        if let Some(handler) = &self.handler {
            handler.lock().unwrap_or_else(PoisonError::into_inner)(completions);
        }
    }
}
