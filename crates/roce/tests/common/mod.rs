//! Two endpoints and a wire between them, under virtual time.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod forge;
pub(crate) mod operations;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use millstream_roce::{
    Access, Completion, CompletionQueueId, DatagramMeta, Endpoint, EndpointConfig, IcrcCheck,
    Identification, Instant, Node, OwnedMemory, Piece, ProtectionDomainId, QueuePairAttributes,
    QueuePairCapabilities, QueuePairConfig, QueuePairState, ReceiveRequest, SendOperation,
    SendRequest, Transmit,
};
use millstream_wire::{Mtu, Packet, Psn, Qpn};

/// How many seeds a fuzzing test tries: so many, unless `MILLSTREAM_FUZZ_SEEDS` says otherwise.
pub(crate) fn seeds(usual: u64) -> u64 {
    std::env::var("MILLSTREAM_FUZZ_SEEDS")
        .map_or(usual, |count| count.parse().expect("MILLSTREAM_FUZZ_SEEDS is a number"))
}

pub(crate) const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);

pub(crate) struct Host {
    pub(crate) endpoint: Endpoint<OwnedMemory>,
    pub(crate) address: IpAddr,
    pub(crate) queue: CompletionQueueId,
    pub(crate) qpn: Qpn,
    pub(crate) completions: Vec<Completion>,
    /// Datagrams on their way to this host.
    pub(crate) inbound: VecDeque<(Instant, Vec<u8>)>,
}

pub(crate) struct Pair {
    pub(crate) now: Instant,
    pub(crate) hosts: [Host; 2],
    pub(crate) latency: Duration,
    /// Decides what happens to each datagram: receiver, and the datagram. Empty = lost; two =
    /// doubled.
    pub(crate) wire: Wire,
}

/// See [`Pair::wire`].
pub(crate) type Wire = Box<dyn FnMut(usize, &[u8]) -> Vec<Vec<u8>>>;

#[derive(Clone, Copy)]
pub(crate) struct Options {
    pub(crate) mtu: Mtu,
    pub(crate) psn: [u32; 2],
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) depth: u8,
    pub(crate) access: Access,
    pub(crate) icrc: IcrcCheck,
    pub(crate) max_window: u32,
    pub(crate) max_message_length: u32,
    pub(crate) completions: usize,
    pub(crate) work_requests: usize,
    pub(crate) max_inline: usize,
    pub(crate) split_writes: bool,
    pub(crate) acknowledgement_delay: Duration,
    pub(crate) reordering: Duration,
    pub(crate) partition_keys: &'static [u16],
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mtu: Mtu::B256,
            psn: [0xff_fff0, 0x12_3456],
            timeout: 10,
            retry_count: 7,
            rnr_retry: 7,
            depth: 4,
            access: everything(),
            icrc: IcrcCheck::AnyIdentification,
            max_window: 128,
            max_message_length: 1 << 30,
            completions: 4096,
            work_requests: 256,
            max_inline: 0,
            split_writes: false,
            acknowledgement_delay: Duration::ZERO,
            reordering: Duration::ZERO,
            partition_keys: &[0xffff],
        }
    }
}

