//! Settings in a TOML file.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::SettingsError;

/// No file of settings is longer.
const MOST: u64 = 1 << 20;

/// A key and its value.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Entry {
    /// With the names of its tables before it, and dots between.
    pub(super) key: String,
    /// As it stands there, but for a string's quotation marks.
    pub(super) value: String,
    /// From 1.
    pub(super) line: usize,
}

/// Reads a file.
pub(super) fn read(path: &Path) -> Result<String, SettingsError> {
    read_file(path).map_err(|error| SettingsError::Read { path: path.to_owned(), error })
}

/// The text of a regular file of up to 1 MiB.
pub(crate) fn read_file(path: &Path) -> io::Result<String> {
    // Opening a pipe would wait for who writes to it.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MOST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MOST {
        return Err(io::Error::other("it has more than 1 MiB"));
    }
    Ok(text)
}

/// The entries of a file, in the order of their keys.
pub(super) fn entries(path: &Path, text: &str) -> Result<Vec<Entry>, SettingsError> {
    let line = |at: usize| {
        1 + text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count()
    };
    let document = DeTable::parse(text).map_err(|error| SettingsError::Syntax {
        path: path.to_owned(),
        line: line(error.span().map_or(text.len(), |span| span.start)),
        message: error.message().to_owned(),
    })?;
    let mut entries = Vec::new();
    // The parser has a limit on how deep tables are.
    let mut tables = vec![(String::new(), document.get_ref())];
    while let Some((prefix, table)) = tables.pop() {
        for (name, value) in table {
            let key = format!("{prefix}{}", name.get_ref());
            let value_text = match value.get_ref() {
                DeValue::Table(inner) => {
                    tables.push((key + ".", inner));
                    continue;
                }
                DeValue::String(value) => value.to_string(),
                DeValue::Integer(value) => value.to_string(),
                // None of these is a value of any setting: shown as it stands.
                _ => text[value.span()].to_owned(),
            };
            entries.push(Entry { key, value: value_text, line: line(name.span().start) });
        }
    }
    entries.sort_by_key(|entry| entry.line);
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<(String, String, usize)>, String> {
        let entries = entries(Path::new("f.toml"), text).map_err(|error| error.to_string())?;
        Ok(entries.into_iter().map(|it| (it.key, it.value, it.line)).collect())
    }

    #[test]
    fn keys_have_their_tables_and_lines() {
        let text = "# sizes\nslice_size = \"64KiB\"\n\n[rdma]\nretry_count = 3\nb.c = true\n";
        let entry = |key: &str, value: &str, line| (key.to_owned(), value.to_owned(), line);
        let expected = [
            entry("slice_size", "64KiB", 2),
            entry("rdma.retry_count", "3", 5),
            entry("rdma.b.c", "true", 6),
        ];
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(parse("a = [1, 2]\n").unwrap(), [entry("a", "[1, 2]", 1)]);
        assert_eq!(parse("").unwrap(), []);
    }

    #[test]
    fn what_is_no_toml_is_told_with_its_line() {
        for (text, expected) in [
            ("a = 1\nb = \n", "f.toml:2: "),
            ("a = 1\n\na = 2\n", "f.toml:3: duplicate key"),
            ("[a\n", "f.toml:1: "),
            ("a = \"x", "f.toml:1: "),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(expected), "{text:?}: {error}");
        }
        // However deep: an error, and no overflow.
        let deep = format!("a = {}1", "{ b = ".repeat(100_000));
        assert!(parse(&deep).is_err());
    }

    #[test]
    fn files_that_cannot_be_read_are_told() {
        for (path, expected) in
            [("/nonexistent/x.toml", "No such file"), ("/dev/zero", "no regular file")]
        {
            let error = read(Path::new(path)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("cannot read {path}: ")), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }
}
