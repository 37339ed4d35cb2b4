//! Names and texts of others, made safe to show on a terminal.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;

/// A name that a user or a peer gave, as it can be shown within a line: control characters, what
/// turns the direction of text, and bytes that are not UTF-8 are written out. Escaping twice changes
/// nothing more.
pub(crate) fn escaped(name: impl AsRef<OsStr>) -> String {
    let mut shown = String::new();
    for chunk in name.as_ref().as_bytes().utf8_chunks() {
        shown.push_str(&without(chunk.valid(), is_unsafe));
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(shown, "\\x{byte:02x}");
        }
    }
    shown
}

/// A text of several lines, in which names were escaped already: nothing but line breaks and tabs
/// acts on a terminal.
pub(crate) fn text(text: &str) -> String {
    without(text, |c| is_unsafe(c) && c != '\n' && c != '\t')
}

/// Whether a character can do more on a terminal than be shown: control characters of ASCII and
/// beyond, line separators, and marks, embeddings, overrides and isolates of writing directions.
pub(crate) fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2066}'..='\u{2069}')
}

fn without(text: &str, is_unwanted: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if !is_unwanted(c) => shown.push(c),
            '\n' | '\t' | '\r' => shown.extend(c.escape_default()),
            c => {
                // Writing to a string cannot fail.
                let _ = match c as u32 {
                    code @ 0..=0xff => write!(shown, "\\x{code:02x}"),
                    code => write!(shown, "\\u{{{code:x}}}"),
                };
            }
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_act_on_a_terminal() {
        for (name, shown) in [
            (&b"plain name.txt"[..], "plain name.txt"),
            ("Gr\u{fc}\u{df}e \u{65e5}\u{672c}".as_bytes(), "Gr\u{fc}\u{df}e \u{65e5}\u{672c}"),
            (b"\x1b[31mred\x07", "\\x1b[31mred\\x07"),
            (b"a\nmillstream: b\r\tc", "a\\nmillstream: b\\r\\tc"),
            ("\u{9b}31m\u{7f}".as_bytes(), "\\x9b31m\\x7f"),
            ("a\u{202e}txt.exe\u{2066}".as_bytes(), "a\\u{202e}txt.exe\\u{2066}"),
            (b"caf\xe9\xff!", "caf\\xe9\\xff!"),
        ] {
            assert_eq!(escaped(OsStr::from_bytes(name)), shown);
            assert_eq!(escaped(shown), shown, "twice is once");
        }
    }

    #[test]
    fn a_text_keeps_its_lines() {
        assert_eq!(text("a\tb\nc\x1b[2J\u{202e}"), "a\tb\nc\\x1b[2J\\u{202e}");
    }
}
