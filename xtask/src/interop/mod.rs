//! `cargo xtask interop`: our stack against the Linux kernel's, message by message.
//!
//! The kernel's soft-RoCE (rxe) runs in a guest, and every packet to and from it passes a relay. Each
//! row is one conversation, reported by itself; one boot serves all of them.

mod bench;
mod capture;
mod device;
mod files;
mod guest;
mod hosts;
mod image;
mod lab;
mod link;
mod matrix;
pub(crate) mod power_cut;
mod relay;
mod row;
mod threads;
mod transfer;

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::bench::Bench;
use self::image::Image;
use self::lab::Lab;
use self::link::{Link, Machines};
use self::matrix::Field;
use self::row::{Row, Tools};
use crate::{install, process, programs};

/// What the rows of the matrix are called while there is no peer to list them.
const MATRIX: &str = "conformance cases";
/// And the transfer engine's tests while they are not built.
const TRANSFER: &str = "transfer engine's tests";

/// For all rows: some three times of what a machine of two cores needs. What hangs ends by limits of
/// its own; this is for a machine on which everything is slow.
const RUN_LIMIT: Duration = Duration::from_secs(30 * 60);

/// When the whole run must have ended.
#[derive(Clone, Copy)]
struct Limit(Instant);

impl Limit {
    fn start() -> Self {
        Self(Instant::now() + RUN_LIMIT)
    }

    fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    fn reason(self) -> String {
        format!("the whole run did not end within {RUN_LIMIT:?}")
    }
}

/// What the command line asks for.
pub(crate) struct Options {
    only: String,
    repeat: u32,
    accelerator: String,
    list: bool,
    bench: bool,
}

impl Default for Options {
    /// Every row. Emulation is the default though /dev/kvm may exist: a nested KVM can hang for ever
    /// in the guest's first instructions, and emulated the guest boots in two seconds anyway.
    fn default() -> Self {
        Self {
            only: String::new(),
            repeat: 1,
            accelerator: "tcg".to_owned(),
            list: false,
            bench: false,
        }
    }
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--only" => options.only.clone_from(value()?),
                "--accel" => {
                    options.accelerator.clone_from(value()?);
                    if !["tcg", "kvm"].contains(&options.accelerator.as_str()) {
                        bail!("--accel {}: it is tcg or kvm", options.accelerator);
                    }
                }
                "--repeat" => {
                    let value = value()?;
                    options.repeat =
                        value.parse().with_context(|| format!("--repeat {value}: no number"))?;
                }
                "--list" => options.list = true,
                "--bench" => options.bench = true,
                _ => bail!("interop has no option {argument}"),
            }
        }
        Ok(options)
    }
}

/// How a row ended.
#[derive(Debug, PartialEq)]
enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

#[derive(Debug)]
struct Report {
    name: String,
    outcome: Outcome,
    time: Duration,
}

/// A verdict on the packets of the matrix.
type Referee = fn(&Path) -> Result<()>;

const REFEREES: [(&str, Referee); 2] = [
    ("capture: tshark dissects every packet", capture::dissected),
    ("capture: the ICRC of every packet is right", capture::icrc),
];

/// What is to be run.
struct Rows {
    conversations: Vec<&'static Row>,
    matrix: Vec<Cases>,
    transfer: transfer::Tests,
}

/// The cases of one of our drivers.
struct Cases {
    driver: &'static str,
    rows: Vec<matrix::Row>,
    referees: Vec<(String, Referee)>,
}

impl Rows {
    /// Those whose names contain `text`.
    fn choose(text: &str, peer: &Path) -> Result<Self> {
        let wanted = |name: &str| name.contains(text);
        let cases = |driver| {
            let mut rows = matrix::rows(peer, driver)?;
            rows.retain(|row| wanted(&row.name));
            let referees = REFEREES.map(|(what, judge)| (format!("{driver}, {what}"), judge));
            let referees = referees.into_iter().filter(|(name, _)| wanted(name)).collect();
            Ok(Cases { driver, rows, referees })
        };
        let rows = Self {
            conversations: row::ROWS.iter().filter(|row| wanted(row.name)).collect(),
            matrix: matrix::DRIVERS.into_iter().map(cases).collect::<Result<_>>()?,
            transfer: transfer::choose(text)?,
        };
        if rows.names().next().is_none() {
            bail!("no row's name contains {text:?}");
        }
        Ok(rows)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let conversations = self.conversations.iter().map(|row| row.name);
        let transfer = self.transfer.run.iter().map(|test| test.name.as_str());
        conversations.chain(self.matrix.iter().flat_map(Cases::names)).chain(transfer)
    }
}

