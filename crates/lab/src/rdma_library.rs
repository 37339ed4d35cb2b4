//! RDMA devices that a program looks for.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A library in place of the system's libibverbs, whose devices cannot be opened: a program that has its folder in
/// `LD_LIBRARY_PATH` says on stderr which of them it tries.
#[derive(Clone, Debug)]
pub struct RdmaLibrary(PathBuf);

impl RdmaLibrary {
    /// Compiles it into this folder, with devices of these names.
    pub fn compile(folder: &Path, names: &[&str]) -> io::Result<Self> {
        let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
        let mut compiler = Command::new("cc");
        compiler.arg(format!("-DNAMES={}", names.join(","))).args(["-shared", "-fPIC", "-o"]);
        compiler.arg(folder.join("libibverbs.so.1")).args(["-x", "c", "-"]).stdin(Stdio::piped());
        let mut compiling = compiler.spawn()?;
        if let Some(mut source) = compiling.stdin.take() {
            source.write_all(include_bytes!("rdma_library.c"))?;
        }
        match compiling.wait()? {
            status if status.success() => Ok(Self(folder.to_owned())),
            status => Err(io::Error::other(format!("{compiler:?}: {status}"))),
        }
    }

    /// Has a command take it in place of the system's.
    pub fn put_before(&self, command: &mut Command) {
        const NAME: &str = "LD_LIBRARY_PATH";
        let given = command.get_envs().find(|(name, _)| *name == NAME);
        let others = match given {
            Some((_, others)) => others.map(OsStr::to_owned),
            None => std::env::var_os(NAME),
        };
        let mut path = OsString::from(&self.0);
        if let Some(others) = others.filter(|others| !others.is_empty()) {
            path.push(":");
            path.push(others);
        }
        command.env(NAME, path);
    }

    /// The devices that a command has tried to open, of what it has said on stderr.
    pub fn tried(stderr: &str) -> Vec<&str> {
        stderr.lines().filter_map(|line| line.strip_prefix("opens ")).collect()
    }
}
