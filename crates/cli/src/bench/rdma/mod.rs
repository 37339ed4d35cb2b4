//! `bench rdma`: what two soft devices of this process do over loopback, beside what the kernel
//! does without them: all in one run, so that whatever else the machine does is in both.

mod host;
mod latency;
mod poster;
mod report;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum};
use millstream_net::baseline;
use serde::Serialize;

use crate::bench::figures::per;
use crate::failure::usage;
use crate::step::Step;
use crate::{output, process, units};
use host::{Host, Memory};
pub(super) use latency::{Arguments as LatencyEnd, run as run_latency_end};
use poster::Poster;
use report::{Bandwidth, Report, Stream};

/// The smallest working set: what several of the largest datagrams need.
const LEAST_WORKING_SET: u64 = 1 << 20;
/// Bytes of requests outstanding, as far as `DEPTHS` allows.
const OUTSTANDING: usize = 4 << 20;
/// The fewest and the most requests outstanding.
const DEPTHS: (usize, usize) = (4, 128);
/// Payload bytes in a datagram of the plain stream: those of the largest path MTU.
const SEGMENT: usize = 4096;
/// Bytes of a write of the TCP stream.
const TCP_WRITE: usize = 1 << 20;

/// Arguments of `bench rdma`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Bytes of a message, up to those of the working set, several with commas between
    #[arg(
        long,
        value_name = "S,...",
        default_value = "4KiB,64KiB,1MiB",
        value_delimiter = ',',
        value_parser = units::size
    )]
    size: Vec<u64>,
    /// Bytes that each side walks through, and those of the streams beside it too: more than caches
    /// hold
    #[arg(long, value_name = "S", default_value = "256MiB", value_parser = units::size)]
    working_set: u64,
    /// What to measure, several with commas between
    #[arg(long, value_name = "O,...", default_value = "write,read,send", value_delimiter = ',')]
    ops: Vec<Operation>,
    /// Queue pairs of each device: requests outstanding are shared among them, one after the other
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    queue_pairs: u16,
    /// How long each measurement takes
    #[arg(long, value_name = "D", default_value = "1s", value_parser = units::duration)]
    duration: Duration,
    /// Progress threads look for work without a pause, instead of sleeping
    #[arg(long)]
    busy_poll: bool,
    /// Address of the side that posts [default: one of loopback]
    #[arg(long, value_name = "IP", requires = "peer")]
    bind: Option<IpAddr>,
    /// Address of the other side, on this machine too
    #[arg(long, value_name = "IP", requires = "bind")]
    peer: Option<IpAddr>,
    /// Send every packet as its own datagram
    #[arg(long)]
    no_segmentation_offload: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Arguments {
    fn spin(&self) -> Duration {
        if self.busy_poll { Duration::MAX } else { Duration::ZERO }
    }
}

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Operation {
    /// RDMA WRITE
    Write,
    /// RDMA READ
    Read,
    /// SEND into posted receives
    Send,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let working_set = arguments.working_set;
    let set = usize::try_from(working_set).ok().filter(|_| working_set >= LEAST_WORKING_SET);
    let set =
        set.ok_or_else(|| usage(format!("--working-set {working_set}: choose 1MiB or more")))?;
    if let Some(size) = arguments.size.iter().find(|&&size| size == 0 || size > working_set) {
        return Err(usage(format!(
            "--size {size}: choose 1 byte to the {working_set} of --working-set"
        )));
    }
    if arguments.duration.is_zero() {
        return Err(usage("--duration 0s: choose 1ms or more"));
    }
    let bench = Bench::new(arguments, set)?;
    let duration = arguments.duration;
    let step = Step::new("a plain UDP stream");
    // Before and after, as the machine may have become faster or slower.
    let (before, segmentation_offload) = udp_stream(duration, set)?;
    drop(step);
    let mut bandwidth = Vec::new();
    for &size in &arguments.size {
        for &op in &arguments.ops {
            let _step = Step::new(&format!("{op:?} {}", units::readable(size)));
            bandwidth.push(bench.bandwidth(op, size as usize)?);
        }
    }
    let _step = Step::new("latency, and what the kernel does");
    let latency = |busy_poll| latency::measure(bench.addresses, duration, busy_poll);
    let latency = [latency(false)?, latency(true)?];
    let tcp = baseline::tcp_stream(duration, TCP_WRITE, set).context("the TCP stream failed")?;
    let tcp_stream = Stream::new(tcp.bytes, tcp.elapsed, tcp.cpu);
    let copy = baseline::memory_copy(duration, set);
    let (after, _) = udp_stream(duration, set)?;
    let udp_stream = before.mean(after);
    for one in &mut bandwidth {
        one.ratio_to_udp = per(one.stream.gb_per_s, udp_stream.gb_per_s);
        one.ratio_to_tcp = per(one.stream.gb_per_s, tcp_stream.gb_per_s);
    }
    let report = Report {
        seconds_each: duration.as_secs_f64(),
        busy_poll: arguments.busy_poll,
        bandwidth,
        working_set,
        queue_pairs: arguments.queue_pairs,
        latency,
        udp_stream,
        udp_segmentation_offload: segmentation_offload,
        tcp_stream,
        memory_copy: Stream::new(copy.bytes, copy.elapsed, copy.cpu),
    };
    if arguments.json { output::json(&report) } else { report::print(&report) }
}

