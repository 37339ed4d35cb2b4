//! `bench transfer --figures`: the engine's ways within a machine, beside copies of memory.
//!
//! Everything that is compared is measured by turns, so that whatever else the machine does is in all of
//! it, and each figure is the median of its turns. Where two are close to each other they take many short turns, and are
//! compared turn by turn: a machine may be twice as fast in one moment as in the next.

mod lane;
mod pieces;
mod report;
mod verbs;

use std::time::Duration;

use millstream_net::baseline::{BlockCopies, CopyDirection, ProcessCopies};

use super::row::{self, Shape};
use super::{Arguments, Operation};
use crate::step::Step;
use crate::{process, units};
use lane::Lane;
use report::{Aim, Report, Row};

/// Bytes that each side walks through: more than caches hold, and what they hold.
const COLD: usize = 256 << 20;
const HOT: usize = 1 << 20;
const TURNS: usize = 5;
/// The same of what is compared turn by turn, and the part of another turn that each takes.
const SHORT_TURNS: usize = 21;
const SHORT: u32 = 4;
/// Of `--duration`, what each measurement of a turn takes, and at least.
const PART: u32 = 10;
const LEAST: Duration = Duration::from_millis(1);
/// Bytes of a request, and requests of a batch.
const SHAPES: [(u64, u32); 6] =
    [(4 << 10, 1), (64 << 10, 1), (1 << 20, 1), (16 << 20, 1), (4 << 10, 128), (64 << 10, 128)];

/// Measures all of it, and prints it.
pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    arguments.reach.settings.load()?;
    // Before there are threads.
    process::clean_up_when_told_to_stop()?;
    let turn = (arguments.duration / PART).max(LEAST);
    let mut report = Report::new(COLD, TURNS, turn);
    {
        let mut bench = Bench::new(arguments, turn)?;
        process::say_last_words_when_told_to_stop();
        for op in [Operation::Write, Operation::Read] {
            for (block_size, batch_size) in SHAPES {
                let row = bench.row(op, block_size, batch_size, COLD)?;
                if !arguments.json {
                    report.print_row(&row)?;
                }
                report.rows.push(row);
            }
        }
        report.judge_rows();
        bench.hot(&mut report.aims)?;
        for lane in &bench.lanes {
            let _step = Step::new(&format!("pieces over {}", lane.name));
            pieces::measure(lane, turn, &mut report.aims)?;
        }
    }
    let _step = Step::new("the engine beside plain verbs");
    verbs::measure(&arguments.reach, turn, &mut report.aims)?;
    report.finish(arguments.json)?;
    process::step_back_when_told_to_stop();
    Ok(())
}

/// All that is measured by turns.
struct Bench {
    turn: Duration,
    lanes: Vec<Lane>,
    blocks: BlockCopies,
    /// `None` where they are not allowed.
    processes: Option<ProcessCopies>,
}

/// What each turn has found.
#[derive(Default)]
struct Turns {
    memory_copy: Vec<f64>,
    process_copy: Vec<f64>,
    /// Of each lane.
    gb_per_s: Vec<Vec<f64>>,
    p50_us: Vec<Vec<f64>>,
}

impl Bench {
    fn new(arguments: &Arguments, turn: Duration) -> anyhow::Result<Self> {
        let processes = ProcessCopies::new(COLD)
            .inspect_err(|error| tracing::info!(%error, "no process_vm_writev to compare with"))
            .ok();
        let open = |name| Lane::open(&arguments.reach, name, COLD);
        let lanes = lane::NAMES.into_iter().map(open).collect::<anyhow::Result<Vec<_>>>()?;
        // All of it once, so that pages are there and mapped, as those of the copies are.
        let (block_size, batch_size) = (16 << 20, (COLD >> 24) as u32);
        for op in [Operation::Write, Operation::Read] {
            let duration = Duration::ZERO;
            let shape = Shape { op, block_size, batch_size, threads: 1, duration };
            for lane in &lanes {
                row::measure(&lane.opened, &lane.buffer, COLD, &shape)?;
            }
        }
        Ok(Self { turn, lanes, blocks: BlockCopies::new(COLD)?, processes })
    }

