//! `bench rdma`: what two soft devices of this process do over loopback, beside what the kernel
//! does without them: all in one run, so that whatever else the machine does is in both.

mod host;
mod latency;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use hdrhistogram::Histogram;
use millstream_net::baseline;
use millstream_verbs::{CompletionStatus, SendOperation, SendRequest};
use serde::Serialize;

use crate::bench::figures::{per, three_digits};
use crate::failure::usage;
use crate::step::Step;
use crate::{output, process, units};
use host::{Host, Memory, Remote};
pub(super) use latency::{Arguments as LatencyEnd, run as run_latency_end};
use latency::{Latency, Pair};

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
/// For a completion. The queue pair gives up earlier.
const PATIENCE: Duration = Duration::from_secs(30);

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

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Operation {
    Write,
    Read,
    Send,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    seconds_each: f64,
    busy_poll: bool,
    bandwidth: Vec<Bandwidth>,
    working_set: u64,
    /// Of a WRITE of 4 KiB, from posting it to its completion, with no other outstanding, and of 4 KiB
    /// there and back over TCP: asleep and awake.
    latency: [Pair; 2],
    udp_stream: Stream,
    udp_segmentation_offload: bool,
    tcp_stream: Stream,
    memory_copy: Stream,
}

#[derive(Serialize)]
struct Bandwidth {
    op: Operation,
    size: u64,
    /// Requests outstanding.
    depth: usize,
    #[serde(flatten)]
    stream: Stream,
    /// Our rate in parts of the plain UDP stream's.
    ratio_to_udp: f64,
    /// And of the TCP stream's.
    ratio_to_tcp: f64,
    retransmissions: u64,
}

#[derive(Clone, Copy, Serialize)]
struct Stream {
    gb_per_s: f64,
    /// Of this process: of both sides, and of the kernel on their behalf.
    cpu_s_per_gb: f64,
}

impl Stream {
    fn new(bytes: u64, elapsed: Duration, cpu: Duration) -> Self {
        let gigabytes = bytes as f64 / 1e9;
        Self {
            gb_per_s: per(gigabytes, elapsed.as_secs_f64()),
            cpu_s_per_gb: per(cpu.as_secs_f64(), gigabytes),
        }
    }

