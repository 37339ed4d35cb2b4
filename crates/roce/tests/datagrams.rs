//! Unreliable datagrams: one packet each, to and from anyone who knows the queue key.

mod common;

use std::net::IpAddr;
use std::time::Duration;

use common::forge::Forge;
use common::{DOMAIN, Options, Pair, meta, pattern, piece};
use millstream_roce::{
    AsyncEvent, Completion, CompletionOperation, CompletionStatus, Counters, DatagramDestination,
    Endpoint, EndpointConfig, Identification, Instant, ModifyError, Node, OwnedMemory, Piece,
    PostError, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig,
    QueuePairState as State, ReceiveRequest, SendOperation, SendRequest, Transmit, Transport,
};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::ipv6::Ipv6Header;
use millstream_wire::{Opcode, Packet, Psn, Qpn};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const KEY: u32 = 0x1111_1111;
const FIRST: u32 = 0xff_ffff;
const ROUTE: usize = 40;
const OK: CompletionStatus = CompletionStatus::Success;

fn attributes(state: State) -> QueuePairAttributes {
    let (queue_key, send_psn) = match state {
        State::Initialized => (Some(KEY), None),
        State::ReadyToSend => (None, Some(Psn::new(FIRST))),
        _ => (None, None),
    };
    QueuePairAttributes { state: Some(state), queue_key, send_psn, ..Default::default() }
}

/// A queue pair for datagrams at a host.
fn datagram_pair(pair: &mut Pair, host: usize) -> Qpn {
    let host = &mut pair.hosts[host];
    let config = QueuePairConfig {
        transport: Transport::UnreliableDatagram,
        ..QueuePairConfig::new(
            DOMAIN,
            host.queue,
            QueuePairCapabilities { max_inline: 200, ..QueuePairCapabilities::new(16, 16) },
        )
    };
    let qpn = host.endpoint.create_queue_pair(&config).unwrap();
    for state in [State::Initialized, State::ReadyToReceive, State::ReadyToSend] {
        host.endpoint.modify_queue_pair(Instant::ZERO, qpn, &attributes(state)).unwrap();
    }
    qpn
}

/// A queue pair for datagrams at each of two hosts.
struct Scene {
    pair: Pair,
    qpns: [Qpn; 2],
    local: u32,
    target: u32,
}

impl Scene {
    fn new() -> Self {
        Self::with(Options::default())
    }

    fn with(options: Options) -> Self {
        let mut pair = Pair::with(options);
        let qpns = [0, 1].map(|host| datagram_pair(&mut pair, host));
        let local = pair.register(0, LOCAL, pattern(5000, 1));
        let target = pair.register(1, REMOTE, vec![0xee; 10_000]);
        Self { pair, qpns, local, target }
    }

    fn to(&self, qpn: Qpn, queue_key: u32) -> Option<DatagramDestination> {
        Some(DatagramDestination { address: self.pair.hosts[1].address, qpn, queue_key })
    }

    fn request(&self, id: u64, length: usize) -> SendRequest {
        let pieces = [piece(self.local, LOCAL, length)];
        let datagram = self.to(self.qpns[1], KEY);
        let send = SendOperation::Send { immediate: None };
        SendRequest { datagram, ..SendRequest::new(id, send, pieces) }
    }

    /// A request for inline bytes.
    fn inline_request(&self, id: u64) -> SendRequest<[Piece; 0]> {
        let SendRequest { operation, datagram, .. } = self.request(id, 0);
        SendRequest { datagram, ..SendRequest::new(id, operation, []) }
    }

    fn post(&mut self, request: &SendRequest) -> Result<(), PostError> {
        let (now, qpn) = (self.pair.now, self.qpns[0]);
        self.pair.hosts[0].endpoint.post_send(now, qpn, request)
    }

    /// Posts a receive of so many bytes at `offset` of the target.
    fn receive(&mut self, id: u64, offset: usize, length: usize) {
        let pieces = [piece(self.target, REMOTE + offset as u64, length)];
        let (qpn, request) = (self.qpns[1], ReceiveRequest { id, pieces });
        self.pair.hosts[1].endpoint.post_receive(qpn, &request).unwrap();
    }

    fn run(&mut self) {
        self.pair.run(Duration::from_secs(1));
    }

