//! Many calls at once, to peers of all kinds, over real sockets on loopback. Deadlines in here are
//! either short because they must pass, or long because they must not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_lab::Stopwatch;
use millstream_metadata::{
    CallError, CallErrorKind, Caller, ClientConfig, Frame, FrameError, FrameType, Handler,
    HostPort, Server, ServerConfig,
};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

/// Answers a request with its own text.
struct Echo;

impl Handler for Echo {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        Some(request)
    }
}

type Told = Result<Frame, CallError>;

fn echo(host: &str) -> Server {
    let address = SocketAddr::new(host.parse().unwrap(), 0);
    let config = ServerConfig { client_timeout: LONG, ..ServerConfig::default() };
    Server::start(address, config, Arc::new(Echo)).unwrap()
}

fn listen(host: &str) -> (TcpListener, HostPort) {
    let listener = TcpListener::bind((host, 0)).unwrap();
    let name = name(listener.local_addr().unwrap());
    (listener, name)
}

fn name(address: SocketAddr) -> HostPort {
    HostPort::from_address(address.ip(), address.port())
}

fn caller() -> Caller {
    Caller::new(ClientConfig::default())
}

fn probe() -> Frame {
    Frame::new(FrameType::Probe, "{}")
}

fn tell(told: &Sender<Told>) -> Box<dyn FnOnce(Told) + Send> {
    let told = told.clone();
    Box::new(move |result| told.send(result).unwrap())
}

fn begin(caller: &Caller, peer: &HostPort, request: Frame, timeout: Duration) -> Receiver<Told> {
    let (told, telling) = mpsc::channel();
    caller.call(peer, request, timeout, tell(&told));
    telling
}

fn ask(caller: &Caller, peer: &HostPort, request: Frame, timeout: Duration) -> Told {
    begin(caller, peer, request, timeout).recv().unwrap()
}

/// A peer that does this with its first connection.
fn peer(host: &str, act: impl FnOnce(TcpStream) + Send + 'static) -> (HostPort, JoinHandle<()>) {
    let (listener, name) = listen(host);
    (name, thread::spawn(move || act(listener.accept().unwrap().0)))
}

fn read_request(mut stream: &TcpStream, request: &Frame) {
    let bytes = request.encode();
    let mut got = vec![0; bytes.len()];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(got, bytes);
}

#[test]
fn requests_are_answered_in_any_size_and_number() {
    let server = echo("127.4.0.1");
    let peer = name(server.address());
    let caller = caller();
    let calls: Vec<_> = [0, 1, 4095, 4096, 100_000, (1 << 20) - 1]
        .into_iter()
        .chain(std::iter::repeat_n(10, 200))
        .map(|length| {
            let request = Frame::new(FrameType::Connection, vec![b'x'; length]);
            (begin(&caller, &peer, request.clone(), LONG), request)
        })
        .collect();
    for (told, request) in calls {
        assert_eq!(told.recv().unwrap().unwrap(), request);
    }
}

#[test]
fn peers_that_never_answer_delay_nobody() {
    let (_mute, dead) = listen("127.4.1.1");
    let server = echo("127.4.1.2");
    let caller = caller();
    let (told, telling) = mpsc::channel();
    for _ in 0..512 {
        caller.call(&dead, probe(), LONG, tell(&told));
    }
    caller.call(&name(server.address()), probe(), LONG, tell(&told));
    // The first that is told, while the others go on.
    assert_eq!(telling.recv().unwrap().unwrap(), probe());
    assert!(telling.try_recv().is_err());
    drop(caller);
    let ended: Vec<_> = telling.try_iter().collect();
    assert_eq!(ended.len(), 512, "each is told before the caller is gone");
    for error in ended {
        let error = error.unwrap_err();
        assert!(matches!(error.kind, CallErrorKind::Ended), "{error}");
    }
}

#[test]
fn many_time_outs_pass_at_once() {
    let (_mute, dead) = listen("127.4.2.1");
    let caller = caller();
    let stopwatch = Stopwatch::start();
    let calls: Vec<_> = (0..512).map(|_| begin(&caller, &dead, probe(), SHORT)).collect();
    for told in calls {
        let error = told.recv().unwrap().unwrap_err();
        assert!(
            matches!(error.kind, CallErrorKind::NoReply { .. } | CallErrorKind::Unreachable { .. }),
            "{error}"
        );
    }
    // One after the other they would take 25 s.
    let took = stopwatch.took();
    assert!(took.own() < LONG / 3, "{took}");
}

