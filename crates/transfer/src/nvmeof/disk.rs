//! Files that are read and written for others, and the order in which that may be done.
//!
//! What is aligned goes around the page cache where the file lets it, all else through it. Both never
//! share a page. Still a file is not written both ways at once: the cache could keep, and write back, a
//! neighbour's bytes from before.

use std::collections::VecDeque;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::mem;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use millstream_net::file_io::{
    ALIGNMENT, AlignedBuffer, FileEngine, FileIo, FileOperation, Job, JobQueue, open_direct,
};

use crate::Opcode;

/// A file that is open for this process's I/O.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) path: String,
    pub(super) length: u64,
    pub(super) writable: bool,
    cached: Arc<File>,
    /// The same file around the page cache, where that works.
    direct: Option<Arc<File>>,
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    /// Operations that have begun, or wait.
    under_way: usize,
    /// WRITEs under way, all of one kind, and whether that is around the page cache.
    writing: usize,
    writing_direct: bool,
    /// WRITEs that wait for those of the other kind.
    waiting: VecDeque<Job<Work>>,
    /// Written, and to be synced by the next call.
    written: Vec<Job<Work>>,
    /// Written, and being synced.
    syncing: Vec<Job<Work>>,
    sync_under_way: bool,
    /// Calls that have failed, and how the last one did.
    failed_syncs: u64,
    sync_error: Option<io::Error>,
}

/// What belongs to an operation.
pub(super) struct Work {
    file: Arc<OpenFile>,
    /// `None` for what the file has done for itself.
    owner: Option<Arc<dyn Owner>>,
    id: u64,
    durable: bool,
    /// How many syncs of the file had failed when it began.
    failed_syncs: u64,
}

/// Who has operations done.
pub(super) trait Owner: Send + Sync {
    /// One has ended. Must not wait.
    fn done(&self, ended: Ended);
}

/// An operation that is over.
pub(super) struct Ended {
    pub(super) opcode: Opcode,
    pub(super) id: u64,
    pub(super) buffer: AlignedBuffer,
    pub(super) range: Range<usize>,
    pub(super) result: io::Result<()>,
}

/// One operation: `range` of the buffer, from `offset` in the file.
pub(super) struct Operation {
    pub(super) opcode: Opcode,
    pub(super) durable: bool,
    pub(super) id: u64,
    pub(super) offset: u64,
    pub(super) buffer: AlignedBuffer,
    pub(super) range: Range<usize>,
}

/// Only what has bytes in order, and an end.
fn check_kind(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    match () {
        () if kind.is_file() || kind.is_block_device() => Ok(()),
        () if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        () => {
            let what = "it is no regular file and no block device";
            Err(io::Error::new(io::ErrorKind::InvalidInput, what))
        }
    }
}

