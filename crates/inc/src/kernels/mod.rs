//! What a switch computes: the contributions of one call, combined element by element.
//!
//! A [`Kernel`] is chosen once a call. It has plain functions over bytes: a slot holds what has been
//! combined so far, as accumulators, and a payload brings elements as they are on the wire. Both are
//! little-endian and need not be aligned. Accumulators of 16-bit floats are 32-bit floats, so that
//! a switch rounds once, when it has all; all others are as on the wire.
//!
//! Results have the same bits on every machine and at every level of vector instructions:
//!
//! - Integers wrap.
//! - A NaN that is computed is the positive quiet one without payload, whatever NaNs went in. `+`
//!   and `*` alone would give one of the operands' or the processor's own. Only a NaN of 32 or 64
//!   bits that is a lone contribution's goes on as it is.
//! - `Minimum` and `Maximum` give a NaN when there is one among the contributions, and -0 is less
//!   than +0 (IEEE 754-2019, 9.6: minimum and maximum). So they do not depend on the order.
//! - A partial sum of an average is a plain sum. Only the root divides, by the number of ranks:
//!   floats before they are rounded to 16 bits, integers toward zero, after the sum has wrapped.
//! - Sums and products of floats do depend on the order of contributions.

mod average;
mod combine;
mod float16;
#[cfg(test)]
mod tests;
mod vectors;

use core::num::NonZeroU32;

use fearless_simd::Level;

use crate::{DataType, ReduceOperation};

use combine::Function;

/// What a switch does with the contributions of one call.
///
/// Vectors of different lengths are combined as far as both reach, and only whole elements are.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    data_type: DataType,
    operation: ReduceOperation,
    level: Level,
    /// Makes accumulators of elements.
    widen: Function,
    /// Combines elements into accumulators.
    combine: Function,
}

impl Kernel {
    /// The kernel for this type and operation, for the processor that this runs on. `None` for the
    /// bitwise operations on floats.
    pub fn of(data_type: DataType, operation: ReduceOperation) -> Option<Self> {
        Self::at_level(data_type, operation, Level::new())
    }

    /// One that takes any bytes as they are, for what is not combined.
    pub(crate) fn of_bytes() -> Self {
        let level = Level::new();
        let copy: Function = |_, slot: &mut [u8], payload: &[u8]| slot.copy_from_slice(payload);
        let operation = ReduceOperation::BitOr;
        Self { data_type: DataType::UInt8, operation, level, widen: copy, combine: |_, _, _| {} }
    }

    fn at_level(data_type: DataType, operation: ReduceOperation, level: Level) -> Option<Self> {
        let combine = combine::function(data_type, operation)?;
        let widen = match data_type {
            DataType::Float16 => float16::widen_binary16,
            DataType::BFloat16 => float16::widen_bfloat16,
            _ => |_, slot: &mut [u8], payload: &[u8]| slot.copy_from_slice(payload),
        };
        Some(Self { data_type, operation, level, widen, combine })
    }

    /// Whether the result depends on the order of contributions.
    pub(crate) const fn depends_on_order(&self) -> bool {
        use DataType::{BFloat16, Float16, Float32, Float64};
        use ReduceOperation::{Average, Product, Sum};
        matches!(self.data_type, Float16 | BFloat16 | Float32 | Float64)
            && matches!(self.operation, Sum | Product | Average)
    }

    /// Bytes of one element on the wire.
    pub const fn wire_size(&self) -> usize {
        self.data_type.size() as usize
    }

    /// Bytes of one element in a slot.
    pub const fn accumulator_size(&self) -> usize {
        match self.data_type {
            DataType::Float16 | DataType::BFloat16 => size_of::<f32>(),
            _ => self.wire_size(),
        }
    }

    /// Starts accumulators with the first contribution.
    pub fn first(&self, slot: &mut [u8], payload: &[u8]) {
        let elements = (slot.len() / self.accumulator_size()).min(payload.len() / self.wire_size());
        let slot = &mut slot[..elements * self.accumulator_size()];
        (self.widen)(self.level, slot, &payload[..elements * self.wire_size()]);
    }

    /// Combines a later contribution into the accumulators.
    pub fn combine(&self, slot: &mut [u8], payload: &[u8]) {
        (self.combine)(self.level, slot, payload);
    }

    /// Turns accumulators into what goes on the wire, which is at the front of the slot then.
    /// Returns how many bytes that is.
    ///
    /// Once a result: accumulators cannot be combined with more afterwards. The root of an average
    /// says of how many ranks; for all other operations that has no effect.
    pub fn finish(&self, slot: &mut [u8], ranks: Option<NonZeroU32>) -> usize {
        if let (ReduceOperation::Average, Some(ranks)) = (self.operation, ranks) {
            average::divide(self.level, self.data_type, slot, ranks);
        }
        match self.data_type {
            DataType::Float16 => float16::narrow_binary16(self.level, slot),
            DataType::BFloat16 => float16::narrow_bfloat16(self.level, slot),
            _ => {}
        }
        slot.len() / self.accumulator_size() * self.wire_size()
    }
}
