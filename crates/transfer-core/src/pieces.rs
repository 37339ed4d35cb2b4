//! The runs of a request, and how slices are cut from them, one after the other and not before they
//! are posted.

use crate::{Borders, Piece, Ranges, SubmitError};

/// Pieces of a block.
const BLOCK: usize = 32;
/// No block.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Block {
    pieces: [Piece; BLOCK],
    next: u32,
}

/// The lists of pieces of all tasks, in blocks that are used again.
#[derive(Debug)]
pub(crate) struct Pieces {
    blocks: Vec<Block>,
    free: u32,
    used: usize,
    limit: usize,
}

/// The runs of a task.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Runs {
    Strided { first: Piece, count: u32, local_stride: u64, remote_stride: u64 },
    List { block: u32, count: u32 },
}

/// A place in the runs of a task.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Cursor {
    block: u32,
    /// The piece.
    index: u32,
    /// Bytes of it that are before this place.
    offset: u64,
}

/// What pieces of a slice do not go across.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) local: Borders,
    pub(crate) peer: Borders,
}

/// How requests are cut: slices of one length, and a short rest goes along with the last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slicing {
    pub(crate) slice_length: u64,
    /// A rest of up to so many bytes is no slice of its own.
    pub(crate) fragment_limit: u64,
    /// A slice has at most so many pieces.
    pub(crate) max_pieces: u32,
}

/// A slice: pieces of its task that follow each other. They may lie anywhere, here and at the peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Cut {
    pub(crate) start: Cursor,
    /// Where the next slice starts.
    pub(crate) end: Cursor,
    pub(crate) first: Piece,
    pub(crate) length: u32,
    pub(crate) pieces: u32,
}

impl Pieces {
    /// Room for so many pieces of lists, rounded up to blocks.
    pub(crate) const fn new(limit: usize) -> Self {
        Self { blocks: Vec::new(), free: NONE, used: 0, limit: limit.div_ceil(BLOCK) }
    }

    /// Takes the ranges of a request in; returns them and how many bytes they have.
    pub(crate) fn take(&mut self, ranges: &Ranges<'_>) -> Result<(Runs, u64), SubmitError> {
        match *ranges {
            Ranges::Contiguous(first) => {
                let length = check(&first, 0, 0, 0)?;
                Ok((Runs::Strided { first, count: 1, local_stride: 0, remote_stride: 0 }, length))
            }
            Ranges::Strided { first, count, local_stride, remote_stride } => {
                let last = count.checked_sub(1).ok_or(SubmitError::ZeroLength)?;
                let length = check(&first, last, local_stride, remote_stride)?;
                let all = length.checked_mul(count.into()).ok_or(SubmitError::Overflow)?;
                Ok((Runs::Strided { first, count, local_stride, remote_stride }, all))
            }
            Ranges::List(list) => self.take_list(list),
        }
    }

    fn take_list(&mut self, list: &[Piece]) -> Result<(Runs, u64), SubmitError> {
        let mut length = 0_u64;
        for piece in list {
            length = length.checked_add(check(piece, 0, 0, 0)?).ok_or(SubmitError::Overflow)?;
        }
        let count = u32::try_from(list.len()).map_err(|_| SubmitError::Overflow)?;
        let needed = list.len().div_ceil(BLOCK);
        if needed == 0 {
            return Err(SubmitError::ZeroLength);
        }
        if needed > self.limit - self.used {
            return Err(SubmitError::TooManyPieces { limit: self.limit * BLOCK });
        }
        let mut next = NONE;
        for part in list.chunks(BLOCK).rev() {
            let block = self.allocate();
            self.blocks[block as usize].pieces[..part.len()].copy_from_slice(part);
            self.blocks[block as usize].next = next;
            next = block;
        }
        Ok((Runs::List { block: next, count }, length))
    }

    fn allocate(&mut self) -> u32 {
        self.used += 1;
        if self.free == NONE {
            self.blocks.push(Block { pieces: [Piece::default(); BLOCK], next: NONE });
            return self.blocks.len() as u32 - 1;
        }
        let block = self.free;
        self.free = self.blocks[block as usize].next;
        block
    }

    /// Frees the blocks of a task.
    pub(crate) fn release(&mut self, runs: &Runs) {
        let Runs::List { mut block, .. } = *runs else { return };
        while block != NONE {
            let next = core::mem::replace(&mut self.blocks[block as usize].next, self.free);
            self.free = block;
            self.used -= 1;
            block = next;
        }
    }

