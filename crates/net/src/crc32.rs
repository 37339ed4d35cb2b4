//! Which way of computing CRCs is the faster on this machine.

use std::hint::black_box;
use std::sync::Once;
use std::time::{Duration, Instant};

use millstream_wire::crc32::Way;

/// As many bytes as the largest packet carries.
const LENGTH: usize = 4096;
/// The shortest of so many counts: the others were interrupted, or warmed the caches.
const TIMES: usize = 8;

/// Chooses it for this process, when called for the first time. Takes some ten microseconds.
pub(crate) fn choose() {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        let bytes = [0x5a; LENGTH];
        let way = choice(|way| {
            let start = Instant::now();
            black_box(way.update(0, black_box(&bytes)));
            start.elapsed()
        });
        tracing::debug!(?way, "CRCs");
        way.choose();
    });
}

/// Carry-less multiplication, unless it takes half as long again: a processor that has it computes
/// the CRC in a tenth of the other's time, and an emulator that does it bit by bit in five times.
fn choice(mut measure: impl FnMut(Way) -> Duration) -> Way {
    let mut best = |way| (0..TIMES).map(|_| measure(way)).min().unwrap_or_default();
    let (multiplication, shifts) = (best(Way::Multiplication), best(Way::Shifts));
    if multiplication > shifts * 3 / 2 { Way::Shifts } else { Way::Multiplication }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is chosen when the best times are these, and every other time is interrupted.
    fn chosen(multiplication: u64, shifts: u64) -> Way {
        let mut calls = 0;
        choice(|way| {
            calls += 1;
            let best = if way == Way::Shifts { shifts } else { multiplication };
            Duration::from_nanos(if calls % 2 == 0 { best } else { 1_000_000 })
        })
    }

    #[test]
    fn the_faster_way_by_far_is_chosen() {
        // A processor with the instruction, an emulated one, and one where it hardly matters.
        assert_eq!(chosen(80, 510), Way::Multiplication);
        assert_eq!(chosen(10_700, 1_890), Way::Shifts);
        assert_eq!(chosen(1_400, 1_000), Way::Multiplication);
    }
}
