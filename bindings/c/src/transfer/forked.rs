//! Processes that are forked off: engines stay with the process that created them, whose threads the other has not got.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use super::shutdown;

/// How often this process was forked off another one, as far as this library knows.
static GENERATION: AtomicU32 = AtomicU32::new(0);

static WATCHING: Once = Once::new();

/// The process that an engine belongs to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Process(u32);

impl Process {
    /// This one, which is noticed from here on when it is another one.
    pub(super) fn this() -> Self {
        // SAFETY: the function is there as long as the library, and does only what one may there.
        WATCHING.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    pub(super) fn is_this(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    shutdown::forget();
}
