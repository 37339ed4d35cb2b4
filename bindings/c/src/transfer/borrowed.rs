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
    /// Batches that need it.
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

    /// One batch less needs what begins there.
    pub(super) fn give_back(&self, engine: &TransferEngine, first: u64) {
        let mut ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(range) = ranges.get_mut(&first) else { return };
        range.users -= 1;
        if range.users == 0 {
            ranges.remove(&first);
            // It is the caller's, and of no transfer any more.
            let pointer = std::ptr::with_exposed_provenance_mut(first as usize);
            let _ = engine.unregister_memory(pointer);
        }
    }
}
