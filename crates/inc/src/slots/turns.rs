//! Contributions whose turn has not come.
//!
//! Where a result depends on the order in which contributions are combined, each place of a segment takes them in the
//! order of children. What of a child's bytes others before it have not sent yet is held. A child is within its
//! window: it has the answers to all segments up to a window before the one that it sends, so the results of those
//! are complete, and nothing of theirs is held any more. So a window of segments for each child holds all
//! that can come, and nobody ever waits for room here.

use core::ops::Range;

use crate::kernels::Kernel;

#[derive(Debug)]
pub(super) struct Turns {
    children: usize,
    window: usize,
    slot_bytes: usize,
    /// A window of segments for each child but the first, whose turn it always is.
    held: Box<[u8]>,
    /// For each slot and child, how many bytes it has sent, from the start of the segment.
    sent: Box<[u32]>,
    /// And how many of them are combined.
    combined: Box<[u32]>,
}

/// Bytes that a node takes to hold contributions of so many children, beside its slots.
pub(crate) const fn held_bytes(children: usize, window: u32, slot_bytes: u32) -> u64 {
    let held = children.saturating_sub(1) as u64 * window as u64 * slot_bytes as u64;
    // Two numbers for each of 2 x window slots and each child.
    held + 2 * window as u64 * children as u64 * 2 * size_of::<u32>() as u64
}

impl Turns {
    /// For so many slots of so many bytes.
    pub(super) fn new(slots: usize, slot_bytes: u32, children: usize, window: u32) -> Self {
        let (window, slot_bytes) = (window as usize, slot_bytes as usize);
        let counts = || vec![0; slots * children].into();
        let held = vec![0; children.saturating_sub(1) * window * slot_bytes].into();
        Self { children, window, slot_bytes, held, sent: counts(), combined: counts() }
    }

    /// A slot is for another segment.
    pub(super) fn open(&mut self, slot: usize) {
        let counts = slot * self.children..(slot + 1) * self.children;
        self.sent[counts.clone()].fill(0);
        self.combined[counts].fill(0);
    }

    /// Where a part of a child's contribution is held.
    fn place(&self, segment: u64, child: usize, part: Range<usize>) -> Range<usize> {
        let index = (child - 1) * self.window + (segment % self.window as u64) as usize;
        let base = index * self.slot_bytes;
        base + part.start..base + part.end
    }

    /// Takes the next bytes of a child, from `offset` on, and combines all whose turn has come, of this child and
    /// those after it. They fit the slot.
    pub(super) fn take(
        &mut self,
        (slot, segment): (usize, u64),
        child: usize,
        offset: usize,
        payload: &[u8],
        kernel: &Kernel,
        accumulators: &mut [u8],
    ) {
        let times = kernel.accumulator_size() / kernel.wire_size();
        let row = slot * self.children;
        let end = offset + payload.len();
        self.sent[row + child] = end as u32;
        let Some(before) = child.checked_sub(1) else {
            kernel.first(&mut accumulators[times * offset..times * end], payload);
            self.combined[row] = end as u32;
            return self.go_on((slot, segment), 1, kernel, accumulators);
        };
        // No packet is combined in part, unless one before it ends within it.
        let turn = (self.combined[row + before] as usize).clamp(offset, end);
        let (due, early) = payload.split_at(turn - offset);
        if self.combined[row + child] as usize == offset && !due.is_empty() {
            kernel.combine(&mut accumulators[times * offset..times * turn], due);
            self.combined[row + child] = turn as u32;
            let place = self.place(segment, child, turn..end);
            self.held[place].copy_from_slice(early);
            return self.go_on((slot, segment), child + 1, kernel, accumulators);
        }
        let place = self.place(segment, child, offset..end);
        self.held[place].copy_from_slice(payload);
        self.go_on((slot, segment), child, kernel, accumulators);
    }

