//! What the state machines cost: streams between two endpoints in memory, on one thread, with no
//! sockets. Run with `cargo run --release -p millstream-roce --example throughput`.
#![allow(clippy::disallowed_methods, reason = "an example is not the sans-IO crate: it measures")]

use std::net::IpAddr;
use std::time::Instant as Clock;

use millstream_roce::{
    Access, Completion, CompletionQueueId, DatagramMeta, Endpoint, EndpointConfig, IcrcCheck,
    Identification, Instant, Node, OwnedMemory, Piece, ProtectionDomainId, QueuePairAttributes,
    QueuePairCapabilities, QueuePairConfig, QueuePairState, SendOperation, SendRequest, Transmit,
};
use millstream_wire::{Mtu, Psn, Qpn};

const ADDRESS: u64 = 0x1000_0000;
const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);
/// Requests kept outstanding.
const DEPTH: usize = 64;

struct Host {
    endpoint: Endpoint<OwnedMemory>,
    address: IpAddr,
    queue: CompletionQueueId,
    qpn: Qpn,
    key: u32,
}

fn host(number: u8, icrc: IcrcCheck, length: usize) -> Host {
    let address = IpAddr::from([127, 0, 0, number]);
    let config = EndpointConfig { icrc, ..EndpointConfig::new(address, number.into()) };
    let mut memory = OwnedMemory::new(4);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let key = memory.register(DOMAIN, ADDRESS, access, vec![number; length]).expect("a region");
    let mut endpoint = Endpoint::new(config, memory);
    let queue = endpoint.create_completion_queue(4096).expect("a completion queue");
    let config = QueuePairConfig::new(DOMAIN, queue, QueuePairCapabilities::new(DEPTH, DEPTH));
    let qpn = endpoint.create_queue_pair(&config).expect("a queue pair");
    Host { endpoint, address, queue, qpn, key }
}

fn connect(hosts: &mut [Host; 2], mtu: Mtu) {
    for side in 0..2 {
        let (remote_address, remote_qpn) = (hosts[1 - side].address, hosts[1 - side].qpn);
        let none = QueuePairAttributes::default();
        let steps = [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(remote_address),
                path_mtu: Some(mtu),
                destination_qpn: Some(remote_qpn),
                receive_psn: Some(Psn::new(0xff_ff00)),
                responder_resources: Some(16),
                minimum_rnr_timer: Some(12),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(Psn::new(0xff_ff00)),
                timeout: Some(14),
                retry_count: Some(7),
                rnr_retry: Some(7),
                initiator_depth: Some(16),
                ..none
            },
        ];
        let host = &mut hosts[side];
        for attributes in &steps {
            host.endpoint
                .modify_queue_pair(Instant::ZERO, host.qpn, attributes)
                .expect("a transition");
        }
    }
}

/// Moves datagrams, up to a batch from each side, until neither has any.
fn exchange(hosts: &mut [Host; 2], now: Instant, datagram: &mut Vec<u8>, check: bool) -> u64 {
    let mut transmit = Transmit::new();
    let mut packets = 0;
    loop {
        let before = packets;
        for from in 0..2 {
            let [a, b] = &mut *hosts;
            let (sender, receiver) = if from == 0 { (a, b) } else { (b, a) };
            let meta = DatagramMeta {
                source: sender.address,
                source_port: 4791,
                destination: receiver.address,
                identification: Identification::Known(0),
                congestion_experienced: false,
            };
            for _ in 0..64 {
                if !sender.endpoint.poll_transmit(now, &mut transmit) {
                    break;
                }
                datagram.clear();
                if check {
                    let sent =
                        transmit.assemble(&sender.endpoint, sender.address, 4791, 0, datagram);
                    assert!(sent, "the payload is there");
                } else {
                    // What `assemble` does, without the checksum.
                    datagram.extend_from_slice(transmit.headers());
                    for piece in transmit.payload() {
                        let bytes = sender.endpoint.bytes(piece).expect("the payload is there");
                        datagram.extend_from_slice(bytes);
                    }
                    datagram.extend_from_slice(transmit.padding());
                    datagram.extend_from_slice(&[0; 4]);
                }
                receiver.endpoint.handle_datagram(now, &meta, datagram);
                packets += 1;
            }
        }
        if packets == before {
            return packets;
        }
    }
}

