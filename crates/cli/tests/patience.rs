//! `--timeout`, `--retry` and `--wait`: peers that are silent, gone, restarted or not there yet.

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;

use common::{Folder, Running, bytes, eventually, millstream, node, run, skip, towards};
use millstream_transfer::{Buffer, Config, RdmaConfig, TransferEngine};

/// A command whose complaints can be read while it runs.
struct Copy {
    child: Child,
    folder: Folder,
}

impl Copy {
    fn start(command: &str, segment: &str, more: &[&str]) -> Self {
        let mut process = millstream();
        process.arg(command).args(towards(segment)).args(more).stdin(Stdio::piped());
        Self::run(&mut process)
    }

    fn run(process: &mut Command) -> Self {
        let folder = Folder::new();
        let log = File::create(folder.file("stderr")).unwrap();
        let child = process.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Self { child, folder }
    }

    fn said(&self) -> String {
        fs::read_to_string(self.folder.file("stderr")).unwrap()
    }

    fn says(&self, text: &str) {
        eventually(text, || self.said().contains(text));
    }

    fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().unwrap()
    }

    fn end(mut self) -> (ExitStatus, String) {
        drop(self.child.stdin.take());
        eventually("it ends", || self.child.try_wait().unwrap().is_some());
        (self.child.wait().unwrap(), self.said())
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A FIFO that holds `get` up until it is read.
fn fifo(folder: &Folder) -> String {
    let path = folder.file("fifo");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

/// An engine at this port of this address with a segment of so many bytes.
fn engine(address: IpAddr, port: u16, length: usize) -> (TransferEngine, Buffer) {
    let listen = SocketAddr::new(address, port);
    let engine = TransferEngine::new(Config { listen, ..Config::new(address) }).unwrap();
    engine.install_rdma(RdmaConfig::new(&[address])).unwrap();
    let buffer = engine.allocate_buffer(length, "*", true).unwrap();
    (engine, buffer)
}

const PORT: u16 = 15_001;
const LENGTH: usize = 64 << 20;

fn content(buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.length()];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

/// Lets `get` copy into a FIFO, and stops its node when a part has arrived.
fn get_from_a_node_that_stops(more: &[&str]) -> (Copy, Running, thread::JoinHandle<Vec<u8>>) {
    let folder = Folder::new();
    let (original, fifo) = (folder.file("original"), fifo(&folder));
    fs::write(&original, bytes(LENGTH, 3)).unwrap();
    let (node, segment) = node("64MiB", &["--file", &original]);
    let get = Copy::start("get", &segment, &[&[&*fifo], more].concat());
    let mut reader = File::open(&fifo).unwrap();
    let mut got = vec![0; 3 << 20];
    reader.read_exact(&mut got).unwrap();
    node.signal("STOP");
    let rest = thread::spawn(move || {
        reader.read_to_end(&mut got).unwrap();
        got
    });
    (get, node, rest)
}

#[test]
fn a_silent_peer_is_told_of_and_waited_for() {
    let (get, node, rest) = get_from_a_node_that_stops(&[]);
    get.says("get: nothing has moved for ");
    assert!(get.said().contains("of 64 MiB done), waiting for segment 127."), "{}", get.said());
    node.signal("CONT");
    let (status, said) = get.end();
    assert!(status.success(), "{said}");
    assert!(rest.join().unwrap() == bytes(LENGTH, 3));
}

#[test]
fn a_peer_that_stays_silent_ends_it() {
    let (get, _node, rest) = get_from_a_node_that_stops(&["--timeout=1s"]);
    let (status, said) = get.end();
    assert_eq!(status.code(), Some(1));
    assert!(rest.join().unwrap().len() < LENGTH);
    assert!(said.contains(" of 67108864 bytes: "), "{said}");
}

#[test]
fn get_goes_on_where_it_stopped() {
    let (get, node, rest) = get_from_a_node_that_stops(&["--timeout=1s", "--retry=50"]);
    get.says("trying again (retry 1 of 50)");
    node.signal("CONT");
    let (status, said) = get.end();
    assert!(status.success(), "{said}");
    assert!(rest.join().unwrap() == bytes(LENGTH, 3));
}

#[test]
fn put_sends_again_what_a_pipe_gave_it() {
    let (node, segment) = node("16MiB", &[]);
    let mut put = Copy::start("put", &segment, &["--timeout=1s", "--retry=50", "-"]);
    let content = bytes(16 << 20, 5);
    let mut stdin = put.stdin();
    let read = |length| {
        let folder = Folder::new();
        let copy = folder.file("copy");
        common::transfer(&["get"], &segment, &[&format!("--length={length}"), &copy]).success();
        fs::read(copy).unwrap()
    };
    let (first, rest) = content.split_at(3 << 20);
    stdin.write_all(first).unwrap();
    eventually("the first chunk is written", || read(2 << 20) == content[..2 << 20]);
    node.signal("STOP");
    thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(rest).unwrap());
        put.says("trying again");
        node.signal("CONT");
        let (status, said) = put.end();
        assert!(status.success(), "{said}");
    });
    assert!(read(16 << 20) == content);
}

