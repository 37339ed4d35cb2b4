//! `sim --scenario rc-chaos`: very many small runs on all cores, and what they come to together.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{bail, ensure};
use millstream_sim::scenarios::Outputs;
use millstream_sim::scenarios::rc_chaos::{Campaign, Options, Outcomes, Trouble, run, shrink};
use serde::Serialize;

use super::{Arguments, PANICKED, Packets, Recording};
use crate::failure::usage;
use crate::output;

/// Runs that a thread takes at a time.
const PART: u64 = 64;
/// Lines of a failed run's log that are shown.
const TAIL: usize = 40;

/// What `--json` prints.
#[derive(Serialize)]
struct Summary {
    scenario: &'static str,
    passed: bool,
    seed: u64,
    runs: u64,
    failed: u64,
    jobs: u64,
    /// The same for the same runs, and only then.
    digest: String,
    seconds: f64,
    runs_per_s: f64,
    bytes: u64,
    packets: Packets,
    happened: BTreeMap<&'static str, u64>,
    failures: Vec<Failure>,
}

#[derive(Serialize)]
struct Failure {
    seed: u64,
    violations: Vec<String>,
    /// The command that shows it again.
    replay: String,
    /// The same, with as little trouble as still fails.
    shrunk: String,
    shrunk_violations: Vec<String>,
    /// The end of the shrunk run's log.
    trace: Vec<String>,
}

/// Runs the campaign that the arguments ask for.
pub(super) fn campaign(arguments: &Arguments) -> anyhow::Result<()> {
    let template = template(arguments)?;
    let (first, runs) = (arguments.seed, arguments.runs);
    let jobs = match arguments.jobs {
        Some(jobs) => jobs,
        None => thread::available_parallelism().map_or(1, |count| count.get() as u64),
    };
    let jobs = jobs.min(runs.div_ceil(PART));
    let start = Instant::now();
    let (campaign, made) = spread(&template, first, runs, jobs);
    // What was not run has not passed.
    ensure!(made == runs, "{made} runs of rc-chaos were made, and not {runs}");
    let seconds = start.elapsed().as_secs_f64();
    record_first(arguments, &template)?;
    let failures = campaign.failures.iter().map(|&seed| failure(&template, seed));
    let summary = Summary {
        scenario: "rc-chaos",
        passed: campaign.failed == 0,
        seed: first,
        runs: made,
        failed: campaign.failed,
        jobs,
        digest: campaign.digest.to_string(),
        seconds,
        runs_per_s: made as f64 / seconds.max(1e-9),
        bytes: campaign.bytes,
        packets: Packets::of(&campaign.network),
        happened: campaign.tally.iter().collect(),
        failures: failures.collect::<anyhow::Result<_>>()?,
    };
    if arguments.json {
        output::json(&summary)?;
    } else {
        output::line(&summary.to_string())?;
    }
    if !summary.passed {
        bail!("{} of {} runs of rc-chaos failed", summary.failed, summary.runs);
    }
    Ok(())
}

/// The options of all runs, but for the seed.
fn template(arguments: &Arguments) -> anyhow::Result<Options> {
    let faults = [arguments.loss, arguments.duplicate, arguments.reorder, arguments.corrupt];
    if faults.iter().any(Option::is_some) || arguments.hosts.is_some() || arguments.size.is_some() {
        let what = "rc-chaos draws faults, hosts and sizes from the seed: leave trouble out by \
                    --without, and requests by --iters";
        return Err(usage(what));
    }
    let trouble = arguments.without.iter().map(|name| {
        let names = Trouble::ALL.map(Trouble::name);
        let unknown = || usage(format!("--without {name}: choose from {}", names.join(", ")));
        Trouble::from_name(name).ok_or_else(unknown)
    });
    let without = trouble.collect::<anyhow::Result<_>>()?;
    Ok(Options { seed: 0, without, operations: arguments.iters })
}

fn with_seed(template: &Options, seed: u64) -> Options {
    Options { seed, ..template.clone() }
}

