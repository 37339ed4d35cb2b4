//! The network of switches and hosts as it was written down: who is connected to whom.
//!
//! The entries are those of a topology file: switches, each with its connections to hosts, to switches below
//! and to switches above. Addresses say who is at the other end. [`Topology::new`] makes a directed graph
//! without circles of them, which [`Topology::place`] plans trees on.

mod check;
mod entry;
mod error;
mod place;
#[cfg(test)]
mod tests;

use core::net::IpAddr;
use std::collections::{BTreeMap, HashMap};

pub use entry::{ConnectionEntry, LinkRate, MAX_QUEUE_PAIR, MacAddress, SwitchEntry};
pub use error::{Problem, TopologyError};
pub use place::{Demand, PlaceError, Placed, SwitchState};

use crate::plan::FanIn;

/// The most switches of a topology.
pub const MAX_SWITCHES: usize = 1024;

/// The most connections of a topology, of all switches together.
pub const MAX_CONNECTIONS: usize = 1 << 18;

/// The index of a switch, in the order of the entries.
pub type SwitchIndex = usize;

/// The index of a link.
pub type LinkIndex = usize;

/// A network that can be planned on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Topology {
    switches: Vec<TopologySwitch>,
    links: Vec<Link>,
    /// Which switch has an address.
    owners: HashMap<IpAddr, SwitchIndex>,
    /// Links to the host at an address.
    attachments: BTreeMap<IpAddr, Vec<LinkIndex>>,
    /// The MAC addresses that are known.
    macs: HashMap<IpAddr, MacAddress>,
    /// What a link without a rate counts as.
    default_rate: LinkRate,
}

/// A switch of the network.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TopologySwitch {
    /// Its number in the file.
    pub id: u64,
    /// The name that it registers with, where the file has one.
    pub name: Option<String>,
    /// Whether it is above all others.
    pub root: bool,
    /// How many children a node on it may have.
    pub fan_in: Option<FanIn>,
    /// Its addresses, in the order of the connections.
    pub addresses: Vec<IpAddr>,
    /// Links to switches below.
    below: Vec<LinkIndex>,
}

/// A link between a switch and what is below it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Link {
    /// What is below.
    pub lower: Lower,
    /// Its address at the link.
    pub lower_address: IpAddr,
    /// Its MAC address there, where the file has one.
    pub lower_mac: Option<MacAddress>,
    /// The switch above.
    pub upper: SwitchIndex,
    /// Its address at the link.
    pub upper_address: IpAddr,
    /// Its MAC address there.
    pub upper_mac: Option<MacAddress>,
    /// What it carries in each direction.
    pub rate: Option<LinkRate>,
}

/// What is at the lower end of a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lower {
    /// A host, by its number in the file.
    Host(u64),
    /// A switch.
    Switch(SwitchIndex),
}

impl Topology {
    /// The switches, in the order of the entries.
    pub fn switches(&self) -> &[TopologySwitch] {
        &self.switches
    }

    /// The links.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Whether a host is at this address.
    pub fn has_host(&self, address: IpAddr) -> bool {
        self.attachments.contains_key(&address)
    }

    /// The host at an address.
    pub fn host_id(&self, address: IpAddr) -> Option<u64> {
        let &link = self.attachments.get(&address)?.first()?;
        match self.links[link].lower {
            Lower::Host(id) => Some(id),
            Lower::Switch(_) => None,
        }
    }

    /// The switch that says that it has this name and this address: the one of the name, or of no name and the
    /// address. It must have both where the file says both.
    pub fn switch(&self, name: &str, address: IpAddr) -> Option<SwitchIndex> {
        let &index = self.owners.get(&address)?;
        let named = self.switches[index].name.as_deref();
        named.is_none_or(|known| known == name).then_some(index)
    }

    /// A switch as people know it: its number, and its name or an address.
    pub fn describe(&self, switch: SwitchIndex) -> String {
        let TopologySwitch { id, name, addresses, .. } = &self.switches[switch];
        match (name, addresses.first()) {
            (Some(name), _) => format!("{id} ({name:?})"),
            (None, Some(address)) => format!("{id} ({address})"),
            (None, None) => id.to_string(),
        }
    }

    /// The MAC address of a switch or a host at one of its addresses, where the file has it.
    pub fn mac(&self, address: IpAddr) -> Option<MacAddress> {
        self.macs.get(&address).copied()
    }
}
