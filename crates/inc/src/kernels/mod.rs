//! What a switch computes: the contributions of one call, combined element by element.
//!
//! A [`Kernel`] is chosen once a call. It has plain functions over bytes: a slot holds what has been
//! combined so far, as accumulators, and a payload brings elements as they are on the wire. Both are
//! little-endian and need not be aligned.
//!
//! Results have the same bits on every machine and at every level of vector instructions:
//!
//! - Integers wrap.
//! - A NaN that is computed is the positive quiet one without payload, whatever NaNs went in. `+`
//!   and `*` alone would give one of the operands' or the processor's own. Only a NaN of 32 or 64
//!   bits that is a lone contribution's goes on as it is.
//! - `Minimum` and `Maximum` give a NaN when there is one among the contributions, and -0 is less
//!   than +0 (IEEE 754-2019, 9.6: minimum and maximum). So they do not depend on the order.
//! - Sums and products of floats do depend on the order of contributions.

mod combine;
#[cfg(test)]
mod tests;
mod vectors;

use fearless_simd::Level;

use crate::{DataType, ReduceOperation};

use combine::Function;

/// What a switch does with the contributions of one call.
///
/// Vectors of different lengths are combined as far as both reach, and only whole elements are.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    data_type: DataType,
    #[cfg_attr(not(test), expect(dead_code, reason = "only averages have a last step"))]
    operation: ReduceOperation,
    level: Level,
    /// Combines elements into accumulators.
    combine: Function,
}

impl Kernel {
    /// The kernel for this type and operation, for the processor that this runs on. `None` for
    /// averages, 16-bit floats and for the bitwise operations on floats.
    pub fn of(data_type: DataType, operation: ReduceOperation) -> Option<Self> {
        Self::at_level(data_type, operation, Level::new())
    }

    fn at_level(data_type: DataType, operation: ReduceOperation, level: Level) -> Option<Self> {
        let combine = combine::function(data_type, operation)?;
        Some(Self { data_type, operation, level, combine })
    }

    /// Bytes of one element, on the wire and in a slot.
    const fn size(&self) -> usize {
        self.data_type.size() as usize
    }

    /// Starts accumulators with the first contribution.
    pub fn first(&self, slot: &mut [u8], payload: &[u8]) {
        let length = slot.len().min(payload.len());
        let whole = length - length % self.size();
        slot[..whole].copy_from_slice(&payload[..whole]);
    }

    /// Combines a later contribution into the accumulators.
    pub fn combine(&self, slot: &mut [u8], payload: &[u8]) {
        (self.combine)(self.level, slot, payload);
    }
}
