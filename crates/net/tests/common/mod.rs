//! What the tests of this crate share: addresses of their own, a node that streams and checks, and
//! waiting for what the node does.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod lab;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant as SystemInstant};

use millstream_net::{Progress, ProgressConfig, Shared};
use millstream_roce::{DatagramMeta, Identification, Instant, Node, Piece, Transmit};
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{ICRC_LENGTH, ROCE_PORT};

/// A loopback address that no other test uses: tests run at once, in threads and in processes.
pub(crate) fn address() -> IpAddr {
    static COUNT: AtomicU32 = AtomicU32::new(1);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    assert!(count < 63, "one test binary uses 62 addresses at most");
    // 17 bits of the process id and 6 of the count: 127.128.0.1 to 127.255.255.254.
    let process = std::process::id() & 0x1_ffff;
    Ipv4Addr::from_bits(0x7f80_0000 | process << 6 | count).into()
}

/// Says that a test cannot run, and fails where nothing may be skipped.
pub(crate) fn skip(test: &str, needs: &str) {
    let required = std::env::var("MILLSTREAM_REQUIRE").is_ok_and(|value| value == "all");
    assert!(!required, "{test} needs {needs}, which is not to be had here");
    println!("skipped {test}: it needs {needs}");
}

/// Whether this process may open packet sockets. If not, the test is skipped.
pub(crate) fn has_packet_sockets(test: &str) -> bool {
    let domain = socket2::Domain::PACKET;
    let has = socket2::Socket::new(domain, socket2::Type::RAW, None).is_ok();
    if !has {
        skip(test, "CAP_NET_RAW");
    }
    has
}

/// Whether this machine has ::1. If not, the test is skipped.
pub(crate) fn has_ipv6(test: &str) -> bool {
    let has = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if !has {
        skip(test, "the address ::1");
    }
    has
}

/// Only to end a test that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for rounds of progress threads.
#[derive(Clone, Default)]
pub(crate) struct Signal(Arc<(Mutex<u64>, Condvar)>);

impl Signal {
    /// A hook that signals each round.
    pub(crate) fn hook<N>(&self) -> impl FnMut(&Shared<N>) + Send + 'static {
        let signal = self.clone();
        move |_: &Shared<N>| signal.notify()
    }

    pub(crate) fn notify(&self) {
        *self.0.0.lock().unwrap() += 1;
        self.0.1.notify_all();
    }

    /// Returns when `condition` holds, which is looked at after each round.
    pub(crate) fn wait_until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let end = SystemInstant::now() + PATIENCE;
        let mut seen = *self.0.0.lock().unwrap();
        while !condition() {
            let left = end.saturating_duration_since(SystemInstant::now());
            let rounds = self.0.0.lock().unwrap();
            let next = self.0.1.wait_timeout_while(rounds, left, |rounds| *rounds == seen).unwrap();
            let timed_out = next.1.timed_out();
            seen = *next.0;
            drop(next);
            assert!(!timed_out, "still waiting for: {what}");
        }
    }
}

