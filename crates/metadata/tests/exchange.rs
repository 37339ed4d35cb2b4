//! Clients and servers over real sockets on loopback. Deadlines in here are either short because
//! they must pass, or long because they must not.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use millstream_metadata::{
    BufferDesc, CallErrorKind, Client, ClientConfig, FileName, Frame, FrameType, Handler, HostPort,
    PeerToPeer, SegmentDesc, SegmentQuery, Server, ServerConfig, Store, StoreError,
};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

/// Answers a request with its own text, and nothing to a notify.
struct Echo;

impl Handler for Echo {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        (request.frame_type != FrameType::Notify).then_some(request)
    }
}

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn name(address: SocketAddr) -> HostPort {
    HostPort::from_address(address.ip(), address.port())
}

fn serve(max_connections: usize, handler: impl Handler) -> Server {
    serve_with(max_connections, LONG, handler)
}

fn serve_with(max_connections: usize, silence: Duration, handler: impl Handler) -> Server {
    let config = ServerConfig {
        max_connections,
        client_timeout: LONG,
        silence_allowed: silence,
        ..ServerConfig::default()
    };
    Server::start(loopback(), config, Arc::new(handler)).unwrap()
}

fn client(call_timeout: Duration) -> Client {
    Client::new(ClientConfig { call_timeout, ..ClientConfig::default() })
}

#[test]
fn requests_are_answered_in_parallel_and_in_any_size() {
    let server = serve(4, Echo);
    let peer = name(server.address());
    std::thread::scope(|scope| {
        for length in [0, 1, 4095, 4096, 100_000, (1 << 20) - 1] {
            let peer = &peer;
            // More than the server serves at a time: some wait.
            scope.spawn(move || {
                let request = Frame::new(FrameType::Connection, vec![b'x'; length]);
                assert_eq!(client(LONG).call(peer, &request).unwrap(), request);
            });
        }
    });
}

#[test]
fn the_old_protocol_is_answered_in_kind() {
    let server = serve(4, Echo);
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let bytes = Frame::new(FrameType::OldProtocol, "{}").encode();
    stream.write_all(&bytes).unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    assert_eq!(reply, bytes);
}

#[test]
fn silent_clients_keep_nobody_out() {
    let server = serve_with(2, SHORT, Echo);
    // Two hold both places without a word; the server closes the oldest for each that follows.
    let mut silent: Vec<_> =
        (0..3).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let request = Frame::new(FrameType::Probe, "{}");
    assert_eq!(client(LONG).call(&name(server.address()), &request).unwrap(), request);
    assert_eq!(silent[0].read(&mut [0; 1]).unwrap(), 0, "the oldest was closed");
}

#[test]
fn a_client_that_never_asks_is_closed_at_the_deadline() {
    let config = ServerConfig { client_timeout: SHORT, ..ServerConfig::default() };
    let server = Server::start(loopback(), config, Arc::new(Echo)).unwrap();
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(&[9, 0, 0]).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_frame_that_is_too_long_is_refused() {
    let server = serve(4, Echo);
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(&((1u64 << 20) + 1).to_le_bytes()).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    let long = Frame::new(FrameType::Probe, vec![b' '; 2000]);
    let short = ClientConfig { frame_limit: 1000, ..ClientConfig::default() };
    let error = Client::new(short).call(&name(server.address()), &long).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Frame(_)), "{error}");
}

#[test]
fn stopping_waits_for_the_request_being_handled_and_closes_the_rest() {
    struct Slow {
        entered: mpsc::SyncSender<()>,
        release: Arc<Barrier>,
    }
    impl Handler for Slow {
        fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
            self.entered.send(()).unwrap();
            self.release.wait();
            Some(request)
        }
    }
    let (entered, has_entered) = mpsc::sync_channel(1);
    let release = Arc::new(Barrier::new(2));
    let server = serve(4, Slow { entered, release: Arc::clone(&release) });
    let peer = name(server.address());
    let mut idle = TcpStream::connect(server.address()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| client(LONG).call(&peer, &Frame::new(FrameType::Probe, "{}")));
        has_entered.recv().unwrap();
        let stopping = scope.spawn(move || drop(server));
        // The idle connection ends although the other is still being handled.
        assert_eq!(idle.read(&mut [0; 1]).unwrap_or(0), 0);
        assert!(!stopping.is_finished());
        release.wait();
        stopping.join().unwrap();
    });
    let error = client(LONG).call(&peer, &Frame::new(FrameType::Probe, "{}")).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Refused { .. }), "{error}");
}

#[test]
fn errors_name_the_peer_and_what_happened() {
    let request = Frame::new(FrameType::Metadata, "{}");

    // Nobody listens: the port was free a moment ago.
    let free = TcpListener::bind(loopback()).unwrap().local_addr().unwrap();
    let error = client(LONG).call(&name(free), &request).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("peer {free}: connection to {free} refused: no process listens there")
    );

    // Listens, never accepts.
    let mute = TcpListener::bind(loopback()).unwrap();
    let peer = name(mute.local_addr().unwrap());
    let error = client(SHORT).call(&peer, &request).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::NoReply { .. }), "{error}");

    // Closes instead of answering.
    let server = serve(4, Echo);
    let peer = name(server.address());
    let error = client(LONG).call(&peer, &Frame::new(FrameType::Notify, "{}")).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Closed), "{error}");

    // Answers something else.
    let other = TcpListener::bind(loopback()).unwrap();
    let peer = name(other.local_addr().unwrap());
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        stream.write_all(&Frame::new(FrameType::Probe, "{}").encode()).unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
    });
    let error = client(LONG).call(&peer, &request).unwrap_err();
    assert!(
        matches!(
            error.kind,
            CallErrorKind::WrongType { asked: FrameType::Metadata, got: FrameType::Probe }
        ),
        "{error}"
    );
    answer.join().unwrap();

    // `.invalid` never resolves (RFC 2606).
    let peer = HostPort { host: "nowhere.invalid".to_owned(), port: 1 };
    let error = client(LONG).call(&peer, &request).unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Resolve(_)), "{error}");
}

