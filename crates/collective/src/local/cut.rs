//! How a vector is cut into chunks, and a chunk into a slice for each rank.

use std::ops::Range;

/// Slices begin at cache lines, and so at elements.
const LINE: usize = 64;

/// A vector of which chunks of one length are done, one after the other.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Chunks {
    total: usize,
    chunk: usize,
}

impl Chunks {
    /// Of so many bytes, in chunks of no more than `most`, and of about one length.
    pub(super) const fn new(total: usize, most: usize) -> Self {
        let count = if total == 0 { 1 } else { total.div_ceil(most) };
        let chunk = total.div_ceil(count).next_multiple_of(LINE);
        Self { total, chunk: if chunk < most { chunk } else { most } }
    }

    pub(super) const fn count(self) -> u64 {
        if self.total == 0 { 0 } else { self.total.div_ceil(self.chunk) as u64 }
    }

    /// The bytes of a chunk.
    pub(super) fn range(self, chunk: u64) -> Range<usize> {
        let start = self.total.min((chunk as usize).saturating_mul(self.chunk));
        start..self.total.min(start + self.chunk)
    }
}

/// The part of a chunk of so many bytes that a rank reduces, from the chunk's start.
pub(super) fn slice(length: usize, world: u32, rank: u32) -> Range<usize> {
    let slice = length.div_ceil(world as usize).next_multiple_of(LINE);
    let at = |rank: u32| length.min(slice * rank as usize);
    at(rank)..at(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_all_of_the_vector_and_fit() {
        for most in [64, 128, 4096] {
            for total in [0, 1, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 100_003] {
                let chunks = Chunks::new(total, most);
                let mut end = 0;
                for chunk in 0..chunks.count() {
                    let range = chunks.range(chunk);
                    assert!(range.start == end && !range.is_empty() && range.len() <= most);
                    assert!(range.start.is_multiple_of(LINE));
                    end = range.end;
                }
                assert_eq!(end, total, "{most}");
                assert!(chunks.range(chunks.count()).is_empty());
            }
        }
        assert_eq!(Chunks::new(300, 256).range(0), 0..192, "about one length");
    }

    #[test]
    fn slices_are_all_of_the_chunk() {
        for world in [1, 2, 3, 17, 256] {
            for length in [0, 1, 64, 65, 8192, 131_072] {
                let slices: Vec<_> = (0..world).map(|rank| slice(length, world, rank)).collect();
                assert_eq!((slices[0].start, slices[world as usize - 1].end), (0, length));
                assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
                let begins = |slice: &&Range<usize>| slice.start < length;
                assert!(slices.iter().filter(begins).all(|it| it.start.is_multiple_of(LINE)));
            }
        }
    }
}
