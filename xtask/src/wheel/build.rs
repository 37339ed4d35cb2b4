//! Building wheels.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::environment::Environment;
use crate::process;

/// The oldest C library that it is for, as maturin says it.
const PLATFORM: &str = "manylinux_2_28";

pub(super) struct Wheels {
    pub(super) native: PathBuf,
    /// `mooncake.engine`, in Python.
    pub(super) mooncake: PathBuf,
}

/// Builds all of them into an empty `target/wheels`.
pub(super) fn wheels() -> Result<Wheels> {
    let tools = Environment::tools()?;
    let folder = process::target_directory().join("wheels");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let mut maturin = Command::new(tools.program("maturin"));
    maturin.args(["build", "--quiet", "--release", "--locked", "--compatibility", PLATFORM]);
    // Its linker has the symbols of that C library; this machine's may be newer.
    maturin.arg("--zig");
    maturin.args(["--manifest-path", "bindings/python/Cargo.toml", "--out"]).arg(&folder);
    maturin.env("PATH", path_with(&tools)?).current_dir(process::repository_root());
    process::run(&mut maturin)?;
    tools.build_wheel("bindings/mooncake", &folder)?;
    Ok(Wheels {
        native: find(&folder, "millstream-")?,
        mooncake: find(&folder, "millstream_mooncake-")?,
    })
}

/// Where programs are looked for, those of the tools first.
fn path_with(tools: &Environment) -> Result<OsString> {
    let own = tools.program("");
    let path = env::var_os("PATH").unwrap_or_default();
    let cargo = env::var_os("CARGO").map(PathBuf::from);
    let cargo = cargo.as_deref().and_then(Path::parent).map(Path::to_owned);
    let all = [own].into_iter().chain(cargo).chain(env::split_paths(&path));
    env::join_paths(all).context("a folder of PATH has a colon")
}

/// The only wheel there that is named so.
fn find(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let named = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(prefix) && name.ends_with(".whl")
    };
    let found: Vec<PathBuf> = entries.filter(named).collect();
    match &found[..] {
        [only] => Ok(only.clone()),
        _ => bail!("{} wheels in {} are called {prefix}...", found.len(), folder.display()),
    }
}
