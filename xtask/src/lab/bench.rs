//! `cargo xtask lab bench`: what several links give together, and what a cut costs.
//!
//! The links are of 200 Mbit/s, so that not the processor but they are the limit. Rates of whole runs are
//! what `millstream bench transfer` says; while a link is cut and restored, they are taken from the
//! counters of the receiving NICs.

use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use millstream_lab::{Cut, Handle, Lab};
use serde_json::{Value, json};

use super::figures::{self, Sample};
use super::options::BenchOptions;
use super::{plan_of_ours, read_plan};
use crate::machine::Machine;
use crate::programs;

const PLANS: [(usize, &str); 3] =
    [(1, "one-link.toml"), (2, "two-links.toml"), (4, "four-links.toml")];

/// Of a run at full rate.
const DURATION: &str = "3s";

/// How often the counters are read.
const INTERVAL: Duration = Duration::from_millis(20);
/// Before the cut, while it lasts, and after it.
const BEFORE: Duration = Duration::from_secs(2);
const CUT: Duration = Duration::from_secs(6);
const AFTER: Duration = Duration::from_secs(40);

/// The rates that count as recovered, in parts of one link's.
const WITHOUT_ONE: f64 = 2.7;
const WITH_ALL: f64 = 3.6;

pub(super) fn run(options: &BenchOptions) -> Result<()> {
    let program = programs::fast_millstream()?;
    let program = program.canonicalize().context("cannot find millstream")?;
    let machine = Machine::here()?;
    let mut rates = Vec::new();
    for _ in 0..options.runs {
        for (links, plan) in PLANS {
            let site = Site::new(&program, plan)?;
            for op in ["write", "read"] {
                rates.push((op, links, site.rate(op)?));
            }
        }
    }
    let mut rows = Vec::new();
    for op in ["write", "read"] {
        let median = |links| {
            let of = rates.iter().filter(|rate| (rate.0, rate.1) == (op, links));
            figures::median(of.map(|rate| rate.2).collect())
        };
        let one = median(1);
        for (links, _) in PLANS {
            let rate = median(links);
            rows.push(json!({
                "op": op, "links": links, "mbit_per_s": rate, "ratio_to_one": rate / one,
            }));
        }
    }
    let mut cuts = Vec::new();
    if options.cuts {
        for (op, how) in [("put", Cut::Silent), ("put", Cut::Down), ("get", Cut::Silent)] {
            let site = Site::new(&program, "four-links.toml")?;
            let one =
                rows.iter().find(|row| row["op"] == if op == "put" { "write" } else { "read" });
            let one = one.and_then(|row| row["mbit_per_s"].as_f64()).context("one link's rate")?;
            cuts.push(cut(site, op, how, one)?);
        }
    }
    if options.json {
        let report = json!({ "machine": machine.to_json(), "rates": rows, "cuts": cuts });
        println!("{report}");
        return Ok(());
    }
    print(&machine, &rows, &cuts);
    Ok(())
}

fn print(machine: &Machine, rows: &[Value], cuts: &[Value]) {
    println!("{machine}");
    println!("{:6} {:>5} {:>10} {:>11}", "op", "links", "Mbit/s", "of one link");
    for row in rows {
        let number = |field: &str| row[field].as_f64().unwrap_or(f64::NAN);
        let (op, links) = (row["op"].as_str().unwrap_or("?"), &row["links"]);
        let (rate, ratio) = (number("mbit_per_s"), number("ratio_to_one"));
        println!("{op:6} {links:>5} {rate:>10.0} {ratio:>11.2}");
    }
    for one in cuts {
        println!("\none of four links cut: {one:#}");
    }
}

/// Two hosts, and a node at `b` with all its addresses.
struct Site {
    node: Process,
    segment: String,
    locals: Vec<IpAddr>,
    /// After the processes in it.
    lab: Lab,
    program: std::path::PathBuf,
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Site {
    fn new(program: &Path, plan: &str) -> Result<Self> {
        let lab = Lab::up(&read_plan(&plan_of_ours(plan))?)?;
        let mut node = lab.command("b", program)?;
        node.args(["node", "--protocol", "rdma:soft", "--buffer", "256MiB"]);
        bind(&mut node, &lab.host("b")?.addresses());
        let node = node.stdout(Stdio::piped()).spawn().context("cannot start a node")?;
        let mut node = Process(node);
        let mut line = String::new();
        let stdout = node.0.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).context("cannot hear from the node")?;
        let ready = line.strip_prefix("ready ").context("the node is not ready")?;
        let ready: Value = serde_json::from_str(ready).context("the node's ready line")?;
        let segment = ready["segment"].as_str().context("the node's segment")?.to_owned();
        let locals = lab.host("a")?.addresses();
        Ok(Self { node, segment, locals, lab, program: program.to_owned() })
    }

