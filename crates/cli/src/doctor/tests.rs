use millstream_topology::{GidEntry, Interface, Port, RdmaDevice};

use super::facts::{PortUser, Tries};
use super::*;

/// A machine on which nothing stands in the way.
fn healthy() -> Facts {
    Facts {
        user: Some(1000),
        capabilities: Some(1 << 13),
        memory_lock_limit: Some(u64::MAX),
        ptrace_scope: Some(0),
        receive_buffer_limit: Some(16 << 20),
        send_buffer_limit: Some(16 << 20),
        interfaces: vec![interface("eth0", 9000, "up")],
        rdma_devices: vec![device("ACTIVE", "Ethernet", &["::ffff:10.0.0.7"])],
        has_libibverbs: true,
        has_librdmacm: true,
        transparent_huge_pages: Some("madvise".to_owned()),
        io_uring_disabled: Some(0),
        clock_source: Some("tsc".to_owned()),
        tries: Some(Tries { udp_socket: Ok((true, true)), shared_port: Ok(()), io_uring: Ok(()) }),
        ..Facts::default()
    }
}

fn interface(name: &str, mtu: u32, state: &str) -> Interface {
    Interface {
        name: name.to_owned(),
        mtu: Some(mtu),
        state: Some(state.to_owned()),
        speed_mbit_per_s: None,
        pci: None,
        numa_node: None,
    }
}

fn device(state: &str, link_layer: &str, gids: &[&str]) -> RdmaDevice {
    let gid = |(index, gid): (usize, &&str)| GidEntry {
        index: index as u32,
        gid: gid.parse().unwrap(),
        version_2: true,
        interface: Some("eth0".to_owned()),
    };
    let port = Port {
        number: 1,
        state: Some(state.to_owned()),
        link_layer: Some(link_layer.to_owned()),
        rate: None,
        gids: gids.iter().enumerate().map(gid).collect(),
    };
    RdmaDevice { name: "mlx5_0".to_owned(), pci: None, numa_node: None, ports: vec![port] }
}

fn user(address: &str, port: u16, user: u32) -> PortUser {
    PortUser { address: address.parse().unwrap(), port, user }
}

fn tries(change: impl FnOnce(&mut Tries)) -> Option<Tries> {
    let mut tries = healthy().tries.unwrap();
    change(&mut tries);
    Some(tries)
}

#[test]
fn a_healthy_machine_has_nothing_to_change() {
    let checks = checks(&healthy());
    let bad: Vec<_> = checks.iter().filter(|check| check.state != State::Ok).collect();
    assert!(bad.is_empty(), "{bad:?}");
}

