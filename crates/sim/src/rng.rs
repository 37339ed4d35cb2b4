//! The only source of randomness: small, seeded, and the same on every machine.

/// A seeded pseudo-random number generator: xoshiro256++ (Blackman and Vigna, 2019), its state
/// filled by SplitMix64 as its authors advise. Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// The generator of this seed.
    pub const fn new(seed: u64) -> Self {
        let mut split = seed;
        let mut state = [0; 4];
        let mut i = 0;
        while i < state.len() {
            state[i] = split_mix(&mut split);
            i += 1;
        }
        Self { state }
    }

    /// An independent generator for a part of the simulation, so that what one part draws does not
    /// change what another sees.
    pub const fn fork(seed: u64, part: u64) -> Self {
        let mut mixed = part;
        Self::new(seed ^ split_mix(&mut mixed))
    }

    /// 64 random bits.
    pub const fn bits(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let result = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (shifted, c, d) = (b << 17, c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ shifted, d.rotate_left(45)];
        result
    }

    /// A number from 0 up to, but not including, `bound`; 0 when `bound` is 0.
    ///
    /// The high half of a 128-bit product: for bounds far below 2^64, as here, its bias cannot be
    /// seen.
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.bits() as u128 * bound as u128) >> 64) as u64
    }

    /// A number from `first` to `last`, both included.
    ///
    /// # Panics
    /// When `last` is less than `first`.
    pub const fn between(&mut self, first: u64, last: u64) -> u64 {
        assert!(first <= last);
        match (last - first).checked_add(1) {
            Some(count) => first + self.below(count),
            None => self.bits(),
        }
    }

    /// Fills `bytes` with random ones.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.bits().to_le_bytes()[..chunk.len()]);
        }
    }
}

/// One step of SplitMix64 (Steele, Lea and Flood, 2014).
const fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_sequences_hold() {
        // SplitMix64 from seed 1234567, as in the reference implementation's test.
        let mut state = 1_234_567;
        let first: [u64; 3] = core::array::from_fn(|_| split_mix(&mut state));
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
        // xoshiro256++ from the state 1, 2, 3, 4.
        let mut rng = Rng { state: [1, 2, 3, 4] };
        let first: [u64; 5] = core::array::from_fn(|_| rng.bits());
        assert_eq!(
            first,
            [
                41_943_041,
                58_720_359,
                3_588_806_011_781_223,
                3_591_011_842_654_386,
                9_228_616_714_210_784_205
            ]
        );
    }

    #[test]
    fn bounds_are_kept_and_reached() {
        let mut rng = Rng::new(1);
        let mut seen = [0_u32; 10];
        for _ in 0..10_000 {
            seen[rng.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| (900..1100).contains(&count)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
        assert_eq!(rng.between(7, 7), 7);
        assert!((0..1000).all(|_| (3..=5).contains(&rng.between(3, 5))));
        rng.between(0, u64::MAX);
    }

    #[test]
    fn seeds_and_parts_differ() {
        let first = |mut rng: Rng| rng.bits();
        assert_ne!(first(Rng::new(1)), first(Rng::new(2)));
        assert_ne!(first(Rng::fork(1, 0)), first(Rng::fork(1, 1)));
        assert_eq!(first(Rng::fork(1, 3)), first(Rng::fork(1, 3)));
    }
}