#[test]
fn nobody_listens() {
    let (listener, peer) = listen("127.4.3.1");
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = ask(&caller(), &peer, probe(), LONG).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("peer {peer}: connection to {address} refused: no process listens there")
    );
}

#[test]
fn a_peer_that_never_accepts() {
    let (_mute, peer) = listen("127.4.4.1");
    let error = ask(&caller(), &peer, probe(), SHORT).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::NoReply { waited } if waited == SHORT), "{error}");
}

#[test]
fn a_peer_that_sends_a_byte_at_a_time_gets_no_more_time() {
    let (peer, dripping) = peer("127.4.5.1", |mut stream| {
        stream.set_nodelay(true).unwrap();
        stream.write_all(&(1_u64 << 40).to_le_bytes()).unwrap();
        // Until the other side has had enough.
        while stream.write(b" ").is_ok() {
            thread::yield_now();
        }
    });
    let config = ClientConfig { frame_limit: 1 << 40, ..ClientConfig::default() };
    let error = ask(&Caller::new(config), &peer, probe(), SHORT).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::NoReply { .. }), "{error}");
    dripping.join().unwrap();
}

#[test]
fn a_peer_that_closes_early() {
    let long = Frame::new(FrameType::Probe, vec![b'x'; 8 << 20]);
    type Act = Box<dyn FnOnce(TcpStream) + Send>;
    let acts: [(&str, Frame, Act); 4] = [
        ("at once", probe(), Box::new(drop)),
        ("in the request", long, Box::new(|mut stream| stream.read_exact(&mut [0; 10]).unwrap())),
        ("after the request", probe(), Box::new(|stream| read_request(&stream, &probe()))),
        (
            "in the reply",
            probe(),
            Box::new(|mut stream| {
                read_request(&stream, &probe());
                stream.write_all(&probe().encode()[..9]).unwrap();
            }),
        ),
    ];
    let caller = caller();
    for (when, request, act) in acts {
        let (peer, acting) = peer("127.4.6.1", act);
        let error = ask(&caller, &peer, request, LONG).unwrap_err();
        assert!(matches!(error.kind, CallErrorKind::Closed), "{when}: {error}");
        acting.join().unwrap();
    }
}

#[test]
fn a_request_that_is_not_taken_ends_in_time() {
    let (listener, peer) = listen("127.4.7.1");
    socket2::SockRef::from(&listener).set_recv_buffer_size(4096).unwrap();
    let request = Frame::new(FrameType::Probe, vec![b'x'; 16 << 20]);
    let length = request.encode().len() as u64;
    let error = ask(&caller(), &peer, request, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::NoReply { .. }), "{error}");
    // Some of it went out, and nothing follows.
    let written = std::io::copy(&mut listener.accept().unwrap().0, &mut std::io::sink());
    assert!((1..length).contains(&written.unwrap()));
}

#[test]
fn replies_are_checked() {
    let reply_with = |bytes: Vec<u8>| {
        let (peer, replying) = peer("127.4.8.1", move |mut stream| {
            read_request(&stream, &probe());
            stream.write_all(&bytes).unwrap();
            // The other side closes first.
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let config = ClientConfig { frame_limit: 100, ..ClientConfig::default() };
        let told = ask(&Caller::new(config), &peer, probe(), LONG);
        replying.join().unwrap();
        told.unwrap_err().kind
    };
    let kind = reply_with(101_u64.to_le_bytes().into());
    let expected = FrameError::TooLong { length: 101, limit: 100 };
    assert!(matches!(kind, CallErrorKind::Frame(error) if error == expected), "{kind}");
    let kind = reply_with(vec![0; 8]);
    assert!(matches!(kind, CallErrorKind::Frame(FrameError::Empty)), "{kind}");
    let kind = reply_with(Frame::new(FrameType::Notify, "{}").encode());
    assert!(
        matches!(
            kind,
            CallErrorKind::WrongType { asked: FrameType::Probe, got: FrameType::Notify }
        ),
        "{kind}"
    );
}

#[test]
fn calls_beyond_the_limit_fail_at_once_and_places_come_back() {
    let (_mute, dead) = listen("127.4.9.1");
    let (release, released) = mpsc::channel::<()>();
    let (slow, answering) = peer("127.4.9.2", move |mut stream| {
        read_request(&stream, &probe());
        released.recv().unwrap();
        stream.write_all(&probe().encode()).unwrap();
    });
    let server = echo("127.4.9.3");
    let caller = Caller::with_limit(ClientConfig::default(), 2);
    let first = begin(&caller, &dead, probe(), LONG);
    let second = begin(&caller, &slow, probe(), LONG);
    let error = ask(&caller, &name(server.address()), probe(), LONG).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::TooMany { limit: 2 }), "{error}");
    release.send(()).unwrap();
    assert!(second.recv().unwrap().is_ok());
    assert!(ask(&caller, &name(server.address()), probe(), LONG).is_ok());
    assert!(first.try_recv().is_err(), "it still waits");
    answering.join().unwrap();
}

