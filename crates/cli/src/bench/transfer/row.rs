//! One row: requests of one size, one way, for some time.
//!
//! Each thread submits a batch, waits until it is done, and submits the next. Blocks go round the
//! segment's buffer, so that a large buffer does not stay in caches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use hdrhistogram::Histogram;
use millstream_transfer::{Buffer, Opcode, SubmitAndWaitError, TransferRequest};

use super::Operation;
use crate::engine::Opened;
use crate::process;

/// The longest latency, in nanoseconds, that is told from longer ones.
const LONGEST_NS: u64 = 60_000_000_000;
/// How often who waits for a batch looks whether the command is told to stop.
const GLANCE: Duration = Duration::from_millis(20);

/// What is measured.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) op: Operation,
    /// Bytes of a request.
    pub(super) block_size: u64,
    /// Requests of a batch.
    pub(super) batch_size: u32,
    pub(super) threads: u32,
    pub(super) duration: Duration,
}

impl Shape {
    /// Bytes of all threads' batches; `None` when no memory is so large, or when it is nothing.
    pub(super) fn bytes(&self) -> Option<usize> {
        let batch = self.block_size.checked_mul(self.batch_size.into())?;
        usize::try_from(batch.checked_mul(self.threads.into())?).ok().filter(|&bytes| bytes > 0)
    }
}

/// What was done.
pub(super) struct Done {
    pub(super) bytes: u64,
    pub(super) requests: u64,
    /// Of batches, in nanoseconds.
    pub(super) latencies: Histogram<u64>,
    /// From the start to the end of the last batch.
    pub(super) elapsed: Duration,
    /// Time on processors that this process has used.
    pub(super) cpu: Duration,
}

impl Done {
    fn new() -> anyhow::Result<Self> {
        let latencies = Histogram::new_with_bounds(1, LONGEST_NS, 3)?;
        let (elapsed, cpu) = (Duration::ZERO, Duration::ZERO);
        Ok(Self { bytes: 0, requests: 0, latencies, elapsed, cpu })
    }
}

/// Measures one row. Told to stop, it ends at once, with what it has.
pub(super) fn measure(opened: &Opened, buffer: &Buffer, shape: &Shape) -> anyhow::Result<Done> {
    let requests = requests(opened, buffer, shape)?;
    // Connects the queue pairs, and opens their windows.
    submit(opened, &requests[0])?;
    let stop = AtomicBool::new(false);
    let (start, cpu) = (Instant::now(), process::processor_time());
    let done: Vec<anyhow::Result<Done>> = thread::scope(|scope| {
        let threads: Vec<_> = requests
            .iter()
            .map(|requests| scope.spawn(|| batches(opened, requests, start, shape.duration, &stop)))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    let mut total = Done { cpu: process::processor_time() - cpu, ..Done::new()? };
    for done in done {
        let done = done?;
        total.bytes += done.bytes;
        total.requests += done.requests;
        total.latencies.add(done.latencies)?;
        total.elapsed = total.elapsed.max(done.elapsed);
    }
    Ok(total)
}

/// Does batches, at least one, until the time is over or another thread has failed.
fn batches(
    opened: &Opened,
    requests: &[TransferRequest],
    start: Instant,
    duration: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<Done> {
    let mut done = Done::new()?;
    loop {
        let submitted = Instant::now();
        match submit(opened, requests) {
            Ok(Some(bytes)) => done.bytes += bytes,
            Ok(None) => return Ok(done),
            Err(_) if process::failed_because_told_to_stop() => return Ok(done),
            Err(error) => {
                // The others need not wait for the end of the time.
                stop.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        done.requests += requests.len() as u64;
        done.latencies.saturating_record(submitted.elapsed().as_nanos() as u64);
        done.elapsed = start.elapsed();
        let over = done.elapsed >= duration || stop.load(Ordering::Relaxed);
        if over || process::told_to_stop() {
            return Ok(done);
        }
    }
}

/// Does a batch; returns the bytes moved, or `None` when told to stop before it was done. It is
/// done, for good or bad, without a limit of ours: the engine gives up on a peer that is dead.
fn submit(opened: &Opened, requests: &[TransferRequest]) -> anyhow::Result<Option<u64>> {
    let batch = opened.engine.allocate_batch(requests.len())?;
    opened.engine.submit(&batch, requests)?;
    while !opened.engine.wait(&batch, GLANCE) {
        if process::told_to_stop() {
            return Ok(None);
        }
    }
    let mut bytes = 0;
    for (index, status) in opened.engine.statuses(&batch).into_iter().enumerate() {
        if let Some(error) = status.error {
            return Err(SubmitAndWaitError::Failed { index, error }.into());
        }
        bytes += status.transferred_bytes;
    }
    Ok(Some(bytes))
}

/// The requests of each thread's batches. Each has its own block on both sides, as far as the
/// segment has so many.
fn requests(
    opened: &Opened,
    buffer: &Buffer,
    shape: &Shape,
) -> anyhow::Result<Vec<Vec<TransferRequest>>> {
    let size = shape.block_size;
    let buffers = opened.segment.buffers();
    let blocks = buffers.first().context("the segment has no memory any more")?.length / size;
    let request = |index: u64| {
        let opcode = match shape.op {
            Operation::Read => Opcode::Read,
            Operation::Write => Opcode::Write,
            Operation::Mix if index.is_multiple_of(2) => Opcode::Read,
            Operation::Mix => Opcode::Write,
        };
        let target_offset = opened.segment.address_of(0, index % blocks * size, size)?;
        let (source, target) = (buffer.address() + index * size, opened.segment.id());
        anyhow::Ok(TransferRequest { opcode, source, target, target_offset, length: size })
    };
    let batch = u64::from(shape.batch_size);
    (0..shape.threads.into())
        .map(|thread: u64| (thread * batch..(thread + 1) * batch).map(request).collect())
        .collect()
}
