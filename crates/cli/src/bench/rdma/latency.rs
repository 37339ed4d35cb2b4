//! Latency between two processes, each pinned to a core of its own: of a WRITE from posting it to its
//! completion, and of as many bytes to and fro over TCP, which is what the kernel can do.
//!
//! This process is the end that answers. The other one is a child that measures and prints what it
//! found: its command is hidden, and not for people.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use millstream_net::{affinity, baseline};
use millstream_verbs::{Qpn, SoftConfig};
use serde::{Deserialize, Serialize};

use super::Operation;
use super::host::{Far, Host, Memory, Part, Remote};
use super::poster::Poster;
use crate::bench::figures::per;
use crate::process::Child;
use crate::{output, units};

/// Bytes of a message.
pub(super) const SIZE: usize = 4096;
/// For the child to open its device, and to end beyond the time that it measures.
const PATIENCE: Duration = Duration::from_secs(20);
/// The longest latency, in nanoseconds, that is told from longer ones.
const LONGEST_NS: u64 = 60_000_000_000;

/// What one side found.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Latency {
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) round_trips: u64,
}

/// Of a WRITE and of TCP's ping-pong, in one way of waiting.
#[derive(Debug, Serialize)]
pub(super) struct Pair {
    /// Both ends look for work without a pause; else they sleep until there is some.
    pub(super) busy_poll: bool,
    pub(super) write: Latency,
    pub(super) tcp_ping_pong: Latency,
    /// Our median in parts of TCP's.
    pub(super) ratio_to_tcp: f64,
}

/// Measures both, asleep or awake.
pub(super) fn measure(
    addresses: [IpAddr; 2],
    duration: Duration,
    busy_poll: bool,
) -> anyhow::Result<Pair> {
    let processors = affinity::processors().context("cannot ask which processors there are")?;
    let (near, far) = (processors[0], *processors.get(1).unwrap_or(&processors[0]));
    let write = write(addresses, duration, busy_poll, [near, far])?;
    let tcp_ping_pong = tcp(duration, busy_poll, [near, far])?;
    let ratio_to_tcp = per(write.p50_us, tcp_ping_pong.p50_us);
    Ok(Pair { busy_poll, write, tcp_ping_pong, ratio_to_tcp })
}

fn write(
    addresses: [IpAddr; 2],
    duration: Duration,
    busy_poll: bool,
    processors: [usize; 2],
) -> anyhow::Result<Latency> {
    let pinned = affinity::pin(processors[1]).context("cannot pin a thread")?;
    let host = Host::open(&config(addresses[1], busy_poll), one_block()?, SIZE, 1, 1)?;
    drop(pinned);
    let Far { address, numbers, max_reads } = host.far();
    let Remote { address: memory, key } = host.remote();
    let words = [
        ["--bind", &addresses[0].to_string()],
        ["--peer", &address.to_string()],
        ["--number", &numbers[0].value().to_string()],
        ["--memory", &memory.to_string()],
        ["--key", &key.to_string()],
        ["--max-reads", &max_reads.to_string()],
    ]
    .map(|pair| pair.map(str::to_owned));
    let mut child = start(&words.concat(), duration, busy_poll, processors[0])?;
    let far: Ready = serde_json::from_value(child.ready(PATIENCE)?)?;
    host.connect_to(&Far {
        address: far.address,
        numbers: vec![Qpn::new(far.number)],
        max_reads: far.max_reads,
    })?;
    report(child, duration)
}

fn tcp(duration: Duration, busy_poll: bool, processors: [usize; 2]) -> anyhow::Result<Latency> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let echo = listener.local_addr()?.to_string();
    let child = start(&["--echo".to_owned(), echo], duration, busy_poll, processors[0])?;
    thread::scope(|scope| {
        let echoing = scope.spawn(|| {
            let _pinned = affinity::pin(processors[1])?;
            baseline::tcp_echo(&listener, SIZE, busy_poll)
        });
        let latency = report(child, duration);
        if latency.is_err() {
            // The child may not have connected, and somebody must.
            drop(std::net::TcpStream::connect(listener.local_addr()?));
        }
        let echoed = echoing.join().map_err(|_panic| anyhow!("the TCP ping-pong panicked"))?;
        let latency = latency?;
        echoed.context("the TCP ping-pong failed")?;
        Ok(latency)
    })
}

