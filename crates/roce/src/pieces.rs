//! The pieces of work requests that wait in a queue.

use std::collections::VecDeque;

use crate::work::Piece;

/// The pieces of one request. The first is here, as most requests have no more; the others are in
/// the [`PieceRing`] of the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceList {
    first: Piece,
    /// Which of all the pieces that were ever in the ring the second is.
    more: u64,
    count: u8,
}

/// All but the first pieces of the requests of a queue. Requests leave it in the order in which
/// they came, and so do their pieces. It grows when requests have several, to as many as the queue
/// can hold, and keeps its room.
#[derive(Debug, Default)]
pub(crate) struct PieceRing {
    pieces: VecDeque<Piece>,
    /// Pieces that have left.
    left: u64,
}

impl PieceRing {
    /// Keeps the pieces of a request, of which there are at most
    /// [`crate::MAX_SCATTER_GATHER`]. Those without bytes are left out.
    pub(crate) fn keep(&mut self, pieces: &[Piece]) -> PieceList {
        let mut pieces = pieces.iter().filter(|piece| piece.length > 0).copied();
        let mut list = PieceList {
            first: Piece::default(),
            more: self.left + self.pieces.len() as u64,
            count: 0,
        };
        if let Some(first) = pieces.next() {
            let before = self.pieces.len();
            self.pieces.extend(pieces);
            list.first = first;
            list.count = (1 + self.pieces.len() - before) as u8;
        }
        list
    }

    /// The pieces of a request that is in the queue.
    pub(crate) fn get(&self, list: &PieceList) -> impl Iterator<Item = Piece> {
        let start = (list.more - self.left) as usize;
        let first = (list.count > 0).then_some(list.first);
        let more = start..start + list.others();
        first.into_iter().chain(more.map(|index| self.pieces[index]))
    }

    /// Forgets the pieces of the oldest request, which leaves the queue.
    pub(crate) fn release(&mut self, list: &PieceList) {
        debug_assert_eq!(list.more, self.left, "requests leave in order");
        let count = list.others();
        self.pieces.drain(..count);
        self.left += count as u64;
    }
}

impl PieceList {
    /// Pieces in the ring.
    fn others(&self) -> usize {
        usize::from(self.count).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(id: u32, count: u32) -> Vec<Piece> {
        (0..count).map(|i| Piece { key: id, address: u64::from(i), length: 1 + i }).collect()
    }

    #[test]
    fn lists_of_any_length_come_back_as_they_were() {
        let mut ring = PieceRing::default();
        let mut queue = VecDeque::new();
        for id in 0..1000 {
            let pieces = list(id, id % 5);
            queue.push_back((ring.keep(&pieces), pieces));
            for (kept, pieces) in &queue {
                assert!(ring.get(kept).eq(pieces.iter().copied()));
            }
            if queue.len() > 7 {
                let (oldest, _) = queue.pop_front().unwrap();
                ring.release(&oldest);
            }
        }
        assert!(ring.pieces.capacity() <= 64, "what left makes room");
    }

    #[test]
    fn pieces_without_bytes_are_left_out() {
        let mut ring = PieceRing::default();
        let piece = |key, length| Piece { key, address: 0, length };
        let kept = ring.keep(&[piece(1, 0), piece(2, 5), piece(3, 0), piece(4, 6)]);
        assert!(ring.get(&kept).eq([piece(2, 5), piece(4, 6)]));
        let empty = ring.keep(&[piece(1, 0)]);
        assert_eq!(ring.get(&empty).count(), 0);
    }

    #[test]
    fn a_single_piece_needs_no_room_in_the_ring() {
        let mut ring = PieceRing::default();
        for id in 0..100 {
            ring.keep(&list(id, 1));
        }
        assert_eq!(ring.pieces.capacity(), 0);
    }
}
