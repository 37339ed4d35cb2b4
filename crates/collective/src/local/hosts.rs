//! One rank's part of a collective of several hosts.
//!
//! The ranks of a host combine what they have through the memory that they share, chunk by chunk. The first of them, which
//! is on the wire, sends that, and gets what all hosts have together. It writes that to the shared memory, where the others
//! read it. Each of these is a step after the one before, with a barrier of the host between steps, so that the wire has a
//! chunk under way, and the next one to begin, while the host works on others:
//!
//! ```text
//! step      0         1         2         3         4         5
//! fill      chunk 0   chunk 1   chunk 2   chunk 3
//! reduce              chunk 0   chunk 1   chunk 2   chunk 3
//! send                          chunk 0   chunk 1   chunk 2   chunk 3
//! result                                  chunk 0   chunk 1   chunk 2
//! take                                              chunk 0   chunk 1
//! ```
//!
//! A chunk is written to where the one three before was, which was sent a step ago; its result to where that of two before
//! was, which was taken a step ago.
//!
//! On the wire a chunk is a call of its own: switches know nothing of it. Before the first, the hosts agree on the whole
//! call ([`Stripe::NONE`](millstream_inc::Stripe::NONE)), so that a difference is named as it is. A call of one chunk needs
//! no such agreement, and fewer steps.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_inc::Collective;

use super::cut::{Chunks, slice};
use super::failure::Failure;
use super::layout::HOST_SLOT_BYTES;
use super::run::{Runner, SMALL_IN_ALL, Stop, Task};
use super::wait::NAP;
use super::wire::{Extent, Wire};
use crate::CollectiveError;

/// So much later than a rank's own time is over, switches are asked whom they wait for: they know hosts only, and the ranks
/// of a host whose time is over know who of them is late.
const HOSTS_FIRST: Duration = Duration::from_millis(500);

/// How many steps after it was written a chunk is sent, its result there, and taken.
const SENT: u64 = 2;
const RESULT: u64 = 3;
const TAKEN: u64 = 4;

/// A chunk of a call.
#[derive(Clone, Debug)]
struct Chunk {
    /// Among those of all calls.
    number: u64,
    /// Which bytes of each part, or of the vector.
    range: Range<usize>,
    extent: Extent,
}

impl Runner {
    /// Does a collective.
    pub(super) fn run_hosts(&mut self, task: &Task<'_>) -> Result<(), Stop> {
        let parts = match task.descriptor.collective {
            Collective::ReduceScatter | Collective::AllGather => self.area.members.world() as usize,
            _ => 1,
        };
        // Elements have 8 bytes at most.
        let chunks = Chunks::new(task.bytes, HOST_SLOT_BYTES / parts / 8 * 8);
        let count = match task.descriptor.collective {
            Collective::Barrier => 0,
            _ => chunks.count(),
        };
        let first = self.chunks;
        self.chunks += count;
        let chunk = |number: u64| {
            let range = chunks.range(number);
            let extent = Extent { part: range.len(), whole: parts * range.len() };
            Chunk { number: first + number, range, extent }
        };
        match count {
            0 => self.run_empty(task, &chunk(0)),
            1 => self.run_one(task, &chunk(0)),
            _ => self.run_several(task, count, chunk),
        }
    }

    /// A call without a vector: nobody goes on before all have come.
    fn run_empty(&mut self, task: &Task<'_>, chunk: &Chunk) -> Result<(), Stop> {
        self.agree(task)?;
        if let Some(number) = self.send(task, chunk)? {
            self.await_wire(task, number)?;
        }
        self.pass(task)
    }

    fn run_one(&mut self, task: &Task<'_>, chunk: &Chunk) -> Result<(), Stop> {
        self.fill_chunk(task, chunk);
        self.agree(task)?;
        let in_all = chunk.extent.whole.saturating_mul(self.ranks.get() as usize);
        if task.kernel.is_some() && in_all > SMALL_IN_ALL {
            self.reduce_own(task, chunk);
            self.pass(task)?;
            self.gather_parts(task, chunk);
        } else if task.kernel.is_some() {
            self.reduce_all(task, chunk);
        } else {
            self.gather_parts(task, chunk);
        }
        if let Some(number) = self.send(task, chunk)? {
            self.await_wire(task, number)?;
            self.publish(task, chunk);
        }
        self.pass(task)?;
        self.take(task, chunk);
        Ok(())
    }

