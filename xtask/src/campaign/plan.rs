//! Who runs what next, and what came of it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::portion::{Finding, Outcome, Portion};

/// What a portion is to take: short, so that a campaign ends in time and little is tried again
/// after it was killed; long beside the start of a process.
const PORTION: Duration = Duration::from_secs(2);
/// Runs in a portion at most.
const MAX_PORTION: u64 = 4096;
/// Findings of which more than the count is kept.
const KEPT: usize = 20;

/// The seeds of a scenario that are to be tried, in their order.
#[derive(Debug)]
pub(super) struct Seeds {
    scenario: String,
    first: u64,
    /// The next one to begin.
    next: u64,
    end: u64,
    /// First seeds of the portions that are under way.
    under_way: BTreeSet<u64>,
    /// Runs of the next portion.
    portion: u64,
    runs: u64,
    failed: u64,
    /// What the processes took.
    time: Duration,
}

impl Seeds {
    pub(super) fn new(scenario: &str, first: u64, runs: u64) -> Result<Self> {
        let end = first.checked_add(runs);
        let end = end.with_context(|| {
            format!("{runs} runs from seed {first}: the last seed must be below 2^64 - 1")
        })?;
        Ok(Self {
            scenario: scenario.to_owned(),
            first,
            next: first,
            end,
            under_way: BTreeSet::new(),
            portion: 1,
            runs: 0,
            failed: 0,
            time: Duration::ZERO,
        })
    }

    /// All seeds below this one were tried.
    fn tried_below(&self) -> u64 {
        self.under_way.first().copied().unwrap_or(self.next)
    }
}

/// A whole campaign.
#[derive(Debug)]
pub(super) struct Plan {
    /// Nothing is begun from then on.
    deadline: Option<Instant>,
    seeds: Vec<Seeds>,
    findings: Vec<Finding>,
}

impl Plan {
    pub(super) const fn new(deadline: Option<Instant>) -> Self {
        Self { deadline, seeds: Vec::new(), findings: Vec::new() }
    }

    pub(super) fn add(&mut self, seeds: Seeds) {
        self.seeds.push(seeds);
    }

