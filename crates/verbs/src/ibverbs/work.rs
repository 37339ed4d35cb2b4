//! What was posted and has not completed.
//!
//! The library's completions do not say enough: on an error only the request's number and the
//! status count, and not even whether it was a send or a receive. So requests are posted under
//! numbers of our own, by which the caller's number, the operation and the length are found again.
//! That also knows what is outstanding when a device dies.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use millstream_roce::{CompletionOperation, Transport};
use millstream_wire::Qpn;

use super::lock;

/// What the completions of a queue pair need to know of it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) qpn: Qpn,
    pub(super) transport: Transport,
    pub(super) send: WorkQueue,
    pub(super) receive: WorkQueue,
    /// A request completed in error, which leaves a reliable connection in the error state.
    failed: AtomicBool,
    /// The application has been told by an event.
    reported: AtomicBool,
    /// The device completes nothing of it any more: what is outstanding is completed here.
    stopped: AtomicBool,
}

impl Work {
    pub(super) fn new(qpn: Qpn, max_send_requests: usize, max_receive_requests: usize) -> Self {
        Self {
            qpn,
            transport: Transport::ReliableConnection,
            send: WorkQueue::new(max_send_requests),
            receive: WorkQueue::new(max_receive_requests),
            failed: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        }
    }

    /// The same for another transport than a reliable connection.
    pub(super) fn of(self, transport: Transport) -> Self {
        Self { transport, ..self }
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

    /// The application itself brings the queue pair to the error state; returns whether it was
    /// told of a failure before.
    pub(super) fn close(&self) -> bool {
        self.reported.swap(true, Ordering::AcqRel)
    }

    /// It could not after all.
    pub(super) fn reopen(&self) {
        self.reported.store(false, Ordering::Release);
    }

    pub(super) fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// From now on nothing is handed to the device: requests are noted only. Then `quiesce` makes
    /// sure that it does not touch those that it has.
    pub(super) fn stop(&self, quiesce: impl FnOnce()) {
        let (mut send, mut receive) = (self.send.poster(), self.receive.poster());
        *send.shut = true;
        *receive.shut = true;
        quiesce();
        self.set_failed();
        self.stopped.store(true, Ordering::Release);
    }

    /// The queue pair was reset: nothing is outstanding, nothing failed. The posters of both
    /// queues are held by the caller.
    pub(super) fn reset<'a>(&self, send: &mut Poster<'a>, receive: &mut Poster<'a>) {
        for (queue, poster) in [(&self.send, send), (&self.receive, receive)] {
            while queue.complete_oldest().is_some() {}
            *poster.shut = false;
        }
        self.failed.store(false, Ordering::Release);
        self.reported.store(false, Ordering::Release);
        self.stopped.store(false, Ordering::Release);
    }
}

/// A request as it was posted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Posted {
    pub(super) id: u64,
    pub(super) operation: CompletionOperation,
    pub(super) length: u32,
}

/// Why a device did not take requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Refused {
    /// How many of them it did take. `None`: it does not say, so that it may have any of them.
    pub(super) accepted: Option<usize>,
    /// Its error number.
    pub(super) code: i32,
}

/// What became of requests that were to be handed over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Handover {
    /// The device has them.
    Taken,
    /// The device has so many of them, and refused the next with this error number.
    Refused(usize, i32),
    /// They are noted, and the device is not asked any more: they are to be flushed.
    Shut,
    /// They are noted, and the device may have any of them: they are to be flushed when it is made
    /// sure that it works on none. Its error number.
    Unknown(i32),
}

/// The requests of one queue: a ring of them, by a sequence number that wraps.
///
/// One thread at a time posts, the one with the [`Poster`]. Completing needs no lock.
#[derive(Debug)]
pub(super) struct WorkQueue {
    limit: u32,
    slots: Box<[Slot]>,
    /// The sequence number of the next request in the upper half, of the oldest that is
    /// outstanding in the lower. They change together or not at all: one that is completed and one
    /// that is taken back are never the same.
    numbers: AtomicU64,
    shut: Mutex<bool>,
}

#[derive(Debug, Default)]
struct Slot {
    id: AtomicU64,
    /// The operation in the upper half, the length in the lower.
    what: AtomicU64,
}

