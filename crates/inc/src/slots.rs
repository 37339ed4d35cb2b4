//! Where segments are added up.
//!
//! A ring of N slots; segment `s` lives in slot `s mod N`. Segment numbers have 64 bits and never
//! wrap, and every slot is tagged with the one that it holds, so a contribution can never land in
//! another lap (a number taken from the 24-bit PSN would: 2^24 is no multiple of N).
//!
//! A slot goes through: free, then one or more children have contributed (the first copies, later
//! ones combine), then all have and it holds the result, then all have the result and it is free.
//!
//! A segment is cut into cells. Children contribute in order, so cells are complete in order, and the
//! result can be passed on cell by cell while the rest of the segment is still to come.
//!
//! Contributions are combined as they arrive. Where the ranks have asked for results that do not depend on that, those
//! that do are combined in the order of children (`turns.rs`).

mod messages;
mod turns;

use thiserror::Error;

use core::num::NonZeroU32;

use crate::kernels::Kernel;
use crate::spec::CommunicatorSpec;

use turns::Turns;
pub(crate) use turns::held_bytes;

/// A set of children: bit `c` stands for child `c`.
pub(crate) type ChildSet = u64;

/// The most children that a set holds.
pub(crate) const MAX_CHILDREN: usize = ChildSet::BITS as usize;

/// The set of the first `count` children.
pub(crate) const fn all_children(count: usize) -> ChildSet {
    if count == 0 { 0 } else { ChildSet::MAX >> (MAX_CHILDREN - count) }
}

/// Why a slot refuses.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub(crate) enum SlotError {
    #[error("the slot still holds another segment")]
    Busy,
    #[error("no slot holds this segment")]
    Absent,
    #[error("the segment has another length")]
    Length,
    #[error("this child has contributed to the segment before")]
    Repeated,
    #[error("the segment is not complete")]
    Incomplete,
}

/// What a contribution did.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Contribution {
    /// The child has sent all of the segment.
    pub(crate) whole: bool,
    /// There is more of the result than before.
    pub(crate) more: bool,
    /// All of it: every child has sent all of the segment.
    pub(crate) complete: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    segment: u64,
    occupied: bool,
    length: u32,
    /// So many bytes from the start have at least one contribution. Every child's packets come in
    /// order, so what has none is always the rest.
    filled: u32,
    cell_bytes: u32,
    /// What is computed; of a slot that was in use, always.
    kernel: Option<Kernel>,
    /// So many bytes from the start have every child's contribution: whole cells.
    complete: u32,
    /// Below the root, so many bytes of the result have come from above, from the start.
    received: u32,
    contributed: ChildSet,
    acknowledged: ChildSet,
}

#[derive(Debug)]
pub(crate) struct Slots {
    /// What is sent: results, and what goes up. Accumulators too, where these are no longer.
    bytes: Box<[u8]>,
    /// Accumulators that are twice as long, of 16-bit floats; empty until there is one.
    wide: Box<[u8]>,
    slots: Box<[Slot]>,
    /// For each cell, how many children have sent it. All slots have room for the smallest cells.
    arrived: Box<[u8]>,
    slot_bytes: u32,
    cells_per_slot: u32,
    everyone: ChildSet,
    /// At the root, where what all children have sent is the result: of how many ranks.
    root_of: Option<NonZeroU32>,
    /// Where the order of contributions is fixed.
    turns: Option<Turns>,
    occupied: u32,
}

impl Slots {
    /// Those of a node that a checked specification describes.
    pub(crate) fn of(spec: &CommunicatorSpec) -> Self {
        let root_of = NonZeroU32::new(spec.world).filter(|_| !spec.has_parent);
        let (least_cell, children) = (spec.path_mtu.bytes() as u32, spec.children.len());
        let mut slots = Self::new(spec.slots(), spec.segment_bytes, least_cell, children, root_of);
        if spec.options.reproducible {
            slots.combine_in_turns(spec.window);
        }
        slots
    }

