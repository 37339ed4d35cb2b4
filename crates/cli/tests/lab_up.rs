//! `lab up`, `status`, `exec` and `down`: topologies as namespaces and links, and what is left of them.

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Folder, Output, PROGRAM, Running, eventually, is_installed, millstream, skip};
use serde_json::Value;

const DOCUMENT: &str = include_str!("../../../docs/lab.md");

/// Every host has an interface below each of two switches.
const TWO_RAILS: &str = "
switches:
  - {id: 0, name: rail-0, connections: [
      {up: false, host_id: 0, my_ip: 10.5.0.1, peer_ip: 10.6.0.1},
      {up: false, host_id: 1, my_ip: 10.5.0.1, peer_ip: 10.6.0.2}]}
  - {id: 1, name: rail-1, connections: [
      {up: false, host_id: 0, my_ip: 10.5.1.1, peer_ip: 10.6.1.1},
      {up: false, host_id: 1, my_ip: 10.5.1.1, peer_ip: 10.6.1.2}]}
lab: {controller: switch1, rate: 400mbit}
";

/// The example of the document.
fn example() -> &'static str {
    DOCUMENT.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap()
}

/// A lab and where it is noted. It is ended with this value.
struct Lab {
    folder: Folder,
    status: Value,
}

/// A command about the lab of a folder.
fn about(folder: &Folder, words: &[&str]) -> Command {
    let mut command = millstream();
    command.arg("lab").arg(words[0]).arg("--directory").arg(folder.path()).args(&words[1..]);
    command
}

fn run(folder: &Folder, words: &[&str]) -> Output {
    Running::start(words[0], &mut about(folder, words)).output()
}

fn write(folder: &Folder, topology: &str) -> String {
    let file = folder.file("topology.yaml");
    fs::write(&file, topology).unwrap();
    file
}

impl Lab {
    /// `None`, and the test is skipped, where this machine has no labs.
    fn up(topology: &str) -> Option<Self> {
        let folder = Folder::new();
        let file = write(&folder, topology);
        // A token is for another controller.
        let mut command = about(&folder, &["up", "--json", &file]);
        command.env("INCCL_TOKEN_FILE", folder.file("no-such-token"));
        let output = Running::start("up", &mut command).output();
        if output.stderr.contains("network namespaces need root") {
            skip(&output.stderr);
            return None;
        }
        let status = output.success().json();
        Some(Self { folder, status })
    }

    fn controller(&self) -> &str {
        self.status["controller"].as_str().unwrap()
    }

    fn at(&self, host: &str, words: &[&str]) -> Running {
        let mut command = about(&self.folder, &["exec", host, "--"]);
        Running::start(host, command.args(words))
    }

    /// A rank at a host, with these addresses.
    fn rank(&self, host: &str, world: &str, rank: &str, bind: &[&str]) -> Running {
        let words = [PROGRAM, "allreduce", "--controller", self.controller(), "--world", world];
        let bind: Vec<&str> = bind.iter().flat_map(|address| ["--bind", address]).collect();
        let size = ["--rank", rank, "--fallback=off", "--size=4,1MiB", "--iters=3", "--verify"];
        self.at(host, &[&words[..], &size, &bind].concat())
    }

    /// Its processes, and the namespaces of its machines.
    fn belongings(&self) -> (Vec<u64>, BTreeSet<String>) {
        let path = self.folder.path().join("millstream-lab-lab/record.json");
        let record: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let holders = record["lab"]["holders"].as_array().unwrap().iter();
        let daemons = record["processes"].as_array().unwrap().iter().map(|it| &it["id"]);
        let others = [&record["holder"]["id"], &record["lab"]["keeper"]];
        let processes: Vec<u64> =
            holders.chain(daemons).chain(others).map(|id| id.as_u64().unwrap()).collect();
        let namespaces = processes.iter().map(|id| namespace(&format!("/proc/{id}")).unwrap());
        let own = namespace("/proc/self").unwrap();
        let namespaces = namespaces.filter(|namespace| *namespace != own).collect();
        (processes, namespaces)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = run(&self.folder, &["down"]);
    }
}

fn namespace(process: &str) -> Option<String> {
    let link = fs::read_link(Path::new(process).join("ns/net")).ok()?;
    Some(link.to_string_lossy().into_owned())
}

/// The network namespaces that processes are in.
fn namespaces() -> BTreeSet<String> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter_map(|entry| namespace(entry.path().to_str()?)).collect()
}

