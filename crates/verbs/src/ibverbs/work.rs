//! What was posted and has not completed.
//!
//! The library's completions do not say enough: on an error only the request's number and the
//! status count, and not even whether it was a send or a receive. So requests are posted under
//! numbers of our own, by which the caller's number, the operation and the length are found again.
//! That also knows what is outstanding when a device dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use millstream_roce::CompletionOperation;
use millstream_wire::Qpn;

/// What the completions of a queue pair need to know of it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) qpn: Qpn,
    pub(super) send: WorkQueue,
    pub(super) receive: WorkQueue,
    /// A request completed in error, which leaves a reliable connection in the error state.
    failed: AtomicBool,
    /// The application has been told by an event.
    reported: AtomicBool,
}

impl Work {
    pub(super) fn new(qpn: Qpn, max_send_requests: usize, max_receive_requests: usize) -> Self {
        Self {
            qpn,
            send: WorkQueue::new(max_send_requests),
            receive: WorkQueue::new(max_receive_requests),
            failed: AtomicBool::new(false),
            reported: AtomicBool::new(false),
        }
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn set_failed(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// Whether an event has to be made of the failure: true once, and not after
    /// [`Work::close`].
    pub(super) fn to_report(&self) -> bool {
        !self.reported.swap(true, Ordering::AcqRel)
    }

    /// The application itself brings the queue pair to the error state.
    pub(super) fn close(&self) {
        self.reported.store(true, Ordering::Release);
    }

    /// The queue pair was reset: nothing is outstanding, nothing failed.
    pub(super) fn reset(&self) {
        self.send.forget();
        self.receive.forget();
        self.failed.store(false, Ordering::Release);
        self.reported.store(false, Ordering::Release);
    }
}

/// A request as it was posted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Posted {
    pub(super) id: u64,
    pub(super) operation: CompletionOperation,
    pub(super) length: u32,
}

/// The requests of one queue: a ring of them, by a sequence number that wraps.
///
/// One thread at a time posts, and one at a time completes: locks around them see to that. The two
/// meet only here, in `posted` and `completed`.
#[derive(Debug)]
pub(super) struct WorkQueue {
    limit: u32,
    slots: Box<[Slot]>,
    posted: AtomicU32,
    completed: AtomicU32,
}

#[derive(Debug, Default)]
struct Slot {
    id: AtomicU64,
    /// The operation in the upper half, the length in the lower.
    what: AtomicU64,
}

/// [`CompletionOperation`]s by the number that they have in a [`Slot`].
const OPERATIONS: [CompletionOperation; 4] = [
    CompletionOperation::Send,
    CompletionOperation::Write,
    CompletionOperation::Read,
    CompletionOperation::Receive,
];

impl WorkQueue {
    /// A queue of at most `limit` requests, at most 2^30.
    fn new(limit: usize) -> Self {
        let limit = limit.min(1 << 30) as u32;
        // A power of two, so that a slot is found across the wrap of the sequence numbers.
        let slots = limit.max(1).next_power_of_two();
        Self {
            limit,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            posted: AtomicU32::new(0),
            completed: AtomicU32::new(0),
        }
    }

    /// The sequence number of the next request, and how many there is room for.
    pub(super) fn next(&self) -> (u32, usize) {
        let posted = self.posted.load(Ordering::Relaxed);
        let outstanding = posted.wrapping_sub(self.completed.load(Ordering::Acquire));
        (posted, self.limit.saturating_sub(outstanding) as usize)
    }

    /// Notes the requests that follow, before they are handed over: they may complete at once.
    /// There must be room for them.
    pub(super) fn post(&self, requests: impl Iterator<Item = Posted>) {
        let mut sequence = self.posted.load(Ordering::Relaxed);
        for Posted { id, operation, length } in requests {
            let number = OPERATIONS.iter().position(|&other| other == operation).unwrap_or(0);
            let slot = self.slot(sequence);
            slot.id.store(id, Ordering::Relaxed);
            slot.what.store((number as u64) << 32 | u64::from(length), Ordering::Relaxed);
            sequence = sequence.wrapping_add(1);
        }
        self.posted.store(sequence, Ordering::Release);
    }

    /// Takes back the newest `count` requests, which were not accepted.
    pub(super) fn retract(&self, count: u32) {
        self.posted
            .store(self.posted.load(Ordering::Relaxed).wrapping_sub(count), Ordering::Release);
    }

    /// The request with this sequence number; it and all before it are done. `None` when no such
    /// request is outstanding, as with what a reset queue pair left in a completion queue.
    pub(super) fn complete(&self, sequence: u32) -> Option<Posted> {
        let completed = self.completed.load(Ordering::Relaxed);
        let outstanding = self.posted.load(Ordering::Acquire).wrapping_sub(completed);
        if sequence.wrapping_sub(completed) >= outstanding {
            return None;
        }
        let slot = self.slot(sequence);
        let what = slot.what.load(Ordering::Relaxed);
        let posted = Posted {
            id: slot.id.load(Ordering::Relaxed),
            operation: OPERATIONS[(what >> 32) as usize % OPERATIONS.len()],
            length: what as u32,
        };
        self.completed.store(sequence.wrapping_add(1), Ordering::Release);
        Some(posted)
    }

    /// The oldest request that is outstanding, which is done thereby.
    pub(super) fn complete_oldest(&self) -> Option<Posted> {
        self.complete(self.completed.load(Ordering::Relaxed))
    }

