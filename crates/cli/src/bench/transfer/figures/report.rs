//! What is said of the figures: a table, what is aimed at, or one JSON object.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::super::Operation;
use super::lane;
use crate::bench::figures::{per, three_digits};
use crate::{output, units};

#[derive(Serialize)]
pub(super) struct Report {
    working_set: usize,
    turns: usize,
    turn_ms: u64,
    pub(super) rows: Vec<Row>,
    pub(super) aims: Vec<Aim>,
}

/// Requests of one size. Each figure is the median of all turns.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) op: Operation,
    pub(super) block_size: u64,
    pub(super) batch_size: u32,
    pub(super) working_set: usize,
    /// In blocks of as many bytes, on one thread.
    pub(super) memory_copy_gb_per_s: f64,
    /// By process_vm_writev or process_vm_readv, where that is allowed.
    pub(super) process_copy_gb_per_s: Option<f64>,
    /// By lane.
    pub(super) gb_per_s: BTreeMap<&'static str, f64>,
    pub(super) batch_p50_us: BTreeMap<&'static str, f64>,
}

/// What a figure is to be.
#[derive(Serialize)]
pub(super) struct Aim {
    what: String,
    figure: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_least: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_most: Option<f64>,
    met: bool,
}

impl Aim {
    pub(super) fn at_least(what: String, figure: f64, least: f64) -> Self {
        Self { what, figure, at_least: Some(least), at_most: None, met: figure >= least }
    }

    pub(super) fn at_most(what: String, figure: f64, most: f64) -> Self {
        Self { what, figure, at_least: None, at_most: Some(most), met: figure <= most }
    }

    fn print(&self) -> anyhow::Result<()> {
        let (sign, aim) = match (self.at_least, self.at_most) {
            (Some(least), _) => (">=", least),
            (None, most) => ("<=", most.unwrap_or_default()),
        };
        let met = if self.met { "met" } else { "missed" };
        let figure = three_digits(self.figure);
        output::line(&format!("{:<84}{figure:>9}  {sign} {aim:<8} {met}", self.what))
    }
}

impl Row {
    fn name(&self) -> String {
        let batch = match self.batch_size {
            1 => String::new(),
            count => format!(" x {count}"),
        };
        format!("{} {}{batch}", self.op.name(), units::readable(self.block_size))
    }
}

impl Report {
    pub(super) fn new(working_set: usize, turns: usize, turn: Duration) -> Self {
        let turn_ms = turn.as_millis() as u64;
        Self { working_set, turns, turn_ms, rows: Vec::new(), aims: Vec::new() }
    }

    /// Prints a row, and before the first one what they are.
    pub(super) fn print_row(&self, row: &Row) -> anyhow::Result<()> {
        if self.rows.is_empty() {
            output::line(&format!(
                "GB/s; both sides walk through {}; medians of {} turns of {} ms, by turns; in brackets: \
                 in parts of memcpy",
                units::readable(self.working_set as u64),
                self.turns,
                self.turn_ms
            ))?;
            let lanes: String = lane::NAMES.iter().map(|name| format!("{name:>15}")).collect();
            output::line(&format!("{:<20}{:>8}{:>19}{lanes}", "", "memcpy", "process_vm"))?;
        }
        let copy = row.memory_copy_gb_per_s;
        let of_copy = |rate: f64| format!("{} ({:.2})", three_digits(rate), per(rate, copy));
        let process = row.process_copy_gb_per_s.map_or("-".to_owned(), of_copy);
        let lane = |name| format!("{:>15}", of_copy(row.gb_per_s[name]));
        let lanes: String = lane::NAMES.into_iter().map(lane).collect();
        output::line(&format!("{:<20}{:>8}{process:>19}{lanes}", row.name(), three_digits(copy)))
    }

    /// What is aimed at in all rows: the worst of them counts.
    pub(super) fn judge_rows(&mut self) {
        let shm = |row: &Row, other: f64| per(row.gb_per_s["shm"], other);
        let by_kernel = |row: &Row| row.process_copy_gb_per_s.map(|other| shm(row, other));
        let by_copy =
            |row: &Row| (row.block_size >= 1 << 20).then(|| shm(row, row.memory_copy_gb_per_s));
        type Figure<'a> = &'a dyn Fn(&Row) -> Option<f64>;
        for (beside, figure) in [
            ("process_vm_writev or -readv", &by_kernel as Figure<'_>),
            ("memcpy, from 1 MiB on", &by_copy),
        ] {
            let ratios = self.rows.iter().filter_map(|row| Some((row.name(), figure(row)?)));
            if let Some((name, least)) = ratios.min_by(|one, other| one.1.total_cmp(&other.1)) {
                let what = format!("shm, in parts of {beside}: the least, {name}");
                self.aims.push(Aim::at_least(what, least, 0.9));
            }
        }
        let single = self.rows.iter().find(|row| row.block_size == 4 << 10 && row.batch_size == 1);
        if let Some(row) = single {
            let what = "shm, one write of 4 KiB, p50 in us".to_owned();
            self.aims.push(Aim::at_most(what, row.batch_p50_us["shm"], 3.0));
        }
    }

    /// Prints the rest.
    pub(super) fn finish(&self, json: bool) -> anyhow::Result<()> {
        if json {
            return output::json(self);
        }
        output::line("")?;
        self.aims.iter().try_for_each(Aim::print)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(block_size: u64, shm: f64, process: Option<f64>) -> Row {
        let of = |figure: f64| lane::NAMES.map(|name| (name, figure)).into();
        Row {
            op: Operation::Write,
            block_size,
            batch_size: 1,
            working_set: 0,
            memory_copy_gb_per_s: 10.0,
            process_copy_gb_per_s: process,
            gb_per_s: of(shm),
            batch_p50_us: of(2.5),
        }
    }

    #[test]
    fn the_worst_row_is_compared_with_what_is_aimed_at() {
        let mut report = Report::new(1 << 20, 3, Duration::from_millis(1));
        let rows = [(4 << 10, 1.0, 1.0), (1 << 20, 9.5, 10.0), (16 << 20, 9.1, 9.0)];
        report.rows.extend(rows.map(|(size, shm, process)| row(size, shm, Some(process))));
        report.judge_rows();
        let aims = report.aims.iter().map(|aim| (aim.figure, aim.met));
        let expected = [(0.95, true), (0.91, true), (2.5, true)];
        for ((figure, met), (known, expected)) in aims.zip(expected) {
            assert!((figure - known).abs() < 1e-9 && met == expected, "{figure}");
        }
        assert!(report.aims[0].what.ends_with("write 1 MiB"), "{}", report.aims[0].what);
        report.rows.push(row(2 << 20, 1.0, None));
        report.aims.clear();
        report.judge_rows();
        assert!(!report.aims[1].met && report.aims[0].met, "where there is nothing beside it");
    }
}
