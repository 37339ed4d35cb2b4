//! A tree of files as a machine of two processors, two NICs and two GPUs has it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use millstream_topology::{Crossing, Distance, Gpu, Topology};

/// A tree that is removed with this value.
struct Tree(PathBuf);

impl Tree {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("millstream-topology-{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(name);
        fs::create_dir(&root).unwrap();
        Self(root)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A link from `path` to a folder of the tree, relative, as the kernel's are.
    fn link(&self, path: &str, target: &str) {
        let up = "../".repeat(path.matches('/').count());
        let at = self.0.join(path);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        symlink(format!("{up}{target}"), at).unwrap();
    }

    /// A PCI function of this class; returns nothing, as its folder is known.
    fn pci(&self, folder: &str, class: &str, vendor: &str, numa_node: &str) {
        for (file, text) in
            [("class", class), ("vendor", vendor), ("device", "0x1017\n"), ("numa_node", numa_node)]
        {
            self.write(&format!("{folder}/{file}"), text);
        }
        let address = folder.rsplit('/').next().unwrap();
        self.link(&format!("bus/pci/devices/{address}"), folder);
    }

    fn rdma(&self, name: &str, pci: &str, gids: &[(&str, &str, &str)]) {
        let folder = format!("{pci}/infiniband/{name}");
        let port = format!("{folder}/ports/1");
        self.write(&format!("{port}/state"), "4: ACTIVE\n");
        self.write(&format!("{port}/link_layer"), "Ethernet\n");
        self.write(&format!("{port}/rate"), "100 Gb/sec (4X EDR)\n");
        for (index, (gid, kind, interface)) in gids.iter().enumerate() {
            self.write(&format!("{port}/gids/{index}"), &format!("{gid}\n"));
            self.write(&format!("{port}/gid_attrs/types/{index}"), &format!("{kind}\n"));
            self.write(&format!("{port}/gid_attrs/ndevs/{index}"), &format!("{interface}\n"));
        }
        // An empty entry: all zeros, and no kind.
        self.write(
            &format!("{port}/gids/{}", gids.len()),
            "0000:0000:0000:0000:0000:0000:0000:0000\n",
        );
        self.link(&format!("{folder}/device"), pci);
        self.link(&format!("class/infiniband/{name}"), &folder);
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const NIC: &str = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0";
const GPU: &str = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0";
const FAR_NIC: &str = "devices/pci0000:80/0000:80:00.0/0000:81:00.0";
const FAR_GPU: &str = "devices/pci0000:80/0000:80:02.0/0000:82:00.0";

fn machine() -> Tree {
    let tree = Tree::new();
    tree.pci(NIC, "0x020000\n", "0x15b3\n", "0\n");
    tree.pci(GPU, "0x030200\n", "0x10de\n", "0\n");
    tree.pci(FAR_NIC, "0x020000\n", "0x15b3\n", "1\n");
    tree.pci(FAR_GPU, "0x038000\n", "0x1002\n", "1\n");
    tree.rdma(
        "mlx5_2",
        NIC,
        &[
            ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", "eth0"),
            ("0000:0000:0000:0000:0000:ffff:0a5b:0007", "RoCE v2", "eth0"),
        ],
    );
    tree.rdma("mlx5_10", FAR_NIC, &[]);
    for (name, device, mtu, speed) in
        [("eth0", NIC, "9000\n", "100000\n"), ("eth1", FAR_NIC, "1500\n", "-1\n")]
    {
        let folder = format!("{device}/net/{name}");
        tree.write(&format!("{folder}/mtu"), mtu);
        tree.write(&format!("{folder}/speed"), speed);
        tree.write(&format!("{folder}/operstate"), "up\n");
        tree.link(&format!("{folder}/device"), device);
        tree.link(&format!("class/net/{name}"), &folder);
    }
    tree.write("devices/virtual/net/lo/mtu", "65536\n");
    tree.link("class/net/lo", "devices/virtual/net/lo");
    tree.write("class/net/bonding_masters", "bond0\n");
    for (node, processors, distances) in [(0, "0-15", "10 21"), (1, "16-31", "21 10")] {
        let folder = format!("devices/system/node/node{node}");
        tree.write(&format!("{folder}/cpulist"), processors);
        tree.write(&format!("{folder}/distance"), distances);
        let meminfo = format!("Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 1 kB\n");
        tree.write(&format!("{folder}/meminfo"), &meminfo);
    }
    tree.write("devices/system/node/online", "0-1\n");
    tree
}

fn read(root: &Path) -> Topology {
    Topology::read(root).unwrap()
}

#[test]
fn rdma_devices_and_their_gids() {
    let tree = machine();
    let devices = read(&tree.0).rdma_devices;
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["mlx5_2", "mlx5_10"], "in the order of people");
    let device = &devices[0];
    assert_eq!(device.pci.as_ref().unwrap().address().to_string(), "0000:3c:00.0");
    assert_eq!(device.numa_node, Some(0));
    let port = &device.ports[0];
    assert_eq!((port.number, port.state.as_deref()), (1, Some("ACTIVE")));
    assert_eq!(port.link_layer.as_deref(), Some("Ethernet"));
    assert_eq!(port.rate.as_deref(), Some("100 Gb/sec (4X EDR)"));
    assert_eq!(port.gids.len(), 2, "empty entries are left out");
    let gid = &port.gids[1];
    assert_eq!((gid.index, gid.version_2, gid.interface.as_deref()), (1, true, Some("eth0")));
    assert_eq!(gid.gid.to_canonical().to_string(), "10.91.0.7");
    assert!(!port.gids[0].version_2);
    assert!(devices[1].ports[0].gids.is_empty());
}

#[test]
fn interfaces_nodes_and_gpus() {
    let tree = machine();
    let topology = read(&tree.0);
    let names: Vec<&str> = topology.interfaces.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["eth0", "eth1", "lo"]);
    let [eth0, eth1, lo] = &topology.interfaces[..] else { panic!("{names:?}") };
    assert_eq!((eth0.mtu, eth0.speed_mbit_per_s), (Some(9000), Some(100_000)));
    assert_eq!((eth0.numa_node, eth0.state.as_deref()), (Some(0), Some("up")));
    assert_eq!(eth1.speed_mbit_per_s, None, "-1 is no speed");
    assert!(lo.pci.is_none() && lo.numa_node.is_none());

    assert_eq!(topology.numa_nodes.len(), 2);
    let node = &topology.numa_nodes[1];
    assert_eq!((node.number, node.processors.as_deref()), (1, Some("16-31")));
    assert_eq!((node.memory, &node.distances[..]), (Some(1 << 20), &[21, 10][..]));

    let gpus: Vec<(String, u32)> =
        topology.gpus.iter().map(|gpu| (gpu.pci.address().to_string(), gpu.vendor)).collect();
    let expected = [("0000:3c:01.0", 0x10de), ("0000:82:00.0", 0x1002)];
    assert_eq!(gpus, expected.map(|(address, vendor)| (address.to_owned(), vendor)));
}

#[test]
fn the_nearest_device_comes_first() {
    let tree = machine();
    let topology = read(&tree.0);
    let distances = |gpu: &Gpu| -> Vec<(String, Distance)> {
        let distances = topology.distances(gpu.place()).into_iter();
        distances.map(|(device, distance)| (device.name.clone(), distance)).collect()
    };
    let distance = |name: &str, crossing, hops, numa| {
        (name.to_owned(), Distance { crossing: Some(crossing), hops, numa: Some(numa) })
    };
    let [near, far] = &topology.gpus[..] else { panic!("{:?}", topology.gpus) };
    assert_eq!(
        distances(near),
        [
            distance("mlx5_2", Crossing::Pix, Some(2), 10),
            distance("mlx5_10", Crossing::Sys, None, 21)
        ]
    );
    assert_eq!(
        distances(far),
        [
            distance("mlx5_10", Crossing::Phb, Some(4), 10),
            distance("mlx5_2", Crossing::Sys, None, 21)
        ]
    );
}

#[test]
fn interfaces_made_of_others_are_where_these_are() {
    let tree = machine();
    for (name, lower) in [
        ("bond0", &["eth0"][..]),
        ("vlan7", &["bond0"]),
        ("bond1", &["eth0", "eth1"]),
        ("a", &["a"]),
    ] {
        for lower in lower {
            tree.link(&format!("class/net/{name}/lower_{lower}"), &format!("class/net/{lower}"));
        }
    }
    let interfaces = read(&tree.0).interfaces;
    let node = |name: &str| interfaces.iter().find(|it| it.name == name).unwrap().numa_node;
    assert_eq!((node("bond0"), node("vlan7")), (Some(0), Some(0)));
    assert_eq!((node("bond1"), node("a")), (None, None), "of two nodes, and of itself");
}

#[test]
fn consoles_are_no_gpus_and_locations_are_counted_for_each_vendor() {
    let tree = machine();
    for (address, class, vendor) in [
        ("0000:05:00.0", "0x030000\n", "0x1a03\n"),
        ("0000:06:00.0", "0x120000\n", "0x1002\n"),
        ("0000:07:00.0", "0x120000\n", "0x10ee\n"),
        ("0000:3d:00.0", "0x030000\n", "0x10de\n"),
    ] {
        tree.pci(&format!("devices/pci0000:00/{address}"), class, vendor, "-1\n");
    }
    let gpus = read(&tree.0).gpus;
    let gpus: Vec<(String, Option<&str>)> =
        gpus.iter().map(|gpu| (gpu.pci.address().to_string(), gpu.location.as_deref())).collect();
    let expected = [
        ("0000:06:00.0", Some("hip:0")),
        ("0000:07:00.0", None),
        ("0000:3c:01.0", Some("cuda:0")),
        ("0000:3d:00.0", Some("cuda:1")),
        ("0000:82:00.0", Some("hip:1")),
    ];
    assert_eq!(gpus, expected.map(|(address, location)| (address.to_owned(), location)));
}

#[test]
fn a_tree_with_nothing_in_it_is_a_machine_with_nothing() {
    let tree = Tree::new();
    let error = Topology::read(&tree.0).unwrap_err();
    assert!(error.to_string().contains("no sysfs tree"), "{error}");
    fs::create_dir(tree.0.join("class")).unwrap();
    assert_eq!(read(&tree.0), Topology::default());
}

#[test]
fn strange_files_are_left_out() {
    let tree = Tree::new();
    tree.write("class/net/eth0/mtu", "many\x1b[31m\n");
    tree.write("class/net/eth0/operstate", "u\x1b[31mp\n");
    // A loop of links, and a value that does not end.
    tree.link("class/net/eth0/device", "class/net/eth0/device");
    tree.write("class/infiniband/x/ports/1/state", &"x".repeat(1 << 20));
    tree.write("class/infiniband/x/ports/one/state", "4: ACTIVE\n");
    tree.write("class/infiniband/x/ports/1/gids/0", "not a gid\n");
    tree.write("class/infiniband/x/ports/1/gid_attrs/types/0", "RoCE v2\n");
    tree.write("devices/system/node/nodeless/cpulist", "1\n");
    let topology = read(&tree.0);
    let eth0 = &topology.interfaces[0];
    assert_eq!((eth0.mtu, eth0.pci.as_ref()), (None, None));
    assert_eq!(eth0.state.as_deref(), Some("u[31mp"), "no control characters");
    let ports = &topology.rdma_devices[0].ports;
    assert_eq!(ports.len(), 1);
    assert_eq!(ports[0].state.as_ref().map(String::len), Some(4096));
    assert!(ports[0].gids.is_empty() && topology.numa_nodes.is_empty());
}
