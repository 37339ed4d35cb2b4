//! Settings: `config`, and their effect on other commands.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;

use common::{Folder, Output, Running, address, millstream, run};
use serde_json::{Value, json};

/// The command, with nothing of the tester's own settings.
fn with(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = millstream();
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("MC_")) {
        command.env_remove(name);
    }
    command.env_remove("MILLSTREAM_CONFIG").envs(variables.iter().copied()).args(arguments);
    Running::start("millstream", &mut command).output()
}

fn setting<'a>(report: &'a Value, name: &str) -> &'a Value {
    let settings = report["settings"].as_array().unwrap();
    settings.iter().find(|setting| setting["name"] == name).unwrap()
}

#[test]
fn each_setting_is_shown_with_its_origin() {
    let folder = Folder::new();
    let (file, other) = (folder.file("a.toml"), folder.file("b.toml"));
    fs::write(&file, "# ours\nslice_size = \"8KiB\"\n[rdma]\nretry_count = 5\n").unwrap();
    fs::write(&other, "slice_size = \"16KiB\"\n").unwrap();
    let variables = [("MC_RETRY_CNT", "6"), ("MC_USE_IPV6", "1"), ("MILLSTREAM_CONFIG", &file)];
    let arguments = ["config", "--json", "--set", "soft.busy_poll=50us"];
    let output = with(&variables, &arguments).success();
    assert_eq!(output.stderr, "note: MC_USE_IPV6 is ignored: addresses say what they are\n");
    let report = output.json();
    assert_eq!(report["notes"], json!(["MC_USE_IPV6 is ignored: addresses say what they are"]));
    let slice_size = setting(&report, "slice_size");
    assert_eq!((&slice_size["value"], &slice_size["unit"]), (&json!(8192), &json!("bytes")));
    assert_eq!(slice_size["text"], "8KiB");
    assert_eq!(slice_size["origin"], json!({"kind": "file", "path": file, "line": 2}));
    let retry_count = setting(&report, "rdma.retry_count");
    assert_eq!(retry_count["value"], 6);
    assert_eq!(retry_count["origin"], json!({"kind": "variable", "name": "MC_RETRY_CNT"}));
    let busy_poll = setting(&report, "soft.busy_poll");
    assert_eq!((&busy_poll["value"], &busy_poll["unit"]), (&json!(50), &json!("us")));
    assert_eq!(busy_poll["origin"], json!({"kind": "argument"}));
    assert_eq!(setting(&report, "fragment_ratio")["origin"], json!({"kind": "default"}));
    assert_eq!(setting(&report, "handshake.host")["value"], Value::Null);

    // The argument names another file.
    let text = with(&variables, &["config", "--config", &other]).success().stdout;
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap();
    let words = |name: &str| line(name).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words("slice_size "), ["slice_size", "16KiB", &format!("{other}:1")]);
    assert_eq!(words("handshake.host "), ["handshake.host", "-", "default"]);
}

#[test]
fn a_file_whose_name_is_not_utf_8_is_told_in_json() {
    let folder = Folder::new();
    let file = folder.path().join(OsStr::from_bytes(b"\xff.toml"));
    fs::write(&file, "slice_size = \"8KiB\"\n").unwrap();
    let mut command = millstream();
    command.args(["config", "--json", "--config"]).arg(&file).env_remove("MC_SLICE_SIZE");
    let report = Running::start("config", &mut command).output().success().json();
    let origin = &setting(&report, "slice_size")["origin"];
    assert_eq!((&origin["kind"], &origin["line"]), (&json!("file"), &json!(1)));
    assert!(origin["path"].as_str().unwrap().ends_with("/\u{fffd}.toml"), "{origin}");
}

