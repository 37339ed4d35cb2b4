//! `controller --topology` and `--plans`: the examples of docs/topology-files.md, as processes.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;

use common::{Folder, Output, Running, address, eventually, millstream, run};

const DOCUMENT: &str = include_str!("../../../docs/topology-files.md");

/// The examples, with addresses that no other test has, and the address in place of each of the document's.
fn examples() -> Vec<(String, BTreeMap<String, String>)> {
    let blocks = DOCUMENT.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.map(with_own_addresses).collect()
}

fn with_own_addresses(block: &str) -> (String, BTreeMap<String, String>) {
    let mut addresses = BTreeMap::new();
    let is_address = |byte: char| byte.is_ascii_digit() || byte == '.';
    for word in block.split(|byte| !is_address(byte)) {
        if word.parse::<Ipv4Addr>().is_ok() {
            addresses.entry(word.to_owned()).or_insert_with(address);
        }
    }
    let lines = block.lines().map(|line| {
        let mut parts: Vec<String> = Vec::new();
        let mut rest = line;
        while let Some(start) = rest.find(is_address) {
            let length = rest[start..].find(|byte| !is_address(byte)).unwrap_or(rest.len() - start);
            let word = &rest[start..start + length];
            parts.push(rest[..start].to_owned());
            parts.push(addresses.get(word).map_or(word, String::as_str).to_owned());
            rest = &rest[start + length..];
        }
        parts.concat() + rest + "\n"
    });
    (lines.collect(), addresses)
}

fn controller(folder: &Folder, topology: &str) -> (Running, String) {
    let (file, plans) = (folder.file("topology.yaml"), folder.file("plans"));
    fs::write(&file, topology).unwrap();
    let listen = format!("{}:0", address());
    let arguments = ["controller", "--listen", &listen, "--topology", &file, "--plans", &plans];
    let mut controller = Running::start("controller", millstream().args(arguments));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    (controller, listen)
}

fn switch(controller: &str, bind: &str) -> Running {
    let arguments = ["switch", "--controller", controller, "--bind", bind];
    let mut switch = Running::start(&format!("switch {bind}"), millstream().args(arguments));
    switch.ready();
    switch
}

fn host(controller: &str, world: u32, rank: u32, bind: &str, more: &[&str]) -> Running {
    let (world, rank) = (world.to_string(), rank.to_string());
    let mut command = millstream();
    command.args([
        "allreduce",
        "--path=switch",
        "--fallback=off",
        "--controller",
        controller,
        "--group=g",
        "--world",
        &world,
    ]);
    command.args(["--rank", &rank, "--bind", bind, "--dtype=int32", "--op=sum"]).args(more);
    Running::start(&format!("rank {rank}"), &mut command)
}

/// The files of plans.
fn plans(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(folder.path().join("plans")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let finished = paths.filter(|path| path.extension().is_some_and(|end| end == "yaml"));
    finished.filter_map(|path| fs::read_to_string(path).ok()).collect()
}

/// The value of a key in each line that has it.
fn values<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    let key = format!("{key}: ");
    let words = text.lines().map(|line| line.trim_start().trim_start_matches("- "));
    words.filter_map(|line| line.strip_prefix(key.as_str())).collect()
}

