//! Which of several tasks has the earliest deadline: a binary heap from which any task can be taken.

use crate::Instant;

/// No place.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Its deadline, and among equal ones when it came.
    order: (Instant, u64),
    task: u32,
}

/// Tasks by their deadlines. Memory grows to the most there were.
#[derive(Debug, Default)]
pub(crate) struct Earliest {
    heap: Vec<Entry>,
    /// By task: its place in the heap.
    places: Vec<u32>,
    came: u64,
}

impl Earliest {
    /// The task whose deadline is the earliest; of equal ones the one that came first.
    pub(crate) fn first(&self) -> Option<u32> {
        self.heap.first().map(|entry| entry.task)
    }

    /// Adds a task, which is not there.
    pub(crate) fn insert(&mut self, task: u32, deadline: Instant) {
        let index = task as usize;
        if index >= self.places.len() {
            self.places.resize(index + 1, NONE);
        }
        self.came += 1;
        self.heap.push(Entry { order: (deadline, self.came), task });
        self.places[index] = self.heap.len() as u32 - 1;
        self.rise(self.heap.len() - 1);
    }

    /// Takes a task out, if it is there.
    pub(crate) fn remove(&mut self, task: u32) {
        let Some(place) = self.places.get_mut(task as usize) else { return };
        let place = core::mem::replace(place, NONE) as usize;
        if place >= self.heap.len() {
            return;
        }
        self.heap.swap_remove(place);
        if let Some(moved) = self.heap.get(place) {
            self.places[moved.task as usize] = place as u32;
            self.rise(place);
            self.sink(place);
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        for place in [a, b] {
            self.places[self.heap[place].task as usize] = place as u32;
        }
    }

    fn rise(&mut self, mut place: usize) {
        while place > 0 && self.heap[place].order < self.heap[(place - 1) / 2].order {
            self.swap(place, (place - 1) / 2);
            place = (place - 1) / 2;
        }
    }

    fn sink(&mut self, mut place: usize) {
        loop {
            let children = (2 * place + 1..2 * place + 3).filter(|&child| child < self.heap.len());
            let Some(least) = children.min_by_key(|&child| self.heap[child].order) else { return };
            if self.heap[place].order <= self.heap[least].order {
                return;
            }
            self.swap(place, least);
            place = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tasks that are left, in order.
    fn drain(earliest: &mut Earliest) -> Vec<u32> {
        core::iter::from_fn(|| {
            let first = earliest.first()?;
            earliest.remove(first);
            Some(first)
        })
        .collect()
    }

    #[test]
    fn the_earliest_is_first_whatever_was_taken_out() {
        // Deadlines in no order, some of them equal.
        let deadline = |task: u32| u64::from(task * 7919 % 101);
        for taken in 0..10 {
            let mut earliest = Earliest::default();
            let of = |task| Instant::from_nanos(deadline(task));
            (0..300).for_each(|task| earliest.insert(task, of(task)));
            let is_taken = |task: &u32| task % 10 == taken;
            (0..300).filter(is_taken).for_each(|task| earliest.remove(task));
            // Once more, and one that there never was.
            (0..300).filter(is_taken).for_each(|task| earliest.remove(task));
            earliest.remove(1000);
            let mut expected: Vec<u32> = (0..300).filter(|task| !is_taken(task)).collect();
            expected.sort_by_key(|&task| (deadline(task), task));
            assert_eq!(drain(&mut earliest), expected);
        }
    }

    #[test]
    fn a_place_is_used_again() {
        let mut earliest = Earliest::default();
        for round in 0..3 {
            earliest.insert(4, Instant::from_nanos(10 - round));
            earliest.insert(2, Instant::from_nanos(9));
            let first = earliest.first();
            assert_eq!(first, Some(if round < 1 { 2 } else { 4 }));
            assert_eq!(drain(&mut earliest).len(), 2);
        }
    }
}