impl OpenFile {
    /// Where it is: its path may have become another one's since it was opened by that.
    pub(super) fn real_path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.cached.as_raw_fd()))
    }

    /// Opens a file, or a block device, of which the first `length` bytes are offered: all that there
    /// are, unless said. A regular file that is shorter becomes so long, if it is to be written.
    pub(super) fn open(
        path: &Path,
        length: Option<u64>,
        writable: bool,
        direct: bool,
    ) -> io::Result<Self> {
        // Opening a pipe would wait for its other end.
        check_kind(&std::fs::metadata(path)?)?;
        let mut file = OpenOptions::new().read(true).write(writable).open(path)?;
        let metadata = file.metadata()?;
        check_kind(&metadata)?;
        // A device says 0 in its metadata; what has no end, as a terminal, cannot seek.
        let mut present = file.seek(SeekFrom::End(0))?;
        if let Some(length) = length
            && length > present
            && metadata.is_file()
            && writable
        {
            file.set_len(length)?;
            present = length;
        }
        let length = length.unwrap_or(present);
        if length > present {
            let what = format!("it has {present} bytes, fewer than the {length} that are offered");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        if length == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is empty"));
        }
        let direct = direct.then(|| open_direct(&file, writable)).and_then(|opened| match opened {
            Ok(direct) => Some(Arc::new(direct)),
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "I/O goes through the page cache");
                None
            }
        });
        Ok(Self {
            path: path.to_string_lossy().into_owned(),
            length,
            writable,
            cached: Arc::new(file),
            direct,
            state: Mutex::default(),
            idle: Condvar::new(),
        })
    }

    /// Whether I/O around the page cache works.
    pub(super) const fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Whether all of these bytes are offered.
    pub(super) fn holds(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.length)
    }

    /// Lets nothing begin any more, and waits for what has.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        while state.under_way > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self) {
        let mut state = self.lock();
        state.under_way -= 1;
        if state.under_way == 0 && state.closed {
            drop(state);
            self.idle.notify_all();
        }
    }

    /// A WRITE has ended: those may begin that waited for it.
    fn written(&self, queue: &JobQueue<Work>) {
        let mut state = self.lock();
        state.writing -= 1;
        while let Some(next) = state.waiting.front() {
            if state.writing > 0 && state.writing_direct != next.direct {
                return;
            }
            let Some(next) = state.waiting.pop_front() else { return };
            state.begin_write(next.direct);
            drop(state);
            queue.submit(next);
            state = self.lock();
        }
    }

    /// Has what was written synced, by one call for all that wait for one.
    fn sync(self: &Arc<Self>, queue: &JobQueue<Work>, written: Option<Job<Work>>) {
        let mut state = self.lock();
        state.written.extend(written);
        if state.sync_under_way || state.written.is_empty() {
            return;
        }
        state.sync_under_way = true;
        let State { written, syncing, .. } = &mut *state;
        mem::swap(written, syncing);
        drop(state);
        queue.submit(Job {
            file: Arc::clone(&self.cached),
            direct: false,
            operation: FileOperation::Sync,
            offset: 0,
            buffer: AlignedBuffer::default(),
            range: 0..0,
            payload: Work {
                file: Arc::clone(self),
                owner: None,
                id: 0,
                durable: false,
                failed_syncs: 0,
            },
        });
    }

    /// A sync has ended.
    ///
    /// The kernel tells a failure once, and may have dropped any page that was dirty by then. So it is that
    /// of all WRITEs that had begun, and not only of those that waited for this call.
    fn synced(self: &Arc<Self>, queue: &JobQueue<Work>, result: io::Result<()>) {
        let mut state = self.lock();
        if let Err(error) = result {
            state.failed_syncs += 1;
            state.sync_error = Some(error);
        }
        let failed_syncs = state.failed_syncs;
        let error = state.sync_error.as_ref().map(again);
        let mut ended = mem::take(&mut state.syncing);
        drop(state);
        for job in ended.drain(..) {
            let result = match &error {
                Some(error) if job.payload.failed_syncs < failed_syncs => Err(again(error)),
                _ => Ok(()),
            };
            end(job, result);
        }
        let mut state = self.lock();
        // Its room is used again.
        state.syncing = ended;
        state.sync_under_way = false;
        drop(state);
        self.sync(queue, None);
    }
}

impl State {
    const fn begin_write(&mut self, direct: bool) {
        self.writing += 1;
        self.writing_direct = direct;
    }
}

fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => error.kind().into(),
    }
}

/// Tells the owner.
fn end(job: Job<Work>, result: io::Result<()>) {
    let Work { file, owner, id, .. } = job.payload;
    let opcode = match job.operation {
        FileOperation::Read => Opcode::Read,
        FileOperation::Write | FileOperation::Sync => Opcode::Write,
    };
    if let Some(owner) = owner {
        owner.done(Ended { opcode, id, buffer: job.buffer, range: job.range, result });
        file.leave();
    }
}

/// Reads and writes files.
#[derive(Debug)]
pub(super) struct Disk {
    io: FileIo<Work>,
}

impl Disk {
    /// Without an `engine`, the best that the system lets us use.
    pub(super) fn start(engine: Option<FileEngine>) -> io::Result<Self> {
        Ok(Self { io: FileIo::start(engine, done)? })
    }

    /// What does the work.
    pub(super) const fn engine(&self) -> FileEngine {
        self.io.engine()
    }

