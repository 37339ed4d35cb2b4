//! How the vector of a call is cut into segments, and who sends and gets each of them.
//!
//! The vector is what all ranks reduce or get together: `count` elements, or a part of `count` elements
//! for each rank. Each part begins with a segment of its own, so that a segment concerns either all
//! ranks or one.
//!
//! Where a call is divided among several trees, a layout is that of one of them: each part's stripe is cut into
//! segments, and places are those in the whole vectors.
//!
//! A vector that fits a packet behind the descriptor has no segments. It travels with the descriptor, and the
//! result with the answer to it.

use core::ops::Range;

use millstream_wire::Mtu;

use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};
use crate::ranks::Ranks;
use crate::{Collective, Stripe};

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
    /// From the start of one part to that of the next.
    part_bytes: u64,
    /// What of each part is on this tree, from its start on.
    stripe_start: u64,
    stripe_bytes: u64,
    segment_bytes: u64,
    segments_per_part: u64,
}

/// How a communicator cuts vectors.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Cut {
    pub(crate) world: u32,
    /// Not 0.
    pub(crate) segment_bytes: u32,
    /// The most bytes of a whole vector that travels with the descriptor.
    pub(crate) small_bytes: u64,
}

impl Cut {
    pub(crate) const fn new(world: u32, segment_bytes: u32, path_mtu: Mtu) -> Self {
        let small_bytes = (path_mtu.bytes() - DESCRIPTOR_BYTES) as u64;
        Self { world, segment_bytes, small_bytes }
    }
}

impl Layout {
    /// Of a call whose first segment has this number.
    pub(crate) fn new(descriptor: &Descriptor, cut: &Cut, first: u64) -> Self {
        let &Cut { world, segment_bytes, .. } = cut;
        let parts = match descriptor.collective {
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast => 1,
            Collective::Barrier => 0,
            Collective::ReduceScatter | Collective::AllGather => world.into(),
        };
        let size = u64::from(descriptor.data_type.size());
        let part_bytes = descriptor.count * size;
        let stripe = descriptor.stripe.elements(descriptor.count);
        let (stripe_start, stripe_end) = (stripe.start * size, stripe.end * size);
        let stripe_bytes = stripe_end - stripe_start;
        let segment_bytes = u64::from(segment_bytes);
        // One that is divided is not, however short.
        let is_small = descriptor.stripe == Stripe::WHOLE && parts * part_bytes <= cut.small_bytes;
        Self {
            collective: descriptor.collective,
            root: descriptor.root,
            first,
            parts,
            part_bytes,
            stripe_start,
            stripe_bytes,
            segment_bytes,
            segments_per_part: if is_small { 0 } else { stripe_bytes.div_ceil(segment_bytes) },
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
            stripe_start: 0,
            stripe_bytes: 0,
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

    /// Bytes of all parts, on this tree.
    pub(crate) const fn bytes(&self) -> u64 {
        self.parts * self.stripe_bytes
    }

    /// Bytes of all parts, of a vector that travels with the descriptor; of any other none.
    pub(crate) const fn small_bytes(&self) -> usize {
        if self.segments_per_part == 0 { self.bytes() as usize } else { 0 }
    }

    /// What of the whole vector a rank sends with its descriptor.
    pub(crate) fn small_source(&self, rank: u32) -> Range<usize> {
        let part = self.small_part(rank..rank + 1);
        match self.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                0..self.small_bytes()
            }
            Collective::AllGather => part,
            Collective::Broadcast if rank == self.root => 0..self.small_bytes(),
            Collective::Broadcast | Collective::Barrier => 0..0,
        }
    }

