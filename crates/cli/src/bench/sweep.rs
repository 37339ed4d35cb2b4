//! `bench sweep`: every collective of every type, checked element by element, in the manner of nccl-tests.
//!
//! All is in this process: a controller, a switch for each tree, and a thread for each rank.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use millstream_collective::{
    Call, Collective, CollectiveError, Communicator, DataType, JoinConfig, MAX_TREES,
    ReduceOperation,
};
use millstream_control::controller::ControllerConfig;
use millstream_control::switch::SwitchConfig;
use millstream_control::{Shutdown, controller, shutdown, switch};
use millstream_verbs::{Device, SoftConfig};
use serde::Serialize;

use super::collective::{Choice, choices, chosen};
use super::figures::three_digits;
use crate::collective::{
    MAX_HOSTS, Mode, Number, Parts, Path, Reference, data_types, is_defined, of_type, operations,
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

/// Calls, and elements that were checked.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Tally {
    calls: u64,
    checked: u64,
    wrong: u64,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.checked += other.checked;
        self.wrong += other.wrong;
    }
}

/// Has all ranks make one call in all ways.
fn check_all<T: Number>(
    ranks: &mut [Communicator],
    reference: &Reference,
) -> Result<Tally, CollectiveError> {
    // What is the same for all ranks is computed once.
    let reductions: Vec<T> = match reference.call {
        Call::AllReduce(operation) | Call::Reduce { operation, .. } => {
            (0..reference.count).map(|index| reference.reduction(index, operation)).collect()
        }
        Call::ReduceScatter(operation) => {
            let all = reference.count * reference.world as usize;
            (0..all).map(|index| reference.reduction(index, operation)).collect()
        }
        Call::Broadcast { .. } | Call::Barrier | Call::AllGather => Vec::new(),
    };
    let reductions = &reductions[..];
    thread::scope(|scope| {
        let check = |rank| move || check_rank::<T>(rank, reference, reductions);
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(check(rank))).collect();
        let tallies: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        let mut total = Tally::default();
        for tally in tallies {
            total.add(tally.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(total)
    })
}

/// Makes one call of a rank in place and not, aligned and not.
fn check_rank<T: Number>(
    communicator: &mut Communicator,
    reference: &Reference,
    reductions: &[T],
) -> Result<Tally, CollectiveError> {
    let &Reference { call, world, count, .. } = reference;
    let rank = communicator.rank();
    let mut tally = Tally::default();
    // With an element before each vector it is not aligned to more than an element; there is one after it, too.
    for (in_place, before) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let Some(parts) = Parts::new(call, rank, world, count, in_place) else {
            return Err(CollectiveError::TooLong { count: count as u64, data_type: T::DATA_TYPE });
        };
        let vector = |length| vec![T::FILLER; before + length + 1];
        let [mut source, mut destination] = parts.lengths.map(vector);
        let [source_range, range] = parts.lengths.map(|length| before..before + length);
        let own = if in_place { &mut destination } else { &mut source };
        for (index, element) in own[before..][parts.source.clone()].iter_mut().enumerate() {
            *element = reference.source(rank, index);
        }
        if in_place {
            communicator.call_in_place(call, &mut destination[range.clone()])?;
        } else {
            communicator.call(call, &source[source_range], &mut destination[range.clone()])?;
        }
        let first = match call {
            Call::ReduceScatter(_) => count * rank as usize,
            _ => 0,
        };
        let expected = |place: usize| match place.checked_sub(before) {
            Some(index) if range.contains(&place) => {
                let reduction = (index.checked_sub(parts.result.start))
                    .filter(|_| parts.result.contains(&index))
                    .and_then(|index| reductions.get(first + index));
                let other = || parts.expected(reference, rank, in_place, index);
                reduction.copied().unwrap_or_else(other)
            }
            _ => T::FILLER,
        };
        let is_wrong = |&(place, element): &(usize, &T)| *element != expected(place);
        tally.calls += 1;
        tally.checked += destination.len() as u64;
        tally.wrong += destination.iter().enumerate().filter(is_wrong).count() as u64;
    }
    Ok(tally)
}

/// A controller and switches in this process, until it ends.
struct Cluster {
    controller: SocketAddr,
    _stop: Vec<Shutdown>,
}

/// An address of 127/8 that no other such process uses.
fn address(host: u32) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 192 | (process >> 8) as u8 & 63, process as u8, host as u8 + 1).into()
}

impl Cluster {
    /// With so many switches.
    fn start(switches: u8) -> anyhow::Result<Self> {
        let config = ControllerConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let (stop_controller, stopped) = shutdown();
        let (ready, listening) = mpsc::channel();
        thread::spawn(move || {
            // That it cannot be sent means that this process is about to fail.
            let ready = |address| ready.send(address).unwrap_or_default();
            controller::run(config, ready, stopped)
        });
        let controller = listening.recv().context("the controller does not start")?;
        let mut stop = vec![stop_controller];
        for number in 0..switches {
            let (stop_switch, stopped) = shutdown();
            let (ready, serving) = mpsc::channel();
            // From above, where no rank is.
            let address = address(253 - u32::from(number));
            let config = SwitchConfig::new(controller, format!("sweep-{number}"), address);
            thread::spawn(move || {
                let ready = |address| ready.send(address).unwrap_or_default();
                switch::run(config, ready, stopped)
            });
            serving.recv().context("a switch does not start")?;
            stop.push(stop_switch);
        }
        Ok(Self { controller, _stop: stop })
    }

    /// All ranks of a group.
    fn join(
        &self,
        world: u32,
        trees: u8,
        arguments: &Arguments,
    ) -> anyhow::Result<Vec<Communicator>> {
        let join = |rank| -> anyhow::Result<Communicator> {
            let open = |tree: u8| {
                Device::open_soft(&SoftConfig::new(address(rank + u32::from(tree) * world)))
            };
            let group = format!("sweep of {world} over {trees}");
            let mut config = JoinConfig::new(self.controller, group, world, rank, &open(0)?);
            config.path = arguments.path.into();
            config.host_label = format!("host {}", rank % arguments.hosts);
            for tree in 1..trees {
                config.more_devices.push(open(tree)?);
            }
            let joined = Communicator::join(&config)?;
            let found = joined.switches().count();
            let shared = joined.switch().is_none();
            anyhow::ensure!(
                shared || found == usize::from(trees),
                "{found} trees in place of {trees}"
            );
            Ok(joined)
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || join(rank))).collect();
            let joined = ranks.into_iter().map(thread::ScopedJoinHandle::join);
            joined
                .map(|rank| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }
}
