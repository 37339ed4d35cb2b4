//! Memory that was not registered, and is read or written all the same.
//!
//! Over TCP the original takes requests whose local memory is not registered, and programs rely on it. Such memory is
//! registered for as long as the batch is under way.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use millstream_transfer::{RegisterError, TransferEngine, TransferRequest};

/// What is borrowed of the caller.
#[derive(Debug, Default)]
pub(super) struct Borrowed {
    /// By first bytes.
    ranges: Mutex<Ranges>,
    /// How many there are. Most programs never have one, and take no lock to see that.
    count: AtomicUsize,
    /// How many there ever were.
    ever: AtomicU64,
}

type Ranges = BTreeMap<u64, Range>;

#[derive(Debug)]
struct Range {
    length: u64,
    /// How many requests need it. With none, it was in use when it was to be unregistered, as by another process that
    /// still copies.
    users: usize,
}

impl Borrowed {
    fn lock(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers these bytes, unless others have it that they are; the first byte of what was borrowed, to give back.
    ///
    /// # Safety
    ///
    /// As of [`TransferEngine::register_memory`], until it was given back.
    pub(super) unsafe fn borrow(
        &self,
        engine: &TransferEngine,
        address: u64,
        length: u64,
    ) -> Result<u64, RegisterError> {
        let mut ranges = self.lock();
        if let Some((first, range)) = holding(&mut ranges, address, length) {
            range.users += 1;
            return Ok(first);
        }
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the caller promises it.
        unsafe { engine.register_memory(pointer, bytes, "*", false) }?;
        self.insert(&mut ranges, address, Range { length, users: 1 });
        Ok(address)
    }

    fn insert(&self, ranges: &mut Ranges, first: u64, range: Range) {
        ranges.insert(first, range);
        self.ever.fetch_add(1, Ordering::SeqCst);
        self.count.store(ranges.len(), Ordering::SeqCst);
    }

    /// How often something was borrowed.
    pub(super) fn ever(&self) -> u64 {
        self.ever.load(Ordering::SeqCst)
    }

    /// Has what is borrowed already stay for these requests, too: adds what of it is to be given back for them. The engine
    /// takes them as it takes those to memory that the caller has registered.
    pub(super) fn share(&self, requests: &[TransferRequest], shared: &mut Vec<u64>) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut ranges = self.lock();
        for request in requests {
            if let Some((first, range)) = holding(&mut ranges, request.source, request.length) {
                range.users += 1;
                shared.push(first);
            }
        }
    }

    /// The first of these requests to memory that is borrowed, which the caller has not registered.
    pub(super) fn position(&self, requests: &[TransferRequest]) -> Option<usize> {
        if self.count.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut ranges = self.lock();
        requests.iter().position(|it| holding(&mut ranges, it.source, it.length).is_some())
    }

    /// Whether something is borrowed that begins there, be it needed or not.
    pub(super) fn begins_at(&self, first: u64) -> bool {
        self.lock().contains_key(&first)
    }

    /// Whether something is borrowed that begins there, and needed.
    pub(super) fn needs(&self, first: u64) -> bool {
        self.count.load(Ordering::SeqCst) > 0
            && self.lock().get(&first).is_some_and(|range| range.users > 0)
    }

    /// One request less needs what begins there. Without any, `unregister` says whether it is no longer registered.
    pub(super) fn give_back(&self, first: u64, unregister: impl Fn(u64) -> bool) {
        let mut ranges = self.lock();
        let Some(range) = ranges.get_mut(&first) else { return };
        range.users -= 1;
        // It is the caller's, and of no transfer any more.
        if range.users == 0 && unregister(first) {
            ranges.remove(&first);
        }
        self.count.store(ranges.len(), Ordering::SeqCst);
    }

    /// Unregisters what was in use; whether something is free now.
    pub(super) fn try_again(&self, unregister: impl Fn(u64) -> bool) -> bool {
        let mut ranges = self.lock();
        let before = ranges.len();
        ranges.retain(|&first, range| range.users > 0 || !unregister(first));
        self.count.store(ranges.len(), Ordering::SeqCst);
        ranges.len() < before
    }
}

/// What all these bytes lie in, with its first byte.
fn holding(ranges: &mut Ranges, address: u64, length: u64) -> Option<(u64, &mut Range)> {
    let end = address.checked_add(length)?;
    let (&first, range) = ranges.range_mut(..=address).next_back()?;
    (end <= first + range.length).then_some((first, range))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn what_is_in_use_is_unregistered_later() {
        let borrowed = Borrowed::default();
        for (first, users) in [(100, 2), (200, 1)] {
            borrowed.insert(&mut borrowed.lock(), first, Range { length: 10, users });
        }
        let asked = RefCell::new(Vec::new());
        let answering = |answer: bool| {
            let asked = &asked;
            move |first| {
                asked.borrow_mut().push(first);
                answer
            }
        };
        borrowed.give_back(100, answering(true));
        assert!(asked.take().is_empty(), "another batch needs it");
        borrowed.give_back(100, answering(false));
        assert!(!borrowed.try_again(answering(false)));
        assert!(borrowed.try_again(answering(true)));
        assert_eq!(asked.take(), [100, 100, 100]);
        assert!(!borrowed.try_again(answering(true)), "nothing is left to do");
        borrowed.give_back(200, answering(true));
        assert_eq!(asked.take(), [200]);
        assert!(borrowed.lock().is_empty());
        assert_eq!(borrowed.count.into_inner(), 0);
    }
}
