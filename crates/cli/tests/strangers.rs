//! Whoever connects to a port of ours and is no peer: he is told apart, closed in time, and keeps
//! nobody out.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use common::{Running, address, eventually, millstream};

const PORT: &str = "18515";
/// What a client of the exchange says first.
const ADDRESS: &[u8; 52] = b"0000:000011:000000:00000000000000000000ffff7f000001\0";

/// A server of `rdma` that listens on `bind`.
fn server(command: &str, bind: &str, more: &[&str]) -> Running {
    let arguments = [&["rdma", command, "--bind", bind, "--iters=20"], more].concat();
    let mut server = Running::start(command, millstream().args(arguments));
    server.listens(&format!("{bind}:{PORT}"));
    server
}

fn client(command: &str, host: &str) -> Running {
    client_with(command, host, &[])
}

fn client_with(command: &str, host: &str, more: &[&str]) -> Running {
    let bind = address();
    let arguments = [&["rdma", command, "--bind", &bind, "--iters=20", host], more].concat();
    Running::start(command, millstream().args(arguments))
}

fn connect(host: &str) -> TcpStream {
    TcpStream::connect(format!("{host}:{PORT}")).unwrap()
}

/// Reads until the other side has closed the connection.
fn closed(mut stream: TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{error}"),
        _ => bytes,
    }
}

#[test]
fn an_rdma_server_tells_strangers_and_serves_its_client() {
    for command in ["pingpong", "ud-pingpong", "write-bw", "atomic"] {
        let host = address();
        let server = server(command, &host, &["--timeout=20s"]);
        // One is heard out after the other, so the notes come in this order.
        for said in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0xff; 52], b""] {
            let mut stranger = connect(&host);
            stranger.write_all(said).unwrap();
            stranger.shutdown(Shutdown::Write).unwrap();
            assert_eq!(closed(stranger), b"");
        }
        // Knows how to begin, and hears our address.
        let mut half = connect(&host);
        half.write_all(ADDRESS).unwrap();
        half.read_exact(&mut [0; 52]).unwrap();
        half.write_all(b"quit\n").unwrap();
        closed(half);
        // Says nothing, and stays.
        let _silent = connect(&host);
        client(command, &host).output().success();
        let output = server.output().success();
        let notes: Vec<&str> = output.stderr.lines().collect();
        for (note, expected) in notes.iter().zip([
            "(it sent \"GET / HTTP/1.1\", which is HTTP); still waiting".to_owned(),
            "(it sent \"\\xff".to_owned(),
            "(it closed the connection without a word)".to_owned(),
            "(it sent \"quit\" in place of `done`)".to_owned(),
        ]) {
            assert!(note.contains(&expected), "{command}: {note}: {expected}");
        }
        assert!(notes.len() >= 4, "{notes:?}");
    }
}

#[test]
fn many_who_say_nothing_keep_no_client_from_an_rdma_server() {
    let host = address();
    let server = server("write-bw", &host, &["--timeout=60s"]);
    let _silent: Vec<TcpStream> = (0..200).map(|_| connect(&host)).collect();
    client("write-bw", &host).output().success();
    let output = server.output().success();
    // Those that were closed for others are not each a line.
    assert!(output.stderr.lines().count() < 30, "{}", output.stderr);
}

#[test]
fn a_client_without_a_way_to_it_hears_so_and_the_next_is_served() {
    let host = address();
    let server = server("write-bw", &host, &[]);
    for (gid, expected) in [
        ("00000000000000000000000000000000", "the peer gave no GID"),
        // The broadcast address is nobody's.
        ("00000000000000000000ffffffffffff", "there is no way to its GID, 255.255.255.255"),
    ] {
        let mut stranger = connect(&host);
        write!(stranger, "0000:000011:000000:{gid}\0").unwrap();
        let said = String::from_utf8(closed(stranger)).unwrap();
        assert!(said.starts_with("error: ") && said.contains(expected), "{said}");
    }
    client("write-bw", &host).output().success();
    server.output().success();
}

