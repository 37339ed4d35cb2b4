//! Which process a peer is. A process number can be given to another process once its owner has been
//! reaped; a pidfd (pidfd_open(2)) cannot, and the start time tells whether it was opened in time.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use thiserror::Error;

use crate::socket::wait;

/// Another process, and no other one that has its number later.
#[derive(Debug)]
pub(super) struct Process {
    pid: libc::pid_t,
    descriptor: OwnedFd,
}

/// Why a process was not found.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// It has no number here.
    #[error("it is in another PID namespace")]
    OtherNamespace,
    /// It has ended, and perhaps another one has its number.
    #[error("process {pid} has ended, or is another one than that which answered")]
    Ended {
        /// Its number.
        pid: i32,
    },
    /// The system does not tell.
    #[error("cannot open process {pid}: {error}")]
    Open {
        /// Its number.
        pid: i32,
        /// Why.
        error: io::Error,
    },
}

impl Process {
    /// The process of this number, if it is the one that started at this time.
    pub(super) fn open(pid: libc::pid_t, started: u64) -> Result<Self, ProcessError> {
        if pid <= 0 {
            return Err(ProcessError::OtherNamespace);
        }
        // SAFETY: no pointers, and a new descriptor that is nobody else's.
        let descriptor = unsafe {
            match libc::syscall(libc::SYS_pidfd_open, pid, 0) {
                ..0 => {
                    return Err(match io::Error::last_os_error() {
                        error if error.raw_os_error() == Some(libc::ESRCH) => {
                            ProcessError::Ended { pid }
                        }
                        error => ProcessError::Open { pid, error },
                    });
                }
                descriptor => OwnedFd::from_raw_fd(descriptor as libc::c_int),
            }
        };
        let process = Self { pid, descriptor };
        // As long as the process of the descriptor lives, nobody else has its number: so what was read
        // before that is seen is about it.
        let found = start_time(&pid.to_string());
        if !process.is_alive() {
            return Err(ProcessError::Ended { pid });
        }
        match found {
            Ok(found) if found == started => Ok(process),
            Ok(_) => Err(ProcessError::Ended { pid }),
            // As when we may have no more descriptors.
            Err(error) => Err(ProcessError::Open { pid, error }),
        }
    }

    pub(super) const fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Whether any of its threads is still there.
    pub(super) fn is_alive(&self) -> bool {
        // A call that failed has found nothing.
        !wait(self.descriptor.as_fd(), libc::POLLIN, Duration::ZERO).unwrap_or(false)
    }

    /// Whether it is still there, and the program that has the other end of this connection too: execve(2)
    /// keeps the number, the start time and the pidfd, but closes the connection, once the memory of the
    /// program before is gone.
    pub(super) fn is_connected(&self, socket: BorrowedFd<'_>) -> bool {
        let poll = |descriptor: BorrowedFd<'_>, events| libc::pollfd {
            fd: descriptor.as_raw_fd(),
            events,
            revents: 0,
        };
        // POLLHUP is told in any case.
        let mut polls =
            [poll(self.descriptor.as_fd(), libc::POLLIN), poll(socket, libc::POLLRDHUP)];
        // SAFETY: so many pollfds, alive during the call.
        let found = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, 0) };
        // A call that failed has found nothing.
        found <= 0
    }

    /// Readable once it has ended.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// When this process started, in ticks since the machine did.
pub(super) fn own_start_time() -> io::Result<u64> {
    start_time("self")
}

/// Field 22 of /proc/PID/stat (proc_pid_stat(5)). The second is a name in parentheses, which may have
/// spaces and parentheses itself.
fn start_time(process: &str) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/stat"))?;
    let strange = || io::Error::new(io::ErrorKind::InvalidData, "/proc/PID/stat has no start time");
    let (_, rest) = text.rsplit_once(')').ok_or_else(strange)?;
    rest.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok()).ok_or_else(strange)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_is_known_by_its_start_and_not_by_its_number() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as libc::pid_t;
        let started = start_time(&pid.to_string()).unwrap();
        let process = Process::open(pid, started).unwrap();
        assert!(process.is_alive());
        // As if the number had gone to another process since.
        assert!(matches!(Process::open(pid, started + 1), Err(ProcessError::Ended { .. })));
        assert!(matches!(Process::open(0, started), Err(ProcessError::OtherNamespace)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
        assert!(matches!(Process::open(pid, started), Err(ProcessError::Ended { .. })));
    }

    #[test]
    fn our_own_start_is_that_which_others_see() {
        let own = std::process::id().to_string();
        assert_eq!(own_start_time().unwrap(), start_time(&own).unwrap());
    }
}
