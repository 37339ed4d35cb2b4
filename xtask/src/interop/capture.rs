//! What two referees say of the packets that were recorded: tshark, and the invariant CRC.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use millstream_wire::ethernet::{self, EthernetHeader};
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::udp::{self, UdpHeader};
use millstream_wire::{ICRC_LENGTH, Packet, ROCE_PORT};

use super::link::OURS;
use crate::process;

/// Of a capture's first word, where this machine wrote it.
const MAGIC: u32 = 0xa1b2_c3d4;
const FILE_HEADER: usize = 24;
const RECORD_HEADER: usize = 16;
/// A capture with fewer packets from either side proves little.
const PACKETS_MIN: u64 = 5000;

/// Fails when tshark finds a RoCE packet that it takes for something else, or that is malformed.
pub(super) fn dissected(path: &Path) -> Result<()> {
    let wrong = format!(
        "udp.dstport == {ROCE_PORT} && udp.length > {} && (!infiniband || _ws.malformed || _ws.expert.severity >= \"Error\")",
        UdpHeader::LENGTH
    );
    let mut tshark = Command::new("tshark");
    // Names are not resolved, and no configuration of the user's is read.
    tshark.args(["-n", "-C", "Default", "-Y", &wrong]);
    // Guessed from payloads, of which short ones then count as malformed.
    for guess in ["rpcordma", "infiniband.eoib"] {
        tshark.args(["--disable-protocol", guess]);
    }
    tshark.arg("-r").arg(path);
    let found = process::output(&mut tshark)?;
    if let Some(first) = found.lines().next() {
        bail!("tshark objects to {} packets, first: {first}", found.lines().count());
    }
    Ok(())
}

/// Fails when a RoCE packet has a wrong ICRC, or is none that our parser takes.
pub(super) fn icrc(path: &Path) -> Result<()> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let ours: Ipv4Addr = OURS.parse()?;
    let (mut from_us, mut from_kernel) = (0, 0);
    for (index, frame) in frames(&bytes)?.enumerate() {
        let Some((source, right)) = check(frame) else { continue };
        ensure!(right, "frame {} has a wrong ICRC or is malformed", index + 1);
        *if source == ours { &mut from_us } else { &mut from_kernel } += 1;
    }
    ensure!(
        from_us >= PACKETS_MIN && from_kernel >= PACKETS_MIN,
        "only {from_us} packets of ours and {from_kernel} of the kernel's were recorded"
    );
    eprintln!("xtask: {from_us} packets of ours and {from_kernel} of the kernel's are right");
    Ok(())
}

/// The frames of a capture that this machine wrote.
fn frames(file: &[u8]) -> Result<impl Iterator<Item = &[u8]>> {
    let word = |bytes: &[u8]| Some(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?));
    ensure!(word(file) == Some(MAGIC), "this is no capture");
    let mut rest = file.get(FILE_HEADER..).context("the capture is cut short")?;
    Ok(std::iter::from_fn(move || {
        let length = word(rest.get(8..)?)? as usize;
        let frame = rest.get(RECORD_HEADER..RECORD_HEADER + length)?;
        rest = &rest[RECORD_HEADER + length..];
        Some(frame)
    }))
}

/// The sender of a RoCE packet and whether the packet is right; `None` of what is no RoCE packet.
fn check(frame: &[u8]) -> Option<(Ipv4Addr, bool)> {
    let (head, packet) = EthernetHeader::parse(frame).ok()?;
    let (ip, datagram) = Ipv4Header::parse(packet).ok()?;
    if head.ether_type != ethernet::IPV4 || ip.protocol != udp::PROTOCOL {
        return None;
    }
    let (header, payload) = UdpHeader::parse(datagram).ok()?;
    // The packet driver has the kernel look for a neighbour by a datagram with nothing in it.
    if header.destination_port != ROCE_PORT || payload.is_empty() {
        return None;
    }
    let Ipv4Header { source, destination, identification, flags, .. } = ip;
    let addresses = Addresses::V4 { source, destination, identification, flags };
    let parsed = Packet::parse(payload).is_ok();
    let computed = || icrc::of_datagram(&Addressing::new(addresses, &header), payload);
    let sent = payload.last_chunk::<ICRC_LENGTH>().map(|bytes| u32::from_le_bytes(*bytes));
    Some((source, parsed && sent == Some(computed())))
}
