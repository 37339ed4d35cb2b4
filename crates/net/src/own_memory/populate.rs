//! Pages, before they are needed (madvise(2)).

use std::io;
use std::ptr;
use std::thread;

use super::page_length;
use crate::ends_between_forks;

/// So much is a thread's work at least.
const SHARE: u64 = 16 << 20;

/// Gives a range all its pages, as if each was written as it is, on up to so many threads. The kernel clears
/// pages on the thread that asks, which takes as long as writing all of it.
pub fn populate(address: u64, length: u64, threads: usize) -> io::Result<()> {
    let page = page_length();
    let first = address - address % page;
    let end = address
        .checked_add(length)
        .and_then(|end| end.checked_next_multiple_of(page))
        .ok_or(io::ErrorKind::InvalidInput)?;
    let threads = (threads as u64).clamp(1, (end - first).div_ceil(SHARE).max(1));
    let share = ((end - first) / threads).next_multiple_of(page).max(page);
    let starts = || (first..end).step_by(share as usize);
    thread::scope(|scope| {
        let work = |start| move || populate_share(start, share.min(end - start));
        let begin = |start| {
            thread::Builder::new()
                .name("populate".to_owned())
                .spawn_scoped(scope, ends_between_forks(work(start)))
        };
        // The first is ours, and what has no thread, too.
        let others: Vec<_> = starts().skip(1).map(|start| (start, begin(start))).collect();
        let mut result = work(first)();
        for (start, other) in others {
            let populated = match other {
                Ok(other) => other.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())),
                Err(_) => work(start)(),
            };
            result = result.and(populated);
        }
        result
    })
}

fn populate_share(start: u64, length: u64) -> io::Result<()> {
    loop {
        let pointer = ptr::with_exposed_provenance_mut(start as usize);
        // SAFETY: it changes no byte, and touches nothing where nothing is mapped.
        let done = unsafe { libc::madvise(pointer, length as usize, libc::MADV_POPULATE_WRITE) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
