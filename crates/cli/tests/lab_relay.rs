//! Copies between hosts without a route between them, by way of a third one.

mod common;

use std::fs;
use std::process::Command;

use common::{Folder, PROGRAM, Running, bytes, skip};
use millstream_lab::{Family, Handle, Lab, LabError, Link, Plan};

/// The command at a host.
fn at(lab: &Handle, host: &str, words: &[&str]) -> Command {
    let mut command = lab.command(host, PROGRAM).unwrap();
    command.env_remove("MILLSTREAM_LOG").env_remove("RUST_LOG").args(words);
    command
}

fn address(lab: &Handle, host: &str, nic: usize) -> String {
    lab.host(host).unwrap().nics[nic].addresses[0].to_string()
}

/// A node at a host, and the name of its segment.
fn node(lab: &Handle, host: &str, words: &[&str], bind: &[&str]) -> (Running, String) {
    let mut command = at(lab, host, &["node", "--buffer", "64MiB"]);
    command.args(words).args(bind.iter().flat_map(|address| ["--bind", address]));
    let mut node = Running::start("node", &mut command);
    let segment = node.ready()["segment"].as_str().unwrap().to_owned();
    (node, segment)
}

#[test]
fn copies_go_by_way_of_a_third_host_where_there_is_no_route() {
    let link = Link { families: vec![Family::Ipv4], ..Link::default() };
    let plan =
        Plan::new().hosts(["a", "r", "b"]).links("a", "r", 1, &link).links("r", "b", 1, &link);
    let lab = match Lab::up(&plan) {
        Ok(lab) => lab,
        Err(LabError::Unavailable(reason)) => return skip(&reason),
        Err(error) => panic!("{error}"),
    };
    let (near, far) = (address(&lab, "r", 0), address(&lab, "r", 1));
    let own = address(&lab, "a", 0);
    let relays = ["--set", "tcp.relay=true"];
    let (relay, relay_name) = node(&lab, "r", &relays, &[&near, &far]);
    let folder = Folder::new();
    let (original, content) = (folder.file("original"), bytes(20 << 20, 7));
    fs::write(&original, &content).unwrap();
    let there = address(&lab, "b", 0);
    for protocol in ["rdma:soft", "tcp"] {
        let (_target, segment) = node(&lab, "b", &["--protocol", protocol], &[&there]);
        let copy = |words: &[&str], more: &[&str]| {
            let mut command = at(&lab, "a", words);
            command.args(["--segment", &segment, "--bind", &own]).args(more);
            Running::start(words[0], &mut command).output()
        };
        let by = ["--relay", &*relay_name];
        // There is no other way.
        let refused = copy(&["put", &original], &[]);
        assert_eq!(refused.code(), Some(1), "{}", refused.stderr);
        copy(&["put", "--verify", &original], &by).success();
        let back = folder.file(&format!("back-{protocol}"));
        copy(&["get", "--verify", "--length=20MiB", &back], &by).success();
        assert!(fs::read(back).unwrap() == content, "{protocol}");
        let bench = ["bench", "transfer", "--block-size=64KiB", "--duration=100ms"];
        copy(&bench, &["--require", "relay", by[0], by[1]]).success();
    }
    // The relay's own answer is told.
    let nobody = format!("{there}:9");
    let mut command = at(&lab, "a", &["put", &original, "--segment", &nobody, "--bind", &own]);
    let refused = Running::start("put", command.args(["--relay", &relay_name])).output();
    let sentence = refused.failure(1);
    assert!(sentence.contains(&format!("the relay {relay_name}")), "{sentence}");
    assert!(sentence.contains("no process listens there"), "{sentence}");
    drop(relay);
}
