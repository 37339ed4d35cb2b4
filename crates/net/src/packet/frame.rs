//! Frames: the headers that precede the datagrams of a message, written and read.

use std::net::IpAddr;

use millstream_roce::{DatagramMeta, Identification};
use millstream_wire::Checksum;
use millstream_wire::ethernet::{self, EthernetHeader};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::ipv6::Ipv6Header;
use millstream_wire::udp::{self, UdpHeader};

use super::offload::{self, Offload};

/// The most bytes of headers, with that of the offload.
pub(super) const MAX_HEADERS: usize =
    offload::LENGTH + EthernetHeader::LENGTH + Ipv6Header::LENGTH + UdpHeader::LENGTH;

/// Don't fragment, and no other flag, and no fragment offset.
const DONT_FRAGMENT: u16 = 0x4000;

const TIME_TO_LIVE: u8 = 64;

/// The link address of the loopback interface. No other has it, and what is not for an interface's
/// own address does not get here.
const LOOPBACK: [u8; 6] = [0; 6];

/// What tells one frame's headers from another's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outline {
    /// Link addresses.
    pub(super) link_destination: [u8; 6],
    pub(super) link_source: [u8; 6],
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// Of both ends.
    pub(super) port: u16,
    /// The IP header's byte of that name, or type of service.
    pub(super) traffic_class: u8,
    /// All datagrams have this length, but for the last, which may be shorter.
    pub(super) segment: usize,
    /// Of all datagrams.
    pub(super) length: usize,
}

/// Bytes of IP packet that a datagram of so many bytes takes; `None` when there is no such packet.
pub(super) fn packet_length(destination: IpAddr, datagram: usize) -> Option<usize> {
    let (ip, counted) = match destination {
        // IPv4's length field counts its own header.
        IpAddr::V4(_) => (Ipv4Header::LENGTH, Ipv4Header::LENGTH),
        IpAddr::V6(_) => (Ipv6Header::LENGTH, 0),
    };
    let udp = UdpHeader::LENGTH + datagram;
    (counted + udp <= usize::from(u16::MAX)).then_some(ip + udp)
}

impl Outline {
    /// Writes all headers, from that of the offload on; returns their length. `None` when there can
    /// be no such packet: families that differ, or a length of more than 16 bits.
    ///
    /// A single datagram over IPv4 has no UDP checksum, as RoCEv2 devices send it. Over IPv6 there
    /// must be one, and the kernel wants one for what it segments: it is left for the kernel or the
    /// interface to complete. IPv4's identification is 0, and the kernel numbers segments from
    /// there: as with a UDP socket, so that receivers who do not see it can guess it.
    pub(super) fn write(&self, bytes: &mut [u8; MAX_HEADERS]) -> Option<usize> {
        let Self { source, destination, port, traffic_class, segment, length, .. } = *self;
        packet_length(destination, length)?;
        let udp_length = (UdpHeader::LENGTH + length) as u16;
        let (ip_length, ether_type) = match destination {
            IpAddr::V4(_) => (Ipv4Header::LENGTH, ethernet::IPV4),
            IpAddr::V6(_) => (Ipv6Header::LENGTH, ethernet::IPV6),
        };
        let udp_start = EthernetHeader::LENGTH + ip_length;
        let segmented = segment < length;
        let needs_checksum = segmented || destination.is_ipv6();
        let headers = udp_start + UdpHeader::LENGTH;
        let offload = Offload {
            segment: segmented.then_some(segment as u16),
            checksum_start: needs_checksum.then_some(udp_start as u16),
            verified: false,
        };
        // Whoever completes the checksum starts from what stands in its place.
        let pseudo_header = Checksum::udp(source, destination, udp_length)?;
        let checksum = if needs_checksum { pseudo_header.folded() } else { 0 };
        let udp =
            UdpHeader { source_port: port, destination_port: port, length: udp_length, checksum };
        let ethernet = EthernetHeader {
            destination: self.link_destination,
            source: self.link_source,
            ether_type,
        };
        let mut end = 0;
        let mut put = |piece: &[u8]| {
            bytes[end..end + piece.len()].copy_from_slice(piece);
            end += piece.len();
        };
        put(&offload.to_bytes(headers as u16));
        put(&ethernet.to_bytes());
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut header = Ipv4Header {
                    type_of_service: traffic_class,
                    total_length: Ipv4Header::LENGTH as u16 + udp_length,
                    identification: 0,
                    flags: DONT_FRAGMENT,
                    time_to_live: TIME_TO_LIVE,
                    protocol: udp::PROTOCOL,
                    checksum: 0,
                    source,
                    destination,
                };
                header.checksum = header.computed_checksum();
                put(&header.to_bytes());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => put(&Ipv6Header {
                traffic_class,
                flow_label: 0,
                payload_length: udp_length,
                next_header: udp::PROTOCOL,
                hop_limit: TIME_TO_LIVE,
                source,
                destination,
            }
            .to_bytes()),
            _ => return None,
        }
        put(&udp.to_bytes());
        Some(end)
    }
}

