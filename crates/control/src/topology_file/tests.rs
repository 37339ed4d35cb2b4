//! YAML in, and what becomes of it: a network, a plan, or an error that says where.

use std::net::IpAddr;

use millstream_inc::plan::{Child, FanIn, SwitchId, Tree, TreeNode};
use millstream_inc::topology::{Demand, Lower, MacAddress, SwitchState};
use proptest::prelude::*;

use super::*;

/// One switch and two hosts, with every key that the format had at first.
const ONE_SWITCH: &str = r#"# topology.yaml
switches:
  - id: 0
    root: true
    connections:
      - up: false
        host_id: 0
        my_ip: "192.168.1.1"
        my_mac: "00:11:22:33:44:55"
        my_port: 4791
        my_qp: 100
        peer_ip: "192.168.1.10"
        peer_mac: "00:11:22:33:44:66"
        peer_port: 4791
        peer_qp: 200
      - up: false
        host_id: 1
        my_ip: "192.168.1.1"
        my_mac: "00:11:22:33:44:55"
        my_port: 4791
        my_qp: 101
        peer_ip: "192.168.1.11"
        peer_mac: "00:11:22:33:44:77"
        peer_port: 4791
        peer_qp: 201
"#;

fn parse(text: &str) -> Result<TopologyFile, String> {
    TopologyFile::parse(Path::new("t.yaml"), text).map_err(|error| error.to_string())
}

#[test]
fn a_file_of_one_switch_is_its_network() {
    let file = parse(ONE_SWITCH).unwrap();
    assert_eq!(file.warnings.len(), 1);
    assert!(file.warnings[0].starts_with("the queue pair numbers"), "{:?}", file.warnings);
    let [switch] = file.topology.switches() else { panic!("{:?}", file.topology) };
    assert_eq!((switch.id, switch.root, &switch.name), (0, true, &None));
    let link = file.topology.links()[1];
    assert_eq!((link.lower, link.rate), (Lower::Host(1), None));
    assert_eq!(link.lower_address, IpAddr::from([192, 168, 1, 11]));
    assert_eq!(link.lower_mac, Some(MacAddress([0, 0x11, 0x22, 0x33, 0x44, 0x77])));
    // Nothing to warn of without them.
    let without: String = ONE_SWITCH
        .lines()
        .filter(|line| !line.contains("_qp"))
        .fold(String::new(), |text, line| text + line + "\n");
    assert_eq!(parse(&without).unwrap().warnings, [""; 0]);
}

/// A tree as text: switches with their children in brackets, and ranks.
fn drawn(tree: &Tree, node: usize) -> String {
    let child = |child: &Child| match *child {
        Child::Host { rank } => rank.to_string(),
        Child::Switch { node } => drawn(tree, node),
    };
    let TreeNode { switch, children, .. } = &tree.nodes()[node];
    format!("s{}({})", switch.0, children.iter().map(child).collect::<Vec<_>>().join(" "))
}

/// The plan for ranks at these addresses, where all switches are there and nothing is on them.
fn plan(text: &str, hosts: &[&str]) -> String {
    let topology = parse(text).unwrap().topology;
    let hosts: Vec<IpAddr> = hosts.iter().map(|host| host.parse().unwrap()).collect();
    let state = |(index, _): (usize, _)| {
        let switch = SwitchId(topology.switches()[index].id);
        Some(SwitchState {
            switch,
            nodes: 0,
            free_nodes: 64,
            free_bytes: 1 << 30,
            free_queue_pairs: 4096,
        })
    };
    let switches: Vec<_> = topology.switches().iter().enumerate().map(state).collect();
    let users = vec![0; topology.links().len()];
    let demand = Demand {
        hosts: &hosts,
        switches: &switches,
        users: &users,
        fan_in: FanIn::MAX,
        segment_bytes: 256 << 10,
        window: 8,
    };
    match topology.place(&demand) {
        Ok(placed) => drawn(&placed.tree, 0),
        Err(error) => error.to_string(),
    }
}

/// Flow style is YAML, too.
const TWO_LEVELS: &str = r"
switches:
  - {id: 7, root: true, connections: [{up: false, my_ip: 10.0.0.7, peer_ip: 10.0.0.8},
                                      {up: false, my_ip: 10.0.0.7, peer_ip: 10.0.0.9}]}
  - {id: 8, connections: [{up: false, host_id: 0, my_ip: 10.0.0.8, peer_ip: 10.0.1.1},
                          {up: false, host_id: 1, my_ip: 10.0.0.8, peer_ip: 10.0.1.2}]}
  - {id: 9, connections: [{up: false, host_id: 2, my_ip: 10.0.0.9, peer_ip: 10.0.1.3},
                          {up: true, my_ip: 10.0.0.9, peer_ip: 10.0.0.7, rate: 10gbit}]}
