//! The programs of this workspace that tasks run, built by cargo.
//!
//! Unoptimized builds have assertions and overflow checks, and the emulated side is slower anyway.
//!
//! They are chosen among the targets of the whole workspace, tests included, and never by package: cargo
//! gives a dependency the features that the chosen packages ask for, so with another choice it would build
//! most of them once more.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;

/// One side of the conformance cases.
pub(crate) fn peer() -> Result<PathBuf> {
    example("interop_peer")
}

/// The cable to the guest.
pub(crate) fn relay() -> Result<PathBuf> {
    example("interop_relay")
}

/// A rank of an AllReduce that knows nothing of our collectives.
pub(crate) fn plain_host() -> Result<PathBuf> {
    example("plain_host")
}

/// What writes to a file until its target is gone, and says whether all of it is there.
pub(crate) fn file_writes() -> Result<PathBuf> {
    example("file_writes")
}

/// The test suite of `millstream-verbs`.
pub(crate) fn suite() -> Result<PathBuf> {
    build(&["test", "--no-run", "--workspace", "--test", "suite"], "suite")
}

/// The command line, or the one that `MILLSTREAM_BIN` names.
pub(crate) fn millstream() -> Result<PathBuf> {
    match std::env::var_os("MILLSTREAM_BIN") {
        Some(path) => Ok(PathBuf::from(path)),
        // With a test, since dependencies of tests have a say in features too.
        None => {
            build(&["build", "--workspace", "--bin", "millstream", "--test", "suite"], "millstream")
        }
    }
}

/// The same, optimized: for figures and packages.
pub(crate) fn fast_millstream() -> Result<PathBuf> {
    match std::env::var_os("MILLSTREAM_BIN") {
        Some(path) => Ok(PathBuf::from(path)),
        None => build(&["build", "--release", "--package", "millstream"], "millstream"),
    }
}

/// The C library, optimized, or the one that `MILLSTREAM_LIBRARY` names.
pub(crate) fn fast_library() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("MILLSTREAM_LIBRARY") {
        return Ok(PathBuf::from(path));
    }
    // Without the form that it has for cargo, with which it would not be linked as a whole.
    let arguments = ["rustc", "--release", "--package", "millstream-c", "--lib"];
    process::run(process::cargo().args(arguments).args(["--crate-type", "cdylib"]))?;
    Ok(process::target_directory().join("release/libmillstream.so"))
}

/// The command, optimized and with line tables.
pub(crate) fn profiled_millstream() -> Result<PathBuf> {
    match std::env::var_os("MILLSTREAM_BIN") {
        Some(path) => Ok(PathBuf::from(path)),
        None => {
            build(&["build", "--profile", "profiling", "--package", "millstream"], "millstream")
        }
    }
}

/// A program of tests.
pub(crate) struct Tests {
    /// Its file, without `.rs`.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

/// The programs of a package's folder `tests`.
pub(crate) fn tests_of(package: &str) -> Result<Vec<Tests>> {
    let messages = messages(&["test", "--no-run", "--workspace", "--test", "*"])?;
    Ok(messages.lines().filter_map(|message| tests(message, package)).collect())
}

/// The program of tests that one of cargo's messages is about, if it is the package's.
fn tests(message: &str, package: &str) -> Option<Tests> {
    let message: Value = serde_json::from_str(message).ok()?;
    // `path+file:///folder#package@version`, by "Package ID Specifications" of the Cargo book.
    let of = message["package_id"].as_str()?.rsplit_once('#')?.1;
    let wanted = message["target"]["kind"][0] == "test"
        && of.split('@').next().is_some_and(|name| name == package);
    let path = message["executable"].as_str().filter(|_| wanted)?.into();
    Some(Tests { name: message["target"]["name"].as_str()?.to_owned(), path })
}

/// An example.
pub(crate) fn example(name: &str) -> Result<PathBuf> {
    build(&["build", "--workspace", "--example", name], name)
}

/// An example of `millstream-transfer-core`, optimized. The package has next to no dependencies.
pub(crate) fn fast_core_example(name: &str) -> Result<PathBuf> {
    let package = "millstream-transfer-core";
    build(&["build", "--release", "--package", package, "--example", name], name)
}

/// An example of `millstream-transfer`, optimized.
pub(crate) fn fast_transfer_example(name: &str) -> Result<PathBuf> {
    let package = "millstream-transfer";
    build(&["build", "--release", "--package", package, "--example", name], name)
}

fn build(arguments: &[&str], target: &str) -> Result<PathBuf> {
    messages(arguments)?
        .lines()
        .find_map(|message| executable(message, target))
        .with_context(|| format!("cargo named no executable of {target}"))
}

/// What cargo says of what it builds.
fn messages(arguments: &[&str]) -> Result<String> {
    let mut cargo: Command = process::cargo();
    process::output(cargo.args(arguments).arg("--message-format=json"))
}

/// The executable that one of cargo's messages is about, if it is the target's.
fn executable(message: &str, target: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    let wanted = message["target"]["name"] == target;
    message["executable"].as_str().filter(|_| wanted).map(PathBuf::from)
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
        let found = |message| executable(message, "suite");
        let messages = [library, "not JSON", other, suite];
        assert_eq!(messages.into_iter().find_map(found), Some(PathBuf::from("/t/s")));
        assert_eq!(found(other), None);
    }

    #[test]
    fn the_tests_of_one_package_are_found() {
        let message = |package| {
            format!(
                r#"{{"package_id":"path+file:///f#{package}@0.1.0","target":{{"kind":["test"],"name":"rdma"}},"executable":"/t/rdma"}}"#
            )
        };
        let found = tests(&message("millstream-transfer"), "millstream-transfer");
        assert_eq!(found.map(|tests| tests.name).as_deref(), Some("rdma"));
        assert!(tests(&message("millstream"), "millstream-transfer").is_none());
    }
}
