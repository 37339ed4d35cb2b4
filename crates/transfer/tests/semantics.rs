//! What docs/semantics.md names is there.

use std::fs;
use std::path::Path;

#[test]
fn the_tests_that_the_table_names_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let table = fs::read_to_string(root.join("docs/semantics.md")).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| "));
    let mut found = 0;
    for row in rows.filter(|row| {
        !row.starts_with("| what |") && !row.starts_with("| ---") && !row.contains("| not yet")
    }) {
        let names = row.split('`').filter(|text| text.starts_with("crates/"));
        let mut names = names.peekable();
        assert!(names.peek().is_some(), "no test: {row}");
        for name in names {
            let (file, test) = name.split_once("::").unwrap_or((name, ""));
            let text = fs::read_to_string(root.join(file));
            let text = text.unwrap_or_else(|error| panic!("{file}: {error}"));
            let is_there = text.contains(&format!("fn {test}()")) || test.is_empty();
            assert!(is_there && text.contains("#[test]"), "{file} has no test {test:?}");
            found += 1;
        }
    }
    assert!(found > 40, "{found}");
}