#[test]
fn a_node_that_dies_is_noticed_while_a_pipe_gives_nothing() {
    let (node, segment) = node("16MiB", &[]);
    // Without a look at the peer, the pipe would be what is waited for in vain.
    let mut put = Copy::start("put", &segment, &["--timeout=20s", "-"]);
    // It stays open to the end.
    let mut stdin = put.stdin();
    stdin.write_all(&bytes(3 << 20, 5)).unwrap();
    let folder = Folder::new();
    let copy = folder.file("copy");
    eventually("the first chunk is written", || {
        common::transfer(&["get"], &segment, &["--length=2MiB", &copy]).success();
        fs::read(&copy).unwrap() == bytes(3 << 20, 5)[..2 << 20]
    });
    node.signal("KILL");
    let (status, said) = put.end();
    drop(stdin);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("segment {segment} failed after ")), "{said}");
}

#[test]
fn a_restarted_node_gets_a_file_from_the_start() {
    let folder = Folder::new();
    let (file, address) = (folder.file("file"), common::address().parse().unwrap());
    let segment = format!("{address}:{PORT}");
    fs::write(&file, bytes(LENGTH, 7)).unwrap();
    let (first, buffer) = engine(address, PORT, LENGTH);
    let put = Copy::start("put", &segment, &["--retry=50", &file]);
    let mut some = [0; 100];
    while some == [0; 100] {
        buffer.read(0, &mut some).unwrap();
        thread::yield_now();
    }
    drop((first, buffer));
    let (_second, buffer) = engine(address, PORT, LENGTH);
    let (status, said) = put.end();
    assert!(status.success() && said.contains("trying again"), "{said}");
    assert!(content(&buffer) == bytes(LENGTH, 7));
}

#[test]
fn a_restarted_node_has_lost_what_a_pipe_gave() {
    let address = common::address().parse().unwrap();
    let (first, buffer) = engine(address, PORT, LENGTH);
    let mut put = Copy::start("put", &format!("{address}:{PORT}"), &["--retry=50", "-"]);
    let mut stdin = put.stdin();
    stdin.write_all(&bytes(3 << 20, 1)).unwrap();
    eventually("the first chunk is written", || {
        content(&buffer)[..2 << 20] == bytes(3 << 20, 1)[..2 << 20]
    });
    drop((first, buffer));
    let (_second, buffer) = engine(address, PORT, LENGTH);
    // It may have ended by then.
    let _ = stdin.write_all(&bytes(8 << 20, 1));
    drop(stdin);
    let (status, said) = put.end();
    if status.success() {
        // Nothing had been confirmed when the first one ended: all of it was still there.
        let all = [bytes(3 << 20, 1), bytes(8 << 20, 1)].concat();
        assert!(content(&buffer)[..11 << 20] == all, "{said}");
        return;
    }
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("are lost, and standard input cannot be read again"), "{said}");
}

