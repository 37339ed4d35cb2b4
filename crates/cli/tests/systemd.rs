//! The daemons under systemd: their units, and what they tell the service manager.

mod common;

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{Folder, Running, address, is_installed, millstream, serve, skip};

/// For a daemon to be ready, on a busy machine too.
const BOUND: Duration = Duration::from_secs(20);
const PROGRAM: &str = "/usr/bin/millstream";
const DAEMONS: [&str; 4] = ["controller", "metadata-server", "node", "switch"];

/// Each with its text.
fn units() -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// The word after the program in `ExecStart`.
fn command(unit: &str) -> &str {
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    assert_eq!([words[0], words[2]], [PROGRAM, "$MILLSTREAM_OPTIONS"]);
    words[1]
}

/// What a daemon needs to start, with this controller.
fn options(daemon: &str, controller: &str) -> Vec<String> {
    let (bind, listen) = (format!("--bind={}", address()), format!("--listen={}:0", address()));
    match daemon {
        "switch" => vec![format!("--controller={controller}"), bind],
        "node" => vec!["--buffer=1MiB".to_owned(), bind],
        _ => vec![listen],
    }
}

#[test]
fn systemd_takes_the_units() {
    if !is_installed("systemd-analyze") {
        return skip("there is no systemd-analyze");
    }
    let scratch = Folder::new();
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]);
    for (path, text) in units() {
        // The program is to be there, which it is only where the package is installed.
        let text = text.replace(PROGRAM, env!("CARGO_BIN_EXE_millstream"));
        let copy = scratch.file(path.file_name().unwrap().to_str().unwrap());
        fs::write(&copy, text).unwrap();
        verify.arg(copy);
    }
    let output = verify.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.is_empty(), "{said}");
}

/// The options that a unit's first lines show.
#[test]
fn the_options_that_units_show_are_options() {
    for (path, text) in units() {
        let shown = text.lines().find_map(|line| line.split_once("MILLSTREAM_OPTIONS=\""));
        let options = shown.unwrap().1.trim_end_matches('"');
        let mut help = millstream();
        help.arg(command(&text)).args(options.split(' ')).arg("--help");
        let name = path.display().to_string();
        Running::start(&name, &mut help).output().success();
    }
}

#[test]
fn every_daemon_says_that_it_is_ready() {
    let (_daemons, controller) = serve();
    let scratch = Folder::new();
    let socket = scratch.file("notify");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(BOUND)).unwrap();
    let mut commands: Vec<String> =
        units().iter().map(|(_, text)| command(text).to_owned()).collect();
    commands.sort();
    assert_eq!(commands, DAEMONS);
    for command in commands {
        let mut daemon = millstream();
        daemon.arg(&command).args(options(&command, &controller)).env("NOTIFY_SOCKET", &socket);
        let mut daemon = Running::start(&command, &mut daemon);
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        assert_eq!(&message[..length], b"READY=1\n", "{command}");
        daemon.ready();
        daemon.signal("TERM");
        daemon.output().success();
    }
}

/// The manager may be gone, or have been somebody else's.
#[test]
fn a_manager_that_does_not_hear_is_no_failure() {
    let scratch = Folder::new();
    let mut daemon = millstream();
    daemon.args(["metadata-server", "--listen", &format!("{}:0", address())]);
    daemon.env("NOTIFY_SOCKET", scratch.file("nobody"));
    let mut daemon = Running::start("metadata-server", &mut daemon);
    daemon.ready();
    daemon.signal("TERM");
    let output = daemon.output().success();
    assert!(output.stderr.contains("NOTIFY_SOCKET"), "{}", output.stderr);
}

/// Each peer is a connection: as many as the system admits, and not the 1,024 that programs begin with.
#[test]
fn every_daemon_lets_itself_open_as_many_files_as_it_may() {
    if !is_installed("prlimit") {
        return skip("there is no prlimit");
    }
    let (_daemons, controller) = serve();
    for name in DAEMONS {
        let mut daemon = Command::new("prlimit");
        daemon.args(["--nofile=200:3000", env!("CARGO_BIN_EXE_millstream"), name]);
        let mut daemon = Running::start(name, daemon.args(options(name, &controller)));
        daemon.ready();
        let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.id())).unwrap();
        let open = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        assert_eq!(open.split_whitespace().nth(3), Some("3000"), "{name}: {open}");
    }
}
