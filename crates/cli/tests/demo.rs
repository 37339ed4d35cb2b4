//! `demo`: works, and leaves nothing behind however it ends.

mod common;

use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};

use common::{Folder, Running, eventually, is_installed, millstream, processes_of_group, skip};

/// Starts a demo in a process group of its own, with temporary files in `folder`.
fn demo(folder: &Folder, arguments: &[&str]) -> Running {
    let mut command = millstream();
    command.arg("demo").args(arguments).env("TMPDIR", folder.path()).process_group(0);
    Running::start("demo", &mut command)
}

fn is_empty(folder: &Folder) -> bool {
    fs::read_dir(folder.path()).unwrap().next().is_none()
}

#[test]
fn the_main_job_is_done() {
    let folder = Folder::new();
    let demo = demo(&folder, &["--file-size=32MiB", "--vector-size=1MiB", "--json"]);
    let group = demo.id();
    let report = demo.output().success().json();
    let checksums: Vec<&str> =
        report["crc32c"].as_array().unwrap().iter().map(|sum| sum.as_str().unwrap()).collect();
    assert!(checksums.iter().all(|&sum| sum.len() == 8 && sum == checksums[0]), "{report}");
    assert_eq!(report["elements_checked"], 8 << 18);
    assert_eq!(report["wrong"], 0);
    let processes = report["processes"].as_array().unwrap();
    let names: Vec<&str> = processes.iter().map(|row| row["process"].as_str().unwrap()).collect();
    let hosts = ["host 0", "host 1", "host 2", "host 3"];
    let expected = ["node", "put", "get", "controller", "switches"];
    // In WRITE mode, and then in SEND mode.
    assert_eq!(names, [&expected[..], &hosts, &hosts].concat());
    assert_eq!(processes_of_group(group), [0; 0]);
    assert!(is_empty(&folder));
}

#[test]
fn a_demo_for_people_ends_with_a_verdict() {
    let folder = Folder::new();
    let output = demo(&folder, &["--file-size=1MiB", "--vector-size=4"]).output().success();
    assert!(output.stdout.contains("the same"), "{}", output.stdout);
    assert!(output.stdout.contains("none wrong"), "{}", output.stdout);
}

#[test]
fn a_demo_on_a_terminal_says_what_it_is_doing() {
    if !is_installed("script") {
        return skip("there is no terminal without `script` (Debian package bsdutils)");
    }
    let folder = Folder::new();
    let command = format!("{} demo --file-size=1MiB --vector-size=4", common::PROGRAM);
    let mut terminal = std::process::Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &command, "/dev/null"]);
    let output = Running::start("script", terminal.env("TMPDIR", folder.path())).output().success();
    for step in ["making the file ...", "put ...", "get ...", "hosts sum their vectors ..."] {
        assert!(output.stdout.contains(step), "{step}: {:?}", output.stdout);
    }
}

#[test]
fn control_c_leaves_nothing_behind() {
    for signal in ["INT", "TERM"] {
        let folder = Folder::new();
        let demo = demo(&folder, &["--file-size=512MiB"]);
        let group = demo.id();
        eventually("the demo has children", || processes_of_group(group).len() > 1);
        demo.signal(signal);
        let output = demo.output();
        let expected = if signal == "INT" { 2 } else { 15 };
        assert_eq!(output.status.signal(), Some(expected), "{}", output.stderr);
        assert_eq!(processes_of_group(group), [0; 0]);
        assert!(is_empty(&folder));
    }
}

#[test]
fn children_die_with_a_demo_that_is_killed() {
    let folder = Folder::new();
    let demo = demo(&folder, &["--file-size=512MiB"]);
    let group = demo.id();
    eventually("the demo has children", || processes_of_group(group).len() > 1);
    demo.signal("KILL");
    demo.output();
    eventually("they are gone", || processes_of_group(group).is_empty());
}

#[test]
fn a_place_without_room_for_the_file_is_told() {
    let mut command = millstream();
    let output =
        Running::start("demo", command.arg("demo").env("TMPDIR", "/no/such/folder")).output();
    assert!(output.failure(1).contains("TMPDIR"), "{}", output.stderr);
}
