//! From entries to a graph.

use core::net::IpAddr;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::{
    ConnectionEntry, Link, LinkIndex, LinkRate, Lower, MAX_CONNECTIONS, MAX_SWITCHES, MacAddress,
    Problem, SwitchEntry, SwitchIndex, Topology, TopologyError, TopologySwitch,
};

type At = TopologyError;

impl Topology {
    /// The network of these switches.
    pub fn new(entries: &[SwitchEntry]) -> Result<Self, TopologyError> {
        let connections = entries.iter().map(|entry| entry.connections.len()).sum();
        for (what, count, limit) in [
            ("switches", entries.len(), MAX_SWITCHES),
            ("connections", connections, MAX_CONNECTIONS),
        ] {
            if count > limit {
                return Err(At::all(Problem::TooMany { what, count, limit }));
            }
        }
        if entries.is_empty() {
            return Err(At::all(Problem::Nothing("switch")));
        }
        let (switches, owners) = switches(entries)?;
        let mut topology = Self {
            switches,
            links: Vec::new(),
            owners,
            attachments: BTreeMap::new(),
            macs: HashMap::new(),
            default_rate: LinkRate::UNKNOWN,
        };
        topology.add_links(entries)?;
        if topology.attachments.is_empty() {
            return Err(At::all(Problem::Nothing("host")));
        }
        topology.check_order()?;
        topology.check_root()?;
        topology.macs = macs(&topology.links);
        let fastest = topology.links.iter().filter_map(|link| link.rate).max();
        topology.default_rate = fastest.unwrap_or(LinkRate::UNKNOWN);
        Ok(topology)
    }

    fn id(&self, switch: SwitchIndex) -> u64 {
        self.switches[switch].id
    }

