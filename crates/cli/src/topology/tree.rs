//! What a drawing shows of PCI Express: below each host bridge the devices that matter, and the
//! switches that are between them.

use std::collections::BTreeMap;

use millstream_topology::{Gpu, Interface, Nic, PciAddress, PciPath, Place, RdmaDevice, Topology};

/// Devices that are drawn, of thousands that a strange tree may have.
const LEAVES_MAX: usize = 256;

/// What is drawn of a machine.
pub(super) struct Machine {
    /// By NUMA node; none of devices of which that is not known.
    pub(super) nodes: BTreeMap<Option<u32>, Node>,
    /// How many devices there are besides.
    pub(super) left_out: usize,
}

/// What is at a NUMA node.
#[derive(Default)]
pub(super) struct Node {
    /// By the name of the root bus.
    pub(super) host_bridges: BTreeMap<String, Vec<Item>>,
    /// Devices that are not on PCI.
    pub(super) others: Vec<Leaf>,
}

/// A switch or a device.
#[derive(Debug)]
pub(super) enum Item {
    Switch(PciAddress, Vec<Self>),
    Leaf(Leaf),
}

/// A device.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) detail: String,
    pub(super) address: Option<PciAddress>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Gpu,
    /// A device that transfers can use.
    Nic,
    /// A network interface that has no such device.
    Interface,
}

/// A device, and where it is.
struct Placed<'a> {
    leaf: Leaf,
    pci: Option<&'a PciPath>,
    numa_node: Option<u32>,
}

/// The drawing of a machine whose NICs these are: the system's RDMA devices, then soft devices.
pub(super) fn machine(topology: &Topology, nics: &[Nic]) -> Machine {
    let soft = nics.iter().filter(|nic| topology.rdma_devices.iter().all(|it| it.name != nic.name));
    let rdma = topology.rdma_devices.iter().map(rdma);
    let soft = soft.map(|nic| Placed {
        leaf: Leaf {
            kind: Kind::Nic,
            name: nic.name.clone(),
            detail: "soft device".to_owned(),
            address: nic.pci.as_ref().map(PciPath::address),
        },
        pci: nic.pci.as_ref(),
        numa_node: nic.numa_node,
    });
    let mut leaves: Vec<Placed<'_>> =
        topology.gpus.iter().map(gpu).chain(rdma).chain(soft).collect();
    let taken: Vec<Option<PciAddress>> = leaves.iter().map(|placed| placed.leaf.address).collect();
    let interfaces = topology.interfaces.iter().filter(|interface| interface.pci.is_some());
    leaves.extend(interfaces.map(interface).filter(|it| !taken.contains(&it.leaf.address)));

    let left_out = leaves.len().saturating_sub(LEAVES_MAX);
    leaves.truncate(LEAVES_MAX);
    let mut nodes: BTreeMap<Option<u32>, Node> = BTreeMap::new();
    let with_processors = topology.numa_nodes.iter().filter(|node| node.processors.is_some());
    for node in with_processors.take(LEAVES_MAX) {
        nodes.entry(Some(node.number)).or_default();
    }
    let mut by_bridge: BTreeMap<(Option<u32>, String), Vec<Placed<'_>>> = BTreeMap::new();
    for placed in leaves {
        let node = topology.node(Place { pci: placed.pci, numa_node: placed.numa_node });
        match placed.pci {
            Some(pci) => {
                let key = (node, pci.root().to_owned());
                by_bridge.entry(key).or_default().push(placed);
            }
            None => nodes.entry(node).or_default().others.push(placed.leaf),
        }
    }
    for ((node, root), mut leaves) in by_bridge {
        leaves.sort_by(|one, other| one.functions().cmp(other.functions()));
        let items = items(&leaves, 0, false);
        nodes.entry(node).or_default().host_bridges.insert(root, items);
    }
    Machine { nodes, left_out }
}

impl Placed<'_> {
    fn functions(&self) -> &[PciAddress] {
        self.pci.map_or(&[], PciPath::functions)
    }
}