    /// Requests of one size over all lanes, and copies of as many bytes.
    fn row(
        &mut self,
        op: Operation,
        block_size: u64,
        batch_size: u32,
        working_set: usize,
    ) -> anyhow::Result<Row> {
        let shape = Shape { op, block_size, batch_size, threads: 1, duration: self.turn };
        let mut turns = self.turns(&shape, working_set, TURNS)?;
        let of_lanes = |all: Vec<Vec<f64>>| {
            self.lanes
                .iter()
                .zip(all)
                .map(|(lane, mut all)| (lane.name, median(&mut all)))
                .collect()
        };
        Ok(Row {
            op,
            block_size,
            batch_size,
            working_set,
            memory_copy_gb_per_s: median(&mut turns.memory_copy),
            process_copy_gb_per_s: self
                .processes
                .is_some()
                .then(|| median(&mut turns.process_copy)),
            gb_per_s: of_lanes(turns.gb_per_s),
            batch_p50_us: of_lanes(turns.p50_us),
        })
    }

    fn turns(&mut self, shape: &Shape, working_set: usize, count: usize) -> anyhow::Result<Turns> {
        let Shape { op, block_size, batch_size, duration, .. } = *shape;
        let size = units::readable(block_size);
        let _step = Step::new(&format!("{} {size} x {batch_size}", op.name()));
        let direction = match op {
            Operation::Read => CopyDirection::Read,
            Operation::Write | Operation::Mix => CopyDirection::Write,
        };
        let block = block_size as usize;
        let mut turns = Turns::default();
        turns.gb_per_s.resize(self.lanes.len(), Vec::new());
        turns.p50_us.resize(self.lanes.len(), Vec::new());
        for _ in 0..count {
            turns.memory_copy.push(self.blocks.measure(duration, block, working_set)?.gb_per_s());
            if let Some(processes) = &mut self.processes {
                let copied = processes.measure(duration, direction, block, working_set)?;
                turns.process_copy.push(copied.gb_per_s());
            }
            for (index, lane) in self.lanes.iter().enumerate() {
                let done = row::measure(&lane.opened, &lane.buffer, working_set, shape)?;
                let seconds = done.elapsed.as_secs_f64();
                turns.gb_per_s[index].push(done.bytes as f64 / 1e9 / seconds);
                turns.p50_us[index].push(done.latencies.value_at_quantile(0.5) as f64 / 1e3);
            }
        }
        Ok(turns)
    }

    /// Small requests over memory that caches hold.
    fn hot(&mut self, aims: &mut Vec<Aim>) -> anyhow::Result<()> {
        let (op, duration) = (Operation::Write, (self.turn / SHORT).max(LEAST));
        let shape = Shape { op, block_size: 4 << 10, batch_size: 128, threads: 1, duration };
        let turns = self.turns(&shape, HOT, SHORT_TURNS)?;
        for (name, least) in [("local", 0.8), ("shm", 0.6)] {
            let what = format!("{name}, 4 KiB x 128 over a hot 1 MiB, in parts of a memcpy loop");
            let lane = self.lanes.iter().position(|lane| lane.name == name);
            let rates = &turns.gb_per_s[lane.expect("all lanes are opened")];
            let part = median_of(rates, &turns.memory_copy, |rate, copy| rate / copy);
            aims.push(Aim::at_least(what, part, least));
        }
        let row = self.row(Operation::Write, 64, 128, HOT)?;
        for (name, least) in [("local", 4e6), ("shm", 2e6)] {
            let what = format!("{name}, 64 B x 128, requests/s");
            aims.push(Aim::at_least(what, row.gb_per_s[name] * 1e9 / 64.0, least));
        }
        Ok(())
    }
}

/// The one in the middle; of none 0.
fn median(all: &mut [f64]) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// The median of what both have in each turn, taken together.
fn median_of(one: &[f64], other: &[f64], together: impl Fn(f64, f64) -> f64) -> f64 {
    let mut all: Vec<f64> = one.iter().zip(other).map(|(&a, &b)| together(a, b)).collect();
    median(&mut all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        for (all, expected) in [(&mut [3.0, 1.0, 2.0][..], 2.0), (&mut [5.0], 5.0), (&mut [], 0.0)]
        {
            assert!((median(all) - expected).abs() < 1e-12);
        }
    }

    #[test]
    fn what_is_compared_turn_by_turn_is_not_a_matter_of_the_moment() {
        // The machine is twice as slow from within the third turn on: by the medians ours would take 7 less.
        let (ours, plain) = ([13.0, 13.0, 13.0, 23.0, 23.0], [10.0, 10.0, 20.0, 20.0, 20.0]);
        let more = median_of(&ours, &plain, |ours, plain| ours - plain);
        assert!((more - 3.0).abs() < 1e-12);
    }
}
