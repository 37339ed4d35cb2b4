//! What there is to know of a machine and of this process, from files below a root and a few tries.
//!
//! What cannot be read is unknown. No file is needed, and none is waited for.

use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Component, Path, PathBuf};

use millstream_net::udp::{SocketConfig, UdpSocket};
use millstream_topology::{Interface, RdmaDevice, Topology};

/// More of a file than of any that is read here.
const MOST: u64 = 4 << 20;

/// The folders that have libraries, and the loader's list of more.
const LIBRARY_FOLDERS: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "lib64",
];
const LOADER_CACHE: &str = "etc/ld.so.cache";

/// What is known. `None` is unknown.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub(super) user: Option<u32>,
    /// The bits of the capabilities in effect.
    pub(super) capabilities: Option<u64>,
    /// Bytes that may be locked in memory; `u64::MAX` is no limit.
    pub(super) memory_lock_limit: Option<u64>,
    pub(super) ptrace_scope: Option<u32>,
    pub(super) receive_buffer_limit: Option<u64>,
    pub(super) send_buffer_limit: Option<u64>,
    pub(super) interfaces: Vec<Interface>,
    pub(super) rdma_devices: Vec<RdmaDevice>,
    pub(super) has_libibverbs: bool,
    pub(super) has_librdmacm: bool,
    /// The CUDA driver, a GPU of NVIDIA, and what lets NICs at its memory.
    pub(super) has_libcuda: bool,
    pub(super) has_nvidia_gpu: bool,
    pub(super) has_peermem: bool,
    /// The kernel's soft-RoCE is loaded.
    pub(super) has_rxe: bool,
    pub(super) udp_sockets: Vec<PortUser>,
    pub(super) tcp_listeners: Vec<PortUser>,
    /// Whether memory gets huge pages by itself: `always`, `madvise` or `never`.
    pub(super) transparent_huge_pages: Option<String>,
    pub(super) io_uring_disabled: Option<u32>,
    /// How the kernel keeps processes of other users from being seen.
    pub(super) hidepid: Option<String>,
    pub(super) clock_source: Option<String>,
    /// Of the first processor: the driver of its frequency, and who chooses it.
    pub(super) frequency_driver: Option<String>,
    pub(super) governor: Option<String>,
    pub(super) memory_limit: Option<u64>,
    /// Processors' time that this process may use, in processors.
    pub(super) processor_quota: Option<f64>,
    pub(super) tries: Option<Tries>,
}

/// Who has a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct PortUser {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) user: u32,
}

/// What was tried, on this machine only. Errors are the system's.
#[derive(Clone, Debug)]
pub(super) struct Tries {
    /// A UDP socket on loopback: whether the kernel cuts and joins datagrams.
    pub(super) udp_socket: Result<(bool, bool), String>,
    /// Sockets of one port, among which a program chooses.
    pub(super) shared_port: Result<(), String>,
    pub(super) io_uring: Result<(), String>,
}

impl Facts {
    /// Reads what the files below `root` say.
    pub(super) fn read(root: &Path) -> Self {
        let proc_self = |name: &str| text(&root.join("proc/self").join(name));
        let sysctl = |name: &str| number(&root.join("proc/sys").join(name));
        let status = proc_self("status").unwrap_or_default();
        let first_processor = root.join("sys/devices/system/cpu/cpu0/cpufreq");
        let topology = Topology::read(&root.join("sys")).unwrap_or_default();
        let cgroups = proc_self("cgroup").unwrap_or_default();
        Self {
            user: field(&status, "Uid:")
                .and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok()),
            capabilities: field(&status, "CapEff:")
                .and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()),
            memory_lock_limit: proc_self("limits").as_deref().and_then(memory_lock_limit),
            ptrace_scope: sysctl("kernel/yama/ptrace_scope").and_then(|it| it.try_into().ok()),
            receive_buffer_limit: sysctl("net/core/rmem_max"),
            send_buffer_limit: sysctl("net/core/wmem_max"),
            interfaces: topology.interfaces,
            rdma_devices: topology.rdma_devices,
            has_libibverbs: has_library(root, "libibverbs.so.1"),
            has_librdmacm: has_library(root, "librdmacm.so.1"),
            has_libcuda: has_library(root, "libcuda.so.1"),
            has_nvidia_gpu: root.join("sys/module/nvidia").is_dir()
                || root.join("proc/driver/nvidia").is_dir(),
            has_peermem: root.join("sys/module/nvidia_peermem").is_dir(),
            has_rxe: root.join("sys/module/rdma_rxe").is_dir(),
            udp_sockets: sockets(root, ["udp", "udp6"], |_| true),
            // TCP_LISTEN
            tcp_listeners: sockets(root, ["tcp", "tcp6"], |state| state == "0A"),
            transparent_huge_pages: text(&root.join("sys/kernel/mm/transparent_hugepage/enabled"))
                .and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())),
            io_uring_disabled: sysctl("kernel/io_uring_disabled").and_then(|it| it.try_into().ok()),
            hidepid: proc_self("mounts").as_deref().and_then(hidepid),
            clock_source: text(
                &root.join("sys/devices/system/clocksource/clocksource0/current_clocksource"),
            ),
            frequency_driver: text(&first_processor.join("scaling_driver")),
            governor: text(&first_processor.join("scaling_governor")),
            memory_limit: memory_limit(root, &cgroups),
            processor_quota: processor_quota(root, &cgroups),
            tries: None,
        }
    }

    /// The same of this machine, with what is tried here.
    pub(super) fn of_this_machine() -> Self {
        let socket = UdpSocket::open(&SocketConfig {
            address: Ipv4Addr::LOCALHOST.into(),
            // Any free one.
            port: 0,
            segmentation_offload: true,
            buffer_length: SocketConfig::DEFAULT_BUFFER_LENGTH,
        });
        let udp_socket = socket
            .map(|socket| (socket.info().segmentation, socket.info().coalescing))
            .map_err(|error| error.to_string());
        let shared_port = millstream_net::probe::shared_port().map_err(|error| error.to_string());
        let io_uring = millstream_net::probe::io_uring().map_err(|error| error.to_string());
        let tries = Some(Tries { udp_socket, shared_port, io_uring });
        Self { tries, ..Self::read(Path::new("/")) }
    }

    pub(super) fn has_capability(&self, bit: u32) -> bool {
        self.capabilities.is_some_and(|bits| bits >> bit & 1 == 1)
    }
}

