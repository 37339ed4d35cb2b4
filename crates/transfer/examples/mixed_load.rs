//! What a request of 64 KiB takes beside a bulk stream, over two soft rails between two engines of this process:
//! with the classic policy, with TENT where all have one priority, and with TENT where the stream is bulk.
//!
//! `cargo run --release -p millstream-transfer --example mixed_load [SECONDS] [ROUNDS] [DEPTH]`: so long each
//! way each round, with so many bulk requests of 4 MiB under way. The ways take turns.
//!
//! `mixed_load towards SEGMENT classic|tent SECONDS DEPTH ADDRESS...` does so once, from devices on these addresses to a
//! segment that is there, and prints one JSON object: `cargo xtask lab bench-policies` runs it over slow links.

use std::collections::VecDeque;
use std::error::Error;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millstream_transfer::{
    Buffer, Config, Opcode, Policy, PriorityLevel, RdmaConfig, Segment, SubmitOptions,
    TransferEngine, TransferRequest, TransferState,
};

const LONG: Duration = Duration::from_secs(600);
/// Bytes of a request.
const SMALL: u64 = 64 << 10;
const BULK: u64 = 4 << 20;
/// From the end of a small request to the next one.
const PAUSE: Duration = Duration::from_millis(1);
/// From the start of the stream to the first of them.
const WARM_UP: Duration = Duration::from_millis(300);

type Failure = Box<dyn Error + Send + Sync>;

struct Way {
    name: &'static str,
    policy: Policy,
    /// Of small requests, and of the stream.
    priorities: [PriorityLevel; 2],
    took: Vec<Duration>,
    bytes: u64,
    time: Duration,
}

fn engine(policy: Policy, addresses: &[&str]) -> Result<TransferEngine, Failure> {
    let addresses = addresses.iter().map(|it| it.parse()).collect::<Result<Vec<IpAddr>, _>>()?;
    let engine = TransferEngine::new(Config { policy, ..Config::new(addresses[0]) })?;
    engine.install_rdma(RdmaConfig::new(&addresses))?;
    Ok(engine)
}

fn write(
    local: (&Buffer, u64),
    segment: &Segment,
    length: u64,
) -> Result<TransferRequest, Failure> {
    Ok(TransferRequest {
        opcode: Opcode::Write,
        source: local.0.address() + local.1,
        target: segment.id(),
        target_offset: segment.address_of(0, local.1, length)?,
        length,
    })
}

/// Bytes that are written to.
const fn room(depth: usize) -> u64 {
    BULK * depth as u64 + SMALL
}

impl Way {
    const fn new(name: &'static str, policy: Policy, priorities: [PriorityLevel; 2]) -> Self {
        Self { name, policy, priorities, took: Vec::new(), bytes: 0, time: Duration::ZERO }
    }

    fn round(&mut self, time: Duration, depth: usize) -> Result<(), Failure> {
        let target = engine(self.policy, &["127.78.0.3", "127.78.0.4"])?;
        let initiator = engine(self.policy, &["127.78.0.1", "127.78.0.2"])?;
        let _remote = target.allocate_buffer(room(depth) as usize, "*", true)?;
        self.measure(&initiator, target.name(), time, depth)
    }

    /// Towards a segment that has [`room`].
    fn measure(
        &mut self,
        initiator: &TransferEngine,
        segment: &str,
        time: Duration,
        depth: usize,
    ) -> Result<(), Failure> {
        let length = room(depth);
        let local = initiator.allocate_buffer(length as usize, "*", false)?;
        let segment = initiator.open_segment(segment)?;
        let options = self
            .priorities
            .map(|priority| SubmitOptions { priority: Some(priority), ..SubmitOptions::default() });
        let bulk = (0..depth as u64).map(|index| write((&local, index * BULK), &segment, BULK));
        let bulk = bulk.collect::<Result<Vec<_>, _>>()?;
        let small = write((&local, length - SMALL), &segment, SMALL)?;
        let over = AtomicBool::new(false);
        let start = Instant::now();
        let bytes = thread::scope(|scope| {
            let stream = scope.spawn(|| -> Result<u64, Failure> {
                let (mut under_way, mut bytes) = (VecDeque::new(), 0);
                let mut next = bulk.iter().cycle();
                loop {
                    let ends = over.load(Ordering::Relaxed);
                    if let Some(request) = next.next().filter(|_| !ends) {
                        under_way.push_back(initiator.submit_new(&[*request], &options[1])?);
                    }
                    if under_way.len() == depth || ends {
                        let Some(oldest) = under_way.pop_front() else { return Ok(bytes) };
                        if !initiator.wait(&oldest, LONG) {
                            return Err("the stream hangs".into());
                        }
                        if initiator.status(&oldest, 0)?.state != TransferState::Completed {
                            return Err("a request of the stream failed".into());
                        }
                        bytes += BULK;
                    }
                }
            });
            // Until rails are connected and measured.
            thread::sleep(WARM_UP);
            while start.elapsed() < time && !stream.is_finished() {
                let begun = Instant::now();
                let batch = initiator.submit_new(&[small], &options[0])?;
                if !initiator.wait(&batch, LONG) {
                    return Err("a request took too long".into());
                }
                if initiator.status(&batch, 0)?.state != TransferState::Completed {
                    return Err("a request failed".into());
                }
                self.took.push(begun.elapsed());
                thread::sleep(PAUSE);
            }
            over.store(true, Ordering::Relaxed);
            stream.join().map_err(|_| "the stream has ended")?
        })?;
        self.bytes += bytes;
        self.time += start.elapsed();
        Ok(())
    }

