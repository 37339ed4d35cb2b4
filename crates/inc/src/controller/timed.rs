//! Values that have deadlines, and which of these is the first.
//!
//! With many connections something happens to one of them all the time, and each time the next deadline of all is asked for. So
//! those that somebody may have changed are noted, and only their deadlines are put in order then.

use core::ops::Deref;
use std::collections::btree_map::ValuesMut;
use std::collections::{BTreeMap, BTreeSet};

use millstream_roce::Instant;

/// What has to be looked at by some time.
pub(super) trait HasDeadline {
    /// By when; none if nothing is waited for.
    fn due_at(&self) -> Option<Instant>;
}

impl HasDeadline for Instant {
    fn due_at(&self) -> Option<Instant> {
        Some(*self)
    }
}

/// Values by their keys. It is read as a map; whoever gets a value to change it may change its deadline.
#[derive(Debug)]
pub(super) struct Timed<K, V> {
    values: BTreeMap<K, V>,
    /// Those whose deadlines may be others than are known.
    changed: BTreeSet<K>,
    /// The deadlines that are known.
    known: BTreeMap<K, Instant>,
    /// The same, the first one first.
    in_order: BTreeSet<(Instant, K)>,
}

impl<K, V> Timed<K, V> {
    pub(super) const fn new() -> Self {
        Self {
            values: BTreeMap::new(),
            changed: BTreeSet::new(),
            known: BTreeMap::new(),
            in_order: BTreeSet::new(),
        }
    }
}

impl<K: Copy + Ord, V: HasDeadline> Timed<K, V> {
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.changed.insert(key);
        self.values.insert(key, value)
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let value = self.values.remove(key)?;
        self.changed.insert(*key);
        Some(value)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let value = self.values.get_mut(key)?;
        self.changed.insert(*key);
        Some(value)
    }

    pub(super) fn values_mut(&mut self) -> ValuesMut<'_, K, V> {
        self.changed.extend(self.values.keys());
        self.values.values_mut()
    }

    /// The first of all deadlines.
    pub(super) fn first(&mut self) -> Option<Instant> {
        self.put_in_order();
        self.in_order.first().map(|&(at, _)| at)
    }

    /// Those whose deadlines are over, in the order of their keys.
    pub(super) fn due(&mut self, now: Instant) -> Vec<K> {
        self.put_in_order();
        let due = self.in_order.iter().take_while(|(at, _)| *at <= now);
        let mut due: Vec<K> = due.map(|&(_, key)| key).collect();
        due.sort_unstable();
        due
    }

    fn put_in_order(&mut self) {
        while let Some(key) = self.changed.pop_first() {
            let at = self.values.get(&key).and_then(V::due_at);
            let before = match at {
                Some(at) => self.known.insert(key, at),
                None => self.known.remove(&key),
            };
            if before == at {
                continue;
            }
            if let Some(before) = before {
                self.in_order.remove(&(before, key));
            }
            if let Some(at) = at {
                self.in_order.insert((at, key));
            }
        }
    }

    /// Whether that is so which [`Timed::first`] has said last, by a look at all. For assertions.
    pub(super) fn agrees(&self) -> bool {
        let first = self.values.values().filter_map(V::due_at).min();
        first == self.in_order.first().map(|&(at, _)| at)
    }
}

/// To read only: what is changed is noted.
impl<K, V> Deref for Timed<K, V> {
    type Target = BTreeMap<K, V>;

    fn deref(&self) -> &Self::Target {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    const fn at(nanos: u64) -> Instant {
        Instant::from_nanos(nanos)
    }

    /// Something that counts how often its deadline is looked at.
    struct Watched<'a> {
        due_at: Option<Instant>,
        looked_at: &'a Cell<usize>,
    }

    impl HasDeadline for Watched<'_> {
        fn due_at(&self) -> Option<Instant> {
            self.looked_at.set(self.looked_at.get() + 1);
            self.due_at
        }
    }

    #[test]
    fn only_what_has_changed_is_looked_at() {
        for count in [100, 10_000] {
            let looked_at = Cell::new(0);
            let mut timed: Timed<u64, Watched<'_>> = Timed::new();
            for key in 0..count {
                timed.insert(key, Watched { due_at: Some(at(key)), looked_at: &looked_at });
            }
            assert_eq!(timed.first(), Some(at(0)));
            looked_at.set(0);
            for key in 0..50 {
                assert_eq!(timed.due(at(key)), [key]);
                if let Some(watched) = timed.get_mut(&key) {
                    watched.due_at = Some(at(count + key));
                }
                assert_eq!(timed.first(), Some(at(key + 1)));
            }
            assert_eq!(looked_at.get(), 50, "of {count}");
        }
    }

    #[test]
    fn what_is_gone_or_waits_for_nothing_is_not_due() {
        let looked_at = Cell::new(0);
        let watched = |due_at| Watched { due_at, looked_at: &looked_at };
        let mut timed: Timed<i32, Watched<'_>> = Timed::new();
        assert_eq!((timed.first(), timed.due(at(9))), (None, vec![]));
        for (key, due_at) in [(1, Some(at(5))), (2, None), (3, Some(at(4))), (4, Some(at(6)))] {
            assert!(timed.insert(key, watched(due_at)).is_none());
        }
        assert_eq!((timed.first(), timed.due(at(5))), (Some(at(4)), vec![1, 3]));
        assert!(timed.remove(&3).is_some() && timed.remove(&3).is_none());
        assert_eq!((timed.first(), timed.due(at(5))), (Some(at(5)), vec![1]));
        if let Some(watched) = timed.get_mut(&1) {
            watched.due_at = None;
        }
        assert_eq!((timed.first(), timed.due(at(9))), (Some(at(6)), vec![4]));
        assert_eq!(timed.keys().copied().collect::<Vec<i32>>(), [1, 2, 4]);
    }

    proptest! {
        #[test]
        fn the_first_deadline_is_the_least_of_all(
            steps in proptest::collection::vec(
                (0..5_u8, 0..8_u32, proptest::option::of(0..20_u64), any::<bool>()),
                1..100,
            ),
        ) {
            let looked_at = Cell::new(0);
            let watched = |due_at| Watched { due_at, looked_at: &looked_at };
            let mut timed: Timed<u32, Watched<'_>> = Timed::new();
            for (what, key, due_at, is_asked) in steps {
                let due_at = due_at.map(at);
                match what {
                    0 => {
                        timed.remove(&key);
                    }
                    1 => {
                        if let Some(watched) = timed.get_mut(&key) {
                            watched.due_at = due_at;
                        }
                    }
                    2 => timed.values_mut().for_each(|it| it.due_at = it.due_at.max(due_at)),
                    _ => {
                        timed.insert(key, watched(due_at));
                    }
                }
                if is_asked {
                    let first = timed.values().filter_map(HasDeadline::due_at).min();
                    let is_due = |it: &Watched<'_>| it.due_at.is_some_and(|it| it <= at(10));
                    let due = timed.iter().filter(|(_, it)| is_due(it)).map(|(&key, _)| key);
                    let due: Vec<u32> = due.collect();
                    prop_assert_eq!(timed.first(), first);
                    prop_assert_eq!(timed.due(at(10)), due);
                    prop_assert!(timed.agrees());
                }
            }
        }
    }
}
