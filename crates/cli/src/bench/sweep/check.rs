//! One call, in all ways, and what came of it.

use std::thread;

use millstream_collective::{Call, CollectiveError, Communicator, Mode};

use super::odd::{self, OddVector};
use crate::collective::{Number, Parts, Reference};

/// Calls, and elements that were checked.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Tally {
    pub(super) calls: u64,
    pub(super) checked: u64,
    pub(super) wrong: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.checked += other.checked;
        self.wrong += other.wrong;
    }
}

/// Has all ranks make one call in all ways.
pub(super) fn check_all<T: Number>(
    ranks: &mut [Communicator],
    reference: &Reference,
    mode: Mode,
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
        let check = |rank| move || check_rank::<T>(rank, reference, mode, reductions);
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
    mode: Mode,
    reductions: &[T],
) -> Result<Tally, CollectiveError> {
    let &Reference { call, world, count, .. } = reference;
    let rank = communicator.rank();
    let mut tally = Tally::default();
    for in_place in [false, true] {
        let Some(parts) = Parts::new(call, rank, world, count, in_place) else {
            return Err(CollectiveError::TooLong { count: count as u64, data_type: T::DATA_TYPE });
        };
        let case = Case { reference, reductions, rank, parts, in_place };
        // With an element before each vector it is not aligned to more than an element.
        tally.add(case.call_slices(communicator, 0)?);
        tally.add(case.call_slices(communicator, 1)?);
        tally.add(case.call_odd(communicator, mode)?);
    }
    Ok(tally)
}

/// A call of a rank.
struct Case<'a, T> {
    reference: &'a Reference,
    reductions: &'a [T],
    rank: u32,
    parts: Parts,
    in_place: bool,
}

impl<T: Number> Case<'_, T> {
    /// With slices, which have so many elements before the vectors, and one after them.
    fn call_slices(
        &self,
        communicator: &mut Communicator,
        before: usize,
    ) -> Result<Tally, CollectiveError> {
        let Self { reference, parts, rank, .. } = self;
        let vector = |length| vec![T::FILLER; before + length + 1];
        let [mut source, mut destination] = parts.lengths.map(vector);
        let [source_range, range] = parts.lengths.map(|length| before..before + length);
        let own = if self.in_place { &mut destination } else { &mut source };
        for (index, element) in own[before..][parts.source.clone()].iter_mut().enumerate() {
            *element = reference.source(*rank, index);
        }
        if self.in_place {
            communicator.call_in_place(reference.call, &mut destination[range])?;
        } else {
            let source = &source[source_range];
            communicator.call(reference.call, source, &mut destination[range])?;
        }
        Ok(self.tally(before, destination.into_iter()))
    }

    /// With vectors that begin at odd addresses: ranks differ in them, and source and destination do.
    fn call_odd(&self, communicator: &Communicator, mode: Mode) -> Result<Tally, CollectiveError> {
        let Self { reference, parts, rank, .. } = self;
        let behind = |number: u32| 1 + 2 * (number % 4) as usize;
        let [source, destination] = parts.lengths;
        let mut source = OddVector::new(source, behind(*rank));
        let mut destination = OddVector::new(destination, behind(rank + 1));
        let own = if self.in_place { &mut destination } else { &mut source };
        for (index, place) in parts.source.clone().enumerate() {
            own.set(1 + place, reference.source(*rank, index));
        }
        let call = (reference.call, mode, reference.count);
        let source = (!self.in_place).then_some(&mut source);
        odd::call(communicator, call, parts, source, &mut destination)?;
        Ok(self.tally(1, destination.elements()))
    }

    /// Compares the destination, and what is before and after it.
    fn tally(&self, before: usize, elements: impl ExactSizeIterator<Item = T>) -> Tally {
        let Self { reference, reductions, parts, rank, in_place } = self;
        let first = match reference.call {
            Call::ReduceScatter(_) => reference.count * *rank as usize,
            _ => 0,
        };
        let range = before..before + parts.lengths[1];
        let expected = |place: usize| match place.checked_sub(before) {
            Some(index) if range.contains(&place) => {
                let reduction = (index.checked_sub(parts.result.start))
                    .filter(|_| parts.result.contains(&index))
                    .and_then(|index| reductions.get(first + index));
                let other = || parts.expected(reference, *rank, *in_place, index);
                reduction.copied().unwrap_or_else(other)
            }
            _ => T::FILLER,
        };
        let checked = elements.len() as u64;
        let is_wrong = |&(place, element): &(usize, T)| element != expected(place);
        Tally { calls: 1, checked, wrong: elements.enumerate().filter(is_wrong).count() as u64 }
    }
}
