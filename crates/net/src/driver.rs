//! The ways of putting datagrams on the network.

use std::fmt;
use std::str::FromStr;

/// How a device sends and receives.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Driver {
    /// A UDP socket: needs no privileges. The IPv4 identification, which the ICRC covers, is not
    /// seen by the receiver, who can check 16 to 32 bits of the ICRC.
    #[default]
    Udp,
    /// A packet socket (AF_PACKET): needs CAP_NET_RAW. IP headers are written and seen whole, so
    /// the ICRC is checked whole. Bypasses the packet filter of the system (nftables).
    Packet,
}

impl Driver {
    /// The name that users read and write.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Packet => "packet",
        }
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no driver's.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("there is no driver \"{0}\": it is udp or packet")]
pub struct UnknownDriver(String);

impl FromStr for Driver {
    type Err = UnknownDriver;

    fn from_str(name: &str) -> Result<Self, UnknownDriver> {
        [Self::Udp, Self::Packet]
            .into_iter()
            .find(|driver| driver.name() == name)
            .ok_or_else(|| UnknownDriver(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for driver in [Driver::Udp, Driver::Packet] {
            assert_eq!(driver.to_string().parse(), Ok(driver));
        }
        let error = "raw".parse::<Driver>().unwrap_err();
        assert!(error.to_string().contains("\"raw\""), "{error}");
    }
}
