//! Slices that one thread copies at a time: how they are claimed, joined and copied in steps.

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use millstream_net::guarded::{self, Caching};

use super::way::Broken;
use crate::Opcode;
use crate::batch::BatchShared;
use crate::task::{TaskHandle, WideSlice};

/// Pieces of a group at most.
const GROUP_PIECES: usize = 64;

/// Deadlines are looked at after so many bytes, at the latest: about a millisecond's work.
const STEP_BYTES: u64 = 4 << 20;

/// Fewer pieces are copied one by one.
const FEWEST_TOGETHER: usize = 4;

/// Requests of so many bytes are written around the caches, of which they would take most.
const AROUND_CACHES: u64 = 256 << 10;

/// What is taken together.
#[derive(Clone, Copy)]
pub(super) struct Grouping {
    /// Both ends are in one process.
    pub(super) within: bool,
    /// A group ends with the slice that makes it so long.
    pub(super) bytes: u64,
}

/// What one thread copies at a time.
pub(super) struct Group {
    pieces: [Piece; GROUP_PIECES],
    pub(super) count: usize,
    /// Tasks whose deadline has passed. Nobody is told of their end under a lock.
    pub(super) late: Vec<usize>,
}

/// Slices of one task.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) task: usize,
    pub(super) opcode: Opcode,
    pub(super) slice: WideSlice,
    pub(super) slices: u64,
    pub(super) caching: Caching,
}

/// Has these pieces copied: several at a time where they are of one length and go around the caches, and one by
/// one where `together` does not. After that, others may be told; in what order the bytes were there until then is not said.
pub(super) fn for_each(
    pieces: &[Piece],
    mut together: impl FnMut(&[Piece]) -> bool,
    mut one: impl FnMut(usize, &Piece),
) {
    // Once for all: it waits until they are in memory. Also if one panics.
    struct Fence(bool);
    impl Drop for Fence {
        fn drop(&mut self) {
            if self.0 {
                guarded::fence();
            }
        }
    }
    let (mut index, mut fence) = (0, Fence(false));
    while index < pieces.len() {
        let alike = alike(&pieces[index..]);
        fence.0 |= alike.len() >= FEWEST_TOGETHER;
        if alike.len() < FEWEST_TOGETHER || !together(alike) {
            alike.iter().zip(index..).for_each(|(piece, index)| one(index, piece));
        }
        index += alike.len();
    }
}

/// Those at the beginning that are to be copied together: the first alone, where that is not to be. Longer ones are
/// streams enough for themselves.
fn alike(pieces: &[Piece]) -> &[Piece] {
    let first = &pieces[0];
    let length = first.slice.length;
    if first.caching != Caching::Around || !(1 << 10..16 << 10).contains(&length) {
        return &pieces[..1];
    }
    let same = |it: &&Piece| {
        it.caching == first.caching && it.opcode == first.opcode && it.slice.length == length
    };
    let count = pieces.iter().take(guarded::TOGETHER).take_while(same).count();
    &pieces[..count]
}

impl Piece {
    /// Copies it step by step, and looks between whether the time of its task is over: then it says how many
    /// bytes were copied. Both ends may be in one process and overlap: no step writes what one after it reads.
    pub(super) fn in_steps<E>(
        &self,
        batch: &Arc<BatchShared>,
        one_process: bool,
        mut copy: impl FnMut(u64, u64, u64) -> Result<(), E>,
    ) -> Result<Option<u64>, E> {
        let WideSlice { source: near, target: far, length } = self.slice;
        if length <= STEP_BYTES {
            return copy(near, far, length).map(|()| None);
        }
        let upwards = match self.opcode {
            Opcode::Write => far > near,
            Opcode::Read => near > far,
        };
        let mut done = 0;
        while done < length {
            if done > 0 && batch.tasks.get(self.task).is_late() {
                return Ok(Some(done));
            }
            let step = STEP_BYTES.min(length - done);
            let offset = if one_process && upwards { length - done - step } else { done };
            copy(near + offset, far + offset, step)?;
            done += step;
        }
        Ok(None)
    }
}

