//! RDMA devices: `class/infiniband`.

use std::net::Ipv6Addr;
use std::path::Path;

use crate::pci::PciPath;
use crate::sysfs::{DEVICES_MAX, names, numa_node, number, text};

/// A port's number has eight bits.
const PORTS_MAX: usize = 255;
/// The tables of today's adapters have 256 entries.
const GIDS_MAX: usize = 1024;
/// Of all devices together. A tree that is not the kernel's may have one folder under many names.
const ALL_PORTS_MAX: usize = 4096;
/// GIDs of all ports together.
const ALL_GIDS_MAX: usize = 65_536;
/// Entries of their tables that are looked at, of which most are empty.
const ALL_ENTRIES_MAX: usize = 1 << 20;

/// A device, such as `mlx5_0` or `rxe0`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RdmaDevice {
    /// Its name.
    pub name: String,
    /// Where it is; soft-RoCE is nowhere.
    pub pci: Option<PciPath>,
    /// The NUMA node that it is at.
    pub numa_node: Option<u32>,
    /// Its ports, by number.
    pub ports: Vec<Port>,
}

/// A port of a device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Port {
    /// From 1.
    pub number: u32,
    /// `ACTIVE` or what else it is.
    pub state: Option<String>,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: Option<String>,
    /// As the kernel writes it: `100 Gb/sec (4X EDR)`.
    pub rate: Option<String>,
    /// The entries of its table that are in use.
    pub gids: Vec<GidEntry>,
}

impl Port {
    /// Whether its link layer is InfiniBand.
    pub fn is_infiniband(&self) -> bool {
        self.link_layer.as_deref() == Some("InfiniBand")
    }
}

/// A GID of a port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GidEntry {
    /// Its index in the table: what `--gid-index` and `MC_GID_INDEX` mean.
    pub index: u32,
    /// The GID; of RoCEv2, an IP address.
    pub gid: Ipv6Addr,
    /// It is of RoCEv2.
    pub version_2: bool,
    /// The network interface whose address it is.
    pub interface: Option<String>,
}

/// Whether the GIDs are read.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Gids {
    Read,
    LeaveOut,
}

/// What may still be read of a tree.
struct Left {
    ports: usize,
    gids: usize,
    entries: usize,
}

impl Left {
    /// The names of a device's ports.
    fn ports(&mut self, folder: &Path) -> Vec<String> {
        let names = names(folder, PORTS_MAX.min(self.ports));
        self.ports -= names.len();
        names
    }

    /// The entries of a port's table that are in use.
    fn gids(
        &mut self,
        folder: &Path,
        entry: impl FnMut(String) -> Option<GidEntry>,
    ) -> Vec<GidEntry> {
        let names = names(folder, GIDS_MAX.min(self.gids).min(self.entries));
        self.entries -= names.len();
        let gids: Vec<GidEntry> = names.into_iter().filter_map(entry).collect();
        self.gids -= gids.len();
        gids
    }
}

pub(crate) fn read(root: &Path, gids: Gids) -> Vec<RdmaDevice> {
    let class = root.join("class/infiniband");
    let mut left = Left { ports: ALL_PORTS_MAX, gids: ALL_GIDS_MAX, entries: ALL_ENTRIES_MAX };
    let device = |name: String| {
        let folder = class.join(&name);
        let (device, ports) = (folder.join("device"), folder.join("ports"));
        let numbers = left.ports(&ports);
        let port =
            |number: String| read_port(&ports.join(&number), number.parse().ok()?, gids, &mut left);
        RdmaDevice {
            // Soft-RoCE has a link to the device of its network interface in some kernels.
            pci: PciPath::of(&device),
            numa_node: numa_node(&device),
            ports: numbers.into_iter().filter_map(port).collect(),
            name,
        }
    };
    names(&class, DEVICES_MAX).into_iter().map(device).collect()
}

fn read_port(folder: &Path, number: u32, gids: Gids, left: &mut Left) -> Option<Port> {
    let attributes = folder.join("gid_attrs");
    let gid = |index: String| {
        // An empty entry's kind cannot be read.
        let kind = text(&attributes.join("types").join(&index))?;
        let gid = self::number::<Ipv6Addr>(&folder.join("gids").join(&index))?;
        let interface = text(&attributes.join("ndevs").join(&index));
        let index = index.parse().ok()?;
        let used = !gid.is_unspecified();
        used.then_some(GidEntry { index, gid, version_2: kind == "RoCE v2", interface })
    };
    // `4: ACTIVE`
    let state = text(&folder.join("state"));
    let state = state.map(|state| match state.split_once(": ") {
        Some((_, word)) => word.to_owned(),
        None => state,
    });
    Some(Port {
        number,
        state,
        link_layer: text(&folder.join("link_layer")),
        rate: text(&folder.join("rate")),
        gids: match gids {
            Gids::Read => left.gids(&folder.join("gids"), gid),
            Gids::LeaveOut => Vec::new(),
        },
    })
}
