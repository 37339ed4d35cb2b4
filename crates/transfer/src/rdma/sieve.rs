//! Which connection makes room for another: SIEVE (Zhang et al., NSDI 2024).
//!
//! Those that were idle go first. A hand walks from the oldest to the youngest and round again. Who was
//! used since the hand was there is passed and has to be used again; the first who was not goes. So a flood
//! of new ones takes the places of its own, and not of those that work.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The order of connections, by their rising numbers, and whether each was used lately.
#[derive(Debug, Default)]
pub(super) struct Sieve {
    used: BTreeMap<u64, Arc<AtomicBool>>,
    /// Where to look next.
    hand: u64,
}

impl Sieve {
    /// A new one, whose number is higher than all before. Returns its mark, which who uses it sets.
    pub(super) fn insert(&mut self, number: u64) -> Arc<AtomicBool> {
        let mark = Arc::<AtomicBool>::default();
        self.used.insert(number, Arc::clone(&mark));
        mark
    }

    pub(super) fn remove(&mut self, number: u64) {
        self.used.remove(&number);
        self.turn_round();
    }

    /// Notes whether it was used since the last look.
    pub(super) fn note(&mut self, number: u64, used: bool) {
        if let Some(known) = self.used.get(&number) {
            known.store(used, Ordering::Relaxed);
        }
    }

    /// The next one that was not used. Until it is removed it has its place, and the hand goes on behind it.
    pub(super) fn next_unused(&mut self) -> Option<u64> {
        // Once round, all have lost their mark, unless they were used meanwhile: then the next one goes.
        for looked in 0..=self.used.len() {
            let (&number, mark) = self.used.range(self.hand..).next()?;
            self.hand = number + 1;
            let used = mark.swap(false, Ordering::Relaxed);
            self.turn_round();
            if !used || looked == self.used.len() {
                return Some(number);
            }
        }
        None
    }

    /// Behind the youngest it begins anew: or else the next one to come would go next.
    fn turn_round(&mut self) {
        if self.used.range(self.hand..).next().is_none() {
            self.hand = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Sieve {
        fn evict(&mut self) -> Option<u64> {
            self.next_unused().inspect(|&number| self.remove(number))
        }
    }

    fn of(count: u64) -> Sieve {
        let mut sieve = Sieve::default();
        (0..count).for_each(|number| _ = sieve.insert(number));
        sieve
    }

    #[test]
    fn who_was_idle_goes_first_and_the_oldest_of_them() {
        let mut sieve = of(5);
        for number in [0, 1, 3] {
            sieve.note(number, true);
        }
        assert_eq!([sieve.evict(), sieve.evict()], [Some(2), Some(4)]);
        // Nobody was used since: the hand goes on from the oldest.
        assert_eq!([sieve.evict(), sieve.evict()], [Some(0), Some(1)]);
        assert_eq!([sieve.evict(), sieve.evict()], [Some(3), None]);
    }

    #[test]
    fn a_flood_of_new_ones_does_not_drive_out_those_that_are_used() {
        let mut sieve = of(8);
        for number in 8..1000 {
            for used in 0..7 {
                sieve.note(used, true);
            }
            let gone = sieve.evict().unwrap();
            assert!(gone >= 7, "{gone}");
            sieve.insert(number);
        }
    }

    #[test]
    fn behind_the_youngest_the_oldest_is_next() {
        let mut sieve = of(3);
        sieve.note(0, true);
        sieve.note(1, true);
        assert_eq!(sieve.evict(), Some(2));
        sieve.insert(3);
        assert_eq!(sieve.evict(), Some(0));
    }

    #[test]
    fn all_used_or_none_one_goes() {
        let mut sieve = of(3);
        (0..3).for_each(|number| sieve.note(number, true));
        assert_eq!(sieve.evict(), Some(0));
        sieve.note(1, true);
        sieve.note(1, false);
        sieve.remove(2);
        sieve.note(2, true);
        assert_eq!([sieve.evict(), sieve.evict()], [Some(1), None]);
    }

    /// As one that is not idle after all.
    #[test]
    fn who_is_not_removed_is_looked_at_again_after_the_others() {
        let mut sieve = of(3);
        sieve.note(1, true);
        let looks = [(); 6].map(|()| sieve.next_unused().unwrap());
        assert_eq!(looks, [0, 2, 0, 1, 2, 0]);
    }
}
