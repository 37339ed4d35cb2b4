//! `cargo xtask lab bench`: what several links give together, and what a cut costs.
//!
//! The links are of 200 Mbit/s, so that not the processor but they are the limit. Rates of whole runs are
//! what `millstream bench transfer` says.

use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use millstream_lab::{Cut, Lab};
use serde_json::{Value, json};

use super::options::BenchOptions;
use super::{cuts, figures, plan_of_ours, read_plan};
use crate::machine::Machine;
use crate::programs;

const PLANS: [(usize, &str); 3] =
    [(1, "one-link.toml"), (2, "two-links.toml"), (4, "four-links.toml")];

/// Of a run at full rate.
const DURATION: &str = "3s";

/// Bytes of a request.
pub(super) const BLOCKS: [&str; 2] = ["64KiB", "1MiB"];

pub(super) fn run(options: &BenchOptions) -> Result<()> {
    let program = programs::fast_millstream()?;
    let program = program.canonicalize().context("cannot find millstream")?;
    let machine = Machine::here()?;
    let mut rates = Vec::new();
    for _ in 0..options.runs {
        for (links, plan) in PLANS {
            let site = Site::new(&program, plan, &[])?;
            for op in ["write", "read"] {
                for block in BLOCKS {
                    rates.push(((op, block, links), site.rate(op, block)?));
                }
            }
        }
    }
    let median = |key| {
        let of = rates.iter().filter(|rate| rate.0 == key).map(|rate| rate.1);
        figures::median(of.collect())
    };
    let mut rows = Vec::new();
    for op in ["write", "read"] {
        for block in BLOCKS {
            let one = median((op, block, 1));
            for (links, _) in PLANS {
                let rate = median((op, block, links));
                rows.push(json!({
                    "op": op, "block_size": block, "links": links,
                    "mbit_per_s": rate, "ratio_to_one": rate / one,
                }));
            }
        }
    }
    let mut cuts = Vec::new();
    if options.cuts {
        for op in ["write", "read"] {
            for how in [Cut::Silent, Cut::Down] {
                let site = || Site::new(&program, "four-links.toml", &[]);
                for measure in [cuts::copy, cuts::stream] {
                    let cut = measure(site()?, op, how)?;
                    eprintln!("one of four links cut: {cut}");
                    cuts.push(cut);
                }
            }
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
    println!("{:6} {:>6} {:>5} {:>10} {:>11}", "op", "block", "links", "Mbit/s", "of one link");
    for row in rows {
        let number = |field: &str| row[field].as_f64().unwrap_or(f64::NAN);
        let text = |field: &str| row[field].as_str().unwrap_or("?");
        let (op, block, links) = (text("op"), text("block_size"), &row["links"]);
        let (rate, ratio) = (number("mbit_per_s"), number("ratio_to_one"));
        println!("{op:6} {block:>6} {links:>5} {rate:>10.0} {ratio:>11.2}");
    }
    for one in cuts {
        println!("\none of four links cut: {one:#}");
    }
}

/// Two hosts, and a node at `b` with all its addresses.
pub(super) struct Site {
    pub(super) node: Process,
    pub(super) segment: String,
    pub(super) locals: Vec<IpAddr>,
    /// After the processes in it.
    pub(super) lab: Lab,
    program: std::path::PathBuf,
    /// Of both.
    variables: Vec<(&'static str, &'static str)>,
}

pub(super) struct Process(pub(super) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Site {
    /// With these variables in the environment of both.
    pub(super) fn new(
        program: &Path,
        plan: &str,
        variables: &[(&'static str, &'static str)],
    ) -> Result<Self> {
        let lab = Lab::up(&read_plan(&plan_of_ours(plan))?)?;
        let mut node = lab.command("b", program)?;
        node.args(["node", "--protocol", "rdma:soft", "--buffer", "256MiB"]);
        node.envs(variables.iter().copied());
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
        Ok(Self {
            node,
            segment,
            locals,
            lab,
            program: program.to_owned(),
            variables: variables.to_vec(),
        })
    }

    /// A command at `a` that works on the segment.
    pub(super) fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.lab.command("a", &self.program)?;
        command.args(words).args(["--segment", &self.segment]);
        command.envs(self.variables.iter().copied());
        bind(&mut command, &self.locals);
        Ok(command)
    }

    /// Mbit/s of payload.
    pub(super) fn rate(&self, op: &str, block: &str) -> Result<f64> {
        let mut bench = self.command(&["bench", "transfer", "--op", op, "--json"])?;
        let batch = if block == "1MiB" { "16" } else { "128" };
        bench.args(["--block-size", block, "--batch-size", batch]);
        bench.args(["--threads=2", "--duration", DURATION]);
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