fn interfaces() -> BTreeSet<String> {
    let names = fs::read_dir("/sys/class/net").unwrap().flatten();
    names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Nothing of a lab is there any more, but for the folder of the test with its file.
fn check_that_nothing_is_left(
    folder: &Folder,
    (processes, of_lab): &(Vec<u64>, BTreeSet<String>),
    before: &BTreeSet<String>,
) {
    eventually("processes end", || {
        processes.iter().all(|id| {
            let stat = fs::read_to_string(format!("/proc/{id}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z "))
        })
    });
    eventually("namespaces go", || namespaces().is_disjoint(of_lab));
    assert_eq!(&interfaces(), before);
    let files = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(files.collect::<Vec<_>>(), ["topology.yaml"]);
}

/// The same, where it is not known which processes there were: they have the test's folder among their arguments.
fn check_that_all_is_gone(folder: &Folder, before: &BTreeSet<String>) {
    eventually("processes end", || {
        let line = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).ok();
        let lines = fs::read_dir("/proc").unwrap().flatten().filter_map(line);
        let place = folder.path().to_str().unwrap();
        lines.filter(|line| String::from_utf8_lossy(line).contains(place)).count() == 0
    });
    check_that_nothing_is_left(folder, &(Vec::new(), BTreeSet::new()), before);
}

#[test]
fn hosts_reduce_over_the_switches_of_a_file_and_nothing_is_left() {
    let before = interfaces();
    let Some(lab) = Lab::up(example()) else { return };
    assert_eq!(lab.controller(), "10.77.0.1:52200");
    let processes = lab.status["processes"].as_array().unwrap();
    let names: Vec<&str> = processes.iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["controller", "switch0", "switch1", "switch2"]);
    assert!(processes.iter().all(|it| it["running"] == true), "{processes:?}");
    let rates = |lab: &Value, host: &str| {
        let hosts = lab["hosts"].as_array().unwrap().iter();
        let host = hosts.clone().find(|it| it["name"] == host).unwrap();
        let nics = host["nics"].as_array().unwrap().iter();
        nics.map(|nic| nic["rate_bits_per_s"].as_u64()).collect::<Vec<_>>()
    };
    // The network that leads to the controller has no limit.
    assert_eq!(rates(&lab.status, "host2"), [Some(100_000_000), None]);
    assert_eq!(rates(&lab.status, "switch1")[0], Some(200_000_000));
    let hosts = [
        ("host0", "10.2.0.1"),
        ("host1", "10.2.0.2"),
        ("host2", "10.2.0.3"),
        ("host3", "10.2.0.4"),
    ];
    let ranks = ["0", "1", "2", "3"];
    let ranks: Vec<Running> = hosts
        .iter()
        .zip(ranks)
        .map(|((host, address), rank)| lab.rank(host, "4", rank, &[address]))
        .collect();
    for rank in ranks {
        let output = rank.output().success();
        // Through the root, which has no hosts.
        assert!(output.stdout.contains("over switch"), "{}", output.stdout);
        assert_eq!(output.stdout.matches(", 0 wrong").count(), 2, "{}", output.stdout);
    }
    // Hosts reach each other through the switches.
    let ping = lab.at("host0", &["ping", "-c1", "-w60", "10.2.0.4"]);
    if is_installed("ping") {
        ping.output().success();
    }
    let again = run(&lab.folder, &["up", &lab.folder.file("topology.yaml")]);
    assert!(again.failure(1).contains("there is a lab lab already"), "{}", again.stderr);
    let nowhere = run(&lab.folder, &["exec", "host9", "--", "true"]);
    assert!(nowhere.failure(1).contains("there is no host host9"), "{}", nowhere.stderr);
    let status = run(&lab.folder, &["status"]).success().stdout;
    assert!(status.contains("controller at 10.77.0.1:52200\n"), "{status}");
    assert!(status.contains("host0:eth0 ") && status.contains("100 Mbit/s  up"), "{status}");

    let belongings = lab.belongings();
    assert!(belongings.1.is_subset(&namespaces()) && belongings.1.len() == 9, "{belongings:?}");
    // Who is at a host ends with it.
    let sleeper = lab.at("host1", &["sleep", "1000"]);
    run(&lab.folder, &["down"]).success();
    assert!(!sleeper.output().status.success());
    check_that_nothing_is_left(&lab.folder, &belongings, &before);
    assert!(run(&lab.folder, &["down"]).failure(1).contains("there is no lab lab"));
}

