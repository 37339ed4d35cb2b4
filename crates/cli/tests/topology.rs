//! `topology`: of this machine, and of a tree of files.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::net::UdpSocket;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use common::{Folder, Running, eventually, millstream, run};

#[test]
fn this_machine_has_loopback_and_the_soft_provider() {
    let object = run(&["topology", "--json"]).success().json();
    assert_eq!(object["providers"]["soft"]["usable"], true);
    let ibverbs = &object["providers"]["ibverbs"];
    assert!(ibverbs["usable"].is_boolean());
    assert!(!ibverbs["detail"].as_str().unwrap().is_empty(), "it says why, or what there is");
    let interfaces = object["interfaces"].as_array().unwrap();
    let loopback = interfaces.iter().find(|it| it["name"] == "lo").expect("lo");
    assert_eq!((&loopback["mtu"], &loopback["path_mtu"]), (&65536.into(), &4096.into()));
    let devices = loopback["soft_devices"].as_array().unwrap();
    let device = devices.iter().find(|it| it["name"] == "soft-127.0.0.1").unwrap();
    assert!(device["segmentation_offload"].is_boolean());
    for (driver, name) in device["drivers"].as_array().unwrap().iter().zip(["udp", "packet"]) {
        assert_eq!(driver["name"], name);
        // Another process may have the port.
        let usable = driver["usable"].as_bool().unwrap();
        assert_eq!(driver.get("problem").is_none(), usable, "{driver}");
    }
    let text = run(&["topology"]).success().stdout;
    assert!(text.contains("\n    --device soft-127.0.0.1: "), "{text}");
}

#[test]
fn an_address_in_use_is_told() {
    let mut held = None;
    eventually("nobody else has the port", || {
        held = UdpSocket::bind("127.0.0.1:4791").ok();
        held.is_some()
    });
    let object = run(&["topology", "--json"]).success().json();
    let interfaces = object["interfaces"].as_array().unwrap();
    let loopback = interfaces.iter().find(|it| it["name"] == "lo").expect("lo");
    let device = &loopback["soft_devices"][0];
    assert_eq!(device["name"], "soft-127.0.0.1");
    let udp = &device["drivers"][0];
    assert_eq!((&udp["name"], &udp["usable"]), (&"udp".into(), &false.into()));
    assert!(udp["problem"].as_str().unwrap().contains("UDP port 4791"), "{device}");
}

#[test]
fn another_tree_says_nothing_of_this_machine() {
    let tree = Folder::new();
    let device = tree.path().join("devices/pci0000:3a/0000:3b:00.0");
    let port = device.join("infiniband/mlx5_0/ports/1");
    for folder in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
        fs::create_dir_all(port.join(folder)).unwrap();
    }
    for (file, text) in [
        ("state", "1: DOWN"),
        ("gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0007"),
        ("gid_attrs/types/3", "RoCE v2"),
        ("gid_attrs/ndevs/3", "eth9"),
    ] {
        fs::write(port.join(file), text).unwrap();
    }
    let infiniband = device.join("infiniband/mlx5_0/ports/2");
    for (file, text) in [
        ("link_layer", "InfiniBand"),
        ("gids/0", "fe80:0000:0000:0000:0002:c903:00a0:0001"),
        ("gid_attrs/types/0", "IB/RoCE v1"),
    ] {
        let file = infiniband.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    fs::write(device.join("numa_node"), "1").unwrap();
    for (folder, name, target) in [
        ("class/infiniband", "mlx5_0", device.join("infiniband/mlx5_0")),
        ("devices/pci0000:3a/0000:3b:00.0/infiniband/mlx5_0", "device", device.clone()),
        ("bus/pci/devices", "0000:3b:00.0", device.clone()),
    ] {
        fs::create_dir_all(tree.path().join(folder)).unwrap();
        symlink(target, tree.path().join(folder).join(name)).unwrap();
    }
    let eth9 = tree.path().join("class/net/eth9");
    fs::create_dir_all(&eth9).unwrap();
    fs::write(eth9.join("mtu"), "1500").unwrap();
    let root = tree.path().to_str().unwrap();

    let object = run(&["topology", "--json", "--sysfs", root]).success().json();
    assert!(object.get("providers").is_none(), "that is of this machine");
    let found = &object["rdma_devices"][0];
    assert_eq!((&found["name"], &found["pci"]), (&"mlx5_0".into(), &"0000:3b:00.0".into()));
    assert_eq!(found["numa_node"], 1);
    let gid = &found["ports"][0]["gids"][0];
    assert_eq!((&gid["index"], &gid["address"]), (&3.into(), &"10.0.0.7".into()));
    assert_eq!(object["interfaces"][0]["path_mtu"], 1024);
    assert_eq!(object["interfaces"][0]["soft_devices"].as_array().unwrap().len(), 0);

    let text = run(&["topology", "--sysfs", root]).success().stdout;
    for expected in [
        "  mlx5_0: PCI 0000:3b:00.0, NUMA node 1\n    port 1: DOWN, unknown, unknown\n",
        "      --gid-index 3: RoCE v2, 10.0.0.7 (eth9)\n",
        "    port 2: unknown, InfiniBand, unknown\n      --gid-index 0: InfiniBand, fe80::2:c903:a0:1\n",
        "  eth9: unknown, MTU 1500: path MTU 1024\n",
        "NUMA nodes: none\nGPUs: none\n",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in {text}");
    }
}

#[test]
fn paths_that_are_not_utf_8_are_told_in_json() {
    let folder = Folder::new();
    let path = |name: &[u8]| folder.path().join(OsStr::from_bytes(name));
    let (root, matrix) = (path(b"sys-\xff"), path(b"matrix-\xff"));
    fs::create_dir_all(root.join("class")).unwrap();
    fs::write(&matrix, r#"{"cpu:0":[["mlx5_0"],[]]}"#).unwrap();
    let mut command = millstream();
    command.args(["topology", "--json"]).env("MC_CUSTOM_TOPO_JSON", &matrix);
    let object = Running::start("topology", &mut command).output().success().json();
    let file = object["nic_priority_matrix_file"].as_str().unwrap();
    assert!(file.ends_with("/matrix-\u{fffd}"), "{file}");
    assert_eq!(object["nic_priority_matrix"]["cpu:0"][0][0], "mlx5_0");
    let mut command = millstream();
    command.args(["topology", "--json", "--sysfs"]).arg(&root);
    let object = Running::start("topology", &mut command).output().success().json();
    let sysfs = object["sysfs"].as_str().unwrap();
    assert!(sysfs.ends_with("/sys-\u{fffd}"), "{sysfs}");
}

#[test]
fn what_is_no_tree_is_an_error() {
    let folder = Folder::new();
    let root = folder.path().to_str().unwrap();
    let output = run(&["topology", "--sysfs", root]);
    let sentence = output.failure(1);
    assert!(sentence.contains(root) && sentence.contains("/sys"), "{sentence}");
}
