//! Datagrams to send: headers and trailers here, one behind the other, payload where it lies.

use std::net::IpAddr;
use std::ops::Range;
use std::slice;

use millstream_roce::{Instant, MAX_INLINE, MAX_SCATTER_GATHER, Node, Transmit, icrc, slot_of};
use millstream_wire::{ICRC_LENGTH, MAX_HEADER_LENGTH};

use crate::{DriverCounters, guarded, prefetch};

/// The zeros that make the payload a multiple of 4 bytes, and the ICRC.
const MAX_TRAILER: usize = 3 + ICRC_LENGTH;

/// Bytes of the largest payload: those of the largest path MTU (IBTA 9.7.2).
const MAX_PAYLOAD: usize = 4096;

/// Datagrams in order. Nothing is written for one but what it has: a batch is small.
pub(super) struct Datagrams {
    list: Vec<Datagram>,
    limit: usize,
    /// Of each datagram its headers, with the inline payload, and its trailer.
    bytes: Vec<u8>,
    /// Point at the payload of each datagram.
    payload: Vec<libc::iovec>,
    /// What the node writes the next one into.
    transmit: Transmit,
}

/// One datagram, by its places in the lists of [`Datagrams`].
#[derive(Clone, Copy)]
pub(super) struct Datagram {
    pub(super) destination: IpAddr,
    /// Bytes of the UDP payload.
    pub(super) length: u32,
    /// That of the queue pair that it is for.
    pub(super) slot: u8,
    headers: u32,
    header_length: u16,
    padding: u8,
    payload_count: u8,
    payload: u32,
}

impl Datagram {
    /// How many [`Datagrams::gather`] makes.
    pub(super) const fn iovecs(&self) -> usize {
        match self.payload_count {
            0 => 1,
            pieces => pieces as usize + 2,
        }
    }

    fn headers(&self) -> Range<usize> {
        let start = self.headers as usize;
        start..start + usize::from(self.header_length)
    }

    fn trailer(&self) -> Range<usize> {
        let start = self.headers().end;
        start..start + usize::from(self.padding) + ICRC_LENGTH
    }

    fn payload(&self) -> Range<usize> {
        let start = self.payload as usize;
        start..start + usize::from(self.payload_count)
    }
}

impl Datagrams {
    /// Headers, pieces, and the trailer.
    pub(super) const MAX_IOVECS: usize = MAX_SCATTER_GATHER + 2;

