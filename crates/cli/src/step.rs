//! What is being done, on a terminal.

use std::io::{self, IsTerminal, Write};

/// A line on stderr that says what is being done, until it is dropped. Nothing where stderr is no
/// terminal.
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
