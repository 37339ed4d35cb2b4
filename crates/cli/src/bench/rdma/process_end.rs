//! One end of a pair of processes whose bandwidth is measured: a child, whose command is hidden and not
//! for people. It is told on stdin who its peer is and when to measure, and prints what it found.

use std::io;
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use clap::Args;
use millstream_net::baseline::machine_time;
use millstream_verbs::Qpn;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Operation;
use super::host::{Far, Host, Memory, Options, Remote};
use super::poster::Poster;
use super::work::Work;
use crate::bench::figures::per;
use crate::{output, process};

/// Arguments of an end.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[arg(long)]
    pub(super) bind: IpAddr,
    #[arg(long)]
    pub(super) op: Operation,
    #[arg(long)]
    pub(super) size: usize,
    #[arg(long)]
    pub(super) depth: usize,
    #[arg(long)]
    pub(super) queue_pairs: u16,
    #[arg(long)]
    pub(super) working_set: usize,
    /// Post, in place of waiting for the other one's requests
    #[arg(long)]
    pub(super) posts: bool,
    #[command(flatten)]
    pub(super) options: Options,
}

impl Arguments {
    /// As words of a command line.
    pub(super) fn words(&self) -> impl Iterator<Item = String> {
        let Self { bind, op, size, depth, queue_pairs, working_set, posts, options } = self;
        let words = [
            "bench".to_owned(),
            "bandwidth-end".to_owned(),
            format!("--bind={bind}"),
            format!("--op={}", op.name()),
            format!("--size={size}"),
            format!("--depth={depth}"),
            format!("--queue-pairs={queue_pairs}"),
            format!("--working-set={working_set}"),
        ];
        words.into_iter().chain(posts.then(|| "--posts".to_owned())).chain(options.words())
    }
}

/// What the peer of an end has to know of it.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Introduction {
    address: IpAddr,
    numbers: Vec<u32>,
    max_reads: u8,
    remote: Remote,
}

/// When all measure, by the machine's clock.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Window {
    pub(super) start: Duration,
    pub(super) end: Duration,
}

/// What one end did in that time.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Share {
    /// Of requests that this end has posted.
    pub(super) bytes: u64,
    pub(super) bytes_per_s: f64,
    pub(super) cpu: Duration,
    pub(super) work: Work,
}

/// Is one end.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { bind, op, size, depth, queue_pairs, working_set, posts, options } = *arguments;
    let part = Memory::new(working_set)?.parts(1).next().context("a memory is a part of itself")?;
    let host = Host::open(&options.config(bind), part, size, depth, queue_pairs.into())?;
    output::ready(&introduction(&host))?;
    let Introduction { address, numbers, max_reads, remote } = hear()?;
    let numbers = numbers.into_iter().map(Qpn::new).collect();
    host.connect_to(&Far { address, numbers, max_reads })?;
    output::ready(&"connected")?;
    let window: Window = hear()?;
    let share = if posts {
        let posters = (0..host.device.shards())
            .map(|shard| Poster::new(&host, shard, remote, op, size, depth))
            .collect();
        post(&host, posters, size, window)?
    } else {
        let share = watch(&host, window);
        // The others may still have requests for this end.
        ensure!(io::stdin().lines().next().is_none(), "there is nothing more to be told");
        share
    };
    output::json(&share)
}

fn introduction(host: &Host) -> Introduction {
    let Far { address, numbers, max_reads } = host.far();
    let numbers = numbers.into_iter().map(Qpn::value).collect();
    Introduction { address, numbers, max_reads, remote: host.remote() }
}

/// Keeps all queues full before and in all of the time that is measured.
fn post(
    host: &Host,
    posters: Vec<Poster<'_>>,
    size: usize,
    window: Window,
) -> anyhow::Result<Share> {
    thread::scope(|scope| {
        let mut threads = Vec::with_capacity(posters.len());
        for mut poster in posters {
            // The name is what a profiler shows.
            let thread = thread::Builder::new().name("poster".to_owned());
            let count = move || count(&mut poster, window);
            threads.push(thread.spawn_scoped(scope, count).context("cannot start a thread")?);
        }
        let mut share = watch(host, window);
        for thread in threads {
            let counted =
                thread.join().map_err(|_panic| anyhow!("a thread that posts panicked"))?;
            let (messages, elapsed) = counted?;
            let bytes = messages * size as u64;
            share.bytes += bytes;
            share.bytes_per_s += per(bytes as f64, elapsed.as_secs_f64());
        }
        Ok(share)
    })
}

/// How many messages passed in the time that is measured, by the completions that came in it; and how
/// long it was, as a thread that waits for completions looks at the clock when some have come.
fn count(poster: &mut Poster<'_>, window: Window) -> anyhow::Result<(u64, Duration)> {
    poster.fill(|| machine_time() >= window.start)?;
    let (before, start) = (poster.done(), Instant::now());
    poster.fill(|| machine_time() >= window.end)?;
    let counted = (poster.done() - before, start.elapsed());
    poster.drain()?;
    Ok(counted)
}

/// Sleeps while others work, and tells what that took.
fn watch(host: &Host, window: Window) -> Share {
    let sleep_until = |time: Duration| thread::sleep(time.saturating_sub(machine_time()));
    sleep_until(window.start);
    let before = Sample::of(host);
    sleep_until(window.end);
    let now = Sample::of(host);
    Share {
        bytes: 0,
        bytes_per_s: 0.0,
        cpu: now.cpu - before.cpu,
        work: now.work.since(before.work),
    }
}

/// What an end has done so far.
struct Sample {
    cpu: Duration,
    work: Work,
}

impl Sample {
    fn of(host: &Host) -> Self {
        Self { cpu: process::processor_time(), work: Work::of([&host.device].into_iter()) }
    }
}

fn hear<T: DeserializeOwned>() -> anyhow::Result<T> {
    let line = io::stdin().lines().next().context("nothing was told on stdin")?;
    serde_json::from_str(&line?).context("what was told on stdin is something else")
}
