//! A completion queue and what was polled from it.

use std::hint;
use std::time::{Duration, Instant};

use anyhow::Context;
use millstream_verbs::{Completion, CompletionQueue, Device, Provider};

/// Completions taken at a time.
const BATCH: usize = 128;

pub(super) struct Completions {
    queue: CompletionQueue,
    ready: Vec<Completion>,
    busy_poll: bool,
}

impl Completions {
    /// Makes a queue of `capacity` entries. With `busy_poll`, one of a device of the system is polled
    /// all the time. A soft device's thread does that for us: two threads of a process that poll
    /// would only keep each other from the device's lock.
    pub(super) fn new(device: &Device, capacity: usize, busy_poll: bool) -> anyhow::Result<Self> {
        let queue = device.create_completion_queue(capacity).with_context(|| {
            format!("cannot make a completion queue of {capacity} entries on {}", device.name())
        })?;
        let busy_poll = busy_poll && device.provider() == Provider::Ibverbs;
        Ok(Self { queue, ready: Vec::with_capacity(BATCH), busy_poll })
    }

    pub(super) fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    /// Waits until there are completions, at most `timeout`, and takes some. None when there are
    /// none in time, and at once when the device has failed.
    pub(super) fn next(&mut self, timeout: Duration) -> &[Completion] {
        self.ready.clear();
        if self.queue.poll(&mut self.ready, BATCH) > 0 {
            return &self.ready;
        }
        if !self.busy_poll {
            if self.queue.wait(timeout) {
                self.queue.poll(&mut self.ready, BATCH);
            }
            return &self.ready;
        }
        let start = Instant::now();
        while self.queue.poll(&mut self.ready, BATCH) == 0 && start.elapsed() < timeout {
            hint::spin_loop();
        }
        &self.ready
    }
}
