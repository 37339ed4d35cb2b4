//! What a topology is made from, checked entry by entry.

use core::fmt;
use core::net::IpAddr;
use core::num::NonZeroU64;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::plan::FanIn;

/// The largest number of a queue pair.
pub const MAX_QUEUE_PAIR: u32 = 0xff_ffff;

/// A switch and its connections.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SwitchEntry {
    /// Its number.
    pub id: u64,
    /// The name that it registers with. Without one it is known by its addresses.
    pub name: Option<String>,
    /// Whether it is above all others.
    pub root: bool,
    /// How many children a node on it may have, if fewer than others'.
    pub fan_in: Option<FanIn>,
    /// Who is connected to it.
    pub connections: Vec<ConnectionEntry>,
}

/// A connection of a switch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ConnectionEntry {
    /// Whether the peer is a switch above.
    pub up: bool,
    /// The peer's number, if it is a host.
    pub host_id: Option<u64>,
    /// The switch's address.
    pub my_ip: IpAddr,
    /// The switch's MAC address.
    pub my_mac: Option<MacAddress>,
    /// The peer's address.
    pub peer_ip: IpAddr,
    /// The peer's MAC address.
    pub peer_mac: Option<MacAddress>,
    /// What the link carries in each direction.
    pub rate: Option<LinkRate>,
}

/// The rate of a link, in bits per second: 1 kbit/s to 1 Pbit/s.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct LinkRate(NonZeroU64);

impl LinkRate {
    /// What links count as where no link has a rate.
    pub(super) const UNKNOWN: Self = Self(NonZeroU64::new(1_000_000_000).unwrap());

    const UNITS: [(&str, u64); 4] = [
        ("kbit", 1_000),
        ("mbit", 1_000_000),
        ("gbit", 1_000_000_000),
        ("tbit", 1_000_000_000_000),
    ];

    const MAX: u64 = 1_000_000_000_000_000;

    /// Bits per second.
    pub fn bits_per_s(self) -> u64 {
        self.0.get()
    }
}

/// What is no rate.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BadRate;

impl FromStr for LinkRate {
    type Err = BadRate;

    /// A number and a unit: `100mbit`.
    fn from_str(text: &str) -> Result<Self, BadRate> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let &(_, scale) = Self::UNITS.iter().find(|(name, _)| *name == unit).ok_or(BadRate)?;
        let number: u64 = number.parse().map_err(|_| BadRate)?;
        let rate = number.checked_mul(scale).filter(|&rate| rate <= Self::MAX).ok_or(BadRate)?;
        NonZeroU64::new(rate).map(Self).ok_or(BadRate)
    }
}

/// The address of an Ethernet interface.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MacAddress(pub [u8; 6]);

/// What is no MAC address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BadMacAddress;

impl FromStr for MacAddress {
    type Err = BadMacAddress;

    fn from_str(text: &str) -> Result<Self, BadMacAddress> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(BadMacAddress)?;
            let hex = part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
            *byte = u8::from_str_radix(part, 16).ok().filter(|_| hex).ok_or(BadMacAddress)?;
        }
        parts.next().is_none().then_some(Self(bytes)).ok_or(BadMacAddress)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_unit_and_are_in_range() {
        for (text, rate) in [
            ("1kbit", Some(1_000)),
            ("100mbit", Some(100_000_000)),
            ("400gbit", Some(400_000_000_000)),
            ("1000tbit", Some(1_000_000_000_000_000)),
            ("1001tbit", None),
            ("18446744073709551615tbit", None),
            ("18446744073709551616kbit", None),
            ("0gbit", None),
            ("-1gbit", None),
            ("1.5gbit", None),
            ("10", None),
            ("gbit", None),
            ("10 gbit", None),
            ("10GBIT", None),
            ("", None),
        ] {
            let parsed = text.parse::<LinkRate>().ok().map(LinkRate::bits_per_s);
            assert_eq!(parsed, rate, "{text:?}");
        }
    }

    #[test]
    fn mac_addresses_are_six_bytes() {
        let text = "00:1a:22:33:44:5f";
        assert_eq!(text.parse(), Ok(MacAddress([0, 0x1a, 0x22, 0x33, 0x44, 0x5f])));
        assert_eq!(text.to_uppercase().parse::<MacAddress>().unwrap().to_string(), text);
        for text in
            ["", "00:1a:22:33:44", "00:1a:22:33:44:5f:6", "0:1a:22:33:44:5f", "+0:1a:22:33:44:5f"]
        {
            assert_eq!(text.parse::<MacAddress>(), Err(BadMacAddress), "{text:?}");
        }
    }
}
