//! Packets that come later than any queue pair waits: a relay between the NICs of an initiator and of a
//! target keeps them back for as long as a test wants, and then lets them go.

mod common;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::{LONG, address, contents, engine_with, pattern, private, request, shared};
use millstream_metadata::{
    Client, Frame, FrameType, Gid, HandShakeDesc, Handler, HostPort, SegmentDesc, Server,
    ServerConfig,
};
use millstream_transfer::{
    Opcode, RdmaConfig, SubmitOptions, TransferEngine, TransferState, TransferStatus,
};
use millstream_verbs::{IcrcCheck, SoftConfig};

const LENGTH: usize = 1 << 20;
/// The port of RoCE v2.
const PORT: u16 = 4791;

/// One direction: what arrives at one of the relay's addresses leaves from the other.
struct Way {
    enters: UdpSocket,
    leaves: Mutex<Option<UdpSocket>>,
    to: OnceLock<SocketAddr>,
    /// What is kept back, while `holds`.
    held: Mutex<VecDeque<Vec<u8>>>,
    holds: AtomicBool,
    passed: AtomicUsize,
}

impl Way {
    fn new(at: IpAddr) -> Self {
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
struct Relay {
    forth: Arc<Way>,
    back: Arc<Way>,
    target: HostPort,
    /// The addresses that the initiator and the target know.
    near: IpAddr,
    far: IpAddr,
    /// Whether it passes what is said at the control port.
    passes_control: AtomicBool,
    /// Fences that the target has confirmed.
    fenced: AtomicUsize,
}

impl Relay {
    fn hold(&self) {
        self.forth.holds.store(true, Ordering::SeqCst);
    }

    /// Lets go what was kept back, in order. How many.
    fn release(&self) -> usize {
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
    fn wait_for_held(&self, count: usize) {
        let end = Instant::now() + LONG;
        while self.forth.held.lock().unwrap().len() < count {
            assert!(Instant::now() < end);
            thread::yield_now();
        }
    }
}

impl Handler for Relay {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        let frame_type = request.frame_type;
        let ask = |frame| Client::default().call(&self.target, &frame).ok();
        if frame_type == FrameType::Metadata {
            let mut descriptor = SegmentDesc::from_json(&ask(request)?.body).ok()?;
            descriptor.devices[0].gid = Gid::from_address(self.near);
            return Some(Frame::new(frame_type, descriptor.to_json()));
        }
        if frame_type != FrameType::Connection {
            return ask(request);
        }
        if !self.passes_control.load(Ordering::SeqCst) {
            return None;
        }
        let mut handshake = HandShakeDesc::from_json(&request.body).ok()?;
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

/// An initiator, a target, and a relay between.
struct Setup {
    target: TransferEngine,
    initiator: TransferEngine,
    relay: Arc<Relay>,
    /// By which the initiator knows the target.
    name: String,
    _server: Server,
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Setup {
    fn new() -> Self {
        let engine = || {
            let address = address();
            // The relay changes the addresses, which the ICRC covers.
            let soft = SoftConfig { icrc: IcrcCheck::Off, ..SoftConfig::new(address) };
            // Queue pairs give up after 8 * 17 ms.
            let timeout = RdmaConfig { acknowledge_timeout: 12, ..RdmaConfig::new(&[address]) };
            engine_with(RdmaConfig { soft, ..timeout })
        };
        let (target, initiator, near, far) = (engine(), engine(), address(), address());
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
            target: target.name().parse().unwrap(),
            near,
            far,
            passes_control: AtomicBool::new(true),
            fenced: AtomicUsize::new(0),
        });
        let handler = Arc::clone(&relay) as Arc<dyn Handler>;
        let server = Server::start((near, 0).into(), ServerConfig::default(), handler).unwrap();
        let name = server.address().to_string();
        Self { target, initiator, relay, name, _server: server, ends, threads: threads.into() }
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// How a WRITE is brought to its end while its packets are kept back.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Cancel,
    Deadline,
    /// Nobody ends it: its queue pair gives up, and it is sent again.
    Retries,
}

/// Writes, keeps back its packets, has it end, and lets them go after everything is over. Returns its
/// status, and whether something of it was written after that.
fn late(by: By, confirms: bool) -> (TransferStatus, bool) {
    let setup = Setup::new();
    let Setup { target, initiator, relay, name, .. } = &setup;
    let remote = shared(target, LENGTH);
    let local = private(initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    // Through the relay, with nothing kept back.
    local.write(0, &pattern(LENGTH, 1)).unwrap();
    initiator.submit_and_wait(&[whole], LONG).unwrap();
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 1));
    assert!(relay.forth.passed.load(Ordering::Relaxed) > 0, "it goes through the relay");

    local.write(0, &pattern(LENGTH, 2)).unwrap();
    relay.hold();
    relay.passes_control.store(confirms, Ordering::SeqCst);
    let batch = initiator.allocate_batch(1).unwrap();
    let deadline = (by == By::Deadline).then(|| Instant::now() + Duration::from_millis(50));
    let options = SubmitOptions { deadline, ..SubmitOptions::default() };
    initiator.submit_with(&batch, &[whole], &options).unwrap();
    relay.wait_for_held(8);
    if by == By::Cancel {
        initiator.cancel(&batch, 0).unwrap();
    }
    assert!(initiator.wait(&batch, LONG));
    let status = initiator.status(&batch, 0).unwrap();
    // From here on the range is the target's again, as far as the status says.
    remote.write(0, &pattern(LENGTH, 3)).unwrap();
    relay.passes_control.store(true, Ordering::SeqCst);
    assert!(relay.release() >= 8);
    // What comes behind them has arrived, so they have.
    let into = private(initiator, LENGTH);
    let read = request(Opcode::Read, (&into, 0), &segment, 0, LENGTH as u64);
    let (first, written) = {
        let first = initiator.submit_and_wait(&[read], LONG).map(drop);
        (first, contents(&remote, 0, LENGTH) != pattern(LENGTH, 3))
    };
    println!("{by:?}, {confirms}: {status:?}, written: {written}, then {first:?}");
    first.unwrap();
    (status, written)
}

#[test]
fn packets_of_a_write_that_was_ended_are_not_written_later() {
    for (by, state) in [
        (By::Cancel, TransferState::Canceled),
        (By::Deadline, TransferState::Timeout),
        (By::Retries, TransferState::Failed),
    ] {
        let (status, written) = late(by, true);
        assert_eq!(status.state, state, "{status:?}");
        assert!(!status.target_undefined && !written, "{by:?}");
    }
}

#[test]
fn a_write_whose_end_the_target_does_not_confirm_is_undefined() {
    for by in [By::Cancel, By::Deadline, By::Retries] {
        let start = Instant::now();
        let (status, _) = late(by, false);
        assert!(status.target_undefined, "{by:?}: {status:?}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

/// Its first packets come after it was sent again over another connection and is done.
#[test]
fn packets_of_a_write_that_was_sent_again_are_not_written_later() {
    let setup = Setup::new();
    let Setup { target, initiator, relay, name, .. } = &setup;
    let remote = shared(target, LENGTH);
    let local = private(initiator, LENGTH);
    let segment = initiator.open_segment(name).unwrap();
    let whole = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[whole], LONG).unwrap();
    local.write(0, &pattern(LENGTH, 2)).unwrap();
    relay.hold();
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit(&batch, &[whole]).unwrap();
    relay.wait_for_held(8);
    let before = relay.fenced.load(Ordering::SeqCst);
    // Until its queue pair has given up. What was kept back so far is let go when it is over.
    let end = Instant::now() + LONG;
    while relay.fenced.load(Ordering::SeqCst) == before {
        assert!(Instant::now() < end);
        thread::yield_now();
    }
    let late = std::mem::take(&mut *relay.forth.held.lock().unwrap());
    relay.release();
    assert!(initiator.wait(&batch, LONG));
    let status = initiator.status(&batch, 0).unwrap();
    assert_eq!(status.state, TransferState::Completed, "{status:?}");
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 2));
    remote.write(0, &pattern(LENGTH, 3)).unwrap();
    relay.hold();
    relay.forth.held.lock().unwrap().extend(late);
    assert!(relay.release() >= 8);
    let into = private(initiator, LENGTH);
    let read = request(Opcode::Read, (&into, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 3));
}
