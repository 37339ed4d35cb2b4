//! `node`: serves a segment of memory.

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use millstream_control::status_server::StatusServer;
use millstream_transfer::{Buffer, FileOptions};
use serde::Serialize;

use crate::daemon::open_many_files;
use crate::engine::{Protocol, Started};
use crate::failure::usage;
use crate::memory::MemoryKind;
use crate::process::StopWatch;
use crate::settings::SettingsArguments;
use crate::{closed, engine, mapped, note, output, paths, retry, status_pages, units};

/// Bytes read from the file at a time.
const CHUNK: usize = 1 << 20;

/// Arguments of `node`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The node's name [default: this machine's]; with a metadata server, also its segment's [default: its
    /// HOST:PORT]
    #[arg(long, value_name = "N")]
    name: Option<String>,
    /// Where segments are found: p2p, or the URI of a metadata server: http://HOST:PORT/metadata
    #[arg(long, value_name = "URI", default_value = "p2p")]
    metadata: String,
    /// How bytes may move: auto (shm, rdma and tcp), rdma, rdma:soft, rdma:ibverbs, tcp, shm, local, nvmeof
    #[arg(long, value_name = "P", value_delimiter = ',', default_value = "auto")]
    protocol: Vec<String>,
    /// Local address, each an RDMA device [default: the first free one of 127.0.0.1 and up; with
    /// rdma:ibverbs, the first device that works]
    #[arg(long, value_name = "IP")]
    bind: Vec<IpAddr>,
    /// Bytes of memory to serve
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    buffer: u64,
    /// Whose memory that is: host, or cuda:N, the GPU with that number
    #[arg(long, value_name = "KIND", default_value_t = MemoryKind::Host)]
    memory: MemoryKind,
    /// Put this file's bytes at the start of the memory; - is stdin
    #[arg(long, value_name = "F")]
    file: Option<PathBuf>,
    /// Offer this file or block device as a segment of its own, for reading and writing; may repeat
    #[arg(long, value_name = "F")]
    offer_file: Vec<PathBuf>,
    /// As --offer-file, for reading only
    #[arg(long, value_name = "F")]
    offer_file_read_only: Vec<PathBuf>,
    /// The file that is offered by the path F is at LOCAL where a server is called SERVER, which opens it there itself
    /// if it may (setting nvmeof.mapped_folders); may repeat
    #[arg(long, value_name = "F@SERVER=LOCAL")]
    map_file: Vec<String>,
    /// Wait up to so long for an address or a name that is in use, or a metadata server that is not there
    #[arg(long, value_name = "D", default_value = "0s", value_parser = units::duration)]
    wait: Duration,
    /// Serve metrics over HTTP at this address, or this port of 127.0.0.1: /metrics for Prometheus, /status as
    /// JSON; nobody is asked there who he is [default: the setting metrics.listen]
    #[arg(long, value_name = "ADDR", value_parser = status_pages::address)]
    http: Option<SocketAddr>,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
    #[command(flatten)]
    pub(crate) settings: SettingsArguments,
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
    /// What was installed, in the order in which it is tried.
    transports: Vec<&'static str>,
    /// Who chooses the pairs of NICs.
    policy: &'static str,
    /// What `auto` could not install.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    paths: Vec<paths::Path>,
    devices: Vec<String>,
    /// Where metrics are.
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<SocketAddr>,
    /// The segments that are files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files: Vec<String>,
}

#[derive(Serialize)]
struct BufferPlace {
    addr: u64,
    length: u64,
}

