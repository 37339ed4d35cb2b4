//! `bench allreduce`: AllReduce over local processes, one row for each size, as nccl-tests has it.

use anyhow::bail;
use clap::Args;
use millstream_control::controller::FanIn;
use serde::Serialize;

use super::figures::three_digits;
use crate::allreduce::{Latency, Reduction, Report};
use crate::cluster::{Cluster, Job};
use crate::controller::FAN_IN;
use crate::failure::usage;
use crate::{output, process, units};

/// The most processes of hosts, and of switches.
const MAX_PROCESSES: i64 = 1024;

/// Arguments of `bench allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Host processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=MAX_PROCESSES))]
    hosts: u32,
    /// Children that a switch has in the tree at most, hosts and switches
    #[arg(long, value_name = "F", default_value_t = FanIn::MAX.get(), value_parser = clap::value_parser!(u32).range(FAN_IN))]
    fan_in: u32,
    /// Switch processes, which take the places in the tree by turns
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_PROCESSES))]
    switches: u32,
    /// Bytes of the vector, several with commas between
    #[arg(
        long,
        value_name = "S,...",
        default_value = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB",
        value_delimiter = ',',
        value_parser = units::size
    )]
    size: Vec<u64>,
    #[command(flatten)]
    reduction: Reduction,
    /// How often, for each size
    #[arg(long, value_name = "I", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// How often before that, without a figure
    #[arg(long, value_name = "I", default_value_t = 5)]
    warmup_iters: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` prints of a row: the slowest host's figures, and the wrong elements of all.
#[derive(Serialize)]
struct Row {
    hosts: u32,
    switches: u32,
    fan_in: u32,
    bytes: u64,
    iters: u32,
    algbw_mb_per_s: f64,
    busbw_mb_per_s: f64,
    latency_us: Latency,
    checked: u64,
    wrong: u64,
}

/// What `--json` prints of a table.
#[derive(Serialize)]
struct Table<'a> {
    rows: &'a [Row],
    /// There are fewer rows than were asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    interrupted: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    check(arguments)?;
    process::clean_up_when_told_to_stop()?;
    let mut cluster = Cluster::start(arguments.switches, arguments.fan_in)?;
    process::say_last_words_when_told_to_stop();
    if !arguments.json {
        print_header(arguments, &cluster)?;
    }
    let job = Job {
        hosts: arguments.hosts,
        sizes: &arguments.size,
        reduction: &arguments.reduction,
        iters: arguments.iters,
        warmup_iters: arguments.warmup_iters,
        patience: None,
    };
    let mut rows = Vec::new();
    let measured = cluster.all_reduce(&job, |reports| {
        let row = Row::slowest(arguments, &reports);
        if !arguments.json {
            print(arguments, &row)?;
        }
        rows.push(row);
        Ok(())
    });
    match measured {
        Err(_) if process::failed_because_told_to_stop() => {}
        measured => measured?,
    }
    if arguments.json {
        match &rows[..] {
            [] => {}
            [row] if arguments.size.len() == 1 => output::json(row)?,
            rows => output::json(&Table { rows, interrupted: process::told_to_stop() })?,
        }
    }
    process::step_back_when_told_to_stop();
    let checked: u64 = rows.iter().map(|row| row.checked).sum();
    match rows.iter().map(|row| row.wrong).sum() {
        0 => Ok(()),
        wrong => bail!("{wrong} of {checked} elements are wrong"),
    }
}

fn check(arguments: &Arguments) -> anyhow::Result<()> {
    for &size in &arguments.size {
        arguments.reduction.elements(size)?;
    }
    let &Arguments { hosts, fan_in, .. } = arguments;
    let most = FanIn::new(fan_in).map_or(0, FanIn::max_world);
    if hosts > most {
        return Err(usage(format!(
            "--fan-in {fan_in}: a tree of it has up to {most} hosts, not --hosts {hosts}"
        )));
    }
    Ok(())
}

impl Row {
    fn slowest(arguments: &Arguments, reports: &[Report]) -> Self {
        let &Arguments { hosts, switches, fan_in, .. } = arguments;
        let least = |figure: fn(&Report) -> f64| {
            reports.iter().map(figure).min_by(f64::total_cmp).unwrap_or_default()
        };
        let most = |figure: fn(&Report) -> f64| {
            reports.iter().map(figure).max_by(f64::total_cmp).unwrap_or_default()
        };
        let first = reports.first();
        Self {
            hosts,
            switches,
            fan_in,
            bytes: first.map_or(0, |report| report.bytes),
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

/// What all rows share, and the names of their columns.
fn print_header(arguments: &Arguments, cluster: &Cluster) -> anyhow::Result<()> {
    let Arguments { hosts, fan_in, iters, warmup_iters, .. } = arguments;
    let addresses = cluster.addresses.join(", ");
    let mut switches = match cluster.addresses.len() {
        1 => format!("a switch at {addresses}"),
        count => format!("{count} switches at {addresses}"),
    };
    if fan_in < hosts {
        switches += &format!(", up to {fan_in} children each");
    }
    output::line(&format!(
        "{hosts} hosts over {switches}; {iters} iterations a row, after {warmup_iters} to warm up; \
         the slowest host's figures"
    ))?;
    output::line(&format!(
        "{:>9}{:>10}{:>7}{:>7}{:>10}{:>11}{:>11}{:>7}",
        "size", "count", "type", "redop", "time us", "algbw GB/s", "busbw GB/s", "wrong"
    ))
}

fn print(arguments: &Arguments, row: &Row) -> anyhow::Result<()> {
    let Reduction { dtype, op, .. } = &arguments.reduction;
    output::line(&format!(
        "{:>9}{:>10}{dtype:>7}{op:>7}{:>10}{:>11}{:>11}{:>7}",
        units::readable(row.bytes),
        row.bytes / 4,
        three_digits(row.latency_us.mean),
        three_digits(row.algbw_mb_per_s / 1e3),
        three_digits(row.busbw_mb_per_s / 1e3),
        row.wrong
    ))
}
