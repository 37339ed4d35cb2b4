//! Many runs: what they come to together, and the least trouble that still fails.

use super::{NetworkCounts, Options, Outcomes, Outputs, Tally, Trouble, run};
use crate::Digest;

/// What a row of runs showed. Parts that were made apart are merged in order of their seeds.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The same for the same runs, and only then.
    pub digest: Digest,
    /// How many there were.
    pub runs: u64,
    /// Bytes that applications moved.
    pub bytes: u64,
    /// What the networks did.
    pub network: NetworkCounts,
    /// What happened how often.
    pub tally: Tally,
    /// Seeds of runs that failed, the first few.
    pub failures: Vec<u64>,
    /// How many failed.
    pub failed: u64,
}

impl Campaign {
    /// Failures whose seeds are kept.
    pub const KEPT: usize = 10;

    /// No runs.
    pub fn new() -> Self {
        Self {
            digest: Digest::new(),
            runs: 0,
            bytes: 0,
            network: NetworkCounts::default(),
            tally: Tally::default(),
            failures: Vec::new(),
            failed: 0,
        }
    }

    /// Adds a run.
    pub fn add(&mut self, outcomes: &Outcomes) {
        let report = &outcomes.report;
        self.digest.merge(report.digest);
        self.runs += 1;
        self.bytes += report.bytes;
        self.network.add(&report.network);
        self.tally.merge(&outcomes.tally);
        if !report.passed() {
            self.fail(report.seed);
        }
    }

    /// Adds a run that failed without a report.
    pub fn fail(&mut self, seed: u64) {
        self.failed += 1;
        if self.failures.len() < Self::KEPT {
            self.failures.push(seed);
        }
    }

    /// Adds the runs of another.
    pub fn merge(&mut self, other: &Self) {
        self.digest.merge(other.digest);
        self.runs += other.runs;
        self.bytes += other.bytes;
        self.network.add(&other.network);
        self.tally.merge(&other.tally);
        self.failed += other.failed;
        let room = Self::KEPT.saturating_sub(self.failures.len());
        self.failures.extend(other.failures.iter().take(room));
    }
}

impl Default for Campaign {
    fn default() -> Self {
        Self::new()
    }
}

/// The least trouble and the fewest requests with which a run still fails. Some twenty runs.
///
/// Whatever is left out, the rest of the run is drawn as before, but time and chance go other ways
/// in it; so what is found is a failure of this seed, perhaps not the same one.
pub fn shrink(options: &Options) -> Options {
    let fails = |options: &Options| {
        run(options, Outputs::default()).is_ok_and(|outcomes| !outcomes.report.passed())
    };
    let mut least = options.clone();
    for trouble in Trouble::ALL {
        if least.without.contains(&trouble) {
            continue;
        }
        let mut less = least.clone();
        less.without.push(trouble);
        if fails(&less) {
            least = less;
        }
    }
    for operations in [0, 1, 2, 4, 8, 16] {
        let less = Options { operations: Some(operations), ..least.clone() };
        if least.operations.is_none_or(|count| operations < count) && fails(&less) {
            return less;
        }
    }
    least
}
