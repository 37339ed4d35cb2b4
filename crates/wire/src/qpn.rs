//! Queue pair numbers.

use core::fmt;

/// A queue pair number: 24 bits, unique within one device.
#[derive(Clone, Copy, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Qpn(u32);

impl Qpn {
    /// Queue pair 1, the general services interface (connection manager datagrams).
    pub const GENERAL_SERVICES: Self = Self(1);

    /// The number with these low 24 bits.
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The 24-bit value.
    pub const fn value(self) -> u32 {
        self.0
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

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qpn({:#x})", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
