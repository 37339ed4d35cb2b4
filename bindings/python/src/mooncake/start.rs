//! Starting an engine as `initialize` asks for it.

use std::env;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::time::Duration;

use millstream_metadata::HostPort;
use millstream_transfer::{RdmaConfig, Settings, Sources, TransferEngine};
use millstream_verbs::Provider;

use super::started::say;

/// Where peers answer whose names have no port.
pub(super) const DEFAULT_PORT: u16 = 12_001;

/// Among which ports an engine answers, unless settings say otherwise: those that the original takes.
const PORTS: std::ops::RangeInclusive<u16> = 15_000..=17_000;

/// How long a call may take beside a nanosecond for each byte, and the least that `MC_TRANSFER_TIMEOUT` can say.
const TIMEOUT: Duration = Duration::from_secs(30);
const LEAST_TIMEOUT: Duration = Duration::from_secs(5);

/// What `initialize` is told.
pub(super) struct Wanted {
    pub(super) hostname: String,
    pub(super) metadata: String,
    pub(super) protocol: String,
    /// Names of RDMA devices, with commas between them; none: those that settings name, and else all that work.
    pub(super) devices: String,
}

/// Any error: the callers get a code, and the log has the rest.
pub(super) type Failed = Box<dyn std::error::Error + Send + Sync>;

pub(super) fn start(wanted: &Wanted) -> Result<TransferEngine, Failed> {
    millstream_net::guarded::recover()?;
    let settings = Settings::load(&Sources::of_process())?;
    let host = HostPort::parse_with_default(&wanted.hostname, DEFAULT_PORT)
        .map_or_else(|_| Ipv4Addr::LOCALHOST.to_string(), |name| name.host);
    let mut config = settings.engine(address(&host));
    config.ports = config.ports.or(Some(PORTS));
    // Settings, such as MC_TCP_BIND_ADDRESS, know better.
    config.host = config.host.or(Some(host.clone()));
    config.default_port = config.default_port.or(Some(DEFAULT_PORT));
    config.metadata = uri(&wanted.metadata);
    config.segment_name = Some(wanted.hostname.clone()).filter(|name| !name.is_empty());
    let engine = TransferEngine::new(config)?;
    let only_tcp = env::var_os("MC_FORCE_TCP").is_some();
    if !only_tcp && let Err(error) = engine.install_shm() {
        say(&format!("no transport shm: {error}"));
    }
    if !only_tcp && !wanted.protocol.eq_ignore_ascii_case("tcp") {
        // As the original does where there are no devices: TCP is left.
        if let Err(error) = engine.install_rdma(rdma(&settings, &wanted.devices)) {
            say(&format!("no transport {}: {error}", wanted.protocol));
        }
    }
    engine.install_tcp(settings.tcp())?;
    if let Some(relay) = settings.relay() {
        engine.install_relay(&relay)?;
    }
    Ok(engine)
}

/// The system's RDMA devices that are wanted.
fn rdma(settings: &Settings, devices: &str) -> RdmaConfig {
    let names = devices.split(',').map(str::trim).filter(|name| !name.is_empty());
    let names: Vec<String> = names.map(str::to_owned).collect();
    let config = settings.rdma(&[]);
    let devices = match names.is_empty() {
        true => config.devices.or(Some(Vec::new())),
        false => Some(names),
    };
    RdmaConfig { provider: Some(Provider::Ibverbs), devices, ..config }
}

/// Where an engine listens whose peers know it by this host: there, if that is an address of this machine.
fn address(host: &str) -> IpAddr {
    match host.parse::<IpAddr>() {
        Ok(address) if TcpListener::bind((address, 0)).is_ok() => address,
        Ok(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}

/// A metadata server without a scheme is etcd's.
fn uri(metadata: &str) -> String {
    match metadata {
        "P2PHANDSHAKE" => metadata.to_owned(),
        _ if metadata.contains("://") => metadata.to_owned(),
        _ => format!("etcd://{metadata}"),
    }
}

/// How long calls may take, as the environment says.
pub(super) fn timeout() -> Duration {
    let seconds = env::var("MC_TRANSFER_TIMEOUT").ok().and_then(|text| text.trim().parse().ok());
    seconds.map_or(TIMEOUT, |seconds| Duration::from_secs(seconds).max(LEAST_TIMEOUT))
}
