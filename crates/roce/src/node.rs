//! What drivers and the simulator drive: something that takes and gives datagrams.

use core::net::IpAddr;

use millstream_wire::icrc::{Addresses, Addressing, Icrc};
use millstream_wire::{ICRC_LENGTH, MAX_HEADER_LENGTH, Qpn, ROCE_PORT};

use crate::Instant;
use crate::inline::MAX_INLINE;
use crate::work::{self, MAX_SCATTER_GATHER, Piece, ScatterGather};

/// Where a datagram came from and what is known of its IP header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DatagramMeta {
    /// Sender's address.
    pub source: IpAddr,
    /// Sender's UDP port.
    pub source_port: u16,
    /// The local address that it was sent to.
    pub destination: IpAddr,
    /// What is known of the IPv4 identification, which the ICRC covers.
    pub identification: Identification,
    /// The IP header carried the congestion-experienced mark.
    pub congestion_experienced: bool,
}

/// What a receiver knows of the IPv4 identification of a datagram. IPv6 has none.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Identification {
    /// The IP header was seen.
    Known(u16),
    /// A UDP socket hides it. This is what a segmenting sender probably used: the datagram's
    /// position in its receive batch, or 0.
    Guessed(u16),
}

/// A state machine that exchanges RoCEv2 datagrams: an endpoint, a switch, or a test peer.
pub trait Node {
    /// Takes the payload of one UDP datagram that arrived at [`ROCE_PORT`]. Anything may arrive;
    /// what is not for this node changes only counters.
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]);

    /// This datagram is handled after the next one: what it writes to may be loaded meanwhile. Nothing has
    /// checked it, and nothing changes.
    fn expect(&self, _datagram: &[u8]) {}

    /// Acts on deadlines that have passed. Early calls are harmless, as long as all that
    /// [`Node::poll_transmit`] has returned is sent by then, or will never be: the bytes of a
    /// datagram that is not acknowledged are its owner's again after this.
    fn handle_timeout(&mut self, now: Instant);

    /// When [`Node::handle_timeout`] must be called next, if nothing else happens.
    fn poll_timeout(&mut self) -> Option<Instant>;

    /// Writes the next datagram to send into `transmit`, or returns `false` when there is none.
    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool;

    /// The bytes of a piece of a [`Transmit`] that this node just returned; `None` when the memory
    /// has gone since, and then the datagram must not be sent.
    fn bytes(&self, piece: &Piece) -> Option<&[u8]>;
}

/// A datagram to send: headers here, payload still where it lies, ICRC still to be computed by
/// whoever knows the IP identification (a driver that segments gives each segment its own).
#[derive(Clone, Debug)]
pub struct Transmit {
    /// Receiver's address; the port is [`ROCE_PORT`].
    pub destination: IpAddr,
    /// The queue pair that sends it, which a packet of a reliable connection does not say; 0 for a
    /// [`Node`] without queue pairs.
    pub source_qpn: Qpn,
    headers: [u8; MAX_HEADER_LENGTH + MAX_INLINE],
    header_length: u16,
    /// So many bytes at the end of `headers` are payload.
    inline_length: u16,
    pad_count: u8,
    payload: ScatterGather,
}

impl Transmit {
    /// An empty one, to be filled by [`Node::poll_transmit`].
    pub const fn new() -> Self {
        Self {
            destination: IpAddr::V4(core::net::Ipv4Addr::UNSPECIFIED),
            source_qpn: Qpn::new(0),
            headers: [0; MAX_HEADER_LENGTH + MAX_INLINE],
            header_length: 0,
            inline_length: 0,
            pad_count: 0,
            payload: ScatterGather::EMPTY,
        }
    }

    /// Fills it: `headers` from the BTH on, with the pad count that `payload` needs.
    ///
    /// # Panics
    /// When `headers` is longer than [`MAX_HEADER_LENGTH`], or there are more pieces than
    /// [`MAX_SCATTER_GATHER`].
    pub fn set(&mut self, destination: IpAddr, headers: &[u8], payload: &[Piece], pad_count: u8) {
        assert!(payload.len() <= MAX_SCATTER_GATHER, "{} pieces", payload.len());
        self.gather(destination, headers, payload.iter().copied(), pad_count);
    }

