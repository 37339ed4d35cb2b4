//! Lines on stderr about what takes long, so that nobody takes it for dead.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How long something takes before there is a line about it.
const DELAY: Duration = Duration::from_secs(1);

/// Prints a line when it is not dropped within a second.
pub(crate) struct Notice {
    /// Dropped to say that it is done.
    _done: mpsc::Sender<()>,
}

impl Notice {
    /// `text` says what is being done.
    pub(crate) fn new(text: String) -> Self {
        let (done, told) = mpsc::channel::<()>();
        let wait = move || {
            if told.recv_timeout(DELAY) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{text}");
            }
        };
        // Without a thread there is no line, and the work is done all the same.
        let _ = thread::Builder::new().name("notice".into()).spawn(wait);
        Self { _done: done }
    }
}
