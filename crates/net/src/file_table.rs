//! How many files the process may have open, and room for them in its table.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Lets the table of open files hold `count`, or as many as the process may have open.
///
/// The kernel makes the table larger when a file is opened that it has no place for. In a process with
/// threads it waits for an RCU grace period then, and with it every thread that opens a file. That takes
/// as long as a processor is busy without a pause, which can be a second. So who must not wait later
/// waits here, when it starts. The table never becomes smaller.
pub fn make_room(count: usize) -> io::Result<()> {
    let limit = limit()?;
    let most = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
    let Some(last) = count.min(most).checked_sub(1) else { return Ok(()) };
    let last = libc::c_int::try_from(last).unwrap_or(libc::c_int::MAX);
    let any = File::open("/dev/null")?;
    // SAFETY: no pointers.
    let copy = unsafe { libc::fcntl(any.as_raw_fd(), libc::F_DUPFD_CLOEXEC, last) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just opened, and nobody else knows it.
    drop(unsafe { OwnedFd::from_raw_fd(copy) });
    Ok(())
}

/// Lets the process have as many files open as it may let itself: most systems begin with 1,024 of them, so that
/// programs with select(2) work, and a daemon with a connection for each peer needs more.
pub fn raise_limit() -> io::Result<()> {
    let mut limit = limit()?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is a `rlimit`.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn limit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a `rlimit`, which is filled in.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => Ok(limit),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        line.trim().parse().unwrap()
    }

    #[test]
    fn the_table_has_room_and_the_files_are_as_many_as_before() {
        make_room(0).unwrap();
        make_room(500).unwrap();
        assert!(size() >= 500, "{}", size());
        let before = size();
        make_room(1).unwrap();
        assert_eq!(size(), before);
        // More than may be open is no error.
        make_room(usize::MAX).unwrap();
    }
}
