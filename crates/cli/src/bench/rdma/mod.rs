//! `bench rdma`: what two soft devices of this process do over loopback, beside what the kernel
//! does without them: all in one run, so that whatever else the machine does is in both.

mod bandwidth;
mod host;
mod latency;
mod poster;
mod process_end;
mod processes;
mod raw;
mod report;
mod work;

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use millstream_net::baseline;
use millstream_verbs::Mtu;
use serde::Serialize;

use crate::bench::figures::per;
use crate::failure::usage;
use crate::step::Step;
use crate::{output, units};
use bandwidth::Bench;
use host::{Options, part_length};
pub(super) use latency::{Arguments as LatencyEnd, run as run_latency_end};
pub(super) use process_end::{Arguments as BandwidthEnd, run as run_bandwidth_end};
pub(super) use raw::RawWrites;
use report::{Report, Stream};

/// The smallest working set: what 16 streams of the largest datagrams need.
pub(super) const LEAST_WORKING_SET: u64 = 1 << 20;
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
    /// Pairs of devices that are measured at once: each has a thread that posts, and its part of the
    /// working set
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    devices: u16,
    /// Pairs of processes that are measured at once, in place of this one: each process has a device,
    /// and its part of the working set, and all of one side share an address
    #[arg(long, value_name = "N", conflicts_with = "devices", value_parser = clap::value_parser!(u16).range(1..=16))]
    processes: Option<u16>,
    /// How long each measurement takes
    #[arg(long, value_name = "D", default_value = "1s", value_parser = units::duration)]
    duration: Duration,
    /// Address of the side that posts [default: one of loopback]
    #[arg(long, value_name = "IP", requires = "peer")]
    bind: Option<IpAddr>,
    /// Address of the other side, on this machine too
    #[arg(long, value_name = "IP", requires = "bind")]
    peer: Option<IpAddr>,
    #[command(flatten)]
    options: Options,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// Pairs of devices that work at once.
    fn pairs(&self) -> u16 {
        self.processes.unwrap_or(self.devices)
    }

    /// Of each device: one for each shard at least.
    fn queue_pairs(&self) -> u16 {
        self.queue_pairs.max(self.options.shards)
    }

    /// Pairs of sockets, and threads that post.
    fn streams(&self) -> u16 {
        self.pairs() * self.options.shards
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

impl Operation {
    const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Send => "send",
        }
    }
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
    let (processes, shards) = (arguments.processes.unwrap_or(1), arguments.options.shards);
    if usize::from(processes * shards) > millstream_verbs::SLOTS {
        return Err(usage(format!(
            "--shards {shards}: an address has room for {}, and --processes are {processes}",
            millstream_verbs::SLOTS
        )));
    }
    let streams = arguments.streams();
    let least = LEAST_WORKING_SET / 16 * u64::from(streams);
    if working_set < least {
        return Err(usage(format!(
            "--working-set {working_set}: {streams} plain UDP streams need {least}"
        )));
    }
    let part = part_length(set, arguments.pairs().into());
    if let Some(size) = arguments.size.iter().find(|&&size| size > part as u64) {
        return Err(usage(format!(
            "--size {size}: each of {} devices has {part} bytes of --working-set",
            arguments.pairs()
        )));
    }
    let bench = Bench::new(arguments, set)?;
    let duration = arguments.duration;
    let step = Step::new("a plain UDP stream");
    // Before and after, as the machine may have become faster or slower.
    let datagram = datagram_length(bench.addresses[0])?;
    let plain = || udp_streams(streams, duration, datagram, set);
    let (before, segmentation_offload) = plain()?;
    drop(step);
    let mut bandwidth = Vec::new();
    for &size in &arguments.size {
        for &op in &arguments.ops {
            let _step = Step::new(&format!("{op:?} {}", units::readable(size)));
            bandwidth.push(bench.bandwidth(op, size as usize)?);
        }
    }
    let _step = Step::new("latency, and what the kernel does");
    let latency = |busy_poll| latency::measure(bench.addresses[0], duration, busy_poll);
    let latency = [latency(false)?, latency(true)?];
    let tcp = baseline::tcp_stream(duration, TCP_WRITE, set).context("the TCP stream failed")?;
    let tcp_stream = Stream::new(tcp.bytes, tcp.elapsed, tcp.cpu);
    let copy = baseline::memory_copy(duration, set);
    let (after, _) = plain()?;
    let udp_stream = before.mean(after);
    for one in &mut bandwidth {
        one.ratio_to_udp = per(one.stream.gb_per_s, udp_stream.gb_per_s);
        one.ratio_to_tcp = per(one.stream.gb_per_s, tcp_stream.gb_per_s);
    }
    let report = Report {
        seconds_each: duration.as_secs_f64(),
        busy_poll: arguments.options.busy_poll,
        bandwidth,
        working_set,
        queue_pairs: arguments.queue_pairs(),
        shards: arguments.options.shards,
        devices: arguments.devices,
        processes: arguments.processes,
        udp_streams: streams,
        udp_datagram: datagram,
        latency,
        udp_stream,
        udp_segmentation_offload: segmentation_offload,
        tcp_stream,
        memory_copy: Stream::new(copy.bytes, copy.elapsed, copy.cpu),
    };
    if arguments.json { output::json(&report) } else { report::print(&report) }
}

/// Before or after the devices: as many streams as there are pairs of their sockets.
fn udp_streams(
    count: u16,
    duration: Duration,
    datagram: usize,
    working_set: usize,
) -> anyhow::Result<(Stream, bool)> {
    let report = baseline::udp_streams(count.into(), duration, datagram, working_set);
    let report = report.context("the plain UDP stream failed")?;
    let stream = Stream::new(report.bytes, report.elapsed, report.cpu);
    Ok((stream, report.segmentation_offload))
}

/// Payload bytes in a datagram of the plain stream: as many as a packet between the devices has, if
/// loopback, where the stream is, takes them.
fn datagram_length([near, far]: [IpAddr; 2]) -> anyhow::Result<usize> {
    let mtu = |near, far| {
        let link = millstream_net::address::path_mtu(near, far);
        link.with_context(|| format!("cannot tell the MTU of the path from {near} to {far}"))
    };
    let loopback = IpAddr::from([127, 0, 0, 1]);
    let link = mtu(near, far)?.min(mtu(loopback, loopback)?);
    let mtu = Mtu::fitting(link);
    Ok(mtu.with_context(|| format!("an MTU of {link} bytes is too small for RoCE"))?.bytes())
}
