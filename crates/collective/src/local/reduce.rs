//! What all ranks contribute, combined a block at a time.

use std::num::NonZeroU32;

use millstream_inc::Kernel;

/// Bytes of elements that are combined at a time. With their accumulators they fit a processor's L1.
const BLOCK: usize = 8 << 10;

/// The largest element, and the largest accumulator for an element of its size.
const WIDEST: usize = 2;

/// Memory of this process for a block. Contributions are copied here before they are looked at, since other processes
/// may change what is shared at any time.
#[derive(Debug)]
pub(super) struct Blocks {
    element: Box<[u8]>,
    accumulator: Box<[u8]>,
    /// Results are combined with those of other hosts: an average is divided there.
    are_parts: bool,
}

impl Blocks {
    pub(super) fn new(are_parts: bool) -> Self {
        let bytes = |count: usize| vec![0; count].into_boxed_slice();
        Self { element: bytes(BLOCK), accumulator: bytes(BLOCK * WIDEST), are_parts }
    }

    /// Combines so many bytes of each rank, in the order of the ranks: `load` copies those of a rank, from an offset on,
    /// and `store` takes the result of an offset.
    pub(super) fn combine(
        &mut self,
        kernel: &Kernel,
        ranks: NonZeroU32,
        length: usize,
        load: impl Fn(u32, usize, &mut [u8]),
        store: impl Fn(usize, &[u8]),
    ) {
        let (wire, accumulator) = (kernel.wire_size(), kernel.accumulator_size());
        for start in (0..length).step_by(BLOCK) {
            let bytes = BLOCK.min(length - start);
            let element = &mut self.element[..bytes];
            let sum = &mut self.accumulator[..bytes / wire * accumulator];
            for rank in 0..ranks.get() {
                match rank {
                    // Accumulators begin as the elements are.
                    0 if wire == accumulator => load(0, start, &mut sum[..bytes]),
                    0 => {
                        load(0, start, element);
                        kernel.first(sum, element);
                    }
                    rank => {
                        load(rank, start, element);
                        kernel.combine(sum, element);
                    }
                }
            }
            let length = kernel.finish(sum, Some(ranks).filter(|_| !self.are_parts));
            store(start, &sum[..length]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use millstream_inc::{DataType, ReduceOperation};

    use super::*;

    #[test]
    fn blocks_of_any_length_are_combined_in_the_order_of_the_ranks() {
        let mut blocks = Blocks::new(false);
        let ranks = NonZeroU32::new(3).unwrap();
        for elements in [0, 1, 2047, 2048, 2049, 5000_usize] {
            let kernel = Kernel::of(DataType::Float32, ReduceOperation::Sum).unwrap();
            let value = |rank: u32, index: usize| match (rank, index % 2) {
                // In another order the sum is another one.
                (0, _) => 1e8_f32,
                (1, 0) => -1e8,
                (_, _) => 3.0 + index as f32,
            };
            let result = RefCell::new(vec![0_u8; 4 * elements]);
            let load = |rank: u32, start: usize, bytes: &mut [u8]| {
                for (at, bytes) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    *bytes = value(rank, start / 4 + at).to_le_bytes();
                }
            };
            let store = |start: usize, bytes: &[u8]| {
                result.borrow_mut()[start..start + bytes.len()].copy_from_slice(bytes);
            };
            blocks.combine(&kernel, ranks, 4 * elements, load, store);
            let result = result.into_inner();
            for (index, bytes) in result.as_chunks::<4>().0.iter().enumerate() {
                let wanted = value(0, index) + value(1, index) + value(2, index);
                assert_eq!(f32::from_le_bytes(*bytes), wanted, "{index} of {elements}");
            }
        }
    }

    #[test]
    fn what_is_combined_with_other_hosts_is_not_divided() {
        let mut blocks = Blocks::new(true);
        let kernel = Kernel::of(DataType::Int32, ReduceOperation::Average).unwrap();
        let load = |_: u32, _: usize, bytes: &mut [u8]| bytes.copy_from_slice(&5_i32.to_le_bytes());
        let store = |_: usize, bytes: &[u8]| assert_eq!(bytes, 15_i32.to_le_bytes());
        blocks.combine(&kernel, NonZeroU32::new(3).unwrap(), 4, load, store);
    }

    #[test]
    fn halves_are_rounded_once() {
        let mut blocks = Blocks::new(false);
        let kernel = Kernel::of(DataType::Float16, ReduceOperation::Average).unwrap();
        // 60,000: the sum of two is beyond fp16, and the average is not.
        let load = |_: u32, _: usize, bytes: &mut [u8]| {
            bytes
                .as_chunks_mut::<2>()
                .0
                .iter_mut()
                .for_each(|bytes| *bytes = 0x7b53_u16.to_le_bytes());
        };
        let store = |_: usize, bytes: &[u8]| {
            assert!(
                bytes.as_chunks::<2>().0.iter().all(|bytes| *bytes == 0x7b53_u16.to_le_bytes())
            );
        };
        blocks.combine(&kernel, NonZeroU32::new(2).unwrap(), 10_000, load, store);
    }
}