    fn add_links(&mut self, entries: &[SwitchEntry]) -> Result<(), TopologyError> {
        // Links between switches, by their ends: the lower one's address first.
        let mut known: HashMap<(IpAddr, IpAddr), LinkIndex> = HashMap::new();
        for (index, entry) in entries.iter().enumerate() {
            let mut ours = HashSet::new();
            for (number, connection) in entry.connections.iter().enumerate() {
                let link = self.link(index, connection);
                let link = link.map_err(|problem| At::connection(index, number, problem))?;
                if !ours.insert((connection.my_ip, connection.peer_ip)) {
                    let problem =
                        Problem::DuplicateConnection(connection.my_ip, connection.peer_ip);
                    return Err(At::connection(index, number, problem));
                }
                match link.lower {
                    Lower::Host(_) => {
                        self.attachments
                            .entry(link.lower_address)
                            .or_default()
                            .push(self.links.len());
                        self.links.push(link);
                    }
                    Lower::Switch(lower) => {
                        let other = if lower == index { link.upper } else { lower };
                        self.add_trunk(&mut known, link, other)
                            .map_err(|problem| At::connection(index, number, problem))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// A link between two switches, which both may have.
    fn add_trunk(
        &mut self,
        known: &mut HashMap<(IpAddr, IpAddr), LinkIndex>,
        link: Link,
        other: SwitchIndex,
    ) -> Result<(), Problem> {
        let other_id = self.id(other);
        if known.contains_key(&(link.upper_address, link.lower_address)) {
            // If this switch is the upper end, it says `up: false`.
            return Err(Problem::BothEnds { other: other_id, up: link.upper == other });
        }
        match known.get(&(link.lower_address, link.upper_address)) {
            None => {
                known.insert((link.lower_address, link.upper_address), self.links.len());
                self.switches[link.upper].below.push(self.links.len());
                self.links.push(link);
            }
            Some(&earlier) => {
                let earlier = &mut self.links[earlier];
                if earlier.rate.is_some() && link.rate.is_some() && earlier.rate != link.rate {
                    return Err(Problem::Rates { other: other_id });
                }
                earlier.rate = earlier.rate.or(link.rate);
                earlier.lower_mac = earlier.lower_mac.or(link.lower_mac);
                earlier.upper_mac = earlier.upper_mac.or(link.upper_mac);
            }
        }
        Ok(())
    }

    /// What one connection of a switch means.
    fn link(&self, index: SwitchIndex, connection: &ConnectionEntry) -> Result<Link, Problem> {
        let &ConnectionEntry { up, host_id, my_ip, my_mac, peer_ip, peer_mac, rate } = connection;
        if peer_ip.is_unspecified() || peer_ip.is_multicast() {
            return Err(Problem::Address(peer_ip));
        }
        if my_ip.is_ipv4() != peer_ip.is_ipv4() {
            return Err(Problem::Families(my_ip, peer_ip));
        }
        let peer = self.owners.get(&peer_ip).copied();
        if peer == Some(index) {
            return Err(Problem::Itself(peer_ip));
        }
        if up {
            if host_id.is_some() {
                return Err(Problem::HostAbove);
            }
            let upper = peer.ok_or(Problem::NoSwitchAbove(peer_ip))?;
            return Ok(Link {
                lower: Lower::Switch(index),
                lower_address: my_ip,
                lower_mac: my_mac,
                upper,
                upper_address: peer_ip,
                upper_mac: peer_mac,
                rate,
            });
        }
        let lower = match (host_id, peer) {
            (Some(host), Some(switch)) => {
                let switch = self.id(switch);
                return Err(Problem::HostIsSwitch { host, address: peer_ip, switch });
            }
            (Some(host), None) => match self.host_id(peer_ip) {
                Some(other) if other != host => {
                    return Err(Problem::SharedHostAddress { address: peer_ip, host, other });
                }
                _ => Lower::Host(host),
            },
            (None, Some(switch)) => Lower::Switch(switch),
            (None, None) => return Err(Problem::Nobody(peer_ip)),
        };
        Ok(Link {
            lower,
            lower_address: peer_ip,
            lower_mac: peer_mac,
            upper: index,
            upper_address: my_ip,
            upper_mac: my_mac,
            rate,
        })
    }

    /// The switches above each switch, once for each link.
    fn above(&self) -> Vec<Vec<SwitchIndex>> {
        let mut above = vec![Vec::new(); self.switches.len()];
        for link in &self.links {
            if let Lower::Switch(lower) = link.lower {
                above[lower].push(link.upper);
            }
        }
        above
    }

    /// No switch is above itself.
    fn check_order(&self) -> Result<(), TopologyError> {
        let above = self.above();
        // Links up that were not taken away yet, and switches that have none.
        let mut left: Vec<usize> = above.iter().map(Vec::len).collect();
        let mut free: Vec<SwitchIndex> =
            (0..left.len()).filter(|&index| left[index] == 0).collect();
        while let Some(upper) = free.pop() {
            for &link in &self.switches[upper].below {
                let Lower::Switch(lower) = self.links[link].lower else { continue };
                left[lower] -= 1;
                if left[lower] == 0 {
                    free.push(lower);
                }
            }
        }
        let Some(start) = left.iter().position(|&links| links > 0) else { return Ok(()) };
        // Each that is left has one above that is left too: going up ends in a circle.
        let up = |switch: SwitchIndex| {
            above[switch].iter().copied().find(|&upper| left[upper] > 0).unwrap_or(switch)
        };
        let mut seen = vec![false; left.len()];
        let mut at = start;
        while !core::mem::replace(&mut seen[at], true) {
            at = up(at);
        }
        let mut circle = vec![at];
        while let Some(&last) = circle.last()
            && up(last) != at
        {
            circle.push(up(last));
        }
        let first = circle.iter().copied().min().unwrap_or(at);
        let ids = circle.into_iter().map(|switch| self.id(switch)).collect();
        Err(At::at(first, Problem::Cycle(ids)))
    }

    /// If there is a root, it is the only one, and above all others.
    fn check_root(&self) -> Result<(), TopologyError> {
        let mut roots = (0..self.switches.len()).filter(|&index| self.switches[index].root);
        let Some(root) = roots.next() else { return Ok(()) };
        if let Some(other) = roots.next() {
            return Err(At::at(other, Problem::TwoRoots(self.id(root))));
        }
        if let Some(&upper) = self.above()[root].first() {
            return Err(At::at(root, Problem::AboveRoot(self.id(upper))));
        }
        let mut reached = vec![false; self.switches.len()];
        let mut next = vec![root];
        while let Some(upper) = next.pop() {
            if core::mem::replace(&mut reached[upper], true) {
                continue;
            }
            next.extend(self.switches[upper].below.iter().filter_map(|&link| {
                match self.links[link].lower {
                    Lower::Switch(lower) => Some(lower),
                    Lower::Host(_) => None,
                }
            }));
        }
        match reached.iter().position(|reached| !reached) {
            Some(beside) => Err(At::at(beside, Problem::BesideRoot(self.id(root)))),
            None => Ok(()),
        }
    }
}

/// The MAC address of each address that has one.
fn macs(links: &[Link]) -> HashMap<IpAddr, MacAddress> {
    let ends = links.iter().flat_map(|link| {
        [(link.upper_address, link.upper_mac), (link.lower_address, link.lower_mac)]
    });
    ends.filter_map(|(address, mac)| Some((address, mac?))).collect()
}

/// The switches without their links, and who has which address.
fn switches(
    entries: &[SwitchEntry],
) -> Result<(Vec<TopologySwitch>, HashMap<IpAddr, SwitchIndex>), TopologyError> {
    let (mut ids, mut names) = (HashSet::new(), HashMap::new());
    let mut owners: HashMap<IpAddr, SwitchIndex> = HashMap::new();
    let mut switches = Vec::with_capacity(entries.len());
    for (index, entry) in entries.iter().enumerate() {
        if !ids.insert(entry.id) {
            return Err(At::at(index, Problem::DuplicateId(entry.id)));
        }
        if let Some(name) = &entry.name
            && let Some(other) = names.insert(name, entry.id)
        {
            let name = name.clone();
            return Err(At::at(index, Problem::DuplicateName { name, other }));
        }
        if entry.connections.is_empty() {
            return Err(At::at(index, Problem::NoConnections));
        }
        let mut addresses = Vec::new();
        for (number, &ConnectionEntry { my_ip: address, .. }) in
            entry.connections.iter().enumerate()
        {
            if address.is_unspecified() || address.is_multicast() {
                return Err(At::connection(index, number, Problem::Address(address)));
            }
            match owners.insert(address, index) {
                None => addresses.push(address),
                Some(other) if other != index => {
                    let other = entries[other].id;
                    let problem = Problem::SharedAddress { address, other };
                    return Err(At::connection(index, number, problem));
                }
                Some(_) => {}
            }
        }
        let SwitchEntry { id, root, fan_in, .. } = *entry;
        let name = entry.name.clone();
        switches.push(TopologySwitch { id, name, root, fan_in, addresses, below: Vec::new() });
    }
    Ok((switches, owners))
}
