//! `cargo xtask tidy`: the rules of the house that no other tool checks.
//!
//! Each rule is a function from a [`Tree`] to [`Problem`]s, so that its tests show it failing on
//! a small made-up tree. The rules' tables are at the top of their files.

mod arrows;
mod documents;
mod hygiene;
mod manifest;
mod proofs;
mod sans_io;
mod source;
mod unsafety;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::process;

/// A rule: what it found wrong in the tree.
type Rule = fn(&Tree) -> Vec<Problem>;

const RULES: &[Rule] = &[
    arrows::dependencies,
    manifest::fields,
    sans_io::calls,
    sans_io::packages,
    sans_io::guards,
    unsafety::allowed_files,
    hygiene::length,
    hygiene::leftovers,
    hygiene::lookups,
    hygiene::machine_paths,
    hygiene::merge_marks,
    hygiene::whitespace,
    documents::named_paths,
    documents::links,
    proofs::hostile_packets,
];

/// Runs every rule on the repository.
pub(crate) fn run() -> Result<()> {
    let tree = Tree::read(&process::repository_root())?;
    let mut problems: Vec<Problem> = RULES.iter().flat_map(|rule| rule(&tree)).collect();
    problems.sort();
    problems.dedup();
    if !problems.is_empty() {
        for problem in &problems {
            eprintln!("{problem}");
        }
        bail!("tidy found {} problems", problems.len());
    }
    eprintln!("xtask: tidy: {} files", tree.files.len());
    Ok(())
}

/// The repository's files by path (with `/`, from the root), in order. A file that is not UTF-8
/// has no text: it exists, and nothing more is known of it.
pub(crate) struct Tree {
    files: BTreeMap<String, String>,
}

/// One thing that is wrong. Line 0 is the whole file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    path: String,
    line: usize,
    what: String,
}

impl Problem {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.what),
            line => write!(f, "{}:{line}: {}", self.path, self.what),
        }
    }
}

impl Tree {
    /// What holds nothing that anybody wrote.
    const SKIPPED: &[&str] = &[".git", "node_modules", "artifacts", "corpus", ".venv"];

    fn read(root: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = std::fs::read_dir(&folder)
                .with_context(|| format!("cannot list {}", folder.display()))?;
            for entry in entries {
                let entry = entry?;
                let path = entry.path();
                // By name alone: in a linked work tree `.git` is a file with a path of this machine.
                if Self::SKIPPED.iter().any(|skipped| entry.file_name() == *skipped) {
                    continue;
                }
                // Of a package, what was built; a module may be called so.
                if entry.file_name() == "target" && folder.join("Cargo.toml").exists() {
                    continue;
                }
                if entry.file_type()?.is_dir() {
                    folders.push(path);
                    continue;
                }
                // A file can go away between listing and reading: an editor's, or a build's.
                let Ok(bytes) = std::fs::read(&path) else { continue };
                let name = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
                files.insert(name, String::from_utf8(bytes).unwrap_or_default());
            }
        }
        Ok(Self { files })
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// The Rust sources of the workspace's own crates, this one included.
    fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        self.iter().filter(|(path, _)| path.ends_with(".rs"))
    }

    fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// Whether `path` is a file here, or a folder with files in it.
    fn contains(&self, path: &str) -> bool {
        let folder = format!("{}/", path.trim_end_matches('/'));
        self.files.contains_key(path) || self.files.keys().any(|file| file.starts_with(&folder))
    }

    #[cfg(test)]
    fn of<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let own = |(path, text): (&str, &str)| (path.to_owned(), text.to_owned());
        Self { files: files.into_iter().map(own).collect() }
    }
}

/// The folders of crates.
const CRATES: [&str; 2] = ["crates/", "bindings/"];

/// The crate whose folder `path` is in: `crates/wire/src/lib.rs` is in `wire`.
fn crate_of(path: &str) -> Option<&str> {
    let inner = CRATES.iter().find_map(|folder| path.strip_prefix(folder))?;
    inner.split_once('/').map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_repository_is_read() {
        let tree = Tree::read(&process::repository_root()).unwrap();
        assert!(tree.contains("xtask/src/tidy/mod.rs"));
        assert!(tree.contains("crates/wire"));
        assert!(!tree.contains("target"));
        assert!(tree.contains("crates/transfer/src/tcp/target/mod.rs"));
    }

    #[test]
    fn a_problem_names_its_place() {
        assert_eq!(Problem::new("a.rs", 3, "bad").to_string(), "a.rs:3: bad");
        assert_eq!(Problem::new("a.rs", 0, "bad").to_string(), "a.rs: bad");
    }
}
