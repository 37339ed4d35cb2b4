//! Which entry of a port's GID table names the device, in RoCEv2 or in InfiniBand.

use std::net::{IpAddr, Ipv6Addr};

/// An entry that is in use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Entry {
    pub(super) index: u8,
    pub(super) gid: [u8; 16],
    pub(super) kind: Kind,
}

/// By what packets it is reached.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// No router forwards these, and soft devices do not speak it.
    RoceV1,
    /// Over UDP.
    RoceV2,
    InfiniBand,
}

impl Entry {
    pub(super) fn address(&self) -> IpAddr {
        Ipv6Addr::from(self.gid).to_canonical()
    }

    fn is_usable(&self) -> bool {
        self.kind != Kind::RoceV1
    }

    /// Smaller is better. Addresses that were given to the interface before the one that it makes
    /// for itself, which only neighbours can reach. In InfiniBand the prefix of link-local addresses is that of a
    /// subnet to which its manager has given no other (IBTA 4.1.1), and all entries are as good.
    fn rank(&self) -> u8 {
        match self.address() {
            _ if self.kind == Kind::InfiniBand => 0,
            IpAddr::V4(_) => 0,
            IpAddr::V6(address) if !address.is_unicast_link_local() => 1,
            IpAddr::V6(_) => 2,
        }
    }
}

/// Why no entry was chosen.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Refusal {
    /// There is no entry that does.
    None,
    /// The one asked for does not do.
    Index { index: u8, found: &'static str, usable: Vec<u8> },
    /// None has the address asked for.
    Address { address: IpAddr, usable: Vec<IpAddr> },
}

/// The entry with this index, or else the best one, the first among equals, of those with this
/// address.
pub(super) fn choose(
    entries: &[Entry],
    index: Option<u8>,
    address: Option<IpAddr>,
) -> Result<Entry, Refusal> {
    let address = address.map(|address| address.to_canonical());
    let fits = |entry: &Entry| address.is_none_or(|address| entry.address() == address);
    let usable = || entries.iter().filter(|entry| entry.is_usable());
    if usable().next().is_none() {
        return Err(Refusal::None);
    }
    let Some(index) = index else {
        let best = usable().filter(|entry| fits(entry)).min_by_key(|entry| entry.rank());
        // Without an address all fit, so that there was one.
        return best.copied().ok_or_else(|| {
            address.map_or(Refusal::None, |address| Refusal::Address {
                address,
                usable: usable().map(Entry::address).collect(),
            })
        });
    };
    let found = match entries.iter().find(|entry| entry.index == index) {
        Some(entry) if entry.is_usable() && fits(entry) => return Ok(*entry),
        Some(entry) if entry.is_usable() => "of another address than the one asked for",
        Some(_) => "a RoCE v1 GID",
        None => "empty",
    };
    let usable = usable().filter(|entry| fits(entry)).map(|entry| entry.index).collect();
    Err(Refusal::Index { index, found, usable })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u8, address: &str, version_2: bool) -> Entry {
        let kind = if version_2 { Kind::RoceV2 } else { Kind::RoceV1 };
        let gid = match address.parse().unwrap() {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        Entry { index, gid, kind }
    }

    /// As a ConnectX port has them.
    fn table() -> Vec<Entry> {
        vec![
            entry(0, "fe80::1", false),
            entry(1, "fe80::1", true),
            entry(2, "10.0.0.7", false),
            entry(3, "10.0.0.7", true),
            entry(5, "2001:db8::7", true),
            entry(6, "10.0.0.8", true),
        ]
    }

    #[test]
    fn version_2_and_ipv4_come_first() {
        let mut entries = table();
        for expected in [3, 6, 5, 1] {
            let chosen = choose(&entries, None, None).unwrap();
            assert_eq!(chosen.index, expected);
            entries.retain(|entry| entry.index != expected);
        }
        assert_eq!(choose(&entries, None, None), Err(Refusal::None));
    }

    #[test]
    fn a_wanted_entry_is_taken_or_refused_with_those_that_do() {
        let entries = table();
        assert_eq!(choose(&entries, Some(5), None).unwrap().address().to_string(), "2001:db8::7");
        for (index, found) in [(2, "a RoCE v1 GID"), (4, "empty"), (255, "empty")] {
            let usable = vec![1, 3, 5, 6];
            let refusal = Refusal::Index { index, found, usable };
            assert_eq!(choose(&entries, Some(index), None), Err(refusal));
        }
    }

    #[test]
    fn an_address_chooses_among_those_that_do() {
        let entries = table();
        let chosen =
            |address: &str| choose(&entries, None, address.parse().ok()).map(|entry| entry.index);
        assert_eq!(chosen("10.0.0.8"), Ok(6));
        assert_eq!(chosen("::ffff:10.0.0.8"), Ok(6));
        // Not the RoCEv1 entry that is as good.
        assert_eq!(chosen("fe80::1"), Ok(1));
        let Err(Refusal::Address { address, usable }) = chosen("10.0.0.9") else { panic!() };
        assert_eq!((address, usable.len()), ("10.0.0.9".parse().unwrap(), 4));
        // An index must agree with it.
        let address = "10.0.0.8".parse().ok();
        assert_eq!(choose(&entries, Some(6), address).unwrap().index, 6);
        let found = "of another address than the one asked for";
        let refusal = Refusal::Index { index: 3, found, usable: vec![6] };
        assert_eq!(choose(&entries, Some(3), address), Err(refusal));
    }

    #[test]
    fn mapped_addresses_are_ipv4() {
        assert_eq!(entry(0, "10.1.2.3", true).address().to_string(), "10.1.2.3");
        assert_eq!(entry(0, "2001:db8::1", true).address().to_string(), "2001:db8::1");
    }

    #[test]
    fn of_infiniband_the_first_is_taken_whatever_its_prefix() {
        let infiniband = |index, gid| Entry { kind: Kind::InfiniBand, ..entry(index, gid, false) };
        for first in ["fe80::2:c903:0:1", "fec0::2:c903:0:1"] {
            let entries = [infiniband(0, first), infiniband(1, "fec0::2:c903:0:2")];
            let chosen = |index, address: Option<&str>| {
                let address = address.map(|address| address.parse().unwrap());
                choose(&entries, index, address).map(|entry| entry.index)
            };
            assert_eq!(chosen(None, None), Ok(0));
            assert_eq!(chosen(Some(1), None), Ok(1));
            assert_eq!(chosen(None, Some("fec0::2:c903:0:2")), Ok(1));
            assert_eq!(chosen(None, Some(first)), Ok(0));
            let refusal = Refusal::Index { index: 2, found: "empty", usable: vec![0, 1] };
            assert_eq!(chosen(Some(2), None), Err(refusal));
        }
    }
}
