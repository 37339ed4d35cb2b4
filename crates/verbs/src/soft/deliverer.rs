//! Who hears of completions and events: threads that wait, and handlers.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};

use millstream_net::{Hook, Shared, Waiters, Worker};
use millstream_roce::{Completion, CompletionQueueId, Endpoint, Notifications};

use super::host_memory::HostMemory;
use super::shards::Shards;
use crate::CompletionHandler;

/// Completions handed to a handler at a time.
const HANDLER_BATCH: usize = 256;

/// So often a handler is called before the next packets have their turn.
const HANDLER_PASSES: usize = 8;

/// Those who want to hear of something on any shard of a device.
#[derive(Default)]
pub(super) struct Notices {
    /// By the numbers of completion queues.
    queues: Mutex<Vec<Option<Arc<Notice>>>>,
    pub(super) events: Waiters,
    /// Set before anything can happen on them that somebody wants to hear of.
    shards: OnceLock<Arc<Shards>>,
}

/// Those who want to hear of a completion queue.
pub(super) struct Notice {
    pub(super) id: CompletionQueueId,
    /// The queue is no more, and its number may be another's. Set and read with an endpoint locked, and
    /// set before the queue goes from any.
    gone: AtomicBool,
    /// Which shard's completions are taken first.
    turn: AtomicUsize,
    pub(super) waiters: Waiters,
    pub(super) solicited_waiters: Waiters,
    handler: Option<Handler>,
}

/// Which threads may call a handler.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum HandlerThreads {
    /// The driver only.
    Driver,
    /// Those that make progress while they wait, too.
    Waiting,
}

struct Handler {
    threads: HandlerThreads,
    /// Completions may have come since the handler's last look.
    wanted: AtomicBool,
    state: Mutex<HandlerState>,
}

struct HandlerState {
    function: CompletionHandler,
    completions: Vec<Completion>,
}

impl Notices {
    /// Says which shards there are, once.
    pub(super) fn set_shards(&self, shards: &Arc<Shards>) {
        let _ = self.shards.set(Arc::clone(shards));
    }

    pub(super) fn add(&self, notice: Arc<Notice>) {
        let (mut queues, index) = (self.queues(), notice.id.0 as usize);
        if queues.len() <= index {
            queues.resize(index + 1, None);
        }
        queues[index] = Some(notice);
    }

    pub(super) fn remove(&self, notice: &Notice) {
        if let Some(place) = self.queues().get_mut(notice.id.0 as usize) {
            *place = None;
        }
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Option<Arc<Notice>>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first queue with this number or a higher one that has one of these bits.
    fn next(&self, from: usize, bits: u64) -> Option<Arc<Notice>> {
        let queues = self.queues();
        let mut rest = queues.get(from..)?.iter().flatten();
        rest.find(|notice| bits & u64::from(Notifications::bit(notice.id)) != 0).cloned()
    }
}

impl Notice {
    pub(super) fn new(
        id: CompletionQueueId,
        handler: Option<(CompletionHandler, HandlerThreads)>,
    ) -> Self {
        let handler = handler.map(|(function, threads)| Handler {
            threads,
            wanted: AtomicBool::new(false),
            state: Mutex::new(HandlerState {
                function,
                completions: Vec::with_capacity(HANDLER_BATCH),
            }),
        });
        Self {
            id,
            gone: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            waiters: Waiters::default(),
            solicited_waiters: Waiters::default(),
            handler,
        }
    }

    pub(super) fn has_handler(&self) -> bool {
        self.handler.is_some()
    }

