//! Reading a `Cargo.toml` as far as the rules need, and the fields that every crate has.

use super::{CRATES, Problem, Tree};

/// One `key = value` line of a manifest.
pub(super) struct Entry {
    pub(super) section: String,
    pub(super) key: String,
    pub(super) value: String,
    pub(super) line: usize,
}

/// One dependency of a manifest.
pub(super) struct Dependency {
    /// The package's own name, where the manifest gives it another one here.
    pub(super) package: String,
    /// Whether only tests, examples and benches can use it.
    pub(super) development: bool,
    pub(super) line: usize,
}

/// Every crate says what it is, under which licence, and takes the workspace's lints.
pub(super) fn fields(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in manifests(tree) {
        let entries = entries(text);
        let has = |section: &str, key: &str| {
            let dotted = format!("{key}.");
            let is = |entry: &Entry| entry.key == key || entry.key.starts_with(&dotted);
            entries.iter().any(|entry| entry.section == section && is(entry))
        };
        for key in ["license", "description"] {
            if !has("package", key) {
                problems.push(Problem::new(path, 0, format!("[package] has no {key}")));
            }
        }
        let inherits = |entry: &Entry| {
            entry.section == "lints" && entry.key == "workspace" && entry.value == "true"
        };
        if !entries.iter().any(inherits) {
            problems.push(Problem::new(path, 0, "no `[lints] workspace = true`"));
        }
    }
    problems
}

/// The manifests of the workspace's members.
pub(super) fn manifests(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    tree.iter().filter(|(path, _)| {
        *path == "xtask/Cargo.toml"
            || (CRATES.iter().any(|folder| path.starts_with(folder))
                && path.ends_with("/Cargo.toml")
                && path.matches('/').count() == 2)
    })
}

/// Every dependency, in whichever of TOML's ways it is written.
pub(super) fn dependencies(text: &str) -> Vec<Dependency> {
    let mut found: Vec<Dependency> = Vec::new();
    let mut named = Vec::new();
    for entry in entries(text) {
        let Some((kind, table)) = dependency_section(&entry.section) else { continue };
        // `[dependencies.name]` has one package over several lines.
        let name = table.unwrap_or_else(|| entry.key.split('.').next().unwrap_or("").to_owned());
        let renamed = match entry.key.as_str() {
            "package" => Some(entry.value.trim_matches('"').to_owned()),
            key if key.ends_with(".package") => Some(entry.value.trim_matches('"').to_owned()),
            _ => inline_package(&entry.value),
        };
        let id = (entry.section.clone(), name.clone());
        let known = named.iter().position(|other| *other == id);
        match (known, renamed) {
            (Some(index), Some(package)) => found[index].package = package,
            (Some(_), None) => {}
            (None, renamed) => {
                named.push(id);
                found.push(Dependency {
                    package: renamed.unwrap_or(name),
                    development: kind == "dev-dependencies",
                    line: entry.line,
                });
            }
        }
    }
    found
}

fn entries(text: &str) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut section = String::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('#') {
            continue;
        }
        if let (true, Some(end)) = (line.starts_with('['), line.rfind(']')) {
            section = line[..end].trim_matches(['[', ']']).to_owned();
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        entries.push(Entry {
            section: section.clone(),
            key: key.trim().trim_matches('"').to_owned(),
            value: value.trim().to_owned(),
            line: index + 1,
        });
    }
    entries
}

/// Which table of dependencies a section is, and the one package it is about, if it is.
fn dependency_section(section: &str) -> Option<(&'static str, Option<String>)> {
    const KINDS: &[&str] = &["dev-dependencies", "build-dependencies", "dependencies"];
    for kind in KINDS {
        if section == *kind || (section.starts_with("target.") && section.ends_with(kind)) {
            // "target.x.dev-dependencies" ends with "dependencies" too: the longer names are first.
            return Some((kind, None));
        }
        let marker = format!("{kind}.");
        if let Some(at) = section.find(&marker)
            && (at == 0 || section.starts_with("target."))
        {
            return Some((kind, Some(section[at + marker.len()..].to_owned())));
        }
    }
    None
}

/// `other` in `{ version = "1", package = "other" }`.
fn inline_package(value: &str) -> Option<String> {
    let (table, _) = value.strip_prefix('{')?.split_once('}')?;
    let field = table.split(',').find_map(|field| field.trim().strip_prefix("package"))?;
    let name = field.trim_start().strip_prefix('=')?;
    Some(name.trim().trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "[package]\nname = \"a\"\nlicense.workspace = true\n\
                        description = \"x\"\n\n[lints]\nworkspace = true\n";

    #[test]
    fn a_whole_manifest_passes() {
        assert_eq!(fields(&Tree::of([("crates/a/Cargo.toml", GOOD)])), []);
    }

    #[test]
    fn each_missing_field_is_found() {
        for (missing, says) in [
            ("license.workspace = true\n", "license"),
            ("description = \"x\"\n", "description"),
            ("workspace = true\n", "lints"),
        ] {
            let at = GOOD.rfind(missing).unwrap();
            let text = [&GOOD[..at], &GOOD[at + missing.len()..]].concat();
            let problems = fields(&Tree::of([("crates/a/Cargo.toml", text.as_str())]));
            assert_eq!(problems.len(), 1, "{missing}");
            assert!(problems[0].what.contains(says), "{missing}");
        }
    }

    #[test]
    fn every_way_to_write_a_dependency() {
        let text = "[dependencies]\nplain = \"1\"\ndotted.workspace = true\n\
            inline = { version = \"1\", package = \"inline-real\" } # why\n\
            [dependencies.table]\nversion = \"1\"\npackage = \"table-real\"\n\
            [target.'cfg(target_os = \"linux\")'.dependencies]\nlinux = \"1\"\n\
            [dev-dependencies]\ndev = \"1\"\n[build-dependencies]\nbuild = \"1\"\n\
            [features]\ndefault = []\n";
        let found: Vec<(String, bool)> =
            dependencies(text).into_iter().map(|d| (d.package, d.development)).collect();
        let expected = [
            ("plain", false),
            ("dotted", false),
            ("inline-real", false),
            ("table-real", false),
            ("linux", false),
            ("dev", true),
            ("build", false),
        ];
        assert_eq!(found, expected.map(|(name, dev)| (name.to_owned(), dev)));
    }
}