/// Runs `node`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    open_many_files();
    // Before the engine starts its threads.
    let signals = StopWatch::start()?;
    let settings = arguments.settings.load()?;
    engine::check_metadata(&arguments.metadata, settings)?;
    let mut protocols = arguments
        .protocol
        .iter()
        .map(|name| engine::protocol(name))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let writable = arguments.offer_file.iter().map(|path| (path, true));
    let readable = arguments.offer_file_read_only.iter().map(|path| (path, false));
    let files: Vec<_> = writable.chain(readable).collect();
    if !files.is_empty() {
        protocols.push(Protocol::Nvmeof);
    }
    let paths: Vec<_> = files.iter().map(|(path, _)| path.as_path()).collect();
    let mut maps = mapped::maps(&arguments.map_file, &paths)?.into_iter();
    let length = usize::try_from(arguments.buffer).ok().filter(|&length| length > 0);
    let length = length.ok_or_else(|| {
        usage(format!("--buffer {}: it must be 1 byte at least", arguments.buffer))
    })?;
    let preload = arguments.file.as_deref().map(|path| open(path, arguments.buffer)).transpose()?;
    let loopback = Ipv4Addr::LOCALHOST.into();
    let options = engine::Options {
        settings,
        metadata: &arguments.metadata,
        segment_name: arguments.name.as_deref(),
        no_segmentation_offload: arguments.no_segmentation_offload,
        patience: None,
        relays: &[],
    };
    let start = Instant::now();
    let until = start.checked_add(arguments.wait).unwrap_or(start);
    let Started { engine, missing } = retry::until(until, retry::may_start_later, || {
        engine::start(&protocols, &arguments.bind, loopback, &options)
    })?;
    let allocating = format!("allocating {}", units::readable(arguments.buffer));
    let buffer = note::when_slow(&allocating, || arguments.memory.allocate(&engine, length, true));
    let buffer = buffer.context("cannot serve the buffer")?;
    if let (Some(source), Some(path)) = (preload, &arguments.file) {
        let path = output::escaped(path);
        note::when_slow(&format!("loading {path}"), || load(source, &buffer))
            .with_context(|| format!("cannot load {path}"))?;
    }
    for (path, writable) in files {
        let options = FileOptions { writable, ..maps.next().unwrap_or_default() };
        engine.register_file(path, options)?;
    }
    let listen = status_pages::place(arguments.http, settings);
    let serve = |(listen, asked_by)| status_pages::serve(&engine, listen, asked_by);
    let pages = listen.map(serve).transpose()?;
    let name = arguments.name.clone().unwrap_or_else(host_name);
    signals.serve();
    output::ready(&Ready {
        name: &name,
        segment: engine.name(),
        metadata: &millstream_metadata::without_password(&arguments.metadata),
        buffer: BufferPlace { addr: buffer.address(), length: buffer.length() as u64 },
        protocols: &arguments.protocol,
        transports: engine.transports().into_iter().map(|(name, _)| name).collect(),
        policy: engine.policy().name(),
        paths: paths::missing(&missing),
        devices: engine.devices(),
        http: pages.as_ref().map(StatusServer::address),
        files: engine.files(),
    })?;
    let signal = signals.wait();
    tracing::info!(signal, "told to stop");
    // It has the engine, too.
    drop(pages);
    Ok(())
}

/// The name of this machine.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "node" } else { name }.to_owned()
}

/// Opens the file, and checks that the buffer holds it where its length is known.
fn open(path: &Path, buffer: u64) -> anyhow::Result<Box<dyn Read>> {
    if path == Path::new("-") {
        closed::check(libc::STDIN_FILENO).context("cannot read standard input")?;
        return Ok(Box::new(io::stdin()));
    }
    let name = output::escaped(path);
    let cannot = || format!("cannot read {name}");
    let slow = match fs::metadata(path).is_ok_and(|data| data.file_type().is_fifo()) {
        true => format!("waiting for a process that opens the FIFO {name} to write"),
        false => format!("opening {name}"),
    };
    let file = note::when_slow(&slow, || File::open(path)).with_context(cannot)?;
    let metadata = file.metadata().with_context(cannot)?;
    if metadata.is_dir() {
        return Err(usage(format!("--file {name}: it is a directory")));
    }
    if metadata.len() > buffer {
        return Err(usage(format!(
            "{name} has {}, and --buffer only {buffer}",
            units::bytes(metadata.len())
        )));
    }
    Ok(Box::new(file))
}

/// Reads to the end, whatever length the file was said to have.
fn load(mut source: impl Read, buffer: &Buffer) -> anyhow::Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    loop {
        let count = match source.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        };
        if count > buffer.length() - at {
            bail!("it has more bytes than the {} of --buffer", buffer.length());
        }
        buffer.write(at, &chunk[..count])?;
        at += count;
    }
}
