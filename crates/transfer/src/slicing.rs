//! How a request is cut into slices.

/// The rule: slices of one length, and a last one that takes a short rest along.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Slicing {
    slice_length: u64,
    /// A rest of up to so many bytes is no slice of its own.
    fragment_limit: u64,
}

/// A part of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl Slicing {
    pub(crate) const MIN_SLICE_LENGTH: usize = 1 << 10;
    pub(crate) const MAX_SLICE_LENGTH: usize = 64 << 20;

    /// Slices of `slice_length` bytes, which must be within the bounds above, and rests of up to one
    /// `fragment_ratio`-th of that merged.
    pub(crate) const fn new(slice_length: usize, fragment_ratio: usize) -> Self {
        let slice_length = slice_length as u64;
        Self { slice_length, fragment_limit: slice_length / fragment_ratio as u64 }
    }

    /// How many slices a request of `length` bytes has: at least one.
    pub(crate) const fn count(&self, length: u64) -> u64 {
        let single = self.slice_length + self.fragment_limit;
        if length <= single { 1 } else { 1 + (length - single).div_ceil(self.slice_length) }
    }

    /// The slice of this index, below `count(length)`.
    pub(crate) const fn part(&self, length: u64, index: u64) -> Part {
        let offset = index * self.slice_length;
        let rest = length - offset;
        let last = rest <= self.slice_length + self.fragment_limit;
        // Both fit: twice MAX_SLICE_LENGTH is far below 2^32.
        Part { offset, length: if last { rest } else { self.slice_length } as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(length: u64) -> Vec<(u64, u32)> {
        let slicing = Slicing::new(65_536, 4);
        (0..slicing.count(length))
            .map(|index| slicing.part(length, index))
            .map(|part| (part.offset, part.length))
            .collect()
    }

    #[test]
    fn boundaries() {
        assert_eq!(parts(1), [(0, 1)]);
        assert_eq!(parts(65_536), [(0, 65_536)]);
        assert_eq!(parts(65_537), [(0, 65_537)]);
        assert_eq!(parts(81_920), [(0, 81_920)], "a rest of a quarter is merged");
        assert_eq!(parts(81_921), [(0, 65_536), (65_536, 16_385)]);
        assert_eq!(parts(131_072), [(0, 65_536), (65_536, 65_536)]);
        assert_eq!(parts(147_456), [(0, 65_536), (65_536, 81_920)]);
        assert_eq!(parts(147_457), [(0, 65_536), (65_536, 65_536), (131_072, 16_385)]);
    }

    #[test]
    fn slices_cover_a_request_exactly() {
        let slicing = Slicing::new(1024, 4);
        for length in (1..6000).chain([1 << 20, (1 << 20) + 255, (1 << 20) + 257]) {
            let mut end = 0;
            for index in 0..slicing.count(length) {
                let part = slicing.part(length, index);
                assert_eq!(part.offset, end, "{length}");
                assert!(part.length > 0 && part.length <= 1280, "{length}");
                end += u64::from(part.length);
            }
            assert_eq!(end, length);
        }
    }

    #[test]
    fn the_ratio_says_which_rests_are_merged() {
        for (ratio, merged) in [(1, 1024), (2, 512), (1024, 1), (4096, 0)] {
            let slicing = Slicing::new(1024, ratio);
            assert_eq!(slicing.count(1024 + merged), 1, "{ratio}");
            assert_eq!(slicing.count(1024 + merged + 1), 2, "{ratio}");
        }
    }

    #[test]
    fn the_longest_request_has_a_count() {
        let slicing = Slicing::new(Slicing::MIN_SLICE_LENGTH, 4);
        let count = slicing.count(u64::MAX);
        let last = slicing.part(u64::MAX, count - 1);
        assert_eq!(last.offset + u64::from(last.length), u64::MAX);
    }
}
