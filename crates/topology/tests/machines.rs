//! Trees of real servers, and of one that is none: distances and the matrix.

mod common;

use common::{MACHINES, Tree};
use millstream_topology::{Nic, PriorityMatrix, Topology};

fn read(machine: &str) -> Topology {
    Topology::read(Tree::of(machine).root()).unwrap()
}

fn matrix(topology: &Topology) -> PriorityMatrix {
    topology.priority_matrix(&topology.nics())
}

/// The part of `nvidia-smi topo -m` that is between GPUs and NICs.
fn crossings(topology: &Topology) -> String {
    let mut text = String::new();
    for gpu in &topology.gpus {
        text.push_str(gpu.location.as_deref().unwrap_or("?"));
        for nic in topology.nics() {
            let crossing = topology.distance(gpu.place(), nic.place()).crossing;
            text.push(' ');
            text.push_str(crossing.map_or("?", |crossing| crossing.name()));
        }
        text.push('\n');
    }
    text
}

/// The matrix with one location a line: `location: preferred | available`, numbers of NICs only.
fn lines(matrix: &PriorityMatrix) -> String {
    let names = |names: &[String]| {
        let number = |name: &String| name.trim_start_matches("mlx5_").to_owned();
        names.iter().map(number).collect::<Vec<_>>().join(" ")
    };
    let entry = |(location, priorities): &(String, millstream_topology::Priorities)| {
        let text = format!(
            "{location}: {} | {}",
            names(&priorities.preferred),
            names(&priorities.available)
        );
        format!("{}\n", text.trim_end())
    };
    matrix.entries().iter().map(entry).collect()
}

#[test]
fn dgx_h100() {
    let topology = read("dgx-h100");
    let names: Vec<String> = topology.nics().into_iter().map(|nic| nic.name).collect();
    assert_eq!(names, (0..12).map(|number| format!("mlx5_{number}")).collect::<Vec<_>>());
    assert_eq!(
        crossings(&topology),
        "\
cuda:0 PXB NODE NODE NODE NODE NODE SYS SYS SYS SYS SYS SYS
cuda:1 NODE NODE NODE PXB NODE NODE SYS SYS SYS SYS SYS SYS
cuda:2 NODE NODE NODE NODE PXB NODE SYS SYS SYS SYS SYS SYS
cuda:3 NODE NODE NODE NODE NODE PXB SYS SYS SYS SYS SYS SYS
cuda:4 SYS SYS SYS SYS SYS SYS PXB NODE NODE NODE NODE NODE
cuda:5 SYS SYS SYS SYS SYS SYS NODE NODE NODE PXB NODE NODE
cuda:6 SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE PXB NODE
cuda:7 SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE NODE PXB
"
    );
    assert_eq!(
        lines(&matrix(&topology)),
        "\
cpu:0: 0 1 2 3 4 5 | 6 7 8 9 10 11
cpu:1: 6 7 8 9 10 11 | 0 1 2 3 4 5
cuda:0: 0 | 1 2 3 4 5 6 7 8 9 10 11
cuda:1: 3 | 0 1 2 4 5 6 7 8 9 10 11
cuda:2: 4 | 0 1 2 3 5 6 7 8 9 10 11
cuda:3: 5 | 0 1 2 3 4 6 7 8 9 10 11
cuda:4: 6 | 0 1 2 3 4 5 7 8 9 10 11
cuda:5: 9 | 0 1 2 3 4 5 6 7 8 10 11
cuda:6: 10 | 0 1 2 3 4 5 6 7 8 9 11
cuda:7: 11 | 0 1 2 3 4 5 6 7 8 9 10
"
    );
    // The two ports of a storage NIC are behind one bridge.
    let nics = topology.nics();
    let ports = topology.distance(nics[1].place(), nics[2].place());
    assert_eq!((ports.crossing.unwrap().name(), ports.hops), ("PIX", Some(2)));
}

