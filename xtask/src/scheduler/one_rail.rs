//! TENT beside classic over one rail, where there is nothing to choose: pairs of runs, and the ratio of each pair.
//!
//! A pair is measured within seconds, and who comes first changes with each: so what else the machine does is in both.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Options;
use crate::machine::Machine;
use crate::{process, programs};

/// TENT is no slower than this part of classic.
const AIM: f64 = 0.97;

/// Bytes of a request, and requests of a batch.
const SHAPES: [(&str, &str); 2] = [("64KiB", "128"), ("4KiB", "128")];
const DURATION: &str = "2s";

/// The ratios of pairs, in order.
#[derive(Debug, PartialEq)]
struct Ratios(Vec<f64>);

impl Ratios {
    fn new(mut ratios: Vec<f64>) -> Self {
        ratios.sort_by(f64::total_cmp);
        Self(ratios)
    }

    /// The one below which is this part of them, between two where it falls between.
    fn quantile(&self, part: f64) -> f64 {
        let place = part * (self.0.len() - 1) as f64;
        let (below, above) = (place.floor() as usize, place.ceil() as usize);
        let rest = place - place.floor();
        self.0[below] * (1.0 - rest) + self.0[above] * rest
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let program = programs::fast_millstream()?;
    let machine = Machine::here()?;
    let mut rows = Vec::new();
    for op in ["write", "read"] {
        for (block, batch) in SHAPES {
            let mut ratios = Vec::new();
            for turn in 0..options.turns {
                let rate = |policy| rate(&program, policy, op, block, batch);
                let (classic, tent) = if turn % 2 == 0 {
                    let classic = rate("classic")?;
                    (classic, rate("tent")?)
                } else {
                    let tent = rate("tent")?;
                    (rate("classic")?, tent)
                };
                eprintln!(
                    "xtask: {op} {block}, turn {} of {}: classic {classic:.3}, TENT {tent:.3} GB/s",
                    turn + 1,
                    options.turns
                );
                ratios.push(tent / classic);
            }
            rows.push((op, block, Ratios::new(ratios)));
        }
    }
    if options.json {
        let rows: Vec<Value> =
            rows.iter().map(|(op, block, ratios)| to_json(op, block, ratios)).collect();
        let (machine, turns) = (machine.to_json(), options.turns);
        println!("{}", json!({ "machine": machine, "turns": turns, "aim": AIM, "rows": rows }));
        return Ok(());
    }
    println!("{machine}");
    println!("TENT/classic over one soft rail, {} pairs of runs each; aim {AIM}", options.turns);
    println!("{:6} {:>6} {:>7} {:>15} {:>15}", "op", "block", "median", "quartiles", "all");
    for (op, block, ratios) in &rows {
        let at = |part| ratios.quantile(part);
        let [quartiles, all] = [(0.25, 0.75), (0.0, 1.0)]
            .map(|(low, high)| format!("{:.3}..{:.3}", at(low), at(high)));
        let verdict = if at(0.5) >= AIM { "" } else { "  below the aim" };
        println!("{op:6} {block:>6} {:>7.3} {quartiles:>15} {all:>15}{verdict}", at(0.5));
    }
    Ok(())
}

fn to_json(op: &str, block: &str, ratios: &Ratios) -> Value {
    let [least, low, median, high, most] =
        [0.0, 0.25, 0.5, 0.75, 1.0].map(|it| ratios.quantile(it));
    json!({
        "op": op, "block_size": block, "median": median, "low_quartile": low,
        "high_quartile": high, "min": least, "max": most,
    })
}

/// GB/s between two processes of their own, over a soft device of each.
fn rate(program: &Path, policy: &str, op: &str, block: &str, batch: &str) -> Result<f64> {
    let mut bench = Command::new(program);
    bench.args(["bench", "transfer", "--json", "--protocol=rdma:soft", "--require=rdma"]);
    bench.args(["--policy", policy, "--op", op, "--block-size", block, "--batch-size", batch]);
    let report = process::output(bench.args(["--duration", DURATION]))?;
    let report: Value = serde_json::from_str(&report).context("bench transfer's JSON")?;
    let row = report["rows"].get(0).unwrap_or(&report);
    row["gb_per_s"].as_f64().context("bench transfer's gb_per_s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_between_what_was_measured() {
        let ratios = Ratios::new(vec![3.0, 1.0, 2.0, 4.0]);
        for (part, expected) in [(0.0, 1.0), (0.5, 2.5), (0.25, 1.75), (1.0, 4.0)] {
            assert!((ratios.quantile(part) - expected).abs() < 1e-9, "{part}");
        }
        assert!((Ratios::new(vec![0.9]).quantile(0.75) - 0.9).abs() < 1e-9);
    }
}
