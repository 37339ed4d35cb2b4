//! What `get` writes. As reading in `put`, it is done by a thread of its own: whoever is to take
//! the bytes can hold up a writer for ever.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;

use anyhow::{Context, bail};

use super::destination::Destination;
use super::standard;
use super::watch::Watch;
use crate::process::TemporaryFile;

/// Chunks that are handed over and not written yet.
const BEHIND: usize = 1;

/// Blocks of zeros of this length become holes.
const BLOCK: usize = 4096;

pub(super) struct Target {
    /// As messages show it.
    pub(super) name: String,
    destination: Destination,
    temporary: Option<TemporaryFile>,
    commands: Sender<Command>,
    replies: Receiver<anyhow::Result<Vec<u8>>>,
    /// Replies that are to come.
    outstanding: usize,
    /// Bytes written.
    count: Arc<AtomicU64>,
}

enum Command {
    Write(Vec<u8>),
    /// Begin again at the start.
    Restart,
    /// All is written.
    Finish,
}

impl Target {
    /// Begins to open it.
    pub(super) fn open(name: String, destination: Destination) -> anyhow::Result<Self> {
        let mut temporary = None;
        let opening = match &destination {
            Destination::Output => Opening::Opened(standard::output().context(name.clone())?),
            Destination::Direct(path) => Opening::Direct(path.clone()),
            Destination::InPlace(path) => Opening::InPlace(path.clone()),
            Destination::Beside { path, mode } => {
                let (own, file) = TemporaryFile::create_beside(path, *mode).with_context(|| {
                    format!(
                        "cannot make a temporary file beside {name} (--inplace writes without one)"
                    )
                })?;
                temporary = Some(own);
                Opening::Temporary(file)
            }
        };
        let (commands, queue) = channel();
        let (to_main, replies) = channel();
        let count = Arc::new(AtomicU64::new(0));
        let own_count = Arc::clone(&count);
        let cannot = format!("cannot write {name}");
        thread::Builder::new()
            .name("write".to_owned())
            .spawn(move || {
                let mut writer = match opening.open(own_count) {
                    Ok(writer) => writer,
                    Err(error) => {
                        let _ = to_main.send(Err(anyhow::Error::from(error).context(cannot)));
                        return;
                    }
                };
                // Nobody listens when the copy has failed otherwise.
                let _ = to_main.send(Ok(Vec::new()));
                for command in queue {
                    let done = writer.run(command);
                    let done =
                        done.map_err(|error| anyhow::Error::from(error).context(cannot.clone()));
                    if to_main.send(done).is_err() {
                        return;
                    }
                }
            })
            .context("cannot start a thread")?;
        Ok(Self { name, destination, temporary, commands, replies, outstanding: 1, count })
    }

    /// Hands a chunk over. Returns one to use for the next.
    pub(super) fn write(&mut self, chunk: Vec<u8>, watch: &mut Watch) -> anyhow::Result<Vec<u8>> {
        let mut spare = Vec::new();
        while self.outstanding > BEHIND {
            spare = self.reply(watch)?;
        }
        self.command(Command::Write(chunk));
        Ok(spare)
    }

    /// Waits until all is written, and for a file, until it is on its disk.
    pub(super) fn finish(&mut self, watch: &mut Watch) -> anyhow::Result<()> {
        while self.outstanding > 0 {
            self.reply(watch)?;
        }
        self.command(Command::Finish);
        let what = format!("{} to reach its disk", self.name);
        let mut wait = watch.wait_for(&what);
        loop {
            match self.replies.recv_timeout(wait.pause()) {
                Ok(reply) => {
                    self.outstanding -= 1;
                    return reply.map(drop);
                }
                // A disk has as much time as it needs: nothing could be done without it.
                Err(RecvTimeoutError::Timeout) => wait.look_only(0),
                Err(RecvTimeoutError::Disconnected) => bail!("cannot write {}", self.name),
            }
        }
    }

    /// Waits for what was handed over, so that all of it counts. That it failed is told by the next
    /// call.
    pub(super) fn settle(&mut self, watch: &mut Watch) {
        while self.outstanding > 0 && self.reply(watch).is_ok() {}
    }

    /// Begins again at the start. `false` when that cannot be: somebody else has the bytes.
    pub(super) fn restart(&mut self, watch: &mut Watch) -> anyhow::Result<bool> {
        while self.outstanding > 0 {
            self.reply(watch)?;
        }
        if self.file().is_none() && self.written() > 0 {
            return Ok(false);
        }
        self.count.store(0, Ordering::Relaxed);
        self.command(Command::Restart);
        self.reply(watch).map(|_| true)
    }

