//! `cargo xtask lab bench-collectives`: AllReduce of int32 beside Open MPI, by turns: over links of 100 Mbit/s, and with
//! `--loopback` on this machine alone. Over two links of 1 Gbit/s it is beside plain WRITEs.

mod mpi;
mod ours;

use std::path::Path;

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

/// What a vector of so many bytes takes at the least, in microseconds, where that is known.
type Bound<'a> = &'a dyn Fn(u64) -> Option<f64>;

const NO_BOUND: Bound<'static> = &|_| None;

/// Mbit/s of the links of two hosts whose bound is what `rdma write-bw` gets there.
const FAST_RATE: u32 = 1000;

const OVER_LINKS: Calls =
    Calls { sizes: &[64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20], warm_up: 2, count: 8 };
const OVER_FAST_LINKS: Calls =
    Calls { sizes: &[1 << 20, 4 << 20, 16 << 20], warm_up: 2, count: 20 };
/// Short calls are many: one takes as long as the scheduler wants it to.
const SHORT_HERE: Calls = Calls { sizes: &[8, 4 << 10, 64 << 10, 1 << 20], warm_up: 5, count: 300 };
const LONG_HERE: Calls = Calls { sizes: &[16 << 20], warm_up: 2, count: 20 };

/// What is measured in each round: how many ranks, what is said of it, and what it took.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    world: usize,
    what: String,
    figure: Figure,
    bound_us: Option<f64>,
}

#[derive(Default)]
struct Rows(Vec<Row>);

impl Rows {
    fn add(
        &mut self,
        (world, what): (usize, &str),
        calls: &Calls,
        figures: Vec<Figure>,
        bound: Bound<'_>,
    ) -> Result<()> {
        let all = figures.iter().map(|figure| figure.bytes).eq(calls.sizes.iter().copied());
        ensure!(all, "{world} ranks, {what}: not every size was measured: {figures:?}");
        for figure in figures {
            let Figure { bytes, mean_us, p50_us } = figure;
            eprintln!(
                "{world} ranks, {what}: {bytes} bytes: mean {mean_us:.0} us, p50 {p50_us:.0} us"
            );
            self.0.push(Row { world, what: what.to_owned(), figure, bound_us: bound(bytes) });
        }
        Ok(())
    }

    /// A row for each size of each thing, in the order in which they were first measured: medians of the rounds.
    fn medians(&self) -> Vec<Row> {
        let mut medians: Vec<Row> = Vec::new();
        for row in &self.0 {
            let same = |other: &&Row| {
                (other.world, &other.what, other.figure.bytes)
                    == (row.world, &row.what, row.figure.bytes)
            };
            if medians.iter().any(|other| same(&other)) {
                continue;
            }
            let all = || self.0.iter().filter(same);
            let bounds: Option<Vec<f64>> = all().map(|row| row.bound_us).collect();
            medians.push(Row {
                figure: Figure {
                    bytes: row.figure.bytes,
                    mean_us: figures::median(all().map(|row| row.figure.mean_us).collect()),
                    p50_us: figures::median(all().map(|row| row.figure.p50_us).collect()),
                },
                bound_us: bounds.map(figures::median),
                ..row.clone()
            });
        }
        medians
    }
}

impl Row {
    fn mean_in_bounds(&self) -> Option<f64> {
        self.bound_us.map(|bound| self.figure.mean_us / bound)
    }
}

pub(super) fn run(options: &BenchOptions) -> Result<()> {
    let program = programs::fast_millstream()?;
    let program = program.canonicalize().context("cannot find millstream")?;
    let mpi = Mpi::new()?;
    let machine = Machine::here()?;
    let mut rows = Rows::default();
    for _ in 0..options.runs {
        if options.loopback {
            here(&mut rows, &program, &mpi)?;
        } else {
            over_links(&mut rows, &program, &mpi)?;
        }
    }
    if options.json {
        println!("{}", json!({ "machine": machine.to_json(), "rows": to_json(&rows) }));
        return Ok(());
    }
    println!("{machine}");
    print(&rows);
    Ok(())
}

