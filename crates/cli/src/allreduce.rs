//! `allreduce`: one host of an AllReduce.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use millstream_collective::{
    Awaited, Buffer, Communicator, DataType, Element, JoinConfig, JoinError, ReduceOperation,
};
use millstream_verbs::SoftConfig;
use serde::{Deserialize, Serialize};

use crate::bench::figures::per;
use crate::failure::{not_yet, usage};
use crate::note::note;
use crate::{address, controller, output, units};

/// The most hosts in a group.
const MAX_HOSTS: u32 = 65_536;

/// The longest latency, in nanoseconds, that is told from longer ones: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// How long a rank waits in silence before it says for what.
const SILENCE: Duration = Duration::from_secs(2);
/// How often it says so again while nothing changes.
const REMINDER: Duration = Duration::from_secs(10);
/// Between attempts to reach a controller that is not there yet.
const RETRY: Duration = Duration::from_millis(100);

/// Arguments of `allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The controller's HOST:PORT
    #[arg(long, value_name = "ADDR", default_value = controller::DEFAULT)]
    controller: String,
    /// The group to take part in
    #[arg(long, value_name = "G", default_value = "default")]
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
    /// Bytes of the vector, several with commas between, one after the other
    #[arg(long, value_name = "S,...", required = true, value_delimiter = ',', value_parser = units::size)]
    size: Vec<u64>,
    #[command(flatten)]
    reduction: Reduction,
    /// How often, for each size
    #[arg(long, value_name = "I", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// How often before that, without a figure
    #[arg(long, value_name = "I", default_value_t = 0)]
    warmup_iters: u32,
    /// Check every element of every result
    #[arg(long)]
    verify: bool,
    /// Wait up to so long for a controller that is not there yet
    #[arg(long, value_name = "D", default_value = "0s", value_parser = units::duration)]
    wait: Duration,
    /// Fail when other ranks or a switch are missing for so long, or an AllReduce takes longer
    /// [default: 30s for ranks and a switch, 60s for an AllReduce]
    #[arg(long, value_name = "D", value_parser = units::duration)]
    timeout: Option<Duration>,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
    /// Print one JSON object for each size
    #[arg(long)]
    json: bool,
}

/// How vectors are reduced.
#[derive(Args, Clone, Debug)]
pub(crate) struct Reduction {
    /// Type of the elements
    #[arg(long, value_name = "T", default_value = "int32")]
    pub(crate) dtype: String,
    /// Operation
    #[arg(long, value_name = "O", default_value = "sum")]
    pub(crate) op: String,
    /// How vectors travel
    #[arg(long, value_enum, default_value = "write", hide = true)]
    mode: Mode,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Mode {
    /// RDMA WRITE: the result lands where it belongs
    Write,
    /// SEND into receive requests
    Send,
}

impl Default for Reduction {
    fn default() -> Self {
        Self { dtype: "int32".to_owned(), op: "sum".to_owned(), mode: Mode::Write }
    }
}

impl Reduction {
    /// Checks that this version can do it with vectors of so many bytes; returns the number of
    /// elements.
    pub(crate) fn elements(&self, size: u64) -> anyhow::Result<usize> {
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
        if !size.is_multiple_of(4) {
            return Err(usage(format!("--size {size}: elements of int32 have 4 bytes each")));
        }
        usize::try_from(size / 4).map_err(|_| usage(format!("--size {size} is too much")))
    }
}

/// What one host says of one size.
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
    pub(crate) mean: f64,
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
    let counts = arguments.size.iter().map(|&size| arguments.reduction.elements(size));
    let counts = counts.collect::<anyhow::Result<Vec<usize>>>()?;
    let largest = counts.iter().copied().max().unwrap_or_default();
    // Vectors that the system does not have the memory for are an error, not an abort.
    let room = Vec::<i32>::new().try_reserve_exact(largest.saturating_mul(2));
    room.with_context(|| format!("no memory for two vectors of {largest} elements"))?;
    let mut communicator = join(arguments)?;
    if !arguments.json {
        let (name, address) = communicator.switch();
        let group = &arguments.group;
        output::line(&format!(
            "rank {rank} of {world} in group {}, over switch {} at {address}",
            output::escaped(group),
            output::escaped(name)
        ))?;
    }
    let (mut checked, mut wrong) = (0, 0);
    for count in counts {
        let report = reduce(&mut communicator, arguments, count).with_context(|| {
            let (name, address) = communicator.switch();
            format!("the allreduce of rank {rank} over switch {name} at {address} failed")
        })?;
        if arguments.json {
            output::json(&report)?;
        } else {
            output::line(&text(&report))?;
        }
        checked += report.checked;
        wrong += report.wrong;
    }
    drop(communicator);
    if wrong > 0 {
        bail!("{wrong} of {checked} elements are wrong");
    }
    Ok(())
}

