//! Which collective a rank calls, and how long its vectors must be.

use std::ops::Range;

use millstream_inc::{Collective, DataType, ReduceOperation};

use crate::{CollectiveError, Element};

/// A collective with what it takes beside vectors. All ranks of a group call the same, with vectors of
/// the same lengths and element type.
///
/// | collective | source | destination | in place |
/// |---|---|---|---|
/// | AllReduce | `count` elements | `count` | both are the vector |
/// | Reduce | `count` | `count` at the root, unused elsewhere | both are the vector |
/// | Broadcast | `count` at the root, unused elsewhere | `count`, also at the root | both are the vector |
/// | Barrier | none | none | none |
/// | ReduceScatter | world x `count`: part `r` goes to rank `r` | `count` | the destination is this rank's part of the vector |
/// | AllGather | `count` | world x `count`: part `r` is of rank `r` | the source is this rank's part of the vector |
///
/// A vector that is unused may have any length. It is neither read nor written.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Call {
    /// Every rank gets the reduction of all vectors.
    AllReduce(ReduceOperation),
    /// One rank gets the reduction of all vectors.
    Reduce {
        /// How elements are combined.
        operation: ReduceOperation,
        /// Who gets the result.
        root: u32,
    },
    /// Every rank gets the vector of one.
    Broadcast {
        /// Whose.
        root: u32,
    },
    /// Nobody goes on before all have come.
    Barrier,
    /// Every rank gets its part of the reduction of all vectors.
    ReduceScatter(ReduceOperation),
    /// Every rank gets the vectors of all, one after the other.
    AllGather,
}

/// What a rank reads and writes. Ranges are of the vectors that the caller gave, in elements.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Shape {
    /// As the switch must know it.
    pub(crate) count: usize,
    pub(crate) source: Range<usize>,
    pub(crate) destination: Range<usize>,
}

impl Call {
    /// The collective alone.
    pub const fn collective(self) -> Collective {
        match self {
            Self::AllReduce(_) => Collective::AllReduce,
            Self::Reduce { .. } => Collective::Reduce,
            Self::Broadcast { .. } => Collective::Broadcast,
            Self::Barrier => Collective::Barrier,
            Self::ReduceScatter(_) => Collective::ReduceScatter,
            Self::AllGather => Collective::AllGather,
        }
    }

    /// How elements are combined, where they are.
    pub const fn operation(self) -> Option<ReduceOperation> {
        match self {
            Self::AllReduce(operation)
            | Self::Reduce { operation, .. }
            | Self::ReduceScatter(operation) => Some(operation),
            Self::Broadcast { .. } | Self::Barrier | Self::AllGather => None,
        }
    }

    /// The rank that is special, where one is.
    pub const fn root(self) -> Option<u32> {
        match self {
            Self::Reduce { root, .. } | Self::Broadcast { root } => Some(root),
            _ => None,
        }
    }

    /// As the switch must know the elements. A barrier has none, and must not differ in their type.
    pub(crate) const fn data_type<T: Element>(self) -> DataType {
        match self {
            Self::Barrier => DataType::UInt8,
            _ => T::DATA_TYPE,
        }
    }

    /// How many elements the source and the destination of each rank have for so many in the table
    /// above; that of an unused vector is the same as elsewhere. `None` when it is too much for the
    /// machine.
    pub fn lengths(self, world: u32, count: usize) -> Option<[usize; 2]> {
        let all = count.checked_mul(world as usize);
        Some(match self {
            Self::AllReduce(_) | Self::Reduce { .. } | Self::Broadcast { .. } => [count; 2],
            Self::Barrier => [0; 2],
            Self::ReduceScatter(_) => [all?, count],
            Self::AllGather => [count, all?],
        })
    }

    /// How many elements a rank reads and writes, where [`Call::lengths`] says how many there are.
    pub(crate) fn used_lengths(
        self,
        rank: u32,
        world: u32,
        count: usize,
    ) -> Result<Option<[usize; 2]>, CollectiveError> {
        self.check_root(world)?;
        let (reads, writes) = self.roles(rank);
        let used = |[source, destination]: [usize; 2]| {
            [if reads { source } else { 0 }, if writes { destination } else { 0 }]
        };
        Ok(self.lengths(world, count).map(used))
    }

    /// What a rank reads of a source and writes of a destination with so many elements.
    pub(crate) fn shape(
        self,
        rank: u32,
        world: u32,
        source: usize,
        destination: usize,
    ) -> Result<Shape, CollectiveError> {
        self.check_root(world)?;
        let (reads, writes) = self.roles(rank);
        let count = match self {
            Self::ReduceScatter(_) | Self::AllReduce(_) => destination,
            Self::AllGather => source,
            Self::Reduce { .. } => source,
            Self::Broadcast { .. } => destination,
            Self::Barrier => 0,
        };
        let expected = self.lengths(world, count);
        let fits = |lengths: [usize; 2]| {
            (!reads || lengths[0] == source) && (!writes || lengths[1] == destination)
        };
        if !expected.is_some_and(fits) {
            return Err(CollectiveError::Lengths {
                collective: self.collective(),
                world,
                source_length: source,
                destination_length: destination,
            });
        }
        let range = |used: bool, length: usize| if used { 0..length } else { 0..0 };
        Ok(Shape { count, source: range(reads, source), destination: range(writes, destination) })
    }

