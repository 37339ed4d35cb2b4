//! `put` and `get`: copy a file into and out of a segment.
//!
//! The file goes through a registered buffer of a few chunks: while one is read or written here,
//! the others are under way.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use millstream_transfer::{Batch, Buffer, Opcode, TransferEngine, TransferRequest, TransferState};
use serde::Serialize;

use crate::engine::{self, Opened};
use crate::failure::usage;
use crate::output::{self, Progress};
use crate::reach::{Patience, Reach};
use crate::units;

/// Bytes of a chunk, and how many are under way.
const CHUNK: usize = 2 << 20;
const CHUNKS: usize = 4;

/// Without a byte for so long, a transfer has failed. The engine itself gives up earlier.
const STALL: Duration = Duration::from_secs(8);

/// Arguments of `put` and `get`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    reach: Reach,
    /// The segment; with --metadata p2p its HOST:PORT
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
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The file
    file: PathBuf,
}

/// What was done.
#[derive(Serialize)]
struct Report<'a> {
    bytes: u64,
    /// CRC-32C (Castagnoli) of the bytes copied.
    crc32c: String,
    seconds: f64,
    gb_per_s: f64,
    segment: &'a str,
    offset: u64,
}

/// Runs `put`.
pub(crate) fn put(arguments: &Arguments) -> anyhow::Result<()> {
    let path = arguments.file.display();
    let mut file = File::open(&arguments.file).with_context(|| format!("cannot read {path}"))?;
    let metadata = file.metadata().with_context(|| format!("cannot read {path}"))?;
    if metadata.is_dir() {
        return Err(usage(format!("{path} is a directory: put copies one file")));
    }
    let available = metadata.len();
    let length = arguments.length.unwrap_or(available);
    // The length of a device or pipe is not known.
    if metadata.is_file() && length > available {
        return Err(usage(format!("--length {length}: {path} has only {available} bytes")));
    }
    let mut source = |bytes: &mut [u8]| {
        file.read_exact(bytes).with_context(|| format!("{path} ended early or cannot be read"))
    };
    copy(arguments, Opcode::Write, Some(length), &mut source)
}

/// Runs `get`.
pub(crate) fn get(arguments: &Arguments) -> anyhow::Result<()> {
    let path = arguments.file.display();
    // Made when the first bytes are there: until then, an existing file stays as it is.
    let mut file = None;
    let mut target = |bytes: &mut [u8]| {
        if file.is_none() {
            file = Some(File::create(&arguments.file)?);
        }
        file.as_mut().map_or(Ok(()), |file: &mut File| file.write_all(bytes))
    };
    let mut target =
        |bytes: &mut [u8]| target(bytes).with_context(|| format!("cannot write {path}"));
    copy(arguments, Opcode::Read, arguments.length, &mut target)
}