/// Why a frame is not taken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rejected {
    /// It ends within a header, or a length contradicts it.
    Length,
    /// It is not UDP over IPv4 or IPv6 without options, in Ethernet.
    Protocol,
    /// It is for somebody else, or from nobody.
    Address,
    /// A checksum is wrong, or IPv6 has none.
    Checksum,
    /// It is a fragment, or may become some: the ICRC covers the flags, which say otherwise.
    Fragment,
}

/// The datagrams of a frame: one, or those of a message that was segmented or coalesced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Datagrams {
    /// Of the first. Only its IP header was seen.
    pub(super) meta: DatagramMeta,
    /// Where the first starts in the frame.
    pub(super) start: usize,
    /// Bytes of all.
    pub(super) length: usize,
    /// Bytes of each, but for the last.
    pub(super) segment: usize,
}

impl Datagrams {
    /// The number of them.
    pub(super) const fn count(&self) -> usize {
        self.length.div_ceil(self.segment)
    }

    /// Each, out of the frame, with what is known of it.
    pub(super) fn of<'a>(
        &self,
        frame: &'a [u8],
    ) -> impl Iterator<Item = (DatagramMeta, &'a [u8])> + use<'a> {
        let meta = self.meta;
        let bytes = &frame[self.start..self.start + self.length];
        bytes.chunks(self.segment).enumerate().map(move |(index, bytes)| {
            let identification = match meta.identification {
                // Whoever segments numbers on from the first. But what was coalesced may have had
                // any numbers: those headers are gone.
                Identification::Known(first) if index > 0 => {
                    Identification::Guessed(first.wrapping_add(index as u16))
                }
                first => first,
            };
            (DatagramMeta { identification, ..meta }, bytes)
        })
    }
}