/// [`CompletionOperation`]s by the number that they have in a [`Slot`].
const OPERATIONS: [CompletionOperation; 6] = [
    CompletionOperation::Send,
    CompletionOperation::Write,
    CompletionOperation::Read,
    CompletionOperation::CompareSwap,
    CompletionOperation::FetchAdd,
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
            numbers: AtomicU64::new(0),
            shut: Mutex::new(false),
        }
    }

    /// The right to post, which one thread has at a time: requests are noted in the order that the
    /// device gets them in.
    pub(super) fn poster(&self) -> Poster<'_> {
        Poster { queue: self, shut: lock(&self.shut) }
    }

    /// The sequence numbers of the next request and of the oldest that is outstanding.
    fn numbers(&self) -> (u32, u32) {
        halves(self.numbers.load(Ordering::Acquire))
    }

    /// The request with this sequence number; it and all before it are done. `None` when no such
    /// request is outstanding, as with what a reset queue pair left in a completion queue.
    pub(super) fn complete(&self, sequence: u32) -> Option<Posted> {
        let mut numbers = self.numbers.load(Ordering::Acquire);
        loop {
            let (posted, completed) = halves(numbers);
            if sequence.wrapping_sub(completed) >= posted.wrapping_sub(completed) {
                return None;
            }
            let found = self.slot(sequence).read();
            let done = join(posted, sequence.wrapping_add(1));
            match self.numbers.compare_exchange_weak(
                numbers,
                done,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some(found),
                Err(other) => numbers = other,
            }
        }
    }

    /// The oldest request that is outstanding, which is done thereby.
    pub(super) fn complete_oldest(&self) -> Option<Posted> {
        loop {
            let (posted, completed) = self.numbers();
            if posted == completed {
                return None;
            }
            if let Some(found) = self.complete(completed) {
                return Some(found);
            }
        }
    }

    fn slot(&self, sequence: u32) -> &Slot {
        &self.slots[sequence as usize & (self.slots.len() - 1)]
    }
}

impl Slot {
    fn write(&self, Posted { id, operation, length }: Posted) {
        let number = OPERATIONS.iter().position(|&other| other == operation).unwrap_or(0);
        self.id.store(id, Ordering::Relaxed);
        self.what.store(join(number as u32, length), Ordering::Relaxed);
    }

    fn read(&self) -> Posted {
        let (number, length) = halves(self.what.load(Ordering::Relaxed));
        let operation = OPERATIONS[number as usize % OPERATIONS.len()];
        Posted { id: self.id.load(Ordering::Relaxed), operation, length }
    }
}

/// The right to post to a queue.
#[derive(Debug)]
pub(super) struct Poster<'a> {
    queue: &'a WorkQueue,
    shut: MutexGuard<'a, bool>,
}

impl Poster<'_> {
    /// Whether nothing is handed to the device any more.
    pub(super) fn is_shut(&self) -> bool {
        *self.shut
    }

    /// The sequence number of the oldest request that is outstanding, or else of the next.
    pub(super) fn oldest(&self) -> u32 {
        self.queue.numbers().1
    }

    /// The sequence number of the next request, and how many there is room for.
    pub(super) fn next(&self) -> (u32, usize) {
        let (posted, completed) = self.queue.numbers();
        let outstanding = posted.wrapping_sub(completed);
        (posted, self.queue.limit.saturating_sub(outstanding) as usize)
    }

    /// Notes the requests, for which there must be room, and has `post` hand them over. They may
    /// complete before that returns.
    pub(super) fn hand_over(
        &mut self,
        requests: impl Iterator<Item = Posted>,
        post: impl FnOnce() -> Result<(), Refused>,
    ) -> Handover {
        let queue = self.queue;
        let (posted, _) = queue.numbers();
        let mut sequence = posted;
        for request in requests {
            queue.slot(sequence).write(request);
            sequence = sequence.wrapping_add(1);
        }
        let count = sequence.wrapping_sub(posted);
        // The upper half wraps out of the word.
        queue.numbers.fetch_add(join(count, 0), Ordering::Release);
        if *self.shut {
            return Handover::Shut;
        }
        match post() {
            Ok(()) => Handover::Taken,
            Err(Refused { accepted: None, code }) => Handover::Unknown(code),
            Err(Refused { accepted: Some(accepted), code }) => {
                let rest = count.saturating_sub(accepted.try_into().unwrap_or(u32::MAX));
                let rest = self.take_back(rest);
                Handover::Refused((count - rest) as usize, code)
            }
        }
    }

    /// Takes back the newest `count` requests, as far as they did not complete; returns how many.
    fn take_back(&self, count: u32) -> u32 {
        let taken = |(posted, completed): (u32, u32)| count.min(posted.wrapping_sub(completed));
        let before =
            self.queue.numbers.fetch_update(Ordering::AcqRel, Ordering::Acquire, |numbers| {
                let (posted, completed) = halves(numbers);
                Some(join(posted.wrapping_sub(taken((posted, completed))), completed))
            });
        before.map_or(0, |numbers| taken(halves(numbers)))
    }
}