/// Copies between the segment and what `local` reads from or writes to. Without a length: up to
/// the end of the segment's buffer.
fn copy(
    arguments: &Arguments,
    opcode: Opcode,
    length: Option<u64>,
    local: &mut dyn FnMut(&mut [u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let Arguments { offset, segment: name, .. } = arguments;
    let offset = *offset;
    let opened = engine::open(&arguments.reach, name)?;
    let available = opened.segment.buffers()[0].length.checked_sub(offset);
    let length = length.or(available).unwrap_or(0);
    let address = opened
        .segment
        .address_of(0, offset, length)
        .map_err(|error| usage(format!("segment {name}: {error}")))?;
    let (verb, what) = match opcode {
        Opcode::Write => ("put", "into"),
        Opcode::Read => ("get", "out of"),
    };
    let start = Instant::now();
    let mut pipeline = Pipeline::new(&opened, opcode, address, length, verb)?;
    pipeline.run(local).with_context(|| {
        let done = pipeline.copied;
        format!("{verb}: segment {name} failed after {done} of {length} bytes")
    })?;
    let checksum = pipeline.checksum;
    drop(pipeline);
    let seconds = start.elapsed().as_secs_f64();
    let gb_per_s = length as f64 / seconds / 1e9;
    if arguments.json {
        let crc32c = format!("{checksum:08x}");
        return output::json(&Report {
            bytes: length,
            crc32c,
            seconds,
            gb_per_s,
            segment: name,
            offset,
        });
    }
    let path = arguments.file.display();
    output::line(&format!(
        "{path}: {length} bytes {what} segment {name} at offset {offset}, CRC-32C {checksum:08x}, \
         {seconds:.2} s, {gb_per_s:.2} GB/s"
    ));
    Ok(())
}

/// Chunks on their way through a registered buffer.
struct Pipeline<'a> {
    engine: &'a TransferEngine,
    template: TransferRequest,
    buffer: Buffer,
    /// The chunk that is read or written here.
    chunk: Vec<u8>,
    /// For each part of the buffer, what is under way there.
    under_way: [Option<(Batch, usize)>; CHUNKS],
    length: u64,
    copied: u64,
    /// Of the bytes of the file so far.
    checksum: u32,
    progress: Progress,
}

impl<'a> Pipeline<'a> {
    fn new(
        opened: &'a Opened,
        opcode: Opcode,
        address: u64,
        length: u64,
        what: &'static str,
    ) -> anyhow::Result<Self> {
        let room = length.clamp(1, (CHUNK * CHUNKS) as u64) as usize;
        let buffer = opened.engine.allocate_buffer(room, "*", false)?;
        let template = TransferRequest {
            opcode,
            source: buffer.address(),
            target: opened.segment.id(),
            target_offset: address,
            length: 0,
        };
        Ok(Self {
            engine: &opened.engine,
            template,
            buffer,
            chunk: vec![0; room.min(CHUNK)],
            under_way: Default::default(),
            length,
            copied: 0,
            checksum: 0,
            progress: Progress::new(what, length),
        })
    }

    fn run(
        &mut self,
        local: &mut dyn FnMut(&mut [u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let write = self.template.opcode == Opcode::Write;
        let mut begun = 0;
        // A chunk further than the last one that was begun, each is finished in turn.
        for index in 0.. {
            let part = index % CHUNKS;
            if let Some((batch, length)) = self.under_way[part].take() {
                self.wait(&batch)?;
                if !write {
                    self.buffer.read(part * CHUNK, &mut self.chunk[..length])?;
                    self.checksum = crc32c::crc32c_append(self.checksum, &self.chunk[..length]);
                    local(&mut self.chunk[..length])?;
                }
                self.copied += length as u64;
                self.progress.advance(length as u64);
            }
            let length = (self.length - begun).min(CHUNK as u64) as usize;
            if length > 0 {
                if write {
                    local(&mut self.chunk[..length])?;
                    self.checksum = crc32c::crc32c_append(self.checksum, &self.chunk[..length]);
                    self.buffer.write(part * CHUNK, &self.chunk[..length])?;
                }
                let batch = self.begin(part, begun, length)?;
                self.under_way[part] = Some((batch, length));
                begun += length as u64;
            }
            if self.copied == self.length {
                break;
            }
        }
        if self.length == 0 && !write {
            // The empty file is a result too.
            local(&mut [])?;
        }
        Ok(())
    }

    fn begin(&self, part: usize, at: u64, length: usize) -> anyhow::Result<Batch> {
        let batch = self.engine.allocate_batch(1)?;
        let request = TransferRequest {
            source: self.template.source + (part * CHUNK) as u64,
            target_offset: self.template.target_offset + at,
            length: length as u64,
            ..self.template
        };
        self.engine.submit(&batch, &[request])?;
        Ok(batch)
    }

    fn wait(&self, batch: &Batch) -> anyhow::Result<()> {
        let mut arrived = 0;
        while !self.engine.wait(batch, STALL) {
            let now = self.engine.status(batch, 0)?.transferred_bytes;
            if now == arrived {
                bail!("no byte has moved for {STALL:?}: is its node still running?");
            }
            arrived = now;
        }
        let status = self.engine.status(batch, 0)?;
        match status.error {
            Some(error) => bail!("{error} (is its node still running?)"),
            None if status.state == TransferState::Completed => Ok(()),
            None => bail!("the transfer ended as {:?}", status.state),
        }
    }
}
