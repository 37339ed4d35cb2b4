//! A controller over TLS: real processes, certificates made for the test.
#![cfg(feature = "tls")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use common::certificates::Files;
use common::{Running, address, millstream};
use millstream_net::tls::{CallerFiles, CallerTls};

/// A controller at this address; where it listens.
fn controller(host: &str, more: &[&str]) -> (Running, String) {
    let mut command = millstream();
    command.args(["controller", "--listen", &format!("{host}:0")]).args(more);
    let mut controller = Running::start("controller", &mut command);
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    (controller, listen)
}

fn rank(listen: &str, world: &str, rank: &str, more: &[&str]) -> Running {
    let mut command = millstream();
    let bind = address();
    command.args(["allreduce", "--controller", listen, "--world", world, "--rank", rank]);
    command.args(["--bind", &bind, "--dtype=int32", "--op=sum", "--size=1MiB", "--verify"]);
    Running::start("host", command.args(more))
}

/// Why a rank of a controller with this certificate does not join.
fn refusal(listen: &str, more: &[&str]) -> String {
    rank(listen, "1", "0", more).output().failure(1).to_owned()
}

#[test]
fn hosts_and_switches_with_certificates_work_over_tls_and_others_hear_why_not() {
    let files = Files::new();
    let (servers, ca) = files.authority("servers");
    let (clients, client_ca) = files.authority("clients");
    let host = address();
    let [certificate, key] = files.certificate(&servers, &host, false);
    let tls = ["--tls-cert", &certificate, "--tls-key", &key, "--tls-client-ca", &client_ca];
    let (_controller, listen) = controller(&host, &tls);
    // Handshakes that never end.
    let half_open: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = TcpStream::connect(&listen).unwrap();
            let _ = stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
            stream
        })
        .collect();
    let [own, own_key] = files.certificate(&clients, "a-client", false);
    let [over, over_key] = files.certificate(&clients, "a-late-client", true);
    let mine = ["--tls-ca", &ca, "--tls-cert", &own, "--tls-key", &own_key];
    let mut command = millstream();
    let bind = address();
    command.args(["switch", "--controller", &listen, "--name=s", "--bind", &bind]).args(mine);
    let mut switch = Running::start("switch", &mut command);
    switch.ready();
    let ranks = ["0", "1"].map(|number| rank(&listen, "2", number, &mine));
    ranks.into_iter().for_each(|rank| drop(rank.output().success()));
    drop(half_open);
    for (more, reason) in [
        (&["--tls-ca", &ca][..], "it asks for a certificate of ours, and none is set here"),
        (
            &["--tls-ca", &ca, "--tls-cert", &over, "--tls-key", &over_key],
            "it says that our certificate has expired",
        ),
        (
            &["--tls-ca", &client_ca, "--tls-cert", &own, "--tls-key", &own_key],
            "none of the authorities that are set here vouches for its certificate",
        ),
        (&[], "TLS in place of the length of a frame"),
    ] {
        let error = refusal(&listen, more);
        assert!(error.contains(reason) && error.contains(&listen), "{error}");
    }
    assert!(switch.is_running());
}

#[test]
fn a_controller_that_is_another_or_late_or_in_the_clear_is_not_called() {
    let files = Files::new();
    let (servers, ca) = files.authority("servers");
    let host = address();
    for (name, expired, reason) in [
        ("elsewhere", false, format!("it was called {host}, and its certificate is for elsewhere")),
        (&host, true, "its certificate has expired".to_owned()),
    ] {
        let [certificate, key] = files.certificate(&servers, name, expired);
        let (_controller, listen) =
            controller(&host, &["--tls-cert", &certificate, "--tls-key", &key]);
        let error = refusal(&listen, &["--tls-ca", &ca]);
        assert!(error.contains(&reason), "{error}");
    }
    let (_controller, listen) = controller(&host, &[]);
    let error = refusal(&listen, &["--tls-ca", &ca]);
    assert!(error.contains("it does not speak TLS"), "{error}");
    // Without authorities, a certificate of ours is nothing.
    let arguments = ["switch", "--controller", &listen, "--tls-cert", "c", "--tls-key", "k"];
    assert_eq!(common::run(&arguments).code(), Some(2));
}

