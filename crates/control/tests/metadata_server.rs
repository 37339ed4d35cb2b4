//! The metadata server over HTTP: the requests of Mooncake's, what is wrong with them, and clients that
//! mean no good.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use millstream_control::metadata_server::{Limits, MetadataServerConfig, run};
use millstream_control::{Shutdown, shutdown};

struct Serving {
    address: SocketAddr,
    shutdown: Option<Shutdown>,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    fn start(limits: Limits) -> Self {
        let config = MetadataServerConfig {
            limits,
            ..MetadataServerConfig::new(([127, 0, 0, 1], 0).into())
        };
        let (shutdown, told) = shutdown();
        let (sender, address) = mpsc::channel();
        let thread =
            thread::spawn(move || run(config, |at| sender.send(at).unwrap(), told).unwrap());
        let address = address.recv().unwrap();
        Self { address, shutdown: Some(shutdown), thread: Some(thread) }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Status and body of the reply to this text.
    fn ask(&self, text: &[u8]) -> (u16, String) {
        let mut stream = self.connect();
        // It may be refused before all of it has come.
        let _ = stream.write_all(text);
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        let reply = String::from_utf8(reply).unwrap();
        let Some((head, body)) = reply.split_once("\r\n\r\n") else { return (0, reply) };
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn call(&self, method: &str, target: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let head = format!("{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close");
        self.ask(format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}").as_bytes())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.shutdown.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

#[test]
fn replies_are_the_originals() {
    let server = Serving::start(Limits::default());
    for (method, target, body, status, text) in [
        ("GET", "/metadata?key=a", "", 404, "metadata not found"),
        ("PUT", "/metadata?key=mooncake%2Fram%2Fa", "{1}", 200, "metadata updated"),
        ("PUT", "/metadata?key=mooncake/ram/a", "{2}", 200, "metadata updated"),
        ("GET", "/metadata?key=mooncake%2Fram%2Fa", "", 200, "{2}"),
        ("PUT", "/metadata?key=m/rpc_meta/a", "{1}", 200, "metadata updated"),
        ("PUT", "/metadata?key=m/rpc_meta/a", "{1}", 200, "metadata unchanged"),
        ("PUT", "/metadata?key=m/rpc_meta/a", "{2}", 400, "Duplicate rpc_meta key not allowed"),
        ("DELETE", "/metadata?key=m/rpc_meta/a", "", 200, "metadata deleted"),
        ("DELETE", "/metadata?key=m/rpc_meta/a", "", 404, "metadata not found"),
        ("GET", "/metadata", "", 400, "metadata key is required"),
        ("GET", "/metadata?key=%20", "", 400, "metadata key is required"),
        ("POST", "/metadata?key=a", "", 405, "Method not allowed"),
        ("GET", "/other?key=a", "", 404, "404: Not Found"),
    ] {
        assert_eq!(
            server.call(method, target, body),
            (status, text.to_owned()),
            "{method} {target}"
        );
    }
}

#[test]
fn what_is_too_much_is_refused() {
    let limits = Limits { key_length: 20, value_length: 10, keys: 2, ..Limits::default() };
    let server = Serving::start(limits);
    let put = |key: &str, value: &str| server.call("PUT", &format!("/metadata?key={key}"), value);
    assert_eq!(put(&"k".repeat(21), "").0, 400);
    assert_eq!(put("a", "0123456789x").0, 413);
    assert_eq!((put("a", "0123456789").0, put("b", "").0), (200, 200));
    assert_eq!(put("c", ""), (507, "there are 2 keys, as many as may be".to_owned()));
    // Lengths that are not what comes.
    let claim = |length: &str| {
        let head = format!("PUT /metadata?key=a HTTP/1.1\r\nHost: a\r\nContent-Length: {length}");
        server.ask(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).0
    };
    assert_eq!(claim("9223372036854775808"), 413);
    assert!([413, 431].contains(&claim("18446744073709551614")));
    assert!([400, 0].contains(&claim("99999999999999999999999")));
    let chunked = "PUT /metadata?key=a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\
                   Connection: close\r\n\r\n8\r\n01234567\r\n8\r\n01234567\r\n0\r\n\r\n";
    assert_eq!(server.ask(chunked.as_bytes()).0, 413);
    assert_eq!(server.call("GET", "/metadata?key=a", ""), (200, "0123456789".to_owned()));
}

#[test]
fn what_is_no_http_is_refused_and_others_are_served() {
    let server = Serving::start(Limits::default());
    let long = format!("GET /metadata?key={} HTTP/1.1\r\n\r\n", "k".repeat(1 << 20));
    for text in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls\r\n\r\n"[..],
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metadata?key=a HTTP/9.9\r\n\r\n",
        long.as_bytes(),
    ] {
        let (status, _) = server.ask(text);
        assert!([0, 400, 414, 431, 505].contains(&status), "{status}");
        assert_eq!(server.call("PUT", "/metadata?key=a", "1").0, 200);
    }
}

/// Who connects and says nothing, or half of something, keeps nobody out.
#[test]
fn a_flood_of_connections_keeps_nobody_out() {
    let limits = Limits { connections: 16, ..Limits::default() };
    let server = Serving::start(limits);
    let mut idle: Vec<TcpStream> = Vec::new();
    for round in 0..10 {
        for _ in 0..16 {
            let mut stream = server.connect();
            stream
                .write_all(
                    &b"PUT /metadata?key=a HTTP/1.1\r\nContent-Length: 9\r\n\r\n1"[..round * 5],
                )
                .unwrap();
            idle.push(stream);
        }
        assert_eq!(server.call("PUT", "/metadata?key=a", "1").0, 200, "{round}");
    }
    // The first of them were closed.
    let mut rest = Vec::new();
    assert!(matches!(idle[0].read_to_end(&mut rest), Ok(0) | Err(_)));
}
