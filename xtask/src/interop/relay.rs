//! The relay on the link to the guest, and what it is told.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail};

use super::guest::{OURS, TAP};
use super::lab::Lab;
use crate::process;

/// The running relay.
pub(super) struct Relay {
    child: Child,
    frames: PathBuf,
    control: PathBuf,
    commands: BufReader<UnixStream>,
}

impl Relay {
    /// Starts the relay and gives its tap device an address. qemu is to connect next.
    pub(super) fn start(lab: &Lab, program: &Path, mtu: u32) -> Result<Self> {
        let (frames, control) = (lab.scratch().join("frames"), lab.scratch().join("control"));
        let mut child = lab
            .command(program)
            .arg(TAP)
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
            let name = format!("net.ipv6.conf.{TAP}.{file}={value}");
            // A kernel without IPv6 has no such setting.
            let _ = process::succeeds(lab.command("sysctl").args(["-qw", &name]));
        }
        // A whole window of packets waits here for an emulated machine.
        let (mtu, queue) = (mtu.to_string(), "5000");
        let link = ["link", "set", TAP, "mtu", &mtu, "txqueuelen", queue, "up"];
        process::run(lab.command("ip").args(link))?;
        let address = format!("{OURS}/24");
        process::run(lab.command("ip").args(["address", "add", &address, "dev", TAP]))?;
        let commands = BufReader::new(UnixStream::connect(&control)?);
        Ok(Self { child, frames, control, commands })
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
