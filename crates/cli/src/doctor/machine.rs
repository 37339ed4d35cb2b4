//! The machine: RDMA devices and libraries, memory, clock and processors.

use std::net::IpAddr;

use millstream_topology::{Port, RdmaDevice};

use super::check::Check;
use super::facts::Facts;
use super::network::is_link_local;
use crate::output::escaped;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![libibverbs(facts), librdmacm(facts), cuda(facts)];
    let ports =
        facts.rdma_devices.iter().flat_map(|it| it.ports.iter().map(move |port| (it, port)));
    checks.extend(ports.map(|(device, port)| rdma_port(device, port)));
    checks.extend([huge_pages(facts), clock(facts), frequency(facts)]);
    checks
}

fn libibverbs(facts: &Facts) -> Check {
    const NAME: &str = "libibverbs";
    match (facts.has_libibverbs, facts.rdma_devices.len()) {
        (true, 0) => {
            Check::ok(NAME, "is here; there is no RDMA device, and soft devices need none")
        }
        (true, count) => Check::ok(NAME, format!("is here, for {count} RDMA devices")),
        (false, 0) => {
            Check::ok(NAME, "is not here, nor is an RDMA device: soft devices need neither")
        }
        (false, count) => Check::blocked(
            NAME,
            format!("libibverbs.so.1 is not here, but {count} RDMA devices are"),
            "the system's devices cannot be used; soft devices can",
            "apt-get install ibverbs-providers (dnf install libibverbs)",
        ),
    }
}

fn librdmacm(facts: &Facts) -> Check {
    let found = if facts.has_librdmacm { "is here" } else { "is not here" };
    Check::ok("librdmacm", format!("{found}; nothing of millstream needs it"))
}

fn cuda(facts: &Facts) -> Check {
    const NAME: &str = "CUDA driver";
    let nics = !facts.rdma_devices.is_empty();
    match (facts.has_libcuda, facts.has_nvidia_gpu) {
        (false, false) => Check::ok(NAME, "is not here, nor is the kernel's module of NVIDIA GPUs"),
        (false, true) => Check::degraded(
            NAME,
            "libcuda.so.1 is not here, but the kernel's module of NVIDIA GPUs is",
            "memory of GPUs cannot be registered",
            "apt-get install libcuda1 (in a container: docker run --gpus all ...)",
        ),
        (true, true) if nics && !facts.has_peermem => Check::degraded(
            NAME,
            "is here, and nvidia-peermem is not loaded",
            "RDMA devices of the system do not get at memory of GPUs; soft devices do",
            "modprobe nvidia-peermem",
        ),
        (true, false) => Check::ok(NAME, "is here; the kernel's module of NVIDIA GPUs is not seen"),
        (true, true) => Check::ok(NAME, "is here: memory of GPUs can be registered"),
    }
}

fn rdma_port(device: &RdmaDevice, port: &Port) -> Check {
    const NAME: &str = "RDMA port";
    let (name, number) = (escaped(&device.name), port.number);
    let interface = port.gids.iter().find_map(|gid| gid.interface.as_deref()).map(escaped);
    let interface = interface.unwrap_or_else(|| "INTERFACE".to_owned());
    let unusable = |what: String, remedy: String| {
        let found = format!("{name} port {number} {what}");
        Check::degraded(NAME, found, "the device cannot be used; soft devices can", remedy)
    };
    let subnet =
        "connect its cable, and start a subnet manager such as opensm (`ibstat`, `sminfo`)";
    if let Some(state) = port.state.as_deref().filter(|state| *state != "ACTIVE") {
        let remedy = match port.is_infiniband() {
            true => subnet.to_owned(),
            false => format!("ip link set dev {interface} up (`rdma link` names the interface)"),
        };
        return unusable(format!("is {}", escaped(state)), remedy);
    }
    if port.is_infiniband() {
        let Some(entry) = port.gids.first() else {
            return unusable("is of InfiniBand and has no GID".to_owned(), subnet.to_owned());
        };
        let found = format!("{name} port {number} is active, as {} of InfiniBand", entry.gid);
        let limits = "for transfers and `rdma`, not for collectives; tested with a fake library only, never run on \
                      InfiniBand hardware";
        return Check::ok(NAME, format!("{found} ({limits})"));
    }
    if let Some(layer) = port.link_layer.as_deref().filter(|layer| *layer != "Ethernet") {
        let remedy = "use its Ethernet interface with soft devices";
        let what = format!("is of {}, neither Ethernet nor InfiniBand", escaped(layer));
        return unusable(what, remedy.to_owned());
    }
    let addresses = port.gids.iter().filter(|gid| gid.version_2);
    let addresses: Vec<IpAddr> = addresses.map(|gid| IpAddr::V6(gid.gid).to_canonical()).collect();
    let remedy = || format!("ip address add ADDRESS/24 dev {interface}");
    match addresses.iter().find(|address| !is_link_local(**address)) {
        Some(address) => Check::ok(NAME, format!("{name} port {number} is active, as {address}")),
        None if addresses.is_empty() => unusable("has no GID of RoCE v2".to_owned(), remedy()),
        None => Check::degraded(
            NAME,
            format!("{name} port {number} has link-local GIDs of RoCE v2 only"),
            "neighbours can reach it, and nobody beyond a router",
            remedy(),
        ),
    }
}

fn huge_pages(facts: &Facts) -> Check {
    const NAME: &str = "huge pages";
    match facts.transparent_huge_pages.as_deref() {
        None => Check::unknown(NAME),
        Some("never") => Check::degraded(
            NAME,
            "memory has none by itself, nor when it is asked for",
            "large buffers take longer to allocate, to register and to walk through",
            "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Some(when) => Check::ok(NAME, format!("by itself: {}", escaped(when))),
    }
}

fn clock(facts: &Facts) -> Check {
    const NAME: &str = "clock";
    /// Those that are read by a system call, and from a slow device.
    const SLOW: [&str; 4] = ["hpet", "acpi_pm", "jiffies", "xen"];
    match facts.clock_source.as_deref() {
        None => Check::unknown(NAME),
        Some(source) if SLOW.contains(&source) => Check::degraded(
            NAME,
            format!("its source is {source}"),
            "reading the time, which every round of a device does, takes a microsecond",
            "echo tsc >/sys/devices/system/clocksource/clocksource0/current_clocksource",
        ),
        Some(source) => Check::ok(NAME, format!("its source is {}", escaped(source))),
    }
}

fn frequency(facts: &Facts) -> Check {
    const NAME: &str = "processor frequency";
    // With these drivers the hardware chooses, and powersave is only what it prefers.
    let by_hardware = facts.frequency_driver.as_deref().is_some_and(|driver| {
        driver.starts_with("intel_pstate") || driver.starts_with("amd-pstate-epp")
    });
    match facts.governor.as_deref() {
        None => Check::ok(NAME, "nothing here changes it"),
        Some("powersave") if !by_hardware => Check::degraded(
            NAME,
            "is the lowest (powersave)",
            "everything takes longer, and figures are of no use",
            "cpupower frequency-set -g performance",
        ),
        Some(governor) => Check::ok(NAME, format!("is chosen by {}", escaped(governor))),
    }
}
