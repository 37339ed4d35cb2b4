//! Work requests: what is posted to a queue pair.

use millstream_wire::Qpn;

use crate::completion::CompletionOperation;
use crate::datagrams::DatagramDestination;
use crate::error::PostError;

/// The most pieces that one work request gathers from or scatters to.
pub const MAX_SCATTER_GATHER: usize = 16;

/// A run of bytes in a registered memory region.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Piece {
    /// Key of the region.
    pub key: u32,
    /// Virtual address of the first byte.
    pub address: u64,
    /// How many bytes.
    pub length: u32,
}

/// A list of up to [`MAX_SCATTER_GATHER`] pieces, held in place. Long to copy, so it is filled where
/// it stays.
#[derive(Clone, Debug)]
pub(crate) struct ScatterGather {
    pieces: [Piece; MAX_SCATTER_GATHER],
    count: u8,
}

impl ScatterGather {
    /// No bytes at all.
    pub(crate) const EMPTY: Self =
        Self { pieces: [Piece { key: 0, address: 0, length: 0 }; MAX_SCATTER_GATHER], count: 0 };

    /// The pieces.
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count.into()]
    }

    /// Becomes the list of these pieces, of which there are not too many. Written in place, as the
    /// whole list is long to copy.
    pub(crate) fn set(&mut self, pieces: impl Iterator<Item = Piece>) {
        self.count = 0;
        for (place, piece) in self.pieces.iter_mut().zip(pieces) {
            *place = piece;
            self.count += 1;
        }
    }
}

/// Bytes in all pieces.
pub(crate) fn length(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.length)).sum()
}

/// The part of a list from byte `offset` on, `length` bytes long (shorter where the list ends).
pub(crate) fn parts(
    pieces: impl Iterator<Item = Piece>,
    offset: u64,
    length: u64,
) -> impl Iterator<Item = Piece> {
    parts_and_rest(pieces, offset, length).map(|(part, _)| part)
}

/// As [`parts`], each with how many bytes of its piece follow it.
pub(crate) fn parts_and_rest(
    mut pieces: impl Iterator<Item = Piece>,
    offset: u64,
    length: u64,
) -> impl Iterator<Item = (Piece, u64)> {
    let (mut skip, mut left) = (offset, length);
    core::iter::from_fn(move || {
        loop {
            if left == 0 {
                return None;
            }
            let Piece { key, address, length } = pieces.next()?;
            let available = u64::from(length);
            if skip >= available {
                skip -= available;
                continue;
            }
            let take = left.min(available - skip);
            let (address, rest) = (address.wrapping_add(skip), available - skip - take);
            skip = 0;
            left -= take;
            return Some((Piece { key, address, length: take as u32 }, rest));
        }
    })
}

const fn check_pieces(count: usize) -> Result<(), PostError> {
    if count > MAX_SCATTER_GATHER {
        return Err(PostError::TooManyPieces { count, limit: MAX_SCATTER_GATHER });
    }
    Ok(())
}

/// What a send work request does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SendOperation {
    /// A message into the peer's next receive request.
    Send {
        /// Delivered in the peer's completion.
        immediate: Option<u32>,
    },
    /// A message into the peer's next receive request, which also takes the right to a region
    /// away from all remotes.
    SendInvalidate {
        /// The peer's key of the region.
        remote_key: u32,
    },
    /// Local pieces into the peer's memory.
    Write {
        /// Virtual address at the peer.
        remote_address: u64,
        /// The peer's key of the region.
        remote_key: u32,
        /// When given, consumes one of the peer's receive requests and completes it with this.
        immediate: Option<u32>,
    },
    /// The peer's memory into local pieces.
    Read {
        /// Virtual address at the peer.
        remote_address: u64,
        /// The peer's key of the region.
        remote_key: u32,
    },
    /// The peer's 8 bytes, compared and swapped in one step: they become `swap` if they are
    /// `compare`. What they were before goes into the local pieces.
    CompareSwap {
        /// Virtual address at the peer, a multiple of 8.
        remote_address: u64,
        /// The peer's key of the region.
        remote_key: u32,
        /// What is expected.
        compare: u64,
        /// What replaces it.
        swap: u64,
    },
    /// Added to the peer's 8 bytes in one step, modulo 2^64. What they were before goes into the
    /// local pieces.
    FetchAdd {
        /// Virtual address at the peer, a multiple of 8.
        remote_address: u64,
        /// The peer's key of the region.
        remote_key: u32,
        /// What is added.
        add: u64,
    },
}

/// Bytes of what an atomic operation works on, and of its result.
pub const ATOMIC_LENGTH: u32 = 8;

