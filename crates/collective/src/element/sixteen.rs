//! Floats of 16 bits, as bits: Rust has no such types yet. Vectors of them are sent as they are; what
//! is here is for those who write their elements from wider floats and read them back.

use std::cmp::Ordering;
use std::fmt;

/// Declares a float of 16 bits with so many bits of mantissa and so large a bias of the exponent.
macro_rules! sixteen_bits {
    ($(#[$meta:meta])* $name:ident: mantissa $mantissa:literal, bias $bias:literal) => {
        $(#[$meta])*
        ///
        /// It compares as numbers do: NaN differs from itself, and both zeros are equal.
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $name(u16);

        impl $name {
            /// The number with these bits.
            pub const fn from_bits(bits: u16) -> Self {
                Self(bits)
            }

            /// Its bits.
            pub const fn to_bits(self) -> u16 {
                self.0
            }

            /// Rounds to the nearest number, of two that are equally near to the one with an even mantissa;
            /// beyond the largest to infinity. NaN stays NaN.
            pub const fn from_f32(value: f32) -> Self {
                Self(round(value, $mantissa, $bias))
            }

            /// The same number, exactly.
            pub const fn to_f32(self) -> f32 {
                widen(self.0, $mantissa, $bias)
            }

            /// Whether it is no number.
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> Self {
                value.to_f32()
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    };
}

sixteen_bits! {
    /// IEEE 754 binary16: 5 bits of exponent and 10 of mantissa.
    Float16: mantissa 10, bias 15
}

sixteen_bits! {
    /// bfloat16, the upper half of a binary32: 8 bits of exponent and 7 of mantissa.
    BFloat16: mantissa 7, bias 127
}

/// The mantissa of a binary32, and the bias of its exponent.
const MANTISSA: u32 = 23;
const BIAS: i32 = 127;

const fn round(value: f32, mantissa: u32, bias: i32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // All ones in the exponent.
    let infinity = 0x7fff_u16 >> mantissa << mantissa;
    if value.is_nan() {
        return sign | infinity | 1 << (mantissa - 1);
    }
    // The significand has its leading one, which a subnormal number does not have.
    let fraction = magnitude & ((1 << MANTISSA) - 1);
    let (significand, exponent) = match (magnitude >> MANTISSA) as i32 {
        0 => (fraction, 1),
        exponent => (fraction | 1 << MANTISSA, exponent),
    };
    // What is to be rounded, exponent and all, and how many of its low bits go.
    let exponent = exponent - BIAS + bias;
    let dropped = MANTISSA - mantissa;
    let (kept, dropped) = if exponent > 0 {
        (((exponent as u64 - 1) << MANTISSA) + significand as u64, dropped)
    } else {
        (significand as u64, dropped + (1 - exponent) as u32)
    };
    if dropped > MANTISSA + 1 {
        // Less than half of the smallest number.
        return sign;
    }
    let half = 1 << (dropped - 1);
    let rest = kept & ((1 << dropped) - 1);
    let mut rounded = kept >> dropped;
    if rest > half || rest == half && rounded & 1 == 1 {
        // A carry goes into the exponent, as it should.
        rounded += 1;
    }
    if rounded >= infinity as u64 { sign | infinity } else { sign | rounded as u16 }
}

const fn widen(bits: u16, mantissa: u32, bias: i32) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let exponent = (bits as u32 & 0x7fff) >> mantissa;
    let significand = bits as u32 & ((1 << mantissa) - 1);
    let largest = 0x7fff_u32 >> mantissa;
    let magnitude = if exponent == largest {
        0x7f80_0000 | significand << (MANTISSA - mantissa)
    } else if exponent > 0 {
        ((exponent as i32 + BIAS - bias) as u32) << MANTISSA | significand << (MANTISSA - mantissa)
    } else if bias == BIAS {
        // Subnormal in both.
        significand << (MANTISSA - mantissa)
    } else {
        // Normal in a binary32. Both factors are powers of two or small integers, so this is exact.
        let unit = f32::from_bits(((1 - bias - mantissa as i32 + BIAS) as u32) << MANTISSA);
        (significand as f32 * unit).to_bits()
    };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All numbers of a type, widened by the definition, in 64 bits.
    fn defined(bits: u16, mantissa: u32, bias: i32) -> f64 {
        let exponent = i32::from((bits & 0x7fff) >> mantissa);
        let fraction = f64::from(bits & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
        let largest = i32::from(0x7fff_u16 >> mantissa);
        let magnitude = match exponent {
            0 => fraction * 2_f64.powi(1 - bias),
            _ if exponent < largest => (1.0 + fraction) * 2_f64.powi(exponent - bias),
            _ if bits & ((1 << mantissa) - 1) == 0 => f64::INFINITY,
            _ => f64::NAN,
        };
        if bits >> 15 == 1 { -magnitude } else { magnitude }
    }

    macro_rules! check {
        ($name:ident, $mantissa:literal, $bias:literal) => {
            for bits in 0..=u16::MAX {
                let number = $name::from_bits(bits);
                let wide = defined(bits, $mantissa, $bias);
                assert_eq!(number.is_nan(), wide.is_nan(), "{bits:#x}");
                if wide.is_nan() {
                    assert!($name::from_f32(number.to_f32()).is_nan(), "{bits:#x}");
                    continue;
                }
                assert_eq!(f64::from(number.to_f32()).to_bits(), wide.to_bits(), "{bits:#x}");
                assert_eq!($name::from_f32(number.to_f32()).to_bits(), bits);
                // Halfway to the next one, and a little to each side.
                let next = defined(bits.wrapping_add(1), $mantissa, $bias);
                if !next.is_finite() {
                    continue;
                }
                let middle = ((wide + next) / 2.0) as f32;
                if f64::from(middle) != (wide + next) / 2.0 {
                    // Below the smallest binary32.
                    continue;
                }
                let even = bits + (bits & 1);
                assert_eq!($name::from_f32(middle).to_bits(), even, "{bits:#x}");
                let below = f32::from_bits(middle.to_bits() - 1);
                assert_eq!($name::from_f32(below).to_bits(), bits, "{bits:#x}");
                let above = f32::from_bits(middle.to_bits() + 1);
                assert_eq!($name::from_f32(above).to_bits(), bits + 1, "{bits:#x}");
            }
        };
    }

    #[test]
    fn every_number_widens_exactly_and_rounds_to_the_nearest() {
        check!(Float16, 10, 15);
        check!(BFloat16, 7, 127);
    }

    #[test]
    fn what_is_too_large_or_too_small() {
        assert_eq!(Float16::from_f32(65_519.0).to_bits(), 0x7bff);
        assert_eq!(Float16::from_f32(65_520.0).to_bits(), 0x7c00);
        assert_eq!(Float16::from_f32(f32::NEG_INFINITY).to_bits(), 0xfc00);
        assert_eq!(Float16::from_f32(-f32::MIN_POSITIVE).to_bits(), 0x8000);
        assert_eq!(BFloat16::from_f32(f32::MAX).to_bits(), 0x7f80);
        assert_eq!(BFloat16::from_f32(f32::from_bits(1)).to_bits(), 0);
        assert!(Float16::from_f32(f32::NAN).is_nan() && BFloat16::from_f32(-f32::NAN).is_nan());
        assert!(Float16::from_f32(1.0) > Float16::from_f32(-2.0));
        assert_eq!(BFloat16::from_f32(0.0), BFloat16::from_f32(-0.0));
        assert_eq!(format!("{} {:?}", Float16::from_f32(1.5), BFloat16::from_f32(3.0)), "1.5 3.0");
    }
}
