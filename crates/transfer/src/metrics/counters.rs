//! What the threads of an engine count: each for itself, as far as there are places.
//!
//! A place is a few cache lines that one thread writes, so that to add is to load and to store. Threads that are more
//! share some, and add to these by one instruction of the processor, which takes as long as twenty others. A submission, or
//! a group of requests that end together, costs an addition for each number, and a request by itself costs none.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::histogram::Buckets;
use super::{RequestCounts, Stages, TransportMetrics};
use crate::transport::{NAMES, name_of};
use crate::{Opcode, TransferState};

/// So many threads have a place for themselves.
const OWN: usize = 32;

/// Places that the others share.
const SHARED: usize = 8;

/// One submission of so many is timed, as the clock takes a part of the time of each: of those to peers, and of those
/// whose requests are copied by who submits them.
const TIMED: [u32; 2] = [4, 16];

/// What all transports count.
#[derive(Debug)]
pub(crate) struct Counters {
    start: Instant,
    pub(super) started_at: SystemTime,
    places: Box<[Place]>,
    /// Of requests that were timed.
    durations: Box<[[Durations; NAMES.len()]]>,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Place {
    transports: [Numbers; NAMES.len()],
}

/// Of one transport. All numbers of a place are written as [`Adding`] says.
#[derive(Debug, Default)]
struct Numbers {
    submitted: AtomicU64,
    /// Requests that another transport went on with.
    moved: AtomicU64,
    /// Requests that have ended, by the number of their state.
    ended: [AtomicU64; 7],
    /// Bytes of READs and WRITEs that have arrived, of requests that have ended.
    bytes: [AtomicU64; 2],
}

/// How long the stages of requests of one transport took. Any thread adds to them.
#[derive(Debug, Default)]
struct Durations {
    queued: Buckets,
    transferring: Buckets,
    completing: Buckets,
    all: Buckets,
}

/// Requests of one transport that have ended together.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) completed: u64,
    /// By the number of their opcode.
    pub(crate) bytes: [u64; 2],
}

/// Of a request that was timed, in nanoseconds since the engine's start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) submitted: u64,
    pub(super) posted: u64,
    pub(super) acknowledged: u64,
    pub(super) told: u64,
}

/// Places that threads have for themselves, as bits. No lock: a process that was forked has them, too.
static TAKEN: AtomicU32 = AtomicU32::new(0);
static NEXT_SHARED: AtomicU32 = AtomicU32::new(0);
const _: () = assert!(OWN == u32::BITS as usize);

thread_local! {
    static SEAT: Seat = const { Seat(Cell::new(None)) };
    /// Submissions of this thread, and those that it copies: one in so many of these is timed, whatever it submits
    /// between them.
    static SUBMISSIONS: [Cell<u32>; 2] = const { [Cell::new(0), Cell::new(0)] };
}

/// The place of a thread, once it has one.
struct Seat(Cell<Option<usize>>);

impl Seat {
    fn place(&self) -> usize {
        self.0.get().unwrap_or_else(|| {
            let place = Self::take();
            self.0.set(Some(place));
            place
        })
    }

    fn take() -> usize {
        let free = |taken: u32| (taken != u32::MAX).then(|| taken | (taken + 1));
        // What the thread has written that had it before is seen.
        match TAKEN.fetch_update(Ordering::Acquire, Ordering::Relaxed, free) {
            Ok(before) => before.trailing_ones() as usize,
            Err(_) => OWN + NEXT_SHARED.fetch_add(1, Ordering::Relaxed) as usize % SHARED,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(place) = self.0.take()
            && place < OWN
        {
            TAKEN.fetch_and(!(1 << place), Ordering::Release);
        }
    }
}

/// The place of this thread.
fn place() -> usize {
    // A thread that ends has none any more.
    SEAT.try_with(Seat::place).unwrap_or(OWN)
}

/// How a thread adds to the numbers of its place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Adding {
    /// Nobody else does.
    Alone,
    Among,
}

impl Adding {
    /// Leaves the cache line alone where there is nothing to add. Who sees it sees what this thread has seen counted.
    #[inline]
    fn add(self, number: &AtomicU64, more: u64) {
        match self {
            _ if more == 0 => {}
            Self::Alone => number.store(number.load(Ordering::Relaxed) + more, Ordering::Release),
            Self::Among => _ = number.fetch_add(more, Ordering::Release),
        }
    }
}