    /// The file that has the bytes and can be read; `None` for what is no file.
    pub(super) fn file(&self) -> Option<PathBuf> {
        match (&self.temporary, &self.destination) {
            (Some(temporary), _) => Some(temporary.path().to_owned()),
            (None, Destination::InPlace(path)) => Some(path.clone()),
            _ => None,
        }
    }

    /// Gives the file its name.
    pub(super) fn commit(&mut self) -> anyhow::Result<()> {
        if let (Some(temporary), Destination::Beside { path, .. }) =
            (self.temporary.take(), &self.destination)
        {
            temporary.rename(path).with_context(|| format!("cannot replace {}", self.name))?;
        }
        Ok(())
    }

    /// Bytes that were written.
    pub(super) fn written(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether what was written is there though the rest is not.
    pub(super) fn is_written_to(&self) -> bool {
        self.temporary.is_none()
    }

    fn command(&mut self, command: Command) {
        // If the thread has ended, its last reply says why.
        let _ = self.commands.send(command);
        self.outstanding += 1;
    }

    fn reply(&mut self, watch: &mut Watch) -> anyhow::Result<Vec<u8>> {
        let what = match &self.destination {
            Destination::Direct(_) => format!("{} to be opened and take bytes", self.name),
            _ => format!("{} to take bytes", self.name),
        };
        let mut wait = watch.wait_for(&what);
        loop {
            match self.replies.recv_timeout(wait.pause()) {
                Ok(reply) => {
                    self.outstanding -= 1;
                    return reply;
                }
                Err(RecvTimeoutError::Timeout) => wait.look(self.count.load(Ordering::Relaxed))?,
                Err(RecvTimeoutError::Disconnected) => bail!("cannot write {}", self.name),
            }
        }
    }
}

/// How a thread gets its file. Opening may block, as a FIFO without a reader does.
enum Opening {
    Opened(File),
    Temporary(File),
    Direct(PathBuf),
    InPlace(PathBuf),
}

struct Writer {
    file: File,
    /// Its length and its being on disk are our business.
    is_regular: bool,
    /// It was empty: blocks of zeros may be left out.
    sparse: bool,
    count: Arc<AtomicU64>,
}

impl Opening {
    fn open(self, count: Arc<AtomicU64>) -> io::Result<Writer> {
        let (is_regular, sparse) = match self {
            Self::Temporary(_) => (true, true),
            Self::InPlace(_) => (true, false),
            Self::Opened(_) | Self::Direct(_) => (false, false),
        };
        let file = match self {
            Self::Opened(file) | Self::Temporary(file) => file,
            Self::Direct(path) => OpenOptions::new().write(true).open(path)?,
            Self::InPlace(path) => {
                OpenOptions::new().write(true).create(true).truncate(false).open(path)?
            }
        };
        Ok(Writer { file, is_regular, sparse, count })
    }
}

impl Writer {
    fn run(&mut self, command: Command) -> io::Result<Vec<u8>> {
        match command {
            Command::Write(mut chunk) => {
                match self.sparse {
                    true => self.write_sparse(&chunk),
                    false => self.write(&chunk),
                }?;
                chunk.clear();
                return Ok(chunk);
            }
            Command::Restart if self.is_regular => {
                self.file.seek(SeekFrom::Start(0))?;
                // What is left out must not show what was there before.
                if self.sparse {
                    self.file.set_len(0)?;
                }
            }
            Command::Finish if self.is_regular => {
                self.file.set_len(self.count.load(Ordering::Relaxed))?;
                self.file.sync_all()?;
            }
            Command::Restart | Command::Finish => {}
        }
        Ok(Vec::new())
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    bytes = &bytes[count..];
                    self.count.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes runs of other blocks, and seeks over blocks of zeros.
    fn write_sparse(&mut self, bytes: &[u8]) -> io::Result<()> {
        const ZEROS: [u8; BLOCK] = [0; BLOCK];
        let mut rest = bytes;
        while !rest.is_empty() {
            let is_hole = |block: &[u8]| block == ZEROS;
            let blocks = || rest.chunks(BLOCK);
            let holes = blocks().take_while(|block| is_hole(block)).count() * BLOCK;
            if holes > 0 {
                self.file.seek(SeekFrom::Current(holes as i64))?;
                self.count.fetch_add(holes as u64, Ordering::Relaxed);
                rest = &rest[holes..];
                continue;
            }
            let length = blocks().take_while(|block| !is_hole(block)).map(<[u8]>::len).sum();
            self.write(&rest[..length])?;
            rest = &rest[length..];
        }
        Ok(())
    }
}
