//! Writes packet captures: classic pcap with nanosecond timestamps, of raw IP packets.

use core::net::IpAddr;
use std::io::{self, Write};

use millstream_roce::Instant;
use millstream_wire::ROCE_PORT;
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::ipv6::Ipv6Header;
use millstream_wire::udp::{self, UdpHeader};

use crate::Datagram;

/// The magic number of captures with nanosecond timestamps, in the byte order of the writer.
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;
/// Link type "raw IP": each packet starts with its IPv4 or IPv6 header.
const LINKTYPE_RAW: u32 = 101;
/// Longer packets than IP can carry do not occur.
const SNAP_LENGTH: u32 = 65_535;
/// Congestion experienced: both bits of the ECN field (RFC 3168).
const CONGESTION_EXPERIENCED: u8 = 3;
/// ECN-capable transport (0), which RoCEv2 senders set.
const ECN_CAPABLE: u8 = 2;

/// Writes datagrams with the IP and UDP headers that a host would have given them.
#[derive(Debug)]
pub struct PcapWriter<W> {
    output: W,
    packet: Vec<u8>,
}

impl<W: Write> PcapWriter<W> {
    /// Starts a capture: writes the file header.
    pub fn new(mut output: W) -> io::Result<Self> {
        output.write_all(&MAGIC_NANOSECONDS.to_le_bytes())?;
        // Version 2.4, time zone 0, accuracy 0.
        output.write_all(&[2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0])?;
        output.write_all(&SNAP_LENGTH.to_le_bytes())?;
        output.write_all(&LINKTYPE_RAW.to_le_bytes())?;
        Ok(Self { output, packet: Vec::new() })
    }

    /// Adds a packet.
    pub fn write(&mut self, at: Instant, datagram: &Datagram) -> io::Result<()> {
        self.packet.clear();
        self.packet.resize(16, 0);
        emit(datagram, &mut self.packet);
        let length = (self.packet.len() - 16) as u32;
        let (seconds, nanos) = (at.nanos() / 1_000_000_000, at.nanos() % 1_000_000_000);
        // The format has 32 bits of seconds: 136 years of virtual time.
        for (i, field) in [seconds as u32, nanos as u32, length, length].into_iter().enumerate() {
            self.packet[i * 4..][..4].copy_from_slice(&field.to_le_bytes());
        }
        self.output.write_all(&self.packet)
    }

    /// Flushes and returns the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.output.flush()?;
        Ok(self.output)
    }
}

/// Appends the datagram as an IP packet.
fn emit(datagram: &Datagram, packet: &mut Vec<u8>) {
    let udp_length = (UdpHeader::LENGTH + datagram.payload.len()) as u16;
    let ecn = if datagram.congestion_experienced { CONGESTION_EXPERIENCED } else { ECN_CAPABLE };
    let mut udp = UdpHeader {
        source_port: datagram.source_port,
        destination_port: ROCE_PORT,
        length: udp_length,
        checksum: 0,
    };
    match (datagram.source, datagram.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut ip = Ipv4Header {
                type_of_service: ecn,
                total_length: Ipv4Header::LENGTH as u16 + udp_length,
                identification: datagram.identification,
                flags: 0x4000,
                time_to_live: 64,
                protocol: udp::PROTOCOL,
                checksum: 0,
                source,
                destination,
            };
            ip.checksum = ip.computed_checksum();
            packet.extend_from_slice(&ip.to_bytes());
            udp.checksum =
                udp_checksum(&source.octets(), &destination.octets(), &udp, &datagram.payload);
        }
        (source, destination) => {
            let [source, destination] = [source, destination].map(|address| match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            });
            let ip = Ipv6Header {
                traffic_class: ecn,
                flow_label: 0,
                payload_length: udp_length,
                next_header: udp::PROTOCOL,
                hop_limit: 64,
                source,
                destination,
            };
            packet.extend_from_slice(&ip.to_bytes());
            udp.checksum =
                udp_checksum(&source.octets(), &destination.octets(), &udp, &datagram.payload);
        }
    }
    packet.extend_from_slice(&udp.to_bytes());
    packet.extend_from_slice(&datagram.payload);
}

/// The UDP checksum over pseudo header, header and payload (RFC 768, RFC 8200 section 8.1: the sum
/// of both forms of the pseudo header is the same).
fn udp_checksum(source: &[u8], destination: &[u8], udp: &UdpHeader, payload: &[u8]) -> u16 {
    let words = |bytes: &[u8]| -> u64 {
        bytes
            .chunks(2)
            .map(|word| u64::from(word[0]) << 8 | u64::from(word.get(1).copied().unwrap_or(0)))
            .sum()
    };
    let mut sum = words(source)
        + words(destination)
        + u64::from(udp::PROTOCOL)
        + u64::from(udp.length)
        + words(&UdpHeader { checksum: 0, ..*udp }.to_bytes())
        + words(payload);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // Zero means "no checksum", so a sum of zero is sent as its other form.
    match !(sum as u16) {
        0 => 0xffff,
        checksum => checksum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(source: &str, destination: &str) -> Datagram {
        Datagram {
            number: 0,
            source: source.parse().unwrap(),
            source_port: 0xc000,
            destination: destination.parse().unwrap(),
            identification: 0x0478,
            congestion_experienced: false,
            payload: b"odd".to_vec(),
        }
    }

    #[test]
    fn a_capture_has_the_layout_that_readers_expect() {
        let mut writer = PcapWriter::new(Vec::new()).unwrap();
        let at = Instant::from_nanos(3_000_000_007);
        writer.write(at, &datagram("10.0.0.1", "10.0.0.2")).unwrap();
        let bytes = writer.finish().unwrap();
        #[rustfmt::skip]
        let expected = [
            0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 101, 0, 0, 0,
            3, 0, 0, 0, 7, 0, 0, 0, 31, 0, 0, 0, 31, 0, 0, 0,
            0x45, 0x02, 0, 31, 0x04, 0x78, 0x40, 0, 64, 17, 0x22, 0x52, 10, 0, 0, 1, 10, 0, 0, 2,
            0xc0, 0, 0x12, 0xb7, 0, 11, 0x45, 0xb9, b'o', b'd', b'd',
        ];
        assert_eq!(bytes, expected, "{bytes:02x?}");
    }

    #[test]
    fn checksums_sum_to_all_ones() {
        // The receiver's check (RFC 1071): the sum over everything, checksum included, is 0xffff.
        for (source, destination) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let datagram = datagram(source, destination);
            let mut packet = Vec::new();
            emit(&datagram, &mut packet);
            let v4 = datagram.source.is_ipv4();
            let (addresses, udp) = if v4 { (12..20, 20) } else { (8..40, 40) };
            let mut covered = packet[addresses].to_vec();
            covered.extend([0, 17, 0, 11]);
            covered.extend(&packet[udp..]);
            covered.push(0);
            let mut sum: u32 =
                covered.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            assert_eq!(sum, 0xffff);
            if v4 {
                let (ip, _) = Ipv4Header::parse(&packet).unwrap();
                assert_eq!(ip.checksum, ip.computed_checksum());
            }
        }
    }
}
