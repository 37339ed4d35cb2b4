//! Which local address a command's RDMA device gets.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use anyhow::Context;
use millstream_collective::Controllers;
use millstream_net::address::{first_free_loopback, local_address_for};
use millstream_verbs::{Device, IbverbsConfig, Provider, SoftConfig};
use thiserror::Error;

use crate::failure::usage;

/// The UDP port of RoCEv2.
pub(crate) const ROCE_PORT: u16 = millstream_wire::ROCE_PORT;

/// How often another free loopback address is tried when a process takes the one just found.
pub(crate) const ATTEMPTS: usize = 16;

/// There is no loopback address left. Said of loopback only: elsewhere an address is not one of
/// many, and the device's error says what to do.
#[derive(Debug, Error)]
pub(crate) enum NoneFree {
    #[error(
        "UDP port {ROCE_PORT} is in use on all of 127.0.0.1 to 127.0.0.254: give another address \
         of 127.0.0.0/8 with --bind"
    )]
    Loopback,
    #[error("other processes keep taking the free addresses of 127.0.0.x: choose one with --bind")]
    Contended,
}

/// Whether [`towards`] chooses among many addresses for this peer.
pub(crate) fn is_one_of_many(peer: IpAddr) -> bool {
    peer.is_loopback() && peer.is_ipv4()
}

/// The address to use towards `peer`: on loopback the first that is free of 127.0.0.1 and up, so that a
/// capture tells processes apart, else the one that the routing table says, which processes share.
pub(crate) fn towards(peer: IpAddr) -> anyhow::Result<IpAddr> {
    if is_one_of_many(peer) {
        return Ok(first_free_loopback(ROCE_PORT).ok_or(NoneFree::Loopback)?.into());
    }
    local_address_for(peer).with_context(|| format!("no local address leads to {peer}"))
}

/// As [`towards`]; on loopback the first of the system's RDMA devices that works, when that provider
/// is asked for: none of them has a loopback address.
pub(crate) fn of_provider_towards(
    provider: Option<Provider>,
    ibverbs: &IbverbsConfig,
    peer: IpAddr,
) -> anyhow::Result<IpAddr> {
    if provider == Some(Provider::Ibverbs) && peer.is_loopback() {
        return Ok(Device::open_ibverbs(ibverbs)?.address());
    }
    towards(peer)
}

/// The address of `HOST:PORT`.
pub(crate) fn resolve(text: &str) -> anyhow::Result<SocketAddr> {
    let port = text.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    if port.is_none() {
        return Err(usage(format!(
            "{text} is not the address of a controller: write HOST:PORT, with a port up to 65535"
        )));
    }
    let explain = || format!("cannot find the address of {text}: is its host spelled right?");
    let mut addresses = text.to_socket_addrs().with_context(explain)?;
    addresses.next().with_context(explain)
}

/// The addresses of controllers: `HOST:PORT[,HOST:PORT]`.
pub(crate) fn resolve_controllers(text: &str) -> anyhow::Result<Controllers> {
    let addresses: Vec<SocketAddr> = text.split(',').map(resolve).collect::<Result<_, _>>()?;
    Controllers::new(addresses).map_err(|error| usage(format!("{text}: {error}")))
}

/// Opens a soft device on `bind`, or else on an address that leads to `peer`, configured as
/// `config` says for that address.
pub(crate) fn open_device(
    bind: Option<IpAddr>,
    peer: IpAddr,
    config: impl Fn(IpAddr) -> SoftConfig,
) -> anyhow::Result<Device> {
    for _ in 0..ATTEMPTS {
        let address = match bind {
            Some(address) => address,
            None => towards(peer)?,
        };
        match Device::open_soft(&config(address)) {
            Err(error) if error.is_in_use() && bind.is_none() && is_one_of_many(peer) => {}
            result => return Ok(result?),
        }
    }
    Err(NoneFree::Contended.into())
}

/// A soft device's name carries its address: `soft-127.0.0.2`.
pub(crate) fn of_device(name: &str) -> Option<IpAddr> {
    name.strip_prefix("soft-")?.parse().ok()
}
