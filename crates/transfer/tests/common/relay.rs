//! A relay between the NICs of an initiator and of a target, which keeps packets back for as long as a test wants, and
//! then lets them go.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_metadata::{
    Client, Frame, FrameType, Gid, HandShakeDesc, Handler, HostPort, SegmentDesc, Server,
    ServerConfig,
};
use millstream_transfer::{Config, RdmaConfig, TransferEngine};
use millstream_verbs::{IcrcCheck, SoftConfig};

use super::{LONG, address};

/// The port of RoCE v2.
const PORT: u16 = 4791;

/// One direction: what arrives at one of the relay's addresses leaves from the other.
pub(crate) struct Way {
    enters: UdpSocket,
    leaves: Mutex<Option<UdpSocket>>,
    to: OnceLock<SocketAddr>,
    /// What is kept back, while `holds`.
    pub(crate) held: Mutex<VecDeque<Vec<u8>>>,
    holds: AtomicBool,
    pub(crate) passed: AtomicUsize,
}

impl Way {
    pub(crate) fn new(at: IpAddr) -> Self {
        let enters = UdpSocket::bind((at, PORT)).unwrap();
        enters.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        Self {
            enters,
            leaves: Mutex::default(),
            to: OnceLock::new(),
            held: Mutex::default(),
            holds: AtomicBool::new(false),
            passed: AtomicUsize::new(0),
        }
    }

    fn run(&self, ends: &AtomicBool) {
        let leaves = self.leaves.lock().unwrap().take().unwrap();
        let mut datagram = [0; 65_536];
        while !ends.load(Ordering::Relaxed) {
            // A timeout is for a look at `ends`.
            let Ok(length) = self.enters.recv(&mut datagram) else { continue };
            let mut held = self.held.lock().unwrap();
            if self.holds.load(Ordering::SeqCst) {
                held.push_back(datagram[..length].to_vec());
            } else {
                drop(held);
                self.pass(&leaves, &datagram[..length]);
            }
        }
    }

