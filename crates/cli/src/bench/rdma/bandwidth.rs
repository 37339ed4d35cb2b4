//! How much passes between pairs of devices that all work at once.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use millstream_verbs::Device;

use super::host::{Host, Memory, Part, part_length};
use super::poster::Poster;
use super::process_end::Arguments as End;
use super::processes::{self, Total};
use super::report::{Bandwidth, Stream};
use super::work::Work;
use super::{Arguments, Operation};
use crate::failure::usage;
use crate::process;

/// Bytes of requests outstanding, as far as `DEPTHS` allows.
const OUTSTANDING: usize = 4 << 20;
/// The fewest and the most requests outstanding.
const DEPTHS: (usize, usize) = (4, 128);

/// What all measurements share.
pub(super) struct Bench<'a> {
    arguments: &'a Arguments,
    /// Of each pair of devices: the first posts.
    pub(super) addresses: Vec<[IpAddr; 2]>,
    working_set: usize,
    /// Of this process; none where others have it.
    memories: Option<[Arc<Memory>; 2]>,
}

impl<'a> Bench<'a> {
    pub(super) fn new(arguments: &'a Arguments, working_set: usize) -> anyhow::Result<Self> {
        let addresses = match (arguments.bind, arguments.peer) {
            (Some(bind), Some(peer)) if bind == peer => {
                return Err(usage("--bind and --peer: two devices need two addresses"));
            }
            (Some(_), Some(_)) if arguments.devices > 1 => {
                return Err(usage("--devices: --bind and --peer are addresses of one pair only"));
            }
            (Some(bind), Some(peer)) => vec![[bind, peer]],
            _ => own_addresses(arguments.devices),
        };
        let memories = match arguments.processes {
            Some(_) => None,
            None => Some([Memory::new(working_set)?, Memory::new(working_set)?]),
        };
        Ok(Self { arguments, addresses, working_set, memories })
    }

    /// Measures with all pairs of devices.
    pub(super) fn bandwidth(&self, op: Operation, size: usize) -> anyhow::Result<Bandwidth> {
        let depth = (OUTSTANDING / size).clamp(DEPTHS.0, DEPTHS.1);
        let Total { bytes, stream, work } = match self.arguments.processes {
            Some(count) => self.between_processes(count, op, size, depth)?,
            None => self.here(op, size, depth)?,
        };
        let (ratio_to_udp, ratio_to_tcp) = (0.0, 0.0);
        Ok(Bandwidth {
            op,
            size: size as u64,
            depth,
            stream,
            ratio_to_udp,
            ratio_to_tcp,
            retransmissions: work.retransmissions(),
            counted: work.counted(bytes),
        })
    }

    fn between_processes(
        &self,
        count: u16,
        op: Operation,
        size: usize,
        depth: usize,
    ) -> anyhow::Result<Total> {
        let Arguments { options, duration, .. } = *self.arguments;
        let queue_pairs = self.arguments.queue_pairs();
        let working_set = part_length(self.working_set, count.into());
        processes::measure(self.addresses[0], count, duration, |bind, posts| End {
            bind,
            op,
            size,
            depth,
            queue_pairs,
            working_set,
            posts,
            options,
        })
    }

    /// All in this process.
    fn here(&self, op: Operation, size: usize, depth: usize) -> anyhow::Result<Total> {
        let lanes = self.lanes(size, depth)?;
        let posters = lanes.iter().flat_map(|Lane { near, far }| {
            let shards = 0..near.device.shards();
            shards.map(|shard| Poster::new(near, shard, far.remote(), op, size, depth))
        });
        let mut posters: Vec<_> = posters.collect();
        let duration = self.arguments.duration;
        // Until windows have opened.
        run(&mut posters, duration / 10)?;
        let work = || Work::of(lanes.iter().flat_map(Lane::devices));
        let before = work();
        let (start, cpu) = (Instant::now(), process::processor_time());
        let messages = run(&mut posters, duration)?;
        let (elapsed, cpu) = (start.elapsed(), process::processor_time() - cpu);
        let bytes = messages * size as u64;
        Ok(Total { bytes, stream: Stream::new(bytes, elapsed, cpu), work: work().since(before) })
    }

    fn lanes(&self, size: usize, depth: usize) -> anyhow::Result<Vec<Lane>> {
        let queue_pairs = usize::from(self.arguments.queue_pairs());
        let open = |address, part: Part| {
            let config = self.arguments.options.config(address);
            Host::open(&config, part, size, depth, queue_pairs)
        };
        let memories = self.memories.iter();
        let parts = memories.flat_map(|[near, far]| {
            let count = self.addresses.len();
            near.parts(count).zip(far.parts(count))
        });
        let lanes = self.addresses.iter().zip(parts).map(|(&[near, far], parts)| {
            let lane = Lane { near: open(near, parts.0)?, far: open(far, parts.1)? };
            lane.near.connect(&lane.far)?;
            Ok(lane)
        });
        lanes.collect()
    }
}

/// Two connected hosts: the near one posts.
struct Lane {
    near: Host,
    far: Host,
}

impl Lane {
    const fn devices(&self) -> [&Device; 2] {
        [&self.near.device, &self.far.device]
    }
}

/// Lets all post at once, each on a thread of its own; returns how many messages passed.
fn run(posters: &mut [Poster<'_>], duration: Duration) -> anyhow::Result<u64> {
    thread::scope(|scope| {
        let mut threads = Vec::with_capacity(posters.len());
        for poster in posters {
            // The name is what a profiler shows.
            let thread = thread::Builder::new().name("poster".to_owned());
            let thread = thread.spawn_scoped(scope, || poster.run(duration));
            threads.push(thread.context("cannot start a thread")?);
        }
        let mut messages = 0;
        for thread in threads {
            messages +=
                thread.join().map_err(|_panic| anyhow!("a thread that posts panicked"))??;
        }
        Ok(messages)
    })
}

/// Addresses of loopback for so many pairs, that no other process chooses as long as it has another
/// number.
pub(super) fn own_addresses(pairs: u16) -> Vec<[IpAddr; 2]> {
    let process = std::process::id();
    let address =
        |host| Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host).into();
    (0..pairs as u8).map(|pair| [address(2 * pair + 1), address(2 * pair + 2)]).collect()
}