/// Which of `count` requests of a submission is timed, if one is: each as likely as the others, since the first of
/// many waits for less than the last.
pub(super) fn chosen(count: usize, copies: bool) -> Option<usize> {
    let turn = SUBMISSIONS.with(|turns| {
        let turn = &turns[usize::from(copies)];
        turn.replace(turn.get().wrapping_add(1))
    });
    if count == 0 || !turn.is_multiple_of(TIMED[usize::from(copies)]) {
        return None;
    }
    // Multiples of this odd number are spread evenly over all numbers of 32 bits (Knuth, TAOCP 3, 6.4).
    let spread = u64::from(turn.wrapping_mul(0x9E37_79B1));
    Some(((spread * count as u64) >> 32) as usize)
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            started_at: SystemTime::now(),
            places: (0..OWN + SHARED).map(|_| Place::default()).collect(),
            durations: (0..SHARED).map(|_| Default::default()).collect(),
        }
    }
}

impl Counters {
    /// Nanoseconds since the start, from 1.
    pub(super) fn now(&self) -> u64 {
        (self.start.elapsed().as_nanos() as u64).max(1)
    }

    pub(super) fn uptime(&self) -> Duration {
        self.start.elapsed()
    }

    fn numbers(&self, transport: u8) -> Option<(&Numbers, Adding)> {
        let place = place();
        let numbers = self.places[place].transports.get(usize::from(transport).checked_sub(1)?)?;
        Some((numbers, if place < OWN { Adding::Alone } else { Adding::Among }))
    }

    /// So many requests are taken by a transport, by its number.
    pub(crate) fn submitted(&self, transport: u8, count: usize) {
        if let Some((numbers, adding)) = self.numbers(transport) {
            adding.add(&numbers.submitted, count as u64);
        }
    }

    /// So many requests go on over another transport.
    #[cold]
    pub(crate) fn moved(&self, from: u8, to: u8, count: usize) {
        self.submitted(to, count);
        if let Some((numbers, adding)) = self.numbers(from) {
            adding.add(&numbers.moved, count as u64);
        }
    }

    /// Requests that are COMPLETED, and bytes of these and others that have ended.
    pub(crate) fn completed(&self, transport: u8, tally: &Tally) {
        let Some((numbers, adding)) = self.numbers(transport) else { return };
        let [read, written] = &numbers.bytes;
        adding.add(&numbers.ended[TransferState::Completed as usize], tally.completed);
        adding.add(read, tally.bytes[Opcode::Read as usize]);
        adding.add(written, tally.bytes[Opcode::Write as usize]);
    }

    /// A request has ended otherwise.
    #[cold]
    pub(crate) fn not_completed(&self, transport: u8, state: u8) {
        let Some((numbers, adding)) = self.numbers(transport) else { return };
        if let Some(number) = numbers.ended.get(usize::from(state)) {
            adding.add(number, 1);
        }
    }

    /// How long the stages of a request took that was timed.
    pub(super) fn timed(&self, transport: u8, times: Times) {
        let durations = &self.durations[place() % SHARED];
        let index = usize::from(transport).checked_sub(1);
        let Some(durations) = index.and_then(|index| durations.get(index)) else { return };
        let Times { submitted, posted, acknowledged, told } = times;
        durations.queued.add(posted.saturating_sub(submitted));
        durations.transferring.add(acknowledged.saturating_sub(posted));
        durations.completing.add(told.saturating_sub(acknowledged));
        durations.all.add(told.saturating_sub(submitted));
    }

    /// What was counted of the transport that has this place among all names.
    pub(super) fn transport(&self, index: usize) -> TransportMetrics {
        let all = || self.places.iter().map(|place| &place.transports[index]);
        let sum = |of: &dyn Fn(&Numbers) -> &AtomicU64| {
            all().map(|numbers| of(numbers).load(Ordering::Acquire)).sum::<u64>()
        };
        let ended = |state: TransferState| sum(&|numbers| &numbers.ended[state as usize]);
        // First what has ended: each of it was submitted before.
        let (completed, failed) = (ended(TransferState::Completed), ended(TransferState::Failed));
        let (canceled, timeout) = (ended(TransferState::Canceled), ended(TransferState::Timeout));
        let moved = sum(&|numbers| &numbers.moved);
        let submitted = sum(&|numbers| &numbers.submitted);
        let bytes = |opcode: Opcode| sum(&|numbers| &numbers.bytes[opcode as usize]);
        let mut stages = Stages::default();
        for durations in self.durations.iter().map(|of| &of[index]) {
            durations.queued.add_to(&mut stages.queued);
            durations.transferring.add_to(&mut stages.transferring);
            durations.completing.add_to(&mut stages.completing);
            durations.all.add_to(&mut stages.all);
        }
        TransportMetrics {
            transport: name_of(index as u8 + 1).unwrap_or_default().to_owned(),
            requests: RequestCounts {
                submitted,
                completed,
                failed,
                canceled,
                timeout,
                moved,
                in_flight: submitted
                    .saturating_sub(completed + failed + canceled + timeout + moved),
            },
            read_bytes: bytes(Opcode::Read),
            written_bytes: bytes(Opcode::Write),
            retransmissions: 0,
            connections_served: 0,
            busy_polls: 0,
            sleeps: 0,
            stages,
        }
    }
}