    /// A ring of `count` slots of `slot_bytes` bytes for so many children. No cell is smaller than
    /// `least_cell`, which is not 0.
    pub(crate) fn new(
        count: u32,
        slot_bytes: u32,
        least_cell: u32,
        children: usize,
        root_of: Option<NonZeroU32>,
    ) -> Self {
        let cells_per_slot = slot_bytes.div_ceil(least_cell);
        Self {
            bytes: vec![0; count as usize * slot_bytes as usize].into(),
            slots: vec![Slot::default(); count as usize].into(),
            arrived: vec![0; count as usize * cells_per_slot as usize].into(),
            slot_bytes,
            cells_per_slot,
            everyone: all_children(children),
            root_of,
            wide: Box::default(),
            turns: None,
            occupied: 0,
        }
    }

    /// From now on, what depends on the order of contributions is combined in the order of children, each of which
    /// is at most a window ahead of the results that it has.
    pub(crate) fn combine_in_turns(&mut self, window: u32) {
        let children = self.everyone.count_ones() as usize;
        self.turns = Some(Turns::new(self.slots.len(), self.slot_bytes, children, window));
    }

    /// How many slots hold a segment.
    pub(crate) fn occupied(&self) -> u32 {
        self.occupied
    }

    /// At the root, of how many ranks.
    pub(crate) fn root_of(&self) -> Option<NonZeroU32> {
        self.root_of
    }

    fn index(&self, segment: u64) -> usize {
        (segment % self.slots.len() as u64) as usize
    }

    /// Where the bytes of a segment start.
    pub(crate) fn offset(&self, segment: u64) -> u64 {
        self.index(segment) as u64 * u64::from(self.slot_bytes)
    }

    /// The index of the slot that holds a segment.
    fn find(&self, segment: u64) -> Result<usize, SlotError> {
        let index = self.index(segment);
        let slot = &self.slots[index];
        let held = slot.occupied && slot.segment == segment;
        if held { Ok(index) } else { Err(SlotError::Absent) }
    }

    /// Takes a slot for the segment, in cells of `cell_bytes`, or finds that it has one with the same
    /// length.
    pub(crate) fn open(
        &mut self,
        segment: u64,
        length: u32,
        cell_bytes: u32,
        kernel: Kernel,
    ) -> Result<(), SlotError> {
        let index = self.index(segment);
        let slot = &mut self.slots[index];
        if !slot.occupied {
            let cells = u64::from(length).div_ceil(u64::from(cell_bytes.max(1)));
            if length > self.slot_bytes || cells > u64::from(self.cells_per_slot) {
                return Err(SlotError::Length);
            }
            let cell_bytes = cell_bytes.max(1);
            let kernel = Some(kernel);
            *slot = Slot { segment, occupied: true, length, cell_bytes, kernel, ..Slot::default() };
            let first = index * self.cells_per_slot as usize;
            self.arrived[first..first + cells as usize].fill(0);
            if let Some(turns) = &mut self.turns {
                turns.open(index);
            }
            self.occupied += 1;
            return Ok(());
        }
        if slot.segment != segment {
            return Err(SlotError::Busy);
        }
        if slot.length != length {
            return Err(SlotError::Length);
        }
        Ok(())
    }

    /// Takes a packet of a child's message, `offset` bytes from its start. Each child's packets come in
    /// order. What others have sent already is combined, what nobody has is copied.
    pub(crate) fn contribute(
        &mut self,
        segment: u64,
        child: usize,
        offset: u32,
        payload: &[u8],
    ) -> Result<Contribution, SlotError> {
        self.accumulate(segment, child, offset, payload)?;
        let end = offset + payload.len() as u32;
        self.arrived(self.index(segment), child, offset, end)
    }

