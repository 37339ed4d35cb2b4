//! A tree of files as a machine of two processors, two NICs and two GPUs has it.

mod common;

use std::fs;
use std::path::Path;

use common::Tree;
use millstream_topology::{Crossing, Distance, Gpu, Topology};

const MACHINE: &str = r"
node 0 cpus=0-15 memory=1024 distances=10,21
node 1 cpus=16-31 memory=1024 distances=21,10
file devices/system/node/online 0-1\n
pci 0000:3a/3a:00.0/3b:00.0/3c:00.0 class=020000 id=15b3:1017 node=0
pci 0000:3a/3a:00.0/3b:00.0/3c:01.0 class=030200 id=10de:1017 node=0
pci 0000:80/80:00.0/81:00.0 class=020000 id=15b3:1017 node=1
pci 0000:80/80:02.0/82:00.0 class=038000 id=1002:1017 node=1
rdma mlx5_2 at 3c:00.0 link=Ethernet rate=100_Gb/sec_(4X_EDR) gid=0,IB/RoCE_v1,fe80::1,eth0 gid=1,RoCE_v2,::ffff:10.91.0.7,eth0
rdma mlx5_10 at 81:00.0 link=Ethernet rate=100_Gb/sec_(4X_EDR)
net eth0 at 3c:00.0 mtu=9000 speed=100000 state=up
net eth1 at 81:00.0 mtu=1500 speed=-1 state=up
net lo mtu=65536
file class/net/bonding_masters bond0\n
";

fn machine() -> Tree {
    Tree::of_text(MACHINE)
}

fn read(root: &Path) -> Topology {
    Topology::read(root).unwrap()
}

#[test]
fn rdma_devices_and_their_gids() {
    let tree = machine();
    let devices = read(tree.root()).rdma_devices;
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
    let topology = read(tree.root());
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
    let topology = read(tree.root());
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
    let more = "
        net bond0 lower=eth0
        net vlan7 lower=bond0
        net bond1 lower=eth0 lower=eth1
        net a lower=a
    ";
    let tree = Tree::of_text(&format!("{MACHINE}{more}"));
    let interfaces = read(tree.root()).interfaces;
    let node = |name: &str| interfaces.iter().find(|it| it.name == name).unwrap().numa_node;
    assert_eq!((node("bond0"), node("vlan7")), (Some(0), Some(0)));
    assert_eq!((node("bond1"), node("a")), (None, None), "of two nodes, and of itself");
}

#[test]
fn consoles_are_no_gpus_and_locations_are_counted_for_each_vendor() {
    let more = "
        pci 0000:00/05:00.0 class=030000 id=1a03:2000 node=-1
        pci 0000:00/06:00.0 class=120000 id=1002:74a1 node=-1
        pci 0000:00/07:00.0 class=120000 id=10ee:5000 node=-1
        pci 0000:00/3d:00.0 class=030000 id=10de:2684 node=-1
    ";
    let tree = Tree::of_text(&format!("{MACHINE}{more}"));
    let gpus = read(tree.root()).gpus;
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
    let error = Topology::read(tree.root()).unwrap_err();
    assert!(error.to_string().contains("no sysfs tree"), "{error}");
    fs::create_dir(tree.root().join("class")).unwrap();
    assert_eq!(read(tree.root()), Topology::default());
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
    let topology = read(tree.root());
    let eth0 = &topology.interfaces[0];
    assert_eq!((eth0.mtu, eth0.pci.as_ref()), (None, None));
    assert_eq!(eth0.state.as_deref(), Some("u[31mp"), "no control characters");
    let ports = &topology.rdma_devices[0].ports;
    assert_eq!(ports.len(), 1);
    assert_eq!(ports[0].state.as_ref().map(String::len), Some(4096));
    assert!(ports[0].gids.is_empty() && topology.numa_nodes.is_empty());
}

#[test]
fn more_devices_than_a_machine_has_are_left_out() {
    let tree = Tree::new();
    for number in 0..1030 {
        fs::create_dir_all(tree.root().join(format!("class/infiniband/x{number}"))).unwrap();
        let node = tree.root().join(format!("devices/system/node/node{number}"));
        fs::create_dir_all(node).unwrap();
    }
    for number in 0..300 {
        let port = tree.root().join(format!("class/infiniband/x7/ports/{number}"));
        fs::create_dir_all(port).unwrap();
    }
    let topology = read(tree.root());
    assert_eq!((topology.rdma_devices.len(), topology.numa_nodes.len()), (1024, 1024));
    // Which ones are left out, the file system decides.
    let most = topology.rdma_devices.iter().map(|device| device.ports.len()).max();
    assert!(most.unwrap() <= 255, "{most:?}");
}

#[test]
fn what_has_many_names_is_read_so_many_times_only() {
    let tree = Tree::new();
    for index in 0..1024 {
        tree.write(&format!("port/gids/{index}"), "fe80::1\n");
        tree.write(&format!("port/gid_attrs/types/{index}"), "RoCE v2\n");
    }
    for number in 1..=100 {
        tree.link(&format!("device/ports/{number}"), "port");
    }
    for number in 0..50 {
        tree.link(&format!("class/infiniband/x{number}"), "device");
    }
    let count = |topology: &Topology| {
        let ports = topology.rdma_devices.iter().flat_map(|device| &device.ports);
        (ports.clone().count(), ports.map(|port| port.gids.len()).sum::<usize>())
    };
    let topology = read(tree.root());
    assert_eq!(topology.rdma_devices.len(), 50);
    let gids: Vec<usize> =
        topology.rdma_devices[0].ports.iter().map(|port| port.gids.len()).collect();
    assert_eq!((gids.len(), gids[63], gids[64]), (100, 1024, 0));
    assert_eq!(count(&topology), (4096, 65_536));
    assert_eq!(count(&Topology::read_places(tree.root()).unwrap()), (4096, 0));
}

#[test]
fn below_one_host_bridge_fewer_links_are_nearer_and_what_is_unknown_is_not_preferred() {
    // Two nodes, one of which is there under two names, and no distances between them.
    let tree = Tree::of_text(
        "node 0 cpus=0-3 memory=1 distances=?
         node 1 cpus=4-7 memory=1 distances=?
         file devices/system/node/node01/cpulist 4-7
         pci 0000:00/00:01.0/01:00.0 class=030200 id=10de:2330 node=1
         pci 0000:00/00:02.0/02:00.0/03:00.0/04:00.0 class=020000 id=15b3:1021 node=1
         pci 0000:00/00:03.0/05:00.0 class=020000 id=15b3:1021 node=1
         rdma far at 04:00.0 link=Ethernet rate=?
         rdma near at 05:00.0 link=Ethernet rate=?
         file class/infiniband/nowhere/node_type 1",
    );
    let topology = read(tree.root());
    assert_eq!(
        topology.priority_matrix(&topology.nics()).to_json(),
        r#"{"cpu:0":[["far","near"],["nowhere"]],"#.to_owned()
            + r#""cpu:1":[["far","near"],["nowhere"]],"#
            + r#""cuda:0":[["near"],["far","nowhere"]]}"#
    );
    assert_eq!(topology.numa_nodes.len(), 2);
}
