//! How far RDMA devices are from a GPU.

use crate::{Gpu, RdmaDevice, Topology};

/// An RDMA device as a GPU sees it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Distance {
    /// The RDMA device's name.
    pub rdma_device: String,
    /// Links of PCI Express between them; `None` when the way goes through the processor.
    pub hops: Option<usize>,
    /// From node to node, 10 within one; `None` when that is not known.
    pub numa: Option<u32>,
}

impl Topology {
    /// All RDMA devices on PCI Express, the nearest to the GPU first.
    pub fn distances(&self, gpu: &Gpu) -> Vec<Distance> {
        let distance = |device: &RdmaDevice| {
            Some(Distance {
                rdma_device: device.name.clone(),
                hops: device.pci.as_ref()?.hops(&gpu.pci),
                numa: self.numa_distance(gpu.numa_node, device.numa_node),
            })
        };
        let mut distances: Vec<Distance> = self.rdma_devices.iter().filter_map(distance).collect();
        // What is not known comes last; equals stay in the order of their names.
        distances.sort_by_key(|it| (it.hops.unwrap_or(usize::MAX), it.numa.unwrap_or(u32::MAX)));
        distances
    }

    fn numa_distance(&self, from: Option<u32>, to: Option<u32>) -> Option<u32> {
        let (from, to) = (from?, to?);
        let node = self.numa_nodes.iter().find(|node| node.number == from)?;
        // The columns are the nodes that there are, which may have gaps.
        let column = self.numa_nodes.iter().position(|node| node.number == to)?;
        node.distances.get(column).copied()
    }
}
