//! Deadlines of very many tasks: a hierarchical timing wheel (Varghese and Lauck, 1987), so that
//! setting and clearing one takes the same short time however many there are.
//!
//! Time is counted in ticks of about a millisecond. A deadline is in the lowest level in whose
//! rotation it lies, and moves down when time comes near it. None is early; each is late by less
//! than a tick.

use crate::Instant;
use crate::chain::{Chain, List};

/// Nanoseconds of a tick, as a power of two.
const TICK_SHIFT: u32 = 20;
/// Slots of a level, as a power of two.
const LEVEL_SHIFT: u32 = 6;
const SLOTS: usize = 1 << LEVEL_SHIFT;
/// Enough for all times of 64 bits.
const LEVELS: usize = (64 - TICK_SHIFT).div_ceil(LEVEL_SHIFT) as usize;

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    tick: u64,
    /// Level and slot, as one number, while it is set.
    slot: Option<u16>,
}

#[derive(Debug)]
pub(crate) struct Wheel {
    now: u64,
    nodes: Vec<Node>,
    chain: Chain,
    slots: Box<[List]>,
    /// For each level a bit for each slot that is not empty.
    occupied: [u64; LEVELS],
    /// Whose time has come.
    expired: List,
}

/// Which slot `expired` is.
const EXPIRED: u16 = (LEVELS * SLOTS) as u16;

impl Wheel {
    pub(crate) fn new() -> Self {
        Self {
            now: 0,
            nodes: Vec::new(),
            chain: Chain::default(),
            slots: vec![List::EMPTY; LEVELS * SLOTS].into(),
            occupied: [0; LEVELS],
            expired: List::EMPTY,
        }
    }

    /// Sets the deadline of an entry that has none.
    pub(crate) fn set(&mut self, place: u32, deadline: Instant) {
        let index = place as usize;
        if index >= self.nodes.len() {
            self.nodes.resize(index + 1, Node::default());
        }
        self.nodes[index].tick = deadline.nanos().div_ceil(1 << TICK_SHIFT);
        self.insert(place);
    }

    /// Forgets the deadline of an entry, if it has one.
    pub(crate) fn clear(&mut self, place: u32) {
        let Some(node) = self.nodes.get_mut(place as usize) else { return };
        match node.slot.take() {
            Some(EXPIRED) => self.chain.remove(&mut self.expired, place),
            Some(slot) => {
                let list = &mut self.slots[slot as usize];
                self.chain.remove(list, place);
                if list.is_empty() {
                    let (level, bit) = (slot as usize / SLOTS, slot as usize % SLOTS);
                    self.occupied[level] &= !(1 << bit);
                }
            }
            None => {}
        }
    }

    /// When [`Wheel::expire`] has something to do: the first deadline, or sooner.
    pub(crate) fn next(&self) -> Option<Instant> {
        let tick = match self.expired.is_empty() {
            false => self.now,
            true => self.next_slot()?.1,
        };
        Some(Instant::from_nanos(tick.saturating_mul(1 << TICK_SHIFT)))
    }