    /// Blocks that tasks have.
    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    /// The rest of the piece at a place, and the place after it; `None` at the end.
    fn piece(&self, runs: &Runs, at: Cursor) -> Option<(Piece, Cursor)> {
        let Cursor { mut block, index, offset } = at;
        let after = index + 1;
        let piece = match *runs {
            Runs::Strided { first, count, local_stride, remote_stride } => {
                if index >= count {
                    return None;
                }
                Piece {
                    local: first.local + u64::from(index) * local_stride,
                    remote: first.remote + u64::from(index) * remote_stride,
                    length: first.length,
                }
            }
            Runs::List { count, .. } => {
                if index >= count {
                    return None;
                }
                let found = &self.blocks[block as usize];
                if (after as usize).is_multiple_of(BLOCK) {
                    block = found.next;
                }
                found.pieces[index as usize % BLOCK]
            }
        };
        let rest = Piece {
            local: piece.local + offset,
            remote: piece.remote + offset,
            length: piece.length - offset,
        };
        Some((rest, Cursor { block, index: after, offset: 0 }))
    }

    /// The slice that starts at a place; `None` at the end.
    pub(crate) fn cut(
        &self,
        runs: &Runs,
        start: Cursor,
        slicing: &Slicing,
        limits: &Limits,
    ) -> Option<Cut> {
        let Slicing { slice_length, fragment_limit, max_pieces } = *slicing;
        let (first, after) = self.piece(runs, start)?;
        let room = limits.local.room(first.local).min(limits.peer.room(first.remote));
        let within = first.length.min(room);
        let whole = within <= slice_length + fragment_limit;
        let mut length = if whole { within } else { slice_length };
        if length < first.length {
            let end = Cursor { offset: start.offset + length, ..start };
            return Some(Cut { start, end, first, length: length as u32, pieces: 1 });
        }
        let (mut end, mut pieces) = (after, 1);
        while pieces < max_pieces
            && let Some((piece, after)) = self.piece(runs, end)
            && length + piece.length <= slice_length
            && piece.length <= limits.local.room(piece.local)
            && piece.length <= limits.peer.room(piece.remote)
        {
            (length, end, pieces) = (length + piece.length, after, pieces + 1);
        }
        Some(Cut { start, end, first, length: length as u32, pieces })
    }

    /// The pieces of a slice of so many bytes.
    pub(crate) fn of_slice(
        &self,
        runs: Runs,
        start: Cursor,
        length: u32,
    ) -> impl Iterator<Item = Piece> {
        let (mut at, mut left) = (start, u64::from(length));
        core::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let (mut piece, after) = self.piece(&runs, at)?;
            piece.length = piece.length.min(left);
            left -= piece.length;
            at = after;
            Some(piece)
        })
    }
}

impl Runs {
    pub(crate) const fn start(&self) -> Cursor {
        let block = match *self {
            Self::Strided { .. } => NONE,
            Self::List { block, .. } => block,
        };
        Cursor { block, index: 0, offset: 0 }
    }
}

