//! Requests whose bytes are in several pieces.

use millstream_transfer_core::{Piece, Ranges};

use crate::task::WideSlice;
use crate::{Opcode, SegmentId};

/// A piece of a request: so many bytes with an end at each side.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TransferPiece {
    /// Address of the first byte in local memory.
    pub source: u64,
    /// Address of the first byte in the target's process.
    pub target_offset: u64,
    /// Bytes. At least one.
    pub length: u64,
}

/// The pieces of a request.
#[derive(Clone, Copy, Debug)]
pub enum Pieces<'a> {
    /// Any.
    List(&'a [TransferPiece]),
    /// Equally long ones at equal distances.
    Strided {
        /// The first.
        first: TransferPiece,
        /// How many. At least one.
        count: u32,
        /// From the start of one to that of the next, in local memory.
        source_stride: u64,
        /// From the start of one to that of the next, in the target's process.
        target_stride: u64,
    },
}

/// A request of several pieces: one task. All of them are in one piece of registered memory, and in
/// one buffer of the segment. Where pieces overlap at the side that is written, any of them may be the
/// last.
#[derive(Clone, Copy, Debug)]
pub struct PiecesRequest<'a> {
    /// Which way.
    pub opcode: Opcode,
    /// The remote segment.
    pub target: SegmentId,
    /// What.
    pub pieces: Pieces<'a>,
}

/// The pieces of a task.
#[derive(Debug)]
pub(crate) enum Shape {
    List(Box<[Piece]>),
    Strided { first: Piece, count: u32, local_stride: u64, remote_stride: u64 },
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Span {
    pub(crate) first: u64,
    pub(crate) length: u64,
}

impl Span {
    /// Whether all of these addresses are in it.
    pub(crate) fn holds(&self, other: Self) -> bool {
        let offset = other.first.checked_sub(self.first);
        let room = offset.and_then(|offset| self.length.checked_sub(offset));
        room.is_some_and(|room| other.length <= room)
    }
}

/// Where the bytes of a request are, and how many there are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Extent {
    pub(crate) source: Span,
    pub(crate) target: Span,
    pub(crate) length: u64,
}

/// Why pieces have no extent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum NoExtent {
    /// There is none, or one has no bytes.
    Empty,
    /// One goes beyond the end of the address space, or there are too many bytes.
    Overflow,
}

impl Pieces<'_> {
    /// The pieces, to be kept.
    pub(crate) fn shape(&self) -> Shape {
        match *self {
            Self::List(list) => Shape::List(list.iter().map(piece).collect()),
            Self::Strided { first, count, source_stride, target_stride } => Shape::Strided {
                first: piece(&first),
                count,
                local_stride: source_stride,
                remote_stride: target_stride,
            },
        }
    }

    /// How many bytes, of those that have an extent.
    pub(crate) fn length(&self) -> u64 {
        match *self {
            Self::List(list) => list.iter().map(|piece| piece.length).sum(),
            Self::Strided { first, count, .. } => first.length * u64::from(count),
        }
    }

    /// The smallest ranges in which all of them are.
    pub(crate) fn extent(&self) -> Result<Extent, NoExtent> {
        match *self {
            Self::List(list) => {
                let mut whole = None;
                for piece in list {
                    let extent = span(piece)?;
                    whole = Some(match whole {
                        None => extent,
                        Some(before) => join(&before, &extent)?,
                    });
                }
                whole.ok_or(NoExtent::Empty)
            }
            Self::Strided { first, count, source_stride, target_stride } => {
                let steps = u64::from(count.checked_sub(1).ok_or(NoExtent::Empty)?);
                let beyond = |from: u64, stride: u64| {
                    stride.checked_mul(steps).and_then(|way| from.checked_add(way))
                };
                let last = TransferPiece {
                    source: beyond(first.source, source_stride).ok_or(NoExtent::Overflow)?,
                    target_offset: beyond(first.target_offset, target_stride)
                        .ok_or(NoExtent::Overflow)?,
                    length: first.length,
                };
                let length = first.length.checked_mul(count.into()).ok_or(NoExtent::Overflow)?;
                let (first, last) = (span(&first)?, span(&last)?);
                Ok(Extent {
                    source: cover(first.source, last.source),
                    target: cover(first.target, last.target),
                    length,
                })
            }
        }
    }
}

fn piece(piece: &TransferPiece) -> Piece {
    let TransferPiece { source, target_offset, length } = *piece;
    Piece { local: source, remote: target_offset, length }
}

fn span(piece: &TransferPiece) -> Result<Extent, NoExtent> {
    let &TransferPiece { source, target_offset, length } = piece;
    let fits = |first: u64| first.checked_add(length).is_some();
    match length {
        0 => Err(NoExtent::Empty),
        _ if fits(source) && fits(target_offset) => Ok(Extent {
            source: Span { first: source, length },
            target: Span { first: target_offset, length },
            length,
        }),
        _ => Err(NoExtent::Overflow),
    }
}

