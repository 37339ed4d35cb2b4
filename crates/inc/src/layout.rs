//! How the vector of a call is cut into segments, and who sends and gets each of them.
//!
//! The vector is what all ranks reduce or get together: `count` elements, or a part of `count` elements
//! for each rank. Each part begins with a segment of its own, so that a segment concerns either all
//! ranks or one.

use crate::Collective;
use crate::descriptor::Descriptor;
use crate::ranks::Ranks;

/// Which ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Who {
    All,
    One(u32),
}

impl Who {
    /// Whether one of these ranks is meant.
    pub(crate) fn among(self, ranks: &Ranks) -> bool {
        match self {
            Self::All => true,
            Self::One(rank) => ranks.contains(rank),
        }
    }

    pub(crate) const fn is(self, rank: u32) -> bool {
        match self {
            Self::All => true,
            Self::One(one) => one == rank,
        }
    }
}

/// Where a segment lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Place {
    /// Bytes from the start of the whole vector.
    pub(crate) start: u64,
    /// Bytes from the start of its part.
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// Whose bytes are reduced.
    pub(crate) sources: Who,
    /// Who gets the result.
    pub(crate) targets: Who,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Layout {
    collective: Collective,
    root: u32,
    /// The number of its first segment.
    first: u64,
    parts: u64,
    part_bytes: u64,
    segment_bytes: u64,
    segments_per_part: u64,
}

impl Layout {
    /// Of a call whose first segment has this number. `segment_bytes` is not 0.
    pub(crate) fn new(descriptor: &Descriptor, world: u32, segment_bytes: u32, first: u64) -> Self {
        let parts = match descriptor.collective {
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast => 1,
            Collective::Barrier => 0,
            Collective::ReduceScatter | Collective::AllGather => world.into(),
        };
        let part_bytes = descriptor.count * u64::from(descriptor.data_type.size());
        let segment_bytes = u64::from(segment_bytes);
        Self {
            collective: descriptor.collective,
            root: descriptor.root,
            first,
            parts,
            part_bytes,
            segment_bytes,
            segments_per_part: part_bytes.div_ceil(segment_bytes),
        }
    }

    /// Of no call: no segments, and the next one has number 0.
    pub(crate) const fn none() -> Self {
        Self {
            collective: Collective::Barrier,
            root: 0,
            first: 0,
            parts: 0,
            part_bytes: 0,
            segment_bytes: 1,
            segments_per_part: 0,
        }
    }

    pub(crate) const fn first(&self) -> u64 {
        self.first
    }

    /// One past the last segment.
    pub(crate) const fn end(&self) -> u64 {
        self.first + self.parts * self.segments_per_part
    }

    /// Bytes of all parts.
    pub(crate) const fn bytes(&self) -> u64 {
        self.parts * self.part_bytes
    }

    /// Where a segment of this call lies.
    pub(crate) fn place(&self, segment: u64) -> Place {
        debug_assert!((self.first..self.end()).contains(&segment), "{segment} of {self:?}");
        let number = segment - self.first;
        let part = number / self.segments_per_part;
        let offset = number % self.segments_per_part * self.segment_bytes;
        let owner = Who::One(part as u32);
        let (sources, targets) = match self.collective {
            Collective::AllReduce | Collective::Barrier => (Who::All, Who::All),
            Collective::Reduce => (Who::All, Who::One(self.root)),
            Collective::Broadcast => (Who::One(self.root), Who::All),
            Collective::ReduceScatter => (Who::All, owner),
            Collective::AllGather => (owner, Who::All),
        };
        Place {
            start: part * self.part_bytes + offset,
            offset,
            length: self.segment_bytes.min(self.part_bytes - offset) as u32,
            sources,
            targets,
        }
    }

    /// Where in its source a rank has the bytes of a segment, if it sends them.
    pub(crate) fn source_offset(&self, segment: u64, rank: u32) -> Option<u64> {
        let place = self.place(segment);
        let own_only = self.collective == Collective::AllGather;
        place.sources.is(rank).then_some(if own_only { place.offset } else { place.start })
    }

