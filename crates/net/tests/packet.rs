//! Packet sockets: everything that a UDP socket does, with every IP header seen.

mod common;

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use common::lab::{
    HERE, HERE_V6, LINK_HERE, LINK_THERE, Lab, Namespace, THERE, THERE_V6, while_nothing_spawns,
};
use common::{
    PATIENCE, Signal, StreamNode, address, config, eventually, has_packet_sockets, start,
};
use millstream_net::{Driver, DriverCounters, OpenError, Progress, ProgressConfig};
use millstream_roce::{
    Endpoint, EndpointConfig, OwnedMemory, ProtectionDomainId, QueuePairAttributes,
    QueuePairCapabilities, QueuePairConfig, QueuePairState, Transport,
};
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::udp::UdpHeader;
use millstream_wire::{ICRC_LENGTH, Qpn, ROCE_PORT};
use socket2::{Domain, SockAddr, Socket, Type};

/// One end of a conversation.
#[derive(Clone, Copy)]
struct End {
    address: IpAddr,
    driver: Driver,
    segmentation_offload: bool,
}

const fn packet(address: IpAddr) -> End {
    End { address, driver: Driver::Packet, segmentation_offload: true }
}

const fn udp(address: IpAddr) -> End {
    End { address, driver: Driver::Udp, segmentation_offload: true }
}

impl End {
    const fn without_offload(self) -> Self {
        Self { segmentation_offload: false, ..self }
    }

    fn config(self) -> ProgressConfig {
        let Self { address, driver, segmentation_offload } = self;
        ProgressConfig { driver, segmentation_offload, ..config(address) }
    }
}

/// Full packets with a shorter last one, single odd ones, runs of tiny ones: groups of all kinds.
fn mixed_lengths(mtu: usize) -> Vec<usize> {
    let mut lengths = vec![mtu; 20];
    lengths.extend([100, mtu, 1, 0, 3, mtu, mtu, 2]);
    lengths.extend([64; 130]);
    lengths
}

fn run(place: &Namespace, own: End, peer: IpAddr, signal: &Signal) -> Progress<StreamNode> {
    let signal = signal.clone();
    place.run(move || {
        let mut node = StreamNode::new(own.address, peer, &mixed_lengths(1024));
        node.window = 100;
        // Without the offload, the kernel segments what a peer left unsegmented.
        node.wrong_guesses = own.driver == Driver::Udp;
        while_nothing_spawns(|| start(own.config(), node, &signal))
    })
}

/// Sends datagrams both ways between two running nodes.
fn exchange(nodes: [&Progress<StreamNode>; 2], signal: &Signal) {
    const TOTAL: usize = 2000;
    let addresses = nodes.map(|node| node.shared().socket_info().address);
    for (node, peer) in nodes.iter().zip([addresses[1], addresses[0]]) {
        // These nodes send nothing again.
        assert!(node.shared().prepare(peer, PATIENCE), "the way to the peer");
    }
    for node in nodes {
        node.shared().lock().unwrap().total += TOTAL;
    }
    for node in nodes {
        signal.wait_until("all datagrams", || {
            let node = node.shared().lock_without_waking().unwrap();
            node.received == node.total && node.acknowledged == node.total
        });
    }
}

/// Lets two ends talk over the wire; returns what their drivers did.
fn talk(lab: &Lab, ends: [End; 2]) -> [DriverCounters; 2] {
    let signal = Signal::default();
    let [here, there] = ends;
    let nodes = [
        run(&lab.here, here, there.address, &signal),
        run(&lab.there, there, here.address, &signal),
    ];
    exchange([&nodes[0], &nodes[1]], &signal);
    for (node, end) in nodes.iter().zip(ends) {
        let shared = node.shared();
        assert_eq!(shared.socket_info().driver, end.driver);
        // What a round did is published after it, and the last acknowledgements may still come.
        signal.wait_until("the counters", || {
            let known = shared.lock_without_waking().unwrap().known as u64;
            let counters = shared.driver_counters();
            // Of each message, the header was seen: of what was segmented, the first one's.
            counters.sent_datagrams > 2000
                && (end.driver == Driver::Udp || known == counters.received_messages)
        });
        let counters = shared.driver_counters();
        assert_eq!((counters.refused_frames, counters.receive_errors), (0, 0), "{counters:?}");
        assert_eq!((counters.unsent_datagrams, counters.overflowed_messages), (0, 0));
    }
    nodes.each_ref().map(|node| node.shared().driver_counters())
}

