//! Which entry of a port's GID table names the device in RoCEv2.

use std::net::{IpAddr, Ipv6Addr};

/// An entry that is in use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Entry {
    pub(super) index: u8,
    pub(super) gid: [u8; 16],
    /// RoCEv2, over UDP. Otherwise RoCEv1, which no router forwards and soft devices do not speak.
    pub(super) version_2: bool,
}

impl Entry {
    pub(super) fn address(&self) -> IpAddr {
        Ipv6Addr::from(self.gid).to_canonical()
    }

    /// Smaller is better. Addresses that were given to the interface before the one that it makes
    /// for itself, which only neighbours can reach.
    fn rank(&self) -> u8 {
        match self.address() {
            IpAddr::V4(_) => 0,
            IpAddr::V6(address) if !address.is_unicast_link_local() => 1,
            IpAddr::V6(_) => 2,
        }
    }
}

/// Why no entry was chosen.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Refusal {
    /// There is no RoCEv2 entry.
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
    let usable = || entries.iter().filter(|entry| entry.version_2);
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
        Some(entry) if entry.version_2 && fits(entry) => return Ok(*entry),
        Some(entry) if entry.version_2 => "of another address than the one asked for",
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
        let gid = match address.parse().unwrap() {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        Entry { index, gid, version_2 }
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
}
