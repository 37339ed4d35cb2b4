//! What the documents name exists.

use super::{Problem, Tree};

const MAP: &str = "ARCHITECTURE.md";

/// Every path in backquotes in ARCHITECTURE.md is a file or a folder here.
pub(super) fn named_paths(tree: &Tree) -> Vec<Problem> {
    let Some(text) = tree.text(MAP) else {
        return vec![Problem::new(MAP, 0, "is missing")];
    };
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        // What stands between the first and second, third and fourth, ... backquote.
        for name in line.split('`').skip(1).step_by(2) {
            if looks_like_a_path(tree, name) && !tree.contains(name) {
                problems.push(Problem::new(MAP, index + 1, format!("`{name}` does not exist")));
            }
        }
    }
    problems
}

/// Every link to a file in the documents at the root and in docs/ leads to one.
pub(super) fn links(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    let ours = |path: &str| !path.contains('/') || path.starts_with("docs/");
    let documents = tree.iter().filter(|(path, _)| path.ends_with(".md") && ours(path));
    for (path, text) in documents {
        for (index, line) in text.lines().enumerate() {
            for rest in line.split("](").skip(1) {
                let Some((target, _)) = rest.split_once(')') else { continue };
                let target = target.split('#').next().unwrap_or("");
                if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let resolved = match path.starts_with("docs/") {
                    true => match target.strip_prefix("../") {
                        Some(above) => above.to_owned(),
                        None => format!("docs/{target}"),
                    },
                    false => target.to_owned(),
                };
                if !tree.contains(&resolved) {
                    let what = format!("the link to {target} leads nowhere");
                    problems.push(Problem::new(path, index + 1, what));
                }
            }
        }
    }
    problems
}

/// Whether a word is meant as a path from the root: it begins with a folder that is there, or
/// ends like a file of ours and has a folder.
fn looks_like_a_path(tree: &Tree, word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let Some((first, _)) = word.split_once('/') else { return false };
    let ends = [".rs", ".toml", ".md", ".sh"].iter().any(|end| word.ends_with(end));
    word.chars().all(plain) && !word.starts_with("..") && (ends || tree.contains(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_does_not_exist_is_found() {
        let check = |map: &str| {
            let files = [(MAP, map), ("crates/wire/src/lib.rs", "")];
            named_paths(&Tree::of(files)).len()
        };
        assert_eq!(check("see `crates/wire/` and `crates/wire/src/lib.rs`\n"), 0);
        assert_eq!(check("see `crates/gone/`\n"), 1);
        assert_eq!(check("see `gone/src/lib.rs`\n"), 1);
        assert_eq!(check("`a/b` `wire <- roce` `std::fs` `crates/*/src` `../x/y.rs`\n"), 0);
    }

    #[test]
    fn a_missing_map_is_found() {
        assert_eq!(named_paths(&Tree::of([])).len(), 1);
    }

    #[test]
    fn a_broken_link_is_found() {
        let check = |path: &str, text: &str| {
            let files = [(path, text), ("CHANGELOG.md", ""), ("docs/a.md", "")];
            links(&Tree::of(files)).len()
        };
        assert_eq!(
            check("README.md", "[a](CHANGELOG.md#x) [b](https://x.org/y) [c](docs/a.md)"),
            0
        );
        assert_eq!(check("README.md", "[a](GONE.md)"), 1);
        assert_eq!(check("docs/b.md", "[a](../CHANGELOG.md) [b](a.md)"), 0);
        assert_eq!(check("docs/b.md", "[a](CHANGELOG.md)"), 1);
    }
}