#[test]
fn each_interface_of_a_host_carries_what_is_for_its_address() {
    let Some(lab) = Lab::up(TWO_RAILS) else { return };
    let received = |host: &str| {
        let table = lab.at(host, &["cat", "/proc/net/dev"]).output().success().stdout;
        let of = |nic: &str| {
            let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{nic}:")));
            line.unwrap().split_whitespace().next().unwrap().parse::<u64>().unwrap()
        };
        [of("eth0"), of("eth1")]
    };
    let before = received("host0");
    let ranks =
        [("host0", "0", ["10.6.0.1", "10.6.1.1"]), ("host1", "1", ["10.6.0.2", "10.6.1.2"])];
    let ranks = ranks.map(|(host, rank, bind)| lab.rank(host, "2", rank, &bind));
    for rank in ranks {
        let output = rank.output().success();
        assert_eq!(output.stdout.matches(", 0 wrong").count(), 2, "{}", output.stdout);
    }
    let after = received("host0");
    for nic in 0..2 {
        // Each has a half of three results of a megabyte.
        assert!(after[nic] - before[nic] > 1 << 20, "{before:?} {after:?}");
    }
    // The controller is where the file has it.
    let [controller, beside] = ["controller", "switch1"].map(|name| {
        let processes = lab.status["processes"].as_array().unwrap();
        let id = &processes.iter().find(|it| it["name"] == name).unwrap()["id"];
        namespace(&format!("/proc/{id}")).unwrap()
    });
    assert_eq!(controller, beside);
}

#[test]
fn nothing_is_left_of_a_lab_whose_holder_was_killed() {
    let before = interfaces();
    let Some(lab) = Lab::up(TWO_RAILS) else { return };
    let belongings = lab.belongings();
    let path = lab.folder.path().join("millstream-lab-lab/record.json");
    let record: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let holder = record["holder"]["id"].to_string();
    assert!(Command::new("kill").args(["-s", "KILL", &holder]).status().unwrap().success());
    check_that_nothing_is_left(&lab.folder, &belongings, &before);
}

/// A switch with hosts, and switches below it.
fn star(switches: u32) -> String {
    let below = |id| {
        format!(
            "  - {{id: {id}, connections: [{{up: true, my_ip: 10.8.{id}.1, peer_ip: 10.8.0.1}}]}}\n"
        )
    };
    let root =
        "  - {id: 0, connections: [{up: false, host_id: 0, my_ip: 10.8.0.1, peer_ip: 10.9.0.1}]}\n";
    format!("switches:\n{root}{}", (1..switches).map(below).collect::<String>())
}

#[test]
fn a_lab_that_cannot_be_made_whole_leaves_nothing() {
    if !is_installed("prlimit") {
        return skip("there is no prlimit");
    }
    let before = interfaces();
    let folder = Folder::new();
    let file = write(&folder, &star(16));
    // Each daemon takes three of the holder's files, so that some are there when there is no more for the next.
    let mut command = Command::new("prlimit");
    command.args(["--nofile=30:30", PROGRAM, "lab", "up", "--directory"]);
    let output = Running::start("prlimit", command.arg(folder.path()).arg(&file)).output();
    if output.stderr.contains("network namespaces need root") {
        return skip(&output.stderr);
    }
    let sentence = output.failure(1);
    assert!(sentence.contains("Too many open files"), "{sentence}");
    check_that_all_is_gone(&folder, &before);
}

#[test]
fn a_lab_of_which_nobody_could_be_told_is_gone() {
    let before = interfaces();
    // It is ended in any case.
    let lab = Lab { folder: Folder::new(), status: Value::Null };
    let file = write(&lab.folder, TWO_RAILS);
    for json in [&["--json"][..], &[]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = about(&lab.folder, &[&["up"][..], json, &[&*file]].concat());
        let output = command.stdout(full).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("network namespaces need root") {
            return skip(&stderr);
        }
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("millstream: cannot write to stdout"), "{stderr}");
        check_that_all_is_gone(&lab.folder, &before);
    }
}

