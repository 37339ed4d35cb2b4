//! Numbers for things that C names, each given once in the life of the process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// So many bits of a handle are the place in the table: what is there at a time is less. The others count.
const PLACE_BITS: u32 = 20;

/// The most that a table holds.
pub(crate) const LIMIT: usize = (1 << PLACE_BITS) - 1;

/// All tables count together, so that a handle of one is none of another. It is never 0, and `u64::MAX` only
/// after 2^44 of them.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What a handle is, as to the process that gave it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Giver {
    /// This one, or nobody.
    This,
    /// One of which this one is a fork, or nobody.
    Other,
}

/// Things that C names by handles, of one process. A fork makes others: of these somebody may have had the lock who is
/// not there.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    table: RwLock<Table<T>>,
    /// Handles with numbers before this one are of another process.
    first: u64,
}

#[derive(Debug)]
struct Table<T> {
    places: Vec<Option<(u64, Arc<T>)>>,
    free: Vec<usize>,
}

impl<T> Handles<T> {
    /// Of a process that was not forked off since handles are given.
    pub(crate) fn new() -> Self {
        Self::from_number(0)
    }

    /// Of a process that was forked off: what was given before is not its own.
    pub(crate) fn after_fork() -> Self {
        Self::from_number(NEXT.load(Ordering::Relaxed))
    }

    fn from_number(first: u64) -> Self {
        let table = RwLock::new(Table { places: Vec::new(), free: Vec::new() });
        Self { table, first }
    }

    /// Whose a handle is. Takes no lock.
    pub(crate) fn giver(&self, handle: u64) -> Giver {
        match handle >> PLACE_BITS {
            0 => Giver::This,
            number if number < self.first => Giver::Other,
            _ => Giver::This,
        }
    }

    /// Takes it in; `None` when there are too many.
    pub(crate) fn insert(&self, value: Arc<T>) -> Option<u64> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let place = match table.free.pop() {
            Some(place) => place,
            None if table.places.len() < LIMIT => {
                table.places.push(None);
                table.places.len() - 1
            }
            None => return None,
        };
        let handle = NEXT.fetch_add(1, Ordering::Relaxed) << PLACE_BITS | place as u64;
        table.places[place] = Some((handle, value));
        Some(handle)
    }

    pub(crate) fn find(&self, handle: u64) -> Option<Arc<T>> {
        self.find_and(handle, Arc::clone)
    }

    /// What `then` makes of it, while it cannot be removed.
    pub(crate) fn find_and<R>(&self, handle: u64, then: impl FnOnce(&Arc<T>) -> R) -> Option<R> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        match table.places.get(place(handle))? {
            Some((known, value)) if *known == handle => Some(then(value)),
            _ => None,
        }
    }

    /// Takes it out: the handle is none any more.
    pub(crate) fn remove(&self, handle: u64) -> Option<Arc<T>> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let place = place(handle);
        let taken = table.places.get_mut(place)?.take_if(|(known, _)| *known == handle);
        let (_, value) = taken?;
        table.free.push(place);
        Some(value)
    }

    /// The handles of those that `wanted` chooses.
    pub(crate) fn filter(&self, wanted: impl Fn(&T) -> bool) -> Vec<u64> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let chosen = table.places.iter().flatten().filter(|(_, value)| wanted(value));
        chosen.map(|(handle, _)| *handle).collect()
    }
}

fn place(handle: u64) -> usize {
    (handle & LIMIT as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_good_until_it_is_removed_and_never_given_again() {
        let table = Handles::new();
        let first = table.insert(Arc::new(1)).unwrap();
        assert_eq!(table.find(first).as_deref(), Some(&1));
        assert_eq!(table.remove(first).as_deref(), Some(&1));
        assert_eq!((table.find(first), table.remove(first)), (None, None));
        let second = table.insert(Arc::new(2)).unwrap();
        assert_ne!(first, second);
        assert_eq!(place(first), place(second), "its place is used again");
        assert_eq!((table.find(first), table.find(second).as_deref()), (None, Some(&2)));
        assert_eq!(
            (table.filter(|it| *it == 2), table.filter(|it| *it == 1)),
            (vec![second], vec![])
        );
    }

    #[test]
    fn a_table_made_after_a_fork_knows_handles_of_before_it() {
        let before = Handles::new();
        let old = before.insert(Arc::new(1)).unwrap();
        let table = Handles::after_fork();
        let own = table.insert(Arc::new(1)).unwrap();
        let givers = [0, 1, old, own, u64::MAX].map(|handle| table.giver(handle));
        assert_eq!(givers, [Giver::This, Giver::This, Giver::Other, Giver::This, Giver::This]);
        assert_eq!(before.giver(old), Giver::This);
    }

    #[test]
    fn what_is_no_handle_is_nothing() {
        let (table, other) = (Handles::new(), Handles::new());
        let handle = table.insert(Arc::new(1)).unwrap();
        other.insert(Arc::new(1)).unwrap();
        for wrong in
            [0, 1, u64::MAX, u64::MAX - 1, handle + 1, handle + (1 << PLACE_BITS), LIMIT as u64]
        {
            assert_eq!((table.find(wrong), table.remove(wrong)), (None, None), "{wrong:#x}");
        }
        assert_eq!(other.find(handle), None, "of another table");
        assert!(table.find(handle).is_some());
    }

    #[test]
    fn a_table_is_full_at_its_limit() {
        let table = Handles::new();
        let value = Arc::new(());
        let handles: Vec<_> =
            (0..LIMIT).map(|_| table.insert(Arc::clone(&value)).unwrap()).collect();
        assert_eq!(table.insert(Arc::clone(&value)), None);
        table.remove(handles[7]).unwrap();
        assert!(table.insert(value).is_some());
    }
}
