//! What vectors are filled with, and what results must be.

use std::fmt::Display;

use millstream_collective::{BFloat16, Call, Element, Float16, ReduceOperation};

/// An element that results can be computed of.
///
/// Integers are of any bits, so that sums and products wrap. Floats are small integers of which every sum
/// and product is exact in every type, in whatever order and on however many switches it is computed.
pub(crate) trait Number: Element + PartialEq + Display {
    /// What nobody contributes and no result is, where that can be.
    const FILLER: Self;

    /// From any bits, for a rank.
    fn new(bits: u64, rank: u32, operation: ReduceOperation) -> Self;

    /// One of the two, or what they are together. A sum, for an average.
    fn combine(self, other: Self, operation: ReduceOperation) -> Self;

    /// A sum divided by the number of ranks.
    fn divide(self, world: u32) -> Self;
}

macro_rules! integers {
    ($($integer:ty)+) => {$(
        impl Number for $integer {
            const FILLER: Self = Self::MAX / 3;

            fn new(bits: u64, _rank: u32, _operation: ReduceOperation) -> Self {
                bits as Self
            }

            fn combine(self, other: Self, operation: ReduceOperation) -> Self {
                match operation {
                    ReduceOperation::Sum | ReduceOperation::Average => self.wrapping_add(other),
                    ReduceOperation::Product => self.wrapping_mul(other),
                    ReduceOperation::Minimum => self.min(other),
                    ReduceOperation::Maximum => self.max(other),
                    ReduceOperation::BitAnd => self & other,
                    ReduceOperation::BitOr => self | other,
                    ReduceOperation::BitXor => self ^ other,
                }
            }

            fn divide(self, world: u32) -> Self {
                // The world may be more than the type can hold.
                (i128::from(self) / i128::from(world)) as Self
            }
        }
    )+};
}

integers! { i8 u8 i16 u16 i32 u32 i64 u64 }

/// A small integer: of 64 ranks every sum is at most 256, and every product 2^8 at most, which bf16 holds.
fn small(bits: u64, rank: u32, operation: ReduceOperation) -> i8 {
    match operation {
        ReduceOperation::Product => {
            let magnitude = if rank.is_multiple_of(8) { 2 } else { 1 };
            if bits & 1 == 0 { magnitude } else { -magnitude }
        }
        _ => (bits % 9) as i8 - 4,
    }
}

macro_rules! floats {
    ($($float:ty: $wide:ty, $from:expr, $to:expr;)+) => {$(
        impl Number for $float {
            const FILLER: Self = $from(300.0);

            fn new(bits: u64, rank: u32, operation: ReduceOperation) -> Self {
                $from(small(bits, rank, operation).into())
            }

            fn combine(self, other: Self, operation: ReduceOperation) -> Self {
                let (a, b): ($wide, $wide) = ($to(self), $to(other));
                $from(match operation {
                    ReduceOperation::Sum | ReduceOperation::Average => a + b,
                    ReduceOperation::Product => a * b,
                    ReduceOperation::Minimum => a.min(b),
                    ReduceOperation::Maximum => a.max(b),
                    // Refused before anything is computed.
                    ReduceOperation::BitAnd | ReduceOperation::BitOr | ReduceOperation::BitXor => <$wide>::NAN,
                })
            }

            fn divide(self, world: u32) -> Self {
                $from($to(self) / world as $wide)
            }
        }
    )+};
}

floats! {
    f32: f32, std::convert::identity, std::convert::identity;
    f64: f64, std::convert::identity, std::convert::identity;
    Float16: f32, Float16::from_f32, Float16::to_f32;
    BFloat16: f32, BFloat16::from_f32, BFloat16::to_f32;
}

/// The function of elements of this type.
macro_rules! of_type {
    ($data_type:expr, $function:ident) => {{
        use millstream_collective::{BFloat16, DataType, Float16};
        match $data_type {
            DataType::Int8 => $function::<i8>,
            DataType::UInt8 => $function::<u8>,
            DataType::Int16 => $function::<i16>,
            DataType::UInt16 => $function::<u16>,
            DataType::Int32 => $function::<i32>,
            DataType::UInt32 => $function::<u32>,
            DataType::Int64 => $function::<i64>,
            DataType::UInt64 => $function::<u64>,
            DataType::Float16 => $function::<Float16>,
            DataType::BFloat16 => $function::<BFloat16>,
            DataType::Float32 => $function::<f32>,
            DataType::Float64 => $function::<f64>,
        }
    }};
}

pub(crate) use of_type;

/// The vectors of all ranks of a call, and its results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reference {
    pub(crate) call: Call,
    pub(crate) world: u32,
    /// As in the table of [`Call`].
    pub(crate) count: usize,
    /// Every iteration has other vectors.
    pub(crate) iteration: u32,
}

