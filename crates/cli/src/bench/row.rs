//! A row of a table of collectives.

use serde::Serialize;

use super::tree::Tree;
use crate::collective::{Latency, Path, Report};

/// The slowest host's figures, and the wrong elements of all.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) collective: String,
    pub(super) hosts: u32,
    pub(super) path: Path,
    pub(super) switches: u32,
    pub(super) fan_in: u32,
    pub(super) trees: u8,
    /// Bytes of the longer vector.
    pub(super) bytes: u64,
    /// Elements of the shorter one.
    pub(super) count: u64,
    pub(super) iters: u32,
    pub(super) algbw_mb_per_s: f64,
    pub(super) busbw_mb_per_s: f64,
    pub(super) latency_us: Latency,
    pub(super) checked: u64,
    pub(super) wrong: u64,
}

impl Row {
    pub(super) fn slowest(hosts: u32, tree: &Tree, reports: &[Report]) -> Self {
        let least = |figure: fn(&Report) -> f64| {
            reports.iter().map(figure).min_by(f64::total_cmp).unwrap_or_default()
        };
        let most = |figure: fn(&Report) -> f64| {
            reports.iter().map(figure).max_by(f64::total_cmp).unwrap_or_default()
        };
        let first = reports.first();
        Self {
            collective: first.map_or_else(String::new, |report| report.collective.clone()),
            hosts,
            path: tree.path,
            switches: tree.switches(),
            fan_in: tree.fan_in(),
            trees: tree.trees(),
            bytes: first.map_or(0, |report| report.bytes),
            count: first.map_or(0, |report| report.count),
            iters: first.map_or(0, |report| report.iters),
            algbw_mb_per_s: least(|report| report.algbw_mb_per_s),
            busbw_mb_per_s: least(|report| report.busbw_mb_per_s),
            latency_us: Latency {
                mean: most(|report| report.latency_us.mean),
                p50: most(|report| report.latency_us.p50),
                p99: most(|report| report.latency_us.p99),
            },
            checked: reports.iter().map(|report| report.checked).sum(),
            wrong: reports.iter().map(|report| report.wrong).sum(),
        }
    }
}
