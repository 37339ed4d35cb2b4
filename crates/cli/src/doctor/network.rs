//! What carries packets: sockets and their buffers, ports, interfaces.

use std::net::IpAddr;

use millstream_control::controller::ControllerConfig;
use millstream_net::udp::SocketConfig;
use millstream_topology::Interface;
use millstream_verbs::Mtu;
use millstream_wire::ROCE_PORT;

use super::check::Check;
use super::facts::{Facts, PortUser};
use super::process::CAP_NET_ADMIN;
use crate::output::escaped;
use crate::units;

/// What eight connections can have in flight: with less, several peers at once feel it.
const ENOUGH_BUFFER: u64 = 4 << 20;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![udp_sockets(facts)];
    checks.extend([
        shared_port(facts),
        buffer("receive buffer", "net.core.rmem_max", facts.receive_buffer_limit, facts),
        buffer("send buffer", "net.core.wmem_max", facts.send_buffer_limit, facts),
        roce_port(facts),
        controller_port(facts),
    ]);
    checks.extend(facts.interfaces.iter().filter_map(interface));
    checks
}

fn udp_sockets(facts: &Facts) -> Check {
    const NAME: &str = "UDP sockets";
    let slow = |what: &str| {
        Check::degraded(
            NAME,
            format!("the kernel does not {what}"),
            "each packet costs a system call of its own: a third of the rate or less",
            "uname -r (segmentation offload of UDP needs Linux 5.0, in a sandbox also its support)",
        )
    };
    match facts.tries.as_ref().map(|tries| &tries.udp_socket) {
        None => Check::unknown(NAME),
        Some(Ok((true, true))) => Check::ok(NAME, "the kernel cuts and joins datagrams (GSO, GRO)"),
        Some(Ok((false, _))) => slow("cut what is sent (UDP_SEGMENT)"),
        Some(Ok((true, false))) => slow("join what is received (UDP_GRO)"),
        Some(Err(error)) => Check::blocked(
            NAME,
            error.clone(),
            "there are no soft devices",
            "docker run --security-opt seccomp=FILE, with a profile that allows socket and bind",
        ),
    }
}

fn shared_port(facts: &Facts) -> Check {
    const NAME: &str = "shared addresses";
    match facts.tries.as_ref().map(|tries| &tries.shared_port) {
        None => Check::unknown(NAME),
        Some(Ok(())) => {
            Check::ok(NAME, "sockets of one port can be told apart (SO_REUSEPORT, BPF)")
        }
        Some(Err(error)) => Check::blocked(
            NAME,
            format!("sockets of one port cannot be told apart: {error}"),
            "there are no soft devices of the driver udp",
            "docker run --security-opt seccomp=FILE, with a profile that allows setsockopt whole",
        ),
    }
}

fn buffer(name: &'static str, sysctl: &str, limit: Option<u64>, facts: &Facts) -> Check {
    let asked = SocketConfig::DEFAULT_BUFFER_LENGTH as u64;
    let Some(limit) = limit else { return Check::unknown(name) };
    let found = format!("{sysctl} is {limit} ({})", units::readable(limit));
    if limit >= asked.min(ENOUGH_BUFFER) {
        return Check::ok(name, found);
    }
    if facts.has_capability(CAP_NET_ADMIN) {
        return Check::ok(name, format!("{found}, and CAP_NET_ADMIN, which may exceed it"));
    }
    Check::degraded(
        name,
        found,
        "what is in flight beyond it is lost and sent again: several peers at once are slow",
        format!("sysctl -w {sysctl}={asked}"),
    )
}

/// The port is one for all devices, and a socket on all addresses keeps it from each.
fn roce_port(facts: &Facts) -> Check {
    const NAME: &str = "UDP port 4791";
    let here: Vec<&PortUser> = facts.udp_sockets.iter().filter(|it| it.port == ROCE_PORT).collect();
    if let Some(all) = here.iter().find(|it| it.address.is_unspecified()) {
        let remedy = match facts.rdma_devices.iter().find(|it| facts.has_rxe && it.pci.is_none()) {
            Some(device) => {
                format!("rdma link delete {} (the kernel's soft-RoCE)", escaped(&device.name))
            }
            None => "ss -ulpn 'sport = :4791' (whose it is: end that)".to_owned(),
        };
        return Check::blocked(
            NAME,
            format!("user {} has it on all addresses", all.user),
            "there are no soft devices",
            remedy,
        );
    }
    match here.iter().find(|it| Some(it.user) != facts.user) {
        Some(other) => Check::degraded(
            NAME,
            format!("user {} has it on {}", other.user, other.address),
            "only processes of one user share an address",
            "millstream node --bind ADDRESS (another one), or run as that user",
        ),
        None if here.is_empty() => Check::ok(NAME, "nobody has it"),
        None => Check::ok(NAME, "in use by this user's processes, which share their addresses"),
    }
}

fn controller_port(facts: &Facts) -> Check {
    const NAME: &str = "controller's port";
    let default = ControllerConfig::DEFAULT_LISTEN;
    let overlaps = |it: &&PortUser| {
        // The default is to listen at all addresses.
        let same = it.address == default.ip() || it.address.is_unspecified();
        it.port == default.port() && (same || default.ip().is_unspecified())
    };
    match facts.tcp_listeners.iter().find(overlaps) {
        None => Check::ok(NAME, format!("nobody listens at {default}")),
        Some(it) if Some(it.user) == facts.user => {
            Check::ok(NAME, format!("a process of this user listens at {default}"))
        }
        Some(other) => Check::degraded(
            NAME,
            format!("user {} listens at {default}", other.user),
            "a controller needs another port, which hosts and switches must be told",
            "millstream controller --listen 127.0.0.1:52201",
        ),
    }
}

/// Of interfaces that have a link, or a device that might have one.
fn interface(interface: &Interface) -> Option<Check> {
    const NAME: &str = "interface";
    let name = escaped(&interface.name);
    let state = interface.state.as_deref().unwrap_or("unknown");
    if matches!(state, "down" | "lowerlayerdown") {
        // Bridges and tunnels that nobody uses are down, too.
        interface.pci.as_ref()?;
        return Some(Check::degraded(
            NAME,
            format!("{name} is down"),
            "nothing goes over it",
            format!("ip link set dev {name} up (and look at its cable)"),
        ));
    }
    let mtu = interface.mtu?;
    let Some(path_mtu) = Mtu::fitting(mtu as usize) else {
        return Some(Check::degraded(
            NAME,
            format!("{name} has an MTU of {mtu}"),
            "it is too small for RoCE",
            format!("ip link set dev {name} mtu 1500"),
        ));
    };
    let found = format!("{name} has an MTU of {mtu}: a path MTU of {}", path_mtu.bytes());
    if path_mtu == Mtu::B4096 {
        return Some(Check::ok(NAME, found));
    }
    Some(Check::degraded(
        NAME,
        found,
        "more packets, and more work for each byte, than jumbo frames would make",
        format!("ip link set dev {name} mtu 9000 (where its network takes that)"),
    ))
}

/// Whether it is an address that only neighbours can reach.
pub(super) const fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}
