//! Which devices the tests use: soft ones on loopback addresses, or those of the system.
//!
//! `MILLSTREAM_TEST_DEVICES` says so: `soft`, which is the default, `ibverbs` for all devices of the system
//! that work, or `ibverbs:NAME,NAME` for these. All of them must reach each other.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use millstream_verbs::Device;

const VARIABLE: &str = "MILLSTREAM_TEST_DEVICES";

/// The addresses of the system's devices, if those are to be used.
static SYSTEM: LazyLock<Option<Vec<IpAddr>>> = LazyLock::new(|| {
    let chosen = std::env::var(VARIABLE).unwrap_or_else(|_| "soft".to_owned());
    let names = match chosen.split_once(':') {
        None if chosen == "soft" => return None,
        None if chosen == "ibverbs" => Device::list_ibverbs().unwrap(),
        Some(("ibverbs", names)) => names.split(',').map(str::to_owned).collect(),
        _ => panic!("{VARIABLE}={chosen}: it is soft, ibverbs or ibverbs:NAME,NAME"),
    };
    let open = |name: &String| {
        Device::open(name).inspect_err(|error| println!("{name} is not used: {error}")).ok()
    };
    let addresses: Vec<_> = names.iter().filter_map(open).map(|device| device.address()).collect();
    assert!(!addresses.is_empty(), "{VARIABLE}={chosen}: no device works");
    Some(addresses)
});

/// Whether they are devices of the system.
pub(crate) fn are_of_the_system() -> bool {
    SYSTEM.is_some()
}

/// An address for a device. Soft devices have one that no other test of this process has, and none of
/// other processes, as long as their numbers differ in the low 15 bits. The system's take turns.
pub(crate) fn address() -> IpAddr {
    if let Some(addresses) = &*SYSTEM {
        // Processes of one test, too, begin at different ones.
        static NEXT: LazyLock<AtomicUsize> =
            LazyLock::new(|| AtomicUsize::new(std::process::id() as usize));
        return addresses[NEXT.fetch_add(1, Ordering::Relaxed) % addresses.len()];
    }
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id();
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    assert_ne!(host, 0, "a test process has 255 addresses");
    Ipv4Addr::new(127, 100 + ((process >> 8) & 0x7f) as u8, process as u8, host).into()
}

/// The device of this address.
pub(crate) fn open(address: IpAddr) -> Device {
    use millstream_verbs::{DeviceChoice, DeviceConfig, Provider};
    let provider = if are_of_the_system() { Provider::Ibverbs } else { Provider::Soft };
    let choice = DeviceChoice::Address(address, Some(provider));
    Device::open_chosen(&DeviceConfig::new(choice).unwrap()).unwrap()
}
