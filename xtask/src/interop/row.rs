//! One conversation with the kernel: libibverbs' `ibv_rc_pingpong` there and `rdma pingpong` here,
//! or the same test of ours there on the kernel's device and here on a soft one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::files::Node;
use super::guest::{Guest, Running};
use super::lab::{self, Lab};
use super::link::{GUEST, Machines, OURS};
use super::{device, files, hosts, threads};
use crate::programs;

/// The TCP port on which both sides exchange their queue pairs' addresses.
const PORT: u16 = 18515;
/// For a conversation. The kernel's side never gives up by itself when its peer is silent.
const LIMIT: Duration = Duration::from_secs(60);
/// After one side is done, for the other.
const CLOSING_LIMIT: Duration = Duration::from_secs(30);
const LISTEN_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

/// A guest that stands still for half a second on a busy machine is not dead: this is seven.
const PATIENT: &str = "--qp-timeout=18";

/// 1 MiB at the default path MTU of 1024 is 1024 packets a message: wrong order, a lost ACK or a
/// wrong MSN show up within few of them. `--all` is 2 bytes to 8 MiB.
pub(super) const ROWS: &[Row] = &[
    Row {
        name: "kernel to itself, 1000 B",
        talk: Talk::Itself { options: "--size=1000 --iters=100" },
    },
    pingpong("kernel sends to us, 1000 B", Side::Client, "--size=1000 --iters=500", ""),
    pingpong("we send to kernel, 1000 B", Side::Server, "--size=1000 --iters=500", ""),
    pingpong("kernel sends to us, 1 MiB", Side::Client, "--size=1048576 --iters=10", ""),
    pingpong("we send to kernel, 1 MiB", Side::Server, "--size=1048576 --iters=10", ""),
    pingpong(
        "kernel sends to us, path MTU 256, receive depth 2",
        Side::Client,
        "--size=30000 --iters=50 --mtu=256",
        "--rx-depth=2",
    ),
    pingpong(
        "we send to kernel, path MTU 512, receive depth 2",
        Side::Server,
        "--size=30000 --iters=50 --mtu=512",
        "--rx-depth=2",
    ),
    packet("kernel sends to us, packet driver", Side::Client, "--size=100000 --iters=50"),
    packet("we send to kernel, packet driver", Side::Server, "--size=100000 --iters=50"),
    datagrams("kernel sends datagrams to us", Side::Client, "--size=1000 --iters=200"),
    datagrams("we send datagrams to kernel", Side::Server, "--size=1024 --iters=200"),
    test("we WRITE to kernel, all sizes", Side::Server, "write-bw --all --iters=3"),
    test("kernel WRITEs to us, all sizes", Side::Client, "write-bw --all --iters=3"),
    test("we READ from kernel, all sizes", Side::Server, "read-bw --all --iters=3"),
    test("kernel READs from us, all sizes", Side::Client, "read-bw --all --iters=3"),
    test("we SEND to kernel, all sizes", Side::Server, "send-bw --all --iters=3"),
    test("kernel SENDs to us, all sizes", Side::Client, "send-bw --all --iters=3"),
    test("we add to the kernel's counter", Side::Server, "atomic --op=fetch-add"),
    test("kernel adds to our counter", Side::Client, "atomic --op=fetch-add"),
    test("we swap the kernel's counter", Side::Server, "atomic --op=compare-swap"),
    test("kernel swaps our counter", Side::Client, "atomic --op=compare-swap"),
    test("WRITE with immediate, to and fro", Side::Server, "write-bw --latency --iters=200"),
    test("four queue pairs", Side::Client, "write-bw --qps=4 --size=3000 --iters=100 --mtu=256"),
    test("our atomics at the kernel", Side::Server, "atomic --qps=4 --iters=300"),
    test("the kernel's atomics here", Side::Client, "atomic --qps=4 --iters=300"),
    Row { name: "kernel as device, verbs suite", talk: Talk::Suite },
    Row { name: "kernel as device, files to and fro", talk: Talk::Files(Node::Same) },
    Row { name: "files into kernel's device and back", talk: Talk::Files(Node::Guest) },
    Row { name: "files from kernel's device and back", talk: Talk::Files(Node::Ours) },
    Row { name: "files both ways, three of ours on one address", talk: Talk::Files(Node::Both) },
    Row { name: "AllReduce of two hosts on kernel's device and ours", talk: Talk::Hosts },
    Row { name: "AllReduce of two kernels on two machines", talk: Talk::Guests },
];

const fn pingpong(
    name: &'static str,
    kernel: Side,
    options: &'static str,
    theirs: &'static str,
) -> Row {
    Row { name, talk: Talk::Pingpong { kernel, options, theirs, driver: "udp" } }
}

