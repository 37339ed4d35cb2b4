//! WRITEs between two soft devices of this process, for who compares with them.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use hdrhistogram::Histogram;
use millstream_net::affinity;
use millstream_verbs::SoftConfig;

use super::Operation;
use super::bandwidth::own_addresses;
use super::host::{Host, Memory};
use super::poster::Poster;

/// Requests that the queue pair holds: as many as the transfer engine's.
const DEPTH: usize = 128;
/// Bytes of the messages for which there are receives, which nobody uses.
const RECEIVED: usize = 4096;
const LONGEST_NS: u64 = 60_000_000_000;

/// Two devices with a queue pair each.
pub(in crate::bench) struct RawWrites {
    near: Host,
    far: Host,
}

/// What was written in rounds.
pub(in crate::bench) struct Rounds {
    pub(in crate::bench) bytes: u64,
    pub(in crate::bench) elapsed: Duration,
    /// Of a round, in nanoseconds.
    pub(in crate::bench) latencies: Histogram<u64>,
}

impl RawWrites {
    /// Each with so many bytes of memory, and on a processor: that of who posts, and the other's. All but their
    /// addresses is as given.
    pub(in crate::bench) fn new(
        working_set: usize,
        processors: [usize; 2],
        config: &SoftConfig,
    ) -> anyhow::Result<Self> {
        let open = |address: IpAddr, processor| {
            let _pinned = affinity::pin(processor).context("cannot pin a thread")?;
            let part = Memory::of_pages(working_set)?.parts(1).next();
            let part = part.context("a memory is a part of itself")?;
            Host::open(&SoftConfig { address, ..config.clone() }, part, RECEIVED, DEPTH, 1)
        };
        let [near, far] = own_addresses(1)[0];
        let (near, far) = (open(near, processors[0])?, open(far, processors[1])?);
        near.connect(&far)?;
        Ok(Self { near, far })
    }

    /// Posts so many WRITEs of this size and waits until all are done, again and again for so long.
    pub(in crate::bench) fn measure(
        &self,
        size: usize,
        count: usize,
        duration: Duration,
    ) -> anyhow::Result<Rounds> {
        let far = self.far.remote();
        let mut poster = Poster::new(&self.near, 0, far, Operation::Write, size, DEPTH);
        let latencies = Histogram::new_with_bounds(1, LONGEST_NS, 3)?;
        let mut rounds = Rounds { bytes: 0, elapsed: Duration::ZERO, latencies };
        let begin = Instant::now();
        while rounds.elapsed < duration {
            let start = Instant::now();
            poster.post(count.min(DEPTH))?;
            poster.drain()?;
            rounds.latencies.saturating_record(start.elapsed().as_nanos() as u64);
            rounds.elapsed = begin.elapsed();
        }
        rounds.bytes = poster.done() * size as u64;
        Ok(rounds)
    }
}
