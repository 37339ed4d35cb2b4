//! What goes to stdout: text, one JSON object, or a daemon's `ready` line. Logs go to stderr.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

/// Prints one JSON object as one line. A closed stdout is not an error: nobody wants the answer.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(&serde_json::to_string(value)?);
    Ok(())
}

/// Prints the line that says that a daemon serves, and how to reach it.
pub(crate) fn ready(value: &impl Serialize) -> anyhow::Result<()> {
    line(&format!("ready {}", serde_json::to_string(value)?));
    Ok(())
}

/// Prints a line at once, though stdout may be a pipe.
pub(crate) fn line(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// Stdout did not take what was written.
#[derive(Debug, Error)]
#[error("cannot write to stdout: {0}")]
pub(crate) struct StdoutError(io::Error);

/// Prints this, at once, though stdout may be a pipe.
pub(crate) fn print(text: &str) -> Result<(), StdoutError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(StdoutError)
}

/// Writes a line to stderr, if that takes it: there is nowhere else to complain.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// A name as it can be shown within a line: control characters, and bytes that are not UTF-8, are
/// written out.
pub(crate) fn escaped(name: impl AsRef<OsStr>) -> String {
    let mut shown = String::new();
    for chunk in name.as_ref().as_bytes().utf8_chunks() {
        for c in chunk.valid().chars() {
            match c.is_control() {
                false => shown.push(c),
                true => shown.extend(c.escape_default()),
            }
        }
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(shown, "\\x{byte:02x}");
        }
    }
    shown
}

/// One line on a terminal that says how far long work is. Nothing where stderr is no terminal.
pub(crate) struct Progress {
    what: &'static str,
    /// What is counted, and how many of it a displayed unit has.
    unit: (&'static str, f64),
    total: u64,
    done: u64,
    start: Instant,
    shown: Option<Instant>,
    terminal: bool,
}

impl Progress {
    const INTERVAL: Duration = Duration::from_millis(200);

    /// For `total` bytes of something.
    pub(crate) fn new(what: &'static str, total: u64) -> Self {
        Self { unit: ("GB", 1e9), ..Self::counting(what, total) }
    }

    /// For `total` of something.
    pub(crate) fn counting(what: &'static str, total: u64) -> Self {
        let terminal = io::stderr().is_terminal();
        let unit = (what, 1.0);
        Self { what, unit, total, done: 0, start: Instant::now(), shown: None, terminal }
    }

    /// So many more are done.
    pub(crate) fn advance(&mut self, count: u64) {
        self.done += count;
        if !self.terminal || self.shown.is_some_and(|shown| shown.elapsed() < Self::INTERVAL) {
            return;
        }
        self.shown = Some(Instant::now());
        let share = if self.total == 0 { 1.0 } else { self.done as f64 / self.total as f64 };
        let rate = self.done as f64 / self.start.elapsed().as_secs_f64().max(1e-9) / self.unit.1;
        let (what, unit) = (self.what, self.unit.0);
        let _ = write!(io::stderr(), "\r{what} {:3.0} %  {rate:.2} {unit}/s\x1b[K", share * 100.0);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
