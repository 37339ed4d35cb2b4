//! `bench transfer`: reads and writes of a segment, one row for each way and size.

mod figures;
mod peer;
mod report;
mod row;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use millstream_transfer::Buffer;
use serde::Serialize;

use crate::bench::rdma::LEAST_WORKING_SET;
use crate::engine::{self, Opened, Protocol, Started};
use crate::failure::usage;
use crate::memory::MemoryKind;
use crate::process::SEEN_TO_END;
use crate::reach::Reach;
use crate::settings::SettingsArguments;
use crate::{note, paths, process, status_pages, units};
use peer::Peer;
use report::Row;
use row::Shape;

/// Block sizes of the table.
const BLOCK_SIZES: [u64; 6] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Bytes that each side walks through, unless the batches need more.
const WORKING_SET: u64 = 256 << 20;

/// Arguments of `bench transfer`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    reach: Reach,
    /// The segment; with --metadata p2p its HOST:PORT [default: that of a node started for this]
    #[arg(long, value_name = "N")]
    segment: Option<String>,
    /// What to do [default: write, then read]
    #[arg(long, value_enum)]
    op: Option<Operation>,
    /// Bytes of a request [default: 4KiB to 4MiB in steps of four]
    #[arg(long, value_name = "S", value_parser = units::size)]
    block_size: Option<u64>,
    /// Requests of a batch
    #[arg(long, value_name = "B", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch_size: u32,
    /// Threads that submit batches
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Bytes that each side walks through, and what is measured for comparison too [default: 256MiB,
    /// or what the batches of all threads need]
    #[arg(long, value_name = "S", value_parser = units::size)]
    working_set: Option<u64>,
    /// Whose memory is read and written here: host, or cuda:N, the GPU with that number
    #[arg(long, value_name = "KIND", default_value_t = MemoryKind::Host)]
    memory: MemoryKind,
    /// The same of the node that is started for this, or of the segment of --protocol local
    #[arg(long, value_name = "KIND", default_value_t = MemoryKind::Host, conflicts_with = "segment")]
    node_memory: MemoryKind,
    /// How long to measure each row; with --figures, each of ten parts
    #[arg(long, value_name = "D", default_value = "1s", value_parser = units::duration)]
    duration: Duration,
    /// Measure a plain UDP stream and a memory copy too, for comparison
    #[arg(long)]
    baseline: bool,
    /// Measure local, shm and rdma:soft beside copies of memory, by turns, and compare with what is aimed
    /// at: takes about a minute and 3 GiB
    #[arg(
        long,
        conflicts_with_all = [
            "protocol", "require", "segment", "op", "block_size", "batch_size", "threads",
            "working_set", "baseline", "bind", "memory", "node_memory",
        ]
    )]
    figures: bool,
    /// Serve metrics over HTTP meanwhile at this address, or this port of 127.0.0.1, as `node --http` does
    #[arg(long, value_name = "ADDR", value_parser = status_pages::address, conflicts_with = "figures")]
    http: Option<SocketAddr>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Operation {
    /// Out of the segment
    Read,
    /// Into the segment
    Write,
    /// Reads and writes in turn
    Mix,
}

impl Operation {
    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Mix => "mix",
        }
    }
}

impl Arguments {
    pub(super) const fn settings(&self) -> &SettingsArguments {
        &self.reach.settings
    }

