//! `sim`: scenarios in the seeded network simulator.

mod chaos;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, bail};
use clap::Args;
use millstream_sim::scenarios::{
    NAMES, NetworkCounts, Outputs, Parameters, Report, ScenarioError, run_with_outputs,
};
use serde::Serialize;

use crate::failure::{not_yet, usage};
use crate::{output, units};

/// Runs for each thread, before what they came to is told.
const PART: u64 = 32;
/// What there is to tell of a run that has no report.
const PANICKED: &str = "panicked: its message is on stderr";

/// Arguments of `sim`. What is not given is the scenario's own choice.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Which scenario: allreduce, transfer, swarm, grid, rc-chaos, congestion, te-chaos,
    /// tent-chaos, inc-chaos, control-chaos or inc-scale
    #[arg(long, value_name = "NAME", default_value = NAMES[0])]
    scenario: String,
    /// Print the names of the scenarios, and run none
    #[arg(long)]
    list: bool,
    /// The seed of the first run
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// How many runs, each with the next seed
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    runs: u64,
    /// Share of packets that are lost
    #[arg(long, value_name = "SHARE", value_parser = units::share)]
    loss: Option<f64>,
    /// Share of packets that arrive twice
    #[arg(long, value_name = "SHARE", value_parser = units::share)]
    duplicate: Option<f64>,
    /// Share of packets that later ones overtake
    #[arg(long, value_name = "SHARE", value_parser = units::share)]
    reorder: Option<f64>,
    /// Share of packets in which a bit is flipped
    #[arg(long, value_name = "SHARE", value_parser = units::share)]
    corrupt: Option<f64>,
    /// Hosts of an allreduce
    #[arg(long, value_name = "N")]
    hosts: Option<u32>,
    /// Bytes of an allreduce's vector, or of a transfer's longest message
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    size: Option<u64>,
    /// How many allreduces, or messages of a connection
    #[arg(long, value_name = "I")]
    iters: Option<u32>,
    /// Threads to run on: for rc-chaos all cores, if not given, and for the others one. They do not
    /// change what is found
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    jobs: Option<u64>,
    /// Trouble that rc-chaos leaves out, as a failure's shortest replay says
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    without: Vec<String>,
    /// Record the packets of the first run, for tshark and its like
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Record the events of the first run, one line each
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--list --json` prints.
#[derive(Serialize)]
struct List<'a> {
    scenarios: &'a [&'a str],
}

/// What `--json` prints.
#[derive(Serialize)]
struct Summary {
    scenario: String,
    passed: bool,
    runs: Vec<Run>,
}

#[derive(Default, Serialize)]
struct Run {
    seed: u64,
    /// The same for the same run, and only then.
    digest: String,
    passed: bool,
    what: String,
    bytes: u64,
    virtual_time_s: f64,
    bits_per_s: u64,
    packets: Packets,
    violations: Vec<String>,
}

#[derive(Default, Serialize)]
struct Packets {
    sent: u64,
    delivered: u64,
    lost: u64,
    overflowed: u64,
    partitioned: u64,
    duplicated: u64,
    held_back: u64,
    corrupted: u64,
}

/// Runs `sim`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.list && arguments.json {
        return output::json(&List { scenarios: &NAMES });
    }
    if arguments.list {
        return NAMES.iter().try_for_each(|name| output::line(name));
    }
    let name = arguments.scenario.as_str();
    if !NAMES.contains(&name) && (name.contains(['/', '.']) || Path::new(name).exists()) {
        return Err(not_yet(&format!(
            "this version cannot read a scenario from the file {name}, only run one of {NAMES:?}"
        )));
    }
    let last = arguments.seed.checked_add(arguments.runs - 1);
    let last = last.ok_or_else(|| usage("--seed and --runs: the last seed is beyond 2^64 - 1"))?;
    if name == "rc-chaos" {
        return chaos::campaign(arguments);
    }
    if !arguments.without.is_empty() {
        return Err(usage("--without is for the scenario rc-chaos"));
    }
    let mut pcap = arguments.pcap.as_deref().map(Recording::create).transpose()?;
    let mut log = arguments.log.as_deref().map(Recording::create).transpose()?;
    let mut summary = Summary { scenario: name.to_owned(), passed: true, runs: Vec::new() };
    let outputs = Outputs {
        pcap: pcap.as_mut().map(Recording::writer),
        log: log.as_mut().map(Recording::writer),
    };
    summary.add(arguments, arguments.seed, run_seed(arguments, arguments.seed, outputs))?;
    let jobs = arguments.jobs.unwrap_or(1);
    let mut next = arguments.seed;
    while next < last {
        let end = last.min(next.saturating_add(jobs * PART));
        let run = |seed| run_seed(arguments, seed, Outputs::default());
        for (seed, result) in (next + 1..=end).zip(spread(next + 1..=end, jobs, run)) {
            summary.add(arguments, seed, result)?;
        }
        next = end;
    }
    for recording in [pcap, log].into_iter().flatten() {
        recording.finish()?;
    }
    if arguments.json {
        output::json(&summary)?;
    }
    if !summary.passed {
        bail!("scenario {name} failed: its report says in what");
    }
    Ok(())
}

/// A run, or `None` if it panicked.
fn run_seed(
    arguments: &Arguments,
    seed: u64,
    outputs: Outputs<'_>,
) -> Option<Result<Report, ScenarioError>> {
    let parameters = parameters(arguments, seed);
    // A panic is what is looked for, not the end of the other runs.
    let run = || run_with_outputs(&arguments.scenario, &parameters, outputs);
    catch_unwind(AssertUnwindSafe(run)).ok()
}

/// Runs all seeds on so many threads. What comes out is in their order.
fn spread<T: Send>(seeds: RangeInclusive<u64>, jobs: u64, run: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let results = Mutex::new(BTreeMap::new());
    let next = Mutex::new(seeds);
    let work = || loop {
        let seed = next.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(seed) = seed else { return };
        let result = run(seed);
        results.lock().unwrap_or_else(PoisonError::into_inner).insert(seed, result);
    };
    thread::scope(|scope| {
        (1..jobs).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

fn parameters(arguments: &Arguments, seed: u64) -> Parameters {
    let default = Parameters::default();
    Parameters {
        seed,
        loss: arguments.loss.unwrap_or(default.loss),
        duplicate: arguments.duplicate.unwrap_or(default.duplicate),
        reorder: arguments.reorder.unwrap_or(default.reorder),
        corrupt: arguments.corrupt.unwrap_or(default.corrupt),
        hosts: arguments.hosts,
        length: arguments.size,
        operations: arguments.iters,
        ..default
    }
}

impl Summary {
    /// Tells of a run: now, or at the end by `--json`.
    fn add(
        &mut self,
        arguments: &Arguments,
        seed: u64,
        result: Option<Result<Report, ScenarioError>>,
    ) -> anyhow::Result<()> {
        let Some(result) = result else {
            self.passed = false;
            if !arguments.json {
                output::line(&format!("seed {seed} {PANICKED}"))?;
            }
            self.runs.push(Run::panicked(seed));
            return Ok(());
        };
        let report = result.map_err(|error| match error {
            ScenarioError::Output(_) => anyhow::Error::from(error),
            error => usage(error.to_string()),
        })?;
        self.passed &= report.passed();
        if !arguments.json {
            output::line(&text(&report, arguments.runs > 1))?;
        } else {
            self.runs.push(Run::of(&report));
        }
        Ok(())
    }
}

/// The whole report, or of one that passed among many, a line.
fn text(report: &Report, many: bool) -> String {
    if !many || !report.passed() {
        return report.to_string();
    }
    let NetworkCounts { sent, lost, duplicated, held_back, corrupted, .. } = report.network;
    format!(
        "seed {} passed, digest {}: {} bytes, {sent} packets ({lost} lost, {duplicated} \
         duplicated, {held_back} held back, {corrupted} corrupted) in {:.6} s of virtual time",
        report.seed,
        report.digest,
        report.bytes,
        report.virtual_time.as_secs_f64()
    )
}

impl Packets {
    fn of(network: &NetworkCounts) -> Self {
        Self {
            sent: network.sent,
            delivered: network.delivered,
            lost: network.lost,
            overflowed: network.overflowed,
            partitioned: network.partitioned,
            duplicated: network.duplicated,
            held_back: network.held_back,
            corrupted: network.corrupted,
        }
    }
}

impl Run {
    fn panicked(seed: u64) -> Self {
        Self { seed, violations: vec![format!("the run {PANICKED}")], ..Self::default() }
    }

    fn of(report: &Report) -> Self {
        Self {
            seed: report.seed,
            digest: report.digest.to_string(),
            passed: report.passed(),
            what: report.what.clone(),
            bytes: report.bytes,
            virtual_time_s: report.virtual_time.as_secs_f64(),
            bits_per_s: report.throughput(),
            packets: Packets::of(&report.network),
            violations: report.violations.iter().map(ToString::to_string).collect(),
        }
    }
}

/// A file that a run is recorded in.
struct Recording {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Recording {
    fn create(path: &Path) -> anyhow::Result<Self> {
        let file = File::create(path)
            .with_context(|| format!("cannot write {}", output::escaped(path)))?;
        Ok(Self { path: path.to_owned(), file: BufWriter::new(file) })
    }

    fn writer(&mut self) -> &mut dyn Write {
        &mut self.file
    }

    fn finish(mut self) -> anyhow::Result<()> {
        self.file.flush().with_context(|| format!("cannot write {}", output::escaped(&self.path)))
    }
}
