//! Servers that are something else, lie, break off, or take their time.

use std::time::Duration;

use millstream_lab::Stopwatch;
use millstream_metadata::{
    Etcd, KeyValue, KeyValueConfig, KeyValueError, KeyValueErrorKind, Memcached, Redis,
};

use crate::fake::{Fake, Script};
use crate::patient;

/// A client of a server on this port.
type New = fn(u16, KeyValueConfig) -> Box<dyn KeyValue>;

const REDIS: New =
    |port, config| Box::new(Redis::new(&format!("redis://127.0.0.1:{port}"), config).unwrap());
const MEMCACHED: New = |port, config| {
    Box::new(Memcached::new(&format!("memcached://127.0.0.1:{port}"), config).unwrap())
};
const ETCD: New =
    |port, config| Box::new(Etcd::new(&format!("etcd://127.0.0.1:{port}"), config).unwrap());
const ALL: [New; 3] = [REDIS, MEMCACHED, ETCD];

/// What comes of all calls at a server that does this.
fn errors(new: New, script: &Script, config: KeyValueConfig) -> [KeyValueError; 3] {
    let fake = Fake::new(script.clone());
    let client = new(fake.port(), config);
    let errors = [
        client.get("k").map(|_| ()).unwrap_err(),
        client.put("k", b"value").unwrap_err(),
        client.remove("k").unwrap_err(),
    ];
    for error in &errors {
        let text = error.to_string();
        assert!(text.contains(client.uri()) && text.contains("\"k\""), "{text}");
        assert!(text.len() < 1000, "{text}");
    }
    errors
}

fn http(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
        .into_bytes()
}

#[test]
fn what_is_another_kind_of_server_makes_no_sense() {
    let others: [Vec<u8>; 6] = [
        b"SSH-2.0-OpenSSH_9.2p1\r\n".to_vec(),
        b"\x15\x03\x01\x00\x02\x02\x16\r\n".to_vec(),
        b"220 mail.example ESMTP\r\n".to_vec(),
        b"{\"a\":1}\r\n".to_vec(),
        vec![0xff; 100_000],
        [vec![0; 40], b"\n".to_vec()].concat(),
    ];
    for script in others.map(Script::Say) {
        for new in ALL {
            for error in errors(new, &script, patient()) {
                assert!(matches!(error.kind, KeyValueErrorKind::Meaning(_)), "{script:?}: {error}");
                assert!(!error.is_transient());
            }
        }
    }
    // An HTTP server is one, but no etcd.
    for new in [REDIS, MEMCACHED] {
        for error in errors(new, &Script::Say(http("200 OK", "{}")), patient()) {
            assert!(matches!(error.kind, KeyValueErrorKind::Meaning(_)), "{error}");
        }
    }
    let [_, put, remove] = errors(ETCD, &Script::Say(http("404 Not Found", "no page")), patient());
    for error in [put, remove] {
        assert!(error.to_string().contains("is it etcd 3.4 or later? (no page)"), "{error}");
    }
}

#[test]
fn what_breaks_off_may_pass() {
    let redis: [&[u8]; 5] = [b"", b"+", b"$5\r\nab", b"$5\r\nvalue", b"$5\r\nvalue\r"];
    let memcached: [&[u8]; 4] =
        [b"", b"STOR", b"VALUE k 0 5\r\nval", b"VALUE k 0 5\r\nvalue\r\nEN"];
    let etcd: [&[u8]; 4] = [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"header\":{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{\"header\"",
    ];
    let cases: [(New, &[&[u8]]); 3] = [(REDIS, &redis), (MEMCACHED, &memcached), (ETCD, &etcd)];
    for (new, replies) in cases {
        for reply in replies {
            for error in errors(new, &Script::Say(reply.to_vec()), patient()) {
                assert!(error.is_transient(), "{:?}: {error}", String::from_utf8_lossy(reply));
            }
        }
    }
}

