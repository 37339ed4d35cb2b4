//! What `node` does until it is ready.

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use common::{Folder, Running, address, bytes, millstream, node, run, transfer};
use millstream_lab::RdmaLibrary;
use serde_json::json;

/// The first bytes of a segment.
fn get(segment: &str, length: usize) -> Vec<u8> {
    let folder = Folder::new();
    let copy = folder.file("copy");
    let length = format!("--length={length}");
    transfer(&["get"], segment, &[&length, &copy]).success();
    fs::read(copy).unwrap()
}

fn pipe(folder: &Folder) -> String {
    let pipe = folder.file("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    pipe
}

#[test]
fn it_is_called_as_its_machine_is() {
    let mut command = millstream();
    let mut node = Running::start(
        "node",
        command.args(["node", "--buffer=1", "--protocol=rdma:soft", "--bind", &address()]),
    );
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(node.ready()["name"], name.trim());
}

#[test]
fn what_has_no_length_is_loaded_to_its_end() {
    let folder = Folder::new();
    let content = bytes(3_000_000, 1);
    let pipe = pipe(&folder);
    let writer = std::thread::spawn({
        let (pipe, content) = (pipe.clone(), content.clone());
        move || fs::write(pipe, content)
    });
    let (_node, segment) = node("4000000", &["--file", &pipe]);
    writer.join().unwrap().unwrap();
    assert!(get(&segment, 3_000_000) == content);

    // Its length is 0, as the file system has it.
    let version = fs::read("/proc/version").unwrap();
    let (_node, segment) = node("4096", &["--file=/proc/version"]);
    assert_eq!(get(&segment, version.len()), version);

    let mut command = millstream();
    command.args(["node", "--buffer=5", "--file=-", "--bind", &address()]).stdin(Stdio::piped());
    let mut node = Running::start("node", &mut command);
    node.stdin().write_all(b"12345").unwrap();
    let segment = node.ready()["segment"].as_str().unwrap().to_owned();
    assert_eq!(get(&segment, 5), b"12345");
}

#[test]
fn a_stream_longer_than_the_buffer_is_refused() {
    let mut command = millstream();
    command.args(["node", "--buffer=5", "--file=-", "--bind", &address()]).stdin(Stdio::piped());
    let mut node = Running::start("node", &mut command);
    node.stdin().write_all(b"123456").unwrap();
    let output = node.output();
    let sentence = output.failure(1);
    assert_eq!(sentence, "cannot load -: it has more bytes than the 5 of --buffer");
}

#[test]
fn loading_that_takes_long_is_told_and_can_be_stopped() {
    let folder = Folder::new();
    let pipe = pipe(&folder);
    let start = || {
        let arguments =
            ["node", "--buffer=5", "--file", &pipe, "--bind", &address()].map(str::to_owned);
        Running::start("node", millstream().args(arguments))
    };
    let mut slow = start();
    let mut writer = fs::File::options().write(true).open(&pipe).unwrap();
    assert_eq!(slow.error_line(), format!("note: loading {pipe}"));
    writer.write_all(b"12345").unwrap();
    drop(writer);
    slow.ready();

    let stopped = start();
    let _writer = fs::File::options().write(true).open(&pipe).unwrap();
    stopped.signal("TERM");
    let output = stopped.output();
    assert_eq!(output.status.signal(), Some(libc::SIGTERM), "{}", output.stderr);
}

#[test]
fn a_fifo_without_a_writer_is_told() {
    let folder = Folder::new();
    let pipe = pipe(&folder);
    let arguments =
        ["node", "--buffer=5", "--file", &pipe, "--bind", &address()].map(str::to_owned);
    let mut node = Running::start("node", millstream().args(arguments));
    let expected = format!("note: waiting for a process that opens the FIFO {pipe} to write");
    assert_eq!(node.error_line(), expected);
    fs::write(&pipe, b"12345").unwrap();
    node.ready();
}

#[test]
fn a_closed_stdin_is_a_failure() {
    let mut shell = Command::new("sh");
    let script = "exec \"$0\" node --buffer=5 --file=- --bind \"$1\" <&-";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_millstream"), &address()]);
    // Were it ready, it would serve zeros, and this would wait in vain.
    let output = Running::start("node", &mut shell).output();
    assert_eq!(output.failure(1), "cannot read standard input: it is closed");
}

#[test]
fn an_address_in_use_is_waited_for() {
    let address = address();
    let first = std::net::UdpSocket::bind((address.as_str(), 4791)).unwrap();
    let arguments = ["node", "--buffer=1", "--protocol=rdma:soft", "--bind", &address];
    let busy = run(&arguments);
    assert!(busy.failure(1).contains("UDP port 4791"), "{}", busy.stderr);
    let arguments = [&arguments[..], &["--wait=60s"]].concat();
    let mut second = Running::start("node", millstream().args(&arguments));
    let note = second.error_line();
    assert!(note.starts_with("note: waiting up to ") && note.contains(&address), "{note}");
    drop(first);
    assert!(second.ready()["segment"].as_str().unwrap().starts_with(&address));
    // Who shares it waits for nobody.
    let mut third = Running::start("node", millstream().args(&arguments[..arguments.len() - 1]));
    assert!(third.ready()["segment"].as_str().unwrap().starts_with(&address));
}

#[test]
fn addresses_that_cannot_be_are_usage_errors() {
    let twice = address();
    for (command, binds, expected) in [
        ("node --buffer=1", &["0.0.0.0"][..], "no address of one interface"),
        ("node --buffer=1", &["::"], "no address of one interface"),
        ("node --buffer=1", &["224.0.0.1"], "no address of one interface"),
        ("node --buffer=1", &[&twice, &twice], "given twice"),
        ("switch --controller=127.0.0.1:1 --name=s", &["0.0.0.0"], "no address of one interface"),
        ("rdma pingpong", &["0.0.0.0"], "no address of one interface"),
        ("rdma write-bw", &["::"], "no address of one interface"),
        ("rdma write-bw", &[&twice, &twice], "this command has one device"),
    ] {
        let mut arguments: Vec<&str> = command.split(' ').collect();
        binds.iter().for_each(|bind| arguments.extend(["--bind", bind]));
        let output = run(&arguments);
        let sentence = output.failure(2);
        assert!(sentence.contains(expected), "{command}: {sentence}");
        assert!(sentence.contains("--bind"), "{command}: {sentence}");
    }
}

/// It is another file there, so that bytes say who has read and written it.
#[test]
fn files_are_mapped_at_servers_which_open_them_themselves() {
    let folder = Folder::new();
    let (here, there, copy) = (folder.file("here"), folder.file("there"), folder.file("copy"));
    fs::write(&here, bytes(100_000, 1)).unwrap();
    fs::write(&there, bytes(100_000, 2)).unwrap();
    let mut command = millstream();
    command.args(["node", "--buffer=1", "--protocol=nvmeof", "--bind", &address()]);
    command.args(["--offer-file", &here, "--map-file", &format!("{here}@shop={there}")]);
    let mut node = Running::start("node", &mut command);
    let segment = node.ready()["files"][0].as_str().unwrap().to_owned();
    let folders = format!(
        "--set=nvmeof.mapped_folders={}",
        fs::canonicalize(folder.path()).unwrap().display()
    );
    let get = |more: &[&str]| {
        run(&[&["get", "--segment", &segment, "--length=100000", &copy], more].concat()).success();
        fs::read(&copy).unwrap()
    };
    let is_there = ["--set=nvmeof.server_name=shop", &folders];
    assert!(get(&is_there) == bytes(100_000, 2));
    // Any path can be said, and another server has the file elsewhere.
    for is_not_there in [&[][..], &is_there[..1], &is_there[1..]] {
        assert!(get(is_not_there) == bytes(100_000, 1));
    }
    fs::write(&copy, bytes(5000, 3)).unwrap();
    run(&[&["put", "--segment", &segment, "--offset=777", &copy], &is_there[..]].concat())
        .success();
    let mut expected = bytes(100_000, 2);
    expected[777..5777].copy_from_slice(&bytes(5000, 3));
    assert!(fs::read(&there).unwrap() == expected);
    assert!(fs::read(&here).unwrap() == bytes(100_000, 1));
    let bad = ["node", "--buffer=1", "--offer-file", &here, "--map-file=elsewhere@shop=/x"];
    let expected = "--map-file \"elsewhere@shop=/x\": it begins with no path of --offer-file, as given there, and @";
    assert_eq!(run(&bad).failure(2), expected);
}

/// Each as a segment of its own, whose offsets are the file's.
#[test]
fn files_are_offered_for_reading_and_writing() {
    let folder = Folder::new();
    let (writable, readable) = (folder.file("writable"), folder.file("readable"));
    fs::write(&writable, vec![0; 3_000_000]).unwrap();
    fs::write(&readable, bytes(100_000, 2)).unwrap();
    let mut command = millstream();
    command.args(["node", "--buffer=1", "--protocol=rdma:soft", "--bind", &address()]);
    command.args(["--offer-file", &writable, "--offer-file-read-only", &readable]);
    let mut node = Running::start("node", &mut command);
    let ready = node.ready();
    let host = ready["segment"].as_str().unwrap();
    let segments = ["readable", "writable"].map(|name| format!("nvmeof/{host}/{name}"));
    assert_eq!(ready["files"], serde_json::json!(segments));

    let (source, copy) = (folder.file("source"), folder.file("copy"));
    fs::write(&source, bytes(2_000_001, 3)).unwrap();
    let put = |segment: &str, more: &[&str]| {
        let all = ["put", "--segment", segment, "--offset=12345", "--verify", "--json", &source];
        run(&[&all, more].concat())
    };
    let report = put(&segments[1], &["--durable"]).success().json();
    assert_eq!((&report["verified"], &report["durable"]), (&true.into(), &true.into()));
    let mut expected = vec![0; 3_000_000];
    expected[12345..2_012_346].copy_from_slice(&bytes(2_000_001, 3));
    assert!(fs::read(&writable).unwrap() == expected);
    let get = ["get", "--segment", &segments[0], "--protocol=nvmeof", "--length=100000", &copy];
    run(&get).success();
    assert!(fs::read(&copy).unwrap() == bytes(100_000, 2));
    let refused = put(&segments[0], &[]);
    assert!(!refused.status.success());
    assert!(refused.stderr.contains("do not"), "{}", refused.stderr);
    // Memory is not durable, whatever leads there.
    fs::write(&source, [1]).unwrap();
    let refused = run(&["put", "--segment", host, "--durable", "--retry=1", &source]);
    assert!(!refused.status.success());
    let reason = "it is to be durable, and nothing that goes to segment";
    assert!(refused.stderr.contains(reason), "{}", refused.stderr);
    assert!(!refused.stderr.contains("trying again"), "{}", refused.stderr);
    assert_eq!(
        run(&["put", "--segment", host, "--json", &source]).success().json()["durable"],
        false
    );
    let bad = run(&["get", "--segment=nvmeof/x", &copy]);
    assert_eq!(
        bad.failure(2),
        "--segment \"nvmeof/x\" is no name of a file: the form is nvmeof/host:port/file"
    );
}

/// Those of the system, and names of which some are of no device: with `auto` and without any that works there is no rdma.
#[test]
fn it_has_those_devices_that_work_of_all_or_of_those_that_are_named() {
    let folder = Folder::new();
    let library = RdmaLibrary::compile(folder.path(), &["mlx5_0", "mlx5_1"]).unwrap();
    let soft = format!("soft-{}", address());
    for (protocol, named, tried, devices) in [
        ("auto", "all", vec!["mlx5_0", "mlx5_1"], Some(vec![])),
        ("auto", "missing,mlx5_1", vec!["mlx5_1"], Some(vec![])),
        ("rdma", &format!("missing,mlx5_1,{soft}"), vec!["mlx5_1"], Some(vec![&soft])),
        ("rdma", "all", vec!["mlx5_0", "mlx5_1"], None),
        ("rdma", "missing", vec![], None),
    ] {
        let mut command = millstream();
        let setting = format!("rdma.devices={named}");
        command.args(["node", "--buffer=1", "--protocol", protocol, "--set", &setting]);
        command.args(["--bind", &address()]);
        library.put_before(&mut command);
        let mut node = Running::start("node", &mut command);
        if let Some(devices) = &devices {
            let ready = node.ready();
            assert_eq!(ready["devices"], json!(devices), "{protocol} {named}");
            let transports = ready["transports"].as_array().unwrap();
            assert_eq!(transports.contains(&json!("rdma")), !devices.is_empty());
            node.signal("TERM");
        }
        let output = node.output();
        assert_eq!(RdmaLibrary::tried(&output.stderr), tried, "{protocol} {named}");
        assert_eq!(output.status.success(), devices.is_some(), "{}", output.stderr);
    }
}
