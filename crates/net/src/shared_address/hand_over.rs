//! Datagrams that came to the socket of another slot's owner.
//!
//! A run of them is sent on in one datagram, from the address to itself, with a header in front that
//! begins as a BTH of the destination's slot: so the kernel steers it to the owner. The owner knows it by
//! the key, which only the processes of the address know, and which no wire ever carries: what an address
//! sends to itself stays in the machine. A datagram that was handed over once is not handed over again.

use std::fmt;
use std::io::IoSlice;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use millstream_roce::{DatagramMeta, Identification, SLOTS};
use socket2::{MsgHdr, SockAddr, Socket};

use super::table::{KEY_LENGTH, Key};
use crate::DriverCounters;

/// Bytes in front of the datagrams: what looks like a BTH, the key, and what was known of the message.
const HEADER_LENGTH: usize = 56;

/// No opcode (IBTA 9.2.1), and no transport header version. So it is no packet to who has no key.
const MARK: [u8; 2] = [0xff, 0x0f];

const KEY: usize = 12;
const ADDRESS: usize = KEY + KEY_LENGTH;
const PORT: usize = ADDRESS + 16;
const SEGMENT: usize = PORT + 2;
const INDEX: usize = SEGMENT + 2;
const CONGESTION: usize = INDEX + 2;

/// The most bytes of one datagram over IPv4, less the header.
const MOST_BYTES: usize = 65_507 - HEADER_LENGTH;

/// Hands datagrams over, and knows those that were.
pub(crate) struct HandOver {
    key: Key,
    pub(crate) slot: usize,
    local: SocketAddr,
    to: SockAddr,
}

/// Datagrams of one message: all but the last have `segment` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run<'a> {
    pub(crate) meta: DatagramMeta,
    /// The place of the first in what the kernel coalesced.
    pub(crate) index: u16,
    pub(crate) segment: usize,
    pub(crate) bytes: &'a [u8],
}

impl fmt::Debug for HandOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is nobody's business.
        f.debug_struct("HandOver").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl HandOver {
    pub(super) fn new(key: Key, slot: usize, local: SocketAddr) -> Self {
        Self { key, slot, local, to: local.into() }
    }

    /// Sends a run to the owner of its slot, now or not at all.
    pub(crate) fn send(
        &self,
        socket: &Socket,
        slot: usize,
        run: &Run<'_>,
        counters: &mut DriverCounters,
    ) {
        // The message may be as long as a whole one, and the header comes on top.
        let most = (MOST_BYTES / run.segment).max(1);
        let mut index = run.index;
        for bytes in run.bytes.chunks(most * run.segment) {
            let count = bytes.len().div_ceil(run.segment) as u64;
            let header = self.header(slot, &Run { index, bytes, ..*run });
            let pieces = [IoSlice::new(&header), IoSlice::new(bytes)];
            let message = MsgHdr::new().with_addr(&self.to).with_buffers(&pieces);
            match socket.sendmsg(&message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
                Ok(_) => counters.handed_over_datagrams += count,
                Err(_) => counters.lost_hand_overs += count,
            }
            index = index.wrapping_add(count as u16);
        }
    }

    fn header(&self, slot: usize, run: &Run<'_>) -> [u8; HEADER_LENGTH] {
        let mut header = [0; HEADER_LENGTH];
        let mut put = |at: usize, bytes: &[u8]| {
            header[at..at + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &MARK);
        put(5, &[(slot << (8 - SLOTS.trailing_zeros())) as u8]);
        put(KEY, &self.key);
        let source = match run.meta.source {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        put(ADDRESS, &source.octets());
        put(PORT, &run.meta.source_port.to_be_bytes());
        put(SEGMENT, &(run.segment as u16).to_be_bytes());
        put(INDEX, &run.index.to_be_bytes());
        put(CONGESTION, &[run.meta.congestion_experienced.into()]);
        header
    }

    /// What was handed over, if this is it.
    pub(crate) fn read<'a>(&self, meta: &DatagramMeta, bytes: &'a [u8]) -> Option<Run<'a>> {
        let (header, bytes) = bytes.split_first_chunk::<HEADER_LENGTH>()?;
        if header[..2] != MARK
            || SocketAddr::new(meta.source, meta.source_port) != self.local
            || header[KEY..KEY + KEY_LENGTH] != self.key
        {
            return None;
        }
        let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let source = Ipv6Addr::from_octets(*header[ADDRESS..].first_chunk()?);
        let source = IpAddr::V6(source).to_canonical();
        let meta = DatagramMeta {
            source,
            source_port: word(PORT),
            destination: meta.destination,
            identification: Identification::Guessed(0),
            congestion_experienced: header[CONGESTION] != 0,
        };
        // A segment of nothing would have no end.
        let segment = usize::from(word(SEGMENT)).max(1);
        Some(Run { meta, index: word(INDEX), segment, bytes })
    }

    /// Bytes in front of what was handed over.
    pub(crate) const HEADER_LENGTH: usize = HEADER_LENGTH;
}
