//! `bench sweep`: every collective of every type, checked element by element, in the manner of nccl-tests.
//!
//! All is in this process: a controller and switches for each fan-in, and a thread for each rank.

mod check;
mod cluster;
mod odd;

use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use millstream_collective::{Call, Collective, DataType, MAX_TREES, ReduceOperation};
use millstream_control::controller::FanIn;
use serde::Serialize;

use check::{Tally, check_all};
use cluster::{Cluster, Group};

use super::collective::{Choice, choices, chosen};
use super::figures::three_digits;
use crate::cluster::MAX_ADDRESSES;
use crate::collective::{
    MAX_HOSTS, Mode, Path, Reference, data_types, is_defined, of_type, operations,
};
use crate::controller::FAN_IN;
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
    /// Children of a switch in the tree at most: where ranks are more, trees have several levels. Of those that leave
    /// one level the first is taken
    #[arg(long, value_name = "F,...", default_value = "64,4", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(FAN_IN))]
    fan_in: Vec<u32>,
    /// Switches, which take the places in a tree by turns; as many as trees at least
    #[arg(long, value_name = "S", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ADDRESSES)))]
    switches: u32,
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
    fan_in: u32,
    /// Levels of switches in each tree, as the controller has made it; 0 where ranks share memory and have none.
    levels: u32,
    mode: &'static str,
    /// Calls of all ranks together: each in place and not, aligned, one element off and at an odd byte.
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

impl Arguments {
    fn check(&self) -> anyhow::Result<()> {
        if self.hosts > 1 && self.path != Path::Auto {
            return Err(usage("--hosts needs --path auto"));
        }
        for &fan_in in &self.fan_in {
            let most = FanIn::new(fan_in).map_or(0, FanIn::max_world);
            if let Some(world) = self.world.iter().find(|&&world| self.below_switches(world) > most)
            {
                return Err(usage(format!(
                    "--fan-in {fan_in}: a tree of it has up to {most} ranks, not --world {world}"
                )));
            }
        }
        let most = |numbers: &[u32]| numbers.iter().copied().max().unwrap_or_default();
        let ranks = most(&self.world).saturating_mul(self.most_trees());
        let switches = self.switches_of_each().saturating_mul(self.fan_in.len() as u32);
        if ranks.saturating_add(switches) > MAX_ADDRESSES {
            return Err(usage(format!(
                "{ranks} addresses of ranks and {switches} of switches are more than {MAX_ADDRESSES}"
            )));
        }
        Ok(())
    }

    fn most_trees(&self) -> u32 {
        self.trees.iter().copied().max().unwrap_or(1).into()
    }

    /// Switches of each fan-in.
    fn switches_of_each(&self) -> u32 {
        self.switches.max(self.most_trees())
    }

    /// How many ranks of a group are children of switches: those that are alone on their host, or the lowest of it.
    fn below_switches(&self, world: u32) -> u32 {
        match (self.path, self.hosts.min(world)) {
            (Path::Switch, _) => world,
            (Path::Auto, hosts @ 2..) => hosts,
            (Path::Auto | Path::SharedMemory, _) => 0,
        }
    }