    fn pass(&self, leaves: &UdpSocket, datagram: &[u8]) {
        let to = *self.to.get().expect("a handshake came before");
        // Nobody may be there any more.
        let _ = leaves.send_to(datagram, to);
        self.passed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Stands in for a target: its descriptor and its handshakes name the relay's addresses.
pub(crate) struct Relay {
    pub(crate) forth: Arc<Way>,
    back: Arc<Way>,
    target: HostPort,
    /// The target's device that is behind the relay: its first.
    device: OnceLock<String>,
    /// The addresses that the initiator and the target know.
    near: IpAddr,
    far: IpAddr,
    /// Whether it passes what is said at the control port.
    pub(crate) passes_control: AtomicBool,
    /// Fences that the target has confirmed, of rails and of streams.
    pub(crate) fenced: AtomicUsize,
    pub(crate) streams_fenced: AtomicUsize,
    /// Where data over TCP is to go, if not to the target's own port.
    pub(crate) data_port: OnceLock<u16>,
    /// Where it says that the target answers, too, if not where the target says so.
    pub(crate) also_at: OnceLock<SocketAddr>,
    /// Whether all that is said at the control port has to wait.
    pub(crate) is_silent: AtomicBool,
}

impl Relay {
    pub(crate) fn hold(&self) {
        self.forth.holds.store(true, Ordering::SeqCst);
    }

    /// Lets go what was kept back, in order. How many.
    pub(crate) fn release(&self) -> usize {
        let mut held = self.forth.held.lock().unwrap();
        let leaves = self.back.enters.try_clone().unwrap();
        let count = held.len();
        for datagram in held.drain(..) {
            self.forth.pass(&leaves, &datagram);
        }
        self.forth.holds.store(false, Ordering::SeqCst);
        count
    }

    /// Waits until so many are kept back.
    pub(crate) fn wait_for_held(&self, count: usize) {
        let end = Instant::now() + LONG;
        while self.forth.held.lock().unwrap().len() < count {
            assert!(Instant::now() < end);
            thread::yield_now();
        }
    }
}

impl Handler for Relay {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        while self.is_silent.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        let frame_type = request.frame_type;
        let ask = |frame| Client::default().call(&self.target, &frame).ok();
        if frame_type == FrameType::Metadata {
            let mut descriptor = SegmentDesc::from_json(&ask(request)?.body).ok()?;
            descriptor.devices[0].gid = Gid::from_address(self.near);
            self.device.get_or_init(|| descriptor.devices[0].name.clone());
            if let Some(port) = self.data_port.get() {
                descriptor.tcp_data_port = Some(*port);
            }
            if let Some(address) = self.also_at.get() {
                descriptor.control_addresses = vec![*address];
            }
            return Some(Frame::new(frame_type, descriptor.to_json()));
        }
        if frame_type != FrameType::Connection {
            return ask(request);
        }
        if !self.passes_control.load(Ordering::SeqCst) {
            return None;
        }
        let mut handshake = HandShakeDesc::from_json(&request.body).ok()?;
        if handshake.stream.is_some() {
            let reply = ask(request)?;
            let fenced = HandShakeDesc::from_json(&reply.body).ok()?.stream_fenced;
            self.streams_fenced.fetch_add(usize::from(fenced), Ordering::SeqCst);
            return Some(reply);
        }
        let nic = handshake.peer_nic_path.rsplit_once('@').map(|(_, nic)| nic.to_owned());
        if nic.is_some() && nic.as_ref() != self.device.get() {
            return ask(request);
        }
        let real = (handshake.local_gid?.address(), PORT).into();
        self.back.to.get_or_init(|| real);
        handshake.local_gid = Some(Gid::from_address(self.far));
        let reply = ask(Frame::new(frame_type, handshake.to_json()))?;
        let mut reply = HandShakeDesc::from_json(&reply.body).ok()?;
        if let Some(gid) = reply.local_gid {
            self.forth.to.get_or_init(|| (gid.address(), PORT).into());
            reply.local_gid = Some(Gid::from_address(self.near));
        }
        self.fenced.fetch_add(usize::from(reply.fenced.is_some()), Ordering::SeqCst);
        Some(Frame::new(frame_type, reply.to_json()))
    }
}

/// A relay between a target and whoever opens its segment by this name.
pub(crate) struct Between {
    pub(crate) relay: Arc<Relay>,
    pub(crate) name: String,
    _server: Server,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Between {
    pub(crate) fn new(target: &str) -> Self {
        let (near, far) = (address(), address());
        let (forth, back) = (Arc::new(Way::new(near)), Arc::new(Way::new(far)));
        *forth.leaves.lock().unwrap() = Some(back.enters.try_clone().unwrap());
        *back.leaves.lock().unwrap() = Some(forth.enters.try_clone().unwrap());
        let ends = Arc::new(AtomicBool::new(false));
        let threads = [&forth, &back].map(|way| {
            let (way, ends) = (Arc::clone(way), Arc::clone(&ends));
            thread::spawn(move || way.run(&ends))
        });
        let relay = Arc::new(Relay {
            forth,
            back,
            target: target.parse().unwrap(),
            device: OnceLock::new(),
            near,
            far,
            passes_control: AtomicBool::new(true),
            fenced: AtomicUsize::new(0),
            streams_fenced: AtomicUsize::new(0),
            data_port: OnceLock::new(),
            also_at: OnceLock::new(),
            is_silent: AtomicBool::new(false),
        });
        let handler = Arc::clone(&relay) as Arc<dyn Handler>;
        let server = Server::start((near, 0).into(), ServerConfig::default(), handler).unwrap();
        let name = server.address().to_string();
        Self { relay, name, _server: server, ends, threads: threads.into() }
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.relay.is_silent.store(false, Ordering::SeqCst);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// What devices have between which there is a relay.
pub(crate) fn relayed(address: IpAddr) -> RdmaConfig {
    // The relay changes the addresses, which the ICRC covers.
    let soft = SoftConfig { icrc: IcrcCheck::Off, ..SoftConfig::new(address) };
    // Queue pairs give up after 8 * 17 ms.
    RdmaConfig { soft, acknowledge_timeout: 12, ..RdmaConfig::new(&[address]) }
}

/// An initiator, a target, and a relay between.
pub(crate) struct Setup {
    pub(crate) target: TransferEngine,
    pub(crate) initiator: TransferEngine,
    pub(crate) relay: Arc<Relay>,
    /// By which the initiator knows the target.
    pub(crate) name: String,
    _between: Between,
}

impl Setup {
    pub(crate) fn new() -> Self {
        Self::with(&super::config, |_| ())
    }

    /// With engines that are made with this, and in which this was installed, too.
    pub(crate) fn with(
        config: &dyn Fn(IpAddr) -> Config,
        install: impl Fn(&TransferEngine),
    ) -> Self {
        let engine = || {
            let address = address();
            let engine = TransferEngine::new(config(address)).unwrap();
            engine.install_rdma(relayed(address)).unwrap();
            install(&engine);
            engine
        };
        let (target, initiator) = (engine(), engine());
        let between = Between::new(target.name());
        let (relay, name) = (Arc::clone(&between.relay), between.name.clone());
        Self { target, initiator, relay, name, _between: between }
    }
}
