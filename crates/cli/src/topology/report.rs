//! What `topology` prints: its keys as JSON.

use std::net::IpAddr;
use std::path::PathBuf;

use millstream_topology::PriorityMatrix;
use serde::Serialize;

/// What `--json` prints.
#[derive(Serialize)]
pub(super) struct Report {
    #[serde(serialize_with = "crate::output::path")]
    pub(super) sysfs: PathBuf,
    /// What can be used here; of another machine's tree, unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) providers: Option<Providers>,
    pub(super) rdma_devices: Vec<RdmaReport>,
    pub(super) interfaces: Vec<InterfaceReport>,
    pub(super) numa_nodes: Vec<NumaReport>,
    pub(super) gpus: Vec<GpuReport>,
    /// For each location of memory, the NICs to prefer and the others that can be used.
    pub(super) nic_priority_matrix: PriorityMatrix,
    /// Where the matrix was read from, if it does not follow from the rest.
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "crate::output::path_if_any"
    )]
    pub(super) nic_priority_matrix_file: Option<PathBuf>,
}

#[derive(Serialize)]
pub(super) struct Providers {
    pub(super) soft: Provider,
    pub(super) ibverbs: Provider,
}

#[derive(Serialize)]
pub(super) struct Provider {
    pub(super) usable: bool,
    /// Why it is not, and what to do; or what it has.
    pub(super) detail: String,
}

#[derive(Serialize)]
pub(super) struct RdmaReport {
    pub(super) name: String,
    pub(super) pci: Option<String>,
    pub(super) numa_node: Option<u32>,
    pub(super) ports: Vec<PortReport>,
}

#[derive(Serialize)]
pub(super) struct PortReport {
    pub(super) number: u32,
    pub(super) state: Option<String>,
    pub(super) link_layer: Option<String>,
    pub(super) rate: Option<String>,
    /// What queue pairs here can use: the entries of RoCEv2, or all of a port of InfiniBand.
    pub(super) gids: Vec<GidReport>,
}

#[derive(Serialize)]
pub(super) struct GidReport {
    pub(super) index: u32,
    pub(super) address: IpAddr,
    pub(super) interface: Option<String>,
}

#[derive(Serialize)]
pub(super) struct InterfaceReport {
    pub(super) name: String,
    pub(super) state: Option<String>,
    pub(super) mtu: Option<u32>,
    /// The largest path MTU of RoCE that fits; none below 348 bytes.
    pub(super) path_mtu: Option<usize>,
    pub(super) speed_mbit_per_s: Option<u32>,
    pub(super) pci: Option<String>,
    pub(super) numa_node: Option<u32>,
    /// Each is a soft device's, by its driver.
    pub(super) soft_devices: Vec<SoftReport>,
}

#[derive(Serialize)]
pub(super) struct SoftReport {
    pub(super) name: String,
    pub(super) address: IpAddr,
    /// The kernel cuts what we send, and joins what we receive.
    pub(super) segmentation_offload: bool,
    /// The one that is used unless another is asked for comes first.
    pub(super) drivers: Vec<DriverReport>,
}

#[derive(Serialize)]
pub(super) struct DriverReport {
    pub(super) name: &'static str,
    pub(super) usable: bool,
    /// Why not, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) problem: Option<String>,
}

#[derive(Serialize)]
pub(super) struct NumaReport {
    pub(super) number: u32,
    pub(super) processors: Option<String>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) distances: Vec<u32>,
}

#[derive(Serialize)]
pub(super) struct GpuReport {
    pub(super) pci: String,
    pub(super) vendor: String,
    pub(super) device: String,
    /// What its memory is called as a location: `cuda:0`.
    pub(super) location: Option<String>,
    pub(super) numa_node: Option<u32>,
    /// The nearest first.
    pub(super) rdma_devices: Vec<DistanceReport>,
}

#[derive(Serialize)]
pub(super) struct DistanceReport {
    pub(super) name: String,
    /// PIX, PXB, PHB, NODE or SYS; none when that is not known.
    pub(super) crossing: Option<&'static str>,
    /// Links of PCI Express; none when the way goes through the processor.
    pub(super) hops: Option<usize>,
    pub(super) numa_distance: Option<u32>,
}
