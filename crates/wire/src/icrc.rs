//! The invariant CRC of RoCEv2 (IBTA annex A17.3.3).
//!
//! It is zlib's CRC-32 over eight bytes of ones (where InfiniBand has its local route header), the
//! IP header, the UDP header, the transport headers and the payload with its padding, with every
//! field that a router may change set to ones: ToS, TTL and checksum of IPv4; traffic class, flow
//! label and hop limit of IPv6; the UDP checksum; the fifth byte of the BTH. It travels
//! little-endian after the padding.
//!
//! The IPv4 identification *is* covered, and a program that receives through a UDP socket never
//! sees it. CRC-32 is linear, so the identification can be solved for instead: see
//! [`Solver::identification`].

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::Bth;
use crate::crc32;
use crate::ipv4::Ipv4Header;
use crate::ipv6::Ipv6Header;
use crate::udp::UdpHeader;

/// CRC-32 of eight bytes of ones: the state after the stand-in for the local route header.
const AFTER_ROUTE_HEADER: u32 = 0x2144_df1c;

/// Don't fragment: the second of the three flag bits of IPv4.
const DONT_FRAGMENT: u16 = 0x4000;

/// The fields of the IP and UDP headers that the ICRC covers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Addressing {
    /// The IP addresses.
    pub addresses: Addresses,
    /// UDP source port.
    pub source_port: u16,
    /// UDP destination port.
    pub destination_port: u16,
}

impl Addressing {
    /// What the ICRC covers of a datagram received with these headers.
    pub const fn new(addresses: Addresses, udp: &UdpHeader) -> Self {
        let UdpHeader { source_port, destination_port, .. } = *udp;
        Self { addresses, source_port, destination_port }
    }
}

/// The IP part of [`Addressing`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Addresses {
    /// IPv4 without options.
    V4 {
        /// Sender.
        source: Ipv4Addr,
        /// Receiver.
        destination: Ipv4Addr,
        /// The identification field.
        identification: u16,
        /// Flags and fragment offset as they stand in the header.
        flags: u16,
    },
    /// IPv6 without extension headers.
    V6 {
        /// Sender.
        source: Ipv6Addr,
        /// Receiver.
        destination: Ipv6Addr,
    },
}

impl Addresses {
    /// The addresses of a datagram as an unconnected UDP socket with path MTU discovery sends it:
    /// don't fragment set, and for IPv4 this identification. `None` when the families differ.
    pub fn unfragmented(source: IpAddr, destination: IpAddr, identification: u16) -> Option<Self> {
        match (source, destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                Some(Self::V4 { source, destination, identification, flags: DONT_FRAGMENT })
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => Some(Self::V6 { source, destination }),
            _ => None,
        }
    }
}

impl From<&Ipv4Header> for Addresses {
    fn from(header: &Ipv4Header) -> Self {
        let Ipv4Header { source, destination, identification, flags, .. } = *header;
        Self::V4 { source, destination, identification, flags }
    }
}

impl From<&Ipv6Header> for Addresses {
    fn from(header: &Ipv6Header) -> Self {
        Self::V6 { source: header.source, destination: header.destination }
    }
}

/// A running ICRC: the headers are in, payload and padding follow.
#[derive(Clone, Debug)]
pub struct Icrc(u32);

