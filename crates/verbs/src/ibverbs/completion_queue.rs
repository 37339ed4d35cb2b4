//! Completion queues of the system's devices.

use std::collections::VecDeque;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use millstream_roce::{
    Completion, CompletionOperation, CompletionQueueId, CompletionStatus, CreateError,
};

use super::device::Device;
use super::work::{self, Owner, Owners, Posted};
use super::{ffi, lock, objects};
use crate::CompletionHandler;

/// Completions handed to a handler at a time.
pub(super) const HANDLER_BATCH: usize = 256;

/// Completions taken from the device at a time.
const BATCH: usize = 32;

/// A completion queue.
///
/// The library cannot say whether a queue has something without taking it. So what was taken to
/// know that waits in `inbox`, and comes first when the queue is polled.
pub(crate) struct CompletionQueue {
    device: Arc<Device>,
    number: u32,
    inbox: Mutex<Inbox>,
    /// How often the device has announced completions, or that it failed.
    announcements: Mutex<u64>,
    announced: Condvar,
    handler: Option<Mutex<CompletionHandler>>,
    queue: Arc<objects::CompletionQueue>,
}

struct Inbox {
    taken: VecDeque<Completion>,
    owners: Owners,
}

impl CompletionQueue {
    pub(crate) fn create(
        device: &Arc<Device>,
        capacity: usize,
        handler: Option<CompletionHandler>,
    ) -> Result<Arc<Self>, CreateError> {
        if device.failed() {
            return Err(CreateError::DeviceFailed);
        }
        let limit = device.max_completions();
        if capacity == 0 || capacity > limit {
            let what = "completion queue capacity";
            return Err(CreateError::OutOfRange { what, value: capacity, limit });
        }
        let number = device.registry().reserve();
        // The limit is one of the library's, and fits.
        let queue = objects::CompletionQueue::create(device.channel(), capacity as i32, number)
            .map_err(|code| {
                device.registry().release(number);
                CreateError::System { call: "ibv_create_cq", code }
            })?;
        let queue = Arc::new(Self {
            device: Arc::clone(device),
            number,
            inbox: Mutex::new(Inbox {
                taken: VecDeque::with_capacity(BATCH),
                owners: Owners::default(),
            }),
            announcements: Mutex::new(0),
            announced: Condvar::new(),
            handler: handler.map(Mutex::new),
            queue: Arc::new(queue),
        });
        device.registry().enter(number, &queue);
        if queue.handler.is_some() {
            queue.request_announcement();
        }
        Ok(queue)
    }

