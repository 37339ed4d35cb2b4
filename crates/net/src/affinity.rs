//! Which processors a thread runs on. Two ends of a ping-pong are measured on two of them.

use std::io;
use std::mem;

/// The processors that this thread may run on, in ascending order.
pub fn processors() -> io::Result<Vec<usize>> {
    let set = affinity()?;
    let count = 8 * mem::size_of_val(&set);
    // SAFETY: the numbers are within the set.
    Ok((0..count).filter(|&number| unsafe { libc::CPU_ISSET(number, &set) }).collect())
}

/// Lets this thread, and the threads and processes that it starts from now on, run on one processor
/// only, until the result is dropped: then this thread runs where it did before.
pub fn pin(processor: usize) -> io::Result<Pinned> {
    let before = affinity()?;
    if processor >= 8 * mem::size_of_val(&before) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: plain old data, of which zeros are a valid value: no processors.
    let mut set = unsafe { mem::zeroed() };
    // SAFETY: the number is within the set.
    unsafe { libc::CPU_SET(processor, &mut set) };
    set_affinity(&set)?;
    Ok(Pinned(before))
}

/// A thread runs on one processor while this is there.
#[must_use]
pub struct Pinned(libc::cpu_set_t);

impl Drop for Pinned {
    fn drop(&mut self) {
        // It was allowed before. If it is no longer, the thread stays where it is.
        let _ = set_affinity(&self.0);
    }
}

fn affinity() -> io::Result<libc::cpu_set_t> {
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut set = unsafe { mem::zeroed() };
    // SAFETY: the pointer is to a set of this size, of this thread (0).
    match unsafe { libc::sched_getaffinity(0, mem::size_of_val(&set), &raw mut set) } {
        0 => Ok(set),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_affinity(set: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: as above; the set is only read.
    match unsafe { libc::sched_setaffinity(0, mem::size_of_val(set), set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_pinned_for_a_while() {
        let before = processors().unwrap();
        let last = *before.last().unwrap();
        let pinned = pin(last).unwrap();
        assert_eq!(processors().unwrap(), [last]);
        let child = std::thread::spawn(|| processors().unwrap());
        assert_eq!(child.join().unwrap(), [last]);
        drop(pinned);
        assert_eq!(processors().unwrap(), before);
        assert!(pin(1 << 20).is_err());
    }
}
