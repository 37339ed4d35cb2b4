//! Where a peer says which memory it is accessing: a page of words that the owner of the memory made for
//! this peer alone. A thread of the peer enters by writing the slot of a registration into a word of its
//! own, and then looks whether that is still registered. Whoever revokes a registration does it the
//! other way round: first the table, then a look at the words. So either the thread sees the
//! revocation, or it is seen.
//!
//! What the words say is only ever waited for, and never longer than the owner wants or the peer lives.

use std::hint;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::memory::{Access, Mapping, memfd, seal};
use super::table::{Key, TableView};

/// Threads of one peer that can be inside at a time.
pub(super) const WORDS: u32 = 64;

/// Words are apart by so much: each thread has a cache line of its own.
const STRIDE: usize = 64;
const LENGTH: usize = WORDS as usize * STRIDE;

/// A copy takes some ten microseconds. So often it is looked for its end before the thread sleeps.
const SPINS: u32 = 1000;

/// How often who waits looks whether the peer lives: its death wakes nobody who sleeps on a word.
const LIFE_CHECK: Duration = Duration::from_millis(20);

/// The words of one peer, as both sides map them.
#[derive(Debug)]
pub(super) struct Presence {
    mapping: Mapping,
}

impl Presence {
    /// For a new peer, and the file to send to it.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let file = memfd(c"millstream-presence", LENGTH)?;
        let mapping = Mapping::new(file.as_fd(), LENGTH, Access::ReadWrite)?;
        seal(file.as_fd(), libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL)?;
        Ok((Self { mapping }, file))
    }

    /// Maps the one that another process made for us.
    pub(super) fn adopt(file: BorrowedFd<'_>) -> io::Result<Self> {
        let mapping = Mapping::adopt(file, LENGTH, Access::ReadWrite)?;
        match mapping.length() {
            LENGTH => Ok(Self { mapping }),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "presence of another length")),
        }
    }

    fn word(&self, index: u32) -> &AtomicU32 {
        let index = index % WORDS;
        let pointer = self.mapping.pointer().as_ptr().wrapping_add(index as usize * STRIDE);
        // SAFETY: inside the mapping, which has `LENGTH` bytes and lives as long as the reference, and
        // aligned. The other process may change it, as atomics may be.
        unsafe { &*pointer.cast::<AtomicU32>() }
    }

    /// Says with this word that the memory is accessed; whether it may be. If so, `leave` must follow.
    pub(super) fn enter(&self, word: u32, key: Key, table: &TableView) -> bool {
        // Sequentially consistent: before `is_registered` looks.
        self.word(word).store(inside(key), Ordering::SeqCst);
        let entered = table.is_registered(key);
        if !entered {
            self.leave(word, key, table);
        }
        entered
    }

    /// Says that it is accessed no more.
    pub(super) fn leave(&self, word: u32, key: Key, table: &TableView) {
        let word = self.word(word);
        word.store(0, Ordering::SeqCst);
        // Who revokes it may sleep on the word.
        if !table.is_registered(key) {
            // SAFETY: the word is alive.
            unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        }
    }

    /// After the table says that it is not registered: waits until nobody is inside, for as long as
    /// `alive` says so and until `deadline`. Whether nobody is.
    pub(super) fn wait_until_left(
        &self,
        key: Key,
        deadline: Instant,
        alive: impl Fn() -> bool,
    ) -> bool {
        (0..WORDS).all(|index| wait_for(self.word(index), inside(key), deadline, &alive))
    }
}

/// What a word says of who is inside this: its slot, counted from 1.
fn inside(key: Key) -> u32 {
    key.slot() as u32 + 1
}

fn wait_for(word: &AtomicU32, value: u32, deadline: Instant, alive: &impl Fn() -> bool) -> bool {
    for _ in 0..SPINS {
        if word.load(Ordering::SeqCst) != value {
            return true;
        }
        hint::spin_loop();
    }
    while word.load(Ordering::SeqCst) == value {
        if !alive() {
            return true;
        }
        let left = deadline.saturating_duration_since(Instant::now()).min(LIFE_CHECK);
        if left.is_zero() {
            return false;
        }
        let time = libc::timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
        // SAFETY: the word and the time are alive. The kernel compares the word before it sleeps; not
        // private, since another process wakes.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                value,
                &raw const time,
                ptr::null::<u32>(),
                0,
            )
        };
    }
    true
}

/// Which of our own threads has which word.
#[derive(Debug, Default)]
pub(super) struct Words {
    taken: AtomicU64,
}

