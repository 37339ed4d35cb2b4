//! Pages over HTTP, and clients that mean no good.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use millstream_control::status_server::{Page, StatusServer, StatusServerError};

const LONG: Duration = Duration::from_secs(60);

fn anywhere() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn start() -> StatusServer {
    start_at(anywhere())
}

fn start_at(listen: SocketAddr) -> StatusServer {
    let asked = AtomicUsize::new(0);
    let pages = move |path: &str| {
        let count = asked.fetch_add(1, Ordering::Relaxed);
        let text = format!("asked {count} times\n");
        (path == "/count").then_some(Page { content_type: "text/plain; version=0.0.4", text })
    };
    StatusServer::start(listen, Arc::new(pages)).unwrap()
}

fn connect(server: &StatusServer) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// The reply to this text, to the end of the connection.
fn ask(server: &StatusServer, text: &[u8]) -> String {
    let mut stream = connect(server);
    // It may be refused before all of it has come.
    let _ = stream.write_all(text);
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply);
    String::from_utf8(reply).unwrap()
}

fn call(server: &StatusServer, method: &str, path: &str) -> String {
    call_by_name(server, method, path, &format!("Host: {}\r\n", server.address()))
}

fn call_by_name(server: &StatusServer, method: &str, path: &str, host: &str) -> String {
    let text = format!("{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n\r\n");
    ask(server, text.as_bytes())
}

#[test]
fn pages_are_made_when_they_are_asked_for() {
    let server = start();
    for count in 0..2 {
        let reply = call(&server, "GET", "/count");
        assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
        assert!(reply.contains("content-type: text/plain; version=0.0.4\r\n"), "{reply}");
        assert!(reply.contains("cache-control: no-store\r\n"), "{reply}");
        let policy = "content-security-policy: default-src 'none'; script-src 'self'; ";
        assert!(reply.contains(policy), "{reply}");
        assert!(reply.contains("x-content-type-options: nosniff\r\n"), "{reply}");
        assert!(reply.ends_with(&format!("\r\n\r\nasked {count} times\n")), "{reply}");
    }
    let head = call(&server, "HEAD", "/count");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    let query = call(&server, "GET", "/count?a=1");
    assert!(query.starts_with("HTTP/1.1 200 OK\r\n"), "{query}");
}

#[test]
fn nothing_else_is_there_and_nothing_can_be_changed() {
    let server = start();
    for path in ["/", "/counts", "//count", "/count/", "/../count", "*"] {
        let reply = call(&server, "GET", path);
        assert!(reply.starts_with("HTTP/1.1 404 "), "{path}: {reply}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "EVIL"] {
        let reply = call(&server, method, "/count");
        assert!(reply.starts_with("HTTP/1.1 405 "), "{method}: {reply}");
        assert!(reply.contains("allow: GET, HEAD\r\n"), "{reply}");
    }
}

/// A page of somebody else whose name leads here reads nothing.
#[test]
fn at_a_loopback_address_no_other_name_is_served() {
    let server = start();
    for host in ["", "Host: 127.0.0.1\r\n", "Host: [::1]:80\r\n", "Host: LocalHost:1\r\n"] {
        let reply = call_by_name(&server, "GET", "/count", host);
        assert!(reply.starts_with("HTTP/1.1 200 "), "{host}: {reply}");
    }
    let both = "Host: localhost\r\nHost: evil.example\r\n";
    for host in ["Host: evil.example\r\n", "Host: localhost.evil.example:80\r\n", both] {
        let reply = call_by_name(&server, "GET", "/count", host);
        assert!(!reply.contains("asked"), "{host}: {reply}");
        assert!(reply.starts_with("HTTP/1.1 421 "), "{host}: {reply}");
    }
    let reply = call(&server, "GET", "http://evil.example/count");
    assert!(reply.starts_with("HTTP/1.1 421 "), "{reply}");
    // At other addresses it may have any name.
    let server = start_at(([0, 0, 0, 0], 0).into());
    let reply = call_by_name(&server, "GET", "/count", "Host: node1.example:9464\r\n");
    assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
}

#[test]
fn what_is_no_http_or_too_long_is_refused_and_others_are_served() {
    let server = start();
    let path = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20));
    let header = format!("GET /count HTTP/1.1\r\nA: {}\r\n\r\n", "a".repeat(1 << 20));
    let headers = format!("GET /count HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(10_000));
    for text in [path.as_bytes(), header.as_bytes(), headers.as_bytes(), b"\xff\x16\x03\r\n\r\n"] {
        let reply = ask(&server, text);
        assert!(!reply.contains("200 OK"), "{reply}");
        assert!(call(&server, "GET", "/count").contains("200 OK"));
    }
}

/// Who connects and says nothing, or half of something, keeps nobody out, and ends when the server does.
#[test]
fn a_flood_of_slow_clients_keeps_nobody_out() {
    let server = start();
    let mut slow = Vec::new();
    for round in 0..5 {
        for _ in 0..40 {
            let mut stream = connect(&server);
            // The oldest may be closed already.
            let _ = stream.write_all(&b"GET /count HTTP/1.1\r\nHost: a\r\n"[..round * 6]);
            slow.push(stream);
        }
        assert!(call(&server, "GET", "/count").contains("200 OK"), "{round}");
    }
    drop(server);
    for stream in &mut slow {
        let mut rest = Vec::new();
        assert!(matches!(stream.read_to_end(&mut rest), Ok(0) | Err(_)));
    }
}

#[test]
fn an_address_that_is_taken_is_an_error_that_names_it() {
    let taken = TcpListener::bind(anywhere()).unwrap();
    let address = taken.local_addr().unwrap();
    let error = StatusServer::start(address, Arc::new(|_: &str| None)).unwrap_err();
    assert!(matches!(error, StatusServerError::Listen { .. }));
    assert!(error.to_string().starts_with(&format!("cannot listen on {address}: ")), "{error}");
}
