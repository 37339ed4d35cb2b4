//! `cargo xtask lab`: hosts and links of a set rate, by hand (docs/lab.md).
//!
//! A lab belongs to a process in the background, `lab hold`, or `millstream lab up --hold` where the file is a topology. The
//! other commands find it by a record in its folder, which is gone when the lab is.

mod bench;
mod collectives;
mod cuts;
mod figures;
mod mixed;
mod options;
mod policies;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use millstream_lab::{Handle, Lab, Labs, Plan};

use crate::{process, programs};
pub(crate) use options::Options;
use options::Task;

pub(crate) fn run(options: &Options) -> Result<()> {
    let name = options.name.as_str();
    match &options.task {
        Task::Up(file) if is_topology(file) => up_of_topology(name, file),
        Task::Up(file) => up(name, file),
        Task::Hold(file) => hold(name, file),
        Task::Down => Ok(labs().end(name)?),
        Task::Exec { host, command } => exec(name, host, command),
        Task::Cut { host, nic, how } => Ok(labs().change(name, |lab| lab.cut(host, nic, *how))?),
        Task::Restore { host, nic } => Ok(labs().change(name, |lab| lab.restore(host, nic))?),
        Task::Rate { host, nic, rate } => {
            Ok(labs().change(name, |lab| lab.set_rate(host, nic, *rate))?)
        }
        Task::Status => status(&labs().read(name)?.lab),
        Task::Bench(rows) => bench::run(rows),
        Task::BenchPolicies(rows) => policies::run(rows),
        Task::BenchCollectives(rows) => collectives::run(rows),
    }
}

fn folder() -> PathBuf {
    process::target_directory().join("lab")
}

fn labs() -> Labs {
    Labs::new(folder())
}

fn is_topology(file: &Path) -> bool {
    file.extension().is_some_and(|end| end == "yaml" || end == "yml")
}

/// Has the command make the lab, with the daemons in it, and note it where the other tasks find it.
fn up_of_topology(name: &str, file: &Path) -> Result<()> {
    let mut command = Command::new(programs::millstream()?);
    command.args(["lab", "up", "--name", name, "--directory"]).arg(folder());
    process::run(command.arg(file))
}

fn read_plan(file: &Path) -> Result<Plan> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    text.parse().with_context(|| file.display().to_string())
}

/// Starts a process that holds the lab, and waits until it is there.
fn up(name: &str, file: &Path) -> Result<()> {
    // Bad plans are told here, and not by a process in the background.
    read_plan(file)?;
    let start = Instant::now();
    let mut holder = Command::new(std::env::current_exe().context("where is xtask?")?);
    holder.args(["lab", "hold", "--name", name]).arg(file);
    holder.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut holder = holder.spawn().context("cannot start a process that holds the lab")?;
    let mut line = String::new();
    let stdout = holder.stdout.take().expect("it is piped");
    BufReader::new(stdout).read_line(&mut line).context("cannot hear from the lab's holder")?;
    if line.trim_end() != READY {
        let said = holder.wait_with_output().context("cannot wait for the lab's holder")?;
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        bail!("{}", said.trim().trim_start_matches("xtask: "));
    }
    let record = labs().read(name)?;
    eprintln!("xtask: up in {:.2} s", start.elapsed().as_secs_f64());
    status(&record.lab)
}

/// What `hold` prints when the lab is there.
const READY: &str = "ready";

/// Holds a lab until it is told to stop by a signal, which ends it in the usual way: the lab goes with
/// its owner.
fn hold(name: &str, file: &Path) -> Result<()> {
    let plan = read_plan(file)?;
    let lab = Lab::up_in(&plan, labs().new_folder(name)?)?;
    labs().write(name, &lab, Vec::new())?;
    println!("{READY}");
    loop {
        std::thread::park();
    }
}

/// Becomes the program, at a host.
fn exec(name: &str, host: &str, command: &[String]) -> Result<()> {
    let lab = labs().read(name)?.lab;
    let (program, arguments) = command.split_first().context("no command")?;
    let mut command = lab.command(host, program)?;
    let error = command.args(arguments).stdin(Stdio::inherit()).exec();
    Err(anyhow!(error).context(format!("cannot start {program}")))
}

/// A line for each NIC.
fn status(lab: &Handle) -> Result<()> {
    println!("{:10} {:40} {:>10}  state", "NIC", "addresses", "rate");
    for host in &lab.layout().hosts {
        for nic in &host.nics {
            let addresses: Vec<String> = nic.addresses.iter().map(ToString::to_string).collect();
            let rate = lab.rate(&host.name, &nic.name)?;
            let state = match lab.is_cut(&host.name, &nic.name)? {
                None => "up",
                Some(millstream_lab::Cut::Down) => "cut: down",
                Some(millstream_lab::Cut::Silent) => "cut: silent",
            };
            println!(
                "{:10} {:40} {:>10}  {state}",
                format!("{}:{}", host.name, nic.name),
                addresses.join(" "),
                rate.map_or_else(|| "no limit".to_owned(), |rate| rate.to_string()),
            );
        }
    }
    Ok(())
}

/// A plan of this repository.
fn plan_of_ours(name: &str) -> PathBuf {
    crate::process::repository_root().join("crates/lab/plans").join(name)
}