fn over_links(rows: &mut Rows, program: &Path, mpi: &Mpi) -> Result<()> {
    let (rate, calls) = (Rate::from_mbit(RATE), &OVER_LINKS);
    let bound: Bound<'_> = &|bytes| Some(bound_us(bytes));
    for world in [4, 8] {
        for (what, shape, bound) in [
            ("one level", Shape::OneLevel { nics: 1 }, bound),
            ("two levels", Shape::TwoLevels, bound),
            ("two NICs", Shape::OneLevel { nics: 2 }, NO_BOUND),
        ] {
            let figures = ours::over_links(program, shape, world, rate, calls)?;
            rows.add((world, what), calls, figures, bound)?;
        }
        for (what, algorithm) in ALGORITHMS {
            let figures = mpi.over_links(world, rate, algorithm, calls)?;
            rows.add((world, what), calls, figures, bound)?;
        }
    }
    let (rate, calls) = (Rate::from_mbit(FAST_RATE), &OVER_FAST_LINKS);
    let (figures, bytes_per_us) = ours::beside_write_bw(program, rate, calls)?;
    let bound: Bound<'_> = &|bytes| Some(bytes as f64 / bytes_per_us);
    rows.add((2, "1 Gbit/s"), calls, figures, bound)
}

fn here(rows: &mut Rows, program: &Path, mpi: &Mpi) -> Result<()> {
    for world in [2, 4, 8] {
        for calls in [&SHORT_HERE, &LONG_HERE] {
            let mut add = |what, figures| rows.add((world, what), calls, figures, NO_BOUND);
            add("switch", ours::here(program, "switch", world, calls)?)?;
            add("MPI, TCP", mpi.here(world, "tcp,self", 0, calls)?)?;
            add("shared memory", ours::here(program, "shared-memory", world, calls)?)?;
            add("MPI, shared memory", mpi.here(world, "vader,self", 0, calls)?)?;
        }
    }
    Ok(())
}

/// What a vector takes one way over a link.
fn bound_us(bytes: u64) -> f64 {
    bytes as f64 / PATH_MTU * (PATH_MTU + HEADERS) * 8.0 / f64::from(RATE)
}

fn to_json(rows: &Rows) -> Vec<Value> {
    let row = |row: Row| {
        let Figure { bytes, mean_us, p50_us } = row.figure;
        json!({
            "ranks": row.world, "what": row.what, "bytes": bytes, "mean_us": mean_us, "p50_us": p50_us,
            "bound_us": row.bound_us, "mean_in_bounds": row.mean_in_bounds(),
        })
    };
    rows.medians().into_iter().map(row).collect()
}

fn print(rows: &Rows) {
    println!("{:>5} {:20} {:>9} {:>11} {:>11}", "ranks", "", "bytes", "mean, us", "p50, us");
    for row in rows.medians() {
        let Figure { bytes, mean_us, p50_us } = row.figure;
        let of_bound = row.mean_in_bounds().map(|part| format!("  mean {part:.2} of the bound"));
        let (world, what, of_bound) = (row.world, &row.what, of_bound.unwrap_or_default());
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
        let row = |world, what: &str, bytes, mean_us, bound_us| Row {
            world,
            what: what.to_owned(),
            figure: Figure { bytes, mean_us, p50_us: 1.0 },
            bound_us,
        };
        let rows = Rows(vec![
            row(4, "a", 8, 3.0, Some(1.0)),
            row(4, "b", 8, 7.0, None),
            row(4, "a", 8, 1.0, Some(4.0)),
            row(8, "a", 8, 9.0, None),
            row(4, "a", 8, 2.0, Some(5.0)),
        ]);
        let medians = rows.medians();
        let wanted =
            [row(4, "a", 8, 2.0, Some(4.0)), row(4, "b", 8, 7.0, None), row(8, "a", 8, 9.0, None)];
        assert_eq!(medians, wanted);
        assert_eq!(
            medians.iter().map(Row::mean_in_bounds).collect::<Vec<_>>(),
            [Some(0.5), None, None]
        );
    }
}