    /// As above, and nothing is counted.
    pub(crate) fn accumulate(
        &mut self,
        segment: u64,
        child: usize,
        offset: u32,
        payload: &[u8],
    ) -> Result<(), SlotError> {
        let index = self.find(segment)?;
        let slot = &mut self.slots[index];
        let bit = 1 << child;
        if slot.contributed & bit != 0 {
            return Err(SlotError::Repeated);
        }
        let (start, end) = (offset as usize, offset as usize + payload.len());
        if end > slot.length as usize {
            return Err(SlotError::Length);
        }
        let Some(kernel) = slot.kernel else { return Err(SlotError::Absent) };
        // An accumulator has as many bytes as an element, or twice as many.
        let times = kernel.accumulator_size() / kernel.wire_size();
        let ring_bytes = times * self.slots.len() * self.slot_bytes as usize;
        let slot = &mut self.slots[index];
        let ring = if times == 1 { &mut self.bytes } else { &mut self.wide };
        if ring.is_empty() {
            *ring = vec![0; ring_bytes].into();
        }
        let base = times * index * self.slot_bytes as usize;
        let accumulators = &mut ring[base..base + times * slot.length as usize];
        if let Some(turns) = self.turns.as_mut().filter(|_| kernel.depends_on_order()) {
            turns.take((index, segment), child, start, payload, &kernel, accumulators);
        } else {
            let filled = slot.filled as usize;
            let (known, new) = payload.split_at(filled.saturating_sub(start).min(payload.len()));
            let border = start + known.len();
            kernel.combine(&mut accumulators[times * start..times * border], known);
            kernel.first(&mut accumulators[times * border..times * end], new);
            slot.filled = filled.max(end) as u32;
        }
        Ok(())
    }

    /// A child has nothing to add to a segment.
    pub(crate) fn contribute_nothing(
        &mut self,
        segment: u64,
        child: usize,
    ) -> Result<Contribution, SlotError> {
        let index = self.find(segment)?;
        let slot = &self.slots[index];
        if slot.contributed & 1 << child != 0 {
            return Err(SlotError::Repeated);
        }
        self.arrived(index, child, 0, slot.length)
    }

    /// Counts what has come of a child, from `start` to `end`.
    fn arrived(
        &mut self,
        index: usize,
        child: usize,
        start: u32,
        end: u32,
    ) -> Result<Contribution, SlotError> {
        let slot = &mut self.slots[index];
        let whole = end == slot.length;
        if whole {
            slot.contributed |= 1 << child;
        }
        let before = slot.complete;
        // The last cell may be shorter than the others.
        let cells = if whole { end.div_ceil(slot.cell_bytes) } else { end / slot.cell_bytes };
        let first = index * self.cells_per_slot as usize;
        let everyone = self.everyone.count_ones() as u8;
        for cell in start / slot.cell_bytes..cells {
            let arrived = &mut self.arrived[first + cell as usize];
            *arrived += 1;
            if *arrived == everyone {
                slot.complete = ((cell + 1) * slot.cell_bytes).min(slot.length);
            }
        }
        let (after, complete) = (slot.complete, slot.contributed == self.everyone);
        if after > before {
            self.finish(index, before as usize, after as usize);
        }
        let slot = &self.slots[index];
        debug_assert_eq!(complete, slot.complete == slot.length && slot.length > 0);
        Ok(Contribution { whole, more: after > before, complete })
    }

    /// All children have sent these bytes of a slot: they become what is sent.
    fn finish(&mut self, index: usize, start: usize, end: usize) {
        let Some(kernel) = self.slots[index].kernel else { return };
        let times = kernel.accumulator_size() / kernel.wire_size();
        let base = index * self.slot_bytes as usize;
        let bytes = &mut self.bytes[base + start..base + end];
        if times == 1 {
            kernel.finish(bytes, self.root_of);
        } else {
            let wide = &mut self.wide[times * (base + start)..times * (base + end)];
            let length = kernel.finish(wide, self.root_of);
            bytes[..length].copy_from_slice(&wide[..length]);
        }
    }

    /// How much of the segment all children have sent, from its start, and how long it is.
    pub(crate) fn contributions(&self, segment: u64) -> Result<(u32, u32), SlotError> {
        let slot = &self.slots[self.find(segment)?];
        Ok((slot.complete, slot.length))
    }

