//! Properties over generated headers and packets: what is emitted parses back to what it was, and
//! an ICRC written the slow way agrees with ours.

use core::net::{Ipv4Addr, Ipv6Addr};

use millstream_wire::ethernet::EthernetHeader;
use millstream_wire::icrc::{self, Addresses, Addressing, Icrc};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::ipv6::Ipv6Header;
use millstream_wire::udp::UdpHeader;
use millstream_wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, ExtendedHeaders, ICRC_LENGTH, Ieth, ImmDt,
    MAX_HEADER_LENGTH, Opcode, Packet, ParseError, Psn, Qpn, Reth,
};
use proptest::array::uniform6;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

fn psn() -> impl Strategy<Value = Psn> {
    any::<u32>().prop_map(Psn::new)
}

fn qpn() -> impl Strategy<Value = Qpn> {
    any::<u32>().prop_map(Qpn::new)
}

fn bth() -> impl Strategy<Value = Bth> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let small = (0..4_u8, 0..16_u8, 0..64_u8, 0..128_u8);
    (any::<u8>(), flags, small, any::<u16>(), qpn(), psn()).prop_map(
        |(opcode, flags, small, partition_key, destination_qpn, psn)| Bth {
            opcode,
            solicited_event: flags.0,
            migration_request: flags.1,
            pad_count: small.0,
            version: small.1,
            partition_key,
            fecn: flags.2,
            becn: flags.3,
            reserved6: small.2,
            destination_qpn,
            acknowledge_request: flags.4,
            reserved7: small.3,
            psn,
        },
    )
}

fn reth() -> impl Strategy<Value = Reth> {
    any::<(u64, u32, u32)>().prop_map(|(virtual_address, remote_key, dma_length)| Reth {
        virtual_address,
        remote_key,
        dma_length,
    })
}

fn aeth() -> impl Strategy<Value = Aeth> {
    (any::<u8>(), psn()).prop_map(|(raw_syndrome, msn)| Aeth { raw_syndrome, msn })
}

fn atomic() -> impl Strategy<Value = AtomicEth> {
    any::<(u64, u32, u64, u64)>().prop_map(|(virtual_address, remote_key, swap_or_add, compare)| {
        AtomicEth { virtual_address, remote_key, swap_or_add, compare }
    })
}

fn atomic_ack() -> impl Strategy<Value = AtomicAckEth> {
    any::<u64>().prop_map(|original| AtomicAckEth { original })
}

fn deth() -> impl Strategy<Value = Deth> {
    (any::<u32>(), any::<u8>(), qpn()).prop_map(|(queue_key, reserved, source_qpn)| Deth {
        queue_key,
        reserved,
        source_qpn,
    })
}

/// A header of every kind; [`packet`] keeps those that its opcode calls for.
fn every_header() -> impl Strategy<Value = ExtendedHeaders> {
    let small = any::<(u32, u32, [u8; 16])>();
    (deth(), reth(), atomic(), aeth(), atomic_ack(), small).prop_map(
        |(deth, reth, atomic, aeth, atomic_ack, (immediate, invalidate, notification))| {
            ExtendedHeaders {
                deth: Some(deth),
                reth: Some(reth),
                atomic: Some(atomic),
                aeth: Some(aeth),
                atomic_ack: Some(atomic_ack),
                immediate: Some(ImmDt(immediate)),
                invalidate: Some(Ieth(invalidate)),
                notification: Some(notification),
            }
        },
    )
}

/// What a [`Packet`] is made of; the payload is its own so that the packet can borrow it.
#[derive(Clone, Debug)]
struct Parts {
    bth: Bth,
    opcode: Opcode,
    extended: ExtendedHeaders,
    payload: Vec<u8>,
    icrc: u32,
}

impl Parts {
    fn packet(&self) -> Packet<'_> {
        let Self { bth, opcode, extended, ref payload, icrc } = *self;
        let padding = &[0; 3][..usize::from(bth.pad_count)];
        Packet { bth, opcode, extended, payload, padding, icrc }
    }

    fn emit(&self) -> Vec<u8> {
        let mut buffer = vec![0xee; MAX_HEADER_LENGTH + self.payload.len() + 3 + ICRC_LENGTH];
        let length = self.packet().emit(&mut buffer);
        buffer.truncate(length);
        buffer
    }
}

