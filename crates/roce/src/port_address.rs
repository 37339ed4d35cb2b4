//! Where a port is.

use core::fmt;
use core::net::IpAddr;
use core::ops::RangeInclusive;

use crate::ModifyError;

/// Local identifiers of one port: others are of nobody, of groups, or of whoever gets the packet (IBTA 4.1.3).
const UNICAST_LIDS: RangeInclusive<u16> = 0x0001..=0xbfff;

/// Where a port is: what a peer must know of it to send packets there.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PortAddress {
    /// Its IP address, which is its GID in RoCEv2; or its GID in InfiniBand, in the form of an IPv6 address.
    pub ip: IpAddr,
    /// Its local identifier in its subnet of InfiniBand; 0 for a port of Ethernet.
    pub lid: u16,
}

impl PortAddress {
    /// Whether it says that it is a port of InfiniBand. No GID there is an IPv4 address, whatever LID comes with it.
    pub const fn is_infiniband(&self) -> bool {
        self.lid != 0 && self.ip.is_ipv6()
    }

    /// Whether its LID can be that of one port.
    pub fn has_unicast_lid(&self) -> bool {
        UNICAST_LIDS.contains(&self.lid)
    }

    /// Whether this port can be connected to one there, as far as their addresses say. To a port of Ethernet the LID of a
    /// peer says nothing: some devices of RoCE say that they have one (`irdma_query_port` of Linux: 1).
    pub fn check_peer(&self, peer: &Self) -> Result<(), ModifyError> {
        let (local, remote) = (*self, *peer);
        if local.is_infiniband() && !remote.is_infiniband() {
            return Err(ModifyError::LinkLayer { local, remote });
        }
        if local.is_infiniband() && !remote.has_unicast_lid() {
            return Err(ModifyError::RemoteLid { remote });
        }
        if local.ip.is_ipv4() != remote.ip.is_ipv4() {
            return Err(ModifyError::AddressFamily { local: local.ip, remote: remote.ip });
        }
        Ok(())
    }
}

impl From<IpAddr> for PortAddress {
    /// Of a port of Ethernet.
    fn from(ip: IpAddr) -> Self {
        Self { ip, lid: 0 }
    }
}

impl fmt::Display for PortAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_infiniband() {
            true => write!(f, "{} (InfiniBand, LID {:#06x})", self.ip, self.lid),
            false => self.ip.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `IP` or `IP,LID`.
    fn port(text: &str) -> PortAddress {
        let (ip, lid) = text.split_once(',').unwrap_or((text, "0"));
        PortAddress { ip: ip.parse().unwrap(), lid: u16::from_str_radix(lid, 16).unwrap() }
    }

    #[test]
    fn ports_of_one_kind_with_unicast_lids_can_be_connected() {
        for (local, remote, expected) in [
            ("10.0.0.1", "10.0.0.2", ""),
            ("fe80::1", "fe80::2", ""),
            ("10.0.0.1", "10.0.0.2,1", ""),
            ("fd00::1", "fd00::2,1", ""),
            ("fe80::1,1", "fe80::2,1", ""),
            ("fe80::1,1", "fe80::2,bfff", ""),
            ("10.0.0.1", "fe80::2", "is not of the same family"),
            ("fe80::1,1", "fe80::2,c000", "LID of fe80::2 is said to be 0xc000"),
            ("fe80::1,1", "fe80::2,ffff", "LID of fe80::2 is said to be 0xffff"),
            ("fe80::1,1", "fe80::2", "fe80::1 (InfiniBand, LID 0x0001) and fe80::2"),
            ("fe80::1,1", "10.0.0.2", "fe80::1 (InfiniBand, LID 0x0001) and 10.0.0.2"),
            ("10.0.0.1", "fe80::2,2a", "is not of the same family"),
        ] {
            let checked = port(local).check_peer(&port(remote));
            let said = checked.err().map_or_else(String::new, |error| error.to_string());
            assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{said}");
        }
    }
}