    /// What a rank reads and writes of a vector with so many elements, in place.
    pub(crate) fn shape_in_place(
        self,
        rank: u32,
        world: u32,
        length: usize,
    ) -> Result<Shape, CollectiveError> {
        self.check_root(world)?;
        let (reads, writes) = self.roles(rank);
        let whole = |used: bool| if used { 0..length } else { 0..0 };
        let part = || match length.is_multiple_of(world as usize) {
            true => {
                let count = length / world as usize;
                Ok((count, count * rank as usize..count * (rank as usize + 1)))
            }
            false => {
                let collective = self.collective();
                Err(CollectiveError::Parts { collective, world, length })
            }
        };
        Ok(match self {
            Self::ReduceScatter(_) => {
                let (count, part) = part()?;
                Shape { count, source: 0..length, destination: part }
            }
            Self::AllGather => {
                let (count, part) = part()?;
                Shape { count, source: part, destination: 0..length }
            }
            Self::Barrier if length > 0 => {
                return Err(CollectiveError::Lengths {
                    collective: Collective::Barrier,
                    world,
                    source_length: length,
                    destination_length: length,
                });
            }
            _ => Shape { count: length, source: whole(reads), destination: whole(writes) },
        })
    }

    /// Whether a rank has a source, and a destination.
    const fn roles(self, rank: u32) -> (bool, bool) {
        match self {
            Self::Reduce { root, .. } => (true, rank == root),
            Self::Broadcast { root } => (rank == root, true),
            _ => (true, true),
        }
    }

    fn check_root(self, world: u32) -> Result<(), CollectiveError> {
        match self.root() {
            Some(root) if root >= world => Err(CollectiveError::Root { root, world }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use ReduceOperation::Sum;

    const REDUCE: Call = Call::Reduce { operation: Sum, root: 1 };
    const BROADCAST: Call = Call::Broadcast { root: 1 };

    #[test]
    fn what_a_rank_reads_and_writes() {
        // The call, the rank of three, lengths: the count, what is read and what is written.
        for (call, rank, lengths, count, source, destination) in [
            (Call::AllReduce(Sum), 0, [5, 5], 5, 0..5, 0..5),
            (REDUCE, 1, [5, 5], 5, 0..5, 0..5),
            (REDUCE, 0, [5, 0], 5, 0..5, 0..0),
            (REDUCE, 0, [5, 9], 5, 0..5, 0..0),
            (BROADCAST, 1, [5, 5], 5, 0..5, 0..5),
            (BROADCAST, 2, [0, 5], 5, 0..0, 0..5),
            (Call::Barrier, 2, [0, 0], 0, 0..0, 0..0),
            (Call::ReduceScatter(Sum), 2, [15, 5], 5, 0..15, 0..5),
            (Call::AllGather, 2, [5, 15], 5, 0..5, 0..15),
            (Call::AllGather, 2, [0, 0], 0, 0..0, 0..0),
        ] {
            let shape = call.shape(rank, 3, lengths[0], lengths[1]);
            assert_eq!(shape, Ok(Shape { count, source, destination }), "{call:?}");
        }
    }

    #[test]
    fn what_a_rank_reads_and_writes_in_place() {
        for (call, rank, length, count, source, destination) in [
            (Call::AllReduce(Sum), 0, 6, 6, 0..6, 0..6),
            (REDUCE, 1, 6, 6, 0..6, 0..6),
            (REDUCE, 0, 6, 6, 0..6, 0..0),
            (BROADCAST, 1, 6, 6, 0..6, 0..6),
            (BROADCAST, 0, 6, 6, 0..0, 0..6),
            (Call::Barrier, 0, 0, 0, 0..0, 0..0),
            (Call::ReduceScatter(Sum), 2, 6, 2, 0..6, 4..6),
            (Call::AllGather, 1, 6, 2, 2..4, 0..6),
        ] {
            let shape = call.shape_in_place(rank, 3, length);
            assert_eq!(shape, Ok(Shape { count, source, destination }), "{call:?}");
        }
    }

    #[test]
    fn lengths_and_roots_that_do_not_fit() {
        for (call, rank, lengths, text) in [
            (Call::AllReduce(Sum), 0, [5, 4], "5 elements and the destination 4"),
            (REDUCE, 1, [5, 4], "5 elements and the destination 4"),
            (BROADCAST, 1, [0, 5], "0 elements and the destination 5"),
            (Call::Barrier, 0, [1, 0], "1 elements and the destination 0"),
            (Call::ReduceScatter(Sum), 0, [16, 5], "the source must have 3 times as many"),
            (Call::AllGather, 0, [5, 14], "the destination must have 3 times as many"),
            (Call::AllGather, 0, [usize::MAX, 5], "the destination must have 3 times as many"),
        ] {
            let error = call.shape(rank, 3, lengths[0], lengths[1]).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        for call in [Call::AllGather, Call::ReduceScatter(Sum)] {
            let error = call.shape_in_place(0, 3, 7).unwrap_err().to_string();
            assert!(error.contains("7 elements") && error.contains("3 ranks"), "{error}");
        }
        for call in [Call::Broadcast { root: 3 }, Call::Reduce { operation: Sum, root: u32::MAX }] {
            let root = call.root().unwrap();
            let error = CollectiveError::Root { root, world: 3 };
            assert_eq!(call.shape(0, 3, 5, 5), Err(error.clone()));
            assert_eq!(call.shape_in_place(0, 3, 5), Err(error));
        }
        assert!(Call::Barrier.shape_in_place(0, 3, 1).is_err());
    }
}
