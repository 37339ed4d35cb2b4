//! `cargo xtask lab bench-collectives`: AllReduce of int32 beside Open MPI, by turns: over links of 100 Mbit/s, and with
//! `--loopback` on this machine alone.

mod mpi;
mod ours;

use anyhow::{Context, Result, ensure};
use millstream_lab::Rate;
use serde_json::{Value, json};

use super::figures;
use super::options::BenchOptions;
use crate::machine::Machine;
use crate::programs;
use mpi::{ALGORITHMS, Mpi};
use ours::Shape;

/// Mbit/s of a link.
const RATE: u32 = 100;
/// Bytes of a frame of RoCEv2 beside its payload: Ethernet, IPv4, UDP, BTH, invariant CRC. And its payload: the path MTU
/// of a link of 1500 bytes.
const HEADERS: f64 = (14 + 20 + 8 + 12 + 4) as f64;
const PATH_MTU: f64 = 1024.0;

/// Which calls are made.
struct Calls {
    sizes: &'static [u64],
    warm_up: usize,
    count: usize,
}

/// What calls of a size took, on the rank where it is greatest.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    bytes: u64,
    mean_us: f64,
    p50_us: f64,
}

/// What has another bound.
const TWO_NICS: &str = "two NICs";

const OVER_LINKS: Calls =
    Calls { sizes: &[64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20], warm_up: 2, count: 8 };
/// Short calls are many: one takes as long as the scheduler wants it to.
const SHORT_HERE: Calls = Calls { sizes: &[8, 4 << 10, 64 << 10, 1 << 20], warm_up: 5, count: 300 };
const LONG_HERE: Calls = Calls { sizes: &[16 << 20], warm_up: 2, count: 20 };

/// What is measured in each round: how many ranks, what is said of it, and what it took.
struct Rows(Vec<(usize, String, Figure)>);

impl Rows {
    fn add(&mut self, world: usize, what: &str, calls: &Calls, figures: Vec<Figure>) -> Result<()> {
        let all = figures.iter().map(|figure| figure.bytes).eq(calls.sizes.iter().copied());
        ensure!(all, "{world} ranks, {what}: not every size was measured: {figures:?}");
        for figure in figures {
            let Figure { bytes, mean_us, p50_us } = figure;
            eprintln!(
                "{world} ranks, {what}: {bytes} bytes: mean {mean_us:.0} us, p50 {p50_us:.0} us"
            );
            self.0.push((world, what.to_owned(), figure));
        }
        Ok(())
    }

    /// A row for each size of each thing, in the order in which they were first measured: medians of the rounds.
    fn medians(&self) -> Vec<(usize, &str, Figure)> {
        let mut medians: Vec<(usize, &str, Figure)> = Vec::new();
        for (world, what, Figure { bytes, .. }) in &self.0 {
            let same =
                |row: &(usize, &str, Figure)| (row.0, row.1, row.2.bytes) == (*world, what, *bytes);
            if medians.iter().any(same) {
                continue;
            }
            let all = || self.0.iter().filter(|row| same(&(row.0, &row.1, row.2)));
            let figure = Figure {
                bytes: *bytes,
                mean_us: figures::median(all().map(|row| row.2.mean_us).collect()),
                p50_us: figures::median(all().map(|row| row.2.p50_us).collect()),
            };
            medians.push((*world, what, figure));
        }
        medians
    }
}

pub(super) fn run(options: &BenchOptions) -> Result<()> {
    let program = programs::fast_millstream()?;
    let program = program.canonicalize().context("cannot find millstream")?;
    let mpi = Mpi::new()?;
    let machine = Machine::here()?;
    let mut rows = Rows(Vec::new());
    for _ in 0..options.runs {
        if options.loopback {
            here(&mut rows, &program, &mpi)?;
        } else {
            over_links(&mut rows, &program, &mpi)?;
        }
    }
    let bound = (!options.loopback).then_some(bound_us as fn(u64) -> f64);
    if options.json {
        let report = json!({ "machine": machine.to_json(), "rows": to_json(&rows, bound) });
        println!("{report}");
        return Ok(());
    }
    println!("{machine}");
    print(&rows, bound);
    Ok(())
}

