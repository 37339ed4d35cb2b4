//! `bench transfer`: reads and writes of a segment.
//!
//! Each thread submits a batch, waits until it is done, and submits the next. Blocks go round the
//! segment's buffer, so that a large buffer does not stay in caches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use millstream_net::baseline;
use millstream_transfer::{Opcode, TransferRequest};
use serde::Serialize;

use crate::engine::{self, Opened};
use crate::failure::usage;
use crate::reach::Reach;
use crate::{output, process, units};

/// For one batch. The engine gives up on a dead peer earlier.
const PATIENCE: Duration = Duration::from_secs(8);
/// The longest latency, in nanoseconds, that is told from longer ones.
const LONGEST_NS: u64 = 60_000_000_000;
/// Payload bytes in a packet of the plain stream: those of the largest path MTU.
const STREAM_SEGMENT: usize = 4096;
/// How long the plain stream and the memory copy are measured.
const BASELINE: Duration = Duration::from_secs(2);

/// Arguments of `bench transfer`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    reach: Reach,
    /// The segment; with --metadata p2p its HOST:PORT
    #[arg(long, value_name = "N")]
    segment: String,
    /// What to do
    #[arg(long, value_enum)]
    op: Operation,
    /// Bytes of a request
    #[arg(long, value_name = "S", value_parser = units::size)]
    block_size: u64,
    /// Requests of a batch
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch_size: u32,
    /// Threads that submit batches
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// How long to measure
    #[arg(long, value_name = "D", value_parser = units::duration)]
    duration: Duration,
    /// Measure a plain UDP stream and a memory copy too, for comparison
    #[arg(long)]
    baseline: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Operation {
    /// Out of the segment
    Read,
    /// Into the segment
    Write,
    /// Reads and writes in turn
    Mix,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    op: Operation,
    block_size: u64,
    batch_size: u32,
    threads: u32,
    seconds: f64,
    bytes: u64,
    gb_per_s: f64,
    requests_per_s: f64,
    /// Of a batch, from its submission to its end.
    latency_us: Latency,
    /// Of this process, not of the node.
    cpu_s_per_gb: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline: Option<Baseline>,
}

#[derive(Serialize)]
struct Latency {
    p50: f64,
    p99: f64,
    p999: f64,
}

/// What the machine does without us.
#[derive(Serialize)]
struct Baseline {
    udp_stream_gb_per_s: f64,
    udp_segmentation_offload: bool,
    memory_copy_gb_per_s: f64,
    /// Our rate in parts of the stream's.
    ratio_to_udp_stream: f64,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let batch_bytes = arguments.block_size.checked_mul(arguments.batch_size.into());
    let local = batch_bytes.and_then(|bytes| bytes.checked_mul(arguments.threads.into()));
    let local = local.and_then(|bytes| usize::try_from(bytes).ok()).filter(|&bytes| bytes > 0);
    let local = local.ok_or_else(|| {
        usage("--block-size x --batch-size x --threads: more than memory can be, or nothing")
    })?;
    let opened = engine::open(&arguments.reach, &arguments.segment)?;
    let available = opened.segment.buffers()[0].length;
    if arguments.block_size > available {
        return Err(usage(format!(
            "--block-size {}: the buffer of segment {} has only {available} bytes",
            arguments.block_size, arguments.segment
        )));
    }
    let buffer = opened.engine.allocate_buffer(local, "*", false)?;
    fill(&buffer)?;
    let requests = requests(arguments, &opened, buffer.address())?;
    // The first batch connects the queue pairs, which is no transfer.
    opened.engine.submit_and_wait(&requests[0][..1], PATIENCE)?;