#[test]
fn hosts_reduce_over_the_switches_of_the_file() {
    let (topology, at) = examples().remove(0);
    let folder = Folder::new();
    let (mut controller, listen) = controller(&folder, &topology);
    let note = controller.error_line();
    assert!(
        note.starts_with("note: the queue pair numbers of the topology are not used"),
        "{note}"
    );
    let of = |address: &str| at[address].as_str();
    let [root, left] = ["127.0.10.1", "127.0.11.1"].map(|address| switch(&listen, of(address)));
    let hosts = ["127.0.20.1", "127.0.20.2", "127.0.20.3", "127.0.20.4"].map(of);
    // A leaf is missing, and who waits is told which. The last rank is the least patient, and joins when the
    // others are there: its time is the group's, and none of it goes by while processes start.
    let absent = format!("switch 2 ({})", of("127.0.12.1"));
    let wait =
        |rank: u32, bind: &str, timeout: &str| host(&listen, 4, rank, bind, &["--size=4", timeout]);
    let mut waiting: Vec<Running> =
        (0..).zip(&hosts[..3]).map(|(rank, bind)| wait(rank, bind, "--timeout=120s")).collect();
    while !waiting[0].error_line().contains("waiting for rank 3 of 4") {}
    waiting.push(wait(3, hosts[3], "--timeout=2s"));
    for host in waiting {
        let output = host.output();
        let needs = format!("has not registered: {absent}");
        assert!(output.failure(1).contains(&needs), "{}", output.stderr);
    }
    let right = switch(&listen, of("127.0.12.1"));
    // Ranks are where their addresses are, in whatever order.
    let order = [2, 0, 3, 1].map(|number: usize| hosts[number]);
    let verify = ["--size=1MiB", "--iters=3", "--verify", "--json"];
    let ranks: Vec<Running> =
        (0..).zip(order).map(|(rank, bind)| host(&listen, 4, rank, bind, &verify)).collect();
    for rank in ranks {
        let report = rank.output().success().json();
        assert_eq!(
            (report["wrong"].as_u64(), report["checked"].as_u64()),
            (Some(0), Some(3 << 18))
        );
    }
    eventually("the plan is removed", || plans(&folder).is_empty());
    // While they run, the plan is there.
    let mut ranks: Vec<Running> = (0..)
        .zip(hosts)
        .map(|(rank, bind)| host(&listen, 4, rank, bind, &["--size=1MiB", "--iters=1000000"]))
        .collect();
    for (rank, leaf) in
        ranks.iter_mut().zip(["127.0.11.1", "127.0.11.1", "127.0.12.1", "127.0.12.1"])
    {
        let line = rank.line();
        assert!(line.contains(&format!("at {}", of(leaf))), "{line}");
    }
    eventually("the plan is there", || !plans(&folder).is_empty());
    let plan = plans(&folder).remove(0);
    assert_eq!(values(&plan, "group"), ["\"g\""]);
    assert_eq!(values(&plan, "id"), ["0", "1", "2"]);
    assert_eq!(values(&plan, "root"), ["true", "false", "false"]);
    assert_eq!(values(&plan, "host_id"), ["0", "1", "2", "3"]);
    assert_eq!(values(&plan, "rank"), ["0", "1", "2", "3"]);
    // Two edges between switches, at both ends, and four to hosts: all with queue pairs of their own.
    let (my, peer) = (values(&plan, "my_qp"), values(&plan, "peer_qp"));
    assert_eq!((my.len(), peer.len()), (8, 8));
    let address = |host: &&str| format!("\"{host}\"");
    let peers = values(&plan, "peer_ip");
    assert!(hosts.iter().map(address).all(|host| peers.contains(&host.as_str())), "{plan}");
    ranks[1].signal("KILL");
    for rank in ranks {
        rank.output();
    }
    eventually("the plan is removed", || plans(&folder).is_empty());
    for daemon in [root, left, right, controller] {
        daemon.signal("TERM");
        daemon.output().success();
    }
}

