//! How far devices of a machine are from each other.

use std::fmt;

use crate::{Gpu, Interface, PciPath, RdmaDevice, Topology};

/// What bytes cross between two devices, in the words of `nvidia-smi topo`. The nearest comes first.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Crossing {
    /// One PCI switch or bridge at most.
    Pix,
    /// Several PCI switches, and no host bridge.
    Pxb,
    /// A host bridge: both devices are below one.
    Phb,
    /// Two host bridges of one NUMA node, or the processors' way to a device that is on no PCI.
    Node,
    /// The links between NUMA nodes.
    Sys,
}

impl Crossing {
    /// All, the nearest first.
    pub const ALL: [Self; 5] = [Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys];

    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }
}

impl fmt::Display for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a device is, as far as the tree tells.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// On PCI Express.
    pub pci: Option<&'a PciPath>,
    /// The NUMA node that it is at.
    pub numa_node: Option<u32>,
}

/// How far one place is from another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Distance {
    /// `None` when the NUMA node of one of them, which decides, is not known.
    pub crossing: Option<Crossing>,
    /// Links of PCI Express between them; `None` when they are not below one host bridge.
    pub hops: Option<usize>,
    /// From node to node as firmware says (ACPI 6.5, 5.2.17), 10 within one; `None` when that is
    /// not known.
    pub numa: Option<u32>,
}

impl Distance {
    /// What is smaller of the nearer one. Hops count only below one host bridge: elsewhere the way
    /// through the processor is what is long. What is not known is behind everything that is.
    pub fn rank(&self) -> (Crossing, usize, u32) {
        let crossing = self.crossing.unwrap_or(Crossing::Sys);
        (crossing, self.hops.unwrap_or(0), self.numa.unwrap_or(u32::MAX))
    }
}

impl Gpu {
    /// Where it is.
    pub fn place(&self) -> Place<'_> {
        Place { pci: Some(&self.pci), numa_node: self.numa_node }
    }
}

impl RdmaDevice {
    /// Where it is.
    pub fn place(&self) -> Place<'_> {
        Place { pci: self.pci.as_ref(), numa_node: self.numa_node }
    }
}

impl Interface {
    /// Where it is.
    pub fn place(&self) -> Place<'_> {
        Place { pci: self.pci.as_ref(), numa_node: self.numa_node }
    }
}

impl Topology {
    /// How far `to` is from `from`.
    pub fn distance(&self, from: Place<'_>, to: Place<'_>) -> Distance {
        let hops = from.pci.zip(to.pci).and_then(|(from, to)| from.hops(to));
        let nodes = self.node(from).zip(self.node(to));
        let bridges = from.pci.zip(to.pci).and_then(|(from, to)| from.crossing(to));
        let crossing = bridges.or_else(|| {
            nodes.map(|(from, to)| if from == to { Crossing::Node } else { Crossing::Sys })
        });
        let numa = nodes.and_then(|(from, to)| self.numa_distance(from, to));
        Distance { crossing, hops, numa }
    }

    /// All RDMA devices, the nearest first; equals stay in the order of their names.
    pub fn distances(&self, from: Place<'_>) -> Vec<(&RdmaDevice, Distance)> {
        let distance = |device| (device, self.distance(from, RdmaDevice::place(device)));
        let mut distances: Vec<_> = self.rdma_devices.iter().map(distance).collect();
        distances.sort_by_key(|(_, distance)| distance.rank());
        distances
    }

    /// The distance from node to node that firmware tells; 10 within one.
    pub fn numa_distance(&self, from: u32, to: u32) -> Option<u32> {
        let told = || {
            let node = self.numa_nodes.iter().find(|node| node.number == from)?;
            // The columns are the nodes that there are, which may have gaps.
            let column = self.numa_nodes.iter().position(|node| node.number == to)?;
            node.distances.get(column).copied()
        };
        told().or((from == to).then_some(10))
    }

    /// The NUMA node of a place. Where the machine has only one, that is it: virtual machines tell
    /// none of their devices. A node that the tree does not have is as good as none.
    pub fn node(&self, place: Place<'_>) -> Option<u32> {
        let only = match &self.numa_nodes[..] {
            [] => Some(0),
            [node] => Some(node.number),
            _ => None,
        };
        let is_there = |number: &u32| self.numa_nodes.iter().any(|node| node.number == *number);
        place.numa_node.filter(|number| self.numa_nodes.is_empty() || is_there(number)).or(only)
    }
}
