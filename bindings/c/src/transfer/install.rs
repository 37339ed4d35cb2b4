//! Transports are installed, by name or as the machine has them.

use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::io::Write;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;

use millstream_topology::PriorityMatrix;
use millstream_transfer::{InstallError, RdmaConfig};
use millstream_verbs::{Device, IbverbsConfig, Provider};

use super::engine::{Call, Engine};
use super::layout::EnginePointer;
use crate::boundary::{self, Failure, code};

/// What stands before the address in the name of a soft device.
const SOFT_PREFIX: &str = "soft-";

/// The transports that can be asked for. What C gets is the address of one of these texts.
static PROTOCOLS: [&str; 5] = ["tcp", "rdma", "shm", "nvmeof", "relay"];

/// # Safety
///
/// `proto` is null or ends with a zero; `args` is null, or its first element is null or a text that ends with a
/// zero. Nobody changes them during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn installTransport(
    engine: EnginePointer,
    proto: *const c_char,
    args: *mut *mut c_void,
) -> *mut c_void {
    boundary::value(ptr::null_mut(), || {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let name = unsafe { boundary::text("proto", proto) }?;
        // SAFETY: the caller promises it.
        let first = unsafe { boundary::array("args", args, usize::from(!args.is_null())) }?.first();
        let first = first.map_or(ptr::null(), |first| first.cast_const().cast());
        // SAFETY: the caller promises it.
        let matrix = unsafe { boundary::optional("args[0]", first) }?;
        let protocol = PROTOCOLS.iter().find(|protocol| **protocol == name).ok_or_else(|| {
            let text = format!("there is no transport {name}: {}", PROTOCOLS.join(", "));
            Failure::new(code::NOT_SUPPORTED_TRANSPORT, text)
        })?;
        if !engine.has_transport(name) {
            install(&engine, name, matrix)?;
        }
        Ok(ptr::from_ref(protocol).cast_mut().cast())
    })
}

/// As in the original nothing happens: a transport goes with its engine.
///
/// # Safety
///
/// `proto` is null or ends with a zero, and nobody changes it during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn uninstallTransport(
    engine: EnginePointer,
    proto: *const c_char,
) -> c_int {
    boundary::negative(|| {
        let _engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        unsafe { boundary::text("proto", proto) }.map(drop)
    })
}

/// What `auto_discover` asks for: `rdma` where the system has devices for it, and else `tcp`. Behind it relays, if
/// settings name some.
pub(super) fn discovered(engine: &Engine) -> Result<(), Failure> {
    let forced = std::env::var_os("MC_FORCE_TCP").is_some_and(|value| !value.is_empty());
    if forced || !install_system_devices(engine)? {
        install(engine, "tcp", None)?;
    }
    match engine.settings.relay() {
        Some(_) => install(engine, "relay", None),
        None => Ok(()),
    }
}

fn install(engine: &Engine, name: &str, matrix: Option<&str>) -> Result<(), Failure> {
    let transfer = &engine.transfer;
    let installed = match name {
        "tcp" => transfer.install_tcp(engine.settings.tcp()),
        "shm" => transfer.install_shm(),
        "nvmeof" => transfer.install_nvmeof(engine.settings.nvmeof()),
        "relay" => {
            let relay = engine.settings.relay().ok_or_else(|| {
                Failure::invalid(
                    "no relay is named: see the setting tcp.relays (MILLSTREAM_RELAYS)",
                )
            })?;
            transfer.install_relay(&relay)
        }
        _ => return install_rdma(engine, matrix),
    };
    installed.map_err(failure)
}

fn failure(error: InstallError) -> Failure {
    Failure::of(error.code(), &error)
}

fn install_rdma(engine: &Engine, matrix: Option<&str>) -> Result<(), Failure> {
    let Some(text) = matrix else {
        if install_system_devices(engine)? {
            return Ok(());
        }
        let config = engine.settings.rdma(&[engine.device_address]);
        return engine
            .transfer
            .install_rdma(RdmaConfig { devices: None, ..config })
            .map_err(failure);
    };
    let matrix = PriorityMatrix::parse(text).map_err(Failure::invalid)?;
    let mut names: Vec<&String> = Vec::new();
    for (_, priorities) in matrix.entries() {
        for name in priorities.preferred.iter().chain(&priorities.available) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let addresses = names.into_iter().map(|name| address_of(engine, name));
    let addresses = addresses.collect::<Result<Vec<_>, _>>()?;
    // It is read once, when the transport is installed.
    let file = unnamed_file(text).map_err(|error| {
        Failure::new(code::CONTEXT, format!("no place for the matrix: {error}"))
    })?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let topology_file = Some(path.into());
    let config = RdmaConfig { topology_file, devices: None, ..engine.settings.rdma(&addresses) };
    engine.transfer.install_rdma(config).map_err(failure)
}

/// Installs `rdma` with those devices of the system that work, of all or of those that settings name; whether there are any.
/// Not where soft ones are asked for, nor, unless settings name some, where the engine is reached from this machine
/// only.
fn install_system_devices(engine: &Engine) -> Result<bool, Failure> {
    let config = engine.settings.rdma(&[]);
    let unwanted = config.devices.is_none() && engine.device_address.is_loopback();
    if config.provider == Some(Provider::Soft) || unwanted {
        return Ok(false);
    }
    let devices = config.devices.or(Some(Vec::new()));
    let config = RdmaConfig { provider: Some(Provider::Ibverbs), devices, ..config };
    match engine.transfer.install_rdma(config) {
        Ok(()) => Ok(true),
        // What this machine does not have is no failure.
        Err(InstallError::Open(_)) => Ok(false),
        Err(error) => Err(failure(error)),
    }
}

fn system_address(config: &RdmaConfig, name: &str) -> Result<IpAddr, Failure> {
    let config = IbverbsConfig { name: Some(name.to_owned()), ..config.ibverbs.clone() };
    let device = Device::open_ibverbs(&config);
    Ok(device.map_err(|error| Failure::new(6, error))?.address())
}

/// The address of a device that a matrix names.
fn address_of(engine: &Engine, name: &str) -> Result<IpAddr, Failure> {
    match name.strip_prefix(SOFT_PREFIX) {
        Some(address) => {
            let none = |_| Failure::new(6, format!("{name}: that is no address of a soft device"));
            address.parse().map_err(none)
        }
        None => system_address(&engine.settings.rdma(&[]), name),
    }
}

/// A file that is in memory only, and goes when it is closed.
fn unnamed_file(text: &str) -> std::io::Result<File> {
    // SAFETY: the name ends with a zero.
    let descriptor = unsafe { libc::memfd_create(c"matrix".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: it was just opened, and nobody else has it.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    file.write_all(text.as_bytes())?;
    Ok(file)
}
