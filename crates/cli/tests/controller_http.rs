//! Clients of a controller that mean no good, at both of its ports, while it has work to do.

mod common;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use common::{PATIENCE, Running, address, eventually, millstream};
use serde_json::Value;

/// How many connections stay open and say nothing: fewer than the files that a process may have open, of
/// which both ends take one.
const IDLE: usize = 400;

/// How many the page's port keeps at most.
const KEPT: usize = 32;

/// What the controller may grow by. A connection that is kept costs some KiB.
const GROWTH_KB: u64 = 64 << 10;

fn connect(at: &str) -> TcpStream {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The reply to what is sent, to the end of the connection.
fn send(at: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(at);
    // It may be refused before all of it has come.
    let _ = stream.write_all(bytes);
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply);
    reply
}

fn get(at: &str, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n");
    let reply = String::from_utf8(send(at, request.as_bytes())).unwrap();
    let (head, text) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{path}: {head}");
    text.to_owned()
}

/// The collectives that the only group has done, as far as is known.
fn collectives(http: &str) -> Option<u64> {
    let groups: Value = serde_json::from_str(&get(http, "/api/v1/groups")).unwrap();
    groups["groups"][0]["collectives"].as_u64()
}

fn resident_kb(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A byte a second, until the other end has had enough.
fn slowly(at: &str, bytes: &[u8]) {
    let mut stream = connect(at);
    stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    for byte in bytes.iter().cycle().take(PATIENCE.as_secs() as usize) {
        if stream.write_all(&[*byte]).is_err() {
            return;
        }
        // An answer or the end: either way, it takes no more of this.
        match stream.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
    panic!("{at} still listens to a byte a second");
}

#[test]
fn a_switch_shows_what_its_ports_have_counted() {
    let (_daemons, listen) = common::serve();
    let (at, bind) = (format!("{}:0", address()), address());
    let arguments = ["switch", "--controller", &listen, "--name=s1", "--bind", &bind];
    let mut switch = Running::start("switch", millstream().args(arguments).args(["--http", &at]));
    let http = switch.ready()["http"].as_str().unwrap().to_owned();
    // One group for each switch: the second goes to the one that serves fewer.
    let rank = |group: &str, rank: &str| {
        let mut command = millstream();
        command.args([
            "allreduce",
            "--path=switch",
            "--fallback=off",
            "--controller",
            &listen,
            "--world=2",
            "--rank",
            rank,
        ]);
        command.args(["--group", group, "--bind", &address(), "--size=64KiB"]);
        Running::start(&format!("rank {rank}"), command.arg("--iters=100000000"))
    };
    let mut hosts = [rank("a", "0"), rank("a", "1")];
    for host in &mut hosts {
        host.line();
    }
    let _others = [rank("b", "0"), rank("b", "1")];
    let metric = |name: &str| {
        let text = get(&http, "/metrics");
        let mut lines = text.lines().filter(|line| line.starts_with(name));
        lines.next().and_then(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
    };
    eventually("a collective", || metric("millstream_switch_collectives_total{") > Some(0));
    let status: Value = serde_json::from_str(&get(&http, "/status")).unwrap();
    assert_eq!(status["name"], "s1");
    let ports = status["communicators"][0]["ports"].as_array().unwrap();
    for (rank, port) in ports.iter().enumerate() {
        assert_eq!(port["rank"], rank);
        assert!(port["payload_bytes_received"].as_u64() >= Some(64 << 10), "{port}");
    }
    assert_eq!(ports.len(), 2);
    let received = "millstream_switch_edge_payload_received_bytes_total{communicator=";
    assert!(metric(received) >= Some(64 << 10));
}

#[test]
fn those_who_mean_no_good_disturb_nobody() {
    let at = address();
    let both = format!("{at}:0");
    let arguments = ["controller", "--listen", &both, "--http", &both];
    let mut controller = Running::start("controller", millstream().args(arguments));
    let ready = controller.ready();
    let text = |key: &str| ready[key].as_str().unwrap().to_owned();
    let (listen, http) = (text("listen"), text("http"));
    let bind = address();
    let arguments = ["switch", "--controller", &listen, "--name=s", "--bind", &bind];
    let mut switch = Running::start("switch", millstream().args(arguments));
    switch.ready();
    let host = |rank: &str| {
        let mut command = millstream();
        command.args([
            "allreduce",
            "--path=switch",
            "--fallback=off",
            "--controller",
            &listen,
            "--world=2",
            "--rank",
            rank,
        ]);
        command.args(["--bind", &address(), "--size=64KiB", "--iters=100000000"]);
        Running::start(&format!("rank {rank}"), &mut command)
    };
    let mut hosts = [host("0"), host("1")];
    eventually("collectives", || collectives(&http) > Some(0));
    let before = resident_kb(controller.id());

    thread::scope(|scope| {
        scope.spawn(|| {
            slowly(&http, b"GET / HTTP/1.1\r\nHost: a\r\nX: aaaaaaaaaaaaaaaaaaaaaaaaaaa");
        });
        // The length of a frame that never comes.
        scope.spawn(|| slowly(&listen, &[0, 0, 0xff, 0xff, b'{', b' ', b' ', b' ']));
        let endless = [&b"GET / HTTP/1.1\r\nX: "[..], &vec![b'x'; 4 << 20]].concat();
        let long_path = format!("GET /{} HTTP/1.1\r\n\r\n", "%2e".repeat(1 << 20));
        let noise: Vec<u8> = common::bytes(1 << 20, 7);
        for bytes in [&endless[..], long_path.as_bytes(), &noise, b"\0\r\n\r\n", b"\x16\x03\x01"] {
            for at in [&http, &listen] {
                let reply = send(at, bytes);
                assert!(!reply.starts_with(b"HTTP/1.1 200"), "{at}");
                get(&http, "/metrics");
            }
        }
        for at in [&http, &listen] {
            let mut idle: Vec<TcpStream> = (0..IDLE).map(|_| connect(at)).collect();
            let done = collectives(&http);
            eventually("more collectives", || collectives(&http) > done);
            for path in ["/", "/openapi.json", "/api/v1/topology", "/api/v1/switches", "/metrics"] {
                get(&http, path);
            }
            let now = resident_kb(controller.id());
            assert!(now < before + GROWTH_KB, "{at}: {before} kB have become {now} kB");
            // There, all but the last were sent away for others, long before the 10 s that a request has.
            let away = if *at == http { IDLE - KEPT } else { 0 };
            for stream in &mut idle[..away] {
                stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                let end = stream.read(&mut [0]);
                let has_ended = match &end {
                    Ok(length) => *length == 0,
                    Err(error) => error.kind() == ErrorKind::ConnectionReset,
                };
                assert!(has_ended, "{end:?}");
            }
        }
    });
    let done = collectives(&http);
    eventually("more collectives", || collectives(&http) > done);
    assert!(hosts.iter_mut().all(Running::is_running) && switch.is_running());
    assert!(controller.is_running());
}
