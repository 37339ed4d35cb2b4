//! CRC-32 (that of zlib and Ethernet), in whichever of two ways is the faster on this machine.
//!
//! Processors multiply without carries, and `crc32fast` uses that. Where they do not, or where an
//! emulator does it bit by bit, [`Way::Shifts`] is several times faster.

mod sparse;

use core::sync::atomic::{AtomicBool, Ordering};

/// Both ways give the same results, so whoever uses one while another is chosen need not know.
static SPARSE: AtomicBool = AtomicBool::new(false);

/// A way to compute it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// By carry-less multiplication, or tables where the processor has none.
    Multiplication,
    /// By shifts and exclusive ors of words.
    Shifts,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Multiplication, Self::Shifts];

    /// Computes it this way from now on, everywhere in this process. What comes out is the same.
    pub fn choose(self) {
        SPARSE.store(self == Self::Shifts, Ordering::Relaxed);
    }

    /// The way that is used now: [`Way::Multiplication`] unless another was chosen.
    pub fn chosen() -> Self {
        if SPARSE.load(Ordering::Relaxed) { Self::Shifts } else { Self::Multiplication }
    }

    /// The CRC-32 of what had the CRC-32 `before`, followed by `bytes`.
    pub fn update(self, before: u32, bytes: &[u8]) -> u32 {
        match self {
            Self::Multiplication => library(before, bytes),
            Self::Shifts => sparse::update(before, bytes),
        }
    }
}

/// The CRC-32 of what had the CRC-32 `before`, followed by `bytes`. That of nothing is 0.
pub(crate) fn update(before: u32, bytes: &[u8]) -> u32 {
    Way::chosen().update(before, bytes)
}

fn library(before: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(before);
    hasher.update(bytes);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_gives_the_same() {
        let bytes: Vec<u8> =
            (0..5000_u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 13) as u8).collect();
        for start in [0, 1, 3] {
            for length in (0..700).chain([1024, 4095, 4096, 4110, 4997]) {
                let bytes = &bytes[start..start + length];
                let before = 0x1234_5678 ^ length as u32;
                let [first, second] = Way::ALL.map(|way| way.update(before, bytes));
                assert_eq!(first, second, "{length} bytes from {start}");
            }
        }
        for way in Way::ALL {
            // The check value that catalogues of CRCs have.
            assert_eq!(way.update(0, b"123456789"), 0xcbf4_3926);
            assert_eq!(way.update(7, &[]), 7);
        }
    }

    #[test]
    fn the_way_that_is_chosen_is_used() {
        assert_eq!(Way::chosen(), Way::Multiplication);
        Way::Shifts.choose();
        assert_eq!(Way::chosen(), Way::Shifts);
        assert_eq!(update(0, &[0xff; 100]), library(0, &[0xff; 100]));
        Way::Multiplication.choose();
    }
}
