//! Reads and writes of files that do not hold up whoever asks for them.
//!
//! A [`FileIo`] takes [`Job`]s and does them in any order, by io_uring, or by threads where the kernel or
//! a container forbids that. Each job owns its buffer while it is under way, and comes back with it.

mod buffer;
mod progress;
mod queue;
mod threads;
mod uring;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::str::FromStr;
use std::sync::Arc;
use std::thread::JoinHandle;

use thiserror::Error;

pub use buffer::{ALIGNMENT, AlignedBuffer};
pub use queue::JobQueue;

/// What does the work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FileEngine {
    /// One thread, and the kernel's io_uring(7).
    IoUring,
    /// Some threads, with pread(2) and pwrite(2).
    Threads,
}

/// A name that is of no engine.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("{0:?} is none of io_uring and threads")]
pub struct UnknownFileEngine(String);

impl FromStr for FileEngine {
    type Err = UnknownFileEngine;

    fn from_str(text: &str) -> Result<Self, UnknownFileEngine> {
        match text {
            "io_uring" => Ok(Self::IoUring),
            "threads" => Ok(Self::Threads),
            _ => Err(UnknownFileEngine(text.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for FileEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        })
    }
}

/// What is done to a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FileOperation {
    /// From the file into the buffer.
    Read,
    /// From the buffer into the file.
    Write,
    /// What was written before goes to the device: fdatasync(2).
    Sync,
}

/// One operation.
#[derive(Debug)]
pub struct Job<T> {
    /// On what.
    pub file: Arc<File>,
    /// Whether that is around the page cache: [`open_direct`].
    pub direct: bool,
    /// What.
    pub operation: FileOperation,
    /// Of the first byte in the file.
    pub offset: u64,
    /// The bytes, if any.
    pub buffer: AlignedBuffer,
    /// Which of the buffer's.
    pub range: Range<usize>,
    /// What the owner wants to know when it is done.
    pub payload: T,
}

/// Takes the result of a job. It may be that of another thread, and may hand in more jobs, but must not
/// wait.
pub trait JobsDone<T>: Fn(&JobQueue<T>, Job<T>, io::Result<()>) + Send + Sync + 'static {}

impl<T, F: Fn(&JobQueue<T>, Job<T>, io::Result<()>) + Send + Sync + 'static> JobsDone<T> for F {}

/// Does jobs. Dropping it does those that it has taken, and ends its threads: it waits for that, unless
/// the owner of a job drops it when it is told.
pub struct FileIo<T: Send + 'static> {
    engine: FileEngine,
    queue: Arc<JobQueue<T>>,
    threads: Vec<JoinHandle<()>>,
}

impl<T: Send + 'static> FileIo<T> {
    /// Begins to take jobs. Without an `engine`, io_uring if the system lets us.
    pub fn start(engine: Option<FileEngine>, done: impl JobsDone<T>) -> io::Result<Self> {
        let queue = Arc::new(JobQueue::new(Box::new(done)));
        let by_threads = || {
            let threads = threads::start(&queue)?;
            Ok(Self { engine: FileEngine::Threads, queue: Arc::clone(&queue), threads })
        };
        if engine == Some(FileEngine::Threads) {
            return by_threads();
        }
        match uring::start(&queue) {
            Ok(thread) => Ok(Self { engine: FileEngine::IoUring, queue, threads: [thread].into() }),
            Err(error) if engine == Some(FileEngine::IoUring) => {
                let what = format!("the system does not let us use io_uring: {error}");
                Err(io::Error::new(error.kind(), what))
            }
            Err(error) => {
                tracing::debug!(%error, "no io_uring: threads read and write files");
                by_threads()
            }
        }
    }

    /// What does the work.
    pub const fn engine(&self) -> FileEngine {
        self.engine
    }

    /// Where jobs are handed in.
    pub const fn queue(&self) -> &Arc<JobQueue<T>> {
        &self.queue
    }
}