#[test]
fn ranks_with_two_addresses_have_a_tree_on_each_rail_and_hear_which_one_died() {
    let (topology, at) = examples().remove(2);
    let folder = Folder::new();
    let (_controller, listen) = controller(&folder, &topology);
    let of = |address: &str| at[address].as_str();
    let rail = |name: &str, bind: &str| {
        let arguments = ["switch", "--controller", &listen, "--name", name, "--bind", bind];
        let mut switch = Running::start(name, millstream().args(arguments));
        switch.ready();
        switch
    };
    let leaves = ["127.0.51.1", "127.0.52.1"].map(of);
    let (_first, second) = (rail("rail-0", leaves[0]), rail("rail-1", leaves[1]));
    let ranks = |more: &[&str]| -> Vec<Running> {
        let of_rank = |rank: u32| {
            let [bind, other] = ["127.0.60", "127.0.61"].map(|it| format!("{it}.{}", rank + 1));
            let more = [&["--bind", of(&other)], more].concat();
            host(&listen, 2, rank, of(&bind), &more)
        };
        (0..2).map(of_rank).collect()
    };
    for rank in ranks(&["--size=4,16KiB,1000004", "--iters=3", "--verify"]) {
        let output = rank.output().success();
        let [first, second] = leaves;
        let over = format!("over 2 trees: switch rail-0 at {first}, switch rail-1 at {second}");
        assert!(output.stdout.contains(&over), "{}", output.stdout);
        assert_eq!(output.stdout.matches(", 0 wrong").count(), 3, "{}", output.stdout);
    }
    let ranks = ranks(&["--size=1MiB", "--iters=1000000"]);
    eventually("the plan is there", || !plans(&folder).is_empty());
    let plan = plans(&folder).remove(0);
    assert!(plan.contains("# Tree 0, from") && plan.contains("# Tree 1, from"), "{plan}");
    assert_eq!(values(&plan, "name"), ["\"rail-0\"", "\"rail-1\""]);
    assert_eq!(values(&plan, "host_id"), ["0", "1", "0", "1"]);
    second.signal("KILL");
    second.output();
    let own = ["127.0.61.1", "127.0.61.2"].map(|address| format!("tree 1, from {}", of(address)));
    for rank in ranks {
        let output = rank.output();
        let error = output.failure(1);
        // Both are told what the first has found.
        let found = own.iter().any(|own| error.contains(own));
        assert!(error.contains(leaves[1]) && found, "{error}");
    }
}

#[test]
fn every_example_is_a_topology_that_refuses_others() {
    let examples = examples();
    assert_eq!(examples.len(), 3);
    for (topology, _) in examples {
        let folder = Folder::new();
        let (controller, listen) = controller(&folder, &topology);
        let (bind, other) = (address(), address());
        let output = host(&listen, 2, 0, &bind, &["--size=4"]).output();
        let sentence =
            format!("rank 0 is at {bind}, and the controller's topology has no host there");
        assert!(output.failure(1).contains(&sentence), "{}", output.stderr);
        let arguments = ["switch", "--controller", &listen, "--bind", &other];
        let output = Running::start("switch", millstream().args(arguments)).output();
        let sentence = format!("the controller's topology has no switch \"switch-{other}\"");
        assert!(output.failure(1).contains(&sentence), "{}", output.stderr);
        controller.signal("TERM");
        controller.output().success();
    }
}

#[test]
fn a_file_with_a_mistake_stops_the_controller_with_its_line() {
    let folder = Folder::new();
    let file = folder.file("mistake.yaml");
    let (example, _) = examples().remove(0);
    let start = |text: &str, more: &[&str]| -> Output {
        fs::write(&file, text).unwrap();
        run(&[&["controller", "--listen=127.0.0.1:0", "--topology", &file], more].concat())
    };
    for (text, sentence) in [
        (example.replace("root: true", "rot: true"), ":4: switch 0: \"rot\" is no key here"),
        (
            example.replace("  - id: 2\n", "  - id: 1\n"),
            ":31: switch 1: there is a switch 1 already",
        ),
        (
            example.replace("  - id: 2\n", "  - id: 2\n    root: true\n"),
            ":31: switch 2: switch 0 is the root already",
        ),
        ("switches: *y".to_owned(), ":1: this is no YAML"),
    ] {
        let output = start(&text, &[]);
        let found = output.failure(1);
        assert!(found.contains(&format!("mistake.yaml{sentence}")), "{found}");
    }
    let output = start(&example, &["--plans", &file]);
    assert!(output.failure(1).contains("the directory of plans, "), "{}", output.stderr);
    let output =
        run(&["controller", "--listen=127.0.0.1:0", "--topology", &folder.file("none.yaml")]);
    assert!(output.failure(1).contains("none.yaml: cannot be read"), "{}", output.stderr);
}