#[test]
fn the_client_hears_why_a_server_cannot_open_its_device() {
    // Without --bind, the server opens a device towards its client: the one that leads to an
    // address of ours is that address itself, and this process has its port.
    let host = "::1";
    if let Err(error) = TcpListener::bind((host, 0)) {
        return common::skip(&format!("there is no IPv6: {error}"));
    }
    let mut taken = None;
    // Other tests use it for a moment.
    eventually("UDP port 4791 of ::1 is free", || {
        taken = std::net::UdpSocket::bind((host, 4791)).ok();
        taken.is_some()
    });
    let port = TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port().to_string();
    let arguments = ["rdma", "write-bw", "--iters=20", "--port", &port];
    let mut server = Running::start("write-bw", millstream().args(arguments));
    server.listens(&format!("[::]:{port}"));
    let mut stream = TcpStream::connect(format!("[{host}]:{port}")).unwrap();
    stream.write_all(b"0000:000011:000000:00000000000000000000000000000001\0").unwrap();
    let said = String::from_utf8(closed(stream)).unwrap();
    let why = said.strip_prefix("error: ").unwrap_or_else(|| panic!("{said:?}"));
    assert!(why.contains("UDP port 4791"), "{why}");
    let note = server.error_line();
    assert!(note.starts_with("note: client [::1]:") && note.ends_with(why), "{note}: {why}");
    // Another client may have another address.
    let other = address();
    client_with("write-bw", &other, &["--port", &port]).output().success();
    server.output().success();
}

#[test]
fn who_never_says_done_keeps_no_client_from_an_rdma_server() {
    let host = address();
    let server = server("write-bw", &host, &[]);
    // More than wait for their turn. Most go as soon as they have had it.
    let half: Vec<TcpStream> = (0..36)
        .map(|index| {
            let mut stream = connect(&host);
            stream.write_all(ADDRESS).unwrap();
            if index >= 8 {
                stream.shutdown(Shutdown::Write).unwrap();
            }
            stream
        })
        .collect();
    client("write-bw", &host).output().success();
    server.output().success();
    drop(half);
}

#[test]
fn what_is_waited_for_may_come_later() {
    // A client waits for its server, and a server for its address.
    let (host, bind) = (address(), address());
    let (node, _) = common::node("1KiB", &[]);
    let arguments =
        ["rdma", "write-bw", "--bind", &bind, "--iters=20", "--wait=60s", &host].map(str::to_owned);
    let client = Running::start("client", millstream().args(arguments));
    let taken = std::net::UdpSocket::bind((host.as_str(), 4791)).unwrap();
    let arguments = ["rdma", "write-bw", "--bind", &host, "--iters=20", "--wait=60s"];
    let mut server = Running::start("server", millstream().args(arguments));
    let note = server.error_line();
    assert!(note.starts_with("note: waiting up to ") && note.contains("UDP port 4791"), "{note}");
    drop((taken, node));
    client.output().success();
    server.output().success();
}

#[test]
fn waiting_has_an_end_where_one_was_asked_for() {
    let host = address();
    let output =
        common::run(&["rdma", "pingpong", "--bind", &host, "--wait=100ms", "--timeout=1s"]);
    let sentence = output.failure(1);
    let expected = format!("no client came to {host}:{PORT} within the 100ms of --wait");
    assert_eq!(sentence, expected);
    let output = common::run(&["rdma", "pingpong", "--wait=100ms", &host]);
    let sentence = output.failure(1);
    assert!(sentence.contains("cannot connect to") && sentence.contains("--wait"), "{sentence}");

    // A peer that listens and says nothing.
    let mute = TcpListener::bind((host.as_str(), 0)).unwrap();
    let port = mute.local_addr().unwrap().port().to_string();
    let bind = address();
    let output = Running::start(
        "client",
        millstream().args([
            "rdma",
            "write-bw",
            "--bind",
            &bind,
            "--timeout=300ms",
            "--port",
            &port,
            &host,
        ]),
    )
    .output_within(Duration::from_secs(20));
    let sentence = output.failure(1);
    assert!(sentence.contains("it said nothing for 300ms"), "{sentence}");
}

#[test]
fn a_timeout_of_0_waits_for_ever() {
    let mute = TcpListener::bind((address(), 0)).unwrap();
    let listen = mute.local_addr().unwrap();
    let (host, port) = (listen.ip().to_string(), listen.port().to_string());
    let bind = address();
    let arguments = ["rdma", "write-bw", "--bind", &bind, "--timeout=0s", "--port", &port, &host];
    let client = Running::start("client", millstream().args(arguments));
    let (mut stream, _) = mute.accept().unwrap();
    stream.read_exact(&mut [0; 52]).unwrap();
    // It waits for our address, and does not close the connection.
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(stream);
    let output = client.output();
    let sentence = output.failure(1);
    assert!(sentence.contains("it closed the connection without a word"), "{sentence}");

    let host = address();
    let server = server("pingpong", &host, &["--timeout=0s"]);
    client_with("pingpong", &host, &["--timeout=0s"]).output().success();
    server.output().success();
}

