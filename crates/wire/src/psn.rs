//! Packet sequence numbers: 24 bits on the wire, 64 bits inside.

use core::fmt;

/// A packet sequence number as the wire carries it: 24 bits, in circular order (IBTA 9.7.2).
///
/// Protocol state should hold 64-bit numbers that never wrap and meet the wire only through
/// [`Psn::from_extended`] and [`Psn::extend`]; comparing raw 24-bit numbers as integers is the
/// classic bug (after 2^24 packets everything new looks old).
#[derive(Clone, Copy, Default, Eq, Hash, PartialEq)]
pub struct Psn(u32);

impl Psn {
    /// How many packet sequence numbers there are.
    pub const COUNT: u32 = 1 << 24;
    const MASK: u32 = Self::COUNT - 1;

    /// The number with these low 24 bits.
    pub const fn new(value: u32) -> Self {
        Self(value & Self::MASK)
    }

    /// The 24-bit value.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The wire form of a 64-bit number.
    pub const fn from_extended(extended: u64) -> Self {
        Self((extended & Self::MASK as u64) as u32)
    }

    /// The 64-bit number with these low 24 bits that is nearest to `near` (ties go below; a result
    /// below zero cannot arise while `near` is at least 2^23).
    pub const fn extend(self, near: u64) -> u64 {
        near.wrapping_add_signed(self.distance_from(Self::from_extended(near)) as i64)
    }

    /// The signed circular distance from `earlier` to `self`, in -2^23 .. 2^23.
    pub const fn distance_from(self, earlier: Self) -> i32 {
        // Move the 24-bit difference to the top of the word, and shift it back with its sign.
        ((self.0.wrapping_sub(earlier.0) << 8) as i32) >> 8
    }

    /// The number `count` further on, around the circle.
    #[must_use]
    pub const fn add(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count) & Self::MASK)
    }

    /// The three bytes of the wire.
    pub const fn to_bytes(self) -> [u8; 3] {
        let [_, a, b, c] = self.0.to_be_bytes();
        [a, b, c]
    }

    /// The number in three bytes of the wire.
    pub const fn from_bytes([a, b, c]: [u8; 3]) -> Self {
        Self(u32::from_be_bytes([0, a, b, c]))
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({:#08x})", self.0)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_circular() {
        assert_eq!(Psn::new(0).distance_from(Psn::new(0xff_ffff)), 1);
        assert_eq!(Psn::new(0xff_ffff).distance_from(Psn::new(0)), -1);
        assert_eq!(Psn::new(0x80_0000).distance_from(Psn::new(0)), -(1 << 23));
        assert_eq!(Psn::new(0x7f_ffff).distance_from(Psn::new(0)), (1 << 23) - 1);
    }

    #[test]
    fn extension_finds_the_nearest_number() {
        let base: u64 = 5 << 24;
        for near in [base, base + 1, base + 0xff_ffff, base + 0x80_0000, base - 3] {
            for distance in [-8_388_608_i64, -70_000, -1, 0, 1, 70_000, 8_388_607] {
                let wanted = near.wrapping_add_signed(distance);
                assert_eq!(Psn::from_extended(wanted).extend(near), wanted, "{near} {distance}");
            }
        }
    }

    #[test]
    fn bytes_round_trip() {
        assert_eq!(Psn::new(0x12_3456).to_bytes(), [0x12, 0x34, 0x56]);
        assert_eq!(Psn::from_bytes([0x12, 0x34, 0x56]), Psn::new(0x12_3456));
        assert_eq!(Psn::new(0xff_ffff).add(2), Psn::new(1));
    }
}
