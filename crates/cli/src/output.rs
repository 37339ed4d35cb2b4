//! What goes to stdout: text, one JSON object, or a daemon's `ready` line. What goes to stderr
//! besides logs: complaints and progress.
//!
//! What cannot be written to stdout is an error: who asked for an answer must not take none for it.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::bench::figures::per;
pub(crate) use crate::escape::escaped;
use crate::{closed, escape, units};

/// A JSON object was printed: a failure after it prints no other one.
static ANSWERED: AtomicBool = AtomicBool::new(false);

/// Stdout gets the bytes of a file, and answers go to stderr.
static FOR_A_FILE: AtomicBool = AtomicBool::new(false);

/// Stdout did not take what was written.
#[derive(Debug, Error)]
#[error("cannot write to stdout: {0}")]
pub(crate) struct StdoutError(io::Error);

/// Prints one JSON object as one line.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = printable(&serde_json::to_string(value)?);
    tell_no_failure();
    Ok(answer(&text)?)
}

/// As [`json`], for one of several objects: until [`tell_no_failure`] a failure after it is told by an object, too.
pub(crate) fn json_of_several(value: &impl Serialize) -> anyhow::Result<()> {
    Ok(answer(&printable(&serde_json::to_string(value)?))?)
}

/// A failure from here on is what objects that were printed say: no other one is printed.
pub(crate) fn tell_no_failure() {
    ANSWERED.store(true, Ordering::Relaxed);
}

/// Puts a path into an object. JSON is UTF-8: in place of other bytes it has U+FFFD.
pub(crate) fn path<S: Serializer>(
    path: impl AsRef<Path>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.as_ref().display())
}

/// The same, if there is one.
pub(crate) fn path_if_any<S: Serializer>(
    it: &Option<PathBuf>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match it {
        Some(it) => path(it, serializer),
        None => serializer.serialize_none(),
    }
}

/// Prints the line that says that a daemon serves, and how to reach it. Tells the service manager too,
/// if that has started it (sd_notify(3)).
pub(crate) fn ready(value: &impl Serialize) -> anyhow::Result<()> {
    let text = printable(&serde_json::to_string(value)?);
    print(&format!("ready {text}\n"))?;
    if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
        // Who set the variable may be gone, and what is served is served.
        complain(&format!("cannot tell NOTIFY_SOCKET that this is ready: {error}"));
    }
    Ok(())
}

/// Prints a line or several. Nothing in them acts on a terminal; names were [`escaped`] before, so
/// that they are told from what is said about them.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    Ok(answer(&escape::text(text))?)
}

/// Stdout gets the bytes of a file from now on: text and JSON go to stderr.
pub(crate) fn give_stdout_away() {
    FOR_A_FILE.store(true, Ordering::Relaxed);
}

fn answer(line: &str) -> Result<(), StdoutError> {
    if FOR_A_FILE.load(Ordering::Relaxed) {
        complain(line);
        return Ok(());
    }
    print(&format!("{line}\n"))
}

/// Prints this, at once, though stdout may be a pipe.
pub(crate) fn print(text: &str) -> Result<(), StdoutError> {
    closed::check(libc::STDOUT_FILENO).map_err(StdoutError)?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(StdoutError)
}

/// Prints what clap has to show, in colours where stdout is a terminal that may have them.
pub(crate) fn help(error: &clap::Error) -> Result<(), StdoutError> {
    // A closed one is found here.
    print("")?;
    error.print().and_then(|()| io::stdout().flush()).map_err(StdoutError)
}

/// Writes a line to stderr, if that takes it: there is nowhere else to complain.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", escape::text(text));
}

/// Whether a JSON object was printed.
pub(crate) fn has_answered() -> bool {
    ANSWERED.load(Ordering::Relaxed)
}

/// Whether an error is that nobody reads our stdout any more.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let closed = |StdoutError(error): &StdoutError| error.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<StdoutError>().is_some_and(closed)
}

/// The same JSON, in which nothing acts on a terminal. Such characters stand only in strings, where
/// they may be written as escapes; JSON's own writer does so with some of them.
fn printable(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match escape::is_unsafe(c) {
            false => text.push(c),
            // All of them have 16 bits. Writing to a string cannot fail.
            true => drop(write!(text, "\\u{:04x}", c as u32)),
        }
    }
    text
}

/// One line on a terminal that says how far long work is. Nothing where stderr is no terminal.
pub(crate) struct Progress {
    what: &'static str,
    /// Whether bytes are counted.
    bytes: bool,
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
        let mut progress = Self::counting(what, total);
        progress.bytes = true;
        progress
    }

    /// For `total` of something.
    pub(crate) fn counting(what: &'static str, total: u64) -> Self {
        let terminal = io::stderr().is_terminal();
        let start = Instant::now();
        Self { what, bytes: false, total, done: 0, start, shown: None, terminal }
    }

    /// So many more are done.
    pub(crate) fn advance(&mut self, count: u64) {
        self.done += count;
        if !self.terminal || self.shown.is_some_and(|shown| shown.elapsed() < Self::INTERVAL) {
            return;
        }
        self.shown = Some(Instant::now());
        let _ = write!(io::stderr(), "\r{}\x1b[K", self.text(self.start.elapsed()));
    }

    /// How far it is after so long: share, rate, and what is left at this rate.
    fn text(&self, elapsed: Duration) -> String {
        let Self { what, bytes, total, done, .. } = *self;
        let share = if total == 0 { 1.0 } else { done as f64 / total as f64 };
        let rate = per(done as f64, elapsed.as_secs_f64());
        let shown = if bytes { units::rate(rate) } else { format!("{rate:.0} {what}/s") };
        let mut text = format!("{what} {:3.0} %  {shown}", share * 100.0);
        let left = per(total.saturating_sub(done) as f64, rate);
        if let Ok(left) = Duration::try_from_secs_f64(left)
            && rate > 0.0
        {
            text.push_str(&format!("  {} left", units::clock(left)));
        }
        text
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_says_how_fast_and_how_long_still() {
        let mut progress = Progress::new("put", 4_000_000_000);
        progress.terminal = false;
        assert_eq!(progress.text(Duration::ZERO), "put   0 %  0 B/s");
        progress.advance(1_000_000_000);
        let text = progress.text(Duration::from_secs(25));
        assert_eq!(text, "put  25 %  40.0 MB/s  1:15 left");
        let mut progress = Progress::counting("runs", 10);
        progress.terminal = false;
        progress.advance(10);
        assert_eq!(progress.text(Duration::from_secs(2)), "runs 100 %  5 runs/s  0:00 left");
    }

    #[test]
    fn json_stays_the_same_and_does_nothing_to_a_terminal() {
        let name = "a\u{1b}[2J\u{9b}\u{202e}\u{7f}\"";
        let json = printable(&serde_json::to_string(name).unwrap());
        assert!(!json.chars().any(escape::is_unsafe), "{json}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), name);
    }
}
