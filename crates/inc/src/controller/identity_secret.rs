//! What a controller makes the numbers from that nobody should foresee.

use core::fmt;

use sha2::{Digest, Sha256};

/// 256 bits that nobody else knows. What is drawn from them tells nothing of them, nor of what else is drawn: SHA-256 (FIPS
/// 180-4) of a text that says what for, the bits and a count. It is not shown.
#[derive(Clone, Copy)]
pub struct IdentitySecret([u8; 32]);

impl IdentitySecret {
    /// These bits, which the operating system has drawn.
    pub const fn new(bits: [u8; 32]) -> Self {
        Self(bits)
    }

    /// 128 bits.
    pub(super) fn draw(&self, what_for: &str, count: u64) -> [u64; 2] {
        let digest = Sha256::new()
            .chain_update(what_for)
            .chain_update(self.0)
            .chain_update(count.to_be_bytes())
            .finalize();
        let half = |first| {
            let bytes = digest[first..first + 8].iter();
            bytes.fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        [half(0), half(8)]
    }
}

/// For simulations and tests: so few bits can be guessed.
impl From<u64> for IdentitySecret {
    fn from(seed: u64) -> Self {
        let mut bits = [0; 32];
        bits[..8].copy_from_slice(&seed.to_be_bytes());
        Self(bits)
    }
}

impl fmt::Debug for IdentitySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdentitySecret(..)")
    }
}
