//! Contributions combined into accumulators: one function for each type and operation.

use fearless_simd::Level;

use super::vectors::zip;
use crate::{DataType, ReduceOperation};

/// Changes the accumulators of a slot by the elements of a payload.
pub(super) type Function = fn(Level, &mut [u8], &[u8]);

pub(super) const fn function(data_type: DataType, operation: ReduceOperation) -> Option<Function> {
    match data_type {
        DataType::Int8 => int8::function(operation),
        DataType::UInt8 => uint8::function(operation),
        DataType::Int16 => int16::function(operation),
        DataType::UInt16 => uint16::function(operation),
        DataType::Int32 => int32::function(operation),
        DataType::UInt32 => uint32::function(operation),
        DataType::Int64 => int64::function(operation),
        DataType::UInt64 => uint64::function(operation),
        DataType::Float16 | DataType::BFloat16 => None,
        DataType::Float32 => float32::function(operation),
        DataType::Float64 => float64::function(operation),
    }
}

/// One function: `$name` applies `$operation` to elements of type `$element`.
macro_rules! function {
    ($element:ty, $name:ident, $operation:expr) => {
        fn $name(level: Level, slot: &mut [u8], payload: &[u8]) {
            zip(
                level,
                slot,
                payload,
                #[inline(always)]
                |ours, theirs| {
                    $operation(<$element>::from_le_bytes(ours), <$element>::from_le_bytes(theirs))
                        .to_le_bytes()
                },
            );
        }
    };
}

macro_rules! integers {
    ($($module:ident $element:ident;)+) => {$(
        mod $module {
            use super::{Function, Level, ReduceOperation, zip};
            use core::ops::{BitAnd, BitOr, BitXor};

            function!($element, sum, $element::wrapping_add);
            function!($element, product, $element::wrapping_mul);
            function!($element, minimum, $element::min);
            function!($element, maximum, $element::max);
            function!($element, bit_and, $element::bitand);
            function!($element, bit_or, $element::bitor);
            function!($element, bit_xor, $element::bitxor);

            pub(super) const fn function(operation: ReduceOperation) -> Option<Function> {
                Some(match operation {
                    ReduceOperation::Sum => sum,
                    ReduceOperation::Product => product,
                    ReduceOperation::Minimum => minimum,
                    ReduceOperation::Maximum => maximum,
                    ReduceOperation::BitAnd => bit_and,
                    ReduceOperation::BitOr => bit_or,
                    ReduceOperation::BitXor => bit_xor,
                    ReduceOperation::Average => return None,
                })
            }
        }
    )+};
}

macro_rules! floats {
    ($($module:ident $element:ident;)+) => {$(
        mod $module {
            use super::{Function, Level, ReduceOperation, zip};

            function!($element, sum, |a: $element, b| canonical(a + b));
            function!($element, product, |a: $element, b| canonical(a * b));
            function!($element, minimum, lesser);
            function!($element, maximum, greater);

            #[inline(always)]
            fn canonical(number: $element) -> $element {
                if number.is_nan() { $element::NAN } else { number }
            }

            // Equal numbers differ in the sign of a zero at most: the lesser has it when one of them
            // does, the greater when both do.
            #[inline(always)]
            fn lesser(a: $element, b: $element) -> $element {
                let equal = $element::from_bits(a.to_bits() | b.to_bits());
                let ordered = if a < b { a } else if b < a { b } else { equal };
                if a.is_nan() | b.is_nan() { $element::NAN } else { ordered }
            }

            #[inline(always)]
            fn greater(a: $element, b: $element) -> $element {
                let equal = $element::from_bits(a.to_bits() & b.to_bits());
                let ordered = if a > b { a } else if b > a { b } else { equal };
                if a.is_nan() | b.is_nan() { $element::NAN } else { ordered }
            }

            pub(super) const fn function(operation: ReduceOperation) -> Option<Function> {
                Some(match operation {
                    ReduceOperation::Sum => sum,
                    ReduceOperation::Product => product,
                    ReduceOperation::Minimum => minimum,
                    ReduceOperation::Maximum => maximum,
                    ReduceOperation::Average
                    | ReduceOperation::BitAnd
                    | ReduceOperation::BitOr
                    | ReduceOperation::BitXor => return None,
                })
            }
        }
    )+};
}

integers! {
    int8 i8;
    uint8 u8;
    int16 i16;
    uint16 u16;
    int32 i32;
    uint32 u32;
    int64 i64;
    uint64 u64;
}

floats! {
    float32 f32;
    float64 f64;
}