impl<T: Send + 'static> fmt::Debug for FileIo<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileIo").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Drop for FileIo<T> {
    fn drop(&mut self) {
        self.queue.stop();
        let own = std::thread::current().id();
        // One of them would wait for itself, and each other for the job that this one is at. They end
        // by themselves.
        if self.threads.iter().any(|thread| thread.thread().id() == own) {
            return;
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Opens a file that is open once more, for I/O around the page cache; why that does not work, if so.
///
/// Offsets, lengths and buffers must be multiples of [`ALIGNMENT`] then. It is a page at least, so that
/// nothing that goes around the cache shares a page with something that goes through it.
pub fn open_direct(file: &File, writable: bool) -> io::Result<File> {
    // The name may be another file's by now.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = OpenOptions::new();
    let direct = options.read(true).write(writable).custom_flags(libc::O_DIRECT).open(path)?;
    // Some file systems say only here that they cannot.
    let mut probe = AlignedBuffer::new(ALIGNMENT);
    direct.read_at(probe.bytes_mut(), 0)?;
    Ok(direct)
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};
    use std::time::Duration;

    use super::*;

    const ENGINES: [FileEngine; 2] = [FileEngine::IoUring, FileEngine::Threads];

    /// A file of so many bytes that nobody else has, and that has no name any more.
    fn file(length: usize) -> Arc<File> {
        let path = std::env::temp_dir()
            .join(format!("millstream-file-io-{}-{length}", std::process::id()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let bytes: Vec<u8> = (0..length).map(|index| (index / 7) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        Arc::new(file)
    }

    type Results = mpsc::Receiver<(Job<usize>, io::Result<()>)>;

    /// `None` where the system has no such engine.
    fn start(engine: FileEngine) -> Option<(FileIo<usize>, Results)> {
        let (sender, receiver) = mpsc::channel();
        let done = move |_: &JobQueue<usize>, job, result| sender.send((job, result)).unwrap();
        match FileIo::start(Some(engine), done) {
            Ok(io) => Some((io, receiver)),
            Err(error) if engine == FileEngine::IoUring => {
                assert!(
                    std::env::var("MILLSTREAM_REQUIRE").as_deref() != Ok("all"),
                    "no io_uring: {error}"
                );
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn job(file: &Arc<File>, operation: FileOperation, offset: u64, length: usize) -> Job<usize> {
        let buffer = AlignedBuffer::new(length.next_multiple_of(ALIGNMENT));
        let file = Arc::clone(file);
        Job { file, direct: false, operation, offset, buffer, range: 0..length, payload: 0 }
    }

    #[test]
    fn many_jobs_come_back_with_their_bytes() {
        for engine in ENGINES {
            let Some((io, results)) = start(engine) else { continue };
            let file = file(1 << 20);
            for index in 0..1000 {
                let mut job = job(&file, FileOperation::Read, index as u64 * 1000 + 3, 900);
                job.range = 100..1000;
                job.payload = index;
                io.queue().submit(job);
            }
            let mut seen = vec![false; 1000];
            for _ in 0..1000 {
                let (job, result) = results.recv_timeout(Duration::from_secs(60)).unwrap();
                result.unwrap();
                assert_eq!((job.offset, &job.range), (job.payload as u64 * 1000 + 3, &(100..1000)));
                let mut bytes = vec![0; 900];
                file.read_exact_at(&mut bytes, job.offset).unwrap();
                assert_eq!(job.buffer.bytes()[job.range.clone()], bytes);
                assert!(!std::mem::replace(&mut seen[job.payload], true));
            }
            drop(io);
        }
    }

    #[test]
    fn what_was_taken_is_done_before_the_end() {
        for engine in ENGINES {
            let Some((io, results)) = start(engine) else { continue };
            let file = file(4096);
            for index in 0..500_usize {
                let mut write = job(&file, FileOperation::Write, index as u64 * 8, 8);
                write.buffer.bytes_mut()[..8].copy_from_slice(&index.to_le_bytes());
                io.queue().submit(write);
            }
            io.queue().submit(job(&file, FileOperation::Sync, 0, 0));
            let queue = Arc::clone(io.queue());
            drop(io);
            assert_eq!(results.try_iter().filter(|(_, result)| result.is_ok()).count(), 501);
            for index in 0..500_usize {
                let mut bytes = [0; 8];
                file.read_exact_at(&mut bytes, index as u64 * 8).unwrap();
                assert_eq!(usize::from_le_bytes(bytes), index);
            }
            queue.submit(job(&file, FileOperation::Read, 0, 1));
            assert!(results.try_recv().unwrap().1.is_err(), "it has ended");
        }
    }

    /// As when the last who has it is told of the end of the last job.
    #[test]
    fn it_may_be_dropped_by_who_is_told() {
        for engine in ENGINES {
            let Some(probe) = start(engine) else { continue };
            drop(probe);
            let (told, ended) = mpsc::channel();
            let itself: Arc<Mutex<Option<FileIo<usize>>>> = Arc::default();
            let held = Arc::clone(&itself);
            let done = move |_: &JobQueue<usize>, _: Job<usize>, result: io::Result<()>| {
                result.unwrap();
                let itself = held.lock().unwrap().take();
                drop(itself);
                told.send(()).unwrap();
            };
            let mut holder = itself.lock().unwrap();
            let io = FileIo::start(Some(engine), done).unwrap();
            let queue = Arc::clone(io.queue());
            *holder = Some(io);
            drop(holder);
            queue.submit(job(&file(4096), FileOperation::Read, 0, 4096));
            ended.recv_timeout(Duration::from_secs(60)).unwrap();
            // Their threads are the last who have a sender.
            drop((queue, itself));
            let end = ended.recv_timeout(Duration::from_secs(60));
            assert_eq!(end, Err(mpsc::RecvTimeoutError::Disconnected), "{engine}");
        }
    }

    /// Around the page cache less than a block can be had, but not asked for.
    #[test]
    fn the_end_of_a_file_within_a_block_is_told_as_such() {
        let file = file(ALIGNMENT + 100);
        let direct = match open_direct(&file, true) {
            Ok(direct) => Arc::new(direct),
            Err(error) => return eprintln!("skipped: no O_DIRECT here: {error}"),
        };
        for engine in ENGINES {
            let Some((io, results)) = start(engine) else { continue };
            io.queue().submit(Job {
                direct: true,
                ..job(&direct, FileOperation::Read, 0, 2 * ALIGNMENT)
            });
            let (_, result) = results.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{engine}");
        }
    }

    #[test]
    fn errors_are_those_of_the_system() {
        for engine in ENGINES {
            let Some((io, results)) = start(engine) else { continue };
            let of = |job| {
                io.queue().submit(job);
                results.recv_timeout(Duration::from_secs(60)).unwrap().1.unwrap_err()
            };
            let end = of(job(&file(1000), FileOperation::Read, 990, 20));
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
            let full = Arc::new(OpenOptions::new().write(true).open("/dev/full").unwrap());
            let full = of(job(&full, FileOperation::Write, 0, 20));
            assert_eq!(full.raw_os_error(), Some(libc::ENOSPC), "{engine}");
            let closed = Arc::new(File::open("/dev/null").unwrap());
            let closed = of(job(&closed, FileOperation::Write, 0, 20));
            assert_eq!(closed.raw_os_error(), Some(libc::EBADF));
        }
    }

    #[test]
    fn around_the_page_cache_and_through_it_the_bytes_are_the_same() {
        let file = file(3 * ALIGNMENT);
        let direct = match open_direct(&file, true) {
            Ok(direct) => Arc::new(direct),
            Err(error) => return eprintln!("skipped: no O_DIRECT here: {error}"),
        };
        for engine in ENGINES {
            let Some((io, results)) = start(engine) else { continue };
            let mut write = job(&direct, FileOperation::Write, ALIGNMENT as u64, ALIGNMENT);
            write.direct = true;
            write.buffer.bytes_mut().fill(77);
            io.queue().submit(write);
            results.recv_timeout(Duration::from_secs(60)).unwrap().1.unwrap();
            let mut bytes = vec![0; 3 * ALIGNMENT];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes[ALIGNMENT..2 * ALIGNMENT].iter().all(|&byte| byte == 77));
            assert_eq!(bytes[ALIGNMENT - 1], ((ALIGNMENT - 1) / 7) as u8);
            assert_eq!(bytes[2 * ALIGNMENT], (2 * ALIGNMENT / 7) as u8);
        }
    }

    #[test]
    fn names_of_engines() {
        for engine in ENGINES {
            assert_eq!(engine.to_string().parse(), Ok(engine));
        }
        assert!("uring".parse::<FileEngine>().is_err());
    }
}
