//! The shards of a soft device: each has an endpoint with a lock of its own, a socket in the group of the
//! address, a slot of queue pair numbers, and a driver.
//!
//! A queue pair is in one shard. What serves queue pairs of all is in each: completion queues have a part
//! in each, and regions and shared receive queues are made in each in the same order, so that they have
//! the same keys and numbers everywhere.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_net::{Failure, NodeGuard, Shared};
use millstream_roce::{CreateError, Endpoint};

use super::host_memory::HostMemory;

/// A shard, as its device uses it.
pub(crate) type Shard = Shared<Endpoint<HostMemory>>;

/// The shards of a device.
pub(super) struct Shards {
    all: Box<[Arc<Shard>]>,
    /// Which have failed, and given all that was outstanding its end.
    ended: Box<[AtomicBool]>,
    /// Where the next queue pair goes that may be anywhere.
    next: AtomicUsize,
    /// Held while something is made in all, or removed from all: so all do it in the same order.
    order: Mutex<()>,
}

impl Shards {
    /// One at least.
    pub(super) fn new(all: Box<[Arc<Shard>]>) -> Self {
        let ended = all.iter().map(|_| AtomicBool::new(false)).collect();
        Self { all, ended, next: AtomicUsize::new(0), order: Mutex::new(()) }
    }

    pub(super) const fn all(&self) -> &[Arc<Shard>] {
        &self.all
    }

    /// All of them, beginning with another one each time.
    pub(super) fn in_turn(&self) -> impl Iterator<Item = usize> + use<> {
        let count = self.all.len();
        let first = if count == 1 { 0 } else { self.next.fetch_add(1, Ordering::Relaxed) };
        (0..count).map(move |index| first.wrapping_add(index) % count)
    }

    /// Makes something in each, which comes out the same in each: what is made by `make`, which is told
    /// of which shard the endpoint is.
    pub(super) fn make<T, E>(
        &self,
        mut make: impl FnMut(usize, &mut Endpoint<HostMemory>) -> Result<T, E>,
    ) -> Result<T, E>
    where
        T: PartialEq + std::fmt::Debug,
    {
        let _order = self.order();
        let mut made = None;
        for (index, shard) in self.all.iter().enumerate() {
            // Only the first can refuse: all are in the same state, and are asked for the same.
            let result = make(index, &mut shard.lock_regardless())?;
            debug_assert!(made.is_none() || made.as_ref() == Some(&result), "{result:?}");
            made = Some(result);
        }
        Ok(made.expect("there is one shard at least"))
    }

    /// Removes something from each.
    pub(super) fn remove(&self, mut remove: impl FnMut(&mut Endpoint<HostMemory>)) {
        let _order = self.order();
        self.all.iter().for_each(|shard| remove(&mut shard.lock_regardless()));
    }

    /// Fails as a call does on a device that has failed.
    pub(super) fn check(&self) -> Result<(), CreateError> {
        let failed = self.all.iter().any(|shard| shard.failure().is_some());
        if failed { Err(CreateError::DeviceFailed) } else { Ok(()) }
    }

    /// Why it failed: the reason of the first, after which the others were closed.
    pub(super) fn failure(&self) -> Option<&Failure> {
        let failures = || self.all.iter().filter_map(|shard| shard.failure());
        let closed = |failure: &&Failure| matches!(failure, Failure::Closed { .. });
        failures().find(|failure| !closed(failure)).or_else(|| failures().next())
    }

    /// Whether all have failed, and whatever was outstanding has its end.
    pub(super) fn have_ended(&self) -> bool {
        self.ended.iter().all(|ended| ended.load(Ordering::SeqCst))
    }

    /// This one has failed, and has flushed what it had.
    pub(super) fn set_ended(&self, failed: &Shard) {
        let ended = self.all.iter().zip(&self.ended).find(|(shard, _)| ptr::eq(&***shard, failed));
        ended.expect("it is one of them").1.store(true, Ordering::SeqCst);
    }

    /// One has failed: so does the whole device.
    pub(super) fn close_others(&self, failed: &Shard) {
        let others = self.all.iter().filter(|shard| !ptr::eq(&***shard, failed));
        others.for_each(|shard| shard.close());
    }

    /// Whether this thread makes the progress of one of them, and has called the handler in which this
    /// is asked.
    pub(super) fn is_progress_thread(&self) -> bool {
        self.all.iter().any(|shard| shard.is_progress_thread())
    }

    /// Returns once no shard is sending what it had collected before this call.
    pub(super) fn quiesce(&self) {
        self.all.iter().for_each(|shard| shard.quiesce());
    }

    /// Returns once no shard is in the middle of what it did when this was called.
    pub(super) fn meet(&self) {
        self.all.iter().for_each(|shard| drop::<NodeGuard<'_, _>>(shard.lock_regardless()));
    }

    /// Calls `post`, and sends what it has asked of any of them afterwards.
    pub(super) fn postpone<T>(&self, post: impl FnOnce() -> T) -> T {
        postpone(&self.all, post)
    }

    fn order(&self) -> MutexGuard<'_, ()> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn postpone<T>(shards: &[Arc<Shard>], post: impl FnOnce() -> T) -> T {
    // Recursion needs one type of closure.
    fn each(shards: &[Arc<Shard>], post: &mut dyn FnMut()) {
        match shards {
            [] => post(),
            [first, rest @ ..] => first.postpone(|| each(rest, post)),
        }
    }
    if let [only] = shards {
        return only.postpone(post);
    }
    let (mut post, mut result) = (Some(post), None);
    each(shards, &mut || result = post.take().map(|post| post()));
    result.expect("it is called once")
}
