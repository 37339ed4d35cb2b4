//! The same computations, one element at a time, as plainly as they can be written. Elements and
//! accumulators are their bits in the low end of 64.

use core::cmp::Ordering;

use crate::{DataType, ReduceOperation};

/// What a payload's element is in a slot.
pub(super) fn first(data_type: DataType, element: u64) -> u64 {
    match data_type {
        DataType::Float16 | DataType::BFloat16 => {
            let number = value_of_16_bits(data_type, element as u16);
            (number as f32).to_bits().into()
        }
        _ => element,
    }
}

/// An accumulator combined with a payload's element.
pub(super) fn combine(
    data_type: DataType,
    operation: ReduceOperation,
    accumulator: u64,
    element: u64,
) -> u64 {
    let (a, b) = (accumulator, first(data_type, element));
    match data_type {
        DataType::Float16 | DataType::BFloat16 | DataType::Float32 => {
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
                ReduceOperation::Sum | ReduceOperation::Average => a + b,
                ReduceOperation::Product => a.wrapping_mul(b),
                ReduceOperation::Minimum => a.min(b),
                ReduceOperation::Maximum => a.max(b),
                ReduceOperation::BitAnd => a & b,
                ReduceOperation::BitOr => a | b,
                ReduceOperation::BitXor => a ^ b,
            };
            wrapped(data_type, result)
        }
    }
}

/// What goes on the wire.
pub(super) fn finish(
    data_type: DataType,
    operation: ReduceOperation,
    accumulator: u64,
    ranks: Option<u32>,
) -> u64 {
    let ranks = ranks.filter(|&ranks| operation == ReduceOperation::Average && ranks > 1);
    let divided = match (data_type, ranks) {
        (_, None) => accumulator,
        (DataType::Float16 | DataType::BFloat16 | DataType::Float32, Some(ranks)) => {
            let sum = f32::from_bits(accumulator as u32);
            let quotient = (f64::from(sum) / f64::from(ranks)) as f32;
            if quotient.is_nan() { 0x7fc0_0000 } else { quotient.to_bits().into() }
        }
        (DataType::Float64, Some(ranks)) => {
            let quotient = f64::from_bits(accumulator) / f64::from(ranks);
            if quotient.is_nan() { 0x7ff8_0000_0000_0000 } else { quotient.to_bits() }
        }
        (_, Some(ranks)) => wrapped(data_type, integer(data_type, accumulator) / i128::from(ranks)),
    };
    match data_type {
        DataType::Float16 | DataType::BFloat16 => {
            narrowed(data_type, f32::from_bits(divided as u32)).into()
        }
        _ => divided,
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
        ReduceOperation::Sum | ReduceOperation::Average => a + b,
        ReduceOperation::Product => a * b,
        ReduceOperation::Minimum => negative_first(a, b)[0],
        ReduceOperation::Maximum => negative_first(a, b)[1],
        ReduceOperation::BitAnd | ReduceOperation::BitOr | ReduceOperation::BitXor => {
            unreachable!("floats have no bitwise operations")
        }
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

/// Bits of exponent and of fraction.
fn shape(data_type: DataType) -> (u32, u32) {
    match data_type {
        DataType::Float16 => (5, 10),
        DataType::BFloat16 => (8, 7),
        _ => unreachable!("only of 16-bit floats"),
    }
}

/// The number that 16 bits stand for (IEEE 754-2019, 3.4).
pub(super) fn value_of_16_bits(data_type: DataType, element: u16) -> f64 {
    let (exponent_bits, fraction_bits) = shape(data_type);
    let sign = if element >> 15 == 1 { -1.0 } else { 1.0 };
    let largest = (1_i32 << exponent_bits) - 1;
    let bias = largest >> 1;
    let exponent = i32::from(element >> fraction_bits) & largest;
    let fraction = f64::from(element & ((1 << fraction_bits) - 1));
    let fraction = fraction / f64::from(1 << fraction_bits);
    if exponent == largest {
        return if fraction == 0.0 { sign * f64::INFINITY } else { f64::NAN };
    }
    match exponent {
        0 => sign * fraction * 2.0_f64.powi(1 - bias),
        _ => sign * (1.0 + fraction) * 2.0_f64.powi(exponent - bias),
    }
}

/// The nearest 16-bit float, found by trying: of two that are as near, the even one.
pub(super) fn narrowed(data_type: DataType, number: f32) -> u16 {
    let (_, fraction_bits) = shape(data_type);
    let infinity = 0x7fff >> fraction_bits << fraction_bits;
    if number.is_nan() {
        return infinity | 1 << (fraction_bits - 1);
    }
    let sign = u16::from(number.is_sign_negative()) << 15;
    let number = f64::from(number).abs();
    // Numbers without sign are in the order of their bits. What follows the largest one would be
    // finite if the exponent had more bits: what is at least as near to it, is infinity.
    let value = |bits: u16| match bits == infinity {
        true => 2.0 * value_of_16_bits(data_type, infinity - (1 << fraction_bits)),
        false => value_of_16_bits(data_type, bits),
    };
    let (mut below, mut above) = (0, infinity);
    if number >= value(infinity) {
        return sign | infinity;
    }
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        match value(middle) <= number {
            true => below = middle,
            false => above = middle,
        }
    }
    let (down, up) = (number - value(below), value(above) - number);
    let nearest = match down.total_cmp(&up) {
        Ordering::Less => below,
        Ordering::Greater => above,
        Ordering::Equal => below + (below & 1),
    };
    sign | nearest
}