/// Leaves the cache line alone where there is nothing to add.
#[inline]
pub(super) fn add(number: &AtomicU64, more: u64) {
    if more > 0 {
        number.fetch_add(more, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::transport::code_of;

    #[test]
    fn what_all_threads_count_is_one_sum() {
        let counters = Counters::default();
        let (shm, index) = (code_of("shm"), usize::from(code_of("shm")) - 1);
        let together = Barrier::new(OWN + SHARED);
        thread::scope(|scope| {
            for _ in 0..OWN + SHARED {
                scope.spawn(|| {
                    counters.submitted(shm, 1);
                    // All of them are there at once.
                    together.wait();
                    counters.submitted(shm, 3);
                    counters.completed(shm, &Tally { completed: 2, bytes: [30, 4] });
                    counters.not_completed(shm, TransferState::Timeout as u8);
                    let (submitted, posted) = (1, 1001);
                    let times = Times { submitted, posted, acknowledged: 3001, told: 3002 };
                    counters.timed(shm, times);
                });
            }
        });
        let threads = (OWN + SHARED) as u64;
        let found = counters.transport(index);
        assert_eq!(found.transport, "shm");
        let expected = RequestCounts {
            submitted: 4 * threads,
            completed: 2 * threads,
            timeout: threads,
            in_flight: threads,
            ..RequestCounts::default()
        };
        assert_eq!(found.requests, expected);
        assert_eq!((found.read_bytes, found.written_bytes), (30 * threads, 4 * threads));
        let Stages { queued, transferring, completing, all } = found.stages;
        let sums =
            [queued, transferring, completing, all].map(|it| (it.count(), it.sum_ns / threads));
        assert_eq!(sums, [1000, 2000, 1, 3001].map(|sum| (threads, sum)));
        // A number that no transport has is nobody's.
        counters.submitted(0, 1);
        counters.submitted(200, 1);
        // What goes on elsewhere is in flight there.
        counters.moved(shm, code_of("tcp"), 3);
        let requests = |name| counters.transport(usize::from(code_of(name)) - 1).requests;
        assert_eq!((requests("shm").moved, requests("shm").in_flight), (3, threads - 3));
        assert_eq!((requests("tcp").moved, requests("tcp").in_flight), (0, 3));
    }

    #[test]
    fn the_place_of_a_thread_that_has_ended_is_free() {
        // Other tests have threads, too, but not so many one after the other.
        for _ in 0..20 * OWN {
            let place = thread::spawn(|| (place(), place())).join().unwrap();
            assert_eq!(place.0, place.1);
        }
        let limit = Instant::now() + Duration::from_secs(60);
        while TAKEN.load(Ordering::Relaxed) == u32::MAX {
            assert!(Instant::now() < limit, "places of threads that have ended are not free");
            thread::yield_now();
        }
    }

    #[test]
    fn each_request_of_a_submission_is_as_likely_to_be_timed() {
        thread::spawn(|| {
            let mut counts = [0; 10];
            (0..4000).filter_map(|_| chosen(10, false)).for_each(|index| counts[index] += 1);
            assert_eq!(counts.iter().sum::<u32>(), 1000);
            assert!(counts.iter().all(|count| (90..=110).contains(count)), "{counts:?}");
            let timed = (0..1600).filter(|_| chosen(1, true).is_some()).count();
            assert_eq!(timed, 100);
            assert_eq!(chosen(0, false), None);
            // Others between them, as many, change nothing.
            let both = (0..1600).map(|_| (chosen(1, false), chosen(1, true)));
            assert_eq!(both.filter(|(_, copied)| copied.is_some()).count(), 100);
        })
        .join()
        .unwrap();
    }
}
