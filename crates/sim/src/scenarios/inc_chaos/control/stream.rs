//! Control connections: reliable and in order, until they break.
//!
//! The kernel of the controller's machine accepts a connection while the process stands still, and refuses it while
//! there is none.

use core::time::Duration;
use std::collections::BTreeMap;

use millstream_inc::protocol::{Commanded, ToController};
use millstream_roce::Instant;

use crate::Rng;

/// A connection whose other end answers nothing for so long breaks (TCP keep-alive).
pub(super) const PATIENCE: Duration = Duration::from_secs(8);

/// What arrives.
#[derive(Clone, Debug)]
pub(super) enum Arrival {
    /// At the controller.
    Accepted,
    /// At the controller; none when the other end is closed.
    Up(Option<ToController>),
    /// At the client; none when the other end is closed.
    Down(Option<Commanded>),
}

/// A connection.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) machine: usize,
    /// The process on that machine.
    pub(super) life: u64,
    /// The controller's process.
    pub(super) controller: u64,
    /// Nothing arrives any more.
    pub(super) broken: bool,
    /// When the last thing that was sent arrives, up and down.
    last: [Instant; 2],
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Streams {
    pub(super) all: BTreeMap<u64, Stream>,
    next: u64,
    /// Until when nothing gets from or to a machine.
    cut: BTreeMap<usize, Instant>,
}

impl Streams {
    pub(super) fn open(&mut self, machine: usize, life: u64, controller: u64, now: Instant) -> u64 {
        let id = self.next;
        self.next += 1;
        let stream = Stream { machine, life, controller, broken: false, last: [now; 2] };
        self.all.insert(id, stream);
        id
    }

    pub(super) fn cut(&mut self, machine: usize, until: Instant) {
        let end = self.cut.entry(machine).or_insert(until);
        *end = (*end).max(until);
    }

    /// Until when a machine is cut off, if it is.
    pub(super) fn cut_until(&self, machine: usize, now: Instant) -> Option<Instant> {
        self.cut.get(&machine).copied().filter(|&until| until > now)
    }

    /// When what is sent now arrives; none when it never does.
    pub(super) fn send(
        &mut self,
        id: u64,
        up: bool,
        now: Instant,
        latency: Duration,
        rng: &mut Rng,
    ) -> Option<Instant> {
        let cut = self.all.get(&id).and_then(|stream| self.cut_until(stream.machine, now));
        let stream = self.all.get_mut(&id).filter(|stream| !stream.broken)?;
        let delay = Duration::from_nanos(rng.below(latency.as_nanos() as u64) + 1000);
        // It is sent again some time after the network is there again.
        let again = Duration::from_micros(rng.below(500_000));
        let at = cut.map_or(now + delay, |until| until + again);
        let last = &mut stream.last[usize::from(up)];
        *last = (*last).max(at);
        Some(*last)
    }

    /// It is broken, for both ends.
    pub(super) fn end(&mut self, id: u64) {
        if let Some(stream) = self.all.get_mut(&id) {
            stream.broken = true;
        }
    }
}
