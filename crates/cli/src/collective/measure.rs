//! A collective again and again, with a clock and a check.

use std::ops::Range;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use millstream_collective::{
    Buffer, Call, CollectiveError, Communicator, FailoverReport, ReduceOperation,
};
use serde::{Deserialize, Serialize};

use super::number::{Number, Reference, of_type};
use super::work::Work;
use crate::bench::figures::per;

/// The longest latency, in nanoseconds, that is told from longer ones: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// What one host says of one size.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Report {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) collective: String,
    /// Bytes of the longer vector.
    pub(crate) bytes: u64,
    /// Elements of the shorter one.
    pub(crate) count: u64,
    pub(crate) iters: u32,
    /// Bytes per second.
    pub(crate) algbw_mb_per_s: f64,
    /// The same times what a ring moves over each link: comparable between numbers of hosts and
    /// algorithms.
    pub(crate) busbw_mb_per_s: f64,
    pub(crate) latency_us: Latency,
    /// Elements of results that were checked, and that were wrong.
    pub(crate) checked: u64,
    pub(crate) wrong: u64,
    /// Why the ranks take the place of a switch, where they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fallback: Option<String>,
    /// By which way it went: `switch`, `shared-memory`, or `hosts`, which is both.
    pub(crate) path: String,
    /// How the ranks have gone on over other trees, each time that a switch was lost until then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failovers: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Latency {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// How often.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repetitions {
    pub(super) iters: u32,
    pub(super) warmup_iters: u32,
    /// Whether every element of every result is checked.
    pub(super) verify: bool,
}

/// Does all iterations of one size.
pub(super) fn measure(
    communicator: &mut Communicator,
    work: &Work,
    count: usize,
    repetitions: Repetitions,
) -> Result<Report, CollectiveError> {
    let measure = of_type!(work.reduction.dtype, measure_of);
    measure(communicator, work, count, repetitions)
}

fn measure_of<T: Number>(
    communicator: &mut Communicator,
    work: &Work,
    count: usize,
    repetitions: Repetitions,
) -> Result<Report, CollectiveError> {
    let Repetitions { iters, warmup_iters, verify } = repetitions;
    let (rank, world, call) = (communicator.rank(), communicator.world(), work.call);
    let fallback = communicator.fallback().map(str::to_owned);
    let path = communicator.route().name().to_owned();
    communicator.set_mode(work.reduction.mode.into());
    let mut vectors = Vectors::<T>::new(communicator, work, count)?;
    for _ in 0..warmup_iters {
        vectors.call(communicator, call)?;
    }
    let bounds = Histogram::<u64>::new_with_bounds(1, LONGEST_NS, 3);
    let mut latencies = bounds.expect("these bounds are in order");
    let mut total = Duration::ZERO;
    let (mut checked, mut wrong) = (0, 0);
    for iteration in 0..iters {
        let reference = Reference { call, world, count, iteration };
        vectors.fill(&reference, rank);
        // So that nobody's filling and checking counts in anybody's time.
        communicator.all_reduce_in_place(&mut [1_i32], ReduceOperation::Sum)?;
        let start = Instant::now();
        vectors.call(communicator, call)?;
        let elapsed = start.elapsed();
        total += elapsed;
        latencies.saturating_record(elapsed.as_nanos() as u64);
        if verify {
            checked += vectors.checked() as u64;
            wrong += vectors.wrong(&reference, rank) as u64;
        }
    }
    let bytes = work.bytes(count, world);
    let seconds = total.as_secs_f64();
    let algbw_mb_per_s = per(bytes as f64 * f64::from(iters) / 1e6, seconds);
    let microseconds = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Report {
        rank,
        world,
        collective: call.collective().name().to_owned(),
        bytes,
        count: count as u64,
        iters,
        algbw_mb_per_s,
        busbw_mb_per_s: algbw_mb_per_s * work.bus_factor(world),
        latency_us: Latency {
            mean: per(seconds * 1e6, iters.into()),
            p50: microseconds(0.5),
            p99: microseconds(0.99),
        },
        checked,
        wrong,
        fallback,
        path,
        failovers: communicator.failovers().iter().map(failover).collect(),
    })
}

/// Why, and over what.
fn failover(report: &FailoverReport) -> String {
    let FailoverReport { reason, switches, fallback, took } = report;
    let over = match fallback {
        Some(why) => format!("the ranks take the place of a switch: {why}"),
        None if switches.is_empty() => {
            "the lowest rank of this host is connected to another switch".to_owned()
        }
        None => {
            let switch = |(name, address): &(String, _)| format!("switch {name} at {address}");
            let switches: Vec<String> = switches.iter().map(switch).collect();
            format!("the ranks use {}", switches.join(", "))
        }
    };
    format!("{reason}; after {:.1} s {over}", took.as_secs_f64())
}

/// What a rank reads and writes: two vectors, or parts of one.
struct Vectors<T: Number> {
    /// `None` in place.
    source: Option<Buffer<T>>,
    destination: Buffer<T>,
    parts: Parts,
}

/// Where in its vectors a rank has its source and its result. Either may be empty.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Parts {
    pub(crate) source: Range<usize>,
    pub(crate) result: Range<usize>,
    /// How long the vectors are.
    pub(crate) lengths: [usize; 2],
}

