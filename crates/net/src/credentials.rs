//! Who is at the other end of a UNIX socket, and whether that is our user.

use std::fs;
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

/// All users whom a user namespace does not have are this one there, unless the system has another number for them.
const OVERFLOW_USER: libc::uid_t = 65_534;

/// What to do where [`is_own_user`] does not even hold for [`own_user`].
pub(crate) const UNTOLD: &str = "the number of this process's user is that of all users whom its user namespace does \
     not have (/proc/sys/kernel/overflowuid), so who is meant cannot be told: run it as another user, or \
     without the user namespace";

/// Whether the kernel means our own user by this number, and nobody else: users whom our user namespace does not have
/// (user_namespaces(7)) have one number together, which may be ours.
pub(crate) fn is_own_user(user: libc::uid_t) -> bool {
    let own = own_user();
    if user != own {
        return false;
    }
    let overflow = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    let overflow = overflow.and_then(|text| text.trim().parse().ok()).unwrap_or(OVERFLOW_USER);
    // Where nothing can be read, users may be missing.
    let users = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    is_meant(user, own, overflow, &users)
}

/// What to add to the error that another user is there, whose number is this.
pub(crate) fn why_another(user: libc::uid_t) -> String {
    if user == own_user() { format!("; {UNTOLD}") } else { String::new() }
}

/// Whether a number means our own user in a namespace with these users, as /proc/PID/uid_map has them.
fn is_meant(user: libc::uid_t, own: libc::uid_t, overflow: libc::uid_t, users: &str) -> bool {
    let has_all = users.split_ascii_whitespace().eq(["0", "0", "4294967295"]);
    user == own && (user != overflow || has_all)
}

/// The user of this process, by whom the kernel also tells who may share a port (SO_REUSEPORT, socket(7)).
pub(crate) fn own_user() -> libc::uid_t {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_stands_for_many_users_is_not_ours() {
        const ALL: &str = "         0          0 4294967295\n";
        const SOME: &str = "         0     100000      65536\n";
        const ONE: &str = "     65534          0          1\n";
        const TWO: &str = "         0       1000          1\n     65534     165534          1\n";
        for (user, own, overflow, users, expected) in [
            (1000, 1000, 65_534, ALL, true),
            (1000, 1000, 65_534, SOME, true),
            (0, 0, 65_534, TWO, true),
            (1000, 0, 65_534, ALL, false),
            (65_534, 0, 65_534, SOME, false),
            (0, 65_534, 65_534, SOME, false),
            // Nobody is missing, so it is one user.
            (65_534, 65_534, 65_534, ALL, true),
            (65_534, 65_534, 65_534, SOME, false),
            (65_534, 65_534, 65_534, ONE, false),
            (65_534, 65_534, 65_534, TWO, false),
            // The system has another number for those who are missing.
            (65_534, 65_534, 99, SOME, true),
            (99, 99, 99, SOME, false),
            // Nothing could be read.
            (65_534, 65_534, 65_534, "", false),
            (1000, 1000, 65_534, "", true),
            (65_534, 65_534, 65_534, "0 0 4294967295 0", false),
        ] {
            let found = is_meant(user, own, overflow, users);
            assert_eq!(found, expected, "{user} {own} {overflow} {users:?}");
        }
    }

    #[test]
    fn an_error_says_what_to_do_where_the_number_is_ours() {
        let own = own_user();
        assert!(why_another(own).contains("run it as another user"));
        assert_eq!(why_another(own.wrapping_add(1)), "");
    }
}