";

#[test]
fn files_are_plans() {
    let narrow = TWO_LEVELS.replace("id: 8,", "id: 8, fan_in: 2, name: leaf,");
    for (text, hosts, tree) in [
        (ONE_SWITCH, &["192.168.1.10", "192.168.1.11"][..], "s0(0 1)"),
        (ONE_SWITCH, &["192.168.1.11"], "s0(0)"),
        (ONE_SWITCH, &["192.168.1.11", "192.168.1.10", "192.168.1.11"], "s0(0 2 1)"),
        (TWO_LEVELS, &["10.0.1.1", "10.0.1.2", "10.0.1.3"], "s7(s8(0 1) s9(2))"),
        (TWO_LEVELS, &["10.0.1.3", "10.0.1.1"], "s7(s8(1) s9(0))"),
        (TWO_LEVELS, &["10.0.1.2", "10.0.1.1"], "s8(0 1)"),
        (&narrow, &["10.0.1.1", "10.0.1.1", "10.0.1.2"], "s8(s8(0) s8(1 2))"),
        (TWO_LEVELS, &["10.0.1.9"], "rank 0 is at 10.0.1.9, and the network has no host there"),
    ] {
        assert_eq!(plan(text, hosts), tree, "{hosts:?}");
    }
}

#[test]
fn what_is_wrong_is_named_with_its_line_and_what_to_do() {
    let with = |from: &str, to: &str| ONE_SWITCH.replacen(from, to, 1);
    let second = "\n      - up: false\n        host_id: 1\n";
    let mut others = Vec::new();
    for (text, error) in [
        (String::new(), "t.yaml:1: a topology is a map, and this is nothing"),
        ("- id: 0".to_owned(), "t.yaml:1: a topology is a map, and this is a list"),
        ("{}".to_owned(), "t.yaml:1: there is no `switches`, which has to be there"),
        (
            "switches: []".to_owned(),
            "t.yaml: there is no switch: a network has a switch and a host at least",
        ),
        ("switches:".to_owned(), "t.yaml:1: `switches` is a list, and this is nothing"),
        ("switches: [1]".to_owned(), "t.yaml:1: a switch is a map, and this is a text or a number"),
        (
            "hosts: []".to_owned(),
            "t.yaml:1: \"hosts\" is no key here: known are `switches`, `group`,",
        ),
        ("switches: [\n".to_owned(), "t.yaml:2: this is no YAML: "),
        (
            "switches: b: c".to_owned(),
            "t.yaml:1: `switches` is a list, and this is a text or a number",
        ),
        ("[a]: b".to_owned(), "t.yaml:1: a key is a word, and this is a list"),
        ("? [a]\n: b".to_owned(), "t.yaml:1: a key is a word, and this is a list"),
        (format!("{ONE_SWITCH}---\nswitches: []\n"), ": a second document begins here"),
        ("a: &x [1]\n".to_owned(), "t.yaml:1: \"a\" is no key here"),
        ("switches: &x\n  - id: 0".to_owned(), ":1: anchors and aliases (`&`, `*`) are not read"),
        ("switches: *x".to_owned(), "t.yaml:1: this is no YAML: "),
        ("switches: !!seq []".to_owned(), "t.yaml:1: tags (`!`) are not read: remove it"),
        (
            with("id: 0", "ID: 0"),
            "t.yaml:3: switch number 1: \"ID\" is no key here: known are `id`, ",
        ),
        (with("  - id: 0\n    root", "  - root"), "t.yaml:3: switch number 1: there is no `id`"),
        (
            with("id: 0", "id: -1"),
            "t.yaml:3: switch number 1: `id` is a whole number up to 2^53 - 1, and not \"-1\"",
        ),
        (with("id: 0", "id: 9007199254740992"), "`id` is a whole number up to 2^53 - 1"),
        (
            with("id: 0", &format!("id: {}", "9".repeat(100))),
            &format!("and not \"{}...\"", "9".repeat(64)),
        ),
        (with("id: 0", "id: 1e3"), "and not \"1e3\""),
        (with("id: 0", "id: \"0\""), "t.yaml:3: switch number 1: `id` is a whole number"),
        (with("id: 0", "id: [0]"), "`id` is a whole number up to 2^53 - 1, and this is a list"),
        (
            with("root: true", "root: yes"),
            "t.yaml:4: switch 0: `root` is true or false, and not \"yes\"",
        ),
        (
            with("root: true", "root: true\n    root: true"),
            "t.yaml:5: switch 0: `root` is there twice",
        ),
        (
            with("root: true", "fan_in: 65"),
            "switch 0: `fan_in` is a number of children, 1 to 64, and not \"65\"",
        ),
        (
            with("root: true", "fan_in: 0"),
            "switch 0: `fan_in` is a number of children, 1 to 64, and not \"0\"",
        ),
        (
            with("root: true", "name: \"\""),
            "switch 0: `name` is 1 to 128 bytes without control characters",
        ),
        (
            with("root: true", "name: \"a\\tb\""),
            "`name` is 1 to 128 bytes without control characters, and not \"a\\tb\"",
        ),
        (
            with("up: false", "up: 0"),
            "t.yaml:6: switch 0, connection 1: `up` is true or false, and not \"0\"",
        ),
        (
            with("my_ip: \"192.168.1.1\"", "my_ip: host"),
            "t.yaml:8: switch 0, connection 1: `my_ip` is an IPv4 or IPv6 address, and not \"host\"",
        ),
        (
            with("        my_ip: \"192.168.1.1\"\n", ""),
            "t.yaml:6: switch 0, connection 1: there is no `my_ip`",
        ),
        (
            with(second, "\n      - host_id: 1\n"),
            "t.yaml:16: switch 0, connection 2: there is no `up`",
        ),
        (
            with("00:11:22:33:44:66", "00:11:22:33:44"),
            "t.yaml:13: switch 0, connection 1: `peer_mac` is a MAC address",
        ),
        (
            with("my_port: 4791", "my_port: 23333"),
            "t.yaml:10: switch 0, connection 1: `my_port` is 4791, the port of RoCEv2, and not \"23333\"",
        ),
        (
            with("my_qp: 100", "my_qp: 16777216"),
            "`my_qp` is a queue pair number, up to 2^24 - 1, and not \"16777216\"",
        ),
        (
            with("my_qp: 100", "rate: 0gbit"),
            "`rate` is a rate of 1kbit to 1000tbit per second, as 100mbit or 10gbit, and not \"0gbit\"",
        ),
        (
            with("my_qp: 100", "rate: 99999999999999999999gbit"),
            "t.yaml:11: switch 0, connection 1: `rate` is",
        ),
        (
            with("peer_ip: \"192.168.1.11\"", "peer_ip: \"192.168.1.10\""),
            "t.yaml:16: switch 0, connection 2: `peer_ip` 192.168.1.10 is an address of host 0, and not of host 1",
        ),
        (
            with(second, "\n      - up: true\n"),
            "t.yaml:16: switch 0, connection 2: `up: true`, but no switch has the address `peer_ip` 192.168.1.11",
        ),
        (
            with(second, "\n      - up: false\n"),
            "t.yaml:16: switch 0, connection 2: no switch has the address `peer_ip` 192.168.1.11, and there is no `host_id`",
        ),
        (
            ONE_SWITCH.to_owned() + &ONE_SWITCH[ONE_SWITCH.find("  - id").unwrap()..],
            "t.yaml:26: switch 0: there is a switch 0 already: give this one its own `id`",
        ),
        (
            TWO_LEVELS.replace("id: 9,", "id: 9, root: true,"),
            "t.yaml:7: switch 9: switch 7 is the root already",
        ),
        (
            TWO_LEVELS.replace("root: true, ", "").replace("{up: true", "{up: false"),
            "t.yaml:8: switch 9, connection 2: switch 7 says of this connection that it is `up: false`, too",
        ),
        (CIRCLE.to_owned(), "t.yaml:3: switch 1: switches "),
        (
            with_lab("cables: 3"),
            "t.yaml:27: lab: \"cables\" is no key here: known are `controller`",
        ),
        (with_lab("rate: 0mbit"), "t.yaml:27: lab: `rate` is a rate of 1kbit"),
        (with_lab("mtu: 1279"), "t.yaml:27: lab: `mtu` is 1280 to 65535 bytes, and not \"1279\""),
        (with_lab("mtu: -1"), "lab: `mtu` is 1280"),
        (with_lab("mtu: \"1500\""), "lab: `mtu` is 1280"),
        (with_lab("controller: [host0]"), "t.yaml:27: lab: `controller` is"),
        (with_lab("controller: host"), "t.yaml:27: lab: `controller` is `machine`"),
        (
            with_lab("controller: host2"),
            "a host or switch of this file, as host0 or switch7, and not \"host2\"",
        ),
        (with_lab("mtu: 1500\n  controller: switch1"), "t.yaml:28: lab: `controller` is `machine`"),
        (ONE_SWITCH.to_owned() + "lab: host0\n", "t.yaml:26: `lab` is a map"),
    ] {
        let found = parse(&text).expect_err(error);
        if !found.contains(error) || !found.starts_with("topology t.yaml") {
            others.push((found, error.to_owned()));
        }
    }
    assert_eq!(others, []);
    // A host with two addresses has two interfaces.
    parse(&with("host_id: 0", "host_id: 1")).unwrap();
}