#[test]
fn dgx_a100_with_four_numa_nodes_a_processor() {
    let topology = read("dgx-a100-nps4");
    assert_eq!(
        crossings(&topology),
        "\
cuda:0 PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS
cuda:1 PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS
cuda:2 SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS
cuda:3 SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS
cuda:4 SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS
cuda:5 SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS
cuda:6 SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS
cuda:7 SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS
"
    );
    // Nodes 0 and 4 have no NIC: those of the same processor are nearer than the others.
    assert_eq!(
        lines(&matrix(&topology)),
        "\
cpu:0: 0 1 2 3 4 5 | 6 7 8 9 10 11
cpu:1: 2 3 | 0 1 4 5 6 7 8 9 10 11
cpu:2: 4 5 | 0 1 2 3 6 7 8 9 10 11
cpu:3: 0 1 | 2 3 4 5 6 7 8 9 10 11
cpu:4: 6 7 8 9 10 11 | 0 1 2 3 4 5
cpu:5: 8 9 | 0 1 2 3 4 5 6 7 10 11
cpu:6: 10 11 | 0 1 2 3 4 5 6 7 8 9
cpu:7: 6 7 | 0 1 2 3 4 5 8 9 10 11
cuda:0: 0 1 | 2 3 4 5 6 7 8 9 10 11
cuda:1: 0 1 | 2 3 4 5 6 7 8 9 10 11
cuda:2: 2 3 | 0 1 4 5 6 7 8 9 10 11
cuda:3: 2 3 | 0 1 4 5 6 7 8 9 10 11
cuda:4: 6 7 | 0 1 2 3 4 5 8 9 10 11
cuda:5: 6 7 | 0 1 2 3 4 5 8 9 10 11
cuda:6: 8 9 | 0 1 2 3 4 5 6 7 10 11
cuda:7: 8 9 | 0 1 2 3 4 5 6 7 10 11
"
    );
}

#[test]
fn gb200_has_no_switch_and_nodes_without_processors() {
    let topology = read("gb200");
    assert_eq!(
        crossings(&topology),
        "\
cuda:0 NODE NODE NODE NODE SYS SYS
cuda:1 NODE NODE NODE NODE SYS SYS
cuda:2 SYS SYS SYS SYS NODE NODE
cuda:3 SYS SYS SYS SYS NODE NODE
"
    );
    let matrix = matrix(&topology);
    let text = lines(&matrix);
    for line in ["cpu:0: 0 1 2 3 | 4 5", "cpu:1: 4 5 | 0 1 2 3", "cuda:3: 4 5 | 0 1 2 3"] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    // 34 nodes, whether they have processors or not, and four GPUs.
    assert_eq!(matrix.entries().len(), 38);
    assert_eq!(topology.numa_nodes[2].processors, None);
    assert!(topology.gpus[0].pci.address().to_string().starts_with("0008:"));
}