const FAMILIES: [(IpAddr, IpAddr); 2] = [(HERE, THERE), (HERE_V6, THERE_V6)];

#[test]
fn packet_sockets_talk_to_each_other() {
    let Some(lab) = Lab::new("packet_sockets_talk_to_each_other", 1500) else { return };
    for (here, there) in FAMILIES {
        let (here, there) = (packet(here), packet(there));
        talk(&lab, [here, there]);
        talk(&lab, [here, there.without_offload()]);
        for counters in talk(&lab, [here.without_offload(), there.without_offload()]) {
            assert_eq!(counters.sent_messages, counters.sent_datagrams);
            assert_eq!(counters.received_messages, counters.received_datagrams);
        }
    }
}

#[test]
fn segments_and_checksums_are_made_where_the_wire_needs_them() {
    let test = "segments_and_checksums_are_made_where_the_wire_needs_them";
    let Some(lab) = Lab::new(test, 1500) else { return };
    lab.as_on_copper();
    for (here, there) in FAMILIES {
        for ends in [[packet(here), packet(there)], [packet(here), udp(there)]] {
            let [sees, _] = talk(&lab, ends);
            assert_eq!(sees.received_messages, sees.received_datagrams);
        }
    }
}

#[test]
fn packet_sockets_talk_to_udp_sockets() {
    let Some(lab) = Lab::new("packet_sockets_talk_to_udp_sockets", 1500) else { return };
    for (here, there) in FAMILIES {
        let (packet, udp) = (packet(here), udp(there));
        let [sees, does] = talk(&lab, [packet, udp]);
        if does.segmentation_refusals == 0 && does.sent_messages < does.sent_datagrams / 2 {
            // What a peer on the same machine sends comes as it was, unsegmented.
            assert!(sees.received_messages < sees.received_datagrams / 2, "{sees:?}");
        }
        talk(&lab, [packet, udp.without_offload()]);
        talk(&lab, [packet.without_offload(), udp]);
        let ends = [packet.without_offload(), udp.without_offload()];
        let [sees, _] = talk(&lab, ends);
        assert_eq!(sees.received_messages, sees.received_datagrams);
    }
}

#[test]
fn devices_on_one_machine_talk_over_loopback() {
    if !has_packet_sockets("devices_on_one_machine_talk_over_loopback") {
        return;
    }
    for offload in [true, false] {
        let signal = Signal::default();
        let (a, b) = (address(), address());
        let start = |own, peer| {
            let end = End { segmentation_offload: offload, ..packet(own) };
            let mut node = StreamNode::new(own, peer, &mixed_lengths(4096));
            node.window = 100;
            while_nothing_spawns(|| common::start(end.config(), node, &signal))
        };
        exchange([&start(a, b), &start(b, a)], &signal);
    }
}

#[test]
fn devices_of_one_interface_do_not_hear_each_other() {
    let test = "devices_of_one_interface_do_not_hear_each_other";
    let Some(lab) = Lab::new(test, 1500) else { return };
    let other = |number| IpAddr::from(Ipv4Addr::new(10, 99, 0, number));
    lab.here.ip("address add 10.99.0.3/24 dev wire");
    lab.there.ip("address add 10.99.0.4/24 dev wire");
    let signal = Signal::default();
    // Each checks that what comes is from its own peer: a stranger's datagram has other numbers.
    let first = [
        run(&lab.here, packet(HERE), THERE, &signal),
        run(&lab.there, packet(THERE), HERE, &signal),
    ];
    let second = [
        run(&lab.here, packet(other(3)), other(4), &signal),
        run(&lab.there, packet(other(4)), other(3), &signal),
    ];
    for nodes in [&first, &second] {
        exchange([&nodes[0], &nodes[1]], &signal);
    }
    drop(second);
    // The two of one host reach each other, too: the kernel leads that way over loopback.
    drop(first);
    let both = [
        run(&lab.here, packet(HERE), other(3), &signal),
        run(&lab.here, packet(other(3)), HERE, &signal),
    ];
    exchange([&both[0], &both[1]], &signal);
    drop(both);
    // So does each reach itself.
    let alone = run(&lab.here, packet(HERE), HERE, &signal);
    let node = alone.shared();
    assert!(node.prepare(HERE, PATIENCE), "the way to itself");
    node.lock().unwrap().total += 100;
    signal.wait_until("what it sent", || node.lock_without_waking().unwrap().received == 100);
}

