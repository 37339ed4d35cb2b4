//! The stages of one request of a batch: when it was submitted, first posted, last acknowledged and told.
//!
//! One at a time: whoever does anything to a request compares a number, and only those of the one that is timed look
//! at the clock. Nothing is allocated.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::counters::{Counters, Times, chosen};
use crate::TransferState;

/// See above. All times are 0 while they are not known.
#[derive(Debug, Default)]
pub(crate) struct Timing {
    /// The index of the task, from 1; 0 while none is timed.
    task: AtomicUsize,
    submitted: AtomicU64,
    posted: AtomicU64,
    acknowledged: AtomicU64,
}

impl Timing {
    /// Times one of these tasks perhaps, which nobody else knows of yet. Calls do not overlap.
    pub(crate) fn begin(&self, first: usize, count: usize, copies: bool, counters: &Counters) {
        let Some(index) = chosen(count, copies) else { return };
        if self.task.load(Ordering::Acquire) == 0 {
            self.submitted.store(counters.now(), Ordering::Relaxed);
            self.posted.store(0, Ordering::Relaxed);
            self.acknowledged.store(0, Ordering::Relaxed);
            self.task.store(first + index + 1, Ordering::Release);
        }
    }

    fn is_of(&self, task: usize) -> bool {
        self.task.load(Ordering::Relaxed) == task + 1
    }

    /// Something of a task is posted, or begins to be copied.
    pub(crate) fn posted(&self, task: usize, counters: &Counters) {
        if self.is_of(task) && self.posted.load(Ordering::Relaxed) == 0 {
            self.posted.store(counters.now(), Ordering::Relaxed);
        }
    }

    /// Something of a task has arrived.
    pub(crate) fn acknowledged(&self, task: usize, counters: &Counters) {
        if self.is_of(task) {
            self.acknowledged.store(counters.now(), Ordering::Relaxed);
        }
    }

    /// A task has ended, and its state says so. Called once for each.
    pub(crate) fn told(&self, task: usize, transport: u8, state: u8, counters: &Counters) {
        if self.is_of(task) {
            self.record(transport, state, counters);
        }
    }

    /// As [`Timing::told`], for tasks that are COMPLETED, or else have told of their end.
    pub(crate) fn completed(&self, tasks: Range<usize>, transport: u8, counters: &Counters) {
        let timed = self.task.load(Ordering::Relaxed);
        if timed > tasks.start && timed <= tasks.end {
            self.record(transport, TransferState::Completed as u8, counters);
        }
    }

    fn record(&self, transport: u8, state: u8, counters: &Counters) {
        let told = counters.now();
        let time = |of: &AtomicU64| Some(of.load(Ordering::Relaxed)).filter(|&time| time != 0);
        let submitted = self.submitted.load(Ordering::Relaxed);
        // Where nobody said so it was in one go.
        let posted = time(&self.posted).unwrap_or(submitted);
        let acknowledged = time(&self.acknowledged).unwrap_or(told);
        if state == TransferState::Completed as u8 {
            counters.timed(transport, Times { submitted, posted, acknowledged, told });
        }
        self.task.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::code_of;

    #[test]
    fn the_stages_of_one_request_at_a_time_are_recorded() {
        let (counters, timing) = (Counters::default(), Timing::default());
        let rdma = code_of("rdma");
        let count = || counters.transport(usize::from(rdma) - 1).stages.all.count();
        let completed = TransferState::Completed as u8;
        // One submission in some is timed.
        let begin = |task| (0..16).for_each(|_| timing.begin(task, 1, false, &counters));
        begin(7);
        // Another one is not timed meanwhile, nor is what happens to others.
        begin(8);
        timing.told(8, rdma, completed, &counters);
        assert_eq!(count(), 0);
        for task in [6, 7, 8] {
            timing.posted(task, &counters);
            timing.acknowledged(task, &counters);
        }
        timing.told(7, rdma, completed, &counters);
        assert_eq!(count(), 1);
        let stages = counters.transport(usize::from(rdma) - 1).stages;
        let parts = stages.queued.sum_ns + stages.transferring.sum_ns + stages.completing.sum_ns;
        assert_eq!(parts, stages.all.sum_ns);
        // It is over, and what fails counts for nothing.
        timing.told(7, rdma, completed, &counters);
        begin(9);
        timing.told(9, rdma, TransferState::Failed as u8, &counters);
        begin(10);
        timing.told(10, rdma, completed, &counters);
        assert_eq!(count(), 2);
    }
}