/// The reply to a request over TLS, with these authorities; why there is none.
fn get(at: &str, ca: &str, head: &str) -> Result<String, std::io::Error> {
    let at: SocketAddr = at.parse().unwrap();
    let files = CallerFiles { authorities: ca.into(), own: None };
    let tls = CallerTls::from_files(&files, &at.ip().to_string()).unwrap();
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut session = tls.session(at.ip())?;
    session.handshake(&mut stream)?;
    session.write(format!("{head}Connection: close\r\n\r\n").as_bytes(), &mut stream)?;
    let (mut reply, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        match session.read(&mut bytes) {
            Ok(0) => return Ok(String::from_utf8(reply).unwrap()),
            Ok(count) => reply.extend(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let count = stream.read(&mut bytes)?;
                session.feed(&bytes[..count])?;
            }
            Err(error) => return Err(error),
        }
    }
}

#[test]
fn the_page_of_a_controller_may_be_over_tls() {
    let files = Files::new();
    let (authority, ca) = files.authority("pages");
    let (_, other) = files.authority("others");
    let host = address();
    let [certificate, key] = files.certificate(&authority, &host, false);
    let mut command = millstream();
    let at = format!("{host}:0");
    command.args(["controller", "--listen", &at, "--http", &at]);
    command.args(["--http-tls-certificate", &certificate, "--http-tls-key", &key]);
    let mut controller = Running::start("controller", &mut command);
    let http = controller.ready()["http"].as_str().unwrap().to_owned();
    // Handshakes that never end, more of them than it has places for.
    let half_open: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut stream = TcpStream::connect(&http).unwrap();
            let _ = stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
            stream
        })
        .collect();
    let request = format!("GET /api/v1/controller HTTP/1.1\r\nHost: {http}\r\n");
    let reply = get(&http, &ca, &request).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 OK\r\n") && reply.contains("\"leads\""), "{reply}");
    // As in the clear: a page from elsewhere does not read it by a name of its own.
    let renamed = get(&http, &ca, "GET / HTTP/1.1\r\nHost: elsewhere.example\r\n").unwrap();
    assert!(renamed.starts_with("HTTP/1.1 421 "), "{renamed}");
    let error = get(&http, &other, &request).unwrap_err();
    let reason = millstream_net::tls::reason(&error);
    assert!(reason.is_some_and(|it| it.contains("vouches for its certificate")), "{error}");
    drop(half_open);
    let mut stream = TcpStream::connect(&http).unwrap();
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let _ = stream.write_all(format!("{request}\r\n").as_bytes());
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply);
    assert!(!reply.starts_with(b"HTTP/"), "in the clear: {:?}", String::from_utf8_lossy(&reply));
}

#[test]
fn files_of_the_page_are_looked_at_before_it_is_served() {
    let files = Files::new();
    let (authority, _) = files.authority("pages");
    let [certificate, key] = files.certificate(&authority, "a-host", false);
    let [_, other_key] = files.certificate(&authority, "another-host", false);
    let run = |more: &[&str]| {
        let words = ["controller", "--listen", "127.0.0.1:0"];
        common::run(&[&words[..], more].concat())
    };
    let page = ["--http", "127.0.0.1:0", "--http-tls-certificate", certificate.as_str()];
    let output = run(&[&page[..], &["--http-tls-key", &other_key]].concat());
    let text = output.failure(1);
    assert!(text.contains("TLS") && text.contains(&other_key), "{text}");
    for words in [&page[..], &["--http-tls-certificate", &certificate, "--http-tls-key", &key]] {
        assert_eq!(run(words).code(), Some(2), "{words:?}");
    }
}