fn stream(name: &str, operation: fn(u32) -> SendOperation, length: usize, mtu: Mtu, check: bool) {
    let icrc = if check { IcrcCheck::Exact } else { IcrcCheck::Off };
    let mut hosts = [1, 2].map(|number| host(number, icrc, length));
    connect(&mut hosts, mtu);
    let piece = Piece { key: hosts[0].key, address: ADDRESS, length: length as u32 };
    let request = SendRequest::new(1, operation(hosts[1].key), [piece]);
    let mut datagram = Vec::with_capacity(8192);
    let mut completions: Vec<Completion> = Vec::with_capacity(DEPTH);
    let total = (1_usize << 30).min(length * 400_000) / length;
    let start = Clock::now();
    let (mut posted, mut completed, mut packets) = (0, 0, 0);
    while completed < total {
        let now = Instant::from_nanos(start.elapsed().as_nanos() as u64);
        let host = &mut hosts[0];
        while posted < total && posted - completed < DEPTH {
            host.endpoint.post_send(now, host.qpn, &request).expect("room in the queue");
            posted += 1;
        }
        packets += exchange(&mut hosts, now, &mut datagram, check);
        let host = &mut hosts[0];
        completions.clear();
        completed += host.endpoint.poll_completions(host.queue, &mut completions, DEPTH);
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{name:6} {length:8} B  path MTU {mtu:5}  {:8}  {:6.2} Mpackets/s  {:7.1} ns/packet  \
         {:6.2} GB/s",
        if check { "ICRC" } else { "no ICRC" },
        packets as f64 / seconds / 1e6,
        seconds * 1e9 / packets as f64,
        (length * total) as f64 / seconds / 1e9,
    );
}

/// What a datagram costs that is not for us, or not as it left its sender.
fn garbage(name: &str, length: usize, spoil: fn(&mut Vec<u8>)) {
    let mut hosts = [1, 2].map(|number| host(number, IcrcCheck::AnyIdentification, length));
    connect(&mut hosts, Mtu::B4096);
    let (now, key) = (Instant::ZERO, hosts[1].key);
    let piece = Piece { key: hosts[0].key, address: ADDRESS, length: length as u32 };
    let pieces = [piece];
    let request = SendRequest::new(1, write(key), pieces);
    let [sender, receiver] = &mut hosts;
    sender.endpoint.post_send(now, sender.qpn, &request).expect("room in the queue");
    let mut transmit = Transmit::new();
    assert!(sender.endpoint.poll_transmit(now, &mut transmit), "the request goes out");
    let mut datagram = Vec::new();
    assert!(transmit.assemble(&sender.endpoint, sender.address, 4791, 0, &mut datagram));
    spoil(&mut datagram);
    let meta = DatagramMeta {
        source: sender.address,
        source_port: 4791,
        destination: receiver.address,
        identification: Identification::Guessed(0),
        congestion_experienced: false,
    };
    let count = 1_000_000;
    let start = Clock::now();
    for _ in 0..count {
        receiver.endpoint.handle_datagram(now, &meta, &datagram);
    }
    let seconds = start.elapsed().as_secs_f64();
    let taken = receiver.endpoint.counters().payload_bytes_received;
    assert_eq!(taken, 0, "garbage is dropped");
    println!("{name:24} {length:5} B  {:7.1} ns/packet", seconds * 1e9 / f64::from(count));
}

fn write(key: u32) -> SendOperation {
    SendOperation::Write { remote_address: ADDRESS, remote_key: key, immediate: None }
}

fn read(key: u32) -> SendOperation {
    SendOperation::Read { remote_address: ADDRESS, remote_key: key }
}

fn main() {
    for check in [false, true] {
        stream("WRITE", write, 8, Mtu::B1024, check);
        stream("WRITE", write, 65_536, Mtu::B256, check);
        stream("WRITE", write, 65_536, Mtu::B1024, check);
        stream("WRITE", write, 65_536, Mtu::B4096, check);
        stream("READ", read, 65_536, Mtu::B1024, check);
        stream("READ", read, 65_536, Mtu::B4096, check);
    }
    garbage("truncated", 8, |datagram| datagram.truncate(11));
    garbage("unknown opcode", 8, |datagram| datagram[0] = 0x1f);
    garbage("unknown queue pair", 4096, |datagram| datagram[7] ^= 1);
    garbage("damaged", 8, |datagram| datagram[30] ^= 1);
    garbage("damaged", 4096, |datagram| datagram[30] ^= 1);
}
