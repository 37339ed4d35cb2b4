//! One rank's part of a collective.
//!
//! A short vector is written to the rank's own place, and after one barrier all read those of all. Of a longer one, chunk
//! after chunk is written (`fill`), reduced, each rank a slice of it (`reduce`), and read (`take`), each of these a step
//! after the one before, with a barrier between steps:
//!
//! ```text
//! step      0         1         2         3
//! fill      chunk 0   chunk 1   chunk 2
//! reduce              chunk 0   chunk 1   chunk 2
//! take                          chunk 0   chunk 1
//! ```
//!
//! With three places by turns nobody writes where another rank still reads. The first chunk is written before the barrier
//! at which the ranks agree on the call, and there is no barrier after the last step: a place is written again only
//! after two further barriers.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_inc::{Collective, Descriptor, Kernel, Overdue};
use millstream_net::shared_memory::MemberProcesses;

use super::area::Area;
use super::cut::{Chunks, slice};
use super::failure::Failure;
use super::layout::{SLOT_BYTES, SMALL_BYTES};
use super::recovery::Recovery;
use super::reduce::Blocks;
use super::wait::{self, NAP, Spinning};
use super::wire::Wire;
use crate::failover::longest_search;
use crate::tree::Work;
use crate::{CollectiveError, LONGEST};

/// So many bytes of all ranks together are reduced by each rank for itself. More are cheaper in slices.
pub(super) const SMALL_IN_ALL: usize = 32 << 10;

/// How much longer than the time of the rank that is on the wire is over the others wait for it: it asks the switches then, and
/// says when it looks for other trees since one of them is lost.
const WIRE_PATIENCE: Duration = Duration::from_millis(4500);

/// Why a collective does not go on.
#[derive(Debug)]
pub(super) enum Stop {
    /// As all ranks know.
    Failed(CollectiveError),
    /// This rank's owner, or the controller, has ended it.
    Told,
}

/// What a rank has for its collectives, one after the other.
#[derive(Debug)]
pub(super) struct Runner {
    pub(super) area: Arc<Area>,
    pub(super) processes: Arc<MemberProcesses>,
    /// Its place among those that share the memory.
    pub(super) rank: u32,
    pub(super) ranks: NonZeroU32,
    spinning: Spinning,
    /// At so many barriers it has arrived.
    pub(super) barriers: u64,
    /// So many chunks were done.
    pub(super) chunks: u64,
    pub(super) blocks: Blocks,
    /// Of who is connected to switches for all of them.
    pub(super) wire: Option<Wire>,
    /// When it was looked last whether the others live.
    looked: Instant,
    /// Since when other trees are looked for, as this rank has seen.
    searching: Option<Instant>,
    /// How long other trees had been looked for, in all, when the collective that is under way began.
    paused: Cell<Duration>,
    /// When it began, and in the search for which trees, if in one whose end was not seen yet.
    began_in: Cell<Option<(Instant, Recovery)>>,
    /// When all ranks of the host were seen to have called the collective that is under way.
    agreed: Option<Instant>,
}

/// A collective, and when it must be over.
pub(super) struct Task<'a> {
    pub(super) work: &'a Work,
    pub(super) descriptor: Descriptor,
    /// Bytes of a rank's part, where vectors have parts, and of all else.
    pub(super) bytes: usize,
    pub(super) kernel: Option<Kernel>,
    pub(super) deadline: Instant,
    /// Set when it must end.
    pub(super) stop: &'a AtomicBool,
}

impl Runner {
    /// After so many barriers.
    pub(super) fn new(
        area: Arc<Area>,
        processes: Arc<MemberProcesses>,
        rank: u32,
        barriers: u64,
        wire: Option<Wire>,
    ) -> Self {
        let ranks = NonZeroU32::new(area.world).unwrap_or(NonZeroU32::MIN);
        let blocks = Blocks::new(area.members.has_others());
        let (spinning, chunks, looked) = (Spinning::of(area.world), 0, Instant::now());
        let (searching, agreed) = (None, None);
        Self {
            area,
            processes,
            rank,
            ranks,
            spinning,
            barriers,
            chunks,
            blocks,
            wire,
            looked,
            searching,
            paused: Cell::default(),
            began_in: Cell::default(),
            agreed,
        }
    }

