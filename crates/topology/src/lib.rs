//! What of a machine matters to moving bytes: RDMA devices, network interfaces, NUMA nodes, GPUs,
//! and how far they are from each other, as the kernel tells it in files (sysfs).
//!
//! The root of the tree is an argument, so that other machines' trees can be looked at too.
//!
//! ```no_run
//! let topology = millstream_topology::Topology::read("/sys".as_ref())?;
//! for gpu in &topology.gpus {
//!     println!("{}: {:?}", gpu.pci.address(), topology.distances(gpu.place()));
//! }
//! # Ok::<(), millstream_topology::ReadError>(())
//! ```

#![forbid(unsafe_code)]

mod affinity;
mod discovery;
mod distance;
mod filter;
mod gpu;
mod interface;
mod matrix;
mod numa;
mod pci;
mod rdma;
mod reach;
mod selection;
mod sysfs;

use std::path::{Path, PathBuf};

use thiserror::Error;

pub use affinity::{AffinityError, PeerAffinity};
pub use discovery::Nic;
pub use distance::{Crossing, Distance, Place};
pub use filter::DeviceFilter;
pub use gpu::Gpu;
pub use interface::Interface;
pub use matrix::{MatrixError, MatrixFileError, Priorities, PriorityMatrix};
pub use numa::NumaNode;
pub use pci::{PciAddress, PciPath};
use rdma::Gids;
pub use rdma::{GidEntry, Port, RdmaDevice};
pub use reach::{Address, Pair, reachable_pairs};
pub use selection::{ANY_LOCATION, Candidates, Numbers, ResolvedMatrix};

/// What a sysfs tree tells. What it does not tell is left out: no file is needed.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Topology {
    /// By name.
    pub rdma_devices: Vec<RdmaDevice>,
    /// By name.
    pub interfaces: Vec<Interface>,
    /// By number.
    pub numa_nodes: Vec<NumaNode>,
    /// By PCI address.
    pub gpus: Vec<Gpu>,
}

/// Why a tree could not be read.
#[derive(Debug, Error)]
#[error("{} is no sysfs tree: it has no folder `class`; the machine's own is /sys", root.display())]
pub struct ReadError {
    /// Where it should be.
    pub root: PathBuf,
}

impl Topology {
    /// Reads the tree below `root`.
    pub fn read(root: &Path) -> Result<Self, ReadError> {
        Self::read_with(root, Gids::Read)
    }

    /// The same without the GIDs, whose tables have some hundreds of entries a port, each in files of its
    /// own.
    pub fn read_places(root: &Path) -> Result<Self, ReadError> {
        Self::read_with(root, Gids::LeaveOut)
    }

    fn read_with(root: &Path, gids: Gids) -> Result<Self, ReadError> {
        if !root.join("class").is_dir() {
            return Err(ReadError { root: root.to_owned() });
        }
        Ok(Self {
            rdma_devices: rdma::read(root, gids),
            interfaces: interface::read(root),
            numa_nodes: numa::read(root),
            gpus: gpu::read(root),
        })
    }
}
