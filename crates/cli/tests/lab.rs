//! Copies between hosts with several NICs, over links of a set rate that are cut.

mod common;

use std::fs;
use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Folder, Output, PROGRAM, Running, bytes, eventually, skip};
use millstream_lab::{Cut, Family, Handle, Lab, LabError, Link, Plan, Rate};

/// Builds a lab; `None`, and the test is skipped, where it cannot be had.
fn lab(plan: &Plan) -> Option<Lab> {
    match Lab::up(plan) {
        Ok(lab) => Some(lab),
        Err(LabError::Unavailable(reason)) => {
            skip(&reason);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn two_hosts(links: usize, link: &Link) -> Plan {
    Plan::new().hosts(["a", "b"]).links("a", "b", links, link)
}

fn link(mbit: u32) -> Link {
    Link { rate: Some(Rate::from_mbit(mbit)), ..Link::default() }
}

fn only(family: Family) -> Link {
    Link { families: vec![family], ..Link::default() }
}

/// The command at a host, with a device on each of these addresses.
fn at(lab: &Handle, host: &str, words: &[&str], bind: &[IpAddr]) -> Command {
    let mut command = lab.command(host, PROGRAM).unwrap();
    command.env_remove("MILLSTREAM_LOG").env_remove("RUST_LOG").args(words);
    for address in bind {
        command.args(["--bind", &address.to_string()]);
    }
    command
}

fn node(lab: &Handle, bind: &[IpAddr]) -> (Running, String) {
    let words = ["node", "--protocol", "rdma:soft", "--buffer", "64MiB"];
    let mut node = Running::start("node", &mut at(lab, "b", &words, bind));
    let segment = node.ready()["segment"].as_str().unwrap().to_owned();
    (node, segment)
}

/// A copy from or to a segment, to its end.
fn copy(lab: &Handle, words: &[&str], segment: &str, bind: &[IpAddr]) -> Output {
    let mut command = at(lab, "a", words, bind);
    Running::start(words[0], command.args(["--segment", segment])).output()
}

/// All addresses of a host, or those at a position of each NIC.
fn addresses(lab: &Handle, host: &str, position: usize) -> Vec<IpAddr> {
    lab.host(host).unwrap().nics.iter().map(|nic| nic.addresses[position]).collect()
}

/// Bytes that each NIC of the host of a process has received.
fn received(process: u32) -> Vec<u64> {
    let table = fs::read_to_string(format!("/proc/{process}/net/dev")).unwrap();
    let mut nics: Vec<(String, u64)> = table
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| name.trim() != "lo")
        .map(|(name, numbers)| {
            let received = numbers.split_whitespace().next().unwrap().parse().unwrap();
            (name.trim().to_owned(), received)
        })
        .collect();
    nics.sort();
    nics.into_iter().map(|(_, received)| received).collect()
}

/// A file of so many bytes.
fn file(folder: &Folder, length: usize) -> (String, Vec<u8>) {
    let (path, content) = (folder.file("original"), bytes(length, 7));
    fs::write(&path, &content).unwrap();
    (path, content)
}

/// Puts a file and gets it back, and compares.
fn there_and_back(lab: &Handle, segment: &str, bind: &[IpAddr]) {
    let folder = Folder::new();
    let (original, content) = file(&folder, 32 << 20);
    let back = folder.file("back");
    copy(lab, &["put", "--verify", &original], segment, bind).success();
    copy(lab, &["get", "--verify", "--length=32MiB", &back], segment, bind).success();
    assert!(fs::read(back).unwrap() == content);
}

#[test]
fn every_command_uses_all_its_nics_in_both_families() {
    let Some(lab) = lab(&two_hosts(4, &link(200))) else { return };
    for family in 0..2 {
        let (ours, theirs) = (addresses(&lab, "a", family), addresses(&lab, "b", family));
        let (node, segment) = node(&lab, &theirs);
        let before = received(node.id());
        there_and_back(&lab, &segment, &ours);
        let after = received(node.id());
        for nic in 0..4 {
            let bytes = after[nic] - before[nic];
            // Who is connected first, or is quicker, has more.
            assert!(bytes > 1 << 20, "eth{nic} had {bytes} of 32 MiB: {before:?} {after:?}");
        }
        let bench = ["bench", "transfer", "--op=write", "--block-size=64KiB", "--duration=100ms"];
        copy(&lab, &bench, &segment, &ours).success();
        let last = received(node.id());
        assert!((0..4).all(|nic| last[nic] > after[nic] + (64 << 10)), "{after:?} {last:?}");
    }
}

#[test]
fn families_in_any_order_reach_each_other() {
    let Some(lab) = lab(&two_hosts(1, &Link::default())) else { return };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for position in 0..2 {
        ours.extend(addresses(&lab, "a", position));
        theirs.extend(addresses(&lab, "b", 1 - position));
    }
    assert!(ours[0].is_ipv4() && theirs[0].is_ipv6());
    let (_node, segment) = node(&lab, &theirs);
    there_and_back(&lab, &segment, &ours);
}

#[test]
fn links_named_in_another_order_are_found() {
    let Some(mut lab) = lab(&two_hosts(2, &link(200))) else { return };
    let (ours, mut theirs) = (addresses(&lab, "a", 0), addresses(&lab, "b", 0));
    theirs.reverse();
    let (node, segment) = node(&lab, &theirs);
    // The host has a way to each address over one link only, and answers by the other: packets cross.
    // Not these: each NIC's partner is at its own link.
    let before = received(node.id());
    there_and_back(&lab, &segment, &ours);
    let after = received(node.id());
    assert!((0..2).all(|nic| after[nic] - before[nic] > 1 << 20), "{before:?} {after:?}");
    drop(node);
    lab.cut("a", "eth0", Cut::Down).unwrap();
    let (_node, segment) = self::node(&lab, &theirs[..1]);
    there_and_back(&lab, &segment, &ours[1..]);
}

#[test]
fn one_family_does_not_reach_the_other() {
    let plan = two_hosts(1, &only(Family::Ipv4)).links("a", "b", 1, &only(Family::Ipv6));
    let Some(lab) = lab(&plan) else { return };
    let (ours, theirs) = (addresses(&lab, "a", 0), addresses(&lab, "b", 0));
    let (_node, segment) = node(&lab, &theirs[1..]);
    let folder = Folder::new();
    let (original, _) = file(&folder, 1000);
    // The node itself is found by IPv6, but no device of ours has such an address.
    let output = copy(&lab, &["put", &original], &segment, &ours[..1]);
    let sentence = output.failure(1);
    for word in ["no local address (10.77.0.1) can reach", "(fd77:0:0:1::2)"] {
        assert!(sentence.contains(word), "{sentence}");
    }
}

#[test]
fn the_smaller_of_two_mtus_is_agreed() {
    let jumbo = Link { mtu: 9000, ..Link::default() };
    let Some(lab) = lab(&two_hosts(2, &jumbo)) else { return };
    // Each host has a NIC that takes no more than 1500, and sees no limit at the other one.
    for (host, nic) in [("a", "eth0"), ("b", "eth1")] {
        let mut ip = lab.command(host, "ip").unwrap();
        assert!(ip.args(["link", "set", nic, "mtu", "1500"]).status().unwrap().success());
    }
    for nic in 0..2 {
        for family in 0..2 {
            let (ours, theirs) = (addresses(&lab, "a", family), addresses(&lab, "b", family));
            let (_node, segment) = node(&lab, &theirs[nic..=nic]);
            there_and_back(&lab, &segment, &ours[nic..=nic]);
        }
    }
}

/// Starts to put a file over all links, of which one is cut when it has carried a part.
fn cut_in_the_middle(
    lab: &mut Lab,
    link: usize,
    how: Cut,
    timeout: &str,
) -> (Running, Running, String, Vec<u8>) {
    let (ours, theirs) = (addresses(lab, "a", 0), addresses(lab, "b", 0));
    let (node, segment) = node(lab, &theirs);
    let folder = Folder::new();
    let (original, content) = file(&folder, 48 << 20);
    let words = ["put", "--verify", "--timeout", timeout, &original, "--segment", &segment];
    // The lab may have carried other copies.
    let before = received(node.id())[link];
    let put = Running::start("put", &mut at(lab, "a", &words, &ours));
    eventually("a part arrives", || received(node.id())[link] > before + (2 << 20));
    lab.cut("a", &format!("eth{link}"), how).unwrap();
    // It was opened when a part had arrived.
    drop(folder);
    (node, put, segment, content)
}

/// What one link does not carry, the others do.
#[test]
fn a_copy_goes_on_without_a_link_that_is_cut() {
    let Some(mut lab) = lab(&two_hosts(4, &link(50))) else { return };
    // The segment's name, where the peer is asked for fences, is an address of the first.
    for (link, how) in [(0, Cut::Silent), (0, Cut::Down), (3, Cut::Silent), (3, Cut::Down)] {
        let (node, put, segment, content) = cut_in_the_middle(&mut lab, link, how, "60s");
        put.output().success();
        lab.restore("a", &format!("eth{link}")).unwrap();
        let folder = Folder::new();
        let back = folder.file("back");
        let ours = addresses(&lab, "a", 0);
        copy(&lab, &["get", "--length=48MiB", &back], &segment, &ours).success();
        assert!(fs::read(back).unwrap() == content);
        drop(node);
    }
}

#[test]
fn a_copy_over_a_link_that_stays_cut_fails_in_time() {
    let Some(mut lab) = lab(&two_hosts(1, &link(50))) else { return };
    let (_node, put, segment, _) = cut_in_the_middle(&mut lab, 0, Cut::Silent, "3s");
    let start = Instant::now();
    let output = put.output();
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert_eq!(output.code(), Some(1), "{}", output.stderr);
    // Before it, it may say that packets are lost.
    let sentence = output.stderr.lines().last().unwrap_or_default();
    for words in [&*segment, "nothing has moved for 3s", "--timeout"] {
        assert!(sentence.contains(words), "{sentence}");
    }
}

#[test]
fn the_nics_of_each_host_carry_an_allreduce_together() {
    let rails = ["x", "y"];
    let plan = Plan::new().hosts(["a", "b", "s"]).switch("x").switch("y");
    let plan = rails.iter().fold(plan, |plan, rail| plan.links("*", rail, 1, &link(200)));
    let Some(lab) = lab(&plan) else { return };
    let at_switch = addresses(&lab, "s", 0);
    let listen = format!("{}:0", at_switch[0]);
    let words = ["controller", "--listen", &listen];
    let mut controller = Running::start("controller", &mut at(&lab, "s", &words, &[]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let _switches: Vec<Running> = rails
        .iter()
        .zip(&at_switch)
        .map(|(name, &bind)| {
            let words = ["switch", "--controller", &listen, "--name", name];
            let mut switch = Running::start(name, &mut at(&lab, "s", &words, &[bind]));
            switch.ready();
            switch
        })
        .collect();
    let rank = |rank: &str, host: &str, more: &[&str]| {
        let words =
            ["allreduce", "--controller", &listen, "--world=2", "--fallback=off", "--rank", rank];
        let words = [&words[..], more].concat();
        Running::start(host, &mut at(&lab, host, &words, &addresses(&lab, host, 0)))
    };
    let verified = ["--size=4,1000004", "--iters=3", "--verify"];
    for host in [("0", "a"), ("1", "b")].map(|(number, host)| rank(number, host, &verified)) {
        let output = host.output().success();
        assert_eq!(output.stdout.matches(", 0 wrong").count(), 2, "{}", output.stdout);
    }
    let long = ["--size=4MiB", "--iters=100000"];
    let hosts = [("0", "a"), ("1", "b")].map(|(number, host)| rank(number, host, &long));
    for host in &hosts {
        // Each has a half of every result.
        eventually("both NICs have received", || {
            received(host.id()).iter().all(|&bytes| bytes > 6 << 20)
        });
        let bytes = received(host.id());
        let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
        assert!(bytes.len() == 2 && most - least < most / 2, "{bytes:?}");
    }
    for host in hosts {
        host.signal("KILL");
        host.output();
    }
}