#[test]
fn routers_are_asked_for_in_place_of_who_is_behind_them() {
    let test = "routers_are_asked_for_in_place_of_who_is_behind_them";
    let Some(lab) = Lab::new(test, 1500) else { return };
    lab.there.ip("address add 10.77.0.1/32 dev lo");
    lab.here.ip("route add 10.77.0.0/24 via 10.99.0.2");
    talk(&lab, [packet(HERE), packet(Ipv4Addr::new(10, 77, 0, 1).into())]);
}

/// Sends a frame with a UDP datagram that is no packet from `there` to `here`, with this VLAN tag, if
/// any.
fn send_frame(lab: &Lab, tag: Option<u16>, change: impl FnOnce(&mut Ipv4Header)) {
    send_datagram(lab, tag, &[0; 20], change);
}

fn send_datagram(
    lab: &Lab,
    tag: Option<u16>,
    datagram: &[u8],
    change: impl FnOnce(&mut Ipv4Header),
) {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (THERE, HERE) else {
        unreachable!("addresses of this family")
    };
    let length = (UdpHeader::LENGTH + datagram.len()) as u16;
    let mut ip = Ipv4Header {
        type_of_service: 0,
        total_length: Ipv4Header::LENGTH as u16 + length,
        identification: IDENTIFICATION,
        flags: 0x4000,
        time_to_live: 3,
        protocol: 17,
        checksum: 0,
        source,
        destination,
    };
    ip.checksum = ip.computed_checksum();
    change(&mut ip);
    let udp =
        UdpHeader { source_port: SOURCE_PORT, destination_port: ROCE_PORT, length, checksum: 0 };
    let mut frame = [LINK_HERE, LINK_THERE].concat();
    if let Some(tag) = tag {
        frame.extend([0x81, 0x00]);
        frame.extend(tag.to_be_bytes());
    }
    frame.extend([0x08, 0x00]);
    frame.extend(ip.to_bytes());
    frame.extend(udp.to_bytes());
    frame.extend(datagram);
    lab.there.run(move || {
        let socket = Socket::new(Domain::PACKET, Type::RAW, None).unwrap();
        // SAFETY: a name that ends with a zero; the storage is longer than a `sockaddr_ll` and as
        // aligned, and zeros are right for what is not set.
        let to = unsafe {
            let interface = libc::if_nametoindex(c"wire".as_ptr());
            SockAddr::try_init(|storage, length| {
                let to = storage.cast::<libc::sockaddr_ll>();
                (*to).sll_family = libc::AF_PACKET as libc::c_ushort;
                (*to).sll_ifindex = interface as libc::c_int;
                *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
                Ok(())
            })
        };
        assert_eq!(socket.send_to(&frame, &to.unwrap().1).unwrap(), frame.len());
    });
}

/// Of [`send_datagram`].
const IDENTIFICATION: u16 = 77;
const SOURCE_PORT: u16 = 50_000;