/// Joins the group, and says what it waits for when that takes long.
fn join(arguments: &Arguments) -> anyhow::Result<Communicator> {
    let &Arguments { world, rank, wait, timeout, .. } = arguments;
    let controller = address::resolve(&arguments.controller)?;
    let device = address::open_device(arguments.bind, controller.ip(), |address| SoftConfig {
        segmentation_offload: !arguments.no_segmentation_offload,
        ..SoftConfig::new(address)
    })?;
    let mut config = JoinConfig::new(controller, &arguments.group, world, rank, &device);
    config.timeout = timeout.unwrap_or(config.timeout);
    config.call_timeout = timeout.unwrap_or(config.call_timeout);
    let (start, mut announcer) = (Instant::now(), Announcer::new());
    loop {
        let joined = Communicator::join_reporting(&config, |waiting| {
            announcer.say(&awaited(arguments, waiting.awaited.as_ref()), waiting.left);
        });
        match joined {
            Err(JoinError::Unreachable { .. }) if start.elapsed() < wait => {
                let what = format!("the controller at {controller}, which cannot be reached");
                announcer.say(&what, wait.saturating_sub(start.elapsed()));
                thread::sleep(RETRY.min(wait));
            }
            joined => {
                return joined.with_context(|| {
                    format!("rank {rank} of {world} cannot join group {}", arguments.group)
                });
            }
        }
    }
}

/// What a rank waits for, in words.
fn awaited(arguments: &Arguments, awaited: Option<&Awaited>) -> String {
    let Arguments { controller, group, world, .. } = arguments;
    match awaited {
        None => format!("an answer of the controller at {controller}"),
        Some(ranks @ Awaited::Ranks { .. }) => format!("{ranks} of {world} in group {group}"),
        Some(other) => format!("{other} for group {group}"),
    }
}

/// Says on stderr what a rank waits for: not at once, when it changes, and now and then again.
struct Announcer {
    start: Instant,
    said: Option<(String, Instant)>,
}

impl Announcer {
    fn new() -> Self {
        Self { start: Instant::now(), said: None }
    }

    fn say(&mut self, what: &str, left: Duration) {
        let news = match &self.said {
            None => self.start.elapsed() >= SILENCE,
            Some((before, when)) => before != what || when.elapsed() >= REMINDER,
        };
        if news {
            note(&format!("waiting for {what}; giving up in {:.0} s", left.as_secs_f64()));
            self.said = Some((what.to_owned(), Instant::now()));
        }
    }
}

/// Does all iterations of one size.
fn reduce(
    communicator: &mut Communicator,
    arguments: &Arguments,
    count: usize,
) -> anyhow::Result<Report> {
    let Arguments { world, rank, iters, warmup_iters, verify, .. } = *arguments;
    let mut source: Buffer<i32> = communicator.allocate(count)?;
    let mut result: Buffer<i32> = communicator.allocate(count)?;
    for _ in 0..warmup_iters {
        communicator.all_reduce_buffers(&source, &mut result, ReduceOperation::Sum)?;
    }
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
    let seconds = total.as_secs_f64();
    let algbw_mb_per_s = per(bytes as f64 * f64::from(iters) / 1e6, seconds);
    let microseconds = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Report {
        rank,
        world,
        bytes,
        iters,
        algbw_mb_per_s,
        busbw_mb_per_s: algbw_mb_per_s * 2.0 * f64::from(world - 1) / f64::from(world),
        latency_us: Latency {
            mean: per(seconds * 1e6, iters.into()),
            p50: microseconds(0.5),
            p99: microseconds(0.99),
        },
        checked,
        wrong,
    })
}

/// What a rank contributes at a place: any number of 32 bits, so that sums wrap around, and
/// another one at each place, rank and iteration.
fn element(iteration: u32, rank: u32, index: usize) -> i32 {
    let whose = (u64::from(iteration) << 32) | u64::from(rank);
    let place = (index as u64) ^ whose.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (place ^ (place >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 32) as i32
}

/// What the result must be there.
fn sum(iteration: u32, world: u32, index: usize) -> i32 {
    (0..world).fold(0, |sum: i32, rank| sum.wrapping_add(element(iteration, rank, index)))
}

fn text(report: &Report) -> String {
    let Report { rank, world, bytes, iters, algbw_mb_per_s, latency_us, .. } = report;
    let Latency { p50, p99, .. } = latency_us;
    let checks = match (report.checked, report.wrong) {
        (0, _) => "not checked".to_owned(),
        (checked, wrong) => format!("{checked} elements checked, {wrong} wrong"),
    };
    format!(
        "rank {rank} of {world}: {iters} x {} summed at {}, {p50:.0} us (p99 {p99:.0} us); \
         {checks}",
        units::readable(*bytes),
        units::rate(algbw_mb_per_s * 1e6)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_differ_and_sums_wrap() {
        let mut seen: Vec<i32> = (0..200).map(|rank| element(0, rank, 5)).collect();
        seen.extend((1..600).map(|iteration| element(iteration, 0, 5)));
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
