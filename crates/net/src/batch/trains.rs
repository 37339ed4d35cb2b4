//! How many messages to the kernel an endpoint's packets become: what an endpoint sends at a time,
//! grouped as a batch is. There is no socket and no time in it, so the numbers are always the same.

use std::net::IpAddr;

use millstream_roce::{
    Access, DatagramMeta, Endpoint, EndpointConfig, Identification, Instant, Node, OwnedMemory,
    Piece, ProtectionDomainId, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig,
    QueuePairState, SendOperation, SendRequest, Transmit,
};
use millstream_wire::{Mtu, Psn, Qpn};

use super::group::group;

const MIB: usize = 1 << 20;
/// What a batch holds.
const BATCH: usize = 128;
const PSN: u32 = 1;

struct Host {
    endpoint: Endpoint<OwnedMemory>,
    address: IpAddr,
    qpn: Qpn,
    key: u32,
    /// Datagrams with payload, messages to the kernel that hold some, and bytes of those.
    sent: Sent,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Sent {
    datagrams: usize,
    messages: usize,
    bytes: usize,
}

impl Host {
    fn new(number: u8, split_writes: bool) -> Self {
        let address = IpAddr::from([10, 0, 0, number]);
        let config = EndpointConfig::new(address, number.into());
        let mut endpoint = Endpoint::new(config, OwnedMemory::new(1));
        let domain = ProtectionDomainId(1);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let key = endpoint.memory_mut().register(domain, 0, access, vec![number; MIB]).unwrap();
        let queue = endpoint.create_completion_queue(2 * MIB / 4096).unwrap();
        let capabilities = QueuePairCapabilities::new(MIB / 4096, 1);
        let config =
            QueuePairConfig { split_writes, ..QueuePairConfig::new(domain, queue, capabilities) };
        let qpn = endpoint.create_queue_pair(&config).unwrap();
        Self { endpoint, address, qpn, key, sent: Sent::default() }
    }

    fn connect(&mut self, address: IpAddr, qpn: Qpn, mtu: Mtu) {
        let none = QueuePairAttributes::default();
        let states = [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(address),
                path_mtu: Some(mtu),
                destination_qpn: Some(qpn),
                receive_psn: Some(Psn::new(PSN)),
                responder_resources: Some(16),
                minimum_rnr_timer: Some(12),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(Psn::new(PSN)),
                timeout: Some(14),
                retry_count: Some(7),
                rnr_retry: Some(7),
                initiator_depth: Some(16),
                ..none
            },
        ];
        for attributes in states {
            let modified = self.endpoint.modify_queue_pair(Instant::ZERO, self.qpn, &attributes);
            modified.unwrap();
        }
    }

    /// What it has to send now, at most a batch of it.
    fn batch(&mut self) -> Vec<Vec<u8>> {
        let mut transmit = Transmit::new();
        let mut datagrams = Vec::new();
        while datagrams.len() < BATCH && self.endpoint.poll_transmit(Instant::ZERO, &mut transmit) {
            let mut datagram = Vec::new();
            assert!(transmit.assemble(&self.endpoint, self.address, 4791, 0, &mut datagram));
            datagrams.push(datagram);
        }
        let mut rest = &datagrams[..];
        while !rest.is_empty() {
            let (message, others) = rest.split_at(group(rest.iter().map(|one| ((), one.len()))));
            let payload = || message.iter().filter(|datagram| datagram.len() > 100);
            self.sent.datagrams += payload().count();
            self.sent.messages += usize::from(payload().count() > 0);
            self.sent.bytes += payload().map(Vec::len).sum::<usize>();
            rest = others;
        }
        datagrams
    }
}

/// What a MiB in requests of `size` bytes takes.
fn per_mib(mtu: Mtu, size: usize, operation: Operation, split_writes: bool) -> Sent {
    let mut hosts = [1, 2].map(|number| Host::new(number, split_writes));
    let far = [1, 0].map(|other: usize| (hosts[other].address, hosts[other].qpn));
    for (host, (address, qpn)) in hosts.iter_mut().zip(far) {
        host.connect(address, qpn, mtu);
    }
    let (key, remote_key) = (hosts[0].key, hosts[1].key);
    for offset in (0..MIB).step_by(size) {
        let remote_address = offset as u64;
        let operation = match operation {
            Operation::Write => {
                SendOperation::Write { remote_address, remote_key, immediate: None }
            }
            Operation::Read => SendOperation::Read { remote_address, remote_key },
        };
        let piece = Piece { key, address: remote_address, length: size as u32 };
        let request = SendRequest::new(0, operation, [piece]);
        let qpn = hosts[0].qpn;
        hosts[0].endpoint.post_send(Instant::ZERO, qpn, &request).unwrap();
    }
    loop {
        let batches = hosts.each_mut().map(Host::batch);
        if batches.iter().all(Vec::is_empty) {
            break;
        }
        for (from, batch) in batches.into_iter().enumerate() {
            let meta = DatagramMeta {
                source: hosts[from].address,
                source_port: 4791,
                destination: hosts[1 - from].address,
                identification: Identification::Known(0),
                congestion_experienced: false,
            };
            for datagram in batch {
                hosts[1 - from].endpoint.handle_datagram(Instant::ZERO, &meta, &datagram);
            }
        }
    }
    let target = match operation {
        Operation::Write => 1,
        Operation::Read => 0,
    };
    let arrived = hosts[target].endpoint.memory().region(hosts[target].key).unwrap();
    assert!(arrived.iter().all(|&byte| byte == 2 - target as u8));
    hosts[1 - target].sent
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Write,
    Read,
}

/// Of a WRITE, of one that may be split, and of a READ. The first packet of a WRITE is 16 bytes longer
/// than those behind it, the first and the last answer to a READ are 4 bytes longer than those
/// between them; of these the last shares a message with the first of the next. A message takes 15
/// packets of the larger path MTU and 62 of the smaller one.
#[test]
fn messages_to_the_kernel_of_a_mib() {
    let messages = |mtu, size| {
        let whole = per_mib(mtu, size, Operation::Write, false).messages;
        let split = per_mib(mtu, size, Operation::Write, true).messages;
        [whole, split, per_mib(mtu, size, Operation::Read, true).messages]
    };
    for (mtu, size, expected) in [
        (Mtu::B4096, 4 << 10, [19, 19, 32]),
        (Mtu::B4096, 16 << 10, [128, 19, 132]),
        (Mtu::B4096, 64 << 10, [32, 19, 35]),
        (Mtu::B4096, 128 << 10, [24, 19, 27]),
        (Mtu::B4096, 1 << 20, [20, 20, 27]),
        (Mtu::B1024, 4 << 10, [512, 25, 528]),
        (Mtu::B1024, 16 << 10, [128, 25, 137]),
        (Mtu::B1024, 64 << 10, [32, 25, 41]),
        (Mtu::B1024, 128 << 10, [32, 25, 40]),
        (Mtu::B1024, 1 << 20, [25, 25, 40]),
    ] {
        assert_eq!(messages(mtu, size), expected, "{mtu}, {size} bytes");
    }
}

/// What that costs: the 16 bytes in more packets.
#[test]
fn bytes_of_a_mib_that_is_written() {
    let sent = |split| per_mib(Mtu::B4096, 64 << 10, Operation::Write, split);
    let whole = Sent { datagrams: 256, messages: 32, bytes: MIB + 256 * 16 + 16 * 16 };
    assert_eq!(sent(false), whole);
    assert_eq!(sent(true), Sent { messages: 19, bytes: MIB + 256 * 32, ..whole });
}
