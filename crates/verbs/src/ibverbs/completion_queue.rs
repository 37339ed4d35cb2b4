//! Completion queues of the system's devices.

use std::collections::VecDeque;
use std::fmt;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use millstream_roce::{
    Completion, CompletionOperation, CompletionQueueId, CompletionStatus, CreateError, Transport,
};
use millstream_wire::Qpn;

use super::device::Device;
use super::objects::Errno;
use super::shared_receive_queue::SharedWork;
use super::work::{self, Owner, Owners, Posted, Work};
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
    /// A queue pair that completes here was stopped: what is outstanding on it has to be flushed.
    flush_due: AtomicBool,
    has_handler: bool,
    /// `None` when there is none, or when it panicked.
    handler: Mutex<Option<CompletionHandler>>,
    queue: Arc<objects::CompletionQueue>,
}

struct Inbox {
    taken: VecDeque<Completion>,
    senders: Senders,
}

/// Whose completions come.
#[derive(Default)]
struct Senders {
    owners: Owners,
    /// Shared receive queues of queue pairs that complete here, and of how many.
    shared: Vec<(Arc<SharedWork>, usize)>,
    /// There were queue pairs for datagrams.
    datagrams: bool,
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
        let limit = device.attributes().max_completions;
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
                senders: Senders::default(),
            }),
            announcements: Mutex::new(0),
            announced: Condvar::new(),
            flush_due: AtomicBool::new(false),
            has_handler: handler.is_some(),
            handler: Mutex::new(handler),
            queue: Arc::new(queue),
        });
        device.registry().enter(number, &queue);
        if queue.has_handler {
            queue.request_announcement(false);
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
        if self.has_handler { 0 } else { self.take(out, limit) }
    }

    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        self.wait_for(timeout, false)
    }

    pub(crate) fn wait_solicited(&self, timeout: Duration) -> bool {
        self.wait_for(timeout, true)
    }

    fn wait_for(&self, timeout: Duration, only_solicited: bool) -> bool {
        if self.has_handler {
            // Nothing to poll ever comes, and what a handler is for must not be taken from it.
            return false;
        }
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
            let seen = *lock(&self.announcements);
            // Once a device that failed is quiet, all that is outstanding is flushed.
            if self.device.registry().is_quiet() {
                return self.fill();
            }
            if left().is_zero() {
                return false;
            }
            self.request_announcement(only_solicited);
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

    /// What is outstanding on a stopped queue pair has to be flushed into this queue.
    pub(super) fn flush(&self) {
        self.flush_due.store(true, Ordering::Release);
        self.announce();
        if self.has_handler {
            self.device.registry().wake();
        }
    }

    /// Whether the handler has to run without an announcement of the device's.
    pub(super) fn is_handler_due(&self) -> bool {
        self.has_handler && self.flush_due.load(Ordering::Acquire)
    }

    /// Runs the handler once, if there is one and it has something to do; returns whether there may
    /// be more. `completions` is scratch.
    pub(super) fn handle(&self, completions: &mut Vec<Completion>) -> bool {
        let mut slot = lock(&self.handler);
        let Some(handler) = &mut *slot else { return false };
        // Asked for before the look, so that what comes after the look is announced.
        self.request_announcement(false);
        completions.clear();
        let count = self.take(completions, HANDLER_BATCH);
        if count > 0 && catch_unwind(AssertUnwindSafe(|| handler(completions))).is_err() {
            // What it owns may be half done, and it is not called again. That it may panic once
            // more while it is dropped is the last of it.
            let handler = slot.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(handler)));
            drop(slot);
            self.device.registry().fail("a completion handler panicked".into());
            return false;
        }
        count == HANDLER_BATCH
    }

    /// Takes what there is, so that it outlives the queue pair that it is of.
    pub(super) fn settle(&self) -> Result<(), Errno> {
        let mut inbox = lock(&self.inbox);
        let Inbox { taken, senders } = &mut *inbox;
        while self.collect(senders, BATCH, |completion| taken.push_back(completion))? == BATCH {}
        Ok(())
    }

    /// Expects completions of this queue from now on; they name it by the key returned.
    pub(super) fn add_owner(&self, owner: Owner) -> Option<u32> {
        let senders = &mut lock(&self.inbox).senders;
        senders.datagrams |= owner.work.transport == Transport::UnreliableDatagram;
        senders.owners.insert(owner)
    }

    /// Completions by this key are dropped from now on.
    pub(super) fn remove_owner(&self, key: u32) {
        lock(&self.inbox).senders.owners.remove(key);
    }

    /// Expects completions of a queue pair that takes from this queue.
    pub(super) fn add_shared(&self, work: &Arc<SharedWork>) {
        let shared = &mut lock(&self.inbox).senders.shared;
        match shared.iter_mut().find(|(known, _)| Arc::ptr_eq(known, work)) {
            Some((_, count)) => *count += 1,
            None => shared.push((Arc::clone(work), 1)),
        }
    }

    /// One such queue pair less.
    pub(super) fn remove_shared(&self, work: &Arc<SharedWork>) {
        let shared = &mut lock(&self.inbox).senders.shared;
        shared.retain_mut(|(known, count)| {
            *count -= usize::from(Arc::ptr_eq(known, work));
            *count > 0
        });
    }

    fn request_announcement(&self, only_solicited: bool) {
        if let Err(code) = self.queue.request_notification(only_solicited) {
            self.device.registry().fail_by("ibv_req_notify_cq", code);
        }
    }

    /// Moves up to `limit` completions to the end of `out`; returns how many.
    fn take(&self, out: &mut Vec<Completion>, limit: usize) -> usize {
        let start = out.len();
        let mut inbox = lock(&self.inbox);
        let Inbox { taken, senders } = &mut *inbox;
        out.extend(taken.drain(..limit.min(taken.len())));
        let mut broken = None;
        while out.len() - start < limit {
            let wanted = BATCH.min(limit - (out.len() - start));
            match self.collect(senders, wanted, |completion| out.push(completion)) {
                Ok(count) if count == wanted => {}
                other => {
                    broken = other.err();
                    break;
                }
            }
        }
        if out.len() - start < limit {
            self.flush_stopped(&senders.owners, taken);
            out.extend(taken.drain(..(limit - (out.len() - start)).min(taken.len())));
        }
        drop(inbox);
        self.report(broken);
        out.len() - start
    }

    /// Whether there is something to poll.
    fn fill(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        let Inbox { taken, senders } = &mut *inbox;
        let mut broken = None;
        while taken.is_empty() {
            match self.collect(senders, BATCH, |completion| taken.push_back(completion)) {
                Ok(BATCH) => {}
                other => {
                    broken = other.err();
                    break;
                }
            }
        }
        if taken.is_empty() {
            self.flush_stopped(&senders.owners, taken);
        }
        let found = !taken.is_empty();
        drop(inbox);
        self.report(broken);
        found
    }

    /// Takes up to `limit` completions from the device and gives those of queues that are known
    /// to `sink`; returns how many were taken.
    fn collect(
        &self,
        senders: &Senders,
        limit: usize,
        mut sink: impl FnMut(Completion),
    ) -> Result<usize, Errno> {
        let mut batch = [MaybeUninit::uninit(); BATCH];
        let entries = self.queue.poll(&mut batch[..limit])?;
        for entry in entries {
            let Some((qpn, receives, posted)) = senders.complete(entry) else { continue };
            let mut completion = completion(qpn, receives, &posted, entry);
            if completion.status != CompletionStatus::Success {
                // Which leaves a connection in the error state, and datagrams in one that only the
                // device knows.
                match senders.work(qpn) {
                    Some(work) if work.transport == Transport::ReliableConnection => {
                        self.device.registry().pair_failed(work);
                    }
                    _ => {}
                }
            } else if receives && senders.receives_datagrams(qpn) {
                completion.source = Some(Qpn::new(entry.src_qp));
            }
            sink(completion);
        }
        Ok(entries.len())
    }

    /// Completes what is outstanding on queue pairs that were stopped: the device will not.
    fn flush_stopped(&self, owners: &Owners, taken: &mut VecDeque<Completion>) {
        if !self.flush_due.swap(false, Ordering::AcqRel) {
            return;
        }
        for owner in owners.iter().filter(|owner| owner.work.stopped()) {
            while let Some(Posted { id, operation, length }) = owner.queue().complete_oldest() {
                taken.push_back(Completion {
                    length,
                    ..Completion::new(id, owner.work.qpn, CompletionStatus::Flushed, operation)
                });
            }
        }
    }

    /// A queue that cannot be polled is the end of its device. The inbox must be free: queue pairs
    /// are stopped, for which queues are settled.
    fn report(&self, broken: Option<Errno>) {
        if let Some(code) = broken {
            self.device.registry().fail_by("ibv_poll_cq", code);
        }
    }
}