fn join(a: &Extent, b: &Extent) -> Result<Extent, NoExtent> {
    let length = a.length.checked_add(b.length).ok_or(NoExtent::Overflow)?;
    let (source, target) = (cover(a.source, b.source), cover(a.target, b.target));
    Ok(Extent { source, target, length })
}

/// The smallest range with both, neither of which goes beyond the end of the address space.
fn cover(a: Span, b: Span) -> Span {
    let first = a.first.min(b.first);
    let end = (a.first + a.length).max(b.first + b.length);
    Span { first, length: end - first }
}

impl Shape {
    /// How many pieces.
    pub(crate) fn count(&self) -> u64 {
        match self {
            Self::List(list) => list.len() as u64,
            Self::Strided { count, .. } => (*count).into(),
        }
    }

    /// The piece of an index below `count`.
    pub(crate) fn piece(&self, index: u64) -> WideSlice {
        let Piece { local, remote, length } = match *self {
            Self::List(ref list) => list[index as usize],
            // `extent` has found that none goes beyond the end of the address space.
            Self::Strided { first, local_stride, remote_stride, .. } => Piece {
                local: first.local + index * local_stride,
                remote: first.remote + index * remote_stride,
                ..first
            },
        };
        WideSlice { source: local, target: remote, length }
    }

    /// As a flow wants them.
    pub(crate) fn ranges(&self) -> Ranges<'_> {
        match *self {
            Self::List(ref list) => Ranges::List(list),
            Self::Strided { first, count, local_stride, remote_stride } => {
                Ranges::Strided { first, count, local_stride, remote_stride }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn piece(source: u64, target_offset: u64, length: u64) -> TransferPiece {
        TransferPiece { source, target_offset, length }
    }

    fn extent(source: (u64, u64), target: (u64, u64), length: u64) -> Extent {
        let span = |(first, length)| Span { first, length };
        Extent { source: span(source), target: span(target), length }
    }

    #[test]
    fn the_extent_has_all_pieces() {
        const END: u64 = u64::MAX;
        type Row<'a> = (&'a [TransferPiece], Result<((u64, u64), (u64, u64), u64), NoExtent>);
        let table: [Row<'_>; 8] = [
            (&[], Err(NoExtent::Empty)),
            (&[piece(1, 1, 0)], Err(NoExtent::Empty)),
            (&[piece(1, 2, 3)], Ok(((1, 3), (2, 3), 3))),
            (&[piece(100, 20, 10), piece(50, 70, 5)], Ok(((50, 60), (20, 55), 15))),
            // One within another.
            (&[piece(100, 20, 10), piece(102, 22, 1)], Ok(((100, 10), (20, 10), 11))),
            (&[piece(END, 1, 1)], Err(NoExtent::Overflow)),
            (&[piece(1, END, 1)], Err(NoExtent::Overflow)),
            (&[piece(0, 0, END), piece(0, 0, 1)], Err(NoExtent::Overflow)),
        ];
        for (list, expected) in table {
            let expected = expected.map(|(source, target, length)| extent(source, target, length));
            assert_eq!(Pieces::List(list).extent(), expected, "{list:?}");
        }
    }

    #[test]
    fn a_span_holds_what_is_in_it() {
        let span = |first, length| Span { first, length };
        let outer = span(100, 50);
        for (inner, holds) in [
            (span(100, 50), true),
            (span(149, 1), true),
            (span(99, 1), false),
            (span(149, 2), false),
            (span(151, 0), false),
            (span(120, u64::MAX), false),
            (span(u64::MAX, u64::MAX), false),
        ] {
            assert_eq!(outer.holds(inner), holds, "{inner:?}");
        }
    }

    #[test]
    fn strides_are_lists() {
        for (count, source_stride, target_stride) in [(1, 7, 7), (3, 10, 100), (4, 0, 5), (2, 5, 0)]
        {
            let first = piece(1000, 2000, 5);
            let strided = Pieces::Strided { first, count, source_stride, target_stride };
            let list: Vec<_> = (0..u64::from(count))
                .map(|i| piece(1000 + i * source_stride, 2000 + i * target_stride, 5))
                .collect();
            assert_eq!(strided.extent(), Pieces::List(&list).extent());
            let length = strided.extent().map(|extent| extent.length);
            assert_eq!((Ok(strided.length()), Ok(Pieces::List(&list).length())), (length, length));
            let (a, b) = (strided.shape(), Pieces::List(&list).shape());
            assert_eq!(a.count(), b.count());
            (0..a.count()).for_each(|index| assert_eq!(a.piece(index), b.piece(index)));
        }
        let strided = |count, source_stride, length| {
            let first = piece(1, 1, length);
            Pieces::Strided { first, count, source_stride, target_stride: 0 }.extent()
        };
        assert_eq!(strided(0, 1, 1), Err(NoExtent::Empty));
        assert_eq!(strided(2, 1, 0), Err(NoExtent::Empty));
        assert_eq!(strided(2, u64::MAX, 1), Err(NoExtent::Overflow));
        assert_eq!(strided(3, u64::MAX / 2, 1), Err(NoExtent::Overflow));
        assert_eq!(strided(u32::MAX, 0, 1 << 40), Err(NoExtent::Overflow));
    }
}
