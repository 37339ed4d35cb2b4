//! Small things that should not stay in a file.

use super::source::{code, is_test_file, line_of, lines_with, production_code};
use super::{Problem, Tree};

/// A file is one idea; a longer one is usually two. Tests beside the code do not count.
const LINES_MAX: usize = 800;

/// Placeholders, and tests that somebody switched off.
const LEFTOVERS: &[&str] = &["todo!(", "unimplemented!(", "dbg!(", "#[ignore"];

/// Where somebody's machine keeps things. In pieces: this file is searched too.
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/tmp/", "bash_jobs")];

/// No file of a crate is longer than [`LINES_MAX`], but generated ones and tests.
pub(super) fn length(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.sources() {
        if is_test_file(tree, path) || is_generated(text) {
            continue;
        }
        let (all, own) = (code(text), production_code(text));
        let only_tested =
            |(all, own): &(&str, &str)| !all.trim().is_empty() && own.trim().is_empty();
        let lines = text.lines().count() - all.lines().zip(own.lines()).filter(only_tested).count();
        if lines > LINES_MAX {
            let what =
                format!("{lines} lines without tests: is it one idea? (at most {LINES_MAX})");
            problems.push(Problem::new(path, 0, what));
        }
    }
    problems
}

/// No placeholder and no ignored test.
pub(super) fn leftovers(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.sources() {
        let code = code(text);
        for word in LEFTOVERS {
            for line in lines_with(&code, word) {
                problems.push(Problem::new(path, line, format!("`{word}` is left over")));
            }
        }
    }
    problems
}

/// Where processes may be forked off, which wait for lookups of ours only.
const FORKED: &[&str] = &["bindings/", "crates/"];

/// Names are looked up where a fork waits for that (`crates/net/src/forks.rs`), and where who asks waits for so long as it
/// likes (`crates/metadata/src/resolver.rs`).
pub(super) fn lookups(tree: &Tree) -> Vec<Problem> {
    let of = |list: &[&str], path: &str| list.iter().any(|start| path.starts_with(start));
    let mut problems = Vec::new();
    for (path, text) in tree.sources() {
        if !of(FORKED, path) || is_test_file(tree, path) {
            continue;
        }
        for line in lines_with(&production_code(text), "to_socket_addrs") {
            let what = "a lookup that no fork waits for, and that has no deadline: use \
                        `Resolver` of millstream-metadata, or `millstream_net::lookup`";
            problems.push(Problem::new(path, line, what));
        }
    }
    problems
}

/// No path that exists on one machine only.
pub(super) fn machine_paths(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.iter() {
        for machine_path in MACHINE_PATHS {
            for (at, _) in text.match_indices(machine_path) {
                // With a name or a dot before it, it is the end of a path in the repository.
                let before = text[..at].chars().next_back();
                if before.is_none_or(|c| !c.is_alphanumeric() && !['_', '-', '.', '}'].contains(&c))
                {
                    let what = format!("`{machine_path}` is a path of one machine");
                    problems.push(Problem::new(path, line_of(text, at), what));
                }
            }
        }
    }
    problems
}

/// No mark of a merge that was not finished (git-merge(1), "HOW CONFLICTS ARE PRESENTED"). The line between two sides
/// may be a heading's underline elsewhere: it counts where there is another mark.
pub(super) fn merge_marks(tree: &Tree) -> Vec<Problem> {
    let [ours, theirs] = ["<", ">"].map(|sign| sign.repeat(7) + " ");
    let between = "=".repeat(7);
    let mut problems = Vec::new();
    for (path, text) in tree.iter() {
        let is_side = |line: &str| line.starts_with(&ours) || line.starts_with(&theirs);
        if !text.lines().any(is_side) {
            continue;
        }
        for (index, line) in text.lines().enumerate() {
            if is_side(line) || line == between {
                problems.push(Problem::new(path, index + 1, "a mark of a merge conflict"));
            }
        }
    }
    problems
}

/// No tab and no space at the end of a line.
pub(super) fn whitespace(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    let checked = |path: &str| [".rs", ".md", ".toml"].iter().any(|end| path.ends_with(end));
    for (path, text) in tree.iter().filter(|(path, _)| checked(path)) {
        for (index, line) in text.lines().enumerate() {
            if line.contains('\t') {
                problems.push(Problem::new(path, index + 1, "a tab"));
            }
            if line.ends_with([' ', '\t']) {
                problems.push(Problem::new(path, index + 1, "white space at the end of the line"));
            }
        }
        if !text.is_empty() && !text.ends_with('\n') {
            problems.push(Problem::new(path, 0, "no line break at the end"));
        }
    }
    problems
}

