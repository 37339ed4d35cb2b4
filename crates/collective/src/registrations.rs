//! Memory that callers have registered, to be found again by address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millstream_verbs::{Access, RegionError};
use thiserror::Error;

use crate::memory::{Domains, Operand, Regions};

/// A communicator has so many at most.
const LIMIT: usize = 4096;

/// Why memory was not registered, or is still.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum RegistrationError {
    /// There is nothing to register.
    #[error(
        "memory at null, of no bytes, or beyond the end of the address space cannot be registered"
    )]
    Empty,
    /// A part of it is registered.
    #[error("{address:#x} to {end:#x} is registered already: deregister it first")]
    Overlap {
        /// The first byte of what is registered.
        address: usize,
        /// The byte behind it.
        end: usize,
    },
    /// There are too many.
    #[error("{LIMIT} ranges are registered, and a communicator has no more")]
    TooMany,
    /// Nothing is registered there.
    #[error("no registered memory begins at {0:#x}")]
    Unknown(usize),
    /// A collective uses it.
    #[error("a collective that is not over uses the memory at {0:#x}: wait for it first")]
    InUse(usize),
    /// The device does not take it.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Memory that the switch may write to, and that this rank sends from, until it is deregistered.
#[derive(Debug)]
pub(crate) struct Registered {
    regions: Regions,
}

impl Registered {
    /// What work requests name for a range that starts at `address`, within this.
    pub(crate) fn operand(&self, address: usize) -> Operand {
        Operand { address: address as u64, ..Operand::of(&self.regions) }
    }
}

/// What is registered with a communicator, by the first byte. Ranges do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Registrations(Mutex<BTreeMap<usize, Entry>>);

#[derive(Debug)]
struct Entry {
    end: usize,
    registered: Arc<Registered>,
}

impl Registrations {
    /// # Safety
    /// Until [`Registrations::remove`] has removed it, and collectives that use it are over, the bytes must stay
    /// mapped and writable, and not be referred to by Rust code while one runs.
    pub(crate) unsafe fn add(
        &self,
        domain: &Domains,
        address: *mut u8,
        length: usize,
    ) -> Result<(), RegistrationError> {
        let start = address.addr();
        let end = start.checked_add(length).filter(|&end| start != 0 && end > start);
        let end = end.ok_or(RegistrationError::Empty)?;
        let mut entries = self.lock();
        if let Some((&address, entry)) = entries.range(..end).next_back()
            && entry.end > start
        {
            return Err(RegistrationError::Overlap { address, end: entry.end });
        }
        if entries.len() >= LIMIT {
            return Err(RegistrationError::TooMany);
        }
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        // SAFETY: the caller promises it. Who uses the region has an `Arc` of it until that is over.
        let regions = unsafe { domain.register_memory(address, length, access)? };
        entries.insert(start, Entry { end, registered: Arc::new(Registered { regions }) });
        Ok(())
    }

    /// Deregisters what begins at this address.
    pub(crate) fn remove(&self, address: usize) -> Result<(), RegistrationError> {
        let mut entries = self.lock();
        let entry = entries.get(&address).ok_or(RegistrationError::Unknown(address))?;
        // Others get theirs from here only, under the lock.
        if Arc::strong_count(&entry.registered) > 1 {
            return Err(RegistrationError::InUse(address));
        }
        let removed = entries.remove(&address);
        // What it waits for needs no lock of ours.
        drop(entries);
        drop(removed);
        Ok(())
    }

    /// What has all of this range.
    pub(crate) fn find(&self, address: usize, length: usize) -> Option<Arc<Registered>> {
        let entries = self.lock();
        let (_, entry) = entries.range(..=address).next_back()?;
        let end = address.checked_add(length)?;
        (end <= entry.end).then(|| Arc::clone(&entry.registered))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Entry>> {
        // Whoever panicked had not changed anything by half.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
