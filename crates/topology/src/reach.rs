//! Which NIC of a peer ours can reach, by their addresses alone.
//!
//! Nothing here knows masks, routes or switches, so two addresses of one kind are taken to reach
//! each other, and who tries finds out. What is left out cannot work between two hosts: from
//! loopback the other addresses of its own host can be reached, but a peer may be anywhere.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{Port, RdmaDevice};

/// NICs of each side that are looked at, from the first.
const NICS_MAX: usize = 256;
/// Addresses of a NIC that are looked at, from the first.
const ADDRESSES_MAX: usize = 16;

/// An address of a NIC.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Address {
    /// Of RoCEv2, whose GIDs are IP addresses; one of IPv4 may be mapped.
    Ip(IpAddr),
    /// A GID of a port of InfiniBand.
    InfiniBand(Ipv6Addr),
}

/// A NIC of ours, and one of a peer that it can reach.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pair {
    /// The index of our NIC.
    pub own: usize,
    /// The index of the peer's NIC.
    pub peer: usize,
    /// Which of our NIC's addresses to take.
    pub own_address: usize,
    /// Which of the peer's NIC's addresses to take.
    pub peer_address: usize,
    /// Both addresses seem to be of one network, so that no router is between. Without masks that
    /// is a guess: 24 bits of IPv4 or 64 bits of IPv6 are the same.
    pub same_network: bool,
}

/// Every pair of NICs that can reach each other, in the order of our NICs and then of the peer's,
/// each with the best of its pairs of addresses. NICs beyond the first 256 of a side, and
/// addresses beyond the first 16 of a NIC, do not count: a peer may say that it has any number.
pub fn reachable_pairs(own: &[impl AsRef<[Address]>], peer: &[impl AsRef<[Address]>]) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (own_nic, own) in own.iter().take(NICS_MAX).enumerate() {
        for (peer_nic, peer) in peer.iter().take(NICS_MAX).enumerate() {
            pairs.extend(best_pair((own_nic, own.as_ref()), (peer_nic, peer.as_ref())));
        }
    }
    pairs
}

fn best_pair(own: (usize, &[Address]), peer: (usize, &[Address])) -> Option<Pair> {
    let mut best: Option<(Reach, Pair)> = None;
    for (own_address, from) in own.1.iter().take(ADDRESSES_MAX).enumerate() {
        for (peer_address, to) in peer.1.iter().take(ADDRESSES_MAX).enumerate() {
            let Some(reach) = reach(*from, *to) else { continue };
            // Of equals, the first that was named.
            if best.as_ref().is_none_or(|(known, _)| reach < *known) {
                let same_network = reach.network == Network::Same;
                let (own, peer) = (own.0, peer.0);
                best = Some((reach, Pair { own, peer, own_address, peer_address, same_network }));
            }
        }
    }
    best.map(|(_, pair)| pair)
}

/// How good a pair of addresses is. The smaller one is the better.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Reach {
    scope: Scope,
    network: Network,
}

/// How far an address is known. RFC 4007, section 4.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Scope {
    Global,
    /// 169.254.0.0/16 and fe80::/10: without routers, and on a host of several links ambiguous.
    LinkLocal,
    /// Within one host.
    Loopback,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Network {
    Same,
    Other,
}

/// `None` when packets from one cannot come to the other.
fn reach(own: Address, peer: Address) -> Option<Reach> {
    let (own, peer) = match (own, peer) {
        (Address::InfiniBand(own), Address::InfiniBand(peer)) => {
            // The subnet prefix: another subnet is behind a router, which only the subnet manager
            // knows of. IBTA, Volume 1, 4.1.1.
            let same = own.to_bits() >> 64 == peer.to_bits() >> 64;
            let usable = !is_nowhere(IpAddr::V6(own)) && !is_nowhere(IpAddr::V6(peer));
            let reach = Reach { scope: Scope::Global, network: Network::Same };
            return (same && usable).then_some(reach);
        }
        (Address::Ip(own), Address::Ip(peer)) => (own.to_canonical(), peer.to_canonical()),
        _ => return None,
    };
    let scope = scope(own);
    if is_nowhere(own) || is_nowhere(peer) || scope != self::scope(peer) {
        return None;
    }
    let same = match (own, peer) {
        (IpAddr::V4(own), IpAddr::V4(peer)) => own.to_bits() >> 8 == peer.to_bits() >> 8,
        (IpAddr::V6(own), IpAddr::V6(peer)) => own.to_bits() >> 64 == peer.to_bits() >> 64,
        _ => return None,
    };
    let network = if same { Network::Same } else { Network::Other };
    Some(Reach { scope, network })
}