    /// The next entry whose deadline has passed. It has none then.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<u32> {
        let now = now.nanos() >> TICK_SHIFT;
        while self.expired.is_empty() {
            let Some((slot, tick)) = self.next_slot().filter(|&(_, tick)| tick <= now) else {
                self.now = self.now.max(now);
                return None;
            };
            self.now = tick;
            self.occupied[slot / SLOTS] &= !(1 << (slot % SLOTS));
            let mut list = core::mem::replace(&mut self.slots[slot], List::EMPTY);
            while let Some(place) = self.chain.pop_front(&mut list) {
                self.insert(place);
            }
        }
        let place = self.chain.pop_front(&mut self.expired)?;
        self.nodes[place as usize].slot = None;
        Some(place)
    }

    fn insert(&mut self, place: u32) {
        let node = &mut self.nodes[place as usize];
        if node.tick <= self.now {
            node.slot = Some(EXPIRED);
            return self.chain.push_back(&mut self.expired, place);
        }
        // The highest group of bits in which it differs from now. Below that group now has passed
        // no slot of the level yet, so slots are in order of time.
        let level = (u64::BITS - 1 - (node.tick ^ self.now).leading_zeros()) / LEVEL_SHIFT;
        let slot = (node.tick >> (level * LEVEL_SHIFT)) as usize % SLOTS;
        let index = level as usize * SLOTS + slot;
        node.slot = Some(index as u16);
        self.occupied[level as usize] |= 1 << slot;
        self.chain.push_back(&mut self.slots[index], place);
    }

    /// The first slot that is not empty, and when it begins.
    fn next_slot(&self) -> Option<(usize, u64)> {
        let level = self.occupied.iter().position(|&slots| slots != 0)?;
        let slot = self.occupied[level].trailing_zeros();
        let shift = level as u32 * LEVEL_SHIFT;
        let rotation = self.now >> (shift + LEVEL_SHIFT) << (shift + LEVEL_SHIFT);
        Some((level * SLOTS + slot as usize, rotation | u64::from(slot) << shift))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: u64 = 1 << TICK_SHIFT;

    fn expired(wheel: &mut Wheel, nanos: u64) -> Vec<u32> {
        core::iter::from_fn(|| wheel.expire(Instant::from_nanos(nanos))).collect()
    }

    #[test]
    fn none_is_early_and_each_is_late_by_less_than_a_tick() {
        // Deadlines in all levels, set at several times.
        let mut wheel = Wheel::new();
        let mut state = 1_u64;
        let mut set: Vec<(u64, u32)> = Vec::new();
        let mut now = 0;
        for place in 0..2000_u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let delay = (state >> 20) >> (state % 40);
            set.push((now + delay, place));
            wheel.set(place, Instant::from_nanos(now + delay));
            if place % 100 == 99 {
                now += delay / 3;
                for place in expired(&mut wheel, now) {
                    let at = set.iter().position(|&(_, other)| other == place).unwrap();
                    assert!(set.swap_remove(at).0 <= now);
                }
                assert!(set.iter().all(|&(deadline, _)| deadline + TICK > now));
            }
        }
        while let Some(next) = wheel.next() {
            let first = set.iter().map(|&(deadline, _)| deadline).min().unwrap();
            assert!(next.nanos() < first + TICK, "{} {first}", next.nanos());
            now = now.max(next.nanos());
            for place in expired(&mut wheel, now) {
                let at = set.iter().position(|&(_, other)| other == place).unwrap();
                let (deadline, _) = set.swap_remove(at);
                assert!(deadline <= now && now < deadline + TICK);
            }
        }
        assert_eq!(set, []);
    }

    #[test]
    fn a_deadline_can_be_cleared_wherever_it_is() {
        for level in 0..LEVELS as u32 {
            for slot in 1..SLOTS as u64 {
                let tick = slot.checked_shl(level * LEVEL_SHIFT).unwrap_or(u64::MAX);
                if tick > u64::MAX >> TICK_SHIFT {
                    continue;
                }
                let mut wheel = Wheel::new();
                wheel.set(0, Instant::ZERO);
                wheel.set(1, Instant::from_nanos(tick << TICK_SHIFT));
                wheel.clear(1);
                assert_eq!(expired(&mut wheel, 0), [0], "level {level}, slot {slot}");
                assert_eq!(wheel.next(), None, "level {level}, slot {slot}");
            }
        }
    }

    #[test]
    fn a_deadline_that_was_cleared_does_not_come() {
        let mut wheel = Wheel::new();
        wheel.clear(3);
        wheel.set(0, Instant::from_nanos(5 * TICK));
        wheel.set(1, Instant::from_nanos(5 * TICK));
        wheel.set(2, Instant::from_nanos(500 * TICK));
        wheel.clear(0);
        assert_eq!(expired(&mut wheel, 5 * TICK), [1]);
        wheel.clear(1);
        wheel.clear(2);
        assert_eq!(wheel.next(), None);
        // One that is past already comes at once, if it is not cleared.
        wheel.set(0, Instant::ZERO);
        wheel.set(1, Instant::ZERO);
        assert_eq!(wheel.next(), Some(Instant::from_nanos(5 * TICK)));
        wheel.clear(0);
        assert_eq!(expired(&mut wheel, 5 * TICK), [1]);
        assert_eq!(wheel.next(), None);
        wheel.set(0, Instant::from_nanos(u64::MAX));
        assert_eq!(expired(&mut wheel, u64::MAX), [] as [u32; 0], "it ends after the last tick");
    }
}
