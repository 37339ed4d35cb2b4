//! Virtual environments of Python below `target/python`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

/// The interpreter of all of them: the oldest that the wheels are for.
const PYTHON: &str = "python3.11";

/// What builds wheels.
const TOOLS: [&str; 4] =
    ["maturin==1.16.0", "ziglang==0.17.1", "hatchling==1.33.0", "wheel==0.45.1"];

pub(super) struct Environment {
    folder: PathBuf,
}

impl Environment {
    /// Makes one that has nothing.
    pub(super) fn fresh(name: &str) -> Result<Self> {
        let folder = process::target_directory().join("python").join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        process::run(Command::new(PYTHON).args(["-m", "venv"]).arg(&folder))?;
        Ok(Self { folder })
    }

    /// The one that has what builds wheels.
    pub(super) fn tools() -> Result<Self> {
        let name = "tools";
        let known = Self { folder: process::target_directory().join("python").join(name) };
        let list = known.folder.join("installed");
        if fs::read_to_string(&list).is_ok_and(|list| list == TOOLS.join(" ")) {
            return Ok(known);
        }
        let tools = Self::fresh(name)?;
        tools.install(&TOOLS)?;
        fs::write(&list, TOOLS.join(" "))?;
        Ok(tools)
    }

    pub(super) fn python(&self) -> PathBuf {
        self.program("python")
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    fn pip(&self, task: &str) -> Command {
        let mut pip = Command::new(self.program("pip"));
        pip.args([task, "--quiet", "--disable-pip-version-check"]);
        pip
    }

    /// Makes a wheel of a folder of the repository with what is installed here.
    pub(super) fn build_wheel(&self, source: &str, into: &Path) -> Result<()> {
        let mut pip = self.pip("wheel");
        pip.args(["--no-deps", "--no-build-isolation", source, "--wheel-dir"]).arg(into);
        process::run(pip.current_dir(process::repository_root()))
    }

    /// Installs packages of the index.
    pub(super) fn install(&self, packages: &[&str]) -> Result<()> {
        process::run(self.pip("install").args(packages))
    }

    /// Installs these files, and nothing of the index.
    pub(super) fn install_wheels(&self, wheels: &[&Path]) -> Result<()> {
        process::run(self.pip("install").arg("--no-index").args(wheels))
    }
}