    pub(crate) fn id(&self) -> CompletionQueueId {
        CompletionQueueId(self.number)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn object(&self) -> &Arc<objects::CompletionQueue> {
        &self.queue
    }

    pub(crate) fn poll(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        if self.handler.is_some() { 0 } else { self.take(out, limit) }
    }

    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        // A time that a clock cannot tell is never reached.
        let deadline = Instant::now().checked_add(timeout);
        let left = || match deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => Duration::MAX,
        };
        loop {
            if self.fill() {
                return true;
            }
            if self.device.failed() || left().is_zero() {
                return false;
            }
            let seen = *lock(&self.announcements);
            self.request_announcement();
            // An announcement is of what comes after it was asked for: look once more.
            if self.fill() {
                return true;
            }
            let mut announcements = lock(&self.announcements);
            while *announcements == seen {
                let left = left();
                if left.is_zero() {
                    return false;
                }
                let waited = self.announced.wait_timeout(announcements, left);
                announcements = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Wakes who waits.
    pub(super) fn announce(&self) {
        *lock(&self.announcements) += 1;
        self.announced.notify_all();
    }

    /// Runs the handler once, if there is one and it has something to do; returns whether there may
    /// be more. `completions` is scratch.
    pub(super) fn handle(&self, completions: &mut Vec<Completion>) -> bool {
        let Some(handler) = &self.handler else { return false };
        // Asked for before the look, so that what comes after the look is announced.
        self.request_announcement();
        completions.clear();
        let count = self.take(completions, HANDLER_BATCH);
        if count > 0 {
            lock(handler)(completions);
        }
        count == HANDLER_BATCH
    }

    /// Takes what there is, so that it outlives the queue pair that it is of.
    pub(super) fn settle(&self) {
        let mut inbox = lock(&self.inbox);
        let Inbox { taken, owners } = &mut *inbox;
        while self.collect(owners, BATCH, |completion| taken.push_back(completion)) == BATCH {}
    }

    /// Expects completions of this queue from now on; they name it by the key returned.
    pub(super) fn add_owner(&self, owner: Owner) -> Option<u32> {
        lock(&self.inbox).owners.insert(owner)
    }

    /// Completions by this key are dropped from now on.
    pub(super) fn remove_owner(&self, key: u32) {
        lock(&self.inbox).owners.remove(key);
    }

    fn request_announcement(&self) {
        if let Err(code) = self.queue.request_notification() {
            self.device.registry().fail_by("ibv_req_notify_cq", code);
        }
    }

    /// Moves up to `limit` completions to the end of `out`; returns how many.
    fn take(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        let start = out.len();
        let mut inbox = lock(&self.inbox);
        let Inbox { taken, owners } = &mut *inbox;
        out.extend(taken.drain(..limit.min(taken.len())));
        while out.len() - start < limit {
            let wanted = BATCH.min(limit - (out.len() - start));
            if self.collect(owners, wanted, |completion| out.push(completion)) < wanted {
                break;
            }
        }
        if out.len() - start < limit && self.device.failed() {
            flush(owners, taken);
            out.extend(taken.drain(..(limit - (out.len() - start)).min(taken.len())));
        }
        out.len() - start
    }

    /// Whether there is something to poll.
    fn fill(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        let Inbox { taken, owners } = &mut *inbox;
        while taken.is_empty() {
            if self.collect(owners, BATCH, |completion| taken.push_back(completion)) < BATCH {
                break;
            }
        }
        if taken.is_empty() && self.device.failed() {
            flush(owners, taken);
        }
        !taken.is_empty()
    }

    /// Takes up to `limit` completions from the device and gives those of queues that are known
    /// to `sink`; returns how many were taken.
    fn collect(&self, owners: &Owners, limit: usize, mut sink: impl FnMut(Completion)) -> usize {
        let mut batch = [MaybeUninit::uninit(); BATCH];
        match self.queue.poll(&mut batch[..limit]) {
            Ok(entries) => {
                for entry in entries {
                    let (key, sequence) = work::parts(entry.wr_id);
                    let Some(owner) = owners.get(key) else { continue };
                    let Some(posted) = owner.queue().complete(sequence) else { continue };
                    let completion = completion(owner, &posted, entry);
                    if completion.status != CompletionStatus::Success {
                        self.device.registry().pair_failed(&owner.work);
                    }
                    sink(completion);
                }
                entries.len()
            }
            Err(code) => {
                self.device.registry().fail_by("ibv_poll_cq", code);
                0
            }
        }
    }
}

/// On a device that failed: what is outstanding will not complete, so it is completed here.
fn flush(owners: &Owners, taken: &mut VecDeque<Completion>) {
    for owner in owners.iter() {
        while let Some(Posted { id, operation, length }) = owner.queue().complete_oldest() {
            taken.push_back(Completion {
                length,
                ..Completion::new(id, owner.work.qpn, CompletionStatus::Flushed, operation)
            });
        }
    }
}

fn completion(owner: &Owner, posted: &Posted, entry: &ffi::Wc) -> Completion {
    let status = status(entry.status);
    let success = status == CompletionStatus::Success;
    let with_immediate = success && owner.receives && entry.wc_flags & ffi::WC_WITH_IMM != 0;
    let operation = match entry.opcode {
        ffi::WC_RECV_RDMA_WITH_IMM if success => CompletionOperation::ReceiveWrite,
        _ => posted.operation,
    };
    Completion {
        // Of sends, only READs have a length in `entry`; on errors, nothing has.
        length: match (success, owner.receives) {
            (true, true) => entry.byte_len,
            (false, true) => 0,
            (_, false) => posted.length,
        },
        immediate: with_immediate.then(|| u32::from_be(entry.imm_data)),
        ..Completion::new(posted.id, owner.work.qpn, status, operation)
    }
}

/// By the numbers of `ibv_wc_status`.
const fn status(number: u32) -> CompletionStatus {
    match number {
        0 => CompletionStatus::Success,
        1 => CompletionStatus::LocalLength,
        4 => CompletionStatus::LocalProtection,
        5 => CompletionStatus::Flushed,
        7 => CompletionStatus::BadResponse,
        9 => CompletionStatus::RemoteInvalidRequest,
        10 => CompletionStatus::RemoteAccess,
        11 => CompletionStatus::RemoteOperational,
        12 => CompletionStatus::RetryExceeded,
        13 => CompletionStatus::ReceiverNotReadyExceeded,
        other => CompletionStatus::Other(other),
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionQueue").field(&self.id()).finish()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.device.registry().release(self.number);
    }
}
