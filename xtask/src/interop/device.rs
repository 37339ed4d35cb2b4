//! The kernel as device: the test suite of `millstream-verbs`, with its provider `ibverbs`, on the
//! guest's soft-RoCE.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::guest::Guest;
use super::row::{await_that, finish};
use crate::process;

/// For the whole suite, which takes two seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the suite; what it prints goes to `STEM.kernel.log`.
pub(super) fn run(guest: &mut Guest, stem: &Path) -> Result<()> {
    // Built here: the guest has the same libraries, or newer ones, and no compiler.
    let program = guest.lend(&build()?)?;
    let suite = guest.start(&format!("MILLSTREAM_TEST_PROVIDER=ibverbs exec ./{program}"))?;
    await_that(LIMIT, || suite.status().is_some());
    finish(&suite, stem)
}

/// Builds the suite, and returns where it is.
fn build() -> Result<PathBuf> {
    let arguments = ["test", "--package", "millstream-verbs", "--test", "suite", "--no-run"];
    let messages = process::output(process::cargo().args(arguments).arg("--message-format=json"))?;
    messages.lines().find_map(executable).context("cargo named no executable of the suite")
}

/// The executable that one of cargo's messages is about, if it is the suite's.
fn executable(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    let suite = message["target"]["name"] == "suite";
    message["executable"].as_str().filter(|_| suite).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suite_is_found_among_cargos_messages() {
        let library = r#"{"reason":"compiler-artifact","target":{"name":"x"},"executable":null}"#;
        let other = r#"{"reason":"compiler-artifact","target":{"name":"x"},"executable":"/t/x"}"#;
        let suite =
            r#"{"reason":"compiler-artifact","target":{"name":"suite"},"executable":"/t/s"}"#;
        let messages = [library, "not JSON", other, suite];
        assert_eq!(messages.into_iter().find_map(executable), Some(PathBuf::from("/t/s")));
        assert_eq!(executable(other), None);
    }
}