    /// Takes the next bytes of the result from the node above, `offset` bytes from the segment's start:
    /// they replace what was sent there. Whether there is a cell more of it.
    pub(crate) fn receive(
        &mut self,
        segment: u64,
        offset: u32,
        payload: &[u8],
    ) -> Result<bool, SlotError> {
        let index = self.find(segment)?;
        let slot = &mut self.slots[index];
        let (start, end) = (offset as usize, offset as usize + payload.len());
        if self.root_of.is_some() || offset != slot.received || end > slot.complete as usize {
            return Err(SlotError::Incomplete);
        }
        let base = index * self.slot_bytes as usize;
        self.bytes[base + start..base + end].copy_from_slice(payload);
        slot.received = end as u32;
        Ok(slot.received == slot.length
            || slot.received / slot.cell_bytes > offset / slot.cell_bytes)
    }

    /// The segment has a result above, but there is nothing of it for this node.
    pub(crate) fn receive_nothing(&mut self, segment: u64) -> Result<(), SlotError> {
        let index = self.find(segment)?;
        let slot = &mut self.slots[index];
        if self.root_of.is_some() || slot.received != 0 || slot.complete != slot.length {
            return Err(SlotError::Incomplete);
        }
        slot.received = slot.length;
        Ok(())
    }

    /// How much of the segment's result there is, from its start, in whole cells, and how long it will be.
    pub(crate) fn result(&self, segment: u64) -> Result<(u32, u32), SlotError> {
        let slot = &self.slots[self.find(segment)?];
        let Slot { complete, received, cell_bytes, length, .. } = *slot;
        let result = match self.root_of.is_some() {
            true => complete,
            false if received == length => received,
            false => received / cell_bytes * cell_bytes,
        };
        Ok((result, length))
    }

    /// A child has the result. Frees the slot when it is the last one.
    pub(crate) fn acknowledge(&mut self, segment: u64, child: usize) -> Result<(), SlotError> {
        let index = self.find(segment)?;
        let slot = &mut self.slots[index];
        let result = if self.root_of.is_some() { slot.complete } else { slot.received };
        if slot.contributed != self.everyone || result != slot.length {
            return Err(SlotError::Incomplete);
        }
        slot.acknowledged |= 1 << child;
        if slot.acknowledged == self.everyone {
            slot.occupied = false;
            self.occupied -= 1;
        }
        Ok(())
    }

    /// Bytes of the ring.
    pub(crate) fn get(&self, offset: u64, length: u32) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.bytes.get(start..start.checked_add(length as usize)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataType, ReduceOperation};

    fn sum() -> Kernel {
        Kernel::of(DataType::UInt8, ReduceOperation::Sum).unwrap()
    }

    #[test]
    fn sets_of_children() {
        assert_eq!(all_children(0), 0);
        assert_eq!(all_children(1), 1);
        assert_eq!(all_children(3), 7);
        assert_eq!(all_children(64), u64::MAX);
    }

    /// What a contribution is to have done.
    fn did(whole: bool, more: bool, complete: bool) -> Contribution {
        Contribution { whole, more, complete }
    }

    #[test]
    fn first_copies_later_combine_whatever_the_interleaving() {
        let mut slots = Slots::new(2, 8, 8, 3, NonZeroU32::new(1));
        // What an earlier lap left behind must not show.
        slots.open(1, 8, 8, sum()).unwrap();
        slots.contribute(1, 0, 0, &[9; 8]).unwrap();
        let mut slots = Slots { slots: vec![Slot::default(); 2].into(), occupied: 0, ..slots };

        slots.open(3, 8, 8, sum()).unwrap();
        // Child 1 overtakes child 0 within the segment.
        let steps: [(usize, u32, &[u8], Contribution); 5] = [
            (0, 0, &[1; 4], did(false, false, false)),
            (1, 0, &[2; 8], did(true, false, false)),
            (0, 4, &[1; 4], did(true, false, false)),
            (2, 0, &[4; 4], did(false, false, false)),
            (2, 4, &[4; 4], did(true, true, true)),
        ];
        for (child, offset, payload, outcome) in steps {
            assert_eq!(slots.result(3), Ok((0, 8)));
            assert_eq!(slots.contribute(3, child, offset, payload), Ok(outcome));
        }
        assert_eq!(slots.result(3), Ok((8, 8)));
        assert_eq!(slots.get(slots.offset(3), 8).unwrap(), [7; 8]);
    }