impl Group {
    const NONE: Piece = Piece {
        task: 0,
        opcode: Opcode::Read,
        slice: WideSlice { source: 0, target: 0, length: 0 },
        slices: 0,
        caching: Caching::Through,
    };

    /// Claims slices of these tasks, and moves on in them. None are left when it is empty.
    pub(super) fn claim(
        batch: &Arc<BatchShared>,
        next: &mut usize,
        end: usize,
        grouping: Grouping,
    ) -> Self {
        let Grouping { within, bytes: limit } = grouping;
        let mut group = Self { pieces: [Self::NONE; GROUP_PIECES], count: 0, late: Vec::new() };
        let mut task = TaskHandle { batch: Arc::clone(batch), index: 0 };
        let mut bytes = 0;
        while *next < end && group.count < GROUP_PIECES && bytes < limit {
            task.index = *next;
            // Another transport claims it.
            if batch.tasks.get(*next).has_left() {
                *next += 1;
                continue;
            }
            if task.is_late() {
                group.late.push(*next);
                *next += 1;
                continue;
            }
            let opcode = task.opcode();
            let whole = task.whole();
            let caching = caching_of(whole.length);
            if let Some(shape) = task.shape() {
                let pieces = task.claim_pieces(GROUP_PIECES - group.count, limit - bytes);
                if pieces.is_empty() {
                    *next += 1;
                    continue;
                }
                batch.posted(task.index);
                for slice in pieces.map(|index| shape.piece(index)) {
                    let task = task.index;
                    group.pieces[group.count] = Piece { task, opcode, slice, slices: 1, caching };
                    group.count += 1;
                    bytes += slice.length;
                }
                continue;
            }
            // What overlaps is one copy, in the direction that is right for all of it.
            let at_once = whole.length <= limit || (within && overlaps(&whole));
            let claimed = match at_once {
                true => task.claim_rest(),
                false => task.claim().map(|slice| (slice, 1)),
            };
            if at_once || claimed.is_none() {
                *next += 1;
            }
            if let Some((slice, slices)) = claimed {
                batch.posted(task.index);
                let task = task.index;
                group.pieces[group.count] = Piece { task, opcode, slice, slices, caching };
                group.count += 1;
                bytes += slice.length;
            }
        }
        group
    }

    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }

    /// Its pieces, and their places in the list. Slices of a task that follow each other at both ends are one,
    /// as long as one step takes it.
    fn joined(&self) -> impl Iterator<Item = (Range<usize>, Piece)> {
        let mut next = 0;
        iter::from_fn(move || {
            let first = next;
            let mut all = *self.pieces().get(first)?;
            next += 1;
            while let Some(piece) = self.pieces().get(next)
                && all.task == piece.task
                && all.slice.source + all.slice.length == piece.slice.source
                && all.slice.target + all.slice.length == piece.slice.target
                && all.slice.length + piece.slice.length <= STEP_BYTES
            {
                all.slice.length += piece.slice.length;
                next += 1;
            }
            Some((first..next, all))
        })
    }

    /// Has its pieces copied, those that follow each other at once.
    pub(super) fn for_each_joined(
        &self,
        copy_one: impl Fn(&Piece) -> Option<Broken>,
        failures: &mut Vec<(usize, Broken)>,
    ) {
        for (indexes, piece) in self.joined() {
            if let Some(why) = copy_one(&piece) {
                failures.extend(indexes.map(|index| (index, why.clone())));
            }
        }
    }
}

/// How a request of so many bytes goes about caches.
pub(super) const fn caching_of(length: u64) -> Caching {
    match length >= AROUND_CACHES {
        true => Caching::Around,
        false => Caching::Through,
    }
}

/// Whether its ends have bytes in common, if they are in one process.
fn overlaps(slice: &WideSlice) -> bool {
    slice.source.abs_diff(slice.target) < slice.length
}
