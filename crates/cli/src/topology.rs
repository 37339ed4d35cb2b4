//! `topology`: what this machine has for moving bytes, and what of it can be used.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use millstream_net::address;
use millstream_net::udp::{SocketConfig, UdpSocket};
use millstream_topology::{Crossing, Gpu, Interface, PciPath, RdmaDevice, Topology};
use millstream_verbs::{Device, Driver, Mtu, SoftConfig};
use serde::Serialize;

use crate::output::{self, line};
use crate::units;

/// The machine's own tree.
const SYSFS: &str = "/sys";

/// Arguments of `topology`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Read this tree instead of /sys, and leave out what it does not tell
    #[arg(long, value_name = "ROOT")]
    sysfs: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    sysfs: PathBuf,
    /// What can be used here; of another machine's tree, unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    providers: Option<Providers>,
    rdma_devices: Vec<RdmaReport>,
    interfaces: Vec<InterfaceReport>,
    numa_nodes: Vec<NumaReport>,
    gpus: Vec<GpuReport>,
}

#[derive(Serialize)]
struct Providers {
    soft: Provider,
    ibverbs: Provider,
}

#[derive(Serialize)]
struct Provider {
    usable: bool,
    /// Why it is not, and what to do; or what it has.
    detail: String,
}

#[derive(Serialize)]
struct RdmaReport {
    name: String,
    pci: Option<String>,
    numa_node: Option<u32>,
    ports: Vec<PortReport>,
}

#[derive(Serialize)]
struct PortReport {
    number: u32,
    state: Option<String>,
    link_layer: Option<String>,
    rate: Option<String>,
    /// The entries of RoCEv2: what queue pairs here can use.
    gids: Vec<GidReport>,
}

#[derive(Serialize)]
struct GidReport {
    index: u32,
    address: IpAddr,
    interface: Option<String>,
}

#[derive(Serialize)]
struct InterfaceReport {
    name: String,
    state: Option<String>,
    mtu: Option<u32>,
    /// The largest path MTU of RoCE that fits; none below 348 bytes.
    path_mtu: Option<usize>,
    speed_mbit_per_s: Option<u32>,
    pci: Option<String>,
    numa_node: Option<u32>,
    /// Each is a soft device's, by its driver.
    soft_devices: Vec<SoftReport>,
}

#[derive(Serialize)]
struct SoftReport {
    name: String,
    address: IpAddr,
    /// The kernel cuts what we send, and joins what we receive.
    segmentation_offload: bool,
    /// The one that is used unless another is asked for comes first.
    drivers: Vec<DriverReport>,
}

#[derive(Serialize)]
struct DriverReport {
    name: &'static str,
    usable: bool,
    /// Why not, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Serialize)]
struct NumaReport {
    number: u32,
    processors: Option<String>,
    memory_bytes: Option<u64>,
    distances: Vec<u32>,
}

#[derive(Serialize)]
struct GpuReport {
    pci: String,
    vendor: String,
    device: String,
    /// What its memory is called as a location: `cuda:0`.
    location: Option<String>,
    numa_node: Option<u32>,
    /// The nearest first.
    rdma_devices: Vec<DistanceReport>,
}

#[derive(Serialize)]
struct DistanceReport {
    name: String,
    /// PIX, PXB, PHB, NODE or SYS; none when that is not known.
    crossing: Option<&'static str>,
    /// Links of PCI Express; none when the way goes through the processor.
    hops: Option<usize>,
    numa_distance: Option<u32>,
}

/// Runs `topology`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let sysfs = arguments.sysfs.as_deref().unwrap_or(Path::new(SYSFS));
    let topology = Topology::read(sysfs)?;
    let ours = arguments.sysfs.is_none();
    let addresses = match ours {
        true => address::local_addresses().context("cannot list this machine's addresses")?,
        false => Vec::new(),
    };
    let report = Report {
        sysfs: sysfs.to_owned(),
        providers: ours.then(providers),
        rdma_devices: topology.rdma_devices.iter().map(rdma_device).collect(),
        interfaces: topology.interfaces.iter().map(|it| interface(it, &addresses)).collect(),
        numa_nodes: topology.numa_nodes.iter().map(numa_node).collect(),
        gpus: topology.gpus.iter().map(|it| gpu(it, &topology)).collect(),
    };
    if arguments.json {
        return output::json(&report);
    }
    report.lines().iter().try_for_each(|text| line(text))
}

