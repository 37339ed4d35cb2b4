//! Probabilities as integers, so that a comparison is the same on every machine.

use core::fmt;

use crate::Rng;

/// How likely something is, to 53 bits.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Probability(u64);

impl Probability {
    /// It never happens.
    pub const NEVER: Self = Self(0);
    /// It always happens.
    pub const ALWAYS: Self = Self(Self::ONE);
    const ONE: u64 = 1 << 53;

    /// The probability of this fraction; `None` unless it is from 0 to 1.
    pub fn new(fraction: f64) -> Option<Self> {
        (0.0..=1.0).contains(&fraction).then_some(Self((fraction * Self::ONE as f64) as u64))
    }

    /// So many in a thousand; all of them from 1000 on.
    pub const fn per_mille(count: u32) -> Self {
        let count = if count < 1000 { count as u64 } else { 1000 };
        Self((count << 53) / 1000)
    }

    /// The fraction: 0 to 1.
    pub fn fraction(self) -> f64 {
        self.0 as f64 / Self::ONE as f64
    }

    /// Whether it happens this time. Draws exactly once from `rng`, whatever the probability, so
    /// that turning one fault on leaves the others where they were.
    pub const fn happens(self, rng: &mut Rng) -> bool {
        rng.bits() >> 11 < self.0
    }
}

impl fmt::Display for Probability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", (self.fraction() * 100_000.0).round() / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_are_certain() {
        let mut rng = Rng::new(1);
        assert!((0..1000).all(|_| !Probability::NEVER.happens(&mut rng)));
        assert!((0..1000).all(|_| Probability::ALWAYS.happens(&mut rng)));
        assert_eq!(Probability::new(1.0), Some(Probability::ALWAYS));
        assert_eq!(Probability::per_mille(2000), Probability::ALWAYS);
        for outside in [-0.001, 1.001, f64::NAN, f64::INFINITY] {
            assert_eq!(Probability::new(outside), None);
        }
    }

    #[test]
    fn a_tenth_is_a_tenth() {
        let mut rng = Rng::new(2);
        let tenth = Probability::per_mille(100);
        let count = (0..100_000).filter(|_| tenth.happens(&mut rng)).count();
        assert!((9_500..10_500).contains(&count), "{count}");
        assert_eq!(tenth.to_string(), "10 %");
        assert_eq!(Probability::per_mille(1).to_string(), "0.1 %");
    }
}
