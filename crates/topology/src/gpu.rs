//! GPUs: display controllers on PCI Express, whose class is 0x03.

use std::path::Path;

use crate::pci::PciPath;
use crate::sysfs::{hexadecimal, names, numa_node};

/// A display controller.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Gpu {
    /// Where it is.
    pub pci: PciPath,
    /// Its vendor's number: 0x10de is NVIDIA, 0x1002 AMD, 0x8086 Intel.
    pub vendor: u32,
    /// The vendor's number for it.
    pub device: u32,
    /// The NUMA node that it is at.
    pub numa_node: Option<u32>,
}

pub(crate) fn read(root: &Path) -> Vec<Gpu> {
    let devices = root.join("bus/pci/devices");
    let gpu = |name: String| {
        let folder = devices.join(name);
        let class = hexadecimal(&folder.join("class"))?;
        let gpu = || {
            Some(Gpu {
                pci: PciPath::of(&folder)?,
                vendor: hexadecimal(&folder.join("vendor"))?,
                device: hexadecimal(&folder.join("device"))?,
                numa_node: numa_node(&folder),
            })
        };
        if class >> 16 == 0x03 { gpu() } else { None }
    };
    let mut gpus: Vec<Gpu> = names(&devices).into_iter().filter_map(gpu).collect();
    gpus.sort_by_key(|gpu| gpu.pci.address());
    gpus
}
