//! Global identifiers of RDMA ports.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A port's global identifier. For RoCEv2 it is its IP address; IPv4 is mapped into IPv6 (IBTA
/// A17.4.5.2). As text: 16 bytes in hexadecimal with colons between.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Gid(pub [u8; 16]);

/// A text that is no GID.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("{0:?} is not a GID: 16 bytes in hexadecimal with colons between are expected")]
pub struct GidError(String);

impl Gid {
    /// The RoCEv2 GID of an address.
    pub const fn from_address(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self(address.to_ipv6_mapped().octets()),
            IpAddr::V6(address) => Self(address.octets()),
        }
    }

    /// The IP address that a RoCEv2 GID is.
    pub const fn address(self) -> IpAddr {
        let address = Ipv6Addr::from_octets(self.0);
        match address.to_ipv4_mapped() {
            Some(address) => IpAddr::V4(address),
            None => IpAddr::V6(address),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ":" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Gid {
    type Err = GidError;

    fn from_str(text: &str) -> Result<Self, GidError> {
        let bad = || GidError(text.chars().take(64).collect());
        let mut bytes = [0; 16];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(bad)?;
            // from_str_radix would take a sign.
            if part.is_empty() || part.len() > 2 || part.starts_with('+') {
                return Err(bad());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() { Err(bad()) } else { Ok(Self(bytes)) }
    }
}

impl TryFrom<String> for Gid {
    type Error = GidError;

    fn try_from(text: String) -> Result<Self, GidError> {
        text.parse()
    }
}

impl From<Gid> for String {
    fn from(gid: Gid) -> Self {
        gid.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_mapped_address() {
        let gid = Gid::from_address("127.0.0.2".parse().unwrap());
        assert_eq!(gid.to_string(), "00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:02");
        assert_eq!(gid.to_string().parse(), Ok(gid));
        assert_eq!(gid.address(), "127.0.0.2".parse::<IpAddr>().unwrap());
        let address: IpAddr = "2001:db8::1".parse().unwrap();
        assert_eq!(Gid::from_address(address).address(), address);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "::1", "00", &"00:".repeat(16), &"0:".repeat(17), "+1:+1", "127.0.0.1"] {
            assert!(text.parse::<Gid>().is_err(), "{text:?}");
        }
    }
}
