//! `rdma pingpong` between two of ours. `cargo xtask interop` has it talk to the kernel.

mod common;

use std::io::Read;
use std::net::TcpListener;

use common::{Output, Running, address, millstream, run};

/// A port that is free on an address of one test, so always the same.
const PORT: &str = "18515";

/// A server on `bind` that listens.
fn server(bind: &str, more: &[&str]) -> Running {
    server_of("pingpong", bind, more)
}

fn server_of(pingpong: &str, bind: &str, more: &[&str]) -> Running {
    let mut command = millstream();
    command.args(["rdma", pingpong, "--bind", bind, "--port", PORT]).args(more);
    let mut server = Running::start("server", &mut command);
    server.listens(&format!("{bind}:{PORT}"));
    server
}

fn both(arguments: &[&str]) -> [Output; 2] {
    both_of("pingpong", arguments)
}

fn both_of(pingpong: &str, arguments: &[&str]) -> [Output; 2] {
    let bind = address();
    let server = server_of(pingpong, &bind, arguments);
    let client_bind = address();
    let mut command = millstream();
    command.args(["rdma", pingpong, "--bind", &client_bind, "--port", PORT]).args(arguments);
    let client = Running::start("client", command.arg(&bind)).output();
    [server.output(), client]
}

#[test]
fn every_byte_of_every_message_is_checked() {
    for (size, iterations) in [(0, 10), (1, 10), (1000, 200), (4096, 50), (1 << 20, 5)] {
        let (size_text, iterations_text) = (size.to_string(), iterations.to_string());
        for output in both(&["--size", &size_text, "--iters", &iterations_text]) {
            let lines: Vec<String> = output.success().stdout.lines().map(str::to_owned).collect();
            assert!(lines[0].starts_with("  local address:  LID 0x0000, QPN 0x"), "{lines:?}");
            assert!(lines[1].starts_with("  remote address: LID 0x0000, QPN 0x"), "{lines:?}");
            let moved = 2 * size * iterations;
            assert!(lines[2].starts_with(&format!("{moved} bytes in ")), "{lines:?}");
            assert!(lines[3].starts_with(&format!("{iterations} iters in ")), "{lines:?}");
            let checked = format!("{} bytes checked", size * iterations);
            assert!(lines[4].starts_with(&checked), "{lines:?}");
            assert!(size < 100 || lines[4].ends_with("millstream's pattern"), "{lines:?}");
        }
    }
}

#[test]
fn datagrams_are_checked_too() {
    for size in [0, 1, 1000, 4096] {
        for output in both_of("ud-pingpong", &["--iters=50", "--size", &size.to_string()]) {
            let output = output.success();
            let checked = format!("{} bytes checked", size * 50);
            assert!(output.stdout.contains(&checked), "{}", output.stdout);
        }
    }
}

#[test]
fn every_path_mtu_and_single_datagrams_work() {
    for mtu in ["256", "512", "2048", "4096"] {
        let arguments = ["--size=100000", "--iters=5", "--mtu", mtu, "--no-segmentation-offload"];
        both(&arguments).into_iter().for_each(|output| drop(output.success()));
    }
}

#[test]
fn messages_of_another_size_are_an_error_on_the_side_that_gets_them() {
    let bind = address();
    let server = server(&bind, &["--size=2000", "--iters=5"]);
    let client_bind = address();
    let client = run(&[
        "rdma",
        "pingpong",
        "--bind",
        &client_bind,
        "--port",
        PORT,
        "--size=1000",
        "--iters=5",
        "--timeout=5s",
        &bind,
    ]);
    let server = server.output();
    assert!(server.failure(1).contains("same --size there?"), "{}", server.stderr);
    assert_eq!(client.code(), Some(1), "its peer is gone: {}", client.stdout);
}

#[test]
fn no_server_is_an_error() {
    let host = address();
    let output = run(&["rdma", "pingpong", "--port", PORT, &host]);
    assert!(output.failure(1).contains(&host), "{}", output.stderr);
}

#[test]
fn a_client_is_told_what_speaks_no_pingpong() {
    let bind = address();
    let listener = TcpListener::bind(format!("{bind}:{PORT}")).unwrap();
    let client = Running::start("client", millstream().args(["rdma", "pingpong", &bind]));
    let (mut stream, _) = listener.accept().unwrap();
    let mut message = [0; 52];
    stream.read_exact(&mut message).unwrap();
    assert_eq!((message[4], message[51]), (b':', 0));
    drop(stream);
    let output = client.output();
    let sentence = output.stderr.trim_end();
    assert!(
        sentence.contains("is no pingpong server, or is busy: it closed the connection"),
        "{sentence}"
    );
    assert_eq!(output.code(), Some(1));
}
