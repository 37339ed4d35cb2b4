//! The sans-IO crates get time, randomness and bytes as arguments, and give bytes back.

use super::source::{is_test_file, line_of, lines_with, production_code};
use super::{Problem, Tree, crate_of, manifest};

const CRATES: &[&str] = &["wire", "roce", "inc", "transfer-core", "sim"];

/// What such a crate's own code must not name, and what to do instead. Tests may: they read
/// captures from files, for one.
const FORBIDDEN: &[(&str, &str)] = &[
    ("UdpSocket", "bytes go in and out as arguments"),
    ("TcpStream", "bytes go in and out as arguments"),
    ("TcpListener", "bytes go in and out as arguments"),
    ("UnixStream", "bytes go in and out as arguments"),
    ("std::thread", "the caller has the threads"),
    ("thread::spawn", "the caller has the threads"),
    ("Instant::now", "time is an argument"),
    ("SystemTime", "time is an argument"),
    ("std::fs", "take a reader or a writer"),
    ("std::process", "the caller has the processes"),
    ("thread_rng", "randomness is an argument"),
    ("rand::", "randomness is an argument"),
    ("getrandom", "randomness is an argument"),
    ("libc", "system calls live in net"),
];

/// The same modules inside `use std::{...}`.
const FORBIDDEN_IN_GROUPS: &[&str] = &["thread", "fs", "process"];

/// Packages that bring I/O, threads or randomness of their own.
const PACKAGES: &[&str] =
    &["libc", "rustix", "nix", "socket2", "mio", "tokio", "rand", "fastrand", "getrandom"];

/// No forbidden name stands in the crates' own code.
pub(super) fn calls(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.sources() {
        let sans_io = crate_of(path).is_some_and(|name| CRATES.contains(&name));
        if !sans_io || is_test_file(tree, path) {
            continue;
        }
        let code = production_code(text);
        for (word, instead) in FORBIDDEN {
            for line in lines_with(&code, word) {
                let what = format!("`{word}` in a sans-IO crate: {instead}");
                problems.push(Problem::new(path, line, what));
            }
        }
        for (at, opening) in code.match_indices("std::{") {
            let start = at + opening.len();
            let group = &code[start..start + group_length(&code[start..])];
            for module in FORBIDDEN_IN_GROUPS {
                if !lines_with(group, module).is_empty() {
                    let what = format!("`std::{module}` in a sans-IO crate");
                    problems.push(Problem::new(path, line_of(&code, at), what));
                }
            }
        }
    }
    problems
}

/// No package that does I/O is a dependency of the crates, tests aside.
pub(super) fn packages(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in manifest::manifests(tree) {
        if !crate_of(path).is_some_and(|name| CRATES.contains(&name)) {
            continue;
        }
        for dependency in manifest::dependencies(text) {
            if !dependency.development && PACKAGES.contains(&dependency.package.as_str()) {
                let what = format!("a sans-IO crate must not depend on {}", dependency.package);
                problems.push(Problem::new(path, dependency.line, what));
            }
        }
    }
    problems
}

/// Each crate forbids unsafe code and has the lints that hold this rule while one types.
pub(super) fn guards(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for name in CRATES {
        let library = format!("crates/{name}/src/lib.rs");
        if let Some(text) = tree.text(&library) {
            if !production_code(text).contains("#![forbid(unsafe_code)]") {
                problems.push(Problem::new(&library, 0, "no `#![forbid(unsafe_code)]`"));
            }
            let lints = format!("crates/{name}/clippy.toml");
            if !tree.text(&lints).is_some_and(|text| text.contains("std::time::Instant::now")) {
                let what = "a sans-IO crate has the clippy.toml of its siblings";
                problems.push(Problem::new(&lints, 0, what));
            }
        }
    }
    problems
}

/// How long the text is that belongs to a group whose brace is open already.
fn group_length(text: &str) -> usize {
    let mut depth = 1_usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        calls(&Tree::of([(path, text)])).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn each_forbidden_name_is_found() {
        for (word, _) in FORBIDDEN {
            let text = format!("fn a() {{\n    {word};\n}}\n");
            let problems = found("crates/roce/src/lib.rs", &text);
            assert!(!problems.is_empty(), "{word}");
            assert!(problems[0].starts_with("crates/roce/src/lib.rs:2: "), "{}", problems[0]);
        }
    }

    #[test]
    fn groups_are_searched() {
        let text = "use std::{collections::{BTreeMap, VecDeque}, thread};\n";
        assert_eq!(found("crates/sim/src/a.rs", text).len(), 1);
        assert_eq!(found("crates/sim/src/a.rs", "use std::{cell, fmt};\nfn thread() {}"), [""; 0]);
    }

    #[test]
    fn comments_tests_and_other_crates_are_free() {
        let text = "//! No Instant::now here.\n#[cfg(test)]\nmod tests { use std::fs; }\n";
        assert_eq!(found("crates/wire/src/lib.rs", text), [""; 0]);
        assert_eq!(found("crates/wire/tests/captures.rs", "use std::fs;"), [""; 0]);
        assert_eq!(found("crates/net/src/lib.rs", "use std::net::UdpSocket;"), [""; 0]);
    }

    #[test]
    fn packages_with_io_are_found() {
        let check = |text| packages(&Tree::of([("crates/inc/Cargo.toml", text)])).len();
        assert_eq!(check("[dependencies]\nlibc = \"1\"\n"), 1);
        assert_eq!(check("[dependencies]\nbitflags = \"1\"\n"), 0);
        assert_eq!(check("[dev-dependencies]\nrand = \"1\"\n"), 0);
    }

    #[test]
    fn missing_guards_are_found() {
        let lints = ("crates/wire/clippy.toml", "std::time::Instant::now");
        let good = ("crates/wire/src/lib.rs", "#![forbid(unsafe_code)]");
        assert_eq!(guards(&Tree::of([lints, good])), []);
        assert_eq!(guards(&Tree::of([good])).len(), 1);
        let commented = ("crates/wire/src/lib.rs", "// #![forbid(unsafe_code)]");
        assert_eq!(guards(&Tree::of([lints, commented])).len(), 1);
    }
}
