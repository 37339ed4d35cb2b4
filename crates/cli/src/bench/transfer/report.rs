//! What is said about a row: a line of a table, or JSON.

use std::time::Duration;

use anyhow::Context;
use millstream_net::baseline::{self, CopyDirection};
use serde::Serialize;

use super::Operation;
use super::row::{Done, Shape};
use crate::bench::figures::{per, three_digits};
use crate::paths::Path;
use crate::{output, units};

/// Payload bytes in a packet of the plain stream: those of the largest path MTU.
const STREAM_SEGMENT: usize = 4096;
/// How long the plain stream and the memory copy are measured.
const BASELINE: Duration = Duration::from_secs(2);

/// How long copies in blocks are measured.
const COPIES: Duration = Duration::from_millis(500);

/// What `--json` prints of a row.
#[derive(Serialize)]
pub(super) struct Row {
    op: Operation,
    /// The one that did the last request.
    transport: Option<&'static str>,
    block_size: u64,
    batch_size: u32,
    threads: u32,
    /// Bytes that each side walks through.
    working_set: usize,
    seconds: f64,
    bytes: u64,
    requests: u64,
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
#[derive(Clone, Serialize)]
struct Baseline {
    udp_stream_gb_per_s: f64,
    udp_segmentation_offload: bool,
    memory_copy_gb_per_s: f64,
    /// Our rate in parts of the stream's.
    ratio_to_udp_stream: f64,
    /// For what copies memory.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    copies: Option<Copies>,
}

/// What copies of as many bytes at a time do, on one thread.
#[derive(Clone, Serialize)]
struct Copies {
    block_copy_gb_per_s: f64,
    /// Our rate in parts of that.
    ratio_to_block_copy: f64,
    /// By process_vm_readv or process_vm_writev, where that is allowed.
    process_copy_gb_per_s: Option<f64>,
    ratio_to_process_copy: Option<f64>,
}

/// What `--json` prints of a row that is all that was asked for.
#[derive(Serialize)]
struct Alone<'a> {
    #[serde(flatten)]
    row: &'a Row,
    /// Who chose the pairs of NICs.
    policy: &'static str,
    paths: Vec<Path>,
}

/// What `--json` prints of a table.
#[derive(Serialize)]
struct Table<'a> {
    rows: &'a [Row],
    policy: &'static str,
    paths: Vec<Path>,
    /// There are fewer rows than were asked for, or less time in the last one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    interrupted: bool,
}

impl Row {
    pub(super) fn new(shape: &Shape, working_set: usize, done: &Done) -> Self {
        let seconds = done.elapsed.as_secs_f64();
        let gigabytes = done.bytes as f64 / 1e9;
        let microseconds = |quantile| done.latencies.value_at_quantile(quantile) as f64 / 1e3;
        Self {
            op: shape.op,
            transport: done.transport,
            block_size: shape.block_size,
            batch_size: shape.batch_size,
            threads: shape.threads,
            working_set,
            seconds,
            bytes: done.bytes,
            requests: done.requests,
            gb_per_s: per(gigabytes, seconds),
            requests_per_s: per(done.requests as f64, seconds),
            latency_us: Latency {
                p50: microseconds(0.5),
                p99: microseconds(0.99),
                p999: microseconds(0.999),
            },
            cpu_s_per_gb: per(done.cpu.as_secs_f64(), gigabytes),
            baseline: None,
        }
    }
}

/// What all rows share, and the names of their columns.
pub(super) fn print_header(
    segment: &str,
    transport: &str,
    duration: Duration,
) -> anyhow::Result<()> {
    output::line(&format!(
        "segment {segment} over {transport}, {duration:?} a row; latencies are of whole batches"
    ))?;
    output::line(&format!(
        "{:<6}{:>9}{:>7}{:>9}{:>11}{:>8}{:>12}{:>9}{:>9}{:>10}",
        "op",
        "bytes",
        "batch",
        "threads",
        "requests",
        "GB/s",
        "requests/s",
        "p50 us",
        "p99 us",
        "CPU s/GB"
    ))
}

