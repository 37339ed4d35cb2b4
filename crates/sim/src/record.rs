//! What happened: one record per event, for the digest, the log and the checkers.

use core::fmt;
use core::net::IpAddr;
use std::io::{self, Write};

use millstream_roce::Instant;
use millstream_wire::Packet;

use crate::Datagram;

/// What happened to a datagram or a machine.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum Happening {
    /// A machine sent a datagram.
    Sent = 1,
    /// It arrived.
    Delivered,
    /// The link lost it.
    Lost,
    /// The link's queue had no room.
    Overflowed,
    /// The link is cut.
    Partitioned,
    /// No link leads there.
    Unreachable,
    /// A rule dropped it.
    Dropped,
    /// It will arrive twice.
    Duplicated,
    /// It was held back.
    HeldBack,
    /// One of its bits was flipped.
    Corrupted,
    /// It was marked "congestion experienced".
    Marked,
    /// It arrived at a machine that is down.
    ReceiverDown,
    /// A machine stopped.
    Crashed,
    /// A machine started again.
    Restarted,
    /// A link was cut.
    Cut,
    /// A link works again.
    Healed,
    /// It arrived at a machine whose receive buffer had no room.
    ReceiveBufferFull,
}

impl Happening {
    /// How many there are.
    pub(crate) const COUNT: usize = Self::ReceiveBufferFull as usize + 1;

    const fn name(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::Delivered => "delivered",
            Self::Lost => "lost",
            Self::Overflowed => "overflowed",
            Self::Partitioned => "partitioned",
            Self::Unreachable => "unreachable",
            Self::Dropped => "dropped",
            Self::Duplicated => "duplicated",
            Self::HeldBack => "held back",
            Self::Corrupted => "corrupted",
            Self::Marked => "marked",
            Self::ReceiverDown => "receiver down",
            Self::Crashed => "crashed",
            Self::Restarted => "restarted",
            Self::Cut => "cut",
            Self::Healed => "healed",
            Self::ReceiveBufferFull => "receive buffer full",
        }
    }
}

impl fmt::Display for Happening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    /// When.
    pub at: Instant,
    /// What.
    pub happening: Happening,
    /// What it happened to.
    pub subject: Subject<'a>,
}

/// What an event happened to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Subject<'a> {
    /// A datagram.
    Datagram(&'a Datagram),
    /// The machine at this address.
    Machine(IpAddr),
    /// The link of this number.
    Link(usize),
}

/// A number that two runs share only when the same events happened at the same times.
///
/// Not a CRC-32: every datagram ends with the CRC-32 of the rest, and a CRC over both comes out
/// the same whatever the payload is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Digest(u64);

impl Digest {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// The number.
    pub const fn value(self) -> u64 {
        self.0
    }

    /// Makes this the digest of several runs.
    pub(crate) const fn merge(&mut self, other: Self) {
        self.word(other.0);
    }

    pub(crate) fn add(&mut self, record: &Record<'_>) {
        self.word(record.at.nanos());
        self.word(record.happening as u64);
        match record.subject {
            Subject::Datagram(datagram) => {
                self.word(datagram.number);
                // The bytes enter once, as they are sent, and again when they were changed.
                if matches!(record.happening, Happening::Sent | Happening::Corrupted) {
                    self.address(datagram.source);
                    self.address(datagram.destination);
                    self.word(u64::from(datagram.identification));
                    self.bytes(&datagram.payload);
                }
            }
            Subject::Machine(address) => self.address(address),
            Subject::Link(link) => self.word(link as u64),
        }
    }

    fn address(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(address) => self.bytes(&address.octets()),
            IpAddr::V6(address) => self.bytes(&address.octets()),
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.word(u64::from_le_bytes(*word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.word(u64::from_le_bytes(last));
    }

    /// FNV-1a's steps on 64-bit words; the shift brings the high bits down, which multiplication
    /// alone never does.
    const fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 ^= self.0 >> 32;
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Writes a record as one line of fixed columns: time, number, what, from, to, length, packet.
pub(crate) fn write_line(output: &mut dyn Write, record: &Record<'_>) -> io::Result<()> {
    let Record { at, happening, subject } = record;
    let at = at.to_string();
    match subject {
        Subject::Machine(address) => {
            writeln!(output, "{at:>16} {:>8} {happening:<13} {address}", "")
        }
        Subject::Link(link) => writeln!(output, "{at:>16} {:>8} {happening:<13} link {link}", ""),
        Subject::Datagram(datagram) => {
            let Datagram { number, source, destination, payload, .. } = datagram;
            // The columns of addresses fit IPv4; IPv6 shifts the rest.
            write!(
                output,
                "{at:>16} {number:>8} {happening:<13} {source:>15} {destination:>15} {:>5} ",
                payload.len(),
            )?;
            match Packet::parse(payload) {
                Ok(packet) => writeln!(output, "{}", Summary(&packet)),
                Err(error) => writeln!(output, "not a packet: {error}"),
            }
        }
    }
}

/// A packet in a few words.
struct Summary<'a>(&'a Packet<'a>);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Packet { bth, opcode, extended, payload, .. } = self.0;
        write!(f, "{opcode:<27?} qp {} psn {}", bth.destination_qpn, bth.psn)?;
        if let Some(aeth) = extended.aeth {
            write!(f, " {:?} msn {}", aeth.syndrome(), aeth.msn)?;
        }
        if let Some(reth) = extended.reth {
            write!(
                f,
                " at {:#x} key {:#x} length {}",
                reth.virtual_address, reth.remote_key, reth.dma_length
            )?;
        }
        if let Some(immediate) = extended.immediate {
            write!(f, " immediate {:#x}", immediate.0)?;
        }
        if !payload.is_empty() {
            write!(f, " payload {}", payload.len())?;
        }
        f.write_str(if bth.acknowledge_request { " ackreq" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(payload: &[u8], at: u64) -> Digest {
        let datagram = Datagram {
            number: 1,
            source: IpAddr::from([10, 0, 0, 1]),
            source_port: 1,
            destination: IpAddr::from([10, 0, 0, 2]),
            identification: 0,
            congestion_experienced: false,
            payload: payload.to_vec(),
        };
        let mut digest = Digest::new();
        digest.add(&Record {
            at: Instant::from_nanos(at),
            happening: Happening::Sent,
            subject: Subject::Datagram(&datagram),
        });
        digest
    }

    #[test]
    fn the_digest_sees_bytes_lengths_and_times() {
        let first = digest(b"0123456789", 1);
        assert_eq!(first, digest(b"0123456789", 1));
        assert_ne!(first, digest(b"0123456788", 1));
        assert_ne!(first, digest(b"0123456789", 2));
        assert_ne!(digest(b"", 1), digest(&[0], 1));
        assert_ne!(digest(&[0; 8], 1), digest(&[0; 9], 1));
        // The highest bit of a word reaches the low ones.
        assert_ne!(
            digest(&[0, 0, 0, 0, 0, 0, 0, 128], 1).value() as u32,
            digest(&[0; 8], 1).value() as u32
        );
    }
}
