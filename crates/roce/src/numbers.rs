//! Queue pair numbers: which of them an endpoint has, and how long one rests before it comes again.

use std::collections::VecDeque;

use millstream_wire::Qpn;

/// Bits of a queue pair number, at its top, that say in which slot it is.
const SLOT_BITS: u32 = 5;

/// Slots that the queue pair numbers of an address are divided into. Endpoints that share an address
/// have one each, so that whoever hands packets on needs to look at the destination's number only.
pub const SLOTS: usize = 1 << SLOT_BITS;

/// The low bits of a number are the index of its queue pair. Those above count, from a random number
/// on, how often the index was used: so that packets for a queue pair of the past, or from someone who
/// guesses, do not meet a new one.
pub(crate) const INDEX_BITS: u32 = 12;

/// So many indexes rest before the one that has rested longest is used again.
const RESTING: usize = 128;

/// How far the counts of two successive owners of a slot are apart when they begin. Has no factor in
/// common with how many there are (127 or 128), and is near the golden section of it: so those of some
/// owners in a row are far from one another.
const GENERATION_STRIDE: u64 = 79;

/// The queue pair numbers that an endpoint may use. Never 0 and 1, which are the management queue pairs,
/// nor 0xffffff, which stands for a multicast group (IBTA 9.2.3).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum QueuePairNumbers {
    /// All of them: it has its address for itself.
    #[default]
    All,
    /// Those of one slot.
    Slot {
        /// Below [`SLOTS`].
        slot: u8,
        /// How many endpoints have had the slot before. Numbers begin elsewhere for each.
        generation: u64,
        /// The same for all owners of the slot, and nobody else's knowledge: seeds the numbers.
        key: u64,
    },
}

/// In which slot the queue pair is that a datagram is for, by its BTH. Of one that is too short to say,
/// 0: it is as good as any.
pub fn slot_of(datagram: &[u8]) -> usize {
    /// The first byte of the destination's number (IBTA 9.2).
    const DESTINATION: usize = 5;
    datagram.get(DESTINATION).map_or(0, |byte| usize::from(byte >> (8 - SLOT_BITS)))
}

impl QueuePairNumbers {
    /// The upper part of the first number, and how many upper parts there are.
    const fn upper_parts(self) -> (u32, u32) {
        const ALL: u32 = 1 << (24 - INDEX_BITS);
        const EACH: u32 = ALL / SLOTS as u32;
        let (first, end) = match self {
            Self::All => (0, ALL),
            Self::Slot { slot, .. } => {
                let slot = slot as u32 % SLOTS as u32;
                (slot * EACH, (slot + 1) * EACH)
            }
        };
        // The whole of the first and of the last, so that every index has as many numbers.
        let first = if first == 0 { 1 } else { first };
        let end = if end == ALL { ALL - 1 } else { end };
        (first, end - first)
    }
}

/// Gives indexes, and a number for each.
#[derive(Debug)]
pub(crate) struct Numbers {
    first: u32,
    count: u32,
    /// How far the counts of this owner begin from where those of the first one did.
    start: u32,
    /// Where those began, seeded: elsewhere for each index.
    key: u64,
    /// How often each index was used.
    uses: Vec<u32>,
    /// Indexes that nobody uses; the first has rested longest.
    resting: VecDeque<u32>,
}

impl Numbers {
    /// With a seed for those that have no key.
    pub(crate) const fn new(numbers: QueuePairNumbers, seed: u64) -> Self {
        let (first, count) = numbers.upper_parts();
        let (start, key) = match numbers {
            QueuePairNumbers::All => (0, seed),
            QueuePairNumbers::Slot { generation, key, .. } => {
                (generation.wrapping_mul(GENERATION_STRIDE) % count as u64, key)
            }
        };
        let start = start as u32;
        Self { first, count, start, key, uses: Vec::new(), resting: VecDeque::new() }
    }

    /// How many are in use.
    pub(crate) fn in_use(&self) -> usize {
        self.uses.len() - self.resting.len()
    }

    /// A number that has not been used for as long as possible, and its index, which is at most one more
    /// than the highest so far. `None` when all are in use.
    pub(crate) fn take(&mut self) -> Option<(usize, Qpn)> {
        let all = self.uses.len() == 1 << INDEX_BITS;
        let index = if self.resting.len() > RESTING || all {
            self.resting.pop_front()?
        } else {
            self.uses.push(0);
            self.uses.len() as u32 - 1
        };
        let uses = &mut self.uses[index as usize];
        let begin = split_mix(split_mix(self.key).wrapping_add(index.into())) as u32 % self.count;
        let upper = self.first + (begin + self.start + *uses) % self.count;
        *uses = (*uses + 1) % self.count;
        Some((index as usize, Qpn::new(upper << INDEX_BITS | index)))
    }

    /// An index is no longer in use.
    pub(crate) fn give_back(&mut self, index: usize) {
        self.resting.push_back(index as u32);
    }
}

/// The mixing of SplitMix64: numbers that differ, not numbers that resist an attacker.
const fn split_mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn slot(slot: u8, generation: u64) -> Numbers {
        Numbers::new(QueuePairNumbers::Slot { slot, generation, key: 7 }, 0)
    }

    fn slot_of_number(qpn: Qpn) -> usize {
        let [a, b, c] = qpn.to_bytes();
        slot_of(&[0, 0, 0, 0, 0, a, b, c])
    }

    #[test]
    fn each_slot_has_its_own_numbers_and_none_that_is_reserved() {
        for number in 0..SLOTS as u8 {
            for generation in 0..200 {
                let mut numbers = slot(number, generation);
                for _ in 0..1 << INDEX_BITS {
                    let (index, qpn) = numbers.take().unwrap();
                    assert_eq!(slot_of_number(qpn), usize::from(number));
                    assert_eq!(qpn.value() as usize & ((1 << INDEX_BITS) - 1), index);
                    assert!(qpn.value() > 1 && qpn.value() < 0xff_ffff, "{qpn:?}");
                }
                assert_eq!(numbers.take(), None);
            }
        }
    }

    #[test]
    fn a_number_comes_again_after_all_others_of_its_index_and_those_that_rest() {
        let mut numbers = slot(3, 0);
        let mut seen = HashSet::new();
        loop {
            let (index, qpn) = numbers.take().unwrap();
            numbers.give_back(index);
            if !seen.insert(qpn) {
                break;
            }
        }
        assert_eq!(seen.len(), 128 * (RESTING + 1));
    }

    #[test]
    fn successive_owners_of_a_slot_have_other_numbers() {
        // As a process has that makes a thousand queue pairs, one after the other.
        let numbers = |generation| {
            let mut numbers = slot(0, generation);
            let take = || {
                let (index, qpn) = numbers.take().unwrap();
                numbers.give_back(index);
                qpn
            };
            std::iter::repeat_with(take).take(1000).collect::<HashSet<_>>()
        };
        for generation in 0..1000 {
            let own = numbers(generation);
            for later in 1..8 {
                assert!(own.is_disjoint(&numbers(generation + later)), "{generation} + {later}");
            }
        }
    }

    #[test]
    fn short_datagrams_are_in_the_first_slot() {
        assert_eq!(slot_of(&[]), 0);
        assert_eq!(slot_of(&[0xff; 5]), 0);
        assert_eq!(slot_of(&[0xff; 6]), SLOTS - 1);
    }
}
