//! GPUs and other accelerators on PCI Express.
//!
//! Their class is no proof: the chip with which a board's management controller (BMC) draws its
//! console is a VGA controller, and so is a desktop's GPU; GPUs of servers are 3D or other display
//! controllers, and some are processing accelerators. PCI Code and ID Assignment Specification,
//! sections 1.4 and 1.19.

use std::path::Path;

use crate::pci::PciPath;
use crate::sysfs::{DEVICES_MAX, hexadecimal, names, numa_node};

/// A GPU or another accelerator.
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
    /// The name of its memory as a location: `cuda:0`. GPUs of one vendor are counted in the order
    /// of their PCI addresses, as CUDA does with `CUDA_DEVICE_ORDER=PCI_BUS_ID`. None of vendors
    /// that have no such name.
    pub location: Option<String>,
}

const VGA_CONTROLLER: u32 = 0x0300;
const CONTROLLER_3D: u32 = 0x0302;
const OTHER_DISPLAY_CONTROLLER: u32 = 0x0380;
/// All interfaces of this base class.
const PROCESSING_ACCELERATOR: u32 = 0x12;

const NVIDIA: u32 = 0x10de;
const AMD: u32 = 0x1002;
const INTEL: u32 = 0x8086;

/// VGA chips of management controllers whose vendor makes GPUs, too: vendor and device.
const MANAGEMENT_VGA: [(u32, u32); 2] = [
    // ES1000 and RV100.
    (AMD, 0x515e),
    (AMD, 0x5159),
];

/// What locations of a vendor's memory begin with, as the vendors' own libraries name devices.
const LOCATIONS: [(u32, &str); 8] = [
    (NVIDIA, "cuda"),
    (AMD, "hip"),
    (INTEL, "xpu"),
    // Moore Threads, MetaX, Cambricon, Huawei, Habana.
    (0x1ed5, "musa"),
    (0x9999, "maca"),
    (0xcabc, "mlu"),
    (0x19e5, "npu"),
    (0x1da3, "hpu"),
];

pub(crate) fn read(root: &Path) -> Vec<Gpu> {
    let devices = root.join("bus/pci/devices");
    let gpu = |name: String| {
        let folder = devices.join(name);
        // Base class, sub-class and programming interface.
        let class = hexadecimal(&folder.join("class"))? >> 8;
        // Most functions of a machine are nothing near a GPU, and are not looked at further.
        if class >> 8 != 0x03 && class >> 8 != PROCESSING_ACCELERATOR {
            return None;
        }
        let vendor = hexadecimal(&folder.join("vendor"))?;
        let device = hexadecimal(&folder.join("device"))?;
        is_accelerator(class, vendor, device).then_some(())?;
        let pci = PciPath::of(&folder)?;
        Some(Gpu { pci, vendor, device, numa_node: numa_node(&folder), location: None })
    };
    // A machine has far more PCI functions than GPUs.
    let mut gpus: Vec<Gpu> =
        names(&devices, 16 * DEVICES_MAX).into_iter().filter_map(gpu).take(DEVICES_MAX).collect();
    gpus.sort_by_key(|gpu| gpu.pci.address());
    name_locations(&mut gpus);
    gpus
}

/// Whether programs compute on a function of this class.
fn is_accelerator(class: u32, vendor: u32, device: u32) -> bool {
    match class {
        VGA_CONTROLLER => {
            [NVIDIA, AMD, INTEL].contains(&vendor) && !MANAGEMENT_VGA.contains(&(vendor, device))
        }
        CONTROLLER_3D | OTHER_DISPLAY_CONTROLLER => true,
        _ => class >> 8 == PROCESSING_ACCELERATOR,
    }
}

fn name_locations(gpus: &mut [Gpu]) {
    for (vendor, prefix) in LOCATIONS {
        let of_vendor = gpus.iter_mut().filter(|gpu| gpu.vendor == vendor);
        for (number, gpu) in of_vendor.enumerate() {
            gpu.location = Some(format!("{prefix}:{number}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_alone_does_not_tell() {
        for (class, vendor, device, expected) in [
            (0x0302, NVIDIA, 0x2330, true),  // H100
            (0x0300, NVIDIA, 0x2684, true),  // RTX 4090
            (0x0380, AMD, 0x740c, true),     // MI250X
            (0x1200, AMD, 0x74a1, true),     // MI300X
            (0x0380, INTEL, 0x0bd5, true),   // Data Center GPU Max
            (0x1200, 0x1da3, 0x1020, true),  // Gaudi 2
            (0x1200, 0x19e5, 0xd802, true),  // Ascend 910B
            (0x0300, 0x1a03, 0x2000, false), // ASPEED
            (0x0300, 0x102b, 0x0536, false), // Matrox
            (0x0300, 0x19e5, 0x1711, false), // Huawei's management controller
            (0x0300, AMD, 0x515e, false),    // ES1000
            (0x0300, 0x1234, 0x1111, false), // QEMU
            (0x0301, NVIDIA, 0x0001, false), // XGA
            (0x0200, 0x15b3, 0x1021, false), // ConnectX-7
            (0x0680, NVIDIA, 0x22a3, false), // NVSwitch
        ] {
            assert_eq!(is_accelerator(class, vendor, device), expected, "{vendor:x}:{device:x}");
        }
    }
}
