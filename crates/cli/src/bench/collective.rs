//! `bench collective`: collectives over local processes, one row for each and each size, as nccl-tests
//! has it.

use anyhow::bail;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use millstream_collective::{Collective, UnknownName};
use serde::Serialize;

use super::figures::three_digits;
use super::row::Row;
use super::tree::{MAX_PROCESSES, Tree};
use crate::cluster::{Cluster, Job};
use crate::collective::{Reduction, Work};
use crate::{output, process, units};

/// Arguments of `bench collective`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Which ones, several with commas between
    #[arg(
        long,
        value_name = "C,...",
        default_value = "all",
        value_delimiter = ',',
        value_parser = choices()
    )]
    collective: Vec<Choice>,
    /// Host processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=MAX_PROCESSES))]
    hosts: u32,
    #[command(flatten)]
    tree: Tree,
    /// Bytes of the longer vector, several with commas between
    #[arg(
        long,
        value_name = "S,...",
        default_value = "4KiB,64KiB,1MiB,16MiB",
        value_delimiter = ',',
        value_parser = units::size
    )]
    size: Vec<u64>,
    #[command(flatten)]
    reduction: Reduction,
    /// The rank that gets the result of a reduce, or has the vector of a broadcast
    #[arg(long, value_name = "R", default_value_t = 0)]
    root: u32,
    /// Have the result in the place of a rank's own vector, or that in its part of the result
    #[arg(long)]
    in_place: bool,
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

/// A collective, or all of them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Choice {
    All,
    One(Collective),
}

/// For `--collective`.
pub(super) fn choices() -> impl TypedValueParser<Value = Choice> {
    let names = Collective::ALL.iter().map(|collective| collective.name()).chain(["all"]);
    PossibleValuesParser::new(names).try_map(|name| match &*name {
        "all" => Ok::<_, UnknownName>(Choice::All),
        name => name.parse().map(Choice::One),
    })
}

/// The collectives of all choices, each once, in the order of the first choice of each.
pub(super) fn chosen(choices: &[Choice]) -> Vec<Collective> {
    let mut chosen = Vec::new();
    for choice in choices {
        let more = match choice {
            Choice::All => Collective::ALL,
            Choice::One(collective) => &[*collective],
        };
        for &collective in more {
            if !chosen.contains(&collective) {
                chosen.push(collective);
            }
        }
    }
    chosen
}

/// What `--json` prints.
#[derive(Serialize)]
struct Table<'a> {
    dtype: &'a str,
    op: &'a str,
    root: u32,
    mode: &'a str,
    in_place: bool,
    rows: &'a [Row],
    /// There are fewer rows than were asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    interrupted: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let works = works(arguments)?;
    process::clean_up_when_told_to_stop()?;
    let mut cluster = arguments.tree.start()?;
    process::say_last_words_when_told_to_stop();
    if !arguments.json {
        print_header(arguments, &cluster)?;
    }
    let mut rows = Vec::new();
    match works.into_iter().try_for_each(|work| measure(arguments, &mut cluster, work, &mut rows)) {
        Err(_) if process::failed_because_told_to_stop() => {}
        measured => measured?,
    }
    if arguments.json {
        let Reduction { dtype, op, mode } = arguments.reduction;
        output::json(&Table {
            dtype: dtype.name(),
            op: op.name(),
            root: arguments.root,
            mode: mode.name(),
            in_place: arguments.in_place,
            rows: &rows,
            interrupted: process::told_to_stop(),
        })?;
    }
    process::step_back_when_told_to_stop();
    let checked: u64 = rows.iter().map(|row| row.checked).sum();
    match rows.iter().map(|row| row.wrong).sum() {
        0 => Ok(()),
        wrong => bail!("{wrong} of {checked} elements are wrong"),
    }
}

/// What is to be done, checked before anything is started.
fn works(arguments: &Arguments) -> anyhow::Result<Vec<Work>> {
    let &Arguments { reduction, root, in_place, hosts, tree, .. } = arguments;
    tree.check(hosts)?;
    let work = |collective| {
        let work = Work::new(collective, reduction, root, in_place, hosts)?;
        for &size in &arguments.size {
            work.count(size, hosts)?;
        }
        Ok(work)
    };
    chosen(&arguments.collective).into_iter().map(work).collect()
}

/// Has hosts do one collective, and adds its rows.
fn measure(
    arguments: &Arguments,
    cluster: &mut Cluster,
    work: Work,
    rows: &mut Vec<Row>,
) -> anyhow::Result<()> {
    // A barrier has no size.
    let sizes = match work.call.collective() {
        Collective::Barrier => &[0][..],
        _ => &arguments.size,
    };
    let &Arguments { hosts, iters, warmup_iters, .. } = arguments;
    let (trees, path) = (arguments.tree.trees, arguments.tree.path);
    let job = Job { hosts, trees, sizes, work, path, iters, warmup_iters, patience: None };
    cluster.run(&job, |reports| {
        let row = Row::slowest(hosts, &arguments.tree, &reports);
        if !arguments.json {
            print(&work, &row)?;
        }
        rows.push(row);
        Ok(())
    })
}

/// What all rows share, and the names of their columns.
fn print_header(arguments: &Arguments, cluster: &Cluster) -> anyhow::Result<()> {
    let Arguments { hosts, tree, iters, warmup_iters, reduction, in_place, .. } = arguments;
    let switches = tree.describe(*hosts, cluster);
    let place = if *in_place { "in place" } else { "out of place" };
    let mode = reduction.mode.name();
    output::line(&format!(
        "{hosts} hosts over {switches}, --mode {mode}, {place}; {iters} iterations a row, after \
         {warmup_iters} to warm up; the slowest host's figures"
    ))?;
    output::line(&format!(
        "{:<13}{:>9}{:>10}{:>7}{:>7}{:>6}{:>10}{:>10}{:>11}{:>11}{:>7}",
        "collective",
        "size",
        "count",
        "type",
        "redop",
        "root",
        "p50 us",
        "p99 us",
        "algbw GB/s",
        "busbw GB/s",
        "wrong"
    ))
}

fn print(work: &Work, row: &Row) -> anyhow::Result<()> {
    let none = || "none".to_owned();
    output::line(&format!(
        "{:<13}{:>9}{:>10}{:>7}{:>7}{:>6}{:>10}{:>10}{:>11}{:>11}{:>7}",
        row.collective,
        units::readable(row.bytes),
        row.count,
        work.reduction.dtype.name(),
        work.call.operation().map_or("none", |operation| operation.name()),
        work.call.root().map_or_else(none, |root| root.to_string()),
        three_digits(row.latency_us.p50),
        three_digits(row.latency_us.p99),
        three_digits(row.algbw_mb_per_s / 1e3),
        three_digits(row.busbw_mb_per_s / 1e3),
        row.wrong
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_each_once() {
        assert_eq!(chosen(&[Choice::All, Choice::One(Collective::Reduce)]), Collective::ALL);
        let barrier_first = chosen(&[Choice::One(Collective::Barrier), Choice::All]);
        assert_eq!(barrier_first.len(), Collective::ALL.len());
        assert_eq!(barrier_first[0], Collective::Barrier);
    }
}