    fn forget(&self) {
        self.completed.store(self.posted.load(Ordering::Acquire), Ordering::Release);
    }

    fn slot(&self, sequence: u32) -> &Slot {
        &self.slots[sequence as usize & (self.slots.len() - 1)]
    }
}

/// The queues whose requests complete into one completion queue, by a key that is not used again
/// soon: completions of a queue that is gone may still come.
#[derive(Debug, Default)]
pub(super) struct Owners {
    slots: Vec<OwnerSlot>,
    free: Vec<u16>,
}

#[derive(Debug)]
struct OwnerSlot {
    generation: u16,
    owner: Option<Owner>,
}

/// One queue of a queue pair.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    pub(super) work: Arc<Work>,
    pub(super) receives: bool,
}

impl Owner {
    pub(super) fn queue(&self) -> &WorkQueue {
        if self.receives { &self.work.receive } else { &self.work.send }
    }
}

impl Owners {
    /// Adds a queue; `None` when there are 65,536 already.
    pub(super) fn insert(&mut self, owner: Owner) -> Option<u32> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u16::try_from(self.slots.len()).ok()?;
                self.slots.push(OwnerSlot { generation: 0, owner: None });
                index
            }
        };
        let slot = &mut self.slots[usize::from(index)];
        slot.owner = Some(owner);
        Some(u32::from(slot.generation) << 16 | u32::from(index))
    }

    pub(super) fn get(&self, key: u32) -> Option<&Owner> {
        let slot = self.slots.get(key as usize & 0xffff)?;
        slot.owner.as_ref().filter(|_| u32::from(slot.generation) == key >> 16)
    }

    pub(super) fn remove(&mut self, key: u32) {
        if self.get(key).is_some() {
            let slot = &mut self.slots[key as usize & 0xffff];
            slot.owner = None;
            slot.generation = slot.generation.wrapping_add(1);
            self.free.push(key as u16);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Owner> {
        self.slots.iter().filter_map(|slot| slot.owner.as_ref())
    }
}

/// The number that a request is posted under: whose, and which.
pub(super) const fn number(key: u32, sequence: u32) -> u64 {
    (key as u64) << 32 | sequence as u64
}

/// The key and the sequence number in a [`number`].
pub(super) const fn parts(number: u64) -> (u32, u32) {
    ((number >> 32) as u32, number as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(id: u64) -> Posted {
        let operation = OPERATIONS[id as usize % 4];
        Posted { id, operation, length: id as u32 * 3 }
    }

    #[test]
    fn requests_are_found_by_their_number_across_the_wrap() {
        let queue = WorkQueue::new(5);
        for start in [0, u32::MAX - 7] {
            queue.posted.store(start, Ordering::Relaxed);
            queue.completed.store(start, Ordering::Relaxed);
            for round in 0..8_u32 {
                let (first, room) = queue.next();
                assert_eq!((first, room), (start.wrapping_add(round * 3), 5));
                queue.post((0..3).map(|i| posted(u64::from(round * 3 + i))));
                assert_eq!(queue.next().1, 2);
                // The first of the three was not signaled.
                for i in [1, 2] {
                    let found = queue.complete(first.wrapping_add(i));
                    assert_eq!(found, Some(posted(u64::from(round * 3 + i))));
                }
            }
        }
    }

    #[test]
    fn what_is_not_outstanding_is_not_found() {
        let queue = WorkQueue::new(4);
        queue.post((0..4).map(posted));
        queue.retract(2);
        assert_eq!(queue.next(), (2, 2));
        assert_eq!(queue.complete(2), None);
        assert_eq!(queue.complete(0), Some(posted(0)));
        assert_eq!(queue.complete(0), None);
        queue.forget();
        assert_eq!(queue.complete(1), None);
        assert_eq!(queue.next(), (2, 4));
    }

    #[test]
    fn a_dead_device_leaves_its_requests_in_order() {
        let queue = WorkQueue::new(4);
        queue.post((0..3).map(posted));
        queue.complete(0);
        let rest: Vec<_> = std::iter::from_fn(|| queue.complete_oldest()).collect();
        assert_eq!(rest, [posted(1), posted(2)]);
    }

    #[test]
    fn a_key_of_a_queue_that_is_gone_finds_nothing() {
        let owner = || Owner { work: Arc::new(Work::new(Qpn::new(7), 1, 1)), receives: false };
        let mut owners = Owners::default();
        let first = owners.insert(owner()).unwrap();
        let other = owners.insert(owner()).unwrap();
        owners.remove(first);
        let second = owners.insert(owner()).unwrap();
        assert_ne!(first, second);
        assert!(owners.get(first).is_none() && owners.get(second).is_some());
        owners.remove(first);
        assert_eq!(owners.iter().count(), 2);
        assert!(owners.get(other).is_some() && owners.get(second).is_some());
    }

    #[test]
    fn a_failure_is_reported_once_until_a_reset() {
        let work = Work::new(Qpn::new(7), 1, 1);
        work.set_failed();
        assert!(work.failed() && work.to_report() && !work.to_report());
        work.reset();
        assert!(!work.failed() && work.to_report());
        work.reset();
        work.close();
        assert!(!work.to_report());
    }

    #[test]
    fn numbers_come_apart_again() {
        assert_eq!(parts(number(0xffff_0001, u32::MAX)), (0xffff_0001, u32::MAX));
    }
}
