//! Any tree whatever is read without a panic, to the end, and what is found of it makes sense.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use common::Tree;
use millstream_topology::{DeviceFilter, PriorityMatrix, Topology, reachable_pairs};
use proptest::collection::vec;
use proptest::prelude::*;

/// What is damaged.
const MACHINE: &str = "
    node 0 cpus=0-3 memory=1000 distances=10,20
    node 1 cpus=4-7 memory=1000 distances=20,10
    pci 0000:00/00:01.0/01:00.0 class=030200 id=10de:2330 node=0
    pci 0000:00/00:01.0/02:00.0 class=020000 id=15b3:1021 node=0
    rdma mlx5_0 at 02:00.0 link=Ethernet rate=? gid=3,RoCE_v2,::ffff:10.0.0.1,eth0
    net eth0 at 02:00.0 mtu=9000 speed=100000 state=up
    net bond0 mtu=9000 state=up lower=eth0
";

/// Names that mean something to the reader, and some that do not.
const NAMES: &str = "class infiniband net bus pci devices system node device ports gids gid_attrs \
    types ndevs mlx5_0 mlx5_1 eth0 bond0 lower_eth0 lower_bond0 a 1 3 -1 node0 node1 cpulist \
    distance meminfo numa_node vendor state link_layer rate mtu speed operstate pci0000:00 \
    0000:00:01.0 0000:01:00.0 0000:02:00.0 \u{202e}\x1b";

/// Where the reader looks.
const FOLDERS: &str = "class/infiniband/mlx5_0/ports/1 class/infiniband/mlx5_0/device \
    class/infiniband/mlx5_1 class/net/eth0 class/net/bond0 class/net/eth0/device \
    devices/system/node/node0 devices/system/node/node1 bus/pci/devices/0000:01:00.0 \
    bus/pci/devices/0000:02:00.0 devices/pci0000:00/0000:00:01.0/0000:01:00.0";

const TEXTS: &str = "0|1|-1|0x030200|0x120000|0x10de|RoCE v2|::1|::ffff:10.0.0.1|4: ACTIVE|10 20|\
    99999999999999999999|0-3|Node 0 MemTotal: 99999999999999999999 kB|";

#[derive(Clone, Debug)]
enum Entry {
    File(PathBuf, Vec<u8>),
    Link(PathBuf, PathBuf),
    Folder(PathBuf),
}

fn one_of(words: &'static str, separator: &str) -> impl Strategy<Value = &'static str> {
    prop::sample::select(words.split(separator).map(str::trim).collect::<Vec<_>>())
}

fn any_path() -> impl Strategy<Value = PathBuf> {
    let folder = prop_oneof![3 => one_of(FOLDERS, " "), 1 => Just("")];
    (folder, vec(one_of(NAMES, " "), 0..3)).prop_map(|(folder, names)| {
        let mut path = PathBuf::from(folder);
        path.extend(names);
        path
    })
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let text = prop_oneof![
        4 => one_of(TEXTS, "|").prop_map(|text| text.as_bytes().to_vec()),
        1 => vec(any::<u8>(), 0..40),
        1 => (any::<u8>(), 0..10_000_usize).prop_map(|(byte, count)| vec![byte; count]),
    ];
    prop_oneof![
        4 => (any_path(), text).prop_map(|(path, text)| Entry::File(path, text)),
        2 => (any_path(), any_path()).prop_map(|(path, target)| Entry::Link(path, target)),
        1 => any_path().prop_map(Entry::Folder),
    ]
}

/// Makes it in place of what is there. What cannot be made is left out.
fn make(tree: &Tree, entry: &Entry) {
    let (Entry::File(path, _) | Entry::Link(path, _) | Entry::Folder(path)) = entry;
    // All links of the tree lead to somewhere in it.
    let at = tree.root().join(path);
    if at == tree.root() || fs::create_dir_all(at.parent().unwrap()).is_err() {
        return;
    }
    let _ = fs::remove_file(&at).or_else(|_| fs::remove_dir_all(&at));
    let _ = match entry {
        Entry::File(_, text) => fs::write(at, text),
        Entry::Link(_, target) => symlink(tree.root().join(target), at),
        Entry::Folder(_) => fs::create_dir(at),
    };
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_is_read(entries in vec(any_entry(), 1..20)) {
        let tree = Tree::of_text(MACHINE);
        entries.iter().for_each(|entry| make(&tree, entry));
        // The folder `class` may have become something else.
        let Ok(topology) = Topology::read(tree.root()) else { return Ok(()) };
        prop_assert_eq!(&Topology::read(tree.root()).unwrap(), &topology, "it is read alike");

        let mut nics = topology.nics();
        nics.push(topology.soft_nic("soft-10.0.0.1", "eth0"));
        let names: Vec<String> = nics.iter().map(|nic| nic.name.clone()).collect();
        let matrix = topology.priority_matrix(&nics);
        prop_assert!(!matrix.entries().is_empty());
        for (_, priorities) in matrix.entries() {
            prop_assert_eq!(priorities.preferred.len() + priorities.available.len(), names.len());
        }
        prop_assert_eq!(&PriorityMatrix::parse(&matrix.to_json()).unwrap(), &matrix);
        for (location, _) in matrix.entries() {
            let resolved = matrix.resolve(&names);
            for attempt in 0..4 {
                let nic = resolved.candidates(location).select(attempt, 7);
                prop_assert!(nic.is_some_and(|nic| nic < names.len()));
            }
        }
        let filtered = matrix.filtered(&DeviceFilter::parse("mlx5_1"));
        prop_assert!(filtered.nics().iter().all(|name| name == "mlx5_1"));

        // From a place to itself nothing is nearer.
        for gpu in &topology.gpus {
            let own = topology.distance(gpu.place(), gpu.place());
            for (_, distance) in topology.distances(gpu.place()) {
                prop_assert!(own.rank() <= distance.rank());
            }
        }
        let addresses: Vec<_> = topology.rdma_devices.iter().map(|it| it.addresses()).collect();
        let pairs = reachable_pairs(&addresses, &addresses);
        prop_assert!(pairs.iter().all(|pair| pair.own < addresses.len()));
    }
}