    fn ends(&mut self, host: usize) -> Vec<(u64, CompletionStatus)> {
        self.pair.poll(host);
        self.pair.completions(host).iter().map(|c| (c.id, c.status)).collect()
    }

    fn go(&mut self, host: usize, state: State) -> Result<(), ModifyError> {
        self.modify(host, &QueuePairAttributes { state: Some(state), ..Default::default() })
    }

    fn modify(&mut self, host: usize, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
        let (now, qpn) = (self.pair.now, self.qpns[host]);
        self.pair.hosts[host].endpoint.modify_queue_pair(now, qpn, attributes)
    }

    fn state(&self, host: usize) -> State {
        self.pair.hosts[host].endpoint.queue_pair_state(self.qpns[host]).unwrap()
    }

    fn target(&self) -> &[u8] {
        self.pair.region(1, self.target)
    }
}

#[test]
fn a_message_arrives_behind_the_header_of_its_packet() {
    for (length, immediate) in [(0, None), (1, Some(7)), (1000, None), (4096, Some(u32::MAX))] {
        let mut scene = Scene::new();
        scene.receive(5, 10, 5000);
        let operation = SendOperation::Send { immediate };
        let request = SendRequest { operation, ..scene.request(1, length) };
        scene.post(&request).unwrap();
        scene.run();
        let (qpn, sent) = (scene.qpns[0], scene.pair.completions(0));
        let expected = Completion {
            length: length as u32,
            ..Completion::new(1, qpn, OK, CompletionOperation::Send)
        };
        assert_eq!(sent, [expected]);
        let received = scene.pair.completions(1);
        let expected = Completion {
            length: (ROUTE + length) as u32,
            immediate,
            source: Some(qpn),
            ..Completion::new(5, scene.qpns[1], OK, CompletionOperation::Receive)
        };
        assert_eq!(received, [expected]);
        let (before, rest) = scene.target().split_at(10);
        let (route, rest) = rest.split_at(ROUTE);
        let (message, after) = rest.split_at(length);
        assert_eq!(message, &pattern(5000, 1)[..length]);
        assert!(before.iter().chain(after).all(|&byte| byte == 0xee));
        assert_eq!(route[..20], [0; 20]);
        // Header and packet as the kernel would have seen them.
        let datagram =
            12 + 8 + 4 * usize::from(immediate.is_some()) + length.next_multiple_of(4) + 4;
        let mut ip = route[20..].to_vec();
        ip.resize(20 + 8 + datagram, 0);
        let (header, payload) = Ipv4Header::parse(&ip).unwrap();
        assert_eq!(payload.len(), 8 + datagram);
        assert_eq!(header.checksum, header.computed_checksum());
        assert_eq!(IpAddr::from(header.source), scene.pair.hosts[0].address);
        assert_eq!(IpAddr::from(header.destination), scene.pair.hosts[1].address);
        assert_eq!((header.protocol, header.flags), (17, 0x4000));
    }
}

