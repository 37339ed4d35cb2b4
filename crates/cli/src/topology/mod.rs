//! `topology`: what this machine has for moving bytes, and what of it can be used.

mod report;
mod text;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use millstream_net::address;
use millstream_net::udp::{SocketConfig, UdpSocket};
use millstream_topology::{Crossing, Gpu, Interface, PciPath, RdmaDevice, Topology};
use millstream_verbs::{Device, Driver, Mtu, SoftConfig};
use report::{
    DistanceReport, DriverReport, GidReport, GpuReport, InterfaceReport, NumaReport, PortReport,
    Provider, Providers, RdmaReport, Report, SoftReport,
};

use crate::output::{self, line};

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
