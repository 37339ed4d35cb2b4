//! SIGINT and SIGTERM end every command at once, and its ports are free for the next.

mod common;

use std::net::{TcpListener, UdpSocket};
use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::{Duration, Instant};

use common::{Running, address, millstream};

const PORT: u16 = 18515;
/// Soon, on a busy machine too.
const SOON: Duration = Duration::from_secs(10);

fn start(arguments: &str) -> Running {
    Running::start("the command", millstream().args(arguments.split(' ')))
}

fn number(signal: &str) -> i32 {
    if signal == "INT" { libc::SIGINT } else { libc::SIGTERM }
}

/// Both ports of a command at this address can be had, at once.
fn ports_are_free(host: &str, port: u16) {
    UdpSocket::bind((host, 4791)).unwrap();
    TcpListener::bind((host, port)).unwrap();
}

#[test]
fn commands_of_rdma_end_by_the_signal() {
    for signal in ["INT", "TERM"] {
        for command in ["pingpong", "write-bw"] {
            let host = address();
            // While it waits for a client.
            let mut server = start(&format!("rdma {command} --bind {host}"));
            server.listens(&format!("{host}:{PORT}"));
            server.signal(signal);
            let output = server.output_within(SOON);
            assert_eq!(output.status.signal(), Some(number(signal)), "{}", output.stderr);
            ports_are_free(&host, PORT);
        }
        // In the middle: the other side hears of it and ends too.
        let (host, bind) = (address(), address());
        let mut server = start(&format!("rdma write-bw --duration 60s --bind {host}"));
        server.listens(&format!("{host}:{PORT}"));
        let mut client = start(&format!("rdma write-bw --duration 60s --bind {bind} {host}"));
        while !client.line().starts_with(" #bytes") {}
        client.signal(signal);
        assert_eq!(client.output_within(SOON).status.signal(), Some(number(signal)));
        ports_are_free(&bind, PORT);
        let output = server.output_within(SOON);
        assert!(output.failure(1).contains(&bind), "{}", output.stderr);
        ports_are_free(&host, PORT);
    }
}

#[test]
fn daemons_end_with_0_whatever_they_do() {
    for signal in ["INT", "TERM"] {
        // A switch whose controller says nothing.
        let host = address();
        let controller = TcpListener::bind((address(), 0)).unwrap();
        let listen = controller.local_addr().unwrap();
        let switch = start(&format!("switch --name s --controller {listen} --bind {host}"));
        let _silent = controller.accept().unwrap();
        switch.signal(signal);
        switch.output_within(SOON).success();
        ports_are_free(&host, PORT);
        // A controller and a node with a connection that says nothing.
        let mut controller = start(&format!("controller --listen {host}:0"));
        let mut node = start(&format!("node --buffer 1 --protocol rdma:soft --bind {host}"));
        let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
        let segment = node.ready()["segment"].as_str().unwrap().to_owned();
        let _silent = [&listen, &segment].map(|at| std::net::TcpStream::connect(at).unwrap());
        for daemon in [controller, node] {
            daemon.signal(signal);
            daemon.output_within(SOON).success();
        }
        let port = |name: &str| name.rsplit_once(':').unwrap().1.parse().unwrap();
        ports_are_free(&host, port(&listen));
        ports_are_free(&host, port(&segment));
    }
}

#[test]
fn a_node_that_is_told_again_ends_by_the_signal() {
    for signal in ["INT", "TERM"] {
        let (listen, bind) = (address(), address());
        let mut server = start(&format!("metadata-server --listen {listen}:0"));
        let uri = server.ready()["metadata"].as_str().unwrap().to_owned();
        let node = format!("node --buffer 1 --protocol rdma:soft --bind {bind} --metadata {uri}");
        let mut node = start(&node);
        node.ready();
        // The node has entries there, and waits seconds for an answer when it takes them back.
        server.signal("STOP");
        let told = Instant::now();
        while node.is_running() {
            assert!(told.elapsed() < SOON, "it goes on");
            node.signal(signal);
            thread::sleep(Duration::from_millis(100));
        }
        let output = node.output_within(SOON);
        assert_eq!(output.status.signal(), Some(number(signal)), "{}", output.stderr);
        ports_are_free(&bind, PORT);
    }
}
