//! What threads share, for `loom`.
//!
//! `loom` takes a sequentially consistent access for an acquiring or releasing one, which would find
//! faults that are none. So here such a load is preceded by a sequentially consistent fence if the
//! thread has made such a store since its last one: a little more than the language promises (other
//! accesses of the thread are ordered by that fence too), and less than any processor does.
//!
//! Nor does `loom` order the stores of one location by different threads, if nothing else does: a
//! thread may find an older one again. It orders read-modify-writes, so stores are exchanges here.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};

use self::atomic::{AtomicUsize, Ordering, fence};

/// `loom`'s, which does not know constant initial values.
macro_rules! model_thread_local {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = const { $value:expr };) => {
        loom::thread_local! { $(#[$attribute])* static $name: $type = $value; }
    };
    ($(#[$attribute:meta])* static $name:ident: $type:ty = $value:expr;) => {
        loom::thread_local! { $(#[$attribute])* static $name: $type = $value; }
    };
}
pub(crate) use model_thread_local as thread_local;

loom::thread_local! {
    /// This thread has made a sequentially consistent store since its last such fence.
    static STORED: Cell<bool> = Cell::new(false);
}

fn before_load(order: Ordering) {
    if order == Ordering::SeqCst && STORED.with(Cell::get) {
        fence(Ordering::SeqCst);
    }
}

fn after_store(order: Ordering) {
    if order == Ordering::SeqCst {
        STORED.with(|stored| stored.set(true));
    }
}

pub(crate) mod atomic {
    use super::{STORED, after_store, before_load};
    pub(crate) use std::sync::atomic::Ordering;

    pub(crate) fn fence(order: Ordering) {
        loom::sync::atomic::fence(order);
        if order == Ordering::SeqCst {
            STORED.with(|stored| stored.set(false));
        }
    }

    macro_rules! atomic {
        ($name:ident, $value:ty, $($operation:ident)*) => {
            #[derive(Debug, Default)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    before_load(order);
                    self.0.load(order)
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    let release = order != Ordering::Relaxed;
                    self.0.swap(value, if release { Ordering::Release } else { order });
                    after_store(order);
                }

                $(
                    pub(crate) fn $operation(&self, value: $value, order: Ordering) -> $value {
                        before_load(order);
                        let old = self.0.$operation(value, order);
                        after_store(order);
                        old
                    }
                )*
            }
        };
    }

    atomic!(AtomicBool, bool, swap);
    atomic!(AtomicU8, u8, swap fetch_or);
    atomic!(AtomicU64, u64, swap fetch_or fetch_add fetch_min);
    atomic!(AtomicUsize, usize, fetch_add fetch_sub);
}

/// `loom` sees no step in a mutex's release, so it would not try another thread's `try_lock` right
/// before that. The count makes one.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    releases: AtomicUsize,
    mutex: loom::sync::Mutex<T>,
}

#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T> {
    releases: &'a AtomicUsize,
    /// `None` only while it is dropped.
    guard: Option<loom::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { releases: AtomicUsize::new(0), mutex: loom::sync::Mutex::new(value) }
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        match self.mutex.lock() {
            Ok(guard) => Ok(self.guard(guard)),
            Err(poisoned) => Err(PoisonError::new(self.guard(poisoned.into_inner()))),
        }
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        self.releases.fetch_add(0, Ordering::Relaxed);
        match self.mutex.try_lock() {
            Ok(guard) => Ok(self.guard(guard)),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(poisoned)) => {
                Err(PoisonError::new(self.guard(poisoned.into_inner())).into())
            }
        }
    }

    fn guard<'a>(&'a self, guard: loom::sync::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard { releases: &self.releases, guard: Some(guard) }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("it is being dropped")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("it is being dropped")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        if self.guard.is_some() && !std::thread::panicking() {
            self.releases.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(crate) fn wait<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
    ) -> LockResult<MutexGuard<'a, T>> {
        let releases = guard.releases;
        let inner = guard.guard.take().expect("it is being dropped");
        let inner = self.0.wait(inner).unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { releases, guard: Some(inner) })
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}
