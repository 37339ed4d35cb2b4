//! One row: requests of one size, one way, for some time.
//!
//! Each thread submits a batch, waits until it is done, and submits the next, of the next blocks.
//! The blocks go round the working set here and as much of the segment, so that they do not stay in
//! caches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
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
    /// Of the last request.
    pub(super) transport: Option<&'static str>,
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
        Ok(Self { bytes: 0, requests: 0, transport: None, latencies, elapsed, cpu })
    }
}

/// Measures one row, over so many bytes of each side at most. Told to stop, it ends at once, with what it
/// has.
pub(super) fn measure(
    opened: &Opened,
    buffer: &Buffer,
    working_set: usize,
    shape: &Shape,
) -> anyhow::Result<Done> {
    let mut batches = thread_batches(opened, buffer, working_set, shape)?;
    // Connects the queue pairs, and opens their windows.
    submit(opened, &batches[0].requests)?;
    let stop = AtomicBool::new(false);
    let (start, cpu) = (Instant::now(), process::processor_time());
    let done: Vec<anyhow::Result<Done>> = thread::scope(|scope| {
        let threads: Vec<_> = batches
            .iter_mut()
            .map(|batch| scope.spawn(|| repeat(opened, batch, start, shape.duration, &stop)))
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
        total.transport = done.transport.or(total.transport);
        total.latencies.add(done.latencies)?;
        total.elapsed = total.elapsed.max(done.elapsed);
    }
    Ok(total)
}

/// Does batches, at least one, until the time is over or another thread has failed.
fn repeat(
    opened: &Opened,
    batch: &mut Batch,
    start: Instant,
    duration: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<Done> {
    let mut done = Done::new()?;
    loop {
        let submitted = Instant::now();
        match submit(opened, &batch.requests) {
            Ok(Some(moved)) => {
                done.bytes += moved.bytes;
                done.transport = moved.transport;
            }
            Ok(None) => return Ok(done),
            Err(_) if process::failed_because_told_to_stop() => return Ok(done),
            Err(error) => {
                // The others need not wait for the end of the time.
                stop.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        done.requests += batch.requests.len() as u64;
        done.latencies.saturating_record(submitted.elapsed().as_nanos() as u64);
        done.elapsed = start.elapsed();
        let over = done.elapsed >= duration || stop.load(Ordering::Relaxed);
        if over || process::told_to_stop() {
            return Ok(done);
        }
        batch.advance();
    }
}

/// Does a batch; returns what was moved, or `None` when told to stop before it was done. It is
/// done, for good or bad, without a limit of ours: the engine gives up on a peer that is dead.
fn submit(opened: &Opened, requests: &[TransferRequest]) -> anyhow::Result<Option<Moved>> {
    let batch = opened.engine.allocate_batch(requests.len())?;
    opened.engine.submit_with(&batch, requests, &opened.wishes.options())?;
    while !opened.engine.wait(&batch, GLANCE) {
        if process::told_to_stop() {
            return Ok(None);
        }
    }
    let all = opened.engine.batch_status(&batch);
    for index in all.first_incomplete.map_or(0..0, |first| first..batch.len()) {
        if let Some(error) = opened.engine.status(&batch, index)?.error {
            return Err(SubmitAndWaitError::Failed { index, error: Box::new(error) }.into());
        }
    }
    let last = opened.engine.status(&batch, batch.len() - 1)?;
    Ok(Some(Moved { bytes: all.transferred_bytes, transport: last.transport }))
}

/// What a batch has done.
struct Moved {
    bytes: u64,
    /// Of its last request.
    transport: Option<&'static str>,
}

/// The requests of a thread, and where the next ones are.
struct Batch {
    requests: Vec<TransferRequest>,
    /// Blocks of our buffer.
    local: Blocks,
    /// Blocks of the segment.
    remote: Blocks,
}

impl Batch {
    /// Moves the requests to the next blocks of both sides.
    fn advance(&mut self) {
        for request in &mut self.requests {
            request.source = self.local.next();
            request.target_offset = self.remote.next();
        }
    }
}

/// The blocks of a buffer that one thread goes round: its own, as far as there are so many.
struct Blocks {
    /// Address of the buffer's first block.
    base: u64,
    /// Bytes of a block.
    size: u64,
    first: u64,
    count: u64,
    /// How many blocks the buffer has.
    all: u64,
    at: u64,
}

impl Blocks {
    /// Of one of so many threads with batches of `batch` requests, of `all` blocks, at least one.
    fn of_thread(thread: u64, threads: u64, batch: u64, all: u64) -> Self {
        // All requests of a batch differ before those of threads do.
        let count = (all / threads).max(batch.min(all));
        Self { base: 0, size: 1, first: thread * count % all, count, all, at: 0 }
    }

    /// The address of the next block.
    fn next(&mut self) -> u64 {
        // Without divisions, which are a part of what a small request takes.
        let block = self.first + self.at;
        let block = if block < self.all { block } else { block - self.all };
        self.at = if self.at + 1 < self.count { self.at + 1 } else { 0 };
        self.base + block * self.size
    }
}

/// The first batch of each thread. Each request has its own block on both sides, as far as the
/// segment has so many, and no thread has one of another's in our buffer.
fn thread_batches(
    opened: &Opened,
    buffer: &Buffer,
    working_set: usize,
    shape: &Shape,
) -> anyhow::Result<Vec<Batch>> {
    let size = shape.block_size;
    let available = opened.segment.length_from(0);
    // It had enough when the command began.
    ensure!(
        available >= size,
        "the segment's buffer has only {available} bytes now, and a request {size}: was its node \
         started again with less?"
    );
    let base = opened.segment.address_of(0, 0, size)?;
    let (threads, batch) = (u64::from(shape.threads), u64::from(shape.batch_size));
    let request = |index: u64| {
        let opcode = match shape.op {
            Operation::Read => Opcode::Read,
            Operation::Write => Opcode::Write,
            Operation::Mix if index.is_multiple_of(2) => Opcode::Read,
            Operation::Mix => Opcode::Write,
        };
        let (source, target) = (buffer.address(), opened.segment.id());
        TransferRequest { opcode, source, target, target_offset: base, length: size }
    };
    let set = buffer.length().min(working_set) as u64;
    let of_thread = |thread: u64| {
        let requests = (thread * batch..(thread + 1) * batch).map(request).collect();
        let blocks = |base, bytes| Blocks {
            base,
            size,
            ..Blocks::of_thread(thread, threads, batch, bytes / size)
        };
        let (local, remote) = (blocks(buffer.address(), set), blocks(base, set.min(available)));
        let mut batch = Batch { requests, local, remote };
        batch.advance();
        batch
    };
    Ok((0..threads).map(of_thread).collect())
}

#[cfg(test)]
mod tests {
    use millstream_transfer::SegmentId;

    use super::*;

    /// The blocks of so many batches of each thread.
    fn taken(threads: u64, batch: u64, all: u64, batches: u64) -> Vec<Vec<u64>> {
        let of_thread = |thread| {
            let mut blocks = Blocks::of_thread(thread, threads, batch, all);
            (0..batch * batches).map(|_| blocks.next()).collect()
        };
        (0..threads).map(of_thread).collect()
    }

    #[test]
    fn batches_go_round_the_whole_buffer() {
        assert_eq!(taken(1, 2, 5, 3), [[0, 1, 2, 3, 4, 0]]);
        // No two threads have a block in common, however far each is.
        assert_eq!(taken(2, 2, 9, 3), [[0, 1, 2, 3, 0, 1], [4, 5, 6, 7, 4, 5]]);
    }

    /// A segment may have less than our buffer.
    #[test]
    fn both_sides_move_from_batch_to_batch() {
        let blocks = |base, all| Blocks { base, size: 8, ..Blocks::of_thread(0, 1, 2, all) };
        let request = TransferRequest {
            opcode: Opcode::Read,
            source: 0,
            target: SegmentId::LOCAL,
            target_offset: 0,
            length: 8,
        };
        let (local, remote) = (blocks(100, 4), blocks(1000, 3));
        let mut batch = Batch { requests: vec![request; 2], local, remote };
        for expected in
            [[(100, 1000), (108, 1008)], [(116, 1016), (124, 1000)], [(100, 1008), (108, 1016)]]
        {
            batch.advance();
            let at: Vec<_> = batch.requests.iter().map(|r| (r.source, r.target_offset)).collect();
            assert_eq!(at, expected);
        }
    }

    #[test]
    fn a_small_buffer_is_shared() {
        assert_eq!(taken(2, 2, 3, 2), [[0, 1, 0, 1], [2, 0, 2, 0]]);
        assert_eq!(taken(2, 4, 3, 1), [[0, 1, 2, 0], [0, 1, 2, 0]]);
        assert_eq!(taken(3, 1, 1, 2), [[0, 0], [0, 0], [0, 0]]);
    }
}