/// Each row changes one thing, which one check notices.
#[test]
fn what_stands_in_the_way_is_told_with_the_line_that_changes_it() {
    use State::{Blocked, Degraded};
    type Row = (fn(&mut Facts), State, &'static str, &'static str);
    let rows: &[Row] = &[
        (|it| it.memory_lock_limit = Some(65_536), Blocked, "locked memory", "ulimit -l unlimited"),
        (
            |it| it.memory_lock_limit = Some(8 << 20),
            Degraded,
            "locked memory",
            "--ulimit memlock=-1:-1",
        ),
        (|it| it.capabilities = Some(0), Degraded, "packet sockets", "setcap cap_net_raw+ep"),
        (
            |it| it.ptrace_scope = Some(1),
            Degraded,
            "memory of other processes",
            "sysctl -w kernel.yama.ptrace_scope=0",
        ),
        (
            |it| (it.ptrace_scope, it.capabilities) = (Some(3), Some(u64::MAX)),
            Degraded,
            "memory of other processes",
            "/etc/sysctl.d/",
        ),
        (
            |it| it.hidepid = Some("2".to_owned()),
            Degraded,
            "processes of others",
            "mount -o remount,hidepid=0 /proc",
        ),
        (|it| it.io_uring_disabled = Some(2), Degraded, "io_uring", "kernel.io_uring_disabled=0"),
        (
            |it| it.tries = tries(|tries| tries.io_uring = Err("refused".to_owned())),
            Degraded,
            "io_uring",
            "--security-opt seccomp=",
        ),
        (|it| it.memory_limit = Some(256 << 20), Degraded, "memory limit", "--memory 4g"),
        (|it| it.processor_quota = Some(0.5), Degraded, "processor quota", "--cpus 2"),
        (
            |it| it.tries = tries(|tries| tries.udp_socket = Err("refused".to_owned())),
            Blocked,
            "UDP sockets",
            "seccomp",
        ),
        (
            |it| it.tries = tries(|tries| tries.udp_socket = Ok((false, true))),
            Degraded,
            "UDP sockets",
            "uname -r",
        ),
        (
            |it| it.tries = tries(|tries| tries.udp_socket = Ok((true, false))),
            Degraded,
            "UDP sockets",
            "uname -r",
        ),
        (
            |it| it.tries = tries(|tries| tries.shared_port = Err("refused".to_owned())),
            Blocked,
            "shared addresses",
            "setsockopt",
        ),
        (
            |it| it.receive_buffer_limit = Some(212_992),
            Degraded,
            "receive buffer",
            "sysctl -w net.core.rmem_max=16777216",
        ),
        (
            |it| it.send_buffer_limit = Some(212_992),
            Degraded,
            "send buffer",
            "sysctl -w net.core.wmem_max=16777216",
        ),
        (
            |it| it.udp_sockets = vec![user("0.0.0.0", 4791, 1000)],
            Blocked,
            "UDP port 4791",
            "ss -ulpn 'sport = :4791'",
        ),
        (
            |it| (it.udp_sockets, it.has_rxe) = (vec![user("::", 4791, 0)], true),
            Blocked,
            "UDP port 4791",
            "rdma link delete mlx5_0",
        ),
        (
            |it| it.udp_sockets = vec![user("10.0.0.7", 4791, 1001)],
            Degraded,
            "UDP port 4791",
            "--bind ADDRESS",
        ),
        (
            |it| it.tcp_listeners = vec![user("10.0.0.7", 52_200, 0)],
            Degraded,
            "controller's port",
            "--listen 127.0.0.1:52201",
        ),
        (
            |it| it.interfaces[0].mtu = Some(1500),
            Degraded,
            "interface",
            "ip link set dev eth0 mtu 9000",
        ),
        (
            |it| it.interfaces[0].mtu = Some(300),
            Degraded,
            "interface",
            "ip link set dev eth0 mtu 1500",
        ),
        (
            |it| it.has_libibverbs = false,
            Blocked,
            "libibverbs",
            "apt-get install ibverbs-providers",
        ),
        (|it| it.has_nvidia_gpu = true, Degraded, "CUDA driver", "libcuda1"),
        (
            |it| (it.has_nvidia_gpu, it.has_libcuda) = (true, true),
            Degraded,
            "CUDA driver",
            "modprobe nvidia-peermem",
        ),
        (
            |it| it.rdma_devices = vec![device("DOWN", "Ethernet", &["::ffff:10.0.0.7"])],
            Degraded,
            "RDMA port",
            "ip link set dev eth0 up",
        ),
        (
            |it| it.rdma_devices = vec![device("ACTIVE", "InfiniBand", &[])],
            Degraded,
            "RDMA port",
            "subnet manager",
        ),
        (
            |it| it.rdma_devices = vec![device("INIT", "InfiniBand", &["fe80::1"])],
            Degraded,
            "RDMA port",
            "subnet manager",
        ),
        (
            |it| it.rdma_devices = vec![device("ACTIVE", "Unspecified", &["fe80::1"])],
            Degraded,
            "RDMA port",
            "soft devices",
        ),
        (
            |it| it.rdma_devices = vec![device("ACTIVE", "Ethernet", &[])],
            Degraded,
            "RDMA port",
            "ip address add ADDRESS/24 dev INTERFACE",
        ),
        (
            |it| it.rdma_devices = vec![device("ACTIVE", "Ethernet", &["fe80::1"])],
            Degraded,
            "RDMA port",
            "ip address add ADDRESS/24 dev eth0",
        ),
        (
            |it| it.transparent_huge_pages = Some("never".to_owned()),
            Degraded,
            "huge pages",
            "echo madvise >",
        ),
        (|it| it.clock_source = Some("hpet".to_owned()), Degraded, "clock", "echo tsc >"),
        (
            |it| it.governor = Some("powersave".to_owned()),
            Degraded,
            "processor frequency",
            "cpupower frequency-set -g performance",
        ),
    ];
    for (change, state, name, remedy) in rows {
        let mut facts = healthy();
        change(&mut facts);
        let checks = checks(&facts);
        let bad: Vec<_> = checks.iter().filter(|check| check.state != State::Ok).collect();
        let [check] = bad[..] else { panic!("{name}: {bad:?}") };
        assert_eq!((check.name, check.state), (*name, *state), "{check:?}");
        assert!(check.remedy.as_ref().unwrap().contains(remedy), "{check:?}");
        assert!(check.cost.is_some() && !check.found.is_empty(), "{check:?}");
        assert!(check.remedy.as_ref().unwrap().lines().count() == 1, "{check:?}");
    }
}

#[test]
fn what_does_not_matter_here_is_all_right() {
    let rows: &[fn(&mut Facts)] = &[
        // Soft devices lock no memory, and need no library.
        |it| (it.memory_lock_limit, it.rdma_devices) = (Some(0), Vec::new()),
        |it| (it.has_libibverbs, it.has_librdmacm, it.rdma_devices) = (false, false, Vec::new()),
        |it| (it.memory_lock_limit, it.capabilities) = (Some(0), Some(1 << 13 | 1 << 14)),
        |it| (it.ptrace_scope, it.capabilities) = (Some(2), Some(1 << 13 | 1 << 19)),
        |it| (it.receive_buffer_limit, it.capabilities) = (Some(1), Some(1 << 13 | 1 << 12)),
        |it| it.receive_buffer_limit = Some(4 << 20),
        |it| it.has_libcuda = true,
        // The prefix of a subnet to which its manager has given no other.
        |it| it.rdma_devices = vec![device("ACTIVE", "InfiniBand", &["fe80::1"])],
        |it| (it.has_nvidia_gpu, it.has_libcuda, it.has_peermem) = (true, true, true),
        |it| {
            (it.has_nvidia_gpu, it.has_libcuda) = (true, true);
            it.rdma_devices.clear();
        },
        // Those of the same user share.
        |it| it.udp_sockets = vec![user("127.0.0.1", 4791, 1000), user("0.0.0.0", 53, 0)],
        |it| it.tcp_listeners = vec![user("127.0.0.1", 52_200, 1000), user("10.0.0.7", 52_201, 0)],
        // A bridge without ports.
        |it| it.interfaces.push(interface("br0", 1500, "down")),
        |it| {
            (it.governor, it.frequency_driver) =
                (Some("powersave".to_owned()), Some("intel_pstate".to_owned()));
        },
        |it| (it.memory_limit, it.processor_quota) = (Some(8 << 30), Some(4.0)),
    ];
    for (index, change) in rows.iter().enumerate() {
        let mut facts = healthy();
        change(&mut facts);
        let checks = checks(&facts);
        let bad: Vec<_> = checks.iter().filter(|check| check.state != State::Ok).collect();
        assert!(bad.is_empty(), "{index}: {bad:?}");
    }
}