impl Cases {
    fn names(&self) -> impl Iterator<Item = &str> {
        let rows = self.rows.iter().map(|row| row.name.as_str());
        rows.chain(self.referees.iter().map(|(name, _)| name.as_str()))
    }
}

/// Runs the rows and prints what became of each.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.list {
        let rows = Rows::choose(&options.only, &programs::peer()?)?;
        rows.names().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let obstacle = obstacle();
    if options.bench {
        return match obstacle {
            None => measure(options),
            Some(reason) => bail!("interop --bench: {reason}"),
        };
    }
    let reports = match obstacle {
        None => run_rows(options)?,
        Some(reason) => {
            let names = row::ROWS.iter().map(|row| row.name).chain([MATRIX, TRANSFER]);
            let skipped = |name: &str| Report {
                name: name.to_owned(),
                outcome: Outcome::Skipped(reason.clone()),
                time: Duration::ZERO,
            };
            names.map(skipped).collect()
        }
    };
    summarize(&reports, process::everything_required())
}

/// Why no row can run on this machine, if so.
fn obstacle() -> Option<String> {
    if !process::is_root() {
        return Some("network namespaces and taps need root".to_owned());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("this kernel has no /dev/net/tun".to_owned());
    }
    let missing = install::ensure(install::FOR_INTEROP);
    missing.first().map(|need| format!("{} is not installed", need.program))
}

fn run_rows(options: &Options) -> Result<Vec<Report>> {
    let peer = programs::peer()?;
    let rows = Rows::choose(&options.only, &peer)?;
    // All is built before the guest boots: it would have to share the processor.
    let cable = programs::relay()?;
    let tools = match rows.conversations.is_empty() {
        true => None,
        false => Some(Tools::build()?),
    };
    let logs = process::target_directory().join("interop");
    std::fs::create_dir_all(&logs)?;
    let image = Image::ensure()?;
    let lab = Lab::new()?;
    let accelerator = &options.accelerator;
    let machines = Machines { lab: &lab, image: &image, cable: &cable, accelerator };
    let (mut relay, mut guest) = machines.boot(Link::FIRST)?;
    let mut reports = Vec::new();
    let failed = Cell::new(false);
    let mut report = |report: Report| {
        let Report { name, outcome, time } = &report;
        eprintln!("xtask: {name}: {}, {time:.1?}", outcome.word());
        failed.set(failed.get() || matches!(outcome, Outcome::Failed(_)));
        reports.push(report);
    };
    let limit = Limit::start();
    for _ in 0..options.repeat {
        if failed.get() {
            break;
        }
        for row in &rows.conversations {
            let Some(tools) = &tools else { break };
            report(attempt(row.name, &logs, |stem| {
                if limit.left().is_zero() {
                    bail!("it was not reached: {}", limit.reason());
                }
                let capture = stem.with_extension("pcap");
                relay.command(&format!("capture {}", capture.display()))?;
                let result = row.run(&machines, &mut guest, tools, stem);
                relay.command("capture-end")?;
                result
            }));
        }
        for cases in &rows.matrix {
            let driver = cases.driver;
            let capture = logs.join(format!("cases-{driver}.pcap"));
            relay.command(&format!("capture {}", capture.display()))?;
            let field =
                Field { lab: &lab, guest: &mut guest, relay: &relay, driver, logs: &logs, limit };
            let ended = matrix::run(field, &peer, &cases.rows, &mut report);
            relay.command("capture-end")?;
            if failed.get() && !cases.rows.is_empty() {
                let last = logs.join(format!("cases-{driver}.last.pcap"));
                relay.command(&format!("recent {}", last.display()))?;
            }
            if ended.is_err() {
                report(attempt(&format!("{driver}: both sides end"), &logs, |_| ended));
            }
            for (name, judge) in &cases.referees {
                report(attempt(name, &logs, |_| judge(&capture)));
            }
        }
        if !rows.transfer.run.is_empty() {
            let set_up = |stem: &Path| transfer::set_up(&mut guest, stem);
            report(attempt("transfer, the guest's devices", &logs, set_up));
        }
        for test in &rows.transfer.run {
            report(attempt(&test.name, &logs, |stem| test.run(&mut guest, stem)));
        }
    }
    for (test, why) in &rows.transfer.not_run {
        println!("not run: {test} ({why})");
    }
    if failed.get() {
        eprintln!("xtask: what both sides printed, and the packets: {}", logs.display());
    }
    Ok(reports)
}

