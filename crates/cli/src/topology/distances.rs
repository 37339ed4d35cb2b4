//! How far memory is from NICs, as a table.

use millstream_topology::{Crossing, Nic, Place, Topology};

/// A row for each NUMA node with processors and each GPU, a column for each NIC.
pub(super) struct DistanceTable {
    pub(super) nics: Vec<String>,
    pub(super) rows: Vec<Row>,
}

/// The distances of one location.
pub(super) struct Row {
    /// `cpu:0`, `cuda:0`, or a PCI address where a GPU has no name as a location.
    pub(super) location: String,
    /// To each NIC; none where it is not known.
    pub(super) crossings: Vec<Option<Crossing>>,
}

impl DistanceTable {
    pub(super) fn of(topology: &Topology, nics: &[Nic]) -> Self {
        let row = |location: String, from: Place<'_>| {
            let crossing = |nic: &Nic| topology.distance(from, nic.place()).crossing;
            Row { location, crossings: nics.iter().map(crossing).collect() }
        };
        let with_processors = topology.numa_nodes.iter().filter(|node| node.processors.is_some());
        let nodes = with_processors.map(|node| {
            let place = Place { pci: None, numa_node: Some(node.number) };
            row(format!("cpu:{}", node.number), place)
        });
        let gpus = topology.gpus.iter().map(|gpu| {
            let location = gpu.location.clone().unwrap_or_else(|| gpu.pci.address().to_string());
            row(location, gpu.place())
        });
        let nics = nics.iter().map(|nic| nic.name.clone()).collect();
        Self { nics, rows: nodes.chain(gpus).collect() }
    }
}

/// The word for what is crossed.
pub(super) fn word(crossing: Option<Crossing>) -> &'static str {
    crossing.map_or("?", Crossing::name)
}

/// What the words mean.
pub(super) fn meaning(crossing: Crossing) -> &'static str {
    match crossing {
        Crossing::Pix => "one PCI switch at most",
        Crossing::Pxb => "several PCI switches",
        Crossing::Phb => "a PCI host bridge",
        Crossing::Node => "within a NUMA node",
        Crossing::Sys => "between NUMA nodes",
    }
}