    /// Milliseconds that this part of a thousand of the small requests took at most.
    fn quantile(&mut self, part: usize) -> f64 {
        self.took.sort_unstable();
        let index = (self.took.len() * part / 1000).min(self.took.len().saturating_sub(1));
        self.took.get(index).map_or(f64::NAN, |took| took.as_secs_f64() * 1e3)
    }

    fn print(&mut self) {
        let rate = self.bytes as f64 / self.time.as_secs_f64() / 1e9;
        let [p50, p99, most] = [500, 990, 1000].map(|part| self.quantile(part));
        println!(
            "{:<26} {:>7} requests, p50 {p50:>8.3} ms, p99 {p99:>8.3} ms, most {most:>8.3} ms; stream {rate:.2} GB/s",
            self.name,
            self.took.len(),
        );
    }
}

fn towards(arguments: &[String]) -> Result<(), Failure> {
    let [segment, policy, seconds, depth, addresses @ ..] = arguments else {
        return Err("towards SEGMENT classic|tent SECONDS DEPTH ADDRESS...".into());
    };
    if addresses.is_empty() {
        return Err("towards SEGMENT classic|tent SECONDS DEPTH ADDRESS...".into());
    }
    let (latency, normal, bulk) =
        (PriorityLevel::Latency, PriorityLevel::Normal, PriorityLevel::Bulk);
    let mut way = match policy.as_str() {
        "classic" => Way::new("classic", Policy::Classic, [normal, normal]),
        "tent" => Way::new("tent", Policy::Tent, [latency, bulk]),
        _ => return Err(format!("{policy} is neither classic nor tent").into()),
    };
    let time = Duration::from_secs(seconds.parse()?);
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let initiator = engine(way.policy, &addresses)?;
    way.measure(&initiator, segment, time, depth.parse::<usize>()?.max(1))?;
    let [p50, p99, most] = [500, 990, 1000].map(|part| way.quantile(part));
    let said = serde_json::json!({
        "policy": way.name,
        "requests": way.took.len(),
        "p50_ms": p50,
        "p99_ms": p99,
        "most_ms": most,
        "stream_mbit_per_s": way.bytes as f64 * 8e-6 / way.time.as_secs_f64(),
    });
    println!("{said}");
    Ok(())
}

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = words.split_first()
        && first == "towards"
    {
        return towards(rest);
    }
    let arguments: Vec<usize> = words.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    let argument = |index: usize, default| arguments.get(index).copied().unwrap_or(default);
    let time = Duration::from_secs(argument(0, 5) as u64);
    let (rounds, depth) = (argument(1, 3), argument(2, 4).max(1));
    let (latency, normal, bulk) =
        (PriorityLevel::Latency, PriorityLevel::Normal, PriorityLevel::Bulk);
    let mut ways = [
        Way::new("classic", Policy::Classic, [normal, normal]),
        Way::new("tent, one priority", Policy::Tent, [normal, normal]),
        Way::new("tent, latency and bulk", Policy::Tent, [latency, bulk]),
    ];
    for _ in 0..rounds {
        for way in &mut ways {
            way.round(time, depth)?;
        }
    }
    ways.iter_mut().for_each(Way::print);
    Ok(())
}
