//! Ways over routed links, which are no subnets: who is not at the other end of a link is reached over hosts that pass on
//! what is for others.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::layout::{End, Layout, PlacedLink};

/// A way of a host.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Route {
    /// Where it leads. Without one, anywhere.
    pub(crate) to: Option<IpAddr>,
    /// Whether it is only for what comes from the NIC's own address.
    pub(crate) own_source: bool,
    /// The other end of the NIC's link.
    pub(crate) via: IpAddr,
    /// Index of the NIC.
    pub(crate) nic: usize,
}

/// A routed link, as one of its ends sees it.
#[derive(Clone, Copy)]
struct Way {
    nic: usize,
    address: IpAddr,
    peer: IpAddr,
    to: usize,
    /// The NIC there.
    their_nic: usize,
}

/// Adds the routes of all hosts.
pub(crate) fn add(layout: &mut Layout) {
    let ways = ways(layout);
    let is_router: Vec<bool> = layout.hosts.iter().map(|host| host.is_router).collect();
    for (host, own) in ways.iter().enumerate().filter(|(host, _)| !is_router[*host]) {
        layout.hosts[host].routes = of_host(own);
    }
    for target in (0..ways.len()).filter(|&target| is_router[target]) {
        let addresses = reached_at(&ways, &is_router, target);
        for is_ipv4 in [true, false] {
            for (router, way) in towards(&ways, &is_router, target, is_ipv4) {
                let routes = &mut layout.hosts[router].routes;
                for &address in addresses.iter().filter(|address| address.is_ipv4() == is_ipv4) {
                    // The kernel knows the other ends of links.
                    if ways[router].iter().all(|own| own.peer != address) {
                        let (to, via, nic) = (Some(address), way.peer, way.nic);
                        routes.push(Route { to, own_source: false, via, nic });
                    }
                }
            }
        }
    }
}

/// The routed links of each host.
fn ways(layout: &Layout) -> Vec<Vec<Way>> {
    let mut ways = vec![Vec::new(); layout.hosts.len()];
    for PlacedLink { ends, .. } in &layout.links {
        let [End::Nic(one, one_nic), End::Nic(other, other_nic)] = *ends else { continue };
        for (host, nic, to, their_nic) in
            [(one, one_nic, other, other_nic), (other, other_nic, one, one_nic)]
        {
            let own = &layout.hosts[host].nics[nic];
            if let (&[address], Some(peer)) = (&own.addresses[..], own.peer) {
                ways[host].push(Way { nic, address, peer, to, their_nic });
            }
        }
    }
    ways
}

/// A host that passes nothing on: over its first link, and what comes from another link's address over that one, so that
/// each of its links carries what is for it.
fn of_host(ways: &[Way]) -> Vec<Route> {
    let mut routes = Vec::new();
    for is_ipv4 in [true, false] {
        let own: Vec<&Way> = ways.iter().filter(|way| way.peer.is_ipv4() == is_ipv4).collect();
        let Some(first) = own.first() else { continue };
        let route =
            |way: &Way, own_source| Route { to: None, own_source, via: way.peer, nic: way.nic };
        routes.push(route(first, false));
        let mut seen = HashSet::new();
        if own.len() > 1 {
            let first_of_address = own.iter().filter(|way| seen.insert(way.address));
            routes.extend(first_of_address.map(|way| route(way, true)));
        }
    }
    routes
}

/// The addresses that are reached by reaching this router: its own, and those of hosts at its links. A host's address is
/// at the first of its links.
fn reached_at(ways: &[Vec<Way>], is_router: &[bool], router: usize) -> Vec<IpAddr> {
    let mut seen = HashSet::new();
    let mut addresses: Vec<IpAddr> = ways[router].iter().map(|way| way.address).collect();
    for way in ways[router].iter().filter(|way| !is_router[way.to]) {
        let first = ways[way.to].iter().find(|theirs| theirs.address == way.peer);
        if first.is_some_and(|first| first.nic == way.their_nic) {
            addresses.push(way.peer);
        }
    }
    addresses.retain(|&address| seen.insert(address));
    addresses
}