    /// Begins an operation on bytes that the file holds. Its owner is told, perhaps at once.
    pub(super) fn begin(&self, file: &Arc<OpenFile>, owner: Arc<dyn Owner>, operation: Operation) {
        let Operation { opcode, durable, id, offset, buffer, range } = operation;
        let multiple = |number: usize| number.is_multiple_of(ALIGNMENT);
        let aligned = multiple(offset as usize) && multiple(range.start) && multiple(range.len());
        let (descriptor, direct) = match &file.direct {
            Some(direct) if aligned => (direct, true),
            _ => (&file.cached, false),
        };
        let mut state = file.lock();
        let failed_syncs = state.failed_syncs;
        let owner = Some(owner);
        let payload = Work { file: Arc::clone(file), owner, id, durable, failed_syncs };
        let operation = match opcode {
            Opcode::Read => FileOperation::Read,
            Opcode::Write => FileOperation::Write,
        };
        let file_descriptor = Arc::clone(descriptor);
        let job = Job { file: file_descriptor, direct, operation, offset, buffer, range, payload };
        state.under_way += 1;
        if state.closed {
            drop(state);
            return end(job, Err(io::ErrorKind::NotFound.into()));
        }
        if opcode == Opcode::Write {
            let other_kind = state.writing > 0 && state.writing_direct != direct;
            if other_kind || !state.waiting.is_empty() {
                state.waiting.push_back(job);
                return;
            }
            state.begin_write(direct);
        }
        drop(state);
        self.io.queue().submit(job);
    }
}