/// A file with settings of a lab.
fn with_lab(settings: &str) -> String {
    format!("{ONE_SWITCH}lab:\n  {settings}\n")
}

#[test]
fn a_file_says_how_it_is_built_on_one_machine() {
    assert_eq!(parse(ONE_SWITCH).unwrap().lab, LabSettings::default());
    let lab = parse(&with_lab("{controller: host1, rate: 2gbit, mtu: 9000}")).unwrap().lab;
    assert_eq!((lab.controller, lab.mtu), (ControllerPlace::Host(1), Some(9000)));
    assert_eq!(lab.rate.map(|rate| rate.bits_per_s()), Some(2_000_000_000));
    let place =
        |place: &str| parse(&with_lab(&format!("controller: {place}"))).unwrap().lab.controller;
    assert_eq!(place("switch0"), ControllerPlace::Switch(0));
    assert_eq!(place("machine"), ControllerPlace::Machine);
}

const CIRCLE: &str = r"
switches:
  - {id: 1, connections: [{up: true, my_ip: 10.0.0.1, peer_ip: 10.0.0.2},
                          {up: false, host_id: 0, my_ip: 10.0.0.1, peer_ip: 10.0.1.1}]}
  - {id: 2, connections: [{up: true, my_ip: 10.0.0.2, peer_ip: 10.0.0.3}]}
  - {id: 3, connections: [{up: true, my_ip: 10.0.0.3, peer_ip: 10.0.0.1}]}
