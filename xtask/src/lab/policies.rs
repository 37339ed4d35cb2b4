//! `cargo xtask lab bench-policies`: classic and TENT over four links of 400, 200, 100 and 100 Mbit/s.
//!
//! First requests of 64 KiB beside a bulk stream, and what each carries; then a stream of batches during which the fastest link becomes slow, is as it was, is cut
//! without a word, and is restored. Rates are those of the receiving NICs' counters.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use millstream_lab::{Cut, Rate};
use serde_json::{Value, json};

use super::bench::{BLOCKS, Process, Site};
use super::figures::{self, Sample};
use super::mixed::Mixed;
use super::options::BenchOptions;
use crate::machine::Machine;
use crate::programs;

const PLAN: &str = "uneven-links.toml";
/// What all links carry together, and what the first does, Mbit/s.
const ALL: f64 = 800.0;
const FIRST: u32 = 400;
/// The NIC whose link changes.
const NIC: &str = "eth0";

/// By whether `MC_USE_TENT` is set.
const POLICIES: [(&str, &str); 2] = [("classic", "0"), ("tent", "1")];

/// How often the counters are read: gaps are seen to this.
const INTERVAL: Duration = Duration::from_millis(5);
/// The time over which a rate is taken.
const WINDOW: Duration = Duration::from_millis(50);
/// How long each of the changes lasts.
const EACH: Duration = Duration::from_secs(4);
/// What counts as recovered, of what is left.
const RECOVERED: f64 = 0.9;

/// What is done to the first link, and what Mbit/s are left of all then.
const CHANGES: [(&str, f64); 5] = [
    ("steady", ALL),
    ("a tenth", ALL - 360.0),
    ("as before", ALL),
    ("cut", ALL - 400.0),
    ("restored", ALL),
];

pub(super) fn run(options: &BenchOptions) -> Result<()> {
    let program = programs::fast_millstream()?;
    let program = program.canonicalize().context("cannot find millstream")?;
    let machine = Machine::here()?;
    let (mut rates, mut streams) = (Vec::new(), Vec::new());
    let mut mixed = Mixed::new()?;
    for _ in 0..options.runs {
        for (policy, tent) in POLICIES {
            let site = || Site::new(&program, PLAN, &[("MC_USE_TENT", tent)]);
            mixed.measure(&site()?, policy)?;
            if options.only_mixed {
                continue;
            }
            let steady = site()?;
            for op in ["write", "read"] {
                for block in BLOCKS {
                    rates.push(((op, block, policy), steady.rate(op, block)?));
                }
            }
            drop(steady);
            if options.cuts {
                for op in ["write", "read"] {
                    let stream = stream(site()?, op)?;
                    eprintln!("{policy}, {op}: {stream}");
                    streams.push(json!({ "policy": policy, "op": op, "changes": stream }));
                }
            }
        }
    }
    let mut rows = Vec::new();
    for op in ["write", "read"] {
        for block in BLOCKS.into_iter().filter(|_| !options.only_mixed) {
            for (policy, _) in POLICIES {
                let of = rates.iter().filter(|rate| rate.0 == (op, block, policy));
                let rate = figures::median(of.map(|rate| rate.1).collect());
                rows.push(json!({
                    "op": op, "block_size": block, "policy": policy,
                    "mbit_per_s": rate, "ratio_to_all": rate / ALL,
                }));
            }
        }
    }
    if options.json {
        let (machine, mixed) = (machine.to_json(), mixed.to_json());
        let report =
            json!({ "machine": machine, "rates": rows, "streams": streams, "mixed": mixed });
        println!("{report}");
        return Ok(());
    }
    println!("{machine}");
    mixed.print();
    if options.only_mixed {
        return Ok(());
    }
    println!("\n{:6} {:>6} {:8} {:>7} {:>7}", "op", "block", "policy", "Mbit/s", "of all");
    for row in &rows {
        let text = |field: &str| row[field].as_str().unwrap_or("?").to_owned();
        let number = |field: &str| row[field].as_f64().unwrap_or(f64::NAN);
        let (op, block, policy) = (text("op"), text("block_size"), text("policy"));
        let (rate, ratio) = (number("mbit_per_s"), number("ratio_to_all"));
        println!("{op:6} {block:>6} {policy:8} {rate:>7.0} {ratio:>7.3}");
    }
    for stream in &streams {
        println!("\n{stream:#}");
    }
    Ok(())
}

/// A stream of batches during the changes.
fn stream(mut site: Site, op: &str) -> Result<Value> {
    let mut bench = site.command(&["bench", "transfer", "--op", op, "--json"])?;
    bench.args(["--block-size=64KiB", "--batch-size=64", "--threads=2", "--duration"]);
    // It is killed before.
    bench.arg(format!("{}s", (EACH * CHANGES.len() as u32).as_secs() + 30));
    bench.stdout(Stdio::null()).stderr(Stdio::inherit());
    let mut stream = Process(bench.spawn().context("cannot start the batches")?);
    let receiver = if op == "read" { stream.0.id() } else { site.node.0.id() };
    let mut samples: Vec<Sample> = Vec::new();
    let mut begun: Vec<Duration> = Vec::new();
    let start = Instant::now();
    loop {
        let now = start.elapsed();
        if let Some(status) = stream.0.try_wait().context("cannot wait for the batches")? {
            bail!("batches failed after {now:?} ({op}): {status}");
        }
        if let Some(bytes) = super::cuts::received(receiver) {
            super::cuts::add(&mut samples, now, bytes);
            if begun.is_empty() && bytes - samples[0].bytes >= 1 << 20 {
                begun.push(now);
            }
        }
        ensure!(!begun.is_empty() || now < EACH * 10, "no batches came ({op})");
        if begun.last().is_some_and(|last| now >= *last + EACH) {
            // Before the scripts that make the change.
            let at = start.elapsed();
            match begun.len() {
                1 => site.lab.set_rate("a", NIC, Some(Rate::from_mbit(FIRST / 10)))?,
                2 => site.lab.set_rate("a", NIC, Some(Rate::from_mbit(FIRST)))?,
                3 => site.lab.cut("a", NIC, Cut::Silent)?,
                4 => site.lab.restore("a", NIC)?,
                _ => break,
            }
            begun.push(at);
        }
        std::thread::sleep(INTERVAL);
    }
    let rates = figures::rates(&samples, WINDOW);
    let end = start.elapsed();
    let full = figures::mean(&rates, begun[1].saturating_sub(EACH / 2), begun[1]);
    let ends = begun.iter().skip(1).copied().chain([end]);
    let changes = CHANGES.iter().zip(begun.iter().zip(ends)).map(|((what, left), (from, to))| {
        let wanted = RECOVERED * full * left / ALL;
        let inside = |(at, _): &&(Duration, f64)| (*from + WINDOW..to).contains(at);
        let reached = rates.iter().filter(inside).find(|(_, rate)| *rate >= wanted);
        let below = rates.iter().filter(inside).filter(|(_, rate)| *rate < wanted).count();
        json!({
            "what": what,
            "mean_mbit_per_s": figures::mean(&rates, *from, to),
            "mean_of_what_is_left": figures::mean(&rates, *from, to) / (full * left / ALL),
            "ms_to_reach_0.9": reached.map(|(at, _)| (*at - *from).as_millis() as u64),
            "part_of_windows_below_0.9": below as f64 / rates.iter().filter(inside).count() as f64,
            "longest_gap_ms": figures::longest_gap(&samples, *from, to).as_millis() as u64,
        })
    });
    Ok(changes.collect())
}