impl Words {
    /// A word that no other thread has; `None` when all are taken.
    pub(super) fn take(&self) -> Option<u32> {
        let lowest = |taken: u64| (taken != u64::MAX).then(|| taken | (taken + 1));
        let before = self.taken.fetch_update(Ordering::Acquire, Ordering::Relaxed, lowest).ok()?;
        Some(before.trailing_ones())
    }

    pub(super) fn give_back(&self, word: u32) {
        self.taken.fetch_and(!(1 << word), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::super::table::{Entry, Table};
    use super::*;

    struct Pair {
        table: Table,
        view: TableView,
        owner: Presence,
        peer: Presence,
    }

    impl Pair {
        fn new() -> Self {
            let table = Table::new(4).unwrap();
            let view = TableView::adopt(table.file()).unwrap();
            let (owner, file) = Presence::new().unwrap();
            let peer = Presence::adopt(file.as_fd()).unwrap();
            Self { table, view, owner, peer }
        }

        fn register(&self) -> Key {
            self.table.insert(Entry { address: 1, length: 1, mappable: true }).unwrap()
        }
    }

    /// Whether nobody is inside anything.
    fn is_empty(presence: &Presence) -> bool {
        (0..WORDS).all(|index| presence.word(index).load(Ordering::SeqCst) == 0)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(30)
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn who_revokes_waits_for_who_is_inside() {
        let Pair { table, view, owner, peer } = &Pair::new();
        let pair = Pair::new();
        let (key, other) = (pair.register(), pair.register());
        drop(pair);
        assert!(!peer.enter(0, key, view), "not registered in this table");
        let key = table.insert(Entry { address: 1, length: 1, mappable: true }).unwrap();
        assert_eq!(key.slot(), 0);
        assert!(peer.enter(5, key, view));
        assert!(!is_empty(owner));
        assert!(owner.wait_until_left(other, soon(), || true), "in another one");
        table.revoke(key);
        assert!(!owner.wait_until_left(key, soon(), || true), "not for ever");
        assert!(owner.wait_until_left(key, late(), || false), "not for the dead");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| owner.wait_until_left(key, late(), || true));
            peer.leave(5, key, view);
            assert!(waiting.join().unwrap());
        });
        assert!(!peer.enter(5, key, view));
        assert!(is_empty(owner), "who was refused is not inside");
    }

    /// Whatever the order of their steps, nobody is inside once the owner has waited.
    #[test]
    fn nobody_is_inside_after_a_revocation() {
        let pair = Pair::new();
        let Pair { table, view, owner, peer } = &pair;
        for round in 0..2000 {
            let key = pair.register();
            let (inside, revoked) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    while peer.enter(3, key, view) {
                        inside.store(true, Ordering::SeqCst);
                        assert!(!revoked.load(Ordering::SeqCst), "round {round}");
                        inside.store(false, Ordering::SeqCst);
                        peer.leave(3, key, view);
                    }
                });
                table.revoke(key);
                assert!(owner.wait_until_left(key, late(), || true));
                revoked.store(true, Ordering::SeqCst);
                assert!(!inside.load(Ordering::SeqCst), "round {round}");
            });
            table.free(key);
        }
    }

    /// Words that change all the time, or say what cannot be, cost the owner no more than its time.
    #[test]
    fn forged_words_are_waited_for_until_the_deadline_only() {
        let pair = Pair::new();
        let key = pair.register();
        pair.table.revoke(key);
        for index in 0..WORDS {
            pair.peer.word(index).store(u32::MAX, Ordering::Relaxed);
        }
        assert!(pair.owner.wait_until_left(key, soon(), || true), "inside nothing");
        pair.peer.word(63).store(inside(key), Ordering::Relaxed);
        assert!(!pair.owner.wait_until_left(key, soon(), || true));
    }

    #[test]
    fn each_thread_has_its_own_word() {
        let words = Words::default();
        let taken: Vec<u32> = std::iter::from_fn(|| words.take()).collect();
        assert_eq!(taken, (0..WORDS).collect::<Vec<_>>());
        words.give_back(17);
        assert_eq!(words.take(), Some(17));
        assert_eq!(words.take(), None);
    }

    #[test]
    fn presence_of_another_length_is_refused() {
        let file = memfd(c"test", LENGTH - 1).unwrap();
        seal(file.as_fd(), libc::F_SEAL_SHRINK).unwrap();
        assert!(Presence::adopt(file.as_fd()).is_err());
    }
}
