//! What this process may do: limits, capabilities, filters of system calls.

use super::check::Check;
use super::facts::Facts;
use crate::units;

/// The numbers of capabilities (capability.h).
pub(super) const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_PTRACE: u32 = 19;

/// Less memory that may be locked than this holds hardly a buffer.
const FEW_LOCKED: u64 = 1 << 20;
/// With so much, ordinary buffers can be registered.
const ENOUGH_LOCKED: u64 = 1 << 30;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    vec![
        memory_lock(facts),
        packet_sockets(facts),
        ptrace(facts),
        hidden_processes(facts),
        io_uring(facts),
        memory_limit(facts),
        processor_quota(facts),
    ]
}

/// The system's devices lock what is registered; soft devices lock nothing.
fn memory_lock(facts: &Facts) -> Check {
    const NAME: &str = "locked memory";
    const REMEDY: &str = "ulimit -l unlimited (docker run --ulimit memlock=-1:-1, or --cap-add \
                          IPC_LOCK; for good: '* - memlock unlimited' in /etc/security/limits.conf)";
    let Some(limit) = facts.memory_lock_limit else { return Check::unknown(NAME) };
    if limit == u64::MAX {
        return Check::ok(NAME, "no limit");
    }
    let found = format!("up to {}", units::readable(limit));
    if facts.has_capability(CAP_IPC_LOCK) {
        return Check::ok(NAME, format!("{found}, and CAP_IPC_LOCK, which has no limit"));
    }
    if facts.rdma_devices.is_empty() {
        return Check::ok(NAME, format!("{found}; soft devices lock none"));
    }
    let cost = "the system's RDMA devices register no more memory than that";
    match limit {
        ..FEW_LOCKED => Check::blocked(NAME, found, cost, REMEDY),
        FEW_LOCKED..ENOUGH_LOCKED => Check::degraded(NAME, found, cost, REMEDY),
        _ => Check::ok(NAME, found),
    }
}

fn packet_sockets(facts: &Facts) -> Check {
    const NAME: &str = "packet sockets";
    if facts.capabilities.is_none() {
        return Check::unknown(NAME);
    }
    if facts.has_capability(CAP_NET_RAW) {
        return Check::ok(NAME, "CAP_NET_RAW is there");
    }
    Check::degraded(
        NAME,
        "CAP_NET_RAW is missing",
        "there is no driver packet; the driver udp works, and checks less of the invariant CRC",
        "setcap cap_net_raw+ep \"$(command -v millstream)\" (docker run --cap-add NET_RAW)",
    )
}

fn ptrace(facts: &Facts) -> Check {
    const NAME: &str = "memory of other processes";
    let privileged = facts.has_capability(CAP_SYS_PTRACE);
    let degraded = |scope: u32, remedy: &str| {
        Check::degraded(
            NAME,
            format!("kernel.yama.ptrace_scope is {scope}"),
            "processes on this machine cannot copy from each other's memory, and use the network",
            remedy,
        )
    };
    match facts.ptrace_scope {
        None | Some(0) => Check::ok(NAME, "those of the same user can be copied from and to"),
        Some(scope @ (1 | 2)) if privileged => Check::ok(
            NAME,
            format!("CAP_SYS_PTRACE is there (kernel.yama.ptrace_scope is {scope})"),
        ),
        Some(scope @ (1 | 2)) => degraded(
            scope,
            "sysctl -w kernel.yama.ptrace_scope=0 (docker run --cap-add SYS_PTRACE)",
        ),
        // It can only become stricter while the system runs.
        Some(scope) => degraded(
            scope,
            "echo kernel.yama.ptrace_scope=0 >/etc/sysctl.d/10-ptrace.conf, and boot again",
        ),
    }
}

fn hidden_processes(facts: &Facts) -> Check {
    const NAME: &str = "processes of others";
    match &facts.hidepid {
        None => Check::ok(NAME, "can be seen"),
        Some(value) => Check::degraded(
            NAME,
            format!("/proc is mounted with hidepid={value}"),
            "whether a peer of another user on this machine still runs cannot be seen",
            "mount -o remount,hidepid=0 /proc",
        ),
    }
}

fn io_uring(facts: &Facts) -> Check {
    const NAME: &str = "io_uring";
    let cost = "targets that offer files read and write them by four threads in its place";
    let degraded = |found: String, remedy: &str| Check::degraded(NAME, found, cost, remedy);
    let sysctl = "sysctl -w kernel.io_uring_disabled=0";
    match (facts.io_uring_disabled, facts.tries.as_ref().map(|tries| &tries.io_uring)) {
        (Some(2), _) => degraded("kernel.io_uring_disabled is 2".to_owned(), sysctl),
        (Some(1), Some(Err(_))) => degraded(
            "kernel.io_uring_disabled is 1, and this process is not privileged".to_owned(),
            sysctl,
        ),
        (_, Some(Err(error))) => degraded(
            format!("the kernel, or a filter of system calls, refuses it: {error}"),
            "docker run --security-opt seccomp=FILE, with a profile that allows io_uring_setup, \
             io_uring_enter and io_uring_register",
        ),
        (_, Some(Ok(()))) => Check::ok(NAME, "is allowed"),
        (_, None) => Check::unknown(NAME),
    }
}

fn memory_limit(facts: &Facts) -> Check {
    const NAME: &str = "memory limit";
    const FEW: u64 = 1 << 30;
    match facts.memory_limit {
        None => Check::ok(NAME, "none of a control group"),
        Some(limit @ ..FEW) => Check::degraded(
            NAME,
            format!("the control group has {}", units::readable(limit)),
            "a process whose buffers exceed it is killed",
            "docker run --memory 4g (systemd: MemoryMax=4G; Kubernetes: resources.limits.memory)",
        ),
        Some(limit) => Check::ok(NAME, format!("the control group has {}", units::readable(limit))),
    }
}

fn processor_quota(facts: &Facts) -> Check {
    const NAME: &str = "processor quota";
    match facts.processor_quota {
        None => Check::ok(NAME, "none of a control group"),
        Some(quota) if quota < 2.0 => Check::degraded(
            NAME,
            format!("the control group has the time of {quota:.2} processors"),
            "threads stand still for up to 100 ms when it is used up: peers see time-outs",
            "docker run --cpus 2 (systemd: CPUQuota=200%; Kubernetes: resources.limits.cpu)",
        ),
        Some(quota) => {
            Check::ok(NAME, format!("the control group has the time of {quota:.2} processors"))
        }
    }
}