fn is_generated(text: &str) -> bool {
    text.lines().take(3).any(|line| line.contains(concat!("@", "generated")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_that_no_fork_waits_for_are_found() {
        let check = |path: &str, text: &str| lookups(&Tree::of([(path, text)])).len();
        let text = "fn a() { (host, 1).to_socket_addrs(); }";
        assert_eq!(check("bindings/c/src/a.rs", text), 1);
        assert_eq!(check("crates/net/src/a.rs", text), 1);
        assert_eq!(check("crates/cli/src/a.rs", text), 1);
        assert_eq!(check("crates/net/tests/a.rs", text), 0);
        assert_eq!(check("crates/net/src/a.rs", "// to_socket_addrs"), 0);
    }

    #[test]
    fn long_files_are_found() {
        let check = |path: &str, text: &str| length(&Tree::of([(path, text)])).len();
        let long = "fn a() {}\n".repeat(LINES_MAX + 1);
        assert_eq!(check("crates/a/src/lib.rs", &long), 1);
        assert_eq!(check("crates/a/src/lib.rs", &long[10..]), 0);
        assert_eq!(check("crates/a/tests/it.rs", &long), 0);
        assert_eq!(
            check("crates/a/src/lib.rs", &format!("// {}\n{long}", concat!("@", "generated"))),
            0
        );
        let tested = format!("fn a() {{}}\n#[cfg(test)]\nmod tests {{\n{long}}}\n");
        assert_eq!(check("crates/a/src/lib.rs", &tested), 0);
        let comments = "// a\n".repeat(LINES_MAX + 1);
        assert_eq!(check("crates/a/src/lib.rs", &comments), 1);
    }

    #[test]
    fn leftovers_are_found() {
        for word in
            ["todo!()", "unimplemented!(\"x\")", "dbg!(1)", "#[ignore]", "#[ignore = \"x\"]"]
        {
            let text = format!("fn a() {{}}\n{word}");
            let problems = leftovers(&Tree::of([("crates/a/tests/it.rs", text.as_str())]));
            assert_eq!(problems.len(), 1, "{word}");
            assert_eq!(problems[0].line, 2);
        }
        let fine = "// todo!()\nfn a() { f(\"dbg!(1)\"); my_todo!(); }";
        assert_eq!(leftovers(&Tree::of([("crates/a/src/lib.rs", fine)])), []);
    }

    #[test]
    fn machine_paths_are_found() {
        for machine_path in MACHINE_PATHS {
            let text = format!("a\nsee {machine_path}x\n");
            let problems = machine_paths(&Tree::of([("docs/a.md", text.as_str())]));
            assert_eq!(problems.len(), 1);
            assert_eq!(problems[0].line, 2);
        }
        let fine = concat!("src/wo", "rk/a.rs ./wo", "rk/b");
        assert_eq!(machine_paths(&Tree::of([("docs/a.md", fine)])), []);
    }

    #[test]
    fn merge_marks_are_found() {
        let check = |text: &str| -> Vec<usize> {
            let problems = merge_marks(&Tree::of([("CHANGELOG.md", text)]));
            problems.into_iter().map(|problem| problem.line).collect()
        };
        let [ours, between, theirs] = ["<", "=", ">"].map(|sign| sign.repeat(7));
        let whole = format!("a\n{ours} HEAD\nb\n{between}\nc\n{theirs} other\nd\n");
        assert_eq!(check(&whole), [2, 4, 6]);
        assert_eq!(check(&format!("a\n{theirs} other\n")), [2]);
        assert_eq!(check(&format!("{between}\r\nb\r\n{ours} HEAD\r\n")), [1, 3]);
        for fine in [
            format!("a heading\n{between}\n"),
            format!(" {ours} HEAD\n"),
            format!("{ours}\n{theirs}x\n"),
            format!("a {theirs} b\n"),
        ] {
            assert!(check(&fine).is_empty(), "{fine}");
        }
    }

    #[test]
    fn white_space_is_found() {
        let check = |path: &str, text: &str| whitespace(&Tree::of([(path, text)])).len();
        assert_eq!(check("a.md", "a \n"), 1);
        assert_eq!(check("a.rs", "\ta\n"), 1);
        assert_eq!(check("a.toml", "a"), 1);
        assert_eq!(check("a.toml", "a\n\nb\n"), 0);
        assert_eq!(check("Makefile", "\ta \n"), 0);
    }
}
