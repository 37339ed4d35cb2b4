//! Copies into and out of another process.

use std::io;
use std::ptr;

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