/// An endpoint with one queue pair that anyone may send datagrams to.
fn open_endpoint() -> (Endpoint<OwnedMemory>, Qpn) {
    const KEY: u32 = 0x1111_1111;
    let mut endpoint = Endpoint::new(EndpointConfig::new(HERE, 1), OwnedMemory::new(1));
    let queue = endpoint.create_completion_queue(16).unwrap();
    let capabilities = QueuePairCapabilities::new(1, 1);
    let config = QueuePairConfig {
        transport: Transport::UnreliableDatagram,
        ..QueuePairConfig::new(ProtectionDomainId(1), queue, capabilities)
    };
    let pair = endpoint.create_queue_pair(&config).unwrap();
    for (state, queue_key) in
        [(QueuePairState::Initialized, Some(KEY)), (QueuePairState::ReadyToReceive, None)]
    {
        let attributes =
            QueuePairAttributes { state: Some(state), queue_key, ..QueuePairAttributes::default() };
        endpoint.modify_queue_pair(millstream_net::now(), pair, &attributes).unwrap();
    }
    (endpoint, pair)
}

/// A datagram to that queue pair, with the ICRC of this identification.
fn sealed(pair: Qpn, identification: u16) -> Vec<u8> {
    let [_, q0, q1, q2] = pair.value().to_be_bytes();
    // BTH: UD SEND Only, partition key, queue pair, PSN; DETH: queue key, source; eight bytes.
    let mut datagram = vec![0x64, 0, 0xff, 0xff, 0, q0, q1, q2, 0, 0, 0, 0];
    datagram.extend([0x11, 0x11, 0x11, 0x11, 0, 0, 0, 2]);
    datagram.extend(b"in order");
    datagram.extend([0; ICRC_LENGTH]);
    let addressing = Addressing {
        addresses: Addresses::unfragmented(THERE, HERE, identification).unwrap(),
        source_port: SOURCE_PORT,
        destination_port: ROCE_PORT,
    };
    let icrc = icrc::of_datagram(&addressing, &datagram).to_le_bytes();
    let body = datagram.len() - ICRC_LENGTH;
    datagram[body..].copy_from_slice(&icrc);
    datagram
}

#[test]
fn the_icrc_is_checked_whole() {
    let Some(lab) = Lab::new("the_icrc_is_checked_whole", 1500) else { return };
    for (driver, wrong_ones) in [(Driver::Packet, 2), (Driver::Udp, 1)] {
        let signal = Signal::default();
        let (endpoint, pair) = open_endpoint();
        let device = lab.here.run({
            let hook = signal.hook();
            let config = End { driver, ..packet(HERE) }.config();
            // SAFETY: it names no memory.
            move || while_nothing_spawns(|| unsafe { Progress::start(config, endpoint, hook) })
        });
        let device = device.unwrap();
        let counters = || *device.shared().lock_without_waking().unwrap().counters();
        let mut arrived = 0;
        let mut send = |datagram: &[u8]| {
            arrived += 1;
            send_datagram(&lab, None, datagram, |_| ());
            signal.wait_until("the datagram", || counters().packets_received == arrived);
            counters().dropped_icrc
        };
        assert_eq!(send(&sealed(pair, IDENTIFICATION)), 0);
        let mut damaged = sealed(pair, IDENTIFICATION);
        damaged[20] ^= 1;
        assert_eq!(send(&damaged), 1);
        // Right for another identification, as if the network had changed that. Who does not see it
        // cannot tell.
        assert_eq!(send(&sealed(pair, IDENTIFICATION + 1)), wrong_ones);
        assert_eq!(send(&sealed(pair, IDENTIFICATION)), wrong_ones);
    }
}

#[test]
fn frames_of_a_vlan_without_interface_are_nobodys() {
    let test = "frames_of_a_vlan_without_interface_are_nobodys";
    let Some(lab) = Lab::new(test, 1500) else { return };
    let signal = Signal::default();
    let device = run(&lab.here, packet(HERE), THERE, &signal);
    device.shared().lock().unwrap().ignore_shorter_than = usize::MAX;
    let received = || device.shared().driver_counters().received_datagrams;
    send_frame(&lab, None, |_| ());
    signal.wait_until("a frame", || received() == 1);
    send_frame(&lab, Some(7), |_| ());
    // Priority 5 of no VLAN: the kernel takes off the tag.
    send_frame(&lab, Some(5 << 13), |_| ());
    signal.wait_until("a frame with a priority", || received() == 2);
    // One wire keeps the order, so that of VLAN 7 would have come before.
    send_frame(&lab, None, |_| ());
    signal.wait_until("another frame", || received() == 3);
}

