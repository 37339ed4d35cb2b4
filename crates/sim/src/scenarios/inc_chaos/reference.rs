//! What a collective's result must be, computed in another way than a switch computes it: elements are
//! numbers, combined one by one along the tree, in wide arithmetic.
//!
//! Sums and products of floats depend on the order. The numbers that are drawn for them are such that each
//! partial result of a switch is exact in 32 bits, so that only its rounding to 16 bits, which is once for
//! each switch, can be seen.

use millstream_inc::{DataType, ReduceOperation};

use super::tree::{Child, Tree};
use crate::Rng;

/// An element.
#[derive(Clone, Copy, Debug)]
enum Number {
    Integer(i128),
    Float(f64),
}

/// Integers have this many bits, and a sign or none.
const fn integer(data_type: DataType) -> Option<(u32, bool)> {
    Some(match data_type {
        DataType::Int8 => (8, true),
        DataType::UInt8 => (8, false),
        DataType::Int16 => (16, true),
        DataType::UInt16 => (16, false),
        DataType::Int32 => (32, true),
        DataType::UInt32 => (32, false),
        DataType::Int64 => (64, true),
        DataType::UInt64 => (64, false),
        _ => return None,
    })
}

/// Wraps to so many bits.
const fn wrap(value: i128, bits: u32, signed: bool) -> i128 {
    let low = value & ((1 << bits) - 1);
    if signed && low >> (bits - 1) != 0 { low - (1 << bits) } else { low }
}

/// Bits of the fraction and least exponent of a normal number, of a 16-bit float.
const fn half(data_type: DataType) -> Option<(i32, i32)> {
    match data_type {
        DataType::Float16 => Some((10, -14)),
        DataType::BFloat16 => Some((7, -126)),
        _ => None,
    }
}

