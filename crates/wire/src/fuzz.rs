//! What the fuzz targets in `fuzz/` call, and what ordinary tests call on their committed corpus.
//!
//! Each function takes any bytes, asserts what must hold for them, and says whether they were
//! well-formed: the corpus has seeds of both kinds, and the replay checks which is which.

use crate::ethernet::{self, EthernetHeader};
use crate::icrc::{self, Addresses, Addressing, Icrc, Solver};
use crate::ipv4::Ipv4Header;
use crate::ipv6::Ipv6Header;
use crate::udp::{self, UdpHeader};
use crate::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, ExtendedHeaders, ICRC_LENGTH, Ieth, ImmDt,
    MAX_HEADER_LENGTH, Opcode, Packet, ParseError, Psn, Qpn, ROCE_PORT, Reth,
};

/// Every header parser by itself: what parses re-emits byte for byte. True when one parsed.
pub fn headers(bytes: &[u8]) -> bool {
    fn emits_what_it_read<T, const N: usize>(
        bytes: &[u8],
        parse: impl Fn(&[u8]) -> Result<T, ParseError>,
        to_bytes: impl Fn(&T) -> [u8; N],
    ) -> bool {
        match parse(bytes) {
            Ok(header) => {
                assert_eq!(to_bytes(&header), bytes[..N]);
                true
            }
            Err(error) => {
                if bytes.len() < N {
                    assert_eq!(error, ParseError::Truncated { needed: N, available: bytes.len() });
                } else {
                    assert!(!error.to_string().is_empty());
                }
                false
            }
        }
    }
    let parsed = [
        emits_what_it_read(bytes, Bth::parse, Bth::to_bytes),
        emits_what_it_read(bytes, Reth::parse, Reth::to_bytes),
        emits_what_it_read(bytes, Aeth::parse, Aeth::to_bytes),
        emits_what_it_read(bytes, AtomicEth::parse, AtomicEth::to_bytes),
        emits_what_it_read(bytes, AtomicAckEth::parse, AtomicAckEth::to_bytes),
        emits_what_it_read(bytes, ImmDt::parse, ImmDt::to_bytes),
        emits_what_it_read(bytes, Ieth::parse, Ieth::to_bytes),
        emits_what_it_read(bytes, Deth::parse, Deth::to_bytes),
        emits_what_it_read(
            bytes,
            |b| UdpHeader::parse(b).map(|(header, _)| header),
            UdpHeader::to_bytes,
        ),
        emits_what_it_read(
            bytes,
            |b| EthernetHeader::parse(b).map(|(header, _)| header),
            EthernetHeader::to_bytes,
        ),
        emits_what_it_read(
            bytes,
            |b| Ipv4Header::parse(b).map(|(header, _)| header),
            Ipv4Header::to_bytes,
        ),
        emits_what_it_read(
            bytes,
            |b| Ipv6Header::parse(b).map(|(header, _)| header),
            Ipv6Header::to_bytes,
        ),
    ];
    if let Some(&three) = bytes.first_chunk() {
        assert_eq!(Psn::from_bytes(three).to_bytes(), three);
        assert_eq!(Qpn::from_bytes(three).to_bytes(), three);
    }
    parsed.contains(&true)
}