impl SendOperation {
    /// Whether it is an atomic operation.
    pub const fn is_atomic(&self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Whether it brings bytes of the peer: it writes into the local pieces, and counts against
    /// `initiator_depth` and the peer's `responder_resources`.
    pub const fn fetches(&self) -> bool {
        matches!(self, Self::Read { .. }) || self.is_atomic()
    }

    /// Whether an atomic operation is one: its result has pieces of [`ATOMIC_LENGTH`] bytes in
    /// all, its address is aligned. Every provider asks this first, so that all of them refuse
    /// alike.
    pub const fn check_atomic(&self, length: u64) -> Result<(), PostError> {
        let (Self::CompareSwap { remote_address: address, .. }
        | Self::FetchAdd { remote_address: address, .. }) = *self
        else {
            return Ok(());
        };
        if length != ATOMIC_LENGTH as u64 {
            return Err(PostError::AtomicLength { length });
        }
        if !address.is_multiple_of(ATOMIC_LENGTH as u64) {
            return Err(PostError::AtomicAlignment { address });
        }
        Ok(())
    }

    /// What its completion is of.
    pub const fn completes_as(&self) -> CompletionOperation {
        match self {
            Self::Send { .. } | Self::SendInvalidate { .. } => CompletionOperation::Send,
            Self::Write { .. } => CompletionOperation::Write,
            Self::Read { .. } => CompletionOperation::Read,
            Self::CompareSwap { .. } => CompletionOperation::CompareSwap,
            Self::FetchAdd { .. } => CompletionOperation::FetchAdd,
        }
    }
}

/// A work request for the send queue. `P` holds its pieces, at most [`MAX_SCATTER_GATHER`]: an array,
/// a slice, or another list. They are copied when it is posted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SendRequest<P = [Piece; 1]> {
    /// The caller's own number, returned in the completion.
    pub id: u64,
    /// What to do.
    pub operation: SendOperation,
    /// The local bytes: source of SEND and WRITE, target of READ and of the result of an atomic
    /// operation, which takes exactly [`ATOMIC_LENGTH`] bytes and is in this machine's byte order.
    /// Pieces of 0 bytes may name any memory.
    pub pieces: P,
    /// Whether success makes a completion; failure always does.
    pub signaled: bool,
    /// Ask for a solicited event at the receiver.
    pub solicited: bool,
    /// Begin it only when all READs and atomic operations that were posted before it are complete:
    /// their results are in place by then, and what it changes at the peer they do not see
    /// (IBTA 10.8.3.3). Datagrams have nothing to wait for.
    pub fence: bool,
    /// Who it is for: on a queue pair for datagrams always, on a connection never.
    pub datagram: Option<DatagramDestination>,
}

impl<P> SendRequest<P> {
    /// A signaled request that asks for nothing else. What differs is said with
    /// `SendRequest { solicited: true, ..SendRequest::new(id, operation, pieces) }`.
    pub const fn new(id: u64, operation: SendOperation, pieces: P) -> Self {
        Self {
            id,
            operation,
            pieces,
            signaled: true,
            solicited: false,
            fence: false,
            datagram: None,
        }
    }
}

impl<P: AsRef<[Piece]>> SendRequest<P> {
    /// The same request, whatever holds its pieces.
    pub fn borrowed(&self) -> SendRequest<&[Piece]> {
        let &Self { id, operation, ref pieces, signaled, solicited, fence, datagram } = self;
        SendRequest { id, operation, pieces: pieces.as_ref(), signaled, solicited, fence, datagram }
    }

    /// Bytes in all its pieces.
    pub fn length(&self) -> u64 {
        length(self.pieces.as_ref())
    }

    /// Whether it has no more pieces than a request may have. Every provider asks this first, so
    /// that all of them refuse alike.
    pub fn check_pieces(&self) -> Result<(), PostError> {
        check_pieces(self.pieces.as_ref().len())
    }

    /// Whether it can have these bytes inline on a queue pair that takes up to `limit`. Every
    /// provider asks this first, so that all of them refuse alike.
    pub fn check_inline(&self, qpn: Qpn, bytes: &[u8], limit: usize) -> Result<(), PostError> {
        if self.operation.fetches() || !self.pieces.as_ref().is_empty() {
            return Err(PostError::NotInline(qpn));
        }
        if bytes.len() > limit {
            return Err(PostError::InlineTooLong { length: bytes.len(), limit });
        }
        Ok(())
    }
}

/// A work request for the receive queue. `P` holds its pieces as in a [`SendRequest`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReceiveRequest<P = [Piece; 1]> {
    /// The caller's own number, returned in the completion.
    pub id: u64,
    /// Where a SEND goes. May be empty for a WRITE with immediate.
    pub pieces: P,
}

impl<P: AsRef<[Piece]>> ReceiveRequest<P> {
    /// The same request, whatever holds its pieces.
    pub fn borrowed(&self) -> ReceiveRequest<&[Piece]> {
        ReceiveRequest { id: self.id, pieces: self.pieces.as_ref() }
    }

    /// Whether it has no more pieces than a request may have. Every provider asks this first, so
    /// that all of them refuse alike.
    pub fn check_pieces(&self) -> Result<(), PostError> {
        check_pieces(self.pieces.as_ref().len())
    }
}

// Small, since they are copied on their way into a queue.
const _: () = assert!(size_of::<SendRequest>() <= 96 && size_of::<ReceiveRequest>() <= 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_list() {
        let piece = |key, address, length| Piece { key, address, length };
        let list = [piece(1, 100, 10), piece(2, 200, 0), piece(3, 300, 5)];
        let part = |offset, length| parts(list.into_iter(), offset, length).collect::<Vec<_>>();
        assert_eq!(length(&list), 15);
        assert_eq!(length(&part(0, 15)), 15);
        assert_eq!(part(8, 4), [piece(1, 108, 2), piece(3, 300, 2)]);
        assert_eq!(part(10, 100), [piece(3, 300, 5)]);
        assert_eq!(part(15, 1), []);
        assert_eq!(part(3, 0), []);
    }

    #[test]
    fn a_request_has_no_more_pieces_than_it_may_have() {
        let operation = SendOperation::Send { immediate: None };
        let pieces = [Piece::default(); MAX_SCATTER_GATHER + 1];
        let check = |count| SendRequest::new(1, operation, &pieces[..count]).check_pieces();
        assert_eq!(check(MAX_SCATTER_GATHER), Ok(()));
        let limit = MAX_SCATTER_GATHER;
        let refused = Err(PostError::TooManyPieces { count: limit + 1, limit });
        assert_eq!(check(limit + 1), refused);
        assert_eq!(ReceiveRequest { id: 1, pieces }.check_pieces(), refused);
    }
}
