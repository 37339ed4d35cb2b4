//! `cargo xtask man` and `cargo xtask config-docs`: write anew what the command says of itself. Tests of
//! the command compare.

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

/// The reference of settings, from the root.
const CONFIGURATION: &str = "docs/reference/configuration.md";

/// Has the command write the reference of its settings.
pub(crate) fn configuration() -> Result<()> {
    let path = process::repository_root().join(CONFIGURATION);
    let arguments = ["run", "--quiet", "--package", "millstream", "--", "config", "--reference"];
    let text = process::output(process::cargo().args(arguments))?;
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
