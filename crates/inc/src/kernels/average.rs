//! The last step of an average: sums divided by the number of ranks.

use core::num::NonZeroU32;

use fearless_simd::Level;

use super::vectors::map;
use crate::DataType;

/// One function: divides accumulators of type `$element`, through `$quotient`.
macro_rules! division {
    ($level:ident $slot:ident $element:ty, $quotient:expr) => {
        map(
            $level,
            $slot,
            #[inline(always)]
            move |sum| $quotient(<$element>::from_le_bytes(sum)).to_le_bytes(),
        )
    };
}

/// Divides integers of up to 32 bits. Processors have no division of vectors of integers, but
/// multiplication.
macro_rules! divide_integers {
    ($level:ident $slot:ident $element:ty, $ranks:ident) => {{
        let reciprocal = Reciprocal::of($ranks);
        division!($level $slot $element, |sum: $element| {
            let sum = i64::from(sum);
            let quotient = reciprocal.times(sum.unsigned_abs()) as i64;
            (if sum < 0 { -quotient } else { quotient }) as $element
        });
    }};
}

/// Divides each accumulator. Quotients of integers are truncated.
pub(super) fn divide(level: Level, data_type: DataType, slot: &mut [u8], ranks: NonZeroU32) {
    let ranks = ranks.get();
    if ranks == 1 {
        return;
    }
    match data_type {
        DataType::Int8 => divide_integers!(level slot i8, ranks),
        DataType::UInt8 => divide_integers!(level slot u8, ranks),
        DataType::Int16 => divide_integers!(level slot i16, ranks),
        DataType::UInt16 => divide_integers!(level slot u16, ranks),
        DataType::Int32 => divide_integers!(level slot i32, ranks),
        DataType::UInt32 => divide_integers!(level slot u32, ranks),
        DataType::Int64 => division!(level slot i64, |sum| sum / i64::from(ranks)),
        DataType::UInt64 => division!(level slot u64, |sum| sum / u64::from(ranks)),
        DataType::Float16 | DataType::BFloat16 | DataType::Float32 => {
            // Exact up to 2^24 ranks.
            let divisor = ranks as f32;
            division!(level slot f32, |sum| {
                let quotient: f32 = sum / divisor;
                if quotient.is_nan() { f32::NAN } else { quotient }
            });
        }
        DataType::Float64 => {
            let divisor = f64::from(ranks);
            division!(level slot f64, |sum| {
                let quotient: f64 = sum / divisor;
                if quotient.is_nan() { f64::NAN } else { quotient }
            });
        }
    }
}

/// 2^64 / divisor, rounded up, in two halves.
///
/// Its product with the divisor is at least 2^64 and less than 2^64 + 2^32, so the integer part of its
/// product with any number of 32 bits is the quotient (Granlund and Montgomery, "Division by
/// invariant integers using multiplication", 1994, theorem 4.2).
#[derive(Clone, Copy)]
struct Reciprocal {
    high: u64,
    low: u64,
}

impl Reciprocal {
    /// Of a divisor that is at least 2.
    const fn of(divisor: u32) -> Self {
        let reciprocal = u64::MAX / divisor as u64 + 1;
        Self { high: reciprocal >> 32, low: reciprocal & 0xffff_ffff }
    }

    /// The integer part of the product with a number of at most 32 bits.
    #[inline(always)]
    const fn times(self, number: u64) -> u64 {
        (number * self.high + ((number * self.low) >> 32)) >> 32
    }
}