const fn join(upper: u32, lower: u32) -> u64 {
    (upper as u64) << 32 | lower as u64
}

const fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

/// The queues whose requests complete into one completion queue, by a key that is not used again
/// soon: completions of a queue that is gone may still come.
#[derive(Debug, Default)]
pub(super) struct Owners {
    slots: Vec<OwnerSlot>,
    free: Vec<u16>,
}

/// The highest generation: [`SHARED`] is not among the bits of a key.
const GENERATIONS: u16 = u16::MAX >> 1;

#[derive(Debug)]
struct OwnerSlot {
    generation: u16,
    owner: Option<Owner>,
}

/// Of the keys of [`number`]s: it is of a shared receive queue, whose number follows.
pub(super) const SHARED: u32 = 1 << 31;

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
            slot.generation = slot.generation.wrapping_add(1) & GENERATIONS;
            self.free.push(key as u16);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Owner> {
        self.slots.iter().filter_map(|slot| slot.owner.as_ref())
    }
}

/// The number that a request is posted under: whose, and which.
pub(super) const fn number(key: u32, sequence: u32) -> u64 {
    join(key, sequence)
}

/// The key and the sequence number in a [`number`].
pub(super) const fn parts(number: u64) -> (u32, u32) {
    halves(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(id: u64) -> Posted {
        let operation = OPERATIONS[id as usize % 4];
        Posted { id, operation, length: id as u32 * 3 }
    }

    /// Notes requests that the device takes all.
    fn post(queue: &WorkQueue, requests: impl Iterator<Item = Posted>) {
        assert_eq!(queue.poster().hand_over(requests, || Ok(())), Handover::Taken);
    }

    fn drained(queue: &WorkQueue) -> Vec<Posted> {
        // Bounded, so that a queue that never ends is a failure.
        std::iter::from_fn(|| queue.complete_oldest()).take(100).collect()
    }

    #[test]
    fn requests_are_found_by_their_number_across_the_wrap() {
        let queue = WorkQueue::new(5);
        for start in [0, u32::MAX - 7] {
            queue.numbers.store(join(start, start), Ordering::Relaxed);
            for round in 0..8_u32 {
                let (first, room) = queue.poster().next();
                assert_eq!((first, room), (start.wrapping_add(round * 3), 5));
                post(&queue, (0..3).map(|i| posted(u64::from(round * 3 + i))));
                assert_eq!(queue.poster().next().1, 2);
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
        let work = Work::new(Qpn::new(7), 4, 1);
        let queue = &work.send;
        let refused = Refused { accepted: Some(2), code: 12 };
        let handover = queue.poster().hand_over((0..4).map(posted), || Err(refused));
        assert_eq!(handover, Handover::Refused(2, 12));
        assert_eq!(queue.poster().next(), (2, 2));
        assert_eq!(queue.complete(2), None);
        assert_eq!(queue.complete(0), Some(posted(0)));
        assert_eq!(queue.complete(0), None);
        work.reset(&mut work.send.poster(), &mut work.receive.poster());
        assert_eq!(queue.complete(1), None);
        assert_eq!(queue.poster().next(), (2, 4));
    }

    #[test]
    fn a_dead_device_leaves_its_requests_in_order() {
        let queue = WorkQueue::new(4);
        post(&queue, (0..3).map(posted));
        queue.complete(0);
        assert_eq!(drained(&queue), [posted(1), posted(2)]);
    }

    #[test]
    fn a_request_that_completed_is_not_taken_back_too() {
        // How many complete before the device says that it has taken so many of the four.
        for (completed, accepted) in [(0, 0), (4, 0), (3, 1), (4, 4), (2, 3)] {
            for start in [0, u32::MAX - 1] {
                let queue = WorkQueue::new(8);
                queue.numbers.store(join(start, start), Ordering::Relaxed);
                let mut reported = Vec::new();
                let handover = queue.poster().hand_over((0..4).map(posted), || {
                    reported.extend((0..completed).filter_map(|_| queue.complete_oldest()));
                    Err(Refused { accepted: Some(accepted), code: 5 })
                });
                // Those that the caller is told of as accepted are those that complete.
                let told = accepted.max(completed);
                assert_eq!(handover, Handover::Refused(told, 5));
                reported.extend(drained(&queue));
                assert_eq!(reported, (0..told as u64).map(posted).collect::<Vec<_>>());
                assert_eq!(queue.poster().next(), (start.wrapping_add(told as u32), 8));
            }
        }
    }

    #[test]
    fn what_a_device_may_have_taken_is_kept_until_it_is_flushed() {
        let queue = WorkQueue::new(4);
        let refused = Refused { accepted: None, code: 5 };
        let handover = queue.poster().hand_over((0..3).map(posted), || Err(refused));
        assert_eq!(handover, Handover::Unknown(5));
        // The device had taken the first.
        assert_eq!(queue.complete(0), Some(posted(0)));
        assert_eq!(drained(&queue), [posted(1), posted(2)]);
    }

    #[test]
    fn what_is_posted_to_a_stopped_queue_pair_is_only_noted() {
        let work = Work::new(Qpn::new(7), 4, 4);
        post(&work.send, (0..1).map(posted));
        work.stop(|| assert!(!work.stopped()));
        assert!(work.failed() && work.stopped() && work.send.poster().is_shut());
        let never = || unreachable!();
        assert_eq!(work.send.poster().hand_over((1..3).map(posted), never), Handover::Shut);
        assert_eq!(drained(&work.send), [posted(0), posted(1), posted(2)]);
        work.reset(&mut work.send.poster(), &mut work.receive.poster());
        assert!(!work.failed() && !work.stopped());
        post(&work.receive, (0..1).map(posted));
    }

    #[test]
    fn every_request_ends_once_however_posts_and_completions_meet() {
        // One thread posts and is refused now and then; one completes what it is given.
        let (queue, done) = (&WorkQueue::new(64), &AtomicBool::new(false));
        let rounds = 20_000;
        let (accepted, completed) = std::thread::scope(|scope| {
            let poster = scope.spawn(move || {
                let mut accepted = 0;
                for round in 0..rounds {
                    let mut poster = queue.poster();
                    let count = poster.next().1.min(3);
                    let requests = (0..count as u64).map(|i| posted(accepted as u64 + i));
                    let refused = Refused { accepted: Some(round % 3), code: 5 };
                    let result = || if round % 2 == 0 { Err(refused) } else { Ok(()) };
                    accepted += match poster.hand_over(requests, result) {
                        Handover::Refused(count, _) => count,
                        _ => count,
                    };
                }
                done.store(true, Ordering::Release);
                accepted
            });
            let completer = scope.spawn(move || {
                let mut ids = Vec::new();
                loop {
                    let last = done.load(Ordering::Acquire);
                    ids.extend(std::iter::from_fn(|| queue.complete_oldest()).map(|p| p.id));
                    if last {
                        return ids;
                    }
                }
            });
            (poster.join().unwrap(), completer.join().unwrap())
        });
        assert!(completed.into_iter().eq(0..accepted as u64), "{accepted}");
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
        let reset = || work.reset(&mut work.send.poster(), &mut work.receive.poster());
        reset();
        assert!(!work.failed() && work.to_report());
        reset();
        work.close();
        assert!(!work.to_report());
    }

    #[test]
    fn numbers_come_apart_again() {
        assert_eq!(parts(number(0xffff_0001, u32::MAX)), (0xffff_0001, u32::MAX));
    }
}