    /// The queue is no more. To be said with the endpoint locked.
    pub(super) fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Takes what there is in the parts of all shards, as far as `limit` goes; returns how many.
    pub(super) fn poll(&self, shards: &Shards, out: &mut Vec<Completion>, limit: usize) -> usize {
        let before = out.len();
        let (all, mut first) = (shards.all().len(), 0);
        if all > 1 {
            first = self.turn.fetch_add(1, Ordering::Relaxed);
        }
        for index in 0..all {
            if out.len() - before == limit {
                break;
            }
            let index = first.wrapping_add(index) % all;
            let mut endpoint = shards.all()[index].lock_regardless();
            if !self.gone.load(Ordering::Relaxed) {
                let left = limit - (out.len() - before);
                endpoint.poll_completions(self.id, out, left);
            }
        }
        if shards.all().len() > 1 && out[before..].iter().any(|one| one.invalidated.is_some()) {
            // Packets that another shard had let in before the key was taken away are written by now.
            shards.meet();
        }
        out.len() - before
    }
}

impl Handler {
    /// Calls the handler with what there is on any shard; `false` when there may be more. If another thread is
    /// at it, that one does it: it looks again after it has let go of the handler.
    fn call(&self, notice: &Notice, shards: &Shards) -> bool {
        self.wanted.store(true, Ordering::SeqCst);
        while self.wanted.load(Ordering::SeqCst) {
            fence(Ordering::SeqCst);
            let mut state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return true,
            };
            let HandlerState { function, completions } = &mut *state;
            let mut passes = 0;
            loop {
                self.wanted.store(false, Ordering::SeqCst);
                completions.clear();
                if notice.poll(shards, completions, HANDLER_BATCH) == 0 {
                    break;
                }
                if passes == HANDLER_PASSES {
                    // They were taken out, so they are handled; the rest has to wait.
                    function(completions);
                    return false;
                }
                passes += 1;
                function(completions);
            }
            drop(state);
            fence(Ordering::SeqCst);
        }
        true
    }
}

/// Bit 63; bits 0 to 30 are those of [`Notifications::queues`], and from 31 on those of
/// [`Notifications::solicited`].
const EVENTS: u64 = 1 << 63;
const SOLICITED: u32 = 31;

/// Hands completions to handlers and waiters after each round.
pub(super) struct Deliverer(Weak<Notices>);

impl Deliverer {
    pub(super) const fn new(notices: Weak<Notices>) -> Self {
        Self(notices)
    }
}

impl Hook<Endpoint<HostMemory>> for Deliverer {
    fn observe(&self, endpoint: &mut Endpoint<HostMemory>, _eventful: bool) -> u64 {
        let Notifications { queues, solicited, events } = endpoint.take_notifications();
        let events = if events { EVENTS } else { 0 };
        events | u64::from(solicited) << SOLICITED | u64::from(queues)
    }

    fn announce(
        &self,
        shared: &Shared<Endpoint<HostMemory>>,
        observed: u64,
        worker: Worker,
    ) -> u64 {
        let Some(notices) = self.0.upgrade() else { return 0 };
        let Some(shards) = notices.shards.get() else { return 0 };
        let over = shared.failure().is_some() && worker == Worker::Driver;
        if over {
            // Whoever waits for completions gets them. If a panic left the endpoint broken this may be the
            // next one, and the others are to end all the same.
            let flush = AssertUnwindSafe(|| shared.lock_regardless().fail_all());
            let flushed = panic::catch_unwind(flush);
            shards.set_ended(shared);
            shards.close_others(shared);
            if let Err(panicked) = flushed {
                panic::resume_unwind(panicked);
            }
        }
        if observed & EVENTS != 0 {
            notices.events.wake();
        }
        let (mut left, mut from) = (0, 0);
        while let Some(notice) = notices.next(from, observed) {
            from = notice.id.0 as usize + 1;
            let bit = u64::from(Notifications::bit(notice.id));
            let Some(handler) = &notice.handler else {
                notice.waiters.wake();
                if observed >> SOLICITED & bit != 0 {
                    notice.solicited_waiters.wake();
                }
                continue;
            };
            let may_call = match worker {
                Worker::Driver => true,
                Worker::Leader => handler.threads == HandlerThreads::Waiting,
                Worker::Poster => false,
            };
            while may_call && !handler.call(&notice, shards) {
                // Packets have their turn, unless there are no more.
                if !over {
                    left |= bit;
                    break;
                }
            }
            if !may_call {
                left |= bit;
            }
        }
        left
    }
}
