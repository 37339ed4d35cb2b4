//! `cargo xtask campaign`: simulations from seeds that were not tried before, all scenarios side by
//! side; and the runs of `cargo xtask test`, a fixed thousand and one that the commit chooses.

mod commit;
mod history;
mod options;
mod plan;
mod portion;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::history::History;
pub(crate) use self::options::Options;
use self::options::Until;
use self::plan::{Plan, Seeds};
use self::portion::Portion;
use crate::{process, programs};

/// Runs of each scenario that [`run_of_commit`] makes, from 0 and from the commit's seed.
const RUNS: u64 = 1000;
/// Scenarios whose first thousand the tests of `crates/sim` make.
const TESTED: [&str; 3] = ["control-chaos", "inc-chaos", "rc-chaos"];
/// Those of scenarios of which one run takes long: tables of many simulations take some seconds each, and a
/// thousand of `transfer` as long as all others together. Each commit tries others.
const FEWER: [(&str, u64); 5] =
    [("congestion", 5), ("grid", 5), ("inc-scale", 2), ("swarm", 500), ("transfer", 250)];
/// How often a long campaign says how far it is.
const NEWS: Duration = Duration::from_secs(60);

/// Runs what the command line asks for.
pub(crate) fn run(options: &Options) -> Result<()> {
    // What is looked for is rare: optimized, it comes ten times as often.
    let millstream = programs::fast_millstream()?;
    let names = scenarios(&millstream)?;
    let names: Vec<String> = match &options.only {
        None => names,
        Some(only) if names.contains(only) => vec![only.clone()],
        Some(only) => bail!("--only {only}: the scenarios are {}", names.join(", ")),
    };
    let mut history = match options.first {
        Some(_) => None,
        None => History::open()?,
    };
    let mut plan = Plan::new(match options.until {
        Until::Time(time) => Some(Instant::now() + time),
        Until::Runs(_) => None,
    });
    for name in names {
        let first = match (options.first, &mut history) {
            (Some(first), _) => first,
            (None, Some(history)) => history.next(&name),
            (None, None) => history::draw(),
        };
        let runs = match options.until {
            Until::Time(_) => u64::MAX - first,
            Until::Runs(runs) => runs,
        };
        plan.add(Seeds::new(&name, first, runs)?);
    }
    carry_out(&millstream, plan, history)
}

/// Runs each scenario from seed 0 and from one that the commit chooses.
pub(crate) fn run_of_commit() -> Result<()> {
    let millstream = programs::millstream()?;
    let base = commit::seed();
    let mut plan = Plan::new(None);
    for name in scenarios(&millstream)? {
        let fewer = FEWER.iter().find(|(slow, _)| *slow == name);
        let runs = fewer.map_or(RUNS, |&(_, runs)| runs);
        let tested = TESTED.contains(&name.as_str());
        for first in [0, base].into_iter().skip(usize::from(tested)) {
            plan.add(Seeds::new(&name, first, runs)?);
        }
    }
    carry_out(&millstream, plan, None)
}

fn scenarios(millstream: &Path) -> Result<Vec<String>> {
    let mut list = std::process::Command::new(millstream);
    let names = process::output(list.args(["sim", "--list"]))?;
    Ok(names.lines().map(str::to_owned).collect())
}

/// What the threads share.
struct Campaign {
    plan: Plan,
    history: Option<History>,
    /// The history could not be written: the campaign is of no use to the next one.
    trouble: Option<anyhow::Error>,
    said: Instant,
}

fn carry_out(millstream: &Path, plan: Plan, history: Option<History>) -> Result<()> {
    let start = Instant::now();
    let campaign = Mutex::new(Campaign { plan, history, trouble: None, said: start });
    let lock = || campaign.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        loop {
            let Some(portion) = next(lock()) else { return };
            let begun = Instant::now();
            let outcome = portion.run(millstream);
            lock().end(&portion, outcome, begun.elapsed(), start);
        }
    };
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    let Campaign { plan, trouble, .. } =
        campaign.into_inner().unwrap_or_else(PoisonError::into_inner);
    print!("{}", plan.summary(start.elapsed()));
    if let Some(trouble) = trouble {
        return Err(trouble.context("how far the campaign came is not kept"));
    }
    match plan.failed() {
        0 => Ok(()),
        failed => bail!("{failed} runs failed: mend what they show, and pin each in {PINNED}"),
    }
}

/// Where seeds that failed once are kept.
const PINNED: &str = "crates/sim/tests/pinned.rs";

fn next(mut campaign: MutexGuard<'_, Campaign>) -> Option<Portion> {
    if campaign.trouble.is_some() {
        return None;
    }
    campaign.plan.next(Instant::now())
}

impl Campaign {
    fn end(
        &mut self,
        portion: &Portion,
        outcome: portion::Outcome,
        time: Duration,
        start: Instant,
    ) {
        // Before it counts as tried: who ends a campaign early has seen what it found.
        outcome.findings.iter().for_each(|finding| eprint!("{finding}"));
        self.plan.end(portion, outcome, time);
        if let Some(history) = &mut self.history {
            let kept = history.keep(&portion.scenario, self.plan.tried_below(&portion.scenario));
            let kept = kept.with_context(|| format!("cannot write {}", history.path().display()));
            self.trouble = self.trouble.take().or(kept.err());
        }
        if self.said.elapsed() >= NEWS {
            self.said = Instant::now();
            let (runs, failed) = (self.plan.runs(), self.plan.failed());
            let minutes = start.elapsed().as_secs() / 60;
            eprintln!("xtask: campaign: after {minutes} min {runs} runs, {failed} failed");
        }
    }
}