fn udp_stream(duration: Duration, working_set: usize) -> anyhow::Result<(Stream, bool)> {
    let report = baseline::udp_stream(duration, SEGMENT, working_set);
    let report = report.context("the plain UDP stream failed")?;
    let stream = Stream::new(report.bytes, report.elapsed, report.cpu);
    Ok((stream, report.segmentation_offload))
}

/// What all measurements share.
struct Bench<'a> {
    arguments: &'a Arguments,
    addresses: [IpAddr; 2],
    memories: [Arc<Memory>; 2],
}

impl<'a> Bench<'a> {
    fn new(arguments: &'a Arguments, working_set: usize) -> anyhow::Result<Self> {
        let addresses = match (arguments.bind, arguments.peer) {
            (Some(bind), Some(peer)) if bind == peer => {
                return Err(usage("--bind and --peer: two devices need two addresses"));
            }
            (Some(bind), Some(peer)) => [bind, peer],
            _ => own_addresses(),
        };
        Ok(Self {
            arguments,
            addresses,
            memories: [Memory::new(working_set)?, Memory::new(working_set)?],
        })
    }

    /// Two connected hosts: the first posts.
    fn hosts(&self, size: usize, depth: usize) -> anyhow::Result<[Host; 2]> {
        let open = |side: usize| {
            let config = host::config(self.addresses[side], self.arguments);
            let queue_pairs = usize::from(self.arguments.queue_pairs);
            Host::open(&config, &self.memories[side], size, depth, queue_pairs)
        };
        let hosts = [open(0)?, open(1)?];
        hosts[0].connect(&hosts[1])?;
        Ok(hosts)
    }

    fn bandwidth(&self, op: Operation, size: usize) -> anyhow::Result<Bandwidth> {
        let depth = (OUTSTANDING / size).clamp(DEPTHS.0, DEPTHS.1);
        let hosts = self.hosts(size, depth)?;
        let mut poster = Poster::new(&hosts[0], hosts[1].remote(), op, size, depth);
        // Until windows have opened.
        poster.run(self.arguments.duration / 10)?;
        let (start, cpu) = (Instant::now(), process::processor_time());
        let messages = poster.run(self.arguments.duration)?;
        let (elapsed, cpu) = (start.elapsed(), process::processor_time() - cpu);
        let retransmissions = hosts[0].device.counters().retransmissions;
        let stream = Stream::new(messages * size as u64, elapsed, cpu);
        let (ratio_to_udp, ratio_to_tcp) = (0.0, 0.0);
        let size = size as u64;
        Ok(Bandwidth { op, size, depth, stream, ratio_to_udp, ratio_to_tcp, retransmissions })
    }
}

/// Two addresses of loopback that no other process chooses, as long as it has another number.
fn own_addresses() -> [IpAddr; 2] {
    let process = std::process::id();
    let address = |host| Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host);
    [address(1).into(), address(2).into()]
}