fn packet() -> impl Strategy<Value = Parts> {
    (bth(), select(Opcode::ALL), every_header(), vec(any::<u8>(), 0..600), any::<u32>()).prop_map(
        |(bth, opcode, every, payload, icrc)| Parts {
            bth: Bth { opcode: opcode as u8, version: 0, ..bth },
            opcode,
            extended: ExtendedHeaders {
                deth: every.deth.filter(|_| opcode.has_deth()),
                reth: every.reth.filter(|_| opcode.has_reth()),
                atomic: every.atomic.filter(|_| opcode.has_atomic()),
                aeth: every.aeth.filter(|_| opcode.has_aeth()),
                atomic_ack: every.atomic_ack.filter(|_| opcode.has_atomic_ack()),
                immediate: every.immediate.filter(|_| opcode.has_immediate()),
                invalidate: every.invalidate.filter(|_| opcode.has_invalidate()),
                notification: every.notification.filter(|_| opcode.has_notification()),
            },
            payload,
            icrc,
        },
    )
}

fn ipv4(payload_length: u16) -> impl Strategy<Value = Ipv4Header> {
    any::<(u8, u16, u16, u8, u8, u16, [u8; 4], [u8; 4])>().prop_map(move |fields| Ipv4Header {
        type_of_service: fields.0,
        total_length: 20 + payload_length,
        identification: fields.1,
        flags: fields.2,
        time_to_live: fields.3,
        protocol: fields.4,
        checksum: fields.5,
        source: Ipv4Addr::from(fields.6),
        destination: Ipv4Addr::from(fields.7),
    })
}

fn ipv6(payload_length: u16) -> impl Strategy<Value = Ipv6Header> {
    (any::<(u8, u8, u8, [u8; 16], [u8; 16])>(), 0_u32..1 << 20).prop_map(
        move |(fields, flow_label)| Ipv6Header {
            traffic_class: fields.0,
            flow_label,
            payload_length,
            next_header: fields.1,
            hop_limit: fields.2,
            source: Ipv6Addr::from(fields.3),
            destination: Ipv6Addr::from(fields.4),
        },
    )
}

fn udp(payload_length: u16) -> impl Strategy<Value = UdpHeader> {
    any::<(u16, u16, u16)>().prop_map(move |(source_port, destination_port, checksum)| UdpHeader {
        source_port,
        destination_port,
        length: 8 + payload_length,
        checksum,
    })
}

/// Parses `bytes`, alone and with others after them, and every prefix, which must be too short.
fn check_prefixes<T: core::fmt::Debug + PartialEq>(
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, ParseError>,
    expected: T,
) -> Result<(), TestCaseError> {
    let needed = bytes.len();
    for available in 0..needed {
        let error = ParseError::Truncated { needed, available };
        prop_assert_eq!(parse(&bytes[..available]), Err(error));
    }
    prop_assert_eq!(&parse(bytes), &Ok(expected));
    prop_assert_eq!(parse(&[bytes, b"tail"].concat()), parse(bytes));
    Ok(())
}

