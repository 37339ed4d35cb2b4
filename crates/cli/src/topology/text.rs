//! What `topology` prints, as text.

use millstream_topology::{Crossing, Priorities};
use millstream_verbs::Driver;

use super::distances::{DistanceTable, Row, meaning, word};
use super::report::{GpuReport, InterfaceReport, Providers, RdmaReport, Report};
use crate::output::escaped;
use crate::units;

impl Report {
    pub(super) fn lines(&self, distances: &DistanceTable) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(Providers { soft, ibverbs }) = &self.providers {
            lines.push("providers".to_owned());
            for (name, provider) in [("soft", soft), ("ibverbs", ibverbs)] {
                let usable = if provider.usable { "usable" } else { "not usable" };
                lines.push(format!("  {name}: {usable}: {}", provider.detail));
            }
        }
        heading(&mut lines, "RDMA devices", self.rdma_devices.len());
        self.rdma_devices.iter().for_each(|device| device.lines(&mut lines));
        heading(&mut lines, "network interfaces", self.interfaces.len());
        self.interfaces.iter().for_each(|interface| interface.lines(&mut lines));
        heading(&mut lines, "NUMA nodes", self.numa_nodes.len());
        for node in &self.numa_nodes {
            let processors = node.processors.as_deref().unwrap_or("none");
            let memory = node.memory_bytes.map_or("unknown".to_owned(), units::readable);
            let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
            let distances = distances.join(" ");
            lines.push(format!(
                "  {}: processors {processors}, memory {memory}, distances {distances}",
                node.number
            ));
        }
        heading(&mut lines, "GPUs", self.gpus.len());
        for gpu in &self.gpus {
            let GpuReport { pci, vendor, device, .. } = gpu;
            let location = gpu.location.as_deref().map_or(String::new(), |name| format!(" {name}"));
            lines.push(format!("  {pci}: {vendor}:{device}{location}{}", at_node(gpu.numa_node)));
        }
        distance_lines(&mut lines, distances);
        self.matrix_lines(&mut lines);
        lines
    }

    fn matrix_lines(&self, lines: &mut Vec<String>) {
        let from = self.nic_priority_matrix_file.as_ref();
        let from = from.map_or(String::new(), |path| format!(" (of {})", escaped(path)));
        lines.push(format!("NICs for memory{from}"));
        for (location, Priorities { preferred, available }) in self.nic_priority_matrix.entries() {
            let names = |names: &[String]| match names {
                [] => "none".to_owned(),
                names => names.iter().map(escaped).collect::<Vec<_>>().join(" "),
            };
            let (preferred, available) = (names(preferred), names(available));
            let location = escaped(location);
            lines.push(format!("  {location}: preferred {preferred}; available {available}"));
        }
    }
}

/// The table, and what the words in it mean.
fn distance_lines(lines: &mut Vec<String>, distances: &DistanceTable) {
    if distances.nics.is_empty() || distances.rows.is_empty() {
        return;
    }
    lines.push("distances".to_owned());
    let nics: Vec<String> = distances.nics.iter().map(escaped).collect();
    let locations = distances.rows.iter().map(|row| row.location.len());
    let first = locations.max().unwrap_or(0);
    let row = |location: &str, cells: &mut dyn Iterator<Item = &str>| {
        let mut line = format!("  {location:first$}");
        for (nic, cell) in nics.iter().zip(cells) {
            let width = nic.chars().count().max(4);
            line.push_str(&format!("  {cell:width$}"));
        }
        line.trim_end().to_owned()
    };
    lines.push(row("", &mut nics.iter().map(String::as_str)));
    for Row { location, crossings } in &distances.rows {
        lines.push(row(location, &mut crossings.iter().map(|crossing| word(*crossing))));
    }
    let known = |crossing: &Crossing| {
        distances.rows.iter().any(|row| row.crossings.contains(&Some(*crossing)))
    };
    for crossing in Crossing::ALL.into_iter().filter(known) {
        lines.push(format!("  {crossing:first$}  {}", meaning(crossing)));
    }
}

impl RdmaReport {
    fn lines(&self, lines: &mut Vec<String>) {
        let pci = self.pci.as_deref().map_or("not on PCI".to_owned(), |pci| format!("PCI {pci}"));
        lines.push(format!("  {}: {pci}{}", self.name, at_node(self.numa_node)));
        for port in &self.ports {
            let text = |text: &Option<String>| text.clone().unwrap_or("unknown".to_owned());
            lines.push(format!(
                "    port {}: {}, {}, {}",
                port.number,
                text(&port.state),
                text(&port.link_layer),
                text(&port.rate)
            ));
            let infiniband = port.link_layer.as_deref() == Some("InfiniBand");
            let kind = if infiniband { "InfiniBand" } else { "RoCE v2" };
            if port.gids.is_empty() {
                lines.push(match infiniband {
                    true => "      no GID: does a subnet manager run?".to_owned(),
                    false => {
                        "      no RoCE v2 GID: give its network interface an IP address".to_owned()
                    }
                });
            }
            for gid in &port.gids {
                let interface =
                    gid.interface.as_deref().map_or(String::new(), |name| format!(" ({name})"));
                lines.push(format!(
                    "      --gid-index {}: {kind}, {}{interface}",
                    gid.index, gid.address
                ));
            }
        }
    }
}

impl InterfaceReport {
    fn lines(&self, lines: &mut Vec<String>) {
        let state = self.state.as_deref().unwrap_or("unknown");
        let mtu = match (self.mtu, self.path_mtu) {
            (Some(mtu), Some(path)) => format!("MTU {mtu}: path MTU {path}"),
            (Some(mtu), None) => format!("MTU {mtu}: too small for RoCE"),
            (None, _) => "MTU unknown".to_owned(),
        };
        let speed = self.speed_mbit_per_s.map_or(String::new(), |speed| format!(", {speed} Mb/s"));
        let node = at_node(self.numa_node);
        lines.push(format!("  {}: {state}, {mtu}{speed}{node}", self.name));
        for soft in &self.soft_devices {
            let offload = if soft.segmentation_offload { "with" } else { "without" };
            lines.push(format!("    --device {}: {offload} segmentation offload", soft.name));
            for driver in &soft.drivers {
                let default =
                    if driver.name == Driver::default().name() { " (default)" } else { "" };
                let how = match &driver.problem {
                    Some(problem) => format!("not usable: {problem}"),
                    None => "usable".to_owned(),
                };
                lines.push(format!("      --driver {}{default}: {how}", driver.name));
            }
        }
    }
}

fn heading(lines: &mut Vec<String>, what: &str, count: usize) {
    lines.push(if count == 0 { format!("{what}: none") } else { what.to_owned() });
}

fn at_node(node: Option<u32>) -> String {
    node.map_or(String::new(), |node| format!(", NUMA node {node}"))
}
