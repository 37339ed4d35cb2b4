//! Copies in blocks, within a process and to or from another one.

use std::hint::black_box;
use std::io;
use std::ptr;
use std::slice;
use std::time::Duration;

use super::{CopyReport, Usage};
use crate::own_memory::Pages;

/// Bytes of a copy that gives pages.
const PAGES: usize = 1 << 20;

/// Which way [`process_copy`] goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CopyDirection {
    /// process_vm_readv(2).
    Read,
    /// process_vm_writev(2).
    Write,
}

/// Copies so many bytes in blocks of this length, again and again for `duration`, on this thread.
pub fn block_copy(duration: Duration, block: usize, working_set: usize) -> io::Result<CopyReport> {
    BlockCopies::new(working_set)?.measure(duration, block, working_set)
}

/// The same between this process and another one, a system call a block.
pub fn process_copy(
    duration: Duration,
    direction: CopyDirection,
    block: usize,
    working_set: usize,
) -> io::Result<CopyReport> {
    ProcessCopies::new(working_set)?.measure(duration, direction, block, working_set)
}

/// Memory with pages as those of a transfer engine's buffers, so that only copies are compared.
#[derive(Debug)]
struct Block(Pages);

impl Block {
    fn new(length: usize, byte: u8) -> io::Result<Self> {
        let mut block = Self(Pages::new(length)?);
        block.bytes().fill(byte);
        Ok(block)
    }

    fn bytes(&mut self) -> &mut [u8] {
        let (pointer, length) = (self.0.pointer().as_ptr(), self.0.length());
        // SAFETY: bytes that are there, of which any value is valid, and that only this has, which is borrowed
        // exclusively.
        unsafe { slice::from_raw_parts_mut(pointer, length) }
    }
}

/// Copies in blocks within this process, of memory that is used for all of them.
#[derive(Debug)]
pub struct BlockCopies {
    source: Block,
    destination: Block,
}

impl BlockCopies {
    /// With so many bytes of memory, twice.
    pub fn new(working_set: usize) -> io::Result<Self> {
        Ok(Self { source: Block::new(working_set, 1)?, destination: Block::new(working_set, 2)? })
    }

    /// Copies in blocks of this length, which go round the first so many bytes, for `duration`.
    pub fn measure(
        &mut self,
        duration: Duration,
        block: usize,
        working_set: usize,
    ) -> io::Result<CopyReport> {
        let (source, destination) = (self.source.bytes(), self.destination.bytes());
        let blocks = blocks(block, working_set.min(source.len()))?;
        repeat(duration, block, blocks, |at| {
            destination[at..at + block].copy_from_slice(black_box(&source[at..at + block]));
            black_box(&mut destination[at..at + block]);
            Ok(())
        })
    }
}

/// Copies between this process and another one, a system call a block, of memory that is used for all of
/// them.
#[derive(Debug)]
pub struct ProcessCopies {
    here: Block,
    there: Other,
}

impl ProcessCopies {
    /// With so many bytes of memory on each side.
    pub fn new(working_set: usize) -> io::Result<Self> {
        let mut new = Self { here: Block::new(working_set, 1)?, there: Other::start(working_set)? };
        // The kernel gives the other process its pages.
        for at in (0..working_set).step_by(PAGES) {
            new.copy(CopyDirection::Write, at, PAGES.min(working_set - at))?;
        }
        Ok(new)
    }

    /// As [`BlockCopies::measure`].
    pub fn measure(
        &mut self,
        duration: Duration,
        direction: CopyDirection,
        block: usize,
        working_set: usize,
    ) -> io::Result<CopyReport> {
        let blocks = blocks(block, working_set.min(self.here.0.length()))?;
        repeat(duration, block, blocks, |at| self.copy(direction, at, block))
    }

    fn copy(&mut self, direction: CopyDirection, at: usize, length: usize) -> io::Result<()> {
        let (here, there) = (&mut self.here.bytes()[at..at + length], &self.there);
        let local = libc::iovec { iov_base: here.as_mut_ptr().cast(), iov_len: length };
        let remote =
            libc::iovec { iov_base: there.memory.wrapping_add(at).cast(), iov_len: length };
        // SAFETY: the piece here is borrowed exclusively; the kernel checks the one there.
        let copied = unsafe {
            let (local, remote) = (&raw const local, &raw const remote);
            match direction {
                CopyDirection::Read => libc::process_vm_readv(there.pid, local, 1, remote, 1, 0),
                CopyDirection::Write => libc::process_vm_writev(there.pid, local, 1, remote, 1, 0),
            }
        };
        match usize::try_from(copied) {
            Ok(copied) if copied == length => Ok(()),
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

fn blocks(block: usize, working_set: usize) -> io::Result<usize> {
    match working_set.checked_div(block) {
        Some(blocks) if blocks > 0 => Ok(blocks),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Calls `copy` with the place of one block after the other.
fn repeat(
    duration: Duration,
    block: usize,
    blocks: usize,
    mut copy: impl FnMut(usize) -> io::Result<()>,
) -> io::Result<CopyReport> {
    // Time is looked at now and then only.
    let turn = 65_536_usize.div_ceil(block);
    let usage = Usage::start();
    let (mut index, mut done) = (0, 0);
    loop {
        for _ in 0..turn {
            copy(index * block)?;
            index = (index + 1) % blocks;
            done += 1;
        }
        let elapsed = usage.started_at().elapsed();
        if elapsed >= duration {
            return Ok(CopyReport { bytes: done * block as u64, elapsed, cpu: usage.cpu() });
        }
    }
}

/// A process that does nothing, and ends with us.
#[derive(Debug)]
struct Other {
    pid: libc::pid_t,
    memory: *mut u8,
    length: usize,
}

impl Other {
    fn start(length: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, which touches none that is there.
        let memory = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: of one with threads: the child calls nothing but what signal handlers may call.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: no pointers. The mapping is the child's own copy of nothing.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::pause();
                }
            }
        }
        let other = Self { pid, memory: memory.cast(), length };
        if pid < 0 { Err(io::Error::last_os_error()) } else { Ok(other) }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // SAFETY: our own child, which was not waited for, and our own mapping, that only it uses.
        unsafe {
            if self.pid > 0 {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, ptr::null_mut(), 0);
            }
            libc::munmap(self.memory.cast(), self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_copied_at_least_once() {
        let report = block_copy(Duration::ZERO, 4096, 1 << 20).unwrap();
        assert_eq!(report.bytes, 64 << 10);
        for direction in [CopyDirection::Read, CopyDirection::Write] {
            let report = process_copy(Duration::ZERO, direction, 1 << 20, 1 << 20).unwrap();
            assert_eq!(report.bytes, 1 << 20);
            assert!(report.gb_per_s() > 0.0);
        }
        assert!(block_copy(Duration::ZERO, 0, 1 << 20).is_err());
        assert!(process_copy(Duration::ZERO, CopyDirection::Read, 2 << 20, 1 << 20).is_err());
    }
}
