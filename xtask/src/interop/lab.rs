//! The network namespace of our side. It goes away with this process, however this process ends.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use millstream_lab::Plan;

/// The only host.
const HOST: &str = "ours";

/// A namespace, and a folder for what runs in it.
pub(super) struct Lab(millstream_lab::Lab);

impl Lab {
    /// Makes a namespace with its loopback up.
    pub(super) fn new() -> Result<Self> {
        let lab = millstream_lab::Lab::up(&Plan::new().hosts([HOST]));
        lab.map(Self).context("cannot make a network namespace")
    }

    /// A folder that is removed with the namespace.
    pub(super) fn scratch(&self) -> &Path {
        self.0.folder()
    }

    /// A command that runs `program` in the namespace. A child's process id is the program's.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.0.command(HOST, program).expect("it has this host")
    }
}

/// Whether a socket listens on TCP `port` where process `pid` is: in its network namespace.
pub(super) fn listens(pid: u32, port: u16) -> bool {
    ["tcp", "tcp6"].iter().any(|table| {
        std::fs::read_to_string(format!("/proc/{pid}/net/{table}"))
            .is_ok_and(|text| table_has_listener(&text, port))
    })
}

/// The kernel's table: slot, local address:port in hexadecimal, remote, state (0A: listening), ...
fn table_has_listener(table: &str, port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, state) = (words.next(), words.nth(1));
        local.is_some_and(|local| local.ends_with(&suffix)) && state == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_told_from_connections() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue\n";
        let row =
            |port: &str, state: &str| format!("   0: 0100007F:{port} 00000000:0000 {state} 0\n");
        assert!(table_has_listener(&format!("{head}{}", row("4853", "0A")), 18515));
        assert!(!table_has_listener(&format!("{head}{}", row("4853", "01")), 18515));
        assert!(!table_has_listener(&format!("{head}{}", row("4854", "0A")), 18515));
        assert!(!table_has_listener(head, 18515));
    }
}
