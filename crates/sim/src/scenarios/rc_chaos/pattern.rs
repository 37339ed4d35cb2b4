//! Bytes that name their origin: what arrives anywhere tells which operation it is of, and which
//! byte of it.

/// The bytes of one operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Pattern(u64);

impl Pattern {
    /// The bytes of an operation of a stream; `version` tells later contents of the same place.
    pub(super) const fn new(stream: usize, operation: usize, version: u32) -> Self {
        let name = (stream as u64) << 52 | (operation as u64) << 32 | version as u64;
        // One step of SplitMix64, so that names that differ in one bit differ everywhere.
        let z = name.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(z ^ (z >> 31))
    }

    const fn word(self, index: u64) -> [u8; 8] {
        let z = self.0.wrapping_add(index.wrapping_mul(0xd6e8_feb8_6659_fd93));
        (z ^ (z >> 32)).to_le_bytes()
    }

    /// Writes the bytes from `offset` on.
    pub(super) fn fill(self, offset: u64, bytes: &mut [u8]) {
        let mut index = offset / 8;
        let before = (offset % 8) as usize;
        let (head, rest) = bytes.split_at_mut(bytes.len().min((8 - before) % 8));
        if !head.is_empty() {
            head.copy_from_slice(&self.word(index)[before..before + head.len()]);
            index += 1;
        }
        let (words, tail) = rest.as_chunks_mut::<8>();
        for word in words {
            *word = self.word(index);
            index += 1;
        }
        let length = tail.len();
        tail.copy_from_slice(&self.word(index)[..length]);
    }

    /// The index of the first byte that is not as from `offset` on.
    pub(super) fn first_difference(self, offset: u64, bytes: &[u8]) -> Option<usize> {
        let mut index = offset / 8;
        let before = (offset % 8) as usize;
        let (head, rest) = bytes.split_at(bytes.len().min((8 - before) % 8));
        let (words, tail) = rest.as_chunks::<8>();
        let mut right = true;
        if !head.is_empty() {
            right &= head == &self.word(index)[before..before + head.len()];
            index += 1;
        }
        for word in words {
            right &= *word == self.word(index);
            index += 1;
        }
        right &= tail == &self.word(index)[..tail.len()];
        if right {
            return None;
        }
        let byte = |at: u64| self.word(at / 8)[(at % 8) as usize];
        (0..bytes.len()).find(|&at| bytes[at] != byte(offset + at as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_is_the_same_bytes() {
        let pattern = Pattern::new(1, 2, 3);
        let mut whole = [0; 100];
        pattern.fill(0, &mut whole);
        for from in 0..40 {
            for to in from..100 {
                let mut part = vec![0; to - from];
                pattern.fill(from as u64, &mut part);
                assert_eq!(part, whole[from..to]);
                assert_eq!(pattern.first_difference(from as u64, &part), None);
                if let Some(last) = part.last_mut() {
                    *last ^= 1;
                    let found = pattern.first_difference(from as u64, &part);
                    assert_eq!(found, Some(part.len() - 1), "{from}..{to}");
                }
            }
        }
    }

    #[test]
    fn other_places_have_other_bytes() {
        let mut bytes = [0; 64];
        Pattern::new(1, 2, 0).fill(0, &mut bytes);
        for (pattern, offset) in [
            (Pattern::new(1, 2, 0), 1),
            (Pattern::new(1, 2, 0), 8),
            (Pattern::new(1, 3, 0), 0),
            (Pattern::new(2, 2, 0), 0),
            (Pattern::new(1, 2, 1), 0),
        ] {
            assert!(pattern.first_difference(offset, &bytes).is_some_and(|at| at < 8));
        }
    }
}