fn start(
    words: &[String],
    duration: Duration,
    busy_poll: bool,
    processor: usize,
) -> anyhow::Result<Child> {
    let _pinned = affinity::pin(processor).context("cannot pin a thread")?;
    let duration = format!("{}us", duration.as_micros());
    let common = ["bench", "latency-end", "--duration", &duration].map(str::to_owned);
    let busy_poll = busy_poll.then(|| "--busy-poll".to_owned());
    let words = common.iter().chain(words).chain(busy_poll.iter());
    Child::start("the end that measures latency", words)
}

fn report(child: Child, duration: Duration) -> anyhow::Result<Latency> {
    let printed = child.finish(duration * 2 + PATIENCE)?;
    serde_json::from_str(&printed).context("the end that measures latency printed no report")
}

fn one_block() -> anyhow::Result<Part> {
    Memory::new(SIZE)?.parts(1).next().context("a memory is a part of itself")
}

fn config(address: IpAddr, busy_poll: bool) -> SoftConfig {
    let busy_poll = if busy_poll { Duration::MAX } else { Duration::ZERO };
    SoftConfig { busy_poll: Some(busy_poll), ..SoftConfig::new(address) }
}

/// Arguments of the end that measures.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[arg(long, value_parser = units::duration)]
    duration: Duration,
    #[arg(long)]
    busy_poll: bool,
    /// Measure TCP, with who echoes here
    #[arg(long, required_unless_present = "bind")]
    echo: Option<SocketAddr>,
    /// Measure WRITE, from a device here
    #[arg(long, requires_all = ["peer", "number", "memory", "key", "max_reads"])]
    bind: Option<IpAddr>,
    #[arg(long)]
    peer: Option<IpAddr>,
    #[arg(long)]
    number: Option<u32>,
    #[arg(long)]
    memory: Option<u64>,
    #[arg(long)]
    key: Option<u32>,
    #[arg(long)]
    max_reads: Option<u8>,
}

#[derive(Debug, Deserialize, Serialize)]
struct Ready {
    address: IpAddr,
    number: u32,
    max_reads: u8,
}

/// Measures, as the other end.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { duration, busy_poll, echo, bind, .. } = *arguments;
    let latency = match (echo, bind) {
        (Some(echo), _) => {
            let report = baseline::tcp_ping_pong(echo, duration, SIZE, busy_poll)?;
            let microseconds = |quantile| report.quantile(quantile).as_secs_f64() * 1e6;
            Latency {
                p50_us: microseconds(0.5),
                p99_us: microseconds(0.99),
                round_trips: report.round_trips.len() as u64,
            }
        }
        (None, Some(bind)) => write_from(arguments, bind)?,
        (None, None) => return Err(anyhow!("neither --echo nor --bind")),
    };
    output::json(&latency)
}

fn write_from(arguments: &Arguments, bind: IpAddr) -> anyhow::Result<Latency> {
    let Arguments { duration, busy_poll, peer, number, memory, key, max_reads, .. } = *arguments;
    let (Some(peer), Some(number), Some(address), Some(key), Some(max_reads)) =
        (peer, number, memory, key, max_reads)
    else {
        return Err(anyhow!("--bind needs all of the peer"));
    };
    let host = Host::open(&config(bind, busy_poll), one_block()?, SIZE, 1, 1)?;
    let own = host.far();
    host.connect_to(&Far { address: peer, numbers: vec![Qpn::new(number)], max_reads })?;
    output::ready(&Ready {
        address: own.address,
        number: own.numbers[0].value(),
        max_reads: own.max_reads,
    })?;
    let mut poster = Poster::new(&host, 0, Remote { address, key }, Operation::Write, SIZE, 1);
    // The first waits until the peer has connected its end.
    poster.run(duration / 10)?;
    let mut latencies = Histogram::<u64>::new_with_bounds(1, LONGEST_NS, 3)?;
    let end = Instant::now() + duration;
    loop {
        let start = Instant::now();
        poster.post(1)?;
        while poster.reap()? == 0 {}
        let now = Instant::now();
        latencies.saturating_record((now - start).as_nanos() as u64);
        if now >= end {
            ensure!(host.device.failure().is_none(), "the device failed");
            return Ok(latency_of(&latencies));
        }
    }
}

fn latency_of(latencies: &Histogram<u64>) -> Latency {
    let microseconds = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
    Latency { p50_us: microseconds(0.5), p99_us: microseconds(0.99), round_trips: latencies.len() }
}