#[test]
fn no_server_is_waited_for_beyond_the_deadline() {
    let call_timeout = Duration::from_millis(300);
    let config = KeyValueConfig { call_timeout, ..patient() };
    let slow_http = [b"HTTP/1.1 200 OK\r\nA: ".to_vec(), vec![b'b'; 10_000]].concat();
    let cases = [
        (REDIS, b"$5\r\nval".to_vec(), [b"+".to_vec(), vec![b'b'; 3000]].concat()),
        (MEMCACHED, b"VALUE k 0 5\r\nval".to_vec(), vec![b'b'; 1000]),
        (ETCD, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{".to_vec(), slow_http),
    ];
    for (new, half, slow) in cases {
        for script in [Script::Hang(Vec::new()), Script::Hang(half), Script::Slowly(slow)] {
            let stopwatch = Stopwatch::start();
            for error in errors(new, &script, config) {
                assert!(matches!(error.kind, KeyValueErrorKind::Unreachable(_)), "{error}");
                assert!(error.to_string().contains("no whole reply"), "{error}");
            }
            // Three calls, on a machine that may be busy.
            let took = stopwatch.took();
            assert!(took.own() < call_timeout * 3 + Duration::from_secs(10), "{took}");
        }
    }
}

#[test]
fn what_goes_on_for_ever_is_cut_off() {
    let block = vec![b'x'; 1 << 16];
    let endless = |start: &[u8]| Script::Forever(start.to_vec(), block.clone());
    let chunk = [b"10000\r\n".to_vec(), block.clone(), b"\r\n".to_vec()].concat();
    let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    let headers = b"A: b\r\n".repeat(1000);
    let cases = [
        (REDIS, endless(b"+")),
        (REDIS, endless(b"-ERR ")),
        (REDIS, endless(b":")),
        (MEMCACHED, endless(b"VALUE k 0 ")),
        (MEMCACHED, endless(b"SERVER_ERROR ")),
        (MEMCACHED, endless(b"VALUE k 0 1\r\n")),
        (ETCD, endless(b"HTTP/1.1 200 OK\r\n\r\n")),
        (ETCD, endless(b"HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775807\r\n\r\n")),
        (ETCD, Script::Forever(chunked, chunk)),
        (ETCD, Script::Forever(b"HTTP/1.1 200 OK\r\n".to_vec(), headers)),
        (ETCD, endless(b"HTTP/1.1 200 OK\r\nA: ")),
    ];
    for (new, script) in cases {
        for error in errors(new, &script, patient()) {
            assert!(matches!(error.kind, KeyValueErrorKind::Meaning(_)), "{error}");
        }
    }
}

#[test]
fn lengths_that_no_value_has_are_refused_at_once() {
    for length in ["1048577", "9223372036854775807"] {
        let reply = format!("${length}\r\nabc");
        let [get, ..] = errors(REDIS, &Script::Hang(reply.into_bytes()), patient());
        assert!(matches!(get.kind, KeyValueErrorKind::TooLong { .. }), "{get}");
        let reply = format!("VALUE k 0 {length}\r\nabc");
        let [get, ..] = errors(MEMCACHED, &Script::Hang(reply.into_bytes()), patient());
        assert!(matches!(get.kind, KeyValueErrorKind::TooLong { .. }), "{get}");
    }
}

#[test]
fn replies_to_something_else_make_no_sense() {
    let cases = [
        (REDIS, &b"*1\r\n$1\r\nk\r\n"[..]),
        (REDIS, b"+QUEUED\r\n"),
        (REDIS, b":7\r\n"),
        (MEMCACHED, b"VALUE other 0 1\r\nx\r\nEND\r\n"),
        (MEMCACHED, b"TOUCHED\r\n"),
    ];
    for (new, reply) in cases {
        for error in errors(new, &Script::Each(reply.to_vec()), patient()) {
            assert!(matches!(error.kind, KeyValueErrorKind::Meaning(_)), "{error}");
        }
    }
    let bodies = [
        r#"{"kvs":[{"key":"b3RoZXI=","value":"eA=="}]}"#,
        r#"{"kvs":[{"key":"aw=="},{"key":"aw=="}]}"#,
        r#"{"kvs":[{"key":"aw==","value":"?"}]}"#,
        r#"{"kvs":7}"#,
        "[",
    ];
    for body in bodies {
        for error in errors(ETCD, &Script::Say(http("200 OK", body)), patient()) {
            assert!(matches!(error.kind, KeyValueErrorKind::Meaning(_)), "{body}: {error}");
        }
    }
}

#[test]
fn a_server_that_fails_is_named_and_may_recover() {
    let error = r#"{"error":"etcdserver: no leader","code":14}"#;
    for error in errors(ETCD, &Script::Say(http("503 Service Unavailable", error)), patient()) {
        assert!(error.is_transient() && error.to_string().contains("no leader"), "{error}");
    }
    for error in errors(ETCD, &Script::Say(http("500 Internal Server Error", "")), patient()) {
        assert!(error.is_transient() && error.to_string().contains("status 500"), "{error}");
    }
    for error in errors(REDIS, &Script::Each(b"-LOADING of a dataset\r\n".to_vec()), patient()) {
        assert!(error.is_transient() && error.to_string().contains("not ready yet"), "{error}");
    }
}

#[test]
fn a_reply_that_nobody_asked_for_answers_no_later_request() {
    // Each request is answered twice. Was the second reply kept for the next request, that would be of
    // another command or key.
    let twice = Fake::new(Script::Each(b"$1\r\na\r\n$1\r\nb\r\n".to_vec()));
    let client = REDIS(twice.port(), patient());
    for _ in 0..5 {
        assert_eq!(client.get("k").unwrap().unwrap(), b"a");
    }
    assert_eq!(twice.connections(), 5);
    // And once: the connection is kept.
    let once = Fake::new(Script::Each(b"$1\r\na\r\n".to_vec()));
    let client = REDIS(once.port(), patient());
    for _ in 0..5 {
        assert_eq!(client.get("k").unwrap().unwrap(), b"a");
    }
    assert_eq!(once.connections(), 1);
}

#[test]
fn a_server_that_repeats_the_password_does_not_get_it_into_an_error() {
    let reply = b"-ERR unknown command 'AUTH', with args beginning with: 'secre".to_vec();
    let reply = [reply, b"\r\n".to_vec()].concat();
    let fake = Fake::new(Script::Each(reply));
    let uri = format!("redis://:secret@127.0.0.1:{}", fake.port());
    let error = Redis::new(&uri, patient()).unwrap().get("k").unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(text.contains("unknown command") && !text.contains("secre"), "{text}");
}

#[test]
fn nobody_there_says_so() {
    let port = crate::daemon::port();
    for new in ALL {
        let error = new(port, patient()).get("k").unwrap_err();
        assert!(error.is_transient());
        assert!(error.to_string().contains("no process listens there"), "{error}");
    }
    for uri in
        ["redis", "memcached", "etcd"].map(|scheme| format!("{scheme}://no.such.host.invalid"))
    {
        let client: Box<dyn KeyValue> = match uri.split_once(':').unwrap().0 {
            "redis" => Box::new(Redis::new(&uri, patient()).unwrap()),
            "memcached" => Box::new(Memcached::new(&uri, patient()).unwrap()),
            _ => Box::new(Etcd::new(&uri, patient()).unwrap()),
        };
        let error = client.get("k").unwrap_err();
        assert!(error.is_transient() && error.to_string().contains("does not resolve"), "{error}");
    }
}