    #[test]
    fn there_is_a_cell_of_the_result_as_soon_as_every_child_has_sent_it() {
        let mut slots = Slots::new(2, 16, 4, 2, NonZeroU32::new(1));
        // Twice the same slot: what was counted before is forgotten.
        for segment in [1, 3] {
            slots.open(segment, 14, 4, sum()).unwrap();
            let mut result = 0;
            for (child, offset, length, wanted) in [
                (0, 0, 3, 0),
                // The rest of the first cell, the second, and a part of the third.
                (0, 3, 6, 0),
                (1, 0, 4, 4),
                (1, 4, 3, 4),
                (1, 7, 2, 8),
                (0, 9, 5, 8),
                (1, 9, 3, 12),
                // The last cell is a short one.
                (1, 12, 2, 14),
            ] {
                let payload = vec![1; length];
                let done = slots.contribute(segment, child, offset, &payload).unwrap();
                assert_eq!(slots.result(segment), Ok((wanted, 14)));
                assert_eq!(done.more, wanted > result);
                assert_eq!(done.complete, wanted == 14);
                result = wanted;
            }
            assert_eq!(slots.get(slots.offset(segment), 14).unwrap(), [2; 14]);
            (0..2).for_each(|child| slots.acknowledge(segment, child).unwrap());
        }
        // More cells than a slot has room for.
        assert_eq!(slots.open(5, 16, 3, sum()), Err(SlotError::Length));
        assert_eq!(slots.open(5, 16, 0, sum()), Err(SlotError::Length));
        assert_eq!(slots.open(5, 12, 3, sum()), Ok(()));
    }

    #[test]
    fn a_slot_is_free_only_when_every_child_has_the_result() {
        let mut slots = Slots::new(2, 4, 4, 2, NonZeroU32::new(1));
        slots.open(0, 4, 4, sum()).unwrap();
        slots.open(1, 4, 4, sum()).unwrap();
        assert_eq!(slots.open(2, 4, 4, sum()), Err(SlotError::Busy));
        slots.contribute(0, 0, 0, &[1; 4]).unwrap();
        assert_eq!(slots.acknowledge(0, 0), Err(SlotError::Incomplete));
        slots.contribute(0, 1, 0, &[1; 4]).unwrap();
        slots.acknowledge(0, 1).unwrap();
        slots.acknowledge(0, 1).unwrap();
        assert_eq!(slots.open(2, 4, 4, sum()), Err(SlotError::Busy));
        assert_eq!(slots.occupied(), 2);
        slots.acknowledge(0, 0).unwrap();
        assert_eq!(slots.occupied(), 1);
        assert_eq!(slots.acknowledge(0, 0), Err(SlotError::Absent));
        slots.open(2, 4, 4, sum()).unwrap();
        assert_eq!(slots.contribute(0, 0, 0, &[1; 4]), Err(SlotError::Absent));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut slots = Slots::new(2, 4, 4, 2, NonZeroU32::new(1));
        assert_eq!(slots.open(0, 5, 4, sum()), Err(SlotError::Length));
        slots.open(0, 3, 4, sum()).unwrap();
        assert_eq!(slots.open(0, 4, 4, sum()), Err(SlotError::Length));
        assert_eq!(slots.open(0, 3, 4, sum()), Ok(()));
        assert_eq!(slots.contribute(0, 0, 0, &[1; 4]), Err(SlotError::Length));
        assert_eq!(slots.contribute(0, 0, 2, &[1; 2]), Err(SlotError::Length));
        slots.contribute(0, 0, 0, &[1; 3]).unwrap();
        assert_eq!(slots.contribute(0, 0, 0, &[1; 3]), Err(SlotError::Repeated));
        assert_eq!(slots.contribute(2, 0, 0, &[1; 3]), Err(SlotError::Absent));
        assert_eq!(slots.get(8, 1), None);
        assert_eq!(slots.get(u64::MAX, 1), None);
    }