/// Reads a frame that the kernel says is for this machine, up to its datagrams.
pub(super) fn parse(
    frame: &[u8],
    offload: Offload,
    local: IpAddr,
    port: u16,
) -> Result<Datagrams, Rejected> {
    let (ethernet, packet) = EthernetHeader::parse(frame).map_err(|_| Rejected::Length)?;
    let ip_length;
    let (source, destination, traffic_class, identification, segment) = match ethernet.ether_type {
        ethernet::IPV4 => {
            let (ip, segment) = Ipv4Header::parse(packet).map_err(length_or_protocol)?;
            if ip.checksum != ip.computed_checksum() {
                return Err(Rejected::Checksum);
            }
            if ip.protocol != udp::PROTOCOL {
                return Err(Rejected::Protocol);
            }
            if ip.flags != DONT_FRAGMENT {
                return Err(Rejected::Fragment);
            }
            let (source, destination) = (IpAddr::from(ip.source), IpAddr::from(ip.destination));
            if ip.source.is_broadcast() {
                return Err(Rejected::Address);
            }
            ip_length = Ipv4Header::LENGTH;
            (source, destination, ip.type_of_service, ip.identification, segment)
        }
        ethernet::IPV6 => {
            let (ip, segment) = Ipv6Header::parse(packet).map_err(length_or_protocol)?;
            if ip.next_header != udp::PROTOCOL {
                return Err(Rejected::Protocol);
            }
            ip_length = Ipv6Header::LENGTH;
            // It has no identification. Known all the same, as there is nothing to guess.
            (ip.source.into(), ip.destination.into(), ip.traffic_class, 0, segment)
        }
        _ => return Err(Rejected::Protocol),
    };
    if destination != local
        || source.is_unspecified()
        || source.is_multicast()
        // Only from this machine to itself; the kernel calls anything else a martian.
        || source.is_loopback() != destination.is_loopback()
        // Who sends to itself does so on the loopback interface, which has no link address.
        || (source == local && ethernet.destination != LOOPBACK)
    {
        return Err(Rejected::Address);
    }
    let (udp, datagrams) = UdpHeader::parse(segment).map_err(|_| Rejected::Length)?;
    if udp.destination_port != port {
        return Err(Rejected::Address);
    }
    if datagrams.is_empty() {
        return Err(Rejected::Length);
    }
    // Nobody but the sender's kernel has touched a checksum that is still to be completed.
    let trusted = offload.checksum_start.is_some() || offload.verified;
    match udp.checksum {
        0 if destination.is_ipv6() => return Err(Rejected::Checksum),
        0 => {}
        _ if trusted => {}
        _ => {
            let sum = Checksum::udp(source, destination, udp.length);
            let mut sum = sum.ok_or(Rejected::Protocol)?;
            sum.update(&segment[..udp.length.into()]);
            if sum.finish() != 0 {
                return Err(Rejected::Checksum);
            }
        }
    }
    let start = EthernetHeader::LENGTH + ip_length + UdpHeader::LENGTH;
    let length = datagrams.len();
    let segment = offload.segment.map_or(length, usize::from);
    let meta = DatagramMeta {
        source,
        source_port: udp.source_port,
        destination,
        identification: Identification::Known(identification),
        congestion_experienced: traffic_class & 0b11 == 0b11,
    };
    Ok(Datagrams { meta, start, length, segment })
}