    /// What is to be measured, row by row.
    fn shapes(&self) -> Vec<Shape> {
        let operations = match &self.op {
            Some(op) => std::slice::from_ref(op),
            None => &[Operation::Write, Operation::Read],
        };
        let sizes = match &self.block_size {
            Some(size) => std::slice::from_ref(size),
            None => &BLOCK_SIZES,
        };
        let &Self { batch_size, threads, duration, .. } = self;
        let shape = |&op, &block_size| Shape { op, block_size, batch_size, threads, duration };
        operations.iter().flat_map(|op| sizes.iter().map(move |size| shape(op, size))).collect()
    }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut shapes = arguments.shapes();
    if arguments.duration.is_zero() {
        return Err(usage("--duration 0s: choose 1ms or more"));
    }
    if arguments.figures {
        return figures::run(arguments);
    }
    // Here, since it is not the node's fault when they are wrong.
    arguments.reach.settings.load()?;
    let set = working_set(arguments, &mut shapes)?;
    // Before anything is started for it.
    let room = Vec::<u8>::new().try_reserve_exact(set);
    room.with_context(|| format!("no memory for a working set of {set} bytes"))?;
    // Before there are threads.
    process::clean_up_when_told_to_stop()?;
    let mut peer = None;
    let mut own = None;
    let (opened, segment) = match &arguments.segment {
        Some(segment) => (engine::open(&arguments.reach, segment)?, segment.clone()),
        None if is_local(&arguments.reach)? => {
            let (opened, buffer) = open_own(&arguments.reach, set, arguments.node_memory)?;
            own = Some(buffer);
            let segment = opened.engine.name().to_owned();
            (opened, segment)
        }
        None => {
            let started = start_peer(&arguments.reach, set as u64, arguments.node_memory)?;
            let segment = started.segment.clone();
            peer = Some(started);
            (engine::open(&arguments.reach, &segment)?, segment)
        }
    };
    let serve = |listen| status_pages::serve(&opened.engine, listen, "--http".to_owned());
    let _pages = arguments.http.map(serve).transpose()?;
    let available = opened.segment.length_from(0);
    if let Some(set) = arguments.working_set.filter(|&set| set > available) {
        return Err(usage(format!(
            "--working-set {set}: the buffer of segment {segment} has only {available} bytes"
        )));
    }
    // Of the sizes that nobody asked for, those that fit.
    shapes.retain(|shape| shape.block_size <= available);
    if shapes.is_empty() {
        let size = arguments.block_size.unwrap_or(BLOCK_SIZES[0]);
        return Err(usage(format!(
            "--block-size {size}: the buffer of segment {segment} has only {available} bytes"
        )));
    }
    let buffer = allocate(&opened, set, arguments.memory)?;
    process::say_last_words_when_told_to_stop();
    let rows = measure(arguments, &shapes, &opened, &buffer).map_err(|error| {
        // How the peer ended says more than what was seen of it from here.
        let ended = peer.as_mut().and_then(|peer| peer.check(SEEN_TO_END).err());
        ended.unwrap_or_else(|| error.context(format!("segment {segment}")))
    })?;
    if arguments.json && !rows.is_empty() {
        let paths = paths::of(&opened)?;
        let policy = opened.engine.policy().name();
        report::print_json(&rows, policy, paths, shapes.len() == 1, process::told_to_stop())?;
    }
    process::step_back_when_told_to_stop();
    drop(own);
    Ok(())
}

/// Whether bytes are to move within this process.
fn is_local(reach: &Reach) -> anyhow::Result<bool> {
    Ok(engine::protocol(&reach.protocol)? == Protocol::Local)
}

/// An engine whose own segment has so many bytes.
fn open_own(reach: &Reach, bytes: usize, memory: MemoryKind) -> anyhow::Result<(Opened, Buffer)> {
    engine::check_metadata(&reach.metadata, reach.settings.load()?)?;
    let options = engine::Options {
        settings: reach.settings.load()?,
        metadata: &reach.metadata,
        segment_name: None,
        no_segmentation_offload: reach.no_segmentation_offload,
        patience: None,
        relays: &[],
    };
    let loopback = Ipv4Addr::LOCALHOST.into();
    let Started { engine, missing } =
        engine::start(&[Protocol::Local], &reach.bind, loopback, &options)?;
    let buffer = memory.allocate(&engine, bytes, true)?;
    let segment = engine.open_segment(engine.name())?;
    reach.wishes.check(&options.settings.engine(loopback).policy_file)?;
    let opened = Opened { engine, segment, wishes: reach.wishes.clone(), missing };
    if let Some(required) = &reach.require {
        paths::require(&opened, required)?;
    }
    Ok((opened, buffer))
}

