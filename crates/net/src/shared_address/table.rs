//! Who has which slot: a file in memory that all processes of an address have open.
//!
//! A slot is its owner's who holds the lock of the slot's byte. The kernel takes the lock away when the
//! owner ends, however it ends. Locks are of the open file description (F_OFD_SETLK, fcntl(2)), so that
//! two devices of one process exclude each other too; each opens the file anew.
//!
//! What the file holds is a hint, but for the key: whoever writes nonsense there, which only the same
//! user can, makes slots be chosen badly and numbers come again too early.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use millstream_roce::SLOTS;

/// Bytes of a slot's record.
const RECORD: usize = 24;

/// Where the key begins, after the records.
const KEY: u64 = (SLOTS * RECORD) as u64;

/// Bytes of the key.
pub(super) const KEY_LENGTH: usize = 16;

/// What the processes of an address know and nobody else.
pub(super) type Key = [u8; KEY_LENGTH];

/// What is known of a slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Record {
    /// How many have had it.
    pub(super) generation: u64,
    /// Since when it is as it is, in nanoseconds since this machine started.
    pub(super) since: u64,
    /// Its last owner has not given it back, or has it still.
    pub(super) claimed: bool,
}

pub(super) struct Table(File);

impl Table {
    /// A new file with a new key, and slots of which any may be the first.
    pub(super) fn create() -> io::Result<OwnedFd> {
        // SAFETY: a name that ends with a zero.
        let descriptor =
            unsafe { libc::memfd_create(c"millstream-slots".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else has it.
        let file = unsafe { File::from_raw_fd(descriptor) };
        let mut random = [0; KEY_LENGTH + SLOTS];
        // SAFETY: so many bytes, borrowed exclusively.
        let filled = unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
        if usize::try_from(filled) != Ok(random.len()) {
            return Err(io::Error::last_os_error());
        }
        let (key, order) = random.split_at(KEY_LENGTH);
        file.write_all_at(key, KEY)?;
        let table = Self(file);
        for (slot, &random) in order.iter().enumerate() {
            // In any order: who had the address before may have had any numbers.
            let (generation, since) = (random.into(), random.into());
            table.write(slot, Record { generation, since, claimed: false })?;
        }
        let Self(file) = table;
        Ok(file.into())
    }

    /// Opens the file anew.
    pub(super) fn open(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        OpenOptions::new().read(true).write(true).open(path).map(Self)
    }

    pub(super) fn key(&self) -> io::Result<Key> {
        let mut key = [0; KEY_LENGTH];
        self.0.read_exact_at(&mut key, KEY)?;
        Ok(key)
    }

    pub(super) fn record(&self, slot: usize) -> io::Result<Record> {
        let mut bytes = [0; RECORD];
        self.0.read_exact_at(&mut bytes, position(slot))?;
        let word = |at: usize| {
            u64::from_ne_bytes(*bytes[at..].first_chunk().expect("a record is three words"))
        };
        Ok(Record { generation: word(0), since: word(8), claimed: word(16) != 0 })
    }

    /// For who has the slot's lock.
    pub(super) fn write(&self, slot: usize, record: Record) -> io::Result<()> {
        let words = [record.generation, record.since, record.claimed.into()];
        let mut bytes = [0; RECORD];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        self.0.write_all_at(&bytes, position(slot))
    }

    /// Takes the slot's lock; `false` when another has it.
    pub(super) fn lock(&self, slot: usize) -> io::Result<bool> {
        match self.set_lock(slot, libc::F_WRLCK) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn unlock(&self, slot: usize) -> io::Result<()> {
        self.set_lock(slot, libc::F_UNLCK)
    }

    fn set_lock(&self, slot: usize, kind: libc::c_int) -> io::Result<()> {
        let lock = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: position(slot).cast_signed(),
            l_len: 1,
            // Must be 0 for these locks.
            l_pid: 0,
        };
        // SAFETY: a whole lock, alive during the call, which does not wait.
        let result =
            unsafe { libc::fcntl(self.0.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

const fn position(slot: usize) -> u64 {
    (slot * RECORD) as u64
}

/// The time, by a clock that all processes of this machine share.
pub(super) fn now() -> u64 {
    // SAFETY: plain old data, of which zeros are a valid value.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: borrowed exclusively. The clock exists, so it cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_one_owner_at_a_time() {
        let file = Table::create().unwrap();
        let [one, other] = [0, 1].map(|_| Table::open(file.as_fd()).unwrap());
        assert!(one.lock(3).unwrap());
        assert!(!other.lock(3).unwrap(), "two have claimed one slot");
        assert!(other.lock(4).unwrap());
        one.unlock(3).unwrap();
        assert!(other.lock(3).unwrap());
        // However the owner ends.
        drop(other);
        assert!(one.lock(3).unwrap() && one.lock(4).unwrap());
    }

    #[test]
    fn all_see_the_records_and_the_key() {
        let file = Table::create().unwrap();
        let [one, other] = [0, 1].map(|_| Table::open(file.as_fd()).unwrap());
        assert_eq!(one.key().unwrap(), other.key().unwrap());
        assert_ne!(one.key().unwrap(), [0; KEY_LENGTH]);
        let record = Record { generation: 5, since: now(), claimed: true };
        one.write(SLOTS - 1, record).unwrap();
        assert_eq!(other.record(SLOTS - 1).unwrap(), record);
        assert!(!other.record(0).unwrap().claimed && other.record(0).unwrap().since < now());
        let another = Table::open(Table::create().unwrap().as_fd()).unwrap();
        assert_ne!(one.key().unwrap(), another.key().unwrap());
    }

    #[test]
    fn a_file_that_is_too_short_is_an_error() {
        let file = Table::create().unwrap();
        File::from(file.try_clone().unwrap()).set_len(RECORD as u64).unwrap();
        let table = Table::open(file.as_fd()).unwrap();
        assert!(table.record(0).is_ok());
        assert!(table.record(1).is_err());
        assert!(table.key().is_err());
    }
}
