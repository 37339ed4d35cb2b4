//! Rust source with what is not code taken out, so that a rule can search for words.
//!
//! Masking replaces comments and literals by spaces and keeps every line break: offsets and line
//! numbers in the masked text are those of the file.

use super::Tree;

/// `text` with comments, strings and characters blanked.
pub(super) fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut masked = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes.get(at + 1) == Some(&b'/') => line_end(bytes, at),
            b'/' if bytes.get(at + 1) == Some(&b'*') => block_comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'r' if starts_word(bytes, at) => match raw_string_end(bytes, at) {
                Some(end) => end,
                None => {
                    at += 1;
                    continue;
                }
            },
            b'\'' => match character_end(text, at) {
                Some(end) => end,
                None => {
                    at += 1;
                    continue;
                }
            },
            _ => {
                at += 1;
                continue;
            }
        };
        blank(&mut masked[at..end]);
        at = end;
    }
    String::from_utf8_lossy(&masked).into_owned()
}

/// [`code`], without the items that only tests compile.
pub(super) fn production_code(text: &str) -> String {
    let mut masked = code(text).into_bytes();
    for (start, end) in test_items(&masked) {
        blank(&mut masked[start..end]);
    }
    String::from_utf8_lossy(&masked).into_owned()
}

/// Whether the file at `path` is compiled for tests or benches only.
pub(super) fn is_test_file(tree: &Tree, path: &str) -> bool {
    let mut parts: Vec<&str> = path.trim_end_matches(".rs").split('/').collect();
    if parts.iter().any(|part| ["tests", "benches"].contains(part)) || parts[0] == "fuzz" {
        return true;
    }
    // Elsewhere a file is a test if the module above declares it, or a folder it is in, so.
    while let Some(name) = parts.pop() {
        let folder = parts.join("/");
        let parents = ["lib.rs", "main.rs", "mod.rs"].map(|file| format!("{folder}/{file}"));
        let declared = parents
            .iter()
            .chain([&format!("{folder}.rs")])
            .filter_map(|parent| tree.text(parent))
            .any(|text| declares_test_module(text, name));
        if declared {
            return true;
        }
    }
    false
}

/// The places where `word` stands in `masked` and is not part of a longer word, as line numbers.
pub(super) fn lines_with(masked: &str, word: &str) -> Vec<usize> {
    masked
        .match_indices(word)
        .filter(|(at, _)| {
            let before = masked[..*at].chars().next_back();
            let after = masked[at + word.len()..].chars().next();
            let joins = |c: char| c.is_alphanumeric() || c == '_';
            let first = word.chars().next().is_some_and(joins);
            let last = word.chars().next_back().is_some_and(joins);
            let longer = first && before.is_some_and(joins) || last && after.is_some_and(joins);
            !longer
        })
        .map(|(at, _)| line_of(masked, at))
        .collect()
}

/// The number of the line that the byte at `offset` is on.
pub(super) fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset].iter().filter(|&&byte| byte == b'\n').count() + 1
}

fn declares_test_module(text: &str, name: &str) -> bool {
    let masked = code(text);
    let declaration = format!("mod {name};");
    test_items(masked.as_bytes())
        .into_iter()
        .any(|(start, end)| masked[start..end].contains(&declaration))
}

/// Where items under a `cfg` that names `test` begin and end.
fn test_items(masked: &[u8]) -> Vec<(usize, usize)> {
    const ATTRIBUTES: &[&[u8]] = &[b"#[cfg(test)]", b"#[cfg(all(test"];
    let mut items = Vec::new();
    let mut at = 0;
    while at < masked.len() {
        if ATTRIBUTES.iter().any(|attribute| masked[at..].starts_with(attribute)) {
            let end = item_end(masked, at);
            items.push((at, end));
            at = end;
        } else {
            at += 1;
        }
    }
    items
}

/// An item ends with a semicolon outside brackets, or where its first braces close.
fn item_end(masked: &[u8], start: usize) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in masked.iter().enumerate().skip(start) {
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 && *byte == b'}' {
                    return at + 1;
                }
            }
            b';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    masked.len()
}

