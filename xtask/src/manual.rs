//! `cargo xtask man`: writes packaging/man anew. A test of the command compares.

use anyhow::{Context, Result};

use crate::process;

/// Where the manual pages are, from the root.
pub(crate) const PAGES: &str = "packaging/man";

/// Has the command write its pages.
pub(crate) fn run() -> Result<()> {
    let folder = process::repository_root().join(PAGES);
    // Pages of commands that there are no more would stay.
    if folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let arguments = ["run", "--quiet", "--package", "millstream", "--", "manual"];
    process::run(process::cargo().args(arguments).arg(&folder))
}
