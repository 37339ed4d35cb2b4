//! What `topology` prints, as text.

use millstream_verbs::Driver;

use super::report::{GpuReport, InterfaceReport, Providers, RdmaReport, Report};
use crate::units;

impl Report {
    pub(super) fn lines(&self) -> Vec<String> {
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
            let mut text = format!("  {pci}: {vendor}:{device}{}", at_node(gpu.numa_node));
            for it in &gpu.rdma_devices {
                text.push_str(&format!(", {} ({})", it.name, it.crossing.unwrap_or("unknown")));
            }
            lines.push(text);
        }
        lines
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
            if port.gids.is_empty() {
                lines.push(
                    "      no RoCE v2 GID: give its network interface an IP address".to_owned(),
                );
            }
            for gid in &port.gids {
                let interface =
                    gid.interface.as_deref().map_or(String::new(), |name| format!(" ({name})"));
                lines.push(format!(
                    "      --gid-index {}: RoCE v2, {}{interface}",
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