#[test]
fn who_is_told_may_panic_and_may_call() {
    let server = echo("127.4.10.1");
    let peer = name(server.address());
    // One place: it is free when the call is told.
    let caller = Arc::new(Caller::with_limit(ClientConfig::default(), 1));
    let (told, telling) = mpsc::channel();
    caller.call(&peer, probe(), LONG, {
        let (again, peer) = (Arc::clone(&caller), peer.clone());
        Box::new(move |result| {
            assert!(result.is_ok());
            assert_eq!(thread::current().name(), Some("calls"));
            again.call(&peer, probe(), LONG, tell(&told));
            panic!("on purpose: nobody else notices");
        })
    });
    assert!(telling.recv().unwrap().is_ok());
    assert!(ask(&caller, &peer, probe(), LONG).is_ok());
}

#[test]
fn a_reply_in_time_counts_although_somebody_who_is_told_takes_long() {
    let timeout = Duration::from_secs(1);
    let (asked, was_asked) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let (reply, replied) = mpsc::channel();
    let (slow, answering) = peer("127.4.14.1", move |mut stream| {
        read_request(&stream, &probe());
        asked.send(()).unwrap();
        released.recv().unwrap();
        stream.write_all(&probe().encode()).unwrap();
        reply.send(()).unwrap();
        // The other side closes first.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let server = echo("127.4.14.2");
    let caller = caller();
    let told = begin(&caller, &slow, probe(), timeout);
    let over = Instant::now() + timeout;
    was_asked.recv().unwrap();
    let take_long = move |_: Told| {
        release.send(()).unwrap();
        replied.recv().unwrap();
        while let Some(left) = over.checked_duration_since(Instant::now()) {
            thread::sleep(left);
        }
    };
    caller.call(&name(server.address()), probe(), LONG, Box::new(take_long));
    assert!(told.recv().unwrap().is_ok());
    answering.join().unwrap();
}

#[test]
fn who_is_told_may_drop_the_caller() {
    let server = echo("127.4.11.1");
    let (_mute, dead) = listen("127.4.11.2");
    let caller = Arc::new(Mutex::new(Some(caller())));
    let (told, telling) = mpsc::channel();
    {
        let held = caller.lock().unwrap();
        let calls = held.as_ref().unwrap();
        calls.call(&dead, probe(), LONG, tell(&told));
        let caller = Arc::clone(&caller);
        let drop_it = move |result: Told| {
            drop(caller.lock().unwrap().take());
            told.send(result).unwrap();
        };
        calls.call(&name(server.address()), probe(), LONG, Box::new(drop_it));
    }
    assert!(telling.recv().unwrap().is_ok());
    // Not when its time is over: the thread is awake.
    let error = telling.recv_timeout(LONG / 3).unwrap().unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Ended), "{error}");
    assert!(telling.recv().is_err(), "the thread has let go of everything");
}

#[test]
fn a_caller_that_goes_ends_all_calls_even_those_that_just_began() {
    let (_mute, dead) = listen("127.4.12.1");
    for count in [0, 1, 100] {
        let caller = caller();
        let (told, telling) = mpsc::channel();
        for _ in 0..count {
            // Who is told last may panic too.
            let told = told.clone();
            let panic_too = move |result: Told| {
                told.send(result).unwrap();
                panic!("on purpose: nobody else notices");
            };
            caller.call(&dead, probe(), LONG, Box::new(panic_too));
        }
        drop(caller);
        let ended = telling
            .try_iter()
            .filter(|told| matches!(told, Err(CallError { kind: CallErrorKind::Ended, .. })));
        assert_eq!(ended.count(), count);
    }
}

#[test]
fn the_longest_and_the_shortest_time_outs() {
    let server = echo("127.4.13.1");
    let peer = name(server.address());
    assert!(ask(&caller(), &peer, probe(), Duration::MAX).is_ok());
    let error = ask(&caller(), &peer, probe(), Duration::ZERO).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Unreachable { .. }), "{error}");
}
