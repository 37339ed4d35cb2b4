//! `put` and `get`: copy a file into and out of a segment.
//!
//! The bytes go through a registered buffer of a few chunks ([`pipeline`]). A thread reads or
//! writes the file ([`source`], [`target`]), so that whatever holds the copy up is seen here
//! ([`watch`]).

mod destination;
pub(crate) mod get;
mod pipeline;
pub(crate) mod put;
mod session;
mod source;
mod standard;
mod target;
mod watch;

use std::path;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use self::pipeline::{CHUNK, Pipeline, Taken};
use self::session::Trouble;
use self::watch::Watch;
use crate::bench::figures::per;
use crate::output::{self, Progress};
use crate::paths::Path;
use crate::reach::{Patience, Reach};
use crate::units;

/// Arguments that `put` and `get` have in common.
#[derive(Args, Debug)]
struct Common {
    #[command(flatten)]
    reach: Reach,
    /// The segment; with --metadata p2p its HOST:PORT, and nvmeof/HOST:PORT/NAME of a file
    #[arg(long, value_name = "N")]
    segment: String,
    /// Where in the segment's buffer, from its start
    #[arg(long, value_name = "O", default_value = "0", value_parser = units::size)]
    offset: u64,
    /// Bytes to copy [default: all of the file, or up to the end of the buffer]
    #[arg(long, value_name = "L", value_parser = units::size)]
    length: Option<u64>,
    #[command(flatten)]
    patience: Patience,
    /// Compare the CRC-32C of both ends afterwards: the bytes are read once more
    #[arg(long)]
    verify: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was done.
#[derive(Serialize)]
struct Report<'a> {
    file: String,
    bytes: u64,
    /// CRC-32C (Castagnoli) of the bytes copied.
    crc32c: String,
    /// Whether both ends were compared.
    verified: bool,
    /// Whether WRITEs counted only once they were durable.
    #[serde(skip_serializing_if = "Option::is_none")]
    durable: Option<bool>,
    seconds: f64,
    gb_per_s: f64,
    segment: &'a str,
    offset: u64,
    /// The one that took the last bytes; none where there were no bytes.
    transport: Option<&'static str>,
    /// Who chose the pairs of NICs.
    policy: &'static str,
    paths: Vec<Path>,
}

/// What a copy has come to.
struct Done {
    taken: Taken,
    bytes: u64,
    checksum: u32,
    time: Duration,
    /// Of `put`, whether its WRITEs were to be durable.
    durable: Option<bool>,
}

impl Common {
    /// Tells what was done: `what` is "into" or "out of".
    fn report(&self, what: &str, path: &path::Path, done: Done) -> anyhow::Result<()> {
        let Self { segment, offset, .. } = self;
        let Done { taken: Taken { transport, policy, paths }, bytes, checksum, time, durable } =
            done;
        let bytes_per_s = per(bytes as f64, time.as_secs_f64());
        if self.json {
            let report = Report {
                file: path.to_string_lossy().into_owned(),
                bytes,
                crc32c: format!("{checksum:08x}"),
                verified: self.verify,
                durable,
                seconds: time.as_secs_f64(),
                gb_per_s: bytes_per_s / 1e9,
                segment,
                offset: *offset,
                transport,
                policy,
                paths,
            };
            return output::json(&report);
        }
        let (name, bytes) = (output::escaped(path), units::bytes(bytes));
        let verified = if self.verify { ", the same at both ends" } else { "" };
        let durable = if durable == Some(true) { ", durable" } else { "" };
        output::line(&format!(
            "{name}: {bytes} {what} segment {segment} at offset {offset}, \
             CRC-32C {checksum:08x}{verified}{durable}, {:.2} s, {}",
            time.as_secs_f64(),
            units::rate(bytes_per_s)
        ))
    }
}

/// The CRC-32C of what the segment holds now. The pipeline reads, and has nothing under way.
struct Reading {
    length: u64,
    checksum: u32,
    chunk: Vec<u8>,
}

impl Reading {
    fn of(length: u64) -> Self {
        Self { length, checksum: 0, chunk: Vec::new() }
    }

    /// Goes on, and ends.
    fn run(&mut self, pipeline: &mut Pipeline, watch: &mut Watch) -> Result<(), Trouble> {
        while pipeline.finished() < self.length {
            let left = self.length - pipeline.begun();
            if left > 0 && !pipeline.is_full() {
                pipeline.read(left.min(CHUNK as u64) as usize)?;
                continue;
            }
            let arrived = pipeline.finish(watch)?;
            pipeline.take(&arrived, &mut self.chunk)?;
            self.checksum = crc32c::crc32c_append(self.checksum, &self.chunk);
        }
        Ok(())
    }
}

/// How a failure of the peer begins.
fn failed(command: &str, segment: &str, how_far: &str) -> String {
    format!("{command}: segment {segment} failed after {how_far}")
}

/// A progress line, if it is known how much there is.
fn progress(what: &'static str, total: Option<u64>) -> Option<Progress> {
    total.map(|total| Progress::new(what, total))
}
