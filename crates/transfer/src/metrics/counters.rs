//! What the threads of an engine count: each for itself, as far as there are places.
//!
//! A place is a few cache lines that usually one thread writes. A submission, or a group of requests that end
//! together, costs an addition for each number, and a request by itself costs none.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::histogram::Buckets;
use super::{RequestCounts, Stages, TransportMetrics};
use crate::transport::{NAMES, name_of};
use crate::{Opcode, TransferState};

/// Places. Threads that are more share them.
const PLACES: usize = 8;

/// One submission of so many is timed where requests are copied by who submits them: the clock would take a part of
/// the time of each.
const TIMED_COPIES: u32 = 16;

/// What all transports count.
#[derive(Debug)]
pub(crate) struct Counters {
    start: Instant,
    pub(super) started_at: SystemTime,
    places: Box<[Place]>,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Place {
    transports: [Numbers; NAMES.len()],
}

/// Of one transport.
#[derive(Debug, Default)]
struct Numbers {
    submitted: AtomicU64,
    /// Requests that another transport went on with.
    moved: AtomicU64,
    /// Requests that have ended, by the number of their state.
    ended: [AtomicU64; 7],
    /// Bytes of READs and WRITEs that have arrived, of requests that have ended.
    bytes: [AtomicU64; 2],
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

static NEXT_THREAD: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The number of this thread, from 1.
    static THREAD: Cell<u32> = const { Cell::new(0) };
    /// Submissions of this thread, and those that it copies: one in so many of these is timed, whatever it submits
    /// between them.
    static SUBMISSIONS: [Cell<u32>; 2] = const { [Cell::new(0), Cell::new(0)] };
}

/// The place of this thread.
fn place() -> usize {
    let number = THREAD.with(|thread| match thread.get() {
        0 => {
            let number = NEXT_THREAD.fetch_add(1, Ordering::Relaxed) | 1 << 31;
            thread.set(number);
            number
        }
        number => number,
    });
    number as usize % PLACES
}

/// Which of `count` requests of a submission is timed, if one is: each as likely as the others, since the first of
/// many waits for less than the last.
pub(super) fn chosen(count: usize, copies: bool) -> Option<usize> {
    let turn = SUBMISSIONS.with(|turns| {
        let turn = &turns[usize::from(copies)];
        turn.replace(turn.get().wrapping_add(1))
    });
    if count == 0 || (copies && !turn.is_multiple_of(TIMED_COPIES)) {
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
            places: (0..PLACES).map(|_| Place::default()).collect(),
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

    fn numbers(&self, transport: u8) -> Option<&Numbers> {
        self.places[place()].transports.get(usize::from(transport).checked_sub(1)?)
    }

    /// So many requests are taken by a transport, by its number.
    pub(crate) fn submitted(&self, transport: u8, count: usize) {
        if let Some(numbers) = self.numbers(transport) {
            numbers.submitted.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// So many requests go on over another transport.
    #[cold]
    pub(crate) fn moved(&self, from: u8, to: u8, count: usize) {
        self.submitted(to, count);
        if let Some(numbers) = self.numbers(from) {
            numbers.moved.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// Requests that are COMPLETED, and bytes of these and others that have ended.
    pub(crate) fn completed(&self, transport: u8, tally: &Tally) {
        let Some(numbers) = self.numbers(transport) else { return };
        let [read, written] = &numbers.bytes;
        add(&numbers.ended[TransferState::Completed as usize], tally.completed);
        add(read, tally.bytes[Opcode::Read as usize]);
        add(written, tally.bytes[Opcode::Write as usize]);
    }

    /// A request has ended otherwise.
    #[cold]
    pub(crate) fn not_completed(&self, transport: u8, state: u8) {
        let Some(numbers) = self.numbers(transport) else { return };
        if let Some(number) = numbers.ended.get(usize::from(state)) {
            number.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How long the stages of a request took that was timed.
    pub(super) fn timed(&self, transport: u8, times: Times) {
        let Some(numbers) = self.numbers(transport) else { return };
        let Times { submitted, posted, acknowledged, told } = times;
        numbers.queued.add(posted.saturating_sub(submitted));
        numbers.transferring.add(acknowledged.saturating_sub(posted));
        numbers.completing.add(told.saturating_sub(acknowledged));
        numbers.all.add(told.saturating_sub(submitted));
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
        for numbers in all() {
            numbers.queued.add_to(&mut stages.queued);
            numbers.transferring.add_to(&mut stages.transferring);
            numbers.completing.add_to(&mut stages.completing);
            numbers.all.add_to(&mut stages.all);
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
    use std::thread;

    use super::*;
    use crate::transport::code_of;

    #[test]
    fn what_all_threads_count_is_one_sum() {
        let counters = Counters::default();
        let (shm, index) = (code_of("shm"), usize::from(code_of("shm")) - 1);
        thread::scope(|scope| {
            for _ in 0..2 * PLACES {
                scope.spawn(|| {
                    counters.submitted(shm, 4);
                    counters.completed(shm, &Tally { completed: 2, bytes: [30, 4] });
                    counters.not_completed(shm, TransferState::Timeout as u8);
                    let (submitted, posted) = (1, 1001);
                    let times = Times { submitted, posted, acknowledged: 3001, told: 3002 };
                    counters.timed(shm, times);
                });
            }
        });
        let threads = 2 * PLACES as u64;
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
    fn each_request_of_a_submission_is_as_likely_to_be_timed() {
        thread::spawn(|| {
            let mut counts = [0; 10];
            for _ in 0..1000 {
                counts[chosen(10, false).unwrap()] += 1;
            }
            assert!(counts.iter().all(|count| (90..=110).contains(count)), "{counts:?}");
            let timed = (0..1600).filter(|_| chosen(1, true).is_some()).count();
            assert_eq!(timed, 100);
            assert_eq!(chosen(0, false), None);
            // Others between them, as many, change nothing.
            let timed =
                (0..1600).filter(|_| chosen(1, false).is_none() || chosen(1, true).is_some());
            assert_eq!(timed.count(), 100);
        })
        .join()
        .unwrap();
    }
}
