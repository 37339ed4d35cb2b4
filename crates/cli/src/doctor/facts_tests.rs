use std::path::PathBuf;

use super::*;

/// A folder that is removed when it is dropped.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let name = format!("millstream-doctor-{}-{name}", std::process::id());
        let root = std::env::temp_dir().join(name);
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const HEAD: &str =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n";

#[test]
fn the_files_of_a_machine_are_understood() {
    let udp = format!(
        "{HEAD}  12: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000 0 1\n"
    );
    let udp6 = format!(
        "{HEAD}   1: 00000000000000000000000000000000:12B7 00000000000000000000000000000000:0000 07 \
         00000000:00000000 00:00000000 00000000     0 0 1\nnonsense\n"
    );
    let tcp = format!(
        "{HEAD}  0: 0100007F:CBE8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  7 0 1\n  \
         1: 0100007F:CBE8 0100007F:1000 01 00000000:00000000 00:00000000 00000000  8 0 1\n"
    );
    let tree = Tree::new(
        "machine",
        &[
            (
                "proc/self/status",
                "Name:\tx\nUid:\t1000\t1001\t1000\t1000\nCapEff:\t0000000000003000\n",
            ),
            (
                "proc/self/limits",
                "Limit Soft Limit Hard Limit Units\nMax locked memory         65536  65536  bytes\n",
            ),
            ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
            ("proc/sys/net/core/rmem_max", "212992\n"),
            ("proc/sys/kernel/io_uring_disabled", "2\n"),
            ("proc/self/net/udp", &udp),
            ("proc/self/net/udp6", &udp6),
            ("proc/self/net/tcp", &tcp),
            (
                "proc/self/mounts",
                "/dev/a / ext4 rw 0 0\nproc /proc proc rw,hidepid=invisible 0 0\n",
            ),
            ("proc/self/cgroup", "0::/kube/pod1\n"),
            ("sys/fs/cgroup/kube/pod1/memory.max", "max\n"),
            ("sys/fs/cgroup/kube/memory.max", "536870912\n"),
            ("sys/fs/cgroup/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/kube/pod1/cpu.max", "50000 100000\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
            ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
            ("sys/module/rdma_rxe/x", ""),
            ("sys/module/nvidia/x", ""),
            ("sys/module/nvidia_peermem/x", ""),
            ("usr/lib64/libcuda.so.1", ""),
            ("sys/class/net/eth7/mtu", "1500\n"),
            ("usr/lib64/librdmacm.so.1", ""),
            ("etc/ld.so.cache", "\0\u{1}glibc\0libibverbs.so.1\0/opt/libibverbs.so.1\0"),
        ],
    );
    let facts = Facts::read(&tree.0);
    // The one in effect.
    assert_eq!((facts.user, facts.capabilities), (Some(1001), Some(0x3000)));
    assert!(facts.has_capability(12) && facts.has_capability(13) && !facts.has_capability(14));
    assert_eq!((facts.memory_lock_limit, facts.ptrace_scope), (Some(65_536), Some(1)));
    assert_eq!((facts.receive_buffer_limit, facts.send_buffer_limit), (Some(212_992), None));
    assert_eq!(facts.io_uring_disabled, Some(2));
    let user =
        |address: &str, port, user| PortUser { address: address.parse().unwrap(), port, user };
    assert_eq!(facts.udp_sockets, [user("127.0.0.1", 4791, 1000), user("::", 4791, 0)]);
    assert_eq!(facts.tcp_listeners, [user("127.0.0.1", 52_200, 7)]);
    assert_eq!(facts.hidepid.as_deref(), Some("invisible"));
    assert_eq!((facts.memory_limit, facts.processor_quota), (Some(512 << 20), Some(0.5)));
    assert_eq!(facts.transparent_huge_pages.as_deref(), Some("never"));
    assert_eq!(facts.clock_source.as_deref(), Some("hpet"));
    assert!(facts.has_libcuda && facts.has_nvidia_gpu && facts.has_peermem);
    assert!(facts.has_rxe && facts.has_libibverbs && facts.has_librdmacm);
    assert_eq!(facts.interfaces[0].mtu, Some(1500));
}

#[test]
fn control_groups_of_version_1_are_understood_too() {
    let tree = Tree::new(
        "version1",
        &[
            ("proc/self/cgroup", "4:memory:/a/b\n1:cpu,cpuacct:/../c\n0::/\n"),
            // That of the host, which a container does not see.
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
            ("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "150000\n"),
            ("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ],
    );
    let facts = Facts::read(&tree.0);
    assert_eq!((facts.memory_limit, facts.processor_quota), (Some(256 << 20), Some(1.5)));
    let none = Tree::new(
        "none",
        &[
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("proc/self/limits", "Max locked memory         unlimited  unlimited  bytes\n"),
            ("proc/self/mounts", "proc /proc proc rw,hidepid=0 0 0\n"),
        ],
    );
    let facts = Facts::read(&none.0);
    assert_eq!((facts.memory_limit, facts.processor_quota), (None, None));
    assert_eq!((facts.memory_lock_limit, facts.hidepid), (Some(u64::MAX), None));
}

#[test]
fn a_tree_without_files_and_one_of_nonsense_say_nothing() {
    let tree = Tree::new("empty", &[]);
    let nonsense = "\u{1b}[2J 9999999999999999999999 : :: 0:0:0 [ ] hidepid= -1\n".repeat(10);
    let files = [
        "proc/self/status",
        "proc/self/limits",
        "proc/self/cgroup",
        "proc/self/mounts",
        "proc/self/net/udp",
        "proc/self/net/tcp6",
        "proc/sys/kernel/yama/ptrace_scope",
        "sys/fs/cgroup/cpu.max",
        "sys/kernel/mm/transparent_hugepage/enabled",
    ];
    let files = files.map(|name| (name, nonsense.as_str()));
    let wild = Tree::new("nonsense", &files);
    for tree in [&tree, &wild] {
        let facts = Facts::read(&tree.0);
        assert_eq!((facts.user, facts.capabilities, facts.memory_lock_limit), (None, None, None));
        assert_eq!((facts.memory_limit, facts.processor_quota), (None, None));
        assert!(facts.udp_sockets.is_empty() && facts.tcp_listeners.is_empty());
        // And every check has an answer.
        assert!(super::super::checks(&facts).len() > 10);
    }
}
