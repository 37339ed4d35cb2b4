//! Many peers and one small receive buffer: what is asked for, and what peers may send, does not
//! overflow it.

use std::net::{IpAddr, Ipv4Addr};
use std::thread;
use std::time::Duration;

use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, MemoryRegion, Piece,
    ProtectionDomain, Psn, QueuePair, QueuePairAttributes, QueuePairCapabilities, QueuePairState,
    ReceiveShare, SendOperation, SendRequest, SoftConfig,
};

/// What an unprivileged process gets where `net.core.rmem_max` is at its default.
const SMALL: usize = 208 << 10;
/// The least that a peer is granted.
const LEAST: u64 = 128 << 10;
/// Bytes of a request.
const MESSAGE: usize = 64 << 10;
/// Requests outstanding on a queue pair.
const DEPTH: usize = 16;
/// Requests of a queue pair.
const REQUESTS: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);

/// A device with memory. Fields are dropped from the top.
struct Host {
    region: MemoryRegion,
    domain: ProtectionDomain,
    device: Device,
    _memory: Vec<u8>,
}

/// A queue pair with a completion queue of its own.
struct End {
    pair: QueuePair,
    completions: CompletionQueue,
}

/// An address that no other process of tests has.
fn address(host: u8) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host).into()
}

impl Host {
    fn open(host: u8) -> Self {
        let config = SoftConfig { buffer_length: SMALL, ..SoftConfig::new(address(host)) };
        let device = Device::open_soft(&config).unwrap();
        let domain = device.allocate_protection_domain();
        let mut memory = vec![host; MESSAGE * DEPTH];
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        // SAFETY: the memory lives as long as the region, and is not touched meanwhile.
        let region = unsafe { domain.register_memory(memory.as_mut_ptr(), memory.len(), access) };
        Self { region: region.unwrap(), domain, device, _memory: memory }
    }

    fn end(&self) -> End {
        let completions = self.device.create_completion_queue(2 * DEPTH).unwrap();
        let capabilities = QueuePairCapabilities::new(DEPTH, 1);
        let pair = self.domain.create_queue_pair(&completions, &completions, capabilities);
        End { pair: pair.unwrap(), completions }
    }
}

fn connect(
    (host, end): (&Host, &End),
    (peer, peer_end): (&Host, &End),
    send_window_bytes: Option<u32>,
) {
    let none = QueuePairAttributes::default();
    let psn = Some(Psn::new(0xff_ff00));
    for attributes in [
        QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(peer.device.address()),
            path_mtu: Some(host.device.path_mtu(peer.device.address()).unwrap()),
            destination_qpn: Some(peer_end.pair.number()),
            receive_psn: psn,
            responder_resources: Some(16),
            minimum_rnr_timer: Some(12),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: psn,
            timeout: Some(17),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(16),
            send_window_bytes,
            ..none
        },
    ] {
        end.pair.modify(&attributes).unwrap();
    }
}

/// Does all requests of a queue pair.
fn work((host, end): (&Host, &End), peer: &Host, write: bool) {
    let (remote_address, remote_key) = (peer.region.address(), peer.region.remote_key());
    let request = |index: usize| {
        let offset = (index % DEPTH * MESSAGE) as u64;
        let remote_address = remote_address + offset;
        let operation = match write {
            true => SendOperation::Write { remote_address, remote_key, immediate: None },
            false => SendOperation::Read { remote_address, remote_key },
        };
        let address = host.region.address() + offset;
        let piece = Piece { key: host.region.key(), address, length: MESSAGE as u32 };
        SendRequest::new(index as u64, operation, [piece])
    };
    let (mut posted, mut done) = (0, 0);
    let mut completions: Vec<Completion> = Vec::new();
    while done < REQUESTS {
        while posted < REQUESTS && posted - done < DEPTH {
            end.pair.post_send(&[request(posted)]).map_err(|(_, error)| error).unwrap();
            posted += 1;
        }
        assert!(end.completions.wait(PATIENCE), "no completion");
        completions.clear();
        done += end.completions.poll(&mut completions, DEPTH);
        assert!(completions.iter().all(|one| one.status == CompletionStatus::Success));
    }
}

/// What hosts repeated, and what their receive buffers lost.
#[derive(Debug, Default)]
struct Losses {
    overflowed: u64,
    retransmissions: u64,
    timeouts: u64,
}

/// `peers` around one host, each connected to it: either they, or it, do their requests, all at once.
/// Different tests have different addresses.
struct Round {
    first_host: u8,
    peers: u8,
    write: bool,
    /// The peers do requests.
    inwards: bool,
}

impl Round {
    fn run(&self) -> Losses {
        let centre = Host::open(self.first_host);
        let peers: Vec<Host> =
            (1..=self.peers).map(|peer| Host::open(self.first_host + peer)).collect();
        let ends: Vec<(&Host, End, End, ReceiveShare)> = peers
            .iter()
            .map(|peer| {
                let share = centre.device.grant_receive_share(1).unwrap();
                (peer, peer.end(), centre.end(), share)
            })
            .collect();
        for (peer, theirs, ours, share) in &ends {
            let window = u32::try_from(share.bytes()).unwrap();
            connect((peer, theirs), (&centre, ours), Some(window));
            connect((&centre, ours), (peer, theirs), None);
        }
        thread::scope(|scope| {
            for (peer, theirs, ours, _) in &ends {
                let centre = &centre;
                scope.spawn(move || match self.inwards {
                    true => work((peer, theirs), centre, self.write),
                    false => work((centre, ours), peer, self.write),
                });
            }
        });
        let mut losses = Losses::default();
        for host in peers.iter().chain([&centre]) {
            let counters = host.device.counters();
            losses.retransmissions += counters.retransmissions;
            losses.timeouts += counters.timeouts;
            losses.overflowed += host.device.driver_counters().overflowed_messages;
        }
        losses
    }

    /// Where a thread has to wait long for a processor, a request may be repeated although nothing
    /// was lost, and both answers come. Without that nothing overflows.
    fn loses_nothing(&self) {
        for _ in 0..50 {
            let losses = self.run();
            println!("{losses:?}");
            if losses.timeouts == 0 {
                assert_eq!((losses.overflowed, losses.retransmissions), (0, 0));
                return;
            }
        }
        panic!("whatever is done, requests time out");
    }
}

#[test]
fn one_reads_from_eight() {
    Round { first_host: 1, peers: 8, write: false, inwards: false }.loses_nothing();
}

#[test]
fn eight_read_from_one() {
    Round { first_host: 21, peers: 8, write: false, inwards: true }.loses_nothing();
}

/// As many as there is room for at full speed.
#[test]
fn two_write_to_one() {
    Round { first_host: 41, peers: 2, write: true, inwards: true }.loses_nothing();
}

#[test]
fn shares_of_peers_that_are_gone_are_free() {
    let host = Host::open(61);
    let grant = |device: &Device| device.grant_receive_share(16).unwrap();
    // The least is more than a small buffer has for an eighth.
    assert_eq!([grant(&host.device), grant(&host.device)].map(|share| share.bytes()), [LEAST; 2]);
    let config = SoftConfig::new(address(62));
    let device = Device::open_soft(&config).unwrap();
    let shares: Vec<ReceiveShare> = (0..30).map(|_| grant(&device)).collect();
    assert!(shares.is_sorted_by(|a, b| a.bytes() >= b.bytes()), "{shares:?}");
    let (first, last) = (shares[0].bytes(), shares[29].bytes());
    assert_eq!(last, LEAST);
    drop(shares);
    assert_eq!(grant(&device).bytes(), first);
}