fn providers() -> Providers {
    let soft = "our own RoCEv2 over the system's sockets";
    let ibverbs = match Device::list_ibverbs() {
        Ok(names) if names.is_empty() => Provider {
            usable: false,
            detail: "libibverbs is here, and this machine has no RDMA device: `rdma link add rxe0 \
                     type rxe netdev NAME` makes the kernel's soft-RoCE one"
                .to_owned(),
        },
        Ok(names) => Provider { usable: true, detail: format!("libibverbs: {}", names.join(", ")) },
        Err(error) => Provider { usable: false, detail: error.to_string() },
    };
    Providers { soft: Provider { usable: true, detail: soft.to_owned() }, ibverbs }
}

fn rdma_device(device: &RdmaDevice) -> RdmaReport {
    let ports = device.ports.iter().map(|port| PortReport {
        number: port.number,
        state: port.state.clone(),
        link_layer: port.link_layer.clone(),
        rate: port.rate.clone(),
        gids: port
            .gids
            .iter()
            .filter(|entry| entry.version_2)
            .map(|entry| GidReport {
                index: entry.index,
                address: IpAddr::V6(entry.gid).to_canonical(),
                interface: entry.interface.clone(),
            })
            .collect(),
    });
    RdmaReport {
        name: device.name.clone(),
        pci: pci(device.pci.as_ref()),
        numa_node: device.numa_node,
        ports: ports.collect(),
    }
}

fn interface(interface: &Interface, addresses: &[(String, IpAddr)]) -> InterfaceReport {
    let ours = addresses.iter().filter(|(name, _)| *name == interface.name);
    let mtu = interface.mtu.and_then(|mtu| Mtu::fitting(mtu as usize));
    InterfaceReport {
        name: interface.name.clone(),
        state: interface.state.clone(),
        mtu: interface.mtu,
        path_mtu: mtu.map(Mtu::bytes),
        speed_mbit_per_s: interface.speed_mbit_per_s,
        pci: pci(interface.pci.as_ref()),
        numa_node: interface.numa_node,
        soft_devices: ours.map(|(_, address)| soft_device(*address)).collect(),
    }
}

/// Tries what a soft device on this address would do. For a moment it has the port of RoCE, which
/// another user may have, or the kernel's own RoCE.
fn soft_device(address: IpAddr) -> SoftReport {
    let driver = |driver: Driver| {
        let config = SoftConfig { driver, ..SoftConfig::new(address) };
        let problem = Device::open_soft(&config).err().map(|error| error.to_string());
        DriverReport { name: driver.name(), usable: problem.is_none(), problem }
    };
    // On any free port.
    let socket = UdpSocket::open(&SocketConfig {
        address,
        port: 0,
        segmentation_offload: true,
        buffer_length: SocketConfig::DEFAULT_BUFFER_LENGTH,
    });
    SoftReport {
        name: format!("soft-{address}"),
        address,
        segmentation_offload: socket.is_ok_and(|socket| socket.info().segmentation),
        drivers: [Driver::Udp, Driver::Packet].map(driver).into(),
    }
}

fn numa_node(node: &millstream_topology::NumaNode) -> NumaReport {
    NumaReport {
        number: node.number,
        processors: node.processors.clone(),
        memory_bytes: node.memory,
        distances: node.distances.clone(),
    }
}

fn gpu(gpu: &Gpu, topology: &Topology) -> GpuReport {
    let distances = topology.distances(gpu.place()).into_iter();
    let distances = distances.map(|(device, distance)| DistanceReport {
        name: device.name.clone(),
        crossing: distance.crossing.map(Crossing::name),
        hops: distance.hops,
        numa_distance: distance.numa,
    });
    GpuReport {
        pci: gpu.pci.address().to_string(),
        vendor: format!("{:04x}", gpu.vendor),
        device: format!("{:04x}", gpu.device),
        location: gpu.location.clone(),
        numa_node: gpu.numa_node,
        rdma_devices: distances.collect(),
    }
}

fn pci(path: Option<&PciPath>) -> Option<String> {
    path.map(|path| path.address().to_string())
}

impl Report {
    fn lines(&self) -> Vec<String> {
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
