//! The licences of what is linked into the program: they ask that their texts go with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::licences;

/// What files with the text of a licence are called, in capitals and in either spelling.
const NAMES: &[&str] = &["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// The packages that these of ours are built of, each with its licence, and the texts of all of them.
pub(crate) fn notices(ours: &[&str]) -> Result<String> {
    let metadata = licences::metadata()?;
    let mut list = String::new();
    // The same text stands once, under the names of all who have it.
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in used(&metadata, ours)? {
        let text = |key: &str| package[key].as_str().unwrap_or("?");
        let name = format!("{} {}", text("name"), text("version"));
        list.push_str(&format!("  {name}: {}\n", text("license")));
        let folder =
            Path::new(text("manifest_path")).parent().context("a manifest has a folder")?;
        for text in licence_texts(folder)? {
            texts.entry(text).or_default().insert(name.clone());
        }
    }
    let mut all = format!(
        "Millstream is built of these packages of crates.io, and of Rust's standard library\n\
         (MIT OR Apache-2.0). Their licences follow, as the packages have them.\n\n{list}"
    );
    let rule = "-".repeat(80);
    for (text, packages) in texts {
        let packages = packages.into_iter().collect::<Vec<_>>().join(", ");
        all.push_str(&format!("\n{rule}\n{packages}\n{rule}\n\n{}\n", text.trim_end()));
    }
    Ok(all)
}

/// The packages of others that those of ours with these names are linked with.
fn used<'a>(metadata: &'a Value, names: &[&str]) -> Result<Vec<&'a Value>> {
    let list = |value: &'_ Value| value.as_array().cloned().unwrap_or_default();
    let nodes = list(&metadata["resolve"]["nodes"]);
    let packages = metadata["packages"].as_array().context("no packages in cargo metadata")?;
    let find = |name: &&str| {
        let found = packages.iter().find(|package| package["name"] == *name);
        Ok(found.with_context(|| format!("no package {name}"))?["id"].clone())
    };
    let mut waiting = names.iter().map(find).collect::<Result<Vec<_>>>()?;
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !seen.insert(id.to_string()) {
            continue;
        }
        let node = nodes.iter().find(|node| node["id"] == id).context("no such package")?;
        for dependency in list(&node["deps"]) {
            // Not what only tests and build scripts need.
            if list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null()) {
                waiting.push(dependency["pkg"].clone());
            }
        }
    }
    let ours = |package: &&Value| package["source"].is_null();
    let used = packages.iter().filter(|package| seen.contains(&package["id"].to_string()));
    Ok(used.filter(|package| !ours(package)).collect())
}

fn licence_texts(folder: &Path) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?
    {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && NAMES.iter().any(|prefix| name.starts_with(prefix)) {
            texts.push(String::from_utf8_lossy(&fs::read(&path)?).into_owned());
        }
    }
    texts.sort();
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_named_and_what_tests_need_is_not() {
        let of_python = notices(&["millstream-python"]).unwrap();
        assert!(of_python.contains("\n  pyo3 ") && !of_python.contains("\n  clap "), "{of_python}");
        let text = notices(&["millstream"]).unwrap();
        let (list, texts) = text.split_once("----").unwrap();
        for package in ["clap", "libc", "serde_json", "tokio"] {
            assert!(list.contains(&format!("\n  {package} ")), "{package} is not in {list}");
        }
        for package in ["proptest", "insta", "millstream-wire", "xtask"] {
            assert!(!list.contains(&format!("\n  {package} ")), "{package} is in {list}");
        }
        assert!(texts.contains("Permission is hereby granted, free of charge"));
    }
}
