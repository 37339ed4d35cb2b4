//! `topology`: what this machine has for moving bytes, and what of it can be used.

mod distances;
mod drawing;
mod report;
mod svg;
mod text;
mod tree;

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use distances::DistanceTable;
use millstream_net::address;
use millstream_net::udp::{SocketConfig, UdpSocket};
use millstream_topology::{
    Crossing, DeviceFilter, Gpu, Interface, Nic, PciPath, PriorityMatrix, RdmaDevice, Topology,
};
use millstream_verbs::{Device, Driver, Mtu, SoftConfig};
use report::{
    DistanceReport, DriverReport, GidReport, GpuReport, InterfaceReport, NumaReport, PortReport,
    Provider, Providers, RdmaReport, Report, SoftReport,
};

use crate::bind;
use crate::output::{self, escaped, line};

/// The machine's own tree.
const SYSFS: &str = "/sys";

/// Arguments of `topology`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Read this tree instead of /sys, and leave out what it does not tell
    #[arg(long, value_name = "ROOT")]
    sysfs: Option<PathBuf>,
    /// Have the soft device of this address in the priority matrix; may repeat
    #[arg(long, value_name = "IP", conflicts_with = "sysfs")]
    bind: Vec<IpAddr>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write a drawing into this file, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Names a file that has the priority matrix of this machine.
const MATRIX_VARIABLE: &str = "MC_CUSTOM_TOPO_JSON";
/// Names the NICs that may be used.
const FILTER_VARIABLE: &str = "MC_TE_FILTERS";

/// Runs `topology`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let sysfs = arguments.sysfs.as_deref().unwrap_or(Path::new(SYSFS));
    let topology = Topology::read(sysfs)?;
    let ours = arguments.sysfs.is_none();
    let addresses = match ours {
        true => address::local_addresses().context("cannot list this machine's addresses")?,
        false => Vec::new(),
    };
    // The settings of this machine say nothing of another one.
    let variable = |name: &str| std::env::var_os(name).filter(|value| ours && !value.is_empty());
    bind::check(&arguments.bind)?;
    let nics = nics(&topology, &arguments.bind, &addresses)?;
    let matrix_file = variable(MATRIX_VARIABLE).map(PathBuf::from);
    let matrix = match &matrix_file {
        Some(path) => PriorityMatrix::read(path).context(MATRIX_VARIABLE)?,
        None => topology.priority_matrix(&nics),
    };
    let filter = variable(FILTER_VARIABLE).unwrap_or_default();
    let filter = DeviceFilter::parse(&filter.to_string_lossy());
    for name in filter.unknown(&matrix.nics()) {
        let name = escaped(name);
        output::complain(&format!("note: {FILTER_VARIABLE} names {name}, which is no NIC here"));
    }
    let distances = DistanceTable::of(&topology, &nics);
    let report = Report {
        sysfs: sysfs.to_owned(),
        providers: ours.then(providers),
        rdma_devices: topology.rdma_devices.iter().map(rdma_device).collect(),
        interfaces: topology.interfaces.iter().map(|it| interface(it, &addresses)).collect(),
        numa_nodes: topology.numa_nodes.iter().map(numa_node).collect(),
        gpus: topology.gpus.iter().map(|it| gpu(it, &topology)).collect(),
        nic_priority_matrix: matrix.filtered(&filter),
        nic_priority_matrix_file: matrix_file,
    };
    if let Some(path) = &arguments.svg {
        let drawing = drawing::svg(&topology, &nics, &distances);
        fs::write(path, drawing).with_context(|| format!("cannot write {}", escaped(path)))?;
    }
    if arguments.json {
        return output::json(&report);
    }
    let lines = report.lines(&distances);
    lines.iter().try_for_each(|text| line(text))
}

/// The system's RDMA devices, and the soft devices of these addresses.
fn nics(
    topology: &Topology,
    bind: &[IpAddr],
    addresses: &[(String, IpAddr)],
) -> anyhow::Result<Vec<Nic>> {
    let mut nics = topology.nics();
    for address in bind {
        let interface = addresses.iter().find(|(_, known)| known == address);
        let interface = match interface {
            Some((name, _)) => name,
            // All of 127.0.0.0/8 is the host's, and one address of it is in the list.
            None if address.is_loopback() => "lo",
            None => anyhow::bail!(
                "--bind {address}: no interface of this machine has this address \
                 (`millstream topology` lists them)"
            ),
        };
        nics.push(topology.soft_nic(&format!("soft-{address}"), interface));
    }
    Ok(nics)
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
            .filter(|entry| entry.version_2 || port.is_infiniband())
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
