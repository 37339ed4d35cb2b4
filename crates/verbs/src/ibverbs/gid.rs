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
    Unsuitable { index: u8, found: &'static str, usable: Vec<u8> },
}

/// The entry asked for, or else the best one, the first among equals.
pub(super) fn choose(entries: &[Entry], wanted: Option<u8>) -> Result<Entry, Refusal> {
    let usable = || entries.iter().filter(|entry| entry.version_2);
    let best = usable().min_by_key(|entry| entry.rank()).ok_or(Refusal::None)?;
    let Some(index) = wanted else { return Ok(*best) };
    let refusal = |found| Refusal::Unsuitable {
        index,
        found,
        usable: usable().map(|entry| entry.index).collect(),
    };
    match entries.iter().find(|entry| entry.index == index) {
        Some(entry) if entry.version_2 => Ok(*entry),
        Some(_) => Err(refusal("a RoCE v1 GID")),
        None => Err(refusal("empty")),
    }
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
            let chosen = choose(&entries, None).unwrap();
            assert_eq!(chosen.index, expected);
            entries.retain(|entry| entry.index != expected);
        }
        assert_eq!(choose(&entries, None), Err(Refusal::None));
    }

    #[test]
    fn a_wanted_entry_is_taken_or_refused_with_those_that_do() {
        let entries = table();
        assert_eq!(choose(&entries, Some(5)).unwrap().address().to_string(), "2001:db8::7");
        for (index, found) in [(2, "a RoCE v1 GID"), (4, "empty"), (255, "empty")] {
            let usable = vec![1, 3, 5, 6];
            let refusal = Refusal::Unsuitable { index, found, usable };
            assert_eq!(choose(&entries, Some(index)), Err(refusal));
        }
    }

    #[test]
    fn mapped_addresses_are_ipv4() {
        assert_eq!(entry(0, "10.1.2.3", true).address().to_string(), "10.1.2.3");
        assert_eq!(entry(0, "2001:db8::1", true).address().to_string(), "2001:db8::1");
    }
}