    /// A command at `a` that works on the segment.
    fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.lab.command("a", &self.program)?;
        command.args(words).args(["--segment", &self.segment]);
        bind(&mut command, &self.locals);
        Ok(command)
    }

    /// Mbit/s of payload.
    fn rate(&self, op: &str) -> Result<f64> {
        let mut bench = self.command(&["bench", "transfer", "--op", op, "--json"])?;
        bench.args(["--block-size=1MiB", "--batch-size=16", "--threads=2", "--duration", DURATION]);
        let report = crate::process::output(&mut bench)?;
        let report: Value = serde_json::from_str(&report).context("bench transfer's JSON")?;
        let row = report["rows"].get(0).unwrap_or(&report);
        Ok(row["gb_per_s"].as_f64().context("bench transfer's gb_per_s")? * 8000.0)
    }
}

fn bind(command: &mut Command, addresses: &[IpAddr]) {
    for address in addresses {
        command.args(["--bind", &address.to_string()]);
    }
}

/// Cuts one of four links for a while in the middle of copies, and says how the rate follows.
fn cut(mut site: Site, op: &str, how: Cut, one: f64) -> Result<Value> {
    let mut copies = site.command(&[op])?;
    let (receiver, file) = match op {
        "put" => ("b", "/dev/zero"),
        _ => ("a", "/dev/null"),
    };
    copies.args(["--timeout=60s", "--length=256MiB", file]);
    let lab: &mut Handle = &mut site.lab;
    let mut process = match receiver {
        "b" => site.node.0.id(),
        _ => 0,
    };
    let start = Instant::now();
    let mut samples = Vec::new();
    let (mut cut_at, mut restored_at) = (None, None);
    let mut copy: Option<Process> = None;
    let mut failures = 0;
    while start.elapsed() < BEFORE + CUT + AFTER {
        let running = match &mut copy {
            Some(copy) => copy.0.try_wait().context("cannot wait for a copy")?,
            None => None,
        };
        if copy.is_none() || running.is_some() {
            failures += usize::from(running.is_some_and(|status| !status.success()));
            let child = copies.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
            let child = child.context("cannot start a copy")?;
            if receiver == "a" {
                process = child.id();
            }
            copy = Some(Process(child));
        }
        let now = start.elapsed();
        if cut_at.is_none() && now >= BEFORE {
            lab.cut("a", "eth3", how)?;
            cut_at = Some(start.elapsed());
        }
        if restored_at.is_none() && now >= BEFORE + CUT {
            lab.restore("a", "eth3")?;
            restored_at = Some(start.elapsed());
        }
        // Between two copies there is nobody whose host it is.
        if let Some(bytes) = received(process) {
            samples.push(Sample { at: start.elapsed(), bytes });
        }
        std::thread::sleep(INTERVAL);
    }
    let (Some(cut_at), Some(restored_at)) = (cut_at, restored_at) else {
        bail!("the link was never cut");
    };
    let rates = figures::rates(&samples);
    let reaches = |from, to, part: f64| {
        figures::first_at(&rates, from, to, part * one).map(|at| (at - from).as_millis() as u64)
    };
    Ok(json!({
        "op": op,
        "how": how,
        "failed_copies": failures,
        "mbit_per_s_before": figures::mean(&rates, Duration::from_secs(1), cut_at),
        "mbit_per_s_while_cut": figures::mean(&rates, cut_at, restored_at),
        "mbit_per_s_after": figures::mean(&rates, restored_at, start.elapsed()),
        "ms_to_2_7_of_one_link_after_cut": reaches(cut_at, restored_at, WITHOUT_ONE),
        "ms_to_3_6_of_one_link_after_restore": reaches(restored_at, start.elapsed(), WITH_ALL),
    }))
}

/// Bytes that all NICs of the host of a process have received.
fn received(process: u32) -> Option<u64> {
    let table = std::fs::read_to_string(format!("/proc/{process}/net/dev")).ok()?;
    Some(figures::received(&table))
}
