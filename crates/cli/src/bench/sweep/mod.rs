//! `bench sweep`: every collective of every type, checked element by element, in the manner of nccl-tests.
//!
//! All is in this process: a controller, a switch for each tree, and a thread for each rank.

mod check;
mod cluster;

use std::thread;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use millstream_collective::{Call, Collective, Communicator, DataType, MAX_TREES, ReduceOperation};
use serde::Serialize;

use check::{Tally, check_all};
use cluster::Cluster;

use super::collective::{Choice, choices, chosen};
use super::figures::three_digits;
use crate::collective::{
    MAX_HOSTS, Mode, Path, Reference, data_types, is_defined, of_type, operations,
};
use crate::failure::usage;
use crate::output;

/// Arguments of `bench sweep`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Which collectives, several with commas between
    #[arg(
        long,
        value_name = "C,...",
        default_value = "all",
        value_delimiter = ',',
        value_parser = choices()
    )]
    collective: Vec<Choice>,
    /// Numbers of ranks
    #[arg(long, value_name = "N,...", default_value = "1,2,3,8,17", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_HOSTS)))]
    world: Vec<u32>,
    /// Elements of the longer vector; where it has a part for each rank, as many more as make all equal
    #[arg(
        long,
        value_name = "N,...",
        default_value = "0,1,2,1023,1024,1025,1048579",
        value_delimiter = ','
    )]
    count: Vec<u32>,
    /// Types of the elements [default: all]
    #[arg(long, value_name = "T,...", value_delimiter = ',', value_parser = data_types())]
    dtype: Vec<DataType>,
    /// Operations [default: all]
    #[arg(long, value_name = "O,...", value_delimiter = ',', value_parser = operations())]
    op: Vec<ReduceOperation>,
    /// How vectors travel
    #[arg(
        long,
        value_enum,
        value_name = "M,...",
        default_value = "write,send",
        value_delimiter = ','
    )]
    mode: Vec<Mode>,
    /// Trees of each communicator, whose hosts have as many addresses
    #[arg(long, value_name = "K,...", default_value = "1", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=MAX_TREES as i64))]
    trees: Vec<u8>,
    /// By which way ranks reach each other
    #[arg(long, value_enum, default_value_t = Path::Switch)]
    path: Path,
    /// With `--path auto`: ranks are dealt to so many hosts, of which each shares memory
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    hosts: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What came of the calls of one collective.
#[derive(Clone, Debug, Serialize)]
struct Row {
    collective: &'static str,
    world: u32,
    trees: u8,
    mode: &'static str,
    /// Calls of all ranks together: each in place and not, aligned and not.
    calls: u64,
    /// Elements that were checked: results, and what must stay as it was, also beside the vectors.
    checked: u64,
    wrong: u64,
    seconds: f64,
}

#[derive(Serialize)]
struct Table<'a> {
    rows: &'a [Row],
    checked: u64,
    wrong: u64,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.hosts > 1 && arguments.path != Path::Auto {
        return Err(usage("--hosts needs --path auto"));
    }
    let most = arguments.trees.iter().copied().max().unwrap_or(1);
    let cluster = Cluster::start(most)?;
    if !arguments.json {
        output::line(&format!(
            "{:<13}{:>6}{:>6}{:>6}{:>9}{:>13}{:>8}{:>10}",
            "collective", "world", "trees", "mode", "calls", "elements", "wrong", "seconds"
        ))?;
    }
    let mut rows = Vec::new();
    let shapes = arguments.world.iter();
    let shapes = shapes.flat_map(|&world| arguments.trees.iter().map(move |&trees| (world, trees)));
    for (world, trees) in shapes {
        let mut ranks = cluster.join(world, trees, arguments)?;
        for &mode in &arguments.mode {
            for rank in &mut ranks {
                rank.set_mode(mode.into());
            }
            for collective in chosen(&arguments.collective) {
                let row = sweep(arguments, &mut ranks, trees, collective, mode)?;
                if !arguments.json {
                    print(&row)?;
                }
                rows.push(row);
            }
        }
        // Together, since who leaves waits for the others.
        thread::scope(|scope| {
            for rank in ranks {
                scope.spawn(move || drop(rank));
            }
        });
    }
    let checked = rows.iter().map(|row| row.checked).sum();
    let wrong = rows.iter().map(|row| row.wrong).sum();
    if arguments.json {
        output::json(&Table { rows: &rows, checked, wrong })?;
    } else {
        output::line(&format!("{checked} elements checked, {wrong} wrong"))?;
    }
    if wrong > 0 {
        bail!("{wrong} of {checked} elements are wrong");
    }
    Ok(())
}

fn print(row: &Row) -> anyhow::Result<()> {
    let Row { collective, world, trees, mode, calls, checked, wrong, seconds } = row;
    let seconds = three_digits(*seconds);
    output::line(&format!(
        "{collective:<13}{world:>6}{trees:>6}{mode:>6}{calls:>9}{checked:>13}{wrong:>8}{seconds:>10}"
    ))
}

/// One collective, of all types, operations and lengths.
fn sweep(
    arguments: &Arguments,
    ranks: &mut [Communicator],
    trees: u8,
    collective: Collective,
    mode: Mode,
) -> anyhow::Result<Row> {
    let world = ranks.len() as u32;
    let start = Instant::now();
    let mut total = Tally::default();
    for (number, &elements) in (0..).zip(&arguments.count) {
        // Every rank is the root at some time.
        let root = number % world;
        let data_types = match collective {
            // It has no elements.
            Collective::Barrier => vec![DataType::UInt8],
            _ => some_or_all(&arguments.dtype, DataType::ALL),
        };
        for data_type in data_types {
            for call in calls(arguments, collective, data_type, root) {
                let count = match call {
                    Call::Barrier => 0,
                    Call::ReduceScatter(_) | Call::AllGather => elements.div_ceil(world),
                    _ => elements,
                } as usize;
                let reference = Reference { call, world, count, iteration: number };
                let check = of_type!(data_type, check_all);
                let tally = check(ranks, &reference);
                total.add(tally.with_context(|| {
                    let mode = mode.name();
                    format!("{call:?} of {count} x {data_type} by {world} ranks, --mode {mode}")
                })?);
            }
        }
    }
    Ok(Row {
        collective: collective.name(),
        world,
        trees,
        mode: mode.name(),
        calls: total.calls,
        checked: total.checked,
        wrong: total.wrong,
        seconds: start.elapsed().as_secs_f64(),
    })
}

fn some_or_all<T: Copy>(some: &[T], all: &[T]) -> Vec<T> {
    if some.is_empty() { all.to_vec() } else { some.to_vec() }
}

/// The calls of a collective with a type: one for each operation, where there are any.
fn calls(
    arguments: &Arguments,
    collective: Collective,
    data_type: DataType,
    root: u32,
) -> Vec<Call> {
    let operations = some_or_all(&arguments.op, ReduceOperation::ALL);
    let defined = operations.into_iter().filter(|&operation| is_defined(operation, data_type));
    match collective {
        Collective::AllReduce => defined.map(Call::AllReduce).collect(),
        Collective::Reduce => defined.map(|operation| Call::Reduce { operation, root }).collect(),
        Collective::ReduceScatter => defined.map(Call::ReduceScatter).collect(),
        Collective::Broadcast => vec![Call::Broadcast { root }],
        Collective::Barrier => vec![Call::Barrier],
        Collective::AllGather => vec![Call::AllGather],
    }
}
