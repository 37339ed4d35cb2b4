//! Where segments are added up.
//!
//! A ring of N slots; segment `s` lives in slot `s mod N`. Segment numbers have 64 bits and never
//! wrap, and every slot is tagged with the one that it holds, so a contribution can never land in
//! another lap (a number taken from the 24-bit PSN would: 2^24 is no multiple of N).
//!
//! A slot goes through: free, then one or more children have contributed (the first copies, later
//! ones combine), then all have and it holds the result, then all have the result and it is free.

use thiserror::Error;

use crate::reduce::Kernel;

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
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Contribution {
    /// The child's message has more packets to come.
    Partial,
    /// The child has contributed; others have not.
    Child,
    /// All have: the slot holds the result.
    Complete,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    segment: u64,
    occupied: bool,
    length: u32,
    /// So many bytes from the start have at least one contribution. Every child's packets come in
    /// order, so what has none is always the rest.
    filled: u32,
    contributed: ChildSet,
    acknowledged: ChildSet,
}

#[derive(Debug)]
pub(crate) struct Slots {
    bytes: Box<[u8]>,
    slots: Box<[Slot]>,
    slot_bytes: u32,
    everyone: ChildSet,
    occupied: u32,
}

impl Slots {
    /// A ring of `count` slots of `slot_bytes` bytes for so many children.
    pub(crate) fn new(count: u32, slot_bytes: u32, children: usize) -> Self {
        Self {
            bytes: vec![0; count as usize * slot_bytes as usize].into(),
            slots: vec![Slot::default(); count as usize].into(),
            slot_bytes,
            everyone: all_children(children),
            occupied: 0,
        }
    }

    /// How many slots hold a segment.
    pub(crate) fn occupied(&self) -> u32 {
        self.occupied
    }

    fn index(&self, segment: u64) -> usize {
        (segment % self.slots.len() as u64) as usize
    }

    /// Where the bytes of a segment start.
    pub(crate) fn offset(&self, segment: u64) -> u64 {
        self.index(segment) as u64 * u64::from(self.slot_bytes)
    }

    fn find(&mut self, segment: u64) -> Result<(&mut Slot, &mut [u8]), SlotError> {
        let index = self.index(segment);
        let slot = &mut self.slots[index];
        if !slot.occupied || slot.segment != segment {
            return Err(SlotError::Absent);
        }
        let start = index * self.slot_bytes as usize;
        let end = start + slot.length as usize;
        Ok((slot, &mut self.bytes[start..end]))
    }

