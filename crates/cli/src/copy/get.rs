//! `get`: copies a part of a segment into a file.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use millstream_transfer::Opcode;

use super::destination::Destination;
use super::pipeline::{CHUNK, Pipeline};
use super::session::{Reopened, Session, Trouble};
use super::source::Source;
use super::standard;
use super::target::Target;
use super::watch::Watch;
use super::{Common, Done, Reading, failed, progress};
use crate::engine::Opened;
use crate::failure::usage;
use crate::output::{self, Progress};
use crate::settings::SettingsArguments;
use crate::{process, units};

/// Arguments of `get`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Write over the file itself, and not a temporary one that replaces it in the end
    #[arg(long)]
    inplace: bool,
    /// The file; - is standard output, and what is said goes to standard error then
    file: PathBuf,
}

impl Arguments {
    pub(crate) const fn settings(&self) -> &SettingsArguments {
        &self.common.reach.settings
    }
}

/// Runs `get`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { common, inplace, file } = arguments;
    // First: a failure must not be told among the bytes.
    let destination = Destination::of(file, *inplace)?;
    if destination.is_output() {
        output::give_stdout_away();
    }
    // A temporary file must not outlive us, nor what a metadata server has. Before any thread is started.
    process::clean_up_when_told_to_stop()?;
    let mut session = Session::new("get", &common.reach, &common.segment, common.patience)?;
    let mut watch = Watch::new("get", common.patience.limit());
    let name = match standard::is_dash(file) {
        true => "standard output".to_owned(),
        false => output::escaped(file),
    };
    let opened = session.open()?;
    let length = length(&opened, common.offset, common.length)?;
    watch.restart(Some(length));
    let mut get = Get {
        target: Target::open(name, destination)?,
        pipeline: Pipeline::new(opened, Opcode::Read, common.offset)?,
        asked: common.length,
        length,
        chunk: Vec::new(),
        checksum: 0,
        progress: progress("get", Some(length)),
        watch,
        start: Instant::now(),
        time: Duration::ZERO,
        reading: None,
        verify: common.verify,
    };
    while let Err(trouble) = get.go_on(&common.segment) {
        match trouble {
            Trouble::Local(error) => {
                return Err(error.context(format!("get: stopped after {}", get.how_far())));
            }
            Trouble::Remote(error) => {
                get.target.settle(&mut get.watch);
                let how_far = get.how_far();
                get.recover(&mut session, common.offset, error)
                    .with_context(|| failed("get", &common.segment, &how_far))?;
            }
        }
    }
    get.progress = None;
    get.target.commit()?;
    let taken = get.pipeline.path()?;
    let done =
        Done { taken, bytes: get.length, checksum: get.checksum, time: get.time, durable: None };
    common.report("out of", file, done)
}

/// How many bytes to copy.
fn length(opened: &Opened, offset: u64, asked: Option<u64>) -> anyhow::Result<u64> {
    let segment = &opened.segment;
    let available = segment.length_from(0).checked_sub(offset);
    let length = asked.or(available).unwrap_or(0);
    segment
        .address_of(0, offset, length)
        .map_err(|error| usage(format!("segment {}: {error}", segment.name())))?;
    Ok(length)
}

struct Get {
    pipeline: Pipeline,
    target: Target,
    asked: Option<u64>,
    length: u64,
    /// To use for the next chunk.
    chunk: Vec<u8>,
    /// Of the bytes that arrived.
    checksum: u32,
    progress: Option<Progress>,
    watch: Watch,
    start: Instant,
    /// How long it took until all was written.
    time: Duration,
    /// What reads the segment once more, when all is written.
    reading: Option<Reading>,
    verify: bool,
}

