//! Why a device of the system cannot be used.

use std::io;
use std::net::IpAddr;

use thiserror::Error;

/// Why a device of the system could not be listed or opened.
#[derive(Debug, Error)]
pub enum IbverbsError {
    /// The library is not on this machine, or cannot be loaded.
    #[error(
        "{file} cannot be loaded ({reason}): install libibverbs (Debian: libibverbs1 and \
         ibverbs-providers; Red Hat: libibverbs), or use a soft device"
    )]
    LibraryMissing {
        /// The library.
        file: String,
        /// What the loader says.
        reason: String,
    },
    /// The library lacks a function.
    #[error("libibverbs.so.1 has no {0}: it is not the library of rdma-core, or too old")]
    Symbol(&'static str),
    /// There is no RDMA device.
    #[error(
        "this machine has no RDMA device, or its driver is not loaded: `rdma link` lists them; \
         `rdma link add rxe0 type rxe netdev NAME` makes the kernel's soft-RoCE one; a soft \
         device needs neither"
    )]
    NoDevice,
    /// No device has this name.
    #[error(
        "there is no RDMA device {name}: there is {} (soft devices are named soft-ADDRESS)",
        available.join(", ")
    )]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// Those that there are.
        available: Vec<String>,
    },
    /// No device has this address.
    #[error("no RDMA device has the address {address}: {}", reasons.join("; "))]
    UnknownAddress {
        /// The address asked for.
        address: IpAddr,
        /// Of each device, why it does not do.
        reasons: Vec<String>,
    },
    /// The device does not have this address.
    #[error("port {port} of {device} has not the address {address}, but {usable:?}")]
    OtherAddress {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The address asked for.
        address: IpAddr,
        /// Those that it has.
        usable: Vec<IpAddr>,
    },
    /// A variable of the environment has a value that it cannot have.
    #[error("{variable}={value}: it is {range}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        range: &'static str,
    },
    /// The device does not have so many ports.
    #[error("{device} has no port {port}: it has ports 1 to {ports}")]
    NoSuchPort {
        /// The device.
        device: String,
        /// The port asked for.
        port: u8,
        /// How many it has.
        ports: u8,
    },
    /// The port is down.
    #[error("port {port} of {device} is {state}: bring its network interface up")]
    PortDown {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state.
        state: &'static str,
    },
    /// The port is of neither Ethernet nor InfiniBand.
    #[error(
        "port {port} of {device} is neither of Ethernet nor of InfiniBand, but of link layer {link_layer}"
    )]
    OtherLinkLayer {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// By the numbers of `IBV_LINK_LAYER_`.
        link_layer: u8,
    },
    /// The port has no address for RoCEv2.
    #[error("port {port} of {device} has no RoCE v2 GID: give its network interface an IP address")]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
    },
    /// The port of InfiniBand is in no subnet that works.
    #[error(
        "port {port} of {device} is of InfiniBand and {found}: is its cable connected, and does a subnet \
         manager run (`ibstat`, `sminfo`)?"
    )]
    NoSubnet {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// How one sees that.
        found: String,
    },
    /// The GID asked for does not do.
    #[error(
        "GID {index} of port {port} of {device} is {found}: usable there are {usable:?}; \
         is MC_GID_INDEX right?"
    )]
    UnsuitableGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The index asked for.
        index: u8,
        /// What is there.
        found: &'static str,
        /// Indices that do.
        usable: Vec<u8>,
    },
    /// A call failed.
    #[error("{call} failed on {device}")]
    System {
        /// The device.
        device: String,
        /// The call.
        call: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
}
