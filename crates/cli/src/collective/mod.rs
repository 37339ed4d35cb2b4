//! `collective`: one host of a collective, and what `allreduce` and the benchmarks share with it.

mod measure;
mod number;
mod participation;
mod work;

use anyhow::{Context, bail};
use clap::Args;
use millstream_collective::{Collective, Communicator, Route};

pub(crate) use measure::{Latency, Parts, Report};
pub(crate) use number::{Number, Reference, of_type};
pub(crate) use participation::{MAX_HOSTS, Participation};
use work::collectives;
pub(crate) use work::{Mode, Path, Reduction, Work, data_types, is_defined, operations};

use crate::failure::usage;
use crate::note::note;
use crate::{output, units};
use measure::Repetitions;

/// Arguments of `collective`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Which one
    #[arg(long, value_name = "C", value_parser = collectives())]
    collective: Collective,
    /// The rank that gets the result of a reduce, or has the vector of a broadcast
    #[arg(long, value_name = "R", default_value_t = 0)]
    root: u32,
    /// Have the result in the place of the rank's own vector, or that in its part of the result
    #[arg(long)]
    in_place: bool,
    #[command(flatten)]
    participation: Participation,
}

/// Runs `collective`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let &Arguments { collective, root, in_place, ref participation } = arguments;
    take_part(collective, root, in_place, participation)
}

/// Joins, and calls the collective with vectors of each size.
pub(crate) fn take_part(
    collective: Collective,
    root: u32,
    in_place: bool,
    arguments: &Participation,
) -> anyhow::Result<()> {
    let Participation { world, rank, iters, warmup_iters, verify, reduction, .. } = *arguments;
    if rank >= world {
        return Err(usage(format!(
            "--rank {rank}: with --world {world}, ranks are 0 to {}",
            world - 1
        )));
    }
    let work = Work::new(collective, reduction, root, in_place, world)?;
    let counts = arguments.size.iter().map(|&size| work.count(size, world));
    let counts = counts.collect::<anyhow::Result<Vec<usize>>>()?;
    let largest = counts.iter().map(|&count| work.bytes(count, world)).max().unwrap_or_default();
    // Vectors that the system does not have the memory for are an error, not an abort.
    let room = usize::try_from(largest.saturating_mul(2)).unwrap_or(usize::MAX);
    let room = Vec::<u8>::new().try_reserve_exact(room);
    room.with_context(|| format!("no memory for two vectors of {}", units::readable(largest)))?;
    let mut communicator = participation::join(arguments)?;
    if let Some(reason) = communicator.fallback() {
        note(&format!("the ranks take the place of a switch: {}", output::escaped(reason)));
    }
    if !arguments.json {
        let (group, way) = (&arguments.group, way(&communicator));
        output::line(&format!(
            "rank {rank} of {world} in group {}, {}",
            output::escaped(group),
            way
        ))?;
    }
    let (mut checked, mut wrong, mut noted) = (0, 0, 0);
    for count in counts {
        let repetitions = Repetitions { iters, warmup_iters, verify };
        let report = measure::measure(&mut communicator, &work, count, repetitions);
        let report = report.with_context(|| {
            format!("the {collective} of rank {rank} {} failed", way(&communicator))
        })?;
        for failover in report.failovers.iter().skip(noted) {
            note(&output::escaped(failover));
        }
        noted = report.failovers.len();
        if arguments.json {
            output::json_of_several(&report)?;
        } else {
            output::line(&text(&report))?;
        }
        checked += report.checked;
        wrong += report.wrong;
    }
    drop(communicator);
    if wrong > 0 {
        if arguments.json {
            // The reports say it.
            output::tell_no_failure();
        }
        bail!("{wrong} of {checked} elements are wrong");
    }
    Ok(())
}

/// By which way the ranks reach each other, in words.
fn way(communicator: &Communicator) -> String {
    let rank = communicator.rank();
    match (communicator.route(), communicator.sharing()) {
        (Route::SharedMemory, _) => "through shared memory".to_owned(),
        (Route::Hosts, [first, ..]) if *first != rank => {
            format!("through shared memory and by rank {first} of this host")
        }
        (Route::Hosts, [_, others @ ..]) if !others.is_empty() => {
            let count = others.len();
            format!("for {count} more of this host through shared memory, {}", over(communicator))
        }
        (Route::Switch | Route::Hosts, _) => over(communicator),
    }
}

/// Which switches a rank is connected to.
fn over(communicator: &Communicator) -> String {
    let hosts = communicator.fallback().is_some();
    let what = if hosts { "that of" } else { "switch" };
    let one = |(name, address)| format!("{what} {} at {address}", output::escaped(name));
    let all: Vec<String> = communicator.switches().map(one).collect();
    match &all[..] {
        [] => "over no switch".to_owned(),
        [only] if hosts => format!("over a switch of the ranks' own, {only}"),
        several if hosts => {
            format!(
                "over {} trees of the ranks' own switches: {}",
                several.len(),
                several.join(", ")
            )
        }
        [only] => format!("over {only}"),
        several => format!("over {} trees: {}", several.len(), several.join(", ")),
    }
}

fn text(report: &Report) -> String {
    let Report { rank, world, collective, bytes, iters, algbw_mb_per_s, latency_us, .. } = report;
    let Latency { p50, p99, .. } = latency_us;
    let checks = match (report.checked, report.wrong) {
        (0, _) => "not checked".to_owned(),
        (checked, wrong) => format!("{checked} elements checked, {wrong} wrong"),
    };
    format!(
        "rank {rank} of {world}: {iters} x {collective} of {} at {}, {p50:.0} us (p99 {p99:.0} us); \
         {checks}",
        units::readable(*bytes),
        units::rate(algbw_mb_per_s * 1e6)
    )
}