/// For each other router that gets there: its way of the fewest links over routers, of those the first one.
fn towards(
    ways: &[Vec<Way>],
    is_router: &[bool],
    target: usize,
    is_ipv4: bool,
) -> Vec<(usize, Way)> {
    let mut found: Vec<Option<Way>> = vec![None; ways.len()];
    let mut next = VecDeque::from([target]);
    while let Some(at) = next.pop_front() {
        for way in ways[at].iter().filter(|way| way.peer.is_ipv4() == is_ipv4) {
            let back = ways[way.to].iter().find(|back| back.nic == way.their_nic);
            if way.to != target && is_router[way.to] && found[way.to].is_none() {
                found[way.to] = back.copied();
                next.push_back(way.to);
            }
        }
    }
    found.into_iter().enumerate().filter_map(|(host, way)| Some((host, way?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Link, Plan};

    /// Routes of a host: `to via NIC`, those of a source in parentheses.
    fn routes(layout: &Layout, host: &str) -> Vec<String> {
        let host = layout.host(host).unwrap();
        let text = |route: &Route| {
            let to = route.to.map_or_else(|| "any".to_owned(), |to| to.to_string());
            let text = format!("{to} via {} {}", route.via, host.nics[route.nic].name);
            if route.own_source { format!("({text})") } else { text }
        };
        host.routes.iter().map(text).collect()
    }

    fn layout(links: &[[(&str, &str); 2]]) -> Layout {
        let plan = Plan::new().hosts(["a", "b", "r", "s", "t"]);
        let plan = ["r", "s", "t"].into_iter().fold(plan, Plan::router);
        let plan = links.iter().fold(plan, |plan, ends| {
            let ends = ends.map(|(host, address)| (host, address.parse().unwrap()));
            plan.routed_link(ends, &Link::default())
        });
        Layout::new(&plan).unwrap()
    }

    #[test]
    fn routers_know_ways_to_all_and_hosts_one() {
        // a - r - s - b, and t between r and s, which is a way around.
        let layout = layout(&[
            [("a", "10.0.0.1"), ("r", "10.1.0.1")],
            [("r", "10.1.0.1"), ("t", "10.1.0.3")],
            [("t", "10.1.0.3"), ("s", "10.1.0.2")],
            [("r", "10.1.0.1"), ("s", "10.1.0.2")],
            [("s", "10.1.0.9"), ("b", "10.0.0.2")],
        ]);
        assert_eq!(routes(&layout, "a"), ["any via 10.1.0.1 eth0"]);
        assert_eq!(
            routes(&layout, "r"),
            ["10.1.0.9 via 10.1.0.2 eth2", "10.0.0.2 via 10.1.0.2 eth2"]
        );
        assert_eq!(
            routes(&layout, "t"),
            [
                "10.0.0.1 via 10.1.0.1 eth0",
                "10.1.0.9 via 10.1.0.2 eth1",
                "10.0.0.2 via 10.1.0.2 eth1"
            ]
        );
    }

    #[test]
    fn what_comes_from_an_address_goes_over_its_link() {
        let layout = layout(&[
            [("r", "10.1.0.1"), ("a", "10.0.0.1")],
            [("s", "10.1.0.2"), ("a", "10.0.1.1")],
            [("s", "fd00::2"), ("a", "fd00::1")],
        ]);
        assert_eq!(
            routes(&layout, "a"),
            [
                "any via 10.1.0.1 eth0",
                "(any via 10.1.0.1 eth0)",
                "(any via 10.1.0.2 eth1)",
                "any via fd00::2 eth2"
            ]
        );
        // Nobody but the host is between them, and it passes nothing on.
        assert_eq!(routes(&layout, "r"), [""; 0]);
    }
}
