//! The kernel as device: the test suite of `millstream-verbs`, with its provider `ibverbs`, on the
//! guest's soft-RoCE.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::guest::Guest;
use super::row::{await_that, finish};

/// For the whole suite, which takes two seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the suite, which is this program; what it prints goes to `STEM.kernel.log`.
pub(super) fn run(guest: &mut Guest, suite: &Path, stem: &Path) -> Result<()> {
    // Built here: the guest has the same libraries, or newer ones, and no compiler.
    let program = guest.lend(suite)?;
    let suite = guest.start(&format!("MILLSTREAM_TEST_PROVIDER=ibverbs exec ./{program}"))?;
    await_that(LIMIT, || suite.status().is_some());
    finish(&suite, stem)
}
