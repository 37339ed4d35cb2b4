//! Every packet of the captures of a real Linux rxe (kernels 6.1 and 6.12, perftest and
//! rdma-core's examples, two guests on a bridge): what the kernel wrote, this crate reads, writes
//! back and checks to the last bit.

mod common;

use std::collections::{BTreeSet, HashMap};

use common::{Layers, captures};
use millstream_wire::icrc::{self, Addresses, Addressing, Solver};
use millstream_wire::{MAX_HEADER_LENGTH, Opcode, Qpn, ROCE_PORT};

/// How many packets each capture has. A new capture gets a line here.
const PACKETS: [(&str, usize); 20] = [
    ("atomic_cswap.pcap", 40),
    ("atomic_fadd.pcap", 40),
    ("k612-mtu4096-read_bw_64k.pcap", 200),
    ("k612-mtu4096-read_rc.pcap", 24),
    ("k612-mtu4096-send_rc.pcap", 40),
    ("k612-mtu4096-write_bw_64k.pcap", 200),
    ("k612-mtu4096-write_rc.pcap", 24),
    ("mixed-rc.pcap", 203),
    ("pingpong_rc.pcap", 80),
    ("read_bw_64k.pcap", 200),
    ("read_rc.pcap", 60),
    ("rping_cm.pcap", 53),
    ("send_rc.pcap", 100),
    ("send_uc.pcap", 80),
    ("send_ud.pcap", 30),
    ("srq_pingpong.pcap", 102),
    ("write_bw_64k.pcap", 200),
    ("write_lat.pcap", 120),
    ("write_rc.pcap", 60),
    ("write_uc.pcap", 48),
];

/// The same packet as a sender with this identification would address it.
fn with_identification(addressing: Addressing, wanted: u16) -> Addressing {
    let Addresses::V4 { source, destination, flags, .. } = addressing.addresses else {
        panic!("the captures are IPv4")
    };
    let addresses = Addresses::V4 { source, destination, flags, identification: wanted };
    Addressing { addresses, ..addressing }
}

#[test]
fn every_capture_is_whole() {
    let found: Vec<_> =
        captures().into_iter().map(|capture| (capture.name, capture.frames.len())).collect();
    assert_eq!(found, PACKETS.map(|(name, packets)| (name.to_owned(), packets)));
}

#[test]
fn every_packet_re_emits_byte_for_byte() {
    let mut opcodes = BTreeSet::new();
    for capture in captures() {
        for (number, frame) in capture.frames.iter().enumerate() {
            let place = format!("{} packet {}", capture.name, number + 1);
            let layers = Layers::parse(frame).unwrap_or_else(|e| panic!("{place}: {e}"));
            assert_eq!(layers.udp.destination_port, ROCE_PORT, "{place}");
            assert_eq!(layers.ip.checksum, layers.ip.computed_checksum(), "{place}");

            let mut emitted = Vec::with_capacity(frame.len());
            emitted.extend_from_slice(&layers.ethernet.to_bytes());
            emitted.extend_from_slice(&layers.ip.to_bytes());
            emitted.extend_from_slice(&layers.udp.to_bytes());
            let start = emitted.len();
            emitted.resize(start + MAX_HEADER_LENGTH + layers.packet.payload.len() + 3 + 4, 0xee);
            let length = layers.packet.emit(&mut emitted[start..]);
            emitted.truncate(start + length);
            assert_eq!(&emitted, frame, "{place}");
            opcodes.insert(layers.packet.bth.opcode);
        }
    }
    // RC without immediate and invalidate, UC SEND and WRITE first, middle and last, UD SEND.
    let seen = [0, 1, 2, 4, 6, 7, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20];
    assert_eq!(opcodes, seen.into_iter().chain(32..=34).chain(38..=40).chain([100]).collect());
}

#[test]
fn every_icrc_is_the_kernels() {
    for capture in captures() {
        for (number, frame) in capture.frames.iter().enumerate() {
            let layers = Layers::parse(frame).unwrap();
            let computed = icrc::of_datagram(&layers.addressing(), layers.datagram);
            assert_eq!(layers.packet.icrc, computed, "{} packet {}", capture.name, number + 1);
        }
    }
}

#[test]
fn the_solver_recovers_every_identification() {
    let mut solvers = HashMap::new();
    let mut identifications = BTreeSet::new();
    for capture in captures() {
        for (number, frame) in capture.frames.iter().enumerate() {
            let layers = Layers::parse(frame).unwrap();
            let length = layers.datagram.len();
            let solver = solvers.entry(length).or_insert_with(|| Solver::new(length));
            let assumed = with_identification(layers.addressing(), 0);
            let computed = icrc::of_datagram(&assumed, layers.datagram);
            assert_eq!(
                solver.identification(0, computed, layers.packet.icrc),
                Some(layers.ip.identification),
                "{} packet {}",
                capture.name,
                number + 1,
            );
            identifications.insert(layers.ip.identification);
        }
    }
    // They are not all alike, or the test above would show little.
    assert!(identifications.len() > 1000, "{}", identifications.len());
}

/// A receiver that takes only 64 identifications keeps 26 bits of the check. Whether one flipped
/// bit gets past those depends on the length and the place alone, so a packet of each length will
/// do, with every bit of its payload and padding.
#[test]
fn no_flipped_bit_passes_for_a_small_identification() {
    let mut lengths = BTreeSet::new();
    let mut flips = 0;
    for capture in captures() {
        for frame in &capture.frames {
            let layers = Layers::parse(frame).unwrap();
            if !lengths.insert(layers.datagram.len()) {
                continue;
            }
            let solver = Solver::new(layers.datagram.len());
            let sent = with_identification(layers.addressing(), 0);
            let received = icrc::of_datagram(&sent, layers.datagram);
            let mut datagram = layers.datagram.to_vec();
            let body = datagram.len() - 4;
            let payload = body - layers.packet.payload.len() - layers.packet.padding.len();
            for bit in payload * 8..body * 8 {
                datagram[bit / 8] ^= 1 << (bit % 8);
                let computed = icrc::of_datagram(&sent, &datagram);
                datagram[bit / 8] ^= 1 << (bit % 8);
                let found = solver.identification(0, computed, received);
                assert!(found.is_none_or(|id| id >= 64), "bit {bit} passes as {found:?}");
                flips += 1;
            }
        }
    }
    assert!(lengths.len() > 10 && flips > 100_000, "{} lengths, {flips} flips", lengths.len());
}

/// The connection manager's datagrams: UD to queue pair 1, its well-known queue key, 256 bytes of
/// management datagram.
#[test]
fn connection_manager_datagrams_parse() {
    let capture = captures().into_iter().find(|capture| capture.name == "rping_cm.pcap").unwrap();
    let mut datagrams = 0;
    for frame in &capture.frames {
        let packet = Layers::parse(frame).unwrap().packet;
        if packet.bth.destination_qpn != Qpn::GENERAL_SERVICES {
            continue;
        }
        assert_eq!(packet.opcode, Opcode::UdSendOnly);
        let deth = packet.extended.deth.unwrap();
        assert_eq!(deth.queue_key, 0x8001_0000);
        assert_eq!(deth.source_qpn, Qpn::GENERAL_SERVICES);
        assert_eq!(packet.payload.len(), 256);
        // Base version 1, class 7 (communication management), class version 2.
        assert_eq!(packet.payload[..3], [1, 7, 2]);
        datagrams += 1;
    }
    assert!(datagrams >= 4, "{datagrams}");
}
