//! 40,000 pieces of 4 KiB as one request, beside one piece of as many bytes.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use millstream_transfer::{
    Batch, Opcode, Pieces, PiecesRequest, SubmitOptions, TransferPiece, TransferRequest,
};

use super::lane::Lane;
use super::report::Aim;
use super::{COLD, LEAST, SHORT_TURNS, TURNS, median, median_of};
use crate::process;

const COUNT: u32 = 40_000;
const LENGTH: u64 = 4 << 10;
/// From one to the next, of those at equal distances: not the length of pages.
const STRIDE: u64 = 6656;
/// How often who waits looks whether the command is told to stop.
const GLANCE: Duration = Duration::from_millis(20);

/// What one turn took, in milliseconds.
#[derive(Clone, Copy)]
struct Took {
    posted: f64,
    done: f64,
}

pub(super) fn measure(lane: &Lane, turn: Duration, aims: &mut Vec<Aim>) -> anyhow::Result<()> {
    let base = lane.opened.segment.address_of(0, 0, COLD as u64)?;
    let source = lane.buffer.address();
    let first = TransferPiece { source, target_offset: base, length: LENGTH };
    let strided =
        Pieces::Strided { first, count: COUNT, source_stride: STRIDE, target_stride: STRIDE };
    let scattered = scattered(source, base);
    let (mut whole, mut rows) = (Vec::new(), [Vec::new(), Vec::new()]);
    // One request takes as long as it takes: who wants figures soon has fewer.
    let turns = if turn > LEAST { SHORT_TURNS } else { TURNS };
    // One more, which gives pages and connects.
    for turn in 0..=turns {
        let took = [
            contiguous(lane, first, u64::from(COUNT) * LENGTH)?,
            pieces(lane, strided)?,
            pieces(lane, Pieces::List(&scattered))?,
        ];
        if turn > 0 {
            whole.push(took[0].done);
            rows.iter_mut().zip(&took[1..]).for_each(|(row, took)| row.push(*took));
        }
    }
    for (name, row) in ["at equal distances", "in any order"].into_iter().zip(rows) {
        let each = |figure: fn(&Took) -> f64| row.iter().map(figure).collect::<Vec<_>>();
        let what = format!("{}, 40,000 pieces of 4 KiB {name}", lane.name);
        aims.push(Aim::at_most(
            format!("{what}, posted, ms"),
            median(&mut each(|took| took.posted)),
            10.0,
        ));
        let ratio = median_of(&each(|took| took.done), &whole, |pieces, whole| pieces / whole);
        aims.push(Aim::at_most(format!("{what}, in parts of one piece's time"), ratio, 1.2));
    }
    Ok(())
}

/// Pages of both sides, each once, in an order that no prefetcher knows.
fn scattered(source: u64, target: u64) -> Vec<TransferPiece> {
    let pages = COLD as u64 / LENGTH;
    // Odd factors have every page of a power of two once.
    let piece = |index: u64| TransferPiece {
        source: source + index * 40_503 % pages * LENGTH,
        target_offset: target + index * 30_011 % pages * LENGTH,
        length: LENGTH,
    };
    (0..COUNT.into()).map(piece).collect()
}

fn contiguous(lane: &Lane, first: TransferPiece, length: u64) -> anyhow::Result<Took> {
    let TransferPiece { source, target_offset, .. } = first;
    let target = lane.opened.segment.id();
    let request = TransferRequest { opcode: Opcode::Write, source, target, target_offset, length };
    time(lane, |batch| Ok(lane.opened.engine.submit(batch, &[request])?))
}

fn pieces(lane: &Lane, pieces: Pieces<'_>) -> anyhow::Result<Took> {
    let target = lane.opened.segment.id();
    let request = PiecesRequest { opcode: Opcode::Write, target, pieces };
    let options = SubmitOptions::default();
    time(lane, |batch| Ok(lane.opened.engine.submit_pieces(batch, &[request], &options)?))
}

fn time(lane: &Lane, submit: impl Fn(&Batch) -> anyhow::Result<()>) -> anyhow::Result<Took> {
    let engine = &lane.opened.engine;
    let batch = engine.allocate_batch(1)?;
    let start = Instant::now();
    submit(&batch)?;
    let posted = start.elapsed();
    while !engine.wait(&batch, GLANCE) {
        if process::told_to_stop() {
            return Err(anyhow!("told to stop"));
        }
    }
    let done = start.elapsed();
    if let Some(error) = engine.status(&batch, 0)?.error {
        return Err(error.into());
    }
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    Ok(Took { posted: milliseconds(posted), done: milliseconds(done) })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_page_is_copied_or_written_twice() {
        let all = scattered(0, 1 << 40);
        let sources: HashSet<u64> = all.iter().map(|piece| piece.source).collect();
        let targets: HashSet<u64> = all.iter().map(|piece| piece.target_offset).collect();
        assert_eq!((sources.len(), targets.len()), (COUNT as usize, COUNT as usize));
        let end = COLD as u64 - LENGTH;
        assert!(all.iter().all(|it| it.source <= end && it.target_offset - (1 << 40) <= end));
        const { assert!((COUNT as u64 - 1) * STRIDE + LENGTH <= COLD as u64) };
    }
}
