//! One call, in all ways, and what came of it.

use std::thread;

use millstream_collective::{Call, CollectiveError, Communicator};

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
