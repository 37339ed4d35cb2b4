//! Engines are created, asked for their name, and destroyed.

use std::ffi::{c_char, c_int};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use millstream_metadata::{HostPort, is_peer_to_peer};
use millstream_net::address::{local_address_for, local_addresses};
use millstream_transfer::{Config, Settings, Sources, TransferEngine};

use super::engine::{self, Call, Engine};
use super::install;
use super::layout::EnginePointer;
use crate::boundary::{self, Failure, code};

/// A port for a name that has none. It is not used: the engine finds one.
const NO_PORT: u16 = 1;

/// An address of the Internet, by which an interface is chosen. Nothing is sent.
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// # Safety
///
/// The texts are null or end with a zero, and nobody changes them during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn createTransferEngine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    rpc_port: u64,
    auto_discover: c_int,
) -> EnginePointer {
    // As in the original, an engine finds its port by itself.
    let _ = rpc_port;
    boundary::value(ptr::null_mut(), || {
        // SAFETY: the caller promises it of all three.
        let (metadata, name, host) = unsafe {
            (
                boundary::text("metadata_conn_string", metadata_conn_string)?,
                boundary::text("local_server_name", local_server_name)?,
                boundary::optional("ip_or_host_name", ip_or_host_name)?,
            )
        };
        let engine = create(metadata, name, host, &Sources::of_process())?;
        if auto_discover != 0 {
            install::discovered(&engine)?;
        }
        engine.published()
    })
}

/// As [`createTransferEngine`], with settings.
///
/// # Safety
///
/// The texts are null or end with a zero, `settings` is null or has as many of them, and nobody changes them during
/// the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn millstream_create_engine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    settings: *const *const c_char,
    count: usize,
) -> EnginePointer {
    boundary::value(ptr::null_mut(), || {
        // SAFETY: the caller promises it of all of them.
        let (metadata, name, host, settings) = unsafe {
            (
                boundary::text("metadata_conn_string", metadata_conn_string)?,
                boundary::text("local_server_name", local_server_name)?,
                boundary::optional("ip_or_host_name", ip_or_host_name)?,
                boundary::array("settings", settings, count)?,
            )
        };
        let mut sources = Sources::of_process();
        for setting in settings {
            // SAFETY: as above.
            sources.arguments.push(unsafe { boundary::text("a setting", *setting) }?.to_owned());
        }
        create(metadata, name, host, &sources)?.published()
    })
}

fn create(
    metadata: &str,
    name: &str,
    host: Option<&str>,
    sources: &Sources,
) -> Result<Engine, Failure> {
    let host = host.filter(|host| !host.is_empty());
    let settings = Settings::load(sources).map_err(Failure::invalid)?;
    let by_address = is_peer_to_peer(metadata);
    let own = HostPort::parse_with_default(name, NO_PORT).ok().map(|name| name.host);
    let set = settings.engine(Ipv4Addr::LOCALHOST.into()).host;
    let host = match (by_address, set) {
        (_, Some(host)) => host,
        (true, None) => own.ok_or_else(|| {
            Failure::invalid(format!("local_server_name {name:?} is no host name or address"))
        })?,
        (false, None) => match (host, own) {
            (Some(host), _) => host.to_owned(),
            // At a metadata server, names may be those of hosts or not.
            (None, Some(own)) if own_address(&own).is_some() => own,
            (None, _) => local_address_for(ELSEWHERE)
                .map_err(|error| Failure::new(code::SOCKET, format!("no local address: {error}")))?
                .to_string(),
        },
    };
    let address = own_address(&host);
    let listen = match host.parse::<IpAddr>() {
        Ok(host) if address.is_some() && !host.is_unspecified() => host,
        Ok(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        // A name may have other addresses for peers, and an address may be translated on the way.
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    let config = Config {
        metadata: metadata.to_owned(),
        segment_name: (!by_address).then(|| name.to_owned()),
        host: Some(host.clone()),
        ..settings.engine(listen)
    };
    let transfer =
        TransferEngine::new(config).map_err(|error| Failure::of(error.code(), &error))?;
    let device = address.or_else(|| local_address_for(ELSEWHERE).ok());
    let device = device.unwrap_or(Ipv4Addr::LOCALHOST.into());
    Ok(Engine::new(transfer, settings, host, device))
}

/// The address of this machine that a name or an address stands for, if it is of this machine.
fn own_address(host: &str) -> Option<IpAddr> {
    let own = local_addresses().unwrap_or_default();
    let is_own =
        |address: &IpAddr| address.is_loopback() || own.iter().any(|(_, known)| known == address);
    match host.parse::<IpAddr>() {
        Ok(address) => Some(address).filter(is_own),
        Err(_) => {
            let found = millstream_net::lookup(host).ok()?;
            found.into_iter().map(|address| address.ip()).find(is_own)
        }
    }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn destroyTransferEngine(engine: EnginePointer) {
    boundary::value((), || engine::destroy(engine));
}

/// NICs are looked for when the transport `rdma` is installed.
#[unsafe(no_mangle)]
pub(super) extern "C" fn discoverTopology(engine: EnginePointer) -> c_int {
    boundary::negative(|| Call::on(engine).map(drop))
}

/// # Safety
///
/// `buf_out` is null, or `buf_len` bytes may be written there.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn getLocalIpAndPort(
    engine: EnginePointer,
    buf_out: *mut c_char,
    buf_len: usize,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        let port = engine.transfer.listening_at().port();
        let name = HostPort::parse_with_default(&engine.host, port);
        let name = name.map_err(Failure::invalid)?.to_string();
        // SAFETY: the caller promises it.
        unsafe { boundary::write_text(buf_out, buf_len, &name) }
    })
}
