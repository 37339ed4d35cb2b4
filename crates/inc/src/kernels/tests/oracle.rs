//! The same computations, one element at a time, as plainly as they can be written. Elements and
//! accumulators are their bits in the low end of 64.

use core::cmp::Ordering;

use crate::{DataType, ReduceOperation};

/// An accumulator combined with a payload's element.
pub(super) fn combine(
    data_type: DataType,
    operation: ReduceOperation,
    accumulator: u64,
    element: u64,
) -> u64 {
    let (a, b) = (accumulator, element);
    match data_type {
        DataType::Float32 => {
            let (a, b) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
            // Sums and products of two binary32 that are computed as binary64 and rounded again
            // are those that are rounded once.
            let result = float(operation, a.into(), b.into()) as f32;
            if result.is_nan() { 0x7fc0_0000 } else { result.to_bits().into() }
        }
        DataType::Float64 => {
            let result = float(operation, f64::from_bits(a), f64::from_bits(b));
            if result.is_nan() { 0x7ff8_0000_0000_0000 } else { result.to_bits() }
        }
        _ => {
            let (a, b) = (integer(data_type, a), integer(data_type, b));
            let result = match operation {
                ReduceOperation::Sum => a + b,
                ReduceOperation::Product => a.wrapping_mul(b),
                ReduceOperation::Minimum => a.min(b),
                ReduceOperation::Maximum => a.max(b),
                ReduceOperation::BitAnd => a & b,
                ReduceOperation::BitOr => a | b,
                ReduceOperation::BitXor => a ^ b,
                ReduceOperation::Average => unreachable!("no average has a kernel"),
            };
            wrapped(data_type, result)
        }
    }
}

fn float(operation: ReduceOperation, a: f64, b: f64) -> f64 {
    let negative_first = |a: f64, b: f64| match a.partial_cmp(&b) {
        None => [f64::NAN; 2],
        Some(Ordering::Less) => [a, b],
        Some(Ordering::Greater) => [b, a],
        Some(Ordering::Equal) if a.is_sign_negative() => [a, b],
        Some(Ordering::Equal) => [b, a],
    };
    match operation {
        ReduceOperation::Sum => a + b,
        ReduceOperation::Product => a * b,
        ReduceOperation::Minimum => negative_first(a, b)[0],
        ReduceOperation::Maximum => negative_first(a, b)[1],
        _ => unreachable!("not of floats"),
    }
}

fn bits(data_type: DataType) -> u32 {
    8 * data_type.size()
}

fn is_signed(data_type: DataType) -> bool {
    use DataType::{Int8, Int16, Int32, Int64};
    matches!(data_type, Int8 | Int16 | Int32 | Int64)
}

fn integer(data_type: DataType, element: u64) -> i128 {
    let element = i128::from(element);
    let half = 1 << (bits(data_type) - 1);
    if is_signed(data_type) && element >= half { element - 2 * half } else { element }
}

fn wrapped(data_type: DataType, result: i128) -> u64 {
    result.rem_euclid(1 << bits(data_type)) as u64
}