    /// Takes a slot for the segment, or finds that it has one with the same length.
    pub(crate) fn open(&mut self, segment: u64, length: u32) -> Result<(), SlotError> {
        let index = self.index(segment);
        let slot = &mut self.slots[index];
        if !slot.occupied {
            if length > self.slot_bytes {
                return Err(SlotError::Length);
            }
            *slot = Slot { segment, occupied: true, length, ..Slot::default() };
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

    /// Takes a packet of a child's message, `offset` bytes from its start. What others have sent
    /// already is combined, what nobody has is copied. The last packet makes the contribution
    /// count.
    pub(crate) fn contribute(
        &mut self,
        segment: u64,
        child: usize,
        offset: u32,
        payload: &[u8],
        kernel: Kernel,
    ) -> Result<Contribution, SlotError> {
        let everyone = self.everyone;
        let (slot, bytes) = self.find(segment)?;
        let bit = 1 << child;
        if slot.contributed & bit != 0 {
            return Err(SlotError::Repeated);
        }
        let start = offset as usize;
        let end = start + payload.len();
        if end > bytes.len() {
            return Err(SlotError::Length);
        }
        let filled = slot.filled as usize;
        let (known, new) = payload.split_at(filled.saturating_sub(start).min(payload.len()));
        kernel(&mut bytes[start..start + known.len()], known);
        bytes[start + known.len()..end].copy_from_slice(new);
        slot.filled = filled.max(end) as u32;
        if end < bytes.len() {
            return Ok(Contribution::Partial);
        }
        slot.contributed |= bit;
        let complete = slot.contributed == everyone;
        Ok(if complete { Contribution::Complete } else { Contribution::Child })
    }

    /// How long the segment is, once it is complete.
    pub(crate) fn result_length(&self, segment: u64) -> Result<u32, SlotError> {
        let slot = &self.slots[self.index(segment)];
        if !slot.occupied || slot.segment != segment {
            return Err(SlotError::Absent);
        }
        if slot.contributed != self.everyone {
            return Err(SlotError::Incomplete);
        }
        Ok(slot.length)
    }

    /// A child has the result. Frees the slot when it is the last one.
    pub(crate) fn acknowledge(&mut self, segment: u64, child: usize) -> Result<(), SlotError> {
        let everyone = self.everyone;
        let (slot, _) = self.find(segment)?;
        if slot.contributed != everyone {
            return Err(SlotError::Incomplete);
        }
        slot.acknowledged |= 1 << child;
        if slot.acknowledged == everyone {
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
    use crate::{DataType, ReduceOperation, reduce};

    fn sum() -> Kernel {
        reduce::kernel(DataType::UInt8, ReduceOperation::Sum).unwrap()
    }

    #[test]
    fn sets_of_children() {
        assert_eq!(all_children(0), 0);
        assert_eq!(all_children(1), 1);
        assert_eq!(all_children(3), 7);
        assert_eq!(all_children(64), u64::MAX);
    }

    #[test]
    fn first_copies_later_combine_whatever_the_interleaving() {
        let mut slots = Slots::new(2, 8, 3);
        // What an earlier lap left behind must not show.
        slots.open(1, 8).unwrap();
        slots.contribute(1, 0, 0, &[9; 8], sum()).unwrap();
        let mut slots = Slots { slots: vec![Slot::default(); 2].into(), occupied: 0, ..slots };

        slots.open(3, 8).unwrap();
        // Child 1 overtakes child 0 within the segment.
        let steps: [(usize, u32, &[u8], Contribution); 5] = [
            (0, 0, &[1; 4], Contribution::Partial),
            (1, 0, &[2; 8], Contribution::Child),
            (0, 4, &[1; 4], Contribution::Child),
            (2, 0, &[4; 4], Contribution::Partial),
            (2, 4, &[4; 4], Contribution::Complete),
        ];
        for (child, offset, payload, outcome) in steps {
            assert_eq!(slots.result_length(3), Err(SlotError::Incomplete));
            assert_eq!(slots.contribute(3, child, offset, payload, sum()), Ok(outcome));
        }
        assert_eq!(slots.result_length(3), Ok(8));
        assert_eq!(slots.get(slots.offset(3), 8).unwrap(), [7; 8]);
    }

    #[test]
    fn a_slot_is_free_only_when_every_child_has_the_result() {
        let mut slots = Slots::new(2, 4, 2);
        slots.open(0, 4).unwrap();
        slots.open(1, 4).unwrap();
        assert_eq!(slots.open(2, 4), Err(SlotError::Busy));
        slots.contribute(0, 0, 0, &[1; 4], sum()).unwrap();
        assert_eq!(slots.acknowledge(0, 0), Err(SlotError::Incomplete));
        slots.contribute(0, 1, 0, &[1; 4], sum()).unwrap();
        slots.acknowledge(0, 1).unwrap();
        slots.acknowledge(0, 1).unwrap();
        assert_eq!(slots.open(2, 4), Err(SlotError::Busy));
        assert_eq!(slots.occupied(), 2);
        slots.acknowledge(0, 0).unwrap();
        assert_eq!(slots.occupied(), 1);
        assert_eq!(slots.acknowledge(0, 0), Err(SlotError::Absent));
        slots.open(2, 4).unwrap();
        assert_eq!(slots.contribute(0, 0, 0, &[1; 4], sum()), Err(SlotError::Absent));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut slots = Slots::new(2, 4, 2);
        assert_eq!(slots.open(0, 5), Err(SlotError::Length));
        slots.open(0, 3).unwrap();
        assert_eq!(slots.open(0, 4), Err(SlotError::Length));
        assert_eq!(slots.open(0, 3), Ok(()));
        assert_eq!(slots.contribute(0, 0, 0, &[1; 4], sum()), Err(SlotError::Length));
        assert_eq!(slots.contribute(0, 0, 2, &[1; 2], sum()), Err(SlotError::Length));
        slots.contribute(0, 0, 0, &[1; 3], sum()).unwrap();
        assert_eq!(slots.contribute(0, 0, 0, &[1; 3], sum()), Err(SlotError::Repeated));
        assert_eq!(slots.contribute(2, 0, 0, &[1; 3], sum()), Err(SlotError::Absent));
        assert_eq!(slots.get(8, 1), None);
        assert_eq!(slots.get(u64::MAX, 1), None);
    }

    #[test]
    fn numbers_beyond_32_bits_keep_their_laps_apart() {
        let mut slots = Slots::new(6, 4, 1);
        for segment in (1 << 40) - 7..(1_u64 << 40) + 7 {
            slots.open(segment, 4).unwrap();
            slots.contribute(segment, 0, 0, &[segment as u8; 4], sum()).unwrap();
            assert_eq!(slots.result_length(segment - 6), Err(SlotError::Absent));
            slots.acknowledge(segment, 0).unwrap();
        }
        assert_eq!(slots.occupied(), 0);
    }
}
