//! What `put` reads, and `get` to compare it. A thread of its own reads it: a FIFO without a writer,
//! a pipe or a dead network file system can hold up a reader for ever, and nothing else shall wait
//! for it unseen.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;

use anyhow::{Context, anyhow, bail};

use super::pipeline::CHUNK;
use super::standard;
use super::watch::Watch;
use crate::failure::usage;
use crate::{closed, output, units};

/// Chunks that are read ahead.
const AHEAD: usize = 1;

pub(super) struct Source {
    /// As messages show it.
    pub(super) name: String,
    path: PathBuf,
    /// How many bytes were asked for.
    asked: Option<u64>,
    /// How many there are, as far as that is known. Some files, as those in `/sys`, have fewer than
    /// they say.
    pub(super) length: Option<u64>,
    reader: Reader,
}

/// The end of the reading thread that is here.
struct Reader {
    events: Receiver<anyhow::Result<Event>>,
    /// Chunks to use again.
    spare: Sender<Vec<u8>>,
    /// Bytes read so far.
    count: Arc<AtomicU64>,
    /// It can be read once more from the start.
    can_restart: bool,
}

enum Event {
    Opened {
        length: Option<u64>,
        can_restart: bool,
    },
    /// All chunks but the last are full.
    Chunk(Vec<u8>),
    End,
}

impl Source {
    /// Opens it, up to `asked` bytes of it.
    pub(super) fn open(path: &Path, asked: Option<u64>, watch: &mut Watch) -> anyhow::Result<Self> {
        let name = if standard::is_dash(path) {
            "standard input".to_owned()
        } else {
            output::escaped(path)
        };
        let (reader, length) = Reader::start(path, &name, asked, watch)?;
        Ok(Self { name, path: path.to_owned(), asked, length, reader })
    }

    /// The next chunk; `None` at the end. While there is none, `meanwhile` is done every now and
    /// then. When that fails, nothing is lost: the next call has the chunk.
    pub(super) fn next<E: From<anyhow::Error>>(
        &mut self,
        watch: &mut Watch,
        meanwhile: impl FnMut(&mut Watch) -> Result<(), E>,
    ) -> Result<Option<Vec<u8>>, E> {
        let what = format!("{} to give bytes", self.name);
        match self.reader.event(&what, watch, meanwhile)? {
            Event::Chunk(chunk) => Ok(Some(chunk)),
            _ => Ok(None),
        }
    }

    /// Takes a chunk back to be used again.
    pub(super) fn recycle(&self, chunk: Vec<u8>) {
        // The thread may have ended.
        let _ = self.reader.spare.send(chunk);
    }

    /// Begins again at the start. `false` when that cannot be.
    pub(super) fn restart(&mut self, watch: &mut Watch) -> anyhow::Result<bool> {
        if !self.reader.can_restart {
            return Ok(false);
        }
        (self.reader, self.length) = Reader::start(&self.path, &self.name, self.asked, watch)?;
        Ok(true)
    }
}

impl Reader {
    /// Starts a thread that opens the file and reads it. Returns its length too, if it has one.
    fn start(
        path: &Path,
        name: &str,
        asked: Option<u64>,
        watch: &mut Watch,
    ) -> anyhow::Result<(Self, Option<u64>)> {
        let (to_main, events) = sync_channel(AHEAD);
        let (spare, returned) = channel();
        let count = Arc::new(AtomicU64::new(0));
        let reading = Reading {
            name: name.to_owned(),
            asked,
            events: to_main,
            spare: returned,
            count: Arc::clone(&count),
        };
        let is_fifo = fs::metadata(path).is_ok_and(|data| data.file_type().is_fifo());
        let own_path = path.to_owned();
        thread::Builder::new()
            .name("read".to_owned())
            .spawn(move || {
                if let Err(error) = reading.run(&own_path) {
                    // Nobody listens when the copy has failed otherwise.
                    let _ = reading.events.send(Err(error));
                }
            })
            .context("cannot start a thread")?;
        let mut reader = Self { events, spare, count, can_restart: false };
        let what = match is_fifo {
            true => format!("a process that opens the FIFO {name} to write"),
            false => format!("{name} to open"),
        };
        let opened = reader.event(&what, watch, |_| anyhow::Ok(()))?;
        let Event::Opened { length, can_restart } = opened else {
            bail!("{name}: cannot be read");
        };
        reader.can_restart = can_restart;
        Ok((reader, length))
    }