#[test]
fn what_is_wrong_is_told_by_every_command_that_has_settings() {
    let folder = Folder::new();
    let file = folder.file("bad.toml");
    fs::write(&file, "\n\nslice_sice = 1\n").unwrap();
    let commands: [&[&str]; 4] = [
        &["config"],
        &["node", "--buffer=1KiB"],
        &["put", "--segment=127.0.0.1:1", "/dev/null"],
        &["bench", "transfer", "--duration=1ms"],
    ];
    for command in commands {
        let output = with(&[("MC_SLICE_SIZE", "1")], command);
        let expected = "MC_SLICE_SIZE=1: slice_size is a size from 1KiB to 64MiB";
        assert_eq!(output.failure(1), expected, "{command:?}");
        let output = with(&[("MILLSTREAM_CONFIG", &file)], command);
        let expected =
            format!("{file}:3: there is no setting \"slice_sice\": is slice_size meant?");
        assert_eq!(output.failure(1), expected, "{command:?}");
        let arguments = [command, &["--set", "rdma.retry_count=x"]].concat();
        let expected =
            "--set: rdma.retry_count=x: rdma.retry_count is a whole number from 0 to 127";
        assert_eq!(with(&[], &arguments).failure(2), expected);
    }
    let missing = folder.file("missing.toml");
    let output = with(&[], &["config", "--json", "--config", &missing]);
    assert!(output.failure(1).starts_with(&format!("cannot read {missing}: No such file")));
    assert_eq!(output.json()["error"]["exit_status"], 1);
}

#[test]
fn a_node_has_the_port_and_the_host_that_settings_say() {
    let bind = address().to_string();
    // A range of one, which is free now; others may take it.
    let port =
        std::net::TcpListener::bind((bind.as_str(), 0)).unwrap().local_addr().unwrap().port();
    let port = port.to_string();
    let mut command = millstream();
    command.args(["node", "--buffer=4KiB", "--bind", &bind, "--set", "handshake.host=localhost"]);
    command.env("MC_MIN_RPC_PORT", &port).env("MC_MAX_RPC_PORT", &port);
    let mut node = Running::start("node", &mut command);
    assert_eq!(node.ready()["segment"], format!("localhost:{port}"));

    // And put finds it by its host alone.
    let folder = Folder::new();
    let file = folder.file("f");
    fs::write(&file, "hello").unwrap();
    let put = ["put", "--segment", &bind, &file];
    let output = with(&[("MC_HANDSHAKE_PORT", &port)], &put);
    output.success();
    assert!(with(&[], &put).failure(2).contains("has no port"));
}

#[test]
fn the_level_of_logs_is_a_setting_below_the_others() {
    let logs = |variables: &[(&str, &str)]| {
        let address = address().to_string();
        let mut command = millstream();
        command.args(["node", "--buffer=4KiB", "--bind", &address]);
        let mut node = Running::start("node", command.envs(variables.iter().copied()));
        node.ready();
        node.signal("TERM");
        node.output().success().stderr.contains(" INFO ")
    };
    assert!(!logs(&[]));
    assert!(logs(&[("MC_LOG_LEVEL", "INFO")]));
    assert!(logs(&[("MC_TRACE", "1")]));
    assert!(!logs(&[("MC_LOG_LEVEL", "INFO"), ("RUST_LOG", "error")]));
}

#[test]
fn a_node_that_is_started_for_a_measurement_has_the_same_settings() {
    let arguments = [
        "bench",
        "transfer",
        "--duration=1ms",
        "--block-size=4KiB",
        "--working-set=1MiB",
        "--protocol=rdma",
        "--json",
    ];
    // A soft device has one partition: refused at both ends.
    let driver = ["--set", "rdma.provider=soft", "--set", "rdma.partition_key_index=1"];
    let error = run(&[&arguments[..], &driver].concat());
    assert!(error.failure(1).contains("partition"), "{}", error.stderr);
    run(&[&arguments[..], &["--set", "rdma.max_path_mtu=256"]].concat()).success();
}

#[test]
fn the_reference_is_that_of_this_version() {
    let kept = include_str!("../../../docs/reference/configuration.md");
    let written = run(&["config", "--reference"]).success().stdout;
    assert!(written == kept, "it is out of date: run cargo xtask config-docs");
}