proptest! {
    #[test]
    fn transport_headers(
        bth in bth(), reth in reth(), aeth in aeth(), atomic in atomic(), ack in atomic_ack(),
        deth in deth(), word in any::<u32>(),
    ) {
        check_prefixes(&bth.to_bytes(), Bth::parse, bth)?;
        check_prefixes(&reth.to_bytes(), Reth::parse, reth)?;
        check_prefixes(&aeth.to_bytes(), Aeth::parse, aeth)?;
        prop_assert_eq!(Aeth::new(aeth.syndrome(), aeth.msn), aeth);
        check_prefixes(&atomic.to_bytes(), AtomicEth::parse, atomic)?;
        check_prefixes(&ack.to_bytes(), AtomicAckEth::parse, ack)?;
        check_prefixes(&deth.to_bytes(), Deth::parse, deth)?;
        check_prefixes(&ImmDt(word).to_bytes(), ImmDt::parse, ImmDt(word))?;
        check_prefixes(&Ieth(word).to_bytes(), Ieth::parse, Ieth(word))?;
    }

    #[test]
    fn outer_headers(
        macs in (uniform6(any::<u8>()), uniform6(any::<u8>())), ether_type in any::<u16>(),
        v4 in ipv4(5), v6 in ipv6(5), udp in udp(5),
    ) {
        let ethernet = EthernetHeader { destination: macs.0, source: macs.1, ether_type };
        // Three bytes beyond what the length fields say, as in a padded Ethernet frame.
        let tail = *b"12345xyz";
        let frame = [&ethernet.to_bytes()[..], &tail].concat();
        prop_assert_eq!(EthernetHeader::parse(&frame), Ok((ethernet, &tail[..])));
        let packet = [&v4.to_bytes()[..], &tail].concat();
        prop_assert_eq!(Ipv4Header::parse(&packet), Ok((v4, &tail[..5])));
        let packet = [&v6.to_bytes()[..], &tail].concat();
        prop_assert_eq!(Ipv6Header::parse(&packet), Ok((v6, &tail[..5])));
        let segment = [&udp.to_bytes()[..], &tail].concat();
        prop_assert_eq!(UdpHeader::parse(&segment), Ok((udp, &tail[..5])));

        // One byte less than the length fields say.
        let short = [&v4.to_bytes()[..], &tail[..4]].concat();
        let error = ParseError::Length { field: 25, available: 24 };
        prop_assert_eq!(Ipv4Header::parse(&short), Err(error));
        let short = [&udp.to_bytes()[..], &tail[..4]].concat();
        let error = ParseError::Length { field: 13, available: 12 };
        prop_assert_eq!(UdpHeader::parse(&short), Err(error));
        let short = [&v6.to_bytes()[..], &tail[..4]].concat();
        let error = ParseError::Length { field: 5, available: 4 };
        prop_assert_eq!(Ipv6Header::parse(&short), Err(error));
    }

    #[test]
    fn a_length_field_below_the_header_is_an_error(v4 in ipv4(0), udp in udp(0), less in 1..8_u16) {
        let v4 = Ipv4Header { total_length: 20 - less, ..v4 };
        let udp = UdpHeader { length: 8 - less, ..udp };
        let field = usize::from(20 - less);
        let error = ParseError::Length { field, available: 20 };
        prop_assert_eq!(Ipv4Header::parse(&v4.to_bytes()).err(), Some(error));
        let error = ParseError::Length { field: usize::from(8 - less), available: 8 };
        prop_assert_eq!(UdpHeader::parse(&udp.to_bytes()).err(), Some(error));
    }

    /// RFC 1071: a header with its checksum in place sums to ones, and one bit less does not.
    #[test]
    fn ipv4_checksums(header in ipv4(0), bit in 0..160_usize) {
        let right = Ipv4Header { checksum: header.computed_checksum(), ..header };
        let sum = |bytes: [u8; 20]| {
            let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
            words.fold(0, |sum, word| { let s = sum + word; (s & 0xffff) + (s >> 16) })
        };
        let mut bytes = right.to_bytes();
        prop_assert_eq!(sum(bytes), 0xffff);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert_ne!(sum(bytes), 0xffff);
    }

    #[test]
    fn packets(parts in packet()) {
        let packet = parts.packet();
        let bytes = parts.emit();
        prop_assert_eq!(Packet::parse(&bytes), Ok(packet));

        // Cut anywhere, it is never taken for the same packet, and never for one with less of a
        // header: what is left is too short, or a packet with a shorter payload.
        let fixed = bytes.len() - packet.payload.len();
        for length in 0..bytes.len() {
            let cut = Packet::parse(&bytes[..length]);
            prop_assert_eq!(cut.is_ok(), length >= fixed, "{} of {}", length, bytes.len());
        }
    }

    #[test]
    fn packets_of_another_version_or_opcode_are_refused(parts in packet(), bits in any::<u8>()) {
        let mut bytes = parts.emit();
        let version = bits & 0xf;
        bytes[1] = bytes[1] & 0xf0 | version;
        let parsed = Packet::parse(&bytes);
        prop_assert_eq!(parsed.err(), (version != 0).then_some(ParseError::Version(version)));
        bytes[1] &= 0xf0;
        bytes[0] = bits;
        let known = Opcode::ALL.iter().any(|&opcode| opcode as u8 == bits);
        let unknown = Packet::parse(&bytes) == Err(ParseError::UnknownOpcode(bits));
        prop_assert_eq!(unknown, !known);
    }

    #[test]
    fn the_icrc_is_the_specifications(
        parts in packet(), v4 in ipv4(0), v6 in ipv6(0), udp in udp(0), cut in 0..600_usize,
    ) {
        let datagram = parts.emit();
        let length = datagram.len() as u16;
        let body = &datagram[..datagram.len() - ICRC_LENGTH];
        let udp = UdpHeader { length: length + 8, ..udp };
        let v4 = Ipv4Header { total_length: length + 28, protocol: 17, ..v4 };
        let v6 = Ipv6Header { payload_length: length + 8, next_header: 17, ..v6 };
        let addressing = Addressing::new(Addresses::from(&v4), &udp);
        let expected = slow_icrc(&v4.to_bytes(), &[1, 8, 10, 11], &udp, body);
        prop_assert_eq!(icrc::of_datagram(&addressing, &datagram), expected);

        let addressing = Addressing::new(Addresses::from(&v6), &udp);
        let mut masked = v6.to_bytes();
        masked[0] |= 0x0f; // The upper half of the traffic class; the rest is whole bytes.
        let expected = slow_icrc(&masked, &[1, 2, 3, 7], &udp, body);
        prop_assert_eq!(icrc::of_datagram(&addressing, &datagram), expected);

        // However it is cut, as a sender does that gathers header, payload and padding.
        let cut = (Bth::LENGTH + cut).min(body.len());
        let mut running = Icrc::start(&addressing, &body[..cut], datagram.len());
        running.update(&body[cut..]);
        prop_assert_eq!(running.finish(), expected);
    }

    #[test]
    fn psn_arithmetic(start in psn(), count in any::<u32>(), near in any::<u64>()) {
        // Adding and measuring undo each other, mod 2^24.
        let later = start.add(count);
        let sum = u64::from(start.value()) + u64::from(count);
        prop_assert_eq!(u64::from(later.value()), sum % (1 << 24));
        let distance = later.distance_from(start);
        prop_assert!((-(1 << 23)..1 << 23).contains(&distance));
        prop_assert_eq!(distance.rem_euclid(1 << 24) as u32, count % (1 << 24));
        if distance != -(1 << 23) {
            prop_assert_eq!(start.distance_from(later), -distance);
        }
        prop_assert_eq!(Psn::from_bytes(later.to_bytes()), later);

        // The extension is the one number within half the circle that has these low bits.
        let near = near.clamp(1 << 23, u64::MAX - (1 << 23));
        let extended = later.extend(near);
        prop_assert_eq!(Psn::from_extended(extended), later);
        prop_assert!((-(1 << 23)..1 << 23).contains(&(extended.wrapping_sub(near) as i64)));
    }

    #[test]
    fn psns_survive_the_wire(near in 1_u64 << 23..1 << 60, distance in -(1_i64 << 23)..1 << 23) {
        let sent = near.wrapping_add_signed(distance);
        prop_assert_eq!(Psn::from_extended(sent).extend(near), sent);
    }
}

/// The ICRC as annex A17 writes it down, a bit at a time: `ones` are the bytes of the IP header
/// that count as ones, besides those of the UDP checksum and the fifth of the BTH.
fn slow_icrc(ip: &[u8], ones: &[usize], udp: &UdpHeader, body: &[u8]) -> u32 {
    let mut covered = [&[0xff; 8][..], ip, &udp.to_bytes(), body].concat();
    for &place in ones {
        covered[8 + place] = 0xff;
    }
    let udp_checksum = 8 + ip.len() + 6;
    covered[udp_checksum..udp_checksum + 2].fill(0xff);
    covered[8 + ip.len() + UdpHeader::LENGTH + 4] = 0xff;
    !covered.into_iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 }
        })
    })
}