    /// The groups with a fan-in: numbers of ranks and trees. One whose trees an earlier fan-in has as well is left out.
    fn groups(&self, number: usize) -> Vec<(u32, u8)> {
        let (earlier, fan_in) = (&self.fan_in[..number], self.fan_in[number]);
        let is_new = |world: u32| {
            let below = self.below_switches(world);
            !earlier.iter().any(|&other| other == fan_in || other.min(fan_in) >= below)
        };
        let worlds = self.world.iter().copied().filter(|&world| is_new(world));
        worlds.flat_map(|world| self.trees.iter().map(move |&trees| (world, trees))).collect()
    }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    arguments.check()?;
    if !arguments.json {
        output::line(&format!(
            "{:<13}{:>6}{:>6}{:>7}{:>7}{:>6}{:>9}{:>13}{:>8}{:>10}",
            "collective",
            "world",
            "trees",
            "fan-in",
            "levels",
            "mode",
            "calls",
            "elements",
            "wrong",
            "seconds"
        ))?;
    }
    let mut rows = Vec::new();
    for (number, &fan_in) in arguments.fan_in.iter().enumerate() {
        let groups = arguments.groups(number);
        if groups.is_empty() {
            continue;
        }
        let switches = arguments.switches_of_each();
        // Those of an earlier fan-in may still be ending: these have other addresses.
        let cluster = Cluster::start(fan_in, number as u32 * switches, switches)?;
        for (world, trees) in groups {
            sweep_group(arguments, &cluster, world, trees, &mut rows)?;
        }
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

/// One group, in all modes.
fn sweep_group(
    arguments: &Arguments,
    cluster: &Cluster,
    world: u32,
    trees: u8,
    rows: &mut Vec<Row>,
) -> anyhow::Result<()> {
    let mut group = cluster.join(world, trees, arguments)?;
    for &mode in &arguments.mode {
        for rank in &mut group.ranks {
            rank.set_mode(mode.into());
        }
        for collective in chosen(&arguments.collective) {
            let row = sweep(arguments, &mut group, collective, mode)?;
            if !arguments.json {
                print(&row)?;
            }
            rows.push(row);
        }
    }
    group.leave();
    Ok(())
}

fn print(row: &Row) -> anyhow::Result<()> {
    let Row { collective, world, trees, fan_in, levels, mode, calls, checked, wrong, seconds } =
        row;
    let seconds = three_digits(*seconds);
    output::line(&format!(
        "{collective:<13}{world:>6}{trees:>6}{fan_in:>7}{levels:>7}{mode:>6}{calls:>9}{checked:>13}\
         {wrong:>8}{seconds:>10}"
    ))
}

/// One collective, of all types, operations and lengths.
fn sweep(
    arguments: &Arguments,
    group: &mut Group,
    collective: Collective,
    mode: Mode,
) -> anyhow::Result<Row> {
    let &mut Group { ref mut ranks, trees, fan_in, levels } = group;
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
                let tally = check(ranks, &reference, mode.into());
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
        fan_in,
        levels,
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(words: &str) -> Arguments {
        Command::parse_from(["sweep"].into_iter().chain(words.split_whitespace())).arguments
    }

    #[test]
    fn trees_of_one_level_are_swept_once() {
        let worlds = |words, number| {
            let groups = parse(words).groups(number);
            groups.into_iter().map(|(world, _)| world).collect::<Vec<_>>()
        };
        for (words, first, second) in [
            ("", &[1, 2, 3, 8, 17][..], &[8, 17][..]),
            ("--fan-in=4,64", &[1, 2, 3, 8, 17], &[8, 17]),
            ("--fan-in=2,4", &[1, 2, 3, 8, 17], &[3, 8, 17]),
            ("--fan-in=4,4", &[1, 2, 3, 8, 17], &[]),
            ("--path=shared-memory", &[1, 2, 3, 8, 17], &[]),
            // Six hosts of one or more ranks are six children.
            ("--path=auto --hosts=6", &[1, 2, 3, 8, 17], &[8, 17]),
            ("--path=auto --hosts=4", &[1, 2, 3, 8, 17], &[]),
        ] {
            assert_eq!((&*worlds(words, 0), &*worlds(words, 1)), (first, second), "{words}");
        }
        assert_eq!(parse("--world=5 --trees=1,2").groups(1), [(5, 1), (5, 2)]);
    }

    #[test]
    fn what_has_no_room_is_refused() {
        for (words, text) in [
            ("--world=65 --fan-in=2", "a tree of it has up to 64 ranks, not --world 65"),
            ("--world=2 --fan-in=64,1", "a tree of it has up to 1 ranks, not --world 2"),
            ("--world=249", "249 addresses of ranks and 6 of switches"),
            ("--world=127 --trees=2 --switches=1 --fan-in=64", "254 addresses of ranks and 2"),
            ("--hosts=2", "--hosts needs --path auto"),
        ] {
            let refused = parse(words).check().unwrap_err().to_string();
            assert!(refused.contains(text), "{words}: {refused}");
        }
        let shared = "--world=65 --fan-in=2 --path=shared-memory";
        for words in ["--world=248", "--world=64 --fan-in=2", shared] {
            parse(words).check().unwrap();
        }
    }
}
