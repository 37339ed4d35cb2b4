//! Rates of links, as `tc` writes them.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// `tc` has more units; these are what links are sold by.
const UNITS: [(&str, u64); 4] =
    [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)];

/// Bits per second in each direction of a link.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rate(u64);

/// A text is no rate.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("{0:?} is no rate: write 200mbit, 10gbit or 512kbit, and at least 8kbit")]
pub struct ParseRateError(String);

impl Rate {
    /// The slowest: a packet takes a second and a half.
    const MIN: u64 = 8_000;

    /// So many million bits per second, at least one.
    pub const fn from_mbit(mbit: u32) -> Self {
        Self(if mbit == 0 { 1_000_000 } else { mbit as u64 * 1_000_000 })
    }

    /// Bits per second.
    pub const fn bits_per_s(self) -> u64 {
        self.0
    }

    /// Bytes that pass in so many microseconds.
    pub(crate) const fn bytes_in_us(self, us: u64) -> u64 {
        (self.0 as u128 * us as u128 / 8_000_000) as u64
    }
}

impl FromStr for Rate {
    type Err = ParseRateError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = UNITS.iter().find_map(|(unit, scale)| {
            let number: u64 = text.strip_suffix(unit)?.trim_end().parse().ok()?;
            number.checked_mul(*scale).filter(|&rate| rate >= Self::MIN)
        });
        parsed.map(Self).ok_or_else(|| ParseRateError(text.to_owned()))
    }
}

impl TryFrom<String> for Rate {
    type Error = ParseRateError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> Self {
        rate.to_string()
    }
}

impl Display for Rate {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let whole = |(_, scale): &&(&str, u64)| self.0.is_multiple_of(*scale);
        let (unit, scale) = UNITS.iter().find(whole).unwrap_or(&("bit", 1));
        write!(f, "{}{unit}", self.0 / scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_written_as_tc_does() {
        for (text, bits, again) in [
            ("200mbit", 200_000_000, "200mbit"),
            ("1000mbit", 1_000_000_000, "1gbit"),
            ("1500 mbit", 1_500_000_000, "1500mbit"),
            ("8kbit", 8_000, "8kbit"),
            ("12345bit", 12_345, "12345bit"),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.bits_per_s(), rate.to_string().as_str()), (bits, again));
        }
        for text in ["", "200", "mbit", "-1mbit", "1.5gbit", "0mbit", "7kbit", "200MBps"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        assert!("18446744073709551615gbit".parse::<Rate>().is_err());
        assert_eq!(Rate::from_mbit(0), Rate::from_mbit(1));
    }

    #[test]
    fn bytes_of_a_time_do_not_overflow() {
        assert_eq!(Rate::from_mbit(200).bytes_in_us(1000), 25_000);
        assert_eq!(Rate(u64::MAX).bytes_in_us(1_000_000), u64::MAX / 8);
    }
}
