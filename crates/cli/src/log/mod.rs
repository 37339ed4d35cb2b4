//! Logs, which go to stderr: what is in them, and how much.
//!
//! They have no colours: what peers and users named stands in them, and so nothing in them may act
//! on a terminal.

mod limit;

use std::io::{self, Write};
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::escape;
use limit::Limit;

/// Of this program, and of any.
pub(crate) const VARIABLES: [&str; 2] = ["MILLSTREAM_LOG", "RUST_LOG"];

/// What `-v` asks for, for processes that we start.
static ASKED_FOR: OnceLock<&str> = OnceLock::new();

/// Starts logging. `-v`, given `verbosity` times, comes first; then what is in the environment; then the
/// setting; without any, daemons show warnings, and other commands only what they fail of, which they
/// say themselves.
pub(crate) fn start(verbosity: u8, setting: Option<&str>, daemon: bool) {
    let asked_for = match verbosity {
        0 => None,
        1 => Some("info"),
        2 => Some("debug"),
        _ => Some("trace"),
    };
    let mut complaint = None;
    let default = if daemon { "warn" } else { "error" };
    let filter = match asked_for {
        Some(level) => EnvFilter::new(ASKED_FOR.get_or_init(|| level)),
        None => from_environment(&mut complaint)
            .unwrap_or_else(|| EnvFilter::new(setting.unwrap_or(default))),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(Stderr::default)
        .with_ansi(false)
        // It would say on stderr that stderr does not take it.
        .log_internal_errors(false);
    tracing_subscriber::registry().with(filter).with(Limit::start()).with(lines).init();
    if let Some(complaint) = complaint {
        tracing::error!("{complaint}");
    }
}

/// Tells what is still to be told before the process ends.
pub(crate) fn finish() {
    limit::finish();
}

/// What `-v` asked for, if it did.
pub(crate) fn asked_for() -> Option<&'static str> {
    ASKED_FOR.get().copied()
}

/// Whether logs of processes that we start are to be shown.
pub(crate) fn is_asked_for() -> bool {
    asked_for().is_some() || VARIABLES.iter().any(|name| std::env::var_os(name).is_some())
}

fn from_environment(complaint: &mut Option<String>) -> Option<EnvFilter> {
    for name in VARIABLES {
        let Some(text) = std::env::var_os(name) else { continue };
        match text.to_string_lossy().parse() {
            Ok(filter) => return Some(filter),
            Err(error) => {
                *complaint = Some(format!("{name} is not understood, and has no effect: {error}"));
            }
        }
    }
    None
}

/// One event on its way to stderr.
#[derive(Default)]
struct Stderr(Vec<u8>);

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Stderr {
    fn drop(&mut self) {
        let text = String::from_utf8_lossy(&self.0);
        let line = escape::escaped(text.trim_end()) + "\n";
        // There is nowhere else to say that stderr does not take it.
        let _ = io::stderr().lock().write_all(line.as_bytes());
    }
}
