//! The table of hostile packets names tests that exist.

use super::{Problem, Tree};

const TABLE: &str = "docs/hostile-packets.md";

/// Every row of the table names a test, and every test that it names is there.
pub(super) fn hostile_packets(tree: &Tree) -> Vec<Problem> {
    let Some(text) = tree.text(TABLE) else {
        return vec![Problem::new(TABLE, 0, "is missing")];
    };
    let mut problems = Vec::new();
    let mut before = "";
    for (index, line) in text.lines().enumerate() {
        // A row is a line of a table below the line of dashes.
        let is_row = line.starts_with('|') && before.starts_with('|') && !line.starts_with("| ---");
        before = line;
        if !is_row {
            continue;
        }
        let tests: Vec<&str> =
            line.split('`').skip(1).step_by(2).filter(|name| name.contains("::")).collect();
        if tests.is_empty() {
            problems.push(Problem::new(TABLE, index + 1, "this row names no test"));
        }
        for test in tests.into_iter().filter(|test| !exists(tree, test)) {
            problems.push(Problem::new(TABLE, index + 1, format!("there is no test `{test}`")));
        }
    }
    problems
}

/// Whether `crate/file::function` is a test.
fn exists(tree: &Tree, test: &str) -> bool {
    let Some((place, function)) = test.split_once("::") else { return false };
    let Some((name, file)) = place.split_once('/') else { return false };
    let Some(text) = tree.text(&format!("crates/{name}/tests/{file}.rs")) else { return false };
    text.contains(&format!("#[test]\nfn {function}() {{"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: (&str, &str) = ("crates/a/tests/b.rs", "#[test]\nfn c() {\n}\nfn d() {\n}\n");

    fn check(row: &str) -> Vec<Problem> {
        let text = format!("words\n\n| packet | test |\n| --- | --- |\n{row}\n");
        hostile_packets(&Tree::of([TEST, (TABLE, text.as_str())]))
    }

    #[test]
    fn tests_that_are_there_are_found() {
        assert_eq!(check("| x | `a/b::c` |"), []);
        assert_eq!(check("| `x` | as `a/b::c` shows |\n\nwords `a/b::z`"), []);
    }

    #[test]
    fn what_is_no_test_is_a_problem() {
        let row = |what: &str| check(&format!("| x | `{what}` |"));
        for missing in ["a/b::d", "a/b::e", "a/z::c", "z/b::c", "b::c", "a/b::"] {
            let what = format!("there is no test `{missing}`");
            assert_eq!(row(missing), [Problem::new(TABLE, 5, what)]);
        }
        assert_eq!(check("| x | y |"), [Problem::new(TABLE, 5, "this row names no test")]);
    }

    #[test]
    fn the_table_has_to_be_there() {
        assert_eq!(hostile_packets(&Tree::of([TEST])), [Problem::new(TABLE, 0, "is missing")]);
    }
}