    /// Combines what is held of a child, and of those after it, as far as the one before each is combined.
    fn go_on(
        &mut self,
        (slot, segment): (usize, u64),
        first: usize,
        kernel: &Kernel,
        accumulators: &mut [u8],
    ) {
        let times = kernel.accumulator_size() / kernel.wire_size();
        let row = slot * self.children;
        for child in first..self.children {
            let start = self.combined[row + child] as usize;
            let end = self.combined[row + child - 1].min(self.sent[row + child]) as usize;
            if end <= start {
                // Nor is it the turn of anyone after it.
                return;
            }
            let held = &self.held[self.place(segment, child, start..end)];
            kernel.combine(&mut accumulators[times * start..times * end], held);
            self.combined[row + child] = end as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use core::num::NonZeroU32;

    use proptest::prelude::*;

    use crate::kernels::Kernel;
    use crate::slots::Slots;
    use crate::{DataType, ReduceOperation};

    const CHILDREN: usize = 4;
    const SEGMENTS: usize = 3;
    /// Of 16 bytes; the last packet of a segment is shorter.
    const PACKETS: usize = 3;
    const LENGTH: usize = 40;

    fn float32(operation: ReduceOperation) -> Kernel {
        Kernel::of(DataType::Float32, operation).unwrap()
    }

    fn contribution(child: usize, segment: usize) -> Vec<f32> {
        let at = |index: usize| {
            let number = (child * 31 + segment * 7 + index) as u32;
            f32::from_bits(0x3f00_0000 + number.wrapping_mul(0x9e37_79b9) % 0x0300_0000)
        };
        (0..LENGTH / 4).map(at).collect()
    }

    fn bytes(vector: &[f32]) -> Vec<u8> {
        vector.iter().flat_map(|element| element.to_le_bytes()).collect()
    }

    /// Contributions that arrive like this, a packet of a child at a time; the results.
    fn results(arrivals: &[usize], kernel: Kernel, in_turns: bool) -> Vec<Vec<u8>> {
        let mut slots = Slots::new(8, 48, 16, CHILDREN, NonZeroU32::new(CHILDREN as u32));
        if in_turns {
            slots.combine_in_turns(4);
        }
        let mut next = [0; CHILDREN];
        for &child in arrivals {
            let (segment, packet) = (next[child] / PACKETS, next[child] % PACKETS);
            next[child] += 1;
            slots.open(segment as u64, LENGTH as u32, 16, kernel).unwrap();
            let vector = bytes(&contribution(child, segment));
            let part = &vector[16 * packet..LENGTH.min(16 * (packet + 1))];
            slots.contribute(segment as u64, child, 16 * packet as u32, part).unwrap();
        }
        let result = |segment| slots.get(slots.offset(segment), LENGTH as u32).unwrap().to_vec();
        (0..SEGMENTS as u64).map(result).collect()
    }

    fn arrivals() -> Vec<usize> {
        (0..CHILDREN).flat_map(|child| [child; SEGMENTS * PACKETS]).collect()
    }

    proptest! {
        #[test]
        fn sums_are_those_in_the_order_of_children_whatever_the_order_of_arrival(
            arrivals in Just(arrivals()).prop_shuffle(),
        ) {
            let found = results(&arrivals, float32(ReduceOperation::Sum), true);
            for (segment, found) in found.into_iter().enumerate() {
                let mut sum = contribution(0, segment);
                for child in 1..CHILDREN {
                    let other = contribution(child, segment);
                    sum.iter_mut().zip(other).for_each(|(sum, element)| *sum += element);
                }
                prop_assert_eq!(found, bytes(&sum));
            }
        }
    }

    /// Without turns the numbers above do show the order.
    #[test]
    fn the_order_of_arrival_shows_without_turns() {
        let mut reversed = arrivals();
        reversed.reverse();
        let kernel = float32(ReduceOperation::Sum);
        let [forth, back] = [arrivals(), reversed].map(|it| results(&it, kernel, false));
        assert_ne!(forth, back);
    }

    #[test]
    fn what_does_not_depend_on_the_order_is_not_held() {
        let mut reversed = arrivals();
        reversed.reverse();
        let kernel = float32(ReduceOperation::Maximum);
        let [forth, back] = [true, false].map(|turns| results(&reversed, kernel, turns));
        assert_eq!(forth, back);
        let depends = |data_type, operation| {
            Kernel::of(data_type, operation).is_some_and(|it| it.depends_on_order())
        };
        for data_type in DataType::ALL {
            let is_float = data_type.name().contains('f');
            for operation in ReduceOperation::ALL {
                let wanted = is_float
                    && matches!(
                        operation,
                        ReduceOperation::Sum | ReduceOperation::Product | ReduceOperation::Average
                    );
                assert_eq!(depends(*data_type, *operation), wanted, "{data_type} {operation}");
            }
        }
    }

    /// Accumulators of 16-bit floats are wider than what is held.
    #[test]
    fn elements_of_16_bits_are_held_as_they_came() {
        let kernel = Kernel::of(DataType::BFloat16, ReduceOperation::Sum).unwrap();
        let of = |child: usize| [0x3f80 + child as u16, 0x4300].map(u16::to_le_bytes).concat();
        let mut results = Vec::new();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let mut slots = Slots::new(2, 8, 8, 3, NonZeroU32::new(3));
            slots.combine_in_turns(1);
            slots.open(5, 4, 8, kernel).unwrap();
            for child in order {
                slots.contribute(5, child, 0, &of(child)).unwrap();
            }
            results.push(slots.get(slots.offset(5), 4).unwrap().to_vec());
        }
        assert!(results.iter().all(|it| *it == results[0]), "{results:?}");
        assert_ne!(results[0], [0; 4]);
    }
}