#[test]
fn files_that_are_no_network_are_told_with_line_and_key() {
    let folder = Folder::new();
    let circle = "
switches:
  - {id: 1, connections: [{up: true, my_ip: 10.0.0.1, peer_ip: 10.0.0.2},
                          {up: false, host_id: 0, my_ip: 10.0.0.1, peer_ip: 10.0.1.1}]}
  - {id: 2, connections: [{up: true, my_ip: 10.0.0.2, peer_ip: 10.0.0.3}]}
  - {id: 3, connections: [{up: true, my_ip: 10.0.0.3, peer_ip: 10.0.0.1}]}
";
    let with = |from: &str, to: &str| example().replacen(from, to, 1);
    for (text, words) in [
        (circle.to_owned(), &[":3: switch 1", "above each other in a circle"][..]),
        (with("  - id: 0\n    root", "  - root"), &["there is no `id`"]),
        (with("rate: 200mbit", "speed: 200mbit"), &["\"speed\" is no key here", "`rate`"]),
        (with("rate: 200mbit", "rate: 0mbit"), &["`rate` is a rate", "\"0mbit\""]),
        (with("id: 1\n", "id: 1\n    root: true\n"), &["switch 0 is the root already"]),
        (with("rate: 100mbit", "rate: 0kbit"), &["lab: `rate` is a rate", "\"0kbit\""]),
        (with("rate: 100mbit", "controller: host77"), &["lab: `controller`", "host77"]),
        (example().replace("10.2.0.1", "127.0.0.1"), &["127.0.0.1 does not leave a machine"]),
        ("switches: []".to_owned(), &["there is no switch"]),
    ] {
        let file = write(&folder, &text);
        let output = run(&folder, &["up", &file]);
        let sentence = output.failure(1);
        for word in words.iter().chain([&"topology.yaml"]) {
            assert!(sentence.contains(word), "{word:?} is not in {sentence}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
    let output = run(&folder, &["up", "/no/such/file.yaml"]);
    assert!(output.failure(1).contains("/no/such/file.yaml"), "{}", output.stderr);
    assert!(run(&folder, &["up", "--name=../x", "f"]).status.code() == Some(1));
    assert!(run(&folder, &["status", "--name=../x"]).failure(1).contains("--name"));
    assert!(run(&folder, &["exec", "host0"]).code() == Some(2));
}

/// Two hosts below one switch.
const TWO_HOSTS: &str = "
switches:
  - {id: 0, name: leaf, connections: [
      {up: false, host_id: 0, my_ip: 10.5.0.1, peer_ip: 10.6.0.1},
      {up: false, host_id: 1, my_ip: 10.5.0.1, peer_ip: 10.6.0.2}]}
lab: {controller: switch0, rate: 400mbit}
";

/// What the interfaces of a host have received and sent, in bytes.
fn moved(lab: &Lab, host: &str) -> [u64; 2] {
    let table = lab.at(host, &["cat", "/proc/net/dev"]).output().success().stdout;
    let interfaces = table.lines().filter_map(|line| line.split_once(':'));
    let interfaces = interfaces.filter(|(name, _)| name.trim() != "lo");
    interfaces.fold([0, 0], |[received, sent], (_, numbers)| {
        let numbers: Vec<u64> =
            numbers.split_whitespace().map(|number| number.parse().unwrap()).collect();
        [received + numbers[0], sent + numbers[8]]
    })
}

#[test]
fn a_host_with_four_ranks_has_the_vector_on_its_link_once() {
    const BYTES: u64 = 4 << 20;
    let Some(lab) = Lab::up(TWO_HOSTS) else { return };
    let hosts = [("host0", "10.6.0.1"), ("host1", "10.6.0.2")];
    // Packets that are lost on a busy machine are sent again: that does not happen each time.
    let least = (0..3).map(|_| {
        let before = hosts.map(|(host, _)| moved(&lab, host));
        let ranks: Vec<Running> = (0..8)
            .map(|rank| {
                let (host, address) = hosts[rank / 4];
                let words = [PROGRAM, "allreduce", "--controller", lab.controller(), "--world=8"];
                let rank = format!("--rank={rank}");
                let rank = [&rank, "--bind", address, "--fallback=off", "--size=4MiB", "--json"];
                lab.at(host, &[&words[..], &rank, &["--verify"]].concat())
            })
            .collect();
        for rank in ranks {
            let report = rank.output().success().json();
            assert_eq!((&report["path"], &report["wrong"]), (&"hosts".into(), &0.into()));
        }
        let after = hosts.map(|(host, _)| moved(&lab, host));
        let each = after.as_flattened().iter().zip(before.as_flattened());
        let each: Vec<u64> = each.map(|(after, before)| after - before).collect();
        assert!(each.iter().all(|&bytes| bytes >= BYTES), "{each:?}");
        each.into_iter().max().unwrap()
    });
    let least = least.min().unwrap();
    assert!(least < BYTES * 12 / 10, "{least} for {BYTES}");
}
