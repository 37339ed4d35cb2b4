//! Processes that are forked off: what C names stays with the process that made it, whose threads the other has not got.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use millstream_net::forks;

use crate::handles::Handles;

/// Handles of the process that they were last asked for. Those of processes before that are never freed.
#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    last: AtomicPtr<OfProcess<T>>,
}

#[derive(Debug)]
struct OfProcess<T> {
    /// See [`forks`].
    forks: u32,
    handles: Handles<T>,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self { last: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Those of this process. Waits for nothing that another process has left.
    pub(crate) fn handles(&self) -> &'static Handles<T> {
        let now = forks();
        let known = self.last.load(Ordering::Acquire);
        // SAFETY: null, or what was put there by this function and is never freed.
        if let Some(of_process) = unsafe { known.as_ref() }.filter(|known| known.forks == now) {
            return &of_process.handles;
        }
        let handles = if now == 0 { Handles::new() } else { Handles::after_fork() };
        let new = Box::into_raw(Box::new(OfProcess { forks: now, handles }));
        match self.last.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it was just made, and from here on is never freed.
            Ok(_) => unsafe { &(*new).handles },
            Err(other) => {
                // SAFETY: nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: another thread of this process has put it there, and it is never freed.
                unsafe { &(*other).handles }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::handles::Giver;

    #[test]
    fn without_a_fork_no_handle_is_of_another_process_whichever_table_is_used_first() {
        static USED: PerProcess<u8> = PerProcess::new();
        static UNUSED: PerProcess<u8> = PerProcess::new();
        let handle = USED.handles().insert(Arc::new(1)).unwrap();
        assert_eq!(UNUSED.handles().giver(handle), Giver::This);
        assert_eq!(UNUSED.handles().find(handle), None);
    }
}