    /// Half of the one and half of the other.
    fn mean(self, other: Self) -> Self {
        Self {
            gb_per_s: f64::midpoint(self.gb_per_s, other.gb_per_s),
            cpu_s_per_gb: f64::midpoint(self.cpu_s_per_gb, other.cpu_s_per_gb),
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
    let bench = Bench::new(arguments, set)?;
    let duration = arguments.duration;
    let step = Step::new("a plain UDP stream");
    // Before and after, as the machine may have become faster or slower.
    let (before, segmentation_offload) = udp_stream(duration, set)?;
    drop(step);
    let mut bandwidth = Vec::new();
    for &size in &arguments.size {
        for op in [Operation::Write, Operation::Read, Operation::Send] {
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
        latency,
        udp_stream,
        udp_segmentation_offload: segmentation_offload,
        tcp_stream,
        memory_copy: Stream::new(copy.bytes, copy.elapsed, copy.cpu),
    };
    if arguments.json { output::json(&report) } else { print(&report) }
}

fn udp_stream(duration: Duration, working_set: usize) -> anyhow::Result<(Stream, bool)> {
    let report = baseline::udp_stream(duration, SEGMENT, working_set);
    let report = report.context("the plain UDP stream failed")?;
    let stream = Stream::new(report.bytes, report.elapsed, report.cpu);
    Ok((stream, report.segmentation_offload))
}

fn print(report: &Report) -> anyhow::Result<()> {
    let line = |what: &str, stream: &Stream, more: &str| {
        let (gb_per_s, cpu_s_per_gb) = (three_digits(stream.gb_per_s), stream.cpu_s_per_gb);
        output::line(&format!("{what:<28}{gb_per_s:>8}{cpu_s_per_gb:>13.3}{more}"))
    };
    output::line(&format!(
        "{:<28}{:>8}{:>13}{:>9}{:>9}{:>9}",
        "", "GB/s", "CPU s/GB", "of UDP", "of TCP", "resends"
    ))?;
    for one in &report.bandwidth {
        let Bandwidth { op, size, depth, stream, .. } = one;
        let op = format!("{op:?}").to_uppercase();
        let more =
            format!("{:>9.2}{:>9.2}{:>9}", one.ratio_to_udp, one.ratio_to_tcp, one.retransmissions);
        line(&format!("{op} {}, {depth} outstanding", units::readable(*size)), stream, &more)?;
    }
    let offload = if report.udp_segmentation_offload { "GSO and GRO" } else { "no offload" };
    line(&format!("plain UDP, {offload}"), &report.udp_stream, "")?;
    line("TCP", &report.tcp_stream, "")?;
    line("memory copy", &report.memory_copy, "")?;
    for Pair { busy_poll, write, tcp_ping_pong, ratio_to_tcp } in &report.latency {
        let how = if *busy_poll { "busy polling" } else { "asleep" };
        let Latency { p50_us, p99_us, .. } = write;
        output::line(&format!(
            "{:<28}{p50_us:>8.1} us (p99 {p99_us:.1} us), {ratio_to_tcp:.2} of TCP's {:.1} us (p99 \
             {:.1} us)",
            format!("WRITE 4 KiB, {how}"),
            tcp_ping_pong.p50_us,
            tcp_ping_pong.p99_us
        ))?;
    }
    Ok(())
}

fn latency_of(latencies: &Histogram<u64>) -> Latency {
    let microseconds = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    Latency { p50_us: microseconds(0.5), p99_us: microseconds(0.99), round_trips: latencies.len() }
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
            Host::open(&config, &self.memories[side], size, depth)
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

/// Posts requests and takes their completions.
struct Poster<'a> {
    host: &'a Host,
    remote: Remote,
    op: Operation,
    size: usize,
    depth: usize,
    posted: u64,
    done: u64,
    requests: Vec<SendRequest>,
    completions: Vec<millstream_verbs::Completion>,
}

impl<'a> Poster<'a> {
    fn new(host: &'a Host, remote: Remote, op: Operation, size: usize, depth: usize) -> Self {
        Self {
            host,
            remote,
            op,
            size,
            depth,
            posted: 0,
            done: 0,
            requests: Vec::with_capacity(depth),
            completions: Vec::with_capacity(depth),
        }
    }

    /// Keeps the queue full for so long, and waits for its end; returns how many messages passed.
    fn run(&mut self, duration: Duration) -> anyhow::Result<u64> {
        let (before, start) = (self.done, Instant::now());
        while start.elapsed() < duration {
            let room = self.depth - (self.posted - self.done) as usize;
            self.post(room)?;
            self.reap()?;
        }
        while self.done < self.posted {
            self.reap()?;
        }
        Ok(self.done - before)
    }

    fn post(&mut self, count: usize) -> anyhow::Result<()> {
        self.requests.clear();
        for index in self.posted..self.posted + count as u64 {
            let remote_address = self.remote.address + self.host.offset(self.size, index);
            let remote_key = self.remote.key;
            let operation = match self.op {
                Operation::Write => {
                    SendOperation::Write { remote_address, remote_key, immediate: None }
                }
                Operation::Read => SendOperation::Read { remote_address, remote_key },
                Operation::Send => SendOperation::Send { immediate: None },
            };
            let pieces = self.host.piece(self.size, index);
            self.requests.push(SendRequest::new(index, operation, pieces));
        }
        let posted = self.host.pair()?.post_send(&self.requests);
        posted.map_err(|(_, error)| error).context("cannot post")?;
        self.posted += count as u64;
        Ok(())
    }

    /// Waits for completions and takes them; returns how many.
    fn reap(&mut self) -> anyhow::Result<usize> {
        if !self.host.completions.wait(PATIENCE) {
            match self.host.device.failure() {
                Some(failure) => bail!(failure),
                None => bail!("no completion came for {} s", PATIENCE.as_secs()),
            }
        }
        self.completions.clear();
        let count = self.host.completions.poll(&mut self.completions, self.depth);
        let failed = |status: &CompletionStatus| *status != CompletionStatus::Success;
        if let Some(status) = self.completions.iter().map(|one| one.status).find(failed) {
            return Err(anyhow!(status).context("a request failed"));
        }
        self.done += count as u64;
        Ok(count)
    }
}

/// Two addresses of loopback that no other process chooses, as long as it has another number.
fn own_addresses() -> [IpAddr; 2] {
    let process = std::process::id();
    let address = |host| Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host);
    [address(1).into(), address(2).into()]
}
