//! Building wheels.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::environment::Environment;
use crate::package::notices;
use crate::process;

/// The oldest C library that it is for, as maturin says it.
const PLATFORM: &str = "manylinux_2_28";

pub(super) struct Wheels {
    pub(super) native: PathBuf,
    /// `mooncake.engine`, in Python.
    pub(super) mooncake: PathBuf,
    /// Nobody else builds there meanwhile.
    _lock: File,
}

/// Builds all of them into an empty `target/wheels`.
pub(super) fn wheels() -> Result<Wheels> {
    // Two processes take turns, until who has built has also used them. The lock ends with the file.
    fs::create_dir_all(process::target_directory())?;
    let lock = File::create(process::target_directory().join("wheels.lock"))?;
    lock.lock()?;
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
    let (native, mooncake) =
        (find(&folder, "millstream-")?, find(&folder, "millstream_mooncake-")?);
    // In the other one is no code of others.
    let others = notices(&["millstream-python"])?;
    add_licences(&tools, &native, &[(THIRD_PARTY, others)])?;
    add_licences(&tools, &mooncake, &[])?;
    Ok(Wheels { native: find(&folder, "millstream-")?, mooncake, _lock: lock })
}

/// The licences of what the native module is built of.
pub(super) const THIRD_PARTY: &str = "third-party-licences";

/// Our licences, which ask that their texts go with what is under them.
pub(super) const OWN: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

/// Adds our licences and these texts to a wheel, where such are (PEP 639), and writes its list of files anew.
fn add_licences(tools: &Environment, wheel: &Path, others: &[(&str, String)]) -> Result<()> {
    let folder = process::target_directory().join("python/repacked");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let into = wheel.parent().context("a wheel lies in a folder")?;
    let run = |task: &str, from: &Path, to: &Path| {
        let mut command = Command::new(tools.python());
        command.args(["-m", "wheel", task]).arg(from).arg("-d").arg(to);
        process::output(&mut command).map(drop)
    };
    run("unpack", wheel, &folder)?;
    let unpacked = only(&folder, |_| true)?;
    let licences = only(&unpacked, |name| name.ends_with(".dist-info"))?.join("licenses");
    fs::create_dir_all(&licences)?;
    for name in OWN {
        fs::copy(process::repository_root().join(name), licences.join(name))?;
    }
    for (name, text) in others {
        fs::write(licences.join(name), text)?;
    }
    fs::remove_file(wheel)?;
    run("pack", &unpacked, into)
}

/// The only entry of a folder whose name is such.
fn only(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found =
        entries.filter(|path| wanted(&path.file_name().unwrap_or_default().to_string_lossy()));
    found.next().with_context(|| format!("{} has not what it should", folder.display()))
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
