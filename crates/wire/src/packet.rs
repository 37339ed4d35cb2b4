//! A whole RoCEv2 packet: what a UDP datagram to port 4791 holds.

use crate::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, ICRC_LENGTH, Ieth, ImmDt, Opcode, ParseError, Reth,
};

/// The most bytes that BTH and extended headers take together (BTH + AtomicETH).
pub const MAX_HEADER_LENGTH: usize = Bth::LENGTH + AtomicEth::LENGTH;

/// The extended headers of one packet. Which are there follows from the opcode.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ExtendedHeaders {
    /// Datagram header.
    pub deth: Option<Deth>,
    /// RDMA header.
    pub reth: Option<Reth>,
    /// Atomic request header.
    pub atomic: Option<AtomicEth>,
    /// Acknowledge header.
    pub aeth: Option<Aeth>,
    /// Atomic response header.
    pub atomic_ack: Option<AtomicAckEth>,
    /// Immediate data.
    pub immediate: Option<ImmDt>,
    /// Key to invalidate.
    pub invalidate: Option<Ieth>,
    /// The 16 reserved bytes of a congestion notification packet.
    pub notification: Option<[u8; 16]>,
}

impl ExtendedHeaders {
    /// Reads the headers that `opcode` calls for; returns them and how many bytes they took.
    pub fn parse(opcode: Opcode, bytes: &[u8]) -> Result<(Self, usize), ParseError> {
        let mut reader = Reader { bytes, at: 0 };
        let headers = Self {
            deth: reader.next(opcode.has_deth(), Deth::LENGTH, Deth::parse)?,
            reth: reader.next(opcode.has_reth(), Reth::LENGTH, Reth::parse)?,
            atomic: reader.next(opcode.has_atomic(), AtomicEth::LENGTH, AtomicEth::parse)?,
            aeth: reader.next(opcode.has_aeth(), Aeth::LENGTH, Aeth::parse)?,
            atomic_ack: reader.next(
                opcode.has_atomic_ack(),
                AtomicAckEth::LENGTH,
                AtomicAckEth::parse,
            )?,
            immediate: reader.next(opcode.has_immediate(), ImmDt::LENGTH, ImmDt::parse)?,
            invalidate: reader.next(opcode.has_invalidate(), Ieth::LENGTH, Ieth::parse)?,
            notification: reader.next(opcode.has_notification(), 16, |bytes| {
                crate::error::prefix::<16>(bytes).copied()
            })?,
        };
        Ok((headers, reader.at))
    }

    /// Writes the headers that are there; returns how many bytes they took.
    ///
    /// # Panics
    /// When `buffer` is shorter than the headers: [`MAX_HEADER_LENGTH`] - [`Bth::LENGTH`] is
    /// always enough for the headers of one opcode.
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        if let Some(header) = &self.deth {
            put(&header.to_bytes());
        }
        if let Some(header) = &self.reth {
            put(&header.to_bytes());
        }
        if let Some(header) = &self.atomic {
            put(&header.to_bytes());
        }
        if let Some(header) = &self.aeth {
            put(&header.to_bytes());
        }
        if let Some(header) = &self.atomic_ack {
            put(&header.to_bytes());
        }
        if let Some(header) = &self.immediate {
            put(&header.to_bytes());
        }
        if let Some(header) = &self.invalidate {
            put(&header.to_bytes());
        }
        if let Some(bytes) = &self.notification {
            put(bytes);
        }
        at
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn next<T>(
        &mut self,
        wanted: bool,
        length: usize,
        parse: impl FnOnce(&'a [u8]) -> Result<T, ParseError>,
    ) -> Result<Option<T>, ParseError> {
        if !wanted {
            return Ok(None);
        }
        // A parser that succeeded has seen `length` bytes, so `at` stays within the buffer.
        let header = parse(&self.bytes[self.at..])?;
        self.at += length;
        Ok(Some(header))
    }
}

/// A parsed packet, borrowing its payload.
///
/// [`Packet::emit`] writes the fields as they stand. Whoever builds a packet by hand keeps
/// `bth.opcode`, `opcode` and `extended` in step, and `bth.pad_count` and `padding`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Packet<'a> {
    /// Base Transport Header.
    pub bth: Bth,
    /// The decoded opcode.
    pub opcode: Opcode,
    /// The headers after the BTH.
    pub extended: ExtendedHeaders,
    /// The payload without its padding.
    pub payload: &'a [u8],
    /// The padding: 0 to 3 bytes, zero by custom.
    pub padding: &'a [u8],
    /// The invariant CRC as the number that [`crate::icrc`] computes.
    pub icrc: u32,
}

impl<'a> Packet<'a> {
    /// Reads the payload of a UDP datagram. The ICRC is returned, not checked: that takes the IP
    /// header, see [`crate::icrc`].
    pub fn parse(datagram: &'a [u8]) -> Result<Self, ParseError> {
        let bth = Bth::parse(datagram)?;
        if bth.version != 0 {
            return Err(ParseError::Version(bth.version));
        }
        let opcode = Opcode::from_byte(bth.opcode)?;
        let (extended, length) = ExtendedHeaders::parse(opcode, &datagram[Bth::LENGTH..])?;
        let start = Bth::LENGTH + length;
        let Some((body, icrc)) = datagram[start..].split_last_chunk::<ICRC_LENGTH>() else {
            let needed = start + ICRC_LENGTH;
            return Err(ParseError::Truncated { needed, available: datagram.len() });
        };
        let pad = bth.pad_count;
        let Some(payload_length) = body.len().checked_sub(usize::from(pad)) else {
            return Err(ParseError::Pad { pad, payload: body.len() });
        };
        let (payload, padding) = body.split_at(payload_length);
        Ok(Self { bth, opcode, extended, payload, padding, icrc: u32::from_le_bytes(*icrc) })
    }

    /// Writes the packet, ICRC included; returns its length.
    ///
    /// # Panics
    /// When `buffer` is too short: [`MAX_HEADER_LENGTH`] + payload + 3 + [`ICRC_LENGTH`] is enough.
    /// When `extended` has headers that no one opcode calls for, and they exceed that maximum.
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        let mut headers = [0; MAX_HEADER_LENGTH];
        let length = self.extended.emit(&mut headers);
        put(&self.bth.to_bytes());
        put(&headers[..length]);
        put(self.payload);
        put(self.padding);
        put(&self.icrc.to_le_bytes());
        at
    }
}