fn over_links(rows: &mut Rows, program: &std::path::Path, mpi: &Mpi) -> Result<()> {
    let rate = Rate::from_mbit(RATE);
    for world in [4, 8] {
        for (what, shape) in [
            ("one level", Shape::OneLevel { nics: 1 }),
            ("two levels", Shape::TwoLevels),
            (TWO_NICS, Shape::OneLevel { nics: 2 }),
        ] {
            rows.add(
                world,
                what,
                &OVER_LINKS,
                ours::over_links(program, shape, world, rate, &OVER_LINKS)?,
            )?;
        }
        for (what, algorithm) in ALGORITHMS {
            rows.add(
                world,
                what,
                &OVER_LINKS,
                mpi.over_links(world, rate, algorithm, &OVER_LINKS)?,
            )?;
        }
    }
    Ok(())
}

fn here(rows: &mut Rows, program: &std::path::Path, mpi: &Mpi) -> Result<()> {
    for world in [2, 4, 8] {
        for calls in [&SHORT_HERE, &LONG_HERE] {
            rows.add(world, "switch", calls, ours::here(program, "switch", world, calls)?)?;
            rows.add(world, "MPI, TCP", calls, mpi.here(world, "tcp,self", 0, calls)?)?;
            let shared = ours::here(program, "shared-memory", world, calls)?;
            rows.add(world, "shared memory", calls, shared)?;
            rows.add(world, "MPI, shared memory", calls, mpi.here(world, "vader,self", 0, calls)?)?;
        }
    }
    Ok(())
}

/// What a vector takes one way over a link.
fn bound_us(bytes: u64) -> f64 {
    bytes as f64 / PATH_MTU * (PATH_MTU + HEADERS) * 8.0 / f64::from(RATE)
}

fn to_json(rows: &Rows, bound: Option<fn(u64) -> f64>) -> Vec<Value> {
    let row = |(world, what, figure): (usize, &str, Figure)| {
        let bound = bound.filter(|_| what != TWO_NICS);
        let Figure { bytes, mean_us, p50_us } = figure;
        json!({
            "ranks": world, "what": what, "bytes": bytes, "mean_us": mean_us, "p50_us": p50_us,
            "mean_in_bounds": bound.map(|bound| mean_us / bound(bytes)),
        })
    };
    rows.medians().into_iter().map(row).collect()
}

fn print(rows: &Rows, bound: Option<fn(u64) -> f64>) {
    println!("{:>5} {:20} {:>9} {:>11} {:>11}", "ranks", "", "bytes", "mean, us", "p50, us");
    for (world, what, Figure { bytes, mean_us, p50_us }) in rows.medians() {
        let bound = bound.filter(|_| what != TWO_NICS);
        let of_bound =
            bound.map(|bound| format!("  mean {:.2} of the bound", mean_us / bound(bytes)));
        let of_bound = of_bound.unwrap_or_default();
        println!("{world:>5} {what:20} {bytes:>9} {mean_us:>11.1} {p50_us:>11.1}{of_bound}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_of_a_mebibyte_takes_what_its_frames_take() {
        assert!((bound_us(1 << 20) - 88_637.0).abs() < 1.0, "{}", bound_us(1 << 20));
    }

    #[test]
    fn a_row_is_the_median_of_its_rounds() {
        let figure = |bytes, mean_us| Figure { bytes, mean_us, p50_us: 1.0 };
        let row = |world, what: &str, figure| (world, what.to_owned(), figure);
        let rows = Rows(vec![
            row(4, "a", figure(8, 3.0)),
            row(4, "b", figure(8, 7.0)),
            row(4, "a", figure(8, 1.0)),
            row(8, "a", figure(8, 9.0)),
            row(4, "a", figure(8, 2.0)),
        ]);
        let wanted = [(4, "a", figure(8, 2.0)), (4, "b", figure(8, 7.0)), (8, "a", figure(8, 9.0))];
        assert_eq!(rows.medians(), wanted);
    }
}
