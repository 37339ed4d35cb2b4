//! Memory that was not registered, and is read or written all the same.
//!
//! Over TCP the original takes requests whose local memory is not registered, and programs rely on it. Such memory is
//! registered for as long as the batch is under way.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use millstream_transfer::{RegisterError, TransferEngine};

/// What is borrowed of the caller, by first bytes.
#[derive(Debug, Default)]
pub(super) struct Borrowed(Mutex<BTreeMap<u64, Range>>);

#[derive(Debug)]
struct Range {
    length: u64,
    /// Batches that need it. With none, it was in use when it was to be unregistered, as by another process that still
    /// copies.
    users: usize,
}

impl Borrowed {
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
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((&first, range)) = ranges.range_mut(..=address).next_back()
            && let Some(end) = address.checked_add(length)
            && end <= first + range.length
        {
            range.users += 1;
            return Ok(first);
        }
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the caller promises it.
        unsafe { engine.register_memory(pointer, bytes, "*", false) }?;
        ranges.insert(address, Range { length, users: 1 });
        Ok(address)
    }

    /// One batch less needs what begins there. Without any, `unregister` says whether it is no longer registered.
    pub(super) fn give_back(&self, first: u64, unregister: impl Fn(u64) -> bool) {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(range) = ranges.get_mut(&first) else { return };
        range.users -= 1;
        // It is the caller's, and of no transfer any more.
        if range.users == 0 && unregister(first) {
            ranges.remove(&first);
        }
    }

    /// Unregisters what was in use; whether something is free now.
    pub(super) fn try_again(&self, unregister: impl Fn(u64) -> bool) -> bool {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = ranges.len();
        ranges.retain(|&first, range| range.users > 0 || !unregister(first));
        ranges.len() < before
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn what_is_in_use_is_unregistered_later() {
        let range = |users| Range { length: 10, users };
        let borrowed = Borrowed(Mutex::new([(100, range(2)), (200, range(1))].into()));
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
        assert!(borrowed.0.lock().unwrap().is_empty());
    }
}
