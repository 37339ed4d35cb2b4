//! `topology`: distances, the priority matrix and the drawing, of trees of real servers and of this
//! machine.

mod common;
#[path = "../../topology/tests/common/mod.rs"]
mod trees;

use std::fs;

use common::{Folder, Running, millstream, run};
use serde_json::{Value, json};
use trees::{MACHINES, Tree};

fn topology(tree: &Tree, more: &[&str]) -> common::Output {
    let root = tree.root().to_str().unwrap();
    run(&[&["topology", "--sysfs", root][..], more].concat()).success()
}

/// The elements of a document, each opened and closed, without anything else that is markup.
fn elements(document: &str) -> Vec<&str> {
    let (declaration, mut rest) = document.split_once("?>").unwrap();
    assert_eq!(declaration, "<?xml version=\"1.0\" encoding=\"UTF-8\"");
    let (mut open, mut elements) = (Vec::new(), Vec::new());
    while let Some((text, after)) = rest.split_once('<') {
        assert!(!text.contains('>'), "{text}");
        let (tag, after) = after.split_once('>').unwrap();
        assert!(!tag.contains('<'), "{tag}");
        let name = tag.split([' ', '/']).find(|name| !name.is_empty()).unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name));
        } else {
            elements.push(name);
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        rest = after;
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
    let acts = |c: char| c.is_control() && c != '\n';
    assert!(!document.contains(acts), "{document}");
    elements
}

#[test]
fn every_machine_is_printed_and_drawn() {
    let folder = Folder::new();
    for (machine, _) in MACHINES {
        let tree = Tree::of(machine);
        let path = folder.path().join(format!("{machine}.svg"));
        let object = topology(&tree, &["--json", "--svg", path.to_str().unwrap()]).json();
        let drawing = fs::read_to_string(&path).unwrap();
        let known = ["svg", "title", "rect", "line", "text"];
        assert!(elements(&drawing).iter().all(|name| known.contains(name)), "{machine}");
        let names = |key: &str, name: &str| -> Vec<String> {
            let list = object[key].as_array().unwrap().iter();
            list.filter_map(|it| it[name].as_str().map(str::to_owned)).collect()
        };
        for name in [names("rdma_devices", "name"), names("gpus", "location")].concat() {
            assert!(drawing.contains(&format!(">{name}</text>")), "{machine}: {name}");
        }
        let text = topology(&tree, &[]).stdout;
        assert!(text.contains("\nNICs for memory\n"), "{machine}: {text}");
    }
}

#[test]
fn a_server_with_eight_gpus_has_a_nic_for_each() {
    let tree = Tree::of("dgx-h100");
    let folder = Folder::new();
    let path = folder.path().join("drawing.svg");
    let object = topology(&tree, &["--json", "--svg", path.to_str().unwrap()]).json();
    let matrix = &object["nic_priority_matrix"];
    let others: Vec<String> =
        (0..12).filter(|number| *number != 10).map(|number| format!("mlx5_{number}")).collect();
    assert_eq!(matrix["cuda:6"], json!([["mlx5_10"], others]));
    assert!(object.get("nic_priority_matrix_file").is_none());
    let gpu = &object["gpus"][6];
    assert_eq!((&gpu["location"], &gpu["pci"]), (&"cuda:6".into(), &"0000:d1:00.0".into()));
    let nearest = &gpu["rdma_devices"][0];
    assert_eq!((&nearest["name"], &nearest["crossing"]), (&"mlx5_10".into(), &"PXB".into()));

    let text = topology(&tree, &[]).stdout;
    for line in [
        "          mlx5_0  mlx5_1  mlx5_2  mlx5_3  mlx5_4  mlx5_5  mlx5_6  mlx5_7  mlx5_8  mlx5_9  \
         mlx5_10  mlx5_11",
        "  cpu:1   SYS     SYS     SYS     SYS     SYS     SYS     NODE    NODE    NODE    NODE    \
         NODE     NODE",
        "  cuda:1  NODE    NODE    NODE    PXB     NODE    NODE    SYS     SYS     SYS     SYS     \
         SYS      SYS",
        "  PXB     several PCI switches",
        "  0000:d1:00.0: 10de:2330 cuda:6, NUMA node 1",
        "  cuda:6: preferred mlx5_10; available mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 \
         mlx5_7 mlx5_8 mlx5_9 mlx5_11",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line:?} is not in {text}");
    }

    // One box for each, and the GPU's second switch below the one that it shares with its NIC.
    let drawing = fs::read_to_string(path).unwrap();
    for (what, count) in [
        ("<title>GPU cuda:", 8),
        ("<title>NIC mlx5_", 12),
        ("<title>network interface eno3, 1000 Mb/s, 0000:0b:00.0</title>", 1),
        ("<title>host bridge 0000:", 11),
        ("<title>NUMA node ", 2),
        (">PXB</text>", 8 + 1),
        ("<title>cuda:6 to mlx5_10: several PCI switches</title>", 1),
        ("<title>switch 0000:cc:00.0</title>", 1),
        ("<title>switch 0000:cf:00.0</title>", 1),
    ] {
        assert_eq!(drawing.matches(what).count(), count, "{what}");
    }
}