#[test]
fn a_client_waits_for_a_way_to_its_server() {
    // The broadcast address is nobody's.
    let host = "255.255.255.255";
    let arguments = ["rdma", "pingpong", "--wait=60s", host];
    let mut client = Running::start("client", millstream().args(arguments));
    let note = client.error_line();
    assert!(note.starts_with("note: waiting up to ") && note.contains(host), "{note}");
}

/// What strangers do to a port.
const SAID: [&[u8]; 5] = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x05\0",
    b"{}",
    b"",
];

/// Some who say something and stay, some who say it and go, in turn.
fn disturb(port: &str, count: usize) -> Vec<TcpStream> {
    let mut staying = Vec::new();
    for index in 0..count {
        let mut stranger = TcpStream::connect(port).unwrap();
        // It may have been closed already.
        let _ = stranger.write_all(SAID[index % SAID.len()]);
        if !index.is_multiple_of(7) {
            staying.push(stranger);
        }
    }
    staying
}

/// Every one of them is closed by the other side.
fn all_closed(strangers: Vec<TcpStream>) {
    strangers.into_iter().for_each(|stranger| drop(closed(stranger)));
}

/// Nothing that can be said to the RoCE port of an address is an answer.
fn garbage_datagrams(to: &str, count: usize) {
    let socket = std::net::UdpSocket::bind((address(), 0)).unwrap();
    for index in 0..count {
        let datagram = common::bytes(index % 1400, index as u64);
        socket.send_to(&datagram, (to, 4791)).unwrap();
    }
}

#[test]
fn a_node_serves_in_the_midst_of_strangers() {
    let folder = common::Folder::new();
    let (original, copy) = (folder.file("original"), folder.file("copy"));
    let content = common::bytes(20_000_000, 3);
    std::fs::write(&original, &content).unwrap();
    let (node, segment) = common::node("32MiB", &[]);
    let host = segment.split(':').next().unwrap();
    let strangers = std::thread::scope(|scope| {
        let strangers = scope.spawn(|| disturb(&segment, 400));
        scope.spawn(|| garbage_datagrams(host, 5000));
        common::transfer(&["put"], &segment, &[&original]).success();
        strangers.join().unwrap()
    });
    common::transfer(&["get"], &segment, &["--length=20000000", &copy]).success();
    assert!(std::fs::read(&copy).unwrap() == content);
    all_closed(strangers);
    node.signal("TERM");
    let output = node.output().success();
    assert!(output.stderr.lines().count() <= 2, "{}", output.stderr);
}

#[test]
fn a_controller_and_a_switch_serve_in_the_midst_of_strangers() {
    let listen = format!("{}:0", address());
    let mut controller =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let mut strangers = disturb(&listen, 400);
    let bind = address();
    let arguments = ["switch", "--controller", &listen, "--name=s", "--bind", &bind];
    let mut switch = Running::start("switch", millstream().args(arguments));
    switch.ready();
    strangers.extend(disturb(&listen, 300));
    std::thread::scope(|scope| {
        scope.spawn(|| garbage_datagrams(&bind, 5000));
        let arguments = ["--group=g", "--world=2", "--size=1MiB", "--iters=20", "--verify"];
        let hosts = ["0", "1"].map(|rank| {
            let host = address();
            let mut command = millstream();
            command.args([
                "allreduce",
                "--path=switch",
                "--fallback=off",
                "--controller",
                &listen,
                "--rank",
                rank,
                "--bind",
                &host,
            ]);
            Running::start("host", command.args(["--dtype=int32", "--op=sum"]).args(arguments))
        });
        strangers.extend(disturb(&listen, 300));
        hosts.into_iter().for_each(|host| drop(host.output().success()));
    });
    all_closed(strangers);
    for daemon in [switch, controller] {
        daemon.signal("TERM");
        let output = daemon.output().success();
        assert!(output.stderr.lines().count() <= 2, "{}", output.stderr);
    }
}