#[test]
fn from_a_restarted_node_all_is_read_again() {
    let folder = Folder::new();
    let (file, address) = (folder.file("file"), common::address().parse().unwrap());
    let segment = format!("{address}:{PORT}");
    let (first, buffer) = engine(address, PORT, LENGTH);
    buffer.write(0, &bytes(LENGTH, 1)).unwrap();
    let get = Copy::start("get", &segment, &["--retry=50", &file]);
    let begun = |path: &Path| fs::read_dir(path).unwrap().count() > 0;
    eventually("it has begun", || begun(folder.path()));
    drop((first, buffer));
    let (_second, buffer) = engine(address, PORT, LENGTH);
    buffer.write(0, &bytes(LENGTH, 2)).unwrap();
    let (status, said) = get.end();
    assert!(status.success() && said.contains("trying again"), "{said}");
    assert!(fs::read(&file).unwrap() == bytes(LENGTH, 2), "not a mixture");
}

#[test]
fn from_a_restarted_node_nothing_is_added_to_a_pipe() {
    let folder = Folder::new();
    let (fifo, address) = (fifo(&folder), common::address().parse().unwrap());
    let (first, buffer) = engine(address, PORT, LENGTH);
    let get = Copy::start("get", &format!("{address}:{PORT}"), &["--retry=50", &fifo]);
    let mut reader = File::open(&fifo).unwrap();
    reader.read_exact(&mut [0]).unwrap();
    drop((first, buffer));
    let (_second, _buffer) = engine(address, PORT, LENGTH);
    let rest = thread::spawn(move || reader.read_to_end(&mut Vec::new()).unwrap());
    let (status, said) = get.end();
    assert_eq!(status.code(), Some(1), "{said}");
    let written = rest.join().unwrap() + 1;
    assert!(said.contains(&format!("after {written} of 67108864 bytes")), "{written}: {said}");
    assert!(said.contains(&format!("the {written} bytes")), "{written}: {said}");
}

#[test]
fn a_peer_that_is_not_there_yet_is_waited_for() {
    let address = common::address().parse().unwrap();
    let segment = format!("{address}:{PORT}");
    let put = Copy::start("put", &segment, &["--wait=60s", "/proc/version"]);
    put.says("put: waiting for up to ");
    assert!(put.said().contains("refused"), "{}", put.said());
    let (_engine, buffer) = engine(address, PORT, 4096);
    let (status, said) = put.end();
    assert!(status.success(), "{said}");
    assert!(content(&buffer).starts_with(&fs::read("/proc/version").unwrap()));
    // No longer than it was told to.
    let nowhere = format!("{}:1", common::address());
    let output = common::transfer(&["put"], &nowhere, &["--wait=200ms", "/proc/version"]);
    assert_eq!(output.code(), Some(1));
    assert!(output.stderr.contains("waited 200ms for it"), "{}", output.stderr);
}

#[test]
fn an_address_that_is_in_use_is_waited_for() {
    let (_node, segment) = node("1KiB", &[]);
    let bind = common::address();
    let put = |more: &[&str]| {
        let mut process = millstream();
        process.args(["put", "--bind", &bind, "--segment", &segment]).args(more);
        process
    };
    let holder = std::net::UdpSocket::bind((bind.as_str(), 4791)).unwrap();
    let output = run(&["put", "--bind", &bind, "--segment", &segment, "/proc/version"]);
    let sentence = output.failure(1);
    assert!(sentence.contains(&format!("UDP port 4791 of {bind} is in use")), "{sentence}");
    assert!(sentence.contains("--wait"), "{sentence}");
    assert!(!sentence.contains("127.0.0.x"), "{sentence}");
    let waiting: Vec<_> =
        (0..3).map(|_| Copy::run(&mut put(&["--wait=60s", "/proc/version"]))).collect();
    waiting.iter().for_each(|put| put.says("put: waiting for up to "));
    drop(holder);
    for put in waiting {
        let (status, said) = put.end();
        assert!(status.success(), "{said}");
    }
}