    /// Room for so many.
    pub(super) fn new(limit: usize) -> Self {
        const MAX_BYTES: usize = MAX_HEADER_LENGTH + MAX_INLINE + MAX_TRAILER;
        Self {
            list: Vec::with_capacity(limit),
            limit,
            bytes: Vec::with_capacity(limit * MAX_BYTES),
            payload: Vec::with_capacity(limit * MAX_SCATTER_GATHER),
            transmit: Transmit::new(),
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn list(&self) -> &[Datagram] {
        &self.list
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
        self.bytes.clear();
        self.payload.clear();
    }

    /// Takes what `node` has to send, until there is no more or there is no room: then, and only
    /// then, the result is `true`.
    pub(super) fn collect<N: Node>(
        &mut self,
        node: &mut N,
        now: Instant,
        counters: &mut DriverCounters,
    ) -> bool {
        while self.list.len() < self.limit {
            if !node.poll_transmit(now, &mut self.transmit) {
                return false;
            }
            if !self.keep(node) {
                counters.withdrawn_datagrams += 1;
            }
        }
        true
    }

    /// Keeps what the node has just written; `false`, leaving all as it was, when the memory of the
    /// payload has gone.
    fn keep<N: Node>(&mut self, node: &N) -> bool {
        let first = self.payload.len();
        let mut length = 0;
        for piece in self.transmit.payload() {
            let bytes = node.bytes(piece).filter(|bytes| bytes.len() == piece.length as usize);
            let Some(bytes) = bytes else {
                self.payload.truncate(first);
                return false;
            };
            self.payload.push(iovec(bytes));
            length += bytes.len();
        }
        let (headers, padding) = (self.transmit.headers(), self.transmit.padding().len());
        let start = self.bytes.len();
        self.bytes.extend_from_slice(headers);
        self.bytes.resize(start + headers.len() + padding + ICRC_LENGTH, 0);
        self.list.push(Datagram {
            destination: self.transmit.destination,
            length: (headers.len() + length + padding + ICRC_LENGTH) as u32,
            slot: slot_of(headers) as u8,
            headers: start as u32,
            header_length: headers.len() as u16,
            padding: padding as u8,
            payload_count: (self.payload.len() - first) as u8,
            payload: first as u32,
        });
        true
    }

    /// Writes the ICRC of a datagram.
    pub(super) fn seal(
        &mut self,
        index: usize,
        source: IpAddr,
        source_port: u16,
        identification: u16,
    ) {
        let next = self.list.get(index + 1);
        if let Some(piece) = next.and_then(|next| self.payload[next.payload()].first()) {
            prefetch(piece.iov_base.cast(), piece.iov_len);
        }
        let datagram = self.list[index];
        if !self.probe(datagram.payload()) {
            // It goes out as nonsense, which its receiver drops: the ICRC stays 0. When the packet is
            // made again, the node is told that its memory is gone.
            return;
        }
        let payload = self.payload[datagram.payload()].iter().map(|piece| {
            // SAFETY: `keep` made it of a slice, which the caller of `SendBatch::collect` promised
            // to keep.
            unsafe { slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len) }
        });
        let trailer = datagram.trailer();
        let padding = trailer.start..trailer.end - ICRC_LENGTH;
        let icrc = icrc(
            (source, source_port),
            datagram.destination,
            identification,
            &self.bytes[datagram.headers()],
            payload.chain([&self.bytes[padding]]),
            datagram.length as usize,
        );
        self.bytes[trailer.end - ICRC_LENGTH..trailer.end].copy_from_slice(&icrc);
    }

    /// Makes sure that pieces of payload can be read. Those of which one cannot are made zeros.
    fn probe(&mut self, payload: Range<usize>) -> bool {
        let pieces = &mut self.payload[payload];
        let is_there = |piece: &libc::iovec| {
            // SAFETY: as for reading them in `seal`.
            unsafe { guarded::probe(piece.iov_base.cast(), piece.iov_len) }.is_ok()
        };
        let are_there = pieces.iter().all(is_there);
        if !are_there {
            static ZEROS: [u8; MAX_PAYLOAD] = [0; MAX_PAYLOAD];
            for piece in pieces {
                *piece = iovec(&ZEROS[..piece.iov_len.min(MAX_PAYLOAD)]);
            }
        }
        are_there
    }

    /// Describes a datagram to the kernel. It stays so until the next one is kept or sealed.
    pub(super) fn gather(&self, index: usize, iovecs: &mut Vec<libc::iovec>) {
        let datagram = &self.list[index];
        let (headers, trailer) = (datagram.headers(), datagram.trailer());
        if datagram.payload_count == 0 {
            iovecs.push(iovec(&self.bytes[headers.start..trailer.end]));
            return;
        }
        iovecs.push(iovec(&self.bytes[headers]));
        iovecs.extend_from_slice(&self.payload[datagram.payload()]);
        iovecs.push(iovec(&self.bytes[trailer]));
    }
}

/// The kernel only reads through the iovecs of a sent message.
pub(super) const fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use millstream_roce::{DatagramMeta, Piece};

