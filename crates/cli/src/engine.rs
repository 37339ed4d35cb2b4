//! Transfer engines as commands ask for them: protocols, metadata, local addresses.

use std::net::{IpAddr, ToSocketAddrs};

use anyhow::{Context, bail};
use millstream_metadata::HostPort;
use millstream_transfer::{Config, InstallError, RdmaConfig, Segment, TransferEngine};
use millstream_verbs::{DeviceError, OpenError, Provider};

use crate::address;
use crate::failure::{not_yet, usage};
use crate::reach::Reach;

/// How often another free loopback address is tried when a process takes the one just found.
const ATTEMPTS: usize = 16;
/// The port of a segment's name without one.
const DEFAULT_PORT: u16 = millstream_metadata::DEFAULT_HANDSHAKE_PORT;

/// A way for bytes to move that this version has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Protocol {
    /// RDMA: over soft devices, over the system's, or over what there is.
    Rdma(Option<Provider>),
    /// Within one process.
    Local,
}

/// Reads a value of `--protocol`.
pub(crate) fn protocol(name: &str) -> anyhow::Result<Protocol> {
    match name {
        // The only one that reaches another machine.
        "auto" | "rdma" => Ok(Protocol::Rdma(None)),
        "rdma:soft" => Ok(Protocol::Rdma(Some(Provider::Soft))),
        "rdma:ibverbs" => Ok(Protocol::Rdma(Some(Provider::Ibverbs))),
        "local" => Ok(Protocol::Local),
        "tcp" | "shm" | "nvmeof" => Err(not_yet(&format!(
            "this version has no protocol {name}, only rdma, rdma:soft, rdma:ibverbs and local"
        ))),
        _ => Err(usage(format!(
            "there is no protocol {name}: it is rdma, rdma:soft, rdma:ibverbs, tcp, local, shm, \
             nvmeof or auto"
        ))),
    }
}

/// Checks a value of `--metadata`.
pub(crate) fn check_metadata(uri: &str) -> anyhow::Result<()> {
    if uri == "p2p" || uri == "P2PHANDSHAKE" {
        return Ok(());
    }
    let known = ["http://", "https://", "etcd://", "redis://", "memcached://"];
    if known.iter().any(|scheme| uri.starts_with(scheme)) {
        return Err(not_yet(&format!("this version has no metadata store {uri}, only p2p")));
    }
    Err(usage(format!(
        "--metadata {uri}: it is p2p, http://HOST:PORT/PATH, etcd://, redis:// or memcached://"
    )))
}

/// Starts an engine on the first of these addresses, with RDMA devices on all of them if asked
/// for. Without an address, one is found that leads to `peer`.
pub(crate) fn start(
    protocols: &[Protocol],
    bind: &[IpAddr],
    peer: IpAddr,
    segmentation_offload: bool,
) -> anyhow::Result<TransferEngine> {
    let provider = provider(protocols)?;
    for _ in 0..ATTEMPTS {
        let found;
        let addresses = match bind {
            [] => {
                found = [address::of_provider_towards(provider.flatten(), peer)?];
                &found[..]
            }
            given => given,
        };
        let engine = TransferEngine::new(Config::new(addresses[0]))?;
        let Some(provider) = provider else { return Ok(engine) };
        let config = RdmaConfig { provider, segmentation_offload, ..RdmaConfig::new(addresses) };
        match engine.install_rdma(config) {
            Ok(()) => return Ok(engine),
            Err(InstallError::Open(DeviceError::Soft(OpenError::PortInUse { .. })))
                if bind.is_empty() => {}
            Err(error) => return Err(error.into()),
        }
    }
    bail!("other processes keep taking the free addresses of 127.0.0.x: choose one with --bind")
}

/// Whether RDMA is among the protocols, and if so, which provider is asked for.
#[expect(clippy::option_option, reason = "not asked for, any, or one of them")]
fn provider(protocols: &[Protocol]) -> anyhow::Result<Option<Option<Provider>>> {
    let mut found = None;
    for protocol in protocols {
        if let Protocol::Rdma(provider) = protocol
            && found.replace(*provider).is_some_and(|other| other != *provider)
        {
            return Err(usage("--protocol: an engine has one provider of rdma".to_owned()));
        }
    }
    Ok(found)
}

/// An engine and the segment that a command works on.
pub(crate) struct Opened {
    pub(crate) engine: TransferEngine,
    pub(crate) segment: Segment,
}

/// Starts an engine and opens a segment with it.
pub(crate) fn open(reach: &Reach, segment: &str) -> anyhow::Result<Opened> {
    check_metadata(&reach.metadata)?;
    let protocol = protocol(&reach.protocol)?;
    let name = HostPort::parse_with_default(segment, DEFAULT_PORT)
        .map_err(|error| usage(format!("--segment {error}")))?;
    // Where the segment is says on which of our addresses it can be reached.
    let peer = match reach.bind.first() {
        Some(address) => *address,
        None => (name.host.as_str(), name.port)
            .to_socket_addrs()
            .with_context(|| format!("cannot find the address of segment {segment}"))?
            .next()
            .with_context(|| format!("the host of segment {segment} has no address"))?
            .ip(),
    };
    let engine = start(&[protocol], &reach.bind, peer, !reach.no_segmentation_offload)?;
    let opened = engine.open_segment(segment)?;
    if opened.buffers().is_empty() {
        bail!("segment {segment} has no memory to read or write");
    }
    Ok(Opened { engine, segment: opened })
}
