//! Access to memory that others may be accessing, and that may be gone.
//!
//! **Races.** Registered memory is written by peers and by other threads at any time. For Rust's memory
//! model each access here is one of single bytes, atomic and relaxed: what is read during a write is a
//! mix of old and new bytes, and nothing worse. The instructions that do it are assembly, of which the
//! compiler assumes nothing; elsewhere than on x86-64 they are such atomic accesses indeed.
//!
//! **Faults.** Memory that a caller brought can be unmapped, protected, or be a file that has become shorter.
//! Then the processor faults, and the kernel sends SIGSEGV or SIGBUS, which end a process. After
//! [`recover`] such a fault ends the access only, and its address is told: the handler finds that the
//! instruction is one of those here, and goes on at the end of their function, as the Linux kernel does in its own
//! copies to and from processes. All these functions are leaves without a stack frame, so that
//! nothing is lost by leaving them anywhere. Faults of other instructions go to the handler of before.
//! A thread that blocks SIGSEGV or SIGBUS has no recovery: the kernel calls no handler there, and ends the process.

#[cfg(target_arch = "x86_64")]
mod assembly;
#[cfg(not(target_arch = "x86_64"))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod signals;

use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;

#[cfg(target_arch = "x86_64")]
use self::assembly as machine;
#[cfg(not(target_arch = "x86_64"))]
use self::portable as machine;
#[cfg(target_arch = "x86_64")]
pub use self::signals::recover;

/// Whether faults can be recovered from on this architecture.
pub const RECOVERS: bool = cfg!(target_arch = "x86_64");

/// Pages are no smaller than this.
const PAGE: usize = 4096;

/// Whether what is written goes through the caches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Caching {
    /// As ever: for what fits there, and may be read soon.
    Through,
    /// Around them, where the processor can: for much at once. The ranges must not overlap. Memory is
    /// not read before it is overwritten, so a third of the traffic goes away.
    Around,
}

/// Memory was not there, or could not be written.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("the memory at {address:#x} is not mapped, or cannot be accessed so")]
pub struct Fault {
    /// What was accessed.
    pub address: u64,
}

/// Faults end the process: there is no recovery on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub fn recover() -> std::io::Result<()> {
    Ok(())
}

/// Copies memory, which may overlap unless it goes around the caches. After a fault any part of it has
/// been copied.
///
/// # Safety
/// No reference may be held to bytes of `to`, and none that excludes reading to bytes of `from`. If
/// [`recover`] has not succeeded, all bytes of both ranges must be mapped, and those of `to` writable. If
/// it has, what is mapped there must be meant: who unmaps memory and maps other memory there, has that
/// copied or overwritten.
#[inline]
pub unsafe fn copy(
    from: *const u8,
    to: *mut u8,
    length: usize,
    caching: Caching,
) -> Result<(), Fault> {
    // SAFETY: the caller promises it; `around` is not more than the length.
    unsafe {
        let around = match caching {
            Caching::Through => 0,
            Caching::Around => machine::copy_around(from, to, length)?,
        };
        let (from, to, length) =
            (from.wrapping_add(around), to.wrapping_add(around), length - around);
        match to.addr().wrapping_sub(from.addr()) < length {
            true => machine::copy_backward(from, to, length),
            false => machine::copy_forward(from, to, length),
        }
    }
}

/// How many ranges callers give to [`copy_together`] at a time, at most.
pub const TOGETHER: usize = 32;

/// Copies ranges of one length, a line of each in turn, around the caches where the processor can, and where they are at least
/// four: each is a stream for its prefetchers, which begin anew with every page. After a fault any part of them has been
/// copied. Whoever is told of what was copied sees it only after a [`fence`] of this thread: one for many such copies.
///
/// # Safety
/// As of [`copy`] for each. Where one goes to what is another's, any of both may be there afterwards.
pub unsafe fn copy_together(ranges: &[(*const u8, *mut u8)], length: usize) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    unsafe { machine::copy_together(ranges, length) }
}

/// What [`copy_together`] has written on this thread is there before whatever this thread writes from now on. It waits for
/// memory, so it is not done for each copy.
pub fn fence() {
    machine::fence();
}

/// Whether a probe of this process has ever found memory that is gone.
static FAULTED: AtomicBool = AtomicBool::new(false);

/// Whether a probe of this process has ever found memory that is gone. Until then, who probes memory
/// anyway before it is used need not do so when it is named.
pub fn has_faulted() -> bool {
    FAULTED.load(Ordering::Relaxed)
}

/// Reads a byte of each page of a range.
///
/// # Safety
/// As for what [`copy`] reads.
pub unsafe fn probe(address: *const u8, length: usize) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    pages(address.addr(), length)
        .try_for_each(|offset| unsafe { machine::probe(address.wrapping_add(offset)) })
        .inspect_err(|_| FAULTED.store(true, Ordering::Relaxed))
}

/// Writes a byte of each page of a range, as it is there.
///
/// # Safety
/// As for what [`copy`] writes.
pub unsafe fn probe_write(address: *mut u8, length: usize) -> Result<(), Fault> {
    // SAFETY: the caller promises it.
    pages(address.addr(), length)
        .try_for_each(|offset| unsafe { machine::probe_write(address.wrapping_add(offset)) })
}

/// The first byte of a range in each of its pages, as offsets.
fn pages(address: usize, length: usize) -> impl Iterator<Item = usize> {
    let next =
        move |offset: &usize| offset.checked_add(PAGE - address.wrapping_add(*offset) % PAGE);
    std::iter::successors(Some(0), next).take_while(move |&offset| offset < length)
}

#[cfg(test)]
mod tests;