    /// Does the collective of this number.
    pub(super) fn run(
        &mut self,
        sequence: u64,
        work: &Work,
        deadline: Instant,
        stop: &AtomicBool,
    ) -> Result<(), Stop> {
        let descriptor = Descriptor { sequence, ..work.descriptor() };
        let bytes = descriptor.count as usize * descriptor.data_type.size() as usize;
        let kernel = match descriptor.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                Kernel::of(descriptor.data_type, descriptor.operation)
            }
            Collective::Broadcast | Collective::AllGather | Collective::Barrier => None,
        };
        self.agreed = None;
        // In this order: one that ends in between is none that it began in.
        let recovery = self.area.recovery();
        self.paused.set(self.area.paused());
        self.began_in.set(recovery.is_under_way.then(|| (Instant::now(), recovery)));
        let task = Task { work, descriptor, bytes, kernel, deadline, stop };
        match self.is_small(&task) {
            _ if self.area.members.has_others() => self.run_hosts(&task)?,
            true => self.run_small(&task)?,
            false => self.run_chunks(&task)?,
        }
        self.area.finish(self.rank, sequence + 1);
        Ok(())
    }

    /// Says what is called, and waits until all have said the same.
    pub(super) fn agree(&mut self, task: &Task<'_>) -> Result<(), Stop> {
        if let Some(failure) = self.area.announce(self.rank, &task.descriptor) {
            return Err(self.fail(failure));
        }
        self.pass(task)?;
        self.agreed = Some(Instant::now());
        Ok(())
    }

    /// Arrives at the next barrier, and waits until all have.
    pub(super) fn pass(&mut self, task: &Task<'_>) -> Result<(), Stop> {
        self.barriers += 1;
        let barrier = self.barriers;
        self.area.arrive(self.rank, barrier);
        let area = Arc::clone(&self.area);
        wait::wait(&area, barrier, self.spinning, || self.look(task, barrier))
    }

    /// Whether there is something to wait for, and how long at most.
    fn look(&mut self, task: &Task<'_>, barrier: u64) -> Result<Duration, Stop> {
        if let Some(failure) = self.area.failure() {
            return Err(Stop::Failed(failure.into()));
        }
        if task.stop.load(Ordering::Acquire) {
            return Err(Stop::Told);
        }
        let now = Instant::now();
        let due = now.saturating_duration_since(self.looked) >= NAP / 2;
        if due {
            self.looked = now;
        }
        if let Some(failure) = self.area.lost(&self.processes, barrier, due) {
            return Err(self.fail(failure));
        }
        if self.is_searching(task, now) {
            return Ok(NAP);
        }
        let deadline = self.deadline(task);
        if now >= deadline && !self.area.is_passed(barrier) {
            let members = &self.area.members;
            let late = (0..self.area.world).filter(|&rank| self.area.lacks(rank, barrier));
            let late: Vec<u32> = late.collect();
            // The last one has arrived just now.
            if late.is_empty() || self.area.is_passed(barrier) {
                return Ok(NAP);
            }
            // Who is on the wire waits for other hosts, most likely, and hears which.
            let wire_until = self.wire_deadline(task).filter(|_| members.has_others());
            if late == [0] && wire_until.is_some_and(|until| now < until) {
                return Ok(NAP);
            }
            let late = late.into_iter().map(|place| members.rank(place));
            return Err(self.fail(Overdue::of(task.descriptor.sequence, late).into()));
        }
        Ok(deadline.saturating_duration_since(now))
    }

    /// Whether who is on the wire joins for other trees, and is not late with that.
    fn is_searching(&mut self, task: &Task<'_>, now: Instant) -> bool {
        if !self.area.recovery().is_under_way {
            self.searching = None;
            return false;
        }
        let since = *self.searching.get_or_insert(now);
        now.saturating_duration_since(since) < longest_search(task.work.limit)
    }

    /// When a collective must be over. The time in which other trees are looked for does not count.
    pub(super) fn deadline(&self, task: &Task<'_>) -> Instant {
        task.deadline + self.paused_for()
    }

    /// How long other trees have been looked for since a collective began.
    fn paused_for(&self) -> Duration {
        // In this order: what is over by the first is in the second.
        let (now, paused) = (self.area.recovery(), self.area.paused());
        // What was over of a search when the collective began is none of that.
        if let Some((began, recovery)) = self.began_in.get()
            && now != recovery
        {
            self.paused.set(self.paused.get().max(paused.saturating_sub(began.elapsed())));
            self.began_in.set(None);
        }
        paused.saturating_sub(self.paused.get())
    }

    /// Until when who is on the wire has asked the switches whom they wait for, if it has called the collective and has no
    /// longer limit than this rank: it may have called later, so its time may be over later.
    fn wire_deadline(&self, task: &Task<'_>) -> Option<Instant> {
        Some(self.agreed? + task.work.limit.min(LONGEST) + self.paused_for() + WIRE_PATIENCE)
    }

    /// Ends the group. Another rank may have done so first, and better.
    pub(super) fn fail(&self, failure: Failure) -> Stop {
        self.area.fail(&failure);
        Stop::Failed(self.area.failure().unwrap_or(failure).into())
    }

    fn is_root(&self, task: &Task<'_>) -> bool {
        self.rank == task.descriptor.root
    }

    /// Whether a vector is so short that all ranks read those of all.
    fn is_small(&self, task: &Task<'_>) -> bool {
        let ranks = self.ranks.get() as usize;
        let (own, in_all) = match task.descriptor.collective {
            Collective::Barrier => (0, 0),
            Collective::AllReduce | Collective::Reduce => {
                (task.bytes, task.bytes.saturating_mul(ranks))
            }
            Collective::ReduceScatter => (task.bytes.saturating_mul(ranks), 0),
            Collective::Broadcast | Collective::AllGather => (task.bytes, 0),
        };
        own <= SMALL_BYTES && in_all <= SMALL_IN_ALL
    }

    fn run_small(&mut self, task: &Task<'_>) -> Result<(), Stop> {
        let &Task { work: &Work { source, destination, .. }, descriptor, bytes, .. } = task;
        let (area, sequence) = (Arc::clone(&self.area), descriptor.sequence);
        let place = |rank: u32| area.layout.small(rank, sequence);
        let short = source.length().min(SMALL_BYTES);
        source.share(0, short, &area.memory, place(self.rank));
        self.agree(task)?;
        let own = self.rank as usize * bytes;
        let from = |start: usize| {
            let area = &area;
            move |rank, offset, to: &mut [u8]| {
                area.memory.read(place(rank) + start + offset, to);
            }
        };
        let to = |offset: usize, from: &[u8]| destination.store(offset, from);
        match (descriptor.collective, &task.kernel) {
            (Collective::Barrier, _) => {}
            (Collective::AllGather, _) => {
                for rank in 0..self.ranks.get() {
                    destination.fetch(rank as usize * bytes, bytes, &area.memory, place(rank));
                }
            }
            (Collective::Broadcast, _) => {
                destination.fetch(0, bytes, &area.memory, place(descriptor.root));
            }
            (Collective::ReduceScatter, Some(kernel)) => {
                self.blocks.combine(kernel, self.ranks, bytes, from(own), to);
            }
            (Collective::Reduce, _) if !self.is_root(task) => {}
            (_, Some(kernel)) => self.blocks.combine(kernel, self.ranks, bytes, from(0), to),
            (_, None) => {}
        }
        Ok(())
    }

    fn run_chunks(&mut self, task: &Task<'_>) -> Result<(), Stop> {
        let most = match task.descriptor.collective {
            // A window of each rank's part.
            Collective::ReduceScatter => self.window(),
            _ => SLOT_BYTES,
        };
        let chunks = Chunks::new(task.bytes, most);
        let first = self.chunks;
        let count = chunks.count();
        self.chunks += count;
        let sliced =
            matches!(task.descriptor.collective, Collective::AllReduce | Collective::Reduce);
        let last = if sliced { count + 1 } else { count };
        for step in 0..=last {
            if step < count {
                self.fill(task, first + step, chunks.range(step));
            }
            if let Some(chunk) = step.checked_sub(1).filter(|&chunk| chunk < count) {
                let range = chunks.range(chunk);
                match task.descriptor.collective {
                    Collective::AllReduce | Collective::Reduce => {
                        self.reduce_slice(task, first + chunk, range);
                    }
                    Collective::ReduceScatter => self.reduce_part(task, first + chunk, range),
                    _ => self.gather(task, first + chunk, range),
                }
            }
            if sliced && let Some(chunk) = step.checked_sub(2) {
                self.take_slices(task, first + chunk, chunks.range(chunk));
            }
            match step {
                0 => self.agree(task)?,
                step if step < last => self.pass(task)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Where a rank has a chunk.
    fn slot(&self, rank: u32, chunk: u64) -> usize {
        self.area.layout.slot(rank, chunk)
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.rank;
        (0..self.ranks.get()).filter(move |&rank| rank != own)
    }

    /// Writes what others need of this rank's chunk.
    fn fill(&self, task: &Task<'_>, chunk: u64, range: Range<usize>) {
        let (source, memory) = (task.work.source, &self.area.memory);
        let slot = self.slot(self.rank, chunk);
        match task.descriptor.collective {
            Collective::AllReduce | Collective::Reduce => {
                let own = slice(range.len(), self.ranks.get(), self.rank);
                source.share(range.start, own.start, memory, slot);
                let rest = range.len() - own.end;
                source.share(range.start + own.end, rest, memory, slot + own.end);
            }
            Collective::ReduceScatter => {
                let window = self.window();
                for rank in self.others() {
                    let start = rank as usize * task.bytes + range.start;
                    source.share(start, range.len(), memory, slot + rank as usize * window);
                }
            }
            Collective::AllGather => source.share(range.start, range.len(), memory, slot),
            Collective::Broadcast if self.is_root(task) => {
                source.share(range.start, range.len(), memory, slot);
            }
            Collective::Broadcast | Collective::Barrier => {}
        }
    }

    /// Bytes of a chunk for each rank's part.
    fn window(&self) -> usize {
        SLOT_BYTES / self.ranks.get() as usize / 64 * 64
    }

    /// Reduces this rank's slice of a chunk.
    fn reduce_slice(&mut self, task: &Task<'_>, chunk: u64, range: Range<usize>) {
        let Some(kernel) = &task.kernel else { return };
        let &Work { source, destination, .. } = task.work;
        let (area, own_rank) = (Arc::clone(&self.area), self.rank);
        let own = slice(range.len(), self.ranks.get(), self.rank);
        let at = range.start + own.start;
        let place = |rank: u32, offset: usize| area.layout.slot(rank, chunk) + own.start + offset;
        let load = |rank: u32, offset: usize, to: &mut [u8]| match rank {
            rank if rank == own_rank => source.load(at + offset, to),
            rank => {
                area.memory.read(place(rank, offset), to);
            }
        };
        let (all, root) = (task.descriptor.collective == Collective::AllReduce, self.is_root(task));
        let store = |offset: usize, from: &[u8]| {
            if all || !root {
                area.memory.write(place(own_rank, offset), from);
            }
            if all || root {
                destination.store(at + offset, from);
            }
        };
        self.blocks.combine(kernel, self.ranks, own.len(), load, store);
    }

    /// Takes the slices of others.
    fn take_slices(&self, task: &Task<'_>, chunk: u64, range: Range<usize>) {
        if task.descriptor.collective == Collective::Reduce && !self.is_root(task) {
            return;
        }
        for rank in self.others() {
            let slice = slice(range.len(), self.ranks.get(), rank);
            let (to, from) = (range.start + slice.start, self.slot(rank, chunk) + slice.start);
            task.work.destination.fetch(to, slice.len(), &self.area.memory, from);
        }
    }

    /// Reduces a window of this rank's part.
    fn reduce_part(&mut self, task: &Task<'_>, chunk: u64, range: Range<usize>) {
        let Some(kernel) = &task.kernel else { return };
        let &Work { source, destination, .. } = task.work;
        let (area, own_rank) = (Arc::clone(&self.area), self.rank);
        let own_part = own_rank as usize * task.bytes + range.start;
        let in_slot = own_rank as usize * self.window();
        let load = |rank: u32, offset: usize, to: &mut [u8]| match rank {
            rank if rank == own_rank => source.load(own_part + offset, to),
            rank => {
                area.memory.read(area.layout.slot(rank, chunk) + in_slot + offset, to);
            }
        };
        let store = |offset: usize, from: &[u8]| destination.store(range.start + offset, from);
        self.blocks.combine(kernel, self.ranks, range.len(), load, store);
    }

    /// Takes what others have, where nothing is combined.
    fn gather(&self, task: &Task<'_>, chunk: u64, range: Range<usize>) {
        let &Task { work: &Work { source, destination, .. }, bytes, .. } = task;
        let memory = &self.area.memory;
        match task.descriptor.collective {
            Collective::Broadcast if self.is_root(task) => {
                destination.copy(range.start, source, range.start, range.len());
            }
            Collective::Broadcast => {
                let from = self.slot(task.descriptor.root, chunk);
                destination.fetch(range.start, range.len(), memory, from);
            }
            _ => {
                let own = self.rank as usize * bytes + range.start;
                destination.copy(own, source, range.start, range.len());
                for rank in self.others() {
                    let to = rank as usize * bytes + range.start;
                    destination.fetch(to, range.len(), memory, self.slot(rank, chunk));
                }
            }
        }
    }
}