/// Rounds to a 16-bit float: to nearest, ties to even.
fn round(value: f64, data_type: DataType) -> f64 {
    let Some((fraction, least)) = half(data_type) else { return value };
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let exponent = ((value.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least);
    let quantum = 2_f64.powi(exponent - fraction);
    let rounded = (value / quantum).round_ties_even() * quantum;
    let limit = 2_f64.powi(2 - least);
    if rounded.abs() >= limit { f64::INFINITY.copysign(value) } else { rounded }
}

fn decode(bytes: &[u8], data_type: DataType) -> Number {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    let word = u64::from_le_bytes(word);
    if let Some((bits, signed)) = integer(data_type) {
        return Number::Integer(wrap(word.into(), bits, signed));
    }
    let Some((fraction, least)) = half(data_type) else {
        let single = data_type == DataType::Float32;
        let value = if single { f32::from_bits(word as u32).into() } else { f64::from_bits(word) };
        return Number::Float(value);
    };
    let magnitude = word & 0x7fff;
    let (exponent, part) = ((magnitude >> fraction) as i32, magnitude & ((1 << fraction) - 1));
    let all_ones = 0x7fff_i32 >> fraction;
    let value = if exponent == all_ones {
        if part == 0 { f64::INFINITY } else { f64::NAN }
    } else if exponent == 0 {
        part as f64 * 2_f64.powi(least - fraction)
    } else {
        (part + (1 << fraction)) as f64 * 2_f64.powi(exponent - 1 + least - fraction)
    };
    Number::Float(if word & 0x8000 != 0 { -value } else { value })
}

/// A NaN becomes the positive quiet one without payload.
fn encode(number: Number, data_type: DataType) -> u64 {
    let value = match number {
        Number::Integer(value) => return value as u64,
        Number::Float(value) => value,
    };
    if data_type == DataType::Float64 {
        return if value.is_nan() { 0x7ff8 << 48 } else { value.to_bits() };
    }
    let Some((fraction, least)) = half(data_type) else {
        return if value.is_nan() { 0x7fc0_0000 } else { (value as f32).to_bits().into() };
    };
    let all_ones = 0x7fff_u64 >> fraction << fraction;
    if value.is_nan() {
        return all_ones | 1 << (fraction - 1);
    }
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let value = round(value, data_type).abs();
    if value.is_infinite() {
        return sign | all_ones;
    }
    // The exponent of the least normal number, and of what is below it, is that of 1 unit.
    let exponent = ((value.to_bits() >> 52) as i32 - 1023).max(least);
    let units = (value / 2_f64.powi(exponent - fraction)) as u64;
    sign | ((((exponent - least) as u64) << fraction) + units)
}

/// IEEE 754-2019, 9.6: a NaN wins, and -0 is less than +0.
fn least(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else if a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

fn combine(a: Number, b: Number, data_type: DataType, operation: ReduceOperation) -> Number {
    use ReduceOperation as Op;
    match (a, b, integer(data_type)) {
        (Number::Integer(a), Number::Integer(b), Some((bits, signed))) => {
            let result = match operation {
                Op::Sum | Op::Average => a + b,
                Op::Product => a.wrapping_mul(b),
                Op::Minimum => a.min(b),
                Op::Maximum => a.max(b),
                Op::BitAnd => a & b,
                Op::BitOr => a | b,
                Op::BitXor => a ^ b,
            };
            Number::Integer(wrap(result, bits, signed))
        }
        (Number::Float(a), Number::Float(b), _) => Number::Float(match operation {
            Op::Product => a * b,
            Op::Minimum => least(a, b),
            Op::Maximum => -least(-a, -b),
            _ => a + b,
        }),
        _ => a,
    }
}

/// What the ranks below a node come to, rounded as it sends it up; at the root, before an average is divided.
fn partial(
    tree: &Tree,
    node: usize,
    of_rank: &dyn Fn(u32) -> Number,
    data_type: DataType,
    operation: ReduceOperation,
) -> Number {
    let children = tree.children(node).map(|child| match child {
        Child::Rank(rank) => of_rank(rank),
        Child::Node(below) => match partial(tree, below, of_rank, data_type, operation) {
            Number::Float(value) => Number::Float(round(value, data_type)),
            number => number,
        },
    });
    let all = children.reduce(|a, b| combine(a, b, data_type, operation));
    all.unwrap_or(Number::Integer(0))
}

/// An average from the sum of all.
fn divide(number: Number, data_type: DataType, world: u32) -> Number {
    match number {
        Number::Integer(sum) => Number::Integer(sum / i128::from(world)),
        Number::Float(sum) if data_type == DataType::Float64 => {
            Number::Float(sum / f64::from(world))
        }
        Number::Float(sum) => Number::Float((sum as f32 / world as f32).into()),
    }
}

/// The vectors of all ranks combined along a tree.
pub(super) fn reduce(
    tree: &Tree,
    data_type: DataType,
    operation: ReduceOperation,
    sources: &[Vec<u8>],
) -> Vec<u8> {
    let size = data_type.size() as usize;
    let length = sources.first().map_or(0, Vec::len);
    let mut result = Vec::with_capacity(length);
    for start in (0..length).step_by(size) {
        let of_rank = |rank: u32| decode(&sources[rank as usize][start..start + size], data_type);
        let mut number = partial(tree, 0, &of_rank, data_type, operation);
        if operation == ReduceOperation::Average {
            number = divide(number, data_type, sources.len() as u32);
        }
        result.extend_from_slice(&encode(number, data_type).to_le_bytes()[..size]);
    }
    result
}

/// Fills a rank's vector with elements that have one result.
pub(super) fn draw(
    rng: &mut Rng,
    data_type: DataType,
    operation: ReduceOperation,
    bytes: &mut [u8],
) {
    use ReduceOperation as Op;
    if integer(data_type).is_some() {
        return rng.fill(bytes);
    }
    for element in bytes.chunks_exact_mut(data_type.size() as usize) {
        let value = match operation {
            Op::Minimum | Op::Maximum => match rng.below(16) {
                0 => 0.0,
                1 => -0.0,
                2 => f64::INFINITY,
                3 => f64::NEG_INFINITY,
                4 => f64::NAN,
                // The least of each type, and less than those of 16 bits have.
                5 => -2_f64.powi(-(rng.between(120, 149) as i32)),
                6 => 2_f64.powi(-(rng.between(14, 24) as i32)),
                _ => (rng.bits() as i32) as f64 / 65_536.0,
            },
            Op::Product => {
                let power = rng.below(6) as i32 - 2;
                2_f64.powi(power) * if rng.below(2) == 0 { 1.0 } else { -1.0 }
            }
            _ => match rng.below(64) {
                0 => f64::NAN,
                1 => f64::INFINITY,
                2 => -0.0,
                // Sums of 16 bits need rounding, and those of fp16 may overflow.
                3..6 => rng.between(0, 60_000) as f64,
                6..40 => (rng.below(4095) as f64) - 2047.0,
                _ => (rng.below(256) as f64) - 127.0,
            },
        };
        let word = encode(Number::Float(value), data_type).to_le_bytes();
        element.copy_from_slice(&word[..element.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_are_rounded_to_nearest_even() {
        let encoded = |value, data_type| encode(Number::Float(value), data_type);
        for (value, fp16, bf16) in [
            (0.0, 0, 0),
            (-0.0, 0x8000, 0x8000),
            (1.0, 0x3c00, 0x3f80),
            (-2.0, 0xc000, 0xc000),
            (2049.0, 0x6800, 0x4500),
            (2051.0, 0x6802, 0x4500),
            (65_504.0, 0x7bff, 0x4780),
            (65_520.0, 0x7c00, 0x4780),
            (5.960_464_477_539_063e-8, 1, 0x3380),
            (6.103_515_625e-5, 0x0400, 0x3880),
            (f64::INFINITY, 0x7c00, 0x7f80),
            (f64::NAN, 0x7e00, 0x7fc0),
        ] {
            assert_eq!(encoded(value, DataType::Float16), fp16, "{value}");
            assert_eq!(encoded(value, DataType::BFloat16), bf16, "{value}");
        }
    }

    #[test]
    fn what_is_decoded_is_encoded_again() {
        for data_type in [DataType::Float16, DataType::BFloat16] {
            for word in 0..=u16::MAX {
                let number = decode(&word.to_le_bytes(), data_type);
                if matches!(number, Number::Float(value) if !value.is_nan()) {
                    assert_eq!(encode(number, data_type), u64::from(word), "{data_type}");
                }
            }
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!((wrap(128, 8, true), wrap(-1, 8, false), wrap(-129, 8, true)), (-128, 255, 127));
        assert_eq!(wrap(1 << 63, 64, true), i128::from(i64::MIN));
    }
}
