//! The peer's side of connections and fences: who may connect, and when nothing of a connection can
//! arrive any more.
//!
//! An initiator numbers its connections in one rising sequence, the epochs. Of each of its rails at
//! most one connection is open here. A connection with a higher epoch takes the place of the one
//! before, and a fence ends all up to its epoch; both wait until the queue pairs of the earlier one
//! are reset and nobody writes for them any more. What is asked again is answered again, and a
//! request to connect that comes after the fence of its epoch is refused: so requests may be lost,
//! doubled, late and out of order.
//!
//! Of closed connections a limited number is remembered by their rails. Of those before that only the
//! highest epoch of each initiator is: what is late from before is refused, and a newer request whose
//! epoch is below that is made again with a higher one.

use std::collections::{BTreeMap, VecDeque};

/// A rail of an initiator.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Initiator {
    /// Which start of which process.
    pub incarnation: u64,
    /// Its number of the rail.
    pub rail: u16,
}

/// Something that the target's caller is to do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TargetOutput {
    /// Make the connection that was asked for, and answer. If that fails, call [`Target::close`].
    Accept {
        /// Whose.
        initiator: Initiator,
        /// Its number.
        epoch: u64,
    },
    /// Answer that only connections of higher epochs than `floor` are taken.
    Refuse {
        /// Whose.
        initiator: Initiator,
        /// The number that was asked for.
        epoch: u64,
        /// The highest that was taken or fenced.
        floor: u64,
    },
    /// Answer that there are as many connections as may be.
    Full {
        /// Whose.
        initiator: Initiator,
        /// The number that was asked for.
        epoch: u64,
    },
    /// Reset the connection's queue pairs, wait until nothing is written for them any more, and call
    /// [`Target::closed`].
    Close {
        /// Whose.
        initiator: Initiator,
        /// Its number.
        epoch: u64,
    },
    /// Answer that nothing up to this epoch can arrive any more.
    Confirm {
        /// To whom.
        initiator: Initiator,
        /// The number that was asked for.
        epoch: u64,
    },
}

/// A rail of an initiator, as far as it is known.
#[derive(Debug)]
struct Entry {
    /// The highest epoch that was taken or fenced.
    floor: u64,
    open: Option<Open>,
    /// Where it is in the order of closed ones, if it is closed.
    closed: u64,
}

/// A connection that is open, or not closed yet.
#[derive(Debug, Default)]
struct Open {
    epoch: u64,
    closing: bool,
    /// A connection to take when this is closed.
    next: Option<u64>,
    /// A fence to confirm then.
    fence: Option<u64>,
}

/// The target's side of connections.
#[derive(Debug)]
pub struct Target {
    max_open: usize,
    max_closed: usize,
    entries: BTreeMap<Initiator, Entry>,
    open: usize,
    /// Closed ones, the one that was closed first coming first.
    closed: BTreeMap<u64, Initiator>,
    sequence: u64,
    /// By incarnation, what is left of rails that were forgotten.
    floors: BTreeMap<u64, Floor>,
    /// Those incarnations, the one whose floor was set first coming first.
    floor_order: BTreeMap<u64, u64>,
    outputs: VecDeque<TargetOutput>,
}

/// The highest epoch of an initiator's rails that were forgotten.
#[derive(Debug)]
struct Floor {
    epoch: u64,
    /// Where it is in the order of floors.
    sequence: u64,
}