    let stop = AtomicBool::new(false);
    let (start, cpu) = (Instant::now(), process::processor_time());
    let done: Vec<anyhow::Result<Done>> = thread::scope(|scope| {
        let threads: Vec<_> = requests
            .iter()
            .map(|requests| {
                scope.spawn(|| batches(&opened, requests, start, arguments.duration, &stop))
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), process::processor_time() - cpu);
    let mut total = Done::new()?;
    for done in done {
        let done = done.with_context(|| format!("segment {}", arguments.segment))?;
        total.bytes += done.bytes;
        total.requests += done.requests;
        total.latencies.add(done.latencies)?;
    }
    drop(buffer);
    drop(opened);
    report(arguments, &total, seconds, cpu.as_secs_f64())
}

/// What a thread has done.
struct Done {
    bytes: u64,
    requests: u64,
    latencies: Histogram<u64>,
}

impl Done {
    fn new() -> anyhow::Result<Self> {
        let latencies = Histogram::new_with_bounds(1, LONGEST_NS, 3)?;
        Ok(Self { bytes: 0, requests: 0, latencies })
    }
}

/// Does batches until the time is over or another thread has failed.
fn batches(
    opened: &Opened,
    requests: &[TransferRequest],
    start: Instant,
    duration: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<Done> {
    let mut done = Done::new()?;
    while start.elapsed() < duration && !stop.load(Ordering::Relaxed) {
        let submitted = Instant::now();
        let moved = opened.engine.submit_and_wait(requests, PATIENCE);
        // The others need not wait for the end of the time.
        done.bytes += moved.inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
        done.requests += requests.len() as u64;
        done.latencies.saturating_record(submitted.elapsed().as_nanos() as u64);
    }
    Ok(done)
}

/// The requests of each thread's batches. Each has its own block on both sides, as far as the
/// segment has so many.
fn requests(
    arguments: &Arguments,
    opened: &Opened,
    source: u64,
) -> anyhow::Result<Vec<Vec<TransferRequest>>> {
    let size = arguments.block_size;
    let blocks = opened.segment.buffers()[0].length / size;
    let request = |index: u64| {
        let opcode = match arguments.op {
            Operation::Read => Opcode::Read,
            Operation::Write => Opcode::Write,
            Operation::Mix if index.is_multiple_of(2) => Opcode::Read,
            Operation::Mix => Opcode::Write,
        };
        let target_offset = opened.segment.address_of(0, index % blocks * size, size)?;
        let (source, target) = (source + index * size, opened.segment.id());
        anyhow::Ok(TransferRequest { opcode, source, target, target_offset, length: size })
    };
    let batch = u64::from(arguments.batch_size);
    (0..arguments.threads.into())
        .map(|thread: u64| (thread * batch..(thread + 1) * batch).map(request).collect())
        .collect()
}

/// Something other than zeros, which the kernel may share.
fn fill(buffer: &millstream_transfer::Buffer) -> anyhow::Result<()> {
    let chunk: Vec<u8> =
        (0..1 << 20).map(|index: u32| (index.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    for at in (0..buffer.length()).step_by(chunk.len()) {
        let length = chunk.len().min(buffer.length() - at);
        buffer.write(at, &chunk[..length])?;
    }
    Ok(())
}

fn report(arguments: &Arguments, total: &Done, seconds: f64, cpu: f64) -> anyhow::Result<()> {
    let gigabytes = total.bytes as f64 / 1e9;
    let gb_per_s = gigabytes / seconds;
    let microseconds = |quantile| total.latencies.value_at_quantile(quantile) as f64 / 1e3;
    let baseline = arguments.baseline.then(|| measure_baseline(gb_per_s)).transpose()?;
    let report = Report {
        op: arguments.op,
        block_size: arguments.block_size,
        batch_size: arguments.batch_size,
        threads: arguments.threads,
        seconds,
        bytes: total.bytes,
        gb_per_s,
        requests_per_s: total.requests as f64 / seconds,
        latency_us: Latency {
            p50: microseconds(0.5),
            p99: microseconds(0.99),
            p999: microseconds(0.999),
        },
        cpu_s_per_gb: if gigabytes > 0.0 { cpu / gigabytes } else { 0.0 },
        baseline,
    };
    if arguments.json {
        return output::json(&report);
    }
    let Latency { p50, p99, p999 } = report.latency_us;
    output::line(&format!(
        "{}, {} x {} in a batch, {} thread(s): {gb_per_s:.2} GB/s, {:.0} requests/s",
        format!("{:?}", report.op).to_lowercase(),
        report.batch_size,
        units::readable(report.block_size),
        report.threads,
        report.requests_per_s
    ));
    output::line(&format!(
        "batch latency {p50:.0} us (p99 {p99:.0} us, p99.9 {p999:.0} us), {:.3} CPU s/GB here",
        report.cpu_s_per_gb
    ));
    if let Some(baseline) = &report.baseline {
        let offload = if baseline.udp_segmentation_offload { "with" } else { "without" };
        output::line(&format!(
            "plain UDP stream {offload} segmentation offload {:.2} GB/s: we do {:.2} of it; \
             memory copy {:.2} GB/s",
            baseline.udp_stream_gb_per_s,
            baseline.ratio_to_udp_stream,
            baseline.memory_copy_gb_per_s
        ));
    }
    Ok(())
}

fn measure_baseline(gb_per_s: f64) -> anyhow::Result<Baseline> {
    let stream =
        baseline::udp_stream(BASELINE, STREAM_SEGMENT).context("the plain UDP stream failed")?;
    let udp_stream_gb_per_s = stream.gb_per_s();
    Ok(Baseline {
        udp_stream_gb_per_s,
        udp_segmentation_offload: stream.segmentation_offload,
        memory_copy_gb_per_s: baseline::memory_copy(BASELINE).gb_per_s(),
        ratio_to_udp_stream: gb_per_s / udp_stream_gb_per_s,
    })
}
