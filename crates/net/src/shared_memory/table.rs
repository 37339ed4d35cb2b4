//! The table of registrations, by which peers know whether memory is still theirs to access.
//!
//! The owner writes it, and peers map it for reading only: a seal of the file allows no new writable
//! mapping (F_SEAL_FUTURE_WRITE, fcntl(2)). An entry has a *key* as long as it is registered, of its slot and a
//! generation that never comes again. Behind the entries is the word that says whether the owner lives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use super::life::Owner;
use super::memory::{Access, Mapping, memfd, seal};

/// The most entries of a table: as many slots as a key has.
pub const MAX_ENTRIES: usize = 1 << SLOT_BITS;

const SLOT_BITS: u32 = 16;

/// Bytes behind the entries, of which the first four are the word of the owner's life.
const LIFE: usize = 64;

/// Names a registration in its owner's table.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Key(pub u64);

impl Key {
    const fn new(slot: usize, generation: u64) -> Self {
        Self(generation << SLOT_BITS | slot as u64)
    }

    pub(super) const fn slot(self) -> usize {
        (self.0 & (MAX_ENTRIES as u64 - 1)) as usize
    }
}

/// What a peer may access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Entry {
    /// Address of the first byte, in the owner.
    pub(super) address: u64,
    /// Bytes.
    pub(super) length: u64,
    /// It can be mapped. What cannot is the user's own memory.
    pub(super) mappable: bool,
}

/// An entry as it is in the file.
#[repr(C)]
struct RawEntry {
    /// 0 for none.
    key: AtomicU64,
    address: AtomicU64,
    length: AtomicU64,
    mappable: AtomicU64,
}

/// The entries of a mapped table.
#[derive(Debug)]
struct Entries {
    mapping: Mapping,
}

impl Entries {
    fn count(&self) -> usize {
        self.mapping.length().saturating_sub(LIFE) / size_of::<RawEntry>()
    }

    /// The word of the owner's life.
    fn life(&self) -> Option<&AtomicU32> {
        let offset = self.count() * size_of::<RawEntry>();
        let pointer = self.mapping.range(offset as u64, LIFE)?;
        // SAFETY: as in `get`.
        Some(unsafe { &*pointer.cast::<AtomicU32>() })
    }

    fn get(&self, slot: usize) -> Option<&RawEntry> {
        // Behind the last one is what is no entry.
        let slot = Some(slot).filter(|&slot| slot < self.count())?;
        let offset = slot.checked_mul(size_of::<RawEntry>())?;
        let pointer = self.mapping.range(offset as u64, size_of::<RawEntry>())?;
        // SAFETY: inside the mapping, which lives as long as the reference, and aligned, since mappings
        // begin at pages. Other processes may change it, as atomics may be.
        Some(unsafe { &*pointer.cast::<RawEntry>() })
    }
}

/// A table of our own.
#[derive(Debug)]
pub(super) struct Table {
    entries: Entries,
    file: OwnedFd,
    slots: Mutex<Slots>,
}

#[derive(Debug)]
struct Slots {
    /// Slots that are free, of those that were ever used.
    free: Vec<usize>,
    used: usize,
    generation: u64,
}

impl Table {
    pub(super) fn new(capacity: usize) -> io::Result<Self> {
        let length = capacity.clamp(1, MAX_ENTRIES) * size_of::<RawEntry>() + LIFE;
        let file = memfd(c"millstream-registrations", length)?;
        let mapping = Mapping::new(file.as_fd(), length, Access::ReadWrite)?;
        // After our own mapping, which stays writable.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE;
        seal(file.as_fd(), seals | libc::F_SEAL_SEAL)?;
        let slots = Mutex::new(Slots { free: Vec::new(), used: 0, generation: 1 });
        Ok(Self { entries: Entries { mapping }, file, slots })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn capacity(&self) -> usize {
        self.entries.count()
    }

    /// The word that says whether this process lives.
    pub(super) fn life(&self) -> Option<&AtomicU32> {
        self.entries.life()
    }

    /// Adds an entry; `None` when the table is full.
    pub(super) fn insert(&self, entry: Entry) -> Option<Key> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.free.pop().unwrap_or_else(|| {
            slots.used += 1;
            slots.used - 1
        });
        let Some(raw) = self.entries.get(slot) else {
            slots.used -= 1;
            return None;
        };
        let key = Key::new(slot, slots.generation);
        slots.generation += 1;
        raw.address.store(entry.address, Ordering::Relaxed);
        raw.length.store(entry.length, Ordering::Relaxed);
        raw.mappable.store(entry.mappable.into(), Ordering::Relaxed);
        raw.key.store(key.0, Ordering::Release);
        Some(key)
    }

    /// Nobody enters any more. Who has entered before is seen by who looks afterwards.
    pub(super) fn revoke(&self, key: Key) {
        if let Some(raw) = self.entries.get(key.slot()) {
            raw.key.store(0, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    /// The slot of a revoked entry may be used again: nobody is inside.
    pub(super) fn free(&self, key: Key) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).free.push(key.slot());
    }
}

/// A peer's table.
#[derive(Debug)]
pub(super) struct TableView {
    entries: Entries,
}

impl TableView {
    /// Maps the table of another process.
    pub(super) fn adopt(file: BorrowedFd<'_>) -> io::Result<Self> {
        let longest = MAX_ENTRIES * size_of::<RawEntry>() + LIFE;
        // One byte more shows that there are more.
        let mapping = Mapping::adopt(file, longest + 1, Access::Read)?;
        if mapping.length() > longest {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the table is too long"));
        }
        Ok(Self { entries: Entries { mapping } })
    }

