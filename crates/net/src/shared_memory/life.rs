//! Whether the process that memory belongs to still runs, as the kernel says in a word of the memory itself: who
//! looks needs a load, where a pidfd takes a system call.
//!
//! The word is a robust futex (set_robust_list(2), the kernel's robust-futex-ABI.rst). It has the number of a thread
//! of the owner, and the kernel sets FUTEX_OWNER_DIED in it when that thread ends, also by SIGKILL, and by execve(2)
//! before the memory of the program before goes.

use std::io;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// What the word says of its owner.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Owner {
    /// It runs.
    Alive,
    /// It has ended, or runs another program.
    Ended,
    /// Nothing: the thread has not begun, or was told to end, or the kernel does not do this.
    Untold,
}

impl Owner {
    /// What it says now. What this thread has read and written before, happened before.
    pub(super) fn of(word: &AtomicU32) -> Self {
        fence(Ordering::SeqCst);
        // Relaxed, since the mapping is read-only: only such loads are sure not to write.
        let found = word.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        match found {
            0 => Self::Untold,
            value if value & libc::FUTEX_OWNER_DIED != 0 => Self::Ended,
            _ => Self::Alive,
        }
    }
}

/// `struct robust_list`.
#[repr(C)]
struct Link {
    next: *const Self,
}

/// `struct robust_list_head`, and the one entry of the list.
#[repr(C)]
struct List {
    first: Link,
    /// From an entry to its word.
    offset: libc::c_long,
    pending: *const Link,
    entry: Link,
}

/// `sizeof(struct robust_list_head)`, as the kernel wants it.
const HEAD_LENGTH: usize = 3 * size_of::<usize>();

/// This thread stands for its process in the word until this is dropped, which says nothing of the process.
pub(super) struct Tenure<'a> {
    word: &'a AtomicU32,
    list: *mut List,
    /// The list of before: the C library's, for robust mutexes.
    before: *const libc::c_void,
    /// It is of this thread.
    _not_send: PhantomData<*const ()>,
}

impl<'a> Tenure<'a> {
    /// Begins, in a thread that locks no robust mutex meanwhile.
    pub(super) fn begin(word: &'a AtomicU32) -> io::Result<Self> {
        let mut before: *const libc::c_void = ptr::null();
        let mut length = 0_usize;
        // SAFETY: both are borrowed exclusively. 0 is this thread.
        let found = unsafe {
            libc::syscall(libc::SYS_get_robust_list, 0, &raw mut before, &raw mut length)
        };
        if found != 0 {
            return Err(io::Error::last_os_error());
        }
        let link = || Link { next: ptr::null() };
        let list = Box::into_raw(Box::new(List {
            first: link(),
            offset: 0,
            pending: ptr::null(),
            entry: link(),
        }));
        // SAFETY: just made. The list is a ring: the head, the entry, the head.
        unsafe {
            (*list).first.next = &raw const (*list).entry;
            (*list).entry.next = &raw const (*list).first;
            let entry = (&raw const (*list).entry).addr();
            (*list).offset = word.as_ptr().addr().wrapping_sub(entry) as libc::c_long;
        }
        let tenure = Self { word, list, before, _not_send: PhantomData };
        // SAFETY: the list lives as long as the kernel knows of it: until this is dropped, or the thread ends.
        if unsafe { libc::syscall(libc::SYS_set_robust_list, list, HEAD_LENGTH) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // Only now: before, nobody would be told of an end. SAFETY: no arguments.
        word.store(unsafe { libc::gettid() } as u32, Ordering::Release);
        Ok(tenure)
    }
}

impl Drop for Tenure<'_> {
    fn drop(&mut self) {
        self.word.store(0, Ordering::Release);
        // SAFETY: what the kernel had before. Once it has it again, nobody knows of our list.
        unsafe {
            if libc::syscall(libc::SYS_set_robust_list, self.before, HEAD_LENGTH) == 0 {
                drop(Box::from_raw(self.list));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem;
    use std::thread;

    use super::*;

    #[test]
    fn an_owner_that_ends_without_a_word_is_told_by_the_kernel() {
        let word = AtomicU32::new(0);
        thread::scope(|scope| {
            let silent = scope.spawn(|| mem::forget(Tenure::begin(&word).unwrap()));
            // The kernel walks the list before it tells who joins (mm_release).
            silent.join().unwrap();
        });
        assert_eq!(Owner::of(&word), Owner::Ended);
    }

    #[test]
    fn an_owner_that_is_told_to_end_says_nothing() {
        let word = AtomicU32::new(0);
        assert_eq!(Owner::of(&word), Owner::Untold);
        for _ in 0..2 {
            let tenure = Tenure::begin(&word).unwrap();
            assert_eq!(Owner::of(&word), Owner::Alive);
            drop(tenure);
            assert_eq!(Owner::of(&word), Owner::Untold);
        }
        // The list of the C library is there again: the end of this thread marks nothing.
        let other = AtomicU32::new(0);
        thread::scope(|scope| scope.spawn(|| drop(Tenure::begin(&other))).join().unwrap());
        assert_eq!(Owner::of(&other), Owner::Untold);
    }
}
