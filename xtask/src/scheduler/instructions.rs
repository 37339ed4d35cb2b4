//! Instructions of a slice, counted by callgrind: the same on a busy machine and on an idle one.
//!
//! What is counted is the example `flow_throughput` of `millstream-transfer-core`: submitted in batches, picked, posted,
//! completed and reported, without a transport. What it does once goes out by the difference of two runs.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::Options;
use crate::{install, programs};

/// Slices of a batch in the example.
const BATCH: u64 = 128;

/// Batches of the two runs.
const BATCHES: [u64; 2] = [1000, 2000];

const POLICIES: [&str; 2] = ["classic", "tent"];
const RAILS: [u64; 2] = [1, 4];

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(need) = install::ensure(install::FOR_INSTRUCTIONS).first() {
        bail!("there is no {}, which {}", need.program, need.reason);
    }
    let program = programs::fast_core_example("flow_throughput")?;
    let mut rows = Vec::new();
    for rails in RAILS {
        let mut of = [0.0; 2];
        for (policy, of) in POLICIES.iter().zip(&mut of) {
            let [few, many] = BATCHES.map(|batches| count(&program, policy, rails, batches));
            let (few, many) = (few?, many?);
            let slices = (BATCHES[1] - BATCHES[0]) * BATCH;
            *of = many.saturating_sub(few) as f64 / slices as f64;
        }
        rows.push((rails, of));
    }
    if options.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(rails, [classic, tent])| {
                json!({ "rails": rails, "classic": classic, "tent": tent, "ratio": tent / classic })
            })
            .collect();
        println!("{}", json!({ "instructions_per_slice": rows }));
        return Ok(());
    }
    println!("instructions of a slice of 64 KiB, in batches of {BATCH}");
    println!("{:>5} {:>9} {:>9} {:>13}", "rails", "classic", "tent", "tent/classic");
    for (rails, [classic, tent]) in rows {
        println!("{rails:>5} {classic:>9.0} {tent:>9.0} {:>13.2}", tent / classic);
    }
    Ok(())
}

/// All instructions of a run.
fn count(program: &Path, policy: &str, rails: u64, batches: u64) -> Result<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program);
    valgrind.args([policy, &rails.to_string(), &batches.to_string()]);
    valgrind.stdin(Stdio::null()).stdout(Stdio::null());
    let output = valgrind.output().context("cannot start valgrind")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("valgrind ended with {}: {}", output.status, said.trim());
    }
    collected(&said).with_context(|| format!("valgrind counted nothing: {}", said.trim()))
}

/// What callgrind says of its end: `==17== Collected : 123456`.
fn collected(said: &str) -> Option<u64> {
    let line = said.lines().rev().find(|line| line.contains("Collected :"))?;
    line.rsplit_once(':')?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_among_what_valgrind_says() {
        let said = "==17== Callgrind, a call-graph generating cache profiler\n\
                    ==17== Events    : Ir\n==17== Collected : 123456\n==17== \n\
                    ==17== I   refs:      123,456\n";
        assert_eq!(collected(said), Some(123_456));
        assert_eq!(collected("==17== Events    : Ir\n"), None);
    }
}
