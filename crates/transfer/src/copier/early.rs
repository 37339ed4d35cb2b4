//! Small requests, which who submits copies at once: it has claimed them before anybody else knew of them. So
//! what they have in common is done once for all of them, and for each one there is little but its copy.

use std::ops::Range;
use std::sync::Arc;

use super::failed::{Failed, not_exchanged, reason, visit};
use super::group::caching_of;
use super::way::{Other, Way};
use crate::batch::BatchShared;
use crate::memory::LocalMemory;
use crate::metrics::Tally;
use crate::task::{TaskRef, WideSlice};
use crate::{FailureReason, Opcode};

impl Way {
    /// Copies tasks that were claimed early, and takes their bytes off those that are `left`: returns those that
    /// another transport may go on with. Does nothing, and returns `None`, where copies cannot begin without a wait.
    pub(super) fn copy_early(
        &self,
        batch: &Arc<BatchShared>,
        tasks: Range<usize>,
        left: &mut u64,
    ) -> Option<Vec<usize>> {
        let mut leaving = Vec::new();
        if tasks.is_empty() {
            return Some(leaving);
        }
        let mut ended = Ended::default();
        let all = tasks.clone();
        let result = match &self.other {
            _ if self.has_gpu() => Ok(false),
            Other::Own(other) => self.copy_within(batch, all, other, &mut ended).map(|()| true),
            Other::Peer(..) => self.copy_across(batch, all, &mut ended),
        };
        // The batch is told when nobody has the memory any more: who is told may take it back.
        let Ended { tally, failed, failed_bytes } = ended;
        *left = left.saturating_sub(tally.bytes[0] + tally.bytes[1] + failed_bytes);
        let fail = |index, failed| self.fail(batch, index, batch.tasks.get(index).slices(), failed);
        // First those that have failed: the others are told of as a range, which may have them in it.
        if result.is_ok() {
            leaving.extend(failed.into_iter().filter_map(|(index, failed)| fail(index, failed)));
        }
        if tally.completed > 0 {
            let transport = batch.tasks.get(tasks.start).transport();
            batch.counters.completed(transport, &tally);
            self.segment.traffic.add(tally.completed, tally.bytes);
            batch.completed(tasks.clone(), transport);
            batch.tasks_finished(tally.completed as usize);
            self.works();
        }
        match result {
            Ok(done) => done.then_some(leaving),
            Err(failed) => {
                leaving.extend(tasks.filter_map(|index| fail(index, failed.clone())));
                Some(leaving)
            }
        }
    }

    /// Copies within this process; fails when none of it was copied.
    fn copy_within(
        &self,
        batch: &BatchShared,
        tasks: Range<usize>,
        other: &LocalMemory,
        ended: &mut Ended,
    ) -> Result<(), Failed> {
        let local = self.local.enter().ok_or(FailureReason::Unregistered)?;
        let other = other.enter().ok_or(FailureReason::Unregistered)?;
        for index in tasks {
            let task = batch.tasks.get(index);
            let WideSlice { source: near, target: far, length } = task.whole();
            let caching = caching_of(length);
            let copied = match task.opcode() {
                Opcode::Write => local.copy_to(near, &other, far, length, caching),
                Opcode::Read => other.copy_to(far, &local, near, length, caching),
            };
            ended.tally.bytes[task.opcode() as usize] += length;
            match copied {
                Ok(()) => {
                    task.arrived(length);
                    ended.tally.completed += 1;
                }
                Err(reason) => ended.fail(index, task, reason.into()),
            }
        }
        Ok(())
    }

    /// Copies to or from a peer's memory; `false` when that must be opened first. Fails when none of it counts.
    fn copy_across(
        &self,
        batch: &BatchShared,
        tasks: Range<usize>,
        ended: &mut Ended,
    ) -> Result<bool, Failed> {
        let Other::Peer(peer, key) = &self.other else { return Ok(false) };
        let Some(region) = peer.region(*key) else { return Ok(false) };
        // While it is entered, the first bytes come.
        let WideSlice { target, length, .. } = batch.tasks.get(tasks.start).whole();
        region.prefetch(target, length as usize);
        let local = self.local.enter().ok_or(FailureReason::Unregistered)?;
        let visit = visit(peer, &region)?;
        for index in tasks.clone() {
            let task = batch.tasks.get(index);
            let WideSlice { source: near, target: far, length } = task.whole();
            let caching = caching_of(length);
            let opcode = task.opcode();
            ended.tally.bytes[opcode as usize] += length;
            if let Err(error) = local.exchange(opcode, near, &visit, far, length, caching) {
                ended.fail(index, task, not_exchanged(&local, error));
            }
        }
        // Only now they have arrived.
        visit.confirm().map_err(reason)?;
        let mut failed = ended.failed.iter().map(|(index, _)| *index).peekable();
        for index in tasks {
            if failed.next_if_eq(&index).is_none() {
                let task = batch.tasks.get(index);
                task.arrived(task.length());
                ended.tally.completed += 1;
            }
        }
        Ok(true)
    }
}

/// What has become of tasks that were claimed early.
#[derive(Default)]
struct Ended {
    /// Those that have arrived.
    tally: Tally,
    failed: Vec<(usize, Failed)>,
    failed_bytes: u64,
}

impl Ended {
    /// A task whose bytes were counted has not arrived.
    #[cold]
    fn fail(&mut self, index: usize, task: TaskRef<'_>, failed: Failed) {
        self.tally.bytes[task.opcode() as usize] -= task.length();
        self.failed_bytes += task.length();
        self.failed.push((index, failed));
    }
}