pub(super) fn print_row(row: &Row) -> anyhow::Result<()> {
    output::line(&format!(
        "{:<6}{:>9}{:>7}{:>9}{:>11}{:>8}{:>12.0}{:>9}{:>9}{:>10}",
        row.op.name(),
        units::readable(row.block_size),
        row.batch_size,
        row.threads,
        row.requests,
        three_digits(row.gb_per_s),
        row.requests_per_s,
        three_digits(row.latency_us.p50),
        three_digits(row.latency_us.p99),
        three_digits(row.cpu_s_per_gb)
    ))
}

/// Prints one row as an object of its own if it is all that was asked for, else all in one.
pub(super) fn print_json(
    rows: &[Row],
    policy: &'static str,
    paths: Vec<Path>,
    alone: bool,
    interrupted: bool,
) -> anyhow::Result<()> {
    match rows {
        [row] if alone => output::json(&Alone { row, policy, paths }),
        _ => output::json(&Table { rows, policy, paths, interrupted }),
    }
}

/// Measures what the machine does without us, over as many bytes, and sets every row beside it. With
/// `copies`, what it does in blocks of the row's size too.
pub(super) fn add_baseline(
    rows: &mut [Row],
    working_set: usize,
    copies: bool,
) -> anyhow::Result<()> {
    let stream = baseline::udp_streams(1, BASELINE, STREAM_SEGMENT, working_set)
        .context("the plain UDP stream failed")?;
    let udp_stream_gb_per_s = stream.gb_per_s();
    let memory_copy_gb_per_s = baseline::memory_copy(BASELINE, working_set).gb_per_s();
    for row in rows {
        let copies = match copies {
            true => Some(measure_copies(row, working_set)?),
            false => None,
        };
        row.baseline = Some(Baseline {
            copies,
            udp_stream_gb_per_s,
            udp_segmentation_offload: stream.segmentation_offload,
            memory_copy_gb_per_s,
            ratio_to_udp_stream: per(row.gb_per_s, udp_stream_gb_per_s),
        });
    }
    Ok(())
}

fn measure_copies(row: &Row, working_set: usize) -> anyhow::Result<Copies> {
    let block = row.block_size as usize;
    let block_copy_gb_per_s = baseline::block_copy(COPIES, block, working_set)?.gb_per_s();
    let direction = match row.op {
        Operation::Read => CopyDirection::Read,
        Operation::Write | Operation::Mix => CopyDirection::Write,
    };
    let process_copy = baseline::process_copy(COPIES, direction, block, working_set)
        .inspect_err(|error| tracing::info!(%error, "no process_vm_writev to compare with"))
        .ok();
    let process_copy_gb_per_s = process_copy.map(|report| report.gb_per_s());
    Ok(Copies {
        block_copy_gb_per_s,
        ratio_to_block_copy: per(row.gb_per_s, block_copy_gb_per_s),
        process_copy_gb_per_s,
        ratio_to_process_copy: process_copy_gb_per_s.map(|other| per(row.gb_per_s, other)),
    })
}

/// Says what the machine does without us, and how much of it the fastest row is.
pub(super) fn print_baseline(rows: &[Row]) -> anyhow::Result<()> {
    let fastest = rows
        .iter()
        .filter_map(|row| row.baseline.as_ref())
        .max_by(|one, other| one.ratio_to_udp_stream.total_cmp(&other.ratio_to_udp_stream));
    let Some(baseline) = fastest else { return Ok(()) };
    let offload = if baseline.udp_segmentation_offload { "with" } else { "without" };
    output::line(&format!(
        "plain UDP stream {offload} segmentation offload {} GB/s: the fastest row does {:.2} of \
         it; memory copy {} GB/s",
        three_digits(baseline.udp_stream_gb_per_s),
        baseline.ratio_to_udp_stream,
        three_digits(baseline.memory_copy_gb_per_s)
    ))?;
    for row in rows {
        let Some(copies) = row.baseline.as_ref().and_then(|baseline| baseline.copies.as_ref())
        else {
            continue;
        };
        let by_kernel = match (copies.process_copy_gb_per_s, copies.ratio_to_process_copy) {
            (Some(rate), Some(ratio)) => {
                format!(", process_vm {} GB/s: {ratio:.2} of it", three_digits(rate))
            }
            _ => String::new(),
        };
        output::line(&format!(
            "{} {}: copies of as many bytes {} GB/s: {:.2} of it{by_kernel}",
            row.op.name(),
            units::readable(row.block_size),
            three_digits(copies.block_copy_gb_per_s),
            copies.ratio_to_block_copy
        ))?;
    }
    Ok(())
}