    #[test]
    fn below_the_root_the_result_is_what_comes_from_above_by_cells() {
        let mut slots = Slots::new(2, 16, 4, 2, None);
        slots.open(0, 14, 4, sum()).unwrap();
        slots.contribute(0, 0, 0, &[1; 14]).unwrap();
        slots.contribute(0, 1, 0, &[1; 8]).unwrap();
        assert_eq!((slots.contributions(0), slots.result(0)), (Ok((8, 14)), Ok((0, 14))));
        // Of what not all have sent there is no result, and none has a gap.
        for (offset, length) in [(0, 9), (1, 1), (4, 4)] {
            let received = slots.receive(0, offset, &[7; 14][..length]);
            assert_eq!(received, Err(SlotError::Incomplete), "{length} bytes at {offset}");
        }
        slots.contribute(0, 1, 8, &[1; 6]).unwrap();
        assert_eq!(slots.acknowledge(0, 0), Err(SlotError::Incomplete));
        let mut offset = 0;
        for (length, more, result) in [
            (3, false, 0),
            (1, true, 4),
            (1, false, 4),
            (2, false, 4),
            (6, true, 12),
            (1, true, 14),
        ] {
            let received = slots.receive(0, offset, &[7; 14][..length]);
            assert_eq!((received, slots.result(0)), (Ok(more), Ok((result, 14))), "at {offset}");
            // Nor is a result empty that has begun.
            assert_eq!(slots.receive_nothing(0), Err(SlotError::Incomplete));
            offset += length as u32;
            if offset == 13 {
                assert_eq!(slots.receive(0, 13, &[7; 2]), Err(SlotError::Incomplete));
                assert_eq!(slots.acknowledge(0, 0), Err(SlotError::Incomplete));
            }
        }
        assert_eq!(slots.get(slots.offset(0), 14).unwrap(), [7; 14]);
        (0..2).for_each(|child| slots.acknowledge(0, child).unwrap());
        assert_eq!(slots.occupied(), 0);
    }

    #[test]
    fn who_has_nothing_says_so_once_and_an_empty_result_comes_only_from_above() {
        for root_of in [None, NonZeroU32::new(3)] {
            let mut slots = Slots::new(2, 8, 4, 3, root_of);
            slots.open(0, 8, 4, sum()).unwrap();
            for child in 0..3 {
                assert_eq!(slots.receive_nothing(0), Err(SlotError::Incomplete));
                let last = child == 2;
                assert_eq!(slots.contribute_nothing(0, child), Ok(did(true, last, last)));
                assert_eq!(slots.contribute_nothing(0, child), Err(SlotError::Repeated));
                assert_eq!(slots.contribute(0, child, 0, &[1]), Err(SlotError::Repeated));
            }
            match root_of {
                None => {
                    assert_eq!(slots.result(0), Ok((0, 8)));
                    assert_eq!(slots.receive_nothing(0), Ok(()));
                    assert_eq!(slots.receive_nothing(0), Err(SlotError::Incomplete));
                }
                // Nobody is above.
                Some(_) => {
                    assert_eq!(slots.receive_nothing(0), Err(SlotError::Incomplete));
                    assert_eq!(slots.receive(0, 0, &[1]), Err(SlotError::Incomplete));
                }
            }
            assert_eq!(slots.result(0), Ok((8, 8)));
        }
    }

    #[test]
    fn numbers_beyond_32_bits_keep_their_laps_apart() {
        let mut slots = Slots::new(6, 4, 4, 1, NonZeroU32::new(1));
        for segment in (1 << 40) - 7..(1_u64 << 40) + 7 {
            slots.open(segment, 4, 4, sum()).unwrap();
            slots.contribute(segment, 0, 0, &[segment as u8; 4]).unwrap();
            assert_eq!(slots.result(segment - 6), Err(SlotError::Absent));
            slots.acknowledge(segment, 0).unwrap();
        }
        assert_eq!(slots.occupied(), 0);
    }
}
