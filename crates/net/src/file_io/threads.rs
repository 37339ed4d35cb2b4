//! Jobs done by threads, with system calls that every system has.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};

use super::progress::advance;
use super::{FileOperation, Job, JobQueue};
use crate::ends_between_forks;

/// So many operations are under way at a time.
const THREADS: usize = 4;

pub(super) fn start<T: Send + 'static>(
    queue: &Arc<JobQueue<T>>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::with_capacity(THREADS);
    for _ in 0..THREADS {
        let shared = Arc::clone(queue);
        match thread::Builder::new()
            .name("file".to_owned())
            .spawn(ends_between_forks(move || work(&shared)))
        {
            Ok(thread) => threads.push(thread),
            // Fewer do it as well.
            Err(error) if threads.is_empty() => return Err(error),
            Err(_) => break,
        }
    }
    Ok(threads)
}

fn work<T>(queue: &JobQueue<T>) {
    let mut state = queue.lock();
    loop {
        if let Some(mut job) = state.take() {
            drop(state);
            let result = perform(&mut job);
            queue.finish(job, result);
            state = queue.lock();
        } else if state.is_over() {
            return;
        } else {
            state = queue.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn perform<T>(job: &mut Job<T>) -> io::Result<()> {
    let mut done = 0;
    loop {
        let (rest, offset) = (job.range.start + done..job.range.end, job.offset + done as u64);
        let result = match job.operation {
            FileOperation::Read => job.file.read_at(&mut job.buffer.bytes_mut()[rest], offset),
            FileOperation::Write => job.file.write_at(&job.buffer.bytes()[rest], offset),
            FileOperation::Sync => job.file.sync_data().map(|()| 0),
        };
        if let Some(result) = advance(job, &mut done, result) {
            return result;
        }
    }
}