impl Target {
    /// Takes so many connections at a time, and remembers so many rails that are closed; and, of the
    /// rails before these, the highest epoch of each of as many initiators as that makes together.
    ///
    /// An initiator that is forgotten altogether could connect again by a request that was late for so
    /// long. Nothing is written for it: it gets new queue pairs, for which no earlier packet is, and who
    /// asked has given them up. It has them until its next connection, or until it is known to be gone.
    pub const fn new(max_open: usize, max_closed: usize) -> Self {
        Self {
            max_open,
            max_closed,
            entries: BTreeMap::new(),
            open: 0,
            closed: BTreeMap::new(),
            sequence: 0,
            floors: BTreeMap::new(),
            floor_order: BTreeMap::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Connections that are open or being closed.
    pub const fn open(&self) -> usize {
        self.open
    }

    /// Rails that are remembered, open ones among them.
    pub fn remembered(&self) -> usize {
        self.entries.len()
    }

    /// Initiators of which rails were forgotten, and the highest epoch is remembered.
    pub fn floors(&self) -> usize {
        self.floors.len()
    }

    /// What to do next.
    pub fn poll_output(&mut self) -> Option<TargetOutput> {
        self.outputs.pop_front()
    }

    /// An initiator wants to connect a rail. Returns whether it will be accepted, unless a newer one
    /// or a fence comes before that: then what else is to be known for it must be kept. Of a request
    /// that comes twice only the first is accepted.
    pub fn connect(&mut self, initiator: Initiator, epoch: u64) -> bool {
        let floor = self.floor(initiator);
        if epoch <= floor {
            self.outputs.push_back(TargetOutput::Refuse { initiator, epoch, floor });
            return false;
        }
        let has_place = self.entries.get(&initiator).is_some_and(|entry| entry.open.is_some());
        if !has_place && self.open >= self.max_open {
            self.outputs.push_back(TargetOutput::Full { initiator, epoch });
            return false;
        }
        let entry = self.entry(initiator);
        entry.floor = epoch;
        match &mut entry.open {
            Some(open) => {
                open.next = Some(epoch);
                self.start_closing(initiator);
            }
            None => self.accept(initiator, epoch),
        }
        true
    }

    /// An initiator asks that nothing of a rail up to this epoch arrive any more.
    pub fn fence(&mut self, initiator: Initiator, epoch: u64) {
        let entry = self.entry(initiator);
        entry.floor = entry.floor.max(epoch);
        match &mut entry.open {
            // What came before it was closed before it was accepted.
            Some(open) if open.epoch > epoch => {
                self.outputs.push_back(TargetOutput::Confirm { initiator, epoch });
            }
            Some(open) => {
                open.fence = open.fence.max(Some(epoch));
                open.next = open.next.filter(|&next| next > epoch);
                self.start_closing(initiator);
            }
            None => {
                self.outputs.push_back(TargetOutput::Confirm { initiator, epoch });
                self.forget_oldest();
            }
        }
    }

    /// A connection is not wanted here any more, or is broken: it is closed.
    pub fn close(&mut self, initiator: Initiator, epoch: u64) {
        let entry = self.entries.get(&initiator);
        let open = entry.and_then(|entry| entry.open.as_ref());
        if open.is_some_and(|open| open.epoch == epoch) {
            self.start_closing(initiator);
        }
    }

    /// Nothing is written for a connection any more.
    pub fn closed(&mut self, initiator: Initiator, epoch: u64) {
        let Some(entry) = self.entries.get_mut(&initiator) else { return };
        let closing = |open: &mut Open| open.closing && open.epoch == epoch;
        let Some(open) = entry.open.take_if(closing) else { return };
        self.open -= 1;
        if let Some(epoch) = open.fence {
            self.outputs.push_back(TargetOutput::Confirm { initiator, epoch });
        }
        match open.next {
            Some(next) => self.accept(initiator, next),
            None => {
                self.sequence += 1;
                entry.closed = self.sequence;
                self.closed.insert(self.sequence, initiator);
                self.forget_oldest();
            }
        }
    }

    /// The highest epoch of a rail that was taken or fenced.
    fn floor(&self, initiator: Initiator) -> u64 {
        let forgotten = || self.floors.get(&initiator.incarnation).map_or(0, |floor| floor.epoch);
        self.entries.get(&initiator).map_or_else(forgotten, |entry| entry.floor)
    }

    /// The entry of a rail, which is a closed one when it is new.
    fn entry(&mut self, initiator: Initiator) -> &mut Entry {
        let floor = self.floor(initiator);
        self.entries.entry(initiator).or_insert_with(|| {
            self.sequence += 1;
            self.closed.insert(self.sequence, initiator);
            Entry { floor, open: None, closed: self.sequence }
        })
    }

    fn accept(&mut self, initiator: Initiator, epoch: u64) {
        if let Some(entry) = self.entries.get_mut(&initiator) {
            self.closed.remove(&entry.closed);
            entry.open = Some(Open { epoch, ..Open::default() });
            self.open += 1;
            self.outputs.push_back(TargetOutput::Accept { initiator, epoch });
        }
    }

    fn start_closing(&mut self, initiator: Initiator) {
        let entry = self.entries.get_mut(&initiator);
        if let Some(open) = entry.and_then(|entry| entry.open.as_mut())
            && !core::mem::replace(&mut open.closing, true)
        {
            let epoch = open.epoch;
            self.outputs.push_back(TargetOutput::Close { initiator, epoch });
        }
    }

    fn forget_oldest(&mut self) {
        while self.closed.len() > self.max_closed
            && let Some((_, initiator)) = self.closed.pop_first()
        {
            if let Some(entry) = self.entries.remove(&initiator) {
                self.raise_floor(initiator.incarnation, entry.floor);
            }
        }
    }

    fn raise_floor(&mut self, incarnation: u64, epoch: u64) {
        // No other rail is forgotten until the next number.
        let sequence = self.sequence;
        let floor = self.floors.entry(incarnation).or_insert(Floor { epoch, sequence });
        self.floor_order.remove(&floor.sequence);
        *floor = Floor { epoch: floor.epoch.max(epoch), sequence };
        self.floor_order.insert(sequence, incarnation);
        while self.floors.len() > self.max_open + self.max_closed
            && let Some((_, incarnation)) = self.floor_order.pop_first()
        {
            self.floors.remove(&incarnation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Initiator = Initiator { incarnation: 7, rail: 0 };
    const B: Initiator = Initiator { incarnation: 7, rail: 1 };

    fn outputs(target: &mut Target) -> Vec<TargetOutput> {
        core::iter::from_fn(|| target.poll_output()).collect()
    }

    fn accept(initiator: Initiator, epoch: u64) -> TargetOutput {
        TargetOutput::Accept { initiator, epoch }
    }

    fn close(initiator: Initiator, epoch: u64) -> TargetOutput {
        TargetOutput::Close { initiator, epoch }
    }

    fn confirm(initiator: Initiator, epoch: u64) -> TargetOutput {
        TargetOutput::Confirm { initiator, epoch }
    }

    fn refuse(initiator: Initiator, epoch: u64, floor: u64) -> TargetOutput {
        TargetOutput::Refuse { initiator, epoch, floor }
    }

    #[test]
    fn a_fence_is_confirmed_when_the_connection_is_closed() {
        let mut target = Target::new(10, 10);
        assert!(target.connect(A, 1));
        assert_eq!(outputs(&mut target), [accept(A, 1)]);
        target.fence(A, 1);
        assert_eq!(outputs(&mut target), [close(A, 1)]);
        target.fence(A, 1);
        assert_eq!(outputs(&mut target), [], "it is being closed");
        target.closed(A, 2);
        target.closed(B, 1);
        assert_eq!((outputs(&mut target), target.open()), (vec![], 1));
        target.closed(A, 1);
        assert_eq!((outputs(&mut target), target.open()), (vec![confirm(A, 1)], 0));
        // Asked again, it is answered again; said again, it is nothing new.
        target.closed(A, 1);
        target.fence(A, 1);
        assert_eq!(outputs(&mut target), [confirm(A, 1)]);
    }

    #[test]
    fn a_request_that_the_fence_overtook_is_refused() {
        let mut target = Target::new(10, 10);
        target.fence(A, 3);
        assert_eq!(outputs(&mut target), [confirm(A, 3)]);
        assert!(!target.connect(A, 3));
        assert!(!target.connect(A, 2));
        assert_eq!(outputs(&mut target), [refuse(A, 3, 3), refuse(A, 2, 3)]);
        target.connect(A, 4);
        target.connect(A, 4);
        assert_eq!(outputs(&mut target), [accept(A, 4), refuse(A, 4, 4)], "once");
        // An old fence does not concern what came after it.
        target.fence(A, 3);
        assert_eq!((outputs(&mut target), target.open()), (vec![confirm(A, 3)], 1));
        // One of a request that has not come yet ends what is before.
        target.fence(A, 6);
        assert_eq!(outputs(&mut target), [close(A, 4)]);
        target.connect(A, 5);
        assert_eq!(outputs(&mut target), [refuse(A, 5, 6)]);
        target.closed(A, 4);
        assert_eq!(outputs(&mut target), [confirm(A, 6)]);
    }

    #[test]
    fn a_new_connection_takes_the_place_of_the_old_when_that_is_closed() {
        let mut target = Target::new(1, 10);
        target.connect(A, 1);
        target.connect(A, 2);
        target.connect(A, 5);
        assert_eq!(outputs(&mut target), [accept(A, 1), close(A, 1)]);
        target.fence(A, 1);
        assert_eq!(outputs(&mut target), []);
        target.closed(A, 1);
        assert_eq!(outputs(&mut target), [confirm(A, 1), accept(A, 5)]);
        assert_eq!((target.open(), target.remembered()), (1, 1));
        // A fence of the one that waits ends that too.
        target.connect(A, 7);
        target.fence(A, 7);
        target.closed(A, 5);
        assert_eq!(outputs(&mut target), [close(A, 5), confirm(A, 7)]);
        assert_eq!(target.open(), 0);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut target = Target::new(2, 3);
        for rail in 0..4 {
            assert_eq!(target.connect(Initiator { incarnation: 1, rail }, 1), rail < 2);
        }
        let full =
            |rail| TargetOutput::Full { initiator: Initiator { incarnation: 1, rail }, epoch: 1 };
        let all = outputs(&mut target);
        assert_eq!(all[2..], [full(2), full(3)]);
        assert_eq!((target.open(), target.remembered()), (2, 2));
        for rail in 100..200 {
            target.fence(Initiator { incarnation: 1, rail }, 1);
        }
        assert_eq!((outputs(&mut target).len(), target.remembered()), (100, 5));
        // Open ones are not forgotten, and closed ones in their order.
        let first = Initiator { incarnation: 1, rail: 0 };
        target.connect(first, 1);
        assert_eq!(outputs(&mut target), [refuse(first, 1, 1)]);
        target.close(first, 1);
        target.close(first, 1);
        target.closed(first, 1);
        assert_eq!(outputs(&mut target), [close(first, 1)]);
        assert_eq!((target.open(), target.remembered(), target.closed.len()), (1, 4, 3));
        let next = Initiator { incarnation: 1, rail: 197 };
        assert!(target.connect(next, 2));
        target.close(next, 1);
        target.close(B, 1);
        assert_eq!(outputs(&mut target), [accept(next, 2)]);
    }

    #[test]
    fn closed_ones_are_forgotten_in_the_order_in_which_they_closed() {
        let rail = |rail| Initiator { incarnation: 1, rail };
        let mut target = Target::new(10, 2);
        target.connect(rail(0), 1);
        target.fence(rail(1), 2);
        // It was there before the other, and is closed after it.
        target.close(rail(0), 1);
        target.closed(rail(0), 1);
        for number in 2..9 {
            target.fence(rail(number), 3);
            assert_eq!((target.remembered(), target.closed.len()), (2, 2));
            let kept = if number == 2 { 0 } else { number - 1 };
            assert!(target.entries.contains_key(&rail(kept)), "{number}");
        }
    }

    #[test]
    fn what_is_late_for_a_rail_that_was_forgotten_is_refused() {
        let rail = |incarnation, rail| Initiator { incarnation, rail };
        let mut target = Target::new(3, 2);
        for epoch in [5, 3, 9, 4] {
            target.fence(rail(1, epoch as u16), epoch);
        }
        outputs(&mut target);
        // Rails 5 and 3 are forgotten, and 5 is the highest of them.
        for (number, epoch, floor) in [(5, 5, 5), (3, 3, 5), (3, 5, 5), (0, 1, 5), (9, 9, 9)] {
            let late = rail(1, number);
            assert!(!target.connect(late, epoch));
            assert_eq!(outputs(&mut target), [refuse(late, epoch, floor)]);
        }
        // A fence of one that was forgotten does not lower it.
        target.fence(rail(1, 3), 1);
        assert!(!target.connect(rail(1, 3), 5));
        assert_eq!(outputs(&mut target), [confirm(rail(1, 3), 1), refuse(rail(1, 3), 5, 5)]);
        assert!(target.connect(rail(1, 3), 10) && !target.connect(rail(1, 9), 9));
        // Of initiators as many are remembered, the last ones.
        assert_eq!(target.floors(), 1);
        for incarnation in 2..=8 {
            target.fence(rail(incarnation, 0), 7);
        }
        assert_eq!((target.floors(), target.floor_order.len()), (5, 5));
        for (incarnation, is_taken) in
            [(2, false), (3, false), (4, false), (5, false), (6, false), (1, true)]
        {
            assert_eq!(target.connect(rail(incarnation, 1), 7), is_taken, "{incarnation}");
        }
    }
}