/// Bytes that each side walks through: at least those of all threads' batches. Of the sizes that
/// nobody asked for, those remain whose batches fit.
fn working_set(arguments: &Arguments, shapes: &mut Vec<Shape>) -> anyhow::Result<usize> {
    let bytes: Option<Vec<usize>> = shapes.iter().map(Shape::bytes).collect();
    let bytes = bytes.ok_or_else(|| {
        usage("--block-size x --batch-size x --threads: more than memory can be, or nothing")
    })?;
    let range = bytes.iter().min().zip(bytes.iter().max());
    let (&smallest, &largest) = range.context("there is nothing to measure")?;
    let Some(set) = arguments.working_set else { return Ok(largest.max(WORKING_SET as usize)) };
    if set < LEAST_WORKING_SET {
        return Err(usage(format!("--working-set {set}: choose 1MiB or more")));
    }
    let set = usize::try_from(set)
        .map_err(|_| usage(format!("--working-set {set}: more than memory can be")))?;
    if smallest > set {
        return Err(usage(format!(
            "--working-set {set}: the batches of all threads have {smallest} bytes (--block-size x \
             --batch-size x --threads)"
        )));
    }
    shapes.retain(|shape| shape.bytes().is_some_and(|bytes| bytes <= set));
    Ok(set)
}

/// Starts a node with so many bytes of memory.
fn start_peer(reach: &Reach, bytes: u64, memory: MemoryKind) -> anyhow::Result<Peer> {
    // Here, since it is this command line that is wrong.
    engine::check_metadata(&reach.metadata, reach.settings.load()?)?;
    let what = format!("starting a node with {}", units::readable(bytes));
    note::when_slow(&what, || Peer::start(reach, bytes, memory))
}

/// Memory for the blocks of all threads, with something other than zeros, which the kernel may
/// share.
fn allocate(opened: &Opened, bytes: usize, memory: MemoryKind) -> anyhow::Result<Buffer> {
    let chunk: Vec<u8> =
        (0..1 << 20).map(|index: u32| (index.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    note::when_slow(&format!("allocating {}", units::readable(bytes as u64)), || {
        let buffer = memory.allocate(&opened.engine, bytes, false)?;
        for at in (0..bytes).step_by(chunk.len()) {
            buffer.write(at, &chunk[..chunk.len().min(bytes - at)])?;
        }
        Ok(buffer)
    })
}

/// Measures row by row, and shows each at once unless all are to be one object. Told to stop, it
/// returns what it has.
fn measure(
    arguments: &Arguments,
    shapes: &[Shape],
    opened: &Opened,
    buffer: &Buffer,
) -> anyhow::Result<Vec<Row>> {
    let text = !arguments.json;
    if text {
        let transport = paths::chosen(opened)?.unwrap_or("nothing");
        report::print_header(opened.segment.name(), transport, arguments.duration)?;
    }
    let mut rows = Vec::new();
    for shape in shapes {
        let done = match row::measure(opened, buffer, buffer.length(), shape) {
            Err(_) if process::failed_because_told_to_stop() => break,
            done => done?,
        };
        if done.requests > 0 {
            let row = Row::new(shape, buffer.length(), &done);
            if text {
                report::print_row(&row)?;
            }
            rows.push(row);
        }
        if process::told_to_stop() {
            break;
        }
    }
    if arguments.baseline && !process::told_to_stop() {
        let copies = matches!(paths::chosen(opened)?, Some("shm" | "local"));
        report::add_baseline(&mut rows, buffer.length(), copies)?;
        if text {
            report::print_baseline(&rows)?;
        }
    }
    Ok(rows)
}