    /// What of the whole vector a rank gets with the answer.
    pub(crate) fn small_target(&self, rank: u32) -> Range<usize> {
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::AllGather => {
                0..self.small_bytes()
            }
            Collective::ReduceScatter => self.small_part(rank..rank + 1),
            Collective::Reduce if rank == self.root => 0..self.small_bytes(),
            Collective::Reduce | Collective::Barrier => 0..0,
        }
    }

    /// As [`Layout::small_source`], of a switch with these ranks below, or a host with several ranks: all or nothing.
    pub(crate) fn small_source_of(&self, ranks: &Ranks) -> Range<usize> {
        let none = self.collective == Collective::Broadcast && !ranks.contains(self.root);
        0..if none { 0 } else { self.small_bytes() }
    }

    /// As [`Layout::small_target`], of a switch with these ranks below, or a host with several ranks: all or nothing.
    pub(crate) fn small_target_of(&self, ranks: &Ranks) -> Range<usize> {
        let none = self.collective == Collective::Reduce && !ranks.contains(self.root);
        0..if none { 0 } else { self.small_bytes() }
    }

    /// Where the parts of some ranks lie in a vector that travels with the descriptor.
    pub(crate) const fn small_part(&self, ranks: Range<u32>) -> Range<usize> {
        if self.segments_per_part > 0 {
            return 0..0;
        }
        let part_bytes = self.stripe_bytes as usize;
        ranks.start as usize * part_bytes..ranks.end as usize * part_bytes
    }

    /// Where a segment of this call lies.
    pub(crate) fn place(&self, segment: u64) -> Place {
        debug_assert!((self.first..self.end()).contains(&segment), "{segment} of {self:?}");
        let number = segment - self.first;
        let part = number / self.segments_per_part;
        let within = number % self.segments_per_part * self.segment_bytes;
        let offset = self.stripe_start + within;
        let (sources, targets) = self.who(part);
        Place {
            start: part * self.part_bytes + offset,
            offset,
            length: self.segment_bytes.min(self.stripe_bytes - within) as u32,
            sources,
            targets,
        }
    }

    /// Who contributes to a part, and who gets its result.
    const fn who(&self, part: u64) -> (Who, Who) {
        let owner = Who::One(part as u32);
        match self.collective {
            Collective::AllReduce | Collective::Barrier => (Who::All, Who::All),
            Collective::Reduce => (Who::All, Who::One(self.root)),
            Collective::Broadcast => (Who::One(self.root), Who::All),
            Collective::ReduceScatter => (Who::All, owner),
            Collective::AllGather => (owner, Who::All),
        }
    }

    /// How many parts the vector has.
    pub(crate) const fn parts(&self) -> u64 {
        self.parts
    }

    /// Where some segments of a part lie in the whole vector, who contributes to them and who gets them. A vector that
    /// travels with the descriptor is as one segment for each part.
    pub(crate) fn pieces(
        &self,
        part: u64,
        segments: Range<u64>,
        is_small: bool,
    ) -> (Range<u64>, (Who, Who)) {
        let bytes = if is_small { self.stripe_bytes } else { self.segment_bytes };
        let base = part * self.part_bytes + self.stripe_start;
        let at = |segment: u64| base + (segment * bytes).min(self.stripe_bytes);
        (at(segments.start)..at(segments.end), self.who(part))
    }

    /// Where in its source a rank has what lies there in the whole vector, in this part.
    pub(crate) fn in_source(&self, whole: u64, part: u64) -> u64 {
        match self.collective {
            Collective::AllGather => whole - part * self.part_bytes,
            _ => whole,
        }
    }

    /// Where in its destination a rank gets what lies there in the whole vector, in this part.
    pub(crate) fn in_target(&self, whole: u64, part: u64) -> u64 {
        match self.collective {
            Collective::ReduceScatter => whole - part * self.part_bytes,
            _ => whole,
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

    /// As [`Layout::source_offset`], of a host with several ranks: what it has is laid out as the whole vector is.
    pub(crate) fn source_offset_of(&self, segment: u64, ranks: &Ranks) -> Option<u64> {
        let place = self.place(segment);
        place.sources.among(ranks).then_some(place.start)
    }

    /// As [`Layout::next_source`], of a host with several ranks.
    pub(crate) fn next_source_of(&self, segment: u64, ranks: &Ranks) -> u64 {
        match self.collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => segment,
            Collective::Broadcast if ranks.contains(self.root) => segment,
            Collective::AllGather => {
                let at = |rank: u32| self.first + u64::from(rank) * self.segments_per_part;
                let next = ranks.ranges().iter().find(|range| segment < at(range.end));
                next.map_or(self.end(), |range| segment.max(at(range.start)))
            }
            Collective::Broadcast | Collective::Barrier => self.end(),
        }
    }

    /// As [`Layout::target_offset`], of a host with several ranks: what it gets is laid out as the whole vector is.
    pub(crate) fn target_offset_of(&self, segment: u64, ranks: &Ranks) -> Option<u64> {
        let place = self.place(segment);
        place.targets.among(ranks).then_some(place.start)
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

    fn descriptor(collective: Collective, count: u64) -> Descriptor {
        Descriptor {
            sequence: 0,
            collective,
            operation: ReduceOperation::Sum,
            data_type: DataType::Int32,
            root: 2,
            count,
            stripe: Stripe::WHOLE,
            mode: Mode::Write,
            destination_address: 0,
            destination_key: 0,
        }
    }

    fn layout(collective: Collective, count: u64, first: u64) -> Layout {
        let descriptor = descriptor(collective, count);
        Layout::new(&descriptor, &Cut { world: 3, segment_bytes: 16, small_bytes: 0 }, first)
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
    fn a_stripe_lies_where_it_is_in_the_whole_vectors() {
        let cut = Cut { world: 3, segment_bytes: 16, small_bytes: 200 };
        let of = |collective, count, tree| {
            let stripe = Stripe::new(tree, 2).unwrap();
            Layout::new(&Descriptor { stripe, ..descriptor(collective, count) }, &cut, 100)
        };
        // 7 elements: 3 and 4 of each part.
        let gather = of(Collective::AllGather, 7, 1);
        assert_eq!((gather.end(), gather.bytes()), (103, 48));
        let (sources, targets) = (Who::One(2), Who::All);
        let wanted = Place { start: 68, offset: 12, length: 16, sources, targets };
        assert_eq!(gather.place(102), wanted);
        assert_eq!(gather.source_offset(102, 2), Some(12));
        assert_eq!(gather.target_offset(102, 0), Some(68));
        let reduce = of(Collective::AllReduce, 13, 1);
        assert_eq!((reduce.end(), reduce.bytes()), (102, 28));
        assert_eq!((reduce.place(101).start, reduce.place(101).length), (40, 12));
        // It is short, and has segments all the same, but where there is no element.
        assert_eq!((reduce.small_bytes(), reduce.small_source(0)), (0, 0..0));
        let none = of(Collective::AllGather, 1, 0);
        assert_eq!((none.end(), none.bytes(), none.small_target(1)), (100, 0, 0..0));
        let agreement = Descriptor { stripe: Stripe::NONE, ..descriptor(Collective::AllReduce, 9) };
        let agreement = Layout::new(&agreement, &cut, 100);
        assert_eq!((agreement.end(), agreement.bytes(), agreement.small_bytes()), (100, 0, 0));
    }

    #[test]
    fn what_fits_a_packet_goes_with_the_descriptor() {
        let cut = Cut::new(3, 512, Mtu::B256);
        assert_eq!(cut.small_bytes, 208);
        // The collective, elements for each part, and what of the whole vector rank 1 sends and gets.
        for (collective, count, source, target) in [
            (Collective::AllReduce, 52, 0..208, 0..208),
            (Collective::Reduce, 52, 0..208, 0..0),
            (Collective::Broadcast, 52, 0..0, 0..208),
            (Collective::Barrier, 0, 0..0, 0..0),
            (Collective::ReduceScatter, 17, 0..204, 68..136),
            (Collective::AllGather, 17, 68..136, 0..204),
        ] {
            let descriptor = descriptor(collective, count);
            let layout = Layout::new(&descriptor, &cut, 7);
            assert_eq!((layout.first(), layout.end()), (7, 7), "{collective}");
            assert_eq!(layout.small_source(1), source, "{collective}");
            assert_eq!(layout.small_target(1), target, "{collective}");
            if collective != Collective::Barrier {
                // The root of the others is rank 2.
                let longer = Layout::new(&Descriptor { count: count + 1, ..descriptor }, &cut, 7);
                assert_ne!(longer.end(), 7, "{collective}");
                assert_eq!((longer.small_source(2), longer.small_target(2)), (0..0, 0..0));
                assert_ne!(layout.small_source(2), 0..0);
                assert_ne!(layout.small_target(2), 0..0);
            }
        }
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
        // A host with ranks 0 and 2 has both parts where they are in the whole vector.
        let ranks: Ranks = [0, 2].into_iter().collect();
        let sources = [0, 1, 2, 4, 5].map(|it| gather.source_offset_of(it, &ranks));
        assert_eq!(sources, [Some(0), Some(16), None, Some(40), Some(56)]);
        let targets = [0, 2, 3, 5].map(|it| scatter.target_offset_of(it, &ranks));
        assert_eq!(targets, [Some(0), None, None, Some(56)]);
        for layout in [gather, scatter, layout(Collective::Broadcast, 20, 3)] {
            for ranks in [&ranks, &[0, 1].into_iter().collect(), &[1].into_iter().collect()] {
                for segment in layout.first()..layout.end() {
                    let has = |&it: &u64| layout.source_offset_of(it, ranks).is_some();
                    let next = (segment..layout.end()).find(has).unwrap_or(layout.end());
                    assert_eq!(layout.next_source_of(segment, ranks), next, "{layout:?} {ranks:?}");
                }
            }
        }
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
