//! What a scenario says at its end.

use core::fmt;
use core::time::Duration;

use millstream_roce::Counters;

use crate::{Digest, Happening, Machine, Simulation, Violation};

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// Which scenario.
    pub scenario: &'static str,
    /// The seed.
    pub seed: u64,
    /// The same for the same run, and only then.
    pub digest: Digest,
    /// What was done, in words.
    pub what: String,
    /// Bytes that applications moved or reduced, each once.
    pub bytes: u64,
    /// Virtual time that it took; zero when it did not end.
    pub virtual_time: Duration,
    /// What the network did.
    pub network: NetworkCounts,
    /// What each device has counted.
    pub devices: Vec<(String, Counters)>,
    /// What must not be: wrong bytes, broken invariants, calls that never ended.
    pub violations: Vec<Violation>,
    /// A table, where the scenario makes one.
    pub table: Option<String>,
}

impl Report {
    /// The report of a scenario of many runs, before the first.
    pub(super) fn of_many(scenario: &'static str, seed: u64, what: String) -> Self {
        Self {
            scenario,
            seed,
            digest: Digest::new(),
            what,
            bytes: 0,
            virtual_time: Duration::ZERO,
            network: NetworkCounts::default(),
            devices: Vec::new(),
            violations: Vec::new(),
            table: None,
        }
    }

    /// Takes in one of many runs.
    pub(super) fn absorb(&mut self, one: Self) {
        self.digest.merge(one.digest);
        self.network.add(&one.network);
        self.violations.extend(one.violations);
    }

    /// Whether everything is as it should be.
    pub const fn passed(&self) -> bool {
        self.violations.is_empty()
    }

    /// Bits per second of virtual time; 0 when it did not end.
    pub fn throughput(&self) -> u64 {
        let bits = u128::from(self.bytes) * 8 * 1_000_000_000;
        bits.checked_div(self.virtual_time.as_nanos()).unwrap_or(0) as u64
    }
}

/// What the network did with packets.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[allow(missing_docs, reason = "the names say it; see Happening")]
pub struct NetworkCounts {
    pub sent: u64,
    pub bytes_sent: u64,
    pub delivered: u64,
    pub lost: u64,
    pub overflowed: u64,
    pub partitioned: u64,
    pub duplicated: u64,
    pub held_back: u64,
    pub corrupted: u64,
}

impl NetworkCounts {
    pub(crate) const fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.bytes_sent += other.bytes_sent;
        self.delivered += other.delivered;
        self.lost += other.lost;
        self.overflowed += other.overflowed;
        self.partitioned += other.partitioned;
        self.duplicated += other.duplicated;
        self.held_back += other.held_back;
        self.corrupted += other.corrupted;
    }

    pub(crate) fn of<M: Machine>(simulation: &Simulation<'_, M>) -> Self {
        let count = |happening| simulation.count(happening);
        Self {
            sent: count(Happening::Sent),
            bytes_sent: simulation.bytes_sent(),
            delivered: count(Happening::Delivered),
            lost: count(Happening::Lost),
            overflowed: count(Happening::Overflowed),
            partitioned: count(Happening::Partitioned),
            duplicated: count(Happening::Duplicated),
            held_back: count(Happening::HeldBack),
            corrupted: count(Happening::Corrupted),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "scenario {}, seed {}, digest {}", self.scenario, self.seed, self.digest)?;
        writeln!(f, "{}", self.what)?;
        if !self.virtual_time.is_zero() {
            let (seconds, rate) = (self.virtual_time.as_secs_f64(), self.throughput());
            writeln!(
                f,
                "{} bytes in {seconds:.6} s of virtual time: {} Mbit/s",
                self.bytes,
                rate / 1_000_000
            )?;
        }
        let NetworkCounts {
            sent,
            bytes_sent,
            delivered,
            lost,
            overflowed,
            partitioned,
            duplicated,
            held_back,
            corrupted,
        } = self.network;
        writeln!(
            f,
            "network: {sent} packets sent ({bytes_sent} bytes), {delivered} delivered; {lost} lost, \
             {overflowed} overflowed, {partitioned} partitioned, {duplicated} duplicated, \
             {held_back} held back, {corrupted} corrupted"
        )?;
        if !self.devices.is_empty() {
            writeln!(
                f,
                "{:<16} {:>9} {:>9} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9}",
                "device",
                "sent",
                "received",
                "naks",
                "rnr",
                "timeouts",
                "resends",
                "duplicate",
                "bad icrc"
            )?;
        }
        for (name, counters) in &self.devices {
            writeln!(
                f,
                "{name:<16} {:>9} {:>9} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9}",
                counters.packets_sent,
                counters.packets_received,
                counters.naks_sent,
                counters.rnr_naks_sent,
                counters.timeouts,
                counters.retransmissions,
                counters.duplicates,
                counters.dropped_icrc
            )?;
        }
        if let Some(table) = &self.table {
            f.write_str(table)?;
        }
        for violation in &self.violations {
            writeln!(f, "VIOLATION {violation}")?;
        }
        f.write_str(if self.passed() { "passed" } else { "FAILED" })
    }
}