#[test]
fn mi300x_is_an_accelerator_and_no_display() {
    let topology = read("mi300x");
    let json = matrix(&topology).to_json();
    assert_eq!(topology.gpus.len(), 8);
    assert!(json.contains(r#""hip:3":[["bnxt_re3"],["bnxt_re0","#), "{json}");
    assert!(crossings(&topology).ends_with("hip:7 SYS SYS SYS SYS NODE NODE NODE PIX\n"));
}

#[test]
fn a_virtual_machine_tells_no_node_and_has_only_one() {
    let topology = read("vm");
    assert!(topology.gpus.is_empty(), "a console is no GPU");
    assert_eq!(topology.rdma_devices[0].numa_node, None);
    assert_eq!(matrix(&topology).to_json(), r#"{"cpu:0":[["mlx5_0"],[]]}"#);
}

#[test]
fn without_rdma_soft_devices_are_where_their_interfaces_are() {
    let topology = read("desktop");
    assert_eq!(
        matrix(&topology).to_json(),
        r#"{"cpu:0":[[],[]],"cuda:0":[[],[]],"xpu:0":[[],[]]}"#
    );
    let soft = |name: &str, interface: &str| topology.soft_nic(name, interface);
    let nics = [soft("soft-10.0.0.1", "eno1"), soft("soft-10.0.7.1", "vlan7")];
    assert_eq!(nics[0].pci.as_ref().unwrap().address().to_string(), "0000:03:00.0");
    assert_eq!(
        topology.priority_matrix(&nics).to_json(),
        r#"{"cpu:0":[["soft-10.0.0.1","soft-10.0.7.1"],[]],"#.to_owned()
            + r#""cuda:0":[["soft-10.0.0.1"],["soft-10.0.7.1"]],"#
            + r#""xpu:0":[["soft-10.0.0.1"],["soft-10.0.7.1"]]}"#
    );
}

#[test]
fn soft_devices_stand_beside_others_in_the_matrix() {
    let topology = read("dgx-h100");
    let mut nics: Vec<Nic> = topology.nics().into_iter().take(1).collect();
    nics.push(topology.soft_nic("soft-10.0.0.1", "ibp154s0"));
    nics.push(topology.soft_nic("soft-127.0.0.1", "lo"));
    let matrix = topology.priority_matrix(&nics);
    for (location, expected) in [
        // Of loopback nothing is known, so it is never preferred on a machine of two nodes.
        ("cpu:0", "0 | soft-10.0.0.1 soft-127.0.0.1"),
        ("cpu:1", "soft-10.0.0.1 | 0 soft-127.0.0.1"),
        ("cuda:4", "soft-10.0.0.1 | 0 soft-127.0.0.1"),
    ] {
        let expected = format!("{location}: {expected}\n");
        assert!(lines(&matrix).contains(&expected), "{expected} is not in {}", lines(&matrix));
    }
}

#[test]
fn an_odd_tree_gives_what_of_it_makes_sense() {
    let topology = read("odd");
    let nodes: Vec<u32> = topology.numa_nodes.iter().map(|node| node.number).collect();
    assert_eq!(nodes, [0, 1, 2, u32::MAX]);
    assert!(topology.numa_nodes[1].distances.is_empty());
    let devices: Vec<_> =
        topology.rdma_devices.iter().map(|it| (&*it.name, it.numa_node)).collect();
    assert_eq!(
        devices,
        [
            ("mlx5_0", None),
            ("mlx5_1", None),
            ("mlx5_2", Some(7)),
            ("mlx5_3", None),
            ("mlx5_4", None),
            ("mlx5_5", None),
            ("mlx5_6", None)
        ]
    );
    let gids: Vec<u32> =
        topology.rdma_devices[3].ports[0].gids.iter().map(|gid| gid.index).collect();
    assert_eq!(gids, [5], "others have no index");
    assert!(topology.interfaces.is_empty());
    assert_eq!(crossings(&topology), "cuda:0 PIX ? ? ? ? ? ?\n");
    assert_eq!(
        lines(&matrix(&topology)),
        "\
cpu:0:  | 0 1 2 3 4 5 6
cpu:1:  | 0 1 2 3 4 5 6
cpu:2:  | 0 1 2 3 4 5 6
cpu:4294967295:  | 0 1 2 3 4 5 6
cuda:0: 0 | 1 2 3 4 5 6
"
    );
}

/// Whatever the machine: all NICs are in every entry once, and the matrix is read as it is written.
#[test]
fn every_matrix_has_every_nic_once_for_each_location() {
    for (machine, _) in MACHINES {
        let topology = read(machine);
        let matrix = matrix(&topology);
        let nics: Vec<String> = topology.nics().into_iter().map(|nic| nic.name).collect();
        for (location, priorities) in matrix.entries() {
            let mut all = [&priorities.preferred[..], &priorities.available].concat();
            all.sort();
            let mut expected = nics.clone();
            expected.sort();
            assert_eq!(all, expected, "{machine}, {location}");
        }
        assert_eq!(PriorityMatrix::parse(&matrix.to_json()).unwrap(), matrix, "{machine}");
        let resolved = matrix.resolve(&nics);
        assert!(resolved.candidates("*").len() == nics.len(), "{machine}");
    }
}

#[test]
fn places_are_the_same_without_the_gids() {
    let mut left_out = 0;
    for (machine, text) in MACHINES {
        let tree = Tree::of_text(text);
        let mut whole = Topology::read(tree.root()).unwrap();
        for port in whole.rdma_devices.iter_mut().flat_map(|device| &mut device.ports) {
            left_out += std::mem::take(&mut port.gids).len();
        }
        assert_eq!(Topology::read_places(tree.root()).unwrap(), whole, "{machine}");
    }
    assert!(left_out > 0);
}