    /// As [`Transmit::set`], with pieces that are not in a list. There are not too many.
    pub(crate) fn gather(
        &mut self,
        destination: IpAddr,
        headers: &[u8],
        payload: impl Iterator<Item = Piece>,
        pad_count: u8,
    ) {
        self.destination = destination;
        self.headers[..headers.len()].copy_from_slice(headers);
        self.header_length = headers.len() as u16;
        self.inline_length = 0;
        self.payload.set(payload);
        self.pad_count = pad_count;
    }

    /// Adds payload that lies here, between the headers and the rest of the payload.
    ///
    /// # Panics
    /// When there is more of it than [`MAX_INLINE`].
    pub(crate) fn put_inline(&mut self, bytes: &[u8]) {
        let start = usize::from(self.header_length);
        self.headers[start..start + bytes.len()].copy_from_slice(bytes);
        self.header_length += bytes.len() as u16;
        self.inline_length += bytes.len() as u16;
    }

    /// Whether it carries data, of one kind or the other.
    pub(crate) fn has_payload(&self) -> bool {
        self.inline_length > 0 || !self.payload.pieces().is_empty()
    }

    /// The transport headers, from the BTH on, and the inline payload if there is any.
    pub fn headers(&self) -> &[u8] {
        &self.headers[..self.header_length.into()]
    }

    /// Where the payload lies, in order: at most [`MAX_SCATTER_GATHER`] pieces.
    pub fn payload(&self) -> &[Piece] {
        const { assert!(MAX_SCATTER_GATHER <= 16) };
        self.payload.pieces()
    }

    /// The zeros that follow the payload.
    pub fn padding(&self) -> &'static [u8] {
        &[0; 3][..self.pad_count.into()]
    }

    /// Bytes of the whole UDP payload, ICRC included.
    pub fn datagram_length(&self) -> usize {
        usize::from(self.header_length)
            + work::length(self.payload()) as usize
            + usize::from(self.pad_count)
            + ICRC_LENGTH
    }

    /// The ICRC when sent from this address with this IPv4 identification, as bytes of the wire.
    /// `payload` yields the bytes of [`Transmit::payload`], piece by piece.
    pub fn icrc<'a>(
        &self,
        source: IpAddr,
        source_port: u16,
        identification: u16,
        payload: impl Iterator<Item = &'a [u8]>,
    ) -> [u8; ICRC_LENGTH] {
        let (from, to) = ((source, source_port), self.destination);
        let rest = payload.chain([self.padding()]);
        icrc(from, to, identification, self.headers(), rest, self.datagram_length())
    }

    /// Appends the whole datagram, ICRC included, to `buffer`; `false`, leaving `buffer` as it was,
    /// when `node` no longer has the payload. For simulators and tests: drivers gather instead.
    pub fn assemble<N: Node + ?Sized>(
        &self,
        node: &N,
        source: IpAddr,
        source_port: u16,
        identification: u16,
        buffer: &mut Vec<u8>,
    ) -> bool {
        if self.payload().iter().any(|piece| node.bytes(piece).is_none()) {
            return false;
        }
        let pieces = || self.payload().iter().filter_map(|piece| node.bytes(piece));
        buffer.extend_from_slice(self.headers());
        pieces().for_each(|bytes| buffer.extend_from_slice(bytes));
        buffer.extend_from_slice(self.padding());
        buffer.extend_from_slice(&self.icrc(source, source_port, identification, pieces()));
        true
    }
}

/// The ICRC of a datagram to [`ROCE_PORT`] at `destination`, with this IPv4 identification, as bytes
/// of the wire. `rest` is what follows the headers, padding included; `length` is that of the whole
/// UDP payload, the ICRC included.
pub fn icrc<'a>(
    (source, source_port): (IpAddr, u16),
    destination: IpAddr,
    identification: u16,
    headers: &[u8],
    rest: impl Iterator<Item = &'a [u8]>,
    length: usize,
) -> [u8; ICRC_LENGTH] {
    let Some(addresses) = Addresses::unfragmented(source, destination, identification) else {
        // A queue pair cannot be connected across address families, so no packet gets here; were
        // one to, the receiver would drop it.
        return [0; ICRC_LENGTH];
    };
    let addressing = Addressing { addresses, source_port, destination_port: ROCE_PORT };
    let mut icrc = Icrc::start(&addressing, headers, length);
    rest.for_each(|bytes| icrc.update(bytes));
    icrc.finish().to_le_bytes()
}

impl Default for Transmit {
    fn default() -> Self {
        Self::new()
    }
}
