//! `allreduce`: one host of an AllReduce.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use millstream_collective::{Buffer, Communicator, DataType, Element, JoinConfig, ReduceOperation};
use millstream_verbs::SoftConfig;
use serde::{Deserialize, Serialize};

use crate::failure::{not_yet, usage};
use crate::{address, output, units};

/// The most hosts in a group.
pub(crate) const MAX_HOSTS: u32 = 64;

/// The longest latency, in nanoseconds, that is told from longer ones: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Arguments of `allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The controller's HOST:PORT
    #[arg(long, value_name = "ADDR")]
    controller: String,
    /// The group to take part in
    #[arg(long, value_name = "G")]
    group: String,
    /// Hosts in the group
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_HOSTS)))]
    world: u32,
    /// This host's place among them, from 0
    #[arg(long, value_name = "R")]
    rank: u32,
    /// Local address [default: one that leads to the controller]
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
    #[command(flatten)]
    vector: Vector,
    /// How often
    #[arg(long, value_name = "I", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Check every element of every result
    #[arg(long)]
    verify: bool,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What is reduced, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Vector {
    /// Bytes of the vector
    #[arg(long, value_name = "S", value_parser = units::size)]
    pub(crate) size: u64,
    /// Type of the elements, such as int32
    #[arg(long, value_name = "T")]
    pub(crate) dtype: String,
    /// Operation, such as sum
    #[arg(long, value_name = "O")]
    pub(crate) op: String,
    /// How vectors travel
    #[arg(long, value_enum, default_value = "write")]
    pub(crate) mode: Mode,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Mode {
    /// RDMA WRITE: the result lands where it belongs
    Write,
    /// SEND into receive requests
    Send,
}

impl Vector {
    /// Checks that this version can do it; returns the number of elements.
    pub(crate) fn check(&self) -> anyhow::Result<usize> {
        let data_type: DataType =
            self.dtype.parse().map_err(|error| usage(format!("--dtype: {error}")))?;
        let operation: ReduceOperation =
            self.op.parse().map_err(|error| usage(format!("--op: {error}")))?;
        if (data_type, operation) != (DataType::Int32, ReduceOperation::Sum) {
            return Err(not_yet(&format!(
                "this version has no {operation} of {data_type}, only sum of int32"
            )));
        }
        if self.mode == Mode::Send {
            return Err(not_yet("this version has no --mode send, only write"));
        }
        let size = self.size;
        if !size.is_multiple_of(4) {
            return Err(usage(format!("--size {size}: elements of int32 have 4 bytes each")));
        }
        usize::try_from(size / 4).map_err(|_| usage(format!("--size {size} is too much")))
    }
}

/// What one host says at the end.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Report {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// Bytes of the vector.
    pub(crate) bytes: u64,
    pub(crate) iters: u32,
    /// Bytes of the vector per second.
    pub(crate) algbw_mb_per_s: f64,
    /// The same times 2 (n - 1) / n: comparable between numbers of hosts and algorithms.
    pub(crate) busbw_mb_per_s: f64,
    pub(crate) latency_us: Latency,
    /// Elements of results that were checked, and that were wrong.
    pub(crate) checked: u64,
    pub(crate) wrong: u64,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Latency {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// Runs `allreduce`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { world, rank, .. } = *arguments;
    if rank >= world {
        return Err(usage(format!(
            "--rank {rank}: with --world {world}, ranks are 0 to {}",
            world - 1
        )));
    }
    let count = arguments.vector.check()?;
    // Vectors that the system does not have the memory for are an error, not an abort.
    let room = Vec::<i32>::new().try_reserve_exact(count.saturating_mul(2));
    room.with_context(|| format!("no memory for two vectors of {} bytes", arguments.vector.size))?;
    let controller = address::resolve(&arguments.controller)?;
    let device = address::open_device(arguments.bind, controller.ip(), |address| SoftConfig {
        segmentation_offload: !arguments.no_segmentation_offload,
        ..SoftConfig::new(address)
    })?;
    let config = JoinConfig::new(controller, &arguments.group, world, rank, &device);
    let mut communicator = Communicator::join(&config)
        .with_context(|| format!("rank {rank} of {world} cannot join group {}", arguments.group))?;
    if !arguments.json {
        let (name, address) = communicator.switch();
        let group = &arguments.group;
        output::line(&format!(
            "rank {rank} of {world} in group {group}, over switch {name} at {address}"
        ));
    }
    let report = reduce(&mut communicator, arguments, count).with_context(|| {
        let (name, address) = communicator.switch();
        format!("the allreduce of rank {rank} over switch {name} at {address} failed")
    })?;
    drop(communicator);
    if arguments.json {
        output::json(&report)?;
    } else {
        output::line(&text(&report));
    }
    if report.wrong > 0 {
        bail!("{} of {} elements are wrong", report.wrong, report.checked);
    }
    Ok(())
}

/// Does all iterations.
fn reduce(
    communicator: &mut Communicator,
    arguments: &Arguments,
    count: usize,
) -> anyhow::Result<Report> {
    let Arguments { world, rank, iters, verify, .. } = *arguments;
    let mut source: Buffer<i32> = communicator.allocate(count)?;
    let mut result: Buffer<i32> = communicator.allocate(count)?;
    let mut latencies = Histogram::<u64>::new_with_bounds(1, LONGEST_NS, 3)?;
    let mut total = Duration::ZERO;
    let (mut checked, mut wrong) = (0, 0);
    for iteration in 0..iters {
        for (index, value) in source.iter_mut().enumerate() {
            *value = element(iteration, rank, index);
        }
        result.fill(i32::MIN);
        // So that nobody's filling and checking counts in anybody's time.
        communicator.all_reduce_in_place(&mut [1_i32], ReduceOperation::Sum)?;
        let start = Instant::now();
        communicator.all_reduce_buffers(&source, &mut result, ReduceOperation::Sum)?;
        let elapsed = start.elapsed();
        total += elapsed;
        latencies.saturating_record(elapsed.as_nanos() as u64);
        if verify {
            let right = |index| sum(iteration, world, index);
            wrong +=
                result.iter().enumerate().filter(|&(i, value)| *value != right(i)).count() as u64;
            checked += count as u64;
        }
    }
    let bytes = count as u64 * u64::from(i32::DATA_TYPE.size());
    let algbw_mb_per_s = bytes as f64 * f64::from(iters) / total.as_secs_f64() / 1e6;
    let microseconds = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Report {
        rank,
        world,
        bytes,
        iters,
        algbw_mb_per_s,
        busbw_mb_per_s: algbw_mb_per_s * 2.0 * f64::from(world - 1) / f64::from(world),
        latency_us: Latency { p50: microseconds(0.5), p99: microseconds(0.99) },
        checked,
        wrong,
    })
}

