//! `cargo xtask interop`: our stack against the Linux kernel's, message by message.
//!
//! The kernel's soft-RoCE (rxe) runs in a guest that is one tap device away. Each row of [`ROWS`]
//! is one conversation, reported by itself; one boot serves all of them. The last has the kernel as
//! our device instead of our peer.

mod device;
mod guest;
mod row;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::guest::Guest;
use self::row::{Row, Side, Talk};
use crate::lab::Lab;
use crate::{install, process};

/// 1 MiB at the default path MTU of 1024 is 1024 packets a message: wrong order, a lost ACK or a
/// wrong MSN show up within few of them. `--all` is 2 bytes to 8 MiB.
const ROWS: &[Row] = &[
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
    test("we WRITE to kernel, all sizes", Side::Server, "write-bw --all --iters=3"),
    test("kernel WRITEs to us, all sizes", Side::Client, "write-bw --all --iters=3"),
    test("we READ from kernel, all sizes", Side::Server, "read-bw --all --iters=3"),
    test("kernel READs from us, all sizes", Side::Client, "read-bw --all --iters=3"),
    test("we SEND to kernel, all sizes", Side::Server, "send-bw --all --iters=3"),
    test("kernel SENDs to us, all sizes", Side::Client, "send-bw --all --iters=3"),
    test("WRITE with immediate, to and fro", Side::Server, "write-bw --latency --iters=200"),
    test("four queue pairs", Side::Client, "write-bw --qps=4 --size=3000 --iters=100 --mtu=256"),
    Row { name: "kernel as device, verbs suite", talk: Talk::Suite },
];

const fn pingpong(
    name: &'static str,
    kernel: Side,
    options: &'static str,
    theirs: &'static str,
) -> Row {
    Row { name, talk: Talk::Pingpong { kernel, options, theirs } }
}

const fn test(name: &'static str, kernel: Side, command: &'static str) -> Row {
    Row { name, talk: Talk::Test { kernel, command } }
}

/// What the command line asks for.
pub(crate) struct Options {
    only: String,
    accelerator: String,
    list: bool,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        // Emulation is the default though /dev/kvm may exist: a nested KVM can hang for ever in
        // the guest's first instructions, and emulated the guest boots in two seconds anyway.
        let mut options = Self { only: String::new(), accelerator: "tcg".to_owned(), list: false };
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
                "--list" => options.list = true,
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

struct Report {
    name: &'static str,
    outcome: Outcome,
    time: Duration,
}

/// Runs the rows and prints what became of each.
pub(crate) fn run(options: &Options) -> Result<()> {
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.name.contains(&options.only)).collect();
    if rows.is_empty() {
        bail!("no row's name contains {:?}", options.only);
    }
    if options.list {
        rows.iter().for_each(|row| println!("{}", row.name));
        return Ok(());
    }
    let reports = match obstacle() {
        Ok(tool) => run_rows(&rows, options, &tool)?,
        Err(reason) => rows
            .iter()
            .map(|row| {
                let outcome = Outcome::Skipped(reason.clone());
                Report { name: row.name, outcome, time: Duration::ZERO }
            })
            .collect(),
    };
    summarize(&reports, process::everything_required())
}

/// The path of the rxe-vm tool, or why no row can run on this machine.
fn obstacle() -> Result<PathBuf, String> {
    let tool = std::env::var_os("MILLSTREAM_RXE_VM").map_or_else(
        || process::repository_root().join("../shared/tools/rxe-vm/rxe-vm"),
        PathBuf::from,
    );
    if !tool.is_file() {
        return Err(format!("no rxe-vm at {} (MILLSTREAM_RXE_VM names it)", tool.display()));
    }
    if !process::is_root() {
        return Err("network namespaces and taps need root".to_owned());
    }
    if !PathBuf::from("/dev/net/tun").exists() {
        return Err("this kernel has no /dev/net/tun".to_owned());
    }
    match install::ensure(install::FOR_INTEROP).first() {
        Some(need) => Err(format!("{} is not installed", need.program)),
        None => Ok(tool),
    }
}

fn run_rows(rows: &[&Row], options: &Options, tool: &Path) -> Result<Vec<Report>> {
    let binary = match std::env::var_os("MILLSTREAM_BIN") {
        Some(path) => PathBuf::from(path),
        None => {
            let arguments = ["build", "--release", "-p", "millstream"];
            process::run(process::cargo().args(arguments))?;
            process::target_directory().join("release/millstream")
        }
    };
    let logs = process::target_directory().join("interop");
    std::fs::create_dir_all(&logs)?;
    let lab = Lab::new()?;
    let mut guest = Guest::boot(tool, &options.accelerator, &lab)?;
    let mut reports = Vec::new();
    for row in rows {
        let start = Instant::now();
        let stem = logs.join(row.name.replace([',', ' '], "-").replace("--", "-"));
        let outcome = match row.run(&lab, &mut guest, &binary, &stem) {
            Ok(()) => Outcome::Passed,
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        eprintln!("xtask: {}: {}", row.name, outcome.word());
        reports.push(Report { name: row.name, outcome, time: start.elapsed() });
    }
    if reports.iter().any(|report| matches!(report.outcome, Outcome::Failed(_))) {
        eprintln!("xtask: what both sides printed, and the packets: {}", logs.display());
    }
    Ok(reports)
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
        Report { name: "row", outcome, time: Duration::ZERO }
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
        let mut names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ROWS.len());
    }
}