    fn run_several(
        &mut self,
        task: &Task<'_>,
        count: u64,
        chunk: impl Fn(u64) -> Chunk,
    ) -> Result<(), Stop> {
        let at = |step: u64, later: u64| {
            step.checked_sub(later).filter(|&number| number < count).map(&chunk)
        };
        let last = count - 1 + TAKEN;
        let (mut agreement, mut sent) = (None, [None; RESULT as usize]);
        for step in 0..=last {
            // First, since the wire is what is scarce.
            if let Some(chunk) = at(step, SENT) {
                // On another tree a chunk might differ first, and not in what the ranks have called.
                if let Some(number) = agreement.take() {
                    self.await_wire(task, number)?;
                }
                self.gather_parts(task, &chunk);
                sent[(chunk.number % RESULT) as usize] = self.send(task, &chunk)?;
            }
            if let Some(chunk) = at(step, 0) {
                self.fill_chunk(task, &chunk);
            }
            if let Some(chunk) = at(step, 1) {
                self.reduce_own(task, &chunk);
            }
            if let Some(chunk) = at(step, TAKEN) {
                self.take(task, &chunk);
            }
            if let Some(chunk) = at(step, RESULT)
                && let Some(number) = sent[(chunk.number % RESULT) as usize]
            {
                self.await_wire(task, number)?;
                self.publish(task, &chunk);
            }
            match step {
                0 => {
                    self.agree(task)?;
                    agreement = self.agree_with_hosts(task)?;
                }
                step if step < last => self.pass(task)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// How long a part of the call may take on the wire.
    fn limit(&self, task: &Task<'_>) -> Duration {
        let left = self.deadline(task).saturating_duration_since(Instant::now());
        left.saturating_add(HOSTS_FIRST)
    }

    /// Who is on the wire has the hosts agree on the call; gives the number of that.
    fn agree_with_hosts(&self, task: &Task<'_>) -> Result<Option<u64>, Stop> {
        self.on_wire(task, |wire| wire.agree(task.work, self.limit(task), NAP))
    }

    /// Who is on the wire sends a chunk; gives the number of that.
    fn send(&self, task: &Task<'_>, chunk: &Chunk) -> Result<Option<u64>, Stop> {
        let &Chunk { number, extent, .. } = chunk;
        self.on_wire(task, |wire| wire.start(task.work, number, extent, self.limit(task), NAP))
    }

    /// Waits for the end of what was sent.
    fn await_wire(&self, task: &Task<'_>, number: u64) -> Result<(), Stop> {
        self.on_wire(task, |wire| wire.wait(number, NAP)).map(|_| ())
    }

    /// Who is on the wire does this until there is an outcome, and looks now and then whether there is still something to
    /// wait for.
    fn on_wire<T>(
        &self,
        task: &Task<'_>,
        attempt: impl Fn(&Wire) -> Option<Result<T, CollectiveError>>,
    ) -> Result<Option<T>, Stop> {
        let Some(wire) = &self.wire else { return Ok(None) };
        loop {
            match attempt(wire) {
                Some(Ok(outcome)) => return Ok(Some(outcome)),
                Some(Err(error)) => return Err(self.wire_failed(task, error)),
                None => {}
            }
            if let Some(failure) = self.area.failure() {
                return Err(Stop::Failed(failure.into()));
            }
            if task.stop.load(Ordering::Acquire) {
                return Err(Stop::Told);
            }
            if let Some(failure) = self.area.lost(&self.processes, self.barriers + 1, true) {
                return Err(self.fail(failure));
            }
        }
    }

    /// The connection to the switches has failed: the ranks of this host hear why.
    fn wire_failed(&self, task: &Task<'_>, error: CollectiveError) -> Stop {
        if task.stop.load(Ordering::Acquire) {
            return Stop::Told;
        }
        let failure = Failure::of_wire(&error, self.area.members.rank(self.rank));
        if let Some(known) = self.area.failure() {
            return Stop::Failed(known.into());
        }
        self.area.fail(&failure);
        Stop::Failed(match failure {
            // Others hear that this rank gives up, and it knows why.
            Failure::PeerLost { .. } => error,
            failure => failure.into(),
        })
    }

    /// The place of the root among the ranks of this host, if it is one.
    fn root_here(&self, task: &Task<'_>) -> Option<u32> {
        self.area.members.place(task.descriptor.root)
    }

    /// Writes what this rank contributes to a chunk.
    fn fill_chunk(&self, task: &Task<'_>, chunk: &Chunk) {
        let (source, memory) = (task.work.source, &self.area.memory);
        let slot = self.area.layout.slot(self.rank, chunk.number);
        let Chunk { range, extent, .. } = chunk;
        match task.descriptor.collective {
            Collective::AllReduce | Collective::Reduce | Collective::AllGather => {
                source.share(range.start, extent.part, memory, slot);
            }
            Collective::ReduceScatter => {
                for part in 0..self.area.members.world() as usize {
                    let from = part * task.bytes + range.start;
                    source.share(from, extent.part, memory, slot + part * extent.part);
                }
            }
            Collective::Broadcast if self.root_here(task) == Some(self.rank) => {
                source.share(range.start, extent.part, memory, slot);
            }
            Collective::Broadcast | Collective::Barrier => {}
        }
    }

    /// Reduces this rank's slice of what the ranks of this host have written, to where it has written its own.
    fn reduce_own(&mut self, task: &Task<'_>, chunk: &Chunk) {
        let Some(kernel) = &task.kernel else { return };
        let area = Arc::clone(&self.area);
        let own = slice(chunk.extent.whole, self.ranks.get(), self.rank);
        let at = |place: u32| area.layout.slot(place, chunk.number) + own.start;
        let load = |place: u32, offset: usize, to: &mut [u8]| {
            area.memory.read(at(place) + offset, to);
        };
        let store = |offset: usize, from: &[u8]| {
            area.memory.write(at(self.rank) + offset, from);
        };
        self.blocks.combine(kernel, self.ranks, own.len(), load, store);
    }

    /// Who is on the wire reduces all that the ranks of this host have written.
    fn reduce_all(&mut self, task: &Task<'_>, chunk: &Chunk) {
        let (Some(kernel), Some(wire)) = (&task.kernel, &self.wire) else { return };
        let area = &self.area;
        let to = wire.span(chunk.number, 0..chunk.extent.whole);
        let load = |place: u32, offset: usize, to: &mut [u8]| {
            area.memory.read(area.layout.slot(place, chunk.number) + offset, to);
        };
        let store = |offset: usize, from: &[u8]| to.store(offset, from);
        self.blocks.combine(kernel, self.ranks, chunk.extent.whole, load, store);
    }

    /// Who is on the wire gathers what this host sends.
    fn gather_parts(&self, task: &Task<'_>, chunk: &Chunk) {
        let Some(wire) = &self.wire else { return };
        let (area, ranks) = (&self.area, self.ranks.get());
        let Chunk { number, extent: Extent { part, whole }, .. } = *chunk;
        let fetch = |place: u32, offset: usize, range: Range<usize>| {
            let (length, from) = (range.len(), area.layout.slot(place, number) + offset);
            wire.span(number, range).fetch(0, length, &area.memory, from);
        };
        match task.descriptor.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                for place in 0..ranks {
                    let slice = slice(whole, ranks, place);
                    fetch(place, slice.start, slice);
                }
            }
            Collective::AllGather => {
                for place in 0..ranks {
                    let start = area.members.rank(place) as usize * part;
                    fetch(place, 0, start..start + part);
                }
            }
            Collective::Broadcast => {
                if let Some(root) = self.root_here(task) {
                    fetch(root, 0, 0..whole);
                }
            }
            Collective::Barrier => {}
        }
    }

    /// Who is on the wire writes what has come for the ranks of this host.
    fn publish(&self, task: &Task<'_>, chunk: &Chunk) {
        let Some(wire) = &self.wire else { return };
        let area = &self.area;
        let Chunk { number, extent: Extent { part, whole }, .. } = *chunk;
        let result = area.layout.result(number);
        let share = |range: Range<usize>| {
            let (start, length) = (range.start, range.len());
            wire.span(number, range).share(0, length, &area.memory, result + start);
        };
        match task.descriptor.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::AllGather => {
                share(0..whole);
            }
            Collective::Reduce if self.root_here(task).is_some() => share(0..whole),
            Collective::ReduceScatter => {
                for rank in area.members.ranks() {
                    let start = *rank as usize * part;
                    share(start..start + part);
                }
            }
            Collective::Reduce | Collective::Barrier => {}
        }
    }

    /// Takes what this rank gets of a chunk.
    fn take(&self, task: &Task<'_>, chunk: &Chunk) {
        let (source, destination) = (task.work.source, task.work.destination);
        let (area, root) = (&self.area, self.root_here(task) == Some(self.rank));
        let Chunk { number, ref range, extent: Extent { part, .. } } = *chunk;
        let result = area.layout.result(number);
        let fetch = |to: usize, from: usize| {
            destination.fetch(to, part, &area.memory, result + from);
        };
        match task.descriptor.collective {
            Collective::Broadcast if root => {
                destination.copy(range.start, source, range.start, part);
            }
            Collective::AllReduce | Collective::Broadcast => fetch(range.start, 0),
            Collective::Reduce if root => fetch(range.start, 0),
            Collective::ReduceScatter => {
                fetch(range.start, area.members.rank(self.rank) as usize * part);
            }
            Collective::AllGather => {
                for rank in 0..area.members.world() as usize {
                    fetch(rank * task.bytes + range.start, rank * part);
                }
            }
            Collective::Reduce | Collective::Barrier => {}
        }
    }
}