fn done(queue: &JobQueue<Work>, job: Job<Work>, result: io::Result<()>) {
    let file = Arc::clone(&job.payload.file);
    match job.operation {
        FileOperation::Sync => file.synced(queue, result),
        FileOperation::Read => end(job, result),
        FileOperation::Write => {
            file.written(queue);
            match job.payload.durable && result.is_ok() {
                true => file.sync(queue, Some(job)),
                false => end(job, result),
            }
        }
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("path", &self.file.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    struct Told(Mutex<mpsc::Sender<Ended>>);

    impl Owner for Told {
        fn done(&self, ended: Ended) {
            self.0.lock().unwrap().send(ended).unwrap();
        }
    }

    fn told() -> (Arc<dyn Owner>, mpsc::Receiver<Ended>) {
        let (sender, receiver) = mpsc::channel();
        (Arc::new(Told(Mutex::new(sender))), receiver)
    }

    /// A file of so many zeros, which is removed when the test has opened it.
    fn file(name: &str, length: u64, direct: bool) -> Arc<OpenFile> {
        let path = std::env::temp_dir().join(format!("millstream-{}-{name}", std::process::id()));
        std::fs::write(&path, vec![0; length as usize]).unwrap();
        let file = OpenFile::open(&path, None, true, direct).unwrap();
        std::fs::remove_file(path).unwrap();
        Arc::new(file)
    }

    fn write(id: u64, offset: u64, length: usize, durable: bool) -> Operation {
        let mut buffer = AlignedBuffer::new(length);
        buffer.bytes_mut().fill(id as u8);
        Operation { opcode: Opcode::Write, durable, id, offset, buffer, range: 0..length }
    }

    /// Aligned and unaligned WRITEs to the same pages, many at once: no byte of a neighbour is lost.
    #[test]
    fn neighbours_of_both_kinds_keep_their_bytes() {
        const PIECE: usize = ALIGNMENT + 512;
        for engine in [None, Some(FileEngine::Threads)] {
            let disk = Disk::start(engine).unwrap();
            let file = file("neighbours", 64 * 2 * ALIGNMENT as u64, true);
            let (owner, results) = told();
            for round in 0..5_u64 {
                for index in 0..64_u64 {
                    // One page, and most of the next one.
                    let base = index * 2 * ALIGNMENT as u64;
                    let id = 1 + (round * 64 + index) % 250;
                    let page = write(id, base, ALIGNMENT, index % 8 == 0);
                    disk.begin(&file, Arc::clone(&owner), page);
                    let rest = write(id, base + ALIGNMENT as u64, PIECE - ALIGNMENT, false);
                    disk.begin(&file, Arc::clone(&owner), rest);
                }
                for _ in 0..128 {
                    results.recv_timeout(Duration::from_secs(60)).unwrap().result.unwrap();
                }
                let mut bytes = vec![0; 2 * ALIGNMENT];
                for index in 0..64_u64 {
                    file.cached.read_exact_at(&mut bytes, index * 2 * ALIGNMENT as u64).unwrap();
                    let id = (1 + (round * 64 + index) % 250) as u8;
                    assert!(bytes[..PIECE].iter().all(|&byte| byte == id), "{round} {index}");
                    assert!(bytes[PIECE..].iter().all(|&byte| byte == 0), "{round} {index}");
                }
            }
        }
    }

    #[test]
    fn synced_writes_all_end_and_share_calls() {
        let disk = Disk::start(None).unwrap();
        let file = file("synced", 1 << 20, false);
        let (owner, results) = told();
        for id in 0..200 {
            disk.begin(&file, Arc::clone(&owner), write(id, id * 5000, 5000, true));
        }
        let mut seen = [false; 200];
        for _ in 0..200 {
            let Ended { id, result, .. } = results.recv_timeout(Duration::from_secs(60)).unwrap();
            result.unwrap();
            assert!(!mem::replace(&mut seen[id as usize], true));
        }
        file.close();
    }

    /// The kernel tells of a failure once, to whoever syncs next: a WRITE that had begun by then may be lost
    /// too, though its own sync succeeds.
    #[test]
    fn a_failed_sync_is_that_of_all_writes_that_had_begun() {
        let disk = Disk::start(None).unwrap();
        let file = file("failed", 1 << 20, false);
        let (owner, results) = told();
        let written = |id| {
            let state = file.lock();
            let work = Work {
                file: Arc::clone(&file),
                owner: Some(Arc::clone(&owner)),
                id,
                durable: true,
                failed_syncs: state.failed_syncs,
            };
            drop(state);
            let Operation { offset, buffer, range, .. } = write(id, 0, 4096, true);
            let operation = FileOperation::Write;
            let descriptor = Arc::clone(&file.cached);
            let direct = false;
            Job { file: descriptor, direct, operation, offset, buffer, range, payload: work }
        };
        // A call serves the first WRITE; the second ends before it does.
        let (first, second) = (written(1), written(2));
        let mut state = file.lock();
        state.under_way = 2;
        state.writing = 1;
        state.sync_under_way = true;
        state.syncing.push(first);
        drop(state);
        done(disk.io.queue(), second, Ok(()));
        file.synced(disk.io.queue(), Err(io::Error::from_raw_os_error(5)));
        for id in [1, 2] {
            let ended = results.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!((ended.id, ended.result.unwrap_err().raw_os_error()), (id, Some(5)));
        }
        // What begins later has nothing to do with it.
        disk.begin(&file, Arc::clone(&owner), write(3, 0, 4096, true));
        results.recv_timeout(Duration::from_secs(60)).unwrap().result.unwrap();
        file.close();
    }

    #[test]
    fn a_closed_file_is_not_touched() {
        let disk = Disk::start(None).unwrap();
        let file = file("closed", 4096, false);
        let (owner, results) = told();
        for id in 0..50 {
            disk.begin(&file, Arc::clone(&owner), write(id, 0, 4096, true));
        }
        file.close();
        assert_eq!(results.try_iter().count(), 50, "what has begun is over");
        disk.begin(&file, owner, write(99, 0, 4096, false));
        let Ended { id, result, .. } = results.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!((id, result.unwrap_err().kind()), (99, io::ErrorKind::NotFound));
    }

    #[test]
    fn what_cannot_be_offered_is_refused() {
        let folder = std::env::temp_dir();
        let open = |path: &Path, length| OpenFile::open(path, length, false, true).unwrap_err();
        assert_eq!(open(&folder, None).kind(), io::ErrorKind::IsADirectory);
        assert_eq!(open(&folder.join("millstream-none"), None).kind(), io::ErrorKind::NotFound);
        let path = folder.join(format!("millstream-{}-short", std::process::id()));
        std::fs::write(&path, []).unwrap();
        assert!(open(&path, None).to_string().contains("empty"));
        std::fs::write(&path, b"abc").unwrap();
        assert!(open(&path, Some(4)).to_string().contains("fewer than the 4"));
        let longer = OpenFile::open(&path, Some(5000), true, false).unwrap();
        assert_eq!((longer.length, std::fs::metadata(&path).unwrap().len()), (5000, 5000));
        assert!(longer.holds(4999, 1) && !longer.holds(5000, 1) && !longer.holds(u64::MAX, 2));
        std::fs::remove_file(path).unwrap();
    }
}
