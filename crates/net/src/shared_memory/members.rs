//! The processes of a group, and which of them have ended.

use std::io;
use std::os::fd::AsRawFd;

use super::process::{Process, ProcessError, own_start_time};

/// Which process this is, for others of its PID namespace: its number, and when it started.
pub fn own_process() -> io::Result<(i32, u64)> {
    // A process number is positive, and fits.
    Ok((std::process::id() as i32, own_start_time()?))
}

/// The processes of a group. A process can be several members.
#[derive(Debug)]
pub struct MemberProcesses {
    processes: Vec<Process>,
}

impl MemberProcesses {
    /// Of numbers and start times (see [`own_process`]). The error says which one is not there.
    pub fn open(members: impl Iterator<Item = (i32, u64)>) -> Result<Self, (usize, ProcessError)> {
        let opened = members.enumerate().map(|(member, (pid, started))| {
            Process::open(pid, started).map_err(|error| (member, error))
        });
        Ok(Self { processes: opened.collect::<Result<_, _>>()? })
    }

    /// The number of a member's process.
    pub fn pid(&self, member: usize) -> Option<i32> {
        Some(self.processes.get(member)?.pid())
    }

    /// The first member of which this holds and whose process has ended.
    pub fn ended(&self, mut concerns: impl FnMut(usize) -> bool) -> Option<usize> {
        let poll = |process: &Process| libc::pollfd {
            fd: process.descriptor().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // On the stack, and as many at a time.
        const AT_ONCE: usize = 64;
        for (index, processes) in self.processes.chunks(AT_ONCE).enumerate() {
            let mut polls = [libc::pollfd { fd: -1, events: 0, revents: 0 }; AT_ONCE];
            for (slot, process) in polls.iter_mut().zip(processes) {
                *slot = poll(process);
            }
            // SAFETY: so many pollfds, alive during the call.
            let found =
                unsafe { libc::poll(polls.as_mut_ptr(), processes.len() as libc::nfds_t, 0) };
            if found <= 0 {
                // An interrupted call has found nothing.
                continue;
            }
            let ended = polls.iter().enumerate().filter(|(_, poll)| poll.revents != 0);
            let ended = ended.map(|(at, _)| index * AT_ONCE + at).find(|&member| concerns(member));
            if ended.is_some() {
                return ended;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn members_that_have_ended_are_found() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let own = own_process().unwrap();
        let other = child.id() as i32;
        let text = std::fs::read_to_string(format!("/proc/{other}/stat")).unwrap();
        let started = text.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap();
        let other = (other, started.parse().unwrap());
        let members = (0..100).map(|member| if member == 70 { other } else { own });
        let members = MemberProcesses::open(members).unwrap();
        assert_eq!(members.ended(|_| true), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(members.ended(|_| true), Some(70));
        assert_eq!(members.ended(|member| member != 70), None);
        assert_eq!((members.pid(70), members.pid(100)), (Some(other.0), None));
        let (member, error) = MemberProcesses::open([own, other].into_iter()).unwrap_err();
        assert!(member == 1 && matches!(error, ProcessError::Ended { .. }), "{error}");
    }
}