fn blank(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().filter(|byte| **byte != b'\n') {
        *byte = b' ';
    }
}

fn starts_word(bytes: &[u8], at: usize) -> bool {
    // `br"..."` and `cr"..."` are raw strings too; any other letter before the r is a name's.
    let part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    match at.checked_sub(1).map(|before| bytes[before]) {
        Some(b'b' | b'c') => at < 2 || !part(&bytes[at - 2]),
        Some(byte) => !part(&byte),
        None => true,
    }
}

fn line_end(bytes: &[u8], start: usize) -> usize {
    bytes[start..].iter().position(|&byte| byte == b'\n').map_or(bytes.len(), |n| start + n)
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = start;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn raw_string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let hashes = bytes[start + 1..].iter().take_while(|&&byte| byte == b'#').count();
    let open = start + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let close = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
    let rest = &bytes[open + 1..];
    let length = rest.windows(close.len()).position(|window| window == close);
    Some(length.map_or(bytes.len(), |length| open + 1 + length + close.len()))
}

/// The end of the character literal at `start`, or nothing if a lifetime is there.
fn character_end(text: &str, start: usize) -> Option<usize> {
    let mut rest = text[start + 1..].char_indices();
    let (_, first) = rest.next()?;
    if first == '\\' {
        rest.next()?;
        return rest.find(|(_, c)| *c == '\'').map(|(at, _)| start + 1 + at + 1);
    }
    let (at, second) = rest.next()?;
    (second == '\'').then_some(start + 1 + at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked() {
        // What is left of each, with the blanks made one.
        let table = [
            ("a // todo\nb", "a b"),
            ("a /* x /* y */ z */ b", "a b"),
            (r#"f("un\"safe") + 1"#, "f( ) + 1"),
            (r##"r#"say "hi""# ;"##, " ;"),
            (r#"br"\" x"#, "b x"),
            ("'a' 'x: &'a str", " 'x: &'a str"),
            (r"'\'' '\n' b", " b"),
            ("'é' b", " b"),
            ("error(\"e\")", "error( )"),
        ];
        for (text, expected) in table {
            let left = code(text);
            let words: Vec<&str> = left.split_whitespace().collect();
            assert_eq!(words.join(" "), expected.trim(), "{text}");
            assert_eq!(left.len(), text.len(), "{text}");
            assert_eq!(left.lines().count(), text.lines().count(), "{text}");
        }
    }

    #[test]
    fn test_items_are_blanked() {
        let text =
            "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { c([1; 2]); }\n}\nfn d() {}\n";
        let left = production_code(text);
        assert_eq!(left.split_whitespace().collect::<Vec<_>>().join(" "), "fn a() {} fn d() {}");
        assert_eq!(left.lines().count(), text.lines().count());
        let one = production_code("#[cfg(test)]\nmod tests;\nfn d() {}");
        assert_eq!(one.trim(), "fn d() {}");
    }

    #[test]
    fn whole_words_only() {
        let masked = "unsafe_code unsafe\nmy_unsafe unsafe{ rand::random a::brand::x";
        assert_eq!(lines_with(masked, "unsafe"), [1, 2]);
        assert_eq!(lines_with(masked, "rand::"), [2]);
    }

    #[test]
    fn test_files_are_known_by_place_or_declaration() {
        let tree = Tree::of([
            ("crates/a/src/lib.rs", "#[cfg(test)]\nmod harness;\nmod real;"),
            ("crates/a/src/harness.rs", ""),
            ("crates/a/src/harness/deep.rs", ""),
            ("crates/a/src/real.rs", "#[cfg(test)] mod table;"),
            ("crates/a/src/real/table.rs", ""),
            ("crates/a/tests/it.rs", ""),
        ]);
        for (path, expected) in [
            ("crates/a/src/lib.rs", false),
            ("crates/a/src/real.rs", false),
            ("crates/a/src/harness.rs", true),
            ("crates/a/src/harness/deep.rs", true),
            ("crates/a/src/real/table.rs", true),
            ("crates/a/tests/it.rs", true),
        ] {
            assert_eq!(is_test_file(&tree, path), expected, "{path}");
        }
    }
}