fn scope(address: IpAddr) -> Scope {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    match (address.is_loopback(), link_local) {
        (true, _) => Scope::Loopback,
        (_, true) => Scope::LinkLocal,
        _ => Scope::Global,
    }
}

/// Addresses that no NIC has: none, those of groups, and "this network" (RFC 1122, 3.2.1.3).
fn is_nowhere(address: IpAddr) -> bool {
    let this_network_or_all = match address {
        IpAddr::V4(address) => address.octets()[0] == 0 || address == Ipv4Addr::BROADCAST,
        IpAddr::V6(_) => false,
    };
    address.is_unspecified() || address.is_multicast() || this_network_or_all
}

impl RdmaDevice {
    /// The addresses of its ports by which transfers can reach it: GIDs of InfiniBand and RoCEv2.
    pub fn addresses(&self) -> Vec<Address> {
        let of_port = |port: &Port| {
            let address = |entry: &crate::GidEntry| match port.is_infiniband() {
                true => Some(Address::InfiniBand(entry.gid)),
                false => entry.version_2.then_some(Address::Ip(IpAddr::V6(entry.gid))),
            };
            port.gids.iter().filter_map(address).collect::<Vec<_>>()
        };
        self.ports.iter().flat_map(of_port).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ib:` before a GID of InfiniBand; IP addresses as they are.
    fn address(text: &str) -> Address {
        match text.strip_prefix("ib:") {
            Some(gid) => Address::InfiniBand(gid.parse().unwrap()),
            None => Address::Ip(text.parse().unwrap()),
        }
    }

    /// NICs with spaces between, addresses of a NIC with commas between; `-` has none.
    fn nics(text: &str) -> Vec<Vec<Address>> {
        let nic = |nic: &str| match nic {
            "-" => Vec::new(),
            addresses => addresses.split(',').map(address).collect(),
        };
        text.split_whitespace().map(nic).collect()
    }

    /// Pairs as `own.address-peer.address`, with `=` in place of `-` within one network.
    fn pairs(own: &str, peer: &str) -> String {
        let pairs = reachable_pairs(&nics(own), &nics(peer));
        let text = |pair: &Pair| {
            let sign = if pair.same_network { '=' } else { '-' };
            let Pair { own, own_address, peer, peer_address, .. } = pair;
            format!("{own}.{own_address}{sign}{peer}.{peer_address}")
        };
        pairs.iter().map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_pair_counts_that_can_reach_each_other() {
        for (own, peer, expected) in [
            ("", "", ""),
            ("10.0.0.1", "", ""),
            ("-", "10.0.0.2", ""),
            ("10.0.0.1", "10.0.0.2", "0.0=0.0"),
            ("10.0.0.1", "192.168.7.2", "0.0-0.0"),
            ("10.0.0.1", "10.0.0.1", "0.0=0.0"),
            // Not only the diagonal.
            ("10.0.0.1 2001:db8::1", "2001:db8::2 10.0.0.2", "0.0=1.0 1.0=0.0"),
            ("10.0.0.1 10.0.1.1", "10.0.0.2 10.0.1.2", "0.0=0.0 0.0-1.0 1.0-0.0 1.0=1.0"),
            ("10.0.0.1", "10.0.0.2 10.0.0.3 10.0.0.4", "0.0=0.0 0.0=1.0 0.0=2.0"),
            ("10.0.0.1 10.0.0.2 10.0.0.3", "10.0.0.4", "0.0=0.0 1.0=0.0 2.0=0.0"),
            ("2001:db8::1 10.0.0.1", "10.0.0.2", "1.0=0.0"),
            // NICs of both families.
            ("10.0.0.1,2001:db8::1", "2001:db8::2", "0.1=0.0"),
            ("10.0.0.1,2001:db8::1", "2001:db8::2,10.0.0.2", "0.0=0.1"),
            ("10.0.0.1,2001:db8::1", "2001:db8::2,172.16.0.2", "0.1=0.0"),
            // Addresses of IPv4 as GIDs of RoCEv2 have them.
            ("::ffff:10.0.0.1", "10.0.0.2", "0.0=0.0"),
            ("::ffff:10.0.0.1", "::ffff:10.0.0.2", "0.0=0.0"),
            ("::ffff:10.0.0.1", "2001:db8::2", ""),
            // The one of the same network, wherever it is named.
            ("10.0.0.1,10.0.1.1", "10.0.2.2,10.0.1.2", "0.1=0.1"),
            ("2001:db8:0:1::1,2001:db8:0:2::1", "2001:db8:0:2::2", "0.1=0.0"),
            ("2001:db8:0:1::1", "fd00::1", "0.0-0.0"),
            // Link-local addresses: with their kind, and only where there is nothing better.
            ("fe80::1", "fe80::2", "0.0=0.0"),
            ("fe80::1,2001:db8::1", "fe80::2,2001:db9::2", "0.1-0.1"),
            ("fe80::1", "2001:db8::2", ""),
            ("169.254.3.1", "169.254.3.2", "0.0=0.0"),
            ("169.254.3.1", "10.0.0.2", ""),
            // Loopback: within a host.
            ("127.0.0.1", "127.0.0.2", "0.0=0.0"),
            ("::1", "::1", "0.0=0.0"),
            ("127.0.0.1", "10.0.0.2", ""),
            ("10.0.0.1", "127.0.0.1", ""),
            ("::ffff:127.0.0.1", "127.9.0.1", "0.0-0.0"),
            ("127.0.0.1,10.0.0.1", "127.0.0.1,10.0.0.1", "0.1=0.1"),
            // What no NIC has.
            ("0.0.0.0", "0.0.0.0", ""),
            ("::", "::", ""),
            ("10.0.0.1", "0.1.2.3", ""),
            ("10.0.0.1", "224.0.0.1", ""),
            ("10.0.0.1", "255.255.255.255", ""),
            ("10.0.0.1", "::ffff:255.255.255.255", ""),
            ("2001:db8::1", "ff02::1", ""),
            // InfiniBand: within a subnet, and never with RoCE.
            ("ib:fe80::1", "ib:fe80::2", "0.0=0.0"),
            ("ib:fec0:0:0:1::1", "ib:fec0:0:0:2::1", ""),
            ("ib:fe80::1", "fe80::2", ""),
            ("ib:fe80::1 10.0.0.1", "10.0.0.2 ib:fe80::2", "0.0=1.0 1.0=0.0"),
            ("ib:::1", "ib:::", ""),
            ("ib:::ffff:10.0.0.1", "10.0.0.2", ""),
        ] {
            assert_eq!(pairs(own, peer), expected, "{own} to {peer}");
            // Whom we reach reaches us.
            let swapped = reachable_pairs(&nics(peer), &nics(own)).len();
            assert_eq!(swapped, expected.split_whitespace().count(), "{peer} to {own}");
        }
    }

    #[test]
    fn a_peer_with_any_number_of_addresses_costs_little() {
        let hostile = vec![vec![address("10.0.0.2"); 1000]; 10_000];
        let pairs = reachable_pairs(&nics("10.0.0.1 10.0.0.3"), &hostile);
        assert_eq!(pairs.len(), 2 * NICS_MAX);
        let far = [vec![address("2001:db8::1"); ADDRESSES_MAX], vec![address("10.0.0.2")]].concat();
        assert!(reachable_pairs(&nics("10.0.0.1"), &[far]).is_empty(), "the 17th does not count");
    }
}
