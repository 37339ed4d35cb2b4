//! Calls by name, with a resolver that does as it is told.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;

use super::*;
use crate::FrameType;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

fn listen(host: &str) -> TcpListener {
    TcpListener::bind((host, 0)).unwrap()
}

/// A listener at another host with the same port, which names that have both addresses need.
fn listen_beside(other: &TcpListener, host: &str) -> TcpListener {
    TcpListener::bind((host, other.local_addr().unwrap().port())).unwrap()
}

fn node(name: &str, listener: &TcpListener) -> HostPort {
    HostPort { host: name.to_owned(), port: listener.local_addr().unwrap().port() }
}

fn request() -> Frame {
    Frame::new(FrameType::Probe, "{}")
}

fn caller(lookup: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Caller {
    let config = ClientConfig { connect_timeout: SHORT, ..ClientConfig::default() };
    Caller::with_resolver(config, DEFAULT_CALL_LIMIT, Resolver::new(lookup))
}

fn addresses<const N: usize>(texts: [&str; N]) -> Vec<SocketAddr> {
    texts.map(|text| (text.parse::<std::net::IpAddr>().unwrap(), 0).into()).into()
}

type Told = mpsc::Receiver<Result<Frame, CallError>>;

fn begin(caller: &Caller, peer: &HostPort, timeout: Duration) -> Told {
    let (tell, told) = mpsc::channel();
    caller.call(peer, request(), timeout, Box::new(move |result| tell.send(result).unwrap()));
    told
}

fn answer(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    let bytes = request().encode();
    let mut got = vec![0; bytes.len()];
    stream.read_exact(&mut got).unwrap();
    stream.write_all(&got).unwrap();
    stream
}

/// Takes connections until its queue is full: the next ones are not answered at all.
fn full(listener: &TcpListener) -> Vec<socket2::Socket> {
    socket2::SockRef::from(listener).listen(0).unwrap();
    let address = listener.local_addr().unwrap().into();
    let mut filling = Vec::new();
    loop {
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        match socket.connect_timeout(&address, SHORT) {
            Ok(()) => filling.push(socket),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::TimedOut);
                return filling;
            }
        }
    }
}

#[test]
fn a_resolver_that_hangs_delays_only_who_needs_it() {
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let caller = caller(move |_| {
        // Until the test is over.
        let _ = released.lock().unwrap().recv();
        Ok(Vec::new())
    });
    let listener = listen("127.3.0.1");
    let hanging: Vec<_> =
        (0..100).map(|i| begin(&caller, &node(&format!("n{i}"), &listener), LONG)).collect();
    let literal = begin(&caller, &node("127.3.0.1", &listener), LONG);
    let _answered = answer(&listener);
    assert_eq!(literal.recv().unwrap().unwrap(), request());

    let error = begin(&caller, &node("n0", &listener), SHORT).recv().unwrap().unwrap_err();
    assert!(
        matches!(&error.kind, CallErrorKind::Resolve(error)
            if error.kind() == io::ErrorKind::TimedOut),
        "{error}"
    );
    for told in &hanging {
        assert!(told.try_recv().is_err(), "it still waits");
    }
    // Nobody waits for the resolver's threads.
    drop(caller);
    for told in hanging {
        assert!(matches!(told.recv().unwrap().unwrap_err().kind, CallErrorKind::Ended));
    }
    drop(release);
}

#[test]
fn addresses_of_a_name_are_tried_one_after_the_other() {
    let caller = caller(|_| Ok(addresses(["127.3.1.1", "127.3.1.2", "127.3.1.3"])));
    let listener = listen("127.3.1.3");
    // Nobody is at the first, and the second does not answer.
    let mute = listen_beside(&listener, "127.3.1.2");
    let _filling = full(&mute);
    let told = begin(&caller, &node("node", &listener), LONG);
    let _answered = answer(&listener);
    assert_eq!(told.recv().unwrap().unwrap(), request());
}

#[test]
fn the_last_address_that_fails_is_named_and_all_of_them_share_the_time() {
    let caller = caller(|_| Ok(addresses(["127.3.2.1", "127.3.2.2"])));
    let mute = listen("127.3.2.2");
    let _filling = full(&mute);
    let error = begin(&caller, &node("node", &mute), LONG).recv().unwrap().unwrap_err();
    assert!(
        matches!(error.kind, CallErrorKind::Unreachable { address, waited }
            if address == mute.local_addr().unwrap() && waited == SHORT),
        "{error}"
    );
    assert_eq!(error.peer, node("node", &mute));
    let timeout = Duration::from_millis(10);
    let error = begin(&caller, &node("node", &mute), timeout).recv().unwrap().unwrap_err();
    assert!(
        matches!(error.kind, CallErrorKind::Unreachable { waited, .. } if waited <= timeout),
        "{error}"
    );
}

#[test]
fn a_name_that_nobody_answers_at_is_looked_up_again() {
    let (announce, asked) = mpsc::channel();
    let moved = Mutex::new(vec![addresses(["127.3.3.2"]), addresses(["127.3.3.1"])]);
    let caller = caller(move |host| {
        announce.send(host.to_owned()).unwrap();
        Ok(moved.lock().unwrap().pop().unwrap())
    });
    let listener = listen("127.3.3.2");
    let peer = node("node", &listener);
    let error = begin(&caller, &peer, LONG).recv().unwrap().unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Refused { .. }), "{error}");
    for _ in 0..3 {
        let told = begin(&caller, &peer, LONG);
        let _answered = answer(&listener);
        assert_eq!(told.recv().unwrap().unwrap(), request());
    }
    assert_eq!(asked.try_iter().count(), 2, "while it answers, it is not looked up");
}

#[test]
fn a_name_without_addresses_is_an_error() {
    let caller = caller(|host| match host {
        "empty" => Ok(Vec::new()),
        _ => Err(io::Error::new(io::ErrorKind::NotFound, "no such name")),
    });
    for (host, says) in [("empty", "no address"), ("none", "no such name")] {
        let peer = HostPort { host: host.to_owned(), port: 1 };
        let error = begin(&caller, &peer, LONG).recv().unwrap().unwrap_err();
        assert!(matches!(error.kind, CallErrorKind::Resolve(_)), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}
