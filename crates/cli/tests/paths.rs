//! What takes the bytes of `node`, `put`, `get` and `bench transfer`, what they say of it, and `--require`.

mod common;

use std::fs;

use common::{Folder, Output, Running, millstream, run};
use serde_json::{Value, json};

/// A node with these protocols, and its ready line.
fn node(protocols: &str) -> (Running, Value) {
    let mut command = millstream();
    command.args(["node", "--protocol", protocols, "--buffer", "1MiB"]);
    let mut node = Running::start("node", &mut command);
    let ready = node.ready();
    (node, ready)
}

fn put(ready: &Value, file: &str, more: &[&str]) -> Output {
    let segment = ready["segment"].as_str().unwrap();
    run(&[&["put", "--segment", segment, "--json", file], more].concat())
}

#[test]
fn auto_takes_the_best_path_that_both_have() {
    let folder = Folder::new();
    let (file, copy) = (folder.file("file"), folder.file("copy"));
    fs::write(&file, "some bytes").unwrap();
    let another = "it is another process's";
    for (protocols, transports, chosen, reason_of_rdma) in [
        ("auto", json!(["local", "shm", "rdma", "tcp"]), "shm", Some("shm goes before it")),
        ("shm", json!(["local", "shm"]), "shm", Some("shm goes before it")),
        ("rdma:soft", json!(["local", "rdma"]), "rdma", None),
        ("tcp", json!(["local", "tcp"]), "tcp", Some("it speaks \"tcp\", not rdma")),
    ] {
        let (_node, ready) = node(protocols);
        assert_eq!(ready["transports"], transports, "{ready}");
        assert_eq!(ready["protocols"], json!([protocols]), "{ready}");
        let report = put(&ready, &file, &[]).success().json();
        assert_eq!(report["transport"], chosen, "{report}");
        let paths = report["paths"].as_array().unwrap();
        let local = json!({"transport": "local", "chosen": false, "reason": another});
        assert_eq!(paths[0], local, "{report}");
        assert_eq!(paths[2].get("reason").and_then(Value::as_str), reason_of_rdma, "{report}");
        let segment = ready["segment"].as_str().unwrap();
        let get = ["get", "--segment", segment, "--length=10", "--json", &copy];
        assert_eq!(run(&get).success().json()["transport"], chosen);
        assert_eq!(fs::read(&copy).unwrap(), b"some bytes");
        let bench = ["bench", "transfer", "--segment", segment, "--working-set=1MiB", "--json"];
        let row = ["--op=write", "--block-size=4KiB", "--duration=1ms"];
        let row = run(&[&bench[..], &row].concat()).success().json();
        assert_eq!((&row["transport"], &row["paths"]), (&json!(chosen), &report["paths"]));
    }
}

#[test]
fn a_path_that_is_required_is_taken_or_the_command_fails() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, "some bytes").unwrap();
    let (_both, both) = node("auto");
    for required in ["shm", "rdma"] {
        let report = put(&both, &file, &["--require", required]).success().json();
        assert_eq!(report["transport"], required, "{report}");
    }
    let (_node, ready) = node("rdma:soft");
    let segment = ready["segment"].as_str().unwrap();
    let expected = format!(
        "--require shm: not to segment {segment}: it does not share its memory (it would go by rdma)"
    );
    let refused = put(&ready, &file, &["--require=shm"]);
    assert!(refused.failure(1).contains(&expected), "{}", refused.stderr);
    for command in [&["get", "--length=1", &file][..], &["bench", "transfer"]] {
        let refused = run(&[command, &["--segment", segment, "--require=shm"]].concat());
        assert!(refused.failure(1).contains(&expected), "{}", refused.stderr);
    }
    let lacking = put(&ready, &file, &["--require=shm", "--protocol=rdma"]);
    let expected = "--require shm: --protocol does not have it (it would go by rdma)";
    assert!(lacking.failure(2).contains(expected), "{}", lacking.stderr);
    let unknown = put(&ready, &file, &["--require=pigeon"]);
    assert!(unknown.failure(2).contains("--require"), "{}", unknown.stderr);
    assert_eq!(fs::read(&file).unwrap(), b"some bytes");
}

/// Its processes are of this host and this user.
#[test]
fn a_benchmark_without_a_segment_measures_the_path_that_is_asked_for() {
    let more = ["--op=write", "--block-size=4KiB", "--working-set=1MiB", "--duration=1ms"];
    for (arguments, expected) in [
        (&[][..], "shm"),
        (&["--protocol=rdma:soft"], "rdma"),
        (&["--require=rdma"], "rdma"),
        (&["--protocol=local"], "local"),
    ] {
        let output = run(&[&["bench", "transfer"], arguments, &more].concat()).success();
        let header = output.stdout.lines().next().unwrap().to_owned();
        assert!(header.contains(&format!(" over {expected},")), "{header}");
    }
}

#[test]
fn the_log_says_what_was_chosen_and_why_not_another() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, "some bytes").unwrap();
    let (_node, ready) = node("rdma:soft");
    let output = put(&ready, &file, &["--verify", "-v"]).success();
    let told: Vec<_> = output.stderr.lines().filter(|it| it.contains("path chosen")).collect();
    assert_eq!(told.len(), 1, "{}", output.stderr);
    assert!(told[0].contains("rdma") && told[0].contains("it does not share its memory"));
}

#[test]
fn requests_are_of_a_class_and_for_an_intent() {
    let folder = Folder::new();
    let (file, policies) = (folder.file("file"), folder.file("policies.toml"));
    fs::write(&file, "some bytes").unwrap();
    let text = "[class.far]\ntransports = [\"rdma\"]\n[rule.backup]\nintent = \"backup\"\ntransports = [\"tcp\"]\n";
    fs::write(&policies, text).unwrap();
    let (_node, ready) = node("auto");
    let set = format!("transfer.policy_file={policies}");
    let by = |more: &[&str]| put(&ready, &file, &[&["--set", &set], more].concat());
    for (more, expected) in [
        (&["--priority=bulk", "--deadline=1m"][..], "shm"),
        (&["--class=far", "--policy=tent"], "rdma"),
        (&["--intent=backup"], "tcp"),
    ] {
        let report = by(more).success().json();
        assert_eq!(report["transport"], expected, "{report}");
    }
    let segment = ready["segment"].as_str().unwrap();
    let row = ["--op=write", "--block-size=4KiB", "--working-set=1MiB", "--duration=1ms", "--json"];
    let bench = ["bench", "transfer", "--segment", segment, "--set", &set, "--class=far"];
    let report = run(&[&bench[..], &row].concat()).success().json();
    assert_eq!(report["transport"], "rdma", "{report}");
    for (more, code, expected) in [
        (&["--class=near"][..], 2, "--class near: the policy file has far"),
        (&["--priority=high"], 2, "latency, normal, bulk"),
        (&["--deadline=soon"], 2, "is not a duration"),
        (&["--intent=back-up"], 1, "which has rules for backup"),
    ] {
        let refused = by(more);
        assert!(refused.failure(code).contains(expected), "{}", refused.stderr);
    }
    let refused = put(&ready, &file, &["--class=far"]);
    assert!(refused.failure(2).contains("there is no policy file"), "{}", refused.stderr);
}
