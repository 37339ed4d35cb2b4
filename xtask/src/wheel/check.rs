//! What must be true of a wheel: that it is small, and works where the C library is as old as its name says.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::build;
use crate::process;

/// Bytes that a wheel may have.
const LARGEST: u64 = 10_000_000;

/// Libraries that belong to the C library.
const LIBRARIES: [&str; 6] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
];

/// The newest version of the C library's symbols, of PEP 600's `manylinux_2_28`.
const NEWEST: (u32, u32) = (2, 28);

/// Checks the wheel with the native module.
pub(super) fn native(wheel: &Path) -> Result<()> {
    let size = fs::metadata(wheel)?.len();
    ensure!(size <= LARGEST, "{} has {size} bytes: at most {LARGEST}", wheel.display());
    let folder = process::target_directory().join("python/unpacked");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    let mut unzip = Command::new("python3.11");
    process::run(unzip.args(["-m", "zipfile", "-e"]).args([wheel, &folder]))?;
    licences(&folder)?;
    let module = folder.join("millstream/_native.abi3.so");
    let dump = process::output(Command::new("objdump").arg("-p").arg(&module))?;
    let needed = Needed::of(&dump)?;
    needed.check()?;
    let symbols = process::output(Command::new("objdump").arg("-T").arg(&module))?;
    let exported = exported(&symbols);
    ensure!(exported == ["PyInit__native"], "the native module exports {exported:?}");
    let (major, minor) = needed.newest;
    eprintln!(
        "xtask: the wheel has {size} bytes, and needs glibc {major}.{minor} and nothing else"
    );
    Ok(())
}

/// Looks whether the texts of all licences are in an unpacked wheel.
fn licences(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut information =
        entries.filter(|path| path.extension().is_some_and(|it| it == "dist-info"));
    let information = information.next().context("the wheel has no dist-info")?;
    for name in build::OWN.into_iter().chain([build::THIRD_PARTY]) {
        let text = fs::read_to_string(information.join("licenses").join(name));
        let text = text.with_context(|| format!("the wheel has no {name}"))?;
        ensure!(
            text.contains("Permission is hereby granted") || text.contains("Apache License"),
            "{name} has no licence"
        );
    }
    Ok(())
}

/// What a library needs of others.
#[derive(Debug, PartialEq)]
struct Needed {
    libraries: Vec<String>,
    /// The newest version of the C library's symbols.
    newest: (u32, u32),
}

impl Needed {
    /// Of what `objdump -p` prints.
    fn of(dump: &str) -> Result<Self> {
        let libraries = dump.lines().filter_map(|line| line.trim().strip_prefix("NEEDED"));
        let libraries: Vec<String> = libraries.map(|name| name.trim().to_owned()).collect();
        let versions = dump.split_whitespace().filter_map(|word| word.strip_prefix("GLIBC_"));
        let version = |text: &str| {
            let mut numbers = text.split('.').map(str::parse);
            match (numbers.next(), numbers.next()) {
                (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
                // Only the C library's own parts have such.
                _ => bail!("GLIBC_{text} is no version"),
            }
        };
        let versions: Vec<(u32, u32)> = versions.map(version).collect::<Result<_>>()?;
        let newest = versions.into_iter().max().context("it needs no version of the C library")?;
        Ok(Self { libraries, newest })
    }

    fn check(&self) -> Result<()> {
        let other = self.libraries.iter().find(|name| !LIBRARIES.contains(&name.as_str()));
        if let Some(other) = other {
            bail!("the native module needs {other}, which is not of the C library");
        }
        let (newest, most) = (self.newest, NEWEST);
        ensure!(newest <= most, "the native module needs glibc {newest:?}, newer than {most:?}");
        Ok(())
    }
}

/// The symbols that `objdump -T` shows as defined.
fn exported(symbols: &str) -> Vec<&str> {
    let defined = symbols.lines().filter(|line| !line.contains("*UND*"));
    let global = defined.filter(|line| {
        let mut words = line.split_whitespace();
        let address = words.next().is_some_and(|it| u64::from_str_radix(it, 16).is_ok());
        address && words.next().is_some_and(|kind| kind.starts_with(['g', 'w', 'u']))
    });
    global.filter_map(|line| line.split_whitespace().last()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "Dynamic Section:\n  NEEDED               libc.so.6\n  NEEDED               libdl.so.2\n\n\
                        Version References:\n  required from libc.so.6:\n    0x06 0x00 03 GLIBC_2.9\n    \
                        0x0696 0x00 02 GLIBC_2.28\n    0x09691a75 0x00 04 GLIBC_2.2.5\n";

    #[test]
    fn what_is_needed_is_read() {
        let needed = Needed::of(DUMP).unwrap();
        assert_eq!(needed.libraries, ["libc.so.6", "libdl.so.2"]);
        assert_eq!(needed.newest, (2, 28));
        assert!(needed.check().is_ok());
    }

    #[test]
    fn what_is_too_new_or_another_library_is_refused() {
        for (from, to) in [("GLIBC_2.28", "GLIBC_2.29"), ("libdl.so.2", "libgcc_s.so.1")] {
            let needed = Needed::of(&DUMP.replace(from, to)).unwrap();
            assert!(needed.check().is_err(), "{to}");
        }
        assert!(Needed::of("GLIBC_PRIVATE").is_err());
        assert!(Needed::of("").is_err());
    }

    #[test]
    fn exported_symbols_are_those_that_are_defined() {
        let symbols = "0000000000000000      DF *UND*\t0000  GLIBC_2.2.5 free\n\
                       0000000000140780 g    DF .text\t0016  Base        PyInit__native\n\
                       0000000000140790  w   DO .data\t0016  Base        local_weak\n";
        assert_eq!(exported(symbols), ["PyInit__native", "local_weak"]);
    }
}