/// The bytes of a piece, if it and its last copy are in the address space.
fn check(piece: &Piece, last: u32, local: u64, remote: u64) -> Result<u64, SubmitError> {
    let fits = |address: u64, stride: u64| {
        let start = stride.checked_mul(last.into())?.checked_add(address)?;
        start.checked_add(piece.length)
    };
    match (fits(piece.local, local), fits(piece.remote, remote)) {
        _ if piece.length == 0 => Err(SubmitError::ZeroLength),
        (Some(_), Some(_)) => Ok(piece.length),
        _ => Err(SubmitError::Overflow),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICING: Slicing =
        Slicing { slice_length: 65_536, fragment_limit: 16_384, max_pieces: 16 };

    fn piece(local: u64, remote: u64, length: u64) -> Piece {
        Piece { local, remote, length }
    }

    const NO_LIMITS: Limits = Limits { local: Borders::NONE, peer: Borders::NONE };

    fn cuts(pieces: &Pieces, runs: &Runs, slicing: &Slicing) -> Vec<(u64, u64, u32, u32)> {
        limited(pieces, runs, slicing, &NO_LIMITS)
    }

    fn limited(
        pieces: &Pieces,
        runs: &Runs,
        slicing: &Slicing,
        limits: &Limits,
    ) -> Vec<(u64, u64, u32, u32)> {
        let mut at = runs.start();
        let next = || {
            let cut = pieces.cut(runs, at, slicing, limits)?;
            assert_eq!(cut.start, at);
            let all: Vec<Piece> = pieces.of_slice(*runs, at, cut.length).collect();
            assert_eq!(all.len(), cut.pieces as usize);
            assert_eq!(all.iter().map(|piece| piece.length).sum::<u64>(), cut.length.into());
            assert_eq!((all[0].local, all[0].remote), (cut.first.local, cut.first.remote));
            at = cut.end;
            Some((cut.first.local, cut.first.remote, cut.length, cut.pieces))
        };
        core::iter::from_fn(next).collect()
    }

    fn lengths(length: u64) -> Vec<u32> {
        let mut pieces = Pieces::new(0);
        let (runs, all) = pieces.take(&Ranges::Contiguous(piece(7, 9, length))).unwrap();
        assert_eq!(all, length);
        cuts(&pieces, &runs, &SLICING).into_iter().map(|(_, _, length, _)| length).collect()
    }

    #[test]
    fn a_run_is_cut_at_its_slices_and_a_short_rest_goes_along() {
        assert_eq!(lengths(1), [1]);
        assert_eq!(lengths(65_536), [65_536]);
        assert_eq!(lengths(81_920), [81_920], "a rest of a quarter is merged");
        assert_eq!(lengths(81_921), [65_536, 16_385]);
        assert_eq!(lengths(147_456), [65_536, 81_920]);
        assert_eq!(lengths(147_457), [65_536, 65_536, 16_385]);
    }

    #[test]
    fn pieces_go_together_wherever_they_are() {
        let mut pieces = Pieces::new(0);
        let strided = |count, local_stride, remote_stride| Ranges::Strided {
            first: piece(0, 1 << 20, 4096),
            count,
            local_stride,
            remote_stride,
        };
        let (runs, length) = pieces.take(&strided(40, 8192, 4096)).unwrap();
        assert_eq!(length, 40 * 4096);
        assert_eq!(
            cuts(&pieces, &runs, &SLICING),
            [
                (0, 1 << 20, 65_536, 16),
                (16 * 8192, (1 << 20) + 65_536, 65_536, 16),
                (32 * 8192, (1 << 20) + 131_072, 32_768, 8)
            ]
        );
        let (runs, _) = pieces.take(&strided(3, 4096, 8192)).unwrap();
        assert_eq!(
            cuts(&pieces, &runs, &SLICING),
            [(0, 1 << 20, 12_288, 3)],
            "with gaps at the peer"
        );
        let list = [piece(9000, 100, 50), piece(10, 7000, 1), piece(500, 20, 500)];
        let mut lists = Pieces::new(32);
        let (runs, _) = lists.take(&Ranges::List(&list)).unwrap();
        assert_eq!(cuts(&lists, &runs, &SLICING), [(9000, 100, 551, 3)], "in any order");
        let few = Slicing { slice_length: 8192, fragment_limit: 2048, max_pieces: 16 };
        let (runs, _) = pieces.take(&strided(3, 8192, 4096)).unwrap();
        let pairs: Vec<u32> =
            cuts(&pieces, &runs, &few).into_iter().map(|(_, _, length, _)| length).collect();
        assert_eq!(pairs, [8192, 4096]);
    }

    #[test]
    fn no_slice_goes_across_a_border() {
        let every = |first, distance| Borders { first, distance };
        let lengths = |local, peer, length| {
            let mut pieces = Pieces::new(0);
            let (runs, _) = pieces.take(&Ranges::Contiguous(piece(1000, 5000, length))).unwrap();
            let cuts = limited(&pieces, &runs, &SLICING, &Limits { local, peer });
            cuts.into_iter().map(|(_, _, length, _)| length).collect::<Vec<_>>()
        };
        let none = Borders::NONE;
        assert_eq!(lengths(every(0, 100_000), none, 101_000), [65_536, 33_464, 2000]);
        assert_eq!(lengths(none, every(0, 100_000), 101_000), [65_536, 29_464, 6000]);
        assert_eq!(
            lengths(every(0, 100_000), every(0, 100_000), 101_000),
            [65_536, 29_464, 4000, 2000]
        );
        // A piece that ends, or begins, at a border; and one before the first.
        assert_eq!(lengths(every(1000, 70_000), none, 70_000), [70_000]);
        assert_eq!(lengths(every(1010, 70_000), none, 70_000), [10, 69_990]);
        assert_eq!(lengths(every(u64::MAX, 1), none, 70_000), [70_000]);
        // A peer may say anything.
        assert_eq!(lengths(none, every(0, 0), 70_000), [70_000]);
        assert_eq!(lengths(none, every(0, 1), 3), [1, 1, 1]);
    }

    #[test]
    fn pieces_of_a_slice_do_not_go_across_a_border_either() {
        let mut pieces = Pieces::new(0);
        let strided = Ranges::Strided {
            first: piece(0, 100, 100),
            count: 6,
            local_stride: 200,
            remote_stride: 100,
        };
        let (runs, _) = pieces.take(&strided).unwrap();
        let parts = |local, peer| {
            let cuts = limited(&pieces, &runs, &SLICING, &Limits { local, peer });
            cuts.into_iter().map(|(.., length, of)| (length, of)).collect::<Vec<_>>()
        };
        let every = |first, distance| Borders { first, distance };
        // Between the third and the fourth at the peer, each of which lies on one side; within the third at the
        // peer, and here.
        assert_eq!(parts(Borders::NONE, every(400, 1000)), [(600, 6)]);
        assert_eq!(parts(Borders::NONE, every(350, 1000)), [(200, 2), (50, 1), (350, 4)]);
        assert_eq!(parts(every(450, 1000), Borders::NONE), [(200, 2), (50, 1), (350, 4)]);
    }

    #[test]
    fn a_slice_has_no_more_pieces_than_it_may() {
        for max_pieces in [1, 2, 3] {
            let slicing = Slicing { max_pieces, ..SLICING };
            let mut pieces = Pieces::new(0);
            let strided = Ranges::Strided {
                first: piece(0, 1 << 20, 100),
                count: 6,
                local_stride: 200,
                remote_stride: 100,
            };
            let (runs, _) = pieces.take(&strided).unwrap();
            let cuts = cuts(&pieces, &runs, &slicing);
            assert_eq!(cuts.len() as u32, 6 / max_pieces);
            assert!(cuts.iter().all(|&(.., length, of)| (length, of) == (100 * of, max_pieces)));
        }
    }

    #[test]
    fn lists_have_room_for_their_pieces_and_give_it_back() {
        let list: Vec<Piece> =
            (0..40_000).map(|i| piece(i * 5000, 1 << 40 | (i * 4096), 4096)).collect();
        let mut pieces = Pieces::new(40_000);
        for _ in 0..3 {
            let (runs, length) = pieces.take(&Ranges::List(&list)).unwrap();
            assert_eq!((length, pieces.used()), (40_000 * 4096, 1250));
            let all = cuts(&pieces, &runs, &SLICING);
            assert_eq!(all.len(), 2500);
            let sum: u64 = all.iter().map(|&(_, _, length, _)| u64::from(length)).sum();
            assert_eq!(sum, length);
            let limit = 40_000;
            let more = pieces.take(&Ranges::List(&list[..1]));
            assert_eq!(more.unwrap_err(), SubmitError::TooManyPieces { limit });
            pieces.release(&runs);
            assert_eq!((pieces.used(), pieces.blocks.len()), (0, 1250));
        }
    }

    #[test]
    fn ranges_that_are_none_are_refused() {
        let mut pieces = Pieces::new(100);
        let strided = |first, count, local_stride, remote_stride| Ranges::Strided {
            first,
            count,
            local_stride,
            remote_stride,
        };
        let end = u64::MAX;
        for (ranges, error) in [
            (Ranges::Contiguous(piece(1, 1, 0)), SubmitError::ZeroLength),
            (Ranges::List(&[]), SubmitError::ZeroLength),
            (Ranges::List(&[piece(1, 1, 1), piece(1, 1, 0)]), SubmitError::ZeroLength),
            (strided(piece(1, 1, 1), 0, 1, 1), SubmitError::ZeroLength),
            (Ranges::Contiguous(piece(end, 1, 1)), SubmitError::Overflow),
            (Ranges::Contiguous(piece(1, end, 1)), SubmitError::Overflow),
            (strided(piece(1, 1, 1), 3, end / 2, 1), SubmitError::Overflow),
            (strided(piece(1, 1, 1), 3, 1, end), SubmitError::Overflow),
            (strided(piece(0, 0, end), 3, 0, 0), SubmitError::Overflow),
            (Ranges::List(&[piece(0, 0, end), piece(0, 0, 1)]), SubmitError::Overflow),
        ] {
            assert_eq!(pieces.take(&ranges).unwrap_err(), error, "{ranges:?}");
            assert_eq!(pieces.used(), 0);
        }
        assert!(pieces.take(&Ranges::Contiguous(piece(end - 1, end - 1, 1))).is_ok());
    }
}