/// The text of a file without white space around it.
fn text(path: &Path) -> Option<String> {
    // A tree that is not the kernel's may hold pipes, which would be waited for.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// What stands after this name at the start of a line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

fn memory_lock_limit(limits: &str) -> Option<u64> {
    match field(limits, "Max locked memory")?.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    }
}

fn has_library(root: &Path, name: &str) -> bool {
    let listed = || {
        let cache = text(&root.join(LOADER_CACHE)).unwrap_or_default();
        cache.contains(name)
    };
    LIBRARY_FOLDERS.iter().any(|folder| root.join(folder).join(name).is_file()) || listed()
}

/// Those of `/proc/net/udp` and the like.
fn sockets(root: &Path, files: [&str; 2], wanted: fn(&str) -> bool) -> Vec<PortUser> {
    let file = |name: &str| text(&root.join("proc/self/net").join(name)).unwrap_or_default();
    let texts = files.map(file);
    let lines = texts.iter().flat_map(|text| text.lines().skip(1));
    lines.filter_map(|line| socket(line, wanted)).collect()
}

fn socket(line: &str, wanted: fn(&str) -> bool) -> Option<PortUser> {
    let mut words = line.split_whitespace().skip(1);
    let (address, port) = words.next()?.split_once(':')?;
    // After the remote address.
    let state = words.nth(1)?;
    // After the queues, the timer and the retransmissions.
    let user = words.nth(3)?.parse().ok()?;
    let word = |at: usize| u32::from_str_radix(address.get(at..at + 8)?, 16).ok();
    // Words of the machine's order, which hold bytes of the network's.
    let address: IpAddr = match address.len() {
        8 => Ipv4Addr::from(word(0)?.to_ne_bytes()).into(),
        32 => {
            let mut bytes = [0; 16];
            for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(index * 8)?.to_ne_bytes());
            }
            Ipv6Addr::from(bytes).into()
        }
        _ => return None,
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    wanted(state).then_some(PortUser { address, port, user })
}

/// What `/proc` is mounted with, if that hides processes.
fn hidepid(mounts: &str) -> Option<String> {
    let options = mounts.lines().rev().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        (words.next()? == "/proc" && words.next()? == "proc").then(|| words.next())?
    })?;
    let value = options.split(',').find_map(|option| option.strip_prefix("hidepid="))?;
    (!matches!(value, "0" | "off")).then(|| value.to_owned())
}

/// The folders of this process's control group, the innermost first: of version 2, or else of this
/// controller of version 1.
fn control_groups(root: &Path, cgroups: &str, controller: &str) -> Vec<PathBuf> {
    let hierarchies = cgroups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        rest.split_once(':')
    });
    let mut folders = Vec::new();
    for (controllers, path) in hierarchies {
        let mount = match controllers {
            "" => root.join("sys/fs/cgroup"),
            names if names.split(',').any(|name| name == controller) => {
                root.join("sys/fs/cgroup").join(controller)
            }
            _ => continue,
        };
        // In a container the path may be one of the host's, which is not here: then the top is ours.
        let inner = Path::new(path).components().filter(|it| matches!(it, Component::Normal(_)));
        let inner: PathBuf = inner.collect();
        folders.extend(inner.ancestors().map(|inner| mount.join(inner)));
    }
    folders
}

fn memory_limit(root: &Path, cgroups: &str) -> Option<u64> {
    let folders = control_groups(root, cgroups, "memory");
    let limit = |folder: &PathBuf| {
        // "max" is no number, and version 1 writes almost 2^63 for none.
        let limit = |name| number(&folder.join(name)).filter(|&bytes| bytes < 1 << 60);
        limit("memory.max").or_else(|| limit("memory.limit_in_bytes"))
    };
    folders.iter().filter_map(limit).min()
}

fn processor_quota(root: &Path, cgroups: &str) -> Option<f64> {
    let folders = control_groups(root, cgroups, "cpu");
    let quota = |folder: &PathBuf| {
        let version_2 = text(&folder.join("cpu.max"));
        let (quota, period): (u64, u64) = match &version_2 {
            Some(text) => {
                let (quota, period) = text.split_once(' ')?;
                (quota.parse().ok()?, period.parse().ok()?)
            }
            None => (
                number(&folder.join("cpu.cfs_quota_us"))?,
                number(&folder.join("cpu.cfs_period_us"))?,
            ),
        };
        (period > 0).then(|| quota as f64 / period as f64)
    };
    folders.iter().filter_map(quota).min_by(f64::total_cmp)
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
