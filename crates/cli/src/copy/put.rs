//! `put`: copies a file into a segment.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use millstream_transfer::Opcode;

use super::pipeline::Pipeline;
use super::session::{Reopened, Session, Trouble};
use super::source::Source;
use super::watch::Watch;
use super::{Common, Done, Reading, failed, progress};
use crate::engine::Opened;
use crate::failure::usage;
use crate::output::Progress;
use crate::process;
use crate::settings::SettingsArguments;

/// Arguments of `put`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Count bytes as copied only once they survive a loss of power there; of segments that are files
    #[arg(long)]
    durable: bool,
    /// The file, read to its end; - is standard input
    file: PathBuf,
}

impl Arguments {
    pub(crate) const fn settings(&self) -> &SettingsArguments {
        &self.common.reach.settings
    }
}

/// Runs `put`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { common, durable, file } = arguments;
    // What a metadata server has of it must not outlive us. Before any thread is started.
    process::clean_up_when_told_to_stop()?;
    let mut session = Session::new("put", &common.reach, &common.segment, common.patience)?;
    let mut watch = Watch::new("put", common.patience.limit());
    let source = Source::open(file, common.length, &mut watch)?;
    let opened = session.open()?;
    let room = room(&opened, common.offset, source.length)?;
    watch.restart(source.length);
    let mut put = Put {
        pipeline: Pipeline::new(opened, Opcode::Write, common.offset)?.with_durable(*durable),
        progress: progress("put", source.length),
        source,
        room,
        ended: false,
        excess: false,
        checksum: 0,
        watch,
        start: Instant::now(),
        time: Duration::ZERO,
        reading: None,
        verify: common.verify,
    };
    while let Err(trouble) = put.go_on() {
        match trouble {
            Trouble::Local(error) => {
                return Err(error.context(format!("put: stopped after {}", put.watch.how_far())));
            }
            Trouble::Remote(error) => put
                .recover(&mut session, common.offset, error)
                .with_context(|| failed("put", session.segment, &put.watch.how_far()))?,
        }
    }
    put.progress = None;
    put.check(&common.segment)?;
    let taken = put.pipeline.path()?;
    let done = Done {
        taken,
        bytes: put.watch.done,
        checksum: put.checksum,
        time: put.time,
        durable: Some(*durable),
    };
    common.report("into", file, done)
}

/// Waits for the oldest chunk.
fn finish(
    pipeline: &mut Pipeline,
    watch: &mut Watch,
    progress: &mut Option<Progress>,
) -> Result<(), Trouble> {
    let length = pipeline.finish(watch)?.length as u64;
    watch.done += length;
    if let Some(progress) = progress {
        progress.advance(length);
    }
    Ok(())
}

/// How many bytes fit. An error when that is known to be too few.
fn room(opened: &Opened, offset: u64, length: Option<u64>) -> anyhow::Result<u64> {
    let segment = &opened.segment;
    segment
        .address_of(0, offset, length.unwrap_or(0))
        .map_err(|error| usage(format!("segment {}: {error}", segment.name())))?;
    Ok(segment.length_from(0) - offset)
}

struct Put {
    pipeline: Pipeline,
    source: Source,
    /// Bytes that fit.
    room: u64,
    /// All of the source was read, or all that fits.
    ended: bool,
    /// The source has more than fits.
    excess: bool,
    /// Of the bytes read.
    checksum: u32,
    watch: Watch,
    progress: Option<Progress>,
    start: Instant,
    /// How long it took to write.
    time: Duration,
    /// What reads back, once all is written.
    reading: Option<Reading>,
    verify: bool,
}

impl Put {
    /// Does what is left to do.
    fn go_on(&mut self) -> Result<(), Trouble> {
        if self.reading.is_none() {
            self.write()?;
            self.time = self.start.elapsed();
            if !self.verify {
                return Ok(());
            }
            self.pipeline.turn(Opcode::Read);
            self.reading = Some(Reading::of(self.watch.done));
        }
        let Some(reading) = &mut self.reading else { return Ok(()) };
        reading.run(&mut self.pipeline, &mut self.watch)
    }

    fn write(&mut self) -> Result<(), Trouble> {
        loop {
            if !self.ended && !self.pipeline.is_full() {
                // The peer is not forgotten while the source gives nothing.
                let Self { pipeline, progress, .. } = self;
                let meanwhile = |watch: &mut Watch| {
                    while pipeline.is_finished() {
                        finish(pipeline, watch, progress)?;
                    }
                    pipeline.probe()
                };
                match self.source.next(&mut self.watch, meanwhile)? {
                    Some(chunk) => self.begin(chunk)?,
                    None => self.ended = true,
                }
            } else if !self.pipeline.is_empty() {
                finish(&mut self.pipeline, &mut self.watch, &mut self.progress)?;
            } else if self.excess {
                let Self { room, source, .. } = self;
                return Err(Trouble::Local(anyhow!(
                    "the segment's buffer is full: the {room} bytes from the offset on were \
                     written, and {} has more",
                    source.name
                )));
            } else {
                return Ok(());
            }
        }
    }

    fn begin(&mut self, mut chunk: Vec<u8>) -> Result<(), Trouble> {
        let left = self.room.saturating_sub(self.pipeline.begun());
        if chunk.len() as u64 > left {
            // What fits is written, so that it can be said how much that is.
            chunk.truncate(left as usize);
            (self.ended, self.excess) = (true, true);
        }
        self.checksum = crc32c::crc32c_append(self.checksum, &chunk);
        let begun = if chunk.is_empty() { Ok(()) } else { self.pipeline.write(&chunk) };
        self.source.recycle(chunk);
        begun
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
                let lost = self.watch.done;
                if lost > 0 || self.reading.is_some() {
                    let name = self.source.name.clone();
                    if !self.source.restart(&mut self.watch)? {
                        bail!(
                            "its node was restarted, so the {lost} bytes that were written are \
                             lost, and {name} cannot be read again"
                        );
                    }
                    (self.ended, self.excess, self.checksum) = (false, false, 0);
                    self.watch.restart(self.source.length);
                    self.reading = None;
                    self.pipeline.turn(Opcode::Write);
                    self.progress = progress("put", self.source.length);
                }
                self.room = room(&opened, offset, self.source.length)?;
            }
            match self.pipeline.reconnect(opened) {
                Ok(()) => return Ok(()),
                Err(Trouble::Local(error)) => return Err(error),
                Err(Trouble::Remote(again)) => error = again,
            }
        }
    }

    /// Compares what was read back, if it was.
    fn check(&self, segment: &str) -> anyhow::Result<()> {
        let Self { checksum, source, .. } = self;
        match &self.reading {
            Some(Reading { checksum: held, .. }) if held != checksum => bail!(
                "put: segment {segment} does not hold what was written: CRC-32C {checksum:08x} \
                 was read from {}, and {held:08x} from the segment",
                source.name
            ),
            _ => Ok(()),
        }
    }
}