/// The items of devices that have the first `depth` functions of their ways in common, in the order
/// of their ways. Below a switch, further switches on the way of one device are shown, since they
/// make it farther; elsewhere only switches that are a way between two devices.
fn items(leaves: &[Placed<'_>], depth: usize, below_switch: bool) -> Vec<Item> {
    let groups = leaves.chunk_by(|one, other| one.functions()[depth] == other.functions()[depth]);
    groups.flat_map(|group| group_items(group, depth, below_switch)).collect()
}

fn group_items(group: &[Placed<'_>], depth: usize, below_switch: bool) -> Vec<Item> {
    // The bridges up to where ways part, or to the function itself.
    let first = group[0].functions();
    let mut end = depth;
    while end + 1 < first.len()
        && group.iter().all(|it| it.functions().get(end + 1) == Some(&first[end + 1]))
    {
        end += 1;
    }
    // Several devices of one function, such as two soft devices: they part nowhere.
    let is_function = group.iter().all(|it| it.functions().len() == end + 1);
    let inner = match is_function {
        true => group.iter().map(|it| Item::Leaf(it.leaf.clone())).collect(),
        false => {
            let (here, below) =
                group.split_at(group.partition_point(|it| it.functions().len() == end + 1));
            let mut inner = here.iter().map(|it| Item::Leaf(it.leaf.clone())).collect::<Vec<_>>();
            inner.extend(items(below, end + 1, true));
            vec![Item::Switch(first[end], inner)]
        }
    };
    if !below_switch {
        return inner;
    }
    // The first function is a downstream port. Each switch that is passed has an upstream and a
    // downstream port.
    let passed = (depth + 1..end).step_by(2).map(|upstream| first[upstream]);
    passed.rev().fold(inner, |inner, upstream| vec![Item::Switch(upstream, inner)])
}

fn gpu(gpu: &Gpu) -> Placed<'_> {
    let address = gpu.pci.address();
    let leaf = Leaf {
        kind: Kind::Gpu,
        name: gpu.location.clone().unwrap_or_else(|| "GPU".to_owned()),
        detail: format!("{:04x}:{:04x}", gpu.vendor, gpu.device),
        address: Some(address),
    };
    Placed { leaf, pci: Some(&gpu.pci), numa_node: gpu.numa_node }
}

fn rdma(device: &RdmaDevice) -> Placed<'_> {
    let detail = match device.ports.first() {
        Some(port) if port.state.as_deref().is_some_and(|state| state != "ACTIVE") => {
            port.state.clone()
        }
        // `400 Gb/sec (4X NDR)`: the lanes have no room.
        Some(port) => {
            port.rate.as_ref().map(|rate| rate.split(" (").next().unwrap_or(rate).to_owned())
        }
        None => None,
    };
    let leaf = Leaf {
        kind: Kind::Nic,
        name: device.name.clone(),
        detail: detail.unwrap_or_default(),
        address: device.pci.as_ref().map(PciPath::address),
    };
    Placed { leaf, pci: device.pci.as_ref(), numa_node: device.numa_node }
}

fn interface(interface: &Interface) -> Placed<'_> {
    let speed = interface.speed_mbit_per_s.map(|speed| format!("{speed} Mb/s"));
    let leaf = Leaf {
        kind: Kind::Interface,
        name: interface.name.clone(),
        detail: speed.unwrap_or_default(),
        address: interface.pci.as_ref().map(PciPath::address),
    };
    Placed { leaf, pci: interface.pci.as_ref(), numa_node: interface.numa_node }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Items of ways, as `switch(items)` by the last part of addresses.
    fn shown(ways: &[&str]) -> String {
        let addresses = |way: &str| -> Vec<PciAddress> {
            way.split('/').map(|bus| format!("0000:{bus}:00.0").parse().unwrap()).collect()
        };
        let paths: Vec<PciPath> =
            ways.iter().map(|way| PciPath::new("pci0000:00", addresses(way)).unwrap()).collect();
        let placed = |path| {
            let leaf = Leaf {
                kind: Kind::Nic,
                name: "x".to_owned(),
                detail: String::new(),
                address: Some(PciPath::address(path)),
            };
            Placed { leaf, pci: Some(path), numa_node: None }
        };
        let mut leaves: Vec<Placed<'_>> = paths.iter().map(placed).collect();
        leaves.sort_by(|one, other| one.functions().cmp(other.functions()));
        text(&items(&leaves, 0, false))
    }

    fn text(items: &[Item]) -> String {
        let bus = |address: &PciAddress| address.to_string()[5..7].to_owned();
        let item = |item: &Item| match item {
            Item::Switch(address, items) => format!("{}({})", bus(address), text(items)),
            Item::Leaf(leaf) => leaf.address.as_ref().map(bus).unwrap(),
        };
        items.iter().map(item).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn switches_are_shown_where_they_are_between_devices() {
        for (ways, expected) in [
            // At root ports, and behind a switch of its own, which is between it and nothing.
            (&["01/02", "03/04"][..], "02 04"),
            (&["01/02/03/04", "05/06"], "04 06"),
            // Two behind one switch: PIX.
            (&["01/02/03/04", "01/02/05/06"], "02(04 06)"),
            // One of them behind a second switch, both behind second switches, and three deep: PXB.
            (&["01/02/03/04", "01/02/05/06/07/08"], "02(04 06(08))"),
            (&["01/02/03/04/05/06", "01/02/07/08/09/0a"], "02(04(06) 08(0a))"),
            (&["01/02/03/04", "01/02/05/06/07/08/09/0a"], "02(04 06(08(0a)))"),
            // Two pairs below one switch.
            (
                &[
                    "01/02/03/04/05/06",
                    "01/02/03/04/07/08",
                    "01/02/09/0a/0b/0c",
                    "01/02/09/0a/0d/0e",
                ],
                "02(04(06 08) 0a(0c 0e))",
            ),
            // Two devices of one function, and one that is on the way to another.
            (&["01/02", "01/02"], "02 02"),
            (&["01/02", "01/02/03"], "02(02 03)"),
            (&[], ""),
        ] {
            assert_eq!(shown(ways), expected, "{ways:?}");
        }
    }
}
