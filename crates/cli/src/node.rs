//! `node`: serves a segment of memory.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use millstream_transfer::Buffer;
use serde::Serialize;

use crate::failure::usage;
use crate::process::StopSignals;
use crate::{engine, output, units};

/// Bytes read from the file at a time.
const CHUNK: usize = 1 << 20;

/// Arguments of `node`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The node's name
    #[arg(long, value_name = "N")]
    name: String,
    /// Where segments are found: p2p
    #[arg(long, value_name = "URI", default_value = "p2p")]
    metadata: String,
    /// How bytes move: auto (which is rdma), rdma, rdma:soft, rdma:ibverbs, local
    #[arg(long, value_name = "P", value_delimiter = ',', default_value = "auto")]
    protocol: Vec<String>,
    /// Local address, each an RDMA device [default: the first free one of 127.0.0.1 and up; with
    /// rdma:ibverbs, the first device that works]
    #[arg(long, value_name = "IP")]
    bind: Vec<IpAddr>,
    /// Bytes of memory to serve
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    buffer: u64,
    /// Put this file's bytes at the start of the memory
    #[arg(long, value_name = "F")]
    file: Option<PathBuf>,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
}

/// The `ready` line.
#[derive(Serialize)]
struct Ready<'a> {
    name: &'a str,
    /// The name by which peers open the segment.
    segment: &'a str,
    metadata: &'a str,
    buffer: BufferPlace,
    protocols: &'a [String],
    devices: Vec<String>,
}

#[derive(Serialize)]
struct BufferPlace {
    addr: u64,
    length: u64,
}

/// Runs `node`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    // Before the engine starts its threads.
    let signals = StopSignals::hold();
    engine::check_metadata(&arguments.metadata)?;
    let protocols = arguments
        .protocol
        .iter()
        .map(|name| engine::protocol(name))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let length = usize::try_from(arguments.buffer).ok().filter(|&length| length > 0);
    let length = length.ok_or_else(|| {
        usage(format!("--buffer {}: it must be 1 byte at least", arguments.buffer))
    })?;
    let preload = arguments.file.as_deref().map(|path| open(path, arguments.buffer)).transpose()?;
    let loopback = Ipv4Addr::LOCALHOST.into();
    let offload = !arguments.no_segmentation_offload;
    let engine = engine::start(&protocols, &arguments.bind, loopback, offload)?;
    let buffer = engine.allocate_buffer(length, "*", true).context("cannot serve the buffer")?;
    if let (Some(file), Some(path)) = (preload, &arguments.file) {
        load(file, &buffer).with_context(|| format!("cannot load {}", path.display()))?;
    }
    output::ready(&Ready {
        name: &arguments.name,
        segment: engine.name(),
        metadata: &arguments.metadata,
        buffer: BufferPlace { addr: buffer.address(), length: buffer.length() as u64 },
        protocols: &arguments.protocol,
        devices: engine.devices(),
    })?;
    let signal = signals.wait();
    tracing::info!(signal, "told to stop");
    Ok(())
}

/// Opens the file and checks that the buffer holds it.
fn open(path: &Path, buffer: u64) -> anyhow::Result<File> {
    let cannot = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(cannot)?;
    let metadata = file.metadata().with_context(cannot)?;
    if metadata.is_dir() {
        return Err(usage(format!("{} is a directory", path.display())));
    }
    if metadata.len() > buffer {
        return Err(usage(format!(
            "{} has {} bytes, and --buffer only {buffer}",
            path.display(),
            metadata.len()
        )));
    }
    Ok(file)
}

fn load(file: File, buffer: &Buffer) -> anyhow::Result<()> {
    let mut chunk = vec![0; CHUNK];
    // One byte more shows that the file has grown.
    let mut file = file.take(buffer.length() as u64 + 1);
    let mut at = 0;
    loop {
        let count = file.read(&mut chunk)?;
        if count == 0 {
            return Ok(());
        }
        buffer.write(at, &chunk[..count])?;
        at += count;
    }
}
