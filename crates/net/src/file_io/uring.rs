//! Jobs done by the kernel's io_uring(7): one thread hands them in and takes the results.

use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::progress::advance;
use super::{FileOperation, Job, JobQueue};
use crate::descriptors::EventDescriptor;
use crate::ends_between_forks;

/// So many operations are under way at a time.
const DEPTH: usize = 64;

/// What the watch for new jobs has in place of a slot's number.
const WAKE: u64 = u64::MAX;

/// Fails where the system does not let us.
pub(super) fn start<T: Send + 'static>(queue: &Arc<JobQueue<T>>) -> io::Result<JoinHandle<()>> {
    let event = EventDescriptor::new()?;
    let shared = Arc::clone(queue);
    let (told, started) = mpsc::channel();
    let work = move || {
        // Made by the thread that uses it: the kernel can do with less locking then.
        let ring = match open() {
            Ok(ring) => ring,
            Err(error) => return drop(told.send(Err(error))),
        };
        let _ = shared.event.set(event);
        let _ = told.send(Ok(()));
        Worker { ring, queue: &shared, slots: Slots::new(), watching: false }.work();
    };
    let thread = thread::Builder::new().name("file".to_owned()).spawn(ends_between_forks(work))?;
    let gone = |_| io::Error::other("its thread has ended");
    started.recv().map_err(gone)??;
    Ok(thread)
}

fn open() -> io::Result<IoUring> {
    let ring = IoUring::new(2 * DEPTH as u32)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed =
        [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::PollAdd::CODE];
    match needed.iter().all(|&code| probe.is_supported(code)) {
        true => Ok(ring),
        false => Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel is too old")),
    }
}

struct Worker<'a, T> {
    ring: IoUring,
    queue: &'a JobQueue<T>,
    slots: Slots<T>,
    /// Whether the ring watches for new jobs.
    watching: bool,
}

/// The jobs that the kernel knows of.
struct Slots<T> {
    jobs: Vec<Option<(Job<T>, usize)>>,
    free: Vec<usize>,
}

impl<T> Slots<T> {
    fn new() -> Self {
        Self { jobs: (0..DEPTH).map(|_| None).collect(), free: (0..DEPTH).collect() }
    }
}

impl<T> Drop for Slots<T> {
    fn drop(&mut self) {
        // After a panic only. The kernel may still use these buffers: they are nobody else's any more.
        self.jobs.drain(..).for_each(mem::forget);
    }
}

impl<T> Worker<'_, T> {
    fn work(mut self) {
        loop {
            let mut state = self.queue.lock();
            state.asleep = false;
            while let Some(slot) = self.slots.free.last().copied() {
                let Some(job) = state.take() else { break };
                self.slots.free.pop();
                self.slots.jobs[slot] = Some((job, 0));
                let pushed = self.push(slot);
                debug_assert!(pushed, "the ring has room for all slots");
            }
            if state.is_over() {
                return;
            }
            // With no slot left there is no use for new jobs.
            state.asleep = !self.slots.free.is_empty();
            drop(state);
            self.wait();
            self.reap();
        }
    }

    /// Hands the rest of a job to the ring.
    fn push(&mut self, slot: usize) -> bool {
        let Some((job, done)) = &mut self.slots.jobs[slot] else { return true };
        let file = types::Fd(job.file.as_raw_fd());
        let rest = &mut job.buffer.bytes_mut()[job.range.clone()][*done..];
        let (pointer, length) = (rest.as_mut_ptr(), rest.len() as u32);
        let offset = job.offset + *done as u64;
        let entry = match job.operation {
            FileOperation::Read => opcode::Read::new(file, pointer, length).offset(offset).build(),
            FileOperation::Write => {
                opcode::Write::new(file, pointer, length).offset(offset).build()
            }
            FileOperation::Sync => {
                opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build()
            }
        };
        self.push_entry(&entry.user_data(slot as u64))
    }

    fn push_entry(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: file and buffer belong to a job that stays in its slot until the kernel has told the
        // end of it, and whose buffer nobody touches meanwhile. A watch has no buffer, and its
        // descriptor lives as long as the queue.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Sleeps until something is done, or there are new jobs.
    fn wait(&mut self) {
        if let Some(event) = self.queue.event.get().filter(|_| !self.watching) {
            let event = types::Fd(event.watched().as_raw_fd());
            let watch = opcode::PollAdd::new(event, libc::POLLIN as u32).build().user_data(WAKE);
            self.watching = self.push_entry(&watch);
        }
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
                ) => {}
            Err(error) => {
                tracing::error!(%error, "io_uring takes nothing; trying again");
                thread::sleep(std::time::Duration::from_millis(20));
            }
        }
    }

    /// Takes what is done.
    fn reap(&mut self) {
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            if completion.user_data() == WAKE {
                self.watching = false;
                if let Some(event) = self.queue.event.get() {
                    event.drain();
                }
                continue;
            }
            let slot = completion.user_data() as usize;
            let Some((job, done)) = self.slots.jobs.get_mut(slot).and_then(Option::as_mut) else {
                continue;
            };
            let result = match completion.result() {
                error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                count => Ok(count as usize),
            };
            let Some(result) = advance(job, done, result) else {
                self.push(slot);
                continue;
            };
            if let Some((job, _)) = self.slots.jobs[slot].take() {
                self.slots.free.push(slot);
                self.queue.finish(job, result);
            }
        }
    }
}
