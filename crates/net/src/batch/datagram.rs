//! One datagram to send: headers and trailer here, payload where it lies.

use std::net::IpAddr;
use std::ptr;
use std::slice;

use millstream_roce::{MAX_SCATTER_GATHER, Node, Transmit};
use millstream_wire::ICRC_LENGTH;

pub(super) struct Datagram {
    pub(super) transmit: Transmit,
    payload: [libc::iovec; MAX_SCATTER_GATHER],
    payload_count: usize,
    /// Padding and ICRC.
    trailer: [u8; 3 + ICRC_LENGTH],
    trailer_length: usize,
    /// Bytes of the UDP payload.
    pub(super) length: usize,
}

pub(super) const NOTHING: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };

impl Datagram {
    /// Headers, pieces, and the trailer.
    pub(super) const MAX_IOVECS: usize = MAX_SCATTER_GATHER + 2;

    pub(super) const fn new() -> Self {
        Self {
            transmit: Transmit::new(),
            payload: [NOTHING; MAX_SCATTER_GATHER],
            payload_count: 0,
            trailer: [0; 3 + ICRC_LENGTH],
            trailer_length: 0,
            length: 0,
        }
    }

    /// Finds the payload; `false` when its memory has gone.
    pub(super) fn resolve<N: Node>(&mut self, node: &N) -> bool {
        self.payload_count = 0;
        for piece in self.transmit.payload() {
            let Some(bytes) = node.bytes(piece) else { return false };
            if bytes.len() != piece.length as usize {
                return false;
            }
            self.payload[self.payload_count] = iovec(bytes);
            self.payload_count += 1;
        }
        self.length = self.transmit.datagram_length();
        true
    }

    /// Writes padding and ICRC.
    pub(super) fn seal(&mut self, source: IpAddr, source_port: u16, identification: u16) {
        let pieces = self.payload[..self.payload_count].iter().map(|piece| {
            // SAFETY: `resolve` made it of a slice, which the caller of `SendBatch::collect`
            // promised to keep.
            unsafe { slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len) }
        });
        let icrc = self.transmit.icrc(source, source_port, identification, pieces);
        let padding = self.transmit.padding();
        self.trailer_length = padding.len() + icrc.len();
        self.trailer[..padding.len()].copy_from_slice(padding);
        self.trailer[padding.len()..self.trailer_length].copy_from_slice(&icrc);
    }

    pub(super) fn gather(&self, iovecs: &mut Vec<libc::iovec>) {
        iovecs.push(iovec(self.transmit.headers()));
        iovecs.extend_from_slice(&self.payload[..self.payload_count]);
        iovecs.push(iovec(&self.trailer[..self.trailer_length]));
    }
}

/// The kernel only reads through the iovecs of a sent message.
pub(super) const fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}
