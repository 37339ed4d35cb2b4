//! The original, as its users install it.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{install, process};

/// What it is called there.
pub(crate) const PACKAGE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";

/// What its programs and ours need beside it.
pub(crate) const NUMPY: &str = "numpy==2.4.6";

const PACKAGES: [&str; 2] = [NUMPY, PACKAGE];

/// Where it is, below the folder of what is built. The name says what is in it.
const FOLDER: &str = "mooncake/0.3.13.post1";

/// The interpreter that has it, which is installed if need be.
pub(crate) fn installed() -> Result<PathBuf> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("its wheel is for x86-64");
    }
    let folder = process::target_directory().join(FOLDER);
    let python = folder.join("bin/python");
    let works = || {
        let import = "import numpy; from mooncake.engine import TransferEngine";
        process::succeeds(Command::new(&python).args(["-c", import]))
    };
    if works() {
        return Ok(python);
    }
    let missing = install::ensure(install::FOR_MOONCAKE);
    if !missing.is_empty() {
        bail!("python3.11 is missing: its wheel is for that version");
    }
    install::ensure_libraries(&["libibverbs1", "librdmacm1", "libnuma1"])?;
    let virtual_environment = Command::new("python3.11").args(["-m", "venv"]).arg(&folder).status();
    if !virtual_environment.context("cannot start python3.11")?.success() {
        bail!("python3.11 -m venv failed: Debian has it in python3.11-venv");
    }
    let mut pip = Command::new(folder.join("bin/pip"));
    process::run(pip.args(["install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES))?;
    if !works() {
        bail!("it is installed, and does not start");
    }
    Ok(python)
}