/// Returns when `condition` holds, of something that gives no signal.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = SystemInstant::now() + PATIENCE;
    while !condition() {
        assert!(SystemInstant::now() < end, "still waiting for: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const DATA: u8 = 0x0a;
const ACKNOWLEDGEMENT: u8 = 0x11;
const HEADER_LENGTH: usize = 12;
const MEMORY_LENGTH: usize = 1 << 20;

/// Sends datagrams out of its memory to a peer of its kind, which checks every byte and every ICRC
/// and says how many have come. Nothing is sent again: a lost datagram is a hang, and a finding.
pub(crate) struct StreamNode {
    address: IpAddr,
    peer: IpAddr,
    memory: Box<[u8]>,
    /// Payload lengths, over and over.
    lengths: Vec<usize>,
    /// How many datagrams to send in all.
    pub(crate) total: usize,
    /// How many may be under way.
    pub(crate) window: usize,
    sent: usize,
    /// How many the peer has.
    pub(crate) acknowledged: usize,
    /// How many have come, in order and undamaged.
    pub(crate) received: usize,
    /// Of how many datagrams the IP header was seen.
    pub(crate) known: usize,
    /// The highest identification, known or guessed.
    pub(crate) highest_identification: u16,
    pub(crate) congestion_experienced: usize,
    acknowledge: Option<IpAddr>,
    /// Deadlines to come, the next one last.
    pub(crate) deadlines: Vec<Instant>,
    /// Deadlines that have passed, and when they were noticed.
    pub(crate) fired: Vec<(Instant, Instant)>,
    /// Guesses of an identification may be wrong: the kernel segmented what came, or coalesced it.
    pub(crate) wrong_guesses: bool,
    /// Send the last acknowledgement again, once for each time that somebody asks for a round.
    pub(crate) repeat: bool,
    /// Do not look at what is shorter.
    pub(crate) ignore_shorter_than: usize,
    /// Panic at the next opportunity.
    pub(crate) panic: bool,
}

fn pattern(position: usize) -> u8 {
    (position.wrapping_mul(31) ^ (position >> 8)) as u8
}

impl StreamNode {
    pub(crate) fn new(address: IpAddr, peer: IpAddr, lengths: &[usize]) -> Self {
        Self {
            address,
            peer,
            memory: (0..MEMORY_LENGTH).map(pattern).collect(),
            lengths: lengths.to_vec(),
            total: 0,
            window: 32,
            sent: 0,
            acknowledged: 0,
            received: 0,
            known: 0,
            highest_identification: 0,
            congestion_experienced: 0,
            acknowledge: None,
            deadlines: Vec::new(),
            fired: Vec::with_capacity(64),
            wrong_guesses: false,
            repeat: false,
            ignore_shorter_than: 0,
            panic: false,
        }
    }

    /// Where the payload of a datagram begins, and its length.
    fn payload(&self, index: usize) -> (usize, usize) {
        let length = self.lengths[index % self.lengths.len()];
        (index.wrapping_mul(977) % (MEMORY_LENGTH - length), length)
    }

    fn check(&mut self, meta: &DatagramMeta, datagram: &[u8]) {
        let identification = match meta.identification {
            Identification::Guessed(identification) => identification,
            Identification::Known(identification) => {
                self.known += 1;
                identification
            }
        };
        assert_eq!(meta.destination, self.address);
        self.highest_identification = self.highest_identification.max(identification);
        self.congestion_experienced += usize::from(meta.congestion_experienced);
        let (body, received) = datagram.split_at(datagram.len() - ICRC_LENGTH);
        let icrc = |identification| {
            let addresses = Addresses::unfragmented(meta.source, self.address, identification);
            let addressing = Addressing {
                addresses: addresses.unwrap(),
                source_port: meta.source_port,
                destination_port: ROCE_PORT,
            };
            icrc::of_datagram(&addressing, datagram).to_le_bytes()
        };
        let wrong_guess = self.wrong_guesses
            && meta.identification == Identification::Guessed(identification)
            && (0..64).any(|other| received == icrc(other));
        if !wrong_guess {
            let length = datagram.len();
            assert_eq!(received, icrc(identification), "ICRC of a datagram of {length} bytes");
        }
        let (headers, body) = body.split_at(HEADER_LENGTH);
        let number = u32::from_be_bytes(headers[8..].try_into().unwrap()) as usize;
        if headers[0] == ACKNOWLEDGEMENT {
            assert!(body.is_empty());
            self.acknowledged = self.acknowledged.max(number);
            return;
        }
        assert_eq!(number, self.received, "datagrams arrive in order");
        let (position, length) = self.payload(number);
        assert_eq!(body.len(), length.next_multiple_of(4));
        let (payload, padding) = body.split_at(length);
        let expected = (position..position + length).map(pattern);
        assert!(payload.iter().copied().eq(expected), "bytes of datagram {number}");
        assert!(padding.iter().all(|&byte| byte == 0));
        self.received += 1;
        self.acknowledge = Some(meta.source);
    }
}

impl Node for StreamNode {
    fn handle_datagram(&mut self, _now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        if datagram.len() >= self.ignore_shorter_than {
            self.check(meta, datagram);
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        if self.repeat {
            self.acknowledge = Some(self.peer);
        }
        assert!(!self.panic, "the test wants a panic");
        while let Some(deadline) = self.deadlines.pop_if(|deadline| *deadline <= now) {
            self.fired.push((deadline, now));
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.deadlines.last().copied()
    }

    fn poll_transmit(&mut self, _now: Instant, transmit: &mut Transmit) -> bool {
        let mut headers = [0; HEADER_LENGTH];
        if let Some(peer) = self.acknowledge.take() {
            headers[0] = ACKNOWLEDGEMENT;
            headers[8..].copy_from_slice(&(self.received as u32).to_be_bytes());
            transmit.set(peer, &headers, &[], 0);
            return true;
        }
        if self.sent == self.total || self.sent - self.acknowledged >= self.window {
            return false;
        }
        headers[0] = DATA;
        headers[8..].copy_from_slice(&(self.sent as u32).to_be_bytes());
        let (position, length) = self.payload(self.sent);
        let piece = |position: usize, length: usize| Piece {
            key: 0,
            address: position as u64,
            length: length as u32,
        };
        let first = length.min(7);
        let pieces = [piece(position, first), piece(position + first, length - first)];
        let padding = (length.next_multiple_of(4) - length) as u8;
        transmit.set(self.peer, &headers, &pieces, padding);
        self.sent += 1;
        true
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        let start = piece.address as usize;
        self.memory.get(start..start + piece.length as usize)
    }
}

pub(crate) fn config(address: IpAddr) -> ProgressConfig {
    ProgressConfig { name: "test".to_owned(), ..ProgressConfig::new(address) }
}

/// Runs a [`StreamNode`].
pub(crate) fn start(
    config: ProgressConfig,
    node: StreamNode,
    signal: &Signal,
) -> Progress<StreamNode> {
    // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
    unsafe { Progress::start(config, node, signal.hook()) }.unwrap()
}
