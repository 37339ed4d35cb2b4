//! Hosts of an AllReduce on the kernel's device over a switch of ours: two in one guest beside one of ours on a
//! soft device, or one in each of two guests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::guest::{Guest, Running};
use super::lab::{self, Lab};
use super::link::{Link, Machines, OURS};
use super::row::{Process, Tools, await_that, finish, tail};
use crate::process;

/// For all calls: some five times of what a busy machine of two cores takes.
const LIMIT: Duration = Duration::from_secs(360);
const LISTEN_LIMIT: Duration = Duration::from_secs(30);
const PORT: u16 = 7600;
/// Of the host here: a switch has its address to itself.
const HOST: &str = "10.91.0.3";
/// Less than an element a packet, not a whole number of packets, many segments.
const SIZES: &str = "4,1000,65536,1048580,16777216";

/// One rank of a world, where its programs are.
struct Rank {
    millstream: String,
    plain_host: String,
    number: u32,
    world: u32,
}

impl Rank {
    fn here(tools: &Tools, number: u32, world: u32) -> Self {
        let [millstream, plain_host] =
            [&tools.millstream, &tools.plain_host].map(|program| program.display().to_string());
        Self { millstream, plain_host, number, world }
    }

    fn in_guest(guest: &Guest, tools: &Tools, number: u32, world: u32) -> Result<Self> {
        let lend = |program| Ok::<_, anyhow::Error>(format!("/host/{}", guest.lend(program)?));
        let (millstream, plain_host) = (lend(&tools.millstream)?, lend(&tools.plain_host)?);
        Ok(Self { millstream, plain_host, number, world })
    }

    /// Shell commands: with each type and mode a group, and in it a call for each size, every element of whose result
    /// is checked; and a group of hosts that send no descriptors.
    fn commands(&self, option: &str, device: &str) -> String {
        let Self { millstream, plain_host, number, world } = self;
        format!(
            "for mode in write send; do for dtype in int32 fp32; do {millstream} allreduce --controller={OURS}:{PORT} \
             --path=switch --wait=30s --timeout=60s --group=$mode-$dtype --world={world} --rank={number} {option} \
             --mode=$mode --dtype=$dtype --size={SIZES} --verify || exit 1; done; done; \
             {plain_host} {OURS}:{PORT} plain {world} {number} {device} {SIZES}"
        )
    }
}

/// What of a row runs here. All of it prints to one file.
struct Ours<'a> {
    lab: &'a Lab,
    log: PathBuf,
    output: File,
    /// The controller and the switch.
    daemons: Vec<Process>,
}

impl<'a> Ours<'a> {
    /// Starts the controller and the switch.
    fn start(lab: &'a Lab, tools: &Tools, stem: &Path) -> Result<Self> {
        let program = &tools.millstream;
        let log = stem.with_extension("ours.log");
        let output = File::create(&log)?;
        let mut ours = Self { lab, log, output, daemons: Vec::new() };
        let controller = format!("{OURS}:{PORT}");
        let daemon = ours.spawn(program, &["controller", "--listen", &controller])?;
        if !await_that(LISTEN_LIMIT, || lab::listens(daemon.0.id(), PORT)) {
            bail!("the controller does not listen: {}", ours.said()?);
        }
        let switch =
            ours.spawn(program, &["switch", "--controller", &controller, "--bind", OURS])?;
        ours.daemons.extend([daemon, switch]);
        Ok(ours)
    }

    fn spawn(&self, program: &Path, arguments: &[&str]) -> Result<Process> {
        let child = self
            .lab
            .command(program)
            .args(arguments)
            .stdout(self.output.try_clone()?)
            .stderr(self.output.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Process(child))
    }

    /// The end of what was printed.
    fn said(&self) -> Result<String> {
        Ok(tail(&fs::read_to_string(&self.log)?))
    }
}

/// Two hosts in the guest, and one of ours. What both sides print goes to `STEM.ours.log` and
/// `STEM.kernel.log`.
pub(super) fn with_ours(lab: &Lab, guest: &mut Guest, tools: &Tools, stem: &Path) -> Result<()> {
    let ours = Ours::start(lab, tools, stem)?;
    let mut address = lab.command("ip");
    process::run(address.args(["address", "replace", &format!("{HOST}/32"), "dev", "lo"]))?;
    let soft = Rank::here(tools, 0, 3).commands(&format!("--bind={HOST}"), &format!("soft-{HOST}"));
    let mut soft = ours.spawn(Path::new("sh"), &["-c", &soft])?;
    let one = Rank::in_guest(guest, tools, 1, 3)?.commands("--device=rxe0", "rxe0");
    let two = Rank::in_guest(guest, tools, 2, 3)?.commands("--device=rxe0", "rxe0");
    let both = guest.start(&format!("({one}) & one=$!\n({two}) && wait $one"))?;
    let failed = |soft: &mut Process| soft.ended().is_some_and(|status| !status.success());
    await_that(LIMIT, || both.status().is_some() || failed(&mut soft));
    await_that(LIMIT, || soft.ended().is_some() || both.status() != Some(0));
    let theirs = finish(&both, stem);
    match soft.ended() {
        Some(status) if status.success() => theirs,
        Some(status) => bail!("ours ended with {status}: {}", ours.said()?),
        None => theirs.and_then(|()| bail!("ours did not end: {}", ours.said()?)),
    }
}

/// One host in the guest and one in another guest, whose end of a link of its own the switch reaches from its one
/// address. What they print goes to `STEM.kernel.log` and `STEM-other.kernel.log`.
pub(super) fn in_two_guests(
    machines: &Machines<'_>,
    guest: &mut Guest,
    tools: &Tools,
    stem: &Path,
) -> Result<()> {
    let (_relay, mut other) = machines.boot(Link::SECOND)?;
    let ours = Ours::start(machines.lab, tools, stem)?;
    let one = Rank::in_guest(guest, tools, 0, 2)?.commands("--device=rxe0", "rxe0");
    let two = Rank::in_guest(&other, tools, 1, 2)?.commands("--device=rxe0", "rxe0");
    let route = format!("ip route replace {OURS} via {} || exit 1", Link::SECOND.ours);
    let one = guest.start(&one)?;
    let two = other.start(&format!("{route}\n{two}"))?;
    let failed = |running: &Running<'_>| running.status().is_some_and(|status| status != 0);
    let ended = || one.status().is_some() && two.status().is_some();
    await_that(LIMIT, || ended() || failed(&one) || failed(&two));
    // One that failed says why, and the other soon does too.
    await_that(LISTEN_LIMIT, ended);
    let stem_of_other = PathBuf::from(format!("{}-other", stem.display()));
    let results = [finish(&one, stem), finish(&two, &stem_of_other)];
    results.into_iter().collect::<Result<()>>().with_context(|| match ours.said() {
        Ok(text) => format!("ours said: {text}"),
        Err(error) => format!("ours said: {error}"),
    })
}