/// Our side over packet sockets.
const fn packet(name: &'static str, kernel: Side, options: &'static str) -> Row {
    Row { name, talk: Talk::Pingpong { kernel, options, theirs: "", driver: "packet" } }
}

const fn datagrams(name: &'static str, kernel: Side, options: &'static str) -> Row {
    Row { name, talk: Talk::Datagrams { kernel, options } }
}

const fn test(name: &'static str, kernel: Side, command: &'static str) -> Row {
    Row { name, talk: Talk::Test { kernel, command } }
}

/// The programs that rows run.
pub(super) struct Tools {
    pub(super) millstream: PathBuf,
    pub(super) suite: PathBuf,
    pub(super) plain_host: PathBuf,
}

impl Tools {
    pub(super) fn build() -> Result<Self> {
        let (millstream, suite) = (programs::millstream()?, programs::suite()?);
        Ok(Self { millstream, suite, plain_host: programs::plain_host()? })
    }
}

pub(super) struct Row {
    pub(super) name: &'static str,
    talk: Talk,
}

/// Who talks to whom, and how.
enum Talk {
    /// `ibv_rc_pingpong` with itself, both in the guest: if this row fails, the fault is not in our
    /// stack.
    Itself { options: &'static str },
    /// `ibv_rc_pingpong` in the guest and ours here. `options` go to both, `theirs` to the
    /// original only; ours uses `driver`.
    Pingpong { kernel: Side, options: &'static str, theirs: &'static str, driver: &'static str },
    /// `ibv_ud_pingpong` in the guest and ours here, with the same options.
    Datagrams { kernel: Side, options: &'static str },
    /// A test of ours on both sides: there on the kernel's device, here on a soft one.
    Test { kernel: Side, command: &'static str },
    /// Our own test suite in the guest.
    Suite,
    /// Files between engines, one of them at least on the kernel's device.
    Files(Node),
    /// Hosts of a group, two of them on the kernel's device, over our switch.
    Hosts,
    /// Hosts of a group, each on the kernel's device of a machine of its own, over our switch.
    Guests,
}

/// What the kernel's side is.
#[derive(Clone, Copy)]
enum Side {
    Client,
    Server,
}

impl Row {
    /// Runs the row. What both sides print goes to `STEM.ours.log` and `STEM.kernel.log`.
    pub(super) fn run(
        &self,
        machines: &Machines<'_>,
        guest: &mut Guest,
        tools: &Tools,
        stem: &Path,
    ) -> Result<()> {
        let (lab, ours) = (machines.lab, &*tools.millstream);
        let device = "-d rxe0 -g $RXE_GID_INDEX -c";
        let original = format!("ibv_rc_pingpong {device}");
        match self.talk {
            Talk::Itself { options } => {
                let listening = "until grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6; do usleep 20000; done";
                let theirs = format!("{original} {options}");
                let both = format!(
                    "{theirs} >/dev/null & server=$!\n{listening}\n{theirs} {GUEST} && wait $server"
                );
                self.alone(guest.start(&both)?, stem)
            }
            Talk::Suite => device::run(guest, &tools.suite, stem),
            Talk::Files(node) => files::run(lab, guest, ours, stem, node),
            Talk::Hosts => hosts::with_ours(lab, guest, tools, stem),
            Talk::Guests => hosts::in_two_guests(machines, guest, tools, stem),
            Talk::Pingpong { kernel, options, theirs, driver } => {
                let theirs = format!("{original} {options} {theirs}");
                let words = format!("pingpong {options} --driver {driver} {PATIENT}");
                Self::talk(lab, guest, ours, stem, kernel, &theirs, &words)
            }
            Talk::Datagrams { kernel, options } => {
                let theirs = format!("ibv_ud_pingpong {device} {options}");
                let words = format!("ud-pingpong {options}");
                Self::talk(lab, guest, ours, stem, kernel, &theirs, &words)
            }
            Talk::Test { kernel, command } => {
                let program = guest.lend(ours)?;
                let theirs = format!("./{program} rdma {command} --device rxe0 {PATIENT}");
                Self::talk(lab, guest, ours, stem, kernel, &theirs, &format!("{command} {PATIENT}"))
            }
        }
    }

    /// Runs a test of ours with the command line `theirs` as the server in the guest, and a client
    /// here, whose output goes to `STEM.ours.log`.
    pub(super) fn measure(
        lab: &Lab,
        guest: &mut Guest,
        ours: &Path,
        stem: &Path,
        theirs: &str,
        command: &str,
    ) -> Result<()> {
        Self::talk(lab, guest, ours, stem, Side::Server, theirs, command)
    }

    /// Lets `theirs` in the guest and ours, with these words for `rdma`, talk to each other.
    fn talk(
        lab: &Lab,
        guest: &mut Guest,
        ours: &Path,
        stem: &Path,
        kernel: Side,
        theirs: &str,
        words: &str,
    ) -> Result<()> {
        let log = stem.with_extension("ours.log");
        let _ = fs::remove_file(&log);
        let start = |host| start_ours(lab, ours, &log, words, host).map(Process);
        let result = match kernel {
            Side::Client => {
                let mut server = start(None)?;
                let listening = await_that(LISTEN_LIMIT, || {
                    server.ended().is_some() || lab::listens(server.0.id(), PORT)
                });
                match (listening, server.ended()) {
                    (_, Some(status)) => Err(anyhow::anyhow!("ours ended with {status} at once")),
                    (false, None) => Err(anyhow::anyhow!("ours does not listen on port {PORT}")),
                    (true, None) => {
                        let client = guest.start(&format!("exec {theirs} {OURS}"))?;
                        conclude(client, server, stem)
                    }
                }
            }
            Side::Server => {
                let server = guest.start(&format!("exec {theirs}"))?;
                if await_that(LISTEN_LIMIT, || server.listens() || server.status().is_some())
                    && server.status().is_none()
                {
                    conclude(server, start(Some(GUEST))?, stem)
                } else {
                    server.stop()?;
                    Err(anyhow::anyhow!(
                        "the kernel's side does not listen: {}",
                        tail(&server.output())
                    ))
                }
            }
        };
        result.map_err(|error| match fs::read_to_string(&log) {
            Ok(text) if !text.trim().is_empty() => {
                error.context(format!("ours said: {}", tail(&text)))
            }
            _ => error,
        })
    }

    fn alone(&self, both: Running<'_>, stem: &Path) -> Result<()> {
        await_that(LIMIT, || both.status().is_some());
        finish(&both, stem)
    }
}

fn start_ours(
    lab: &Lab,
    ours: &Path,
    log: &Path,
    words: &str,
    host: Option<&str>,
) -> Result<Child> {
    let log = File::create(log)?;
    lab.command(ours)
        .arg("rdma")
        .args(words.split_whitespace())
        .args(["--bind", OURS])
        .args(host)
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", ours.display()))
}

/// Waits for both sides, and fails unless both exit with 0.
fn conclude(kernel: Running<'_>, mut ours: Process, stem: &Path) -> Result<()> {
    await_that(LIMIT, || kernel.status().is_some() || ours.ended().is_some());
    await_that(CLOSING_LIMIT, || kernel.status().is_some() && ours.ended().is_some());
    let ended = ours.ended();
    if ended.is_none() {
        eprintln!("ours, which has not ended:\n{}", threads::of(ours.0.id()));
    }
    let kernel = finish(&kernel, stem);
    match (ended, kernel) {
        (Some(status), kernel) if status.success() => kernel,
        (Some(status), Ok(())) => bail!("ours ended with {status}, the kernel's side with 0"),
        (Some(status), Err(error)) => Err(error.context(format!("ours ended with {status}"))),
        (None, Ok(())) => bail!("ours did not end, the kernel's side did"),
        (None, Err(error)) => Err(error.context("ours did not end")),
    }
}

/// Saves what the kernel's side printed, ends it if it has not ended, and judges it. Where the guest
/// was before it was ended goes to `STEM.guest.log`.
pub(super) fn finish(kernel: &Running<'_>, stem: &Path) -> Result<()> {
    let status = kernel.status();
    let stopped = if status.is_none() { kernel.stop() } else { Ok(()) };
    let output = kernel.output();
    fs::write(stem.with_extension("kernel.log"), &output)?;
    if let Some(state) = kernel.state() {
        if status.is_none() {
            // The folder of logs may be gone before anybody looks.
            eprintln!("{}", threads::first_part(&state));
        }
        fs::write(stem.with_extension("guest.log"), state)?;
    }
    stopped?;
    match status {
        Some(0) => Ok(()),
        Some(status) => bail!("the kernel's side ended with {status}: {}", tail(&output)),
        None => bail!("the kernel's side did not end: {}", tail(&output)),
    }
}

/// A child that does not outlive its row.
pub(super) struct Process(pub(super) Child);

impl Process {
    pub(super) fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.0.try_wait().ok().flatten()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already: then there is nothing to kill.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether `condition` became true in time.
pub(super) fn await_that(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > limit {
            return false;
        }
        sleep(POLL);
    }
    true
}

/// Prints the end of what a test said before it failed: its log may be gone before anybody looks.
pub(super) fn print_end(output: &str) {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(40)..].iter().for_each(|line| eprintln!("  {line}"));
}

/// The last lines of a log, as one.
pub(super) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join(" | ")
}