impl Icrc {
    /// Starts with the IP and UDP headers and the transport headers.
    ///
    /// `headers` starts with the BTH and may go on with anything; `udp_payload_length` counts the
    /// whole UDP payload with its ICRC.
    ///
    /// # Panics
    /// When `headers` is shorter than a BTH.
    pub fn start(addressing: &Addressing, headers: &[u8], udp_payload_length: usize) -> Self {
        const UDP: usize = 8;
        // The longest prefix: IPv6 (40) + UDP (8) + BTH (12).
        let mut prefix = [0xff; 60];
        // A caller may pass more than an IP packet holds (a receive buffer of merged datagrams).
        // No ICRC of such a thing means anything; the length fields take the low bits.
        let udp_length = udp_payload_length.wrapping_add(UDP) as u16;
        let ip_length = match addressing.addresses {
            Addresses::V4 { source, destination, identification, flags } => {
                prefix[0] = 0x45;
                prefix[2..4].copy_from_slice(&udp_length.wrapping_add(20).to_be_bytes());
                prefix[4..6].copy_from_slice(&identification.to_be_bytes());
                prefix[6..8].copy_from_slice(&flags.to_be_bytes());
                prefix[9] = crate::udp::PROTOCOL;
                prefix[12..16].copy_from_slice(&source.octets());
                prefix[16..20].copy_from_slice(&destination.octets());
                20
            }
            Addresses::V6 { source, destination } => {
                prefix[0] = 0x6f;
                prefix[4..6].copy_from_slice(&udp_length.to_be_bytes());
                prefix[6] = crate::udp::PROTOCOL;
                prefix[8..24].copy_from_slice(&source.octets());
                prefix[24..40].copy_from_slice(&destination.octets());
                40
            }
        };
        let udp = &mut prefix[ip_length..ip_length + UDP];
        udp[0..2].copy_from_slice(&addressing.source_port.to_be_bytes());
        udp[2..4].copy_from_slice(&addressing.destination_port.to_be_bytes());
        udp[4..6].copy_from_slice(&udp_length.to_be_bytes());
        let bth = ip_length + UDP;
        prefix[bth..bth + Bth::LENGTH].copy_from_slice(&headers[..Bth::LENGTH]);
        prefix[bth + 4] = 0xff;
        let crc = crc32::update(AFTER_ROUTE_HEADER, &prefix[..bth + Bth::LENGTH]);
        Self(crc32::update(crc, &headers[Bth::LENGTH..]))
    }

    /// Adds payload or padding.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = crc32::update(self.0, bytes);
    }

    /// The value, to be stored little-endian.
    pub const fn finish(self) -> u32 {
        self.0
    }
}

/// The ICRC that a whole UDP payload should end with.
///
/// # Panics
/// When `datagram` is shorter than a BTH and an ICRC.
pub fn of_datagram(addressing: &Addressing, datagram: &[u8]) -> u32 {
    let body = &datagram[..datagram.len() - crate::ICRC_LENGTH];
    Icrc::start(addressing, body, datagram.len()).finish()
}

/// Finds the IPv4 identification under which a packet's ICRC is right.
///
/// For packets of one length, the XOR of the ICRCs under two identifications depends only on the
/// XOR of the identifications, and linearly: sixteen values, one for each bit, span all
/// differences. A difference outside their span proves that the packet is damaged; one inside names
/// the identification. What remains of the check's strength is 32 - 16 bits, or 32 - 6 where the
/// caller accepts only 64 identifications, as of a segmented send.
#[derive(Clone, Debug)]
pub struct Solver {
    udp_payload_length: usize,
    /// Row `i` has its highest set bit at a place no other row has: reduced by elimination.
    /// `(difference of the ICRC, difference of the identification)`.
    rows: [(u32, u16); 16],
}

impl Solver {
    /// Prepares for packets of one length; keep it, this costs about as much as a long packet.
    pub fn new(udp_payload_length: usize) -> Self {
        let mut rows = [(0_u32, 0_u16); 16];
        // What the sixteen bits contribute: the bytes after the identification are zeros, since
        // only differences matter (the CRC register without its initial and final inversion).
        let after = 14 + 8 + udp_payload_length.saturating_sub(crate::ICRC_LENGTH);
        for (bit, row) in rows.iter_mut().enumerate() {
            let identification = 1_u16 << bit;
            *row = (difference(identification, after), identification);
        }
        for i in 0..rows.len() {
            let (pivot_row, pivot_id) = rows[i];
            debug_assert_ne!(pivot_row, 0, "x^n is invertible modulo the CRC polynomial");
            let pivot = 31 - pivot_row.leading_zeros().min(31);
            for (j, row) in rows.iter_mut().enumerate() {
                if j != i && row.0 & (1 << pivot) != 0 {
                    row.0 ^= pivot_row;
                    row.1 ^= pivot_id;
                }
            }
        }
        Self { udp_payload_length, rows }
    }

    /// The length that it was made for.
    pub const fn udp_payload_length(&self) -> usize {
        self.udp_payload_length
    }

    /// Given the ICRC computed under identification `assumed` and the one received, the
    /// identification that was sent; `None` when there is none and the packet is damaged.
    pub fn identification(&self, assumed: u16, computed: u32, received: u32) -> Option<u16> {
        let mut rest = computed ^ received;
        let mut identification = assumed;
        for (row, id) in self.rows {
            if rest & (1 << (31 - row.leading_zeros().min(31))) != 0 {
                rest ^= row;
                identification ^= id;
            }
        }
        (rest == 0).then_some(identification)
    }
}