    /// The first segment from this one on that has bytes of a rank, or the end.
    pub(crate) fn next_source(&self, segment: u64, rank: u32) -> u64 {
        let own = self.first + u64::from(rank) * self.segments_per_part;
        match self.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => segment,
            Collective::Broadcast if rank == self.root => segment,
            Collective::AllGather if segment < own + self.segments_per_part => segment.max(own),
            _ => self.end(),
        }
    }

    /// Where in its destination a rank gets the result of a segment, if it does.
    pub(crate) fn target_offset(&self, segment: u64, rank: u32) -> Option<u64> {
        let place = self.place(segment);
        let own_only = self.collective == Collective::ReduceScatter;
        place.targets.is(rank).then_some(if own_only { place.offset } else { place.start })
    }

    /// Whether the result of a segment goes to where the rank says with its own bytes of that segment; if
    /// not, its descriptor says where.
    pub(crate) const fn reflects(&self) -> bool {
        matches!(self.collective, Collective::AllReduce | Collective::Reduce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataType, Mode, ReduceOperation};

    fn layout(collective: Collective, count: u64, first: u64) -> Layout {
        let descriptor = Descriptor {
            sequence: 0,
            collective,
            operation: ReduceOperation::Sum,
            data_type: DataType::Int32,
            root: 2,
            count,
            mode: Mode::Write,
            destination_address: 0,
            destination_key: 0,
        };
        Layout::new(&descriptor, 3, 16, first)
    }

    #[test]
    fn who_sends_and_gets_what() {
        use Collective::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
        let one = Who::One;
        // 5 elements: 20 bytes, two segments for each part.
        for (collective, segments, number, start, offset, length, sources, targets) in [
            (AllReduce, 2, 1, 16, 16, 4, Who::All, Who::All),
            (Reduce, 2, 0, 0, 0, 16, Who::All, one(2)),
            (Broadcast, 2, 1, 16, 16, 4, one(2), Who::All),
            (ReduceScatter, 6, 3, 36, 16, 4, Who::All, one(1)),
            (AllGather, 6, 4, 40, 0, 16, one(2), Who::All),
        ] {
            let layout = layout(collective, 5, 100);
            assert_eq!((layout.first(), layout.end()), (100, 100 + segments));
            let wanted = Place { start, offset, length, sources, targets };
            assert_eq!(layout.place(100 + number), wanted, "{collective}");
        }
        for (collective, count) in [(Collective::Barrier, 7), (AllReduce, 0), (AllGather, 0)] {
            let layout = layout(collective, count, 9);
            assert_eq!((layout.first(), layout.end(), layout.bytes()), (9, 9, 0));
        }
        assert_eq!(Layout::none().end(), 0);
    }

    #[test]
    fn where_ranks_have_their_bytes() {
        let gather = layout(Collective::AllGather, 5, 0);
        assert_eq!((gather.source_offset(5, 2), gather.source_offset(5, 1)), (Some(16), None));
        assert_eq!((gather.target_offset(5, 2), gather.target_offset(5, 1)), (Some(56), Some(56)));
        let scatter = layout(Collective::ReduceScatter, 5, 0);
        assert_eq!(
            (scatter.source_offset(5, 2), scatter.source_offset(5, 1)),
            (Some(56), Some(56))
        );
        assert_eq!((scatter.target_offset(5, 2), scatter.target_offset(5, 1)), (Some(16), None));
        assert_eq!(gather.bytes(), 60);
        for layout in [gather, scatter, layout(Collective::Broadcast, 20, 3)] {
            for rank in 0..3 {
                for segment in layout.first()..layout.end() {
                    let has = |&segment: &u64| layout.source_offset(segment, rank).is_some();
                    let next = (segment..layout.end()).find(has).unwrap_or(layout.end());
                    assert_eq!(layout.next_source(segment, rank), next, "{layout:?} {rank}");
                }
            }
        }
    }
}
