//! `bench allreduce`: AllReduce over local processes.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde::Serialize;

use crate::allreduce::{Latency, MAX_HOSTS, Report, Vector};
use crate::cluster::Cluster;
use crate::failure::{not_yet, usage};
use crate::{output, process, units};

/// For all hosts together: more than their own timeouts.
const PATIENCE: Duration = Duration::from_secs(600);

/// Arguments of `bench allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Host processes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_HOSTS)))]
    hosts: u32,
    /// Hosts below one switch
    #[arg(long, value_name = "F")]
    fan_in: Option<u32>,
    /// Shape of the switches
    #[arg(long, value_name = "SHAPE")]
    switches: Option<String>,
    #[command(flatten)]
    vector: Vector,
    /// How often
    #[arg(long, value_name = "I", value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The slowest host's figures, and the wrong elements of all.
#[derive(Serialize)]
struct Summary {
    hosts: u32,
    bytes: u64,
    iters: u32,
    algbw_mb_per_s: f64,
    busbw_mb_per_s: f64,
    latency_us: Latency,
    checked: u64,
    wrong: u64,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let &Arguments { hosts, ref vector, iters, .. } = arguments;
    vector.check()?;
    match arguments.fan_in {
        Some(0) => return Err(usage("--fan-in 0: a switch has one host at least")),
        Some(fan_in) if fan_in < hosts => {
            return Err(not_yet(&format!(
                "this version has one switch: --fan-in {fan_in} is less than --hosts {hosts}"
            )));
        }
        _ => {}
    }
    if let Some(shape) = &arguments.switches {
        return Err(not_yet(&format!("this version has one switch: leave out --switches {shape}")));
    }
    process::clean_up_when_told_to_stop()?;
    let reports = Cluster::start()?.all_reduce(hosts, vector, iters, PATIENCE)?;
    let summary = summarize(arguments, &reports);
    if arguments.json {
        output::json(&summary)?;
    } else {
        let Latency { p50, p99 } = summary.latency_us;
        output::line(&format!(
            "{hosts} hosts, {iters} x {}: {:.1} MB/s (bus {:.1} MB/s), {p50:.0} us (p99 {p99:.0} \
             us); {} elements checked, {} wrong",
            units::readable(vector.size),
            summary.algbw_mb_per_s,
            summary.busbw_mb_per_s,
            summary.checked,
            summary.wrong
        ));
    }
    if summary.wrong > 0 {
        bail!("{} of {} elements are wrong", summary.wrong, summary.checked);
    }
    Ok(())
}

fn summarize(arguments: &Arguments, reports: &[Report]) -> Summary {
    let least = |figure: fn(&Report) -> f64| {
        reports.iter().map(figure).min_by(f64::total_cmp).unwrap_or_default()
    };
    let most = |figure: fn(&Report) -> f64| {
        reports.iter().map(figure).max_by(f64::total_cmp).unwrap_or_default()
    };
    Summary {
        hosts: arguments.hosts,
        bytes: arguments.vector.size,
        iters: arguments.iters,
        algbw_mb_per_s: least(|report| report.algbw_mb_per_s),
        busbw_mb_per_s: least(|report| report.busbw_mb_per_s),
        latency_us: Latency {
            p50: most(|report| report.latency_us.p50),
            p99: most(|report| report.latency_us.p99),
        },
        checked: reports.iter().map(|report| report.checked).sum(),
        wrong: reports.iter().map(|report| report.wrong).sum(),
    }
}
