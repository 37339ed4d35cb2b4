//! Network interfaces: `class/net`.

use std::path::Path;

use crate::pci::PciPath;
use crate::sysfs::{names, numa_node, number, text};

/// A network interface. Its addresses are not in these files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Bytes in an IP packet.
    pub mtu: Option<u32>,
    /// `up`, `down`, or `unknown`, as loopback says.
    pub state: Option<String>,
    /// Megabits per second, where the driver knows.
    pub speed_mbit_per_s: Option<u32>,
    /// Where it is; virtual ones are nowhere.
    pub pci: Option<PciPath>,
    /// The NUMA node that it is at.
    pub numa_node: Option<u32>,
}

pub(crate) fn read(root: &Path) -> Vec<Interface> {
    let class = root.join("class/net");
    let interface = |name: String| {
        let folder = class.join(&name);
        // `bonding_masters` is a file.
        folder.is_dir().then(|| Interface {
            mtu: number(&folder.join("mtu")),
            state: text(&folder.join("operstate")),
            // Where the driver does not know, the file says -1 or cannot be read.
            speed_mbit_per_s: number(&folder.join("speed")),
            pci: PciPath::of(&folder.join("device")),
            numa_node: numa_node(&folder.join("device")),
            name,
        })
    };
    names(&class).into_iter().filter_map(interface).collect()
}