#[test]
fn headers_that_are_wrong_are_refused_and_counted() {
    let test = "headers_that_are_wrong_are_refused_and_counted";
    let Some(lab) = Lab::new(test, 1500) else { return };
    let signal = Signal::default();
    let device = run(&lab.here, packet(HERE), THERE, &signal);
    device.shared().lock().unwrap().ignore_shorter_than = usize::MAX;
    let counters = || device.shared().driver_counters();
    send_frame(&lab, None, |ip| ip.checksum ^= 1);
    eventually("the first", || counters().refused_frames == 1);
    send_frame(&lab, None, |ip| {
        ip.total_length += 1;
        ip.checksum = ip.computed_checksum();
    });
    eventually("the second", || counters().refused_frames == 2);
    // As if it were from here: the kernel calls it a martian, and drops it for UDP sockets.
    send_frame(&lab, None, |ip| {
        ip.source = ip.destination;
        ip.checksum = ip.computed_checksum();
    });
    eventually("the third", || counters().refused_frames == 3);
    send_frame(&lab, None, |_| ());
    signal.wait_until("a good one", || counters().received_datagrams == 1);
    assert_eq!(counters().refused_frames, 3);
}

#[test]
fn a_neighbour_that_appears_late_is_found() {
    let Some(lab) = Lab::new("a_neighbour_that_appears_late_is_found", 1500) else { return };
    lab.there.ip("address del 10.99.0.2/24 dev wire");
    let signal = Signal::default();
    let here = run(&lab.here, packet(HERE), THERE, &signal);
    assert!(!here.shared().prepare(THERE, Duration::ZERO));
    here.shared().lock().unwrap().total = 1;
    let counters = || here.shared().driver_counters();
    signal.wait_until("a datagram to nobody", || counters().unresolved_datagrams == 1);
    assert_eq!(counters().sent_datagrams, 0);
    lab.there.ip("address add 10.99.0.2/24 dev wire");
    let mut node = StreamNode::new(THERE, HERE, &mixed_lengths(1024));
    node.received = 1;
    let there = lab.there.run({
        let signal = signal.clone();
        move || start(packet(THERE).config(), node, &signal)
    });
    assert!(here.shared().prepare(THERE, PATIENCE), "the neighbour");
    assert!(there.shared().prepare(HERE, PATIENCE), "the neighbour");
    here.shared().lock().unwrap().total = 10;
    signal.wait_until("the rest", || there.shared().lock_without_waking().unwrap().received == 10);
}

#[test]
fn a_neighbour_that_changes_its_link_address_is_followed() {
    let test = "a_neighbour_that_changes_its_link_address_is_followed";
    let Some(lab) = Lab::new(test, 1500) else { return };
    let signal = Signal::default();
    let here = run(&lab.here, packet(HERE), THERE, &signal);
    let there = run(&lab.there, packet(THERE), HERE, &signal);
    exchange([&here, &there], &signal);
    // As another machine that took the address over would have it; the kernel here is told by
    // whoever speaks first.
    lab.there.ip("link set wire address 02:00:00:00:00:77");
    lab.here.ip("neighbour change 10.99.0.2 lladdr 02:00:00:00:00:77 nud reachable dev wire");
    let counters = |node: &Progress<StreamNode>| node.shared().driver_counters();
    let before = counters(&there).received_datagrams;
    // A datagram to the old address is nobody's, and these nodes send nothing again.
    here.shared().lock().unwrap().repeat = true;
    eventually("a datagram to the new address", || {
        drop(here.shared().lock());
        counters(&there).received_datagrams > before
    });
}