/// What `identification` followed by `after` zero bytes adds to a CRC-32.
fn difference(identification: u16, after: usize) -> u32 {
    const ZEROS: [u8; 256] = [0; 256];
    let crc = |first: [u8; 2]| {
        let mut crc = crc32::update(0, &first);
        let mut rest = after;
        while rest > 0 {
            let now = rest.min(ZEROS.len());
            crc = crc32::update(crc, &ZEROS[..now]);
            rest -= now;
        }
        crc
    };
    crc(identification.to_be_bytes()) ^ crc([0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ethernet::EthernetHeader;
    use crate::{Opcode, Packet};

    /// A UC SEND of 18 bytes and two of padding. The ICRC is the published one; the frame is
    /// written out from the field values published with it (scapy's RoCE tests).
    const UC_SEND_ONLY: [u8; 78] = [
        0x24, 0x8a, 0x07, 0xa8, 0xfa, 0x22, 0x24, 0x8a, 0x07, 0xa8, 0xfa, 0x22, 0x08, 0x00, //
        0x45, 0x01, 0x00, 0x40, 0x04, 0x78, 0x40, 0x00, 0x40, 0x11, 0xb4, 0xd5, //
        0xc0, 0xa8, 0x00, 0x07, 0xc0, 0xa8, 0x00, 0x07, //
        0xc0, 0x00, 0x12, 0xb7, 0x00, 0x2c, 0xac, 0xa2, //
        0x24, 0x60, 0xff, 0xff, 0x00, 0x00, 0x00, 0xd3, 0x00, 0xcf, 0x17, 0x10, //
        0x46, 0x30, 0x81, 0x8b, 0xe2, 0x89, 0x35, 0xd9, 0x0e, 0x9a, 0x95, 0x50, 0x54, 0x01, //
        0xbe, 0x88, 0x5e, 0x50, 0x00, 0x00, //
        0x78, 0xf3, 0x53, 0xf3,
    ];

    /// A congestion notification as a ConnectX-4 Lx sent it: ToS, BECN and no UDP checksum.
    const CONNECTX4_NOTIFICATION: [u8; 74] = [
        0xe4, 0x1d, 0x2d, 0xab, 0x2b, 0xc2, 0x7c, 0xfe, 0x90, 0x64, 0x3b, 0x32, 0x08, 0x00, //
        0x45, 0xc2, 0x00, 0x3c, 0x71, 0x8c, 0x40, 0x00, 0x40, 0x11, 0x91, 0x61, //
        0x0a, 0x00, 0x11, 0x01, 0x0a, 0x00, 0x12, 0x01, //
        0x00, 0x00, 0x12, 0xb7, 0x00, 0x28, 0x00, 0x00, //
        0x81, 0x00, 0xff, 0xff, 0x40, 0x00, 0x01, 0x18, 0x00, 0x00, 0x00, 0x00, //
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, //
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, //
        0x82, 0xfd, 0x00, 0x2a,
    ];

    /// The addressing and the UDP payload of an Ethernet frame.
    fn open(frame: &[u8]) -> (Addressing, &[u8]) {
        let (_, packet) = EthernetHeader::parse(frame).unwrap();
        let (ip, segment) = Ipv4Header::parse(packet).unwrap();
        assert_eq!(ip.checksum, ip.computed_checksum());
        let (udp, datagram) = UdpHeader::parse(segment).unwrap();
        (Addressing::new(Addresses::from(&ip), &udp), datagram)
    }

    fn v4(identification: u16) -> Addressing {
        let host = |last| IpAddr::from([10, 0, 0, last]);
        let addresses = Addresses::unfragmented(host(1), host(2), identification).unwrap();
        Addressing { addresses, source_port: 0xc000, destination_port: crate::ROCE_PORT }
    }

    #[test]
    fn the_published_vectors_hold() {
        for (frame, opcode, wire) in [
            (&UC_SEND_ONLY[..], Opcode::UcSendOnly, [0x78, 0xf3, 0x53, 0xf3]),
            (&CONNECTX4_NOTIFICATION, Opcode::CongestionNotification, [0x82, 0xfd, 0x00, 0x2a]),
        ] {
            let (addressing, datagram) = open(frame);
            let packet = Packet::parse(datagram).unwrap();
            assert_eq!(packet.opcode, opcode);
            assert_eq!(packet.icrc.to_le_bytes(), wire);
            assert_eq!(of_datagram(&addressing, datagram), packet.icrc);
        }
    }

    #[test]
    fn the_published_packets_have_the_published_fields() {
        let (_, datagram) = open(&UC_SEND_ONLY);
        let send = Packet::parse(datagram).unwrap();
        assert!(send.bth.migration_request);
        assert_eq!((send.bth.destination_qpn.value(), send.bth.psn.value()), (211, 13_571_856));
        assert_eq!((send.payload.len(), send.padding), (18, &[0, 0][..]));

        let (_, datagram) = open(&CONNECTX4_NOTIFICATION);
        let notification = Packet::parse(datagram).unwrap();
        assert!(notification.bth.becn && !notification.bth.fecn);
        assert_eq!(notification.bth.destination_qpn.value(), 0x118);
        assert_eq!(notification.extended.notification, Some([0; 16]));
        assert_eq!(notification.payload, &[] as &[u8]);
    }

    #[test]
    fn only_what_routers_change_is_left_out() {
        let (addressing, datagram) = open(&UC_SEND_ONLY);
        let right = of_datagram(&addressing, datagram);
        // Fields a router may change: ToS, TTL and checksum, UDP checksum, FECN and BECN.
        for masked in [15, 22, 24, 25, 40, 41, 46] {
            let mut frame = UC_SEND_ONLY;
            frame[masked] ^= 0xff;
            let ip = Ipv4Header::parse(&frame[14..]).unwrap().0;
            let (udp, datagram) = UdpHeader::parse(&frame[34..]).unwrap();
            let addressing = Addressing::new(Addresses::from(&ip), &udp);
            assert_eq!(of_datagram(&addressing, datagram), right, "byte {masked}");
        }
        // Everything else that the parsers let through: identification, flags, addresses, ports,
        // and all of the datagram.
        for covered in (18..22).chain(26..38).chain(42..46).chain(47..74) {
            let mut frame = UC_SEND_ONLY;
            frame[covered] ^= 1;
            let ip = Ipv4Header::parse(&frame[14..]).unwrap().0;
            let (udp, datagram) = UdpHeader::parse(&frame[34..]).unwrap();
            let addressing = Addressing::new(Addresses::from(&ip), &udp);
            assert_ne!(of_datagram(&addressing, datagram), right, "byte {covered}");
        }
    }

    #[test]
    fn unfragmented_sets_dont_fragment_and_keeps_families_apart() {
        let (v4, v6) = (Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST);
        assert_eq!(
            Addresses::unfragmented(v4.into(), v4.into(), 3),
            Some(Addresses::V4 { source: v4, destination: v4, identification: 3, flags: 0x4000 })
        );
        assert_eq!(
            Addresses::unfragmented(v6.into(), v6.into(), 3),
            Some(Addresses::V6 { source: v6, destination: v6 })
        );
        assert_eq!(Addresses::unfragmented(v4.into(), v6.into(), 3), None);
        assert_eq!(Addresses::unfragmented(v6.into(), v4.into(), 3), None);
    }

    #[test]
    fn lengths_that_no_ip_packet_has_do_not_panic() {
        let datagram = vec![0; 65_600];
        for length in [65_507, 65_508, 65_527, 65_528, 65_535, 65_536, 65_600] {
            of_datagram(&v4(0), &datagram[..length]);
        }
    }

    #[test]
    fn the_solver_finds_every_identification() {
        let mut datagram = [0x5a; 300];
        datagram[..Bth::LENGTH].fill(0);
        for length in [16, 17, 20, 40, 300] {
            let datagram = &datagram[..length];
            let solver = Solver::new(length);
            let computed = of_datagram(&v4(7), datagram);
            for identification in 0..=u16::MAX {
                let received = of_datagram(&v4(identification), datagram);
                assert_eq!(solver.identification(7, computed, received), Some(identification));
            }
        }
    }

    #[test]
    fn the_solver_accepts_one_difference_in_65536() {
        let solver = Solver::new(1024);
        // An odd multiplier visits differences all over the 32 bits.
        let accepted = (0..1 << 20)
            .filter(|i: &u32| solver.identification(0, 0, i.wrapping_mul(0x9e37_79b1)).is_some())
            .count();
        assert!((1..64).contains(&accepted), "{accepted} of 2^20, where 16 are expected");
    }
}
