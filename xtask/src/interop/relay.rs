//! The relay on the link to the guest, and what it is told.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail};

use super::lab::Lab;
use super::link::{Link, MTU};
use crate::process;

/// The running relay.
pub(super) struct Relay {
    child: Child,
    link: Link,
    frames: PathBuf,
    control: PathBuf,
    commands: BufReader<UnixStream>,
}

impl Relay {
    /// Starts the relay of `link` and gives its tap device an address. qemu is to connect next.
    pub(super) fn start(lab: &Lab, program: &Path, link: Link) -> Result<Self> {
        let Link { tap, ours, .. } = link;
        let [frames, control] =
            ["frames", "control"].map(|socket| lab.scratch().join(format!("{tap}.{socket}")));
        for socket in [&frames, &control] {
            // One of an earlier guest on this link may be there.
            let _ = std::fs::remove_file(socket);
        }
        let mut child = lab
            .command(program)
            .arg(tap)
            .args([&frames, &control])
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        if line.trim() != "ready" {
            bail!("the relay did not start: {}", child.wait()?);
        }
        for (file, value) in [("disable_ipv6", "1"), ("accept_ra", "0")] {
            let name = format!("net.ipv6.conf.{tap}.{file}={value}");
            // A kernel without IPv6 has no such setting.
            let _ = process::succeeds(lab.command("sysctl").args(["-qw", &name]));
        }
        // A whole window of packets waits here for an emulated machine.
        let (mtu, queue) = (MTU.to_string(), "5000");
        let up = ["link", "set", tap, "mtu", &mtu, "txqueuelen", queue, "up"];
        process::run(lab.command("ip").args(up))?;
        let address = format!("{ours}/24");
        process::run(lab.command("ip").args(["address", "add", &address, "dev", tap]))?;
        let commands = BufReader::new(UnixStream::connect(&control)?);
        Ok(Self { child, link, frames, control, commands })
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// Where qemu connects to.
    pub(super) fn frames(&self) -> &Path {
        &self.frames
    }

    /// Where others may give commands too.
    pub(super) fn control(&self) -> &Path {
        &self.control
    }

    /// Gives a command, and returns the answer.
    pub(super) fn command(&mut self, command: &str) -> Result<String> {
        writeln!(self.commands.get_mut(), "{command}")?;
        let mut answer = String::new();
        self.commands.read_line(&mut answer).context("the relay is gone")?;
        match answer.trim().strip_prefix("ok") {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => bail!("the relay answers {answer:?} to {command:?}"),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // It ends by itself when qemu does; if that was never there, here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
