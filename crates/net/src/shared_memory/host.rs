//! Which processes this one can share memory with.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use crate::credentials::{UNTOLD, is_own_user, own_user};

/// Where a process is: the machine, since it was started, and the namespaces (namespaces(7)).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Host {
    /// The kernel's random number of this start of the machine.
    pub boot_id: String,
    /// The inode of its PID namespace, in which its number means something.
    pub pid_namespace: u64,
    /// The inode of its network namespace, in which its socket has a name.
    pub network_namespace: u64,
}

impl Host {
    /// Of this process.
    pub fn own() -> io::Result<Self> {
        let namespace = |name: &str| fs::metadata(format!("/proc/self/ns/{name}"));
        Ok(Self {
            boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
            pid_namespace: namespace("pid")?.ino(),
            network_namespace: namespace("net")?.ino(),
        })
    }

    /// A text that processes of this host and this user have in common, and no others. There is none where others of the
    /// user cannot be told from other users.
    pub fn with_user(&self) -> io::Result<String> {
        let Self { boot_id, pid_namespace, network_namespace } = self;
        let user = own_user();
        match is_own_user(user) {
            true => Ok(format!("{boot_id}/{pid_namespace}/{network_namespace}/{user}")),
            false => Err(io::Error::other(UNTOLD)),
        }
    }

    /// Why memory cannot be shared with a process there, if so.
    pub fn obstacle(&self, other: &Self) -> Option<&'static str> {
        if self.boot_id != other.boot_id {
            Some("it is on another host, or that host was started again")
        } else if self.pid_namespace != other.pid_namespace {
            Some("it is in another PID namespace (container) of this host")
        } else if self.network_namespace != other.network_namespace {
            Some("it is in another network namespace (container) of this host")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_way_is_named() {
        let own = Host::own().unwrap();
        assert_eq!(own.obstacle(&Host::own().unwrap()), None);
        let host = Host { boot_id: "other".to_owned(), pid_namespace: 1, network_namespace: 1 };
        assert!(own.obstacle(&host).unwrap().contains("another host"));
        let container = Host { pid_namespace: 1, network_namespace: 1, ..own.clone() };
        assert!(own.obstacle(&container).unwrap().contains("PID namespace"));
        let network = Host { network_namespace: 1, ..own.clone() };
        assert!(own.obstacle(&network).unwrap().contains("network namespace"));
    }
}
