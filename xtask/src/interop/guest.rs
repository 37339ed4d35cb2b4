//! The guest: a stock Linux kernel with soft-RoCE, booted once for many commands.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::lab::Lab;
use crate::process;

/// The guest's address, and ours on the link to it.
pub(super) const GUEST: &str = "10.91.0.2";
pub(super) const OURS: &str = "10.91.0.1";
/// The host's end of that link.
pub(super) const TAP: &str = "rxe0";

const AGENT: &str = include_str!("agent.sh");
/// A guest boots in two seconds on an idle machine: this is for a busy one.
const BOOT_LIMIT: Duration = Duration::from_secs(90);
/// The whole run's bound, held by rxe-vm, in case this process is gone or stuck.
const GUEST_SECONDS_MAX: u32 = 900;
const POLL: Duration = Duration::from_millis(20);

/// A running guest. It is told to power off when this is dropped.
pub(super) struct Guest {
    child: Child,
    share: PathBuf,
    console: PathBuf,
    commands: u32,
}

/// A command that runs in the guest.
pub(super) struct Running<'a> {
    guest: &'a Guest,
    number: u32,
}

impl Guest {
    /// Builds the guest's image if there is none, and boots it in `lab`.
    pub(super) fn boot(tool: &Path, accelerator: &str, lab: &Lab) -> Result<Self> {
        if !image_exists() {
            eprintln!("xtask: building the guest's image (once)");
            process::run(Command::new(tool).arg("build"))?;
        }
        let share = lab.scratch().join("share");
        fs::create_dir(&share)?;
        fs::write(share.join("agent.sh"), AGENT)?;
        let console = lab.scratch().join("guest.log");
        let log = File::create(&console)?;
        let child = Command::new(tool)
            .args(["run", "--netns", lab.namespace(), "--tap", TAP, "--accel", accelerator])
            .args(["--ip", &format!("{GUEST}/24"), "--host-ip", &format!("{OURS}/24")])
            .args(["--timeout", &GUEST_SECONDS_MAX.to_string()])
            .arg("--share")
            .arg(&share)
            .args(["--", "sh", "agent.sh"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", tool.display()))?;
        let mut guest = Self { child, share, console, commands: 0 };
        let start = Instant::now();
        while !guest.has("up") {
            if let Some(status) = guest.child.try_wait()? {
                bail!("the guest did not boot ({status}): {}", guest.console_tail());
            }
            if start.elapsed() > BOOT_LIMIT {
                bail!("the guest did not boot in {BOOT_LIMIT:?}: {}", guest.console_tail());
            }
            sleep(POLL);
        }
        eprintln!("xtask: the guest booted in {:.1?} ({accelerator})", start.elapsed());
        Ok(guest)
    }

    /// Starts a shell command in the guest, after the one before it has ended.
    pub(super) fn start(&mut self, command: &str) -> Result<Running<'_>> {
        self.commands += 1;
        let number = self.commands;
        // The guest looks for the file all the time: it must not see half of it.
        let unfinished = self.share.join("unfinished");
        fs::write(&unfinished, format!("echo $$ >/tmp/{number}.pid\n{command}\n"))?;
        fs::rename(&unfinished, self.share.join(format!("{number}.cmd")))?;
        Ok(Running { guest: self, number })
    }

    /// Copies a program to where commands run, unless it is there, and returns its name there.
    pub(super) fn lend(&self, program: &Path) -> Result<String> {
        let name = program.file_name().context("the program's path ends in no name")?;
        let target = self.share.join(name);
        if !target.exists() {
            fs::copy(program, target)
                .with_context(|| format!("cannot copy {}", program.display()))?;
        }
        Ok(name.to_string_lossy().into_owned())
    }

    fn has(&self, name: &str) -> bool {
        self.share.join(name).exists()
    }

    fn console_tail(&self) -> String {
        let text = fs::read_to_string(&self.console).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(5).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // If any of this fails, the lab's janitor ends the guest.
        let _ = fs::write(self.share.join("quit"), "");
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            if let Ok(Some(_)) = self.child.try_wait() {
                return;
            }
            sleep(POLL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running<'_> {
    /// The exit status, once the command has ended.
    pub(super) fn status(&self) -> Option<i32> {
        let path = self.guest.share.join(format!("{}.status", self.number));
        fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    /// Whether the command's TCP socket listens.
    pub(super) fn listens(&self) -> bool {
        self.guest.has(&format!("{}.listening", self.number))
    }

    /// Ends the command if it has not ended, and waits for that.
    pub(super) fn stop(&self) -> Result<()> {
        fs::write(self.guest.share.join(format!("{}.stop", self.number)), "")?;
        let start = Instant::now();
        while self.status().is_none() {
            if start.elapsed() > Duration::from_secs(10) {
                bail!("the guest does not answer: {}", self.guest.console_tail());
            }
            sleep(POLL);
        }
        Ok(())
    }

    pub(super) fn output(&self) -> String {
        let path = self.guest.share.join(format!("{}.out", self.number));
        let bytes = fs::read(path).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Where rxe-vm keeps what it built.
fn image_exists() -> bool {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("RXE_VM_CACHE").map(PathBuf::from).or_else(|| {
        let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(base.join("rxe-vm"))
    });
    cache.is_some_and(|cache| cache.join("linux-image-amd64/initrd").exists())
}
