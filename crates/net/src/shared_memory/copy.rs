//! Copies within a process, and into and out of another one.

use std::io;
use std::ptr;

/// Whether what is written goes through the caches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Caching {
    /// As ever: for what fits there, and may be read soon.
    Through,
    /// Around them, where the processor can: for much at once. The ranges must not overlap. Memory is
    /// not read before it is overwritten, so a third of the traffic goes away.
    Around,
}

/// Copies memory, which may overlap unless it goes around the caches.
///
/// # Safety
/// All bytes of both ranges must be mapped, those of `to` writable, and no reference may be held to them
/// that conflicts with that. Others may write them meanwhile: then what is copied is mixed.
pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize, caching: Caching) {
    let around = match caching {
        Caching::Through => 0,
        // SAFETY: the caller promises it.
        Caching::Around => unsafe { copy_around(from, to, length) },
    };
    // SAFETY: the caller promises it; `around` is not more than the length.
    unsafe { ptr::copy(from.add(around), to.add(around), length - around) };
}

/// Copies around the caches, and returns how much it has copied: not the end, which is short.
///
/// Four pages at a time, a cache line of each in turn: their loads are four streams for the
/// processor's prefetchers, which do not go beyond a page.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_around(from: *const u8, to: *mut u8, length: usize) -> usize {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const LINE: usize = 64;
    const PAGE: usize = 4096;
    const STREAMS: usize = 4;
    const TURN: usize = STREAMS * PAGE;
    let head = to.align_offset(LINE);
    if length < head.saturating_add(TURN) {
        return 0;
    }
    // SAFETY: `head` bytes are within the ranges.
    unsafe { ptr::copy(from, to, head) };
    let mut done = head;
    while length - done >= TURN {
        for line in (0..PAGE).step_by(LINE) {
            for stream in 0..STREAMS {
                let at = done + stream * PAGE + line;
                // SAFETY: a line at `at` is within the turn, which is within the ranges. Loads
                // may be unaligned, and stores are aligned: `to + head` is, and so is all that is added.
                // Every processor of this architecture has these instructions.
                unsafe {
                    let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
                    let [a, b, c, d] = [0, 1, 2, 3].map(|index| _mm_loadu_si128(from.add(index)));
                    _mm_stream_si128(to, a);
                    _mm_stream_si128(to.add(1), b);
                    _mm_stream_si128(to.add(2), c);
                    _mm_stream_si128(to.add(3), d);
                }
            }
        }
        done += TURN;
    }
    // SAFETY: such stores are ordered with nothing: whoever is told of them later must see them.
    unsafe { _mm_sfence() };
    done
}

/// # Safety
/// None needed: it copies nothing.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_around(_from: *const u8, _to: *mut u8, _length: usize) -> usize {
    0
}

/// Which way bytes go between us and another process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    /// process_vm_writev(2).
    Write,
    /// process_vm_readv(2).
    Read,
}

/// Copies between `length` bytes here and as many at an address of the process of this number.
///
/// # Safety
/// All bytes of the range here must be mapped, for a `Read` writable, and no reference may be held to
/// them that conflicts with that.
pub(super) unsafe fn process_copy(
    way: Way,
    pid: libc::pid_t,
    local: *mut u8,
    remote: u64,
    length: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < length {
        let here =
            libc::iovec { iov_base: local.wrapping_add(done).cast(), iov_len: length - done };
        let there = libc::iovec {
            iov_base: ptr::without_provenance_mut(remote as usize + done),
            iov_len: length - done,
        };
        // SAFETY: one piece each, alive during the call. The one here is what the caller promises; the
        // kernel checks the one there in the other process.
        let copied = unsafe {
            match way {
                Way::Write => {
                    libc::process_vm_writev(pid, &raw const here, 1, &raw const there, 1, 0)
                }
                Way::Read => {
                    libc::process_vm_readv(pid, &raw const here, 1, &raw const there, 1, 0)
                }
            }
        };
        match usize::try_from(copied) {
            // A page is not there: the next call would say so.
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Ok(copied) => done += copied,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_copy_every_byte_and_no_other() {
        let source: Vec<u8> = (0..100_000_u32).map(|index| ((index * 7) >> 3) as u8 | 1).collect();
        for length in [0, 1, 63, 64, 4096, 16_383, 16_384, 16_447, 16_448, 50_000, 65_536, 99_000] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (13, 63), (64, 65)] {
                for caching in [Caching::Through, Caching::Around] {
                    let mut target = vec![0; 100_000];
                    // SAFETY: both ranges are in vectors.
                    unsafe {
                        let to = target.as_mut_ptr().add(to);
                        copy(source.as_ptr().add(from), to, length, caching);
                    }
                    assert!(
                        target[to..to + length] == source[from..from + length],
                        "{length} {to}"
                    );
                    assert!(target[..to].iter().all(|&byte| byte == 0), "{length} {to}");
                    assert!(target[to + length..].iter().all(|&byte| byte == 0), "{length} {to}");
                }
            }
        }
    }
}
