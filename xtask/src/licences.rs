//! The licence of every dependency must be satisfiable from [`ALLOWED`].

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process;

/// Licences that ask no more of a user than a notice.
const ALLOWED: &[&str] = &[
    "MIT",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "Unicode-3.0",
    "Unlicense",
    "CC0-1.0",
    "0BSD",
];

/// Packages with a licence that is not on the list, each with the licence that was looked at. Nothing of them may be in
/// what users get.
const BUILD_ONLY: &[(&str, &str)] = &[
    // Tells pyo3's build script what processor it builds for. The exception only permits more than Apache-2.0 does.
    ("target-lexicon", "Apache-2.0 WITH LLVM-exception"),
];

/// Checks every package that a build on this platform can use.
pub(crate) fn run() -> Result<()> {
    let (count, problems) = check(&metadata()?)?;
    if !problems.is_empty() {
        bail!("licences that are not allowed:\n  {}", problems.join("\n  "));
    }
    eprintln!("xtask: the licences of {count} packages are allowed");
    Ok(())
}

/// What cargo knows of the packages that a build on this platform can use.
pub(crate) fn metadata() -> Result<Value> {
    let version = process::output(Command::new("rustc").arg("-vV"))?;
    let host = version
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .context("`rustc -vV` names no host")?;
    // Filtered, so that checking does not download crates of other platforms.
    let arguments = ["metadata", "--format-version", "1", "--filter-platform", host];
    let metadata = process::output(process::cargo().args(arguments))?;
    serde_json::from_str(&metadata).context("cargo metadata's JSON")
}

/// Returns how many packages there are, and one line for each that is not allowed.
fn check(metadata: &Value) -> Result<(usize, Vec<String>)> {
    let packages = metadata["packages"].as_array().context("no packages in cargo metadata")?;
    let mut problems = Vec::new();
    for package in packages {
        let name = format!(
            "{} {}",
            package["name"].as_str().unwrap_or("?"),
            package["version"].as_str().unwrap_or("?")
        );
        match package["license"].as_str() {
            None => problems.push(format!("{name}: names no licence")),
            Some(licence)
                if BUILD_ONLY.iter().any(|known| {
                    package["name"].as_str() == Some(known.0) && licence == known.1
                }) => {}
            Some(expression) => match satisfiable(expression) {
                Ok(true) => {}
                Ok(false) => problems.push(format!("{name}: {expression}")),
                Err(error) => problems.push(format!("{name}: {expression}: {error:#}")),
            },
        }
    }
    Ok((packages.len(), problems))
}

/// Whether an SPDX expression can be met with allowed licences only.
fn satisfiable(expression: &str) -> Result<bool> {
    // Crates from before SPDX expressions write MIT/Apache-2.0.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = tokens.as_slice();
    let value = alternatives(&mut rest)?;
    if let Some(token) = rest.first() {
        bail!("unexpected {token:?}");
    }
    Ok(value)
}

fn alternatives(tokens: &mut &[&str]) -> Result<bool> {
    let mut value = conjunction(tokens)?;
    while take(tokens, "OR") {
        value |= conjunction(tokens)?;
    }
    Ok(value)
}

fn conjunction(tokens: &mut &[&str]) -> Result<bool> {
    let mut value = licence(tokens)?;
    while take(tokens, "AND") {
        value &= licence(tokens)?;
    }
    Ok(value)
}

fn licence(tokens: &mut &[&str]) -> Result<bool> {
    if take(tokens, "(") {
        let value = alternatives(tokens)?;
        if !take(tokens, ")") {
            bail!("a parenthesis is not closed");
        }
        return Ok(value);
    }
    let Some((&name, rest)) = tokens.split_first() else { bail!("a licence is missing") };
    *tokens = rest;
    if take(tokens, "WITH") {
        // An exception changes what is granted: such a pair would need its own entry.
        *tokens = tokens.split_first().context("an exception is missing")?.1;
        return Ok(false);
    }
    Ok(ALLOWED.contains(&name))
}

fn take(tokens: &mut &[&str], word: &str) -> bool {
    match tokens.split_first() {
        Some((&first, rest)) if first == word => {
            *tokens = rest;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        let table = [
            ("MIT", true),
            ("MIT OR Apache-2.0", true),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0-only", false),
            ("MPL-2.0", false),
            ("MIT OR GPL-3.0-only", true),
            ("MIT AND GPL-3.0-only", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("(MIT OR Apache-2.0) AND MPL-2.0", false),
            ("Apache-2.0 WITH LLVM-exception", false),
            ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true),
            // AND binds tighter than OR.
            ("MIT OR GPL-3.0-only AND MPL-2.0", true),
        ];
        for (expression, expected) in table {
            assert_eq!(satisfiable(expression).unwrap(), expected, "{expression}");
        }
    }

    #[test]
    fn malformed_expressions_are_errors() {
        for expression in ["", "MIT OR", "(MIT", "MIT Apache-2.0", "Apache-2.0 WITH"] {
            assert!(satisfiable(expression).is_err(), "{expression}");
        }
    }

    #[test]
    fn a_package_that_is_not_allowed_is_named() {
        let metadata = serde_json::json!({"packages": [
            {"name": "fine", "version": "1.0.0", "license": "MIT"},
            {"name": "viral", "version": "2.0.0", "license": "GPL-3.0-only"},
            {"name": "silent", "version": "3.0.0", "license": null},
        ]});
        let (count, problems) = check(&metadata).unwrap();
        assert_eq!(count, 3);
        assert_eq!(problems, ["viral 2.0.0: GPL-3.0-only", "silent 3.0.0: names no licence"]);
    }

    #[test]
    fn what_only_builds_is_allowed_by_name_and_licence() {
        let (name, licence) = BUILD_ONLY[0];
        let package = |name: &str, licence: &str| {
            let packages =
                [serde_json::json!({"name": name, "version": "1.0.0", "license": licence})];
            check(&serde_json::json!({ "packages": packages })).unwrap().1.len()
        };
        assert_eq!(package(name, licence), 0);
        assert_eq!(package("another", licence), 1);
        assert_eq!(package(name, "GPL-3.0-only"), 1);
    }
}