const fn length_or_protocol(error: millstream_wire::ParseError) -> Rejected {
    match error {
        millstream_wire::ParseError::Version(_) => Rejected::Protocol,
        _ => Rejected::Length,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use millstream_wire::icrc::{self, Addresses, Addressing};
    use millstream_wire::{Packet, ROCE_PORT};

    use super::*;

    /// What the kernel's soft-RoCE sent and received; see crates/wire/tests/captures.
    const CAPTURES: [&[u8]; 3] = [
        include_bytes!("../../../wire/tests/captures/send_rc.pcap"),
        include_bytes!("../../../wire/tests/captures/mixed-rc.pcap"),
        include_bytes!("../../../wire/tests/captures/k612-mtu4096-write_rc.pcap"),
    ];

    fn frames() -> Vec<&'static [u8]> {
        let mut frames = Vec::new();
        for capture in CAPTURES {
            let mut rest = &capture[24..];
            while let Some((head, tail)) = rest.split_first_chunk::<16>() {
                let length = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
                let (frame, tail) = tail.split_at(length);
                frames.push(frame);
                rest = tail;
            }
        }
        assert!(frames.len() > 100);
        frames
    }

    fn destination(frame: &[u8]) -> IpAddr {
        Ipv4Addr::new(frame[30], frame[31], frame[32], frame[33]).into()
    }

    fn read(frame: &[u8]) -> Result<Datagrams, Rejected> {
        parse(frame, Offload::default(), destination(frame), ROCE_PORT)
    }

    #[test]
    fn frames_of_the_kernel_are_read_with_their_identification() {
        let mut identifications = std::collections::BTreeSet::new();
        for frame in frames() {
            let datagrams = read(frame).unwrap();
            assert_eq!(datagrams.count(), 1);
            let (meta, datagram) = datagrams.of(frame).next().unwrap();
            let Identification::Known(identification) = meta.identification else {
                panic!("the IP header was seen");
            };
            identifications.insert(identification);
            let addresses =
                Addresses::unfragmented(meta.source, meta.destination, identification).unwrap();
            let (source_port, destination_port) = (meta.source_port, ROCE_PORT);
            let addressing = Addressing { addresses, source_port, destination_port };
            let packet = Packet::parse(datagram).unwrap();
            assert_eq!(icrc::of_datagram(&addressing, datagram), packet.icrc);
        }
        assert!(identifications.len() > 50, "the kernel counts");
    }

    /// The outline of a captured frame.
    fn outline(frame: &[u8]) -> Outline {
        let datagrams = read(frame).unwrap();
        Outline {
            link_destination: *frame[..6].first_chunk().unwrap(),
            link_source: *frame[6..12].first_chunk().unwrap(),
            source: datagrams.meta.source,
            destination: datagrams.meta.destination,
            port: ROCE_PORT,
            traffic_class: 0,
            segment: datagrams.length,
            length: datagrams.length,
        }
    }

    #[test]
    fn headers_are_written_as_the_kernel_writes_them() {
        for frame in frames() {
            let mut bytes = [0; MAX_HEADERS];
            let length = outline(frame).write(&mut bytes).unwrap();
            // No offload is asked for but a hint of the headers' length.
            assert_eq!(bytes[..offload::LENGTH], Offload::default().to_bytes(42));
            let written = &bytes[offload::LENGTH..length];
            // But for identification and source port, which are the sender's choice, and the
            // header checksum, which follows.
            let mut expected: [u8; 42] = *frame.first_chunk().unwrap();
            expected[18..20].fill(0);
            expected[34..36].copy_from_slice(&ROCE_PORT.to_be_bytes());
            let ip = Ipv4Header::parse(&frame[14..]).unwrap().0;
            let ip = Ipv4Header { identification: 0, ..ip };
            expected[24..26].copy_from_slice(&ip.computed_checksum().to_be_bytes());
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let v6 = |last| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last));
        let v4 = |last| IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
        for (source, destination, headers) in [(v4(1), v4(2), 42), (v6(1), v6(2), 62)] {
            for (segment, length) in [(100, 100), (100, 350), (65_000, 65_000)] {
                let outline = Outline {
                    link_destination: [2, 0, 0, 0, 0, 2],
                    link_source: [2, 0, 0, 0, 0, 1],
                    source,
                    destination,
                    port: ROCE_PORT,
                    traffic_class: 0b11,
                    segment,
                    length,
                };
                let mut bytes = [0; MAX_HEADERS];
                let end = outline.write(&mut bytes).unwrap();
                assert_eq!(end, offload::LENGTH + headers);
                let (offload, head) = bytes[..end].split_first_chunk().unwrap();
                let offload = Offload::parse(offload).unwrap();
                let frame = [head, &vec![7; length]].concat();
                let datagrams = parse(&frame, offload, destination, ROCE_PORT).unwrap();
                assert_eq!((datagrams.length, datagrams.segment), (length, segment));
                assert!(datagrams.meta.congestion_experienced, "the traffic class is there");
                let lengths: Vec<_> = datagrams.of(&frame).map(|(_, bytes)| bytes.len()).collect();
                assert_eq!(lengths.len(), length.div_ceil(segment));
                assert_eq!(lengths.iter().sum::<usize>(), length);
                assert!(lengths.iter().rev().skip(1).all(|&length| length == segment));
                // The first is known, the others are where a segmenting kernel puts them.
                let expected = (0..).map(|index| match index {
                    0 => Identification::Known(0),
                    index => Identification::Guessed(index),
                });
                let seen = datagrams.of(&frame).map(|(meta, _)| meta.identification);
                assert!(seen.zip(expected).all(|(seen, expected)| seen == expected));
            }
        }
    }

    #[test]
    fn a_checksum_left_to_the_kernel_is_right_when_it_completes_it() {
        let v6 = |last| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last));
        let outline = Outline {
            link_destination: [0; 6],
            link_source: [0; 6],
            source: v6(1),
            destination: v6(2),
            port: ROCE_PORT,
            traffic_class: 0,
            segment: 33,
            length: 33,
        };
        let mut bytes = [0; MAX_HEADERS];
        let end = outline.write(&mut bytes).unwrap();
        let offload = Offload::parse(bytes.first_chunk().unwrap()).unwrap();
        let mut frame = [&bytes[offload::LENGTH..end], &[0x5a; 33]].concat();
        // As the kernel does: sum from there on, and put the result where the offset says.
        let start = usize::from(offload.checksum_start.unwrap());
        let mut sum = Checksum::new();
        sum.update(&frame[start..]);
        frame[start + 6..start + 8].copy_from_slice(&sum.finish().to_be_bytes());
        // Nobody vouches for it now, so it is looked at.
        assert!(parse(&frame, Offload::default(), v6(2), ROCE_PORT).is_ok());
        frame[start + 20] ^= 1;
        let damaged = parse(&frame, Offload::default(), v6(2), ROCE_PORT);
        assert_eq!(damaged, Err(Rejected::Checksum));
        let verified = Offload { verified: true, ..Offload::default() };
        assert!(parse(&frame, verified, v6(2), ROCE_PORT).is_ok(), "the interface has looked");
        frame[start + 6..start + 8].fill(0);
        assert_eq!(parse(&frame, verified, v6(2), ROCE_PORT), Err(Rejected::Checksum), "none");
    }

    /// Changes bytes of a good frame, and its header checksum with them.
    fn changed(changes: &[(usize, u8)]) -> Vec<u8> {
        let mut frame = frames()[0].to_vec();
        for &(at, value) in changes {
            frame[at] = value;
        }
        if let Ok((ip, _)) = Ipv4Header::parse(&frame[14..]) {
            frame[24..26].copy_from_slice(&ip.computed_checksum().to_be_bytes());
        }
        frame
    }

    #[test]
    fn what_is_wrong_is_refused() {
        let good = frames()[0];
        let local = destination(good);
        let total = u16::from_be_bytes([good[16], good[17]]);
        let [longer0, longer1] = (good.len() as u16 - 14 + 1).to_be_bytes();
        let [udp0, udp1] = (total - 20 + 1).to_be_bytes();
        let own_source = [0, 1, 2, 3].map(|byte| (26 + byte, good[30 + byte]));
        for (changes, expected, what) in [
            (&[][..], None, "nothing"),
            (&[(15, 0xff)], None, "type of service"),
            (&[(22, 1)], None, "time to live"),
            (&[(12, 8), (13, 6)], Some(Rejected::Protocol), "ARP"),
            (&[(12, 0x81), (13, 0)], Some(Rejected::Protocol), "a VLAN tag"),
            (&[(14, 0x46)], Some(Rejected::Protocol), "options"),
            (&[(14, 0x65)], Some(Rejected::Protocol), "version 6"),
            (&[(23, 6)], Some(Rejected::Protocol), "TCP"),
            (&[(20, 0x60)], Some(Rejected::Fragment), "more fragments"),
            (&[(20, 0x20)], Some(Rejected::Fragment), "more fragments"),
            (&[(20, 0x40), (21, 1)], Some(Rejected::Fragment), "a later fragment"),
            (&[(20, 0xc0)], Some(Rejected::Fragment), "the reserved flag"),
            (&[(20, 0x00)], Some(Rejected::Fragment), "may be fragmented"),
            (&[(16, longer0), (17, longer1)], Some(Rejected::Length), "longer than the frame"),
            (&[(16, 0), (17, 19)], Some(Rejected::Length), "shorter than its header"),
            (&[(16, 0), (17, 27)], Some(Rejected::Length), "no UDP header"),
            (&[(38, udp0), (39, udp1)], Some(Rejected::Length), "UDP longer than IP"),
            (&[(38, 0), (39, 7)], Some(Rejected::Length), "UDP shorter than its header"),
            (&[(38, 0), (39, 8)], Some(Rejected::Length), "an empty datagram"),
            (&[(33, good[33] ^ 1)], Some(Rejected::Address), "for somebody else"),
            (&[(37, 0xb8)], Some(Rejected::Address), "another port"),
            (&[(26, 127)], Some(Rejected::Address), "from a loopback address"),
            (&[(26, 224)], Some(Rejected::Address), "from a group"),
            (&[(26, 0), (27, 0), (28, 0), (29, 0)], Some(Rejected::Address), "from nobody"),
            (&[(26, 255), (27, 255), (28, 255), (29, 255)], Some(Rejected::Address), "from all"),
            (&own_source[..], Some(Rejected::Address), "from ourselves, over a wire"),
            (&[(40, 1)], Some(Rejected::Checksum), "a wrong UDP checksum"),
        ] {
            let frame = changed(changes);
            let result = parse(&frame, Offload::default(), local, ROCE_PORT);
            assert_eq!(result.err(), expected, "{what}");
        }
        let mut frame = changed(&[]);
        frame[24] ^= 1;
        assert_eq!(parse(&frame, Offload::default(), local, ROCE_PORT), Err(Rejected::Checksum));
        for length in 0..good.len() {
            // Cut short; padding at the end, as Ethernet has it for short frames, is no harm.
            assert!(parse(&good[..length], Offload::default(), local, ROCE_PORT).is_err());
        }
        let mut over_loopback = changed(&own_source);
        over_loopback[..6].fill(0);
        assert!(parse(&over_loopback, Offload::default(), local, ROCE_PORT).is_ok());
        let padded = [good, &[0; 9]].concat();
        assert_eq!(
            parse(&padded, Offload::default(), local, ROCE_PORT),
            parse(good, Offload::default(), local, ROCE_PORT)
        );
    }

    #[test]
    fn any_bytes_do_no_harm() {
        // A fixed sequence of pseudo-random changes of good frames, all read without a panic.
        let mut state = 1_u64;
        let mut next = |limit: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % limit
        };
        let frames = frames();
        for _ in 0..20_000 {
            let mut frame = frames[next(frames.len())].to_vec();
            for _ in 0..=next(4) {
                let at = next(frame.len().min(60));
                frame[at] = next(256) as u8;
            }
            frame.truncate(next(frame.len() + 1));
            let mut header = [0; offload::LENGTH];
            header.fill_with(|| next(256) as u8);
            header[1] = [0, 5][next(2)];
            let Ok(offload) = Offload::parse(&header) else { continue };
            let local = if frame.len() > 33 { destination(&frame) } else { IpAddr::from([0; 4]) };
            if let Ok(datagrams) = parse(&frame, offload, local, ROCE_PORT) {
                assert_eq!(datagrams.of(&frame).count(), datagrams.count());
            }
        }
    }

    #[test]
    fn marks_of_congestion_are_seen() {
        for (type_of_service, expected) in [(0, false), (1, false), (2, false), (3, true)] {
            let frame = changed(&[(15, 0xb8 | type_of_service)]);
            let datagrams = read(&frame).unwrap();
            assert_eq!(datagrams.meta.congestion_experienced, expected);
        }
    }

    #[test]
    fn what_no_packet_holds_is_not_written() {
        let mut bytes = [0; MAX_HEADERS];
        let outline = outline(frames()[0]);
        let longest = Outline { segment: 65_507, length: 65_507, ..outline };
        assert!(longest.write(&mut bytes).is_some());
        let longer = Outline { segment: 65_508, length: 65_508, ..outline };
        assert_eq!(longer.write(&mut bytes), None);
        let mixed = Outline { destination: Ipv6Addr::LOCALHOST.into(), ..outline };
        assert_eq!(mixed.write(&mut bytes), None);
        let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
        assert_eq!(packet_length(v6, 65_527), Some(65_575));
        assert_eq!(packet_length(v6, 65_528), None);
        assert_eq!(packet_length(IpAddr::from([10, 0, 0, 1]), 100), Some(128));
    }
}
