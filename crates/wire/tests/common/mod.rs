//! What several integration tests share: the committed captures of a real Linux rxe, and the way
//! from an Ethernet frame down to a packet.

#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::path::PathBuf;

use millstream_wire::ethernet::{self, EthernetHeader};
use millstream_wire::icrc::{Addresses, Addressing};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::udp::{self, UdpHeader};
use millstream_wire::{Packet, ParseError};

/// One capture file.
pub(crate) struct Capture {
    /// The file's name without its directory.
    pub(crate) name: String,
    /// Its frames, from the Ethernet header on.
    pub(crate) frames: Vec<Vec<u8>>,
}

/// Every capture in `tests/captures`, in the order of their names.
pub(crate) fn captures() -> Vec<Capture> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/captures");
    let mut paths: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let frames = frames(&std::fs::read(&path).unwrap());
            Capture { name, frames }
        })
        .collect()
}

/// The frames of a classic little-endian pcap file of Ethernet, none of them cut short.
fn frames(file: &[u8]) -> Vec<Vec<u8>> {
    const MAGIC_MICROSECONDS: u32 = 0xa1b2_c3d4;
    const LINK_ETHERNET: u32 = 1;
    let word = |bytes: &[u8], at| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());

    let (header, mut records) = file.split_at(24);
    assert_eq!(word(header, 0), MAGIC_MICROSECONDS, "not a little-endian classic pcap");
    assert_eq!(word(header, 20), LINK_ETHERNET, "not a capture of Ethernet");
    let mut frames = Vec::new();
    while !records.is_empty() {
        let (header, rest) = records.split_at(16);
        let (captured, original) = (word(header, 8), word(header, 12));
        assert_eq!(captured, original, "frame {} is cut short", frames.len());
        let (frame, rest) = rest.split_at(captured as usize);
        frames.push(frame.to_vec());
        records = rest;
    }
    frames
}

/// Every layer of a frame that holds a RoCEv2 packet over IPv4.
pub(crate) struct Layers<'a> {
    pub(crate) ethernet: EthernetHeader,
    pub(crate) ip: Ipv4Header,
    pub(crate) udp: UdpHeader,
    pub(crate) datagram: &'a [u8],
    pub(crate) packet: Packet<'a>,
}

impl<'a> Layers<'a> {
    /// Takes the frame apart. The captures hold nothing but UDP over IPv4, so anything else fails
    /// the test that meets it.
    pub(crate) fn parse(frame: &'a [u8]) -> Result<Self, ParseError> {
        let (ethernet, rest) = EthernetHeader::parse(frame)?;
        assert_eq!(ethernet.ether_type, ethernet::IPV4);
        let (ip, rest) = Ipv4Header::parse(rest)?;
        assert_eq!(ip.protocol, udp::PROTOCOL);
        let (udp, datagram) = UdpHeader::parse(rest)?;
        let packet = Packet::parse(datagram)?;
        Ok(Self { ethernet, ip, udp, datagram, packet })
    }

    /// What the ICRC covers of the outer headers.
    pub(crate) fn addressing(&self) -> Addressing {
        Addressing::new(Addresses::from(&self.ip), &self.udp)
    }
}
