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
        DataType::Float16 => binary16::function(operation),
        DataType::BFloat16 => bfloat16::function(operation),
        DataType::Float32 => float32::function(operation),
        DataType::Float64 => float64::function(operation),
    }
}

/// One function: `$name` applies `$operation` to accumulators and elements, both of them `$slot`
/// once `$widen` has made that of what is `$wire` in the payload.
macro_rules! function {
    ($slot:ty, $wire:ty, $widen:expr, $name:ident, $operation:expr) => {
        fn $name(level: Level, slot: &mut [u8], payload: &[u8]) {
            zip(
                level,
                slot,
                payload,
                #[inline(always)]
                |ours, theirs| {
                    let theirs = $widen(<$wire>::from_le_bytes(theirs));
                    $operation(<$slot>::from_le_bytes(ours), theirs).to_le_bytes()
                },
            );
        }
    };
}

macro_rules! integers {
    ($($module:ident $element:ident;)+) => {$(
        mod $module {
            use super::{Function, Level, ReduceOperation, zip};
            use core::convert::identity;
            use core::ops::{BitAnd, BitOr, BitXor};

            function!($element, $element, identity, sum, $element::wrapping_add);
            function!($element, $element, identity, product, $element::wrapping_mul);
            function!($element, $element, identity, minimum, $element::min);
            function!($element, $element, identity, maximum, $element::max);
            function!($element, $element, identity, bit_and, $element::bitand);
            function!($element, $element, identity, bit_or, $element::bitor);
            function!($element, $element, identity, bit_xor, $element::bitxor);

            pub(super) const fn function(operation: ReduceOperation) -> Option<Function> {
                Some(match operation {
                    ReduceOperation::Sum | ReduceOperation::Average => sum,
                    ReduceOperation::Product => product,
                    ReduceOperation::Minimum => minimum,
                    ReduceOperation::Maximum => maximum,
                    ReduceOperation::BitAnd => bit_and,
                    ReduceOperation::BitOr => bit_or,
                    ReduceOperation::BitXor => bit_xor,
                })
            }
        }
    )+};
}

macro_rules! floats {
    ($($module:ident $slot:ident $wire:ident $widen:path;)+) => {$(
        mod $module {
            use super::{Function, Level, ReduceOperation, zip};

            function!($slot, $wire, $widen, sum, |a: $slot, b| canonical(a + b));
            function!($slot, $wire, $widen, product, |a: $slot, b| canonical(a * b));
            function!($slot, $wire, $widen, minimum, lesser);
            function!($slot, $wire, $widen, maximum, greater);

            #[inline(always)]
            fn canonical(number: $slot) -> $slot {
                if number.is_nan() { $slot::NAN } else { number }
            }

            // Equal numbers differ in the sign of a zero at most: the lesser has it when one of them
            // does, the greater when both do.
            #[inline(always)]
            fn lesser(a: $slot, b: $slot) -> $slot {
                let equal = $slot::from_bits(a.to_bits() | b.to_bits());
                let ordered = if a < b { a } else if b < a { b } else { equal };
                if a.is_nan() | b.is_nan() { $slot::NAN } else { ordered }
            }

            #[inline(always)]
            fn greater(a: $slot, b: $slot) -> $slot {
                let equal = $slot::from_bits(a.to_bits() & b.to_bits());
                let ordered = if a > b { a } else if b > a { b } else { equal };
                if a.is_nan() | b.is_nan() { $slot::NAN } else { ordered }
            }

            pub(super) const fn function(operation: ReduceOperation) -> Option<Function> {
                Some(match operation {
                    ReduceOperation::Sum | ReduceOperation::Average => sum,
                    ReduceOperation::Product => product,
                    ReduceOperation::Minimum => minimum,
                    ReduceOperation::Maximum => maximum,
                    ReduceOperation::BitAnd
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
    binary16 f32 u16 super::super::float16::from_binary16;
    bfloat16 f32 u16 super::super::float16::from_bfloat16;
    float32 f32 f32 core::convert::identity;
    float64 f64 f64 core::convert::identity;
}