";

#[test]
fn files_that_would_be_many_are_refused_early() {
    // Aliases of aliases, ten to the ninth of them.
    let mut bomb = "a: &a [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for (last, next) in "abcdefgh".chars().zip("bcdefghi".chars()) {
        bomb += &format!("{next}: &{next} [{}]\n", vec![format!("*{last}"); 10].join(","));
    }
    let as_switches = format!("switches: {}", &bomb[3..]);
    for text in [&bomb, &as_switches] {
        assert!(parse(text).is_err());
    }
    for deep in ["[", "{", "- ", "? ", "switches: [", "{a: "] {
        assert!(parse(&deep.repeat(100_000)).is_err(), "{deep}");
    }
    let many = "switches:\n".to_owned()
        + &(0..1025).map(|id| format!("  - {{id: {id}, connections: []}}\n")).collect::<String>();
    let error = parse(&many).unwrap_err();
    assert!(error.contains("1025 switches are too many: the limit is 1024"), "{error}");
}

#[test]
fn a_file_that_is_none_or_too_large_is_refused() {
    let directory =
        std::env::temp_dir().join(format!("millstream-topology-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("t.yaml");
    let error = || TopologyFile::read(&path).unwrap_err();
    assert!(matches!(*error().problem, FileProblem::Io(_)));
    // 100 MB, of which no block is there.
    File::create(&path).unwrap().set_len(100_000_000).unwrap();
    assert!(error().to_string().contains("larger than 32 MiB"), "{}", error());
    std::fs::write(&path, b"switches:\n  \xff").unwrap();
    assert!(error().to_string().contains("t.yaml:2: this is no UTF-8"), "{}", error());
    assert!(matches!(*TopologyFile::read(&directory).unwrap_err().problem, FileProblem::Io(_)));
    let endless = TopologyFile::read(Path::new("/dev/zero")).unwrap_err();
    assert!(matches!(*endless.problem, FileProblem::TooLarge));
    std::fs::write(&path, ONE_SWITCH).unwrap();
    assert_eq!(TopologyFile::read(&path).unwrap().topology, parse(ONE_SWITCH).unwrap().topology);
    std::fs::remove_dir_all(&directory).unwrap();
}

proptest! {
    #[test]
    fn any_text_is_a_topology_or_an_error(text in "(?s).{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn a_file_with_a_mistake_is_a_topology_or_an_error(
        two in any::<bool>(),
        at in any::<prop::sample::Index>(),
        length in 0_usize..30,
        text in "[-a-z0-9:{}\\[\\],&*!'\"#?|> \n\t.]{0,12}",
    ) {
        let mut file = if two { TWO_LEVELS } else { ONE_SWITCH }.to_owned();
        let at = at.index(file.len());
        file.replace_range(at..(at + length).min(file.len()), &text);
        let _ = parse(&file);
    }
}
