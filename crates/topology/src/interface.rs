//! Network interfaces: `class/net`.

use std::path::Path;

use crate::pci::PciPath;
use crate::sysfs::{DEVICES_MAX, names, numa_node, number, text};

/// A VLAN on a bond has two below it. A tree may hold a circle.
const LAYERS_MAX: usize = 2;
/// Interfaces of a bond that are asked.
const LOWER_MAX: usize = 8;
/// Files and folders of an interface.
const ENTRIES_MAX: usize = 256;

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
    /// The NUMA node that it is at; of one that is made of others, such as a bond, where these are.
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
            numa_node: lowest_numa_node(&class, &name, 0),
            name,
        })
    };
    names(&class, DEVICES_MAX).into_iter().filter_map(interface).collect()
}

/// The NUMA node of an interface, or the one that all interfaces below it have.
fn lowest_numa_node(class: &Path, name: &str, depth: usize) -> Option<u32> {
    let folder = class.join(name);
    if let Some(node) = numa_node(&folder.join("device")) {
        return Some(node);
    }
    if depth == LAYERS_MAX {
        return None;
    }
    let lower = names(&folder, ENTRIES_MAX).into_iter().filter_map(|entry| {
        let lower = entry.strip_prefix("lower_")?;
        Some(lowest_numa_node(class, lower, depth + 1))
    });
    let nodes: Vec<Option<u32>> = lower.take(LOWER_MAX).collect();
    let first = *nodes.first()?;
    nodes.iter().all(|node| *node == first).then_some(first)?
}