/// A UDP payload: what parses re-emits byte for byte and holds the headers of its opcode. True
/// when it parsed.
pub fn packet(bytes: &[u8]) -> bool {
    let packet = match Packet::parse(bytes) {
        Ok(packet) => packet,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let mut emitted = vec![0xee; bytes.len()];
    assert_eq!(packet.emit(&mut emitted), bytes.len());
    assert_eq!(emitted, bytes);

    let opcode = packet.opcode;
    let extended = &packet.extended;
    assert_eq!(Opcode::from_byte(bytes[0]), Ok(opcode));
    assert_eq!(extended.deth.is_some(), opcode.has_deth());
    assert_eq!(extended.reth.is_some(), opcode.has_reth());
    assert_eq!(extended.atomic.is_some(), opcode.has_atomic());
    assert_eq!(extended.aeth.is_some(), opcode.has_aeth());
    assert_eq!(extended.atomic_ack.is_some(), opcode.has_atomic_ack());
    assert_eq!(extended.immediate.is_some(), opcode.has_immediate());
    assert_eq!(extended.invalidate.is_some(), opcode.has_invalidate());
    assert_eq!(extended.notification.is_some(), opcode.has_notification());

    let mut scratch = [0; MAX_HEADER_LENGTH - Bth::LENGTH];
    let length = extended.emit(&mut scratch);
    assert_eq!(ExtendedHeaders::parse(opcode, &scratch), Ok((*extended, length)));
    assert_eq!(packet.padding.len(), usize::from(packet.bth.pad_count));
    let parts = Bth::LENGTH + length + packet.payload.len() + packet.padding.len() + ICRC_LENGTH;
    assert_eq!(parts, bytes.len());
    true
}

/// An Ethernet frame, from the outside in. True when it holds a RoCEv2 packet whose ICRC is right.
pub fn frame(bytes: &[u8]) -> bool {
    open(bytes).is_ok_and(|opened| match opened {
        Some((addressing, datagram)) if packet(datagram) => {
            let received = Packet::parse(datagram).map(|packet| packet.icrc);
            received == Ok(icrc::of_datagram(&addressing, datagram))
        }
        _ => false,
    })
}

/// The UDP payload of a frame to RoCEv2's port, or `None` when the frame holds something else.
fn open(frame: &[u8]) -> Result<Option<(Addressing, &[u8])>, ParseError> {
    let (ethernet, packet) = EthernetHeader::parse(frame)?;
    let (addresses, protocol, segment) = match ethernet.ether_type {
        ethernet::IPV4 => {
            let (ip, segment) = Ipv4Header::parse(packet)?;
            // A header that has the checksum it should have sums to zero with it.
            let right = Ipv4Header { checksum: ip.computed_checksum(), ..ip };
            assert_eq!(right.computed_checksum(), right.checksum);
            (Addresses::from(&ip), ip.protocol, segment)
        }
        ethernet::IPV6 => {
            let (ip, segment) = Ipv6Header::parse(packet)?;
            (Addresses::from(&ip), ip.next_header, segment)
        }
        _ => return Ok(None),
    };
    if protocol != udp::PROTOCOL {
        return Ok(None);
    }
    let (udp, datagram) = UdpHeader::parse(segment)?;
    assert!(Ipv4Header::LENGTH + UdpHeader::LENGTH + datagram.len() <= packet.len());
    let ours = udp.destination_port == ROCE_PORT;
    Ok(ours.then(|| (Addressing::new(addresses, &udp), datagram)))
}

/// Two identifications, the place of a bit, and a UDP payload: the ICRC does not depend on how the
/// payload is cut up, notices the bit, and gives the identification away. True when there were
/// bytes enough.
pub fn icrc(bytes: &[u8]) -> bool {
    let Some((&[s0, s1, a0, a1, f0, f1], datagram)) = bytes.split_first_chunk::<6>() else {
        return false;
    };
    if datagram.len() < Bth::LENGTH + ICRC_LENGTH {
        return false;
    }
    let (sent, assumed) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([a0, a1]));
    let place = usize::from(u16::from_be_bytes([f0, f1]));
    let addressing = |identification| {
        let (source, destination) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let addresses = Addresses::V4 { source, destination, identification, flags: 0x4000 };
        Addressing { addresses, source_port: 0xc000, destination_port: ROCE_PORT }
    };

    let received = icrc::of_datagram(&addressing(sent), datagram);
    let computed = icrc::of_datagram(&addressing(assumed), datagram);
    let solver = Solver::new(datagram.len());
    assert_eq!(solver.identification(assumed, computed, received), Some(sent));

    let body = datagram.len() - ICRC_LENGTH;
    let cut = Bth::LENGTH + place % (body - Bth::LENGTH + 1);
    let mut in_two = Icrc::start(&addressing(sent), &datagram[..cut], datagram.len());
    in_two.update(&datagram[cut..body]);
    assert_eq!(in_two.finish(), received);

    let mut damaged = datagram.to_vec();
    damaged[place / 8 % body] ^= 1 << (place % 8);
    let noticed = icrc::of_datagram(&addressing(sent), &damaged) != received;
    // The fifth byte of the BTH is masked, as routers may set the congestion bits there.
    assert_eq!(noticed, place / 8 % body != 4);
    true
}