#[test]
fn over_ipv6_the_header_fills_its_place() {
    let [a, b]: [IpAddr; 2] = ["2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap()];
    let mut endpoint = Endpoint::new(EndpointConfig::new(b, 1), OwnedMemory::new(4));
    let queue = endpoint.create_completion_queue(8).unwrap();
    let config = QueuePairConfig {
        transport: Transport::UnreliableDatagram,
        ..QueuePairConfig::new(DOMAIN, queue, QueuePairCapabilities::new(4, 4))
    };
    let qpn = endpoint.create_queue_pair(&config).unwrap();
    for state in [State::Initialized, State::ReadyToReceive, State::ReadyToSend] {
        endpoint.modify_queue_pair(Instant::ZERO, qpn, &attributes(state)).unwrap();
    }
    let key =
        endpoint.memory_mut().register(DOMAIN, LOCAL, common::everything(), vec![0; 100]).unwrap();
    // To itself, and back in by hand.
    let pieces = [piece(key, LOCAL, 100)];
    endpoint.post_receive(qpn, &ReceiveRequest { id: 1, pieces }).unwrap();
    let send = SendOperation::Send { immediate: None };
    let request = SendRequest {
        datagram: Some(DatagramDestination { address: a, qpn, queue_key: KEY }),
        ..SendRequest::new(2, send, [piece(key, LOCAL + 50, 6)])
    };
    endpoint.post_send(Instant::ZERO, qpn, &request).unwrap();
    let mut transmit = Transmit::new();
    assert!(endpoint.poll_transmit(Instant::ZERO, &mut transmit));
    assert_eq!(transmit.destination, a);
    transmit.destination = b;
    let mut datagram = Vec::new();
    assert!(transmit.assemble(&endpoint, a, 4791, 0, &mut datagram));
    let mut meta = meta(a, b);
    meta.congestion_experienced = true;
    endpoint.handle_datagram(Instant::ZERO, &meta, &datagram);
    let mut received = Vec::new();
    assert_eq!(endpoint.poll_completions(queue, &mut received, 9), 1);
    assert_eq!((received[0].id, received[0].length), (1, 46));
    let mut ip = endpoint.memory().region(key).unwrap()[..ROUTE].to_vec();
    ip.resize(ROUTE + 8 + datagram.len(), 0);
    let (header, _) = Ipv6Header::parse(&ip).unwrap();
    assert_eq!((IpAddr::from(header.source), IpAddr::from(header.destination)), (a, b));
    assert_eq!((header.next_header, header.traffic_class), (17, 3));
    assert_eq!(usize::from(header.payload_length), 8 + datagram.len());
}

/// What is dropped leaves no trace but its counter, nothing is answered, and the next good one
/// arrives.
#[test]
fn what_does_not_belong_is_dropped_and_counted() {
    type Spoil = fn(&mut Forge);
    type Count = fn(&Counters) -> u64;
    let table: [(&str, Opcode, Spoil, Count); 8] = [
        (
            "queue key",
            Opcode::UdSendOnly,
            |f| *f = f.clone().deth(KEY ^ 1, 9),
            |c| c.dropped_queue_key,
        ),
        (
            "partition",
            Opcode::UdSendOnly,
            |f| f.bth.partition_key = 0x8001,
            |c| c.dropped_partition_key,
        ),
        (
            "another queue pair",
            Opcode::UdSendOnly,
            |f| f.bth.destination_qpn = Qpn::new(5),
            |c| c.dropped_qpn,
        ),
        (
            "all of a multicast group",
            Opcode::UdSendOnly,
            |f| {
                f.bth.destination_qpn = Qpn::new(0xff_ffff);
            },
            |c| c.dropped_qpn,
        ),
        ("a connection's message", Opcode::RcSendOnly, |_| {}, |c| c.dropped_opcode),
        (
            "a connection's answer",
            Opcode::RcAcknowledge,
            |f| *f = f.clone().payload(b""),
            |c| c.dropped_opcode,
        ),
        (
            "a message that does not fit",
            Opcode::UdSendOnly,
            |f| {
                *f = f.clone().payload(&[1; 101]);
            },
            |c| c.dropped_no_receive,
        ),
        (
            "longer than a packet",
            Opcode::UdSendOnly,
            |f| *f = f.clone().payload(&[1; 4100]),
            |c| c.dropped_malformed,
        ),
    ];
    for (what, opcode, spoil, count) in table {
        let mut scene = Scene::new();
        scene.receive(1, 0, ROUTE + 100);
        let mut forge = Forge::new(&scene.pair, 1, opcode, 0).payload(b"good");
        forge.bth.destination_qpn = scene.qpns[1];
        let mut bad = if opcode.has_deth() { forge.clone().deth(KEY, 9) } else { forge };
        let mut good = Forge::new(&scene.pair, 1, Opcode::UdSendOnly, 0).deth(KEY, 9);
        good = good.payload(b"good");
        good.bth.destination_qpn = scene.qpns[1];
        spoil(&mut bad);
        bad.inject(&mut scene.pair);
        assert_eq!(count(&scene.pair.counters(1)), 1, "{what}: {:?}", scene.pair.counters(1));
        assert!(scene.target().iter().all(|&byte| byte == 0xee), "{what}");
        assert_eq!(scene.pair.answers(1), [], "{what}");
        assert_eq!(scene.ends(1), [], "{what}");
        good.inject(&mut scene.pair);
        assert_eq!(scene.pair.answers(1), []);
        assert_eq!(scene.ends(1), [(1, OK)], "{what}");
        assert_eq!(&scene.target()[ROUTE..ROUTE + 4], b"good");
        assert_eq!(scene.state(1), State::ReadyToSend);
    }
}

#[test]
fn datagrams_for_a_connection_are_dropped() {
    let mut scene = Scene::new();
    for opcode in [Opcode::UdSendOnly, Opcode::UdSendOnlyWithImmediate] {
        // To the connected queue pair of the host.
        Forge::new(&scene.pair, 1, opcode, 100).deth(KEY, 9).inject(&mut scene.pair);
    }
    assert_eq!(scene.pair.counters(1).dropped_opcode, 2);
    assert_eq!(scene.pair.answers(1), []);
}

#[test]
fn packets_of_a_connection_for_a_datagram_queue_pair_are_dropped() {
    let mut scene = Scene::new();
    scene.receive(1, 0, 5000);
    let mut count = 0;
    for &opcode in Opcode::ALL.iter().filter(|opcode| opcode.is_reliable_connection()) {
        let mut forge = Forge::new(&scene.pair, 1, opcode, FIRST);
        forge.bth.destination_qpn = scene.qpns[1];
        forge.inject(&mut scene.pair);
        count += 1;
        assert_eq!(scene.pair.counters(1).dropped_opcode, count, "{opcode:?}");
    }
    assert_eq!(scene.pair.answers(1), []);
    assert_eq!(scene.ends(1), []);
    assert_eq!(scene.state(1), State::ReadyToSend);
}

#[test]
fn every_flipped_bit_of_a_datagram_is_noticed() {
    let mut scene = Scene::new();
    scene.receive(1, 0, 5000);
    let mut forge = Forge::new(&scene.pair, 1, Opcode::UdSendOnlyWithImmediate, 0)
        .deth(KEY, 9)
        .immediate(1)
        .payload(b"good");
    forge.bth.destination_qpn = scene.qpns[1];
    let datagram = forge.datagram(&scene.pair);
    // Byte 4 of the BTH is left out of the ICRC.
    for bit in (0..datagram.len() * 8).filter(|bit| bit / 8 != 4) {
        let mut damaged = datagram.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        scene.pair.inject(1, &damaged);
        assert_eq!(scene.ends(1), [], "bit {bit}");
    }
    assert!(scene.pair.counters(1).dropped_icrc > 100);
    scene.pair.inject(1, &datagram);
    assert_eq!(scene.ends(1), [(1, OK)]);
}

#[test]
fn without_a_receive_a_datagram_is_lost_and_from_anyone_it_is_taken() {
    let mut scene = Scene::new();
    let mut forge = Forge::new(&scene.pair, 1, Opcode::UdSendOnly, 77).deth(KEY, 0x1234);
    forge.bth.destination_qpn = scene.qpns[1];
    forge.inject(&mut scene.pair);
    assert_eq!(scene.pair.counters(1).dropped_no_receive, 1);
    scene.receive(1, 0, 100);
    // A sender that this host knows nothing of: its ICRC covers its address.
    let mut stranger = Pair::new();
    stranger.hosts[0].address = IpAddr::from([192, 0, 2, 99]);
    let datagram = forge.datagram(&stranger);
    let mut meta = meta(stranger.hosts[0].address, scene.pair.hosts[1].address);
    meta.identification = Identification::Guessed(0);
    let now = scene.pair.now;
    scene.pair.hosts[1].endpoint.handle_datagram(now, &meta, &datagram);
    scene.pair.poll(1);
    let received = scene.pair.completions(1)[0];
    assert_eq!((received.id, received.source), (1, Some(Qpn::new(0x1234))));
    assert_eq!(scene.target()[32..36], [192, 0, 2, 99]);
    assert_eq!(scene.pair.answers(1), []);
}

#[test]
fn receiving_goes_by_state() {
    for (state, takes) in [
        (State::Reset, false),
        (State::Initialized, false),
        (State::ReadyToReceive, true),
        (State::ReadyToSend, true),
        (State::SendQueueDrained, true),
        (State::Error, false),
    ] {
        let mut scene = Scene::new();
        scene.go(1, State::Reset).unwrap();
        let steps = [State::Initialized, State::ReadyToReceive, State::ReadyToSend];
        let last = match state {
            State::Reset => 0,
            State::Initialized => 1,
            State::ReadyToReceive => 2,
            _ => 3,
        };
        steps[..last].iter().for_each(|&s| scene.modify(1, &attributes(s)).unwrap());
        if !steps.contains(&state) {
            scene.go(1, state).unwrap();
        }
        if state != State::Reset {
            scene.receive(1, 0, 100);
        }
        let request = scene.request(1, 10);
        scene.post(&request).unwrap();
        scene.run();
        assert_eq!(scene.pair.counters(1).dropped_state, u64::from(!takes), "{state}");
        let arrived = scene.target()[ROUTE] != 0xee;
        assert_eq!(arrived, takes, "{state}");
    }
}

#[test]
fn requests_that_are_no_datagrams_are_refused() {
    let mut scene = Scene::new();
    let (qpn, good) = (scene.qpns[0], scene.request(1, 10));
    let (remote_address, remote_key) = (0, 0);
    for operation in [
        SendOperation::Write { remote_address, remote_key, immediate: None },
        SendOperation::Read { remote_address, remote_key },
    ] {
        let refused = scene.post(&SendRequest { operation, ..good });
        assert_eq!(refused, Err(PostError::NotADatagram(qpn)));
    }
    let refused = scene.post(&SendRequest { datagram: None, ..good });
    assert_eq!(refused, Err(PostError::DestinationMissing(qpn)));
    let other = DatagramDestination { address: "::1".parse().unwrap(), ..good.datagram.unwrap() };
    let refused = scene.post(&SendRequest { datagram: Some(other), ..good });
    assert!(matches!(refused, Err(PostError::AddressFamily { .. })), "{refused:?}");
    let refused = scene.post(&scene.request(1, 4097));
    assert_eq!(refused, Err(PostError::TooLong { length: 4097, limit: 4096 }));
    for _ in 0..16 {
        scene.post(&good).unwrap();
    }
    assert_eq!(scene.post(&good), Err(PostError::QueueFull { limit: 16 }));
    // And a connection has one peer.
    let host = &mut scene.pair.hosts[0];
    let refused = host.endpoint.post_send(Instant::ZERO, host.qpn, &good);
    assert_eq!(refused, Err(PostError::DestinationNotAllowed(host.qpn)));
}

#[test]
fn bytes_are_the_applications_again_when_the_driver_has_sent_them() {
    let mut scene = Scene::new();
    for id in 0..3 {
        let request = scene.request(id, 10);
        scene.post(&SendRequest { signaled: id != 1, ..request }).unwrap();
    }
    let mut transmit = Transmit::new();
    let host = &mut scene.pair.hosts[0];
    for sent in 0..3 {
        assert!(host.endpoint.poll_transmit(Instant::ZERO, &mut transmit));
        let packet = transmit.headers();
        let expected = Psn::new(FIRST).add(sent);
        assert_eq!(packet[9..12], expected.to_bytes());
        assert_eq!(host.endpoint.completions_waiting(host.queue), 0);
    }
    assert!(!host.endpoint.poll_transmit(Instant::ZERO, &mut transmit));
    assert_eq!(host.endpoint.poll_timeout(), Some(Instant::ZERO), "the driver comes back at once");
    host.endpoint.handle_timeout(Instant::ZERO);
    assert_eq!(host.endpoint.poll_timeout(), None);
    assert_eq!(scene.ends(0), [(0, OK), (2, OK)]);
}

#[test]
fn a_controlled_queue_key_stands_for_ones_own() {
    let mut scene = Scene::new();
    let own = QueuePairAttributes { queue_key: Some(0x8000_0055), ..Default::default() };
    scene.modify(0, &own).unwrap();
    let good = scene.request(1, 0);
    for (given, sent) in [(KEY, KEY), (0x8000_1234, 0x8000_0055), (0xffff_ffff, 0x8000_0055)] {
        let datagram = scene.to(scene.qpns[1], given);
        scene.post(&SendRequest { datagram, ..good }).unwrap();
        let mut transmit = Transmit::new();
        let host = &mut scene.pair.hosts[0];
        assert!(host.endpoint.poll_transmit(Instant::ZERO, &mut transmit));
        let mut datagram = Vec::new();
        assert!(transmit.assemble(&host.endpoint, host.address, 4791, 0, &mut datagram));
        let packet = Packet::parse(&datagram).unwrap();
        assert_eq!(packet.extended.deth.unwrap().queue_key, sent);
        assert!(!packet.bth.migration_request, "there is no path to migrate");
    }
}

#[test]
fn a_request_that_fails_breaks_the_send_queue_and_no_more() {
    let mut scene = Scene::new();
    let good = scene.request(0, 10);
    let outside = [piece(scene.local, LOCAL + 4000, 4096)];
    let broken = SendRequest { id: 1, pieces: outside, ..good };
    let later = SendRequest { id: 2, signaled: false, ..good };
    for request in [good, broken, later] {
        scene.post(&request).unwrap();
    }
    scene.receive(8, 0, 100);
    scene.receive(9, 100, 100);
    scene.run();
    let (failed, flushed) = (CompletionStatus::LocalProtection, CompletionStatus::Flushed);
    assert_eq!(scene.ends(0), [(0, OK), (1, failed), (2, flushed)]);
    assert_eq!(scene.state(0), State::SendQueueError);
    assert_eq!(scene.pair.hosts[0].endpoint.poll_event(), None);
    // What is posted now is flushed at once, and it receives.
    scene.post(&SendRequest { id: 3, ..good }).unwrap();
    assert_eq!(scene.ends(0), [(3, flushed)]);
    let local = scene.pair.register(0, LOCAL * 2, vec![0; 100]);
    let pieces = [piece(local, LOCAL * 2, 100)];
    let (qpn, request) = (scene.qpns[0], ReceiveRequest { id: 4, pieces });
    scene.pair.hosts[0].endpoint.post_receive(qpn, &request).unwrap();
    let mut forge = Forge::new(&scene.pair, 0, Opcode::UdSendOnly, 0).deth(KEY, 9);
    forge.bth.destination_qpn = qpn;
    forge.inject(&mut scene.pair);
    assert_eq!(scene.ends(0), [(4, OK)]);
    // And back.
    scene.go(0, State::ReadyToSend).unwrap();
    scene.post(&SendRequest { id: 5, ..good }).unwrap();
    scene.run();
    assert_eq!(scene.ends(0), [(5, OK)]);
    assert_eq!(scene.ends(1), [(8, OK), (9, OK)]);
}

#[test]
fn memory_that_went_away_is_a_local_error() {
    let mut scene = Scene::new();
    let request = scene.request(1, 10);
    scene.post(&request).unwrap();
    let key = scene.local;
    scene.pair.hosts[0].endpoint.memory_mut().deregister(key).unwrap();
    scene.run();
    assert_eq!(scene.ends(0), [(1, CompletionStatus::LocalProtection)]);
    assert_eq!(scene.state(0), State::SendQueueError);
    // A receive buffer that went away is worse: its queue pair is broken.
    scene.receive(7, 0, 100);
    let key = scene.target;
    scene.pair.hosts[1].endpoint.memory_mut().deregister(key).unwrap();
    let mut forge = Forge::new(&scene.pair, 1, Opcode::UdSendOnly, 0).deth(KEY, 9);
    forge.bth.destination_qpn = scene.qpns[1];
    forge.inject(&mut scene.pair);
    assert_eq!(scene.ends(1), [(7, CompletionStatus::LocalProtection)]);
    assert_eq!(scene.state(1), State::Error);
    let event = scene.pair.hosts[1].endpoint.poll_event();
    assert_eq!(event, Some(AsyncEvent::QueuePairFatal(scene.qpns[1])));
}

#[test]
fn the_send_queue_drains() {
    let mut scene = Scene::new();
    let good = scene.request(1, 10);
    scene.post(&good).unwrap();
    let mut transmit = Transmit::new();
    assert!(scene.pair.hosts[0].endpoint.poll_transmit(Instant::ZERO, &mut transmit));
    scene.go(0, State::SendQueueDrained).unwrap();
    assert_eq!(scene.pair.hosts[0].endpoint.poll_event(), None);
    let refused = scene.go(0, State::ReadyToSend);
    assert_eq!(refused, Err(ModifyError::Draining(scene.qpns[0])));
    scene.post(&SendRequest { id: 2, ..good }).unwrap();
    scene.run();
    assert_eq!(scene.ends(0), [(1, OK)]);
    let drained = AsyncEvent::SendQueueDrained(scene.qpns[0]);
    assert_eq!(scene.pair.hosts[0].endpoint.poll_event(), Some(drained));
    let key = QueuePairAttributes { queue_key: Some(3), ..Default::default() };
    scene.modify(0, &key).unwrap();
    scene.go(0, State::ReadyToSend).unwrap();
    scene.run();
    assert_eq!(scene.ends(0), [(2, OK)]);
}

#[test]
fn closing_flushes_both_queues() {
    let mut scene = Scene::new();
    let request = scene.request(1, 10);
    scene.post(&request).unwrap();
    let local = scene.local;
    let pieces = [piece(local, LOCAL, 100)];
    let qpn = scene.qpns[0];
    let endpoint = &mut scene.pair.hosts[0].endpoint;
    endpoint.post_receive(qpn, &ReceiveRequest { id: 2, pieces }).unwrap();
    scene.go(0, State::Error).unwrap();
    let flushed = CompletionStatus::Flushed;
    assert_eq!(scene.ends(0), [(1, flushed), (2, flushed)]);
    scene.post(&request).unwrap();
    assert_eq!(scene.ends(0), [(1, flushed)]);
    scene.run();
    assert_eq!(scene.pair.counters(0).packets_sent, 0);
}

/// One sender does not keep the other queue pairs of its device from sending.
#[test]
fn connections_send_between_bursts_of_datagrams() {
    let mut scene = Scene::with(Options { max_window: 1, ..Options::default() });
    for id in 0..16 {
        let request = scene.request(id, 10);
        scene.post(&request).unwrap();
    }
    let key = scene.pair.register(1, REMOTE * 2, vec![0; 100]);
    let operation =
        SendOperation::Write { remote_address: REMOTE * 2, remote_key: key, immediate: None };
    scene.pair.post(0, 99, operation, &[piece(scene.local, LOCAL, 100)]);
    for round in 0..3 {
        // The queue is full again before it was empty.
        let mut transmit = Transmit::new();
        let host = &mut scene.pair.hosts[0];
        let opcodes: Vec<u8> = std::iter::from_fn(|| {
            let more = host.endpoint.poll_transmit(Instant::ZERO, &mut transmit);
            more.then(|| transmit.headers()[0])
        })
        .collect();
        assert!(opcodes.len() >= 16, "{round}");
        assert!(round > 0 || opcodes.contains(&(Opcode::RcWriteOnly as u8)), "{opcodes:?}");
        host.endpoint.handle_timeout(Instant::ZERO);
        for id in 0..16 {
            let request = scene.request(id, 10);
            scene.post(&request).unwrap();
        }
    }
}

#[test]
fn inline_data_is_copied_into_the_datagram() {
    let mut scene = Scene::new();
    for (id, length) in [(1, 0), (2, 1), (3, 199), (4, 200)] {
        let at = id as usize * 300;
        scene.receive(id, at, 300);
        let request = scene.inline_request(id);
        let mut data = pattern(length, id as u8);
        let (now, qpn) = (scene.pair.now, scene.qpns[0]);
        let endpoint = &mut scene.pair.hosts[0].endpoint;
        endpoint.post_send_inline(now, qpn, &request, &data).unwrap();
        data.fill(0);
        scene.run();
        assert_eq!(scene.ends(0), [(id, CompletionStatus::Success)]);
        assert_eq!(scene.ends(1), [(id, CompletionStatus::Success)]);
        let arrived = &scene.target()[at + millstream_roce::GLOBAL_ROUTE_HEADER_LENGTH..][..length];
        assert_eq!(arrived, pattern(length, id as u8));
    }
    let request = scene.inline_request(5);
    let (now, qpn) = (scene.pair.now, scene.qpns[0]);
    let endpoint = &mut scene.pair.hosts[0].endpoint;
    let refused = endpoint.post_send_inline(now, qpn, &request, &[0; 201]);
    assert_eq!(refused, Err(PostError::InlineTooLong { length: 201, limit: 200 }));
}