/// What a rank contributes at a place: any number of 32 bits, so that sums wrap around, and
/// another one at each place, rank and iteration.
fn element(iteration: u32, rank: u32, index: usize) -> i32 {
    let place = (index as u64) ^ (u64::from(iteration) << 40) ^ (u64::from(rank) << 58);
    let mixed = (place ^ (place >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 32) as i32
}

/// What the result must be there.
fn sum(iteration: u32, world: u32, index: usize) -> i32 {
    (0..world).fold(0, |sum: i32, rank| sum.wrapping_add(element(iteration, rank, index)))
}

fn text(report: &Report) -> String {
    let Report { rank, world, bytes, iters, algbw_mb_per_s, latency_us, .. } = report;
    let Latency { p50, p99 } = latency_us;
    let checks = match (report.checked, report.wrong) {
        (0, _) => "not checked".to_owned(),
        (checked, wrong) => format!("{checked} elements checked, {wrong} wrong"),
    };
    format!(
        "rank {rank} of {world}: {iters} x {} summed at {algbw_mb_per_s:.1} MB/s, {p50:.0} us \
         (p99 {p99:.0} us); {checks}",
        units::readable(*bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_differ_and_sums_wrap() {
        let mut seen: Vec<i32> = (0..64).map(|rank| element(0, rank, 5)).collect();
        seen.extend((1..64).map(|iteration| element(iteration, 0, 5)));
        seen.extend((6..64).map(|index| element(0, 0, index)));
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert!(count - seen.len() < 2);
        let wraps = |index| {
            let exact: i64 = (0..4).map(|rank| i64::from(element(0, rank, index))).sum();
            i64::from(sum(0, 4, index)) != exact
        };
        assert!((0..100).any(wraps));
    }
}