    /// The next portion, of the seeds that had the least time so far.
    pub(super) fn next(&mut self, now: Instant) -> Option<Portion> {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return None;
        }
        let open = self.seeds.iter_mut().filter(|seeds| seeds.next < seeds.end);
        let seeds = open.min_by_key(|seeds| seeds.time + PORTION * seeds.under_way.len() as u32)?;
        let (scenario, first) = (seeds.scenario.clone(), seeds.next);
        let runs = seeds.portion.min(seeds.end - first);
        seeds.next += runs;
        seeds.under_way.insert(first);
        Some(Portion { scenario, first, runs })
    }

    /// Takes what came of a portion, which took so long.
    pub(super) fn end(&mut self, portion: &Portion, outcome: Outcome, time: Duration) {
        let of_it = |seeds: &&mut Seeds| {
            seeds.scenario == portion.scenario && seeds.under_way.contains(&portion.first)
        };
        let Some(seeds) = self.seeds.iter_mut().find(of_it) else { return };
        seeds.under_way.remove(&portion.first);
        seeds.runs += portion.runs;
        seeds.failed += outcome.failed;
        seeds.time += time;
        if time < PORTION / 2 {
            seeds.portion = (portion.runs * 2).clamp(seeds.portion, MAX_PORTION);
        } else if time > PORTION * 2 {
            seeds.portion = (portion.runs / 2).max(1);
        }
        let room = KEPT.saturating_sub(self.findings.len());
        self.findings.extend(outcome.findings.into_iter().take(room));
    }

    /// All seeds of a scenario below this one were tried, from its first on.
    pub(super) fn tried_below(&self, scenario: &str) -> u64 {
        let seeds = self.seeds.iter().find(|seeds| seeds.scenario == scenario);
        seeds.map_or(0, Seeds::tried_below)
    }

    pub(super) fn runs(&self) -> u64 {
        self.seeds.iter().map(|seeds| seeds.runs).sum()
    }

    pub(super) fn failed(&self) -> u64 {
        self.seeds.iter().map(|seeds| seeds.failed).sum()
    }

    /// A line for each row of seeds, then what failed and how to see it again.
    pub(super) fn summary(&self, time: Duration) -> String {
        let mut text = format!(
            "{:<12} {:>20} {:>10} {:>7} {:>10} {:>9}\n",
            "scenario", "from seed", "runs", "failed", "CPU time", "runs/s"
        );
        for seeds in &self.seeds {
            let Seeds { scenario, first, runs, failed, time, .. } = seeds;
            let seconds = time.as_secs_f64();
            let rate = *runs as f64 / seconds.max(1e-9);
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{scenario:<12} {first:>20} {runs:>10} {failed:>7} {seconds:>8.1} s {rate:>9.1}"
            );
        }
        let (runs, failed) = (self.runs(), self.failed());
        let _ = writeln!(text, "{runs} runs in {:.1} s: {failed} failed", time.as_secs_f64());
        self.findings.iter().for_each(|finding| {
            let _ = write!(text, "{finding}");
        });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(10);

    fn plan(rows: &[(&str, u64, u64)]) -> Plan {
        let mut plan = Plan::new(None);
        rows.iter()
            .for_each(|&(name, first, runs)| plan.add(Seeds::new(name, first, runs).unwrap()));
        plan
    }

    /// Ends every portion at once with this outcome; returns how many there were.
    fn carry_out(plan: &mut Plan, time: Duration, failed: u64) -> usize {
        let mut count = 0;
        while let Some(portion) = plan.next(Instant::now()) {
            count += 1;
            let findings = vec![Finding { what: "w".into(), commands: vec!["c".into()] }];
            let findings = if failed > 0 { findings } else { Vec::new() };
            plan.end(&portion, Outcome { failed, findings }, time);
        }
        count
    }

    #[test]
    fn every_seed_is_run_once_and_portions_grow() {
        let mut plan = plan(&[("a", 0, 1000), ("a", 5000, 1000), ("b", 7, 3)]);
        let count = carry_out(&mut plan, MOMENT, 0);
        assert!(count < 30, "{count} portions");
        assert_eq!((plan.runs(), plan.failed()), (2003, 0));
        assert_eq!(plan.tried_below("b"), 10);
    }

    #[test]
    fn portions_that_take_long_shrink_again() {
        let mut plan = plan(&[("a", 0, 10_000)]);
        for (time, next) in [(MOMENT, 2), (MOMENT, 4), (3 * PORTION, 2), (PORTION, 2)] {
            let portion = plan.next(Instant::now()).unwrap();
            plan.end(&portion, Outcome::default(), time);
            assert_eq!(plan.seeds[0].portion, next);
        }
    }

    #[test]
    fn whoever_had_the_least_time_is_next() {
        let mut plan = plan(&[("fast", 0, 1 << 40), ("slow", 0, 1 << 40)]);
        let mut times = [0_u32, 0];
        for _ in 0..100 {
            let portion = plan.next(Instant::now()).unwrap();
            let slow = portion.scenario == "slow";
            times[usize::from(slow)] += if slow { 4 } else { 1 };
            plan.end(&portion, Outcome::default(), PORTION * if slow { 4 } else { 1 });
        }
        assert!(times[0].abs_diff(times[1]) <= 4, "{times:?}");
    }

    #[test]
    fn what_is_under_way_is_not_tried() {
        let mut plan = plan(&[("a", 100, 50)]);
        let [first, second] = [(); 2].map(|()| plan.next(Instant::now()).unwrap());
        plan.end(&second, Outcome::default(), MOMENT);
        assert_eq!(plan.tried_below("a"), 100);
        plan.end(&first, Outcome::default(), MOMENT);
        assert_eq!(plan.tried_below("a"), 102);
    }

    #[test]
    fn nothing_begins_after_the_deadline() {
        let now = Instant::now();
        let mut plan = Plan::new(Some(now + PORTION));
        plan.add(Seeds::new("a", 0, u64::MAX).unwrap());
        assert!(plan.next(now).is_some());
        assert!(plan.next(now + PORTION).is_none());
    }

    #[test]
    fn seeds_end_at_the_last_number() {
        for (first, runs) in [(u64::MAX, 1), (u64::MAX - 1, 2), (1, u64::MAX)] {
            let error = Seeds::new("a", first, runs).unwrap_err().to_string();
            assert!(error.contains("below 2^64 - 1"), "{error}");
        }
        let mut plan = plan(&[("a", u64::MAX - 3, 3)]);
        carry_out(&mut plan, MOMENT, 0);
        assert_eq!(plan.runs(), 3);
    }

    #[test]
    fn the_summary_tells_what_failed_and_how_to_see_it_again() {
        let mut plan = plan(&[("a", 0, 100)]);
        carry_out(&mut plan, PORTION, 1);
        assert_eq!((plan.failed(), plan.findings.len()), (100, KEPT));
        let summary = plan.summary(PORTION);
        assert!(summary.contains("FAILED w\n    c\n"), "{summary}");
    }
}