impl Senders {
    /// The queue pair and request that a completion is of, and whether it is a receive. `None` when
    /// it is of a queue pair that is gone.
    fn complete(&self, entry: &ffi::Wc) -> Option<(Qpn, bool, Posted)> {
        let (key, sequence) = work::parts(entry.wr_id);
        if key & work::SHARED != 0 {
            let number = key & !work::SHARED;
            let (shared, _) = self.shared.iter().find(|(shared, _)| shared.number == number)?;
            return Some((Qpn::new(entry.qp_num), true, shared.complete(sequence)?));
        }
        let owner = self.owners.get(key)?;
        Some((owner.work.qpn, owner.receives, owner.queue().complete(sequence)?))
    }

    fn receives_datagrams(&self, qpn: Qpn) -> bool {
        // Connections need no search.
        self.datagrams
            && self.work(qpn).is_some_and(|work| work.transport == Transport::UnreliableDatagram)
    }

    fn work(&self, qpn: Qpn) -> Option<&Work> {
        let owner = self.owners.iter().find(|owner| owner.work.qpn == qpn)?;
        Some(&owner.work)
    }
}

fn completion(qpn: Qpn, receives: bool, posted: &Posted, entry: &ffi::Wc) -> Completion {
    let status = status(entry.status);
    let success = status == CompletionStatus::Success;
    let with_immediate = success && receives && entry.wc_flags & ffi::WC_WITH_IMM != 0;
    let with_key = success && receives && entry.wc_flags & ffi::WC_WITH_INV != 0;
    let operation = match entry.opcode {
        ffi::WC_RECV_RDMA_WITH_IMM if success => CompletionOperation::ReceiveWrite,
        _ => posted.operation,
    };
    Completion {
        // Of sends, only READs have a length in `entry`; on errors, nothing has.
        length: match (success, receives) {
            (true, true) => entry.byte_len,
            (false, true) => 0,
            (_, false) => posted.length,
        },
        immediate: with_immediate.then(|| u32::from_be(entry.imm_data)),
        invalidated: with_key.then_some(entry.imm_data),
        ..Completion::new(posted.id, qpn, status, operation)
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