    use super::*;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 1, 2, 3));
    const HEADERS: [u8; 28] = [7; 28];

    /// Sends datagrams with these pieces, over and over; a key of 1 is of memory that has gone.
    struct Source {
        lists: Vec<Vec<Piece>>,
        next: usize,
        memory: Vec<u8>,
    }

    impl Source {
        fn new(lists: Vec<Vec<Piece>>) -> Self {
            Self { lists, next: 0, memory: (0..=255).cycle().take(8192).collect() }
        }
    }

    impl Node for Source {
        fn handle_datagram(&mut self, _: Instant, _: &DatagramMeta, _: &[u8]) {}

        fn handle_timeout(&mut self, _: Instant) {}

        fn poll_timeout(&mut self) -> Option<Instant> {
            None
        }

        fn poll_transmit(&mut self, _: Instant, transmit: &mut Transmit) -> bool {
            let pieces = &self.lists[self.next % self.lists.len()];
            let length: u32 = pieces.iter().map(|piece| piece.length).sum();
            let padding = (length.wrapping_neg() & 3) as u8;
            transmit.set(PEER, &HEADERS, pieces, padding);
            self.next += 1;
            true
        }

        fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
            if piece.key == 1 {
                return None;
            }
            let start = piece.address as usize;
            Some(&self.memory[start..start + piece.length as usize])
        }
    }

    fn piece(key: u32, address: u64, length: u32) -> Piece {
        Piece { key, address, length }
    }

    /// The bytes of a datagram as the kernel would gather them, and in how many parts.
    fn gathered(datagrams: &Datagrams, index: usize) -> (Vec<u8>, usize) {
        let mut iovecs = Vec::new();
        datagrams.gather(index, &mut iovecs);
        let part = |iovec: &libc::iovec| {
            // SAFETY: they point into `datagrams` and into the memory of a `Source`, which live.
            unsafe { slice::from_raw_parts(iovec.iov_base.cast::<u8>(), iovec.iov_len) }
        };
        (iovecs.iter().flat_map(part).copied().collect(), iovecs.len())
    }

    #[test]
    fn a_datagram_is_gathered_as_it_is_assembled() {
        let source = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let lists = vec![
            vec![piece(0, 5, 1000)],
            vec![],
            vec![piece(0, 0, 10), piece(0, 300, 0), piece(0, 900, 77)],
            (0..16).map(|i| piece(0, i * 10, 1 + i as u32)).collect(),
        ];
        let mut node = Source::new(lists.clone());
        let mut datagrams = Datagrams::new(8);
        let mut counters = DriverCounters::default();
        assert!(datagrams.collect(&mut node, Instant::ZERO, &mut counters));
        // The last seal counts: datagrams are sealed anew when they are sent otherwise.
        for identification in [9, 3] {
            (0..8).for_each(|index| datagrams.seal(index, source, 4791, identification));
        }
        node.next = 0;
        for index in 0..8 {
            let mut transmit = Transmit::new();
            node.poll_transmit(Instant::ZERO, &mut transmit);
            let mut expected = Vec::new();
            assert!(transmit.assemble(&node, source, 4791, 3, &mut expected));
            let pieces = lists[index % lists.len()].len();
            let parts = if pieces == 0 { 1 } else { pieces + 2 };
            assert_eq!(gathered(&datagrams, index), (expected.clone(), parts));
            assert_eq!(datagrams.list()[index].length as usize, expected.len());
        }
    }

    #[test]
    fn what_has_gone_leaves_no_trace() {
        let lists = vec![vec![piece(0, 0, 100), piece(1, 0, 100)], vec![piece(0, 7, 4)]];
        let mut node = Source::new(lists);
        let mut datagrams = Datagrams::new(2);
        let mut counters = DriverCounters::default();
        assert!(datagrams.collect(&mut node, Instant::ZERO, &mut counters));
        assert_eq!(counters.withdrawn_datagrams, 2);
        for index in 0..2 {
            let (bytes, parts) = gathered(&datagrams, index);
            assert_eq!((parts, &bytes[28..32]), (3, &[7, 8, 9, 10][..]));
        }
    }

    /// What a batch writes for 128 packets, headers and iovecs, stays in the first-level cache.
    #[test]
    fn a_batch_is_small() {
        let mut node = Source::new(vec![vec![piece(0, 0, 4096)]]);
        let mut datagrams = Datagrams::new(128);
        datagrams.collect(&mut node, Instant::ZERO, &mut DriverCounters::default());
        let mut iovecs = Vec::new();
        (0..128).for_each(|index| datagrams.gather(index, &mut iovecs));
        let written = size_of_val(datagrams.list())
            + datagrams.bytes.len()
            + size_of_val(&*datagrams.payload)
            + size_of_val(&*iovecs);
        assert!(written <= 18 << 10, "{written} bytes");
        // All of it has room from the start, so nothing is allocated later.
        assert!(datagrams.bytes.capacity() >= 128 * (MAX_HEADER_LENGTH + MAX_INLINE + MAX_TRAILER));
    }
}