pub(crate) fn everything() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(Options::default())
    }

    pub(crate) fn with(options: Options) -> Self {
        let mut hosts = [1_u8, 2].map(|n| {
            let address = IpAddr::from([10, 0, 0, n]);
            let config = EndpointConfig {
                icrc: options.icrc,
                partition_keys: options.partition_keys.to_vec(),
                max_window: options.max_window,
                max_message_length: options.max_message_length,
                reordering: options.reordering,
                ..EndpointConfig::new(address, n.into())
            };
            let mut endpoint = Endpoint::new(config, OwnedMemory::new(64));
            let queue = endpoint.create_completion_queue(options.completions).unwrap();
            let capabilities = QueuePairCapabilities {
                max_inline: options.max_inline,
                ..QueuePairCapabilities::new(options.work_requests, options.work_requests)
            };
            let config = QueuePairConfig {
                split_writes: options.split_writes,
                acknowledgement_delay: options.acknowledgement_delay,
                ..QueuePairConfig::new(DOMAIN, queue, capabilities)
            };
            let qpn = endpoint.create_queue_pair(&config).unwrap();
            let inbound = VecDeque::new();
            Host { endpoint, address, queue, qpn, completions: Vec::new(), inbound }
        });
        for i in 0..2 {
            let (remote_address, qpn) = (hosts[1 - i].address, hosts[1 - i].qpn);
            let host = &mut hosts[i];
            for attributes in connect(&options, i, remote_address, qpn) {
                host.endpoint.modify_queue_pair(Instant::ZERO, host.qpn, &attributes).unwrap();
            }
        }
        let wire = Box::new(|_: usize, datagram: &[u8]| vec![datagram.to_vec()]);
        Self { now: Instant::ZERO, hosts, latency: Duration::from_micros(10), wire }
    }

    pub(crate) fn register(&mut self, host: usize, address: u64, bytes: Vec<u8>) -> u32 {
        let memory = self.hosts[host].endpoint.memory_mut();
        memory.register(DOMAIN, address, everything(), bytes).unwrap()
    }

    pub(crate) fn region(&self, host: usize, key: u32) -> &[u8] {
        self.hosts[host].endpoint.memory().region(key).unwrap()
    }

    pub(crate) fn post(
        &mut self,
        host: usize,
        id: u64,
        operation: SendOperation,
        pieces: &[Piece],
    ) {
        let request = SendRequest::new(id, operation, pieces);
        let host = &mut self.hosts[host];
        host.endpoint.post_send(self.now, host.qpn, &request).unwrap();
    }

    pub(crate) fn receive(&mut self, host: usize, id: u64, pieces: &[Piece]) {
        let host = &mut self.hosts[host];
        host.endpoint.post_receive(host.qpn, &ReceiveRequest { id, pieces }).unwrap();
    }

    /// Sends what there is to send, then moves time to the next arrival or deadline and acts on
    /// it. Returns `false` when nothing will happen any more.
    pub(crate) fn step(&mut self) -> bool {
        self.flush();
        let next = self
            .hosts
            .iter_mut()
            .filter_map(|host| {
                let arrival = host.inbound.front().map(|(at, _)| *at);
                match (arrival, host.endpoint.poll_timeout()) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                }
            })
            .min();
        let Some(next) = next else { return false };
        self.now = self.now.max(next);
        for i in 0..2 {
            let source = self.hosts[1 - i].address;
            let host = &mut self.hosts[i];
            while host.inbound.front().is_some_and(|(at, _)| *at <= self.now) {
                let (_, datagram) = host.inbound.pop_front().unwrap();
                let meta = meta(source, host.address);
                host.endpoint.handle_datagram(self.now, &meta, &datagram);
            }
            host.endpoint.handle_timeout(self.now);
        }
        self.flush();
        true
    }

    fn flush(&mut self) {
        let mut transmit = Transmit::new();
        for i in 0..2 {
            loop {
                let host = &mut self.hosts[i];
                if !host.endpoint.poll_transmit(self.now, &mut transmit) {
                    break;
                }
                let mut datagram = Vec::new();
                assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
                assert_eq!(datagram.len(), transmit.datagram_length());
                let at = self.now + self.latency;
                for datagram in (self.wire)(1 - i, &datagram) {
                    self.hosts[1 - i].inbound.push_back((at, datagram));
                }
            }
            let host = &mut self.hosts[i];
            host.endpoint.poll_completions(host.queue, &mut host.completions, usize::MAX);
        }
    }

    /// Steps until nothing happens any more, within `limit` of virtual time.
    pub(crate) fn run(&mut self, limit: Duration) {
        let end = self.now + limit;
        while self.step() {
            assert!(self.now <= end, "still busy after {limit:?}");
        }
    }

    /// The completions of a host so far, taken.
    pub(crate) fn completions(&mut self, host: usize) -> Vec<Completion> {
        std::mem::take(&mut self.hosts[host].completions)
    }

    /// Hands a host a datagram from its peer, as it is.
    pub(crate) fn inject(&mut self, host: usize, datagram: &[u8]) {
        let meta = meta(self.hosts[1 - host].address, self.hosts[host].address);
        self.hosts[host].endpoint.handle_datagram(self.now, &meta, datagram);
    }

    /// How many packets a host keeps that came before their turn.
    pub(crate) fn early_packets(&self, host: usize) -> usize {
        self.hosts[host].endpoint.usage().early_packets
    }

    /// So much later; only this host looks at its deadlines, once.
    pub(crate) fn pass(&mut self, host: usize, time: Duration) {
        self.now = self.now + time;
        self.hosts[host].endpoint.handle_timeout(self.now);
    }

    pub(crate) fn modify(&mut self, host: usize, state: QueuePairState) {
        let host = &mut self.hosts[host];
        let to = QueuePairAttributes { state: Some(state), ..QueuePairAttributes::default() };
        host.endpoint.modify_queue_pair(self.now, host.qpn, &to).unwrap();
    }

    pub(crate) fn state(&self, host: usize) -> QueuePairState {
        let host = &self.hosts[host];
        host.endpoint.queue_pair_state(host.qpn).unwrap()
    }
}

pub(crate) fn connect(
    options: &Options,
    side: usize,
    remote_address: IpAddr,
    qpn: Qpn,
) -> [QueuePairAttributes; 3] {
    let none = QueuePairAttributes::default();
    [
        QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            access: Some(options.access),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(remote_address),
            path_mtu: Some(options.mtu),
            destination_qpn: Some(qpn),
            receive_psn: Some(Psn::new(options.psn[1 - side])),
            responder_resources: Some(options.depth),
            minimum_rnr_timer: Some(12),
            ..none
        },
        QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(Psn::new(options.psn[side])),
            timeout: Some(options.timeout),
            retry_count: Some(options.retry_count),
            rnr_retry: Some(options.rnr_retry),
            initiator_depth: Some(options.depth),
            ..none
        },
    ]
}

pub(crate) fn meta(source: IpAddr, destination: IpAddr) -> DatagramMeta {
    DatagramMeta {
        source,
        source_port: 4791,
        destination,
        identification: Identification::Known(0),
        congestion_experienced: false,
    }
}

/// A datagram with its ICRC made right, from host `1 - to`.
pub(crate) fn sign(pair: &Pair, to: usize, packet: &Packet<'_>) -> Vec<u8> {
    use millstream_wire::icrc::{Addresses, Addressing, of_datagram};
    let mut buffer = vec![0; 8192];
    let length = packet.emit(&mut buffer);
    buffer.truncate(length);
    let addresses =
        Addresses::unfragmented(pair.hosts[1 - to].address, pair.hosts[to].address, 0).unwrap();
    let addressing = Addressing { addresses, source_port: 4791, destination_port: 4791 };
    let icrc = of_datagram(&addressing, &buffer);
    let end = buffer.len() - 4;
    buffer[end..].copy_from_slice(&icrc.to_le_bytes());
    buffer
}

pub(crate) fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

pub(crate) fn piece(key: u32, address: u64, length: usize) -> Piece {
    Piece { key, address, length: length as u32 }
}

/// A small generator for faults: the tests need repeatable, not good, randomness.
pub(crate) struct Lcg(pub(crate) u64);

impl Lcg {
    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((self.0 >> 33) as u32) % limit
    }
}
