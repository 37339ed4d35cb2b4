//! Lines on stderr about what takes long, so that nobody takes it for dead.

use std::io::{self, IsTerminal, Write};
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

/// A line on a terminal that says what is being done, until it is dropped. Nothing where stderr is
/// no terminal.
pub(crate) struct Step {
    shown: bool,
}

impl Step {
    pub(crate) fn new(what: &str) -> Self {
        let shown = io::stderr().is_terminal();
        if shown {
            let _ = write!(io::stderr(), "\r{what} ...\x1b[K");
        }
        Self { shown }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