/// Runs all seeds on so many threads; also returns how many runs were made. What comes out does not depend on how many
/// threads there are. The last seed must be one: `first + runs - 1` is less than 2^64.
fn spread(template: &Options, first: u64, runs: u64, jobs: u64) -> (Campaign, u64) {
    let (next, made) = (AtomicU64::new(0), AtomicU64::new(0));
    let done = Mutex::new(BTreeMap::new());
    let progress = Mutex::new(output::Progress::counting("runs", runs));
    let work = || loop {
        let part = next.fetch_add(1, Ordering::Relaxed);
        let Some(start) = part.checked_mul(PART).filter(|&start| start < runs) else { return };
        let end = start.saturating_add(PART).min(runs);
        let mut campaign = Campaign::new();
        // Inclusive: after the last seed there may be no number.
        for seed in first + start..=first + (end - 1) {
            // A panic of the stack is what is looked for, not the end of the campaign.
            let options = with_seed(template, seed);
            match std::panic::catch_unwind(|| run(&options, Outputs::default())) {
                Ok(Ok(outcomes)) => campaign.add(&outcomes),
                Ok(Err(_)) | Err(_) => campaign.fail(seed),
            }
            made.fetch_add(1, Ordering::Relaxed);
        }
        done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(part, campaign);
        let mut progress = progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        progress.advance(end - start);
    };
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    let mut campaign = Campaign::new();
    let done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.values().for_each(|part| campaign.merge(part));
    (campaign, made.into_inner())
}

/// Writes the packets and events of the first run where they are asked for.
fn record_first(arguments: &Arguments, template: &Options) -> anyhow::Result<()> {
    let mut pcap = arguments.pcap.as_deref().map(Recording::create).transpose()?;
    let mut log = arguments.log.as_deref().map(Recording::create).transpose()?;
    if pcap.is_none() && log.is_none() {
        return Ok(());
    }
    let outputs = Outputs {
        pcap: pcap.as_mut().map(Recording::writer),
        log: log.as_mut().map(Recording::writer),
    };
    run(&with_seed(template, arguments.seed), outputs)?;
    [pcap, log].into_iter().flatten().try_for_each(Recording::finish)
}

fn violations(outcomes: &Outcomes) -> Vec<String> {
    outcomes.report.violations.iter().map(ToString::to_string).collect()
}

/// What there is to tell of a run that failed.
fn failure(template: &Options, seed: u64) -> anyhow::Result<Failure> {
    let options = with_seed(template, seed);
    let again = std::panic::catch_unwind(|| run(&options, Outputs::default()));
    let replay = format!("millstream sim {options}");
    let Ok(outcomes) = again else {
        let violations = vec![format!("the run {PANICKED}")];
        let (shrunk, trace) = (replay.clone(), Vec::new());
        return Ok(Failure {
            seed,
            violations,
            replay,
            shrunk,
            shrunk_violations: Vec::new(),
            trace,
        });
    };
    let least = std::panic::catch_unwind(|| shrink(&options)).unwrap_or(options);
    let mut log = Vec::new();
    let shrunk = run(&least, Outputs { log: Some(&mut log), pcap: None })?;
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    let tail = &lines[lines.len().saturating_sub(TAIL)..];
    Ok(Failure {
        seed,
        violations: violations(&outcomes?),
        replay,
        shrunk: format!("millstream sim {least}"),
        shrunk_violations: violations(&shrunk),
        trace: tail.iter().map(|&line| line.to_owned()).collect(),
    })
}

impl core::fmt::Display for Summary {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { scenario, seed, runs, failed, jobs, digest, seconds, runs_per_s, .. } = self;
        writeln!(f, "scenario {scenario}, {runs} runs from seed {seed}, digest {digest}")?;
        writeln!(f, "{seconds:.1} s on {jobs} threads: {runs_per_s:.0} runs/s")?;
        let Packets {
            sent, lost, overflowed, partitioned, duplicated, held_back, corrupted, ..
        } = &self.packets;
        writeln!(
            f,
            "{} bytes moved in {sent} packets: {lost} lost, {overflowed} overflowed, {partitioned} \
             partitioned, {duplicated} duplicated, {held_back} held back, {corrupted} corrupted",
            self.bytes
        )?;
        for (name, count) in &self.happened {
            writeln!(f, "  {name:<36} {count:>12}")?;
        }
        for failure in &self.failures {
            writeln!(f, "\nFAILED: {}", failure.replay)?;
            for violation in &failure.violations {
                writeln!(f, "  {violation}")?;
            }
            writeln!(f, "with the least trouble: {}", failure.shrunk)?;
            for violation in &failure.shrunk_violations {
                writeln!(f, "  {violation}")?;
            }
            writeln!(f, "the end of that run (all of it: --log FILE, --pcap FILE):")?;
            for line in &failure.trace {
                writeln!(f, "  {line}")?;
            }
        }
        match failed {
            0 => f.write_str("passed"),
            _ => write!(f, "FAILED: {failed} of {runs} runs"),
        }
    }
}