/// Answers metadata requests from a store, as an engine does.
struct FromStore(Arc<PeerToPeer>);

impl Handler for FromStore {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        let query: SegmentQuery = serde_json::from_slice(&request.body).unwrap();
        let text = match query.file {
            Some(file) => self.0.local_file(&file),
            None => self.0.local_segment(),
        };
        let text = text.map_or_else(|| b"null\n".to_vec(), |text| text.to_vec());
        Some(Frame::new(request.frame_type, text))
    }
}

#[test]
fn peers_ask_each_other_for_descriptors() {
    let published = Arc::new(PeerToPeer::new(client(LONG)));
    let server = serve(4, FromStore(Arc::clone(&published)));
    let segment = server.address().to_string();
    let asking = PeerToPeer::new(client(LONG));

    let error = asking.segment(&segment).unwrap_err();
    assert!(error.to_string().contains("has no such segment to offer"), "{error}");

    let mut descriptor = SegmentDesc {
        name: segment.clone(),
        protocol: "rdma".to_owned(),
        ..SegmentDesc::default()
    };
    published.publish_segment(&descriptor).unwrap();
    assert_eq!(asking.segment(&segment).unwrap(), descriptor);

    descriptor.buffers.push(BufferDesc {
        name: "cpu:0".to_owned(),
        addr: 4096,
        length: 1,
        ..BufferDesc::default()
    });
    published.publish_segment(&descriptor).unwrap();
    assert_eq!(asking.segment(&segment).unwrap(), descriptor);

    published.withdraw_segment(&segment).unwrap();
    assert!(asking.segment(&segment).is_err());
    assert_eq!(asking.address(&segment).unwrap().address.to_string(), segment);
    assert!(matches!(asking.segment("no-port"), Err(StoreError::Name(_))));
}

#[test]
fn peers_ask_each_other_for_files() {
    let published = Arc::new(PeerToPeer::new(client(LONG)));
    let server = serve(4, FromStore(Arc::clone(&published)));
    let asking = PeerToPeer::new(client(LONG));
    let name = FileName::new(server.address().to_string().parse().unwrap(), "f").unwrap();
    let name = name.to_string();
    assert!(asking.segment(&name).is_err());

    let memory = SegmentDesc {
        name: server.address().to_string(),
        protocol: "rdma".to_owned(),
        ..SegmentDesc::default()
    };
    published.publish_segment(&memory).unwrap();
    let buffer = BufferDesc {
        name: "f".to_owned(),
        length: 5,
        file_path: Some("/f".to_owned()),
        ..BufferDesc::default()
    };
    // Named after where its process thinks to be.
    let file = SegmentDesc {
        name: "nvmeof/elsewhere:1/f".to_owned(),
        protocol: "nvmeof".to_owned(),
        buffers: vec![buffer],
        ..SegmentDesc::default()
    };
    published.publish_segment(&file).unwrap();
    assert_eq!(asking.segment(&name).unwrap(), file);
    assert_eq!(asking.segment(&memory.name).unwrap(), memory);
    assert!(asking.segment(&name.replace("/f", "/g")).is_err());

    published.withdraw_segment(&file.name).unwrap();
    assert!(asking.segment(&name).is_err());
    assert_eq!(asking.segment(&memory.name).unwrap(), memory);
    assert!(matches!(asking.segment("nvmeof/x"), Err(StoreError::Name(_))));
}

/// As Mooncake is, which answers every request with its memory.
#[test]
fn who_knows_of_no_files_is_told_from_who_has_them() {
    struct Memory;
    impl Handler for Memory {
        fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
            let text = br#"{"name":"a:1","protocol":"tcp"}"#;
            Some(Frame::new(request.frame_type, text.to_vec()))
        }
    }
    let server = serve(4, Memory);
    let error = PeerToPeer::new(client(LONG)).segment(&format!("nvmeof/{}/f", server.address()));
    assert!(error.unwrap_err().to_string().contains("offers no files"));
}

#[test]
fn a_descriptor_too_long_for_a_frame_is_not_published() {
    let config = ClientConfig { frame_limit: 100, ..ClientConfig::default() };
    let store = PeerToPeer::new(Client::new(config));
    let descriptor = SegmentDesc { name: "x".repeat(100), ..SegmentDesc::default() };
    assert!(matches!(store.publish_segment(&descriptor), Err(StoreError::TooLong { .. })));
    assert_eq!(store.local_segment(), None);
}

#[test]
fn who_has_a_long_descriptor_of_its_own_can_ask() {
    let published = Arc::new(PeerToPeer::new(client(LONG)));
    let server = serve(4, FromStore(Arc::clone(&published)));
    let segment = server.address().to_string();
    let name = segment.clone();
    let descriptor = SegmentDesc { name, protocol: "rdma".to_owned(), ..SegmentDesc::default() };
    published.publish_segment(&descriptor).unwrap();

    let config = ClientConfig { frame_limit: 4 << 20, ..ClientConfig::default() };
    let asking = PeerToPeer::new(Client::new(config));
    let long = SegmentDesc { name: "x".repeat(3 << 20), ..SegmentDesc::default() };
    asking.publish_segment(&long).unwrap();
    assert_eq!(asking.segment(&segment).unwrap(), descriptor);
}
