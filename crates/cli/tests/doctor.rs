//! `doctor`: of this machine, and of a tree of files.

mod common;

use std::fs;

use common::{Folder, run};
use serde_json::Value;

#[test]
fn this_machine_is_looked_at() {
    let output = run(&["doctor", "--json"]);
    let report = output.json();
    let checks = report["checks"].as_array().unwrap();
    for check in checks {
        let state = check["state"].as_str().unwrap();
        let changes = check["cost"].is_string() && check["remedy"].is_string();
        assert_eq!(changes, state != "ok", "{check}");
    }
    // What blocks this machine, if anything, is not for this test to say.
    let blocked = checks.iter().any(|check| check["state"] == "blocked");
    assert_eq!(output.code(), Some(i32::from(blocked)));
    let named = |name: &str| checks.iter().any(|check| check["name"] == name);
    for name in ["UDP sockets", "shared addresses", "receive buffer", "locked memory", "io_uring"] {
        assert!(named(name), "{name}");
    }
    let text = run(&["doctor"]).stdout;
    assert!(text.contains("UDP sockets: "), "{text}");
}

#[test]
fn what_is_blocked_ends_with_1_and_what_is_not_with_0() {
    let tree = Folder::new();
    let root = tree.path().to_str().unwrap();
    let output = run(&["doctor", "--root", root]).success();
    assert!(!output.stdout.contains("blocked"), "{}", output.stdout);

    let net = tree.path().join("proc/self/net");
    fs::create_dir_all(&net).unwrap();
    let udp =
        "head\n 1: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 1\n";
    fs::write(net.join("udp"), udp).unwrap();
    let output = run(&["doctor", "--root", root]);
    assert_eq!(output.failure(1), "1 of these stand in the way");
    assert!(output.stdout.contains("blocked   UDP port 4791: "), "{}", output.stdout);
    assert!(
        output.stdout.contains("\n          try: ss -ulpn 'sport = :4791'"),
        "{}",
        output.stdout
    );
    let output = run(&["doctor", "--json", "--root", root]);
    assert_eq!(output.code(), Some(1));
    let report: Value = output.json();
    assert_eq!(report["state"], "blocked");
}
