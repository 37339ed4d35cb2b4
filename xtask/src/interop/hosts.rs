//! Hosts of an AllReduce on the kernel's device, and one on a soft device, over a switch of ours.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::guest::{Guest, OURS};
use super::lab::{self, Lab};
use super::row::{Process, await_that, finish, tail};
use crate::process;

/// For all calls: some ten times of what an idle machine takes.
const LIMIT: Duration = Duration::from_secs(180);
const LISTEN_LIMIT: Duration = Duration::from_secs(30);
const PORT: u16 = 7600;
/// Of the host here: a switch has its address to itself.
const HOST: &str = "10.91.0.3";
/// Less than an element a packet, not a whole number of packets, many segments.
const SIZES: &str = "4,1000,65536,1048580,16777216";

/// Shell commands that are one rank of three: with each type and mode a group, and in it a call for each size,
/// every element of whose result is checked.
fn rank(program: &str, rank: u32, device: &str) -> String {
    format!(
        "for mode in write send; do for dtype in int32 fp32; do {program} allreduce --controller={OURS}:{PORT} \
         --path=switch --wait=30s --timeout=60s --group=$mode-$dtype --world=3 --rank={rank} {device} --mode=$mode --dtype=$dtype \
         --size={SIZES} --verify || exit 1; done; done"
    )
}

/// Runs the row. What both sides print goes to `STEM.ours.log` and `STEM.kernel.log`.
pub(super) fn run(lab: &Lab, guest: &mut Guest, ours: &Path, stem: &Path) -> Result<()> {
    let log = stem.with_extension("ours.log");
    let output = File::create(&log)?;
    let start = |program: &Path, arguments: &[&str]| -> Result<Process> {
        let child = lab
            .command(program)
            .args(arguments)
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Process(child))
    };
    let controller = format!("{OURS}:{PORT}");
    let daemon = start(ours, &["controller", "--listen", &controller])?;
    if !await_that(LISTEN_LIMIT, || lab::listens(daemon.0.id(), PORT)) {
        bail!("the controller does not listen: {}", tail(&fs::read_to_string(&log)?));
    }
    let _switch = start(ours, &["switch", "--controller", &controller, "--bind", OURS])?;
    let mut address = lab.command("ip");
    process::run(address.args(["address", "replace", &format!("{HOST}/32"), "dev", "lo"]))?;
    let soft = rank(&ours.display().to_string(), 0, &format!("--bind={HOST}"));
    let mut soft = start(Path::new("sh"), &["-c", &soft])?;
    let program = format!("/host/{}", guest.lend(ours)?);
    let [one, two] = [1, 2].map(|number| rank(&program, number, "--device=rxe0"));
    let both = guest.start(&format!("({one}) & one=$!\n({two}) && wait $one"))?;
    let failed = |soft: &mut Process| soft.ended().is_some_and(|status| !status.success());
    await_that(LIMIT, || both.status().is_some() || failed(&mut soft));
    await_that(LIMIT, || soft.ended().is_some() || both.status() != Some(0));
    let theirs = finish(&both, stem);
    match soft.ended() {
        Some(status) if status.success() => theirs,
        Some(status) => bail!("ours ended with {status}: {}", tail(&fs::read_to_string(&log)?)),
        None => {
            theirs.and_then(|()| bail!("ours did not end: {}", tail(&fs::read_to_string(&log)?)))
        }
    }
}