    fn event<E: From<anyhow::Error>>(
        &self,
        what: &str,
        watch: &mut Watch,
        mut meanwhile: impl FnMut(&mut Watch) -> Result<(), E>,
    ) -> Result<Event, E> {
        let mut wait = watch.wait_for(what);
        loop {
            match self.events.recv_timeout(wait.pause()) {
                Ok(event) => return Ok(event?),
                Err(RecvTimeoutError::Timeout) => {
                    // First: it knows better than that nothing moves.
                    meanwhile(wait.watch())?;
                    wait.look(self.count.load(Ordering::Relaxed))?;
                }
                // Only after a panic, which has said why.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(anyhow!("reading was cut off").into());
                }
            }
        }
    }
}

/// What the thread has.
struct Reading {
    name: String,
    asked: Option<u64>,
    events: SyncSender<anyhow::Result<Event>>,
    spare: Receiver<Vec<u8>>,
    count: Arc<AtomicU64>,
}

impl Reading {
    fn run(&self, path: &Path) -> anyhow::Result<()> {
        let Self { name, asked, .. } = self;
        let cannot = || format!("cannot read {name}");
        let mut file = open(path).with_context(cannot)?;
        let metadata = file.metadata().with_context(cannot)?;
        if metadata.is_dir() {
            return Err(usage(format!("{name} is a directory: put copies one file")));
        }
        let start =
            if metadata.is_file() { file.stream_position().with_context(cannot)? } else { 0 };
        let there = announced(&metadata).map(|length| length.saturating_sub(start));
        if let (&Some(asked), Some(there)) = (asked, there)
            && asked > there
        {
            return Err(usage(format!(
                "--length {asked}: {name} has only {}",
                units::bytes(there)
            )));
        }
        let limit = asked.or(there);
        let can_restart = metadata.is_file() && !standard::is_dash(path);
        if self.events.send(Ok(Event::Opened { length: limit, can_restart })).is_err() {
            return Ok(());
        }
        let mut done = 0;
        loop {
            let mut chunk = self.spare.try_recv().unwrap_or_default();
            let left = limit.map_or(u64::MAX, |limit| limit - done);
            let room = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK);
            chunk.resize(room, 0);
            let length = self.fill(&mut file, &mut chunk).with_context(cannot)?;
            done += length as u64;
            chunk.truncate(length);
            if length > 0 && self.events.send(Ok(Event::Chunk(chunk))).is_err() {
                return Ok(());
            }
            if length < room {
                self.check_end(&mut file, start + done, done, limit)?;
                break;
            }
            if length == 0 {
                break;
            }
        }
        let _ = self.events.send(Ok(Event::End));
        Ok(())
    }

    /// Reads until the chunk is full or the file ends: a pipe gives less at a time.
    fn fill(&self, file: &mut File, chunk: &mut [u8]) -> io::Result<usize> {
        let mut length = 0;
        while length < chunk.len() {
            match file.read(&mut chunk[length..]) {
                Ok(0) => break,
                Ok(count) => {
                    length += count;
                    self.count.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(length)
    }

    /// The file has ended, after `done` bytes, at `position`. Is that all of it?
    fn check_end(
        &self,
        file: &mut File,
        position: u64,
        done: u64,
        limit: Option<u64>,
    ) -> anyhow::Result<()> {
        let Self { name, asked, .. } = self;
        let Some(limit) = limit.filter(|limit| done < *limit) else { return Ok(()) };
        if let Some(asked) = asked {
            bail!("{name} ended after {done} of the {asked} bytes of --length");
        }
        // It said how long it is. A file that has become shorter says so now; one that still says
        // the same, and has no more to give, was never so long.
        let metadata = file.metadata().with_context(|| format!("cannot read {name}"))?;
        let more = file.read(&mut [0]).with_context(|| format!("cannot read {name}"))?;
        if metadata.len() <= position || more > 0 {
            bail!(
                "{name} became shorter while it was read: it had {limit} bytes when it was \
                 opened, and ended after {done}"
            );
        }
        Ok(())
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    if !standard::is_dash(path) {
        return Ok(File::open(path)?);
    }
    let stdin = io::stdin();
    closed::check(libc::STDIN_FILENO)?;
    Ok(File::from(stdin.as_fd().try_clone_to_owned()?))
}

/// The length that a file says it has. Of none that says 0 is that believed: many in `/proc` do.
fn announced(metadata: &Metadata) -> Option<u64> {
    (metadata.is_file() && metadata.len() > 0).then_some(metadata.len())
}