#[test]
fn names_in_a_tree_are_no_markup() {
    let name = "<text>\u{202e}&x";
    let tree = Tree::of_text(&format!(
        "pci 0000:00/00:01.0/01:00.0 class=020000 id=15b3:1021 node=0
         file devices/pci0000:00/0000:00:01.0/0000:01:00.0/infiniband/a/ports/1/rate <b>&\\x1b[31m
         link class/infiniband/{name} devices/pci0000:00/0000:00:01.0/0000:01:00.0/infiniband/a"
    ));
    let folder = Folder::new();
    let path = folder.path().join("drawing.svg");
    let output = topology(&tree, &["--svg", path.to_str().unwrap()]);
    let drawing = fs::read_to_string(path).unwrap();
    elements(&drawing);
    assert!(drawing.contains("&lt;text&gt;\\u{202e}&amp;x"), "{drawing}");
    assert!(output.stdout.contains("  <text>\\u{202e}&x: "), "{}", output.stdout);
    assert!(!output.stdout.contains(['\u{202e}', '\u{1b}']), "{}", output.stdout);
}

#[test]
fn a_drawing_of_very_many_devices_stays_small() {
    let devices = (0..400).map(|number| {
        let (bus, slot) = (16 + number / 32, number % 32);
        format!("pci 0000:00/00:01.0/{bus:02x}:{slot:02x}.0 class=030200 id=10de:1 node=0\n")
    });
    let nics = (0..100).map(|number| format!("file class/infiniband/x{number}/node_type 1\n"));
    let tree = Tree::of_text(&devices.chain(nics).collect::<String>());
    let folder = Folder::new();
    let path = folder.path().join("drawing.svg");
    topology(&tree, &["--json", "--svg", path.to_str().unwrap()]);
    let drawing = fs::read_to_string(path).unwrap();
    elements(&drawing);
    for text in [
        "244 more devices are not drawn",
        "336 more locations are not in the table",
        "36 more NICs are not in the table",
    ] {
        assert!(drawing.contains(text), "{text}");
    }
    assert!(drawing.len() < 2 << 20, "{}", drawing.len());
}

#[test]
fn a_drawing_that_cannot_be_written_is_a_failure() {
    let tree = Tree::of("vm");
    let root = tree.root().to_str().unwrap();
    let output = run(&["topology", "--sysfs", root, "--svg", "/no/such/folder/x.svg"]);
    let sentence = output.failure(1);
    assert!(sentence.contains("cannot write /no/such/folder/x.svg"), "{sentence}");
}

/// Runs `topology` on this machine with variables.
fn with(variables: &[(&str, &str)], arguments: &[&str]) -> common::Output {
    let mut command = millstream();
    command.arg("topology").args(arguments).envs(variables.iter().copied());
    Running::start("topology", &mut command).output()
}

#[test]
fn a_matrix_and_a_filter_of_the_environment_count_on_this_machine() {
    let folder = Folder::new();
    let path = folder.path().join("matrix.json");
    let file = path.to_str().unwrap();
    fs::write(&path, r#"{"cuda:0": [["b"], ["a", "c"]], "cpu:0": [["a"], []]}"#).unwrap();
    let variables = [("MC_CUSTOM_TOPO_JSON", file), ("MC_TE_FILTERS", "a, b,d")];
    let output = with(&variables, &["--json"]).success();
    let object: Value = output.json();
    let expected = json!({"cpu:0": [["a"], []], "cuda:0": [["b"], ["a"]]});
    assert_eq!(object["nic_priority_matrix"], expected);
    assert_eq!(object["nic_priority_matrix_file"], file);
    assert_eq!(output.stderr, "note: MC_TE_FILTERS names d, which is no NIC here\n");
    let text = with(&variables, &[]).success().stdout;
    let lines = format!(
        "NICs for memory (of {file})\n  cpu:0: preferred a; available none\n  \
         cuda:0: preferred b; available a\n"
    );
    assert!(text.ends_with(&lines), "{text}");

    // Another machine's tree has nothing to do with them.
    let tree = Tree::of("vm");
    let arguments = ["--json", "--sysfs", tree.root().to_str().unwrap()];
    let object = with(&variables, &arguments).success().json();
    assert_eq!(object["nic_priority_matrix"], json!({"cpu:0": [["mlx5_0"], []]}));

    for (text, reason) in
        [(r#"{"cpu:0": [["a"]]}"#, "two lists of NICs"), ("cpu:0", "expected value at line 1")]
    {
        fs::write(&path, text).unwrap();
        let output = with(&variables, &["--svg", "/no/such/folder"]);
        let sentence = output.failure(1);
        for part in ["MC_CUSTOM_TOPO_JSON", file, reason] {
            assert!(sentence.contains(part), "{part} is not in {sentence}");
        }
    }
    fs::remove_file(&path).unwrap();
    let output = with(&variables, &[]);
    assert!(output.failure(1).contains("No such file"), "{}", output.stderr);
}

#[test]
fn soft_devices_are_in_the_matrix_where_they_are_asked_for() {
    let arguments = ["topology", "--json", "--bind", "127.0.0.1", "--bind", "127.0.0.7"];
    let object = run(&arguments).success().json();
    let matrix = object["nic_priority_matrix"].as_object().unwrap();
    let entry = matrix["cpu:0"].as_array().unwrap();
    let all = entry.iter().flat_map(|list| list.as_array().unwrap());
    let all: Vec<&str> = all.filter_map(Value::as_str).collect();
    for name in ["soft-127.0.0.1", "soft-127.0.0.7"] {
        assert!(all.contains(&name), "{all:?}");
    }
    let output = run(&["topology", "--bind", "192.0.2.1"]);
    assert!(output.failure(1).contains("no interface of this machine"), "{}", output.stderr);
    run(&["topology", "--bind", "127.0.0.1", "--bind", "127.0.0.1"]).failure(2);
    run(&["topology", "--bind", "127.0.0.1", "--sysfs", "/sys"]).failure(2);
}
