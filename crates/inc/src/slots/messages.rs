//! Segments whose length is that of a message: known when the first contribution is whole, and the same of all.

use super::{Contribution, SlotError, Slots};
use crate::kernels::Kernel;

impl Slots {
    /// Takes a slot for the segment, or finds that it has one.
    pub(crate) fn open_message(&mut self, segment: u64, kernel: Kernel) -> Result<(), SlotError> {
        if self.find(segment).is_ok() {
            return Ok(());
        }
        // As long as there is room, and one cell, since the result is sent whole.
        self.open(segment, self.slot_bytes, self.slot_bytes, kernel)
    }

    /// All of a child's message has come, which has so many bytes, not 0. What others have sent beyond it stays behind
    /// the end of the result, which there is not before they have ended: then they find that theirs are longer.
    pub(crate) fn end_message(
        &mut self,
        segment: u64,
        child: usize,
        length: u32,
    ) -> Result<Contribution, SlotError> {
        let index = self.find(segment)?;
        let slot = &mut self.slots[index];
        if slot.contributed & 1 << child != 0 {
            return Err(SlotError::Repeated);
        }
        let fits = match slot.contributed {
            0 => length <= slot.length,
            _ => slot.length == length,
        };
        if !fits {
            return Err(SlotError::Length);
        }
        slot.length = length;
        self.arrived(index, child, 0, length)
    }
}

#[cfg(test)]
mod tests {
    use core::num::NonZeroU32;

    use super::*;
    use crate::{DataType, ReduceOperation};

    fn slots() -> Slots {
        let mut slots = Slots::new(2, 16, 4, 3, NonZeroU32::new(3));
        slots.open_message(1, kernel()).unwrap();
        slots
    }

    fn kernel() -> Kernel {
        Kernel::of(DataType::UInt8, ReduceOperation::Sum).unwrap()
    }

    #[test]
    fn who_has_sent_more_than_the_first_that_is_whole_cannot_end() {
        let mut slots = slots();
        for (child, length) in [(0, 8), (1, 4), (2, 4)] {
            slots.accumulate(1, child, 0, &[1; 8][..length]).unwrap();
        }
        for child in [1, 2] {
            assert!(slots.end_message(1, child, 4).is_ok_and(|it| it.whole && !it.more));
        }
        assert_eq!(slots.result(1), Ok((0, 4)));
        assert_eq!(slots.accumulate(1, 0, 8, &[1; 4]), Err(SlotError::Length));
        assert_eq!(slots.end_message(1, 0, 12), Err(SlotError::Length));
    }

    #[test]
    fn a_message_is_as_long_as_the_first_that_is_whole() {
        let mut slots = slots();
        for (child, offset, length) in [(1, 0, 8), (0, 0, 4), (2, 0, 8), (0, 4, 4)] {
            slots.open_message(1, kernel()).unwrap();
            slots.accumulate(1, child, offset, &[1; 8][..length]).unwrap();
        }
        assert_eq!(slots.result(1), Ok((0, 16)));
        assert!(slots.end_message(1, 1, 8).is_ok_and(|it| it.whole && !it.more));
        assert_eq!(slots.end_message(1, 1, 8), Err(SlotError::Repeated));
        assert_eq!(slots.end_message(1, 2, 12), Err(SlotError::Length));
        assert_eq!(slots.accumulate(1, 2, 8, &[1; 4]), Err(SlotError::Length));
        assert!(slots.end_message(1, 2, 8).is_ok_and(|it| !it.complete));
        assert_eq!(slots.result(1), Ok((0, 8)), "one is still to come");
        assert!(slots.end_message(1, 0, 8).is_ok_and(|it| it.complete && it.more));
        assert_eq!(slots.result(1), Ok((8, 8)));
        (0..3).for_each(|child| slots.acknowledge(1, child).unwrap());
        assert_eq!(slots.occupied(), 0);
    }
}