impl Get {
    /// Does what is left to do.
    fn go_on(&mut self, segment: &str) -> Result<(), Trouble> {
        if self.reading.is_none() {
            self.read()?;
            self.target.finish(&mut self.watch)?;
            self.time = self.start.elapsed();
            if !self.verify {
                return Ok(());
            }
            self.check_file()?;
            self.pipeline.rewind();
            self.reading = Some(Reading::of(self.length));
        }
        let Some(reading) = &mut self.reading else { return Ok(()) };
        reading.run(&mut self.pipeline, &mut self.watch)?;
        let (first, second) = (self.checksum, reading.checksum);
        if first != second {
            let error = anyhow::anyhow!(
                "segment {segment} changed meanwhile: CRC-32C {first:08x} was read, and then \
                 {second:08x}"
            );
            return Err(Trouble::Local(error));
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), Trouble> {
        while self.watch.done < self.length {
            let left = self.length - self.pipeline.begun();
            if left > 0 && !self.pipeline.is_full() {
                self.pipeline.read(left.min(CHUNK as u64) as usize)?;
                continue;
            }
            let arrived = self.pipeline.finish(&mut self.watch)?;
            let mut chunk = std::mem::take(&mut self.chunk);
            self.pipeline.take(&arrived, &mut chunk)?;
            self.checksum = crc32c::crc32c_append(self.checksum, &chunk);
            self.chunk = self.target.write(chunk, &mut self.watch)?;
            self.watch.done += arrived.length as u64;
            if let Some(progress) = &mut self.progress {
                progress.advance(arrived.length as u64);
            }
        }
        Ok(())
    }

    /// Reads the file that was written, if it is one.
    fn check_file(&mut self) -> anyhow::Result<()> {
        let Self { checksum, target, watch, .. } = self;
        let Some(path) = target.file() else { return Ok(()) };
        let name = &target.name;
        let (length, held) =
            checksum_of(&path, watch).with_context(|| format!("cannot compare {name}"))?;
        if (length, held) != (self.length, *checksum) {
            bail!(
                "{name} does not hold what was written: CRC-32C {checksum:08x} of {} bytes was \
                 read from the segment, and {held:08x} of {length} bytes from the file",
                self.length
            );
        }
        Ok(())
    }

    /// Gets the segment again after a failure.
    fn recover(
        &mut self,
        session: &mut Session<'_>,
        offset: u64,
        mut error: anyhow::Error,
    ) -> anyhow::Result<()> {
        loop {
            self.pipeline.disconnect();
            let Reopened { opened, restarted } = session.open_again(error)?;
            if restarted {
                // What it holds now need not go with what was read before.
                if !self.target.restart(&mut self.watch)? {
                    bail!(
                        "its node was restarted, and the {} bytes that {} has already cannot be \
                         taken back",
                        self.target.written(),
                        self.target.name
                    );
                }
                self.length = length(&opened, offset, self.asked)?;
                self.watch.restart(Some(self.length));
                (self.checksum, self.reading) = (0, None);
                self.pipeline.rewind();
                self.progress = progress("get", Some(self.length));
            }
            match self.pipeline.reconnect(opened) {
                Ok(()) => return Ok(()),
                Err(Trouble::Local(error)) => return Err(error),
                Err(Trouble::Remote(again)) => error = again,
            }
        }
    }

    /// How many bytes really are where they were to go.
    fn how_far(&self) -> String {
        let (length, target) = (self.length, &self.target);
        if target.is_written_to() {
            format!("{} of {}", target.written(), units::bytes(length))
        } else {
            let (done, length) = (self.watch.done, units::bytes(length));
            format!("{done} of {length}, and {} is as it was", target.name)
        }
    }
}

/// Length and CRC-32C of a file.
fn checksum_of(path: &Path, watch: &mut Watch) -> anyhow::Result<(u64, u32)> {
    let mut source = Source::open(path, None, watch)?;
    let (mut length, mut checksum) = (0, 0);
    while let Some(chunk) = source.next(watch, |_| anyhow::Ok(()))? {
        length += chunk.len() as u64;
        checksum = crc32c::crc32c_append(checksum, &chunk);
        source.recycle(chunk);
    }
    Ok((length, checksum))
}
