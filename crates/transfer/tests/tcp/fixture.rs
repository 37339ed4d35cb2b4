//! Engines that have memory, and streams to them.

use std::fmt::{Debug, Write as _};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::thread;
use std::time::Duration;

use millstream_metadata::{
    Client, Frame, FrameType, Gate, Handler, SegmentDesc, Server, ServerConfig,
};
use millstream_transfer::{Buffer, Config, Opcode, Segment, TcpConfig, TransferEngine};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::{LONG, address, private, request, shared};

pub(crate) fn engine(config: TcpConfig) -> TransferEngine {
    static KEEPER: Once = Once::new();
    KEEPER.call_once(|| tracing::subscriber::set_global_default(Keeper).unwrap());
    let engine = TransferEngine::new(Config::new(address())).unwrap();
    engine.install_tcp(config).unwrap();
    engine
}

/// All framings: what initiators are made with.
pub(crate) fn framings() -> [(&'static str, TcpConfig); 5] {
    let best = TcpConfig::default();
    let original = TcpConfig { messages: false, ..best.clone() };
    let one = TcpConfig { version_one: true, ..best.clone() };
    let confirmed = TcpConfig { confirm_writes: true, ..one.clone() };
    let checked = TcpConfig { checksums: true, ..best.clone() };
    [
        ("best", best),
        ("checksums", checked),
        ("version 2", original),
        ("version 1", one),
        ("confirmed", confirmed),
    ]
}

/// An engine with memory, another one, memory there, and the segment of the first.
pub(crate) struct Pair {
    pub(crate) segment: Segment,
    pub(crate) remote: Buffer,
    pub(crate) local: Buffer,
    pub(crate) target: TransferEngine,
    pub(crate) initiator: TransferEngine,
}

pub(crate) fn pair(config: TcpConfig, length: usize) -> Pair {
    let (target, initiator) = (engine(TcpConfig::default()), engine(config));
    let (remote, local) = (shared(&target, length), private(&initiator, length));
    let segment = initiator.open_segment(target.name()).unwrap();
    Pair { segment, remote, local, target, initiator }
}

/// A segment with this descriptor, asked of somebody at the target's host who has this gate.
pub(crate) fn said(
    (initiator, target): (&TransferEngine, &TransferEngine),
    gate: Option<Gate>,
    descriptor: SegmentDesc,
) -> (Server, Segment) {
    // The target is looked for at the host of the segment's name.
    let listener = TcpListener::bind((target.listening_at().ip(), 0)).unwrap();
    let says = Arc::new(Says(descriptor));
    let server = Server::guarded(listener, ServerConfig::default(), gate, says).unwrap();
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    (server, segment)
}

/// The error of a WRITE of 64 bytes.
pub(crate) fn failure(initiator: &TransferEngine, segment: &Segment) -> String {
    let local = private(initiator, 64);
    let asked = [request(Opcode::Write, (&local, 0), segment, 0, 64)];
    initiator.submit_and_wait(&asked, LONG).unwrap_err().to_string()
}

pub(crate) fn descriptor(engine: &TransferEngine) -> SegmentDesc {
    let frame = Frame::new(FrameType::Metadata, b"{}".to_vec());
    let reply = Client::default().call(&engine.name().parse().unwrap(), &frame).unwrap();
    SegmentDesc::from_json(&reply.body).unwrap()
}

/// Answers with a descriptor, whatever is asked.
pub(crate) struct Says(pub(crate) SegmentDesc);

impl Handler for Says {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        Some(Frame::new(request.frame_type, self.0.to_json()))
    }
}

/// A segment that is the target's, but for the port for data.
pub(crate) fn at_port(
    initiator: &TransferEngine,
    target: &TransferEngine,
    place: SocketAddr,
) -> (Server, Segment) {
    let mut said = descriptor(target);
    said.tcp_data_port = Some(place.port());
    saying(initiator, place.ip(), said)
}

/// A segment that has this descriptor, at this host.
pub(crate) fn saying(
    initiator: &TransferEngine,
    host: IpAddr,
    said: SegmentDesc,
) -> (Server, Segment) {
    let listen = SocketAddr::new(host, 0);
    let server = Server::start(listen, ServerConfig::default(), Arc::new(Says(said))).unwrap();
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    (server, segment)
}

pub(crate) fn relayed(
    initiator: &TransferEngine,
    target: &TransferEngine,
    relay: &Relay,
) -> (Server, Segment) {
    at_port(initiator, target, relay.address)
}

/// Passes on what goes to a target's port for data, and back.
pub(crate) struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    /// After each 16 KiB to the target.
    pause: Duration,
    moved: AtomicU64,
    /// Pumps that have not ended.
    pumps: AtomicUsize,
    streams: Mutex<Vec<TcpStream>>,
}

impl Relay {
    pub(crate) fn start(target: &TransferEngine, pause: Duration) -> Self {
        let listener = TcpListener::bind((target.listening_at().ip(), 0)).unwrap();
        Self::with(listener, target, pause)
    }

    pub(crate) fn with(listener: TcpListener, target: &TransferEngine, pause: Duration) -> Self {
        let ip = target.listening_at().ip();
        let place = SocketAddr::new(ip, descriptor(target).tcp_data_port.unwrap());
        let address = listener.local_addr().unwrap();
        let (moved, pumps) = (AtomicU64::new(0), AtomicUsize::new(0));
        let shared = Arc::new(Shared { pause, moved, pumps, streams: Mutex::default() });
        let all = Arc::clone(&shared);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(place) else { continue };
                let clone = |stream: &TcpStream| stream.try_clone().unwrap();
                all.streams.lock().unwrap().extend([clone(&near), clone(&far)]);
                all.pumps.fetch_add(2, Ordering::SeqCst);
                let (there, back) = ((clone(&near), clone(&far)), (far, near));
                for ((from, to), pause) in [(there, all.pause), (back, Duration::ZERO)] {
                    let all = Arc::clone(&all);
                    thread::spawn(move || {
                        let _ = pump(from, &to, pause, &all.moved);
                        let _ = to.shutdown(Shutdown::Write);
                        all.pumps.fetch_sub(1, Ordering::SeqCst);
                    });
                }
            }
        });
        Self { address, shared }
    }

    /// Bytes, both ways.
    pub(crate) fn moved(&self) -> u64 {
        self.shared.moved.load(Ordering::SeqCst)
    }

    /// Breaks all connections.
    pub(crate) fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Waits until nothing moves any more.
    pub(crate) fn drain(&self) {
        let mut before = u64::MAX;
        while before != self.moved() {
            before = self.moved();
            thread::sleep(Duration::from_millis(300));
        }
    }
}

fn pump(
    mut from: TcpStream,
    mut to: &TcpStream,
    pause: Duration,
    moved: &AtomicU64,
) -> io::Result<()> {
    let mut bytes = [0; 16 << 10];
    loop {
        let count = from.read(&mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        to.write_all(&bytes[..count])?;
        moved.fetch_add(count as u64, Ordering::SeqCst);
        thread::sleep(pause);
    }
}

/// What the log of this process says of the port for data of the segment that this server answers for.
pub(crate) fn logged(server: &Server) -> Vec<String> {
    let (peer, lines) = (format!("{:?}", server.address().to_string()), LINES.lock().unwrap());
    let is_of = |line: &&String| line.contains(&peer) && line.contains("data port");
    lines.iter().filter(is_of).cloned().collect()
}

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps what is logged.
struct Keeper;

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            let _ = write!(line, "{}={value:?} ", field.name());
        });
        LINES.lock().unwrap().push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
