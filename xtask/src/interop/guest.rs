//! The guest: a stock Linux kernel with soft-RoCE, booted once for many commands.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::image::Image;
use super::lab::Lab;
use super::link::{Link, MTU};
use super::relay::Relay;

const AGENT: &str = include_str!("agent.sh");
const STATE: &str = include_str!("state.sh");
/// A guest boots in two seconds on an idle machine: this is for a busy one.
const BOOT_LIMIT: Duration = Duration::from_secs(90);
const MEMORY_MIB: u32 = 512;
/// One, and a place for another that never comes: where there is one place only, qemu before 8.1
/// leaves out the guest's memory barriers. But its devices run on threads of their own, and a packet
/// that the guest gives to its network device may go unnoticed, and with it all that follow.
const PROCESSORS: &str = "1,maxcpus=2";
/// The old timer would be what the kernel measures the processor's clock by, though it knows better: what
/// else runs here meanwhile makes that wrong, and the guest's clock go up to three times too fast.
const NO_PIT: &str = ",pit=off";
const POLL: Duration = Duration::from_millis(20);

/// To say what state it is in; a guest that hangs says nothing.
const STATE_LIMIT: Duration = Duration::from_secs(30);

/// What the kernel is told: to be quick, as it is emulated, and not to check what is not at stake.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable \
    init_on_alloc=0 cryptomgr.notests rodata=off no_timer_check lpj=4000000 random.trust_cpu=on \
    audit=0 net.ifnames=0 rdinit=/init";

/// A running guest. It is told to power off when this is dropped.
pub(super) struct Guest {
    child: RefCell<Child>,
    share: PathBuf,
    console: PathBuf,
    commands: u32,
    /// Its processor is, and much slower than this machine's.
    pub(super) is_emulated: bool,
}

/// A command that runs in the guest.
pub(super) struct Running<'a> {
    guest: &'a Guest,
    number: u32,
}

impl Guest {
    /// Boots the guest in `lab`, at the end of the relay's link. If this process goes away, the lab
    /// ends it.
    pub(super) fn boot(image: &Image, accelerator: &str, lab: &Lab, relay: &Relay) -> Result<Self> {
        Self::boot_with(image, accelerator, lab, relay, &[])
    }

    /// The same, with more arguments for qemu.
    pub(super) fn boot_with(
        image: &Image,
        accelerator: &str,
        lab: &Lab,
        relay: &Relay,
        arguments: &[String],
    ) -> Result<Self> {
        let Link { tap, guest, .. } = *relay.link();
        let share = lab.scratch().join(format!("{tap}.share"));
        // That of an earlier guest on this link may be there.
        let _ = fs::remove_dir_all(&share);
        fs::create_dir(&share)?;
        fs::write(share.join("agent.sh"), AGENT)?;
        fs::write(share.join("state.sh"), STATE)?;
        fs::write(share.join("configuration"), format!("MTU={MTU}\nADDRESS={guest}/24\n"))?;
        let console = lab.scratch().join(format!("{tap}.guest.log"));
        let log = File::create(&console)?;
        // KVM tells the guest how fast its clock is.
        let pit = if accelerator == "tcg" { NO_PIT } else { "" };
        let child = lab
            .command("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-vga", "none"])
            .arg("-machine")
            .arg(format!("pc,accel={accelerator},usb=off,smbus=off{pit}"))
            .args(["-no-reboot", "-cpu", "max", "-smp", PROCESSORS, "-m", &MEMORY_MIB.to_string()])
            .arg("-kernel")
            .arg(image.kernel())
            .arg("-initrd")
            .arg(image.file_system())
            .args(["-append", KERNEL_ARGUMENTS, "-serial", "stdio"])
            .arg("-netdev")
            .arg(format!("stream,id=n0,addr.type=unix,addr.path={}", relay.frames().display()))
            .args(["-device", &format!("virtio-net-pci,netdev=n0,romfile=,host_mtu={MTU}")])
            .arg("-fsdev")
            .arg(format!("local,id=host,path={},security_model=none", share.display()))
            .args(["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start qemu")?;
        let is_emulated = accelerator == "tcg";
        let guest = Self { child: RefCell::new(child), share, console, commands: 0, is_emulated };
        let start = Instant::now();
        while !guest.has("up") {
            if let Some(status) = guest.ended() {
                bail!("the guest did not boot ({status}): {}", guest.console_tail());
            }
            if start.elapsed() > BOOT_LIMIT {
                bail!("the guest did not boot in {BOOT_LIMIT:?}: {}", guest.console_tail());
            }
            sleep(POLL);
        }
        let version = image.version();
        eprintln!("xtask: Linux {version} booted in {:.1?} ({accelerator})", start.elapsed());
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
            // Tests are large files.
            fs::hard_link(program, &target)
                .or_else(|_| fs::copy(program, target).map(drop))
                .with_context(|| format!("cannot copy {}", program.display()))?;
        }
        Ok(name.to_string_lossy().into_owned())
    }

    /// Resets the machine, as a cut of its power does: its kernel gets to do nothing more.
    pub(super) fn reset(mut self) {
        let child = self.child.get_mut();
        let _ = child.kill();
        let _ = child.wait();
    }

    /// What the guest says of itself, to explain a failure. It needs no network, but a guest that
    /// runs.
    pub(super) fn state(&mut self) -> String {
        let state = match self.start("sh state.sh") {
            Ok(state) => state,
            Err(error) => return format!("cannot ask the guest: {error:#}"),
        };
        let (guest, start) = (state.guest, Instant::now());
        let over = || start.elapsed() > STATE_LIMIT || guest.ended().is_some();
        while state.status().is_none() && !over() {
            sleep(POLL);
        }
        match state.status() {
            Some(_) => state.output(),
            None => format!("{}\n{}", guest.silence(), guest.console()),
        }
    }

    /// Why the guest says nothing more.
    fn silence(&self) -> String {
        match self.ended() {
            Some(status) => format!("the guest has ended, qemu with {status}"),
            None => format!("the guest does not answer within {STATE_LIMIT:?}"),
        }
    }

    /// How qemu ended, if it has.
    fn ended(&self) -> Option<ExitStatus> {
        self.child.borrow_mut().try_wait().ok().flatten()
    }

    /// What the guest's kernel said on its console: errors, and why it panicked.
    fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    fn has(&self, name: &str) -> bool {
        self.share.join(name).exists()
    }

    fn console_tail(&self) -> String {
        let text = self.console();
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
            if self.ended().is_some() {
                return;
            }
            sleep(POLL);
        }
        let child = self.child.get_mut();
        let _ = child.kill();
        let _ = child.wait();
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
            if start.elapsed() > STATE_LIMIT || self.guest.ended().is_some() {
                let why = match self.read("state") {
                    Some(_) => format!("the command does not end within {STATE_LIMIT:?}"),
                    None => self.guest.silence(),
                };
                bail!("{why}; the guest's console: {:?}", self.guest.console_tail());
            }
            sleep(POLL);
        }
        Ok(())
    }

    pub(super) fn output(&self) -> String {
        self.read("out").unwrap_or_default()
    }

    /// What the guest said of itself before [`Running::stop`] ended the command, or, when it could
    /// not, what is on its console.
    pub(super) fn state(&self) -> Option<String> {
        let console = || (self.guest.ended().is_some()).then(|| self.guest.console());
        self.read("state").or_else(console)
    }

    fn read(&self, what: &str) -> Option<String> {
        let bytes = fs::read(self.guest.share.join(format!("{}.{what}", self.number))).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}