#[test]
fn three_at_once_put_from_one_address() {
    const EACH: usize = 24 << 20;
    let address = common::address().parse().unwrap();
    let (_engine, buffer) = engine(address, PORT, 3 * EACH);
    let (segment, bind) = (format!("{address}:{PORT}"), common::address());
    let begin = |index: usize| {
        let offset = (index * EACH).to_string();
        let mut put = millstream();
        put.args(["put", "--bind", &bind, "--segment", &segment, "--offset", &offset, "-"]);
        let mut put = Copy::run(put.stdin(Stdio::piped()));
        let mut stdin = put.stdin();
        let content = bytes(EACH, index as u64);
        stdin.write_all(&content[..EACH / 2]).unwrap();
        (put, stdin, content)
    };
    // None of them can end before all have begun.
    let begun: Vec<_> = (0..3).map(begin).collect();
    eventually("all have put something", || {
        let first = |(index, (.., content)): (usize, &(_, _, Vec<u8>))| {
            let mut byte = [0; 64];
            buffer.read(index * EACH, &mut byte).unwrap();
            byte == content[..64]
        };
        begun.iter().enumerate().all(first)
    });
    let mut expected = Vec::new();
    let feed = |(put, mut stdin, content): (Copy, ChildStdin, Vec<u8>)| {
        let rest = content[EACH / 2..].to_vec();
        let feeder = thread::spawn(move || stdin.write_all(&rest).unwrap());
        expected.extend(content);
        (put, feeder)
    };
    for (put, feeder) in begun.into_iter().map(feed).collect::<Vec<_>>() {
        feeder.join().unwrap();
        let (status, said) = put.end();
        assert!(status.success(), "{said}");
    }
    assert!(content(&buffer) == expected);
}

#[test]
fn a_link_that_is_down_for_a_while_ends_nothing() {
    // A network of its own, which goes away with this shell.
    let mut shell = Command::new("unshare");
    shell.args(["--net", "sh", "-c", "ip link set lo up && echo ready && cat"]);
    shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut shell) = shell.spawn() else { return skip("unshare is not installed") };
    let mut line = String::new();
    BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if line != "ready\n" {
        shell.wait().unwrap();
        return skip("a network namespace needs root and ip (iproute2)");
    }
    let inside = |program: &str| {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", shell.id())).arg(program);
        command
    };
    let program = env!("CARGO_BIN_EXE_millstream");
    let folder = Folder::new();
    let fifo = fifo(&folder);
    let mut node = inside(program);
    node.args(["node", "--name=n", "--bind=127.0.0.1", "--buffer=64MiB", "--protocol=rdma:soft"]);
    node.stdin(Stdio::null());
    let mut node = Running::start("node", &mut node);
    let segment = node.ready()["segment"].as_str().unwrap().to_owned();
    let mut get = inside(program);
    get.args(["get", "--protocol=rdma:soft", "--segment", &segment, &fifo]).stdin(Stdio::null());
    let get = Copy::run(&mut get);
    let mut reader = File::open(&fifo).unwrap();
    reader.read_exact(&mut vec![0; 3 << 20]).unwrap();
    let link = |state: &str| {
        let set = inside("ip").args(["link", "set", "lo", state]).status().unwrap();
        assert!(set.success());
    };
    link("down");
    let rest = thread::spawn(move || reader.read_to_end(&mut Vec::new()).unwrap());
    get.says("get: nothing has moved for ");
    link("up");
    let (status, said) = get.end();
    assert!(status.success(), "{said}");
    assert_eq!(rest.join().unwrap(), LENGTH - (3 << 20));
    drop(shell.stdin.take());
    shell.wait().unwrap();
}
