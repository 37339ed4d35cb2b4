//! A network namespace that goes away with this process, however this process ends.
//!
//! A signal runs no destructor. So a janitor, a shell in a process group of its own, holds the
//! reading end of a pipe whose other end only this process has: when the pipe closes, whether by
//! [`Drop`], Ctrl-C or SIGKILL, the janitor ends what is left in the namespace and removes it.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::process;

/// `$1` is the namespace, `$2` the scratch folder.
const JANITOR: &str = r#"
trap '' INT TERM HUP
cat >/dev/null
for signal in TERM KILL; do
    pids=$(ip netns pids "$1" 2>/dev/null) || break
    [ -n "$pids" ] || break
    kill -s "$signal" $pids 2>/dev/null
    tries=0
    while [ -n "$(ip netns pids "$1" 2>/dev/null)" ] && [ $tries -lt 20 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
done
ip netns del "$1" 2>/dev/null
rm -rf "$2"
"#;

/// A namespace, and a folder for what runs in it.
pub(crate) struct Lab {
    namespace: String,
    scratch: PathBuf,
    janitor: Child,
}

impl Lab {
    /// Makes a namespace with its loopback up. Needs root.
    pub(crate) fn new() -> Result<Self> {
        let namespace = format!("millstream-{}", std::process::id());
        let scratch = std::env::temp_dir().join(&namespace);
        std::fs::create_dir(&scratch)
            .with_context(|| format!("cannot make {}", scratch.display()))?;
        let janitor = Command::new("sh")
            .args(["-c", JANITOR, "janitor", &namespace])
            .arg(&scratch)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot start the janitor")?;
        let lab = Self { namespace, scratch, janitor };
        process::run(Command::new("ip").args(["netns", "add", &lab.namespace]))?;
        process::run(lab.command("ip").args(["link", "set", "lo", "up"]))?;
        Ok(lab)
    }

    /// A folder that is removed with the namespace.
    pub(crate) fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// A command that runs `program` in the namespace. `ip` replaces itself by the program, so a
    /// child's process id is the program's.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]).arg(program).stdin(Stdio::null());
        command
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        // Nothing is left to do about a janitor that fails.
        let _ = self.janitor.wait();
    }
}

/// Whether a socket listens on TCP `port` where process `pid` is: in its network namespace.
pub(crate) fn listens(pid: u32, port: u16) -> bool {
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