#[test]
fn an_address_that_is_shared_is_none_for_a_packet_socket() {
    let test = "an_address_that_is_shared_is_none_for_a_packet_socket";
    let Some(lab) = Lab::new(test, 1500) else { return };
    let open = |driver| {
        lab.here.run(move || {
            let config = ProgressConfig { driver, share_address: true, ..config(HERE) };
            millstream_net::Opened::new(config)
        })
    };
    let _shared = open(Driver::Udp).unwrap_or_else(|error| panic!("{error}"));
    let error = open(Driver::Packet).err().unwrap();
    assert!(matches!(error, OpenError::PacketDriverAlone { address: HERE, .. }), "{error}");
    assert!(error.to_string().contains("use the udp driver"), "{error}");
    let _another = open(Driver::Udp).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn the_port_is_held_and_nobody_is_told_that_it_is_unreachable() {
    let test = "the_port_is_held_and_nobody_is_told_that_it_is_unreachable";
    let Some(lab) = Lab::new(test, 1500) else { return };
    let signal = Signal::default();
    let device = run(&lab.here, packet(HERE), THERE, &signal);
    for (driver, share_address) in
        [(Driver::Packet, false), (Driver::Packet, true), (Driver::Udp, false), (Driver::Udp, true)]
    {
        let error = lab.here.run(move || {
            let config = ProgressConfig { driver, share_address, ..config(HERE) };
            let node = StreamNode::new(HERE, THERE, &[100]);
            // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
            unsafe { Progress::start(config, node, |_| ()) }.err().unwrap()
        });
        let as_expected = match driver {
            Driver::Packet => {
                matches!(error, OpenError::PacketDriverAlone { address: HERE, port: ROCE_PORT })
            }
            Driver::Udp => matches!(error, OpenError::PortInUse { address: HERE, port: ROCE_PORT }),
        };
        assert!(as_expected && error.is_in_use(), "{driver}: {error}");
    }
    let stranger = lab.there.run(|| {
        let socket = UdpSocket::bind((THERE, 0)).unwrap();
        socket.connect((HERE, ROCE_PORT)).unwrap();
        socket
    });
    // Too short for a packet, so that the node under test is not what it comes to.
    device.shared().lock().unwrap().ignore_shorter_than = 16;
    for count in 1..=3 {
        // What the peer's kernel answers would be the error of the next call.
        assert_eq!(stranger.send(b"?").unwrap(), 1);
        let counters = || device.shared().driver_counters();
        signal.wait_until("the datagram", || counters().received_datagrams == count);
    }
    assert_eq!(stranger.take_error().unwrap().map(|error| error.kind()), None);
    drop(device);
    eventually("an answer that nobody is there", || {
        stranger
            .send(b"?")
            .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    });
    // The port is free for the next one.
    drop(run(&lab.here, packet(HERE), THERE, &signal));
}

#[test]
fn fragments_are_refused_and_counted() {
    let Some(lab) = Lab::new("fragments_are_refused_and_counted", 1500) else { return };
    let signal = Signal::default();
    let device = run(&lab.here, packet(HERE), THERE, &signal);
    device.shared().lock().unwrap().ignore_shorter_than = usize::MAX;
    let stranger = lab.there.run(|| UdpSocket::bind((THERE, 0)).unwrap());
    let fragment: libc::c_int = libc::IP_PMTUDISC_DONT;
    // SAFETY: an integer of the length that is passed, alive during the call.
    let result = unsafe {
        let length = size_of_val(&fragment) as libc::socklen_t;
        let option = libc::IP_MTU_DISCOVER;
        let value = (&raw const fragment).cast();
        libc::setsockopt(stranger.as_raw_fd(), libc::IPPROTO_IP, option, value, length)
    };
    assert_eq!(result, 0);
    for count in 1..=2 {
        stranger.send_to(&[0; 4000], (HERE, ROCE_PORT)).unwrap();
        // One of three: the others have no UDP header, and stay in the kernel.
        let refused = || device.shared().driver_counters().refused_frames;
        eventually("the fragments", || refused() >= count);
        assert_eq!(refused(), count);
    }
    assert_eq!(device.shared().driver_counters().received_datagrams, 0);
}

#[test]
fn datagrams_that_exceed_the_mtu_are_counted() {
    let Some(lab) = Lab::new("datagrams_that_exceed_the_mtu_are_counted", 1400) else { return };
    for end in [packet(HERE), packet(HERE).without_offload()] {
        let signal = Signal::default();
        let device = lab.here.run({
            let signal = signal.clone();
            move || {
                // 20 + 8 + 12 + 1356 + 4 = 1400 bytes of packet, and one word more.
                let node = StreamNode::new(HERE, THERE, &[1356, 1360, 1360, 1356]);
                while_nothing_spawns(|| start(end.config(), node, &signal))
            }
        });
        assert!(device.shared().prepare(THERE, PATIENCE), "the way");
        device.shared().lock().unwrap().total = 4;
        let counters = || device.shared().driver_counters();
        signal.wait_until("sending", || {
            counters().sent_datagrams + counters().too_long_datagrams == 4
        });
        assert_eq!((counters().sent_datagrams, counters().too_long_datagrams), (2, 2));
    }
}

#[test]
fn without_the_capability_there_is_an_error_that_names_it() {
    // In a thread of its own, of which the capability is taken away.
    let error = std::thread::spawn(|| {
        drop_raw_capability();
        let own = address();
        let node = StreamNode::new(own, own, &[100]);
        // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
        unsafe { Progress::start(packet(own).config(), node, |_| ()) }.err().unwrap()
    });
    let error = error.join().unwrap();
    assert!(matches!(error, OpenError::NotPrivileged { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("CAP_NET_RAW") && text.contains("udp driver"), "{text}");
}

/// Takes CAP_NET_RAW out of this thread's effective capabilities.
fn drop_raw_capability() {
    /// `_LINUX_CAPABILITY_VERSION_3`, and this thread; then effective, permitted and inheritable
    /// capabilities, twice 32 of each.
    const VERSION: u32 = 0x2008_0522;
    const CAP_NET_RAW: u32 = 13;
    let mut header = [VERSION, 0];
    let mut sets = [0_u32; 6];
    // SAFETY: the header and the sets have the lengths that this version has.
    unsafe {
        let get = libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr());
        assert_eq!(get, 0);
        sets[0] &= !(1 << CAP_NET_RAW);
        let set = libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr());
        assert_eq!(set, 0);
    }
}

#[test]
fn interfaces_without_ethernet_headers_are_refused() {
    let test = "interfaces_without_ethernet_headers_are_refused";
    let Some(lab) = Lab::new(test, 1500) else { return };
    lab.here.ip("tuntap add dev plain mode tun");
    lab.here.ip("address add 10.97.0.1/24 dev plain");
    let own = IpAddr::from(Ipv4Addr::new(10, 97, 0, 1));
    let error = lab.here.run(move || {
        let node = StreamNode::new(own, own, &[100]);
        // SAFETY: the memory of a `StreamNode` is never changed, and lives as long as the node.
        unsafe { Progress::start(packet(own).config(), node, |_| ()) }.err().unwrap()
    });
    assert!(matches!(&error, OpenError::NotEthernet { interface, .. } if interface == "plain"));
}

#[test]
fn an_interface_that_goes_down_and_comes_back_is_no_end() {
    let Some(lab) = Lab::new("an_interface_that_goes_down_and_comes_back_is_no_end", 1500) else {
        return;
    };
    let signal = Signal::default();
    let here = run(&lab.here, packet(HERE), THERE, &signal);
    let there = run(&lab.there, packet(THERE), HERE, &signal);
    exchange([&here, &there], &signal);
    lab.here.ip("link set wire down");
    // Routes go with it, and that is noticed.
    eventually("the loss of the way", || !here.shared().prepare(THERE, Duration::ZERO));
    lab.here.ip("link set wire up");
    exchange([&here, &there], &signal);
    // An address that is taken away is no way out, either.
    lab.here.ip("address del 10.99.0.1/24 dev wire");
    eventually("the loss of the way", || !here.shared().prepare(THERE, Duration::ZERO));
    lab.here.ip("address add 10.99.0.1/24 dev wire");
    exchange([&here, &there], &signal);
    assert!(here.shared().failure().is_none() && there.shared().failure().is_none());
}
