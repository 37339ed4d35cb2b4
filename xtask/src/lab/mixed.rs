//! Requests of 64 KiB beside a bulk stream over the lab's links: what they take, with either policy.
//!
//! TENT knows the small ones as latency-class and the stream as bulk; classic has no priorities. What runs at the lab's host
//! is the example `mixed_load` of `millstream-transfer`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::bench::Site;
use super::figures;
use crate::programs;

/// The 99th percentile with TENT is at most this part of classic's.
const AIM: f64 = 1.0 / 3.0;

/// Seconds of a run, and requests of 4 MiB of the stream that are under way.
const SECONDS: &str = "10";
const DEPTH: &str = "4";

/// What a run has shown.
struct Run {
    policy: &'static str,
    p50_ms: f64,
    p99_ms: f64,
    stream: f64,
}

pub(super) struct Mixed {
    program: PathBuf,
    runs: Vec<Run>,
}

impl Mixed {
    pub(super) fn new() -> Result<Self> {
        let program = programs::fast_transfer_example("mixed_load")?;
        let program = program.canonicalize().context("cannot find the example mixed_load")?;
        Ok(Self { program, runs: Vec::new() })
    }

    /// A run at a site of its own.
    pub(super) fn measure(&mut self, site: &Site, policy: &'static str) -> Result<()> {
        let mut command = site.lab.command("a", &self.program)?;
        command.args(["towards", &site.segment, policy, SECONDS, DEPTH]);
        command.args(site.locals.iter().map(ToString::to_string));
        let said = crate::process::output(&mut command)?;
        let said: Value = serde_json::from_str(&said).context("what mixed_load says")?;
        let number =
            |field: &str| said[field].as_f64().with_context(|| format!("no {field}: {said}"));
        let (p50_ms, p99_ms) = (number("p50_ms")?, number("p99_ms")?);
        let stream = number("stream_mbit_per_s")?;
        eprintln!("{policy}, small requests: {said}");
        self.runs.push(Run { policy, p50_ms, p99_ms, stream });
        Ok(())
    }

    fn of(&self, policy: &str, figure: impl Fn(&Run) -> f64) -> f64 {
        let runs = self.runs.iter().filter(|run| run.policy == policy);
        figures::median(runs.map(figure).collect())
    }

    /// TENT's in parts of classic's.
    fn ratio(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        self.of("tent", &figure) / self.of("classic", &figure)
    }

    pub(super) fn to_json(&self) -> Value {
        let of = |policy| {
            json!({
                "p50_ms": self.of(policy, |run| run.p50_ms),
                "p99_ms": self.of(policy, |run| run.p99_ms),
                "stream_mbit_per_s": self.of(policy, |run| run.stream),
            })
        };
        json!({
            "classic": of("classic"), "tent": of("tent"),
            "ratio_p50": self.ratio(|run| run.p50_ms),
            "ratio_p99": self.ratio(|run| run.p99_ms), "aim": AIM,
        })
    }

    pub(super) fn print(&self) {
        println!("requests of 64 KiB beside a stream, medians of the runs");
        println!("{:8} {:>9} {:>9} {:>14}", "policy", "p50, ms", "p99, ms", "stream, Mbit/s");
        for policy in ["classic", "tent"] {
            let [p50, p99] = [self.of(policy, |it| it.p50_ms), self.of(policy, |it| it.p99_ms)];
            println!("{policy:8} {p50:>9.2} {p99:>9.2} {:>14.0}", self.of(policy, |it| it.stream));
        }
        let [p50, p99] = [self.ratio(|run| run.p50_ms), self.ratio(|run| run.p99_ms)];
        println!("{:8} {p50:>9.3} {p99:>9.3}   (p99: aim {AIM:.3})", "ratio");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_both_make_the_ratio() {
        let run = |policy, p99_ms| Run { policy, p50_ms: 1.0, p99_ms, stream: 700.0 };
        let runs = [("classic", 90.0), ("tent", 9.0), ("classic", 60.0), ("tent", 15.0)];
        let mut runs: Vec<Run> = runs.into_iter().map(|(policy, ms)| run(policy, ms)).collect();
        runs.push(run("classic", 100.0));
        runs.push(run("tent", 30.0));
        let mixed = Mixed { program: PathBuf::new(), runs };
        let said = mixed.to_json();
        let number = |value: &Value| value.as_f64().unwrap();
        assert!((number(&said["ratio_p99"]) - 15.0 / 90.0).abs() < 1e-9, "{said}");
        assert!((number(&said["classic"]["p99_ms"]) - 90.0).abs() < 1e-9, "{said}");
        assert!((number(&said["ratio_p50"]) - 1.0).abs() < 1e-9, "{said}");
    }
}
