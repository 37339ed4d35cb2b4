//! `cargo xtask mooncake`: our transfer engine with the original's, in both directions, byte for byte.
//!
//! The original is what its users install: the wheel from PyPI, in an environment of its own below `target`. Each row
//! is a way to find each other, a framing and a direction; one pair of processes does all of its cases.

mod cases;
mod peer;
pub(crate) mod wheel;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::cases::CASES;
use self::peer::{Kind, Peer, Setting};
use crate::{process, programs};

/// What the command line asks for.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// Only rows and cases whose name has this.
    only: String,
    list: bool,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--only" => {
                    options.only.clone_from(rest.next().context("--only needs a value")?);
                }
                "--list" => options.list = true,
                _ => bail!("mooncake has no option {argument}"),
            }
        }
        Ok(options)
    }
}

/// How two processes find each other, and which framing they use.
#[derive(Clone, Copy, Debug)]
struct Row {
    store: &'static str,
    /// `1`: without acknowledgements of WRITEs.
    version: u32,
    initiator: Kind,
    target: Kind,
    /// Settings of our side, beside these.
    ours: Option<Setting>,
}

impl Row {
    fn name(&self) -> String {
        let ours = self.ours.map_or_else(String::new, |(name, value)| format!(", {name}={value}"));
        let Self { store, version, initiator, target, .. } = self;
        format!("{store}, v{version}{ours}: {initiator} to {target}")
    }
}

const PEER_TO_PEER: &str = "P2PHANDSHAKE";

/// Stores are to follow.
const STORES: [&str; 1] = [PEER_TO_PEER];

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for store in STORES {
        for version in [2, 1] {
            for (initiator, target) in [(Kind::Ours, Kind::Original), (Kind::Original, Kind::Ours)]
            {
                rows.push(Row { store, version, initiator, target, ours: None });
            }
        }
        // What is confirmed must be there at once, also in version 1.
        let ours = Some(("CONFIRM_WRITES", "yes"));
        let (initiator, target) = (Kind::Ours, Kind::Original);
        rows.push(Row { store, version: 1, initiator, target, ours });
        // The same programs with each other: what is wrong there is wrong with the cases.
        for kind in [Kind::Ours, Kind::Original] {
            rows.push(Row { store, version: 2, initiator: kind, target: kind, ours: None });
        }
    }
    rows
}

/// How a case ended.
struct Report {
    row: String,
    case: &'static str,
    outcome: Result<()>,
    time: Duration,
}

/// Runs the rows, and prints a table of all cases.
pub(crate) fn run(options: &Options) -> Result<()> {
    let wanted = |row: &Row, case: &str| format!("{}: {case}", row.name()).contains(&options.only);
    if options.list {
        for row in rows() {
            CASES.iter().filter(|case| wanted(&row, case.name)).for_each(|case| {
                println!("{}: {}", row.name(), case.name);
            });
        }
        return Ok(());
    }
    let python = match wheel::installed() {
        Ok(python) => python,
        Err(error) if process::everything_required() => {
            return Err(error.context("the original is needed, as MILLSTREAM_REQUIRE=all"));
        }
        Err(error) => {
            eprintln!("xtask: skipped: there is no original: {error:#}");
            return Ok(());
        }
    };
    let ours = programs::example("millstream-transfer", "tcp_peer")?;
    let mut reports = Vec::new();
    for row in rows() {
        let cases: Vec<_> = CASES.iter().filter(|case| wanted(&row, case.name)).collect();
        if cases.is_empty() {
            continue;
        }
        let start = |kind| Peer::start(kind, &ours, &python, row.store, row.version, row.ours);
        let (mut initiator, mut target) = (start(row.initiator)?, start(row.target)?);
        for case in cases {
            let begun = Instant::now();
            let mut ends = cases::Ends {
                initiator: &mut initiator,
                target: &mut target,
                acknowledged: row.version > 1 || row.ours.is_some(),
                restart: &start,
            };
            let outcome = (case.run)(&mut ends);
            reports.push(Report {
                row: row.name(),
                case: case.name,
                outcome,
                time: begun.elapsed(),
            });
        }
    }
    print_table(&reports);
    let failed = reports.iter().filter(|report| report.outcome.is_err()).count();
    match (failed, reports.len()) {
        (_, 0) => bail!("no row is named so: --list prints all"),
        (0, _) => Ok(()),
        (failed, all) => bail!("{failed} of {all} cases failed"),
    }
}

fn print_table(reports: &[Report]) {
    let width = reports.iter().map(|report| report.row.len()).max().unwrap_or_default();
    let cases = reports.iter().map(|report| report.case.len()).max().unwrap_or_default();
    for Report { row, case, outcome, time } in reports {
        let said = match outcome {
            Ok(()) => "ok".to_owned(),
            Err(error) => format!("FAILED: {error:#}"),
        };
        println!("{row:width$}  {case:cases$}  {:>6} ms  {said}", time.as_millis());
    }
}
