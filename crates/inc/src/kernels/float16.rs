//! The two 16-bit floats: IEEE 754 binary16, and bfloat16, which is the upper half of a binary32.
//!
//! Every one of them is exactly a binary32; the other way rounds to the nearest, ties to even. The
//! arithmetic has selections in place of branches.

use fearless_simd::Level;

use super::vectors::zip;

/// Bytes of the accumulators that are narrowed at a time.
const BLOCK: usize = 256;

pub(super) fn widen_binary16(level: Level, slot: &mut [u8], payload: &[u8]) {
    zip(
        level,
        slot,
        payload,
        #[inline(always)]
        |_, theirs| from_binary16(u16::from_le_bytes(theirs)).to_le_bytes(),
    );
}

pub(super) fn widen_bfloat16(level: Level, slot: &mut [u8], payload: &[u8]) {
    zip(
        level,
        slot,
        payload,
        #[inline(always)]
        |_, theirs| from_bfloat16(u16::from_le_bytes(theirs)).to_le_bytes(),
    );
}

pub(super) fn narrow_binary16(level: Level, slot: &mut [u8]) {
    narrow(slot, |narrowed, accumulators| {
        zip(
            level,
            narrowed,
            accumulators,
            #[inline(always)]
            |_, accumulator| to_binary16(f32::from_le_bytes(accumulator)).to_le_bytes(),
        );
    });
}

pub(super) fn narrow_bfloat16(level: Level, slot: &mut [u8]) {
    narrow(slot, |narrowed, accumulators| {
        zip(
            level,
            narrowed,
            accumulators,
            #[inline(always)]
            |_, accumulator| to_bfloat16(f32::from_le_bytes(accumulator)).to_le_bytes(),
        );
    });
}

/// Narrows accumulators where they lie, to the front of the slot. A block is copied out of the way
/// first, since the results lie over it.
fn narrow(slot: &mut [u8], narrow: impl Fn(&mut [u8], &[u8])) {
    let mut accumulators = [0; BLOCK];
    let (mut from, mut to) = (0, 0);
    while from < slot.len() {
        let length = accumulators.len().min(slot.len() - from);
        let block = &mut accumulators[..length];
        block.copy_from_slice(&slot[from..from + length]);
        narrow(&mut slot[to..to + length / 2], block);
        from += length;
        to += length / 2;
    }
}

#[inline(always)]
pub(super) fn from_bfloat16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
fn to_bfloat16(number: f32) -> u16 {
    let bits = number.to_bits();
    // Half of the last place, and less by one where the last place is even: ties fall to even.
    // What overflows carries into the exponent, and from the largest exponent to infinity.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    if number.is_nan() { 0x7fc0 } else { (rounded >> 16) as u16 }
}

/// Exponent bits of a binary32 with this value of its exponent.
const fn exponent(value: i32) -> u32 {
    ((value + 127) as u32) << 23
}

#[inline(always)]
pub(super) fn from_binary16(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let sign = (bits & 0x8000) << 16;
    let magnitude = (bits & 0x7fff) << 13;
    // The exponent's bias is 15 in the one and 127 in the other.
    let normal = magnitude + ((127 - 15) << 23);
    // Of infinities and NaNs the exponent is the largest in both.
    let special = normal + ((127 - 15) << 23);
    // A subnormal has no leading one. Put it behind one, and take that away: the difference is
    // exact, and no operand of it is a subnormal binary32, which processors are slow with.
    let leading = exponent(-14);
    let subnormal = f32::from_bits(leading + magnitude) - f32::from_bits(leading);
    let magnitude = if magnitude >= 0x7c00 << 13 {
        special
    } else if magnitude < 0x0400 << 13 {
        subnormal.to_bits()
    } else {
        normal
    };
    f32::from_bits(sign | magnitude)
}

#[inline(always)]
fn to_binary16(number: f32) -> u16 {
    let bits = number.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // As above: what overflows carries into the exponent.
    let biased = magnitude.wrapping_sub((127 - 15) << 23);
    let rounded = biased.wrapping_add(0x0fff + (magnitude >> 13 & 1));
    // Below 2^-14 the last place is 2^-24, which is that of the numbers from 1/2 to 1: the sum is
    // rounded there, and its bits above those of 1/2 count places.
    let half = exponent(-1);
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(half)).to_bits() - half;
    let narrowed = if magnitude >= exponent(16) {
        0x7c00
    } else if magnitude < exponent(-14) {
        subnormal
    } else {
        rounded >> 13
    };
    if number.is_nan() { 0x7e00 } else { (sign | narrowed) as u16 }
}
