//! `bench allreduce`: AllReduce over local processes, one row for each size, as nccl-tests has it.

use anyhow::bail;
use clap::Args;
use millstream_collective::Collective;
use serde::Serialize;

use super::figures::three_digits;
use super::row::Row;
use super::tree::{MAX_PROCESSES, Tree};
use crate::cluster::{Cluster, Job};
use crate::collective::{Reduction, Work};
use crate::{output, process, units};

/// Arguments of `bench allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Host processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=MAX_PROCESSES))]
    hosts: u32,
    #[command(flatten)]
    tree: Tree,
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

/// What `--json` prints of a table.
#[derive(Serialize)]
struct Table<'a> {
    rows: &'a [Row],
    /// There are fewer rows than were asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    interrupted: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let work = check(arguments)?;
    process::clean_up_when_told_to_stop()?;
    let mut cluster = arguments.tree.start()?;
    process::say_last_words_when_told_to_stop();
    if !arguments.json {
        print_header(arguments, &cluster)?;
    }
    let job = Job {
        hosts: arguments.hosts,
        trees: arguments.tree.trees,
        sizes: &arguments.size,
        work,
        path: arguments.tree.path,
        iters: arguments.iters,
        warmup_iters: arguments.warmup_iters,
        patience: None,
    };
    let mut rows = Vec::new();
    let measured = cluster.run(&job, |reports| {
        let row = Row::slowest(arguments.hosts, &arguments.tree, &reports);
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

fn check(arguments: &Arguments) -> anyhow::Result<Work> {
    let hosts = arguments.hosts;
    let work = Work::new(Collective::AllReduce, arguments.reduction, 0, false, hosts)?;
    for &size in &arguments.size {
        work.count(size, hosts)?;
    }
    arguments.tree.check(hosts)?;
    Ok(work)
}

/// What all rows share, and the names of their columns.
fn print_header(arguments: &Arguments, cluster: &Cluster) -> anyhow::Result<()> {
    let Arguments { hosts, tree, iters, warmup_iters, .. } = arguments;
    let switches = tree.describe(*hosts, cluster);
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
    let Reduction { dtype, op, .. } = arguments.reduction;
    output::line(&format!(
        "{:>9}{:>10}{:>7}{:>7}{:>10}{:>11}{:>11}{:>7}",
        units::readable(row.bytes),
        row.count,
        dtype.name(),
        op.name(),
        three_digits(row.latency_us.mean),
        three_digits(row.algbw_mb_per_s / 1e3),
        three_digits(row.busbw_mb_per_s / 1e3),
        row.wrong
    ))
}
