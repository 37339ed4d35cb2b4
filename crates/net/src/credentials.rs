//! Who is at the other end of a UNIX socket.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Who is at the other end of a UNIX socket, as the kernel says (SO_PEERCRED, unix(7)).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Credentials {
    /// 0 for a process that has no number in our PID namespace.
    pub(crate) pid: libc::pid_t,
    pub(crate) user: libc::uid_t,
}

impl Credentials {
    pub(crate) fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = mem::size_of_val(&credentials) as libc::socklen_t;
        // SAFETY: both are borrowed exclusively, and the length is that of the credentials.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut credentials).cast(),
                &raw mut length,
            )
        };
        match result {
            0 => Ok(Self { pid: credentials.pid, user: credentials.uid }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The user of this process, by whom the kernel also tells who may share a port (SO_REUSEPORT, socket(7)).
pub(crate) fn own_user() -> libc::uid_t {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() }
}
