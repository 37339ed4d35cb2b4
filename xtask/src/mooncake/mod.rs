//! `cargo xtask mooncake`: our transfer engine with the original's, in both directions, byte for byte.
//!
//! The original is what its users install: the wheel from PyPI, in an environment of its own below `target`. Each row
//! is a way to find each other, a framing and a direction; one pair of processes does all of its cases.

mod cases;
mod peer;
mod store;
pub(crate) mod wheel;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use self::cases::{CASES, Case};
use self::peer::{Kind, Peer, Setting, Start};
use self::store::{Programs, Running, Store};
use crate::{install, process, programs};

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
    store: Store,
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

/// Rows, each with its cases.
type Rows<'a> = Vec<(Row, Vec<&'a Case>)>;

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for store in Store::ALL {
        for version in [2, 1] {
            for (initiator, target) in [(Kind::Ours, Kind::Original), (Kind::Original, Kind::Ours)]
            {
                rows.push(Row { store, version, initiator, target, ours: None });
            }
        }
        if store == Store::PeerToPeer {
            // What is confirmed must be there at once, also in version 1.
            let ours = Some(("CONFIRM_WRITES", "yes"));
            let (initiator, target) = (Kind::Ours, Kind::Original);
            rows.push(Row { store, version: 1, initiator, target, ours });
        }
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
    let ours = programs::example("tcp_peer")?;
    let wanted_of = |store| {
        let cases = |row: &Row| -> Vec<&Case> {
            CASES.iter().filter(|case| wanted(row, case.name)).collect()
        };
        let rows = rows().into_iter().filter(move |row| row.store == store);
        rows.map(|row| (row, cases(&row))).filter(|(_, cases)| !cases.is_empty()).collect()
    };
    let mut work: Vec<(Store, Rows<'_>)> =
        Store::ALL.into_iter().map(|store| (store, wanted_of(store))).collect();
    work.retain(|(_, rows)| !rows.is_empty());
    if work.iter().any(|(store, _)| *store == Store::Etcd) && !has_etcd()? {
        work.retain(|(store, _)| *store != Store::Etcd);
    }
    let millstream = match work.iter().any(|(store, _)| *store == Store::OurServer) {
        true => programs::millstream()?,
        false => PathBuf::new(),
    };
    let programs = Programs { python: &python, millstream: &millstream };
    let begun = Instant::now();
    // Much of the time the original lets pass.
    let mut reports = Vec::new();
    thread::scope(|scope| {
        let (ours, programs) = (&ours, &programs);
        let run = |(store, rows)| scope.spawn(move || run_store(store, rows, ours, programs));
        let threads: Vec<_> = work.into_iter().map(run).collect();
        for thread in threads {
            let ended = thread.join().map_err(|_| anyhow!("the thread of a store has panicked"));
            reports.extend(ended.flatten()?);
        }
        anyhow::Ok(())
    })?;
    print_table(&reports);
    println!("{} cases in {} s", reports.len(), begun.elapsed().as_secs());
    let failed = reports.iter().filter(|report| report.outcome.is_err()).count();
    match (failed, reports.len()) {
        (_, 0) => bail!("no row is named so: --list prints all"),
        (0, _) => Ok(()),
        (failed, all) => bail!("{failed} of {all} cases failed"),
    }
}

/// Does the rows of a store.
fn run_store(
    store: Store,
    rows: Rows<'_>,
    ours: &Path,
    programs: &Programs<'_>,
) -> Result<Vec<Report>> {
    let mut reports = Vec::new();
    let running = Running::start(store, programs)?;
    for (row, cases) in rows {
        let Row { version, ours: setting, .. } = row;
        let (python, store) = (programs.python, running.uri.as_str());
        let start = Start { ours, python, store, version, setting };
        run_row(&row, &cases, &start, &mut reports)?;
    }
    Ok(reports)
}

/// Does the cases of a row with one pair of processes.
fn run_row(row: &Row, cases: &[&Case], start: &Start<'_>, reports: &mut Vec<Report>) -> Result<()> {
    // A store keeps the names of engines that were killed.
    let names = ["initiator", "target", "next"].map(|which| {
        let Row { version, initiator, target, .. } = row;
        format!("{which}-{initiator}-{target}-{version}")
    });
    let mut initiator = Peer::start(row.initiator, &names[0], start)?;
    let mut target = Peer::start(row.target, &names[1], start)?;
    let again =
        if row.store.gives_names_again(row.initiator, row.target) { &names[1] } else { &names[2] };
    for case in cases {
        let begun = Instant::now();
        let mut ends = cases::Ends {
            initiator: &mut initiator,
            target: &mut target,
            named: row.store != Store::PeerToPeer,
            acknowledged: row.version > 1 || row.ours.is_some(),
            restart: &|| Peer::start(row.target, again, start),
        };
        let outcome = (case.run)(&mut ends);
        reports.push(Report { row: row.name(), case: case.name, outcome, time: begun.elapsed() });
    }
    Ok(())
}

/// Whether etcd is there, which is installed if need be.
fn has_etcd() -> Result<bool> {
    match install::ensure(install::FOR_METADATA)[..] {
        [] => Ok(true),
        _ if process::everything_required() => {
            bail!("etcd is needed, as MILLSTREAM_REQUIRE=all: Debian has it in etcd-server")
        }
        _ => {
            eprintln!("xtask: skipped: etcd is missing: Debian has it in etcd-server");
            Ok(false)
        }
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