impl Reference {
    /// What a rank contributes at a place of its source.
    pub(crate) fn source<T: Number>(&self, rank: u32, index: usize) -> T {
        let whose = (u64::from(self.iteration) << 32) | u64::from(rank);
        let place = (index as u64) ^ whose.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (place ^ (place >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let operation = self.call.operation().unwrap_or(ReduceOperation::Sum);
        // The upper half of a product is the better mixed one.
        T::new(mixed ^ (mixed >> 32), rank, operation)
    }

    /// What the result of a rank must be there, if it gets one.
    pub(crate) fn result<T: Number>(&self, rank: u32, index: usize) -> T {
        match self.call {
            Call::AllReduce(operation) | Call::Reduce { operation, .. } => {
                self.reduction(index, operation)
            }
            Call::ReduceScatter(operation) => {
                self.reduction(self.count * rank as usize + index, operation)
            }
            Call::Broadcast { root } => self.source(root, index),
            Call::AllGather => self.source((index / self.count) as u32, index % self.count),
            Call::Barrier => T::FILLER,
        }
    }

    /// What all ranks contribute at a place, combined.
    pub(crate) fn reduction<T: Number>(&self, index: usize, operation: ReduceOperation) -> T {
        let others = (1..self.world).map(|rank| self.source(rank, index));
        let combined = others.fold(self.source(0, index), |a: T, b| a.combine(b, operation));
        match operation {
            ReduceOperation::Average => combined.divide(self.world),
            _ => combined,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(call: Call, world: u32) -> Reference {
        Reference { call, world, count: 10, iteration: 0 }
    }

    const SUM: Call = Call::AllReduce(ReduceOperation::Sum);

    #[test]
    fn elements_differ_and_sums_wrap() {
        let of = |iteration| Reference { iteration, ..reference(SUM, 4) };
        let mut seen: Vec<i32> = (0..64).map(|rank| of(0).source(rank, 5)).collect();
        seen.extend((1..64).map(|iteration| of(iteration).source::<i32>(0, 5)));
        seen.extend((6..64).map(|index| of(0).source::<i32>(0, index)));
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert!(count - seen.len() < 2);
        let wraps = |index| {
            let exact: i64 = (0..4).map(|rank| i64::from(of(0).source::<i32>(rank, index))).sum();
            i64::from(of(0).result::<i32>(0, index)) != exact
        };
        assert!((0..100).any(wraps));
    }

    #[test]
    fn floats_are_exact_in_any_order() {
        for operation in [ReduceOperation::Sum, ReduceOperation::Product] {
            let reference = reference(Call::AllReduce(operation), 64);
            for index in 0..200 {
                let wide: f64 = reference.result(0, index);
                let backwards = (0..64).rev().map(|rank| reference.source::<BFloat16>(rank, index));
                let backwards = backwards.reduce(|a, b| a.combine(b, operation)).unwrap();
                assert_eq!(f64::from(backwards.to_f32()), wide);
                assert_eq!(f64::from(reference.result::<Float16>(0, index).to_f32()), wide);
                assert_ne!(backwards, BFloat16::FILLER);
            }
        }
    }

    #[test]
    fn operations_are_those_of_the_elements() {
        use ReduceOperation as O;
        for (operation, result) in [
            (O::Sum, -122),
            (O::Average, -122),
            // 2200 - 9 x 256
            (O::Product, -104),
            (O::Minimum, -100),
            (O::Maximum, -22),
            (O::BitAnd, -100 & -22),
            (O::BitOr, -100 | -22),
            (O::BitXor, -100 ^ -22),
        ] {
            assert_eq!((-100_i8).combine(-22, operation), result, "{operation}");
        }
        assert_eq!((-122_i8).divide(200), 0);
        assert_eq!((-7_i64).divide(2), -3);
        assert_eq!(u64::MAX.divide(2), u64::MAX / 2);
        assert_eq!(Float16::from_f32(1.0).divide(3), Float16::from_f32(1.0 / 3.0));
    }

    #[test]
    fn results_are_of_the_right_ranks_and_places() {
        let of = |call, rank, index| reference(call, 4).result::<i32>(rank, index);
        let from = |call, rank, index| reference(call, 4).source::<i32>(rank, index);
        let scatter = Call::ReduceScatter(ReduceOperation::Sum);
        assert_eq!(of(scatter, 2, 3), of(SUM, 0, 23));
        assert_eq!(of(Call::AllGather, 0, 23), from(Call::AllGather, 2, 3));
        let broadcast = Call::Broadcast { root: 3 };
        assert_eq!(of(broadcast, 0, 5), from(broadcast, 3, 5));
        let reduce = Call::Reduce { operation: ReduceOperation::Sum, root: 1 };
        assert_eq!(of(reduce, 1, 5), of(SUM, 0, 5));
    }
}
