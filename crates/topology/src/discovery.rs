//! The priority matrix of a machine: which NICs are near which memory.

use crate::{Distance, PciPath, Place, Priorities, PriorityMatrix, Topology};

/// A NIC that transfers may use: a system's RDMA device, or a soft device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Nic {
    /// The name that the matrix has for it.
    pub name: String,
    /// Where it is on PCI Express, or where the interface of a soft device is.
    pub pci: Option<PciPath>,
    /// The NUMA node that it is at.
    pub numa_node: Option<u32>,
}

impl Nic {
    /// Where it is.
    pub fn place(&self) -> Place<'_> {
        Place { pci: self.pci.as_ref(), numa_node: self.numa_node }
    }
}

impl Topology {
    /// The system's RDMA devices, by name.
    pub fn nics(&self) -> Vec<Nic> {
        let nic = |device: &crate::RdmaDevice| Nic {
            name: device.name.clone(),
            pci: device.pci.clone(),
            numa_node: device.numa_node,
        };
        self.rdma_devices.iter().map(nic).collect()
    }

    /// A soft device of this name: it is where its interface is. Loopback is nowhere, and so is an
    /// interface that the tree does not have.
    pub fn soft_nic(&self, name: &str, interface: &str) -> Nic {
        let interface = self.interfaces.iter().find(|it| it.name == interface);
        Nic {
            name: name.to_owned(),
            pci: interface.and_then(|it| it.pci.clone()),
            numa_node: interface.and_then(|it| it.numa_node),
        }
    }

    /// Which of these NICs are to be preferred for memory of each NUMA node (`cpu:0`) and each GPU
    /// (`cuda:0`): the nearest ones, all that are equally near. The others are available, in the
    /// order of the list. A NIC of which nothing is known is not preferred, unless the machine has
    /// only one NUMA node.
    pub fn priority_matrix(&self, nics: &[Nic]) -> PriorityMatrix {
        let mut matrix = PriorityMatrix::default();
        // A kernel without NUMA names no node.
        let no_nodes = self.numa_nodes.is_empty().then_some(0);
        for node in self.numa_nodes.iter().map(|node| node.number).chain(no_nodes) {
            let memory = Place { pci: None, numa_node: Some(node) };
            matrix.insert(format!("cpu:{node}"), self.priorities(memory, nics));
        }
        for gpu in &self.gpus {
            if let Some(location) = &gpu.location {
                matrix.insert(location.clone(), self.priorities(gpu.place(), nics));
            }
        }
        matrix
    }

    fn priorities(&self, memory: Place<'_>, nics: &[Nic]) -> Priorities {
        let distances: Vec<(&Nic, Distance)> =
            nics.iter().map(|nic| (nic, self.distance(memory, nic.place()))).collect();
        let known = distances.iter().filter(|(_, distance)| distance.crossing.is_some());
        let least = known.map(|(_, distance)| distance.rank()).min();
        let mut priorities = Priorities::default();
        for (nic, distance) in distances {
            let nearest = distance.crossing.is_some() && Some(distance.rank()) == least;
            match nearest {
                true => priorities.preferred.push(nic.name.clone()),
                false => priorities.available.push(nic.name.clone()),
            }
        }
        priorities
    }
}