/// Prints figures of our stack beside the kernel's.
fn measure(options: &Options) -> Result<()> {
    let (ours, cable) = (programs::fast_millstream()?, programs::relay()?);
    let logs = process::target_directory().join("interop");
    std::fs::create_dir_all(&logs)?;
    let image = Image::ensure()?;
    let lab = Lab::new()?;
    let accelerator = &options.accelerator;
    let machines = Machines { lab: &lab, image: &image, cable: &cable, accelerator };
    let (_relay, mut guest) = machines.boot(Link::FIRST)?;
    Bench { lab: &lab, guest: &mut guest, ours: &ours, logs: &logs }.run(&options.only)
}

/// Runs one row, whose files begin with the path that it is given.
fn attempt(name: &str, logs: &Path, run: impl FnOnce(&Path) -> Result<()>) -> Report {
    let start = Instant::now();
    let stem = logs.join(name.replace([',', ' '], "-").replace("--", "-"));
    let outcome = match run(&stem) {
        Ok(()) => Outcome::Passed,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    };
    Report { name: name.to_owned(), outcome, time: start.elapsed() }
}

impl Outcome {
    fn word(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "FAILED",
            Self::Skipped(_) => "skipped",
        }
    }
}

/// Prints the table and the closing line. With `strict`, a skipped row is a failure too.
fn summarize(reports: &[Report], strict: bool) -> Result<()> {
    let width = reports.iter().map(|report| report.name.len()).max().unwrap_or(0);
    let count = |word| reports.iter().filter(|report| report.outcome.word() == word).count();
    for Report { name, outcome, time } in reports {
        let reason = match outcome {
            Outcome::Passed => String::new(),
            Outcome::Failed(reason) | Outcome::Skipped(reason) => format!("  {reason}"),
        };
        let line =
            format!("{name:width$}  {:7}  {:5.1} s{reason}", outcome.word(), time.as_secs_f64());
        println!("{line}");
    }
    let (passed, failed, skipped) = (count("passed"), count("FAILED"), count("skipped"));
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed > 0 {
        bail!("interop: {failed} rows failed");
    }
    if strict && skipped > 0 {
        bail!("interop: {skipped} rows were skipped, and MILLSTREAM_REQUIRE=all");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcome: Outcome) -> Report {
        Report { name: "row".to_owned(), outcome, time: Duration::ZERO }
    }

    #[test]
    fn a_failure_fails_and_a_skip_fails_only_when_all_is_required() {
        let failed = [report(Outcome::Passed), report(Outcome::Failed("why".to_owned()))];
        assert!(summarize(&failed, false).is_err());
        let skipped = [report(Outcome::Skipped("why".to_owned()))];
        assert!(summarize(&skipped, false).is_ok());
        assert!(summarize(&skipped, true).is_err());
        assert!(summarize(&[report(Outcome::Passed)], true).is_ok());
    }

    #[test]
    fn options() {
        let parse = |words: &[&str]| {
            Options::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(parse(&["--only", "1 MiB", "--accel", "kvm"]).unwrap().only, "1 MiB");
        assert!(parse(&["--accel", "magic"]).is_err());
        assert!(parse(&["--only"]).is_err());
        assert!(parse(&["--other"]).is_err());
    }

    #[test]
    fn rows_have_names_of_their_own() {
        let mut names: Vec<&str> = row::ROWS.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), row::ROWS.len());
    }
}
