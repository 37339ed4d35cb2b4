//! What the tasks of a flow are about: a flow knows them by a number of ours.

use std::sync::Arc;

use millstream_transfer_core::Piece;

use super::peer::Way;
use crate::batch::BatchShared;
use crate::counted::Counted;
use crate::memory::LocalMemory;
use crate::segment::{OpenSegment, View};
use crate::task::TaskHandle;
use crate::terms::Terms;
use crate::transport::Run;

/// Tasks of one batch between the same two pieces of memory.
#[derive(Debug)]
struct Entry {
    batch: Arc<BatchShared>,
    local: Arc<LocalMemory>,
    segment: Arc<OpenSegment>,
    terms: Terms,
    /// Which of the engine's transports does it.
    transport: usize,
    view: View,
    /// Index of the target's buffer in the descriptor.
    buffer: usize,
}

/// Runs of tasks that have not all ended.
#[derive(Debug, Default)]
pub(super) struct Runs(Counted<Entry>);

/// The number of a run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RunId(u32);

/// The keys of a piece's memory at both ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Keys {
    pub(super) local: u32,
    pub(super) remote: u32,
}

impl Runs {
    /// Adds a run.
    pub(super) fn insert(&mut self, batch: &Arc<BatchShared>, run: &Run, terms: &Terms) -> RunId {
        let entry = Entry {
            batch: Arc::clone(batch),
            local: Arc::clone(&run.local),
            segment: Arc::clone(&run.segment),
            terms: Terms { allowed: run.allowed, ..*terms },
            transport: run.transport,
            view: run.view.clone(),
            buffer: run.buffer,
        };
        RunId(self.0.insert(entry, run.tasks.len()))
    }

    /// The number of a task, by its index in its batch.
    pub(super) const fn user(run: RunId, task: usize) -> u64 {
        (run.0 as u64) << 32 | task as u64
    }

    fn entry(&self, user: u64) -> Option<&Entry> {
        self.0.get((user >> 32) as u32)
    }

    /// The task of a number.
    pub(super) fn task(&self, user: u64) -> Option<TaskHandle> {
        let batch = Arc::clone(&self.entry(user)?.batch);
        Some(TaskHandle { batch, index: user as u32 as usize })
    }

    /// The batch of a task, and its index there.
    pub(super) fn place(&self, user: u64) -> Option<(&Arc<BatchShared>, usize)> {
        Some((&self.entry(user)?.batch, user as u32 as usize))
    }

    /// The segment of a task.
    pub(super) fn segment(&self, user: u64) -> Option<&Arc<OpenSegment>> {
        Some(&self.entry(user)?.segment)
    }

    /// A task as it was given to the transport, and on what terms.
    pub(super) fn run(&self, user: u64) -> Option<(Run, Terms)> {
        let entry = self.entry(user)?;
        let task = user as u32 as usize;
        let run = Run {
            transport: entry.transport,
            transport_name: super::RdmaTransport::NAME,
            copies: false,
            tasks: task..task + 1,
            claimed: task,
            allowed: entry.terms.allowed,
            local: Arc::clone(&entry.local),
            segment: Arc::clone(&entry.segment),
            view: entry.view.clone(),
            buffer: entry.buffer,
        };
        Some((run, entry.terms))
    }

    /// Whether two tasks are of one run.
    pub(super) const fn of_one_run(one: u64, other: u64) -> bool {
        one >> 32 == other >> 32
    }

    /// The keys of a piece of a slice for the devices of a rail. `None` when the descriptor has none for them.
    pub(super) fn keys(&self, user: u64, piece: &Piece, way: &Way) -> Option<Keys> {
        let entry = self.entry(user)?;
        let local = entry.local.keys(entry.transport, piece.local);
        let remote = &entry.view.part(entry.buffer, piece.remote)?.rkey;
        Some(Keys { local: *local.get(way.local)?, remote: *remote.get(way.remote)? })
    }

    /// A task of it has ended.
    pub(super) fn ended(&mut self, user: u64) {
        self.0.release((user >> 32) as u32, 1);
    }
}
