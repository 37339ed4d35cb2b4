//! `put` and `get` lose nothing, whatever they read and write.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output as Bytes, Stdio};
use std::thread;

use common::{Folder, Running, bytes, eventually, millstream, node, run, towards, transfer};

/// Runs a command that takes and gives bytes.
fn pipe(command: &str, segment: &str, more: &[&str], input: &[u8]) -> Bytes {
    let mut process = millstream();
    process.arg(command).args(towards(segment)).args(more);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = process.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    thread::scope(|scope| {
        // It need not read all of it.
        scope.spawn(move || stdin.write_all(input));
        child.wait_with_output().unwrap()
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn make_fifo(path: &str) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// What the segment holds at its start.
fn held(segment: &str, length: usize) -> Vec<u8> {
    let output = pipe("get", segment, &[&format!("--length={length}"), "-"], &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    output.stdout
}

#[test]
fn bytes_go_through_pipes() {
    let (_node, segment) = node("32MiB", &[]);
    for (length, said) in [(0, "0 bytes"), (1, "1 byte"), (20_000_003, "20000003 bytes")] {
        let content = bytes(length, 3);
        let put = pipe("put", &segment, &["-"], &content);
        assert!(put.status.success(), "{}", text(&put.stderr));
        assert!(text(&put.stdout).starts_with(&format!("-: {said} into")));
        let get = pipe("get", &segment, &[&format!("--length={length}"), "-"], &[]);
        assert!(get.stdout == content, "{length} bytes, but other ones");
        assert!(text(&get.stderr).starts_with(&format!("-: {said} out of")));
    }
    // What is said is on standard error in JSON, too, and names the file.
    let get = pipe("get", &segment, &["--length=9", "--json", "-"], &[]);
    assert_eq!(get.stdout.len(), 9);
    let report: serde_json::Value = serde_json::from_slice(&get.stderr).unwrap();
    assert_eq!((&report["file"], &report["bytes"]), (&"-".into(), &9.into()));
    // So is what fails, as early as it may be.
    let wrong = ["--json", "--segment=nonsense"];
    for more in [&["-"][..], &["/dev/stdout"], &["--nonsense", "-"]] {
        let get = millstream().arg("get").args(wrong).args(more).output().unwrap();
        assert_eq!((get.status.code(), text(&get.stdout)), (Some(2), String::new()));
        let said = text(&get.stderr);
        let failure: serde_json::Value =
            serde_json::from_str(said.lines().last().unwrap()).unwrap();
        assert_eq!(failure["error"]["exit_status"], 2);
    }
    // Standard output by another name.
    let get = pipe("get", &segment, &["--length=9", "/dev/stdout"], &[]);
    assert_eq!(get.stdout.len(), 9);
}

#[test]
fn what_has_no_size_is_read_to_its_end() {
    let folder = Folder::new();
    let (_node, segment) = node("8MiB", &[]);
    let content = bytes(5_000_001, 5);
    let put = pipe("put", &segment, &["/dev/stdin", "--json"], &content);
    let report: serde_json::Value = serde_json::from_slice(&put.stdout).unwrap();
    assert_eq!((&report["file"], &report["bytes"]), (&"/dev/stdin".into(), &5_000_001.into()));
    assert!(held(&segment, content.len()) == content);

    let fifo = folder.file("fifo");
    make_fifo(&fifo);
    let content = bytes(3_000_001, 6);
    thread::scope(|scope| {
        scope.spawn(|| fs::write(&fifo, &content).unwrap());
        transfer(&["put"], &segment, &[&fifo]).success();
    });
    assert!(held(&segment, content.len()) == content);

    // One that says 0 bytes, and one that says more than it has.
    for path in ["/proc/version", "/sys/class/net/lo/mtu"] {
        let content = fs::read(path).unwrap();
        let put = transfer(&["put"], &segment, &[path, "--json"]).success().json();
        assert_eq!(put["bytes"], content.len());
        assert_eq!(held(&segment, content.len()), content);
    }
}

#[test]
fn what_does_not_end_fills_the_buffer_and_fails() {
    let (_node, segment) = node("5000000", &[]);
    let put = transfer(&["put"], &segment, &["--offset=1000000", "/dev/zero"]);
    let sentence = put.failure(1);
    assert!(sentence.contains("full") && sentence.contains("4000000 bytes"), "{sentence}");
    transfer(&["put"], &segment, &["--length=5000000", "/dev/zero"]).success();
    let put = pipe("put", &segment, &["-"], &bytes(5_000_001, 1));
    assert_eq!(put.status.code(), Some(1));
    // What fits exactly is no failure.
    let content = bytes(5_000_000, 1);
    assert!(pipe("put", &segment, &["-"], &content).status.success());
    assert!(held(&segment, content.len()) == content);
    // And less than was asked for is one.
    let put = pipe("put", &segment, &["--length=10", "-"], b"123456789");
    assert!(text(&put.stderr).contains("after 9 of the 10 bytes"), "{}", text(&put.stderr));
    assert_eq!(put.status.code(), Some(1));
}

/// Runs `put` of a file that is changed after it was opened and before most of it is read: its node
/// is not there yet.
fn put_of_what_changes(change: impl FnOnce(&File)) -> (common::Output, Vec<u8>) {
    let folder = Folder::new();
    let path = folder.file("file");
    fs::write(&path, bytes(32 << 20, 8)).unwrap();
    let (node, segment) = node("64MiB", &[]);
    node.signal("STOP");
    let mut command = millstream();
    command.arg("put").args(towards(&segment)).args(["--wait=60s", &path]);
    let put = Running::start("put", &mut command);
    // Everything that is read ahead is read.
    let opened = || {
        let entries = fs::read_dir(format!("/proc/{}/fd", put.id()));
        let mut entries = entries.into_iter().flatten().flatten();
        entries.any(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == &*path))
    };
    eventually("the file is open", opened);
    change(&OpenOptions::new().append(true).open(&path).unwrap());
    node.signal("CONT");
    let output = put.output();
    (output, held(&segment, 32 << 20))
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_a_failure() {
    let (output, _) = put_of_what_changes(|file| file.set_len(20 << 20).unwrap());
    assert_eq!(output.code(), Some(1), "{}", output.stderr);
    assert!(output.stderr.contains("file became shorter while it was read"), "{}", output.stderr);
    assert!(output.stderr.contains("ended after 20971520"), "{}", output.stderr);
}

#[test]
fn a_file_that_grows_while_it_is_read_is_copied_as_long_as_it_was() {
    let (output, held) = put_of_what_changes(|mut file| file.write_all(b"more").unwrap());
    assert!(output.success().stdout.contains("33554432 bytes"));
    assert!(held == bytes(32 << 20, 8));
}

#[test]
fn a_fifo_without_a_peer_is_not_waited_for_for_ever() {
    let folder = Folder::new();
    let fifo = folder.file("fifo");
    make_fifo(&fifo);
    let (_node, segment) = node("1KiB", &[]);
    let put = transfer(&["put"], &segment, &["--timeout=300ms", &fifo]);
    assert!(put.failure(1).contains("opens the FIFO"), "{}", put.stderr);
    let get = transfer(&["get"], &segment, &["--timeout=300ms", &fifo]);
    assert!(get.failure(1).contains(&fifo), "{}", get.stderr);
    // Nor is one whose other end does nothing.
    let _idle = OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    let put = transfer(&["put"], &segment, &["--timeout=300ms", &fifo]);
    assert!(put.failure(1).contains("to give bytes"), "{}", put.stderr);
}

#[test]
fn streams_that_are_full_or_closed_are_failures() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, bytes(100_000, 4)).unwrap();
    let (_node, segment) = node("1MiB", &[]);
    let shell = |line: &str, more: &str| {
        let line = format!("\"$@\" {more} {line}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &line, "sh", env!("CARGO_BIN_EXE_millstream")]);
        shell
    };
    for (command, more, redirection, expected) in [
        ("put", &*file, ">/dev/full", "No space left"),
        ("put", "--json", &*format!("{file} >/dev/full"), "No space left"),
        ("get", "-", ">/dev/full", "No space left"),
        ("get", "/dev/full", "", "after 0 of 1048576 bytes: cannot write /dev/full"),
        ("get", "-", ">&-", "standard output: it is closed"),
        ("put", "-", "<&-", "standard input: it is closed"),
        ("get", "-", "| head -c 1 >/dev/null", "Broken pipe"),
    ] {
        let mut process = shell(redirection, more);
        process.arg(command).args(towards(&segment)).stdin(Stdio::null());
        let output = process.output().unwrap();
        let said = text(&output.stderr);
        assert!(said.contains(expected), "{command} {more} {redirection}: {said:?}");
        if !redirection.starts_with('|') {
            assert_eq!(output.status.code(), Some(1), "{command} {more} {redirection}");
        }
    }
    // A full standard error takes no words, and changes nothing else.
    for (line, code) in [("- 2>/dev/full >/dev/null", 0), ("/dev/full 2>/dev/full", 1)] {
        let mut process = shell(line, "");
        process.arg("get").args(towards(&segment));
        assert_eq!(process.output().unwrap().status.code(), Some(code), "{line}");
    }
}

#[test]
fn what_cannot_be_copied_is_refused() {
    let folder = Folder::new();
    let file = folder.file("file");
    fs::write(&file, "x").unwrap();
    let (_node, segment) = node("1KiB", &[]);
    let (two_63, two_64) = ("9223372036854775808", "18446744073709551616");
    for number in [two_63, two_64, "-1", "12XB", "0x10", "1.5B", ""] {
        for flag in ["--offset", "--length"] {
            for command in ["put", "get"] {
                let output = transfer(&[command], &segment, &[&format!("{flag}={number}"), &file]);
                assert_eq!(output.code(), Some(2), "{command} {flag}={number}: {}", output.stderr);
            }
        }
    }
    let directory = folder.path().to_str().unwrap();
    for (command, path) in
        [("put", directory), ("get", directory), ("get", &*folder.file("new/")), ("get", "/dev/")]
    {
        let output = transfer(&[command], &segment, &[path]);
        assert!(output.failure(2).contains("is a directory"), "{command} {path}");
    }
    for segment in ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x", "::1", ":1"] {
        let output = transfer(&["put"], segment, &[&file]);
        assert!(output.failure(2).contains("--segment"), "{}", output.stderr);
    }
    assert_eq!(fs::read(&file).unwrap(), b"x");
}

#[test]
fn names_cannot_write_to_the_terminal() {
    let folder = Folder::new();
    let (_node, segment) = node("1KiB", &[]);
    for name in [&b"\x1b[31mred\nmillstream: lie"[..], b"caf\xe9"] {
        let path = folder.path().join(std::ffi::OsStr::from_bytes(name));
        let start = |command: &str| {
            let mut process = millstream();
            process.arg(command).args(towards(&segment)).arg(&path);
            Running::start(command, &mut process).output()
        };
        let missing = start("put");
        assert_eq!(missing.failure(1).matches('\x1b').count(), 0);
        assert_eq!(start("get").success().stdout.matches(['\x1b', '\u{fffd}']).count(), 0);
        assert_eq!(fs::read(&path).unwrap().len(), 1024);
        start("put").success();
    }
}

#[test]
fn both_ends_are_compared() {
    let folder = Folder::new();
    let (original, copy) = (folder.file("original"), folder.file("copy"));
    fs::write(&original, bytes(10_000_000, 2)).unwrap();
    let (_node, segment) = node("20MiB", &[]);
    let put = transfer(&["put"], &segment, &["--verify", "--json", &original]).success().json();
    assert_eq!(put["verified"], true);
    let get = |to| pipe("get", &segment, &["--verify", "--length=10000000", to], &[]);
    assert!(text(&get(&copy).stdout).contains("the same at both ends"));
    assert!(text(&get("-").stderr).contains("the same at both ends"));
    // Another put changes what this one has written, before all of it is.
    let fifo = folder.file("fifo");
    make_fifo(&fifo);
    let mut command = millstream();
    command.arg("put").args(towards(&segment)).args(["--verify", &fifo]);
    let first = Running::start("put", &mut command);
    let mut writer = OpenOptions::new().write(true).open(&fifo).unwrap();
    let content = bytes(3 << 20, 9);
    writer.write_all(&content).unwrap();
    eventually("the first chunk is written", || held(&segment, 2 << 20) == content[..2 << 20]);
    pipe("put", &segment, &["-"], b"x");
    drop(writer);
    let sentence = first.output();
    let sentence = sentence.failure(1);
    assert!(sentence.contains("does not hold what was written"), "{sentence}");
    assert!(sentence.contains(&format!("{:08x}", crc32c::crc32c(&content))), "{sentence}");
}

#[test]
fn a_segment_that_changes_while_it_is_read_is_noticed() {
    let folder = Folder::new();
    let fifo = folder.file("fifo");
    make_fifo(&fifo);
    let (_node, segment) = node("20MiB", &[]);
    let mut command = millstream();
    command.arg("get").args(towards(&segment)).args(["--verify", &fifo]);
    let get = Running::start("get", &mut command);
    let mut reader = File::open(&fifo).unwrap();
    // The first chunk was read from the segment once a byte of it is here.
    reader.read_exact(&mut [0]).unwrap();
    pipe("put", &segment, &["-"], b"x");
    let rest = reader.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(rest, (20 << 20) - 1);
    let output = get.output();
    assert!(output.failure(1).contains("changed meanwhile"), "{}", output.stderr);
}

#[test]
fn several_addresses_are_several_devices() {
    let folder = Folder::new();
    let file = folder.file("file");
    let content = bytes(5_000_000, 7);
    fs::write(&file, &content).unwrap();
    let (_node, segment) = node("8MiB", &[]);
    let (first, second) = (common::address(), common::address());
    let put = |more: &[&str]| run(&[&["put", "--segment", &segment, &file], more].concat());
    put(&["--bind", &first, "--bind", &second]).success();
    assert!(held(&segment, content.len()) == content);
    let twice = put(&["--bind", &first, "--bind", &first]);
    assert!(twice.failure(2).contains("given twice"), "{}", twice.stderr);
    for address in ["0.0.0.0", "::", "224.0.0.1"] {
        let output = put(&["--bind", address]);
        assert!(output.failure(2).contains(address), "{}", output.stderr);
    }
}