impl Parts {
    /// For so many elements as in the table of [`Call`]. `None` when that is too much for the machine.
    pub(crate) fn new(
        call: Call,
        rank: u32,
        world: u32,
        count: usize,
        in_place: bool,
    ) -> Option<Self> {
        let [source, destination] = call.lengths(world, count)?;
        let part = count * rank as usize..count * (rank as usize + 1);
        let (mut source_part, mut result_part) = (0..source, 0..destination);
        let mut lengths = [source, destination];
        if in_place {
            lengths = [source.max(destination); 2];
            match call {
                Call::AllGather => source_part = part,
                Call::ReduceScatter(_) => result_part = part,
                _ => {}
            }
        }
        match call {
            Call::Reduce { root, .. } if root != rank => result_part = 0..0,
            Call::Broadcast { root } if root != rank => source_part = 0..0,
            _ => {}
        }
        Some(Self { source: source_part, result: result_part, lengths })
    }

    /// What must be at a place of the destination when the call is over: a result, or what was there
    /// before.
    pub(crate) fn expected<T: Number>(
        &self,
        reference: &Reference,
        rank: u32,
        in_place: bool,
        index: usize,
    ) -> T {
        if self.result.contains(&index) {
            reference.result(rank, index - self.result.start)
        } else if in_place && self.source.contains(&index) {
            reference.source(rank, index - self.source.start)
        } else {
            T::FILLER
        }
    }
}

impl<T: Number> Vectors<T> {
    fn new(
        communicator: &Communicator,
        work: &Work,
        count: usize,
    ) -> Result<Self, CollectiveError> {
        let (rank, world) = (communicator.rank(), communicator.world());
        let parts = Parts::new(work.call, rank, world, count, work.in_place).ok_or(
            CollectiveError::TooLong { count: count as u64, data_type: work.reduction.dtype },
        )?;
        let source = match work.in_place {
            true => None,
            false => Some(communicator.allocate(parts.lengths[0])?),
        };
        Ok(Self { source, destination: communicator.allocate(parts.lengths[1])?, parts })
    }

    fn call(&mut self, communicator: &mut Communicator, call: Call) -> Result<(), CollectiveError> {
        match &self.source {
            Some(source) => communicator.call_buffers(call, source, &mut self.destination),
            None => communicator.call_buffer_in_place(call, &mut self.destination),
        }
    }

    fn fill(&mut self, reference: &Reference, rank: u32) {
        self.destination.fill(T::FILLER);
        let source = self.source.as_mut().unwrap_or(&mut self.destination);
        for (index, value) in source[self.parts.source.clone()].iter_mut().enumerate() {
            *value = reference.source(rank, index);
        }
    }

    /// How many elements are checked.
    fn checked(&self) -> usize {
        self.destination.len()
    }

    /// How many are not what they must be.
    fn wrong(&self, reference: &Reference, rank: u32) -> usize {
        let in_place = self.source.is_none();
        let right = |index| self.parts.expected(reference, rank, in_place, index);
        self.destination.iter().enumerate().filter(|&(index, value)| *value != right(index)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_has_and_gets() {
        let broadcast = Call::Broadcast { root: 1 };
        let reduce = Call::Reduce { operation: ReduceOperation::Sum, root: 1 };
        let scatter = Call::ReduceScatter(ReduceOperation::Sum);
        for (call, rank, in_place, source, result, lengths) in [
            (Call::AllReduce(ReduceOperation::Sum), 0, false, 0..5, 0..5, [5, 5]),
            (reduce, 0, true, 0..5, 0..0, [5, 5]),
            (reduce, 1, false, 0..5, 0..5, [5, 5]),
            (broadcast, 0, false, 0..0, 0..5, [5, 5]),
            (broadcast, 1, true, 0..5, 0..5, [5, 5]),
            (Call::Barrier, 1, true, 0..0, 0..0, [0, 0]),
            (scatter, 2, false, 0..15, 0..5, [15, 5]),
            (scatter, 2, true, 0..15, 10..15, [15, 15]),
            (Call::AllGather, 1, false, 0..5, 0..15, [5, 15]),
            (Call::AllGather, 1, true, 5..10, 0..15, [15, 15]),
        ] {
            let count = if call == Call::Barrier { 0 } else { 5 };
            let parts = Parts::new(call, rank, 3, count, in_place);
            assert_eq!(parts, Some(Parts { source, result, lengths }), "{call:?}");
        }
    }

    #[test]
    fn what_is_no_result_stays() {
        let call = Call::ReduceScatter(ReduceOperation::Sum);
        let reference = Reference { call, world: 3, count: 5, iteration: 0 };
        let parts = Parts::new(call, 2, 3, 5, true).unwrap();
        let expected = |index| parts.expected::<i32>(&reference, 2, true, index);
        assert_eq!(expected(9), reference.source::<i32>(2, 9));
        assert_eq!(expected(10), reference.result::<i32>(2, 0));
        let call = Call::Reduce { operation: ReduceOperation::Sum, root: 1 };
        let reference = Reference { call, ..reference };
        let parts = Parts::new(call, 2, 3, 5, false).unwrap();
        assert_eq!(parts.expected::<i32>(&reference, 2, false, 0), i32::FILLER);
    }
}