    /// What the kernel has said of its owner.
    pub(super) fn owner(&self) -> Owner {
        self.entries.life().map_or(Owner::Untold, Owner::of)
    }

    /// Whether this is registered now. All that this thread has stored sequentially consistently
    /// before is seen by the owner, if it revokes the entry after this.
    pub(super) fn is_registered(&self, key: Key) -> bool {
        fence(Ordering::SeqCst);
        // Relaxed, since the mapping is read-only: only such loads are sure not to write.
        let found = self.entries.get(key.slot()).map(|raw| raw.key.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        key.0 != 0 && found == Some(key.0)
    }

    /// What is registered by this key.
    pub(super) fn entry(&self, key: Key) -> Option<Entry> {
        let raw = self.entries.get(key.slot())?;
        let entry = || Entry {
            address: raw.address.load(Ordering::Relaxed),
            length: raw.length.load(Ordering::Relaxed),
            mappable: raw.mappable.load(Ordering::Relaxed) != 0,
        };
        // Of one generation, if the key was there before and after.
        let found = self.is_registered(key).then(entry)?;
        (self.is_registered(key) && found.address.checked_add(found.length).is_some())
            .then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: Entry = Entry { address: 4096, length: 100, mappable: true };

    #[test]
    fn peers_see_what_is_registered_and_cannot_write_it() {
        let table = Table::new(4).unwrap();
        let view = TableView::adopt(table.file()).unwrap();
        let key = table.insert(ENTRY).unwrap();
        assert_eq!(view.entry(key), Some(ENTRY));
        assert!(Mapping::adopt(table.file(), 1, Access::ReadWrite).is_err());
        table.revoke(key);
        assert!(!view.is_registered(key));
        assert_eq!(view.entry(key), None);
        table.free(key);
        let again = table.insert(ENTRY).unwrap();
        assert_eq!(again.slot(), key.slot());
        assert_ne!(again, key, "another generation");
        assert!(!view.is_registered(key) && view.is_registered(again));
    }

    #[test]
    fn a_table_can_be_full() {
        let table = Table::new(3).unwrap();
        let keys: Vec<Key> = (0..3).map(|_| table.insert(ENTRY).unwrap()).collect();
        assert_eq!(table.insert(ENTRY), None);
        assert_eq!(table.insert(ENTRY), None);
        table.revoke(keys[1]);
        assert_eq!(table.insert(ENTRY), None, "who is inside has not left yet");
        table.free(keys[1]);
        assert_eq!(table.insert(ENTRY).unwrap().slot(), keys[1].slot());
        assert_eq!(Table::new(usize::MAX).unwrap().capacity(), MAX_ENTRIES);
    }

    #[test]
    fn forged_contents_make_nothing_but_refusals() {
        let length = 2 * size_of::<RawEntry>() + LIFE + 7;
        let file = memfd(c"forged", length).unwrap();
        let forger =
            Entries { mapping: Mapping::new(file.as_fd(), length, Access::ReadWrite).unwrap() };
        seal(file.as_fd(), libc::F_SEAL_SHRINK).unwrap();
        let view = TableView::adopt(file.as_fd()).unwrap();
        assert!(!view.is_registered(Key(0)), "no entry is no registration");
        // Slots that the table does not have.
        for key in [2, 3, MAX_ENTRIES as u64 - 1, u64::MAX] {
            assert!(!view.is_registered(Key(key)) && view.entry(Key(key)).is_none(), "{key}");
        }
        assert!(forger.get(1).is_some() && forger.get(2).is_none(), "the owner's life is no entry");
        let key = Key::new(1, 5);
        let raw = forger.get(1).unwrap();
        raw.key.store(key.0, Ordering::Relaxed);
        raw.address.store(u64::MAX - 5, Ordering::Relaxed);
        raw.length.store(7, Ordering::Relaxed);
        raw.mappable.store(77, Ordering::Relaxed);
        assert_eq!(view.entry(key), None, "a range beyond the address space");
        raw.length.store(5, Ordering::Relaxed);
        assert!(view.entry(key).unwrap().mappable);
        let long = memfd(c"long", MAX_ENTRIES * size_of::<RawEntry>() + LIFE + 1).unwrap();
        seal(long.as_fd(), libc::F_SEAL_SHRINK).unwrap();
        assert!(TableView::adopt(long.as_fd()).is_err());
        for length in [1, LIFE - 1, LIFE, LIFE + 1] {
            let short = memfd(c"short", length).unwrap();
            seal(short.as_fd(), libc::F_SEAL_SHRINK).unwrap();
            let view = TableView::adopt(short.as_fd()).unwrap();
            assert!(view.owner() == Owner::Untold && view.entry(Key(1 << SLOT_BITS)).is_none());
        }
    }
}
